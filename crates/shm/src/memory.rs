//! Sealed memfds, and mappings of memory.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use nix::sys::stat::fstat;
use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};

pub(crate) const PAGE: usize = 4096;
const HUGE: usize = 2 << 20;
const ACCESS: ProtFlags = ProtFlags::PROT_READ.union(ProtFlags::PROT_WRITE);

/// A whole memfd mapped shared, or private memory, readable and writable; unmapped on drop.
#[derive(Debug)]
pub(crate) struct Mapping {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is plain memory of the process; it may be unmapped from any thread, and handing out its
// address is safe. Whoever dereferences it answers for races.
unsafe impl Send for Mapping {}
// SAFETY: as above; `&Mapping` gives nothing but address and length.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of `fd`.
    pub(crate) fn new(fd: BorrowedFd<'_>, len: usize) -> io::Result<Mapping> {
        if cfg!(miri) {
            // Miri has neither memfds nor shared mappings; the ends that it runs share one mapping.
            return Mapping::private(len);
        }
        let size = NonZeroUsize::new(len).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let ptr = unsafe { mmap(None, size, ACCESS, MapFlags::MAP_SHARED, fd, 0) }?;
        Ok(Mapping::of(ptr, len))
    }

    /// `len` bytes of zeroed memory that no other process can map.
    pub(crate) fn private(len: usize) -> io::Result<Mapping> {
        let size = NonZeroUsize::new(len).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: as above.
        let ptr = unsafe { mmap_anonymous(None, size, ACCESS, MapFlags::MAP_PRIVATE) }?;
        Ok(Mapping::of(ptr, len))
    }

    /// That range, which was mapped just now.
    fn of(ptr: NonNull<c_void>, len: usize) -> Mapping {
        if len >= HUGE {
            // SAFETY: the range was mapped just now. This is advice: a refusal leaves small pages.
            let _ = unsafe { madvise(ptr, len, MmapAdvise::MADV_HUGEPAGE) };
        }
        Mapping { ptr: ptr.cast(), len }
    }

    #[inline]
    pub(crate) fn ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly the range that `new` mapped, and nobody else unmaps it. Failure would leave it mapped.
        let _ = unsafe { munmap(self.ptr.cast::<c_void>(), self.len) };
    }
}

/// A zeroed memfd of `len` bytes that can neither shrink nor grow.
pub(crate) fn sealed_memfd(name: &str, len: usize) -> io::Result<OwnedFd> {
    if cfg!(miri) {
        return Ok(std::fs::File::open("/dev/zero")?.into());
    }
    let size = i64::try_from(len).map_err(|_| io::Error::from_raw_os_error(libc::ENOMEM))?;
    let fd = memfd_create(name, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
    nix::unistd::ftruncate(&fd, size)?;
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
    fcntl(&fd, FcntlArg::F_ADD_SEALS(seals))?;
    Ok(fd)
}

/// The size in bytes of a memfd that came from a peer, once it is certain that touching a mapping of it can't
/// raise SIGBUS: it is ordinary memory (a punched hole reads as zeros) and sealed against shrinking.
pub(crate) fn verified_size(fd: &impl AsFd) -> Result<usize, String> {
    let seals = fcntl(fd, FcntlArg::F_GET_SEALS).map_err(|code| format!("fcntl(F_GET_SEALS): {code}"))?;
    if !SealFlag::from_bits_retain(seals).contains(SealFlag::F_SEAL_SHRINK) {
        return Err("a segment is not sealed against shrinking (F_SEAL_SHRINK)".into());
    }
    let system = fstatfs(fd.as_fd()).map_err(|code| format!("fstatfs: {code}"))?;
    if system.filesystem_type() != TMPFS_MAGIC {
        return Err("a segment is not a memfd of ordinary pages".into());
    }
    let size = fstat(fd).map_err(|code| format!("fstat: {code}"))?.st_size;
    usize::try_from(size).map_err(|_| format!("a segment of {size} bytes"))
}

/// What tells a memfd from every other one of this machine, in whichever process it is looked at.
pub(crate) fn identity(fd: BorrowedFd<'_>) -> io::Result<u64> {
    Ok(fstat(fd)?.st_ino)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_could_shrink_is_refused() {
        let sealed = sealed_memfd("test", 8192).expect("memfd");
        assert_eq!(verified_size(&sealed), Ok(8192));
        nix::unistd::ftruncate(&sealed, 0).expect_err("sealed");
        nix::unistd::ftruncate(&sealed, 1 << 20).expect_err("sealed");

        let open = memfd_create("test", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).expect("memfd");
        nix::unistd::ftruncate(&open, 8192).expect("not sealed");
        assert!(verified_size(&open).is_err_and(|why| why.contains("F_SEAL_SHRINK")));

        let file = OwnedFd::from(std::fs::File::open("/proc/self/exe").expect("a file"));
        assert!(verified_size(&file).is_err_and(|why| why.contains("F_GET_SEALS")));
    }
}
