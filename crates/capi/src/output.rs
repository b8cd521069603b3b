//! What the caller frees with `xrail_free`.

use std::ffi::{c_char, c_void};

use crossrail_types::{Error, ErrorKind, Reason};

use crate::failure::{Failure, c_text};

/// Memory of C's own allocator, for `xrail_free`.
pub(crate) fn allot(operation: &str, size: usize) -> Result<*mut u8, Box<Failure>> {
    // SAFETY: any size may be asked for.
    let block = unsafe { libc::malloc(size.max(1)) }.cast::<u8>();
    if block.is_null() {
        let detail = format!("no memory for {size} bytes");
        return Err(Error::new(ErrorKind::Exhausted, operation, detail).with_reason(Reason::Memory).into());
    }
    Ok(block)
}

/// A copy of `bytes`, followed by a zero byte.
pub(crate) fn bytes(operation: &str, bytes: &[u8]) -> Result<*mut c_void, Box<Failure>> {
    let block = allot(operation, bytes.len() + 1)?;
    // SAFETY: the block has room for them and one more.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), block, bytes.len());
        block.add(bytes.len()).write(0);
    }
    Ok(block.cast())
}

/// A copy of `text`, without its zero bytes.
pub(crate) fn text(operation: &str, text: &str) -> Result<*mut c_char, Box<Failure>> {
    bytes(operation, c_text(text).as_bytes()).map(<*mut c_void>::cast)
}

/// Frees what a function of this library has allotted.
///
/// # Safety
/// `block` is null, or was returned as bytes, text or an array, and is not used after this.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_free(block: *mut c_void) {
    // SAFETY: from `malloc`, or null.
    unsafe { libc::free(block) };
}
