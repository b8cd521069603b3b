//! GPU memory over links that only know host memory: chunks go through pinned bounce slots.
//!
//! ```text
//! out: device memory ─ pack ─> slot ─ lane ─> wire        the slot is free when the peer has the chunk
//! in:  wire ─ lane ─> slot ─ unpack ─> device memory      the slot is free when the unpack that read it is complete
//!
//! Stager   one per GPU in use: a thread that makes all CUDA calls, and the bounce memory
//! Client   one per worker: slots, and work put in under the worker's lock, which never waits
//! Gpu      what the thread asks of a GPU: by CUDA, or simulated
//! ```
//!
//! Work is begun in the order in which it was put in, and packs beside unpacks. Unpacks that are ready together go
//! together. Each way has slots of its own, so that sends never starve receives: with one pool, two GPUs that send to
//! each other could each hold every slot, waiting for the other to take a chunk.

mod bell;
mod bounce;
mod client;
mod core;
mod cuda;
pub(crate) mod nvtx;
mod pace;
#[cfg(any(test, feature = "simulated-gpu"))]
mod simulated;
mod stager;
#[cfg(test)]
mod tests;
pub mod unpack;

use crossrail_types::Result;

pub(crate) use bounce::Slot;
pub(crate) use client::Client;
pub(crate) use stager::Stager;

/// Which way bytes go; each has its own slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Device memory to a slot.
    Out,
    /// A slot to device memory.
    In,
}

/// Who hears that work is finished. Called on the stager's thread with no lock of staging held. It must return soon,
/// and must take no lock under which somebody calls [`Client::quiesce`].
pub(crate) trait Staged: Send + Sync {
    /// `done` is finished, in this order; when empty, a slot that was waited for is free. False: nobody has acted on it
    /// yet, and [`Staged::catch_up`] is to be called soon.
    fn staged(&self, done: Vec<Done>) -> bool;

    /// Acts on what was told before. False: somebody is in the way, it is to be called again soon.
    fn catch_up(&self) -> bool {
        true
    }
}

/// A finished piece of work.
#[derive(Debug)]
pub(crate) struct Done {
    /// As it was put in.
    pub(crate) ticket: u64,
    /// The slot of a pack, which holds the bytes now. Also given back where the pack failed.
    pub(crate) slot: Option<Slot>,
    /// Whether the bytes are where they belong.
    pub(crate) result: Result<()>,
}

/// What was staged for one GPU by everybody who shares its context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageStats {
    /// Bytes copied out of its memory.
    pub packed: u64,
    /// Bytes copied into its memory.
    pub unpacked: u64,
    /// Time with a copy out under way, in nanoseconds.
    pub pack_ns: u64,
    /// Time with a copy in under way, in nanoseconds.
    pub unpack_ns: u64,
    /// Time in which a chunk that was to go out waited for a slot, in nanoseconds.
    pub out_slot_ns: u64,
    /// Time in which a chunk that came in waited for a slot, in nanoseconds.
    pub in_slot_ns: u64,
    /// Batches of copies in: launches, with `CROSSRAIL_UNPACK=kernel`.
    pub batches: u64,
}

/// A move between a slot and device memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    /// The slot's bytes.
    pub(crate) host: *mut u8,
    /// The device's.
    pub(crate) memory: u64,
    /// How many.
    pub(crate) len: usize,
}

// SAFETY: an address that is passed on; whoever put the work in vouches for both ends until it is finished.
#[allow(unsafe_code)]
unsafe impl Send for Part {}

/// A point in a GPU's queue of one way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark(pub(crate) u64);

/// What a stager's thread asks of its GPU. Calls put work in and never wait for it.
pub(crate) trait Gpu: Send {
    /// Whether the device's memory is there, so that the move can't harm anything else.
    fn check(&mut self, part: &Part) -> Result<()>;

    /// Puts a copy out of device memory in. `Err`: nothing of it is under way.
    fn pack(&mut self, part: &Part) -> Result<Mark>;

    /// Puts copies into device memory in, all with one mark. `Err`: nothing of it is under way.
    fn unpack(&mut self, parts: &[Part]) -> Result<Mark>;

    /// Whether everything up to the mark is complete. After `Ok(true)` and `Err` the mark is used up, and nothing
    /// touches its memory any more.
    fn is_done(&mut self, mark: Mark) -> Result<bool>;
}
