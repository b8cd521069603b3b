//! Payloads that are rows of lists, at both ends: for lanes that take them.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use crossrail_types::{HEAD_LEN, Head, LaneId};

use super::harness::{End, PATIENCE, PLAIN, pattern};
use crate::{Index, Lane, List, Loan, Payload, Place, Rows, Sink, Stride, Tx};

/// What lies between rows, and what fills memory that was returned.
const GAP_BYTE: u8 = 0xA5;
const POISON_BYTE: u8 = 0xEE;

/// Rows of two lengths with gaps between them, in reverse order.
struct Table {
    memory: Vec<u8>,
    list: Arc<List>,
}

impl Table {
    /// With at least `bytes` in its rows, of `lens` bytes by turns.
    fn new(bytes: usize, lens: [u64; 2]) -> Table {
        let count = (bytes as u64).div_ceil(lens[0] + lens[1]);
        let [one, two] = lens.map(|len| len + len % 7 + 1);
        let memory = vec![GAP_BYTE; ((one + two) * count) as usize];
        let base = memory.as_ptr() as u64;
        let strides = vec![
            Stride { at: base, len: lens[0], stride: one, count },
            Stride { at: base + one * count, len: lens[1], stride: two, count },
        ];
        let rows = Rows::new(strides).expect("rows");
        let index: Vec<u32> = (0..count as u32).rev().flat_map(|row| [row + count as u32, row]).collect();
        let list = List::new(Arc::new(rows), Index::Some(index.into())).expect("a list");
        Table { memory, list: Arc::new(list) }
    }

    /// Its rows' bytes in the order of the list.
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.list.bytes() as usize];
        // SAFETY: the table's own memory, in which no lane writes at present.
        unsafe { self.list.copy_out(0, bytes.as_mut_ptr(), bytes.len() as u64) };
        bytes
    }

    fn fill(&mut self, bytes: &[u8]) {
        // SAFETY: as above.
        unsafe { self.list.copy_in(0, bytes.as_ptr(), bytes.len() as u64) };
    }
}

/// Sends ranges of a table, one behind the other, and receives frames into another one.
struct Ranges {
    label: String,
    outgoing: Option<Table>,
    queue: VecDeque<usize>,
    sent_up_to: u64,
    sent: usize,
    incoming: Table,
    received_up_to: u64,
    placed: usize,
    heads: usize,
    loan: Option<Arc<Loan>>,
}

impl Ranges {
    fn new(label: &str, bytes: usize) -> Ranges {
        Ranges {
            label: label.to_owned(),
            outgoing: None,
            queue: VecDeque::new(),
            sent_up_to: 0,
            sent: 0,
            incoming: Table::new(bytes, [13, 2304]),
            received_up_to: 0,
            placed: 0,
            heads: 0,
            loan: None,
        }
    }
}

impl Sink for Ranges {
    fn next(&mut self, _lane: LaneId) -> Option<Tx> {
        let len = self.queue.pop_front()?;
        let list = self.outgoing.as_ref()?.list.clone();
        let list = Some(Box::new((list, self.sent_up_to)));
        self.sent_up_to += len as u64;
        let payload = Payload { len, list, grant: self.loan.clone(), ..Payload::EMPTY };
        Some(Tx { head: Head::new(PLAIN, len as u32), payload, token: 0 })
    }

    fn sent(&mut self, _lane: LaneId, _token: u64) {
        self.sent += 1;
    }

    fn place(&mut self, _lane: LaneId, head: &Head) -> Place {
        let (len, from) = (head.payload_len() as usize, self.received_up_to);
        self.received_up_to += len as u64;
        self.heads += 1;
        assert!(self.received_up_to <= self.incoming.list.bytes(), "{}: a head that nobody sent", self.label);
        Place::Rows { list: self.incoming.list.clone(), from, len, grant: self.loan.clone(), token: 0 }
    }

    fn placed(&mut self, _lane: LaneId, _token: u64) {
        self.placed += 1;
    }
}

/// The ends of a pair, `a` of which sends.
struct Pair {
    a: (Box<dyn Lane>, Ranges),
    b: (Box<dyn Lane>, Ranges),
    frames: Vec<usize>,
}

/// Lengths of frames: in the middle of rows, at their ends, over many.
const SIZES: [usize; 9] = [1, 99, 101, 2304, 2317, 70_000, 8, 1_000_003, 250_000];

/// Those lengths, each as so many frames as the lane needs for it.
fn frames(sizes: &[usize], max_payload: usize) -> Vec<usize> {
    let cut = |size: usize| (0..size).step_by(max_payload).map(move |at| max_payload.min(size - at));
    sizes.iter().flat_map(|size| cut(*size)).collect()
}

impl Pair {
    /// `None`, reported, where the lanes take no lists.
    fn new(a: End, b: End) -> Option<Pair> {
        if !a.lane.caps().lists {
            return None;
        }
        let all: usize = SIZES.iter().sum();
        let mut from = Ranges::new(&a.label, 0x1000);
        let mut outgoing = Table::new(all, [100, 7]);
        outgoing.fill(&pattern(7, outgoing.list.bytes() as usize));
        let frames = frames(&SIZES, a.lane.caps().max_payload);
        (from.outgoing, from.queue) = (Some(outgoing), frames.iter().copied().collect());
        let to = Ranges::new(&b.label, all);
        Some(Pair { a: (a.lane, from), b: (b.lane, to), frames })
    }

    fn drive(&mut self, budget: usize, done: impl Fn(&Pair) -> bool) {
        let mut idle_since = Instant::now();
        while !done(self) {
            let mut moved = false;
            for (lane, sink) in [&mut self.a, &mut self.b] {
                moved |= lane.poll(sink, budget, true).unwrap_or_else(|error| panic!("{}: {error}", sink.label));
            }
            if moved {
                idle_since = Instant::now();
            } else {
                let (a, b) = (&self.a.1, &self.b.1);
                assert!(idle_since.elapsed() < PATIENCE, "{}: stuck; sent {}, placed {}", a.label, a.sent, b.placed);
                std::thread::yield_now();
            }
        }
    }

    fn is_through(&self) -> bool {
        self.a.1.sent == self.frames.len() && self.b.1.placed == self.frames.len()
    }

    /// Bytes of the frames, as they were sent and as they arrived.
    fn bytes(&self) -> (Vec<u8>, Vec<u8>) {
        let all = SIZES.iter().sum();
        let (mut sent, mut came) =
            (self.a.1.outgoing.as_ref().map(Table::bytes).unwrap_or_default(), self.b.1.incoming.bytes());
        sent.truncate(all);
        came.truncate(all);
        (sent, came)
    }
}

/// Frames go from rows to rows of other lengths, and nothing is written between them.
pub(super) fn both_ends(a: End, b: End) {
    let Some(mut pair) = Pair::new(a, b) else { return };
    pair.drive(100_000, Pair::is_through);
    let (sent, came) = pair.bytes();
    let wrong = sent.iter().zip(&came).position(|(sent, came)| sent != came);
    assert_eq!(wrong, None, "{}: bytes differ there", pair.a.1.label);
    let table = &mut pair.b.1.incoming;
    table.fill(&vec![GAP_BYTE; table.list.bytes() as usize]);
    let touched = table.memory.iter().position(|byte| *byte != GAP_BYTE);
    assert_eq!(touched, None, "{}: written beside the rows", pair.b.1.label);
}

/// Rows that are received into are recalled in mid-frame.
pub(super) fn received_recalled(a: End, b: End) {
    recalled(a, b, false);
}

/// Rows that are sent from are recalled in mid-frame.
pub(super) fn sent_recalled(a: End, b: End) {
    recalled(a, b, true);
}

/// Once they are returned no lane touches them, and framing holds.
fn recalled(a: End, b: End, sends: bool) {
    let Some(mut pair) = Pair::new(a, b) else { return };
    let loan = Arc::new(Loan::default());
    let lent = if sends { &mut pair.a.1.loan } else { &mut pair.b.1.loan };
    *lent = Some(loan.clone());
    // In the middle of the longest, or of the frames that it takes.
    let shorter = &SIZES[..7];
    let (before, first) = (shorter.iter().sum::<usize>(), frames(shorter, pair.a.0.caps().max_payload).len());
    pair.drive(1, |pair| pair.b.0.stats().rx_bytes > before as u64 + 50_000 || sends && pair.a.1.sent > first);
    let (lane, sink) = (&mut pair.b.0, &mut pair.b.1);
    lane.poll(sink, 1, true).unwrap_or_else(|error| panic!("{}: {error}", sink.label));
    if !loan.recall() {
        pair.drive(1 << 20, |_| loan.is_returned());
    }
    let (sent, placed, all) = (pair.a.1.sent, pair.b.1.placed, pair.frames.len());
    assert!(if sends { sent < all } else { placed < all }, "{}: all was over before the recall", pair.a.1.label);
    if let Some(table) = if sends { pair.a.1.outgoing.as_mut() } else { Some(&mut pair.b.1.incoming) } {
        table.memory.fill(POISON_BYTE);
    }
    let wire = (SIZES.iter().sum::<usize>() + all * HEAD_LEN) as u64;
    pair.drive(1 << 20, |pair| pair.b.0.stats().rx_bytes == wire);
    assert_eq!(pair.b.1.heads, all, "{}: frames", pair.b.1.label);
    if !sends {
        let touched = pair.b.1.incoming.memory.iter().position(|byte| *byte != POISON_BYTE);
        assert_eq!(touched, None, "{}: written after it was returned", pair.b.1.label);
    }
}
