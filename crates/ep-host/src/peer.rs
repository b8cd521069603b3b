//! Another rank: how to write to it, and what it has written here.
#![allow(unsafe_code)]

use std::time::Duration;

use crossrail::{Endpoint, Mapped, Memory, Region, RegionKey, Request};
use crossrail_transport::Word;
use crossrail_types::Result;

use crate::heap::{Areas, ControlWords, HEADER, Header, Heap, MESSAGES};

/// The heap of this rank.
#[derive(Debug)]
pub(crate) struct OwnHeap {
    pub(crate) heap: Heap,
    pub(crate) areas: Areas,
    /// This rank.
    pub(crate) me: usize,
}

/// What one rank sends another in an operation. The receiver's heap has a control word for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// Dispatch: header and metadata.
    Meta,
    /// Dispatch: rows.
    Rows,
    /// Dispatch, rank layout: the place granted to the receiver's rows.
    Grant,
    /// Combine: the weights to apply to the sender's rows.
    Weights,
    /// Combine: header and rows.
    Back,
    /// The sender has reached a barrier.
    Sync,
    /// Number of the last dispatch whose slots the sender has released.
    DispatchReleased,
    /// Number of the last combine whose slots the sender has released.
    CombineReleased,
}

const _: () = assert!(Message::CombineReleased as usize + 1 == MESSAGES);

impl Message {
    /// What a fault says was outstanding.
    pub(crate) fn description(self) -> &'static str {
        match self {
            Message::Meta => "its metadata",
            Message::Rows => "its rows",
            Message::Grant => "its place for our rows",
            Message::Weights => "its weights",
            Message::Back => "its returned rows",
            Message::Sync => "it at a barrier",
            Message::DispatchReleased => "it to release the dispatch before the last",
            Message::CombineReleased => "it to release the combine before the last",
        }
    }

    /// Its control word in the receiver's heap.
    pub(crate) fn word(self, words: &ControlWords, parity: usize) -> &Word {
        &words.0[self as usize][parity]
    }

    /// The staged slot that it releases: dispatch 0 and 1, combine 0 and 1.
    fn staged(self, parity: usize) -> Option<usize> {
        match self {
            Message::DispatchReleased => Some(parity),
            Message::CombineReleased => Some(2 + parity),
            _ => None,
        }
    }

    /// The word's place within [`ControlWords`].
    fn offset(self, parity: usize) -> usize {
        size_of::<Word>() * (2 * self as usize + parity)
    }
}

/// A message that an operation waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Expected {
    /// The sender.
    pub(crate) rank: usize,
    pub(crate) message: Message,
    pub(crate) parity: usize,
    /// The operation's sequence number, or the value that the sender's counter must reach.
    pub(crate) number: u64,
}

/// Another rank as this one sees it: one end of a connection between the two; or this rank itself.
pub(crate) struct Peer {
    pub(crate) rank: usize,
    pub(crate) masked: bool,
    /// Its loss was recorded, and nothing was received from it since.
    pub(crate) lost: bool,
    /// Receives its next notice, where lost ranks are masked.
    pub(crate) inbox: Option<Request>,
    access: Access,
    /// Sequence numbers of the dispatch and the combine before the two connected: their slots count as released.
    pub(crate) floor: [u64; 2],
}

enum Access {
    /// This rank itself.
    Myself,
    /// Both map the other's heap.
    Mapped { heap: Heap, _mapped: Mapped, endpoint: Endpoint },
    /// Writes through the engine.
    Network(Box<Network>),
}

/// A rank of another node. Its messages are one-sided writes, whose immediate values are counted by kind and parity.
pub(crate) struct Network {
    endpoint: Endpoint,
    /// Key of its heap.
    key: RegionKey,
    /// Our heap, where its writes are counted.
    region: Region,
    /// Number of the connection in our writes, and in its writes: late writes of an earlier connection do not count.
    generation: [u32; 2],
    /// Local copies of the slots, from which writes are made.
    staging: Memory,
    /// Writes in flight, by slot: dispatch 0 and 1, combine 0 and 1.
    requests: [Vec<Request>; 4],
    /// Writes posted, by kind and parity.
    posted: [u64; KINDS],
    /// Writes that had arrived when their slot was released, by kind and parity.
    seen: [u64; KINDS],
}

/// Kinds of writes, times two for the parity.
const KINDS: usize = 10;
const META: usize = 0;
const ROWS: usize = 2;
const WEIGHTS: usize = 4;
const BACK: usize = 6;
const BACK_ROWS: usize = 8;
/// Low half of an operation's number, as a tag in words. It wraps, and is never 0, which marks an unwritten word.
pub(crate) fn tag(number: u64) -> u64 {
    match number & 0xffff_ffff {
        0 => 1 << 31,
        low => low,
    }
}

/// The stamp of a header: the tag of the operation, and the number of writes of that kind since the connection, this
/// one included. The reader accepts the header once it has counted that many writes.
fn stamp(operation: u64, nth: u64) -> u64 {
    tag(operation) << 32 | nth & 0xffff_ffff
}

/// The immediate of writes of words.
const WORD: u32 = 15;

/// What a [`Network`] is made from.
pub(crate) struct NetworkParts {
    pub(crate) endpoint: Endpoint,
    pub(crate) key: RegionKey,
    pub(crate) region: Region,
    pub(crate) writes_as: u32,
    pub(crate) reads_as: u32,
    pub(crate) staging: Memory,
}

fn immediate(generation: u32, kind: usize) -> u32 {
    generation << 4 | kind as u32
}

/// A contiguous part of a slot to be written to a rank of another node: offsets in staging and in its heap, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) len: usize,
}

impl Peer {
    pub(crate) fn this_rank(rank: usize) -> Peer {
        Peer { rank, masked: false, lost: false, inbox: None, access: Access::Myself, floor: [0; 2] }
    }

    pub(crate) fn mapped(rank: usize, heap: Heap, mapped: Mapped, endpoint: Endpoint) -> Peer {
        let access = Access::Mapped { heap, _mapped: mapped, endpoint };
        Peer { rank, masked: false, lost: false, inbox: None, access, floor: [0; 2] }
    }

    pub(crate) fn network(rank: usize, parts: NetworkParts) -> Peer {
        let NetworkParts { endpoint, key, region, writes_as, reads_as, staging } = parts;
        let network = Network {
            endpoint,
            key,
            region,
            generation: [writes_as, reads_as],
            staging,
            requests: Default::default(),
            posted: [0; KINDS],
            seen: [0; KINDS],
        };
        let access = Access::Network(Box::new(network));
        Peer { rank, masked: false, lost: false, inbox: None, access, floor: [0; 2] }
    }

    pub(crate) fn is_network(&self) -> bool {
        matches!(self.access, Access::Network(_))
    }

    pub(crate) fn endpoint(&self) -> Option<&Endpoint> {
        match &self.access {
            Access::Myself => None,
            Access::Mapped { endpoint, .. } => Some(endpoint),
            Access::Network(network) => Some(&network.endpoint),
        }
    }

    /// Whether its process is alive, as far as the connection knows.
    pub(crate) fn is_alive(&self) -> bool {
        self.endpoint().is_none_or(Endpoint::is_alive)
    }

    /// Why it is not alive.
    pub(crate) fn end(&self) -> String {
        self.endpoint().and_then(Endpoint::end).unwrap_or_else(|| "its process is gone".to_owned())
    }

    /// Where this rank writes its dispatch slot: in the peer's heap, or in staging.
    pub(crate) fn slot(&self, own: &OwnHeap, parity: usize) -> *mut u8 {
        let at = own.areas.slot(parity, own.me);
        match &self.access {
            Access::Myself => own.heap.at(at),
            Access::Mapped { heap, .. } => heap.at(at),
            Access::Network(network) => network.staging.ptr().wrapping_add(staged_slot(&own.areas, parity)),
        }
    }

    /// The same for its combine slot.
    pub(crate) fn back(&self, own: &OwnHeap, parity: usize) -> *mut u8 {
        let at = own.areas.back(parity, own.me);
        match &self.access {
            Access::Myself => own.heap.at(at),
            Access::Mapped { heap, .. } => heap.at(at),
            Access::Network(network) => network.staging.ptr().wrapping_add(staged_back(&own.areas, parity)),
        }
    }

    /// The peer's heap, if this process maps it.
    pub(crate) fn heap(&self, own: &OwnHeap) -> Option<Heap> {
        match &self.access {
            Access::Myself => Some(own.heap),
            Access::Mapped { heap, .. } => Some(*heap),
            Access::Network(_) => None,
        }
    }

    /// Waits, for at most `limit`, for a write from the staged slot whose release `expected` is. `false` if there is none.
    pub(crate) fn await_write(&self, own: &OwnHeap, expected: Expected, limit: Duration) -> bool {
        let Access::Network(network) = &self.access else { return false };
        let Some(request) = expected.message.staged(expected.parity).and_then(|slot| network.requests[slot].last())
        else {
            return false;
        };
        if !self.has_released(own, expected) {
            return false;
        }
        // A timeout is no error: the caller polls again. A failed write means a dead peer, which is detected elsewhere.
        let _ = request.wait(Some(limit));
        true
    }

    /// Whether the peer has released the slot, as far as its word says.
    fn has_released(&self, own: &OwnHeap, expected: Expected) -> bool {
        let floor = self.floor[usize::from(expected.message == Message::CombineReleased)];
        let word = expected.message.word(own.heap.words(&own.areas, self.rank), expected.parity).observe();
        word.max(floor) >= expected.number
    }

    /// Writes a message's control word in the peer's heap.
    pub(crate) fn set_word(&mut self, own: &OwnHeap, parity: usize, message: Message, value: u64) {
        match &mut self.access {
            Access::Myself => message.word(own.heap.words(&own.areas, own.me), parity).announce(value),
            Access::Mapped { heap, .. } => {
                message.word(heap.words(&own.areas, own.me), parity).announce(value);
                heap.doorbell().ring();
            }
            Access::Network(network) => {
                let at = (own.areas.words(own.me) + message.offset(parity)) as u64;
                let imm = immediate(network.generation[0], WORD as usize);
                let bytes = value.to_le_bytes().to_vec();
                // As above: a dead peer is detected elsewhere.
                let _ = network.endpoint.write(bytes, &network.key, at, Some(imm));
            }
        }
    }

    /// Counts row writes before they are posted. Returns their number since the connection, for the header: the receiver
    /// has all rows once it has counted as many. 0 where rows go straight into the peer's heap.
    pub(crate) fn announce(&mut self, combine: bool, parity: usize, writes: usize) -> u64 {
        match &mut self.access {
            Access::Network(network) => {
                let kind = if combine { BACK_ROWS } else { ROWS } + parity;
                network.posted[kind] += writes as u64;
                network.posted[kind]
            }
            _ => 0,
        }
    }

    /// Publishes the first `len` bytes of the dispatch slot: header and metadata.
    pub(crate) fn publish_meta(&mut self, own: &OwnHeap, parity: usize, operation: u64, len: usize) -> Result<()> {
        match &mut self.access {
            Access::Network(network) => {
                let span = Span { from: staged_slot(&own.areas, parity), to: own.areas.slot(parity, own.me), len };
                network.publish(parity, META + parity, operation, span)
            }
            _ => {
                self.set_word(own, parity, Message::Meta, operation);
                Ok(())
            }
        }
    }

    /// Publishes the rows of a dispatch.
    pub(crate) fn publish_rows(&mut self, own: &OwnHeap, parity: usize, operation: u64, spans: &[Span]) -> Result<()> {
        match &mut self.access {
            Access::Network(network) => spans.iter().try_for_each(|span| network.write(parity, ROWS + parity, *span)),
            _ => {
                self.set_word(own, parity, Message::Rows, operation);
                Ok(())
            }
        }
    }

    /// Publishes the weights of a combine: the second header of the slot and `len - HEADER` bytes after it.
    pub(crate) fn publish_weights(&mut self, own: &OwnHeap, parity: usize, operation: u64, len: usize) -> Result<()> {
        match &mut self.access {
            Access::Network(network) => {
                let at = own.areas.back_weights();
                let span =
                    Span { from: staged_back(&own.areas, parity) + at, to: own.areas.back(parity, own.me) + at, len };
                network.publish(2 + parity, WEIGHTS + parity, operation, span)
            }
            _ => {
                self.set_word(own, parity, Message::Weights, operation);
                Ok(())
            }
        }
    }

    /// Publishes `len` bytes of rows and the header of a combine.
    pub(crate) fn publish_back(&mut self, own: &OwnHeap, parity: usize, operation: u64, len: usize) -> Result<()> {
        match &mut self.access {
            Access::Network(network) => {
                let (from, to) = (staged_back(&own.areas, parity), own.areas.back(parity, own.me));
                if len > 0 {
                    let rows = own.areas.back_rows();
                    network.write(2 + parity, BACK_ROWS + parity, Span { from: from + rows, to: to + rows, len })?;
                }
                network.publish(2 + parity, BACK + parity, operation, Span { from, to, len: HEADER })
            }
            _ => {
                self.set_word(own, parity, Message::Back, operation);
                Ok(())
            }
        }
    }

    /// Whether the expected message has arrived. A slot is released to this rank once what it wrote there before has left
    /// staging as well: a peer that gave this rank up releases a slot whose writes may still be in flight.
    pub(crate) fn has_arrived(&mut self, own: &OwnHeap, expected: Expected) -> bool {
        let Expected { message, parity, number, .. } = expected;
        let areas = &own.areas;
        let word = || message.word(own.heap.words(areas, self.rank), parity).observe();
        match message {
            Message::Grant => return word() >> 32 == tag(number),
            Message::DispatchReleased | Message::CombineReleased => {
                return self.has_released(own, expected) && self.staging_is_free(message, parity);
            }
            Message::Sync => return word() >= number,
            Message::Meta | Message::Rows | Message::Weights | Message::Back => {}
        }
        // Exactly this operation's: a peer that is ahead has called something else in its place.
        let Access::Network(network) = &self.access else { return word() == number };
        // SAFETY: a header inside our heap. Its write is complete (`is_whole`), and the peer writes this slot again only
        // after we have released it.
        let row_writes = |at: usize| unsafe { own.heap.at(at).cast::<Header>().read_volatile() }.writes;
        match message {
            Message::Meta => network.is_whole(own, META + parity, areas.slot(parity, self.rank), number),
            Message::Rows => network.count(ROWS + parity) >= row_writes(areas.slot(parity, self.rank)),
            Message::Weights => {
                let at = areas.back(parity, self.rank) + areas.back_weights();
                network.is_whole(own, WEIGHTS + parity, at, number)
            }
            _ => {
                let at = areas.back(parity, self.rank);
                network.is_whole(own, BACK + parity, at, number) && network.count(BACK_ROWS + parity) >= row_writes(at)
            }
        }
    }

    /// Whether nothing is being read from the staged slot whose release the message is.
    fn staging_is_free(&mut self, message: Message, parity: usize) -> bool {
        let (Access::Network(network), Some(slot)) = (&mut self.access, message.staged(parity)) else { return true };
        // A failed write means a dead peer, which is detected when its answer is overdue.
        network.requests[slot].retain(|request| !request.is_done());
        network.requests[slot].is_empty()
    }

    /// The operation that the peer called in place of the one that sends the expected message, if it did.
    pub(crate) fn other_operation(&self, own: &OwnHeap, expected: Expected) -> Option<&'static str> {
        let Expected { message, parity, number, .. } = expected;
        let last = |message: Message, parity: usize| self.last_operation(own, message, parity);
        let at = |message: Message| (0..2).any(|parity| last(message, parity) == number);
        match message {
            Message::Meta if at(Message::Back) || at(Message::Weights) => Some("combine"),
            Message::Meta if at(Message::Sync) => Some("sync"),
            Message::Back | Message::Weights if at(Message::Meta) => Some("dispatch"),
            Message::Back | Message::Weights if at(Message::Sync) => Some("sync"),
            Message::Sync if at(Message::Meta) => Some("dispatch"),
            Message::Sync if at(Message::Back) || at(Message::Weights) => Some("combine"),
            // It writes this slot again only after this rank has released it.
            Message::Meta | Message::Back | Message::Weights if last(message, parity) > number => {
                Some("a later operation")
            }
            _ => None,
        }
    }

    /// Number of the last operation of this parity with which the peer sent the message.
    fn last_operation(&self, own: &OwnHeap, message: Message, parity: usize) -> u64 {
        let areas = &own.areas;
        let word = || message.word(own.heap.words(areas, self.rank), parity).observe();
        let Access::Network(network) = &self.access else { return word() };
        let (kind, at) = match message {
            Message::Meta => (META, areas.slot(parity, self.rank)),
            Message::Back => (BACK, areas.back(parity, self.rank)),
            Message::Weights => (WEIGHTS, areas.back(parity, self.rank) + areas.back_weights()),
            _ => return word(),
        };
        if network.count(kind + parity) == 0 {
            return 0;
        }
        // SAFETY: a header inside our heap, of which any bytes are valid; one that is being written is read again.
        unsafe { own.heap.at(at).cast::<Header>().read_volatile() }.operation
    }

    /// Whether the peer has written its rows of dispatch operation `number` of this parity.
    pub(crate) fn rows_were_written(&self, own: &OwnHeap, parity: usize, number: u64) -> bool {
        match &self.access {
            Access::Network(network) => {
                let at = own.areas.slot(parity, self.rank);
                // SAFETY: as in `last_operation`.
                let header = unsafe { own.heap.at(at).cast::<Header>().read_volatile() };
                header.operation >= number && network.count(ROWS + parity) >= header.writes
            }
            _ => Message::Rows.word(own.heap.words(&own.areas, self.rank), parity).observe() >= number,
        }
    }

    /// Closes the connection.
    pub(crate) fn close(self, limit: Duration) {
        if let Some(endpoint) = self.endpoint() {
            // An error means that the peer has closed it already.
            let _ = endpoint.close(Some(limit));
        }
    }
}

impl Network {
    fn write(&mut self, slot: usize, kind: usize, span: Span) -> Result<()> {
        let local = self.staging.slice(span.from..span.from + span.len)?;
        let imm = immediate(self.generation[0], kind);
        let request = self.endpoint.write(local, &self.key, span.to as u64, Some(imm))?;
        self.requests[slot].push(request);
        Ok(())
    }

    fn count(&self, kind: usize) -> u64 {
        self.region.imm_count(immediate(self.generation[1], kind))
    }

    /// Writes a span that begins with a header, which says how many writes of that kind there are with this one.
    fn publish(&mut self, slot: usize, kind: usize, operation: u64, span: Span) -> Result<()> {
        let nth = self.posted[kind] + 1;
        let header = self.staging.ptr().wrapping_add(span.from).cast::<Header>();
        // SAFETY: a header inside our staging, which no write in flight includes: the slot was free, and an operation
        // writes each header once.
        unsafe { (&raw mut (*header).stamp).write_volatile(stamp(operation, nth)) };
        self.write(slot, kind, span)?;
        self.posted[kind] = nth;
        Ok(())
    }

    /// Whether a write of that kind, with a header of operation `number` at `at`, is complete. A write that was counted
    /// need not be the one whose header stands there: after an operation that gave the peer up, its write arrives late, and
    /// the next one for the same slot may already be on its way.
    fn is_whole(&self, own: &OwnHeap, kind: usize, at: usize, number: u64) -> bool {
        let count = self.count(kind);
        if count <= self.seen[kind] {
            return false;
        }
        let header = own.heap.at(at).cast::<Header>();
        // SAFETY: a header inside our heap. The stamp is one aligned word: that of this write, or of the one before.
        let found = unsafe { (&raw const (*header).stamp).read_volatile() };
        // The difference of 32 bits wraps as the two counts do.
        found >> 32 == tag(number) && (count as u32).wrapping_sub(found as u32) < 1 << 31
    }

    fn take(&mut self, kind: usize) {
        self.seen[kind] = self.count(kind);
    }
}

impl Peer {
    /// Releases the dispatch slots of this parity: the peer may write them again.
    pub(crate) fn release_dispatch(&mut self, own: &OwnHeap, parity: usize, released: u64) {
        if let Access::Network(network) = &mut self.access {
            network.take(META + parity);
        }
        self.set_word(own, parity, Message::DispatchReleased, released);
    }

    /// Releases the combine slots of this parity.
    pub(crate) fn release_combine(&mut self, own: &OwnHeap, parity: usize, released: u64) {
        if let Access::Network(network) = &mut self.access {
            network.take(WEIGHTS + parity);
            network.take(BACK + parity);
        }
        self.set_word(own, parity, Message::CombineReleased, released);
    }
}

/// Staging: both dispatch slots, then both combine slots.
pub(crate) fn staged_slot(areas: &Areas, parity: usize) -> usize {
    parity * areas.slot_bytes()
}

fn staged_back(areas: &Areas, parity: usize) -> usize {
    2 * areas.slot_bytes() + parity * areas.back_bytes()
}

#[cfg(test)]
mod tests;
