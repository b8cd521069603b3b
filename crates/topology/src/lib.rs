//! Discovery of network devices, GPUs, processors and memory, and of the distances between them.
//!
//! Every call queries the operating system; nothing is cached. Interfaces and their addresses come from `getifaddrs`,
//! which lists exactly this network namespace. sysfs may show another namespace, so its data is used only for an
//! interface with the same name, index and hardware address. All functions may be called from any thread.

#![forbid(unsafe_code)]

mod affinity;
mod gpu;
mod host;
mod memory;
mod nic;
mod placement;
mod select;
#[cfg(test)]
mod testing;
mod tree;

pub use affinity::{Distance, distance, nearest};
pub use gpu::GpuSeen;
pub use host::{Cpus, Machine, NumaNode};
pub use memory::HostMemory;
pub use nic::{Interface, Nic};
pub use placement::Placement;
pub use select::{NetDevice, select};
pub use tree::Tree;

use crossrail_types::Result;

/// The network interfaces of this network namespace, ordered by index.
///
/// # Errors
/// `Io` if the operating system does not list them.
pub fn nics() -> Result<Vec<Nic>> {
    Tree::default().nics()
}

/// A NIC that need not have a network interface, as an RDMA device, by the PCI address of its hardware.
pub fn hardware(name: &str, pci: &str) -> Nic {
    nic::hardware(&Tree::default(), name, pci)
}

/// The NVIDIA GPUs on the PCI bus, ordered by address, whether or not a driver is loaded.
pub fn gpus() -> Vec<GpuSeen> {
    Tree::default().gpus()
}

/// The processors this process may run on.
///
/// # Errors
/// `Io` if the operating system does not report the CPU affinity.
pub fn cpus() -> Result<Cpus> {
    Tree::default().cpus()
}

/// The memory that this process may use, within the limits of its control groups; `None` if procfs reports none.
pub fn host_memory() -> Option<HostMemory> {
    Tree::default().host_memory()
}

/// The CPU time that the control groups of this process leave, in processors; `None` if they leave all.
pub fn cpu_quota() -> Option<f64> {
    Tree::default().cpu_quota()
}

/// The machine and its memory.
///
/// # Errors
/// `Io` if `/proc` cannot be read.
pub fn machine() -> Result<Machine> {
    Tree::default().machine()
}
