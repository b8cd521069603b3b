//! The receiving half of a lane: heads and small payloads by way of a small buffer, large payloads straight
//! into their destination, with the same call that brings the next head.
#![allow(unsafe_code)] // writes to where the sink said

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

use crossrail_transport::{Grant, LaneError, Place, Sink};
use crossrail_types::{HEAD_LEN, Head, LaneId};

use crate::fault::fault;
use crate::sys;

/// Bytes of the input buffer: what one call takes of small frames.
const INPUT: usize = 64 * 1024;
/// Most bytes that one call reads into a destination.
const STEP: usize = 1 << 20;
/// Bytes that a call reads beyond a payload that it completes: the next head, and a small frame or two. More
/// would copy the beginning of the next large payload twice.
const BEYOND: usize = 4096;

/// A payload that is arriving.
#[derive(Debug)]
struct Body {
    dst: *mut u8,
    /// Bytes still to be written at `dst`.
    into: usize,
    /// Bytes to be thrown away after that.
    discard: usize,
    grant: Option<Arc<Grant>>,
    token: Option<u64>,
}

// SAFETY: a description of memory, as crossrail_transport::Place is; dereferenced only under its rules.
unsafe impl Send for Body {}

impl Body {
    /// `None`: it has no place at present.
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

    /// The destination was taken back: what would go there is thrown away, and nobody is told.
    fn give_up(&mut self) {
        self.discard += self.into;
        self.into = 0;
        self.token = None;
    }

    /// Uses up to `bytes.len()` bytes that were read already; returns how many.
    fn absorb(&mut self, bytes: &[u8]) -> usize {
        let mut used = 0;
        if self.into > 0 {
            let n = self.into.min(bytes.len());
            let usage = self.grant.as_deref().map(Grant::enter);
            if matches!(usage, Some(None)) {
                drop(usage);
                self.give_up();
            } else {
                // SAFETY: the sink gave `into` bytes at `dst`; `usage` keeps a revocation waiting.
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

/// How a read went.
enum Read {
    /// So many bytes, fewer than asked for if the flag says so.
    Some { short: bool },
    /// Nothing there now.
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
    /// The sink has no place for the payload of the head that is next in the input buffer.
    pub(crate) waits: bool,
    /// Why nothing more will come.
    ended: Option<LaneError>,
    /// The socket may have more: epoll said so, and no read has come back empty since.
    pub(crate) readable: bool,
    /// Bytes of heads and payloads taken off the stream and used.
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

    /// Whether there is something to do without looking at the socket.
    pub(crate) fn has_work(&self) -> bool {
        if self.ended.is_some() {
            return true;
        }
        let buffered = self.end - self.start;
        if self.body.is_some() { buffered > 0 } else { buffered >= HEAD_LEN }
    }

    /// Delivers what has arrived, about `budget` bytes. `Ok(true)`: something moved.
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
                    // What came before the end counts first; the next poll reports it.
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

    /// Hands out what is in the input buffer.
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
                        let why = format!("a frame of {payload} bytes, more than the {max} that were agreed");
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

    /// One read from the socket into wherever the next bytes belong.
    fn read(&mut self, fd: RawFd, budget: usize) -> io::Result<Read> {
        if self.start > 0 {
            self.input.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        // A body that is not complete has used up the input buffer.
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
                // SAFETY: the sink gave `into` bytes at `dst`; `usage` keeps a revocation waiting.
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
