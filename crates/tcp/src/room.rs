//! Whether a lane may take more frames, and what the kernel has accepted.

use std::os::fd::RawFd;

use crate::sys;

/// Bytes between two checks of the link's rate.
const ADAPT_EVERY: u64 = 1 << 20;
/// The kernel may hold unsent bytes for half a millisecond of the link's rate, but at least `LOWAT_MIN` bytes.
const UNSENT_TIME_DIVISOR: u64 = 2000;
const LOWAT_MIN: usize = 64 * 1024;

/// The room that the kernel has for bytes to send.
#[derive(Debug)]
pub(crate) struct Room {
    /// The kernel may have room: epoll reported the socket writable, and no write has been refused since.
    pub(crate) writable: bool,
    /// Bytes accepted since the kernel last reported its unsent data below `lowat`.
    since_low: usize,
    /// TCP_NOTSENT_LOWAT: the limit on unsent bytes in the kernel.
    lowat: usize,
    lowat_max: usize,
    /// Value of `bytes` at which `lowat` is next adapted to the link's rate.
    adapt_at: u64,
    /// Bytes accepted by the kernel.
    pub(crate) bytes: u64,
}

impl Room {
    pub(crate) fn new(lowat: usize) -> Room {
        Room { writable: true, since_low: 0, lowat, lowat_max: lowat, adapt_at: ADAPT_EVERY, bytes: 0 }
    }

    /// The limit on unsent bytes in the kernel.
    pub(crate) fn lowat(&self) -> usize {
        self.lowat
    }

    #[inline]
    pub(crate) fn count(&mut self, n: usize) {
        self.bytes += n as u64;
        self.since_low = self.since_low.saturating_add(n);
    }

    /// Adapts the limit on unsent bytes to the link, from time to time. Before frames are taken.
    #[inline]
    pub(crate) fn adapt(&mut self, fd: RawFd) {
        if self.bytes >= self.adapt_at {
            self.adapt_now(fd);
        }
    }

    /// Limits the kernel's unsent bytes to what the link carries in 1/[`UNSENT_TIME_DIVISOR`] of a second. At the end
    /// of a transfer over uneven rails, the others idle while the slow one sends what it has already accepted.
    #[cold]
    fn adapt_now(&mut self, fd: RawFd) {
        self.adapt_at = self.bytes + ADAPT_EVERY;
        let Ok(rate) = sys::tcp_info(fd).map(|bytes| crate::info::read(&bytes).delivery_rate) else { return };
        let wanted = usize::try_from(rate / UNSENT_TIME_DIVISOR).unwrap_or(usize::MAX);
        let lowat = wanted.clamp(LOWAT_MIN.min(self.lowat_max), self.lowat_max);
        let changed = lowat.abs_diff(self.lowat) > self.lowat / 4;
        if changed && sys::set_int(fd, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, lowat as i32).is_ok() {
            self.lowat = lowat;
        }
    }

    /// Whether a further frame may be taken.
    ///
    /// A slow rail must not take frames before it can send them: others could carry them sooner. A writable socket has
    /// less than half of `lowat` unsent, so `lowat / 2` more bytes may be written without asking again.
    #[inline]
    pub(crate) fn takes(&mut self, fd: RawFd) -> bool {
        if self.since_low >= self.lowat / 2 || !self.writable {
            if !sys::is_writable(fd) {
                self.writable = false;
                return false;
            }
            self.writable = true;
            self.since_low = 0;
        }
        true
    }
}
