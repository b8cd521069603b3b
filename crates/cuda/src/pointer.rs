//! Queries about addresses: the kind of memory, its GPU, its allocation.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};

use crossrail_types::Result;
use cudarc::driver::sys::{CUmemAllocationHandleType, CUmemorytype, CUpointer_attribute};

use crate::context::Context;
use crate::driver::Cuda;
use crate::raw::{Code, Raw};

const HOST: u32 = 1;
const DEVICE: u32 = 2;
const RANGE_CALL: &str = "cuMemGetAddressRange";
const INVALID_VALUE: Code = 1;
const NOT_FOUND: Code = 500;

/// The kind of memory at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// Unknown to the driver: pageable host memory, or no memory at all.
    Unknown,
    /// Pinned host memory, allocated by or registered with the driver.
    Pinned,
    /// Memory of a GPU.
    Device,
    /// Managed memory, which migrates between host and GPUs (`cudaMallocManaged`).
    Managed,
}

/// The driver's attributes of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PointerInfo {
    /// The kind of memory.
    pub kind: MemoryKind,
    /// The GPU that owns the memory, or that it was pinned or allocated for.
    pub device: Option<u32>,
    /// The start of the allocation (for VMM memory: of what is mapped from one handle); 0 if unknown.
    pub base: u64,
    /// The length of the allocation in bytes; 0 if unknown.
    pub len: u64,
    /// Whether legacy IPC handles can share it, as for memory of `cudaMalloc`.
    pub legacy_ipc: bool,
    /// Whether it can be exported as a file descriptor, as for VMM memory created with that handle type.
    pub descriptor: bool,
    /// Whether it belongs to a memory pool (`cudaMallocAsync`), which neither of these can share.
    pub pooled: bool,
    /// An id that is unique among all past and present allocations of this process; 0 if there is none.
    pub id: u64,
}

impl PointerInfo {
    /// Queries the attributes of `address`. Any address is permitted; the memory is not accessed.
    ///
    /// # Errors
    /// A failed call.
    pub fn of(context: &Context, address: u64) -> Result<PointerInfo> {
        use CUpointer_attribute as Attribute;
        let (mut kind, mut handles, mut managed, mut legacy, mut mapped) = (0_u32, 0_u32, 0_u32, 0_u32, 0_u32);
        let (mut ordinal, mut base, mut len, mut pool, mut id): (c_int, u64, usize, u64, u64) = (-1, 0, 0, 0, 0);
        let mut attributes = [
            Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            Attribute::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
            Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED,
            Attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
            Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
            Attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
            Attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID,
            Attribute::CU_POINTER_ATTRIBUTE_MAPPED,
        ];
        let mut values: [*mut c_void; 10] = [
            (&raw mut kind).cast(),
            (&raw mut handles).cast(),
            (&raw mut managed).cast(),
            (&raw mut legacy).cast(),
            (&raw mut ordinal).cast(),
            (&raw mut base).cast(),
            (&raw mut len).cast(),
            (&raw mut pool).cast(),
            (&raw mut id).cast(),
            (&raw mut mapped).cast(),
        ];
        context.run("pointer", "cuPointerGetAttributes", |raw| {
            // SAFETY: both arrays have 10 entries, and each variable is at least as large as its attribute's documented
            // type (bools are 1 byte; the other bytes were zero). For unknown addresses the driver writes zeros.
            unsafe { (raw.cuPointerGetAttributes)(10, attributes.as_mut_ptr(), values.as_mut_ptr(), address) }
        })?;
        let mut kind = match kind {
            _ if managed != 0 => MemoryKind::Managed,
            HOST => MemoryKind::Pinned,
            DEVICE => MemoryKind::Device,
            _ => MemoryKind::Unknown,
        };
        if kind == MemoryKind::Device && legacy == 0 {
            // For VMM memory the attributes give the reserved address range, which may be mapped only in part.
            match PointerInfo::extent(context, address)? {
                Some((start, bytes)) => (base, len) = (start, bytes),
                None if mapped == 0 => kind = MemoryKind::Unknown,
                None => {}
            }
        }
        let known = kind != MemoryKind::Unknown;
        let descriptor = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0;
        Ok(PointerInfo {
            kind,
            device: u32::try_from(ordinal).ok().filter(|_| known),
            base,
            len: len as u64,
            legacy_ipc: legacy != 0,
            descriptor: handles & descriptor != 0 && pool == 0,
            pooled: pool != 0,
            id,
        })
    }
}

impl PointerInfo {
    /// The start and the length in bytes of the allocation that contains `address`; `None` if the driver knows none.
    ///
    /// For VMM memory: of what is mapped there from one handle, even if adjacent addresses of the same reserved range
    /// are mapped too.
    ///
    /// # Errors
    /// A failed call.
    pub fn extent(context: &Context, address: u64) -> Result<Option<(u64, usize)>> {
        let (code, base, len) = ask(context, address)?;
        if matches!(code, INVALID_VALUE | NOT_FOUND) {
            return Ok(None);
        }
        context.check("pointer", RANGE_CALL, code)?;
        Ok(Some((base, len)))
    }

    /// The GPU that owns the device memory at `address`; `None` for managed or host memory, and for no memory.
    ///
    /// # Errors
    /// A failed call.
    pub fn device_at(context: &Context, address: u64) -> Result<Option<u32>> {
        use CUpointer_attribute as Attribute;
        let (mut kind, mut managed, mut ordinal): (u32, u32, c_int) = (0, 0, -1);
        let mut attributes = [
            Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED,
            Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        ];
        let mut values: [*mut c_void; 3] =
            [(&raw mut kind).cast(), (&raw mut managed).cast(), (&raw mut ordinal).cast()];
        context.run("pointer", "cuPointerGetAttributes", |raw| {
            // SAFETY: both arrays have 3 entries, and each variable is at least as large as its attribute's documented
            // type (the bool is 1 byte; the other bytes were zero). For unknown addresses the driver writes zeros.
            unsafe { (raw.cuPointerGetAttributes)(3, attributes.as_mut_ptr(), values.as_mut_ptr(), address) }
        })?;
        let device = kind == CUmemorytype::CU_MEMORYTYPE_DEVICE as u32 && managed == 0;
        Ok(u32::try_from(ordinal).ok().filter(|_| device))
    }
}

fn ask(context: &Context, address: u64) -> Result<(Code, u64, usize)> {
    let (mut base, mut len) = (0_u64, 0_usize);
    // SAFETY: both are valid out pointers; any address is permitted.
    let ask = |raw: &Raw| unsafe { (raw.cuMemGetAddressRange_v2)(&mut base, &mut len, address) };
    let code = context.current("pointer", ask)?;
    Ok((code, base, len))
}

/// The GPU that owns the memory at `address`, or that it was allocated for; `None` if it is unknown to the driver.
/// Neither requires nor creates a context. Any address is permitted; the memory is not accessed.
///
/// # Errors
/// A failed call.
pub fn owner(cuda: &Cuda, address: u64) -> Result<Option<u32>> {
    use CUpointer_attribute as Attribute;
    let (mut kind, mut ordinal): (u32, c_int) = (0, -1);
    let mut attributes = [Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL];
    let mut values: [*mut c_void; 2] = [(&raw mut kind).cast(), (&raw mut ordinal).cast()];
    let _relaxed = cuda.relaxed();
    // SAFETY: both arrays have 2 entries, and each variable is as large as its attribute's documented type.
    let code = unsafe { (cuda.raw().cuPointerGetAttributes)(2, attributes.as_mut_ptr(), values.as_mut_ptr(), address) };
    cuda.check("pointer", "cuPointerGetAttributes", code)?;
    Ok(u32::try_from(ordinal).ok().filter(|_| kind != 0))
}
