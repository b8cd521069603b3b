//! State of a far rank that the threads of a proxy share: the progress after which slots may be used again.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use crossrail::placing::RailReport;
use crossrail_ep::{ProxyRail, ProxyReport};
use crossrail_kernels::ep::{EP_WORD_COMBINE_TAKEN, EP_WORD_DISPATCH_TAKEN, Inbox, Sequence};

use crossrail_locks::Mutex;
use crossrail_sight::Histogram;

use crate::proxy::area::Area;

/// A far rank: what is sent to it lies in `send`, what it sends arrives in `receive`; both are laid out as an inbox.
pub(crate) struct FarRank {
    pub(crate) rank: u32,
    pub(crate) send: Area,
    pub(crate) receive: Area,
    pub(crate) inbox: Inbox,
    taken: [Taken; 2],
    /// Of its connection.
    generation: AtomicU64,
    /// By lane.
    sent: Vec<LaneSent>,
    /// Of each lane, as its thread has last reported it.
    lanes: Mutex<Vec<LaneReport>>,
}

/// Totals of a lane for a far rank, which only its thread changes. In cache lines of their own: a thread that writes one of
/// several in a line delays the threads that write the others.
#[derive(Debug, Default)]
#[repr(align(128))]
struct LaneSent {
    /// Commands of kernels that were read.
    commands: AtomicU64,
    bytes: AtomicU64,
    /// By sequence: up to which epoch all is placed.
    placed: [AtomicU64; 2],
}

/// Adds to a number that only the caller writes.
fn add(number: &AtomicU64, more: u64) {
    number.store(number.load(Ordering::Relaxed) + more, Ordering::Relaxed);
}

/// State and totals of a lane for a far rank.
#[derive(Clone, Debug, Default)]
pub(crate) struct LaneReport {
    /// Commands that are not sent yet.
    pub(crate) pending: u64,
    /// Writes that are not placed yet.
    pub(crate) in_flight: u64,
    /// Durations of bursts.
    pub(crate) bursts: Histogram,
    pub(crate) rails: Vec<RailReport>,
}

/// Progress of a sequence of operations between this rank and a far one.
///
/// Kernels use a slot again when a control word reports that its reader is done with it. That word is set only once no
/// write to the slot is in flight any more: the reader may not have waited for all of them.
struct Taken {
    /// Offset of the word.
    at: u64,
    /// Last epoch that the far rank has released.
    released: AtomicU64,
}

/// Marks in a receive area that all operations up to these, by sequence, are over.
pub(crate) fn set_taken(receive: &Area, inbox: &Inbox, epochs: [u64; 2]) {
    for (word, epoch) in [EP_WORD_DISPATCH_TAKEN, EP_WORD_COMBINE_TAKEN].into_iter().zip(epochs) {
        receive.word(inbox.word(word)).fetch_max(epoch, Ordering::AcqRel);
    }
}

impl FarRank {
    pub(crate) fn new(rank: u32, send: Area, receive: Area, inbox: Inbox, lanes: usize) -> FarRank {
        let taken = [EP_WORD_DISPATCH_TAKEN, EP_WORD_COMBINE_TAKEN]
            .map(|word| Taken { at: inbox.word(word), released: AtomicU64::new(0) });
        let sent = (0..lanes).map(|_| LaneSent::default()).collect();
        let reports = Mutex::new(vec![LaneReport::default(); lanes]);
        FarRank { rank, send, receive, inbox, taken, generation: AtomicU64::new(0), sent, lanes: reports }
    }

    /// Replaces the report of a lane.
    pub(crate) fn report(&self, lane: usize, report: LaneReport) {
        if let Some(known) = self.lanes.lock().get_mut(lane) {
            *known = report;
        }
    }

    /// Totals of all lanes for the rank, as these have last reported them, and durations of their bursts.
    pub(crate) fn reported(&self) -> (ProxyReport, Histogram) {
        let mut bursts = Histogram::default();
        let mut whole = ProxyReport {
            commands: self.sum(|lane| &lane.commands),
            sent_bytes: self.sent_bytes(),
            ..ProxyReport::default()
        };
        for lane in self.lanes.lock().iter() {
            whole.pending += lane.pending;
            whole.in_flight += lane.in_flight;
            bursts.merge(&lane.bursts);
            for rail in lane.rails.iter().map(ProxyRail::of) {
                match whole.rails.iter_mut().find(|known| known.name == rail.name) {
                    Some(known) => known.add(rail),
                    None => whole.rails.push(rail),
                }
            }
        }
        (whole.bursts, whole.burst_ns) = bursts.total();
        (whole, bursts)
    }

    /// Both ends agree that all operations up to these, by sequence, are over.
    pub(crate) fn set_taken(&self, epochs: [u64; 2]) {
        set_taken(&self.receive, &self.inbox, epochs);
    }

    /// It has received all up to this epoch.
    pub(crate) fn released(&self, sequence: Sequence, epoch: u64) {
        let before = self.taken[sequence as usize].released.fetch_max(epoch, Ordering::SeqCst);
        if before < epoch {
            self.publish(sequence);
        }
    }

    /// All that `lane` had to send it up to this epoch is placed. Called by the lane's thread only.
    pub(crate) fn placed(&self, lane: usize, sequence: Sequence, epoch: u64) {
        let placed = &self.sent[lane].placed[sequence as usize];
        if placed.load(Ordering::Relaxed) < epoch {
            placed.store(epoch, Ordering::SeqCst);
            self.publish(sequence);
        }
    }

    /// Publishes to kernels which slots they may use again. The thread that changes the last of the numbers reads all of
    /// them, as each thread stores its own before it loads the others, sequentially consistent.
    fn publish(&self, sequence: Sequence) {
        let Taken { at, released } = &self.taken[sequence as usize];
        let lanes = self.sent.iter().map(|lane| lane.placed[sequence as usize].load(Ordering::SeqCst));
        let epoch = lanes.min().unwrap_or(0).min(released.load(Ordering::SeqCst));
        let word = self.receive.word(*at);
        // The host raises the word when ranks connect.
        if word.load(Ordering::Relaxed) < epoch {
            word.fetch_max(epoch, Ordering::AcqRel);
        }
    }

    /// Sets the generation of its connection, before any thread drives it.
    pub(crate) fn set_generation(&self, generation: u64) {
        self.generation.store(generation, Ordering::Release);
    }

    /// The generation of its connection.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Counts a command of a kernel that `lane` has read. Called by the lane's thread only.
    pub(crate) fn add_command(&self, lane: usize) {
        add(&self.sent[lane].commands, 1);
    }

    /// Counts bytes that `lane` has sent. Called by the lane's thread only.
    pub(crate) fn add_sent(&self, lane: usize, bytes: u64) {
        add(&self.sent[lane].bytes, bytes);
    }

    /// Bytes that were sent, without repetitions by rails.
    pub(crate) fn sent_bytes(&self) -> u64 {
        self.sum(|lane| &lane.bytes)
    }

    fn sum(&self, number: impl Fn(&LaneSent) -> &AtomicU64) -> u64 {
        self.sent.iter().map(|lane| number(lane).load(Ordering::Relaxed)).sum()
    }
}

/// For diagnosis, on one line: the control words that it has written here, and how far the proxy is with it.
impl fmt::Display for FarRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = |number: &AtomicU64| number.load(Ordering::Acquire);
        write!(f, "rank {}, on another node: ", self.rank)?;
        write!(f, "{} commands read, {} bytes sent", self.sum(|lane| &lane.commands), self.sent_bytes())?;
        for (at, (name, taken)) in ["dispatch", "combine"].iter().zip(&self.taken).enumerate() {
            let placed: Vec<u64> = self.sent.iter().map(|lane| number(&lane.placed[at])).collect();
            let (released, free) = (number(&taken.released), number(self.receive.word(taken.at)));
            write!(f, "; {name}: placed up to {placed:?}, released {released}, free {free}")?;
        }
        Ok(())
    }
}
