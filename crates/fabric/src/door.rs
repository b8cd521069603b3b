//! The way to an object of several rails for threads that do not drive it.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use crossrail_locks::Mutex;
use crossrail_types::{Error, Result};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::placing::FabricPlacing;

/// A rail that has joined the peer's.
pub struct Joined {
    /// From [`attach_rail`](crate::attach_rail).
    pub rail: FabricPlacing,
    /// The network interface that its companion connection needs.
    pub interface: Option<String>,
}

/// Rails and ends from other threads.
#[derive(Default)]
pub(crate) struct Brought {
    pub(crate) rails: Vec<Joined>,
    /// Interfaces that are down.
    pub(crate) down: Vec<String>,
    /// Why the peer is lost.
    pub(crate) end: Option<String>,
}

/// Any thread adds rails to an object, or ends it. Its driver wakes up.
pub struct Door {
    brought: Mutex<Brought>,
    /// Set while `brought` is not empty: read at each poll, without the lock.
    rung: AtomicBool,
    event: EventFd,
}

impl Door {
    pub(crate) fn new() -> Result<Door> {
        let event = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|error| Error::io("connect", "eventfd", &error.into()))?;
        Ok(Door { brought: Mutex::default(), rung: AtomicBool::new(false), event })
    }

    /// Adds a rail. Beyond those that an object has at a time, it is closed.
    pub fn add(&self, joined: Joined) {
        self.bring(|brought| brought.rails.push(joined));
    }

    /// That network interface is down: rails whose companion connections go over it are lost.
    pub fn interface_down(&self, interface: &str) {
        self.bring(|brought| brought.down.push(interface.to_owned()));
    }

    /// The peer is lost, for that reason.
    pub fn end(&self, why: &str) {
        self.bring(|brought| {
            brought.end.get_or_insert_with(|| why.to_owned());
        });
    }

    fn bring(&self, add: impl FnOnce(&mut Brought)) {
        add(&mut self.brought.lock());
        self.rung.store(true, Ordering::Release);
        // The counter cannot be full: its reader empties it.
        let _ = self.event.write(1);
    }

    pub(crate) fn is_rung(&self) -> bool {
        self.rung.load(Ordering::Acquire)
    }

    /// All that was brought since the last call.
    pub(crate) fn take(&self) -> Brought {
        self.rung.store(false, Ordering::Relaxed);
        let _ = self.event.read();
        std::mem::take(&mut *self.brought.lock())
    }
}

impl AsFd for Door {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
