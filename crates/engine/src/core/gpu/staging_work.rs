//! What a worker has to do with the GPUs' stagers: the GPUs, work that is under way there, and who waits for slots.

use std::sync::Arc;

use crossrail_cuda_ipc::Domain;
use crossrail_proto as proto;
use crossrail_types::{EndpointId, LaneId};
use proto::{Landed, Memory};
use slab::Slab;

use crossrail_gpu::{Device, StagingQueue, StreamPoint};

/// A GPU that this worker's operations have named.
pub(crate) struct Gpu {
    pub(crate) device: Arc<Device>,
    pub(crate) client: StagingQueue,
}

/// What a worker has to do with stagers.
#[derive(Default)]
pub(crate) struct Staging {
    /// Copies between processes; `None`: not asked for yet.
    domain: Option<Result<Arc<Domain>, String>>,
    /// By number.
    pub(crate) gpus: Vec<Option<Gpu>>,
    work: Slab<Entry>,
    serial: u32,
    /// Lanes with chunks that wait for a slot, and lanes that hold a head for which there is none.
    pub(crate) slotless: Vec<(EndpointId, LaneId)>,
    pub(crate) waiting: Vec<(EndpointId, LaneId)>,
    /// Lanes polled under the lock have something that they are to ask for.
    pub(crate) inside: bool,
}

struct Entry {
    serial: u32,
    work: Work,
}

/// What a ticket stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    Pack {
        endpoint: EndpointId,
        lane: LaneId,
        number: u64,
        memory: Memory,
    },
    Unpack {
        endpoint: EndpointId,
        memory: Memory,
        landed: Landed,
    },
    /// Operations wait for an event of a caller's stream.
    Gate,
}

impl Work {
    pub(crate) fn of(&self, whose: EndpointId) -> bool {
        matches!(self, Work::Pack { endpoint, .. } | Work::Unpack { endpoint, .. } if *endpoint == whose)
    }

    pub(crate) fn touches(&self, whose: EndpointId, which: impl Fn(&Memory) -> bool) -> bool {
        self.of(whose) && matches!(self, Work::Pack { memory, .. } | Work::Unpack { memory, .. } if which(memory))
    }
}

impl Staging {
    /// What copies between processes go by, or why there is none.
    pub(crate) fn domain(&self) -> Result<Arc<Domain>, String> {
        self.domain.clone().unwrap_or_else(|| Err("no GPU of this process is in use".to_owned()))
    }

    pub(crate) fn set_domain(&mut self, domain: Result<Arc<Domain>, String>) {
        self.domain.get_or_insert(domain);
    }

    pub(crate) fn gpu(&self, ordinal: u32) -> Option<&Gpu> {
        self.gpus.get(ordinal as usize)?.as_ref()
    }

    /// Adds a GPU; the one given back is not needed, and must be dropped without the worker's lock.
    pub(crate) fn add(&mut self, gpu: Gpu) -> Option<Gpu> {
        let at = gpu.device.ordinal() as usize;
        if self.gpus.len() <= at {
            self.gpus.resize_with(at + 1, || None);
        }
        match &self.gpus[at] {
            Some(_) => Some(gpu),
            None => {
                self.gpus[at] = Some(gpu);
                None
            }
        }
    }

    /// Takes all GPUs away, to be dropped without the worker's lock.
    pub(crate) fn take_gpus(&mut self) -> Vec<Option<Gpu>> {
        std::mem::take(&mut self.gpus)
    }

    pub(crate) fn ticket(&mut self, work: Work) -> u64 {
        self.serial = self.serial.wrapping_add(1);
        let key = self.work.insert(Entry { serial: self.serial, work });
        u64::from(self.serial) << 32 | key as u64
    }

    /// What that ticket stood for; `None`: it was given up.
    pub(crate) fn take(&mut self, ticket: u64) -> Option<Work> {
        let known = self.is_pending(ticket);
        known.then(|| self.work.remove((ticket & u64::from(u32::MAX)) as usize).work)
    }

    /// Whether what that ticket stands for is not finished.
    pub(crate) fn is_pending(&self, ticket: u64) -> bool {
        let (key, serial) = ((ticket & u64::from(u32::MAX)) as usize, (ticket >> 32) as u32);
        self.work.get(key).is_some_and(|entry| entry.serial == serial)
    }

    /// Waits for `event` on that GPU; the ticket to expect.
    pub(crate) fn after(&mut self, ordinal: u32, event: StreamPoint) -> Option<u64> {
        let ticket = self.ticket(Work::Gate);
        self.gpu(ordinal)?.client.wait_for(ticket, event);
        Some(ticket)
    }

    /// Nothing of what `which` names is touched any more; what could not be ended in time.
    pub(crate) fn quiesce(&mut self, which: impl Fn(&Work) -> bool) -> Option<String> {
        let found: Vec<(usize, u64)> = self
            .work
            .iter()
            .filter(|(_, entry)| which(&entry.work))
            .map(|(key, entry)| (key, u64::from(entry.serial) << 32 | key as u64))
            .collect();
        if found.is_empty() {
            return None;
        }
        for (key, _) in &found {
            self.work.try_remove(*key);
        }
        let tickets = |ticket| found.iter().any(|(_, known)| *known == ticket);
        let failed = self.gpus.iter().flatten().filter_map(|gpu| gpu.client.quiesce(tickets).err());
        failed.map(|error| error.to_string()).next()
    }
}
