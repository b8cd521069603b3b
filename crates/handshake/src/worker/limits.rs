use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossrail_locks::{Mutex, PerProcess};
use crossrail_types::{Error, ErrorKind, Reason};
use nix::sys::resource::{Resource, getrlimit};

use super::wire::WORKER;
use crate::exchange::{Exchange, send_reject};
use crate::message::{Reject, RejectCode};
use crate::pending::{GRACE, Pending};
use crate::proof::draw;
use crate::terms::no_descriptor;

/// Limits on handshakes in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most at a time.
    pub half_open: usize,
    /// Most at a time from one IP address (all of loopback, and of an IPv6 network of 64 bits, is one), or from one
    /// user over the Unix socket.
    pub half_open_per_source: usize,
    /// Longest time that one may take.
    pub timeout: Duration,
    /// How long one is sure of its place.
    pub grace: Duration,
}

impl Default for Limits {
    /// At most an eighth of the permitted descriptors.
    fn default() -> Limits {
        let half_open = share_of_descriptors(8).clamp(8, 64);
        let half_open_per_source = half_open.div_ceil(4);
        Limits { half_open, half_open_per_source, timeout: Duration::from_secs(5), grace: GRACE }
    }
}

/// The limit of open files of this process, divided by `parts`.
pub fn share_of_descriptors(parts: u64) -> usize {
    let most = getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, _)| soft);
    usize::try_from(most / parts).unwrap_or(usize::MAX)
}

/// Limits of open files above this are not checked.
const MANY_DESCRIPTORS: usize = 1 << 16;

/// Maximum age of a count of the open descriptors.
const COUNT_HOLDS: Duration = Duration::from_secs(1);
/// Descriptors that one connection is taken to use, at this end and by what the program does meanwhile.
const PER_CONNECTION: usize = 64;

/// A count of the open descriptors. Counting takes time in proportion to them, so connections share a count: each would
/// otherwise make the next one slower.
struct Counted {
    at: Instant,
    /// The limit that it was compared with.
    most: usize,
    /// Further connections that leave enough.
    enough_for: usize,
}

static COUNTED: PerProcess<Mutex<Option<Counted>>> = PerProcess::new();

/// True if less than an eighth of the descriptors is free: these are reserved for the process itself.
pub(super) fn descriptors_are_low() -> bool {
    let most = share_of_descriptors(1);
    if most > MANY_DESCRIPTORS {
        return false;
    }
    let mut counted = COUNTED.lock();
    if let Some(Counted { at, most: of, enough_for }) = &mut *counted
        && *of == most
        && at.elapsed() < COUNT_HOLDS
        && *enough_for > 0
    {
        *enough_for -= 1;
        return false;
    }
    let open = std::fs::read_dir("/proc/self/fd").map_or(most, Iterator::count);
    let free = (most - most / 8).saturating_sub(open);
    *counted = Some(Counted { at: Instant::now(), most, enough_for: free / PER_CONNECTION });
    free == 0
}

/// Reject text for a peer whose handshake was evicted.
pub(super) const EVICTED: &str = "the handshake took long while others waited for their turn";

/// The error of a handshake that was evicted for another.
pub(super) fn evicted_error(exchange: &Exchange<'_>) -> Error {
    exchange.error(ErrorKind::Refused, EVICTED).with_reason(Reason::Busy)
}

/// How long connections wait for a descriptor before they are turned away.
const DESCRIPTOR_MAX: Duration = Duration::from_secs(1);

/// A reserve descriptor for when the process has no other left: it allows a connection to be accepted and rejected with
/// the reason, instead of waiting in vain in the kernel's queue.
pub(super) struct Spare {
    held: Option<OwnedFd>,
    /// Since when there was none.
    since: Option<Instant>,
}

impl Spare {
    /// Keeps a copy of `any`.
    pub(super) fn new(any: BorrowedFd<'_>) -> Spare {
        Spare { held: any.try_clone_to_owned().ok(), since: None }
    }

    /// There was a descriptor for a connection.
    pub(super) fn rest(&mut self) {
        self.since = None;
    }

    /// There was none, as `error` says. `accept` is called with one more if that has lasted, and the connection is
    /// turned away; whether there was one.
    pub(super) fn turn_away<C: AsFd>(
        &mut self,
        error: &Error,
        any: BorrowedFd<'_>,
        accept: impl FnOnce() -> Option<C>,
    ) -> bool {
        let mut lasts = || self.since.get_or_insert_with(Instant::now).elapsed() >= DESCRIPTOR_MAX;
        if error.reason != Some(Reason::Descriptors) || !lasts() {
            return false;
        }
        // Closed before the connection is accepted in its place.
        let connection = self.held.take().map(drop).and_then(|()| accept());
        if let Some(connection) = &connection {
            send_reject(connection.as_fd(), &WORKER, &no_descriptor(&*error.detail));
        }
        let turned_away = connection.is_some();
        drop(connection);
        self.held = any.try_clone_to_owned().ok();
        turned_away
    }
}

/// Where a connection comes from, as far as limits tell connections apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Source {
    Ip(IpAddr),
    User(u32),
}

/// The handshakes in progress at one listener.
///
/// When there is no room, one of them ends as [`Pending::evict`] has it. The peer is told to try again, as is one for
/// which there is no room.
pub(crate) struct HalfOpen {
    limits: Limits,
    entries: Mutex<Entries>,
}

struct Entries {
    next: u64,
    open: Pending<Source, Connection>,
}

struct Connection {
    /// Ends the handshake: the connection itself, shared with its thread.
    socket: OwnedFd,
    evicted: Arc<AtomicBool>,
}

impl HalfOpen {
    pub(crate) fn new(limits: Limits) -> HalfOpen {
        HalfOpen { limits, entries: Mutex::new(Entries { next: 0, open: Pending::new(limits.grace) }) }
    }

    /// Counts one more handshake, until the slot is dropped; or why there is no room for it. The second: a connection
    /// that was evicted for it and gets a reject.
    pub(crate) fn take(
        half_open: &Arc<HalfOpen>,
        source: Source,
        connection: BorrowedFd<'_>,
    ) -> Result<(Slot, Option<OwnedFd>), Reject> {
        let limits = &half_open.limits;
        let now = Instant::now();
        let connection = connection.try_clone_to_owned().map_err(|error| no_descriptor(format!("dup: {error}")))?;
        let mut entries = half_open.entries.lock();
        let evicted = if entries.open.count(&source) >= limits.half_open_per_source {
            let limit = limits.half_open_per_source;
            let full = || format!("{limit} handshakes from this address are in progress, the limit for one address");
            Some(entries.open.evict(&source, true, now, draw()).ok_or_else(|| Reject::new(RejectCode::Busy, full()))?)
        } else if entries.open.len() >= limits.half_open {
            let full = || format!("{} handshakes are in progress, the limit of this listener", limits.half_open);
            Some(entries.open.evict(&source, false, now, draw()).ok_or_else(|| Reject::new(RejectCode::Busy, full()))?)
        } else {
            None
        };
        let (id, flag) = (entries.next, Arc::new(AtomicBool::new(false)));
        entries.next += 1;
        entries.open.insert(id, source, now, Connection { socket: connection, evicted: Arc::clone(&flag) });
        drop(entries);
        let evicted = evicted.map(|(_, connection)| {
            connection.evicted.store(true, Ordering::Release);
            connection.socket
        });
        Ok((Slot { half_open: Arc::clone(half_open), source, id, evicted: Evicted(flag) }, evicted))
    }
}

/// The right to have one handshake in progress.
pub(crate) struct Slot {
    half_open: Arc<HalfOpen>,
    source: Source,
    id: u64,
    evicted: Evicted,
}

/// Whether a handshake was evicted for another.
#[derive(Clone)]
pub(super) struct Evicted(Arc<AtomicBool>);

impl Evicted {
    pub(super) fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

impl Slot {
    pub(super) fn source(&self) -> Source {
        self.source
    }

    pub(super) fn evicted(&self) -> Evicted {
        self.evicted.clone()
    }

    /// Removes the handshake of a peer that has proved itself from the count: it can no longer be evicted. False: it
    /// has been evicted already.
    pub(crate) fn settle(self) -> bool {
        self.half_open.entries.lock().open.remove(self.id)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.half_open.entries.lock().open.remove(self.id);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_peer_that_has_proved_itself_makes_room_for_nobody() {
        let half_open = Arc::new(HalfOpen::new(Limits { half_open: 2, half_open_per_source: 2, ..Limits::default() }));
        let (connection, _peer) = UnixStream::pair().expect("a pair of sockets");
        let take = |user| HalfOpen::take(&half_open, Source::User(user), connection.as_fd()).expect("a slot");
        let (proven, _) = take(1);
        assert!(proven.settle());
        let ((first, _), (second, none)) = (take(1), take(1));
        assert!(none.is_none(), "one that is settled does not count");
        let (_other, evicted) = take(2);
        assert!(evicted.is_some(), "one of them has made room");
        assert!(first.settle() != second.settle(), "and only one");
    }
}
