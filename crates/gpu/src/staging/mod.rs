//! Staging: chunks of GPU memory go through pinned bounce slots, for links that only reach host memory.
//!
//! ```text
//! out: device memory ─ pack ─> slot ─ lane ─> wire        the slot is free when the peer has acknowledged the chunk
//! in:  wire ─ lane ─> slot ─ unpack ─> device memory      the slot is free when the unpack that reads it is complete
//!
//! Stager         one per GPU in use: a thread that makes all driver calls, and the bounce memory
//! StagingQueue   one per worker and GPU: slots, and submission under the worker's lock, which never waits
//! CopyEngine     what the thread needs of a GPU: a real one, or a simulated one
//! ```
//!
//! Packs start in the order of their submission, and so do unpacks; the two directions run concurrently. Unpacks that
//! are ready together are submitted as one batch. Each direction has slots of its own, so that sends never starve
//! receives: with one pool, two GPUs that send to each other could each hold every slot while they wait for the other
//! to take a chunk.

mod bounce;
mod cuda;
mod idle_policy;
mod pipeline;
mod queue;
#[cfg(any(test, feature = "simulated-gpu"))]
mod simulated;
mod stager;
#[cfg(test)]
mod tests;
mod wake_up;

use std::sync::Arc;
use std::time::Instant;

use crossrail_types::Result;

pub use bounce::Slot;
pub use queue::StagingQueue;
pub use stager::Stager;

/// Receives completions of one worker's staging.
///
/// Called on the stager's thread, with no lock of staging held. An implementation must return soon, and must never wait
/// for a lock under which [`StagingQueue::quiesce`] is called: that would deadlock with the stager.
pub trait StagingListener: Send + Sync {
    /// `completions` have finished, in this order; if empty, a slot that was waited for is free. False: the completions
    /// are stored but not processed, and [`StagingListener::process`] must be called soon.
    fn completed(&self, completions: Vec<Completion>) -> bool;

    /// Processes stored completions. False: that was not possible yet, and it must be called again soon.
    fn process(&self) -> bool {
        true
    }
}

/// A finished pack, unpack or wait.
#[derive(Debug)]
pub struct Completion {
    /// The ticket under which it was submitted.
    pub ticket: u64,
    /// The slot of a pack, which now holds the bytes; returned also when the pack failed.
    pub slot: Option<Slot>,
    /// Whether the bytes arrived.
    pub result: Result<()>,
    /// When it happened, where the context records traces.
    pub span: Option<Span>,
}

/// When a GPU did what it was submitted, as its stager saw it.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// When it was its turn: submitted to the GPU, and everything before it in its direction complete.
    pub began: Instant,
    /// When the stager found it complete.
    pub ended: Instant,
    /// Bytes copied.
    pub bytes: u64,
}

/// Staging of one GPU, by all workers of its context together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageStats {
    /// Bytes copied out of its memory.
    pub packed: u64,
    /// Bytes copied into its memory.
    pub unpacked: u64,
    /// Time with a copy out in flight, in nanoseconds.
    pub pack_ns: u64,
    /// Time with a copy in in flight, in nanoseconds.
    pub unpack_ns: u64,
    /// Time in which an outgoing chunk waited for a slot, in nanoseconds.
    pub out_slot_ns: u64,
    /// Time in which an incoming chunk waited for a slot, in nanoseconds.
    pub in_slot_ns: u64,
    /// Batches of copies in: launches, with `CROSSRAIL_UNPACK=kernel`.
    pub batches: u64,
}

/// Device memory of a chunk.
#[derive(Clone, Debug)]
pub enum ChunkMemory {
    /// Where it begins.
    At(u64),
    /// Address and length of each of its pieces, which are as long as the chunk together.
    Pieces(Arc<[(u64, u64)]>),
}

impl From<u64> for ChunkMemory {
    fn from(address: u64) -> ChunkMemory {
        ChunkMemory::At(address)
    }
}

/// A copy between a slot and device memory.
#[derive(Clone, Debug)]
struct SlotCopy {
    /// The slot's first byte.
    host: *mut u8,
    memory: ChunkMemory,
    /// Bytes.
    len: usize,
}

impl SlotCopy {
    /// Address, place in the slot, and length of each piece of device memory.
    fn pieces(&self) -> impl Iterator<Item = (u64, usize, usize)> {
        let whole = match self.memory {
            ChunkMemory::At(address) => Some((address, self.len as u64)),
            ChunkMemory::Pieces(_) => None,
        };
        let pieces: &[(u64, u64)] = match &self.memory {
            ChunkMemory::At(_) => &[],
            ChunkMemory::Pieces(pieces) => pieces,
        };
        let mut at = 0;
        whole.into_iter().chain(pieces.iter().copied()).map(move |(address, len)| {
            at += len as usize;
            (address, at - len as usize, len as usize)
        })
    }
}

// SAFETY: the address is only passed on; whoever submitted the copy vouches for both ends until it is complete.
#[allow(unsafe_code)]
unsafe impl Send for SlotCopy {}

/// A point in a GPU's queue of one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mark(u64);

/// What a stager's thread needs of its GPU. Calls submit work and never wait for it.
trait CopyEngine: Send {
    /// Checks that the device memory is allocated, so that the copy cannot harm other memory.
    fn check(&mut self, copy: &SlotCopy) -> Result<()>;

    /// Submits a copy out of device memory. `Err`: nothing of it is in flight.
    fn pack(&mut self, copy: &SlotCopy) -> Result<Mark>;

    /// Submits copies into device memory, as one batch with one mark. `Err`: nothing of it is in flight.
    fn unpack(&mut self, copies: &[SlotCopy]) -> Result<Mark>;

    /// Whether everything up to the mark is complete. After `Ok(true)` and `Err` the mark is used up, and the GPU no
    /// longer accesses its memory.
    fn is_done(&mut self, mark: Mark) -> Result<bool>;
}
