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

/// An array with one element for each of `all`, in one block. After it follow copies of the bytes that the elements
/// point to, each with a zero byte at its end. `element` makes an element from its index and the copies of its parts.
pub(crate) fn array<T, const N: usize>(
    operation: &str,
    all: &[[&[u8]; N]],
    element: impl Fn(usize, [*const u8; N]) -> T,
) -> Result<*mut T, Box<Failure>> {
    let head = size_of::<T>() * all.len();
    let block = allot(operation, head + all.iter().flatten().map(|part| part.len() + 1).sum::<usize>())?;
    let mut at = head;
    for (index, parts) in all.iter().enumerate() {
        let copies = parts.map(|part| {
            // SAFETY: the block has room for all of them, each with a zero byte at its end.
            unsafe {
                let to = block.add(at);
                std::ptr::copy_nonoverlapping(part.as_ptr(), to, part.len());
                to.add(part.len()).write(0);
                at += part.len() + 1;
                to.cast_const()
            }
        });
        // SAFETY: inside the array at the head of the block, which `malloc` has aligned.
        unsafe { block.cast::<T>().add(index).write(element(index, copies)) };
    }
    Ok(block.cast())
}

/// A copy of numbers.
pub(crate) fn numbers<T: Copy>(operation: &str, all: &[T]) -> Result<*mut T, Box<Failure>> {
    let block = allot(operation, size_of_val(all))?.cast::<T>();
    // SAFETY: the block has room for them, and `malloc` has aligned it.
    unsafe { std::ptr::copy_nonoverlapping(all.as_ptr(), block, all.len()) };
    Ok(block)
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
