//! Memory that other processes and other GPUs can map: made apart from its addresses, and passed on as a descriptor.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use crossrail_types::{Error, ErrorKind, Result};
use cudarc::driver::sys::{
    CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags, CUmemAllocationHandleType,
    CUmemAllocationProp, CUmemAllocationType, CUmemGenericAllocationHandle, CUmemLocation, CUmemLocationType,
};

use crate::context::Context;
use crate::device::Device;
use crate::driver::Cuda;
use crate::memory::{allocate, check_len};
use crate::raw::{Code, Raw};

const DESCRIPTOR: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Memory of one GPU without an address: map it to use it, export it to share it. Freed when every mapping of it and
/// every descriptor for it, in all processes, is gone.
#[derive(Clone, Debug)]
pub struct Allocation(Arc<Handle>);

#[derive(Debug)]
struct Handle {
    cuda: Cuda,
    device: u32,
    raw: CUmemGenericAllocationHandle,
    len: usize,
}

impl Drop for Handle {
    fn drop(&mut self) {
        let _relaxed = self.cuda.relaxed();
        // SAFETY: made by `new` or `import`, or retained, released once. Mappings keep the memory.
        unsafe { (self.cuda.raw().cuMemRelease)(self.raw) };
    }
}

impl Allocation {
    /// Allocates at least `len` bytes on `context`'s GPU, rounded up to what the GPU can map.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] when memory of this GPU can't be shared; [`ErrorKind::Exhausted`] with the sum
    /// asked for and what is free.
    pub fn new(context: &Context, len: usize) -> Result<Allocation> {
        check_len(len)?;
        let device = context.device();
        if !device.shares_memory()? {
            return Err(Error::new(ErrorKind::Unsupported, "memory", "can't be shared as a file descriptor")
                .with_lane(format!("cuda:{}", device.ordinal())));
        }
        let prop = properties(device)?;
        let (mut granularity, mut handle) = (0_usize, 0);
        let option = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        // SAFETY: `granularity` is a valid place for one size, `prop` is initialized.
        context.run("memory", "cuMemGetAllocationGranularity", |raw| unsafe {
            (raw.cuMemGetAllocationGranularity)(&mut granularity, &prop, option)
        })?;
        let rounded = len
            .checked_next_multiple_of(granularity)
            .ok_or_else(|| Error::new(ErrorKind::Usage, "memory", format!("{len} bytes are too many")))?;
        // SAFETY: `handle` is a valid place for one handle, `prop` is initialized.
        let mut make = |raw: &Raw| unsafe { (raw.cuMemCreate)(&mut handle, rounded, &prop, 0) };
        allocate(context, rounded, || context.run("memory", "cuMemCreate", &mut make))?;
        let cuda = context.cuda().clone();
        Ok(Allocation(Arc::new(Handle { cuda, device: device.ordinal(), raw: handle, len: rounded })))
    }

    /// Takes memory that another process exported. `len` is what it said; mapping more than there is fails.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] for 0 bytes; a failed call, such as for a descriptor that is none of these.
    pub fn import(context: &Context, descriptor: BorrowedFd<'_>, len: usize) -> Result<Allocation> {
        check_len(len)?;
        let mut handle = 0;
        // The driver takes the number for a pointer, and refuses 0; a copy has a higher one.
        let copy = if descriptor.as_raw_fd() == 0 { Some(duplicate(descriptor)?) } else { None };
        let number = copy.as_ref().map_or(descriptor.as_raw_fd(), AsRawFd::as_raw_fd) as usize as *mut c_void;
        context.run("import of memory", "cuMemImportFromShareableHandle", |raw| {
            // SAFETY: `handle` is a valid place for one handle; the descriptor, passed by value, is open.
            unsafe { (raw.cuMemImportFromShareableHandle)(&mut handle, number, DESCRIPTOR) }
        })?;
        let (cuda, device) = (context.cuda().clone(), context.device().ordinal());
        Ok(Allocation(Arc::new(Handle { cuda, device, raw: handle, len })))
    }

    /// The memory that `address` lies in, where it was made this way by anybody in the process and may be exported:
    /// PyTorch's expandable segments, for instance. `len` counts from the start of the part that is mapped there.
    ///
    /// # Errors
    /// A failed call: plain allocations have no such handle.
    pub fn of_address(context: &Context, address: u64, len: usize) -> Result<Allocation> {
        check_len(len)?;
        let raw = retain(context, address)?;
        let (cuda, device) = (context.cuda().clone(), context.device().ordinal());
        Ok(Allocation(Arc::new(Handle { cuda, device, raw, len })))
    }

    /// A descriptor for it, to be sent to another process over a Unix socket.
    ///
    /// # Errors
    /// A failed call.
    pub fn export(&self) -> Result<OwnedFd> {
        let mut number: c_int = -1;
        let cuda = &self.0.cuda;
        let _relaxed = cuda.relaxed();
        // SAFETY: `number` is a valid place for one descriptor, which is what this kind of handle is.
        let code =
            unsafe { (cuda.raw().cuMemExportToShareableHandle)((&raw mut number).cast(), self.0.raw, DESCRIPTOR, 0) };
        self.check("export of memory", "cuMemExportToShareableHandle", code)?;
        // SAFETY: the driver made this descriptor for us; nobody else owns it.
        Ok(unsafe { OwnedFd::from_raw_fd(number) })
    }

    /// Its length in bytes, a multiple of what the GPU can map.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether both are the same memory: the driver has one handle for each allocation of a process, while it lives.
    pub fn is_same(&self, other: &Allocation) -> bool {
        self.0.raw == other.0.raw
    }

    /// Maps all of it, at one address, for reading and writing by each GPU of `contexts`.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] for no context at all; a failed call, such as for a GPU that can't reach it, or a length
    /// that is not that of the memory.
    pub fn map(&self, contexts: &[&Context]) -> Result<Mapping> {
        Mapping::of(std::slice::from_ref(self), contexts)
    }

    fn check(&self, operation: &str, call: &str, code: Code) -> Result<()> {
        self.0.cuda.check(&format!("{operation} on cuda:{}", self.0.device), call, code)
    }
}

/// Memory at an address, for the GPUs that it was mapped for; unmapped when this is dropped.
#[derive(Debug)]
pub struct Mapping {
    allocations: Vec<Allocation>,
    context: Context,
    address: u64,
    len: usize,
    /// How many of them, and how many bytes, are mapped so far.
    mapped: (usize, usize),
}

impl Mapping {
    /// Maps all of several allocations, one after the other, at one address, for reading and writing by each GPU of
    /// `contexts`.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] for no allocation or no context at all; a failed call, such as for a GPU that can't reach
    /// it, or a length that is not that of the memory.
    pub fn of(allocations: &[Allocation], contexts: &[&Context]) -> Result<Mapping> {
        let operation = "mapping of memory";
        let usage = |why: &str| Error::new(ErrorKind::Usage, operation, why);
        let first = *contexts.first().ok_or_else(|| usage("no GPU is named that shall reach it"))?;
        let len = allocations.iter().try_fold(0_usize, |sum, allocation| sum.checked_add(allocation.len()));
        let len = len.filter(|len| *len > 0).ok_or_else(|| usage("no memory is named, or too much"))?;
        let access: Vec<CUmemAccessDesc> =
            contexts.iter().map(|context| access_for(context.device())).collect::<Result<_>>()?;
        let mut address = 0;
        // SAFETY: `address` is a valid place for one address.
        let reserve = |raw: &Raw| unsafe { (raw.cuMemAddressReserve)(&mut address, len, 0, 0, 0) };
        first.run(operation, "cuMemAddressReserve", reserve)?;
        let allocations = allocations.to_vec();
        let mut mapping = Mapping { allocations, context: first.clone(), address, len, mapped: (0, 0) };
        mapping.map_all()?;
        // SAFETY: the addresses are mapped; `access` has as many entries as are named.
        first.run(operation, "cuMemSetAccess", |raw| unsafe {
            (raw.cuMemSetAccess)(address, len, access.as_ptr(), access.len())
        })?;
        Ok(mapping)
    }

    /// Lets the GPUs of `contexts` too read and write `len` bytes that are mapped at `address` already, by whomever in this
    /// process: all of one mapping or of several.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] for no context at all; a failed call, such as for a GPU that can't reach the memory.
    pub fn allow(address: u64, len: usize, contexts: &[&Context]) -> Result<()> {
        let operation = "access to memory";
        let first = contexts.first().ok_or_else(|| Error::new(ErrorKind::Usage, operation, "no GPU is named"))?;
        let access: Vec<CUmemAccessDesc> =
            contexts.iter().map(|context| access_for(context.device())).collect::<Result<_>>()?;
        // SAFETY: `access` has as many entries as are named; the driver refuses addresses at which it has mapped nothing.
        first.run(operation, "cuMemSetAccess", |raw| unsafe {
            (raw.cuMemSetAccess)(address, len, access.as_ptr(), access.len())
        })
    }

    fn map_all(&mut self) -> Result<()> {
        for allocation in &self.allocations {
            let (handle, len) = (allocation.0.raw, allocation.len());
            let address = self.address + self.mapped.1 as u64;
            // SAFETY: the addresses are reserved, in this length, and nothing is mapped there.
            let map = |raw: &Raw| unsafe { (raw.cuMemMap)(address, len, 0, handle, 0) };
            self.context.run("mapping of memory", "cuMemMap", map)?;
            self.mapped = (self.mapped.0 + 1, self.mapped.1 + len);
        }
        Ok(())
    }

    /// Its address, the same for every GPU it is mapped for.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its length in bytes.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let unmap = |raw: &Raw| {
            let mut address = self.address;
            for allocation in &self.allocations[..self.mapped.0] {
                // SAFETY: mapped in this length by `map_all`, unmapped once. Whoever put in work that uses it has
                // promised that it is done: every operation that names addresses is unsafe.
                unsafe { (raw.cuMemUnmap)(address, allocation.len()) };
                address += allocation.len() as u64;
            }
            // SAFETY: reserved by `of` in this length, freed once.
            unsafe { (raw.cuMemAddressFree)(self.address, self.len) }
        };
        let _ = self.context.current("mapping of memory", unmap);
    }
}

/// The handle by which the memory at `address` was mapped; to be released once.
fn retain(context: &Context, address: u64) -> Result<CUmemGenericAllocationHandle> {
    let mut handle = 0;
    context.run("memory", "cuMemRetainAllocationHandle", |raw| {
        // SAFETY: `handle` is a valid place for one handle; the driver refuses an address that it did not map.
        unsafe { (raw.cuMemRetainAllocationHandle)(&mut handle, address as usize as *mut c_void) }
    })?;
    Ok(handle)
}

fn duplicate(descriptor: BorrowedFd<'_>) -> Result<OwnedFd> {
    descriptor.try_clone_to_owned().map_err(|error| Error::io("import of memory", "dup", &error))
}

fn location(device: &Device) -> Result<CUmemLocation> {
    let id = c_int::try_from(device.ordinal())
        .map_err(|_| Error::new(ErrorKind::Usage, "memory", "no GPU has such a number"))?;
    Ok(CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id })
}

fn access_for(device: &Device) -> Result<CUmemAccessDesc> {
    let flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    Ok(CUmemAccessDesc { location: location(device)?, flags })
}

fn properties(device: &Device) -> Result<CUmemAllocationProp> {
    Ok(CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: DESCRIPTOR,
        location: location(device)?,
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: cudarc::driver::sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    })
}
