//! A small safe layer over the CUDA driver and NVRTC, both loaded at run time.
//!
//! Nothing here needs CUDA to build or to start: [`Cuda::load`] answers either with the driver or with [`Absent`],
//! which says what is missing. Every failed call is a `crossrail_types::Error` that names the call and its code.
//!
//! ```text
//! Cuda        the driver: its version, its devices          Absent    why there is none
//! Device      name, architecture, PCI address, NUMA node    Context   the primary context, shared with PyTorch
//! Stream      own, or a caller's raw handle                 Event     a point in a stream
//! DeviceMemory, PinnedMemory     plain allocations          RegisteredMemory       host memory that was there already
//! Allocation, Mapping            memory for other processes                  IpcHandle, IpcMapping   the older way
//! Relaxed, Entered               guards for threads                          Capture, Graph         recorded work
//! PointerInfo what an address is                            Module, Function       compiled kernels
//! nvrtc       source to machine code, kept on disk      Deferred     what is given back by a thread of its own
//! ```
//!
//! Handles may be used from any thread. Operations that name addresses are unsafe: the driver does not know who
//! else uses them. Every wait is bounded.

mod capture;
mod context;
mod deferred;
mod device;
mod driver;
mod event;
mod ipc;
mod memory;
mod module;
pub mod nvrtc;
mod pointer;
mod raw;
mod relaxed;
mod release;
mod stream;
mod stream_ops;
mod vmm;

pub use capture::{Capture, Graph};
pub use context::{Context, Entered, MemoryInfo};
pub use deferred::Deferred;
pub use device::{Arch, Device};
pub use driver::{Absent, Cuda, MIN_DRIVER};
pub use event::Event;
pub use ipc::{IpcHandle, IpcMapping};
pub use memory::{DeviceMemory, PinnedMemory, RegisteredMemory};
pub use module::{Function, Grid, KernelArgs, Module, Usage};
pub use pointer::{MemoryKind, PointerInfo, owner};
pub use relaxed::Relaxed;
pub use release::{ReleasePause, wait_for_releases};
pub use stream::{Stream, max_waiting_streams};
pub use vmm::{Allocation, Mapping};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_may_be_used_from_any_thread() {
        fn check<T: Send + Sync>() {}
        check::<(Cuda, Device, Context, Stream, Event)>();
        check::<(DeviceMemory, PinnedMemory, RegisteredMemory, Allocation, Mapping, Module, Function)>();
        check::<(IpcHandle, IpcMapping)>();
        check::<(nvrtc::Library, nvrtc::Compiler, nvrtc::Cache)>();
    }
}
