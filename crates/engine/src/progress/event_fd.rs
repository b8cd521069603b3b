use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use crossrail_types::{Error, Result};
use nix::sys::eventfd::{EfdFlags, EventFd};

/// A readable descriptor for event loops.
pub(crate) struct EventsFd {
    fd: EventFd,
    wanted: AtomicBool,
}

impl EventsFd {
    pub(crate) fn new() -> Result<EventsFd> {
        let fd = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)
            .map_err(|error| Error::io("worker", "eventfd", &error.into()))?;
        Ok(EventsFd { fd, wanted: AtomicBool::new(false) })
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.wanted.store(true, Ordering::Release);
        self.fd.as_raw_fd()
    }

    #[inline]
    pub(crate) fn signal(&self) {
        if self.wanted.load(Ordering::Acquire) {
            self.write();
        }
    }

    #[cold]
    #[inline(never)]
    fn write(&self) {
        let _ = self.fd.write(1);
    }

    pub(crate) fn drain(&self) {
        let _ = self.fd.read();
    }
}
