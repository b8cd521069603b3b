//! The lanes of one worker: a record of each, and those that are polled under the lock.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use crossrail_proto as proto;
use crossrail_transport::{Barrier, Domain, Lane, LaneCaps, LaneStats, Loan, Payload, Tx, Word};
use crossrail_types::{EndpointId, LaneId};
use slab::Slab;

use super::bulk_lane::LaneEnd;
use super::chunk_queue::ChunkQueue;
use super::id_table::IdTable;
use super::rows::part::RowsBuffer;

/// Longest control payload that the protocol asks room for.
const CONTROL_MAX: usize = 4096;

/// Records of all lanes, by id. That of a lane that has ended stays while receipts may refer to it.
#[derive(Default)]
pub(crate) struct Lanes {
    records: IdTable<LaneRecord>,
}

impl Lanes {
    /// An id for a lane that is about to be created.
    pub(crate) fn reserve(&mut self) -> LaneId {
        LaneId(self.records.reserve())
    }

    /// Adds the record of a lane to that peer, which is up since `now`, with a reserved id.
    pub(super) fn insert(&mut self, now: proto::Time, id: LaneId, owner: EndpointId, record: LaneRecord) {
        self.records.insert(id.0, LaneRecord { owner, up_since: now, ..record });
    }

    /// Frees a reserved id for which there is no lane.
    pub(super) fn abandon(&mut self, id: LaneId) {
        self.records.remove(id.0);
    }

    /// Records in the table, those of lanes that have ended too.
    pub(super) fn len(&self) -> usize {
        self.records.len()
    }

    /// Removes the records of the selected peers' lanes that have ended.
    pub(super) fn free_ended(&mut self, of: impl Fn(EndpointId) -> bool) {
        let ended = self.records.iter().filter(|(_, lane)| !lane.alive && of(lane.owner));
        for id in ended.map(|(id, _)| id).collect::<Vec<_>>() {
            self.records.remove(id);
        }
    }

    #[inline]
    pub(crate) fn get(&self, id: LaneId) -> Option<&LaneRecord> {
        self.records.get(id.0)
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, id: LaneId) -> Option<&mut LaneRecord> {
        self.records.get_mut(id.0)
    }

    /// The lane's name, for receipts and messages.
    pub(crate) fn name(&self, id: LaneId) -> Arc<str> {
        self.get(id).map_or_else(|| "?".into(), |lane| lane.name.clone())
    }

    /// Lanes that are alive and run over that network interface.
    pub(crate) fn over(&self, interface: &str) -> Vec<LaneId> {
        let over = |lane: &LaneRecord| lane.alive && lane.interface.as_deref() == Some(interface);
        self.records.iter().filter(|(_, lane)| over(lane)).map(|(id, _)| LaneId(id)).collect()
    }
}

/// What the engine keeps for one lane beside the lane itself. Its buffers are dropped only after the lane.
pub(crate) struct LaneRecord {
    name: Arc<str>,
    /// The peer that it leads to, once it is in the table.
    owner: EndpointId,
    up_since: proto::Time,
    transport: &'static str,
    rail: Option<(u16, u16)>,
    /// The network interface it runs over, for link events.
    interface: Option<String>,
    caps: LaneCaps,
    socket: bool,
    rests: bool,
    /// Messages up to here go with their first frame.
    eager_max: usize,
    /// Messages above are copied directly, if the lane can.
    copied_min: usize,
    /// Those of memory that the peer can map, above this already.
    mapped_min: usize,
    /// Messages up to here are carried with their first frame, whatever their memory.
    carried_max: usize,
    alive: bool,
    /// The next frame to send: one for which a post found no room, or a packed chunk.
    pending: Option<Tx>,
    /// Its chunks, and those of GPU memory that wait for their turn.
    pub(super) chunks: ChunkQueue,
    /// Payloads allocated here that the lane still reads, by token - 1.
    held: Slab<Box<[u8]>>,
    control: Box<[u8]>,
    control_len: usize,
    /// The word that is arriving, and where it goes. A lane places one frame after the other.
    word: Box<u64>,
    word_target: Option<(usize, Arc<Loan>)>,
    /// Bytes for a list that are arriving, if the lane takes none.
    pub(super) rows: RowsBuffer,
    /// Bytes acknowledged when it was last suspected of being dead, if others were in flight then.
    acked_when_suspected: Option<u64>,
    /// Times that it was suspected, and chunks that other lanes carried again when it was lost.
    pub(super) stalls: u64,
    pub(super) resent_chunks: u64,
    /// It ended because a checksum differed.
    pub(super) is_corrupt: bool,
}

impl LaneRecord {
    fn new(name: &str, transport: &'static str, caps: LaneCaps, eager_max: usize) -> LaneRecord {
        LaneRecord {
            name: name.into(),
            owner: EndpointId(u32::MAX),
            up_since: proto::Time(0),
            transport,
            rail: None,
            interface: None,
            caps,
            socket: false,
            rests: false,
            eager_max,
            copied_min: eager_max,
            mapped_min: eager_max,
            carried_max: eager_max,
            alive: true,
            pending: None,
            chunks: ChunkQueue::default(),
            held: Slab::new(),
            control: vec![0; CONTROL_MAX].into(),
            control_len: 0,
            word: Box::new(0),
            word_target: None,
            rows: RowsBuffer::default(),
            acked_when_suspected: None,
            stalls: 0,
            resent_chunks: 0,
            is_corrupt: false,
        }
    }

    /// How long it has been up.
    pub(super) fn age(&self, now: proto::Time) -> Duration {
        Duration::from_nanos(now.since(self.up_since))
    }

    /// The record of that lane. Messages of up to `eager_max` bytes go with their first frame.
    pub(crate) fn of(lane: &(impl Lane + ?Sized), transport: &'static str, eager_max: usize) -> LaneRecord {
        LaneRecord::new(lane.name(), transport, lane.caps().clone(), eager_max)
    }

    /// The lane as the protocol knows it: it carries messages, and chunks too (`bulk`).
    pub(crate) fn spec(&self, id: LaneId, bulk: bool) -> proto::LaneSpec {
        let caps = &self.caps;
        proto::LaneSpec {
            id,
            reliable: caps.reliable,
            messages: true,
            bulk,
            max_payload: u32::try_from(caps.max_payload).unwrap_or(u32::MAX),
            eager_max: self.eager_max.min(caps.max_payload) as u32,
            whole_max: if caps.reliable { caps.whole_max as u32 } else { 0 },
            counts: caps.reliable && caps.counts,
            cost_ns: 1,
        }
    }

    /// A lane whose polls cost a system call: it is polled less often while others are busy.
    pub(crate) fn over_socket(self) -> LaneRecord {
        LaneRecord { socket: true, ..self }
    }

    pub(crate) fn polls_socket(&self) -> bool {
        self.socket
    }

    /// Marks a lane that needs no polls while idle: its descriptor reports every event.
    pub(crate) fn resting(self) -> LaneRecord {
        LaneRecord { rests: true, ..self }
    }

    pub(super) fn rests(&self) -> bool {
        self.rests
    }

    /// A lane of a rail: its number and channel, and the network interface.
    pub(crate) fn on_rail(self, rail: (u16, u16), interface: Option<String>) -> LaneRecord {
        LaneRecord { rail: Some(rail), interface, ..self }
    }

    /// Messages of more than `any` bytes are copied directly, of memory that the peer can map those of more than
    /// `mapped`.
    pub(crate) fn copied_above(self, any: usize, mapped: usize) -> LaneRecord {
        let carried_max = if self.caps.direct { self.eager_max.min(any).min(mapped) } else { self.eager_max };
        LaneRecord { copied_min: any, mapped_min: mapped, carried_max, ..self }
    }

    pub(crate) fn name(&self) -> &Arc<str> {
        &self.name
    }

    pub(crate) fn transport(&self) -> &'static str {
        self.transport
    }

    /// The peer that it leads to.
    pub(super) fn owner(&self) -> EndpointId {
        self.owner
    }

    pub(crate) fn rail(&self) -> Option<(u16, u16)> {
        self.rail
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.alive
    }

    /// Whether the peer confirms messages by publishing a count.
    #[inline]
    pub(super) fn counts(&self) -> bool {
        self.caps.counts
    }

    /// Payloads up to this length are placed whole, within one poll.
    #[inline]
    pub(super) fn whole_max(&self) -> usize {
        self.caps.whole_max
    }

    #[inline]
    pub(crate) fn is_reliable(&self) -> bool {
        self.caps.reliable
    }

    #[inline]
    pub(super) fn eager_max(&self) -> usize {
        self.eager_max
    }

    /// Whether `len` bytes go with their first frame, whatever their memory. False says nothing.
    #[inline]
    pub(super) fn carries(&self, len: usize) -> bool {
        len <= self.carried_max
    }

    /// Whether `len` bytes are copied directly; `mapped`: the peer can map them.
    #[inline(always)]
    pub(super) fn copies_directly(&self, len: usize, mapped: impl FnOnce() -> bool) -> bool {
        self.caps.direct && (len > self.copied_min || (len > self.mapped_min && mapped()))
    }

    // ---- the frame that goes next

    #[inline]
    pub(super) fn has_pending(&self) -> bool {
        self.pending.is_some()
    }

    #[inline]
    pub(super) fn take_pending(&mut self) -> Option<Tx> {
        self.pending.take()
    }

    pub(super) fn set_pending(&mut self, tx: Tx) {
        self.pending = Some(tx);
    }

    /// Makes the chunk whose turn it is the next frame; whether there was one, and no other frame was pending.
    pub(super) fn advance_chunks(&mut self) -> bool {
        self.chunks.advance(&mut self.pending)
    }

    /// Whether its next frame waits for a GPU here: then the peer's silence means nothing.
    pub(crate) fn is_held_up(&self) -> bool {
        self.pending.is_none() && self.chunks.is_held_up()
    }

    // ---- buffers

    /// Keeps `bytes` until the lane has sent them.
    pub(super) fn hold(&mut self, bytes: &[u8]) -> (Payload, u64) {
        let key = self.held.insert(bytes.into());
        let held = &self.held[key];
        (Payload { ptr: held.as_ptr(), len: held.len(), ..Payload::EMPTY }, key as u64 + 1)
    }

    /// The lane no longer reads what was held under that token.
    pub(super) fn release(&mut self, token: u64) {
        self.held.try_remove(token as usize - 1);
    }

    /// Memory for a control payload of `len` bytes; `None`: it is too long.
    #[inline]
    pub(super) fn control_buffer(&mut self, len: usize) -> Option<*mut u8> {
        (len <= self.control.len()).then(|| {
            self.control_len = len;
            self.control.as_mut_ptr()
        })
    }

    /// Memory for a word that goes to the address `target`. Lanes fill in pieces what they receive, and others poll a
    /// word: it is therefore received here, and [`LaneRecord::deliver_word`] stores it whole.
    pub(super) fn word_buffer(&mut self, target: usize, grant: Arc<Loan>) -> *mut u8 {
        self.word_target = Some((target, grant));
        std::ptr::from_mut(&mut *self.word).cast()
    }

    /// Stores the word that has arrived by one release store, which orders everything placed before it. Nothing if the
    /// memory was taken back meanwhile.
    pub(super) fn deliver_word(&mut self) {
        let Some((target, grant)) = self.word_target.take() else { return };
        if let Some(_permit) = grant.enter() {
            // SAFETY: eight aligned bytes of memory that the grant keeps (see `DataPath::place`); atomic, since its
            // owner polls them from other threads.
            unsafe { Word::at(target as *mut u64) }.announce(*self.word);
        }
    }

    /// Whether the lane carries bytes of lists from and to where they are.
    pub(super) fn takes_lists(&self) -> bool {
        self.caps.lists
    }

    /// The control payload that has arrived.
    #[inline]
    pub(super) fn control(&self) -> &[u8] {
        &self.control[..self.control_len]
    }

    // ---- its end

    /// Whether nothing was acknowledged since this was last called, while bytes were in flight both times.
    /// `acked`: bytes acknowledged so far; `None`: nothing is in flight, or that is not known.
    pub(crate) fn is_silent(&mut self, acked: Option<u64>) -> bool {
        let silent = acked.is_some() && acked == self.acked_when_suspected;
        self.acked_when_suspected = acked;
        silent
    }

    /// The lane was dropped: receipts still ask for its name, nothing for its buffers. False: it was closed before.
    pub(super) fn close(&mut self) -> bool {
        let was_alive = std::mem::replace(&mut self.alive, false);
        self.pending = None;
        self.chunks.clear();
        self.control = Box::default();
        self.control_len = 0;
        was_alive
    }
}

/// A lane polled under the worker's lock.
pub(crate) struct PolledLane {
    pub(crate) id: LaneId,
    pub(crate) endpoint: EndpointId,
    pub(crate) lane: Box<dyn Lane>,
    /// Polling it costs a system call.
    pub(crate) socket: bool,
    /// It may rest while nothing goes over it.
    pub(crate) rests: bool,
    /// Something has arrived since [`Transfers::rest_idle`](super::Transfers::rest_idle) last asked.
    pub(super) used: bool,
}

/// All lanes polled under the worker's lock.
///
/// While [`PolledLanes::is_armed`], every lane's peer sends a wake-up with its next frame, because no thread polls
/// here; a lane that is added meanwhile was not armed, so whoever adds one must disarm.
///
/// Of many lanes, those that are idle rest: they are armed one by one and not polled, so that they cost the others
/// nothing. One is awake again when its peer has sent its wake-up, which epoll reports, or when this end uses it.
pub(crate) struct PolledLanes {
    /// Those that are polled, then those that rest.
    lanes: Vec<PolledLane>,
    /// How many are polled.
    awake: usize,
    /// There are only sockets, and few: they are polled in every pass.
    sockets_only: bool,
    armed: bool,
    /// Where the lane was that was found last.
    last: usize,
    /// Lanes that were dropped, also those polled elsewhere; `None`: nobody takes them.
    ends: Option<Vec<LaneEnd>>,
}

impl PolledLanes {
    pub(super) fn new() -> PolledLanes {
        PolledLanes { lanes: Vec::new(), awake: 0, sockets_only: true, armed: false, last: 0, ends: None }
    }

    /// How many are polled: they have the first positions.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.awake
    }

    /// How many rest.
    #[inline]
    pub(super) fn resting(&self) -> usize {
        self.lanes.len() - self.awake
    }

    /// The lane at that position, if it is polled.
    #[inline]
    pub(super) fn at(&mut self, at: usize) -> Option<&mut PolledLane> {
        if at < self.awake { self.lanes.get_mut(at) } else { None }
    }

    /// Where the lane is, which is awake after this.
    #[inline]
    pub(super) fn position(&mut self, id: LaneId) -> Option<usize> {
        self.find(id)
    }

    /// The lane itself, which is awake after this.
    #[inline(always)]
    pub(super) fn get_mut(&mut self, id: LaneId) -> Option<&mut dyn Lane> {
        Some(&mut *self.entry(id)?.lane)
    }

    /// The lane, which is awake after this, and what is known of it.
    #[inline(always)]
    pub(super) fn entry(&mut self, id: LaneId) -> Option<&mut PolledLane> {
        let found = self.last < self.awake && self.lanes.get(self.last).is_some_and(|lane| lane.id == id);
        if !found {
            self.last = self.find(id)?;
        }
        self.lanes.get_mut(self.last)
    }

    /// [`PolledLanes::position`], which looks through all of them.
    #[inline(never)]
    fn find(&mut self, id: LaneId) -> Option<usize> {
        let at = self.lanes.iter().position(|lane| lane.id == id)?;
        Some(if at < self.awake { at } else { self.awaken(at) })
    }

    /// The peer of the only lane, if there is one.
    #[inline]
    pub(super) fn only_endpoint(&self) -> Option<EndpointId> {
        match &*self.lanes {
            [lane] => Some(lane.endpoint),
            _ => None,
        }
    }

    /// What the lane makes of memory, if it reaches that of the peer.
    pub(super) fn domain(&mut self, id: LaneId) -> Option<&mut dyn Domain> {
        self.get_mut(id)?.domain()
    }

    /// Records that the lane's socket is ready. Returns whether a sleeping thread must be woken: the lane rested, and
    /// no other event will report it. No-op if the lane is not polled here.
    pub(crate) fn ready(&mut self, id: LaneId, readable: bool, writable: bool) -> bool {
        let before = self.awake;
        if let Some(lane) = self.get_mut(id) {
            lane.ready(readable, writable);
        }
        self.awake > before && self.armed
    }

    /// Has those of the lanes at these positions rest for which there is no work.
    pub(super) fn rest(&mut self, at: &[usize]) {
        let (end, first) = (self.awake, self.awake - at.len());
        // Side by side, from the last on: none of the others moves to a position that is yet to be looked at.
        for (to, at) in (first..end).rev().zip(at.iter().rev()) {
            self.lanes.swap(*at, to);
        }
        let passed = announce_sleep(&mut self.lanes[first..end]);
        for at in (first..end).rev() {
            let lane = &mut self.lanes[at].lane;
            if passed && lane.confirm_sleep() {
                self.awake -= 1;
                self.lanes.swap(at, self.awake);
            } else {
                lane.disarm();
            }
        }
        self.recount();
    }

    /// The lane at that position, which rests, is polled again. Its new position.
    #[cold]
    fn awaken(&mut self, at: usize) -> usize {
        let lane = &mut self.lanes[at];
        lane.used = true;
        // Otherwise nobody polls, and this lane stays armed like all the others.
        if !self.armed {
            lane.lane.disarm();
        }
        self.lanes.swap(at, self.awake);
        self.awake += 1;
        self.recount();
        self.awake - 1
    }

    /// What it has carried; `None`: no such lane is polled here.
    pub(crate) fn stats(&self, id: LaneId) -> Option<LaneStats> {
        self.lanes.iter().find(|lane| lane.id == id).map(|lane| lane.lane.stats())
    }

    #[inline]
    pub(super) fn sockets_only(&self) -> bool {
        self.sockets_only
    }

    pub(super) fn add(&mut self, lane: PolledLane) {
        self.lanes.push(lane);
        let last = self.lanes.len() - 1;
        self.lanes.swap(self.awake, last);
        self.awake += 1;
        self.recount();
    }

    /// Takes the lane at that position out. The order of the others changes.
    pub(super) fn remove(&mut self, at: usize) -> PolledLane {
        let mut at = at;
        if at < self.awake {
            self.awake -= 1;
            self.lanes.swap(at, self.awake);
            at = self.awake;
        }
        let lane = self.lanes.swap_remove(at);
        self.recount();
        if self.ends.is_some() {
            self.note_end(LaneEnd::of(&*lane.lane));
        }
        lane
    }

    /// Keeps what lanes had carried when they were dropped, for [`PolledLanes::take_ends`].
    pub(crate) fn keep_ends(&mut self) {
        self.ends.get_or_insert_default();
    }

    /// A lane was dropped, here or where it was polled.
    pub(crate) fn note_end(&mut self, end: LaneEnd) {
        if let Some(ends) = &mut self.ends {
            ends.push(end);
        }
    }

    /// The lanes that were dropped since the last call.
    pub(super) fn take_ends(&mut self) -> Vec<LaneEnd> {
        self.ends.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Takes a lane of that endpoint out.
    pub(super) fn remove_of(&mut self, endpoint: EndpointId) -> Option<PolledLane> {
        let at = self.lanes.iter().position(|lane| lane.endpoint == endpoint)?;
        Some(self.remove(at))
    }

    fn recount(&mut self) {
        let polled = &self.lanes[..self.awake];
        self.sockets_only = polled.len() <= 2 && polled.iter().all(|lane| lane.socket);
    }

    #[inline]
    pub(super) fn is_armed(&self) -> bool {
        self.armed
    }

    /// Has every lane's peer send a wake-up with its next frame. False: there is work already, and nothing is armed.
    pub(super) fn arm(&mut self) -> bool {
        let lanes = &mut self.lanes[..self.awake];
        self.armed = announce_sleep(lanes) && lanes.iter_mut().all(|lane| lane.lane.confirm_sleep());
        if !self.armed {
            lanes.iter_mut().for_each(|lane| lane.lane.disarm());
        }
        self.armed
    }

    /// A thread polls the lanes again: no wake-ups are needed. Whether the lanes were armed.
    #[inline]
    pub(crate) fn disarm(&mut self) -> bool {
        let was_armed = std::mem::replace(&mut self.armed, false);
        if was_armed {
            for lane in &mut self.lanes[..self.awake] {
                lane.lane.disarm();
            }
        }
        was_armed
    }
}

/// Announces that no thread polls these lanes any more: one barrier serves them all. False: they must be polled.
fn announce_sleep(lanes: &mut [PolledLane]) -> bool {
    let mut barrier = None;
    for PolledLane { lane, .. } in lanes {
        barrier = lane.announce_sleep().or(barrier);
    }
    barrier.is_none_or(|barrier: Barrier| barrier())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU64, Ordering};

    use crossrail_transport::{LaneError, Post, Sink};

    use super::*;

    /// Calls that put lanes to sleep or wake them, in order.
    static ASKED: Mutex<Vec<(&str, usize)>> = Mutex::new(Vec::new());

    fn barrier() -> bool {
        ASKED.lock().unwrap().push(("barrier", 0));
        true
    }

    struct Sleeper {
        number: usize,
        has_work: bool,
    }

    impl Lane for Sleeper {
        fn id(&self) -> LaneId {
            LaneId(self.number as u32)
        }
        fn name(&self) -> &'static str {
            "sleeper"
        }
        fn caps(&self) -> &LaneCaps {
            unreachable!("nothing is sent")
        }
        fn post(&mut self, _: &Tx) -> Result<Post, LaneError> {
            unreachable!("nothing is sent")
        }
        fn poll(&mut self, _: &mut dyn Sink, _: usize, _: bool) -> Result<bool, LaneError> {
            unreachable!("nothing is polled")
        }
        fn announce_sleep(&mut self) -> Option<Barrier> {
            ASKED.lock().unwrap().push(("announce", self.number));
            Some(barrier)
        }
        fn confirm_sleep(&mut self) -> bool {
            ASKED.lock().unwrap().push(("confirm", self.number));
            !self.has_work
        }
        fn disarm(&mut self) {
            ASKED.lock().unwrap().push(("disarm", self.number));
        }
        fn stats(&self) -> LaneStats {
            LaneStats::default()
        }
    }

    /// The lanes of which that was asked.
    fn asked(what: &str) -> Vec<usize> {
        ASKED.lock().unwrap().iter().filter(|(asked, _)| *asked == what).map(|(_, number)| *number).collect()
    }

    #[test]
    fn lanes_go_to_sleep_together_behind_one_barrier() {
        let mut lanes = PolledLanes::new();
        for number in 0..5 {
            let lane = Box::new(Sleeper { number, has_work: number == 3 });
            let (id, endpoint) = (LaneId(number as u32), EndpointId(number as u32));
            lanes.add(PolledLane { id, endpoint, lane, socket: false, rests: true, used: false });
        }
        assert!(!lanes.arm() && !lanes.is_armed(), "one has work");
        assert_eq!((asked("announce"), asked("barrier")), (vec![0, 1, 2, 3, 4], vec![0]));
        assert_eq!(asked("disarm"), [0, 1, 2, 3, 4], "no lane is left asleep");
        ASKED.lock().unwrap().clear();
        lanes.rest(&[1, 3, 4]);
        assert_eq!((asked("announce").len(), asked("barrier").len(), asked("disarm")), (3, 1, vec![3]));
        let mut awake: Vec<u32> = (0..lanes.len()).filter_map(|at| lanes.at(at).map(|lane| lane.id.0)).collect();
        awake.sort_unstable();
        assert_eq!((awake, lanes.resting()), (vec![0, 2, 3], 2));
        let order: Vec<&str> = ASKED.lock().unwrap().iter().map(|(what, _)| *what).collect();
        assert_eq!(
            order[..4],
            ["announce", "announce", "announce", "barrier"],
            "the barrier follows all announcements"
        );
    }

    #[test]
    fn a_word_that_arrives_in_pieces_is_seen_whole_or_not_at_all() {
        let (lane, _other) = crossrail_transport::loopback::pair(LaneId(0), LaneId(1)).expect("a lane");
        let mut record = LaneRecord::of(&lane, "test", 0);
        let (polled, grant) = (AtomicU64::new(7), Arc::new(Loan::default()));
        let target = polled.as_ptr() as usize;
        let word = 0x0102_0304_0506_0708_u64.to_ne_bytes();
        for cut in 0..=8 {
            polled.store(7, Ordering::Relaxed);
            let to = record.word_buffer(target, Arc::clone(&grant));
            for (at, byte) in word.iter().enumerate().take(cut) {
                // SAFETY: the buffer has eight bytes.
                unsafe { to.add(at).write(*byte) };
            }
            assert_eq!(polled.load(Ordering::Acquire), 7, "{cut} bytes were seen");
            for (at, byte) in word.iter().enumerate().skip(cut) {
                // SAFETY: as above.
                unsafe { to.add(at).write(*byte) };
            }
            record.deliver_word();
            assert_eq!(polled.load(Ordering::Acquire), u64::from_ne_bytes(word));
        }
        grant.recall();
        record.word_buffer(target, Arc::clone(&grant));
        polled.store(7, Ordering::Relaxed);
        record.deliver_word();
        assert_eq!(polled.load(Ordering::Acquire), 7, "the memory was taken back");
    }
}
