//! NCCL unloads a plugin when its last communicator is gone; ours has threads that may outlive that.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
