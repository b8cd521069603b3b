//! Unexpected messages: those that arrive before their receive is posted.

use std::collections::HashMap;

use crossrail_types::{EndpointId, LaneId, OpId};
use slab::Slab;

use super::Context;
use super::peer_ops::PeerOp;
use crate::{Event, Failure, Matcher, Offer, Short};

/// An unexpected message.
#[derive(Debug)]
struct Unexpected {
    their: u32,
    tag: u64,
    len: u64,
    /// Its bytes are in the engine's hands, or on the way there; otherwise it was only announced.
    eager: bool,
    complete: bool,
    offer: Option<Offer>,
    accepted: Option<(OpId, u64)>,
    /// Why it is to be forgotten once it is there in whole, if its receive has ended.
    ended: Option<Failure>,
    /// Out of our hands; only its id is kept from being used again.
    over: bool,
    /// It arrives unasked: the number of its announcement.
    number: Option<u32>,
    /// Its announcement is still due: the peer's id and the tag are not known.
    early: bool,
}

/// A message that was announced, and is accepted: a transfer is to begin.
#[derive(Debug)]
pub(super) struct Announced {
    pub(super) their: u32,
    pub(super) tag: u64,
    pub(super) len: u64,
    pub(super) offer: Option<Offer>,
    /// Its number, if it arrives unasked.
    pub(super) number: Option<u32>,
}

/// Unexpected messages, from their head to the event that takes them away.
///
/// Owns their ids, which the matcher and the engine know them by, and the peer's credit for their bytes: one that
/// exceeds it breaks the protocol. The engine holds the bytes. An id is free again when the engine has taken the event
/// that names it for the last time ([`UnexpectedMessages::taken`]). [`Peer`](super::Peer) brings messages for which the
/// matcher has no receive, and the receives that match them later.
#[derive(Debug)]
pub(super) struct UnexpectedMessages {
    table: Slab<Unexpected>,
    bytes: u64,
    credit: u64,
    /// The receive whose message is being copied out, and the peer's id of it.
    copied_out: Option<(OpId, u32)>,
    /// Messages that arrive unasked, by the number of their announcement; and how many were announced.
    unasked: HashMap<u32, u32>,
    announced: u32,
}

impl UnexpectedMessages {
    /// `credit`: bytes that the peer may have sent before their receives.
    pub(super) fn new(credit: u64) -> UnexpectedMessages {
        UnexpectedMessages {
            table: Slab::new(),
            bytes: 0,
            credit,
            copied_out: None,
            unasked: HashMap::new(),
            announced: 0,
        }
    }

    /// A message of `len` bytes comes in with its first frame.
    pub(super) fn keep_eager(
        &mut self,
        peer: EndpointId,
        their: u32,
        tag: u64,
        len: u32,
        matcher: &mut Matcher,
        cx: &mut Context<'_>,
    ) -> Result<u32, String> {
        self.take_credit(u64::from(len))?;
        let announced = Announced { their, tag, len: u64::from(len), offer: None, number: None };
        self.keep(peer, announced, true, matcher, cx)
    }

    /// A message comes in (`eager`), or was announced.
    pub(super) fn keep(
        &mut self,
        peer: EndpointId,
        of: Announced,
        eager: bool,
        matcher: &mut Matcher,
        cx: &mut Context<'_>,
    ) -> Result<u32, String> {
        let Announced { their, tag, len, offer, number } = of;
        let arrival = self.table.vacant_key() as u32;
        cx.peer_ops.claim(their, PeerOp::Arrival(arrival))?;
        matcher.keep(peer, arrival, tag, len);
        self.table.insert(Unexpected {
            their,
            tag,
            len,
            eager,
            complete: false,
            offer,
            accepted: None,
            ended: None,
            over: false,
            number,
            early: false,
        });
        if let Some(number) = number {
            self.unasked.insert(number, arrival);
        }
        Ok(arrival)
    }

    fn get_mut(&mut self, arrival: u32) -> Option<&mut Unexpected> {
        self.table.get_mut(arrival as usize).filter(|k| !k.over)
    }

    /// Takes credit for a message of `len` bytes that arrives before its receive.
    fn take_credit(&mut self, len: u64) -> Result<(), String> {
        let total = self.bytes + len;
        if total > self.credit {
            return Err(format!("{total} bytes of unexpected messages; the credit is {}", self.credit));
        }
        self.bytes = total;
        Ok(())
    }

    /// All bytes of the message with that number arrive unasked on `lane`, and no receive has matched it: the arrival
    /// that they belong to. `None`: it is over, or there already. `most`: messages that the peer may have in flight.
    pub(super) fn place_unasked(
        &mut self,
        number: u32,
        len: u32,
        (lane, most): (LaneId, u32),
        cx: &mut Context<'_>,
    ) -> Result<Option<u32>, String> {
        if let Some(arrival) = self.unasked.get(&number).copied() {
            let message = &self.table[arrival as usize];
            if message.len != u64::from(len) {
                return Err(format!("{len} bytes of a message of {}", message.len));
            }
            if message.complete {
                return Ok(None);
            }
            if !message.eager {
                self.take_credit(u64::from(len))?;
                self.table[arrival as usize].eager = true;
            }
            // This copy counts from now on: the other lane may have died without our knowing.
            cx.lanes.void_kept_placements(arrival, Some(lane));
            return Ok(Some(arrival));
        }
        let ahead = number.wrapping_sub(self.announced);
        if (ahead as i32) < 0 {
            return Ok(None);
        }
        if ahead >= most {
            return Err(format!("a message that is {ahead} ahead of those announced; the credit is {most}"));
        }
        self.take_credit(u64::from(len))?;
        let message = Unexpected {
            their: 0,
            tag: 0,
            len: u64::from(len),
            eager: true,
            complete: false,
            offer: None,
            accepted: None,
            ended: None,
            over: false,
            number: Some(number),
            early: true,
        };
        let arrival = self.table.insert(message) as u32;
        self.unasked.insert(number, arrival);
        Ok(Some(arrival))
    }

    /// A message is announced that arrives unasked. Where its bytes arrived first, or begin to: the arrival that they belong
    /// to. `Err`: the peer broke the protocol.
    pub(super) fn announce(&mut self, number: u32, len: u64) -> Result<Option<u32>, String> {
        if number != self.announced {
            return Err(format!("message {number} announced after {} others", self.announced));
        }
        self.announced = number.wrapping_add(1);
        let arrival = self.unasked.get(&number).copied();
        match arrival.map(|arrival| self.table[arrival as usize].len) {
            Some(known) if known != len => Err(format!("a message of {len} bytes, of which {known} arrived")),
            _ => Ok(arrival),
        }
    }

    /// The message whose bytes arrived before its announcement is that one. `by`: the receive that matches it.
    pub(super) fn name(
        &mut self,
        peer: EndpointId,
        arrival: u32,
        (their, tag): (u32, u64),
        by: Option<(OpId, u64)>,
        matcher: &mut Matcher,
        cx: &mut Context<'_>,
    ) -> Result<(), String> {
        cx.peer_ops.claim(their, PeerOp::Arrival(arrival))?;
        let Some(message) = self.get_mut(arrival) else { return Ok(()) };
        (message.their, message.tag, message.early, message.accepted) = (their, tag, false, by);
        match (by, message.complete, message.len) {
            (Some((op, capacity)), true, _) => self.deliver(arrival, op, capacity, cx),
            (Some(_), false, _) => {}
            (None, _, len) => matcher.keep(peer, arrival, tag, len),
        }
        Ok(())
    }

    /// Discards a message whose bytes arrived before its announcement.
    pub(super) fn drop_early(&mut self, arrival: Option<u32>, cx: &mut Context<'_>) {
        let Some(arrival) = arrival else { return };
        self.remove(arrival, cx);
        cx.events.push(Event::DropArrival { arrival });
    }

    /// Discards all such messages: their announcements would be ignored from now on.
    pub(super) fn drop_all_early(&mut self, cx: &mut Context<'_>) {
        let early = self.table.iter().filter(|(_, message)| message.early && !message.over).map(|(at, _)| at as u32);
        for arrival in early.collect::<Vec<_>>() {
            self.drop_early(Some(arrival), cx);
        }
    }

    /// A message is there in whole.
    pub(super) fn complete(&mut self, arrival: u32, cx: &mut Context<'_>) {
        let Some(message) = self.get_mut(arrival) else { return };
        message.complete = true;
        if let Some(why) = message.ended.take() {
            self.discard(arrival, &why, cx);
        } else if let Some((op, capacity)) = message.accepted {
            self.deliver(arrival, op, capacity, cx);
        }
    }

    /// A message is out of our hands. If there are bytes, the event that goes with it frees the id.
    fn remove(&mut self, arrival: u32, cx: &mut Context<'_>) {
        let Some(message) = self.get_mut(arrival) else { return };
        let (their, number) = (message.their, message.number);
        if let Some(number) = number {
            self.unasked.remove(&number);
            cx.lanes.void_kept_placements(arrival, None);
        }
        let Some(message) = self.get_mut(arrival) else { return };
        if message.eager {
            message.over = true;
            let len = message.len;
            self.bytes -= len;
        } else {
            self.table.remove(arrival as usize);
        }
        cx.peer_ops.free(their);
    }

    fn discard(&mut self, arrival: u32, why: &Failure, cx: &mut Context<'_>) {
        let Some(&Unexpected { their, eager, .. }) = self.table.get(arrival as usize) else { return };
        self.remove(arrival, cx);
        if eager {
            cx.events.push(Event::DropArrival { arrival });
        }
        cx.control.push_failed(their, why, cx.events);
    }

    /// The sender has cancelled a message.
    pub(super) fn cancelled(
        &mut self,
        peer: EndpointId,
        arrival: u32,
        why: &Failure,
        matcher: &mut Matcher,
        cx: &mut Context<'_>,
    ) {
        matcher.forget(peer, arrival);
        self.discard(arrival, why, cx);
    }

    fn deliver(&mut self, arrival: u32, op: OpId, capacity: u64, cx: &mut Context<'_>) {
        let Some(&Unexpected { their, tag, len, .. }) = self.table.get(arrival as usize) else { return };
        self.remove(arrival, cx);
        if len > capacity {
            cx.events.push(Event::DropArrival { arrival });
            cx.truncated(op, tag, their, len, capacity);
            return;
        }
        cx.events.push(Event::Deliver { arrival, op, len: len as u32 });
        cx.events.push(Short { op, tag, bytes: len, wire_ns: 0, lane: None }.into());
        cx.control.owe_done(their, cx.events);
    }

    /// A receive has matched a message. Returns what was only announced: it comes now.
    pub(super) fn accept(&mut self, arrival: u32, op: OpId, capacity: u64, cx: &mut Context<'_>) -> Option<Announced> {
        let failed = cx.control.failed().or_else(|| cx.control.bye_sent().then_some(Failure::Closed));
        let Some(message) = self.get_mut(arrival) else {
            cx.events.fail(op, failed.unwrap_or(Failure::Cancelled), 0, 0);
            return None;
        };
        if message.eager {
            if message.complete {
                self.deliver(arrival, op, capacity, cx);
            } else {
                message.accepted = Some((op, capacity));
            }
            return None;
        }
        let Unexpected { their, tag, len, offer, number, .. } = *message;
        if let Some(why) = failed {
            self.remove(arrival, cx);
            cx.events.fail(op, why, 0, tag);
        } else if len > capacity {
            self.remove(arrival, cx);
            cx.truncated(op, tag, their, len, capacity);
        } else {
            self.table.remove(arrival as usize);
            if let Some(number) = number {
                self.unasked.remove(&number);
            }
            return Some(Announced { their, tag, len, offer, number });
        }
        None
    }

    /// Ends a receive that has matched a message which is still coming in; false: there is none.
    pub(super) fn end_receive(&mut self, op: OpId, why: &Failure, cx: &mut Context<'_>) -> bool {
        let of = |k: &Unexpected| !k.over && matches!(k.accepted, Some((o, _)) if o == op);
        let Some((_, message)) = self.table.iter_mut().find(|(_, k)| of(k)) else { return false };
        message.accepted = None;
        message.ended = Some(why.clone());
        cx.events.fail(op, why.clone(), 0, message.tag);
        true
    }

    /// The engine takes the event that names `arrival` for the last time; `by`: the receive that it is copied out for.
    pub(super) fn taken(&mut self, arrival: u32, by: Option<OpId>) {
        let message = self.table.try_remove(arrival as usize);
        if let Some(op) = by {
            self.copied_out = message.map(|message| (op, message.their));
        }
    }

    /// The peer's id of the message that the engine was last told to copy out, if it is for `op`.
    pub(super) fn copied_for(&self, op: OpId) -> Option<u32> {
        self.copied_out.filter(|(of, _)| *of == op).map(|(_, their)| their)
    }

    /// Forgets messages that are not there in whole: they will never be.
    /// Drops the messages that have arrived whole and that nothing has received.
    pub(super) fn forget_all(&mut self, peer: EndpointId, matcher: &mut Matcher, cx: &mut Context<'_>) {
        let is_kept = |message: &Unexpected| {
            message.eager && message.complete && !message.over && !message.early && message.accepted.is_none()
        };
        let kept: Vec<u32> = self.table.iter().filter(|(_, of)| is_kept(of)).map(|(at, _)| at as u32).collect();
        for arrival in kept {
            matcher.forget(peer, arrival);
            self.remove(arrival, cx);
            cx.events.push(Event::DropArrival { arrival });
        }
    }

    pub(super) fn fail_all(&mut self, peer: EndpointId, why: &Failure, matcher: &mut Matcher, cx: &mut Context<'_>) {
        let all: Vec<u32> = self.table.iter().map(|(i, _)| i as u32).collect();
        for arrival in all {
            let message = &self.table[arrival as usize];
            if message.over || (message.eager && message.complete && !message.early) {
                continue;
            }
            let (accepted, tag, eager) = (message.accepted, message.tag, message.eager);
            matcher.forget(peer, arrival);
            self.remove(arrival, cx);
            if eager {
                cx.events.push(Event::DropArrival { arrival });
            }
            if let Some((op, _)) = accepted {
                cx.events.fail(op, why.clone(), 0, tag);
            }
        }
    }
}
