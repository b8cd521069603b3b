//! The sending half of a lane: several small frames per system call, large payloads by reference.
#![allow(unsafe_code)] // reads the user's memory, as its grants permit

use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;

use crossrail_transport::{LaneError, Loan, LoanUse, Payload, Post, Sink, Tx};
use crossrail_types::{HEAD_LEN, Head, LaneId};
use libc::iovec;

use crate::fault::fault;
use crate::pipe::Pipe;
use crate::room::Room;
use crate::sys;

/// Payloads up to this size are copied if the kernel does not accept them at once.
pub(crate) const COPIES_UP_TO: usize = 64 * 1024;
/// Maximum bytes of copied frames in the queue; beyond that, `post` returns `Full`.
pub(crate) const COPIES_WAITING: usize = 256 * 1024;
/// Maximum frames, and bytes of small frames, gathered for one system call.
const BATCH_FRAMES: usize = 32;
const BATCH_BYTES: usize = 64 * 1024;
/// Minimum size of a payload sent by reference.
const BY_REFERENCE_FROM: usize = 64 * 1024;
/// Maximum size of a payload that is copied behind its header, which is cheaper than a gathering call, and maximum
/// bytes of such frames that are copied one behind the other.
const JOIN_UP_TO: usize = 1024;
const JOINED_MAX: usize = 4096;
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

    /// Whether its payload is rows that may still be read.
    fn is_rows(&self) -> bool {
        match &self.source {
            Source::Copied(_) => false,
            Source::User(payload) => payload.list.is_some() && !payload.grant.as_deref().is_some_and(Loan::is_recalled),
        }
    }

    /// Offset of the next payload byte.
    fn offset(&self) -> usize {
        self.done.saturating_sub(HEAD_LEN)
    }
}

/// How the sending half of a lane brings frames to the kernel.
pub trait Outlet: Send {
    /// The socket has become writable.
    fn set_writable(&mut self);
    /// Bytes of frames that the kernel has accepted.
    fn bytes(&self) -> u64;
    /// Whether there is work that need not wait for the socket.
    fn has_work(&self) -> bool;
    /// See [`crossrail_transport::Lane::post`].
    ///
    /// # Errors
    /// Those of the connection.
    fn post(&mut self, fd: RawFd, tx: &Tx) -> Result<Post, LaneError>;
    /// Sends frames from the sink while the kernel has room, about `budget` bytes. Returns whether any were sent.
    ///
    /// # Errors
    /// Those of the connection.
    fn poll(
        &mut self,
        fd: RawFd,
        lane: LaneId,
        sink: &mut dyn Sink,
        budget: usize,
        probe: bool,
    ) -> Result<bool, LaneError>;
}

/// The sending half of a lane.
#[derive(Debug)]
pub struct Sender {
    queue: VecDeque<Outgoing>,
    /// Bytes of copied frames in `queue`.
    copies: usize,
    room: Room,
    /// Bytes of frames that are sent together. Empty between calls.
    joined: Vec<u8>,
    /// The pipe for sending by reference, if available.
    pipe: Option<Pipe>,
}

impl Sender {
    pub(crate) fn new(lowat: usize, by_reference: bool) -> Sender {
        Sender {
            queue: VecDeque::new(),
            copies: 0,
            room: Room::new(lowat),
            joined: Vec::new(),
            pipe: by_reference.then(Pipe::new).flatten(),
        }
    }
}

impl Outlet for Sender {
    fn set_writable(&mut self) {
        self.room.writable = true;
    }

    fn bytes(&self) -> u64 {
        self.room.bytes
    }

    fn has_work(&self) -> bool {
        self.room.writable && !self.queue.is_empty()
    }

    fn post(&mut self, fd: RawFd, tx: &Tx) -> Result<Post, LaneError> {
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
            self.room.writable = false;
        } else {
            let room = self.copies + HEAD_LEN + tx.payload.len <= COPIES_WAITING;
            let large = self.queue.iter().any(|waiting| matches!(waiting.source, Source::User(_)));
            if large || !room || !copies {
                return Ok(Post::Full);
            }
        }
        if copies {
            self.copies += HEAD_LEN + out.len;
            let mut copy = Vec::new();
            append(&tx.payload, 0, out.len, &mut copy);
            out.source = Source::Copied(copy);
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

    fn poll(
        &mut self,
        fd: RawFd,
        lane: LaneId,
        sink: &mut dyn Sink,
        budget: usize,
        probe: bool,
    ) -> Result<bool, LaneError> {
        let until = self.room.bytes.saturating_add(budget as u64);
        let mut moved = false;
        if !self.room.writable && !probe {
            return Ok(false);
        }
        while self.room.bytes < until {
            if self.queue.is_empty() && !self.fetch(fd, lane, sink) {
                break;
            }
            let Some(n) = self.write(fd, usize::try_from(until - self.room.bytes).unwrap_or(usize::MAX))? else {
                self.room.writable = false;
                break;
            };
            self.room.writable = true;
            self.room.count(n);
            moved = true;
            self.retire(n, lane, sink);
        }
        Ok(moved)
    }
}

impl Sender {
    /// Writes a frame while the queue is empty, as far as the kernel accepts it.
    fn write_now(&mut self, fd: RawFd, out: &Outgoing) -> Result<usize, LaneError> {
        let written = send_joined(fd, std::iter::once(out), &mut self.joined)
            .or_else(|| send_rows(fd, out))
            .unwrap_or_else(|| gather(fd, std::iter::once(out)));
        let n = accepted("send", written)?.unwrap_or(0);
        self.room.count(n);
        Ok(n)
    }

    /// Fills the empty queue from the sink, unless the kernel holds too much unsent data. Returns false if there is
    /// nothing to send.
    fn fetch(&mut self, fd: RawFd, lane: LaneId, sink: &mut dyn Sink) -> bool {
        self.room.adapt(fd);
        let mut waiting = 0;
        while waiting < BATCH_BYTES && self.queue.len() < BATCH_FRAMES {
            if !self.room.takes(fd) {
                break;
            }
            let Some(tx) = sink.next(lane) else { break };
            let by_reference = tx.payload.list.is_none() && !tx.payload.reused;
            let out = Outgoing {
                head: tx.head,
                len: tx.payload.len,
                source: Source::User(tx.payload),
                done: 0,
                token: Some(tx.token),
                by_reference,
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
                let usage = payload.grant.as_deref().map(Loan::enter);
                usable = !matches!(usage, Some(None))
                    // SAFETY: from + left == payload.len, which is valid until `sent` or a revocation; `usage` makes a
                    // revocation wait.
                    && unsafe { pipe.fill(payload.ptr.add(from), left.min(budget.max(BATCH_BYTES))) }.is_ok();
            }
            if pipe.holds() > 0 {
                let more = pipe.holds() < front.len - front.offset();
                return accepted("splice", pipe.drain(fd, more));
            }
            if !usable && !payload.grant.as_deref().is_some_and(Loan::is_recalled) {
                self.pipe = None; // not permitted on this system: copy from now on
            }
        }
        let written = send_joined(fd, self.queue.iter(), &mut self.joined)
            .or_else(|| send_rows(fd, front))
            .unwrap_or_else(|| gather(fd, self.queue.iter()));
        accepted("sendmsg", written)
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
pub(crate) fn accepted(call: &str, result: io::Result<usize>) -> Result<Option<usize>, LaneError> {
    match result {
        Ok(n) => Ok(Some(n)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(Some(0)),
        // The kernel is temporarily out of memory; the next poll tries again.
        Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => Ok(Some(0)),
        Err(error) => Err(fault(call, &error)),
    }
}

/// Appends a payload's bytes from `at` on; zeros if its memory was revoked.
pub(crate) fn append(payload: &Payload, at: usize, len: usize, out: &mut Vec<u8>) {
    let usage = payload.grant.as_deref().map(Loan::enter);
    if len == 0 || matches!(usage, Some(None)) {
        out.resize(out.len() + len, 0);
        return;
    }
    // SAFETY: at + len <= payload.len, which is valid until `sent` or a revocation; `usage` makes a revocation wait.
    // All of what is added is written.
    unsafe {
        out.reserve(len);
        payload.read(at, len, out.as_mut_ptr().add(out.len()));
        out.set_len(out.len() + len);
    }
}

/// Sends frames that are all short, copied one behind the other; `None`: they are not.
fn send_joined<'a>(
    fd: RawFd,
    frames: impl Iterator<Item = &'a Outgoing> + Clone,
    joined: &mut Vec<u8>,
) -> Option<io::Result<usize>> {
    let mut total = 0;
    if !frames.clone().all(|frame| {
        total += frame.left();
        frame.len <= JOIN_UP_TO && total <= JOINED_MAX
    }) {
        return None;
    }
    joined.clear();
    frames.for_each(|frame| {
        joined.extend_from_slice(frame.head_left());
        let at = frame.offset();
        match &frame.source {
            Source::Copied(bytes) => joined.extend_from_slice(&bytes[at..]),
            Source::User(payload) => append(payload, at, frame.len - at, joined),
        }
    });
    Some(sys::send(fd, joined, false))
}

/// Sends a frame whose payload is rows of a list, as far as one sendmsg does; `None`: it is none, or was revoked.
fn send_rows(fd: RawFd, frame: &Outgoing) -> Option<io::Result<usize>> {
    let Source::User(payload) = &frame.source else { return None };
    let (list, from) = payload.list.as_deref()?;
    let usage = payload.grant.as_deref().map(Loan::enter);
    if matches!(usage, Some(None)) {
        return None;
    }
    let rows = (&**list, from + frame.offset() as u64);
    // SAFETY: the rows are valid until `sent` or a revocation; `usage` makes a revocation wait.
    Some(unsafe { crate::rows::send(fd, frame.head_left(), rows, frame.len - frame.offset()) })
}

/// Sends as many of `frames` as fit, in one sendmsg.
fn gather<'a>(fd: RawFd, frames: impl Iterator<Item = &'a Outgoing>) -> io::Result<usize> {
    let mut pieces = [iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 2 * BATCH_FRAMES];
    let mut count = 0;
    let mut total = 0;
    let mut usages: Vec<LoanUse<'_>> = Vec::new();
    let mut add = |bytes: *const u8, len: usize| {
        if len > 0 {
            pieces[count] = iovec { iov_base: bytes.cast_mut().cast(), iov_len: len };
            count += 1;
        }
    };
    for frame in frames.take(BATCH_FRAMES) {
        if frame.is_rows() && total > 0 {
            break;
        }
        let head = frame.head_left();
        add(head.as_ptr(), head.len());
        let len = frame.len - frame.offset();
        total += head.len() + len;
        if len > 0 {
            let start = match &frame.source {
                Source::Copied(bytes) => bytes[frame.offset()..].as_ptr(),
                Source::User(payload) => {
                    let usage = payload.grant.as_deref().map(Loan::enter);
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
