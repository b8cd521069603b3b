//! Connections that carry chunks: polled outside the worker's lock, by one thread at a time each.

use std::os::fd::RawFd;
use std::sync::Arc;

use crossrail_transport::{LaneError, Place, Sink, Tx};
use crossrail_types::{EndpointId, Head, LaneId, Result};

use super::group::{About, Group};
use super::{Due, Progress};
use crate::core::{BulkLane, LaneEnd, READABLE, WRITABLE};

/// Bytes that a connection may move in each direction before the others get their turn.
const BUDGET: usize = 4 << 20;

/// The worker's connections that carry chunks, in groups: the thread that makes progress pumps the first group, and
/// also sleeps on it; each other group has its own thread. Any thread.
pub(crate) struct Connections(Vec<Group>);

impl Connections {
    /// `threads`: how many groups have threads of their own.
    ///
    /// # Errors
    /// `Io` and `Exhausted` when the system refuses descriptors.
    pub(super) fn new(threads: usize) -> Result<Connections> {
        (0..=threads).map(|_| Group::new()).collect::<Result<_>>().map(Connections)
    }

    #[inline]
    pub(super) fn groups(&self) -> &[Group] {
        &self.0
    }

    /// The group that whoever makes progress pumps and sleeps on.
    #[inline]
    pub(super) fn driven(&self) -> &Group {
        &self.0[0]
    }

    /// Has the driving thread poll that descriptor, edge-triggered: for what arrives, and for room if so asked.
    ///
    /// # Errors
    /// `Io` when the system refuses it.
    pub(crate) fn watch(&self, fd: RawFd, about: About, room: bool) -> Result<()> {
        self.driven().watch(fd, about, room)
    }

    /// Has the driving thread poll a watched descriptor for room, too.
    pub(crate) fn watch_room(&self, fd: RawFd, about: About) {
        self.driven().watch_room(fd, about);
    }

    /// Wakes the thread that sleeps on control connections, because there is one more.
    pub(crate) fn wake_driver(&self) {
        self.driven().wake_always();
    }

    /// The group for one more connection over a device on that NUMA node: of those with threads one that has the
    /// fewest, if there are any. `started`: the nodes that the threads of the first groups were placed by.
    pub(super) fn emptiest(&self, started: &[Option<u32>], node: Option<u32>) -> usize {
        let lanes: Vec<usize> = self.0.iter().skip(1).map(Group::lanes).collect();
        emptiest(&lanes, started, node).map_or(0, |at| at + 1)
    }

    /// Connections beside the first of a rail, of all groups.
    pub(super) fn further(&self) -> usize {
        let of = |group: &Group| group.snapshot().iter().filter(|lane| lane.is_further()).count();
        self.0.iter().map(of).sum()
    }

    /// Polls every connection once.
    pub(crate) fn pump(&self, progress: &Progress) {
        for group in &self.0 {
            group.pump(progress);
        }
    }
}

/// Of threads with so many connections each one that has the fewest: one that was placed by that node or that has not
/// started, if possible. Threads start in their order.
fn emptiest(lanes: &[usize], started: &[Option<u32>], node: Option<u32>) -> Option<usize> {
    let fewest = lanes.iter().min()?;
    let mut emptiest = (0..lanes.len()).filter(|at| lanes[*at] == *fewest);
    let near = emptiest.clone().find(|at| started.get(*at).is_none_or(|placed| *placed == node));
    near.or_else(|| emptiest.next())
}

impl Group {
    /// Polls every connection that has work. Whether anything moved.
    pub(crate) fn pump(&self, shared: &Progress) -> bool {
        let mut moved = false;
        // One test for all: mostly there is nothing, and there may be many.
        if !self.pending.take() {
            return false;
        }
        for lane in self.snapshot().iter() {
            if lane.is_dead() {
                self.bury(shared, lane);
                moved = true;
                continue;
            }
            let readiness = lane.take_ready();
            if readiness == 0 && !lane.take_wanted() {
                continue;
            }
            let Some(mut held) = lane.lane.try_lock() else {
                // Another thread polls it, and may have checked before this work was left: leave it for the next pump.
                lane.set_ready(readiness);
                lane.want();
                continue;
            };
            let Some(inner) = held.as_mut() else { continue };
            if readiness != 0 {
                inner.ready(readiness & READABLE != 0, readiness & WRITABLE != 0);
            }
            let mut sink = OutsideSink { shared, endpoint: lane.endpoint, fault: None, callbacks: Vec::new() };
            let polled = inner.poll(&mut sink, BUDGET, false);
            let OutsideSink { fault, callbacks, .. } = sink;
            let polled = match fault {
                Some(why) => Err(LaneError::Protocol(why)),
                None => polled,
            };
            let wakes = inner.fd().is_some();
            drop(held);
            match polled {
                Ok(false) if wakes => {}
                // Nothing reports what arrives, so it is polled for ever.
                Ok(false) => lane.want(),
                Ok(true) => {
                    lane.want();
                    moved = true;
                }
                Err(error) => {
                    lane.verdict.lock().get_or_insert(error);
                    self.bury(shared, lane);
                    moved = true;
                }
            }
            shared.threads.call_back(callbacks);
        }
        moved
    }

    fn bury(&self, shared: &Progress, lane: &Arc<BulkLane>) {
        let dropped = lane.lane.lock().take();
        self.remove(lane.id);
        let verdict = lane.verdict.lock().take().unwrap_or_else(|| LaneError::Closed("its peer is gone".to_owned()));
        let end = dropped.as_ref().map(|lane| LaneEnd::of(&**lane));
        drop(dropped);
        let mut core = shared.core.lock();
        end.into_iter().for_each(|end| core.transfers().polled().note_end(end));
        core.transfers().lane_lost(lane.endpoint, lane.id, &verdict);
        shared.after(core);
    }
}

/// The protocol's side of a lane polled outside the worker's lock: it takes the lock for each call.
struct OutsideSink<'a> {
    shared: &'a Progress,
    endpoint: EndpointId,
    fault: Option<String>,
    /// They run once the lane is let go.
    callbacks: Vec<Due>,
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
            // A frame without a payload may carry acknowledgements, which free slots.
            core.transfers().settle_aside(self.endpoint);
            self.shared.after_or_leave(core, Some(&mut self.callbacks));
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
        self.shared.after_or_leave(core, Some(&mut self.callbacks));
    }

    fn returned(&mut self) {
        let mut core = self.shared.core.lock();
        core.operations().settle_returns();
        self.shared.after_or_leave(core, Some(&mut self.callbacks));
    }
}

#[cfg(test)]
mod tests {
    use super::emptiest;

    #[test]
    fn connections_are_spread_and_kept_to_threads_of_their_node() {
        assert_eq!(emptiest(&[], &[], None), None);
        // The first thread that has not started, and then those of the same node.
        assert_eq!(emptiest(&[0, 0, 0], &[], Some(1)), Some(0));
        assert_eq!(emptiest(&[1, 0, 0], &[Some(1)], Some(0)), Some(1));
        assert_eq!(emptiest(&[1, 1, 1], &[Some(1), Some(0), None], Some(0)), Some(1));
        assert_eq!(emptiest(&[1, 1, 1], &[Some(1), Some(0), None], None), Some(2));
        // Equal shares come first.
        assert_eq!(emptiest(&[1, 2, 1], &[Some(1), Some(0), Some(1)], Some(0)), Some(0));
        assert_eq!(emptiest(&[1, 0, 0], &[Some(1), Some(0)], Some(1)), Some(2), "one that has not started");
    }
}
