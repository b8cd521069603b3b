//! Which network devices, GPUs, processors and memory this machine has, and how far apart they are.
//!
//! What is there comes from the operating system at the moment of the call; nothing is cached. Interfaces and
//! their addresses come from `getifaddrs`, which sees exactly this network namespace; sysfs only adds to an
//! interface what it says of the same name, index and hardware address. All calls may be made from any thread.

#![forbid(unsafe_code)]

mod affinity;
mod gpu;
mod host;
mod nic;
mod select;
#[cfg(test)]
mod testing;
mod tree;

pub use affinity::{Distance, distance, nearest};
pub use gpu::GpuSeen;
pub use host::{Cpus, Machine, NumaNode};
pub use nic::{Interface, Nic};
pub use select::{NetDevice, select};
pub use tree::Tree;

use crossrail_types::Result;

/// The network interfaces of this network namespace, by index.
///
/// # Errors
/// `Io` when the operating system will not list them.
pub fn nics() -> Result<Vec<Nic>> {
    Tree::default().nics()
}

/// The NVIDIA GPUs on the PCI bus, by address, whether or not a driver is loaded.
pub fn gpus() -> Vec<GpuSeen> {
    Tree::default().gpus()
}

/// The processors this process may run on.
///
/// # Errors
/// `Io` when the operating system will not say.
pub fn cpus() -> Result<Cpus> {
    Tree::default().cpus()
}

/// The machine and its memory.
///
/// # Errors
/// `Io` when `/proc` is not there to be read.
pub fn machine() -> Result<Machine> {
    Tree::default().machine()
}
