//! The receiving half of a lane. Headers and small payloads pass through an input buffer; large payloads are read
//! directly into their destination, by the same call that reads the next header.
#![allow(unsafe_code)] // writes to destinations given by the sink

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

use crossrail_transport::{Grant, LaneError, Place, Sink};
use crossrail_types::{HEAD_LEN, Head, LaneId};

use crate::fault::fault;
use crate::sys;

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
    grant: Option<Arc<Grant>>,
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
                Ok(Some(Body { dst, into, discard: payload - into, grant, token: Some(token) }))
            }
            Place::Discard => {
                Ok(Some(Body { dst: std::ptr::null_mut(), into: 0, discard: payload, grant: None, token: None }))
            }
            Place::Wait => Ok(None),
            Place::Refuse(why) => Err(LaneError::Protocol(why)),
        }
    }

    fn advance(&mut self, n: usize) {
        // SAFETY: n <= into, so the pointer stays inside the destination or one past its end.
        self.dst = unsafe { self.dst.add(n) };
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
            let usage = self.grant.as_deref().map(Grant::enter);
            if matches!(usage, Some(None)) {
                drop(usage);
                self.give_up();
            } else {
                // SAFETY: the sink provided `into` bytes at `dst`; `usage` makes a revocation wait.
                unsafe { sys::copy_to(self.dst, &bytes[..n]) };
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
        self.token.filter(|_| !self.grant.is_some_and(|grant| grant.is_revoked()))
    }
}

/// The outcome of a read.
enum Read {
    /// Data was read; `short`: less than requested, so the socket is empty.
    Some { short: bool },
    /// The socket is empty.
    Dry,
    /// The peer has closed its end.
    End,
}

/// The receiving half of a lane.
#[derive(Debug)]
pub(crate) struct Receiver {
    input: Box<[u8]>,
    start: usize,
    end: usize,
    body: Option<Body>,
    /// The sink has no destination yet for the frame whose header is next in the input buffer.
    pub(crate) waits: bool,
    /// The error that ended the stream. Reported after everything received before it.
    ended: Option<LaneError>,
    /// The socket may have data: epoll reported it readable, and no read has found it empty since.
    pub(crate) readable: bool,
    /// Bytes of headers and payloads consumed.
    pub(crate) bytes: u64,
}

impl Receiver {
    pub(crate) fn new() -> Receiver {
        Receiver {
            input: vec![0; INPUT].into_boxed_slice(),
            start: 0,
            end: 0,
            body: None,
            waits: false,
            ended: None,
            readable: true,
            bytes: 0,
        }
    }

    /// Whether there is work that needs no system call.
    pub(crate) fn has_work(&self) -> bool {
        if self.ended.is_some() {
            return true;
        }
        let buffered = self.end - self.start;
        if self.body.is_some() { buffered > 0 } else { buffered >= HEAD_LEN }
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
        let until = self.bytes.saturating_add(budget as u64);
        let mut moved = false;
        loop {
            moved |= self.deliver(lane, sink, until)?;
            if self.bytes >= until {
                return Ok(true);
            }
            if self.waits {
                return Ok(moved);
            }
            if let Some(error) = &self.ended {
                return if moved { Ok(true) } else { Err(error.clone()) };
            }
            if !self.readable && (!probe || moved) {
                return Ok(moved);
            }
            let left = usize::try_from(until - self.bytes).unwrap_or(usize::MAX);
            let read = match self.read(fd, left) {
                Ok(Read::End) => Err(self.closed()),
                Err(error) => Err(fault("recv", &error)),
                Ok(read) => Ok(read),
            };
            match read {
                Ok(Read::Some { short }) => {
                    moved = true;
                    if short && probe {
                        self.deliver(lane, sink, until)?;
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
        LaneError::Closed(if self.body.is_some() || self.end > self.start {
            "the peer closed the connection inside a frame".into()
        } else {
            "the peer closed the connection".into()
        })
    }

    /// Delivers the contents of the input buffer.
    fn deliver(&mut self, (lane, max): (LaneId, usize), sink: &mut dyn Sink, until: u64) -> Result<bool, LaneError> {
        let mut moved = false;
        loop {
            let body = match &mut self.body {
                Some(body) => body,
                None => {
                    let Some(bytes) = self.input[self.start..self.end].first_chunk::<HEAD_LEN>() else { break };
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
                    self.start += HEAD_LEN;
                    self.bytes += HEAD_LEN as u64;
                    moved = true;
                    self.body.insert(body)
                }
            };
            let used = body.absorb(&self.input[self.start..self.end]);
            self.start += used;
            self.bytes += used as u64;
            moved |= used > 0;
            if body.into + body.discard > 0 {
                break;
            }
            if let Some(token) = self.body.take().and_then(Body::finish) {
                sink.placed(lane, token);
            }
        }
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        Ok(moved)
    }

    /// Reads once from the socket, to the destination of the next bytes.
    fn read(&mut self, fd: RawFd, budget: usize) -> io::Result<Read> {
        if self.start > 0 {
            self.input.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        // An incomplete body has consumed the whole input buffer.
        let (asked, got) = match &mut self.body {
            Some(body) if body.into > 0 => {
                let len = body.into.min(budget.clamp(INPUT, STEP));
                let beyond = if len < body.into || body.discard > 0 { 0 } else { BEYOND };
                let usage = body.grant.as_deref().map(Grant::enter);
                if matches!(usage, Some(None)) {
                    drop(usage);
                    body.give_up();
                    return Ok(Read::Some { short: false });
                }
                // SAFETY: the sink provided `into` bytes at `dst`; `usage` makes a revocation wait.
                let got = unsafe { sys::recv_two(fd, body.dst, len, &mut self.input[..beyond]) };
                drop(usage);
                if let Ok(n) = got {
                    let placed = n.min(len);
                    body.advance(placed);
                    self.bytes += placed as u64;
                    self.end = n - placed;
                }
                (len, got)
            }
            Some(body) if body.discard >= INPUT => {
                let got = sys::recv_discard(fd, body.discard.min(budget.max(INPUT)));
                if let Ok(n) = got {
                    body.discard -= n;
                    self.bytes += n as u64;
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
