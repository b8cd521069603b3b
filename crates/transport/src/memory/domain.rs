//! Direct access to the peer's memory: descriptors, copies, mappings.
#![allow(unsafe_code)] // descriptions that are sent, and `Domain::step`

use std::any::Any;
use std::sync::Arc;

use crossrail_types::Result;

/// How the peer can reach a piece of our memory; opaque to all but the lane that made it.
pub type Descriptor = [u8; 24];

/// How a direct copy is done, for people and for the cost model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DirectKind {
    /// Both processes map the memory: one plain copy, no system call.
    Mapped,
    /// process_vm_readv / process_vm_writev.
    Cma,
    /// Both memories belong to GPUs, or one does: a copy engine or a kernel, by peer access.
    CudaIpc,
}

/// Which way a direct copy goes, seen from here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copy {
    /// The peer's memory into ours.
    Pull,
    /// Our memory into the peer's.
    Push,
}

/// Copies by both ends up to this length are split in two halves, one per end: repeated sends of the same memory then
/// stay in the cache of the processor that copies them. For longer copies, which exceed the caches, the ends claim
/// pieces in turn.
pub const HALVES_MAX: usize = 1 << 20;

/// One end's part of a direct copy. Both ends may hold a job for the same `slot`: each claims pieces from the
/// shared cursor there, so that the two together copy every byte once.
#[derive(Clone, Debug)]
pub struct Job {
    /// The shared cursor, made by the sending end with [`Domain::open`]; `None`: this end copies it all.
    pub slot: Option<u32>,
    /// Our memory.
    pub local: *mut u8,
    /// Theirs.
    pub remote: Descriptor,
    /// Bytes in all.
    pub len: usize,
    /// Which way.
    pub copy: Copy,
    /// Bytes this end has claimed and copied so far (kept by `step`).
    pub moved: usize,
    /// What `step` remembers of it; 0 at first.
    pub state: u64,
    /// Whether this end may claim pieces of the half that is the other end's, up to [`HALVES_MAX`]. Without, `step` is
    /// `Waiting` once its own half is claimed.
    pub helps: bool,
}

// SAFETY: as for Payload: a description; `Domain::step` dereferences it under its own contract.
unsafe impl Send for Job {}

/// What one [`Domain::step`] did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// This end copied so many bytes; more may be left.
    Moved(usize),
    /// All is claimed; the other end is still copying its part.
    Waiting,
    /// Every byte has been copied, by whichever end.
    Done,
    /// This end cannot (the text says why); what it claimed is not copied.
    Failed(String),
    /// As `Failed`: the memory of one of the ends is not mapped, so nothing else can copy it either.
    Unmapped(String),
}

/// Memory of the peer that this process maps, for as long as any clone of `keep` lives: also when the peer has freed
/// it, closed the lane or died.
#[derive(Clone, Debug)]
pub struct Window {
    /// First byte. The peer may write there at any time.
    pub ptr: *mut u8,
    /// Bytes.
    pub len: usize,
    /// The GPU on which `ptr` may be used; `None`: it is this process's own address space.
    pub device: Option<u32>,
    /// Holds the mapping.
    pub keep: Arc<dyn Any + Send + Sync>,
}

// SAFETY: as for Payload: a description, with what keeps the range mapped; whoever dereferences `ptr` answers for
// races.
unsafe impl Send for Window {}

/// Direct access to memory over a link, at one of its two ends.
///
/// The owner describes its memory, for a copy ([`Domain::describe`]) or to be mapped ([`Domain::share`]); descriptors
/// travel in frames, or by any other means. The peer asks whether it reaches what a descriptor says
/// ([`Domain::reach`]), and either copies ([`Domain::step`]) or maps it ([`Domain::map`]). Descriptors are untrusted:
/// whatever one contains, only memory that the owner has described is accessed.
///
/// What a link needs to know of memory beforehand (a segment's file, a handle of an allocation, a registration), it
/// establishes when memory is first described, keeps, and passes to the peer itself.
pub trait Domain {
    /// Makes a descriptor by which the peer can access `len` bytes at `ptr`; returns also how it would copy.
    ///
    /// # Errors
    /// Why it cannot.
    fn describe(&mut self, ptr: *const u8, len: usize) -> std::result::Result<(Descriptor, DirectKind), String>;

    /// How this end would copy what `remote` describes.
    ///
    /// # Errors
    /// Why it cannot.
    fn reach(&mut self, remote: &Descriptor, len: usize) -> std::result::Result<DirectKind, String>;

    /// Passes the memory that holds `len` bytes at `ptr` to the peer, whose [`Domain::map`] understands the
    /// descriptor. `Ok(None)`: no room on the way there at present; ask again after a poll that moved something.
    ///
    /// # Errors
    /// `Unsupported`: not that memory; `Exhausted`, `Io`: the system refused.
    fn share(&mut self, ptr: *const u8, len: usize) -> Result<Option<Descriptor>>;

    /// Maps `len` bytes of what the peer's [`Domain::share`] described. `gpu`: the GPU of this process for which memory
    /// of a GPU is mapped; `None`: the link chooses. `Ok(None)`: the memory itself has not arrived yet; ask again after
    /// a poll that moved something. Touches no page.
    ///
    /// # Errors
    /// `Region`: the memory is gone, another one, or shorter than that; `Protocol`: it is not what may be mapped
    /// safely; `Unsupported`, `Exhausted`, `Io`: the system or the driver refused.
    fn map(&mut self, remote: &Descriptor, len: usize, gpu: Option<u32>) -> Result<Option<Window>>;

    /// A shared cursor for a copy of `len` bytes; `None` when all are in use, or the link has none. The sending end
    /// owns it.
    fn open(&mut self, len: usize) -> Option<u32>;

    /// Copies about `budget` bytes.
    ///
    /// # Safety
    /// `job.local` must be valid for `job.len` bytes, for writing when `job.copy` is `Pull`.
    unsafe fn step(&mut self, job: &mut Job, budget: usize) -> Step;

    /// Copies pieces of this end's halves of several jobs, of those that it [helps](Job::helps) of both, where one call
    /// of the system copies them for less than `step` would one by one: a row of jobs with cursors, none longer than
    /// [`HALVES_MAX`], that the peer has not stopped. The bytes that were copied; what is left is `step`'s.
    ///
    /// # Errors
    /// A piece could not be copied: of which job in the row, and its step (`Failed` or `Unmapped`). That job has failed at
    /// both ends.
    ///
    /// # Safety
    /// As [`Domain::step`], for every job.
    unsafe fn step_row(&mut self, _row: &mut [&mut Job]) -> std::result::Result<usize, (usize, Step)> {
        Ok(0)
    }

    /// Stops both ends from claiming more of `slot`; true when no piece is being copied any longer.
    fn stop(&mut self, slot: u32) -> bool;

    /// Gives the cursor back. Only its owner, after `Done` or a `stop` that returned true.
    fn close(&mut self, slot: u32);
}
