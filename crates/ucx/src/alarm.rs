//! A timer that wakes a sleeping lane.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use crossrail_types::{Error, Result};

/// How long a lane over memory sleeps at most. UCX 1.13 loses wake-ups of posix and sysv: a sender whose peer makes
/// room in the shared queue at times sleeps on.
const SLEEP_MAX: Duration = Duration::from_millis(5);

/// A timer as a descriptor, for one wake-up each time it is set.
pub(crate) struct Alarm(OwnedFd);

impl Alarm {
    pub(crate) fn new() -> Result<Alarm> {
        // SAFETY: takes no memory.
        let fd = unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_NONBLOCK | libc::TFD_CLOEXEC) };
        if fd < 0 {
            return Err(Error::io("connect", "timerfd_create", &std::io::Error::last_os_error()));
        }
        // SAFETY: just created, owned by nobody else.
        Ok(Alarm(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Arms the timer to fire after [`SLEEP_MAX`], or disarms it (`on` is false).
    pub(crate) fn set(&self, on: bool) {
        let limit = if on { SLEEP_MAX } else { Duration::ZERO };
        let none = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let value = libc::timespec { tv_sec: 0, tv_nsec: libc::c_long::from(limit.subsec_nanos().cast_signed()) };
        let timer = libc::itimerspec { it_interval: none, it_value: value };
        // SAFETY: the timer is a local; nothing is stored.
        unsafe { libc::timerfd_settime(self.0.as_raw_fd(), 0, &timer, std::ptr::null_mut()) };
    }
}
