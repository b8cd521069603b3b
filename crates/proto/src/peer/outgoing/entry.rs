//! One operation of this end, or one read that it serves.

use crossrail_types::{LaneId, OpId};

use crate::feed::Feed;
use crate::frame::Target;
use crate::{DirectId, Failure, Memory, Offer, Protocol, Receipt, RegionRef, Time};

/// Something of ours in flight: what a short message needs, and apart from it the state of longer ones.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) op: OpId,
    pub(super) len: u64,
    pub(super) started: Time,
    pub(super) serial: u32,
    /// Number of the frame with its bytes, where they go with the messages.
    pub(super) seq: Option<u32>,
    pub(super) lane: LaneId,
    pub(super) kind: Kind,
    pub(super) stage: Stage,
    long: Option<Box<LongState>>,
}

/// What only longer operations need.
#[derive(Debug)]
pub(super) struct LongState {
    pub(super) announced: Time,
    pub(super) consented: Time,
    /// A direct copy was offered to the peer, with the shared cursor.
    pub(super) offered: bool,
    pub(super) slot: Option<u32>,
    pub(super) job: Option<DirectId>,
    pub(super) after: AfterStop,
    pub(super) copy_ns: u64,
    /// All of it was copied from here, without the peer.
    pub(super) pushed: bool,
    pub(super) feed: Option<Feed>,
    pub(super) serve: Option<Serve>,
    /// Why it was aborted, if our memory failed.
    pub(super) fault: Option<Failure>,
    /// It took credit for its bytes, which go unasked.
    pub(super) took_bytes: bool,
}

static NO_LONG_STATE: LongState = LongState::since(Time(0));

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Send,
    Write,
    Read {
        target: Target,
    },
    /// A read of the peer's.
    Serve,
}

/// A read of the peer's, from where and to where.
#[derive(Clone, Copy, Debug)]
pub(super) struct Serve {
    pub(super) region: RegionRef,
    pub(super) base: u64,
    pub(super) their: u32,
    pub(super) target: Target,
    pub(super) passive: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The bytes went along.
    Eager,
    /// Waiting for the peer.
    Announced,
    /// Chunks go out.
    Feeding,
    /// Cancelled here, or a serve that failed: waiting for the peer to agree.
    Aborting,
}

/// What to do once a stopped direct copy, or the unpacks of a finished read, have ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum AfterStop {
    /// It was not told to stop.
    Running,
    /// Nothing: the peer replies next.
    Nothing,
    Feed(Target),
    Finish(Result<(), Failure>),
    ServeFailed(Failure),
}

impl LongState {
    /// Of an operation that has just begun.
    const fn since(began: Time) -> LongState {
        LongState {
            announced: began,
            consented: began,
            offered: false,
            slot: None,
            job: None,
            after: AfterStop::Running,
            copy_ns: 0,
            pushed: false,
            feed: None,
            serve: None,
            fault: None,
            took_bytes: false,
        }
    }

    pub(super) fn announce(&mut self, now: Time, offer: Option<Offer>) {
        self.announced = now;
        self.offered = offer.is_some();
        self.slot = offer.and_then(|o| o.slot);
    }
}

impl Outgoing {
    #[inline]
    pub(super) fn new(op: OpId, kind: Kind, len: u64, serial: u32, started: Time, lane: LaneId) -> Outgoing {
        Outgoing { op, len, started, serial, seq: None, lane, kind, stage: Stage::Announced, long: None }
    }

    /// State that only longer operations need.
    pub(super) fn long(&self) -> &LongState {
        self.long.as_deref().unwrap_or(&NO_LONG_STATE)
    }

    /// As [`Outgoing::long`], to change it; allocated on first use.
    pub(super) fn long_mut(&mut self) -> &mut LongState {
        let started = self.started;
        self.long.get_or_insert_with(|| Box::new(LongState::since(started)))
    }

    pub(super) fn feed(&mut self) -> Option<&mut Feed> {
        self.long.as_deref_mut()?.feed.as_mut()
    }

    /// Takes the reason why it was aborted.
    pub(super) fn take_fault(&mut self) -> Option<Failure> {
        self.long.as_deref_mut()?.fault.take()
    }

    pub(super) fn touched(&self) -> bool {
        self.long().feed.as_ref().is_some_and(Feed::touched)
    }

    /// Whether it has chunks for lanes to take.
    pub(super) fn feeds(&self) -> bool {
        self.stage == Stage::Feeding && self.long().feed.as_ref().is_some_and(|f| f.left() > 0)
    }

    pub(super) fn memory(&self) -> Memory {
        match self.long().serve {
            Some(Serve { region, base, passive, .. }) => Memory::Region { region, base, passive },
            None => Memory::Op(self.op),
        }
    }

    #[inline]
    pub(super) fn receipt(&mut self, now: Time) -> Receipt {
        let total = now.since(self.started);
        let mut receipt = Receipt {
            bytes: self.len,
            protocol: Protocol::Eager,
            lane: None,
            lanes: Vec::new(),
            match_ns: 0,
            window_ns: 0,
            wire_ns: total,
            copy_ns: self.long().copy_ns,
            pushed: self.long().pushed,
        };
        if let Some(feed) = self.long.as_mut().and_then(|m| m.feed.take()) {
            receipt.protocol = Protocol::Chunks;
            (receipt.lanes, receipt.window_ns) = feed.summary();
            receipt.match_ns = self.long().consented.since(self.long().announced);
        } else if self.seq.is_some() || self.stage == Stage::Eager {
            receipt.lane = Some(self.lane);
        } else {
            receipt.protocol = Protocol::Direct;
        }
        receipt.wire_ns = total.saturating_sub(receipt.match_ns + receipt.window_ns + receipt.copy_ns);
        receipt
    }
}
