//! A small safe layer over the CUDA driver and NVRTC, both loaded at run time.
//!
//! Neither building nor starting a program requires CUDA: [`Cuda::load`] returns the driver, or [`Absent`] with what is
//! missing. A failed call is a `crossrail_types::Error` with the name of the call and its error code. Where the docs
//! below say "a failed call", they mean such an error, of kind `Io` unless stated otherwise.
//!
//! ```text
//! Cuda        the driver: its version, its devices          Absent    why it cannot be used
//! Device      name, architecture, PCI address, NUMA node    Context   the primary context, shared with PyTorch
//! Stream      a new one, or a caller's raw handle           Event     a point in a stream
//! Batch       many operations of a stream in few calls
//! DeviceMemory, PinnedMemory     plain allocations          RegisteredMemory       existing host memory, pinned
//! Allocation, Mapping            memory that can be shared                   IpcHandle, IpcMapping   legacy CUDA IPC
//! Relaxed, Entered               per-thread guards                           Capture, Graph         captured work
//! PointerInfo attributes of an address                      Module, Function       compiled kernels
//! nvrtc       source to machine code, cached on disk        Deferred               values dropped on a thread
//! ```
//!
//! Handles may be used from any thread, except where a type is not `Send` or `Sync`. Operations on addresses are
//! unsafe: the driver does not know who else uses the memory. Every wait on the host has a limit.

mod batch;
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

pub use batch::Batch;
pub use capture::{Capture, Graph};
pub use context::{Context, Entered, MemoryInfo};
pub use deferred::Deferred;
pub use device::{Arch, Device};
pub use driver::{Absent, Cuda, DriverError, MIN_DRIVER};
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
