//! What lanes ask for while they are polled: the next frame to send, and where a received one goes.
#![allow(unsafe_code)]

use crossrail_proto as proto;
use crossrail_transport::{Place, Tx};
use crossrail_types::{EndpointId, Head, LaneId};
use proto::{Host, Memory, Placing};

use super::chunk_queue::PACKED;
use super::gpu::{CONTROL, GpuMemory, Incoming, device_range};
use super::lanes::LaneRecord;
use super::operations::{MESSAGE, ROWS, UsualLane, WORD};
use super::rows::hosted::Shown;
use super::tables::Tables;

/// The tables and GPU memory, as lanes use them: what the core lends while a lane is polled.
///
/// The methods are those of [`Sink`](crossrail_transport::Sink), for any lane of an endpoint, with the same contract:
/// `place` precedes `placed` for every frame, and `sent` follows for every token that `next` gave out.
pub(crate) struct DataPath<'a> {
    pub(super) tables: &'a mut Tables,
    pub(super) gpu: &'a mut GpuMemory,
}

/// Whether that lane has anything to carry.
#[inline]
pub(super) fn wants(tables: &Tables, endpoint: EndpointId, lane: LaneId) -> bool {
    tables.lanes.get(lane).is_some_and(|lane| lane.has_pending())
        || tables.peers.get(endpoint).is_some_and(|peer| peer.protocol.wants(lane))
}

impl DataPath<'_> {
    /// The next frame.
    pub(crate) fn next(&mut self, endpoint: EndpointId, lane: LaneId) -> Option<Tx> {
        let record = self.tables.lanes.get_mut(lane)?;
        if record.chunks.is_staging() {
            return self.gpu.next(self.tables, endpoint, lane);
        }
        if let Some(tx) = record.take_pending() {
            return Some(tx);
        }
        let now = self.tables.clock.now();
        loop {
            let out = self.tables.peers.get_mut(endpoint)?.protocol.next(now, lane)?;
            if out.chunk {
                self.tables.trace_sent(endpoint, lane, &out);
            }
            if out.chunk && self.gpu.stage(self.tables, endpoint, lane, &out) {
                return self.gpu.next(self.tables, endpoint, lane);
            }
            if let Some(tx) = self.tables.kept_frame(endpoint, lane, &out) {
                return Some(tx);
            }
        }
    }

    /// The lane no longer reads the payload of that token.
    #[inline]
    pub(crate) fn sent(&mut self, lane: LaneId, token: u64) {
        if token != 0 {
            self.sent_held(lane, token);
        }
    }

    fn sent_held(&mut self, lane: LaneId, token: u64) {
        if token & PACKED != 0 {
            self.gpu.sent(self.tables, lane, token & !PACKED);
        } else if let Some(record) = self.tables.lanes.get_mut(lane) {
            record.release(token);
        }
    }

    /// Where the payload of a received frame goes.
    #[inline]
    pub(crate) fn place(&mut self, endpoint: EndpointId, lane: LaneId, head: &Head) -> Place {
        let tables = &mut *self.tables;
        let now = tables.clock.now();
        let Some(peer) = tables.peers.get_mut(endpoint) else { return Place::Discard };
        let operations = &mut tables.operations;
        let usual = UsualLane { endpoint, lane, names: peer.names() };
        let names = (peer.message_lane() == Some(lane)).then_some(usual.names);
        let mut ended = |short| {
            if names.is_none() || !operations.finish_short(&usual, &short) {
                operations.deliver_later(endpoint, &{ short });
            }
        };
        if let Some(short) = peer.protocol.place_short(now, lane, head, &mut tables.matcher, &mut ended) {
            return operations.place_short(endpoint, names, &short);
        }
        let mut regions = Shown { regions: &tables.regions, hosted: &mut tables.hosted, endpoint };
        let mut host = Host { matcher: &mut tables.matcher, regions: &mut regions };
        match peer.protocol.place(now, lane, head, &mut host) {
            Placing::Message(short) => tables.operations.place_short(endpoint, names, &short),
            Placing::Memory { memory, offset, len, chunk } => {
                if chunk {
                    tables.trace_arriving(endpoint, lane, head);
                }
                let Some((ptr, have, gpu)) = tables.extent(memory) else {
                    if let Some((dst, gpu)) = device_range(tables, memory, offset, len) {
                        let incoming = Incoming { memory, dst, gpu, len: len as usize, chunk };
                        return self.gpu.place(tables, endpoint, lane, incoming);
                    }
                    return tables.place_rows(endpoint, lane, (memory, offset, len));
                };
                if offset.checked_add(u64::from(len)).is_none_or(|end| end > have) {
                    return Place::Refuse(format!("{len} bytes at {offset} of a memory of {have} bytes"));
                }
                if let Some(gpu) = gpu {
                    let (dst, len) = ((ptr as u64 + offset).into(), len as usize);
                    return self.gpu.place(tables, endpoint, lane, Incoming { memory, dst, gpu, len, chunk });
                }
                if len as usize == size_of::<u64>()
                    && !chunk
                    && (ptr as usize + offset as usize).is_multiple_of(size_of::<u64>())
                    && matches!(memory, Memory::Region { .. })
                    && let Some(grant) = tables.loan(endpoint, memory)
                    && let Some(lane) = tables.lanes.get_mut(lane)
                {
                    let target = ptr as usize + offset as usize;
                    return Place::Into { dst: lane.word_buffer(target, grant), len: 8, grant: None, token: WORD };
                }
                // What is placed whole is there before another thread has the lock.
                let whole = tables.lanes.get(lane).is_some_and(|lane| len as usize <= lane.whole_max());
                let grant = if whole { None } else { tables.loan(endpoint, memory) };
                // SAFETY: inside the memory by the check above.
                let dst = unsafe { ptr.add(offset as usize) };
                Place::Into { dst, len: len as usize, grant, token: 0 }
            }
            Placing::Unexpected { arrival, len } => {
                let Some(peer) = tables.peers.get_mut(endpoint) else { return Place::Discard };
                let (dst, loan) = peer.insert_arrival(arrival, len as usize, &mut tables.operations.returns);
                Place::Into { dst, len: len as usize, grant: Some(loan), token: 0 }
            }
            Placing::Control { len } => {
                let record = tables.lanes.get_mut(lane);
                match record.and_then(|lane| lane.control_buffer(len as usize)) {
                    Some(dst) => Place::Into { dst, len: len as usize, grant: None, token: CONTROL },
                    None => Place::Refuse(format!("control frame of {len} bytes")),
                }
            }
            Placing::Discard => Place::Discard,
            Placing::Refuse(why) => Place::Refuse(why),
        }
    }

    /// The payload is in its place. `Err` kills the lane.
    #[inline(always)]
    pub(crate) fn placed(&mut self, endpoint: EndpointId, lane: LaneId, token: u64) -> Result<(), String> {
        if token & MESSAGE != 0 {
            let operations = &mut self.tables.operations;
            if let Some(short) = operations.placed_short(token) {
                operations.deliver_later(endpoint, &short);
            }
            return Ok(());
        }
        self.tables.trace_arrived(lane);
        if token == WORD {
            if let Some(lane) = self.tables.lanes.get_mut(lane) {
                lane.deliver_word();
            }
        } else if token == ROWS {
            if let Some(lane) = self.tables.lanes.get_mut(lane) {
                lane.rows.deliver();
            }
        } else if token > CONTROL && !self.gpu.placed(self.tables, endpoint, lane)? {
            return Ok(());
        }
        let tables = &mut *self.tables;
        let now = tables.clock.now();
        let Some(peer) = tables.peers.get_mut(endpoint) else { return Ok(()) };
        let mut regions = Shown { regions: &tables.regions, hosted: &mut tables.hosted, endpoint };
        let mut host = Host { matcher: &mut tables.matcher, regions: &mut regions };
        let control = if token == CONTROL { tables.lanes.get(lane).map(LaneRecord::control) } else { None };
        let result = peer.protocol.placed(now, lane, control.unwrap_or_default(), &mut host);
        // The next frame may name what this one brought, and bytes for rows are copied there before the peer can hear
        // that they have arrived.
        tables.take_arrived(endpoint);
        result
    }
}
