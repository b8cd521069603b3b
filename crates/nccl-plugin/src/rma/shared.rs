//! State that the threads of a group share with NCCL's threads.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crossrail_locks::Mutex;
use crossrail_types::{Error, ErrorKind, Result};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::batch::{Kind, Signal};
use super::gpu::Queue;
use super::memory::Region;
use super::requests::Requests;
use crate::log;

/// Most requests of one context to one peer: as many as NCCL's queues hold, by the properties of the device.
pub(crate) const IN_FLIGHT: u32 = 256;

/// Requests in flight of the contexts that one `createContext` made.
#[derive(Debug)]
pub(crate) struct Tally {
    /// By context and peer.
    in_flight: Box<[AtomicU32]>,
    ranks: usize,
    ended: AtomicBool,
}

impl Tally {
    pub(crate) fn new(contexts: usize, ranks: usize) -> Arc<Tally> {
        let in_flight = (0..contexts * ranks).map(|_| AtomicU32::new(0)).collect();
        Arc::new(Tally { in_flight, ranks, ended: AtomicBool::new(false) })
    }

    /// No request is tested any more, and what was not begun is not.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Release);
    }

    /// Counts a request.
    ///
    /// # Errors
    /// `Exhausted`.
    pub(crate) fn start(self: &Arc<Tally>, requests: &Requests, context: usize, rank: u32) -> Result<(Ticket, u64)> {
        let at = context * self.ranks + rank as usize;
        if self.in_flight[at].fetch_add(1, Ordering::Relaxed) >= IN_FLIGHT {
            self.in_flight[at].fetch_sub(1, Ordering::Relaxed);
            let detail = format!("context {context} has {IN_FLIGHT} requests to rank {rank} in flight");
            return Err(Error::new(ErrorKind::Exhausted, "request", detail));
        }
        let (request, handle) = requests.start().inspect_err(|_| {
            self.in_flight[at].fetch_sub(1, Ordering::Relaxed);
        })?;
        Ok((Ticket { request, tally: Arc::clone(self), at }, handle))
    }
}

/// A request, for the thread that ends it.
#[derive(Debug)]
pub(crate) struct Ticket {
    request: u32,
    tally: Arc<Tally>,
    at: usize,
}

impl Ticket {
    pub(crate) fn finish(self, requests: &Requests, outcome: Result<()>) {
        self.tally.in_flight[self.at].fetch_sub(1, Ordering::Relaxed);
        if self.is_over() {
            requests.forget(self.request);
        } else {
            requests.finish(self.request, outcome);
        }
    }

    /// Its context has ended.
    pub(crate) fn is_over(&self) -> bool {
        self.tally.ended.load(Ordering::Acquire)
    }
}

/// Source of an operation's bytes.
#[derive(Debug)]
pub(crate) enum Source {
    /// In the operation: NCCL frees the memory of such values before it deregisters it.
    Inline([u8; INLINE]),
    Memory(Arc<Region>, u64),
    None,
}

/// Most bytes of an inline source.
pub(crate) const INLINE: usize = 64;

/// An operation that is to be sent, or is being sent.
#[derive(Debug)]
pub(crate) struct Op {
    pub(crate) peer: u32,
    pub(crate) kind: Kind,
    pub(crate) source: Source,
    pub(crate) registration: u32,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) signal: Option<Signal>,
    pub(crate) tag: u64,
    /// `None`: no request waits for it.
    pub(crate) ticket: Option<Ticket>,
}

/// For the sending thread.
pub(crate) enum ToSending {
    Op(Op),
    Gpu(Box<dyn Queue>),
    /// Answered once nothing accesses retired regions.
    Fence(Sender<()>),
}

/// For the receiving thread.
pub(crate) enum ToReceiving {
    Gpu(Box<dyn Queue>),
    Fence(Sender<()>),
}

/// A queue to a thread, which may be asleep.
pub(crate) struct Mailbox<T> {
    items: Mutex<Vec<T>>,
    sleeps: AtomicBool,
    event: EventFd,
}

impl<T> Mailbox<T> {
    fn new() -> Result<Mailbox<T>> {
        let event = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|error| Error::io("connect", "eventfd", &error.into()))?;
        Ok(Mailbox { items: Mutex::default(), sleeps: AtomicBool::new(false), event })
    }

    pub(crate) fn push(&self, item: T) {
        self.items.lock().push(item);
        self.wake();
    }

    /// Wakes the thread, should it be asleep.
    pub(crate) fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.sleeps.load(Ordering::Relaxed) && self.sleeps.swap(false, Ordering::Relaxed) {
            // A full counter is readable, too.
            let _ = self.event.write(1);
        }
    }

    /// Exchanges `into`, which is empty, for what was pushed.
    pub(crate) fn take(&self, into: &mut Vec<T>) {
        std::mem::swap(&mut *self.items.lock(), into);
    }

    /// The thread is about to sleep. False: there is something.
    pub(crate) fn arm(&self) -> bool {
        let _ = self.event.read();
        self.sleeps.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.items.lock().is_empty()
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.event.as_fd().as_raw_fd()
    }
}

/// Registration of a number.
pub(crate) enum Found {
    Known(Arc<Region>),
    /// Deregistered.
    Gone,
    /// The peer has registered it, and this rank has not.
    NotYet,
}

/// A get in flight.
#[derive(Debug)]
pub(crate) struct Get {
    pub(crate) peer: u32,
    pub(crate) region: Arc<Region>,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// Bytes that are not in place.
    pub(crate) left: u64,
    pub(crate) ticket: Ticket,
}

#[derive(Default)]
struct Gets {
    next: u64,
    open: HashMap<u64, Get>,
}

/// See the module.
pub(crate) struct Shared {
    pub(crate) id: u64,
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
    /// Time that a batch waits for registrations of this rank.
    pub(crate) patience: Duration,
    pub(crate) requests: Requests,
    pub(crate) sending: Mailbox<ToSending>,
    pub(crate) receiving: Mailbox<ToReceiving>,
    regions: Mutex<Vec<Option<Arc<Region>>>>,
    gets: Mutex<Gets>,
    /// By rank: why it was lost.
    lost: Vec<OnceLock<Error>>,
    has_failed: AtomicBool,
}

impl Shared {
    /// # Errors
    /// `Io` when the system refuses descriptors.
    pub(crate) fn new(id: u64, rank: u32, ranks: u32, patience: Duration) -> Result<Arc<Shared>> {
        Ok(Arc::new(Shared {
            id,
            rank,
            ranks,
            patience,
            requests: Requests::new(),
            sending: Mailbox::new()?,
            receiving: Mailbox::new()?,
            regions: Mutex::default(),
            gets: Mutex::default(),
            lost: (0..ranks).map(|_| OnceLock::new()).collect(),
            has_failed: AtomicBool::new(false),
        }))
    }

    /// Adds a registration, of the next number, which `make` gets.
    pub(crate) fn register(&self, make: impl FnOnce(u32) -> Region) -> Arc<Region> {
        let mut regions = self.regions.lock();
        let region = Arc::new(make(regions.len() as u32));
        regions.push(Some(Arc::clone(&region)));
        drop(regions);
        // A batch may wait for it.
        self.receiving.wake();
        region
    }

    /// Ends a registration. False: it has ended.
    pub(crate) fn deregister(&self, region: &Region) -> bool {
        region.retire();
        self.regions.lock().get_mut(region.number as usize).is_some_and(|entry| entry.take().is_some())
    }

    pub(crate) fn region(&self, number: u32) -> Found {
        match self.regions.lock().get(number as usize) {
            Some(Some(region)) => Found::Known(Arc::clone(region)),
            Some(None) => Found::Gone,
            None => Found::NotYet,
        }
    }

    /// Notes a get; its tag.
    pub(crate) fn begin_get(&self, get: Get) -> u64 {
        let mut gets = self.gets.lock();
        gets.next += 1;
        let tag = gets.next;
        gets.open.insert(tag, get);
        tag
    }

    /// Target of the replies to a get: region, offset and length.
    pub(crate) fn get_target(&self, tag: u64, peer: u32) -> Option<(Arc<Region>, u64, u64)> {
        let gets = self.gets.lock();
        let get = gets.open.get(&tag).filter(|get| get.peer == peer)?;
        Some((Arc::clone(&get.region), get.offset, get.len))
    }

    /// Bytes of a get are in place; the last ones end it.
    pub(crate) fn got(&self, tag: u64, bytes: u64) {
        let mut gets = self.gets.lock();
        let Some(get) = gets.open.get_mut(&tag) else { return };
        get.left = get.left.saturating_sub(bytes);
        if get.left == 0
            && let Some(get) = gets.open.remove(&tag)
        {
            drop(gets);
            get.ticket.finish(&self.requests, Ok(()));
        }
    }

    /// A get has failed.
    pub(crate) fn fail_get(&self, tag: u64, error: Error) {
        let get = self.gets.lock().open.remove(&tag);
        if let Some(get) = get {
            get.ticket.finish(&self.requests, Err(error));
        }
    }

    /// A peer is lost: requests to it fail from now on.
    pub(crate) fn lose(&self, rank: u32, error: Error) {
        let Some(lost) = self.lost.get(rank as usize) else { return };
        if lost.set(error.clone()).is_ok() {
            // Not an error while no request concerns it: ranks close their groups one after the other.
            log::info(format_args!("RMA: rank {rank} is lost: {error}"));
        }
        let ended: Vec<Get> = {
            let mut gets = self.gets.lock();
            let tags: Vec<u64> = gets.open.iter().filter(|(_, get)| get.peer == rank).map(|(tag, _)| *tag).collect();
            tags.iter().filter_map(|tag| gets.open.remove(tag)).collect()
        };
        for get in ended {
            self.fail();
            get.ticket.finish(&self.requests, Err(error.clone()));
        }
        self.sending.wake();
        self.receiving.wake();
    }

    /// Why a peer was lost.
    pub(crate) fn lost(&self, rank: u32) -> Option<&Error> {
        self.lost.get(rank as usize)?.get()
    }

    /// A request has failed, or will, because a peer is lost.
    pub(crate) fn fail(&self) {
        self.has_failed.store(true, Ordering::Release);
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Acquire)
    }
}
