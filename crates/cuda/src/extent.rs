//! Single questions about an address: where its allocation begins and ends, and whose memory it is.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};

use crossrail_types::Result;
use cudarc::driver::sys::{CUmemorytype, CUpointer_attribute};

use crate::raw::{Code, Raw};
use crate::{Context, PointerInfo};

const CALL: &str = "cuMemGetAddressRange";
const INVALID_VALUE: Code = 1;
const NOT_FOUND: Code = 500;

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
        context.check("pointer", CALL, code)?;
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
