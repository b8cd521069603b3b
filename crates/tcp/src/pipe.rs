//! User memory on its way into a socket by reference: vmsplice into a pipe, splice out of it.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::unistd::pipe2;

use crate::sys;

/// Bytes asked of the pipe: a quarter of what the system lets an unprivileged pipe hold, so that sixteen lanes
/// stay well inside a user's share.
const WANTED: i32 = 256 * 1024;
/// A smaller pipe than this would cost more calls than the copy it saves.
const LEAST: usize = 64 * 1024;

/// The pipe of one lane.
#[derive(Debug)]
pub(crate) struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
    size: usize,
    /// Bytes in it.
    holds: usize,
}

impl Pipe {
    /// A pipe, if the system grants a useful one.
    pub(crate) fn new() -> Option<Pipe> {
        let (read, write) = pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK).ok()?;
        let size = fcntl(&write, FcntlArg::F_SETPIPE_SZ(WANTED)).or_else(|_| fcntl(&write, FcntlArg::F_GETPIPE_SZ));
        let size = usize::try_from(size.ok()?).ok().filter(|size| *size >= LEAST)?;
        Some(Pipe { read, write, size, holds: 0 })
    }

    pub(crate) fn holds(&self) -> usize {
        self.holds
    }

    /// Whether it is low enough to be worth a call that fills it.
    pub(crate) fn is_low(&self) -> bool {
        self.holds <= self.size / 2
    }

    /// Refers to up to `len` bytes at `ptr`; what is in the pipe already goes before them.
    ///
    /// # Safety
    /// `ptr` must be valid for reading `len` bytes during the call. The bytes that reach the peer are those that
    /// the pages hold when they are sent.
    #[allow(unsafe_code)]
    pub(crate) unsafe fn fill(&mut self, ptr: *const u8, len: usize) -> io::Result<()> {
        // SAFETY: the caller's.
        let n = unsafe { sys::vmsplice(self.write.as_raw_fd(), ptr, len.min(self.size - self.holds)) }?;
        self.holds += n;
        Ok(())
    }

    /// Moves what it holds to `socket`; `more` announces that more follows.
    pub(crate) fn drain(&mut self, socket: RawFd, more: bool) -> io::Result<usize> {
        let n = sys::splice(self.read.as_raw_fd(), socket, self.holds, more)?;
        self.holds -= n;
        Ok(n)
    }
}
