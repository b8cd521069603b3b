//! The way to a [`TcpPlacing`](super::TcpPlacing) for threads that do not drive it.

use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossrail_types::{Error, ErrorKind, Result};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::LINKS_MAX;

/// Longest sleep between two checks.
const WAIT: Duration = Duration::from_secs(1);

/// An authenticated connection to the peer.
#[derive(Debug)]
pub struct Connection {
    /// Its number, below 1,024, the same at both ends, and no other connection's of this object.
    pub id: u16,
    /// Its name for people, as `tcp/eth1`.
    pub name: String,
    /// Short writes go over the connection with the lowest that has room.
    pub cost: u32,
    /// The network interface that it depends on, if one is known: see [`Door::interface_down`].
    pub interface: Option<String>,
    /// In any mode. From now on it carries nothing but the object's frames.
    pub stream: TcpStream,
}

/// Connections, and the end, from other threads.
#[derive(Debug, Default)]
pub(crate) struct Brought {
    pub(crate) connections: Vec<Connection>,
    /// Interfaces that are down.
    pub(crate) down: Vec<String>,
    /// Why the peer is lost.
    pub(crate) end: Option<String>,
}

/// Any thread adds connections to an object, or ends it. Its driver wakes up.
#[derive(Debug)]
pub struct Door {
    brought: Mutex<Brought>,
    /// Set while `brought` is not empty: read at each poll, without the lock.
    rung: AtomicBool,
    /// The object was dropped.
    closed: AtomicBool,
    event: EventFd,
}

impl Door {
    /// # Errors
    /// `Io` and `Exhausted` when the system refuses a descriptor.
    pub fn new() -> Result<Door> {
        let event = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|error| Error::io("connect", "eventfd", &error.into()))?;
        Ok(Door { brought: Mutex::default(), rung: AtomicBool::new(false), closed: AtomicBool::new(false), event })
    }

    /// Adds a connection. Beyond those that an object can have at all, it is closed.
    pub fn add(&self, connection: Connection) {
        self.bring(|brought| {
            if brought.connections.len() < LINKS_MAX && !self.is_closed() {
                brought.connections.push(connection);
            }
        });
    }

    /// That network interface is down: connections that depend on it are lost.
    pub fn interface_down(&self, interface: &str) {
        self.bring(|brought| {
            if !brought.down.iter().any(|known| known == interface) {
                brought.down.push(interface.to_owned());
            }
        });
    }

    /// The peer is lost, for that reason. Its writes that have arrived are still reported.
    pub fn end(&self, why: &str) {
        self.bring(|brought| {
            brought.end.get_or_insert_with(|| why.to_owned());
        });
    }

    /// Takes the connections that were added, for what makes no object of them; empty: none was until the deadline.
    ///
    /// # Errors
    /// `PeerDead`: the door was ended, for that reason.
    pub fn added(&self, deadline: Instant) -> Result<Vec<Connection>> {
        loop {
            let brought = self.take();
            if let Some(why) = brought.end {
                return Err(Error::new(ErrorKind::PeerDead, "placing", why));
            }
            if !brought.connections.is_empty() {
                return Ok(brought.connections);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(Vec::new());
            }
            let timeout = PollTimeout::try_from(left.min(WAIT)).unwrap_or(PollTimeout::ZERO);
            // An error is as good as a connection: the loop repeats.
            let _ = poll(&mut [PollFd::new(self.as_fd(), PollFlags::POLLIN)], timeout);
        }
    }

    /// True once the object was dropped.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// The object was dropped, or is none: connections are closed.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        drop(self.take());
    }

    fn bring(&self, add: impl FnOnce(&mut Brought)) {
        add(&mut self.brought.lock().unwrap_or_else(PoisonError::into_inner));
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
        std::mem::take(&mut *self.brought.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl AsFd for Door {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.event.as_fd()
    }
}
