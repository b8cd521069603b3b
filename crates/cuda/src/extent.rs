//! Where an allocation begins and ends.
#![allow(unsafe_code)]

use crossrail_types::Result;

use crate::raw::{Code, Raw};
use crate::{Context, PointerInfo};

const CALL: &str = "cuMemGetAddressRange";
const INVALID_VALUE: Code = 1;
const NOT_FOUND: Code = 500;

impl PointerInfo {
    /// Where the allocation that `address` lies in begins, and its length in bytes. Of VMM memory: what is mapped there
    /// from one handle, also where more is mapped beside it in the same range of reserved addresses.
    ///
    /// # Errors
    /// A failed call, as for an address that is no GPU memory.
    pub fn extent(context: &Context, address: u64) -> Result<(u64, u64)> {
        let (code, base, len) = ask(context, address)?;
        context.check("pointer", CALL, code)?;
        Ok((base, len as u64))
    }

    /// The same, `None` where the driver knows no allocation.
    pub(crate) fn extent_if_any(context: &Context, address: u64) -> Result<Option<(u64, usize)>> {
        let (code, base, len) = ask(context, address)?;
        if matches!(code, INVALID_VALUE | NOT_FOUND) {
            return Ok(None);
        }
        context.check("pointer", CALL, code)?;
        Ok(Some((base, len)))
    }
}

fn ask(context: &Context, address: u64) -> Result<(Code, u64, usize)> {
    let (mut base, mut len) = (0_u64, 0_usize);
    // SAFETY: both are valid places for one number; any address may be asked for.
    let ask = |raw: &Raw| unsafe { (raw.cuMemGetAddressRange_v2)(&mut base, &mut len, address) };
    let code = context.current("pointer", ask)?;
    Ok((code, base, len))
}
