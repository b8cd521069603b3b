//! Messages that came before their receive.

use crossrail_types::OpId;

use super::Peer;
use super::theirs::Their;
use crate::peer::incoming::InKind;
use crate::peer::open::What;
use crate::{Event, Failure, Matcher, Offer, Short, Time};

/// An unexpected message.
#[derive(Debug)]
pub(super) struct Kept {
    pub(super) their: u32,
    pub(super) tag: u64,
    pub(super) len: u64,
    /// Its bytes are in the engine's hands, or on the way there; otherwise it was only announced.
    pub(super) eager: bool,
    pub(super) complete: bool,
    offer: Option<Offer>,
    pub(super) accepted: Option<(OpId, u64)>,
    /// Why it is to be forgotten once it is there in whole, if its receive has ended.
    pub(super) ended: Option<Failure>,
    /// Out of our hands; only its id is kept from being used again.
    pub(super) over: bool,
}

impl Peer {
    pub(super) fn keep_eager(&mut self, their: u32, tag: u64, len: u32, matcher: &mut Matcher) -> Result<What, String> {
        let total = self.arrival_bytes + u64::from(len);
        if total > self.config.eager_credit {
            return Err(format!("{total} bytes of unexpected messages; the credit is {}", self.config.eager_credit));
        }
        let len = u64::from(len);
        let arrival = self.keep(their, Kept::new(their, tag, len, true, None), matcher)?;
        self.arrival_bytes = total;
        Ok(What::Kept { arrival })
    }

    pub(super) fn keep(&mut self, their: u32, kept: Kept, matcher: &mut Matcher) -> Result<u32, String> {
        let arrival = self.arrivals.vacant_key() as u32;
        self.theirs.claim(their, Their::Arrival(arrival))?;
        matcher.keep(self.id, arrival, kept.tag, kept.len);
        self.arrivals.insert(kept);
        Ok(arrival)
    }

    /// An unexpected message is there in whole.
    pub(super) fn kept(&mut self, arrival: u32) {
        let Some(kept) = self.arrivals.get_mut(arrival as usize).filter(|k| !k.over) else { return };
        kept.complete = true;
        if let Some(why) = kept.ended.take() {
            self.discard_kept(arrival, &why);
        } else if let Some((op, capacity)) = kept.accepted {
            self.deliver(arrival, op, capacity);
        }
    }

    /// An unexpected message is out of our hands. If there are bytes, the event that goes with it frees the id.
    pub(super) fn remove_kept(&mut self, arrival: u32) {
        let Some(kept) = self.arrivals.get_mut(arrival as usize).filter(|k| !k.over) else { return };
        let their = kept.their;
        if kept.eager {
            kept.over = true;
            self.arrival_bytes -= kept.len;
        } else {
            self.arrivals.remove(arrival as usize);
        }
        self.theirs.free(their);
    }

    fn discard_kept(&mut self, arrival: u32, why: &Failure) {
        let Some(&Kept { their, eager, .. }) = self.arrivals.get(arrival as usize) else { return };
        self.remove_kept(arrival);
        if eager {
            self.events.push(Event::DropArrival { arrival });
        }
        self.answers.tell_failed(their, why, &mut self.events);
    }

    /// The sender has cancelled an unexpected message.
    pub(super) fn drop_kept(&mut self, arrival: u32, why: &Failure, matcher: &mut Matcher) {
        matcher.forget(self.id, arrival);
        self.discard_kept(arrival, why);
    }

    fn deliver(&mut self, arrival: u32, op: OpId, capacity: u64) {
        let Some(&Kept { their, tag, len, .. }) = self.arrivals.get(arrival as usize) else { return };
        self.remove_kept(arrival);
        if len > capacity {
            self.events.push(Event::DropArrival { arrival });
            self.truncated(op, tag, their, len, capacity);
            return;
        }
        self.events.push(Event::Deliver { arrival, op, len: len as u32 });
        self.events.push(Short { op, tag, bytes: len, wire_ns: 0, lane: None }.into());
        self.answers.owe_done(their, &mut self.events);
    }

    pub(super) fn accept_kept(&mut self, now: Time, arrival: u32, op: OpId, capacity: u64) {
        let failed = self.answers.failed().or_else(|| self.answers.bye_sent().then_some(Failure::Closed));
        let Some(kept) = self.arrivals.get_mut(arrival as usize).filter(|k| !k.over) else {
            self.events.fail(op, failed.unwrap_or(Failure::Cancelled), 0, 0);
            return;
        };
        if kept.eager {
            if kept.complete {
                self.deliver(arrival, op, capacity);
            } else {
                kept.accepted = Some((op, capacity));
            }
            return;
        }
        let Kept { their, tag, len, offer, .. } = *kept;
        if let Some(why) = failed {
            self.remove_kept(arrival);
            self.events.fail(op, why, 0, tag);
        } else if len > capacity {
            self.remove_kept(arrival);
            self.truncated(op, tag, their, len, capacity);
        } else {
            self.arrivals.remove(arrival as usize);
            self.begin_transfer(now, their, InKind::Receive { op, tag }, len, offer);
        }
    }
}

impl Kept {
    pub(super) fn new(their: u32, tag: u64, len: u64, eager: bool, offer: Option<Offer>) -> Kept {
        Kept { their, tag, len, eager, complete: false, offer, accepted: None, ended: None, over: false }
    }
}
