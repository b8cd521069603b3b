//! Sending user memory by reference: vmsplice into a pipe, splice from the pipe into the socket.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::unistd::pipe2;

use crossrail_locks::{ignores_sigpipe, without_sigpipe};

use crate::sys;

/// Requested size of the pipe in bytes: a quarter of the default limit for unprivileged pipes, so that sixteen lanes
/// stay well within a user's limit.
const WANTED: i32 = 256 * 1024;
/// Minimum useful size in bytes: a smaller pipe costs more in system calls than it saves by not copying.
const LEAST: usize = 64 * 1024;

/// The pipe of one lane.
#[derive(Debug)]
pub(crate) struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
    size: usize,
    /// Bytes in the pipe.
    holds: usize,
    /// The process ignores SIGPIPE; otherwise it is blocked around splice(2), which has no flag against it.
    ignores_sigpipe: bool,
}

impl Pipe {
    /// Creates a pipe; `None` if the system does not grant a useful one.
    pub(crate) fn new() -> Option<Pipe> {
        let (read, write) = pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK).ok()?;
        let size = fcntl(&write, FcntlArg::F_SETPIPE_SZ(WANTED)).or_else(|_| fcntl(&write, FcntlArg::F_GETPIPE_SZ));
        let size = usize::try_from(size.ok()?).ok().filter(|size| *size >= LEAST)?;
        Some(Pipe { read, write, size, holds: 0, ignores_sigpipe: ignores_sigpipe() })
    }

    pub(crate) fn holds(&self) -> usize {
        self.holds
    }

    /// Whether it is empty enough for another fill to be worth a system call.
    pub(crate) fn is_low(&self) -> bool {
        self.holds <= self.size / 2
    }

    /// Appends references to up to `len` bytes at `ptr`.
    ///
    /// # Safety
    /// `ptr` must be valid for reading `len` bytes during the call. The peer receives what the pages contain when they
    /// are sent, which may be later.
    #[allow(unsafe_code)]
    pub(crate) unsafe fn fill(&mut self, ptr: *const u8, len: usize) -> io::Result<()> {
        // SAFETY: guaranteed by the caller.
        let n = unsafe { sys::vmsplice(self.write.as_raw_fd(), ptr, len.min(self.size - self.holds)) }?;
        self.holds += n;
        Ok(())
    }

    /// Moves its contents to `socket`; `more` announces further data.
    pub(crate) fn drain(&mut self, socket: RawFd, more: bool) -> io::Result<usize> {
        let splice = || sys::splice(self.read.as_raw_fd(), socket, self.holds, more);
        let n = if self.ignores_sigpipe { splice() } else { without_sigpipe(splice) }?;
        self.holds -= n;
        Ok(n)
    }
}
