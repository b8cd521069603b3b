use crossrail_proto as proto;
use crossrail_types::{EndpointId, LaneId};
use proto::{Landed, Memory};
use slab::Slab;

/// Work submitted to the stagers and not completed, by ticket.
#[derive(Default)]
pub(super) struct StagingWork {
    entries: Slab<Entry>,
    /// Part of every ticket, so that a ticket of an entry that is reused refers to nothing.
    serial: u32,
}

struct Entry {
    serial: u32,
    work: Work,
}

/// What a ticket stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    Pack {
        endpoint: EndpointId,
        lane: LaneId,
        number: u64,
        memory: Memory,
        gpu: u32,
    },
    Unpack {
        endpoint: EndpointId,
        memory: Memory,
        landed: Landed,
        gpu: u32,
    },
    /// Operations wait for a point in a caller's stream, which is named by its handle.
    Wait {
        gpu: u32,
        stream: u64,
    },
}

impl Work {
    pub(super) fn is_of(&self, whose: EndpointId) -> bool {
        matches!(self, Work::Pack { endpoint, .. } | Work::Unpack { endpoint, .. } if *endpoint == whose)
    }

    pub(super) fn touches(&self, whose: EndpointId, which: impl Fn(&Memory) -> bool) -> bool {
        self.is_of(whose) && matches!(self, Work::Pack { memory, .. } | Work::Unpack { memory, .. } if which(memory))
    }
}

impl StagingWork {
    /// A new ticket.
    pub(super) fn add(&mut self, work: Work) -> u64 {
        self.serial = self.serial.wrapping_add(1);
        let key = self.entries.insert(Entry { serial: self.serial, work });
        ticket(self.serial, key)
    }

    /// What a completed ticket stood for; `None`: it was cancelled.
    pub(super) fn take(&mut self, ticket: u64) -> Option<Work> {
        self.is_pending(ticket).then(|| self.entries.remove(key(ticket)).work)
    }

    pub(super) fn is_pending(&self, ticket: u64) -> bool {
        self.entries.get(key(ticket)).is_some_and(|entry| entry.serial == (ticket >> 32) as u32)
    }

    /// Cancels all work that `which` selects; its tickets.
    pub(super) fn cancel(&mut self, which: impl Fn(&Work) -> bool) -> Vec<u64> {
        let selected = self.entries.iter().filter(|(_, entry)| which(&entry.work));
        let tickets: Vec<u64> = selected.map(|(key, entry)| ticket(entry.serial, key)).collect();
        for ticket in &tickets {
            self.entries.try_remove(key(*ticket));
        }
        tickets
    }
}

fn ticket(serial: u32, key: usize) -> u64 {
    u64::from(serial) << 32 | key as u64
}

fn key(ticket: u64) -> usize {
    (ticket & u64::from(u32::MAX)) as usize
}
