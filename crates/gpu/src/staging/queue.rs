//! One worker's access to a stager.

use std::sync::Arc;
use std::time::Instant;

use crossrail_types::Result;

use super::ChunkMemory;
use super::bounce::Slot;
use super::pipeline::{Owner, SlotTransfer, StreamWait};
use super::stager::{StagerShared, StagerThread};
use crate::direction::Direction;
use crate::stream_point::StreamPoint;

/// One worker's staging on one GPU.
///
/// Any thread may use it. Calls never wait, except [`StagingQueue::quiesce`], and dropping it, which waits until the
/// GPU has finished this queue's copies.
pub struct StagingQueue {
    id: u32,
    thread: Arc<StagerThread>,
}

impl StagingQueue {
    pub(super) fn new(id: u32, thread: Arc<StagerThread>) -> StagingQueue {
        StagingQueue { id, thread }
    }

    fn shared(&self) -> &StagerShared {
        self.thread.shared()
    }

    /// A free slot of at least `len` bytes; `None`: no such slot of that direction is free.
    pub fn slot(&self, direction: Direction, len: usize) -> Option<Slot> {
        self.shared().bounce.take(direction, len)
    }

    /// Bytes of the longest slot: at least those of a chunk.
    pub fn slot_len(&self) -> usize {
        self.shared().bounce.slot_len()
    }

    /// Requests one `completed(vec![])` when a slot of that direction becomes free, or at once if one of `len` bytes is.
    /// What becomes free may be shorter, and another queue may take it first.
    pub fn notify_when_free(&self, direction: Direction, len: usize) {
        self.shared().bounce.await_free(self.id, direction, len);
    }

    /// Submits a copy of `len` bytes of device memory into the slot, which comes back with the
    /// [`Completion`](super::Completion).
    ///
    /// The memory must stay allocated until then, or until [`StagingQueue::quiesce`] has returned; if it is freed
    /// earlier, the ticket fails.
    pub fn pack(&self, ticket: u64, src: impl Into<ChunkMemory>, slot: Slot, len: usize) {
        self.submit(Direction::Out, ticket, slot, src.into(), len);
    }

    /// Submits a copy of the slot's first `len` bytes into device memory; the slot is then released. The memory as for
    /// [`StagingQueue::pack`].
    pub fn unpack(&self, ticket: u64, slot: Slot, dst: impl Into<ChunkMemory>, len: usize) {
        self.submit(Direction::In, ticket, slot, dst.into(), len);
    }

    /// Completes `ticket` when `point` is reached.
    pub fn wait_for(&self, ticket: u64, point: StreamPoint) {
        let since = self.shared().traced().then(Instant::now);
        self.shared().submitted.lock().waits.push(StreamWait { owner: self.owner(ticket), point, since });
        self.shared().wake_up.signal();
    }

    /// Cancels the work of those tickets: drops what was not started and waits for what the GPU is executing. After
    /// `Ok` nothing accesses their memory any more, and their slots are free. A [`Completion`](super::Completion) that
    /// was already on its way may still arrive.
    ///
    /// May be called under any lock that [`StagingListener`](super::StagingListener) does not wait for.
    ///
    /// # Errors
    /// `Timeout` when the GPU does not finish: it still accesses the memory and the slots.
    pub fn quiesce(&self, tickets: impl Fn(u64) -> bool) -> Result<()> {
        self.shared().quiesce(&mut |owner| owner.queue == self.id && tickets(owner.ticket))
    }

    /// How many packs and unpacks, of all queues, were not started.
    #[cfg(test)]
    pub(super) fn queued(&self) -> usize {
        self.shared().submitted.lock().transfers.iter().map(std::collections::VecDeque::len).sum()
    }

    fn submit(&self, direction: Direction, ticket: u64, slot: Slot, memory: ChunkMemory, len: usize) {
        debug_assert!(len <= slot.len(), "{len} bytes in a slot of {}", slot.len());
        debug_assert!(slot.direction() == direction, "a slot of the other direction");
        let transfer = SlotTransfer { owner: self.owner(ticket), slot, memory, len };
        self.shared().submitted.lock().transfers[direction as usize].push_back(transfer);
        self.shared().wake_up.signal();
    }

    fn owner(&self, ticket: u64) -> Owner {
        Owner { queue: self.id, ticket }
    }
}

impl Drop for StagingQueue {
    fn drop(&mut self) {
        // On a timeout the slots stay with the GPU; there is nothing to recover here.
        let _ = self.quiesce(|_| true);
        self.shared().forget(self.id);
    }
}
