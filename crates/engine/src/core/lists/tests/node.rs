//! One end of the simulation: a core, its memory, the moves and notices that it starts, and what must hold of them.
#![allow(unsafe_code)] // looks at memory that the core writes

use std::sync::Arc;

use crossrail_proto as proto;
use crossrail_shm::Arena;
use crossrail_transport::{Index, List, Rows, Stride};
use crossrail_types::{EndpointId, ErrorKind, Log, LogLevel, OpId};

use super::Random;
use crate::core::gpu::{Inbox, Reach};
use crate::core::lists::{ListOperation, Part, RowsOf, SentDescription};
use crate::core::{BulkLane, Core, OpKind};
use crate::memory::{Buffer, RegionKey, RegionStride};

/// Bytes of a move's place in a region, and moves of a node.
pub(super) const PLACE: usize = 2048;
pub(super) const MOVES: usize = 4;
/// Written to memory that was given back, which nobody may touch any more.
const POISON: u8 = 0xEE;

/// The byte at `at` of what `number` writes, which is never 0.
fn pattern(number: u64, at: u64) -> u8 {
    (number.wrapping_mul(0x9e37_79b9).wrapping_add(at.wrapping_mul(0x85eb_ca6b)) >> 13) as u8 | 1
}

/// Registered memory.
pub(super) struct Pool {
    pub(super) of: proto::RegionRef,
    key: RegionKey,
    at: *mut u8,
    /// Deregistration: refused, recalled, given back.
    pub(super) ends: u8,
}

impl Pool {
    fn of(core: &mut Core, secret: u8, bytes: Vec<u8>) -> Pool {
        let buffer = Buffer::from(bytes);
        let at = buffer.ptr;
        let (of, key) = core.transfers().regions().insert(buffer, [secret; 16]);
        Pool { of, key, at, ends: 0 }
    }

    fn byte(&self, at: usize) -> u8 {
        assert!(at < PLACE * MOVES);
        // SAFETY: inside the pool, which is registered as long as the core lives.
        unsafe { *self.at.add(at) }
    }

    fn fill(&self, byte: u8) {
        // SAFETY: the same.
        unsafe { self.at.write_bytes(byte, PLACE * MOVES) }
    }
}

/// Rows to rows, prepared, and what was started of it.
pub(super) struct SimMove {
    kind: OpKind,
    own: Arc<List>,
    /// Rows of the peer's pool.
    theirs: List,
    memory: Box<[u8]>,
    strides: Vec<RegionStride>,
    sent: Option<[Option<SentDescription>; 3]>,
    dropped: bool,
    /// Numbers of its starts.
    starts: Vec<u64>,
    /// Its memory when the last of them had ended.
    settled: Option<Box<[u8]>>,
}

/// A move or a notice that was started.
pub(super) struct Started {
    pub(super) id: OpId,
    pub(super) number: u64,
    /// Of a move: which, and where its part begins and ends. `None`: a notice alone.
    of: Option<(usize, u64, u64)>,
    notice: bool,
    /// It names a view that was dropped, which the peer may not have heard of yet.
    stale: bool,
    pub(super) cancelled: bool,
    /// How it ended.
    pub(super) ended: Option<Result<(), ErrorKind>>,
}

/// What a node checks at its peer, whose memory and notices these are.
pub(super) struct Node {
    pub(super) core: Core,
    pub(super) endpoint: EndpointId,
    /// The pattern of what the peer reads.
    source: u64,
    /// Written by the peer's moves, and read by them.
    pub(super) pools: [Pool; 2],
    pub(super) moves: Vec<SimMove>,
    pub(super) started: Vec<Started>,
    /// Notices of the peer: the numbers of what they belong to.
    pub(super) noticed: Vec<u64>,
    pub(super) bulk: Vec<Option<Arc<BulkLane>>>,
    /// Its peer has ended, or it has itself.
    pub(super) down: bool,
    pub(super) crashed: bool,
}

/// A notice: its number, padded to some length.
fn notice(number: u64, len: usize) -> Vec<u8> {
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.resize(bytes.len().max(len), number as u8);
    bytes
}

/// Rows with gaps from `at` on in at most [`PLACE`] bytes, as long as those of `like`; new lengths without.
fn strides(random: &mut Random, at: u64, like: Option<&[(u64, u64)]>) -> Vec<Stride> {
    let fresh: Vec<(u64, u64)> =
        (0..1 + random.below(3)).map(|_| (1 + random.below(90), 1 + random.below(6))).collect();
    let mut at = at;
    let rows = like.unwrap_or(&fresh).iter();
    rows.map(|(len, count)| {
        let stride = len + random.below(3) * random.below(9);
        let first = at + random.below(9);
        at = first + stride * count;
        Stride { at: first, len: *len, stride, count: *count }
    })
    .collect()
}

impl Node {
    pub(super) fn new(index: usize, config: proto::Config, notices_max: u64, random: &mut Random) -> Node {
        let mut core = Core::new(Log(LogLevel::Off), Arena::new(), Inbox::default());
        core.transfers.tables.clock.simulate(proto::Time(1));
        let endpoint = core.transfers().add_peer(config, "peer", 0, Reach::Staged("simulated".to_owned()));
        core.transfers.tables.hosted.notices_max = notices_max;
        let peer = core.transfers.tables.peers.get_mut(endpoint).expect("a peer");
        peer.outbox.notices_max = notices_max;
        let source = 1_000_000 + index as u64;
        let bytes = (0..PLACE * MOVES).map(|at| pattern(source, at as u64)).collect();
        let pools = [Pool::of(&mut core, 1, vec![0; PLACE * MOVES]), Pool::of(&mut core, 2, bytes)];
        let mut node = Node {
            core,
            endpoint,
            source,
            pools,
            moves: Vec::new(),
            started: Vec::new(),
            noticed: Vec::new(),
            bulk: Vec::new(),
            down: false,
            crashed: false,
        };
        (0..MOVES).for_each(|at| node.moves.push(SimMove::new(random, at)));
        node
    }

    /// Starts a move, or a part of it.
    pub(super) fn start(&mut self, at: usize, number: u64, keys: &[RegionKey; 2], random: &mut Random) {
        let Node { core, endpoint, moves, .. } = self;
        let of = &mut moves[at];
        if of.sent.is_none() && !of.prepare(core, *endpoint, keys) {
            return;
        }
        let rows = of.own.count();
        let first = random.below(rows);
        let whole = random.below(3) > 0;
        let (first, last) = if whole { (0, rows) } else { (first, first + 1 + random.below(rows - first)) };
        let (from, end) = (of.own.position(first), of.own.position(last));
        of.check_settled();
        of.settled = None;
        if of.kind == OpKind::Write {
            let bytes: Vec<u8> = (0..of.own.bytes()).map(|at| pattern(number, at)).collect();
            // SAFETY: the move's own memory, of which no operation is in flight.
            unsafe { of.own.copy_in(0, bytes.as_ptr(), of.own.bytes()) };
        } else {
            of.memory.fill(0);
        }
        of.starts.push(number);
        let longest = random.pick(&[1, 30, 900]);
        let bytes = if random.below(2) == 0 { notice(number, random.below(longest) as usize) } else { Vec::new() };
        let stale = of.dropped;
        let what = ListOperation {
            kind: of.kind,
            view: of.sent.unwrap_or_default(),
            local: Part { list: of.own.clone(), from, gpu: None },
            over: Arc::new([]),
            len: end - from,
            imm: None,
            notice: bytes.clone(),
            keep: Arc::new(()),
            after: None,
        };
        if let Ok(id) = core.start_list(*endpoint, what) {
            let (of, notice) = (Some((at, from, end)), !bytes.is_empty());
            self.started.push(Started { id, number, of, notice, stale, cancelled: false, ended: None });
        }
    }

    pub(super) fn is_in_flight(&self, at: usize) -> bool {
        self.started.iter().any(|of| of.ended.is_none() && of.of.is_some_and(|(which, ..)| which == at))
    }

    pub(super) fn notify(&mut self, number: u64, len: usize) {
        if let Ok(id) = self.core.notify(self.endpoint, notice(number, len)) {
            let plain = Started { id, number, of: None, notice: true, stale: false, cancelled: false, ended: None };
            self.started.push(plain);
        }
    }

    /// Has the peer forget a move, which none is started of.
    pub(super) fn forget(&mut self, at: usize) {
        let of = &mut self.moves[at];
        if let Some([Some(view), rows, _]) = of.sent.filter(|_| !of.dropped) {
            of.dropped = true;
            let sent: Vec<SentDescription> = [view].into_iter().chain(rows).collect();
            self.core.withdraw(self.endpoint, &sent);
        }
    }

    /// Takes a region back, as deregistering does, as far as that has come.
    pub(super) fn end_region(&mut self, at: usize) {
        let (core, pool) = (&mut self.core, &mut self.pools[at]);
        let (of, before) = (pool.of, pool.ends);
        pool.ends = match before {
            0 => {
                core.end_region(of);
                1
            }
            1 if !core.is_region_used(of) => 2 + u8::from(!core.recall_region(of)),
            2 if !core.is_region_kept(of) => 3,
            ends => ends,
        };
        if pool.ends == 3 && before < 3 {
            pool.fill(POISON);
        }
    }

    pub(super) fn keys(&self) -> [RegionKey; 2] {
        [self.pools[0].key.clone(), self.pools[1].key.clone()]
    }
}

impl SimMove {
    fn new(random: &mut Random, at: usize) -> SimMove {
        let kind = if random.below(2) == 0 { OpKind::Write } else { OpKind::Read };
        let place =
            if kind == OpKind::Write { (at * PLACE) as u64 } else { random.below((PLACE * (MOVES - 1)) as u64) };
        let there = strides(random, place, None);
        let lengths: Vec<(u64, u64)> = there.iter().map(|of| (of.len, of.count)).collect();
        let mut memory = vec![0; PLACE].into_boxed_slice();
        let here = strides(random, memory.as_mut_ptr() as u64, Some(&lengths));
        let rows = |strides: &[Stride]| Arc::new(Rows::new(strides.to_vec()).expect("rows"));
        let (own, theirs) = (rows(&here), rows(&there));
        let mut index: Vec<u32> = (0..own.count() as u32).collect();
        (1..index.len()).rev().for_each(|at| index.swap(at, random.below(at as u64 + 1) as usize));
        index.truncate(1 + random.below(index.len() as u64) as usize);
        let index = if random.below(3) == 0 { Index::All } else { Index::Some(index.into()) };
        let list = |rows| List::new(rows, index.clone()).expect("a list");
        let strides = there.iter().map(|stride| RegionStride { region: 0, stride: *stride }).collect();
        let (own, theirs) = (Arc::new(list(own)), list(theirs));
        SimMove { kind, own, theirs, memory, strides, sent: None, dropped: false, starts: Vec::new(), settled: None }
    }

    fn prepare(&mut self, core: &mut Core, endpoint: EndpointId, keys: &[RegionKey; 2]) -> bool {
        let key = keys[usize::from(self.kind == OpKind::Read)].key;
        let Ok(rows) = core.describe_rows(endpoint, RowsOf::Peer(&[key], &self.strides)) else { return false };
        let rows = rows.expect("of the peer's memory");
        let of = (&rows, self.theirs.index(), self.theirs.rows().even());
        let Ok(view) = core.describe_view(endpoint, of, None) else { return false };
        self.sent = Some([Some(view), Some(rows), None]);
        true
    }

    /// Nothing was written here once it was over.
    fn check_settled(&self) {
        if let Some(settled) = &self.settled {
            assert!(*settled == self.memory, "{:?} was written to after its end", self.starts);
        }
    }

    /// Places of its bytes in the peer's pool, by their positions.
    fn places(&self, from: u64, end: u64) -> impl Iterator<Item = (u64, usize)> {
        addresses(&self.theirs, from, end).map(|(position, place)| (position, place as usize))
    }
}

/// The address of each byte of a list, by its position.
fn addresses(list: &List, from: u64, end: u64) -> impl Iterator<Item = (u64, u64)> {
    let mut cursor = list.cursor(from);
    (from..end).map(move |position| (position, cursor.piece(1).expect("inside").0))
}

/// Checks that what `node` started is as it should be, now that it has ended.
pub(super) fn check_end(node: &mut Node, peer: &Node, at: usize) {
    if let Some((at, ..)) = node.started[at].of {
        node.moves[at].settled = Some(node.moves[at].memory.clone());
    }
    let (node, started) = (&*node, &node.started[at]);
    let number = started.number;
    let result = started.ended.as_ref().expect("it has ended");
    if let Err(kind) = result {
        let gone =
            started.of.is_some_and(|(at, ..)| peer.pools[usize::from(node.moves[at].kind == OpKind::Read)].ends > 0);
        let explained = match kind {
            ErrorKind::Cancelled => started.cancelled,
            ErrorKind::Region => gone || started.stale,
            ErrorKind::PeerDead | ErrorKind::Closed => node.down,
            _ => false,
        };
        assert!(explained, "{number} failed without a reason: {kind:?}");
        return;
    }
    let Some((at, from, end)) = started.of else { return };
    let of = &node.moves[at];
    let pool = &peer.pools[usize::from(of.kind == OpKind::Read)];
    let mut own = vec![0; (end - from) as usize];
    // SAFETY: the move's own memory.
    unsafe { of.own.copy_out(from, own.as_mut_ptr(), end - from) };
    for ((position, place), byte) in of.places(from, end).zip(own) {
        let expected = match of.kind {
            OpKind::Write => pattern(number, position),
            _ => pattern(peer.source, place as u64),
        };
        assert_eq!(byte, expected, "byte {position} of {number}, here");
        if of.kind == OpKind::Write && pool.ends < 3 && !peer.crashed {
            assert_eq!(pool.byte(place), expected, "byte {position} of {number}, at the peer");
        }
    }
}

/// A notice has been raised at `node`, of what `peer` started.
pub(super) fn check_notice(node: &Node, peer: &Node, bytes: &[u8]) -> u64 {
    let number = u64::from_le_bytes(*bytes.first_chunk().expect("a number"));
    assert!(bytes[8..].iter().all(|byte| *byte == number as u8), "the notice of {number} is damaged");
    assert!(!node.noticed.contains(&number), "the notice of {number} came twice");
    let started = peer.started.iter().find(|of| of.number == number).expect("a notice of nobody");
    assert!(started.notice);
    if started.of.is_none() {
        let alone = |number: &u64| peer.started.iter().any(|of| of.number == *number && of.of.is_none());
        let later = node.noticed.iter().find(|other| **other > number && alone(other));
        assert!(later.is_none(), "the notice {number} came behind {later:?}");
    }
    if let Some((at, from, end)) = started.of
        && peer.moves[at].kind == OpKind::Write
        && node.pools[0].ends < 3
    {
        for (position, place) in peer.moves[at].places(from, end) {
            let byte = node.pools[0].byte(place);
            assert_eq!(byte, pattern(number, position), "the notice of {number} came before byte {position}");
        }
    }
    number
}

/// At the end: memory holds what was moved there, and nothing else.
pub(super) fn check_memory(node: &Node, peer: &Node) {
    let mut allowed = vec![vec![0]; PLACE * MOVES];
    for of in &peer.moves {
        of.check_settled();
        let (mut rows, memory) = (vec![false; PLACE], of.memory.as_ptr() as u64);
        let all = of.own.bytes();
        for ((position, place), (_, here)) in of.places(0, all).zip(addresses(&of.own, 0, all)) {
            let here = (here - memory) as usize;
            rows[here] = true;
            if of.kind == OpKind::Write {
                allowed[place].extend(of.starts.iter().map(|number| pattern(*number, position)));
            } else {
                let right = [0, pattern(node.source, place as u64), POISON];
                assert!(right.contains(&of.memory[here]), "byte {position} of {:?} is wrong", of.starts);
            }
        }
        assert!(rows.iter().zip(&of.memory).all(|(row, byte)| *row || *byte == 0), "a byte between rows was written");
    }
    for (at, allowed) in allowed.iter().enumerate() {
        let byte = node.pools[0].byte(at);
        let right = if node.pools[0].ends == 3 { byte == POISON } else { allowed.contains(&byte) };
        assert!(right, "byte {at} of a pool is {byte:#x}, which nobody has moved there");
        let untouched = if node.pools[1].ends == 3 { POISON } else { pattern(node.source, at as u64) };
        assert_eq!(node.pools[1].byte(at), untouched, "what is read has changed");
    }
}

/// Whether `peer` has all notices of what `node` started and has ended well.
pub(super) fn has_all_notices(node: &Node, peer: &Node) -> bool {
    let due = |of: &&Started| of.notice && matches!(of.ended, Some(Ok(())));
    node.started.iter().filter(due).all(|of| peer.noticed.contains(&of.number))
}
