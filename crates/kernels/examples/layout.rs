//! Writes `csrc/layout/args.cuh` from `src/args.rs`.

fn main() -> std::io::Result<()> {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/csrc/layout/args.cuh");
    std::fs::write(file, crossrail_kernels::layout())
}
