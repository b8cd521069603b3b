//! A lane over an emulated NIC: memory is registered, identified to the peer by a key of that rail, and written by a
//! device that runs asynchronously.
//!
//! Worked example of a link with remote placement. It also verifies, on machines without such a NIC, that loans are
//! kept and returned as such a link requires. A frame with a payload of up to [`INLINE_MAX`] bytes is a message. For a
//! longer one the receiver registers the place and replies with its key; the sender registers the payload and posts a
//! put, whose completion is followed by a message. Both keep the loans of their memory meanwhile ([`Loan::keep`]).
//! Dropping a lane withdraws its puts and its keys, after which the device touches none of its memory.
#![allow(unsafe_code)] // the device's copies

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crossrail_types::{HEAD_LEN, Head, LaneId};

use crate::{Kept, Lane, LaneCaps, LaneError, LaneStats, Loan, Place, Post, Sink, Tx};

/// Largest payload that its frame's message carries.
const INLINE_MAX: usize = 4096;
/// Messages that one direction holds at most.
const MESSAGES: usize = 64;
/// Bytes that the device moves while an end is polled.
const STEP: usize = 64 * 1024;

/// By what a device finds memory that was registered with it, and no other device does.
type Key = u64;

/// Two lanes that are each other's peer, each with a device of its own.
pub fn pair(id_a: LaneId, id_b: LaneId) -> (DryLane, DryLane) {
    let (a, b, _) = pair_with_brake(id_a, id_b);
    (a, b)
}

/// [`pair`], and what stops both devices.
pub fn pair_with_brake(id_a: LaneId, id_b: LaneId) -> (DryLane, DryLane, Brake) {
    static DEVICES: AtomicU32 = AtomicU32::new(1);
    let port = || Port { device: DEVICES.fetch_add(1, Ordering::Relaxed), alive: true, ..Port::default() };
    let wire = Arc::new(Mutex::new(Wire { ports: [port(), port()], moved: 0, limit: usize::MAX }));
    (DryLane::new(id_a, 0, Arc::clone(&wire)), DryLane::new(id_b, 1, Arc::clone(&wire)), Brake(wire))
}

/// Stops devices in the middle of what they do.
#[derive(Clone)]
pub struct Brake(Arc<Mutex<Wire>>);

impl Brake {
    /// Has the devices stop once they have moved that many bytes in all.
    pub fn stop_after(&self, bytes: usize) {
        lock(&self.0).limit = bytes;
    }

    /// Whether they have stopped.
    pub fn has_stopped(&self) -> bool {
        let wire = lock(&self.0);
        wire.moved >= wire.limit
    }
}

enum Message {
    Frame {
        head: Head,
        inline: Vec<u8>,
    },
    /// The payload of the frame before is in its place.
    Complete,
}

/// The place of a payload: its key, and its length, which may be shorter than the payload.
struct Ready {
    key: Key,
    room: usize,
}

/// A put that was posted.
struct Put {
    from: Key,
    to: Key,
    len: usize,
    done: usize,
}

/// One end's device.
#[derive(Default)]
struct Port {
    device: u32,
    registered: u32,
    memory: HashMap<Key, (*mut u8, usize)>,
    puts: VecDeque<Put>,
    /// Of puts that were posted here, in their order.
    completions: VecDeque<Result<(), String>>,
    /// What has arrived.
    messages: VecDeque<Message>,
    ready: VecDeque<Ready>,
    alive: bool,
}

// SAFETY: the pointers are dereferenced by `Wire::run` only, under the rules of the lanes that registered them.
unsafe impl Send for Port {}

impl Port {
    /// Makes `len` bytes known to the device until [`Port::deregister`].
    fn register(&mut self, ptr: *mut u8, len: usize) -> Key {
        self.registered += 1;
        let key = (u64::from(self.device) << 32) | u64::from(self.registered);
        self.memory.insert(key, (ptr, len));
        key
    }

    fn deregister(&mut self, key: Key) {
        self.memory.remove(&key);
    }

    fn find(&self, key: Key, len: usize) -> Result<*mut u8, String> {
        match self.memory.get(&key) {
            Some((ptr, have)) if len <= *have => Ok(*ptr),
            Some((_, have)) => Err(format!("{len} bytes by a key of {have}")),
            None => Err(format!("device {} knows no key {key:#x}", self.device)),
        }
    }
}

struct Wire {
    ports: [Port; 2],
    /// Bytes that were put, and after how many the devices stop.
    moved: usize,
    limit: usize,
}

impl Wire {
    /// The devices run on, whoever is polled.
    fn run(&mut self) {
        for from in [0, 1] {
            let Some(put) = self.ports[from].puts.front().filter(|_| self.moved < self.limit) else { continue };
            let (len, done) = (put.len, put.done);
            let ends = self.ports[from].find(put.from, len);
            let ends = ends.and_then(|source| Ok((source, self.ports[1 - from].find(put.to, len)?)));
            let n = (len - done).min(STEP);
            let moved = ends.map(|(source, target)| {
                // SAFETY: both are registered for `len` bytes, which whoever registered them keeps until then.
                unsafe { std::ptr::copy_nonoverlapping(source.add(done), target.add(done), n) };
            });
            self.moved += n;
            let port = &mut self.ports[from];
            match (&moved, port.puts.front_mut()) {
                (Ok(()), Some(put)) if done + n < len => put.done += n,
                _ => {
                    port.puts.pop_front();
                    port.completions.push_back(moved);
                }
            }
        }
    }
}

/// Memory that this end's device may touch.
struct Registered {
    key: Key,
    kept: Option<Kept>,
}

struct Outgoing {
    tx: Tx,
    /// The payload, or what stands in for it, once the receiver is ready.
    source: Option<Registered>,
}

struct Incoming {
    len: usize,
    target: Registered,
    /// What is reported once it is there, unless that loan was recalled.
    placed: Option<(u64, Option<Arc<Loan>>)>,
}

/// One end of [`pair`].
pub struct DryLane {
    id: LaneId,
    caps: LaneCaps,
    me: usize,
    wire: Arc<Mutex<Wire>>,
    outgoing: Option<Outgoing>,
    incoming: Option<Incoming>,
    /// Sent in place of memory that was recalled.
    filler: Vec<u8>,
    waits: bool,
    stats: LaneStats,
}

fn lock(wire: &Mutex<Wire>) -> MutexGuard<'_, Wire> {
    wire.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The memory of a loan, kept for that lane; `None`: it was recalled. Without a loan it outlives the lane's use.
fn keep(loan: Option<&Arc<Loan>>, lane: LaneId) -> Option<Option<Kept>> {
    match loan {
        Some(loan) => loan.keep(lane).map(Some),
        None => Some(None),
    }
}

impl DryLane {
    fn new(id: LaneId, me: usize, wire: Arc<Mutex<Wire>>) -> DryLane {
        let caps = LaneCaps {
            max_payload: 16 << 20,
            reliable: false,
            whole_max: 0,
            counts: false,
            direct: false,
            lists: false,
        };
        let stats = LaneStats::default();
        DryLane { id, caps, me, wire, outgoing: None, incoming: None, filler: Vec::new(), waits: false, stats }
    }

    fn say(&self, message: Message) {
        lock(&self.wire).ports[1 - self.me].messages.push_back(message);
    }

    fn has_room(&self) -> bool {
        self.outgoing.is_none() && lock(&self.wire).ports[1 - self.me].messages.len() < MESSAGES
    }

    /// Ends the device's use of that memory, of which it has no request any more.
    fn release(&self, registered: Registered, sink: &mut dyn Sink) {
        lock(&self.wire).ports[self.me].deregister(registered.key);
        if registered.kept.is_some_and(Kept::give_back) {
            sink.returned();
        }
    }

    /// Sends a frame, for which there is room. Whether that was all of it.
    fn send(&mut self, tx: &Tx) -> bool {
        let len = tx.payload.len;
        let mut inline = vec![0; if len <= INLINE_MAX { len } else { 0 }];
        let usage = tx.payload.grant.as_deref().map(Loan::enter);
        if !inline.is_empty() && !matches!(usage, Some(None)) {
            // SAFETY: the payload is valid until `sent`, or until it is recalled, which waits for `usage`.
            unsafe { std::ptr::copy_nonoverlapping(tx.payload.ptr, inline.as_mut_ptr(), len) };
        }
        self.stats.tx_bytes += (HEAD_LEN + inline.len()) as u64;
        self.say(Message::Frame { head: tx.head, inline });
        len <= INLINE_MAX
    }

    /// The receiver has a place for the payload that was announced.
    fn put(&mut self, Ready { key: to, room }: Ready) -> Result<(), LaneError> {
        let Some(out) = self.outgoing.as_mut().filter(|out| out.source.is_none()) else {
            return Err(LaneError::Protocol("a place for a payload that was not announced".to_owned()));
        };
        let len = out.tx.payload.len.min(room);
        let port = &mut lock(&self.wire).ports[self.me];
        let source = match keep(out.tx.payload.grant.as_ref(), self.id) {
            Some(kept) => Registered { key: port.register(out.tx.payload.ptr.cast_mut(), len), kept },
            None => {
                self.filler.resize(len, 0);
                Registered { key: port.register(self.filler.as_mut_ptr(), len), kept: None }
            }
        };
        port.puts.push_back(Put { from: source.key, to, len, done: 0 });
        out.source = Some(source);
        Ok(())
    }

    /// Acts on the oldest completion; the bytes it stands for, if there was one.
    fn complete(&mut self, sink: &mut dyn Sink) -> Result<usize, LaneError> {
        let completion = lock(&self.wire).ports[self.me].completions.pop_front();
        let Some(completion) = completion else { return Ok(0) };
        completion.map_err(|why| LaneError::Down(format!("a put failed: {why}")))?;
        let Some(Outgoing { tx, source: Some(source) }) = self.outgoing.take() else { return Ok(0) };
        self.release(source, sink);
        self.stats.tx_bytes += tx.payload.len as u64;
        self.say(Message::Complete);
        sink.sent(self.id, tx.token);
        Ok(tx.payload.len)
    }

    /// A frame has arrived. `Ok(false)`: it has no place yet.
    fn arrived(&mut self, head: &Head, inline: &[u8], sink: &mut dyn Sink) -> Result<bool, LaneError> {
        let len = head.payload_len() as usize;
        if len > self.caps.max_payload || (len <= INLINE_MAX && len != inline.len()) {
            return Err(LaneError::Protocol(format!("a payload of {len} bytes was announced")));
        }
        let place = sink.place(self.id, head);
        self.waits = matches!(place, Place::Wait);
        let (dst, room, loan, token) = match place {
            Place::Wait => return Ok(false),
            Place::Refuse(why) => return Err(LaneError::Protocol(why)),
            Place::Rows { .. } => return Err(LaneError::Protocol("this lane places no rows".to_owned())),
            Place::Discard => (std::ptr::null_mut(), 0, None, None),
            Place::Into { dst, len: room, grant, token } => (dst, room.min(len), grant, Some(token)),
        };
        self.stats.rx_bytes += (HEAD_LEN + inline.len()) as u64;
        if len <= INLINE_MAX {
            let usage = loan.as_deref().map(Loan::enter);
            if room > 0 && !matches!(usage, Some(None)) {
                // SAFETY: the place may be written until `placed`, or until it is recalled, which waits for `usage`.
                unsafe { std::ptr::copy_nonoverlapping(inline.as_ptr(), dst, room) };
            }
            drop(usage);
            if let Some(token) = token.filter(|_| !loan.is_some_and(|loan| loan.is_recalled())) {
                sink.placed(self.id, token);
            }
            return Ok(true);
        }
        let (kept, room) = match keep(loan.as_ref(), self.id) {
            Some(kept) => (kept, room),
            // Recalled in the meantime: the put has no bytes.
            None => (None, 0),
        };
        let dst = if room > 0 { dst } else { std::ptr::NonNull::dangling().as_ptr() };
        let port = &mut lock(&self.wire).ports;
        let key = port[self.me].register(dst, room);
        port[1 - self.me].ready.push_back(Ready { key, room });
        let target = Registered { key, kept };
        self.incoming = Some(Incoming { len, target, placed: token.map(|token| (token, loan)) });
        Ok(true)
    }

    /// The payload that was announced is in its place; its bytes.
    fn placed(&mut self, sink: &mut dyn Sink) -> Result<usize, LaneError> {
        let Some(Incoming { len, target, placed }) = self.incoming.take() else {
            return Err(LaneError::Protocol("the end of a payload that was not announced".to_owned()));
        };
        self.release(target, sink);
        self.stats.rx_bytes += len as u64;
        if let Some((token, loan)) = placed
            && !loan.is_some_and(|loan| loan.is_recalled())
        {
            sink.placed(self.id, token);
        }
        Ok(len)
    }

    /// Acts on the oldest message; the bytes it stands for. `None`: there is none, or it has no place.
    fn receive(&mut self, sink: &mut dyn Sink) -> Result<Option<usize>, LaneError> {
        let message = lock(&self.wire).ports[self.me].messages.pop_front();
        match message {
            None => Ok(None),
            Some(Message::Complete) => self.placed(sink).map(Some),
            Some(Message::Frame { head, inline }) if self.arrived(&head, &inline, sink)? => {
                Ok(Some(HEAD_LEN + inline.len()))
            }
            Some(frame) => {
                lock(&self.wire).ports[self.me].messages.push_front(frame);
                Ok(None)
            }
        }
    }

    /// Takes frames while there is room; the bytes they stand for. `None`: there is none.
    fn send_next(&mut self, sink: &mut dyn Sink) -> Option<usize> {
        if !self.has_room() {
            return None;
        }
        let tx = sink.next(self.id)?;
        if self.send(&tx) {
            sink.sent(self.id, tx.token);
            return Some(HEAD_LEN + tx.payload.len);
        }
        self.outgoing = Some(Outgoing { tx, source: None });
        Some(HEAD_LEN)
    }
}

impl Lane for DryLane {
    fn id(&self) -> LaneId {
        self.id
    }

    fn name(&self) -> &str {
        "dry"
    }

    fn caps(&self) -> &LaneCaps {
        &self.caps
    }

    fn post(&mut self, tx: &Tx) -> Result<Post, LaneError> {
        if tx.payload.len > INLINE_MAX || !self.has_room() {
            return Ok(Post::Full);
        }
        self.send(tx);
        Ok(Post::Taken)
    }

    fn poll(&mut self, sink: &mut dyn Sink, budget: usize, _probe: bool) -> Result<bool, LaneError> {
        let (mut any, mut moved) = (false, 0);
        lock(&self.wire).run();
        // Asked before receiving: all that it sent is there by then.
        let gone = !lock(&self.wire).ports[1 - self.me].alive;
        while moved < budget
            && let Some(bytes) = self.receive(sink)?
        {
            (any, moved) = (true, moved + bytes);
        }
        if gone {
            if any || self.waits {
                return Ok(any);
            }
            return Err(LaneError::Closed("the other end was dropped".to_owned()));
        }
        let ready = lock(&self.wire).ports[self.me].ready.pop_front();
        if let Some(ready) = ready {
            self.put(ready)?;
            any = true;
        }
        moved = self.complete(sink)?;
        while moved < budget
            && let Some(bytes) = self.send_next(sink)
        {
            (any, moved) = (true, moved + bytes);
        }
        Ok(any || moved > 0)
    }

    fn stats(&self) -> LaneStats {
        LaneStats { acked_bytes: self.stats.tx_bytes, ..self.stats }
    }
}

impl Drop for DryLane {
    /// Ends the queue: the device has no request of this end's from then on, and finds none of its memory. Only then
    /// are loans returned, by the drop of what kept them.
    fn drop(&mut self) {
        let port = &mut lock(&self.wire).ports[self.me];
        port.alive = false;
        port.puts.clear();
        port.memory.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance;

    fn boxed() -> (Box<dyn Lane>, Box<dyn Lane>) {
        let (a, b) = pair(LaneId(1), LaneId(2));
        (Box::new(a), Box::new(b))
    }

    #[test]
    fn conforms() {
        conformance::run("dry", &mut boxed);
    }

    #[test]
    fn ends_at_any_stage() {
        conformance::run_endings("dry", 0..12, &mut boxed);
    }

    /// Sends one payload by one loan and receives into memory by another.
    struct Transfer {
        outgoing: Vec<u8>,
        incoming: Vec<u8>,
        loan: Arc<Loan>,
        taken: bool,
        placed: bool,
        returned: usize,
    }

    impl Transfer {
        fn new(len: usize) -> Transfer {
            let (outgoing, incoming) = (vec![7; len], vec![0; len]);
            Transfer { outgoing, incoming, loan: Arc::default(), taken: false, placed: false, returned: 0 }
        }
    }

    impl Sink for Transfer {
        fn next(&mut self, _: LaneId) -> Option<Tx> {
            let (ptr, len) = (self.outgoing.as_ptr(), self.outgoing.len());
            let payload = crate::Payload { ptr, len, grant: Some(Arc::clone(&self.loan)), ..crate::Payload::EMPTY };
            let first = !std::mem::replace(&mut self.taken, true);
            first.then(|| Tx { head: Head::new(1, len as u32), payload, token: 5 })
        }
        fn sent(&mut self, _: LaneId, token: u64) {
            assert_eq!(token, 5);
        }
        fn place(&mut self, _: LaneId, _: &Head) -> Place {
            let (dst, len) = (self.incoming.as_mut_ptr(), self.incoming.len());
            Place::Into { dst, len, grant: Some(Arc::clone(&self.loan)), token: 9 }
        }
        fn placed(&mut self, _: LaneId, token: u64) {
            assert_eq!(token, 9);
            self.placed = true;
        }
        fn returned(&mut self) {
            self.returned += 1;
        }
    }

    /// A lane in mid-payload: both ends keep their memory, and the device is in the midst of it.
    fn under_way(len: usize) -> ((DryLane, Transfer), (DryLane, Transfer)) {
        let (mut a, mut b) = pair(LaneId(1), LaneId(2));
        let (mut from, mut to) = (Transfer::new(len), Transfer::new(len));
        to.taken = true;
        while !(to.incoming[0] == 7 && from.taken) {
            a.poll(&mut from, 1 << 20, true).expect("up");
            b.poll(&mut to, 1 << 20, true).expect("up");
        }
        assert_eq!((from.loan.keepers(), to.loan.keepers()), (vec![LaneId(1)], vec![LaneId(2)]));
        ((a, from), (b, to))
    }

    #[test]
    fn memory_is_kept_until_the_device_is_done_with_it() {
        let ((mut a, mut from), (mut b, mut to)) = under_way(8 * STEP);
        assert!(!from.loan.recall() && !to.loan.recall(), "the device goes on");
        while !(from.loan.is_returned() && to.loan.is_returned()) {
            a.poll(&mut from, 1 << 20, true).expect("up");
            b.poll(&mut to, 1 << 20, true).expect("up");
        }
        assert_eq!((from.returned, to.returned, to.placed), (1, 1, false));
        assert!(lock(&a.wire).ports.iter().all(|port| port.memory.is_empty()), "registered for nothing");
    }

    #[test]
    fn a_queue_that_is_torn_down_returns_memory_at_either_end() {
        for drops_sender in [true, false] {
            let ((mut a, mut from), (mut b, mut to)) = under_way(8 * STEP);
            from.loan.recall();
            to.loan.recall();
            let left = if drops_sender {
                drop(a);
                assert!(from.loan.is_returned());
                b.poll(&mut to, 1 << 20, true)
            } else {
                drop(b);
                assert!(to.loan.is_returned());
                to.incoming.fill(0xEE);
                a.poll(&mut from, 1 << 20, true)
            };
            assert!(matches!(left, Err(LaneError::Closed(_))), "{left:?}");
            assert!(drops_sender || to.incoming.iter().all(|byte| *byte == 0xEE), "written after it was returned");
        }
    }

    #[test]
    fn a_key_is_of_one_rail() {
        let ((mut a, mut from), (b, _to)) = under_way(8 * STEP);
        let (_c, other) = pair(LaneId(3), LaneId(4));
        let mut memory = vec![0; 8 * STEP];
        let foreign = lock(&other.wire).ports[1].register(memory.as_mut_ptr(), memory.len());
        if let Some(put) = lock(&b.wire).ports[0].puts.front_mut() {
            put.to = foreign;
        }
        let error = a.poll(&mut from, 1 << 20, true).expect_err("a key of another rail");
        assert!(matches!(&error, LaneError::Down(why) if why.contains("knows no key")), "{error}");
        assert!(memory.iter().all(|byte| *byte == 0));
    }
}
