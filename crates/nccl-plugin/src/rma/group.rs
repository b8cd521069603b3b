//! A group of ranks that put into each other's memory, and the contexts through which they do.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use crossrail::{Endpoint, Worker};
use crossrail_locks::Mutex;
use crossrail_nccl_abi::rma::{SIGNAL_ADD, SIGNAL_INC};
use crossrail_types::{Error, ErrorKind, Result};

use super::batch::{Kind, Refusal, Signal};
use super::gpu;
use super::memory::{Area, Region};
use super::progress::{Driven, Half};
use super::shared::{Get, INLINE, Op, Shared, Source, Tally, ToReceiving, ToSending};

/// Timeout for a thread to stop accessing memory.
const FENCE: Duration = Duration::from_secs(10);

/// A group: one `connect`. Any thread may use it; the last clone's end, or [`Group::close`], ends its threads.
pub(crate) struct Group {
    shared: Arc<Shared>,
    /// Memory of batches, to be pinned.
    areas: Vec<Arc<Area>>,
    gpu: Mutex<Option<Opened>>,
    tallies: Mutex<Vec<Weak<Tally>>>,
    stop: Arc<AtomicBool>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// For NCCL's thread, where cores are few.
    helped: Option<Arc<Driven>>,
    /// Their end is that of the rails.
    rails: Mutex<Option<(Worker, Vec<Endpoint>)>>,
}

/// The group's GPU.
struct Opened {
    ordinal: u32,
    _pins: Vec<Box<dyn Send + Sync>>,
}

/// Contexts: one `createContext`.
pub(crate) struct Contexts {
    group: Arc<Group>,
    count: usize,
    stride: u32,
    tally: Arc<Tally>,
}

/// A range of registered memory.
pub(crate) struct Range {
    pub(crate) region: Arc<Region>,
    pub(crate) offset: u64,
}

/// A signal as NCCL asks for it.
pub(crate) struct Asked {
    pub(crate) region: Arc<Region>,
    pub(crate) offset: u64,
    pub(crate) value: u64,
    pub(crate) operation: u32,
}

fn usage(operation: &str, detail: String) -> Error {
    Error::new(ErrorKind::Usage, operation, detail)
}

impl Group {
    /// Starts the threads: one, or `is_split` one for each half.
    ///
    /// # Errors
    /// `Io` when the system refuses one.
    pub(crate) fn start(
        shared: &Arc<Shared>,
        (sending, receiving): (Box<dyn Half>, Box<dyn Half>),
        areas: Vec<Arc<Area>>,
        rails: Option<(Worker, Vec<Endpoint>)>,
        is_split: bool,
    ) -> Result<Arc<Group>> {
        let stop = Arc::new(AtomicBool::new(false));
        let parts = match is_split {
            true => vec![Driven::new(vec![sending]), Driven::new(vec![receiving])],
            false => vec![Driven::new(vec![sending, receiving])],
        };
        let group = Arc::new(Group {
            shared: Arc::clone(shared),
            areas,
            gpu: Mutex::new(None),
            tallies: Mutex::default(),
            stop,
            threads: Mutex::default(),
            helped: parts.first().filter(|_| !is_split).cloned(),
            rails: Mutex::new(rails),
        });
        for (driven, name) in parts.into_iter().zip(["crossrail-rma-tx", "crossrail-rma-rx"]) {
            let stop = Arc::clone(&group.stop);
            let builder = std::thread::Builder::new().name(name.to_owned());
            let thread = builder.spawn(move || driven.run(&stop));
            group.threads.lock().push(thread.map_err(|error| Error::io("connect", "pthread_create", &error))?);
        }
        Ok(group)
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Registers memory: of a GPU, or of the host. All ranks do so in the same order.
    ///
    /// # Errors
    /// `Usage`: no memory; `Unsupported`: a GPU that cannot be used, or a second one; a failed driver call.
    pub(crate) fn register(&self, start: u64, len: usize, of_gpu: bool, flags: u64) -> Result<Arc<Region>> {
        if (start == 0 && len > 0) || start.checked_add(len as u64).is_none() {
            return Err(usage("regMrSym", format!("{len} bytes at {start:#x}")));
        }
        let ordinal = if of_gpu { Some(self.open_gpu(start)?) } else { None };
        let id = self.shared.id;
        Ok(self.shared.register(|number| Region::new(id, number, (start, len), ordinal, flags)))
    }

    /// Pins the batches' memory and gives each thread a stream, when the first memory of a GPU is registered.
    fn open_gpu(&self, address: u64) -> Result<u32> {
        let found = gpu::of(address)?;
        let mut opened = self.gpu.lock();
        match &*opened {
            Some(known) if known.ordinal == found.ordinal() => return Ok(known.ordinal),
            Some(known) => {
                let detail =
                    format!("memory of cuda:{} in a group with that of cuda:{}", found.ordinal(), known.ordinal);
                return Err(Error::new(ErrorKind::Unsupported, "regMrSym", detail));
            }
            None => {}
        }
        let pins = self.areas.iter().map(|area| found.pin(area)).collect::<Result<_>>()?;
        let (sending, receiving) = (found.queue()?, found.queue()?);
        self.shared.sending.push(ToSending::Gpu(sending));
        self.shared.receiving.push(ToReceiving::Gpu(receiving));
        *opened = Some(Opened { ordinal: found.ordinal(), _pins: pins });
        Ok(found.ordinal())
    }

    /// Ends a registration: afterwards nothing accesses the memory.
    ///
    /// # Errors
    /// `Usage`: it has ended; `Timeout`: copies are still in flight.
    pub(crate) fn deregister(&self, region: &Region) -> Result<()> {
        if !self.shared.deregister(region) {
            return Err(usage("deregMrSym", "the memory is not registered any more".to_owned()));
        }
        if self.stop.load(Ordering::Acquire) {
            return Ok(());
        }
        let (done, answers) = channel();
        self.shared.sending.push(ToSending::Fence(done.clone()));
        self.shared.receiving.push(ToReceiving::Fence(done));
        for _ in 0..2 {
            if answers.recv_timeout(FENCE).is_err() && !self.stop.load(Ordering::Acquire) {
                let detail = "copies from or to the memory are still in flight";
                return Err(Error::new(ErrorKind::Timeout, "deregMrSym", detail).with_waited(FENCE));
            }
        }
        Ok(())
    }

    /// Makes contexts.
    ///
    /// # Errors
    /// `Usage`: no valid number of them, or a stride that does not divide the ranks.
    pub(crate) fn contexts(self: &Arc<Group>, count: i32, stride: i32) -> Result<Contexts> {
        let ranks = self.shared.ranks;
        let (count, stride) = match (usize::try_from(count), u32::try_from(stride)) {
            (Ok(count), Ok(stride)) if stride > 0 && ranks.is_multiple_of(stride) => (count, stride),
            _ => {
                let detail = format!("{count} contexts of every {stride}th of {ranks} ranks");
                return Err(usage("createContext", detail));
            }
        };
        let tally = Tally::new(count, ranks as usize);
        let mut tallies = self.tallies.lock();
        tallies.retain(|tally| tally.strong_count() > 0);
        tallies.push(Arc::downgrade(&tally));
        Ok(Contexts { group: Arc::clone(self), count, stride, tally })
    }

    /// Ends the group: its threads, its rails. Contexts that were not destroyed end, too.
    ///
    /// # Errors
    /// `Timeout`: a peer may still access memory; the group has ended all the same.
    pub(crate) fn close(&self) -> Result<()> {
        for tally in self.tallies.lock().drain(..) {
            if let Some(tally) = tally.upgrade() {
                tally.end();
            }
        }
        self.stop.store(true, Ordering::Release);
        self.shared.sending.wake();
        self.shared.receiving.wake();
        for thread in self.threads.lock().drain(..) {
            thread.thread().unpark();
            // One that has panicked has ended, too.
            let _ = thread.join();
        }
        let ended = self.rails.lock().take().map_or(Ok(()), |(worker, endpoints)| {
            drop(endpoints);
            worker.close()
        });
        *self.gpu.lock() = None;
        ended
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Reported by the call that has closed it, if one has.
        let _ = self.close();
    }
}

impl Contexts {
    pub(crate) fn shared(&self) -> &Shared {
        &self.group.shared
    }

    /// Makes progress, should the threads need help.
    pub(crate) fn progress(&self) {
        if let Some(driven) = &self.group.helped {
            driven.help();
        }
    }

    /// Ends them: their requests are not tested any more.
    pub(crate) fn end(&self) {
        self.tally.end();
    }

    /// Checks the arguments that all operations have.
    pub(crate) fn check(&self, operation: &str, context: i32, rank: u32) -> Result<usize> {
        let shared = &self.group.shared;
        let index = usize::try_from(context).ok().filter(|index| *index < self.count);
        let index = index.ok_or_else(|| usage(operation, format!("context {context} of {}", self.count)))?;
        if rank >= shared.ranks {
            return Err(usage(operation, format!("rank {rank} of {}", shared.ranks)));
        }
        if !rank.abs_diff(shared.rank).is_multiple_of(self.stride) {
            let detail = format!("rank {rank} is not a peer of rank {}: the stride is {}", shared.rank, self.stride);
            return Err(usage(operation, detail));
        }
        match shared.lost(rank) {
            Some(error) => {
                shared.fail();
                Err(error.clone())
            }
            None if self.group.stop.load(Ordering::Acquire) => {
                Err(Error::new(ErrorKind::Closed, operation, "the group is closed"))
            }
            None => Ok(index),
        }
    }

    fn own(&self, operation: &str, region: &Region) -> Result<()> {
        if region.group == self.group.shared.id {
            return Ok(());
        }
        Err(usage(operation, "memory that another group has registered".to_owned()))
    }

    fn local(&self, operation: &str, range: &Range, len: u64) -> Result<u64> {
        self.own(operation, &range.region)?;
        range.region.range(range.offset, len).map_err(|why| {
            let detail = format!("{len} bytes at {} of {}: {}", range.offset, range.region.len(), text(why));
            usage(operation, detail)
        })
    }

    /// Puts bytes, if any, and then a signal. Returns the request's handle.
    ///
    /// # Errors
    /// `Usage`: an argument; `Exhausted`: too many requests; why the peer is lost.
    pub(crate) fn put(
        &self,
        (context, rank): (i32, u32),
        ranges: Option<(Range, Range)>,
        len: usize,
        signal: Option<Asked>,
    ) -> Result<u64> {
        let operation = if signal.is_some() { "iputSignal" } else { "iput" };
        let context = self.check(operation, context, rank)?;
        let (mut source, mut registration, mut offset) = (Source::None, 0, 0);
        if len > 0 {
            let Some((from, to)) = ranges else {
                return Err(usage(operation, format!("no memory for {len} bytes")));
            };
            let at = self.local(operation, &from, len as u64)?;
            self.own(operation, &to.region)?;
            (registration, offset) = (to.region.number, to.offset);
            source = match from.region.gpu {
                None if len <= INLINE => Source::Inline(copied(at, len)),
                _ => Source::Memory(from.region, from.offset),
            };
        }
        let signal = signal.map(|asked| self.signal(operation, &asked)).transpose()?;
        let shared = &self.group.shared;
        let (ticket, handle) = self.tally.start(&shared.requests, context, rank)?;
        let (kind, len, ticket) = (Kind::Put, len as u64, Some(ticket));
        let op = Op { peer: rank, kind, source, registration, offset, len, signal, tag: 0, ticket };
        shared.sending.push(ToSending::Op(op));
        Ok(handle)
    }

    fn signal(&self, operation: &str, asked: &Asked) -> Result<Signal> {
        self.own(operation, &asked.region)?;
        let value = match asked.operation {
            SIGNAL_INC => 1,
            SIGNAL_ADD => asked.value,
            other => return Err(usage(operation, format!("operation {other} of a signal; 1 and 2 are known"))),
        };
        Ok(Signal { registration: asked.region.number, offset: asked.offset, value })
    }

    /// Gets bytes. The request's handle; the bytes are visible to the GPU when it is done.
    ///
    /// # Errors
    /// As [`Contexts::put`].
    pub(crate) fn get(&self, (context, rank): (i32, u32), remote: &Range, local: Range, len: usize) -> Result<u64> {
        let context = self.check("iget", context, rank)?;
        let len = len as u64;
        self.local("iget", &local, len)?;
        self.own("iget", &remote.region)?;
        let shared = &self.group.shared;
        let (ticket, handle) = self.tally.start(&shared.requests, context, rank)?;
        let get = Get { peer: rank, region: local.region, offset: local.offset, len, left: len, ticket };
        let op = Op {
            peer: rank,
            kind: Kind::Get,
            source: Source::None,
            registration: remote.region.number,
            offset: remote.offset,
            len,
            signal: None,
            tag: shared.begin_get(get),
            ticket: None,
        };
        shared.sending.push(ToSending::Op(op));
        Ok(handle)
    }
}

fn text(why: Refusal) -> &'static str {
    Refusal::text(why as u8)
}

/// Bytes of registered host memory.
#[allow(unsafe_code)]
fn copied(at: u64, len: usize) -> [u8; INLINE] {
    let mut bytes = [0; INLINE];
    // SAFETY: the range was checked; NCCL keeps registered memory, except for inline values after their last put.
    unsafe { std::ptr::copy_nonoverlapping(at as usize as *const u8, bytes.as_mut_ptr(), len.min(INLINE)) };
    bytes
}
