//! The lanes that are polled under the worker's lock: awake ones, and those that rest.

use crossrail_transport::{Barrier, Domain, Lane, LaneStats};
use crossrail_types::{EndpointId, LaneId};

use super::bulk_lane::LaneEnd;

/// A lane polled under the worker's lock.
pub(crate) struct PolledLane {
    pub(crate) id: LaneId,
    pub(crate) endpoint: EndpointId,
    pub(crate) lane: Box<dyn Lane>,
    /// Polling it costs a system call.
    pub(crate) socket: bool,
    /// It may rest while nothing goes over it.
    pub(crate) rests: bool,
    /// Something has arrived since [`Transfers::rest_idle`](super::Transfers::rest_idle) last asked.
    pub(super) used: bool,
}

/// All lanes polled under the worker's lock.
///
/// While [`PolledLanes::is_armed`], every lane's peer sends a wake-up with its next frame, because no thread polls
/// here; a lane that is added meanwhile is armed at once.
///
/// Of many lanes, those that are idle rest: they are armed one by one and not polled, so that they cost the others
/// nothing. One is awake again when its peer has sent its wake-up, which epoll reports, or when this end uses it.
pub(crate) struct PolledLanes {
    /// Those that are polled, then those that rest.
    lanes: Vec<PolledLane>,
    /// How many are polled.
    awake: usize,
    /// There are only sockets, and few: they are polled in every pass.
    sockets_only: bool,
    armed: bool,
    /// Where the lane was that was found last.
    last: usize,
    /// Lanes that were dropped, also those polled elsewhere; `None`: nobody takes them.
    ends: Option<Vec<LaneEnd>>,
}

impl PolledLanes {
    pub(super) fn new() -> PolledLanes {
        PolledLanes { lanes: Vec::new(), awake: 0, sockets_only: true, armed: false, last: 0, ends: None }
    }

    /// How many are polled: they have the first positions.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.awake
    }

    /// How many rest.
    #[inline]
    pub(super) fn resting(&self) -> usize {
        self.lanes.len() - self.awake
    }

    /// The lane at that position, if it is polled.
    #[inline]
    pub(super) fn at(&mut self, at: usize) -> Option<&mut PolledLane> {
        if at < self.awake { self.lanes.get_mut(at) } else { None }
    }

    /// Where the lane is, which is awake after this.
    #[inline]
    pub(super) fn position(&mut self, id: LaneId) -> Option<usize> {
        self.find(id)
    }

    /// The lane itself, which is awake after this.
    #[inline(always)]
    pub(super) fn get_mut(&mut self, id: LaneId) -> Option<&mut dyn Lane> {
        Some(&mut *self.entry(id)?.lane)
    }

    /// The lane, which is awake after this, and what is known of it.
    #[inline(always)]
    pub(super) fn entry(&mut self, id: LaneId) -> Option<&mut PolledLane> {
        let found = self.last < self.awake && self.lanes.get(self.last).is_some_and(|lane| lane.id == id);
        if !found {
            self.last = self.find(id)?;
        }
        self.lanes.get_mut(self.last)
    }

    /// [`PolledLanes::position`], which looks through all of them.
    #[inline(never)]
    fn find(&mut self, id: LaneId) -> Option<usize> {
        let at = self.lanes.iter().position(|lane| lane.id == id)?;
        Some(if at < self.awake { at } else { self.awaken(at) })
    }

    /// The peer of the only lane, if there is one.
    #[inline]
    pub(super) fn only_endpoint(&self) -> Option<EndpointId> {
        match &*self.lanes {
            [lane] => Some(lane.endpoint),
            _ => None,
        }
    }

    /// What the lane makes of memory, if it reaches that of the peer.
    pub(super) fn domain(&mut self, id: LaneId) -> Option<&mut dyn Domain> {
        self.get_mut(id)?.domain()
    }

    /// Records that the lane's socket is ready. Returns whether a sleeping thread must be woken: the lane rested, and
    /// no other event will report it. No-op if the lane is not polled here.
    pub(crate) fn ready(&mut self, id: LaneId, readable: bool, writable: bool) -> bool {
        let before = self.awake;
        if let Some(lane) = self.get_mut(id) {
            lane.ready(readable, writable);
        }
        self.awake > before && self.armed
    }

    /// Has those of the lanes at these positions rest for which there is no work.
    pub(super) fn rest(&mut self, at: &[usize]) {
        let (end, first) = (self.awake, self.awake - at.len());
        // Side by side, from the last on: none of the others moves to a position that is yet to be looked at.
        for (to, at) in (first..end).rev().zip(at.iter().rev()) {
            self.lanes.swap(*at, to);
        }
        let passed = announce_sleep(&mut self.lanes[first..end]);
        for at in (first..end).rev() {
            let lane = &mut self.lanes[at].lane;
            if passed && lane.confirm_sleep() {
                self.awake -= 1;
                self.lanes.swap(at, self.awake);
            } else {
                lane.disarm();
            }
        }
        self.recount();
    }

    /// The lane at that position, which rests, is polled again. Its new position.
    #[cold]
    fn awaken(&mut self, at: usize) -> usize {
        let lane = &mut self.lanes[at];
        lane.used = true;
        // Otherwise nobody polls, and this lane stays armed like all the others.
        if !self.armed {
            lane.lane.disarm();
        }
        self.lanes.swap(at, self.awake);
        self.awake += 1;
        self.recount();
        self.awake - 1
    }

    /// What it has carried; `None`: no such lane is polled here.
    pub(crate) fn stats(&self, id: LaneId) -> Option<LaneStats> {
        self.lanes.iter().find(|lane| lane.id == id).map(|lane| lane.lane.stats())
    }

    #[inline]
    pub(super) fn sockets_only(&self) -> bool {
        self.sockets_only
    }

    pub(super) fn add(&mut self, lane: PolledLane) {
        self.lanes.push(lane);
        let last = self.lanes.len() - 1;
        self.lanes.swap(self.awake, last);
        self.awake += 1;
        self.recount();
    }

    /// Arms a lane that was just added if the others are. False: it has work already, and no lane is armed any more.
    pub(super) fn arm_added(&mut self, id: LaneId) -> bool {
        if !self.armed {
            // A lane may be armed from its beginning.
            if let Some(lane) = self.get_mut(id) {
                lane.disarm();
            }
            return true;
        }
        let armed = self.get_mut(id).is_some_and(Lane::arm);
        if !armed {
            self.disarm();
        }
        armed
    }

    /// Takes the lane at that position out. The order of the others changes.
    pub(super) fn remove(&mut self, at: usize) -> PolledLane {
        let mut at = at;
        if at < self.awake {
            self.awake -= 1;
            self.lanes.swap(at, self.awake);
            at = self.awake;
        }
        let lane = self.lanes.swap_remove(at);
        self.recount();
        if self.ends.is_some() {
            self.note_end(LaneEnd::of(&*lane.lane));
        }
        lane
    }

    /// Keeps what lanes had carried when they were dropped, for [`PolledLanes::take_ends`].
    pub(crate) fn keep_ends(&mut self) {
        self.ends.get_or_insert_default();
    }

    /// A lane was dropped, here or where it was polled.
    pub(crate) fn note_end(&mut self, end: LaneEnd) {
        if let Some(ends) = &mut self.ends {
            ends.push(end);
        }
    }

    /// The lanes that were dropped since the last call.
    pub(super) fn take_ends(&mut self) -> Vec<LaneEnd> {
        self.ends.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Takes a lane of that endpoint out.
    pub(super) fn remove_of(&mut self, endpoint: EndpointId) -> Option<PolledLane> {
        let at = self.lanes.iter().position(|lane| lane.endpoint == endpoint)?;
        Some(self.remove(at))
    }

    fn recount(&mut self) {
        let polled = &self.lanes[..self.awake];
        self.sockets_only = polled.len() <= 2 && polled.iter().all(|lane| lane.socket);
    }

    #[inline]
    pub(super) fn is_armed(&self) -> bool {
        self.armed
    }

    /// Has every lane's peer send a wake-up with its next frame. False: there is work already, and nothing is armed.
    pub(super) fn arm(&mut self) -> bool {
        let lanes = &mut self.lanes[..self.awake];
        self.armed = announce_sleep(lanes) && lanes.iter_mut().all(|lane| lane.lane.confirm_sleep());
        if !self.armed {
            lanes.iter_mut().for_each(|lane| lane.lane.disarm());
        }
        self.armed
    }

    /// A thread polls the lanes again: no wake-ups are needed. Whether the lanes were armed.
    #[inline]
    pub(crate) fn disarm(&mut self) -> bool {
        let was_armed = std::mem::replace(&mut self.armed, false);
        if was_armed {
            for lane in &mut self.lanes[..self.awake] {
                lane.lane.disarm();
            }
        }
        was_armed
    }
}

/// Announces that no thread polls these lanes any more: one barrier serves them all. False: they must be polled.
fn announce_sleep(lanes: &mut [PolledLane]) -> bool {
    let mut barrier = None;
    for PolledLane { lane, .. } in lanes {
        barrier = lane.announce_sleep().or(barrier);
    }
    barrier.is_none_or(|barrier: Barrier| barrier())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use crossrail_transport::{LaneCaps, LaneError, Post, Sink, Tx};

    use super::*;

    /// Calls that put lanes to sleep or wake them, in order.
    static ASKED: Mutex<Vec<(&str, usize)>> = Mutex::new(Vec::new());

    fn barrier() -> bool {
        ASKED.lock().unwrap().push(("barrier", 0));
        true
    }

    struct Sleeper {
        number: usize,
        has_work: bool,
    }

    impl Lane for Sleeper {
        fn id(&self) -> LaneId {
            LaneId(self.number as u32)
        }
        fn name(&self) -> &'static str {
            "sleeper"
        }
        fn caps(&self) -> &LaneCaps {
            unreachable!("nothing is sent")
        }
        fn post(&mut self, _: &Tx) -> Result<Post, LaneError> {
            unreachable!("nothing is sent")
        }
        fn poll(&mut self, _: &mut dyn Sink, _: usize, _: bool) -> Result<bool, LaneError> {
            unreachable!("nothing is polled")
        }
        fn arm(&mut self) -> bool {
            self.announce_sleep().is_some_and(|barrier| barrier()) && self.confirm_sleep()
        }
        fn announce_sleep(&mut self) -> Option<Barrier> {
            ASKED.lock().unwrap().push(("announce", self.number));
            Some(barrier)
        }
        fn confirm_sleep(&mut self) -> bool {
            ASKED.lock().unwrap().push(("confirm", self.number));
            !self.has_work
        }
        fn disarm(&mut self) {
            ASKED.lock().unwrap().push(("disarm", self.number));
        }
        fn stats(&self) -> LaneStats {
            LaneStats::default()
        }
    }

    /// Held by a test that looks at [`ASKED`].
    static ALONE: Mutex<()> = Mutex::new(());

    fn add(lanes: &mut PolledLanes, number: usize, has_work: bool) -> LaneId {
        let (id, endpoint) = (LaneId(number as u32), EndpointId(number as u32));
        let lane = Box::new(Sleeper { number, has_work });
        lanes.add(PolledLane { id, endpoint, lane, socket: false, rests: true, used: false });
        id
    }

    #[test]
    fn a_lane_that_comes_while_others_are_armed_wakes_nobody() {
        let _alone = ALONE.lock().unwrap();
        let mut lanes = PolledLanes::new();
        let first = add(&mut lanes, 10, false);
        assert!(lanes.arm_added(first) && !lanes.is_armed(), "a thread polls");
        assert_eq!(asked("disarm"), [10]);
        assert!(lanes.arm());
        ASKED.lock().unwrap().clear();
        let second = add(&mut lanes, 11, false);
        assert!(lanes.arm_added(second) && lanes.is_armed());
        assert_eq!((asked("confirm"), asked("disarm")), (vec![11], vec![]));
        let busy = add(&mut lanes, 12, true);
        assert!(!lanes.arm_added(busy) && !lanes.is_armed(), "it must be polled");
        let mut disarmed = asked("disarm");
        disarmed.sort_unstable();
        assert_eq!(disarmed, [10, 11, 12]);
    }

    /// The lanes of which that was asked.
    fn asked(what: &str) -> Vec<usize> {
        ASKED.lock().unwrap().iter().filter(|(asked, _)| *asked == what).map(|(_, number)| *number).collect()
    }

    #[test]
    fn lanes_go_to_sleep_together_behind_one_barrier() {
        let _alone = ALONE.lock().unwrap();
        ASKED.lock().unwrap().clear();
        let mut lanes = PolledLanes::new();
        for number in 0..5 {
            add(&mut lanes, number, number == 3);
        }
        assert!(!lanes.arm() && !lanes.is_armed(), "one has work");
        assert_eq!((asked("announce"), asked("barrier")), (vec![0, 1, 2, 3, 4], vec![0]));
        assert_eq!(asked("disarm"), [0, 1, 2, 3, 4], "no lane is left asleep");
        ASKED.lock().unwrap().clear();
        lanes.rest(&[1, 3, 4]);
        assert_eq!((asked("announce").len(), asked("barrier").len(), asked("disarm")), (3, 1, vec![3]));
        let mut awake: Vec<u32> = (0..lanes.len()).filter_map(|at| lanes.at(at).map(|lane| lane.id.0)).collect();
        awake.sort_unstable();
        assert_eq!((awake, lanes.resting()), (vec![0, 2, 3], 2));
        let order: Vec<&str> = ASKED.lock().unwrap().iter().map(|(what, _)| *what).collect();
        assert_eq!(
            order[..4],
            ["announce", "announce", "announce", "barrier"],
            "the barrier follows all announcements"
        );
    }
}
