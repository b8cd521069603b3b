//! Lanes polled outside the worker's lock: TCP connections that carry chunks, and the threads that pump them.

use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use crossrail_transport::{Lane, LaneError, Place, Sink, Tx};
use crossrail_types::{EndpointId, Error, Head, LaneId, Result};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use parking_lot::{Mutex, RwLock};

use crate::state::Flag;
use crate::worker::Shared;

/// Bytes a connection may move in each direction before the others get their turn.
const BUDGET: usize = 4 << 20;

const READABLE: u32 = 1;
const WRITABLE: u32 = 2;

/// A lane that is polled outside the worker's lock, by one thread at a time.
pub(crate) struct BulkLane {
    pub(crate) id: LaneId,
    pub(crate) endpoint: EndpointId,
    pub(crate) lane: Mutex<Option<Box<dyn Lane>>>,
    /// The protocol has something for it.
    pub(crate) wanted: Flag,
    /// It is to be dropped: its peer is gone, or it is taken for dead.
    pub(crate) dead: Flag,
    /// Why, if it was taken for dead.
    pub(crate) verdict: Mutex<Option<LaneError>>,
    readiness: AtomicU32,
}

impl BulkLane {
    pub(crate) fn new(endpoint: EndpointId, lane: Box<dyn Lane>) -> BulkLane {
        BulkLane {
            id: lane.id(),
            endpoint,
            lane: Mutex::new(Some(lane)),
            wanted: Flag::default(),
            dead: Flag::default(),
            verdict: Mutex::new(None),
            readiness: AtomicU32::new(READABLE | WRITABLE),
        }
    }
}

impl BulkLane {
    /// Look at its socket, whatever epoll has said.
    pub(crate) fn readable(&self) {
        self.readiness.fetch_or(READABLE, Ordering::AcqRel);
    }
}

impl std::fmt::Debug for BulkLane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BulkLane({})", self.id)
    }
}

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
    lanes: RwLock<Arc<Vec<Arc<BulkLane>>>>,
    count: AtomicUsize,
}

/// An event of a group that is not about one of its own lanes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ready {
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
        Ok(Group { epoll, wake, asleep: AtomicBool::new(false), lanes: RwLock::default(), count: AtomicUsize::new(0) })
    }

    /// Whether it has connections.
    #[inline]
    pub(crate) fn has_lanes(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0
    }

    /// Watches `fd`, edge-triggered in both directions.
    pub(crate) fn watch(&self, fd: RawFd, about: About) -> Result<()> {
        let flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT | EpollFlags::EPOLLRDHUP | EpollFlags::EPOLLET;
        // SAFETY: the caller's descriptor is open; epoll forgets it by itself when it is closed.
        #[allow(unsafe_code)]
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        self.epoll
            .add(fd, EpollEvent::new(flags, about.to_data()))
            .map_err(|error| Error::io("worker", "epoll_ctl", &error.into()))
    }

    pub(crate) fn add(&self, lane: Arc<BulkLane>) -> Result<()> {
        if let Some(fd) = lane.lane.lock().as_ref().and_then(|lane| lane.fd()) {
            self.watch(fd, About::Lane(lane.id))?;
        }
        let mut lanes = self.lanes.write();
        let mut more = Vec::clone(&lanes);
        more.push(lane);
        self.count.store(more.len(), Ordering::Relaxed);
        *lanes = Arc::new(more);
        drop(lanes);
        self.wake();
        Ok(())
    }

    fn remove(&self, id: LaneId) {
        let mut lanes = self.lanes.write();
        let mut fewer = Vec::clone(&lanes);
        fewer.retain(|lane| lane.id != id);
        self.count.store(fewer.len(), Ordering::Relaxed);
        *lanes = Arc::new(fewer);
    }

    pub(crate) fn snapshot(&self) -> Arc<Vec<Arc<BulkLane>>> {
        self.lanes.read().clone()
    }

    /// Gets the thread that sleeps on this group going, if one does.
    pub(crate) fn wake(&self) {
        if self.asleep.load(Ordering::SeqCst) {
            let _ = self.wake.write(1);
        }
    }

    /// Wakes it whatever it does.
    pub(crate) fn wake_always(&self) {
        let _ = self.wake.write(1);
    }

    /// Collects events, for at most `timeout` (`None`: until there are some), and marks its own lanes ready.
    /// Events about anything else go to `other`.
    pub(crate) fn events(&self, timeout: Option<Duration>, mut other: impl FnMut(Ready)) -> bool {
        let mut events = [EpollEvent::empty(); 32];
        let sleeps = timeout != Some(Duration::ZERO);
        let timeout = match timeout {
            None => EpollTimeout::NONE,
            // Rounded up, so that a timer is never spun on for its last part.
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
                // For whoever sleeps: a passer-by that drained it would send the sleeper back to sleep.
                About::Wake if sleeps => {
                    let _ = self.wake.read();
                }
                About::Wake => {}
                About::Lane(id) if lanes.iter().any(|lane| lane.id == id) => {
                    let bits = if readable { READABLE } else { 0 } | if writable { WRITABLE } else { 0 };
                    if let Some(lane) = lanes.iter().find(|lane| lane.id == id) {
                        lane.readiness.fetch_or(bits, Ordering::AcqRel);
                    }
                }
                _ => other(Ready { about, readable, writable }),
            }
        }
        found > 0
    }

    /// The thread is about to sleep in [`Group::events`]; call, then look at everything once more, then sleep.
    pub(crate) fn drowsy(&self) {
        self.asleep.store(true, Ordering::SeqCst);
    }

    pub(crate) fn awake(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }

    /// Polls every connection that something was said about. Whether anything moved.
    pub(crate) fn pump(&self, shared: &Shared) -> bool {
        let mut moved = false;
        for lane in self.snapshot().iter() {
            if lane.dead.is_up() {
                self.bury(shared, lane);
                moved = true;
                continue;
            }
            let readiness = lane.readiness.swap(0, Ordering::AcqRel);
            if readiness == 0 && !lane.wanted.take() {
                continue;
            }
            let Some(mut held) = lane.lane.try_lock() else {
                // Another thread is at it; it may have looked before this was said.
                lane.readiness.fetch_or(readiness, Ordering::AcqRel);
                lane.wanted.raise();
                continue;
            };
            let Some(inner) = held.as_mut() else { continue };
            if readiness != 0 {
                inner.ready(readiness & READABLE != 0, readiness & WRITABLE != 0);
            }
            let mut sink = OutsideSink { shared, endpoint: lane.endpoint, fault: None };
            let polled = inner.poll(&mut sink, BUDGET, false);
            let polled = match sink.fault {
                Some(why) => Err(LaneError::Protocol(why)),
                None => polled,
            };
            match polled {
                Ok(false) => {}
                Ok(true) => {
                    lane.wanted.raise();
                    moved = true;
                }
                Err(error) => {
                    drop(held);
                    lane.verdict.lock().get_or_insert(error);
                    self.bury(shared, lane);
                    moved = true;
                }
            }
        }
        moved
    }

    /// Whether a connection was told to go on and has not been looked at since.
    pub(crate) fn pending(&self) -> bool {
        self.snapshot()
            .iter()
            .any(|lane| lane.wanted.is_up() || lane.dead.is_up() || lane.readiness.load(Ordering::Acquire) != 0)
    }

    fn bury(&self, shared: &Shared, lane: &Arc<BulkLane>) {
        drop(lane.lane.lock().take());
        self.remove(lane.id);
        let verdict = lane.verdict.lock().take().unwrap_or_else(|| LaneError::Closed("its peer is gone".to_owned()));
        let mut core = shared.core.lock();
        core.lane_lost(lane.endpoint, lane.id, &verdict);
        shared.after(core);
    }
}

/// The protocol's side of a lane polled outside the lock: takes it for each question.
struct OutsideSink<'a> {
    shared: &'a Shared,
    endpoint: EndpointId,
    fault: Option<String>,
}

impl Sink for OutsideSink<'_> {
    fn next(&mut self, lane: LaneId) -> Option<Tx> {
        let mut core = self.shared.core.lock();
        core.st.tick();
        core.st.next(self.endpoint, lane)
    }

    fn sent(&mut self, lane: LaneId, token: u64) {
        if token == 0 {
            return;
        }
        self.shared.core.lock().st.sent(lane, token);
    }

    fn place(&mut self, lane: LaneId, head: &Head) -> Place {
        let mut core = self.shared.core.lock();
        let place = core.st.place(self.endpoint, lane, head);
        if matches!(place, Place::Discard) {
            // Frames without a payload tell of things, too: of slots that are free.
            core.settle_aside(self.endpoint);
            self.shared.after(core);
        }
        place
    }

    fn placed(&mut self, lane: LaneId, token: u64) {
        let mut core = self.shared.core.lock();
        core.st.tick();
        match core.st.placed(self.endpoint, lane, token) {
            Ok(()) => core.settle_aside(self.endpoint),
            Err(why) => {
                self.fault.get_or_insert(why);
            }
        }
        self.shared.after(core);
    }
}

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
    pub(crate) fn tell(&self) {
        if self.wanted.load(Ordering::Acquire) {
            let _ = self.fd.write(1);
        }
    }

    pub(crate) fn drain(&self) {
        let _ = self.fd.read();
    }
}
