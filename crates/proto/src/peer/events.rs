//! What the engine is to be told.

use std::collections::VecDeque;

use crossrail_types::OpId;

use crate::{DirectId, Event, Failure, Memory, RegionRef, Short};

/// Events that the engine has not taken yet, in the order in which it takes them.
///
/// Every part of [`Peer`](super::Peer) adds to it; [`Peer::event`](super::Peer::event) and its short forms take. The
/// good end of a short message is kept in few bytes for as long as no longer event is ahead of it: what is in `shorts`
/// happened before all that is in `events`. While there is something in `arrived`, `events` is not empty: the end of
/// the access follows.
#[derive(Debug, Default)]
pub(super) struct Events {
    events: VecDeque<Event>,
    shorts: VecDeque<Short>,
    /// Writes with an immediate whose bytes are in place.
    arrived: VecDeque<(RegionRef, u32)>,
}

impl Events {
    #[inline]
    pub(super) fn push(&mut self, event: Event) {
        self.events.push_back(event);
    }

    /// The good end of a short message.
    #[inline(always)]
    pub(super) fn end_short(&mut self, short: Short) {
        if self.events.is_empty() {
            self.shorts.push_back(short);
        } else {
            self.events.push_back(short.into());
        }
    }

    /// The bad end of an operation of which `progress` bytes had been moved.
    pub(super) fn fail(&mut self, op: OpId, why: Failure, progress: u64, tag: u64) {
        self.events.push_back(Event::Done { op, result: Err(why), progress, tag });
    }

    pub(super) fn revoke(&mut self, memory: Memory) {
        self.events.push_back(Event::Revoke { memory });
    }

    /// A direct copy is no longer wanted.
    pub(super) fn stop(&mut self, job: DirectId) {
        self.events.push_back(Event::StopDirect { job });
    }

    /// A write with an immediate is complete; [`Event::Released`] has been added.
    pub(super) fn arrive(&mut self, region: RegionRef, imm: u32) {
        debug_assert!(!self.events.is_empty());
        self.arrived.push_back((region, imm));
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.shorts.is_empty() && self.events.is_empty()
    }

    /// Whether all that is there is the ends of short messages.
    #[inline]
    pub(super) fn are_short(&self) -> bool {
        self.events.is_empty()
    }

    #[inline]
    pub(super) fn take_short(&mut self) -> Option<Short> {
        self.shorts.pop_front()
    }

    #[inline]
    pub(super) fn take_arrived(&mut self) -> Option<(RegionRef, u32)> {
        self.arrived.pop_front()
    }

    /// The next event, where no short one is left.
    pub(super) fn take(&mut self) -> Option<Event> {
        match self.arrived.pop_front() {
            Some((region, imm)) => Some(Event::Imm { region, imm }),
            None => self.events.pop_front(),
        }
    }

    /// If the next event is the success of operation `of`: turns it into a failure. False: the next event is another
    /// one.
    pub(super) fn fail_next(&mut self, of: OpId, why: &Failure) -> bool {
        let Some(Event::Done { op, result, progress, .. }) = self.events.front_mut() else { return false };
        if *op != of || result.is_err() {
            return false;
        }
        (*result, *progress) = (Err(why.clone()), 0);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn short(index: u32) -> Short {
        Short { op: OpId { index, generation: 0 }, tag: 0, bytes: 8, wire_ns: 0, lane: None }
    }

    #[test]
    fn a_short_end_waits_behind_longer_events() {
        let mut events = Events::default();
        events.end_short(short(1));
        events.push(Event::Bye);
        events.end_short(short(2));
        assert_eq!(events.take_short(), Some(short(1)));
        assert_eq!(events.take_short(), None, "the goodbye goes first");
        assert!(!events.is_empty() && !events.are_short());
        assert_eq!((events.take(), events.take()), (Some(Event::Bye), Some(short(2).into())));
        assert!(events.is_empty() && events.take().is_none());
    }

    #[test]
    fn only_the_success_that_is_next_becomes_a_failure() {
        let mut events = Events::default();
        assert!(!events.fail_next(short(1).op, &Failure::Cancelled));
        events.push(short(1).into());
        assert!(!events.fail_next(short(2).op, &Failure::Cancelled));
        assert!(events.fail_next(short(1).op, &Failure::Cancelled));
        assert!(!events.fail_next(short(1).op, &Failure::Closed), "it has failed already");
        let failure = Event::Done { op: short(1).op, result: Err(Failure::Cancelled), progress: 0, tag: 0 };
        assert_eq!(events.take(), Some(failure));
    }

    #[test]
    fn immediates_go_before_the_end_of_their_access() {
        let (mut events, region) = (Events::default(), RegionRef { index: 0, generation: 0 });
        events.push(Event::Released { passive: 0, region });
        events.arrive(region, 7);
        assert_eq!(events.take(), Some(Event::Imm { region, imm: 7 }));
        assert_eq!(events.take(), Some(Event::Released { passive: 0, region }));
    }
}
