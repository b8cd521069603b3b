//! The two halves of a lane with checksums.
//!
//! Payloads pass through a lane buffer at both ends: the checksum covers the bytes that are sent, even if the user's
//! memory changes afterwards, and a byte reaches its destination only once it has been checked. Where two lanes carry
//! the same chunk, corrupt bytes of one can thus never overwrite correct bytes of the other, and a reader that polls
//! memory which a peer writes never sees corrupt bytes.

use std::io;
use std::os::fd::RawFd;

use crossrail_transport::{LaneError, Post, Sink, Tx};
use crossrail_types::{HEAD_LEN, LaneId};

use crate::record::{self, RECORD_HEAD, RECORD_MAX};
use crate::room::Room;
use crate::rx::{Frames, Intake, Read};
use crate::sys;
use crate::tx::{COPIES_UP_TO, COPIES_WAITING, Outlet, accepted, append};

/// Sealed bytes beyond which no further record is begun before the kernel has taken them.
const STAGED: usize = 4 * RECORD_MAX;
/// Size of the input buffer in bytes: several records, so that few are cut by its end.
const INPUT: usize = 8 * (RECORD_HEAD + RECORD_MAX);

/// A frame that is being sealed.
#[derive(Debug)]
struct Sealing {
    tx: Tx,
    /// Whether its head is sealed, and how many bytes of its payload are.
    head: bool,
    payload: usize,
}

/// The sending half of a lane with checksums.
#[derive(Debug)]
pub struct Sealer {
    room: Room,
    /// Records, of which the kernel has accepted `sent` bytes.
    staged: Vec<u8>,
    sent: usize,
    sealing: Option<Sealing>,
    /// Number of the next record.
    number: u64,
    /// Bytes of frames in `staged`, and of those before them.
    framed: u64,
    flushed: u64,
}

impl Sealer {
    pub(crate) fn new(room: Room) -> Sealer {
        Sealer { room, staged: Vec::new(), sent: 0, sealing: None, number: 0, framed: 0, flushed: 0 }
    }

    fn waiting(&self) -> usize {
        self.staged.len() - self.sent
    }

    /// Adds what fits of the frame that is being sealed to the record that begins at `start`. The frame's token, once
    /// all of it is sealed.
    fn add(&mut self, start: usize) -> Option<u64> {
        let room = |staged: &Vec<u8>| (RECORD_HEAD + RECORD_MAX).saturating_sub(staged.len() - start);
        let sealing = self.sealing.as_mut()?;
        if !sealing.head {
            // A head is never cut: it is delivered out of the record.
            if room(&self.staged) < HEAD_LEN {
                return None;
            }
            self.staged.extend_from_slice(&sealing.tx.head.0);
            sealing.head = true;
        }
        let payload = &sealing.tx.payload;
        let part = room(&self.staged).min(payload.len - sealing.payload);
        append(payload, sealing.payload, part, &mut self.staged);
        sealing.payload += part;
        if sealing.payload < payload.len {
            return None;
        }
        self.sealing.take().map(|done| done.tx.token)
    }

    fn begin(&mut self) -> usize {
        if self.sent >= STAGED {
            self.staged.drain(..self.sent);
            self.sent = 0;
        }
        let start = self.staged.len();
        self.staged.extend_from_slice(&[0; RECORD_HEAD]);
        start
    }

    fn end(&mut self, start: usize) {
        if self.staged.len() == start + RECORD_HEAD {
            self.staged.truncate(start);
            return;
        }
        record::seal(self.number, &mut self.staged[start..]);
        self.framed += (self.staged.len() - start - RECORD_HEAD) as u64;
        self.number += 1;
    }

    /// Seals frames until enough is staged or nothing is left to send. Returns whether anything is staged.
    fn fill(&mut self, fd: RawFd, lane: LaneId, sink: &mut dyn Sink) -> bool {
        self.room.adapt(fd);
        let mut more = true;
        while more && self.waiting() < STAGED {
            let start = self.begin();
            while self.staged.len() - start < RECORD_HEAD + RECORD_MAX {
                if self.sealing.is_none() {
                    let tx = if self.room.takes(fd) { sink.next(lane) } else { None };
                    self.sealing = tx.map(|tx| Sealing { tx, head: false, payload: 0 });
                }
                more = self.sealing.is_some();
                match self.add(start) {
                    Some(token) => sink.sent(lane, token),
                    None => break,
                }
            }
            self.end(start);
        }
        self.waiting() > 0
    }

    /// Sends what is staged. `None`: the kernel has no room for all of it.
    fn flush(&mut self, fd: RawFd) -> Result<Option<()>, LaneError> {
        while self.waiting() > 0 {
            let more = self.sealing.is_some();
            let Some(n) = accepted("send", sys::send(fd, &self.staged[self.sent..], more))? else {
                self.room.writable = false;
                return Ok(None);
            };
            self.room.writable = true;
            self.room.count(n);
            self.sent += n;
        }
        self.staged.clear();
        self.sent = 0;
        self.flushed += std::mem::take(&mut self.framed);
        Ok(Some(()))
    }
}

impl Outlet for Sealer {
    fn set_writable(&mut self) {
        self.room.writable = true;
    }

    fn bytes(&self) -> u64 {
        self.flushed
    }

    fn has_work(&self) -> bool {
        self.room.writable && (self.waiting() > 0 || self.sealing.is_some())
    }

    fn post(&mut self, fd: RawFd, tx: &Tx) -> Result<Post, LaneError> {
        let copied = tx.payload.len <= COPIES_UP_TO;
        let room = copied && self.waiting() + HEAD_LEN + tx.payload.len <= COPIES_WAITING;
        let behind = self.waiting() > 0;
        if self.sealing.is_some() || (behind && !room) {
            return Ok(Post::Full);
        }
        self.sealing = Some(Sealing { tx: tx.clone(), head: false, payload: 0 });
        while self.sealing.is_some() && (copied || self.waiting() < STAGED) {
            let start = self.begin();
            let _ = self.add(start); // a frame that is sealed whole is `Taken`
            self.end(start);
        }
        let taken = self.sealing.is_none();
        if !behind {
            self.flush(fd)?;
        }
        Ok(if taken { Post::Taken } else { Post::Held })
    }

    fn poll(
        &mut self,
        fd: RawFd,
        lane: LaneId,
        sink: &mut dyn Sink,
        budget: usize,
        probe: bool,
    ) -> Result<bool, LaneError> {
        if !self.room.writable && !probe {
            return Ok(false);
        }
        let before = self.room.bytes;
        let until = before.saturating_add(budget as u64);
        while self.room.bytes < until {
            if self.waiting() == 0 && !self.fill(fd, lane, sink) {
                break;
            }
            if self.flush(fd)?.is_none() {
                break;
            }
        }
        Ok(self.room.bytes > before)
    }
}

/// The receiving half of a lane with checksums.
#[derive(Debug)]
pub struct Opener {
    input: Box<[u8]>,
    start: usize,
    end: usize,
    /// Bytes from `start` on that have been checked.
    checked: usize,
    /// Number of the next record.
    number: u64,
    frames: Frames,
}

impl Opener {
    pub(crate) fn new() -> Opener {
        Opener {
            input: vec![0; INPUT].into_boxed_slice(),
            start: 0,
            end: 0,
            checked: 0,
            number: 0,
            frames: Frames::default(),
        }
    }
}

impl Intake for Opener {
    fn deliver(&mut self, lane: (LaneId, usize), sink: &mut dyn Sink, until: u64) -> Result<bool, LaneError> {
        let mut moved = false;
        loop {
            if self.checked == 0 {
                let Some(length) = record::open(self.number, &self.input[self.start..self.end])? else { break };
                self.start += RECORD_HEAD;
                self.number += 1;
                self.checked = length;
            }
            let bytes = &self.input[self.start..self.start + self.checked];
            let (used, some) = self.frames.deliver(bytes, lane, sink, until)?;
            self.start += used;
            self.checked -= used;
            moved |= some;
            if self.checked > 0 {
                if self.frames.waits || self.frames.bytes >= until {
                    break;
                }
                return Err(LaneError::Protocol("the head of a frame is cut by its record".to_owned()));
            }
        }
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        Ok(moved)
    }

    fn read(&mut self, fd: RawFd, _budget: usize) -> io::Result<Read> {
        if self.start > 0 {
            self.input.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let asked = self.input.len() - self.end;
        match sys::recv(fd, &mut self.input[self.end..]) {
            Ok(0) => Ok(Read::End),
            Ok(n) => {
                self.end += n;
                Ok(Read::Some { short: n < asked })
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Read::Dry),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(Read::Some { short: false }),
            Err(error) => Err(error),
        }
    }

    fn bytes(&self) -> u64 {
        self.frames.bytes
    }

    fn waits(&self) -> bool {
        self.frames.waits
    }

    fn has_work(&self) -> bool {
        self.checked > 0
    }

    fn is_inside(&self) -> bool {
        self.frames.is_inside() || self.end > self.start
    }
}
