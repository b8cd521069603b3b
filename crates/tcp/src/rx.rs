//! The receiving half of a lane. Headers and small payloads pass through an input buffer; large payloads are read
//! directly into their destination, by the same call that reads the next header.
#![allow(unsafe_code)] // writes to destinations given by the sink

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

use crossrail_transport::{LaneError, List, Loan, Place, Sink};
use crossrail_types::{HEAD_LEN, Head, LaneId};

use crate::fault::fault;
use crate::{rows, sys};

/// Size of the input buffer in bytes, and so of one read of small frames.
const INPUT: usize = 64 * 1024;
/// Maximum bytes that one call reads into a destination.
const STEP: usize = 1 << 20;
/// Bytes that a call reads beyond the payload it completes: the next header and one or two small frames. Reading more
/// would copy the start of the next large payload twice.
const BEYOND: usize = 4096;

/// A payload that is being received.
#[derive(Debug)]
struct Body {
    dst: *mut u8,
    /// Bytes still to be written to `dst`.
    into: usize,
    /// Bytes to be discarded after that.
    discard: usize,
    /// The destination is there, and not at `dst`.
    rows: Option<(Arc<List>, u64)>,
    grant: Option<Arc<Loan>>,
    token: Option<u64>,
}

// SAFETY: a description of memory like crossrail_transport::Place; it is dereferenced only under the same rules.
unsafe impl Send for Body {}

impl Body {
    /// Starts receiving a payload; `None` if the sink has no destination for it yet.
    fn new(place: Place, payload: usize) -> Result<Option<Body>, LaneError> {
        match place {
            Place::Into { dst, len, grant, token } => {
                let into = len.min(payload);
                Ok(Some(Body { dst, into, discard: payload - into, rows: None, grant, token: Some(token) }))
            }
            Place::Rows { list, from, len, grant, token } => {
                let (into, rows) = (len.min(payload), Some((list, from)));
                let dst = std::ptr::null_mut();
                Ok(Some(Body { dst, into, discard: payload - into, rows, grant, token: Some(token) }))
            }
            Place::Discard => {
                let dst = std::ptr::null_mut();
                Ok(Some(Body { dst, into: 0, discard: payload, rows: None, grant: None, token: None }))
            }
            Place::Wait => Ok(None),
            Place::Refuse(why) => Err(LaneError::Protocol(why)),
        }
    }

    fn advance(&mut self, n: usize) {
        match &mut self.rows {
            Some((_, from)) => *from += n as u64,
            // SAFETY: n <= into, so the pointer stays inside the destination or one past its end.
            None => self.dst = unsafe { self.dst.add(n) },
        }
        self.into -= n;
    }

    /// Handles a revoked destination: discards the rest of the payload and reports no completion.
    fn give_up(&mut self) {
        self.discard += self.into;
        self.into = 0;
        self.token = None;
    }

    /// Consumes bytes that have already been read; returns how many.
    fn absorb(&mut self, bytes: &[u8]) -> usize {
        let mut used = 0;
        if self.into > 0 {
            let n = self.into.min(bytes.len());
            let usage = self.grant.as_deref().map(Loan::enter);
            if matches!(usage, Some(None)) {
                drop(usage);
                self.give_up();
            } else {
                match &self.rows {
                    // SAFETY: the sink provided the rows; `usage` makes a revocation wait.
                    Some((list, from)) => unsafe { list.copy_in(*from, bytes.as_ptr(), n as u64) },
                    // SAFETY: the sink provided `into` bytes at `dst`; `usage` makes a revocation wait.
                    None => unsafe { sys::copy_to(self.dst, &bytes[..n]) },
                }
                drop(usage);
                self.advance(n);
                used = n;
            }
        }
        if self.into == 0 {
            let n = self.discard.min(bytes.len() - used);
            self.discard -= n;
            used += n;
        }
        used
    }

    /// The token to report, if the destination is complete and still granted.
    fn finish(self) -> Option<u64> {
        self.token.filter(|_| !self.grant.is_some_and(|grant| grant.is_recalled()))
    }
}

/// What is being received, and how much has been.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    body: Option<Body>,
    /// The sink has no destination yet for the frame whose header is next.
    pub(crate) waits: bool,
    /// Bytes of headers and payloads consumed.
    pub(crate) bytes: u64,
}

impl Frames {
    /// Delivers the frames in `input` until `until` bytes have been consumed in all. Returns how many of it were
    /// consumed, and whether any progress was made; what is left is less than a header, or the sink has to wait.
    #[inline(always)]
    pub(crate) fn deliver(
        &mut self,
        input: &[u8],
        (lane, max): (LaneId, usize),
        sink: &mut dyn Sink,
        until: u64,
    ) -> Result<(usize, bool), LaneError> {
        let mut start = 0;
        let mut moved = false;
        loop {
            let body = match &mut self.body {
                Some(body) => body,
                None => {
                    let Some(bytes) = input[start..].first_chunk::<HEAD_LEN>() else { break };
                    if self.bytes >= until {
                        break;
                    }
                    let head = Head(*bytes);
                    let payload = head.payload_len() as usize;
                    if payload > max {
                        let why = format!("a frame of {payload} bytes exceeds the agreed maximum of {max}");
                        return Err(LaneError::Protocol(why));
                    }
                    let body = Body::new(sink.place(lane, &head), payload)?;
                    self.waits = body.is_none();
                    let Some(body) = body else { break };
                    start += HEAD_LEN;
                    self.bytes += HEAD_LEN as u64;
                    moved = true;
                    self.body.insert(body)
                }
            };
            let used = body.absorb(&input[start..]);
            start += used;
            self.bytes += used as u64;
            moved |= used > 0;
            if body.into + body.discard > 0 {
                break;
            }
            if let Some(token) = self.body.take().and_then(Body::finish) {
                sink.placed(lane, token);
            }
        }
        Ok((start, moved))
    }

    /// Whether a payload is incomplete.
    pub(crate) fn is_inside(&self) -> bool {
        self.body.is_some()
    }
}

/// Where received bytes pass through on their way to their destinations.
pub trait Intake: Send {
    /// Delivers what has been read, about until `until` bytes have been consumed. Whether any progress was made.
    ///
    /// # Errors
    /// `Protocol` and `Corrupt`: what was read can't be delivered.
    fn deliver(&mut self, lane: (LaneId, usize), sink: &mut dyn Sink, until: u64) -> Result<bool, LaneError>;
    /// Reads once from the socket, about `budget` bytes.
    ///
    /// # Errors
    /// Those of the system call.
    fn read(&mut self, fd: RawFd, budget: usize) -> io::Result<Read>;
    /// Bytes consumed.
    fn bytes(&self) -> u64;
    /// Whether the sink has no destination yet for the next frame.
    fn waits(&self) -> bool;
    /// Whether there is work that needs no system call.
    fn has_work(&self) -> bool;
    /// Whether a frame has come in part.
    fn is_inside(&self) -> bool;
}

/// The outcome of a read.
#[derive(Clone, Copy, Debug)]
pub enum Read {
    /// Data was read; `short`: less than requested, so the socket is empty.
    Some {
        /// Less came than was asked for.
        short: bool,
    },
    /// The socket is empty.
    Dry,
    /// The peer has closed its end.
    End,
}

/// The receiving half of a lane.
#[derive(Debug)]
pub(crate) struct Receiver<I> {
    pub(crate) intake: I,
    /// The error that ended the stream. Reported after everything received before it.
    ended: Option<LaneError>,
    /// The socket may have data: epoll reported it readable, and no read has found it empty since.
    pub(crate) readable: bool,
}

impl<I: Intake> Receiver<I> {
    pub(crate) fn new(intake: I) -> Receiver<I> {
        Receiver { intake, ended: None, readable: true }
    }

    /// Whether there is work that needs no system call.
    pub(crate) fn has_work(&self) -> bool {
        self.ended.is_some() || self.intake.has_work()
    }

    /// Delivers received data, about `budget` bytes. Returns whether any progress was made.
    pub(crate) fn poll(
        &mut self,
        fd: RawFd,
        lane: (LaneId, usize),
        sink: &mut dyn Sink,
        budget: usize,
        probe: bool,
    ) -> Result<bool, LaneError> {
        let until = self.intake.bytes().saturating_add(budget as u64);
        let mut moved = false;
        loop {
            moved |= self.intake.deliver(lane, sink, until)?;
            if self.intake.bytes() >= until {
                return Ok(true);
            }
            if self.intake.waits() {
                return Ok(moved);
            }
            if let Some(error) = &self.ended {
                return if moved { Ok(true) } else { Err(error.clone()) };
            }
            if !self.readable && (!probe || moved) {
                return Ok(moved);
            }
            let left = usize::try_from(until - self.intake.bytes()).unwrap_or(usize::MAX);
            let read = match self.intake.read(fd, left) {
                Ok(Read::End) => Err(self.closed()),
                Err(error) => Err(fault("recv", &error)),
                Ok(read) => Ok(read),
            };
            match read {
                Ok(Read::Some { short }) => {
                    moved = true;
                    if short && probe {
                        self.intake.deliver(lane, sink, until)?;
                        return Ok(true);
                    }
                }
                Ok(Read::Dry | Read::End) => {
                    self.readable = false;
                    return Ok(moved);
                }
                Err(error) => {
                    // Data received before the error counts as progress; the next poll reports the error.
                    self.ended = Some(error.clone());
                    return if moved { Ok(true) } else { Err(error) };
                }
            }
        }
    }

    fn closed(&self) -> LaneError {
        LaneError::Closed(if self.intake.is_inside() {
            "the peer closed the connection inside a frame".into()
        } else {
            "the peer closed the connection".into()
        })
    }
}

/// Small frames pass through an input buffer, large payloads are read into place.
#[derive(Debug)]
pub struct Plain {
    input: Box<[u8]>,
    start: usize,
    end: usize,
    frames: Frames,
    /// Used again by each call that receives rows.
    pieces: rows::Pieces,
}

impl Plain {
    pub(crate) fn new() -> Plain {
        Plain {
            input: vec![0; INPUT].into_boxed_slice(),
            start: 0,
            end: 0,
            frames: Frames::default(),
            pieces: rows::Pieces::default(),
        }
    }
}

impl Intake for Plain {
    #[inline]
    fn bytes(&self) -> u64 {
        self.frames.bytes
    }

    #[inline]
    fn waits(&self) -> bool {
        self.frames.waits
    }

    fn has_work(&self) -> bool {
        let buffered = self.end - self.start;
        if self.frames.is_inside() { buffered > 0 } else { buffered >= HEAD_LEN }
    }

    fn is_inside(&self) -> bool {
        self.frames.is_inside() || self.end > self.start
    }

    fn deliver(&mut self, lane: (LaneId, usize), sink: &mut dyn Sink, until: u64) -> Result<bool, LaneError> {
        let (used, moved) = self.frames.deliver(&self.input[self.start..self.end], lane, sink, until)?;
        self.start += used;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        Ok(moved)
    }

    fn read(&mut self, fd: RawFd, budget: usize) -> io::Result<Read> {
        if self.start > 0 {
            self.input.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        // An incomplete body has consumed the whole input buffer.
        let (asked, got) = match &mut self.frames.body {
            Some(body) if body.into > 0 => {
                let len = body.into.min(budget.clamp(INPUT, STEP));
                let beyond = if len < body.into || body.discard > 0 { 0 } else { BEYOND };
                let usage = body.grant.as_deref().map(Loan::enter);
                if matches!(usage, Some(None)) {
                    drop(usage);
                    body.give_up();
                    return Ok(Read::Some { short: false });
                }
                let spill = &mut self.input[..beyond];
                let (len, got) = match &body.rows {
                    // SAFETY: the sink provided the rows; `usage` makes a revocation wait.
                    Some((list, from)) => unsafe { rows::recv(fd, &mut self.pieces, (list, *from), len, spill) },
                    // SAFETY: the sink provided `into` bytes at `dst`; `usage` makes a revocation wait.
                    None => (len, unsafe { sys::recv_two(fd, body.dst, len, spill) }),
                };
                drop(usage);
                if let Ok(n) = got {
                    let placed = n.min(len);
                    body.advance(placed);
                    self.frames.bytes += placed as u64;
                    self.end = n - placed;
                }
                (len, got)
            }
            Some(body) if body.discard >= INPUT => {
                let got = sys::recv_discard(fd, body.discard.min(budget.max(INPUT)));
                if let Ok(n) = got {
                    body.discard -= n;
                    self.frames.bytes += n as u64;
                }
                (INPUT, got)
            }
            _ => {
                let got = sys::recv(fd, &mut self.input[self.end..]);
                let asked = self.input.len() - self.end;
                if let Ok(n) = got {
                    self.end += n;
                }
                (asked, got)
            }
        };
        match got {
            Ok(0) => Ok(Read::End),
            Ok(n) => Ok(Read::Some { short: n < asked }),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Read::Dry),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(Read::Some { short: false }),
            Err(error) => Err(error),
        }
    }
}
