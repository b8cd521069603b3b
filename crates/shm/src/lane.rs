//! The lane itself.
#![allow(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_transport::{
    Barrier, Domain, Lane, LaneCaps, LaneError, LaneStats, NOTE_FILES, NOTE_MAX, Place, Post, ReceivedNote, Sink, Tx,
    WatchRoom,
};
use crossrail_types::{HEAD_LEN, Head, LaneId};

use crate::arena::Arena;
use crate::arriving::Arriving;
use crate::attached::{Attached, Report};
use crate::cma::Process;
use crate::count::Count;
use crate::cursor::Cursors;
use crate::descriptors::Held;
use crate::notes::Notes;
use crate::peer_segment::PeerSegment;
use crate::ring::{Consumer, Frame, MAX_PAYLOAD, Producer};
use crate::shutdown;
use crate::wake::{COUNT, DATA, Flags, ROOM};
use crate::wire::{Inbox, MOST_SEGMENTS, NoRecord, Record, Wire};

/// Consecutive idle polls after which the socket is checked: the death of a peer is noticed within some tens of
/// microseconds while spinning, at a cost below one percent.
const SOCKET_EVERY: u32 = 1024;
/// Segments of the peer that have been passed and not named yet: each takes a descriptor.
const MOST_UNMAPPED: usize = 512;
/// Freed segments of the peer that are known as such; older ones are unknown ids.
const GONE_KEPT: usize = 256;

/// Payloads up to here are copied in one poll however small its budget: their copies take less than a microsecond.
const WHOLE_MAX: usize = 16 << 10;
/// Bytes copied at a time however small the budget.
const SMALLEST_COPY: usize = 4 << 10;

/// A lane through shared memory. See the crate's page.
pub struct ShmLane {
    id: LaneId,
    caps: LaneCaps,
    report: Report,
    producer: Producer,
    consumer: Consumer,
    count: Count,
    flags: Flags,
    pub(crate) wire: Arc<Wire>,
    inbox: Inbox,
    /// Being delivered, over several polls.
    arriving: Option<Arriving>,
    /// Sequence number of a frame for which the sink had no place.
    waits_at: u64,
    /// Taken from the sink, did not fit.
    held: Option<Tx>,
    /// The ring filled up before the sink ran out of frames.
    blocked: bool,
    /// The socket is readable.
    attention: bool,
    /// The peer is gone; what it left in the ring is still to be delivered.
    hung_up: bool,
    idle: u32,
    /// Neither armed nor disarmed since it was attached, asleep.
    is_new: bool,
    stats: LaneStats,
    pub(crate) arena: Arc<Arena>,
    pub(crate) cursors: Cursors,
    pub(crate) segments: HashMap<u32, PeerSegment>,
    /// Those that it freed last.
    pub(crate) gone: VecDeque<u32>,
    notes: Notes,
    /// Protocol violation found on the socket.
    fault: Option<LaneError>,
    /// A segment or a note waits for room in the socket.
    pub(crate) wants_room: bool,
    /// State that a caller may wait for has changed since the last poll: a segment was passed or freed, a note arrived
    /// or was taken, or the socket has room.
    news: bool,
    pub(crate) process: Result<Process, String>,
    pub(crate) peer_has_cma: bool,
}

impl ShmLane {
    pub(crate) fn new(attached: Attached) -> Option<ShmLane> {
        let side = attached.side.index();
        Some(ShmLane {
            id: attached.id,
            caps: LaneCaps {
                max_payload: MAX_PAYLOAD,
                reliable: true,
                whole_max: WHOLE_MAX,
                counts: true,
                direct: true,
                lists: true,
            },
            producer: Producer::new(&attached.control, side)?,
            consumer: Consumer::new(&attached.control, 1 - side)?,
            count: Count::new(&attached.control, side),
            flags: Flags::new(&attached.control, side, attached.expedited),
            cursors: Cursors::new(&attached.control, side),
            report: attached.report,
            wire: attached.wire,
            inbox: Inbox::default(),
            arriving: None,
            waits_at: 0,
            held: None,
            blocked: false,
            attention: false,
            hung_up: false,
            idle: 0,
            is_new: true,
            stats: LaneStats::default(),
            arena: attached.arena,
            segments: HashMap::new(),
            gone: VecDeque::new(),
            notes: Notes::default(),
            fault: None,
            wants_room: false,
            news: false,
            process: attached.process,
            peer_has_cma: attached.peer_has_cma,
        })
    }

    /// The outcome of attaching, for this end.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// Whether the peer may be asked to copy from or into this process by CMA.
    pub fn peer_copies(&self) -> bool {
        self.peer_has_cma
    }

    /// Puts a frame into the ring and wakes the peer if it sleeps; false: no room.
    #[inline(always)]
    fn push(&mut self, tx: &Tx) -> Result<bool, LaneError> {
        if !self.producer.push(&tx.head, &tx.payload)? {
            self.blocked = true;
            return Ok(false);
        }
        self.flags.wake(DATA, &self.wire);
        self.stats.tx_bytes += (HEAD_LEN + tx.payload.len) as u64;
        Ok(true)
    }

    #[inline]
    fn transmit(&mut self, sink: &mut dyn Sink, budget: usize) -> Result<bool, LaneError> {
        if self.held.is_none() && !sink.wants() {
            self.blocked = false;
            return Ok(false);
        }
        let before = self.stats.tx_bytes;
        loop {
            let tx = match self.held.take() {
                Some(tx) => tx,
                None if !self.producer.room()? || self.stats.tx_bytes - before >= budget as u64 => {
                    self.blocked = true;
                    break;
                }
                None => match sink.next(self.id) {
                    Some(tx) => tx,
                    None => {
                        self.blocked = false;
                        break;
                    }
                },
            };
            if !self.push(&tx)? {
                self.held = Some(tx);
                break;
            }
            sink.sent(self.id, tx.token);
        }
        Ok(self.stats.tx_bytes != before)
    }

    #[inline]
    fn receive(&mut self, sink: &mut dyn Sink, budget: usize) -> Result<bool, LaneError> {
        let before = self.stats.rx_bytes;
        if self.arriving.is_some() && !self.go_on(sink, budget) {
            return Ok(true);
        }
        while self.consumer.is_ready()? {
            let frame = self.consumer.frame()?;
            match sink.place(self.id, &frame.head) {
                Place::Into { dst, len, grant: None, token } if frame.len <= WHOLE_MAX => {
                    let wanted = len.min(frame.len);
                    if wanted > 0 {
                        // SAFETY: the sink vouches for `len` writable bytes at `dst`; the frame has as many as are
                        // copied.
                        unsafe { frame.copy_to(dst, 0, wanted) };
                    }
                    self.take_frame(&frame);
                    sink.placed(self.id, token);
                }
                place => match Arriving::new(frame, place)? {
                    Some(arriving) if frame.len > WHOLE_MAX && frame.len > budget => {
                        self.arriving = Some(arriving);
                        self.go_on(sink, budget);
                        return Ok(true);
                    }
                    Some(arriving) => drop(self.deliver(sink, arriving, frame.len)),
                    None => {
                        self.waits_at = self.consumer.at();
                        break;
                    }
                },
            }
            if self.stats.rx_bytes - before >= budget as u64 {
                break;
            }
        }
        let moved = self.stats.rx_bytes != before;
        if !moved && self.consumer.owes() {
            // The producer needs the last bit of room only where the ring is small: it may wait for an idle poll.
            self.publish();
        }
        Ok(moved)
    }

    /// Done with the frame: its room is the producer's again.
    #[inline]
    fn take_frame(&mut self, frame: &Frame) {
        self.stats.rx_bytes += (HEAD_LEN + frame.len) as u64;
        if self.consumer.release(frame) {
            self.publish();
        }
    }

    /// Whether the next frame has no place at present.
    fn waits(&self) -> bool {
        self.waits_at == self.consumer.at()
    }

    /// Copies the next `len` bytes of a frame; the frame itself when it is not complete by that.
    #[inline]
    fn deliver(&mut self, sink: &mut dyn Sink, mut arriving: Arriving, len: usize) -> Option<Arriving> {
        // SAFETY: the sink vouches for the place while the loan is not recalled.
        let Some((frame, placed)) = (unsafe { arriving.go_on(len) }) else { return Some(arriving) };
        self.take_frame(&frame);
        if let Some(token) = placed {
            sink.placed(self.id, token);
        }
        None
    }

    /// Continues with a frame that is larger than one poll's budget; true when it is complete.
    #[cold]
    fn go_on(&mut self, sink: &mut dyn Sink, budget: usize) -> bool {
        if let Some(arriving) = self.arriving.take() {
            let len = budget.max(SMALLEST_COPY).min(arriving.left());
            self.arriving = self.deliver(sink, arriving, len);
        }
        self.arriving.is_none()
    }

    /// [`Lane::take`] of any payload that lies in its slot.
    ///
    /// # Safety
    /// As for `take`.
    #[inline(never)]
    unsafe fn take_words(&mut self, dst: *mut u8, len: usize, count: Option<u32>) -> bool {
        // SAFETY: by the contract.
        let due = unsafe { self.consumer.take_inline(dst, len) };
        self.taken(len, due, count)
    }

    /// A frame of that payload was taken. `due`: it is time to give its room back.
    #[inline(always)]
    fn taken(&mut self, len: usize, due: bool, count: Option<u32>) -> bool {
        self.stats.rx_bytes += (HEAD_LEN + len) as u64;
        self.idle = 0;
        if due {
            self.publish();
        }
        match count {
            Some(count) => Lane::publish(self, count),
            None => false,
        }
    }

    /// [`Lane::put`] of any payload that fits into its slot.
    ///
    /// # Safety
    /// As for `put`.
    #[inline(never)]
    unsafe fn put_words(&mut self, head: &Head, payload: *const u8, len: usize) -> bool {
        // SAFETY: by the contract.
        unsafe { self.put_inline(head, payload, len) }
    }

    /// # Safety
    /// As for [`Lane::put`].
    #[inline(always)]
    unsafe fn put_inline(&mut self, head: &Head, payload: *const u8, len: usize) -> bool {
        if self.held.is_some() || self.hung_up {
            return false;
        }
        // SAFETY: by the contract.
        let put = unsafe { self.producer.push_inline(head, payload, len) };
        if put {
            self.stats.tx_bytes += (HEAD_LEN + len) as u64;
            self.flags.wake(DATA, &self.wire);
        }
        put
    }

    /// A poll has something to do even if the ring is empty.
    fn needs_poll(&self) -> bool {
        self.attention || self.hung_up && !self.waits()
    }

    /// Gives room back to the peer's producer.
    #[inline(never)]
    fn publish(&mut self) {
        self.consumer.publish();
        self.flags.wake(ROOM, &self.wire);
    }

    /// Makes an error from shared memory final, although the peer may correct the memory afterwards.
    #[cold]
    fn broke(&mut self, error: LaneError) -> LaneError {
        self.attention = true;
        self.fault.get_or_insert(error).clone()
    }

    /// Reads what has come over the socket and sends what is owed. An error is final, and reported by `poll`.
    #[cold]
    pub(crate) fn service_socket(&mut self) -> Result<(), LaneError> {
        self.idle = 0;
        self.attention = false;
        if self.fault.is_none() {
            self.fault = self.read_socket().err();
        }
        match &self.fault {
            Some(fault) => {
                self.attention = true;
                Err(fault.clone())
            }
            None => Ok(()),
        }
    }

    fn read_socket(&mut self) -> Result<(), LaneError> {
        self.wire.settle();
        self.settle_notes();
        self.news |= std::mem::take(&mut self.wants_room);
        while !self.hung_up {
            match self.inbox.next(self.wire.stream()) {
                Ok(Record::Bell) => {}
                Ok(Record::Gone { id }) => self.segment_gone(id),
                Ok(Record::Segment { id, fd }) => {
                    if self.segments.len() >= MOST_SEGMENTS || self.segments.contains_key(&id) {
                        return Err(LaneError::Protocol(format!("segment {id} was passed twice or exceeds the limit")));
                    }
                    let unmapped =
                        || self.segments.values().filter(|one| matches!(one, PeerSegment::Passed(_))).count();
                    let segment = match fd {
                        // Counted only where there may be too many.
                        Some(_) if self.segments.len() >= MOST_UNMAPPED && unmapped() >= MOST_UNMAPPED => {
                            PeerSegment::Lost("512 segments that this end had not mapped were passed before it")
                        }
                        Some(fd) => Held::new(fd).map_or(
                            PeerSegment::Lost("peers had passed as many descriptors as this process keeps for them"),
                            PeerSegment::Passed,
                        ),
                        None => PeerSegment::Lost("this process had no descriptor left to receive it"),
                    };
                    self.segments.insert(id, segment);
                    self.news = true;
                }
                Ok(Record::Note { bytes, files, lost }) => {
                    self.notes.arrive(bytes, files, lost)?;
                    self.news = true;
                }
                Ok(Record::Taken(count)) => {
                    self.notes.peer_took(count)?;
                    self.news = true;
                }
                Err(NoRecord::Empty) => break,
                Err(NoRecord::HungUp) => self.hung_up = true,
                Err(NoRecord::Garbage(why)) => return Err(LaneError::Protocol(why)),
            }
        }
        Ok(())
    }

    /// Tells the peer of notes that were taken; later, if the socket has no room.
    fn settle_notes(&mut self) {
        if let Some(count) = self.notes.owed()
            && self.wire.taken(count).is_ok()
        {
            self.notes.told(count);
        }
    }

    fn segment_gone(&mut self, id: u32) {
        if self.segments.remove(&id).is_some() {
            if self.gone.len() == GONE_KEPT {
                self.gone.pop_front();
            }
            self.gone.push_back(id);
            self.news = true;
        }
    }
}

impl Drop for ShmLane {
    fn drop(&mut self) {
        self.flags.leave();
    }
}

impl Lane for ShmLane {
    fn id(&self) -> LaneId {
        self.id
    }

    fn name(&self) -> &str {
        "shm"
    }

    fn caps(&self) -> &LaneCaps {
        &self.caps
    }

    #[inline]
    fn post(&mut self, tx: &Tx) -> Result<Post, LaneError> {
        if self.held.is_some() || self.hung_up {
            self.blocked = true;
            return Ok(Post::Full);
        }
        Ok(if self.push(tx)? { Post::Taken } else { Post::Full })
    }

    #[inline]
    fn poll(&mut self, sink: &mut dyn Sink, budget: usize, _probe: bool) -> Result<bool, LaneError> {
        if self.attention || self.idle >= SOCKET_EVERY {
            self.service_socket()?;
        }
        // The peer's death is known before its ring is read: when that is empty now, it is empty for good.
        let received = self.receive(sink, budget).map_err(|error| self.broke(error))?;
        if self.hung_up {
            return if received || self.waits() {
                Ok(received)
            } else {
                Err(LaneError::Closed("the peer closed the lane or its process is gone".into()))
            };
        }
        let sent = self.transmit(sink, budget).map_err(|error| self.broke(error))?;
        let moved = sent | received | std::mem::take(&mut self.news);
        self.idle = if moved { 0 } else { self.idle + 1 };
        Ok(moved)
    }

    #[inline]
    fn peek(&mut self, head: &mut Head) -> bool {
        // Whatever comes before the next frame, a poll does.
        if self.attention || self.hung_up || self.idle >= SOCKET_EVERY || self.arriving.is_some() {
            return false;
        }
        self.consumer.inline_head(head)
    }

    #[inline]
    unsafe fn take(&mut self, dst: *mut u8, len: usize, count: Option<u32>) -> bool {
        // Apart, so that a word goes its way without a loop or a call, and without registers saved for one.
        if len != size_of::<u64>() || dst.is_null() {
            // SAFETY: by the contract.
            return unsafe { self.take_words(dst, len, count) };
        }
        // SAFETY: by the contract; `peek` saw the frame, so it is the oldest and not yet released.
        let due = unsafe { self.consumer.take_inline(dst, size_of::<u64>()) };
        self.taken(len, due, count)
    }

    #[inline]
    unsafe fn put(&mut self, head: &Head, payload: *const u8, len: usize) -> bool {
        if len != size_of::<u64>() {
            // SAFETY: by the contract.
            return unsafe { self.put_words(head, payload, len) };
        }
        // SAFETY: by the contract.
        unsafe { self.put_inline(head, payload, size_of::<u64>()) }
    }

    fn fd(&self) -> Option<RawFd> {
        Some(self.wire.stream().as_raw_fd())
    }

    fn on_full(&mut self, watch: WatchRoom) -> bool {
        self.wire.on_full(watch);
        true
    }

    fn ready(&mut self, _readable: bool, _writable: bool) {
        self.attention = true;
    }

    fn arm(&mut self) -> bool {
        if std::mem::take(&mut self.is_new) && self.flags.is_announced() {
            // Since before the peer's first frame: it has seen the announcement, or will.
            return self.confirm_sleep();
        }
        let passed = self.announce_sleep().is_none_or(|barrier| barrier());
        self.confirm_sleep() && passed
    }

    fn announce_sleep(&mut self) -> Option<Barrier> {
        if self.needs_poll() {
            return None;
        }
        if self.consumer.owes() {
            self.publish();
        }
        let room = if self.blocked { ROOM } else { 0 };
        self.flags.announce(if self.waits() { room } else { DATA | COUNT | room })
    }

    fn confirm_sleep(&mut self) -> bool {
        let waits = self.waits();
        // An error here is work too: the next poll reports it.
        let unread = self.arriving.is_some() || !waits && self.consumer.has_next();
        // Once is enough: whoever waits for a count asks for it before the next call.
        let counted = !waits && self.count.has_changed() && self.count.read() > 0;
        let work = self.needs_poll() || unread || counted || self.blocked && self.producer.room() != Ok(false);
        if work {
            self.flags.awake();
        }
        !work
    }

    fn disarm(&mut self) {
        self.is_new = false;
        self.flags.awake();
    }

    #[inline]
    fn publish(&mut self, count: u32) -> bool {
        if self.held.is_some() {
            return false;
        }
        self.count.publish(count);
        self.flags.wake(COUNT, &self.wire);
        true
    }

    #[inline]
    fn published(&mut self) -> Result<Option<u32>, LaneError> {
        // The count first: whatever the peer had sent when it wrote that is visible then.
        let count = self.count.read();
        if self.arriving.is_some() || self.consumer.has_next() {
            return Ok(None);
        }
        Ok(Some(count))
    }

    fn send_note(&mut self, note: &[u8], files: &[BorrowedFd<'_>]) -> Result<bool, LaneError> {
        if note.len() > NOTE_MAX || files.len() > NOTE_FILES {
            let (len, count) = (note.len(), files.len());
            return Err(LaneError::Protocol(format!("a note of {len} bytes and {count} descriptors to pass")));
        }
        let count = files.len() as u32;
        if !self.notes.may_send(count) {
            return Ok(false);
        }
        match self.wire.note(note, files) {
            Ok(()) => {
                self.notes.sent(count);
                Ok(true)
            }
            Err(e) => match e.raw_os_error() {
                // The peer has yet to read what it was sent, or it is gone, which the next poll finds out.
                Some(libc::EAGAIN | libc::EINTR | libc::ENOBUFS | libc::ENOMEM | libc::ETOOMANYREFS)
                | Some(libc::EPIPE | libc::ECONNRESET) => {
                    self.wants_room = true;
                    Ok(false)
                }
                _ => Err(LaneError::Down(format!("sendmsg of a note: {e}"))),
            },
        }
    }

    fn recv_note(&mut self) -> Option<ReceivedNote> {
        if self.notes.is_empty() && !self.hung_up && self.service_socket().is_err() {
            return None; // the next poll says why
        }
        let passed = self.notes.take()?;
        self.settle_notes();
        Some(passed)
    }

    fn close_and_wait(&mut self, limit: Duration) -> bool {
        let (stream, until) = (self.wire.stream(), Instant::now() + limit);
        self.flags.leave();
        shutdown::hang_up(stream);
        shutdown::has_hung_up(stream, until) && (self.flags.peer_has_left() || shutdown::has_ended(stream, until))
    }

    fn domain(&mut self) -> Option<&mut dyn Domain> {
        Some(self)
    }

    fn stats(&self) -> LaneStats {
        LaneStats { acked_bytes: self.stats.tx_bytes, ..self.stats }
    }
}
