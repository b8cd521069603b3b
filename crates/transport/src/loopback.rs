//! The worked example of a backend: two lanes of one process, joined by two bounded byte queues.
//!
//! It is small enough to read in one go and does everything a [`Lane`] must: partial progress,
//! [`Post::Held`], grants, short and discarded payloads, sleeping on a descriptor, delivery of all that
//! was sent before a close. A new backend starts as a copy of this file and ends by passing
//! [`crate::conformance`].
#![allow(unsafe_code)] // the two copies between a user's memory and the queue, at the end of this file

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crossrail_types::{Error, HEAD_LEN, Head, LaneId, Result};

use crate::{COPIED_MAX, Lane, LaneCaps, LaneError, LaneStats, Loan, Payload, Place, Post, Sink, Tx};

/// Bytes that one direction holds at most.
const CAPACITY: usize = 256 * 1024;
/// Bytes of one copy between a user's memory and the queue.
const STEP: usize = 64 * 1024;

/// Two lanes that are each other's peer. Fails when the process is out of descriptors.
pub fn pair(id_a: LaneId, id_b: LaneId) -> Result<(LoopbackLane, LoopbackLane)> {
    let bells = UnixStream::pair().and_then(|(a, b)| {
        a.set_nonblocking(true)?;
        b.set_nonblocking(true)?;
        Ok((a, b))
    });
    let (bell_a, bell_b) = bells.map_err(|source| Error::io("loopback", "socketpair", &source))?;
    let (forth, back) = (Arc::new(Mutex::new(Pipe::default())), Arc::new(Mutex::new(Pipe::default())));
    let a = LoopbackLane::new(id_a, bell_a, Arc::clone(&forth), Arc::clone(&back));
    let b = LoopbackLane::new(id_b, bell_b, back, forth);
    Ok((a, b))
}

/// One direction of the wire.
#[derive(Debug, Default)]
struct Pipe {
    bytes: VecDeque<u8>,
    writer_gone: bool,
    reader_gone: bool,
    reader_asleep: bool,
    writer_asleep: bool,
}

impl Pipe {
    fn room(&self) -> usize {
        CAPACITY - self.bytes.len()
    }
}

fn lock(pipe: &Mutex<Pipe>) -> MutexGuard<'_, Pipe> {
    pipe.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A frame that is not fully in the pipe yet.
#[derive(Debug)]
struct Outgoing {
    tx: Tx,
    /// Bytes of head and payload that are in the pipe.
    done: usize,
}

/// What the next incoming byte belongs to.
#[derive(Debug)]
enum Incoming {
    Head { bytes: [u8; HEAD_LEN], have: usize },
    Body { place: Place, offset: usize, len: usize },
}

impl Incoming {
    const START: Incoming = Incoming::Head { bytes: [0; HEAD_LEN], have: 0 };
}

/// One end of [`pair`].
#[derive(Debug)]
pub struct LoopbackLane {
    id: LaneId,
    caps: LaneCaps,
    bell: UnixStream,
    tx: Arc<Mutex<Pipe>>,
    rx: Arc<Mutex<Pipe>>,
    outgoing: Option<Outgoing>,
    incoming: Incoming,
    /// The sink has no place for the head in `incoming`.
    waits: bool,
    stats: LaneStats,
}

impl LoopbackLane {
    fn new(id: LaneId, bell: UnixStream, tx: Arc<Mutex<Pipe>>, rx: Arc<Mutex<Pipe>>) -> LoopbackLane {
        let caps = LaneCaps {
            max_payload: 16 << 20,
            reliable: true,
            whole_max: 0,
            counts: false,
            direct: false,
            lists: false,
        };
        let stats = LaneStats::default();
        LoopbackLane { id, caps, bell, tx, rx, outgoing: None, incoming: Incoming::START, waits: false, stats }
    }

    /// Wakes the peer. A full bell already rings; a peer that is gone hears nothing.
    fn ring(&mut self) {
        let _ = self.bell.write(&[1]);
    }

    /// Puts what fits of the outgoing frame into the pipe; returns the bytes put.
    fn write(&mut self, budget: usize) -> usize {
        let Some(out) = &mut self.outgoing else { return 0 };
        let mut pipe = lock(&self.tx);
        let mut moved = 0;
        if out.done < HEAD_LEN {
            let n = pipe.room().min(HEAD_LEN - out.done);
            pipe.bytes.extend(&out.tx.head.0[out.done..out.done + n]);
            out.done += n;
            moved += n;
        }
        while out.done >= HEAD_LEN && moved < budget {
            let offset = out.done - HEAD_LEN;
            let n = pipe.room().min(out.tx.payload.len - offset).min(STEP);
            if n == 0 {
                break;
            }
            let mut piece = vec![0; n];
            copy_from_payload(&out.tx.payload, offset, &mut piece);
            pipe.bytes.extend(&piece);
            out.done += n;
            moved += n;
        }
        let wake = moved > 0 && std::mem::take(&mut pipe.reader_asleep);
        drop(pipe);
        self.stats.tx_bytes += moved as u64;
        if wake {
            self.ring();
        }
        moved
    }

    fn outgoing_is_done(&self) -> bool {
        self.outgoing.as_ref().is_none_or(|out| out.done == HEAD_LEN + out.tx.payload.len)
    }

    fn send_some(&mut self, sink: &mut dyn Sink, budget: usize) -> bool {
        let (mut moved, mut any) = (0, false);
        while moved < budget {
            if self.outgoing.is_none() {
                if lock(&self.tx).room() < HEAD_LEN {
                    break;
                }
                let Some(tx) = sink.next(self.id) else { break };
                self.outgoing = Some(Outgoing { tx, done: 0 });
            }
            moved += self.write(budget - moved);
            if !self.outgoing_is_done() {
                break;
            }
            if let Some(out) = self.outgoing.take() {
                any = true;
                sink.sent(self.id, out.tx.token);
            }
        }
        any || moved > 0
    }

    /// Takes up to `into.len()` bytes out of the pipe.
    fn read(&mut self, into: &mut [u8]) -> usize {
        let mut pipe = lock(&self.rx);
        let n = pipe.bytes.read(into).unwrap_or(0);
        let wake = n > 0 && std::mem::take(&mut pipe.writer_asleep);
        drop(pipe);
        self.stats.rx_bytes += n as u64;
        if wake {
            self.ring();
        }
        n
    }

    fn receive_some(&mut self, sink: &mut dyn Sink, budget: usize) -> std::result::Result<bool, LaneError> {
        let mut moved = 0;
        loop {
            match std::mem::replace(&mut self.incoming, Incoming::START) {
                Incoming::Head { mut bytes, mut have } => {
                    if have == 0 && moved >= budget {
                        return Ok(true);
                    }
                    let n = self.read(&mut bytes[have..]);
                    have += n;
                    moved += n;
                    if have < HEAD_LEN {
                        self.incoming = Incoming::Head { bytes, have };
                        return Ok(moved > 0);
                    }
                    let head = Head(bytes);
                    let len = head.payload_len() as usize;
                    if len > self.caps.max_payload {
                        return Err(LaneError::Protocol(format!("a payload of {len} bytes was announced")));
                    }
                    let place = sink.place(self.id, &head);
                    self.waits = matches!(place, Place::Wait);
                    if self.waits {
                        self.incoming = Incoming::Head { bytes, have };
                        return Ok(moved > 0);
                    }
                    if let Place::Refuse(why) = place {
                        return Err(LaneError::Protocol(why));
                    }
                    self.incoming = Incoming::Body { place, offset: 0, len };
                }
                Incoming::Body { place, mut offset, len } => {
                    let mut piece = vec![0; (len - offset).min(STEP)];
                    let n = self.read(&mut piece);
                    copy_to_place(&place, offset, &piece[..n]);
                    offset += n;
                    moved += n;
                    if offset < len {
                        self.incoming = Incoming::Body { place, offset, len };
                        if n == 0 || moved >= budget {
                            return Ok(moved > 0);
                        }
                    } else if let Place::Into { grant, token, .. } = place
                        && !grant.is_some_and(|grant| grant.is_recalled())
                    {
                        sink.placed(self.id, token);
                    }
                }
            }
        }
    }
}

impl Lane for LoopbackLane {
    fn id(&self) -> LaneId {
        self.id
    }

    fn name(&self) -> &str {
        "loopback"
    }

    fn caps(&self) -> &LaneCaps {
        &self.caps
    }

    fn post(&mut self, tx: &Tx) -> std::result::Result<Post, LaneError> {
        let len = HEAD_LEN + tx.payload.len;
        let (room, gone) = {
            let pipe = lock(&self.tx);
            (pipe.room(), pipe.reader_gone)
        };
        if gone {
            return Err(LaneError::Closed("the other end was dropped".into()));
        }
        let copies = tx.payload.len <= COPIED_MAX;
        if self.outgoing.is_some() || room < HEAD_LEN || (copies && room < len) {
            return Ok(Post::Full);
        }
        self.outgoing = Some(Outgoing { tx: tx.clone(), done: 0 });
        self.write(len);
        if !self.outgoing_is_done() {
            return Ok(Post::Held);
        }
        self.outgoing = None;
        Ok(Post::Taken)
    }

    fn poll(&mut self, sink: &mut dyn Sink, budget: usize, _probe: bool) -> std::result::Result<bool, LaneError> {
        let gone = lock(&self.rx).writer_gone; // asked before reading: all it wrote is in the pipe by then
        let received = self.receive_some(sink, budget)?;
        if gone && !received && !self.waits {
            return Err(LaneError::Closed("the other end was dropped".into()));
        }
        let sent = !gone && self.send_some(sink, budget);
        Ok(received || sent)
    }

    fn fd(&self) -> Option<RawFd> {
        Some(self.bell.as_raw_fd())
    }

    fn arm(&mut self) -> bool {
        let mut rx = lock(&self.rx);
        rx.reader_asleep = !self.waits;
        let readable = !self.waits && (!rx.bytes.is_empty() || rx.writer_gone);
        drop(rx);
        let mut tx = lock(&self.tx);
        tx.writer_asleep = true;
        let writable = self.outgoing.is_some() && tx.room() > 0;
        !readable && !writable
    }

    fn disarm(&mut self) {
        lock(&self.rx).reader_asleep = false;
        lock(&self.tx).writer_asleep = false;
        let mut scratch = [0; 64];
        loop {
            match self.bell.read(&mut scratch) {
                Ok(n) if n == scratch.len() => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                _ => break,
            }
        }
    }

    fn stats(&self) -> LaneStats {
        LaneStats { acked_bytes: self.stats.tx_bytes, ..self.stats }
    }
}

impl Drop for LoopbackLane {
    fn drop(&mut self) {
        lock(&self.tx).writer_gone = true;
        lock(&self.rx).reader_gone = true;
        self.ring();
    }
}

/// Fills `out` from the payload at `offset`; with zeros where the loan was recalled, so that framing holds.
fn copy_from_payload(payload: &Payload, offset: usize, out: &mut [u8]) {
    let usage = payload.grant.as_deref().map(Loan::enter);
    if matches!(usage, Some(None)) {
        return out.fill(0);
    }
    // SAFETY: the caller keeps offset + out.len() <= payload.len; the payload is valid until `sent` or until
    // `recall` has returned, which waits for `usage`.
    unsafe { std::ptr::copy_nonoverlapping(payload.ptr.add(offset), out.as_mut_ptr(), out.len()) }
}

/// Writes `bytes`, which are the payload's bytes from `offset` on, to where the sink wants them, if anywhere.
fn copy_to_place(place: &Place, offset: usize, bytes: &[u8]) {
    let Place::Into { dst, len, grant, .. } = place else { return };
    let n = bytes.len().min(len.saturating_sub(offset));
    let usage = grant.as_deref().map(Loan::enter);
    if n == 0 || matches!(usage, Some(None)) {
        return;
    }
    // SAFETY: offset + n <= len, which the sink said may be written until `placed` or until `recall` has returned,
    // which waits for `usage`.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), dst.add(offset), n) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conforms() {
        crate::conformance::run("loopback", &mut || {
            let (a, b) = pair(LaneId(1), LaneId(2)).expect("descriptors");
            (Box::new(a), Box::new(b))
        });
    }

    #[test]
    fn ends_at_any_stage() {
        crate::conformance::run_endings("loopback", 0..12, &mut || {
            let (a, b) = pair(LaneId(1), LaneId(2)).expect("descriptors");
            (Box::new(a), Box::new(b))
        });
    }

    struct Silent;

    impl Sink for Silent {
        fn next(&mut self, _: LaneId) -> Option<Tx> {
            None
        }
        fn sent(&mut self, _: LaneId, _: u64) {}
        fn place(&mut self, _: LaneId, _: &Head) -> Place {
            Place::Discard
        }
        fn placed(&mut self, _: LaneId, _: u64) {}
    }

    #[test]
    fn a_payload_beyond_the_limit_is_a_protocol_violation() {
        let (mut a, mut b) = pair(LaneId(1), LaneId(2)).expect("descriptors");
        a.outgoing =
            Some(Outgoing { tx: Tx { head: Head::new(1, u32::MAX), payload: Payload::EMPTY, token: 0 }, done: 0 });
        a.write(HEAD_LEN);
        assert!(matches!(b.poll(&mut Silent, 1 << 20, true), Err(LaneError::Protocol(_))));
    }
}
