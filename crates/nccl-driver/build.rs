//! Compiles the logger that plugins call: a function with a variable number of arguments, which Rust cannot define.

fn main() {
    println!("cargo::rerun-if-changed=csrc/logger.c");
    // `cargo check` for another architecture needs no C compiler for it; linking does, and names what is missing.
    if let Err(error) =
        cc::Build::new().cargo_warnings(false).file("csrc/logger.c").try_compile("crossrail_nccl_logger")
    {
        println!("cargo::warning=csrc/logger.c is not compiled: {error}");
    }
}
