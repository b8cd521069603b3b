//! One rank as this one sees it: how to write to it, and what it has written here.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossrail::{Endpoint, Mapped, Memory, Region, RegionKey, Request};
use crossrail_types::Result;

use crate::heap::{Areas, HEADER, Header, Heap, MESSAGES, Words};
use crate::wait::ring;

/// This rank's own heap.
#[derive(Debug)]
pub(crate) struct Here {
    pub(crate) heap: Heap,
    pub(crate) areas: Areas,
    /// This rank.
    pub(crate) me: usize,
}

/// What one rank tells another in an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// Dispatch: header and metadata.
    Meta,
    /// Dispatch: rows.
    Rows,
    /// Dispatch, rank layout: where the rows go.
    Grant,
    /// Combine: the weights to sum with.
    Weights,
    /// Combine: header and rows.
    Back,
    /// It has come to a barrier.
    Sync,
    /// So many of its dispatch slots are free again.
    DispatchTaken,
    /// So many of its combine slots are free again.
    CombineTaken,
}

const _: () = assert!(Message::CombineTaken as usize + 1 == MESSAGES);

impl Message {
    /// As an error names what was waited for.
    pub(crate) fn what(self) -> &'static str {
        match self {
            Message::Meta => "its metadata",
            Message::Rows => "its rows",
            Message::Grant => "its place for our rows",
            Message::Weights => "its weights",
            Message::Back => "its rows back",
            Message::Sync => "it at a barrier",
            Message::DispatchTaken => "it to take the dispatch before the last",
            Message::CombineTaken => "it to take the combine before the last",
        }
    }

    /// Its word in the receiver's heap.
    pub(crate) fn word(self, words: &Words, parity: usize) -> &AtomicU64 {
        &words.0[self as usize][parity]
    }

    /// The word's place within [`Words`].
    fn offset(self, parity: usize) -> usize {
        size_of::<AtomicU64>() * (2 * self as usize + parity)
    }
}

/// One end of a connection between two ranks.
pub(crate) struct Peer {
    pub(crate) rank: usize,
    pub(crate) masked: bool,
    way: Way,
    /// Dispatches and combines that count as taken since the two connected.
    pub(crate) floor: [u64; 2],
}

enum Way {
    /// This rank itself.
    Myself,
    /// It maps our heap, and we its.
    Mapped { heap: Heap, _mapped: Mapped, endpoint: Endpoint },
    /// Through the engine.
    Network(Box<Network>),
}

/// A rank of another node. Its messages come as writes that are counted per kind and parity.
pub(crate) struct Network {
    endpoint: Endpoint,
    /// Its heap.
    key: RegionKey,
    /// Our heap, in which its writes are counted.
    region: Region,
    /// Numbers the connection in what we write, and in what it writes.
    generation: [u32; 2],
    /// Slots like its own, that writes are made from.
    staging: Memory,
    /// Writes under way, by slot: dispatch 0 and 1, combine 0 and 1.
    requests: [Vec<Request>; 4],
    /// Row writes begun, by kind and parity.
    begun: [u64; KINDS],
    /// Headers that were looked at, by kind and parity.
    seen: [u64; KINDS],
}

/// Kinds of writes, times two for the parity.
const KINDS: usize = 10;
const META: usize = 0;
const ROWS: usize = 2;
const WEIGHTS: usize = 4;
const BACK: usize = 6;
const BACK_ROWS: usize = 8;
/// The immediate of writes of words.
const WORD: u32 = 15;

/// What a network peer is made of.
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

/// A part of a slot that is to be written to a rank of another node: from where in staging to where in its heap.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) len: usize,
}

impl Peer {
    pub(crate) fn myself(rank: usize) -> Peer {
        Peer { rank, masked: false, way: Way::Myself, floor: [0; 2] }
    }

    pub(crate) fn mapped(rank: usize, heap: Heap, mapped: Mapped, endpoint: Endpoint) -> Peer {
        Peer { rank, masked: false, way: Way::Mapped { heap, _mapped: mapped, endpoint }, floor: [0; 2] }
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
            begun: [0; KINDS],
            seen: [0; KINDS],
        };
        Peer { rank, masked: false, way: Way::Network(Box::new(network)), floor: [0; 2] }
    }

    pub(crate) fn is_network(&self) -> bool {
        matches!(self.way, Way::Network(_))
    }

    pub(crate) fn endpoint(&self) -> Option<&Endpoint> {
        match &self.way {
            Way::Myself => None,
            Way::Mapped { endpoint, .. } => Some(endpoint),
            Way::Network(network) => Some(&network.endpoint),
        }
    }

    /// Whether its process is there, as far as the connection tells.
    pub(crate) fn is_alive(&self) -> bool {
        self.endpoint().is_none_or(Endpoint::is_alive)
    }

    /// Why it is not.
    pub(crate) fn end(&self) -> String {
        self.endpoint().and_then(Endpoint::end).unwrap_or_else(|| "its process is gone".to_owned())
    }

    /// Where this rank writes its dispatch slot of the peer's heap: there, or in staging.
    pub(crate) fn slot(&self, here: &Here, parity: usize) -> *mut u8 {
        let at = here.areas.slot(parity, here.me);
        match &self.way {
            Way::Myself => here.heap.at(at),
            Way::Mapped { heap, .. } => heap.at(at),
            Way::Network(network) => network.staging.ptr().wrapping_add(staged_slot(&here.areas, parity)),
        }
    }

    /// The same for its combine slot.
    pub(crate) fn back(&self, here: &Here, parity: usize) -> *mut u8 {
        let at = here.areas.back(parity, here.me);
        match &self.way {
            Way::Myself => here.heap.at(at),
            Way::Mapped { heap, .. } => heap.at(at),
            Way::Network(network) => network.staging.ptr().wrapping_add(staged_back(&here.areas, parity)),
        }
    }

    /// The peer's heap, if this process maps it.
    pub(crate) fn heap(&self, here: &Here) -> Option<Heap> {
        match &self.way {
            Way::Myself => Some(here.heap),
            Way::Mapped { heap, .. } => Some(*heap),
            Way::Network(_) => None,
        }
    }

    /// Waits until staging may be written again; the peer has taken what was in it.
    pub(crate) fn reclaim(&mut self, combine: bool, parity: usize, deadline: Instant) {
        if let Way::Network(network) = &mut self.way {
            for request in std::mem::take(&mut network.requests[usize::from(combine) * 2 + parity]) {
                // A failed write means a dead peer, which is noticed where its answer is missed.
                let _ = request.wait(Some(deadline.saturating_duration_since(Instant::now())));
            }
        }
    }

    /// Tells the peer a number.
    pub(crate) fn tell(&mut self, here: &Here, parity: usize, message: Message, value: u64) {
        match &mut self.way {
            Way::Myself => message.word(here.heap.words(&here.areas, here.me), parity).store(value, Ordering::Release),
            Way::Mapped { heap, .. } => {
                message.word(heap.words(&here.areas, here.me), parity).store(value, Ordering::Release);
                ring(heap.bell());
            }
            Way::Network(network) => {
                let at = (here.areas.words(here.me) + message.offset(parity)) as u64;
                let imm = immediate(network.generation[0], WORD as usize);
                let bytes = value.to_le_bytes().to_vec();
                // As above: death is noticed elsewhere.
                let _ = network.endpoint.write(bytes, &network.key, at, Some(imm));
            }
        }
    }

    /// How many writes `spans` will be counted as, from the connection on: for the header that announces them.
    pub(crate) fn announce(&mut self, combine: bool, parity: usize, writes: usize) -> u64 {
        match &mut self.way {
            Way::Network(network) => {
                let kind = if combine { BACK_ROWS } else { ROWS } + parity;
                network.begun[kind] += writes as u64;
                network.begun[kind]
            }
            _ => 0,
        }
    }

    /// Publishes the first `len` bytes of the dispatch slot: header and metadata.
    pub(crate) fn publish_meta(&mut self, here: &Here, parity: usize, operation: u64, len: usize) -> Result<()> {
        match &mut self.way {
            Way::Network(network) => {
                let span = Span { from: staged_slot(&here.areas, parity), to: here.areas.slot(parity, here.me), len };
                network.write(parity, META + parity, span)
            }
            _ => {
                self.tell(here, parity, Message::Meta, operation);
                Ok(())
            }
        }
    }

    /// Publishes the rows of a dispatch.
    pub(crate) fn publish_rows(&mut self, here: &Here, parity: usize, operation: u64, spans: &[Span]) -> Result<()> {
        match &mut self.way {
            Way::Network(network) => spans.iter().try_for_each(|span| network.write(parity, ROWS + parity, *span)),
            _ => {
                self.tell(here, parity, Message::Rows, operation);
                Ok(())
            }
        }
    }

    /// Publishes the weights of a combine: the second header of the slot and `len - HEADER` bytes after it.
    pub(crate) fn publish_weights(&mut self, here: &Here, parity: usize, operation: u64, len: usize) -> Result<()> {
        match &mut self.way {
            Way::Network(network) => {
                let at = here.areas.back_weights();
                let span = Span {
                    from: staged_back(&here.areas, parity) + at,
                    to: here.areas.back(parity, here.me) + at,
                    len,
                };
                network.write(2 + parity, WEIGHTS + parity, span)
            }
            _ => {
                self.tell(here, parity, Message::Weights, operation);
                Ok(())
            }
        }
    }

    /// Publishes `len` bytes of rows and the header of a combine.
    pub(crate) fn publish_back(&mut self, here: &Here, parity: usize, operation: u64, len: usize) -> Result<()> {
        match &mut self.way {
            Way::Network(network) => {
                let (from, to) = (staged_back(&here.areas, parity), here.areas.back(parity, here.me));
                if len > 0 {
                    let rows = here.areas.back_rows();
                    network.write(2 + parity, BACK_ROWS + parity, Span { from: from + rows, to: to + rows, len })?;
                }
                network.write(2 + parity, BACK + parity, Span { from, to, len: HEADER })
            }
            _ => {
                self.tell(here, parity, Message::Back, operation);
                Ok(())
            }
        }
    }

    /// Whether the peer's message of that operation (or that number) is here.
    pub(crate) fn has_told(&mut self, here: &Here, parity: usize, message: Message, number: u64) -> bool {
        let word = message.word(here.heap.words(&here.areas, self.rank), parity).load(Ordering::Acquire);
        match message {
            Message::Grant => return word >> 32 == number & 0xffff_ffff,
            Message::DispatchTaken => return word.max(self.floor[0]) >= number,
            Message::CombineTaken => return word.max(self.floor[1]) >= number,
            Message::Sync => return word >= number,
            Message::Meta | Message::Rows | Message::Weights | Message::Back => {}
        }
        let Way::Network(network) = &mut self.way else { return word >= number };
        let header = |at: usize| {
            // SAFETY: a header inside our heap; a write into it is complete when it is counted, and the next one into
            // this slot comes only when we have said that we took this one.
            unsafe { here.heap.at(at).cast::<Header>().read_volatile() }
        };
        match message {
            Message::Meta => {
                network.fresh(META + parity, || header(here.areas.slot(parity, self.rank)).operation, number)
            }
            Message::Rows => network.count(ROWS + parity) >= header(here.areas.slot(parity, self.rank)).writes,
            Message::Weights => {
                let at = here.areas.back(parity, self.rank) + here.areas.back_weights();
                network.fresh(WEIGHTS + parity, || header(at).operation, number)
            }
            _ => {
                let at = here.areas.back(parity, self.rank);
                network.fresh(BACK + parity, || header(at).operation, number)
                    && network.count(BACK_ROWS + parity) >= header(at).writes
            }
        }
    }

    /// Whether the peer is already at a later operation than `number`, of the other kind than `message`: the ranks
    /// disagree about what to call.
    pub(crate) fn is_elsewhere(&self, here: &Here, message: Message, number: u64) -> Option<&'static str> {
        let words = here.heap.words(&here.areas, self.rank);
        let at = |message: Message| (0..2).any(|parity| message.word(words, parity).load(Ordering::Acquire) == number);
        match message {
            Message::Meta if at(Message::Back) || at(Message::Weights) => Some("combine"),
            Message::Meta if at(Message::Sync) => Some("sync"),
            Message::Back | Message::Weights if at(Message::Meta) => Some("dispatch"),
            Message::Back | Message::Weights if at(Message::Sync) => Some("sync"),
            Message::Sync if at(Message::Meta) => Some("dispatch"),
            Message::Sync if at(Message::Back) || at(Message::Weights) => Some("combine"),
            _ => None,
        }
    }

    /// Says goodbye to the peer.
    pub(crate) fn close(self, limit: Duration) {
        if let Some(endpoint) = self.endpoint() {
            // A peer that is gone already needs no goodbye.
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

    /// Whether a write of that kind has come that was not looked at, and is of operation `number`. An older one is of
    /// an operation that did not wait for this peer.
    fn fresh(&mut self, kind: usize, operation: impl Fn() -> u64, number: u64) -> bool {
        let count = self.count(kind);
        if count <= self.seen[kind] {
            return false;
        }
        match operation() {
            found if found == number => true,
            found if found < number => {
                self.seen[kind] = count;
                false
            }
            _ => false,
        }
    }

    fn take(&mut self, kind: usize) {
        self.seen[kind] = self.count(kind);
    }
}

impl Peer {
    /// The dispatch in the slots of this parity was taken: the peer may write them again.
    pub(crate) fn take_dispatch(&mut self, here: &Here, parity: usize, taken: u64) {
        if let Way::Network(network) = &mut self.way {
            network.take(META + parity);
        }
        self.tell(here, parity, Message::DispatchTaken, taken);
    }

    /// The combine in the slots of this parity was taken.
    pub(crate) fn take_combine(&mut self, here: &Here, parity: usize, taken: u64) {
        if let Way::Network(network) = &mut self.way {
            network.take(WEIGHTS + parity);
            network.take(BACK + parity);
        }
        self.tell(here, parity, Message::CombineTaken, taken);
    }
}

/// Staging: both dispatch slots, then both combine slots.
pub(crate) fn staged_slot(areas: &Areas, parity: usize) -> usize {
    parity * areas.slot_bytes()
}

fn staged_back(areas: &Areas, parity: usize) -> usize {
    2 * areas.slot_bytes() + parity * areas.back_bytes()
}
