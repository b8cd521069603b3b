//! Connections that carry chunks: polled outside the worker's lock, by one thread at a time each.

use std::sync::Arc;

use crossrail_transport::{LaneError, Place, Sink, Tx};
use crossrail_types::{EndpointId, Head, LaneId};

use super::Progress;
use super::group::Group;
use crate::core::{BulkLane, READABLE, WRITABLE};

/// Bytes a connection may move in each direction before the others get their turn.
const BUDGET: usize = 4 << 20;

impl Group {
    /// Polls every connection that something was said about. Whether anything moved.
    pub(crate) fn pump(&self, shared: &Progress) -> bool {
        let mut moved = false;
        for lane in self.snapshot().iter() {
            if lane.dead.is_up() {
                self.bury(shared, lane);
                moved = true;
                continue;
            }
            let readiness = lane.take_ready();
            if readiness == 0 && !lane.wanted.take() {
                continue;
            }
            let Some(mut held) = lane.lane.try_lock() else {
                // Another thread is at it; it may have looked before this was said.
                lane.set_ready(readiness);
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

    fn bury(&self, shared: &Progress, lane: &Arc<BulkLane>) {
        drop(lane.lane.lock().take());
        self.remove(lane.id);
        let verdict = lane.verdict.lock().take().unwrap_or_else(|| LaneError::Closed("its peer is gone".to_owned()));
        let mut core = shared.core.lock();
        core.transfers().lane_lost(lane.endpoint, lane.id, &verdict);
        shared.after(core);
    }
}

/// The protocol's side of a lane polled outside the lock: takes it for each question.
struct OutsideSink<'a> {
    shared: &'a Progress,
    endpoint: EndpointId,
    fault: Option<String>,
}

impl Sink for OutsideSink<'_> {
    fn next(&mut self, lane: LaneId) -> Option<Tx> {
        let mut core = self.shared.core.lock();
        core.read_clock();
        core.transfers().data().next(self.endpoint, lane)
    }

    fn sent(&mut self, lane: LaneId, token: u64) {
        if token == 0 {
            return;
        }
        self.shared.core.lock().transfers().data().sent(lane, token);
    }

    fn place(&mut self, lane: LaneId, head: &Head) -> Place {
        let mut core = self.shared.core.lock();
        let place = core.transfers().data().place(self.endpoint, lane, head);
        if matches!(place, Place::Discard) {
            // Frames without a payload tell of things, too: of slots that are free.
            core.transfers().settle_aside(self.endpoint);
            self.shared.after(core);
        }
        place
    }

    fn placed(&mut self, lane: LaneId, token: u64) {
        let mut core = self.shared.core.lock();
        core.read_clock();
        match core.transfers().data().placed(self.endpoint, lane, token) {
            Ok(()) => core.transfers().settle_aside(self.endpoint),
            Err(why) => {
                self.fault.get_or_insert(why);
            }
        }
        self.shared.after(core);
    }
}
