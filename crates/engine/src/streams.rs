//! What is put into callers' streams: waits for operations, copies to a peer's memory with a signal behind them, waits
//! for such signals. None of it waits here.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossrail_cuda::{Capture, Context as Primary, PinnedMemory, Stream};
use crossrail_kernels::{FLAG_REACHED, FlagAwaitArgs, Kernels, PutArgs};
use crossrail_types::{Error, ErrorKind, Result, Settings};
use parking_lot::Mutex;

use crate::buffer::{self, Memory, Place};
use crate::device::Device;
use crate::mapped::Mapped;
use crate::request::Request;

/// Pinned memory is taken by so many bytes.
const PAGE: usize = 4096;
/// Words lie so far apart: each in a cache line of its own.
const LINE: usize = 64;

/// A 64-bit word that becomes a value behind a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signal {
    /// Where in the mapped memory, in bytes; a multiple of 8.
    pub offset: usize,
    /// What it becomes.
    pub value: u64,
}

/// How a wait for a signal went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The stream has not come to its end.
    Pending,
    /// The signal had reached its value.
    Reached,
    /// The limit was over first; the stream went on all the same.
    TimedOut,
}

/// A wait for a signal that was put into a stream.
#[derive(Clone, Debug)]
pub struct Awaited(Arc<Word>);

impl Awaited {
    /// How it went. Of a wait that was captured in a graph: how the latest replay's did.
    pub fn outcome(&self) -> Outcome {
        match self.0.cell().load(Ordering::Acquire) {
            0 => Outcome::Pending,
            FLAG_REACHED => Outcome::Reached,
            _ => Outcome::TimedOut,
        }
    }
}

/// What callers' streams need of one GPU. Primary contexts are the process's, so this is too.
#[derive(Default)]
pub(crate) struct Calls {
    kernels: Mutex<Option<Arc<Kernels>>>,
    /// Words that end waits of streams, and words that tell how waits went: a stream may look at one of the former some
    /// time after it was written, so that it must only ever grow.
    pages: [Mutex<Pages>; 2],
}

#[derive(Default)]
struct Pages {
    all: Vec<Arc<PinnedMemory>>,
    free: Vec<(usize, usize)>,
}

/// A word in pinned memory, nobody else's as long as this lives.
struct Word {
    owner: Arc<Calls>,
    page: Arc<PinnedMemory>,
    at: (usize, usize),
    /// A stream may still write it: it is not given to anybody else until that has happened.
    awaits: bool,
    /// A graph may write it for ever.
    captured: bool,
}

impl std::fmt::Debug for Word {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Word({})", self.cell().load(Ordering::Relaxed))
    }
}

impl Word {
    fn cell(&self) -> &AtomicU64 {
        // SAFETY: the page has a word there, aligned; every access to it is atomic, here and on the GPU.
        unsafe { AtomicU64::from_ptr(self.page.as_ptr().add(self.at.1).cast()) }
    }

    fn address(&self) -> u64 {
        self.page.address() + self.at.1 as u64
    }
}

impl Drop for Word {
    fn drop(&mut self) {
        let busy = self.captured || (self.awaits && self.cell().load(Ordering::Acquire) == 0);
        if !busy {
            self.owner.pages[usize::from(self.awaits)].lock().free.push(self.at);
        }
    }
}

impl Calls {
    fn word(self: &Arc<Self>, context: &Primary, awaits: bool, captured: bool) -> Result<Word> {
        let mut pages = self.pages[usize::from(awaits)].lock();
        if pages.free.is_empty() {
            let page = PinnedMemory::new(context, PAGE)?;
            // SAFETY: the page is new, nobody else's, and of that length.
            unsafe { page.as_ptr().write_bytes(0, PAGE) };
            let at = pages.all.len();
            pages.all.push(Arc::new(page));
            pages.free.extend((0..PAGE / LINE).map(|index| (at, index * LINE)));
        }
        let at = pages.free.pop().unwrap_or_default();
        let page = pages.all[at.0].clone();
        drop(pages);
        Ok(Word { owner: self.clone(), page, at, awaits, captured })
    }

    fn kernels(&self, context: &Primary, settings: &Settings) -> Result<Arc<Kernels>> {
        let mut kept = self.kernels.lock();
        if let Some(kernels) = &*kept {
            return Ok(kernels.clone());
        }
        let kernels = crossrail_kernels::shared(context, settings, settings.timeout)?;
        *kept = Some(kernels.clone());
        Ok(kernels)
    }
}

/// What there is for that GPU.
fn calls(device: &Device) -> Arc<Calls> {
    static ALL: Mutex<BTreeMap<u32, Arc<Calls>>> = Mutex::new(BTreeMap::new());
    ALL.lock().entry(device.ordinal()).or_default().clone()
}

/// The GPU's context, if it is a real one.
fn context<'a>(device: &'a Device, what: &str) -> Result<&'a Primary> {
    device.cuda().ok_or_else(|| Error::new(ErrorKind::Unsupported, what, "a simulated GPU has no such streams"))
}

/// Has everything loaded that puts and waits of that GPU need: a capture is no time for it. What fails here fails
/// again, with its reason, where it is needed.
pub(crate) fn prepare(device: &Device) {
    if let Some(context) = device.cuda() {
        let _ = calls(device).kernels(context, device.settings());
    }
}

impl Request {
    /// Lets a stream of GPU `ordinal` wait for the request: what is put into the stream after this call runs once the
    /// request is finished, whether it came out well or not ([`Request::test`] tells which). The host waits for nothing.
    ///
    /// # Safety
    /// `stream` must be a live stream's handle, or 0 for the default stream.
    ///
    /// # Errors
    /// `Usage`: the stream is another GPU's, or is being captured (a graph can't wait for one transfer again and again;
    /// capture [`Mapped::put`] instead); `Unsupported`: there is no CUDA; what the driver says.
    pub unsafe fn wait_on(&self, stream: u64, ordinal: u32) -> Result<()> {
        let device = self.shared.context.gpus().device(ordinal)?;
        let context = context(&device, "wait_on")?;
        // SAFETY: the caller vouches for the stream.
        let stream = unsafe { Stream::borrow(context, stream)? };
        if stream.capture()? != Capture::None {
            let detail = "the stream is being captured, and a graph cannot wait for one transfer again and again";
            return Err(Error::new(ErrorKind::Usage, "wait_on", detail).with_hint("capture Mapped::put instead"));
        }
        if self.is_done() {
            return Ok(());
        }
        let word = calls(&device).word(context, false, false)?;
        let before = word.cell().load(Ordering::Relaxed) as u32;
        let (address, value) = (word.address(), before.wrapping_add(1));
        // Written by whoever sees it finish. Streams that waited for less are satisfied by more, so that the word is
        // free as soon as it is written.
        let tell = move |_| word.cell().store(u64::from(value), Ordering::Release);
        // The driver first: a wait that cannot be put in needs nobody to end it.
        // SAFETY: the word lives as long as its GPU's pages do, which the context keeps; the stream was vouched for.
        unsafe { stream.wait_value32(address, value)? };
        self.on_complete(tell);
        Ok(())
    }
}

impl Mapped {
    /// Puts into `stream`: a copy of `len` bytes of GPU memory at `src` to `offset` of this memory, and then `signal`:
    /// whoever sees the signal's value there, on any GPU or the host, also sees the bytes. The host is not involved
    /// afterwards, and a graph that captures this does it at every replay.
    ///
    /// # Safety
    /// `stream` must be a live stream's handle, or 0; `src` must be valid for `len` bytes until the stream has come past
    /// this, and this memory mapped: keep a clone of it as long as that may be, or as the graph is used.
    ///
    /// # Errors
    /// `Usage`: outside the memory, a signal that is not 8-byte aligned, host memory, a stream of another GPU than
    /// [`Mapped::place`]; what the driver says.
    pub unsafe fn put(&self, offset: usize, src: u64, len: usize, stream: u64, signal: Option<Signal>) -> Result<()> {
        buffer::check(self.len(), offset, len, "put")?;
        let signal_at = match signal {
            Some(signal) => self.signal_at(signal)?,
            None => 0,
        };
        let Some(device) = &self.gpu else {
            return Err(Error::new(ErrorKind::Usage, "put", "the memory is the host's: write it directly"));
        };
        let context = context(device, "put")?;
        // SAFETY: the caller vouches for the stream.
        let stream = unsafe { Stream::borrow(context, stream)? };
        let kernels = calls(device).kernels(context, device.settings())?;
        let dst = self.ptr() as u64 + offset as u64;
        let value = signal.map_or(0, |signal| signal.value);
        // By a kernel at every size: in a graph, a copy engine's node takes longer to begin than it gains.
        // No counter: streams and graphs would each need their own, and a handle does not tell streams apart for ever.
        let args = PutArgs { dst, src, len: len as u64, part: 0, signal: signal_at, value, counter: 0 };
        // SAFETY: in bounds by the check, mapped as the caller promises; `src` is vouched for.
        unsafe { kernels.put(&stream, &args, None) }
    }

    fn signal_at(&self, signal: Signal) -> Result<u64> {
        buffer::check(self.len(), signal.offset, 8, "put")?;
        aligned("put", self.ptr() as u64 + signal.offset as u64)
    }
}

impl Memory {
    /// Puts into `stream`: a wait until the 64-bit word at `offset` of this memory has reached `value`, or `limit` is
    /// over: the stream goes on in either case, and [`Awaited::outcome`] says which it was. It can be captured.
    ///
    /// While a stream waits, its GPU should not be asked to free memory or load kernels: the driver lets those wait too.
    ///
    /// # Safety
    /// `stream` must be a live stream's handle, or 0; the memory must live until the stream has come past this.
    ///
    /// # Errors
    /// `Usage`: host memory, outside it, not 8-byte aligned, a stream of another GPU; what the driver says.
    pub unsafe fn await_signal(&self, offset: usize, value: u64, stream: u64, limit: Duration) -> Result<Awaited> {
        let what = "await_signal";
        buffer::check(self.len(), offset, 8, what)?;
        let (Some(memory), Place::Gpu(_)) = (self.on_gpu(), self.place()) else {
            return Err(Error::new(ErrorKind::Usage, what, "the memory is the host's: read it directly"));
        };
        let flag = aligned(what, memory.ptr() + offset as u64)?;
        let device = memory.device();
        let context = context(device, what)?;
        // SAFETY: the caller vouches for the stream.
        let stream = unsafe { Stream::borrow(context, stream)? };
        let kernels = calls(device).kernels(context, device.settings())?;
        let captured = stream.capture()? != Capture::None;
        let word = calls(device).word(context, true, captured)?;
        word.cell().store(0, Ordering::Relaxed);
        let limit_ns = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        let args = FlagAwaitArgs { flag, value, limit_ns, outcome: word.address() };
        // SAFETY: the flag is in bounds, and lives as the caller promises; the word is this wait's alone.
        unsafe { kernels.flag_await(&stream, &args)? };
        Ok(Awaited(Arc::new(word)))
    }
}

fn aligned(what: &str, address: u64) -> Result<u64> {
    if address.is_multiple_of(8) {
        return Ok(address);
    }
    Err(Error::new(ErrorKind::Usage, what, format!("the signal at {address:#x} is not 8-byte aligned")))
}
