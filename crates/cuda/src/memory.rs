//! Plain allocations: on the GPU, and on the host where the GPU reaches them.
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

/// How long an allocation for which there is no memory waits for what was dropped just before.
const FREED_SOON: Duration = Duration::from_secs(1);

/// Memory of a GPU; freed, by a thread of its own ([`crate::wait_for_releases`]), when this is dropped. Its contents are undefined
/// at first.
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
            // SAFETY: allocated by `new`, freed once. Whoever put in work that uses it has promised that it is done:
            // every operation that names addresses is unsafe.
            let _ = context.current("memory", |raw| unsafe { (raw.cuMemFree_v2)(address) });
        });
    }
}

impl DeviceMemory {
    /// Allocates `len` bytes, aligned to 256.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] for 0 bytes; [`ErrorKind::Exhausted`] with the sum asked for and what is free.
    pub fn new(context: &Context, len: usize) -> Result<DeviceMemory> {
        check_len(len)?;
        let mut address = 0;
        // SAFETY: `address` is a valid place for one address.
        let mut make = |raw: &Raw| unsafe { (raw.cuMemAlloc_v2)(&mut address, len) };
        allocate(context, len, || context.run("memory", "cuMemAlloc", &mut make))?;
        Ok(DeviceMemory { context: context.clone(), address, len })
    }

    /// The context it belongs to.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Its address on the GPU.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its length in bytes, never 0.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }
}

/// Host memory that stays where it is, which every GPU of the process can copy from and to at full rate and reach
/// from kernels; freed, by a thread of its own, when this is dropped. Its contents are undefined at first.
#[derive(Debug)]
pub struct PinnedMemory {
    context: Context,
    start: NonNull<u8>,
    address: u64,
    len: usize,
}

// SAFETY: it owns its memory; access to the contents goes through raw pointers, for which the caller answers.
unsafe impl Send for PinnedMemory {}
// SAFETY: as above.
unsafe impl Sync for PinnedMemory {}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        let (context, start) = (self.context.clone(), self.start.as_ptr().expose_provenance());
        self.context.release_thread().when_idle(move || {
            let start = std::ptr::with_exposed_provenance_mut(start);
            // SAFETY: allocated by `new`, freed once. Whoever put in work that uses it has promised that it is done:
            // every operation that names addresses is unsafe.
            let _ = context.current("memory", |raw| unsafe { (raw.cuMemFreeHost)(start) });
        });
    }
}

impl PinnedMemory {
    /// Allocates `len` bytes of pinned memory, aligned to a page. As a rule the system takes them
    /// from the NUMA node of the thread that calls; [`RegisteredMemory`] can be put where it shall be.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] for 0 bytes; [`ErrorKind::Exhausted`] with the sum asked for.
    pub fn new(context: &Context, len: usize) -> Result<PinnedMemory> {
        check_len(len)?;
        let mut start: *mut c_void = std::ptr::null_mut();
        let flags = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: `start` is a valid place for one pointer.
        let make = |raw: &Raw| unsafe { (raw.cuMemHostAlloc)(&mut start, len, flags) };
        context.run("memory", "cuMemHostAlloc", make).map_err(|error| with_sum(error, len))?;
        let Some(start) = NonNull::new(start.cast::<u8>()) else {
            return Err(Error::new(ErrorKind::Exhausted, "memory", "cuMemHostAlloc gave no memory"));
        };
        let mut memory = PinnedMemory { context: context.clone(), start, address: 0, len };
        let mut address = 0;
        // SAFETY: `start` was allocated as mapped; `address` is a valid place for one address.
        context.run("memory", "cuMemHostGetDevicePointer", |raw| unsafe {
            (raw.cuMemHostGetDevicePointer_v2)(&mut address, start.as_ptr().cast(), 0)
        })?;
        memory.address = address;
        Ok(memory)
    }

    /// The context it was made in.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Its address on the GPU.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Where it is on the host. Who reads or writes through this answers for what the GPU does there meanwhile.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Its length in bytes, never 0.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }
}

/// Host memory that was there already, such as a shared mapping bound to a NUMA node, pinned while this lives: every
/// GPU of the process can copy from and to it at full rate and reach it from kernels.
///
/// Its drop may wait for the GPU: [`crate::Deferred::when_idle`] takes it, and the memory with it, to a thread of its own.
#[derive(Debug)]
pub struct RegisteredMemory {
    context: Context,
    start: NonNull<u8>,
    address: u64,
    len: usize,
}

// SAFETY: it hands out numbers only, and gives the memory back from whichever thread drops it.
unsafe impl Send for RegisteredMemory {}
// SAFETY: as above.
unsafe impl Sync for RegisteredMemory {}

impl Drop for RegisteredMemory {
    fn drop(&mut self) {
        let start = self.start.as_ptr().cast();
        // SAFETY: registered by `new`, unregistered once, while it is still mapped, as its caller promised.
        let _ = self.context.current("memory", |raw| unsafe { (raw.cuMemHostUnregister)(start) });
    }
}

impl RegisteredMemory {
    /// Pins `len` bytes from `start` on.
    ///
    /// # Safety
    /// The memory must stay mapped, where it is, until the result is dropped.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] for 0 bytes; a failed call, with the sum asked for, such as for memory that is registered
    /// already, or a limit on pinned memory.
    pub unsafe fn new(context: &Context, start: NonNull<u8>, len: usize) -> Result<RegisteredMemory> {
        check_len(len)?;
        let flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the caller vouches for the memory.
        let register = |raw: &Raw| unsafe { (raw.cuMemHostRegister_v2)(start.as_ptr().cast(), len, flags) };
        context.run("memory", "cuMemHostRegister", register).map_err(|error| with_sum(error, len))?;
        let mut memory = RegisteredMemory { context: context.clone(), start, address: 0, len };
        let mut address = 0;
        // SAFETY: registered as mapped just now; `address` is a valid place for one address.
        context.run("memory", "cuMemHostGetDevicePointer", |raw| unsafe {
            (raw.cuMemHostGetDevicePointer_v2)(&mut address, start.as_ptr().cast(), 0)
        })?;
        memory.address = address;
        Ok(memory)
    }

    /// Its address on the GPU.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its length in bytes, never 0.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }
}

pub(crate) fn check_len(len: usize) -> Result<()> {
    if len == 0 {
        return Err(Error::new(ErrorKind::Usage, "memory", "0 bytes can't be allocated"));
    }
    Ok(())
}

/// Allocates memory of the GPU; once more where there is none, but some was dropped that is not free yet.
pub(crate) fn allocate(context: &Context, len: usize, mut make: impl FnMut() -> Result<()>) -> Result<()> {
    let made = match make() {
        Err(error) if error.kind == ErrorKind::Exhausted && wait_for_releases(FREED_SOON) => make(),
        made => made,
    };
    made.map_err(|error| with_sums(context, error, len))
}

/// Adds to an error what was asked for.
fn with_sum(mut error: Error, len: usize) -> Error {
    error.detail = format!("{} of pinned host memory asked for: {}", format_gib(len as u64), error.detail);
    error
}

/// Adds to an allocation's error what was asked for and what there is.
fn with_sums(context: &Context, mut error: Error, len: usize) -> Error {
    let free = match context.memory() {
        Ok(info) => format!("{} of {} are free", format_gib(info.free), format_gib(info.total)),
        Err(_) => "what is free is not known".to_owned(),
    };
    error.detail = format!("{} asked for, {free}: {}", format_gib(len as u64), error.detail);
    error
}
