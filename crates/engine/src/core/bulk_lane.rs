//! Lanes polled outside the worker's lock: their state that is shared between threads.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use crossrail_locks::Mutex;
use crossrail_transport::{Lane, LaneError, LaneStats};
use crossrail_types::{EndpointId, LaneId};

pub(crate) const READABLE: u32 = 1;
pub(crate) const WRITABLE: u32 = 2;

/// A lane that is polled outside the worker's lock, by one thread at a time.
pub(crate) struct BulkLane {
    pub(crate) id: LaneId,
    pub(crate) endpoint: EndpointId,
    pub(crate) lane: Mutex<Option<Box<dyn Lane>>>,
    /// The protocol has frames for it.
    wanted: Flag,
    /// To be dropped: its peer has ended, or it was declared dead.
    dead: Flag,
    /// Its group's flag: one of the group's lanes must be polled.
    group: OnceLock<Arc<Flag>>,
    /// Why, if it was taken for dead.
    pub(crate) verdict: Mutex<Option<LaneError>>,
    readiness: AtomicU32,
    /// Its place among its rail's connections; `None`: their number is set.
    pub(crate) among: Option<Among>,
}

impl BulkLane {
    pub(crate) fn new(endpoint: EndpointId, lane: Box<dyn Lane>, among: Option<Among>) -> BulkLane {
        BulkLane {
            id: lane.id(),
            endpoint,
            lane: Mutex::new(Some(lane)),
            wanted: Flag::default(),
            dead: Flag::default(),
            group: OnceLock::new(),
            verdict: Mutex::new(None),
            readiness: AtomicU32::new(READABLE | WRITABLE),
            among,
        }
    }

    /// It is not the first connection of its rail, whose number is found by measuring.
    pub(crate) fn is_further(&self) -> bool {
        self.among.is_some_and(|among| among.place.1 > 0)
    }
}

impl BulkLane {
    /// Records that its socket is ready: `READABLE`, `WRITABLE`, or both.
    pub(crate) fn set_ready(&self, readiness: u32) {
        self.readiness.fetch_or(readiness, Ordering::AcqRel);
        self.notify();
    }

    /// Joins a group: from now on the group's flag is raised when this lane must be polled.
    pub(crate) fn join(&self, group: &Arc<Flag>) {
        let _ = self.group.set(Arc::clone(group));
        self.notify();
    }

    /// The protocol has something for it.
    pub(crate) fn want(&self) {
        self.wanted.raise();
        self.notify();
    }

    /// Whether [`BulkLane::want`] was called since the last call of this.
    pub(crate) fn take_wanted(&self) -> bool {
        self.wanted.take()
    }

    /// It is to be dropped.
    pub(crate) fn drop_soon(&self) {
        self.dead.raise();
        self.notify();
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.dead.is_up()
    }

    /// Raised after the lane's own flag, so that the thread that takes the group's flag also finds the lane's.
    fn notify(&self) {
        if let Some(group) = self.group.get() {
            group.raise();
        }
    }

    /// What its socket is ready for since the last call.
    pub(crate) fn take_ready(&self) -> u32 {
        self.readiness.swap(0, Ordering::AcqRel)
    }
}

impl std::fmt::Debug for BulkLane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BulkLane({})", self.id)
    }
}

/// What a lane had carried when it was dropped.
pub(crate) struct LaneEnd {
    pub(crate) id: LaneId,
    pub(crate) name: String,
    pub(crate) stats: LaneStats,
}

impl LaneEnd {
    /// That of a lane about to be dropped.
    pub(crate) fn of(lane: &dyn Lane) -> LaneEnd {
        LaneEnd { id: lane.id(), name: lane.name().to_owned(), stats: lane.stats() }
    }
}

/// The place of a connection among those of its rail, whose number is found by measuring.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Among {
    /// The rail's number, and the connection's.
    pub(crate) place: (u16, u16),
    /// Connections that carry chunks until something is measured.
    pub(crate) begin_with: u16,
}

/// A flag that another thread raises.
#[derive(Debug, Default)]
pub(crate) struct Flag(AtomicBool);

impl Flag {
    pub(crate) fn raise(&self) {
        self.0.store(true, Ordering::Release);
    }

    pub(crate) fn is_up(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    pub(crate) fn take(&self) -> bool {
        self.0.load(Ordering::Relaxed) && self.0.swap(false, Ordering::AcqRel)
    }
}
