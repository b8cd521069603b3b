//! Plain allocations: device memory, and pinned host memory that GPUs can access.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ptr::NonNull;
use std::time::Duration;

use crossrail_types::{Error, ErrorKind, Result, format_gib};
use cudarc::driver::sys::{
    CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_PORTABLE,
};

use crate::context::Context;
use crate::raw::Raw;
use crate::release::wait_for_releases;

/// How long a failed allocation waits for memory that was just dropped to be released.
const FREED_SOON: Duration = Duration::from_secs(1);

/// Memory of a GPU, initially with undefined contents. Dropping it frees the memory on the release thread
/// ([`crate::wait_for_releases`]).
#[derive(Debug)]
pub struct DeviceMemory {
    context: Context,
    address: u64,
    len: usize,
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let (context, address) = (self.context.clone(), self.address);
        self.context.release_thread().when_idle(move || {
            // SAFETY: allocated by `new`, freed once. Work that uses it has completed, as guaranteed by the callers of
            // the unsafe operations on addresses.
            let _ = context.current("memory", |raw| unsafe { (raw.cuMemFree_v2)(address) });
        });
    }
}

impl DeviceMemory {
    /// Allocates `len` bytes, aligned to 256 bytes. If no memory is free, waits up to 1 s for dropped memory to be
    /// released.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] for 0 bytes; [`ErrorKind::Exhausted`] with the requested and the free memory.
    pub fn new(context: &Context, len: usize) -> Result<DeviceMemory> {
        check_len(len)?;
        let mut address = 0;
        // SAFETY: `address` is a valid out pointer.
        let mut make = |raw: &Raw| unsafe { (raw.cuMemAlloc_v2)(&mut address, len) };
        allocate(context, len, || context.run("memory", "cuMemAlloc", &mut make))?;
        Ok(DeviceMemory { context: context.clone(), address, len })
    }

    /// The context of the memory.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The address on the GPU.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The length in bytes, never 0.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }
}

/// Pinned host memory, initially with undefined contents: every GPU of the process can copy from and to it at full rate
/// and access it from kernels. Dropping it frees the memory on the release thread.
#[derive(Debug)]
pub struct PinnedMemory {
    context: Context,
    start: NonNull<u8>,
    address: u64,
    len: usize,
}

// SAFETY: it owns its memory; access to the contents is through raw pointers, under the caller's responsibility.
unsafe impl Send for PinnedMemory {}
// SAFETY: as above.
unsafe impl Sync for PinnedMemory {}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        let (context, start) = (self.context.clone(), self.start.as_ptr().expose_provenance());
        self.context.release_thread().when_idle(move || {
            let start = std::ptr::with_exposed_provenance_mut(start);
            // SAFETY: allocated by `new`, freed once. Work that uses it has completed, as guaranteed by the callers of
            // the unsafe operations on addresses.
            let _ = context.current("memory", |raw| unsafe { (raw.cuMemFreeHost)(start) });
        });
    }
}

impl PinnedMemory {
    /// Allocates `len` bytes of pinned memory, aligned to a page, usually on the NUMA node of the calling thread. Use
    /// [`RegisteredMemory`] to choose the node.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] for 0 bytes; [`ErrorKind::Exhausted`] with the requested memory.
    pub fn new(context: &Context, len: usize) -> Result<PinnedMemory> {
        check_len(len)?;
        let mut start: *mut c_void = std::ptr::null_mut();
        let flags = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: `start` is a valid out pointer.
        let make = |raw: &Raw| unsafe { (raw.cuMemHostAlloc)(&mut start, len, flags) };
        context.run("memory", "cuMemHostAlloc", make).map_err(|error| with_requested(error, len))?;
        let Some(start) = NonNull::new(start.cast::<u8>()) else {
            return Err(Error::new(ErrorKind::Exhausted, "memory", "cuMemHostAlloc returned no memory"));
        };
        let mut memory = PinnedMemory { context: context.clone(), start, address: 0, len };
        let mut address = 0;
        // SAFETY: `start` was allocated as mapped; `address` is a valid out pointer.
        context.run("memory", "cuMemHostGetDevicePointer", |raw| unsafe {
            (raw.cuMemHostGetDevicePointer_v2)(&mut address, start.as_ptr().cast(), 0)
        })?;
        memory.address = address;
        Ok(memory)
    }

    /// The context it was allocated in.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The address on the GPU.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The address on the host. Whoever reads or writes through it must synchronise with the GPU's accesses.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// The length in bytes, never 0.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }
}

/// Existing host memory, such as a shared mapping bound to a NUMA node, pinned while this lives: every GPU of the
/// process can copy from and to it at full rate and access it from kernels.
///
/// Dropping it may wait for the GPU. Wrap it, together with the memory, in [`crate::Deferred::when_idle`] to drop it on
/// the release thread.
#[derive(Debug)]
pub struct RegisteredMemory {
    context: Context,
    start: NonNull<u8>,
    address: u64,
    len: usize,
}

// SAFETY: it exposes addresses only, and unregisters the memory from whichever thread drops it.
unsafe impl Send for RegisteredMemory {}
// SAFETY: as above.
unsafe impl Sync for RegisteredMemory {}

impl Drop for RegisteredMemory {
    fn drop(&mut self) {
        let start = self.start.as_ptr().cast();
        // SAFETY: registered by `new`, unregistered once, while it is still mapped, as guaranteed by the caller of
        // `new`.
        let _ = self.context.current("memory", |raw| unsafe { (raw.cuMemHostUnregister)(start) });
    }
}

impl RegisteredMemory {
    /// Pins `len` bytes at `start`.
    ///
    /// # Safety
    /// The memory must stay mapped at this address until the result is dropped.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] for 0 bytes; a failed call, with the requested size, as for memory that is already
    /// registered or exceeds the limit on pinned memory.
    pub unsafe fn new(context: &Context, start: NonNull<u8>, len: usize) -> Result<RegisteredMemory> {
        check_len(len)?;
        let flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the caller guarantees the memory.
        let register = |raw: &Raw| unsafe { (raw.cuMemHostRegister_v2)(start.as_ptr().cast(), len, flags) };
        context.run("memory", "cuMemHostRegister", register).map_err(|error| with_requested(error, len))?;
        let mut memory = RegisteredMemory { context: context.clone(), start, address: 0, len };
        let mut address = 0;
        // SAFETY: just registered as mapped; `address` is a valid out pointer.
        context.run("memory", "cuMemHostGetDevicePointer", |raw| unsafe {
            (raw.cuMemHostGetDevicePointer_v2)(&mut address, start.as_ptr().cast(), 0)
        })?;
        memory.address = address;
        Ok(memory)
    }

    /// The address on the GPU.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The length in bytes, never 0.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }
}

pub(crate) fn check_len(len: usize) -> Result<()> {
    if len == 0 {
        return Err(Error::new(ErrorKind::Usage, "memory", "cannot allocate 0 bytes"));
    }
    Ok(())
}

/// Allocates GPU memory. If there is none, waits for pending releases and tries once more.
pub(crate) fn allocate(context: &Context, len: usize, mut make: impl FnMut() -> Result<()>) -> Result<()> {
    let made = match make() {
        Err(error) if error.kind == ErrorKind::Exhausted && wait_for_releases(FREED_SOON) => make(),
        made => made,
    };
    made.map_err(|error| with_memory(context, error, len))
}

/// Adds the requested size to an error.
fn with_requested(mut error: Error, len: usize) -> Error {
    error.detail = format!("{} of pinned host memory requested: {}", format_gib(len as u64), error.detail);
    error
}

/// Adds the requested and the free memory to the error of an allocation.
fn with_memory(context: &Context, mut error: Error, len: usize) -> Error {
    let free = match context.memory() {
        Ok(info) => format!("{} of {} are free", format_gib(info.free), format_gib(info.total)),
        Err(_) => "free memory unknown".to_owned(),
    };
    error.detail = format!("{} requested, {free}: {}", format_gib(len as u64), error.detail);
    error
}
