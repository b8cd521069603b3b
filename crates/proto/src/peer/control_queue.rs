//! Control frames and completions owed to the peer, and the state of the connection.

use std::collections::VecDeque;

use crate::frame::{self, Bytes, Frame};
use crate::{Body, Event, Failure};

use super::events::Events;

/// Ids in the payload of one done frame.
const DONES: usize = frame::CONTROL_MAX as usize / 4;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Live,
    /// The peer broke the protocol, or a reliable lane is gone: nothing goes in or out any more.
    Broken(String),
    /// The peer said goodbye.
    Closed,
    /// The engine reported the peer as dead.
    Dead(Failure),
}

/// Queue of control frames, completions owed to the peer, and whether the connection is open in each direction.
///
/// Every part of [`Peer`](super::Peer) adds to it while the connection is live and this end has not sent its goodbye;
/// `sending` takes from it. The length is bounded: a peer that makes this end owe more is cut off. Acknowledgements may
/// wait a few passes for a message that carries them ([`ControlQueue::due`]).
#[derive(Debug)]
pub(super) struct ControlQueue {
    phase: Phase,
    closing: bool,
    bye_sent: bool,
    control: VecDeque<(Frame, Body)>,
    /// Finished operations of the peer whose completion has not been sent.
    dones: VecDeque<u32>,
    /// Whether one of them finishes a read of ours, whose wire id we may use again.
    done_reads: bool,
    urgent: bool,
    passes: u32,
    lazy_passes: u32,
    /// Maximum number of queued replies.
    most: usize,
}

impl ControlQueue {
    /// `credit`: operations that the peer may have in flight.
    pub(super) fn new(credit: u32, lazy_passes: u32) -> ControlQueue {
        ControlQueue {
            phase: Phase::Live,
            closing: false,
            bye_sent: false,
            control: VecDeque::new(),
            dones: VecDeque::new(),
            done_reads: false,
            urgent: false,
            passes: 0,
            lazy_passes,
            // A peer that keeps to its credit is owed a few frames per operation; one that is owed more keeps sending
            // requests and does not read the replies.
            most: 16 * credit as usize + 64,
        }
    }

    #[inline]
    pub(super) fn phase(&self) -> &Phase {
        &self.phase
    }

    #[inline]
    pub(super) fn live(&self) -> bool {
        matches!(self.phase, Phase::Live)
    }

    /// Whether this end has asked for the end of the connection.
    #[inline]
    pub(super) fn closing(&self) -> bool {
        self.closing
    }

    #[inline]
    pub(super) fn bye_sent(&self) -> bool {
        self.bye_sent
    }

    /// Whether the peer listens, and this end has not said goodbye.
    #[inline]
    pub(super) fn talks(&self) -> bool {
        self.live() && !self.bye_sent
    }

    /// Whether the peer listens, and this end has not asked for the end of the connection.
    #[inline]
    pub(super) fn is_open(&self) -> bool {
        self.talks() && !self.closing
    }

    /// Why nothing more can be done with this peer, if so.
    pub(super) fn failed(&self) -> Option<Failure> {
        match &self.phase {
            Phase::Live => None,
            Phase::Broken(why) => Some(Failure::PeerDead(why.clone())),
            Phase::Closed => Some(Failure::Closed),
            Phase::Dead(why) => Some(why.clone()),
        }
    }

    /// Why no operation may be started, if so.
    #[inline]
    pub(super) fn refusal(&self) -> Option<Failure> {
        match &self.phase {
            Phase::Dead(why) => Some(why.clone()),
            Phase::Closed => Some(Failure::Closed),
            Phase::Live | Phase::Broken(_) => self.closing.then_some(Failure::Closed),
        }
    }

    /// Nothing new is begun, here or there.
    pub(super) fn close(&mut self) {
        self.closing = true;
    }

    /// The goodbye of a connection that is closing goes out.
    pub(super) fn say_bye(&mut self) {
        self.bye_sent = true;
    }

    /// Whether a goodbye is yet to be said.
    #[inline]
    pub(super) fn owes_bye(&self) -> bool {
        self.closing && !self.bye_sent
    }

    /// The peer has said goodbye; false: it was no longer live.
    pub(super) fn hear_bye(&mut self) -> bool {
        let live = self.live();
        if live {
            self.phase = Phase::Closed;
        }
        live
    }

    /// The engine has given the peer up; false: it had before.
    pub(super) fn die(&mut self, why: &Failure) -> bool {
        let alive = !matches!(self.phase, Phase::Dead(_));
        if alive {
            self.phase = Phase::Dead(why.clone());
        }
        alive
    }

    /// Nothing can be trusted any more.
    #[cold]
    pub(super) fn break_off(&mut self, why: String, events: &mut Events) {
        if matches!(self.phase, Phase::Live | Phase::Closed) {
            events.push(Event::Broken { why: why.clone() });
            self.phase = Phase::Broken(why);
        }
    }

    /// Queues a control frame, which precedes any new operation.
    pub(super) fn push(&mut self, frame: Frame, body: Body, events: &mut Events) {
        if self.talks() {
            self.control.push_back((frame, body));
            self.bound(self.control.len(), events);
        }
    }

    /// Queues the failure of the peer's operation `op`.
    pub(super) fn push_failed(&mut self, op: u32, why: &Failure, events: &mut Events) {
        let (code, bytes) = frame::encode_failure(why);
        self.push(Frame::Fail { op, code }, Body::from(bytes), events);
    }

    /// Asks the peer to end our operation with wire id `op` before its time.
    pub(super) fn push_abort(&mut self, op: u32, why: &Failure, events: &mut Events) {
        let (code, bytes) = match why {
            Failure::Device(_) => frame::encode_failure(why),
            _ => (0, Bytes::EMPTY),
        };
        self.push(Frame::Abort { op, code }, Body::from(bytes), events);
    }

    /// Queues the completion of an operation of the peer.
    #[inline]
    pub(super) fn owe_done(&mut self, their: u32, events: &mut Events) {
        if self.talks() {
            self.dones.push_back(their);
            self.bound(self.dones.len(), events);
        }
    }

    /// As [`ControlQueue::owe_done`], for a read of ours that the peer serves.
    pub(super) fn owe_read_done(&mut self, their: u32, events: &mut Events) {
        self.owe_done(their, events);
        self.done_reads = true;
    }

    #[inline]
    fn bound(&mut self, owed: usize, events: &mut Events) {
        if owed > self.most {
            self.break_off(format!("{owed} replies are queued for a peer that keeps sending requests"), events);
        }
    }

    /// Removes a queued completion; false: it was sent already.
    pub(super) fn withdraw_done(&mut self, their: u32) -> bool {
        let found = self.dones.iter().position(|id| *id == their);
        found.is_some_and(|at| self.dones.remove(at).is_some())
    }

    /// The data of a read that we serve need not go out.
    pub(super) fn withdraw_data(&mut self, of: u32) {
        self.control.retain(|(frame, _)| !matches!(frame, Frame::ReadData { serve, .. } if *serve == of));
    }

    /// Nobody listens.
    pub(super) fn clear(&mut self) {
        self.control.clear();
        self.dones.clear();
        self.done_reads = false;
    }

    /// Whether neither frame nor confirmation waits.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.waiting() == 0
    }

    /// Not 0 if a frame or a confirmation waits.
    #[inline]
    pub(super) fn waiting(&self) -> usize {
        self.control.len() | self.dones.len()
    }

    /// Whether there is no confirmation to give.
    #[inline]
    pub(super) fn no_dones(&self) -> bool {
        self.dones.is_empty()
    }

    /// Whether a new message may go out before all that is owed.
    #[inline]
    pub(super) fn is_clear(&self) -> bool {
        self.is_open() && self.control.is_empty() && !self.dones_first()
    }

    /// Whether something must go out now rather than ride along with a later message.
    pub(super) fn has_urgent(&self) -> bool {
        !self.control.is_empty() || (self.urgent && !self.dones.is_empty()) || self.dones_first() || self.owes_bye()
    }

    /// Whether completions must precede the next new operation: there are many, or one is for a read of ours, whose id
    /// the new operation may reuse (one completion rides along with it and is processed first).
    #[inline]
    pub(super) fn dones_first(&self) -> bool {
        self.dones.len() >= DONES || (self.done_reads && self.dones.len() > 1)
    }

    /// The next frame that goes out before any operation.
    #[inline]
    pub(super) fn take_frame(&mut self) -> Option<(Frame, Body)> {
        self.control.pop_front()
    }

    /// The next confirmation, to go along with a frame; 0: there is none.
    #[inline]
    pub(super) fn take_done(&mut self) -> u32 {
        let id = self.dones.pop_front().unwrap_or(0);
        if self.dones.is_empty() {
            self.done_reads = false;
        }
        id
    }

    /// As many confirmations as fit into a frame of their own.
    pub(super) fn take_dones(&mut self) -> Bytes {
        let mut bytes = Bytes::EMPTY;
        while usize::from(bytes.len) < DONES * 4 && !self.dones.is_empty() {
            bytes = bytes.push(&self.take_done().to_le_bytes());
        }
        bytes
    }

    /// Sets whether everything owed goes out with the next pass, alone if need be.
    pub(super) fn urge(&mut self, owes: bool) {
        self.urgent = owes;
    }

    #[inline]
    pub(super) fn is_urgent(&self) -> bool {
        self.urgent
    }

    /// Whether no acknowledgement has been held back.
    #[inline]
    pub(super) fn none_deferred(&self) -> bool {
        !self.urgent && self.passes == 0
    }

    /// Whether what is owed must go out alone; if not, counts one deferred pass.
    pub(super) fn due(&mut self) -> bool {
        let due = self.urgent || self.passes >= self.lazy_passes || matches!(self.phase, Phase::Closed);
        self.passes += u32::from(!due);
        due
    }

    /// All that was owed is on its way.
    #[inline]
    pub(super) fn settle(&mut self) {
        self.passes = 0;
        self.urgent = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_only_asks_is_broken_off() {
        let (mut queue, mut events) = (ControlQueue::new(1, 1), Events::default());
        for _ in 0..16 + 64 {
            queue.push(Frame::Nothing, Body::None, &mut events);
            queue.owe_done(1, &mut events);
        }
        assert!(queue.live() && events.is_empty());
        queue.owe_done(1, &mut events);
        assert!(matches!(events.take(), Some(Event::Broken { .. })));
        let waiting = (queue.control.len(), queue.dones.len());
        queue.push(Frame::Nothing, Body::None, &mut events);
        queue.owe_done(1, &mut events);
        assert_eq!((queue.control.len(), queue.dones.len()), waiting, "nobody listens");
        assert!(events.is_empty() && queue.failed().is_some());
    }

    #[test]
    fn nothing_is_said_after_the_goodbye() {
        let (mut queue, mut events) = (ControlQueue::new(4, 1), Events::default());
        queue.close();
        queue.push_failed(1, &Failure::Closed, &mut events);
        assert!(queue.owes_bye() && queue.take_frame().is_some());
        queue.say_bye();
        queue.push_failed(2, &Failure::Closed, &mut events);
        assert!(!queue.owes_bye() && queue.is_empty());
        assert_eq!(queue.refusal(), Some(Failure::Closed));
    }

    #[test]
    fn a_confirmation_is_withdrawn_before_it_goes_out_and_not_after() {
        let (mut queue, mut events) = (ControlQueue::new(4, 1), Events::default());
        for id in [1, 2, 3] {
            queue.owe_read_done(id, &mut events);
        }
        assert!(queue.dones_first());
        assert_eq!(queue.take_done(), 1);
        assert!(queue.withdraw_done(2) && !queue.withdraw_done(1));
        assert!(!queue.dones_first(), "one goes along with the next frame");
        assert_eq!((queue.take_done(), queue.take_done()), (3, 0));
    }

    #[test]
    fn acknowledgements_wait_a_few_occasions() {
        let mut queue = ControlQueue::new(4, 2);
        assert_eq!([queue.due(), queue.due(), queue.due()], [false, false, true]);
        assert!(!queue.none_deferred());
        queue.settle();
        queue.urge(true);
        assert!(queue.due());
    }
}
