//! Operations on callers' streams: waits for requests, and for signals behind copies
//! ([`Mapped::put`](super::Mapped::put)). They are only enqueued; nothing here blocks.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crossrail_cuda::{Capture, Context as Primary, Stream};
use crossrail_gpu::{Device, StreamSupport, Word, WordUse};
use crossrail_kernels::{FLAG_REACHED, FLAG_TIMED_OUT, FlagAwaitArgs};
use crossrail_types::{Error, ErrorKind, Result};

use super::Request;
use crate::memory::{self, Memory, Place};

/// A 64-bit word that becomes a value behind a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signal {
    /// Where in the mapped memory, in bytes; a multiple of 8.
    pub offset: usize,
    /// What it becomes.
    pub value: u64,
}

/// Outcome of a wait for a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The stream has not reached the end of the wait.
    Pending,
    /// The signal had reached its value.
    Reached,
    /// The time limit expired first; the stream continued anyway.
    TimedOut,
}

/// A wait for a signal that was enqueued in a stream.
#[derive(Clone, Debug)]
pub struct Awaited(Arc<Word>);

impl Awaited {
    /// The outcome so far. Of a wait captured in a graph: the latest replay's.
    pub fn outcome(&self) -> Outcome {
        match self.0.cell().load(Ordering::Acquire) {
            0 => Outcome::Pending,
            FLAG_REACHED => Outcome::Reached,
            _ => Outcome::TimedOut,
        }
    }
}

/// The GPU's context and what streams need of it, if it is a real one.
pub(super) fn real<'a>(device: &'a Device, what: &str) -> Result<(&'a Primary, &'a Arc<StreamSupport>)> {
    let simulated = || Error::new(ErrorKind::Unsupported, what, "a simulated GPU has no such streams");
    device.cuda().zip(device.stream_support()).ok_or_else(simulated)
}

/// Loads everything that puts and waits on that GPU need.
pub(super) fn prepare(device: &Device) {
    if let Some(calls) = device.stream_support() {
        calls.prepare(device.settings());
    }
}

impl Request {
    /// Lets a stream of GPU `ordinal` wait for the request: what is put into the stream after this call runs once the
    /// request is finished, whether it came out well or not ([`Request::test`] tells which). The host waits for
    /// nothing.
    ///
    /// # Safety
    /// `stream` must be a live stream's handle, or 0 for the default stream.
    ///
    /// # Errors
    /// `Usage`: the stream is another GPU's, or is being captured (a graph can't wait for one transfer again and again;
    /// capture [`Mapped::put`](super::Mapped::put) instead); `Exhausted`: as many of the process's streams wait on that
    /// GPU as may ([`crossrail_cuda::max_waiting_streams`]: 7, unless CUDA_DEVICE_MAX_CONNECTIONS says otherwise),
    /// since with one more what they wait for would not go on; `Unsupported`: there is no CUDA; what the driver says.
    pub unsafe fn wait_on(&self, stream: u64, ordinal: u32) -> Result<()> {
        self.progress.check_origin("wait_on")?;
        let device = self.progress.environment().gpus().device(ordinal)?;
        let (context, calls) = real(&device, "wait_on")?;
        // SAFETY: the caller vouches for the stream.
        let stream = unsafe { Stream::borrow(context, stream)? };
        if stream.capture()? != Capture::None {
            let detail = "the stream is being captured, and a graph cannot wait for one transfer again and again";
            return Err(Error::new(ErrorKind::Usage, "wait_on", detail).with_hint("capture Mapped::put instead"));
        }
        if self.is_done() {
            return Ok(());
        }
        // The transfer may need kernels on this GPU, and those can't be loaded while the stream waits.
        calls.prepare(device.settings());
        let word = calls.word(WordUse::EndsWait)?;
        let value = word.cell().load(Ordering::Relaxed) + 1;
        word.register_wait(stream.handle(), value, "wait_on")?;
        // The driver first: a wait that cannot be submitted needs no write to end it. It compares the lower half, and
        // so that streams that waited for less are satisfied by more.
        // SAFETY: the word's page is given back, at the earliest, when no stream waits for it; the stream was vouched
        // for.
        let put_in = unsafe { stream.wait_value32(word.address(), value as u32) };
        // Written by the thread that sees the request finish; the word is free then.
        let store = move || word.cell().store(value, Ordering::Release);
        match put_in {
            Ok(()) => self.on_complete(move |_| store()),
            Err(_) => store(),
        }
        put_in
    }
}

impl Memory {
    /// Enqueues in `stream` a wait until the 64-bit word at `offset` of this memory has reached `value`, or until
    /// `limit` has passed: the stream continues in either case, and [`Awaited::outcome`] tells which. It can be
    /// captured.
    ///
    /// While a stream waits, do not free memory or load kernels on its GPU: the driver blocks those calls until the
    /// wait ends.
    ///
    /// # Safety
    /// `stream` must be a live stream's handle, or 0; the memory must live until the stream has come past this.
    ///
    /// # Errors
    /// `Usage`: host memory, outside it, not 8-byte aligned, a stream of another GPU; `Exhausted` as
    /// [`Request::wait_on`], where it is not captured; what the driver says.
    pub unsafe fn await_signal(&self, offset: usize, value: u64, stream: u64, limit: Duration) -> Result<Awaited> {
        let what = "await_signal";
        memory::check(self.len(), offset, 8, what)?;
        let (Some(memory), Place::Gpu(_)) = (self.on_gpu(), self.place()) else {
            return Err(Error::new(ErrorKind::Usage, what, "the memory is the host's: read it directly"));
        };
        let flag = aligned(what, memory.ptr() + offset as u64)?;
        let device = memory.device();
        let (context, calls) = real(device, what)?;
        // SAFETY: the caller vouches for the stream.
        let stream = unsafe { Stream::borrow(context, stream)? };
        let kernels = calls.kernels(device.settings())?;
        let captured = stream.capture()? != Capture::None;
        let word = calls.word(if captured { WordUse::ReportsToGraph } else { WordUse::ReportsWait })?;
        word.cell().store(0, Ordering::Relaxed);
        if !captured && let Err(error) = word.register_wait(stream.handle(), 1, what) {
            // Nobody writes it: it is free again.
            word.cell().store(FLAG_TIMED_OUT, Ordering::Relaxed);
            return Err(error);
        }
        let limit_ns = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        let args = FlagAwaitArgs { flag, value, limit_ns, outcome: word.address() };
        // SAFETY: the flag is in bounds, and lives as the caller promises; the word is this wait's alone.
        if let Err(error) = unsafe { kernels.flag_await(&stream, &args) } {
            word.cell().store(FLAG_TIMED_OUT, Ordering::Relaxed);
            return Err(error);
        }
        Ok(Awaited(Arc::new(word)))
    }
}

pub(super) fn aligned(what: &str, address: u64) -> Result<u64> {
    if address.is_multiple_of(8) {
        return Ok(address);
    }
    Err(Error::new(ErrorKind::Usage, what, format!("the signal at {address:#x} is not 8-byte aligned")))
}
