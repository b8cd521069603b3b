//! One connection of a [`TcpPlacing`](super::TcpPlacing).
#![allow(unsafe_code)] // receives into exposed memory, sends from the caller's

use std::collections::VecDeque;
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use crossrail_transport::placing::{Exposed, Target};
use crossrail_transport::{LaneError, Loan};
use libc::iovec;

use super::outgoing::{Frame, GATHER, Outgoing};
use super::wire::{HEAD, Head, Kind};
use crate::fault::fault;
use crate::room::Room;
use crate::sys;
use crate::tx::accepted;

/// Bytes read ahead while heads are awaited: many short writes at once, yet little to copy of a long one.
const AHEAD: usize = 4096;
/// With more than this of a payload outstanding, only the next head is read ahead.
const LONG: usize = 16 * 1024;
/// Pieces of one sendmsg.
const PIECES: usize = 160;
/// Frames without an acknowledgement, with which a link takes no more; the peer acknowledges far more often.
pub(crate) const UNACKED_MAX: usize = 1024;
/// Frames, and bytes, that are acknowledged at once.
const OWED_FRAMES: u32 = 64;
const OWED_BYTES: usize = 512 << 10;
/// Frames that a link has to send to a peer that takes none. More is a peer that only makes work.
const UNSENT_MAX: usize = 4 * UNACKED_MAX;

/// A frame that the kernel has not accepted completely.
#[derive(Debug)]
struct Sending {
    frame: Frame,
    head: [u8; HEAD],
    /// Bytes of head and payload that the kernel has accepted.
    done: usize,
}

/// A part whose payload is arriving.
#[derive(Debug)]
struct Current {
    head: Head,
    done: usize,
    discarded: bool,
}

/// Result of [`Link::step`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// A frame, whose payload is in place unless it was discarded.
    Frame { head: Head, discarded: bool },
    /// Nothing more at present.
    Dry,
    /// As much as one poll may receive.
    Enough,
}

/// A connection that is up.
#[derive(Debug)]
pub(crate) struct Link {
    stream: TcpStream,
    room: Room,
    unsent: VecDeque<Sending>,
    unacked: VecDeque<Frame>,
    /// Frames of kind [`Kind::Discarded`] that the peer has not acknowledged.
    discards: usize,
    /// Counted frames that the peer has acknowledged.
    acked: u32,
    /// Counted frames received, how many of them were acknowledged, and the bytes of the others.
    received: u32,
    confirmed: u32,
    owed: usize,
    ahead: Box<[u8; AHEAD]>,
    start: usize,
    end: usize,
    current: Option<Current>,
    /// There may be bytes to read.
    readable: bool,
    /// The peer has closed it: read until its end.
    ending: bool,
    rx_bytes: u64,
    tx_pieces: u64,
    /// Bytes that the peer's kernel had acknowledged, and the time of the last change.
    progress: (u64, Instant),
}

impl Link {
    /// A connection whose socket options are set.
    pub(crate) fn new(stream: TcpStream, lowat: usize) -> Link {
        Link {
            stream,
            room: Room::new(lowat),
            unsent: VecDeque::new(),
            unacked: VecDeque::new(),
            discards: 0,
            acked: 0,
            received: 0,
            confirmed: 0,
            owed: 0,
            ahead: Box::new([0; AHEAD]),
            start: 0,
            end: 0,
            current: None,
            readable: true,
            ending: false,
            rx_bytes: 0,
            tx_pieces: 0,
            progress: (0, Instant::now()),
        }
    }

    /// Bytes sent and received, and parts sent.
    pub(crate) fn totals(&self) -> (u64, u64, u64) {
        (self.room.bytes, self.rx_bytes, self.tx_pieces)
    }

    /// Counted frames received.
    pub(crate) fn received(&self) -> u32 {
        self.received
    }

    pub(crate) fn is_readable(&self) -> bool {
        self.readable
    }

    /// Records readiness that epoll reported.
    pub(crate) fn ready(&mut self, readable: bool, writable: bool, ending: bool) {
        self.readable |= readable;
        self.room.writable |= writable;
        self.ending |= ending;
    }

    // ---- sending

    /// True if it takes further frames: the kernel has accepted all earlier ones, and the peer confirms them.
    pub(crate) fn takes(&self) -> bool {
        self.room.writable && self.unsent.is_empty() && self.unacked.len() < UNACKED_MAX
    }

    /// True if it takes further frames without payload: those that another link has left are many at once.
    pub(crate) fn takes_bare(&self) -> bool {
        self.unsent.len() < UNSENT_MAX / 2
    }

    /// True if it has frames that the kernel may accept.
    pub(crate) fn can_flush(&self) -> bool {
        self.room.writable && !self.unsent.is_empty()
    }

    /// Bytes that it takes at a time: few on a slow rail, as others may send them sooner.
    pub(crate) fn share(&mut self) -> usize {
        self.room.adapt(self.stream.as_raw_fd());
        self.room.lowat()
    }

    /// Adds a frame to those that [`Link::flush`] sends. The acknowledgement of all received goes with it.
    ///
    /// # Errors
    /// The peer has others send and takes nothing.
    pub(crate) fn push(&mut self, frame: Frame, out: &Outgoing) -> Result<(), LaneError> {
        if self.unsent.len() >= UNSENT_MAX {
            return Err(LaneError::Protocol(format!("it takes none of {UNSENT_MAX} answers")));
        }
        (self.confirmed, self.owed) = (self.received, 0);
        let head = out.head(&frame, self.received);
        self.tx_pieces += u64::from(matches!(frame, Frame::Part { .. }));
        self.discards += usize::from(frame.is_discard());
        self.unsent.push_back(Sending { frame, head, done: 0 });
        Ok(())
    }

    /// True if frames were received and not acknowledged. `many`: enough to acknowledge them at once.
    pub(crate) fn owes(&self, many: bool) -> bool {
        let frames = self.received.wrapping_sub(self.confirmed);
        if many { frames >= OWED_FRAMES || self.owed >= OWED_BYTES } else { frames > 0 }
    }

    /// Frames received that were acknowledged.
    pub(crate) fn confirmed(&self) -> u32 {
        self.confirmed
    }

    /// True if it sends a frame at once.
    pub(crate) fn is_idle(&self) -> bool {
        self.room.writable && self.unsent.is_empty()
    }

    /// True if acknowledgements must go over this link itself, so that they do not overtake that a part was discarded.
    pub(crate) fn confirms_itself(&self) -> bool {
        self.discards > 0
    }

    /// The count that an acknowledgement over another link carries.
    pub(crate) fn confirm(&mut self) -> u32 {
        (self.confirmed, self.owed) = (self.received, 0);
        self.received
    }

    /// An acknowledgement over another link may be lost: a further one is due.
    pub(crate) fn renew(&mut self) {
        if self.received != 0 {
            self.confirmed = self.received.wrapping_sub(1);
        }
    }

    /// Sends what was pushed, as far as the kernel accepts it. Whether it accepted anything.
    ///
    /// # Errors
    /// Those of the connection.
    pub(crate) fn flush(&mut self, out: &Outgoing) -> Result<bool, LaneError> {
        let mut moved = false;
        while self.can_flush() {
            let mut pieces = [iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; PIECES];
            let mut count = 0;
            for sending in &self.unsent {
                if count + 1 + GATHER > PIECES {
                    break;
                }
                let left = &sending.head[sending.done.min(HEAD)..];
                if !left.is_empty() {
                    pieces[count] = iovec { iov_base: left.as_ptr().cast_mut().cast(), iov_len: left.len() };
                    count += 1;
                }
                out.memory(&sending.frame, sending.done.saturating_sub(HEAD), |extent| {
                    pieces[count] = iovec { iov_base: extent.at as *mut libc::c_void, iov_len: extent.len };
                    count += 1;
                    true
                });
            }
            // SAFETY: heads are borrowed; memory of writes is readable until their ends, which come after this.
            let sent = unsafe { sys::send_pieces(self.stream.as_raw_fd(), &pieces[..count]) };
            match accepted("sendmsg", sent)? {
                None => self.room.writable = false,
                Some(0) => break, // the kernel is out of memory; the next poll tries again
                Some(n) => {
                    moved = true;
                    self.room.count(n);
                    self.retire(n);
                }
            }
        }
        Ok(moved)
    }

    /// Removes bytes that the kernel has accepted.
    fn retire(&mut self, mut n: usize) {
        while let Some(front) = self.unsent.front_mut() {
            let part = (front.frame.len() - front.done).min(n);
            (front.done, n) = (front.done + part, n - part);
            if front.done < front.frame.len() {
                return;
            }
            if let Some(Sending { frame, .. }) = self.unsent.pop_front()
                && frame.is_counted()
            {
                self.unacked.push_back(frame);
            }
        }
    }

    /// The peer has received `count` frames of this link. A count that an acknowledgement over another link has overtaken
    /// changes nothing.
    ///
    /// # Errors
    /// More than it was sent.
    pub(crate) fn acknowledged(&mut self, count: u32, out: &mut Outgoing) -> Result<(), LaneError> {
        let fresh = count.wrapping_sub(self.acked);
        if fresh > u32::MAX / 2 {
            return Ok(());
        }
        let fresh = fresh as usize;
        if fresh > self.unacked.len() {
            let (sent, acked) = (self.unacked.len(), self.acked);
            let why =
                format!("it acknowledges {count} frames, of which {acked} were acknowledged and {sent} sent since");
            return Err(LaneError::Protocol(why));
        }
        self.acked = count;
        for frame in self.unacked.drain(..fresh) {
            self.discards -= usize::from(frame.is_discard());
            out.acknowledged(&frame);
        }
        Ok(())
    }

    /// Closes the connection. The parts that it may not have delivered, until the peer states which have arrived.
    ///
    /// Frames without payload are queued for another link at once, as the peer may wait for them before it states
    /// anything. It may receive them twice.
    pub(crate) fn close(self, out: &mut Outgoing) -> Rest {
        let sent = self.unacked.len();
        let mut frames = Vec::new();
        let all = self.unacked.into_iter().chain(self.unsent.into_iter().map(|sending| sending.frame));
        for (at, frame) in all.enumerate() {
            match frame {
                Frame::Part { .. } => frames.push((at, frame)),
                Frame::Bare(head) if head.kind.is_counted() => out.queue_bare(head),
                Frame::Bare(_) => {}
            }
        }
        Rest { acked: self.acked, sent, frames }
    }

    /// True if the peer's kernel owes acknowledgements and has sent none for `limit`.
    pub(crate) fn has_stalled(&mut self, now: Instant, limit: Duration) -> bool {
        let fd = self.stream.as_raw_fd();
        let info = sys::tcp_info(fd).map(|bytes| crate::info::read(&bytes)).unwrap_or_default();
        // A peer whose window is full answers the first probe of it.
        let owed = info.unacked > 0 || info.window_probes > 1;
        if !owed || info.bytes_acked != self.progress.0 {
            self.progress = (info.bytes_acked, now);
        }
        now.saturating_duration_since(self.progress.1) >= limit
    }

    // ---- receiving

    /// Receives on, up to the next frame. `budget`: bytes that may still be read from the socket.
    ///
    /// # Errors
    /// Those of the connection; [`LaneError::Protocol`] of what the peer sent.
    pub(crate) fn step(
        &mut self,
        exposed: &Exposed,
        check: impl Fn(&Head) -> Result<(), String>,
        budget: &mut usize,
    ) -> Result<Step, LaneError> {
        loop {
            if let Some(current) = &self.current {
                if current.done == current.head.len as usize {
                    return Ok(self.complete());
                }
                if self.start < self.end {
                    self.place_ahead(exposed);
                    continue;
                }
            } else if self.end - self.start >= HEAD {
                let head = self.ahead[self.start..].first_chunk().map(Head::decode);
                let head = head.unwrap_or_else(|| Err("no head".to_owned())).map_err(LaneError::Protocol)?;
                self.start += HEAD;
                if head.kind != Kind::Part {
                    self.received = self.received.wrapping_add(u32::from(head.kind.is_counted()));
                    return Ok(Step::Frame { head, discarded: false });
                }
                check(&head).map_err(LaneError::Protocol)?;
                let Target { revoked, .. } = exposed.find(head.key, head.at, head.len.into()).map_err(|wrong| {
                    LaneError::Protocol(format!("a write of {} bytes to byte {} {wrong}", head.len, head.at))
                })?;
                self.current = Some(Current { head, done: 0, discarded: revoked });
                continue;
            }
            if !self.readable {
                return Ok(Step::Dry);
            }
            if *budget == 0 {
                return Ok(Step::Enough);
            }
            let n = self.read(exposed)?;
            *budget = budget.saturating_sub(n);
        }
    }

    fn complete(&mut self) -> Step {
        self.received = self.received.wrapping_add(1);
        match self.current.take() {
            Some(Current { head, discarded, .. }) => {
                self.owed += head.len as usize;
                Step::Frame { head, discarded }
            }
            None => Step::Dry,
        }
    }

    /// Copies what was read ahead of the payload to its place.
    fn place_ahead(&mut self, exposed: &Exposed) {
        let Some(current) = &mut self.current else { return };
        let ahead = &self.ahead[self.start..self.end];
        let n = ahead.len().min(current.head.len as usize - current.done);
        match target(exposed, current, n).and_then(|target| Some((target.loan.enter()?, target.memory))) {
            // SAFETY: exposed for writing until its loan is returned, which waits for what was entered.
            Some((_usage, memory)) => unsafe { sys::copy_to(memory.at as *mut u8, &ahead[..n]) },
            None => current.discarded = true,
        }
        (current.done, self.start) = (current.done + n, self.start + n);
    }

    /// One read from the socket; nothing is left of what was read before but the beginning of a head.
    fn read(&mut self, exposed: &Exposed) -> Result<usize, LaneError> {
        self.ahead.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let fd = self.stream.as_raw_fd();
        let (asked, read) = match &mut self.current {
            None => {
                let into = &mut self.ahead[self.end..];
                (into.len(), sys::recv(fd, into))
            }
            Some(current) => {
                let left = current.head.len as usize - current.done;
                let lent =
                    target(exposed, current, left).and_then(|target| Some((target.loan.enter()?, target.memory)));
                match lent {
                    Some((_usage, memory)) => {
                        let ahead = &mut self.ahead[..if left > LONG { HEAD } else { AHEAD }];
                        let asked = left + ahead.len();
                        // SAFETY: exposed for writing until its loan is returned, which waits for what was entered.
                        (asked, unsafe { sys::recv_two(fd, memory.at as *mut u8, left, ahead) })
                    }
                    None => {
                        current.discarded = true;
                        (left, sys::recv_discard(fd, left))
                    }
                }
            }
        };
        match read {
            Ok(0) => Err(LaneError::Closed("closed by the peer".to_owned())),
            Ok(n) => {
                self.rx_bytes += n as u64;
                self.readable = n == asked || self.ending;
                let placed = self.current.as_ref().map_or(0, |current| n.min(current.head.len as usize - current.done));
                if let Some(current) = &mut self.current {
                    current.done += placed;
                }
                self.end += n - placed;
                Ok(n)
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                self.readable = false;
                Ok(0)
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => Ok(0),
            Err(error) => Err(fault("recv", &error)),
        }
    }
}

/// Destination of the next `len` bytes of a part; `None`: access has ended.
fn target<'a>(exposed: &'a Exposed, current: &Current, len: usize) -> Option<Target<'a>> {
    let Current { head, done, discarded } = current;
    let target = exposed.find(head.key, head.at + *done as u64, len as u64).ok()?;
    (!discarded && !target.revoked && !Loan::is_recalled(target.loan)).then_some(target)
}

/// Frames of a lost link.
#[derive(Debug)]
pub(crate) struct Rest {
    /// Frames that the peer had acknowledged.
    acked: u32,
    /// Number of counted frames that were sent and not acknowledged.
    sent: usize,
    /// The parts among them and among those that were not sent, with their place in that order. Not the answers, of which
    /// a peer can cause any number over one connection after the other.
    frames: Vec<(usize, Frame)>,
}

impl Rest {
    /// The peer had received `count` frames before it closed the connection: the others go over other links. How many
    /// parts those are.
    ///
    /// # Errors
    /// It cannot have.
    pub(crate) fn settle(self, count: u32, out: &mut Outgoing) -> Result<u64, LaneError> {
        let arrived = count.wrapping_sub(self.acked) as usize;
        if arrived > self.sent {
            return Err(LaneError::Protocol(format!(
                "it received {count} frames of a connection, more than it was sent"
            )));
        }
        let delivered = self.frames.partition_point(|(at, _)| *at < arrived);
        self.frames[..delivered].iter().for_each(|(_, frame)| out.acknowledged(frame));
        Ok(out.requeue(self.frames[delivered..].iter().map(|(_, frame)| *frame)))
    }
}
