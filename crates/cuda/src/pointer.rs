//! What an address is.
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

/// Whose memory an address is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// Ordinary host memory, of which the driver knows nothing; or no memory at all.
    Unknown,
    /// Host memory that is pinned: allocated or registered by the driver.
    Pinned,
    /// Memory of a GPU.
    Device,
    /// Memory that moves between host and GPUs (`cudaMallocManaged`).
    Managed,
}

/// What the driver says of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PointerInfo {
    /// Whose memory it is.
    pub kind: MemoryKind,
    /// The GPU whose memory it is, or that it was pinned or made for.
    pub device: Option<u32>,
    /// Where the allocation (of VMM memory: what is mapped from one handle) that it lies in begins; 0 when that is not
    /// known.
    pub base: u64,
    /// How long that is, in bytes; 0 when it is not known.
    pub len: u64,
    /// Whether it may be shared through legacy IPC handles, as memory of `cudaMalloc` may.
    pub legacy_ipc: bool,
    /// Whether it may be exported as a file descriptor: VMM memory that was made so.
    pub descriptor: bool,
    /// Whether it belongs to a memory pool (`cudaMallocAsync`), which is shared in yet another way.
    pub pooled: bool,
    /// A number that no other allocation of this process has or had; 0 when there is none.
    pub id: u64,
}

impl PointerInfo {
    /// Asks for `address`. Any number may be asked for; nothing is read there.
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
        let mut places: [*mut c_void; 10] = [
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
            // SAFETY: both arrays have 10 entries, and each place is as large as its attribute's documented type or
            // larger (bools are 1 byte and the rest was zero). Unknown addresses are answered with zeros.
            unsafe { (raw.cuPointerGetAttributes)(10, attributes.as_mut_ptr(), places.as_mut_ptr(), address) }
        })?;
        let mut kind = match kind {
            _ if managed != 0 => MemoryKind::Managed,
            HOST => MemoryKind::Pinned,
            DEVICE => MemoryKind::Device,
            _ => MemoryKind::Unknown,
        };
        if kind == MemoryKind::Device && legacy == 0 {
            // The attributes tell the range of reserved addresses, of which only some may be mapped.
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
    /// Where the allocation that `address` lies in begins, and its length in bytes. Of VMM memory: what is mapped there
    /// from one handle, also where more is mapped beside it in the same range of reserved addresses. `None` where the driver
    /// knows no allocation.
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

    /// The GPU whose memory lies at `address`; `None` for memory that is not a GPU's alone, and for none at all.
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
        let mut places: [*mut c_void; 3] =
            [(&raw mut kind).cast(), (&raw mut managed).cast(), (&raw mut ordinal).cast()];
        context.run("pointer", "cuPointerGetAttributes", |raw| {
            // SAFETY: both arrays have 3 entries, and each place is as large as its attribute's documented type or
            // larger (the bool is 1 byte and the rest was zero). Unknown addresses are answered with zeros.
            unsafe { (raw.cuPointerGetAttributes)(3, attributes.as_mut_ptr(), places.as_mut_ptr(), address) }
        })?;
        let device = kind == CUmemorytype::CU_MEMORYTYPE_DEVICE as u32 && managed == 0;
        Ok(u32::try_from(ordinal).ok().filter(|_| device))
    }
}

fn ask(context: &Context, address: u64) -> Result<(Code, u64, usize)> {
    let (mut base, mut len) = (0_u64, 0_usize);
    // SAFETY: both are valid places for one number; any address may be asked for.
    let ask = |raw: &Raw| unsafe { (raw.cuMemGetAddressRange_v2)(&mut base, &mut len, address) };
    let code = context.current("pointer", ask)?;
    Ok((code, base, len))
}

/// The GPU that `address` is memory of, or was made for; `None` when the driver knows no such memory. Needs no context,
/// and makes none. Any number may be asked for; nothing is read there.
///
/// # Errors
/// A failed call.
pub fn owner(cuda: &Cuda, address: u64) -> Result<Option<u32>> {
    use CUpointer_attribute as Attribute;
    let (mut kind, mut ordinal): (u32, c_int) = (0, -1);
    let mut attributes = [Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL];
    let mut places: [*mut c_void; 2] = [(&raw mut kind).cast(), (&raw mut ordinal).cast()];
    let _relaxed = cuda.relaxed();
    // SAFETY: both arrays have 2 entries, and each place is as large as its attribute's documented type.
    let code = unsafe { (cuda.raw().cuPointerGetAttributes)(2, attributes.as_mut_ptr(), places.as_mut_ptr(), address) };
    cuda.check("pointer", "cuPointerGetAttributes", code)?;
    Ok(u32::try_from(ordinal).ok().filter(|_| kind != 0))
}
