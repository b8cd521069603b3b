//! The lanes of one worker: a record of each.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use crossrail_proto as proto;
use crossrail_transport::{Lane, LaneCaps, Loan, Payload, Tx, Word};
use crossrail_types::{EndpointId, LaneId};
use slab::Slab;

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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

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
