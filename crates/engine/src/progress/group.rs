//! Connections pumped by one thread at a time, and what that thread sleeps on.

use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crossrail_locks::Mutex;
use crossrail_types::{EndpointId, Error, LaneId, Result};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::core::{BulkLane, Flag, READABLE, WRITABLE};

/// Events of what arrives at a descriptor, and of its end.
const ARRIVALS: EpollFlags = EpollFlags::EPOLLIN.union(EpollFlags::EPOLLRDHUP).union(EpollFlags::EPOLLET);

/// What an epoll event is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum About {
    Wake,
    Lane(LaneId),
    Session(EndpointId),
    Links,
}

impl About {
    fn to_data(self) -> u64 {
        match self {
            About::Wake => 0,
            About::Links => 1 << 32,
            About::Lane(id) => 2 << 32 | u64::from(id.0),
            About::Session(id) => 3 << 32 | u64::from(id.0),
        }
    }

    fn from_data(data: u64) -> About {
        match data >> 32 {
            1 => About::Links,
            2 => About::Lane(LaneId(data as u32)),
            3 => About::Session(EndpointId(data as u32)),
            _ => About::Wake,
        }
    }
}

/// Connections pumped by one thread at a time, and what that thread sleeps on.
pub(crate) struct Group {
    epoll: Epoll,
    wake: EventFd,
    asleep: AtomicBool,
    /// By id.
    lanes: Mutex<Arc<Vec<Arc<BulkLane>>>>,
    /// One of the lanes must be polled.
    pub(super) pending: Arc<Flag>,
    count: AtomicUsize,
}

/// An event of a group that is not about one of its own lanes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SocketEvent {
    pub(crate) about: About,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
}

impl Group {
    pub(crate) fn new() -> Result<Group> {
        let fail = |call: &str, error: nix::Error| Error::io("worker", call, &error.into());
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(|error| fail("epoll_create1", error))?;
        let wake = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)
            .map_err(|error| fail("eventfd", error))?;
        epoll
            .add(&wake, EpollEvent::new(EpollFlags::EPOLLIN, About::Wake.to_data()))
            .map_err(|error| fail("epoll_ctl", error))?;
        Ok(Group {
            epoll,
            wake,
            asleep: AtomicBool::new(false),
            lanes: Mutex::default(),
            pending: Arc::default(),
            count: AtomicUsize::new(0),
        })
    }

    /// Whether it has connections.
    #[inline]
    pub(crate) fn has_lanes(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0
    }

    /// How many connections it has.
    pub(super) fn lanes(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Watches `fd`, edge-triggered: for what arrives and, with `room`, also for room in the socket, of which every read by
    /// the peer is an event.
    pub(crate) fn watch(&self, fd: RawFd, about: About, room: bool) -> Result<()> {
        let flags = if room { ARRIVALS | EpollFlags::EPOLLOUT } else { ARRIVALS };
        // SAFETY: the caller's descriptor is open; epoll forgets it by itself when it is closed.
        #[allow(unsafe_code)]
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        self.epoll
            .add(fd, EpollEvent::new(flags, about.to_data()))
            .map_err(|error| Error::io("worker", "epoll_ctl", &error.into()))
    }

    /// Watches `fd`, which is watched already, for room, too. Room that there is by now is an event.
    pub(super) fn watch_room(&self, fd: RawFd, about: About) {
        // SAFETY: as in `watch`.
        #[allow(unsafe_code)]
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        // An error means that the descriptor is not watched any more: its lane is being dropped.
        let _ = self.epoll.modify(fd, &mut EpollEvent::new(ARRIVALS | EpollFlags::EPOLLOUT, about.to_data()));
    }

    pub(crate) fn add(&self, lane: Arc<BulkLane>) -> Result<()> {
        if let Some(fd) = lane.lane.lock().as_ref().and_then(|lane| lane.fd()) {
            self.watch(fd, About::Lane(lane.id), true)?;
        }
        let mut lanes = self.lanes.lock();
        let mut more = Vec::clone(&lanes);
        let at = more.partition_point(|known| known.id < lane.id);
        more.insert(at, Arc::clone(&lane));
        self.count.store(more.len(), Ordering::Relaxed);
        *lanes = Arc::new(more);
        drop(lanes);
        lane.join(&self.pending);
        self.wake();
        Ok(())
    }

    pub(super) fn remove(&self, id: LaneId) {
        let mut lanes = self.lanes.lock();
        let mut fewer = Vec::clone(&lanes);
        fewer.retain(|lane| lane.id != id);
        self.count.store(fewer.len(), Ordering::Relaxed);
        *lanes = Arc::new(fewer);
    }

    pub(crate) fn snapshot(&self) -> Arc<Vec<Arc<BulkLane>>> {
        self.lanes.lock().clone()
    }

    /// Wakes the thread that sleeps on this group, if one does.
    #[inline]
    pub(crate) fn wake(&self) {
        if self.asleep.load(Ordering::SeqCst) {
            self.wake_always();
        }
    }

    /// Writes the wake-up even if no thread is known to sleep.
    #[inline(never)]
    pub(crate) fn wake_always(&self) {
        let _ = self.wake.write(1);
    }

    /// Collects events, for at most `timeout` (`None`: until there are some), and marks its own lanes ready.
    /// Events about anything else go to `other`.
    pub(crate) fn events(&self, timeout: Option<Duration>, mut other: impl FnMut(SocketEvent)) -> bool {
        let mut events = [EpollEvent::empty(); 32];
        let sleeps = timeout != Some(Duration::ZERO);
        let timeout = match timeout {
            None => EpollTimeout::NONE,
            // Rounded up, so that the last part of a timeout is not spent spinning.
            Some(time) => {
                let ms = time.as_nanos().div_ceil(1_000_000).min(1 << 30) as u32;
                EpollTimeout::try_from(ms).unwrap_or(EpollTimeout::MAX)
            }
        };
        let found = self.epoll.wait(&mut events, timeout).unwrap_or(0);
        if sleeps {
            self.asleep.store(false, Ordering::SeqCst);
        }
        let lanes = self.snapshot();
        for event in &events[..found] {
            let flags = event.events();
            let broken = EpollFlags::EPOLLERR | EpollFlags::EPOLLHUP;
            let readable = flags.intersects(EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP | broken);
            let writable = flags.intersects(EpollFlags::EPOLLOUT | broken);
            let about = About::from_data(event.data());
            match about {
                // Only the sleeper drains it: another thread that did would send the sleeper back to sleep.
                About::Wake if sleeps => {
                    let _ = self.wake.read();
                }
                About::Wake => {}
                About::Lane(id) => match lanes.binary_search_by_key(&id, |lane| lane.id) {
                    Ok(at) => {
                        lanes[at].set_ready(if readable { READABLE } else { 0 } | if writable { WRITABLE } else { 0 });
                    }
                    Err(_) => other(SocketEvent { about, readable, writable }),
                },
                _ => other(SocketEvent { about, readable, writable }),
            }
        }
        found > 0
    }

    /// The thread is about to sleep in [`Group::events`]. Call this first, then check for work once more, then sleep:
    /// work that is left in between finds the flag set and wakes the thread.
    pub(crate) fn about_to_sleep(&self) {
        self.asleep.store(true, Ordering::SeqCst);
    }

    pub(crate) fn awake(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }

    /// Whether a connection has work and was not polled since.
    pub(crate) fn pending(&self) -> bool {
        self.pending.is_up()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// Events at present: whether of arrivals, and of room.
    fn events(group: &Group) -> Vec<(bool, bool)> {
        let mut seen = Vec::new();
        group.events(Some(Duration::ZERO), |event| seen.push((event.readable, event.writable)));
        seen
    }

    #[test]
    fn a_peer_that_reads_wakes_only_who_waits_for_room() {
        let (mut ours, mut theirs) = UnixStream::pair().expect("a pair of sockets");
        ours.set_nonblocking(true).expect("nonblocking");
        let group = Group::new().expect("a group");
        let (fd, about) = (ours.as_raw_fd(), About::Lane(LaneId(7)));
        group.watch(fd, about, false).expect("watched");
        let mut record = [0; 16];
        for _ in 0..3 {
            ours.write_all(&record).expect("room");
            theirs.read_exact(&mut record).expect("a record");
            assert_eq!(events(&group), [], "nothing has arrived");
        }
        theirs.write_all(&record).expect("room");
        assert_eq!(events(&group), [(true, false)]);
        while ours.write_all(&record).is_ok() {}
        group.watch_room(fd, about);
        events(&group);
        // The kernel reports room once most of it is free.
        theirs.set_nonblocking(true).expect("nonblocking");
        while theirs.read(&mut [0; 4096]).is_ok() {}
        assert!(events(&group).iter().any(|(_, writable)| *writable), "there is room again");
    }
}
