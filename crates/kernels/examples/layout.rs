//! Writes `csrc/layout/args.cuh` and `csrc/layout/ep.cuh` from `src/args.rs` and `src/ep/args.rs`.

fn main() -> std::io::Result<()> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/csrc/layout");
    std::fs::write(format!("{folder}/args.cuh"), crossrail_kernels::layout())?;
    std::fs::write(format!("{folder}/ep.cuh"), crossrail_kernels::ep::layout_ep())
}
