//! Virtual memory management (VMM): memory that is allocated separately from its addresses, exported as a file
//! descriptor, and mapped by other processes and GPUs.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use crossrail_types::{Error, ErrorKind, Reason, Result};
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

/// Memory of a GPU without an address: map it to use it, export it to share it. The driver frees it when all its
/// mappings and descriptors, in all processes, are closed.
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
        // SAFETY: created, imported or retained once, released once. Mappings keep the memory alive.
        unsafe { (self.cuda.raw().cuMemRelease)(self.raw) };
    }
}

impl Allocation {
    /// Allocates at least `len` bytes on `context`'s GPU, rounded up to the mapping granularity.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if memory of this GPU cannot be shared; [`ErrorKind::Exhausted`] with the requested
    /// and the free memory.
    pub fn new(context: &Context, len: usize) -> Result<Allocation> {
        check_len(len)?;
        let device = context.device();
        if !device.shares_memory()? {
            return Err(Error::new(ErrorKind::Unsupported, "memory", "cannot be shared as a file descriptor")
                .with_reason(Reason::DeviceUnsupported)
                .with_lane(format!("cuda:{}", device.ordinal())));
        }
        let prop = properties(device)?;
        let (mut granularity, mut handle) = (0_usize, 0);
        let option = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        // SAFETY: `granularity` is a valid out pointer, `prop` is initialised.
        context.run("memory", "cuMemGetAllocationGranularity", |raw| unsafe {
            (raw.cuMemGetAllocationGranularity)(&mut granularity, &prop, option)
        })?;
        let rounded = len
            .checked_next_multiple_of(granularity)
            .ok_or_else(|| Error::new(ErrorKind::Usage, "memory", format!("{len} bytes exceed the address space")))?;
        // SAFETY: `handle` is a valid out pointer, `prop` is initialised.
        let mut make = |raw: &Raw| unsafe { (raw.cuMemCreate)(&mut handle, rounded, &prop, 0) };
        allocate(context, rounded, || context.run("memory", "cuMemCreate", &mut make))?;
        let cuda = context.cuda().clone();
        Ok(Allocation(Arc::new(Handle { cuda, device: device.ordinal(), raw: handle, len: rounded })))
    }

    /// Imports memory that another process exported. `len` is the length it announced; mapping more than there is
    /// fails.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] for 0 bytes; a failed call, as for a descriptor that is not exported memory.
    pub fn import(context: &Context, descriptor: BorrowedFd<'_>, len: usize) -> Result<Allocation> {
        check_len(len)?;
        let mut handle = 0;
        // The driver takes the descriptor as a pointer and rejects 0 as null; a duplicate has a higher number.
        let copy = if descriptor.as_raw_fd() == 0 { Some(duplicate(descriptor)?) } else { None };
        let number = copy.as_ref().map_or(descriptor.as_raw_fd(), AsRawFd::as_raw_fd) as usize as *mut c_void;
        context.run("import of memory", "cuMemImportFromShareableHandle", |raw| {
            // SAFETY: `handle` is a valid out pointer; the descriptor, passed by value, is open.
            unsafe { (raw.cuMemImportFromShareableHandle)(&mut handle, number, DESCRIPTOR) }
        })?;
        let (cuda, device) = (context.cuda().clone(), context.device().ordinal());
        Ok(Allocation(Arc::new(Handle { cuda, device, raw: handle, len })))
    }

    /// The allocation mapped at `address`, if it is VMM memory allocated anywhere in this process, such as PyTorch's
    /// expandable segments. `len` counts from the start of the mapped part.
    ///
    /// # Errors
    /// A failed call, as for plain allocations, which have no such handle.
    pub fn of_address(context: &Context, address: u64, len: usize) -> Result<Allocation> {
        check_len(len)?;
        let raw = retain(context, address)?;
        let (cuda, device) = (context.cuda().clone(), context.device().ordinal());
        Ok(Allocation(Arc::new(Handle { cuda, device, raw, len })))
    }

    /// Exports the memory as a descriptor, to be sent to another process over a Unix socket.
    ///
    /// # Errors
    /// A failed call.
    pub fn export(&self) -> Result<OwnedFd> {
        let mut number: c_int = -1;
        let cuda = &self.0.cuda;
        let _relaxed = cuda.relaxed();
        // SAFETY: `number` is a valid out pointer for a descriptor, which is what this handle type is.
        let code =
            unsafe { (cuda.raw().cuMemExportToShareableHandle)((&raw mut number).cast(), self.0.raw, DESCRIPTOR, 0) };
        self.check("export of memory", "cuMemExportToShareableHandle", code)?;
        // SAFETY: the driver created this descriptor for the caller, so nothing else owns it.
        Ok(unsafe { OwnedFd::from_raw_fd(number) })
    }

    /// The length in bytes, a multiple of the mapping granularity.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether both are the same memory: in a process, the driver has one handle per live allocation.
    pub fn is_same(&self, other: &Allocation) -> bool {
        self.0.raw == other.0.raw
    }

    /// Maps the allocation at one address, readable and writable by all GPUs of `contexts`.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] if `contexts` is empty; a failed call, as for a GPU without peer access, or if the length
    /// is not that of the memory.
    pub fn map(&self, contexts: &[&Context]) -> Result<Mapping> {
        Mapping::of(std::slice::from_ref(self), contexts)
    }

    fn check(&self, operation: &str, call: &str, code: Code) -> Result<()> {
        self.0.cuda.check(&format!("{operation} on cuda:{}", self.0.device), call, code)
    }
}

/// Memory mapped at an address for some GPUs; unmapped on drop.
#[derive(Debug)]
pub struct Mapping {
    allocations: Vec<Allocation>,
    context: Context,
    address: u64,
    len: usize,
    /// The number of allocations and of bytes mapped so far, for the drop after a partial failure.
    mapped: (usize, usize),
}

impl Mapping {
    /// Maps several allocations contiguously, readable and writable by all GPUs of `contexts`.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] if either list is empty; a failed call, as for a GPU without peer access, or if a length is
    /// not that of the memory.
    pub fn of(allocations: &[Allocation], contexts: &[&Context]) -> Result<Mapping> {
        let operation = "mapping of memory";
        let usage = |why: &str| Error::new(ErrorKind::Usage, operation, why);
        let first = *contexts.first().ok_or_else(|| usage("the list of GPUs is empty"))?;
        let len = allocations.iter().try_fold(0_usize, |sum, allocation| sum.checked_add(allocation.len()));
        let len = len
            .filter(|len| *len > 0)
            .ok_or_else(|| usage("the list of allocations is empty, or their total length overflows"))?;
        let access: Vec<CUmemAccessDesc> =
            contexts.iter().map(|context| access_for(context.device())).collect::<Result<_>>()?;
        let mut address = 0;
        // SAFETY: `address` is a valid out pointer.
        let reserve = |raw: &Raw| unsafe { (raw.cuMemAddressReserve)(&mut address, len, 0, 0, 0) };
        first.run(operation, "cuMemAddressReserve", reserve)?;
        let allocations = allocations.to_vec();
        let mut mapping = Mapping { allocations, context: first.clone(), address, len, mapped: (0, 0) };
        mapping.map_all()?;
        // SAFETY: the addresses are mapped; the length passed is that of `access`.
        first.run(operation, "cuMemSetAccess", |raw| unsafe {
            (raw.cuMemSetAccess)(address, len, access.as_ptr(), access.len())
        })?;
        Ok(mapping)
    }

    /// Gives the GPUs of `contexts` read and write access to `len` bytes that any part of this process has mapped at
    /// `address`. The range must consist of complete mappings.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] if `contexts` is empty; a failed call, as for a GPU without peer access.
    pub fn allow(address: u64, len: usize, contexts: &[&Context]) -> Result<()> {
        let operation = "access to memory";
        let first =
            contexts.first().ok_or_else(|| Error::new(ErrorKind::Usage, operation, "the list of GPUs is empty"))?;
        let access: Vec<CUmemAccessDesc> =
            contexts.iter().map(|context| access_for(context.device())).collect::<Result<_>>()?;
        // SAFETY: the length passed is that of `access`; the driver rejects addresses that are not mapped.
        first.run(operation, "cuMemSetAccess", |raw| unsafe {
            (raw.cuMemSetAccess)(address, len, access.as_ptr(), access.len())
        })
    }

    fn map_all(&mut self) -> Result<()> {
        for allocation in &self.allocations {
            let (handle, len) = (allocation.0.raw, allocation.len());
            let address = self.address + self.mapped.1 as u64;
            // SAFETY: the addresses are reserved in this length and not mapped yet.
            let map = |raw: &Raw| unsafe { (raw.cuMemMap)(address, len, 0, handle, 0) };
            self.context.run("mapping of memory", "cuMemMap", map)?;
            self.mapped = (self.mapped.0 + 1, self.mapped.1 + len);
        }
        Ok(())
    }

    /// The address, the same for every GPU.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The length in bytes.
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
                // SAFETY: mapped in this length by `map_all`, unmapped once. Work that uses it has completed, as
                // guaranteed by the callers of the unsafe operations on addresses.
                unsafe { (raw.cuMemUnmap)(address, allocation.len()) };
                address += allocation.len() as u64;
            }
            // SAFETY: reserved by `of` in this length, freed once.
            unsafe { (raw.cuMemAddressFree)(self.address, self.len) }
        };
        let _ = self.context.current("mapping of memory", unmap);
    }
}

/// Retains the handle of the memory mapped at `address`; it must be released once.
fn retain(context: &Context, address: u64) -> Result<CUmemGenericAllocationHandle> {
    let mut handle = 0;
    context.run("memory", "cuMemRetainAllocationHandle", |raw| {
        // SAFETY: `handle` is a valid out pointer; the driver rejects an address that it did not map.
        unsafe { (raw.cuMemRetainAllocationHandle)(&mut handle, address as usize as *mut c_void) }
    })?;
    Ok(handle)
}

fn duplicate(descriptor: BorrowedFd<'_>) -> Result<OwnedFd> {
    descriptor.try_clone_to_owned().map_err(|error| Error::io("import of memory", "dup", &error))
}

fn location(device: &Device) -> Result<CUmemLocation> {
    let id = c_int::try_from(device.ordinal())
        .map_err(|_| Error::new(ErrorKind::Usage, "memory", "the GPU's ordinal is out of range"))?;
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
