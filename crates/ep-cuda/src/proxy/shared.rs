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
    /// Commands of kernels that were read.
    commands: AtomicU64,
    sent_bytes: AtomicU64,
    /// Of each lane, as its thread has last reported it.
    lanes: Mutex<Vec<LaneReport>>,
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
    /// Of each lane: up to which epoch all is placed.
    placed: Vec<AtomicU64>,
}

/// Marks in a receive area that all operations up to these, by sequence, are over.
pub(crate) fn set_taken(receive: &Area, inbox: &Inbox, epochs: [u64; 2]) {
    for (word, epoch) in [EP_WORD_DISPATCH_TAKEN, EP_WORD_COMBINE_TAKEN].into_iter().zip(epochs) {
        receive.word(inbox.word(word)).fetch_max(epoch, Ordering::AcqRel);
    }
}

impl FarRank {
    pub(crate) fn new(rank: u32, send: Area, receive: Area, inbox: Inbox, lanes: usize) -> FarRank {
        let taken = [EP_WORD_DISPATCH_TAKEN, EP_WORD_COMBINE_TAKEN].map(|word| Taken {
            at: inbox.word(word),
            released: AtomicU64::new(0),
            placed: (0..lanes).map(|_| AtomicU64::new(0)).collect(),
        });
        let [generation, commands, sent_bytes] = [const { AtomicU64::new(0) }; 3];
        let reports = Mutex::new(vec![LaneReport::default(); lanes]);
        FarRank { rank, send, receive, inbox, taken, generation, commands, sent_bytes, lanes: reports }
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
            commands: self.commands.load(Ordering::Relaxed),
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
        self.taken[sequence as usize].released.fetch_max(epoch, Ordering::AcqRel);
    }

    /// All that `lane` had to send it up to this epoch is placed.
    pub(crate) fn placed(&self, lane: usize, sequence: Sequence, epoch: u64) {
        self.taken[sequence as usize].placed[lane].fetch_max(epoch, Ordering::AcqRel);
    }

    /// Sets the generation of its connection, before any thread drives it.
    pub(crate) fn set_generation(&self, generation: u64) {
        self.generation.store(generation, Ordering::Release);
    }

    /// The generation of its connection.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Counts a command of a kernel that was read.
    pub(crate) fn add_command(&self) {
        self.commands.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts bytes that were sent.
    pub(crate) fn add_sent(&self, bytes: u64) {
        self.sent_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Bytes that were sent, without repetitions by rails.
    pub(crate) fn sent_bytes(&self) -> u64 {
        self.sent_bytes.load(Ordering::Relaxed)
    }

    /// Publishes to kernels which slots they may use again.
    pub(crate) fn publish(&self) {
        for taken in &self.taken {
            let placed = taken.placed.iter().map(|placed| placed.load(Ordering::Acquire)).min().unwrap_or(0);
            let epoch = placed.min(taken.released.load(Ordering::Acquire));
            // The host raises the word when ranks connect.
            self.receive.word(taken.at).fetch_max(epoch, Ordering::AcqRel);
        }
    }
}

/// For diagnosis, on one line: the control words that it has written here, and how far the proxy is with it.
impl fmt::Display for FarRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = |number: &AtomicU64| number.load(Ordering::Acquire);
        write!(f, "rank {}, on another node: ", self.rank)?;
        write!(f, "{} commands read, {} bytes sent", number(&self.commands), number(&self.sent_bytes))?;
        for (name, taken) in ["dispatch", "combine"].iter().zip(&self.taken) {
            let placed: Vec<u64> = taken.placed.iter().map(number).collect();
            let (released, free) = (number(&taken.released), number(self.receive.word(taken.at)));
            write!(f, "; {name}: placed up to {placed:?}, released {released}, free {free}")?;
        }
        Ok(())
    }
}
