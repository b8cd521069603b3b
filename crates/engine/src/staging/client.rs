//! One worker's side of a stager.

use std::sync::Arc;

use crossrail_types::Result;

use super::Way;
use super::bounce::Slot;
use super::core::{After, Owner, Task};
use super::stager::{Running, Shared};
use crate::device::Ready;

/// One worker's staging on one GPU. Calls never wait, except `quiesce` and the drop, which waits for what the GPU is
/// at for it. Any thread.
pub(crate) struct Client {
    id: u32,
    running: Arc<Running>,
}

impl Client {
    pub(super) fn new(id: u32, running: Arc<Running>) -> Client {
        Client { id, running }
    }

    fn shared(&self) -> &Shared {
        &self.running.shared
    }

    /// A free slot; `None`: there is none now.
    pub(crate) fn slot(&self, way: Way) -> Option<Slot> {
        self.shared().bounce.take(way)
    }

    /// The bytes of a slot, at least those of a chunk.
    pub(crate) fn slot_len(&self) -> usize {
        self.shared().bounce.slot_len()
    }

    /// Asks for one `staged(vec![])` when a slot of that way is free: somebody else may have it by then.
    pub(crate) fn when_free(&self, way: Way) {
        self.shared().bounce.await_free(self.id, way);
    }

    /// Copies `len` bytes of device memory from `src` on into the slot, which comes back with [`super::Done`].
    ///
    /// The memory must stay there until it does, or until [`Client::quiesce`] has returned; if it is freed all the
    /// same, the ticket fails.
    pub(crate) fn pack(&self, ticket: u64, src: u64, slot: Slot, len: usize) {
        self.put_in(Way::Out, ticket, slot, src, len);
    }

    /// Copies the first `len` bytes of the slot into device memory from `dst` on, and then gives the slot back. The
    /// memory as for [`Client::pack`].
    pub(crate) fn unpack(&self, ticket: u64, slot: Slot, dst: u64, len: usize) {
        self.put_in(Way::In, ticket, slot, dst, len);
    }

    /// Tells when `event` is complete.
    pub(crate) fn after(&self, ticket: u64, event: Ready) {
        self.shared().queue.lock().afters.push(After { owner: self.owner(ticket), event });
        self.shared().bell.ring();
    }

    /// Gives up the work of those tickets: what is not begun is dropped, what the GPU is at is waited for. After `Ok` nothing
    /// touches its memory any more, and its slots are free. A `Done` that was on its way may still arrive.
    ///
    /// May be called under a lock that [`super::Staged::staged`] does not take.
    ///
    /// # Errors
    /// `Timeout` when the GPU does not end: its memory and the slots stay in use.
    pub(crate) fn quiesce(&self, tickets: impl Fn(u64) -> bool) -> Result<()> {
        self.shared().quiesce(&mut |owner| owner.client == self.id && tickets(owner.ticket))
    }

    /// How many packs and unpacks, anybody's, are not begun.
    #[cfg(test)]
    pub(super) fn queued(&self) -> usize {
        self.shared().queue.lock().tasks.iter().map(std::collections::VecDeque::len).sum()
    }

    fn put_in(&self, way: Way, ticket: u64, slot: Slot, memory: u64, len: usize) {
        debug_assert!(len <= slot.len(), "{len} bytes in a slot of {}", slot.len());
        debug_assert!(slot.way() == way, "a slot of the other way");
        let task = Task { owner: self.owner(ticket), slot, memory, len };
        self.shared().queue.lock().tasks[way as usize].push_back(task);
        self.shared().bell.ring();
    }

    fn owner(&self, ticket: u64) -> Owner {
        Owner { client: self.id, ticket }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // What does not end keeps its slots; there is nothing else to be done about it here.
        let _ = self.quiesce(|_| true);
        self.shared().forget(self.id);
    }
}
