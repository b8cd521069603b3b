//! Memory that UCX sends from.

use std::collections::VecDeque;

use crossrail_transport::LaneError;

use crate::link::{Link, Request};
use crate::memory::Memory;

/// Slots of memory that UCX sends from. The lowest free one is taken, not the next in turn: one that UCX is done with
/// at once is in a cache when it is filled again.
pub(crate) struct Slots {
    memory: Memory,
    size: usize,
    /// By slot: the operation that reads it.
    requests: Vec<Option<Request>>,
    /// Slots of the operations that were begun and not counted, in their order; `None`: it ended at once.
    begun: VecDeque<Option<usize>>,
    /// Operations that have ended, of those begun in order.
    carried: u32,
}

impl Slots {
    /// `count` slots of `size` bytes each.
    pub(crate) fn new(count: u32, size: usize) -> Slots {
        Slots {
            memory: Memory::new(count as usize * size),
            size,
            requests: (0..count).map(|_| None).collect(),
            begun: VecDeque::new(),
            carried: 0,
        }
    }

    /// Operations that have ended, of those begun in order. An operation's error is reported once.
    pub(crate) fn carried(&mut self, link: &Link) -> Result<u32, LaneError> {
        while let Some(first) = self.begun.front() {
            if let Some(slot) = *first
                && !link.has_ended(&mut self.requests[slot])?
            {
                break;
            }
            self.begun.pop_front();
            self.carried = self.carried.wrapping_add(1);
        }
        Ok(self.carried)
    }

    /// What [`Slots::carried`] would be.
    pub(crate) fn carried_by_now(&self, link: &Link) -> u32 {
        let is_over = |slot: &Option<usize>| slot.is_none_or(|slot| !link.is_under_way(&self.requests[slot]));
        self.carried.wrapping_add(self.begun.iter().take_while(|slot| is_over(slot)).count() as u32)
    }

    /// A slot that nothing reads, as the offset of its first byte in the memory.
    pub(crate) fn free(&mut self, link: &Link) -> Result<Option<usize>, LaneError> {
        if !self.begun.is_empty() {
            self.carried(link)?;
        }
        Ok(self.requests.iter().position(Option::is_none).map(|slot| slot * self.size))
    }

    /// Whether there is such a slot.
    pub(crate) fn has_free(&self, link: &Link) -> bool {
        let first = self.begun.front().copied().flatten();
        self.requests.iter().any(Option::is_none) || first.is_some_and(|slot| !link.is_under_way(&self.requests[slot]))
    }

    /// Records an operation that reads the free slot at `base`, unless it has ended already.
    pub(crate) fn begin(&mut self, base: usize, request: Option<Request>) {
        match request {
            None if self.begun.is_empty() => self.carried = self.carried.wrapping_add(1),
            None => self.begun.push_back(None),
            request => {
                let slot = self.slot_of(base);
                self.requests[slot] = request;
                self.begun.push_back(Some(slot));
            }
        }
    }

    /// The slot whose first byte is at `base`.
    pub(crate) fn slot_of(&self, base: usize) -> usize {
        base / self.size
    }

    /// Whether nothing reads a slot, as far as is known from the last call of [`Slots::carried`].
    pub(crate) fn is_free(&self, slot: usize) -> bool {
        self.requests[slot].is_none()
    }

    /// Whether nothing reads a slot.
    pub(crate) fn is_over(&self, link: &Link, slot: usize) -> bool {
        !link.is_under_way(&self.requests[slot])
    }

    pub(crate) fn memory(&mut self) -> &mut Memory {
        &mut self.memory
    }

    /// Whether an operation is outstanding.
    pub(crate) fn are_under_way(&self, link: &Link) -> bool {
        self.requests.iter().any(|request| link.is_under_way(request))
    }

    /// Keeps the memory as it is for as long as the process lives.
    pub(crate) fn leave(&mut self) {
        std::mem::forget(std::mem::replace(&mut self.memory, Memory::new(1)));
    }

    /// Gives requests back that have not ended: the lane ends.
    pub(crate) fn forget(&mut self, link: &Link) {
        self.requests.iter_mut().for_each(|request| link.forget(request.take()));
    }
}
