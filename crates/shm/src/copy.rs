//! Plain copies.
#![allow(unsafe_code)]

/// Copies up to a few hundred kilobytes that somebody will read soon.
///
/// # Safety
/// As `std::ptr::copy_nonoverlapping` for `len` bytes.
#[inline]
pub(crate) unsafe fn small(dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: by the contract.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, len) };
}

/// Copies one piece of a transfer of `total` bytes.
///
/// # Safety
/// As `std::ptr::copy_nonoverlapping` for `len` bytes.
pub(crate) unsafe fn piece(dst: *mut u8, src: *const u8, len: usize, _total: usize) {
    // SAFETY: by the contract.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, len) };
}
