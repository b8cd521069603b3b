//! One end of a measurement: its memory, its requests, and what the two ends agree on.

use std::time::{Duration, Instant};

use crossrail::{Context, Endpoint, Receipt, Request, Worker};
use crossrail_types::{Error, ErrorKind, Result};

use crate::area::{Area, MemoryKind};

/// Interval at which a long wait calls the observer.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Upper bound on a control message between the two ends, in bytes.
const CONTROL_LEN: usize = 64 << 10;
/// Upper half of the tags that measurements use: an application that measures beside its own traffic must not use them.
pub(crate) const TAGS: u64 = 0xc705_be4c_0000_0000;
const DATA: u64 = TAGS | 1;
const REPLY: u64 = TAGS | 2;
const CONTROL: u64 = TAGS | 3;

/// Which end of a bench this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Sends first, measures.
    Driver,
    /// Answers.
    Echo,
}

/// Reports progress: called some ten times per second, on the measuring thread, outside of what is timed.
pub trait Observer {
    /// `done` of `total` iterations are complete. An error ends the run; [`stop`] ends it early, and [`p2p`] then
    /// returns what it has measured. Two-ended measurements also call it when the warm-up is done, and all is.
    ///
    /// # Errors
    /// The error with which to end the run.
    ///
    /// [`p2p`]: crate::p2p
    fn tick(&mut self, done: u64, total: u64) -> Result<()>;
}

const STOPPED: &str = "stopped by its observer";

/// The error by which an [`Observer`] stops a run early.
#[must_use]
pub fn stop() -> Error {
    Error::new(ErrorKind::Cancelled, "bench", STOPPED)
}

/// Whether `error` is that of [`stop`].
pub(crate) fn stopped(error: &Error) -> bool {
    error.kind == ErrorKind::Cancelled && error.detail == STOPPED
}

/// An observer that does nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unobserved;

impl Observer for Unobserved {
    fn tick(&mut self, _done: u64, _total: u64) -> Result<()> {
        Ok(())
    }
}

/// One end of a bench.
pub struct Session<'a> {
    /// Allocates memory; its timeout bounds every wait.
    pub context: &'a Context,
    /// Receives.
    pub worker: &'a Worker,
    /// Sends. The peer runs the same bench in the other role.
    pub endpoint: &'a Endpoint,
    /// Which end this is.
    pub role: Role,
    /// What memory this end moves (the ends may differ).
    pub memory: MemoryKind,
    /// Receives progress reports.
    pub observer: &'a mut dyn Observer,
}

/// A request in flight. It is cancelled when dropped unfinished, so that a failed run leaves no receive posted.
pub(crate) struct Flight {
    request: Request,
    finished: bool,
}

impl Flight {
    /// The request.
    pub(crate) fn request(&self) -> &Request {
        &self.request
    }

    /// Ends it without cancelling: its request has finished.
    pub(crate) fn finished(mut self) {
        self.finished = true;
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if !self.finished {
            self.request.cancel();
        }
    }
}

/// Progress of a run, and when it was last reported.
pub(crate) struct Progress {
    done: u64,
    total: u64,
    reported: Instant,
}

impl Progress {
    pub(crate) fn new(total: usize) -> Progress {
        Progress { done: 0, total: total as u64, reported: Instant::now() }
    }

    /// Counts iterations where no clock is read.
    #[inline]
    pub(crate) fn count(&mut self, by: usize) {
        self.done += by as u64;
    }
}

impl Session<'_> {
    #[inline]
    pub(crate) fn send(&self, area: &Area) -> Result<Flight> {
        flight(self.endpoint.send(area.buffer(), DATA))
    }

    #[inline]
    pub(crate) fn recv(&self, area: &Area) -> Result<Flight> {
        flight(self.worker.recv(area.buffer(), DATA, u64::MAX, Some(self.endpoint)))
    }

    #[inline]
    pub(crate) fn send_reply(&self, area: &Area) -> Result<Flight> {
        flight(self.endpoint.send(area.buffer(), REPLY))
    }

    #[inline]
    pub(crate) fn recv_reply(&self, area: &Area) -> Result<Flight> {
        flight(self.worker.recv(area.buffer(), REPLY, u64::MAX, Some(self.endpoint)))
    }

    /// Waits for one request, within the context's timeout; reports progress meanwhile.
    #[inline]
    pub(crate) fn finish(&mut self, flight: Flight, progress: &mut Progress) -> Result<Receipt> {
        self.finish_within(flight, self.context.settings().timeout, progress)
    }

    /// As [`finish`](Session::finish), within `limit`.
    #[inline]
    pub(crate) fn finish_within(
        &mut self,
        mut flight: Flight,
        limit: Duration,
        progress: &mut Progress,
    ) -> Result<Receipt> {
        match flight.request.wait(Some(POLL_INTERVAL)) {
            Ok(receipt) => {
                flight.finished = true;
                Ok(receipt)
            }
            Err(error) => self.finish_slowly(flight, limit, progress, error),
        }
    }

    #[cold]
    fn finish_slowly(
        &mut self,
        mut flight: Flight,
        limit: Duration,
        progress: &mut Progress,
        error: Error,
    ) -> Result<Receipt> {
        let request = &flight.request;
        let outcome = self.again_within(limit, progress, error, |slice| request.wait(Some(slice)));
        flight.finished = !matches!(&outcome, Err(error) if error.kind == ErrorKind::Timeout);
        outcome
    }

    /// Continues a wait that exceeded its first interval, within the context's timeout; reports progress meanwhile.
    #[cold]
    pub(crate) fn again<T>(
        &mut self,
        progress: &mut Progress,
        error: Error,
        wait: impl FnMut(Duration) -> Result<T>,
    ) -> Result<T> {
        self.again_within(self.context.settings().timeout, progress, error, wait)
    }

    fn again_within<T>(
        &mut self,
        limit: Duration,
        progress: &mut Progress,
        mut error: Error,
        mut wait: impl FnMut(Duration) -> Result<T>,
    ) -> Result<T> {
        let began = Instant::now();
        while error.kind == ErrorKind::Timeout {
            self.report(progress)?;
            let Some(left) = limit.checked_sub(began.elapsed() + POLL_INTERVAL) else { break };
            match wait(left.min(POLL_INTERVAL)) {
                Ok(outcome) => return Ok(outcome),
                Err(again) => error = again,
            }
        }
        Err(if error.kind == ErrorKind::Timeout { error.with_waited(limit) } else { error })
    }

    /// Counts iterations; `now` is a clock reading that the caller has taken anyway.
    #[inline]
    pub(crate) fn advance(&mut self, progress: &mut Progress, by: usize, now: Instant) -> Result<()> {
        progress.count(by);
        if now.duration_since(progress.reported) >= POLL_INTERVAL { self.report(progress) } else { Ok(()) }
    }

    /// Between what is untimed and what is timed: reports progress, so that the observer knows of the moment.
    pub(crate) fn mark(&mut self, progress: &mut Progress) -> Result<()> {
        self.report(progress)
    }

    #[cold]
    fn report(&mut self, progress: &mut Progress) -> Result<()> {
        progress.reported = Instant::now();
        self.observer.tick(progress.done, progress.total)
    }

    /// Sends `mine` to the peer, and returns what the peer sends in the same call.
    pub(crate) fn exchange(&mut self, mine: &[u8]) -> Result<Vec<u8>> {
        if mine.len() > CONTROL_LEN {
            return Err(Error::new(ErrorKind::Exhausted, "bench", "the report is larger than 64 KiB"));
        }
        let progress = &mut Progress::new(0);
        let inbox = Area::new(self.context, MemoryKind::Ordinary, CONTROL_LEN)?;
        let inbound = flight(self.worker.recv(inbox.buffer(), CONTROL, u64::MAX, Some(self.endpoint)))?;
        let outbound = flight(self.endpoint.send(mine.to_vec(), CONTROL))?;
        let received = self.finish(inbound, progress)?.bytes as usize;
        self.finish(outbound, progress)?;
        inbox.copy_out(received)
    }

    /// Compares the two ends' plans: (name, value) pairs.
    pub(crate) fn agree(&mut self, what: &str, plan: &[(&str, usize)]) -> Result<()> {
        let mut mine = format!("{what} {:?}", self.role);
        for (name, value) in plan {
            mine.push_str(&format!(" {name}={value}"));
        }
        let theirs = self.exchange(mine.as_bytes())?;
        let other = match self.role {
            Role::Driver => Role::Echo,
            Role::Echo => Role::Driver,
        };
        let expected = mine.replacen(&format!("{:?}", self.role), &format!("{other:?}"), 1);
        if theirs == expected.as_bytes() {
            return Ok(());
        }
        let theirs: String = String::from_utf8_lossy(&theirs).chars().take(200).filter(|c| !c.is_control()).collect();
        Err(Error::new(ErrorKind::Mismatch, "bench", format!("this end runs {mine:?}, the other end {theirs:?}"))
            .with_peer(self.endpoint.peer())
            .with_hint("start both ends with the same parameters"))
    }

    /// Exchanges the outcomes of verification: an error at one end is an error at both.
    pub(crate) fn judge(&mut self, mine: Result<()>) -> Result<()> {
        let theirs = self.exchange(mine.as_ref().err().map(ToString::to_string).unwrap_or_default().as_bytes());
        mine?;
        let theirs = theirs?;
        if theirs.is_empty() {
            return Ok(());
        }
        let why: String = String::from_utf8_lossy(&theirs).chars().take(500).filter(|c| !c.is_control()).collect();
        Err(Error::new(ErrorKind::Protocol, "verify", format!("the other end reports: {why}"))
            .with_peer(self.endpoint.peer()))
    }

    /// Seeds of the patterns that this end and the other end send in `round`.
    pub(crate) fn seeds(&self, round: u64) -> (u64, u64) {
        match self.role {
            Role::Driver => (2 * round, 2 * round + 1),
            Role::Echo => (2 * round + 1, 2 * round),
        }
    }
}

pub(crate) fn flight(request: Result<Request>) -> Result<Flight> {
    Ok(Flight { request: request?, finished: false })
}

/// Cost of one clock read in microseconds: the minimum of many measurements.
pub(crate) fn clock_us() -> f64 {
    let reads = || {
        let began = Instant::now();
        for _ in 0..99 {
            std::hint::black_box(Instant::now());
        }
        began.elapsed().as_secs_f64() * 1e6 / 100.0
    };
    (0..20).map(|_| reads()).fold(f64::INFINITY, f64::min)
}

/// Checks that a receipt confirms all `size` bytes.
#[inline]
pub(crate) fn whole(receipt: &Receipt, size: usize) -> Result<()> {
    if receipt.bytes == size as u64 { Ok(()) } else { Err(short(receipt.bytes, size)) }
}

#[cold]
fn short(bytes: u64, size: usize) -> Error {
    Error::new(ErrorKind::Protocol, "verify", format!("received {bytes} bytes of a message of {size}"))
}
