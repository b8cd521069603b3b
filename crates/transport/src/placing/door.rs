//! [`Door`]: additions to an object of one-sided writes, and its end, from threads that do not drive it.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossrail_types::{Error, ErrorKind, Result};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

/// Longest sleep between two checks.
const WAIT: Duration = Duration::from_secs(1);

/// Rails, and the end, from other threads.
#[derive(Debug)]
pub struct Brought<R> {
    /// Rails that have joined the peer's.
    pub rails: Vec<R>,
    /// Network interfaces that are down, each once.
    pub down: Vec<String>,
    /// The reason for which the peer is lost.
    pub end: Option<String>,
}

impl<R> Default for Brought<R> {
    fn default() -> Brought<R> {
        Brought { rails: Vec::new(), down: Vec::new(), end: None }
    }
}

/// Any thread adds rails to an object, or ends it. The thread that drives the object sleeps on the door's descriptor,
/// which becomes readable.
#[derive(Debug)]
pub struct Door<R> {
    brought: Mutex<Brought<R>>,
    /// Set while `brought` is not empty: read at each poll, without the lock.
    rung: AtomicBool,
    /// The object was dropped.
    closed: AtomicBool,
    event: EventFd,
    most: usize,
}

impl<R> Door<R> {
    /// A door before which up to `most` rails wait to be taken.
    ///
    /// # Errors
    /// `Io` and `Exhausted` when the system refuses a descriptor.
    pub fn new(most: usize) -> Result<Door<R>> {
        let event = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|error| Error::io("connect", "eventfd", &error.into()))?;
        let (rung, closed) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Door { brought: Mutex::default(), rung, closed, event, most })
    }

    /// Adds a rail. It is closed where too many wait, or the object was dropped.
    pub fn add(&self, rail: R) {
        self.bring(|brought| {
            if brought.rails.len() < self.most && !self.is_closed() {
                brought.rails.push(rail);
            }
        });
    }

    /// That network interface is down: rails that depend on it are lost.
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

    /// Takes the rails that were added, for a caller without an object; empty if none was until the deadline.
    ///
    /// # Errors
    /// `PeerDead`: the door was ended, for that reason.
    pub fn added(&self, deadline: Instant) -> Result<Vec<R>> {
        loop {
            let brought = self.take();
            if let Some(why) = brought.end {
                return Err(Error::new(ErrorKind::PeerDead, "placing", why));
            }
            if !brought.rails.is_empty() {
                return Ok(brought.rails);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(Vec::new());
            }
            let timeout = PollTimeout::try_from(left.min(WAIT)).unwrap_or(PollTimeout::ZERO);
            // An error is as good as a rail: the loop repeats.
            let _ = poll(&mut [PollFd::new(self.as_fd(), PollFlags::POLLIN)], timeout);
        }
    }

    /// True once the object was dropped.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// The object was dropped, or was never made: rails are closed.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        drop(self.take());
    }

    fn bring(&self, add: impl FnOnce(&mut Brought<R>)) {
        add(&mut self.brought.lock().unwrap_or_else(PoisonError::into_inner));
        self.rung.store(true, Ordering::Release);
        // The counter cannot be full: its reader empties it.
        let _ = self.event.write(1);
    }

    /// True while something was brought that the driver has yet to take. Reads one word.
    pub fn is_rung(&self) -> bool {
        self.rung.load(Ordering::Acquire)
    }

    /// All that was brought since the last call.
    pub fn take(&self) -> Brought<R> {
        self.rung.store(false, Ordering::Relaxed);
        let _ = self.event.read();
        std::mem::take(&mut *self.brought.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl<R> AsFd for Door<R> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_waits_is_bounded_and_closed_with_the_object() {
        let door = Door::new(2).expect("a descriptor");
        assert!(!door.is_rung());
        (0..1000).for_each(|rail| door.add(rail));
        (0..1000).for_each(|_| door.interface_down("eth1"));
        door.end("the first reason");
        door.end("another");
        assert!(door.is_rung());
        let brought = door.take();
        assert_eq!((brought.rails, brought.down), (vec![0, 1], vec!["eth1".to_owned()]));
        assert_eq!(brought.end.as_deref(), Some("the first reason"));
        assert!(!door.is_rung() && door.take().rails.is_empty());
        door.close();
        door.add(3);
        assert!(door.is_closed() && door.take().rails.is_empty());
    }

    #[test]
    fn rails_are_awaited_until_the_end_or_the_deadline() {
        let door = Door::new(2).expect("a descriptor");
        assert!(door.added(Instant::now()).expect("no end").is_empty());
        let soon = Instant::now() + Duration::from_secs(20);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| door.added(soon));
            door.add(7);
            assert_eq!(waits.join().expect("no panic").expect("no end"), [7]);
            let waits = scope.spawn(|| door.added(soon));
            door.end("killed");
            assert_eq!(waits.join().expect("no panic").expect_err("an end").kind, ErrorKind::PeerDead);
        });
        assert!(Instant::now() < soon);
    }
}
