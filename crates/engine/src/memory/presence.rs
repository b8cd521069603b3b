//! Checks that memory which a caller passes by address is mapped.
#![allow(unsafe_code)]

use crossrail_types::{Error, ErrorKind, Result};

/// Checks that all `len` bytes at `address` are mapped, when this is called. A peer may write there at any time from then
/// on, and its bytes would end the process otherwise.
///
/// # Errors
/// `Usage`: the range begins at address 0, ends beyond 2^64, or is not mapped in whole.
pub(crate) fn check_mapped(what: &str, address: usize, len: usize) -> Result<()> {
    if len == 0 {
        return Ok(());
    }
    let refused = |why: &str| Err(Error::new(ErrorKind::Usage, what, format!("{len} bytes at {address:#x}: {why}")));
    if address == 0 {
        return refused("there is no memory at address 0");
    }
    let Some(end) = address.checked_add(len) else { return refused("they end beyond 2^64") };
    // SAFETY: asks for a number.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096);
    let first = address - address % page;
    // With this flag the call does nothing but look for the mappings; the rounding up is the kernel's.
    // SAFETY: it touches no byte of the memory.
    let looked = unsafe { libc::msync(first as *mut libc::c_void, end - first, libc::MS_ASYNC) };
    if looked == 0 {
        return Ok(());
    }
    let error = std::io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::ENOMEM) => refused("they are not mapped, or not all of them"),
        // A sandbox may refuse the call: the memory is then accepted unchecked.
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_not_there_is_refused() {
        let (page, three) = (4096, 3 * 4096);
        // SAFETY: new pages of our own.
        let pages = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            libc::mmap(std::ptr::null_mut(), three, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        assert_ne!(pages, libc::MAP_FAILED);
        let at = pages as usize;
        for (address, len) in [(at, three), (at + 5, 7), (at + page, page), (0, 0)] {
            assert!(check_mapped("register", address, len).is_ok(), "{len} bytes");
        }
        // SAFETY: the middle one of them, which nothing uses.
        assert_eq!(unsafe { libc::munmap((at + page) as *mut libc::c_void, page) }, 0);
        for (address, len, why) in [
            (at, three, "not mapped"),
            (at + page - 1, 2, "not mapped"),
            (at + page, 1, "not mapped"),
            (0, 8, "address 0"),
            (usize::MAX - 3, 8, "beyond 2^64"),
        ] {
            let error = check_mapped("register", address, len).expect_err("refused");
            assert!(error.kind == ErrorKind::Usage && error.detail.contains(why), "{error} lacks {why}");
        }
        assert!(check_mapped("register", at, page).is_ok());
        // SAFETY: what is left of our own pages.
        assert_eq!(unsafe { libc::munmap(pages, three) }, 0);
    }
}
