//! The sending half of a lane: several small frames per system call, large payloads by reference.
#![allow(unsafe_code)] // reads the user's memory, as its grants permit

use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;

use crossrail_transport::{Grant, GrantUse, LaneError, Payload, Post, Sink, Tx};
use crossrail_types::{HEAD_LEN, Head, LaneId};
use libc::iovec;

use crate::fault::fault;
use crate::pipe::Pipe;
use crate::sys;

/// Payloads up to this size are copied if the kernel does not accept them at once.
pub(crate) const COPIES_UP_TO: usize = 64 * 1024;
/// Maximum bytes of copied frames in the queue; beyond that, `post` returns `Full`.
const COPIES_WAITING: usize = 256 * 1024;
/// Bytes between two checks of the link's rate.
const ADAPT_EVERY: u64 = 1 << 20;
/// The kernel may hold unsent bytes for half a millisecond of the link's rate, but at least `LOWAT_MIN` bytes.
const UNSENT_TIME_DIVISOR: u64 = 2000;
const LOWAT_MIN: usize = 64 * 1024;
/// Maximum frames, and bytes of small frames, gathered for one system call.
const BATCH_FRAMES: usize = 32;
const BATCH_BYTES: usize = 64 * 1024;
/// Minimum size of a payload sent by reference.
const BY_REFERENCE_FROM: usize = 64 * 1024;
/// Maximum size of a payload that is copied behind its header, which is cheaper than a gathering call.
const JOIN_UP_TO: usize = 1024;
/// Zeros, sent in place of memory that was revoked: the frame's length has already been announced.
static FILLER: [u8; 16 * 1024] = [0; 16 * 1024];

/// The location of a queued frame's payload.
#[derive(Debug)]
enum Source {
    /// A copy, made when the frame was posted.
    Copied(Vec<u8>),
    /// The user's memory.
    User(Payload),
}

/// A frame that the kernel has not accepted completely.
#[derive(Debug)]
struct Outgoing {
    head: Head,
    source: Source,
    len: usize,
    /// Bytes of header and payload that the kernel has accepted.
    done: usize,
    /// The token to report once the kernel has accepted everything.
    token: Option<u64>,
    /// Whether the kernel may refer to the pages after `sent`.
    by_reference: bool,
}

impl Outgoing {
    fn left(&self) -> usize {
        HEAD_LEN + self.len - self.done
    }

    /// The part of the header still to be sent.
    fn head_left(&self) -> &[u8] {
        &self.head.0[self.done.min(HEAD_LEN)..]
    }

    /// Offset of the next payload byte.
    fn offset(&self) -> usize {
        self.done.saturating_sub(HEAD_LEN)
    }
}

/// The sending half of a lane.
#[derive(Debug)]
pub(crate) struct Sender {
    queue: VecDeque<Outgoing>,
    /// Bytes of copied frames in `queue`.
    copies: usize,
    /// The kernel may have room: epoll reported the socket writable, and no write has been refused since.
    pub(crate) writable: bool,
    /// Bytes accepted since the kernel last reported its unsent data below `lowat`.
    since_low: usize,
    /// TCP_NOTSENT_LOWAT: the limit on unsent bytes in the kernel.
    lowat: usize,
    lowat_max: usize,
    /// Value of `bytes` at which `lowat` is next adapted to the link's rate.
    adapt_at: u64,
    /// The pipe for sending by reference, if available.
    pipe: Option<Pipe>,
    /// Bytes accepted by the kernel.
    pub(crate) bytes: u64,
}

impl Sender {
    pub(crate) fn new(lowat: usize, by_reference: bool) -> Sender {
        Sender {
            queue: VecDeque::new(),
            copies: 0,
            writable: true,
            since_low: 0,
            lowat,
            lowat_max: lowat,
            adapt_at: ADAPT_EVERY,
            pipe: by_reference.then(Pipe::new).flatten(),
            bytes: 0,
        }
    }

    /// Whether there is work that need not wait for the socket.
    pub(crate) fn has_work(&self) -> bool {
        self.writable && !self.queue.is_empty()
    }

    /// Limits the kernel's unsent bytes to what the link carries in 1/[`UNSENT_TIME_DIVISOR`] of a second. At the end
    /// of a transfer over uneven rails, the others idle while the slow one sends what it has already accepted.
    #[cold]
    fn adapt(&mut self, fd: RawFd) {
        self.adapt_at = self.bytes + ADAPT_EVERY;
        let Ok(rate) = sys::tcp_info(fd).map(|bytes| crate::info::read(&bytes).delivery_rate) else { return };
        let wanted = usize::try_from(rate / UNSENT_TIME_DIVISOR).unwrap_or(usize::MAX);
        let lowat = wanted.clamp(LOWAT_MIN.min(self.lowat_max), self.lowat_max);
        let changed = lowat.abs_diff(self.lowat) > self.lowat / 4;
        if changed && sys::set_int(fd, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, lowat as i32).is_ok() {
            self.lowat = lowat;
        }
    }

    fn count(&mut self, n: usize) {
        self.bytes += n as u64;
        self.since_low = self.since_low.saturating_add(n);
    }

    /// See [`crossrail_transport::Lane::post`].
    pub(crate) fn post(&mut self, fd: RawFd, tx: &Tx) -> Result<Post, LaneError> {
        let copies = tx.payload.len <= COPIES_UP_TO;
        let mut out = Outgoing {
            head: tx.head,
            source: Source::User(tx.payload.clone()),
            len: tx.payload.len,
            done: 0,
            token: None,
            by_reference: false,
        };
        if self.queue.is_empty() {
            out.done = self.write_now(fd, &out)?;
            if out.left() == 0 {
                return Ok(Post::Taken);
            }
            self.writable = false;
        } else {
            let room = self.copies + HEAD_LEN + tx.payload.len <= COPIES_WAITING;
            let large = self.queue.iter().any(|waiting| matches!(waiting.source, Source::User(_)));
            if large || !room || !copies {
                return Ok(Post::Full);
            }
        }
        if copies {
            self.copies += HEAD_LEN + out.len;
            out.source = Source::Copied(copy_of(&tx.payload));
            self.queue.push_back(out);
            return Ok(Post::Taken);
        }
        if out.done == 0 {
            return Ok(Post::Full);
        }
        out.token = Some(tx.token);
        self.queue.push_back(out);
        Ok(Post::Held)
    }

    /// Writes a frame while the queue is empty, as far as the kernel accepts it.
    fn write_now(&mut self, fd: RawFd, out: &Outgoing) -> Result<usize, LaneError> {
        let Source::User(payload) = &out.source else { return Ok(0) };
        let written = if out.len <= JOIN_UP_TO {
            let mut joined = [0; HEAD_LEN + JOIN_UP_TO];
            joined[..HEAD_LEN].copy_from_slice(&out.head.0);
            let usage = payload.grant.as_deref().map(Grant::enter);
            if out.len > 0 && !matches!(usage, Some(None)) {
                // SAFETY: the payload is valid during post; `usage` makes a revocation wait.
                let bytes = unsafe { std::slice::from_raw_parts(payload.ptr, out.len) };
                joined[HEAD_LEN..HEAD_LEN + out.len].copy_from_slice(bytes);
            }
            drop(usage);
            sys::send(fd, &joined[..HEAD_LEN + out.len], false)
        } else {
            gather(fd, std::iter::once(out))
        };
        let n = accepted("send", written)?.unwrap_or(0);
        self.count(n);
        Ok(n)
    }

    /// Sends frames from the sink while the kernel has room, about `budget` bytes. Returns whether any were sent.
    pub(crate) fn poll(
        &mut self,
        fd: RawFd,
        lane: LaneId,
        sink: &mut dyn Sink,
        budget: usize,
        probe: bool,
    ) -> Result<bool, LaneError> {
        let until = self.bytes.saturating_add(budget as u64);
        let mut moved = false;
        if !self.writable && !probe {
            return Ok(false);
        }
        while self.bytes < until {
            if self.queue.is_empty() && !self.fetch(fd, lane, sink) {
                break;
            }
            let Some(n) = self.write(fd, usize::try_from(until - self.bytes).unwrap_or(usize::MAX))? else {
                self.writable = false;
                break;
            };
            self.writable = true;
            self.count(n);
            moved = true;
            self.retire(n, lane, sink);
        }
        Ok(moved)
    }

    /// Fills the empty queue from the sink, unless the kernel holds too much unsent data. Returns false if there is
    /// nothing to send.
    fn fetch(&mut self, fd: RawFd, lane: LaneId, sink: &mut dyn Sink) -> bool {
        if self.bytes >= self.adapt_at {
            self.adapt(fd);
        }
        let mut waiting = 0;
        while waiting < BATCH_BYTES && self.queue.len() < BATCH_FRAMES {
            // A slow rail must not take frames before it can send them: others could carry them sooner. A writable
            // socket has less than half of `lowat` unsent, so `lowat / 2` more bytes may be written without asking
            // again.
            if self.since_low >= self.lowat / 2 || !self.writable {
                if !sys::is_writable(fd) {
                    self.writable = false;
                    break;
                }
                self.writable = true;
                self.since_low = 0;
            }
            let Some(tx) = sink.next(lane) else { break };
            let out = Outgoing {
                head: tx.head,
                len: tx.payload.len,
                source: Source::User(tx.payload),
                done: 0,
                token: Some(tx.token),
                by_reference: true,
            };
            waiting += out.left();
            self.queue.push_back(out);
        }
        !self.queue.is_empty()
    }

    /// Writes the front of the queue once. `None`: the kernel has no room.
    fn write(&mut self, fd: RawFd, budget: usize) -> Result<Option<usize>, LaneError> {
        let Some(front) = self.queue.front() else { return Ok(Some(0)) };
        if front.by_reference
            && front.len >= BY_REFERENCE_FROM
            && let Source::User(payload) = &front.source
            && let Some(pipe) = &mut self.pipe
        {
            if front.done < HEAD_LEN {
                return accepted("send", sys::send(fd, front.head_left(), true));
            }
            let (from, left) = (front.offset() + pipe.holds(), front.len - front.offset() - pipe.holds());
            let mut usable = true;
            if left > 0 && pipe.is_low() {
                let usage = payload.grant.as_deref().map(Grant::enter);
                usable = !matches!(usage, Some(None))
                    // SAFETY: from + left == payload.len, which is valid until `sent` or a revocation; `usage` makes a
                    // revocation wait.
                    && unsafe { pipe.fill(payload.ptr.add(from), left.min(budget.max(BATCH_BYTES))) }.is_ok();
            }
            if pipe.holds() > 0 {
                let more = pipe.holds() < front.len - front.offset();
                return accepted("splice", pipe.drain(fd, more));
            }
            if !usable && !payload.grant.as_deref().is_some_and(Grant::is_revoked) {
                self.pipe = None; // not permitted on this system: copy from now on
            }
        }
        accepted("sendmsg", gather(fd, self.queue.iter()))
    }

    /// Removes the first `n` bytes of the queue, which the kernel has accepted, and reports completed frames.
    fn retire(&mut self, mut n: usize, lane: LaneId, sink: &mut dyn Sink) {
        while let Some(front) = self.queue.front_mut() {
            let part = front.left().min(n);
            front.done += part;
            n -= part;
            if front.left() > 0 {
                break;
            }
            if let Some(done) = self.queue.pop_front() {
                if matches!(done.source, Source::Copied(_)) {
                    self.copies -= HEAD_LEN + done.len;
                }
                if let Some(token) = done.token {
                    sink.sent(lane, token);
                }
            }
        }
    }
}

/// The bytes accepted by a call; `None` if the kernel has no room. Classifies other errors for the lane.
fn accepted(call: &str, result: io::Result<usize>) -> Result<Option<usize>, LaneError> {
    match result {
        Ok(n) => Ok(Some(n)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(Some(0)),
        // The kernel is temporarily out of memory; the next poll tries again.
        Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => Ok(Some(0)),
        Err(error) => Err(fault(call, &error)),
    }
}

/// Copies a payload; zeros if its memory was revoked.
fn copy_of(payload: &Payload) -> Vec<u8> {
    let usage = payload.grant.as_deref().map(Grant::enter);
    if payload.len == 0 || matches!(usage, Some(None)) {
        return vec![0; payload.len];
    }
    let mut copy = Vec::new();
    // SAFETY: the payload is valid during post; `usage` makes a revocation wait.
    unsafe { sys::copy_from(payload.ptr, payload.len, &mut copy) };
    copy
}

/// Sends as many of `frames` as fit, in one sendmsg.
fn gather<'a>(fd: RawFd, frames: impl Iterator<Item = &'a Outgoing>) -> io::Result<usize> {
    let mut pieces = [iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 2 * BATCH_FRAMES];
    let mut count = 0;
    let mut total = 0;
    let mut usages: Vec<GrantUse<'_>> = Vec::new();
    let mut add = |bytes: *const u8, len: usize| {
        if len > 0 {
            pieces[count] = iovec { iov_base: bytes.cast_mut().cast(), iov_len: len };
            count += 1;
        }
    };
    for frame in frames.take(BATCH_FRAMES) {
        let head = frame.head_left();
        add(head.as_ptr(), head.len());
        let len = frame.len - frame.offset();
        total += head.len() + len;
        if len > 0 {
            let start = match &frame.source {
                Source::Copied(bytes) => bytes[frame.offset()..].as_ptr(),
                Source::User(payload) => {
                    let usage = payload.grant.as_deref().map(Grant::enter);
                    if matches!(usage, Some(None)) {
                        add(FILLER.as_ptr(), len.min(FILLER.len()));
                        if len > FILLER.len() {
                            break;
                        }
                        continue;
                    }
                    usages.extend(usage.flatten());
                    payload.ptr.wrapping_add(frame.offset())
                }
            };
            add(start, len);
        }
        if total >= 2 * BATCH_BYTES {
            break;
        }
    }
    // SAFETY: headers, copies and the filler are borrowed; user memory is valid until `sent` or a revocation; `usages`
    // makes a revocation wait.
    unsafe { sys::send_pieces(fd, &pieces[..count]) }
}
