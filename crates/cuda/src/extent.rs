//! Where an allocation begins and ends.
#![allow(unsafe_code)]

use crossrail_types::Result;

use crate::{Context, PointerInfo};

impl PointerInfo {
    /// Where the allocation that `address` lies in begins, and its length in bytes. Of VMM memory: what is mapped there
    /// from one handle, also where more is mapped beside it in the same range of reserved addresses.
    ///
    /// # Errors
    /// A failed call, as for an address that is no GPU memory.
    pub fn extent(context: &Context, address: u64) -> Result<(u64, u64)> {
        let (mut base, mut len) = (0_u64, 0_usize);
        context.run("pointer", "cuMemGetAddressRange", |raw| {
            // SAFETY: both are valid places for one number; any address may be asked for.
            unsafe { (raw.cuMemGetAddressRange_v2)(&mut base, &mut len, address) }
        })?;
        Ok((base, len as u64))
    }
}
