//! One lane's chunks: the count of all that it was given, and the queue of those that must be staged.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::Arc;

use crossrail_gpu::{ChunkMemory, Scratch, Slot};
use crossrail_proto as proto;
use crossrail_transport::{Loan, Payload, Tx};
use proto::{Memory, Out};

/// Chunks that a lane has packed, or is having packed, ahead of what it sends. More would keep slots from other lanes,
/// and a slow rail would take more than its share.
const LOOKAHEAD: usize = 4;
/// A lane takes no further chunk when it has this many bytes ahead, which a GPU packs in a fraction of the time in
/// which a connection carries them: at 5 GB/s that is 200 us, several times what a pack takes. Chunks that a lane has
/// taken cannot move to another lane when it gets slower, and hold bounce memory for which other lanes may wait.
const AHEAD: u64 = 1 << 20;
/// Length of the first chunk of a lane that has none ahead; the next is twice as long, and so on. The lane idles until
/// its first chunk is packed, and the GPU packs in the order of submission.
const FIRST: u64 = 256 << 10;

/// Marks the token of a packed chunk on its way out; the rest is the chunk's number.
pub(crate) const PACKED: u64 = 1 << 63;

/// See the module. Most lanes never stage anything, so what that needs is allocated on first use.
#[derive(Default)]
pub(in crate::core) struct ChunkQueue {
    /// Chunks that the protocol gave to the lane, and those of them that the peer has consumed. The peer counts them in
    /// the order in which they were given, so chunks never overtake one another.
    given: u64,
    acked: u64,
    staged: Option<Box<Staged>>,
}

#[derive(Default)]
struct Staged {
    queue: VecDeque<QueuedChunk>,
    /// Slots that the lane or the peer may still need.
    in_flight: VecDeque<InFlight>,
    landing: Option<Landing>,
    /// Chunks taken since the lane last had none ahead.
    run: usize,
    /// The lane's pending frame is one of these chunks.
    turn: bool,
    /// The lane has asked for its next chunk, of this memory, before that was packed.
    starved: Option<Memory>,
}

/// A chunk that waits for its turn.
pub(in crate::core) struct QueuedChunk {
    pub(in crate::core) number: u64,
    pub(in crate::core) out: Out,
    pub(in crate::core) stage: Stage,
}

/// How far a queued chunk is.
pub(in crate::core) enum Stage {
    /// It waits for a bounce slot.
    Slotless,
    Packing,
    Packed(Slot, Option<(RawFd, u64)>),
    /// A chunk of host memory, which only waits for its turn.
    Plain(Tx),
    /// Its transfer is over, or its bytes cannot be read: it is only counted.
    Void,
}

impl Stage {
    fn is_ready(&self) -> bool {
        !matches!(self, Stage::Slotless | Stage::Packing)
    }
}

struct InFlight {
    number: u64,
    _slot: Slot,
    sent: bool,
}

/// The payload that is being received.
pub(in crate::core) enum Landing {
    /// A chunk, in a bounce slot.
    Chunk { slot: Slot, gpu: u32, memory: Memory, dst: ChunkMemory, len: usize },
    /// A short message for GPU memory, in host memory.
    Short { bytes: Scratch, grant: Arc<Loan>, gpu: u32, memory: Memory, dst: u64 },
}

impl ChunkQueue {
    fn staged_mut(&mut self) -> &mut Staged {
        self.staged.get_or_insert_default()
    }

    /// Whether it has ever staged anything: then frames are taken in turns ([`super::GpuMemory::next`]).
    #[inline]
    pub(in crate::core) fn is_staging(&self) -> bool {
        self.staged.is_some()
    }

    /// Whether it has as many chunks ahead as it may.
    pub(in crate::core) fn is_full(&self) -> bool {
        self.staged.as_ref().is_some_and(|staged| {
            let bytes: u64 = staged.queue.iter().map(|queued| u64::from(queued.out.head.payload_len())).sum();
            staged.queue.len() >= staged.run.clamp(2, LOOKAHEAD)
                || bytes >= AHEAD
                || staged.queue.iter().any(|queued| matches!(queued.stage, Stage::Slotless))
        })
    }

    /// Whether the next chunk waits for a GPU.
    pub(in crate::core) fn is_held_up(&self) -> bool {
        let next = self.staged.as_ref().and_then(|staged| staged.queue.front());
        next.is_some_and(|queued| !queued.stage.is_ready())
    }

    /// Whether chunks wait for their turn.
    pub(in crate::core) fn is_waiting(&self) -> bool {
        self.staged.as_ref().is_some_and(|staged| staged.turn || !staged.queue.is_empty())
    }

    /// The lane asks for a frame, and its next chunk waits for a GPU: the chunk's memory, the first time.
    pub(in crate::core) fn starve(&mut self) -> Option<Memory> {
        let staged = self.staged.as_mut().filter(|staged| staged.starved.is_none())?;
        let next = staged.queue.front().filter(|queued| !queued.stage.is_ready())?;
        let proto::Body::Memory { memory, .. } = next.out.body else { return None };
        staged.starved = Some(memory);
        staged.starved
    }

    /// The lane has its next chunk, or needs none any more: the memory of the chunk that it has waited for.
    pub(in crate::core) fn feed(&mut self) -> Option<Memory> {
        self.staged.as_mut()?.starved.take()
    }

    /// Counts a chunk that the protocol gave to the lane; its number.
    pub(in crate::core) fn count(&mut self) -> u64 {
        self.given += 1;
        self.given - 1
    }

    pub(in crate::core) fn push(&mut self, chunk: QueuedChunk) {
        self.staged_mut().queue.push_back(chunk);
    }

    /// The oldest chunk that waits for a slot.
    pub(in crate::core) fn first_slotless(&self) -> Option<&QueuedChunk> {
        self.staged.as_ref()?.queue.iter().find(|queued| matches!(queued.stage, Stage::Slotless))
    }

    pub(in crate::core) fn set_stage(&mut self, number: u64, stage: Stage) {
        let queue = self.staged.as_mut().map(|staged| &mut staged.queue);
        if let Some(queued) = queue.into_iter().flatten().find(|queued| queued.number == number) {
            queued.stage = stage;
        }
    }

    /// Chunks of memory that `which` names and that are not packed go out as void.
    pub(in crate::core) fn void(&mut self, which: impl Fn(&Memory) -> bool) {
        for queued in self.staged.iter_mut().flat_map(|staged| &mut staged.queue) {
            let named = matches!(&queued.out.body, proto::Body::Memory { memory, .. } if which(memory));
            if named && !queued.stage.is_ready() {
                queued.stage = Stage::Void;
            }
        }
    }

    /// How long the lane's next chunk may be.
    pub(in crate::core) fn most(&self) -> u64 {
        self.staged.as_ref().map_or(FIRST, |staged| FIRST << (staged.run + staged.queue.len()).min(32))
    }

    /// Whether the lane's pending frame is a chunk.
    pub(in crate::core) fn is_turn(&self) -> bool {
        self.staged.as_ref().is_some_and(|staged| staged.turn)
    }

    /// The pending chunk, if any, is being sent. `idle`: there was none.
    pub(in crate::core) fn end_turn(&mut self, idle: bool) {
        let staged = self.staged_mut();
        staged.turn = false;
        if idle && staged.queue.is_empty() {
            staged.run = 0;
        }
    }

    /// Makes the next chunk the pending frame if it is ready and no other frame is pending; whether it did.
    pub(in crate::core) fn advance(&mut self, pending: &mut Option<Tx>) -> bool {
        if pending.is_some() {
            return false;
        }
        let Some(staged) = &mut self.staged else { return false };
        if !staged.queue.front().is_some_and(|queued| queued.stage.is_ready()) {
            return false;
        }
        let Some(QueuedChunk { number, out, stage }) = staged.queue.pop_front() else { return false };
        let tx = match stage {
            Stage::Packed(slot, file) => {
                let len = out.head.payload_len() as usize;
                let payload = Payload { ptr: slot.ptr().cast_const(), len, file, reused: true, ..Payload::EMPTY };
                staged.in_flight.push_back(InFlight { number, _slot: slot, sent: false });
                Tx { head: out.head, payload, token: PACKED | number }
            }
            Stage::Plain(tx) => tx,
            _ => Tx { head: proto::frame::void(&out.head), payload: Payload::EMPTY, token: 0 },
        };
        staged.run += 1;
        staged.turn = true;
        *pending = Some(tx);
        true
    }

    /// The lane no longer reads a packed chunk.
    pub(in crate::core) fn sent(&mut self, number: u64) {
        let acked = self.acked;
        if let Some(staged) = &mut self.staged {
            if let Some(chunk) = staged.in_flight.iter_mut().find(|chunk| chunk.number == number) {
                chunk.sent = true;
            }
            staged.release_slots(acked);
        }
    }

    /// The peer has consumed this many more of the lane's chunks.
    pub(in crate::core) fn consumed(&mut self, chunks: u32) {
        self.acked += u64::from(chunks);
        let acked = self.acked;
        if let Some(staged) = &mut self.staged {
            staged.release_slots(acked);
        }
    }

    pub(in crate::core) fn set_landing(&mut self, landing: Landing) {
        self.staged_mut().landing = Some(landing);
    }

    pub(in crate::core) fn take_landing(&mut self) -> Option<Landing> {
        self.staged.as_mut()?.landing.take()
    }

    /// The memory for which a chunk is being received.
    pub(in crate::core) fn landing_chunk(&self) -> Option<Memory> {
        match self.staged.as_ref()?.landing {
            Some(Landing::Chunk { memory, .. }) => Some(memory),
            _ => None,
        }
    }

    /// The lane is closed: its slots are free.
    pub(in crate::core) fn clear(&mut self) {
        self.staged = None;
    }
}

impl Staged {
    /// A slot is free when the lane has sent it and the peer has consumed it: a lane may retransmit until then.
    fn release_slots(&mut self, acked: u64) {
        self.in_flight.retain(|chunk| chunk.number >= acked || !chunk.sent);
    }
}
