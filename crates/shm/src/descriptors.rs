//! Descriptors that peers have passed and that this end has not used yet: a share of what the process may have, over all
//! lanes together.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use nix::sys::resource::{Resource, getrlimit};

/// The share: a quarter.
const PARTS: u64 = 4;

static HELD: AtomicU64 = AtomicU64::new(0);

/// Room for a number of descriptors, until it is dropped.
#[derive(Debug)]
pub(crate) struct Room(u64);

impl Room {
    /// Room for `count` more; `None`: peers hold the whole share.
    pub(crate) fn take(count: usize) -> Option<Room> {
        let most = getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, _)| soft) / PARTS;
        let fits = |held: u64| held.checked_add(count as u64).filter(|sum| *sum <= most);
        HELD.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).ok()?;
        Some(Room(count as u64))
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        HELD.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// A descriptor with its room.
#[derive(Debug)]
pub(crate) struct Held {
    fd: OwnedFd,
    _room: Room,
}

impl Held {
    /// `None`: there is no room; the descriptor is closed.
    pub(crate) fn new(fd: OwnedFd) -> Option<Held> {
        Some(Held { _room: Room::take(1)?, fd })
    }
}

impl AsFd for Held {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
