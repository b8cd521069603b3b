//! Lists and notices: the sender's side ([`outbox`](super::rows::outbox)) and the receiver's ([`hosted`](super::rows::hosted)).
//!
//! A list at its owner is a region: a linear space of bytes that writes and reads address by key and offset, and that
//! chunks, rails and lost lanes know nothing about. Only where its bytes are is looked up in a [`List`]. The rows of
//! both sides are told once, then a *view*, which pairs them by two indices, and every operation names that view. The
//! view's owner copies, where it can reach the peer's memory; otherwise the bytes go as those of any write or read.
#![allow(unsafe_code)]

#[cfg(test)]
mod tests;

use std::any::Any;
use std::sync::Arc;

use crossrail_gpu::StreamPoint;
use crossrail_proto as proto;
use crossrail_transport::{DirectKind, Index, Payload, Place, Tx};
use crossrail_types::{EndpointId, Error, ErrorKind, LaneId, OpId, Result};
use proto::{Memory, Offer, Operation};

use super::operations::ROWS;
use super::outcome::{OpKind, gone};
use super::peer_memory::create_domain;
use super::rows::hosted::Hosted;
pub(crate) use super::rows::hosted::Raised;
use super::rows::hosted::{Arrived, Where};
pub(crate) use super::rows::outbox::SentDescription;
use super::rows::outbox::{Outbox, Waiting, cost};
use super::rows::part::PAIRED;
pub(crate) use super::rows::part::{FollowUp, Part};
use super::rows::wire::{self, Named, PUT_AHEAD, Reachable, Sort, TheirRows};
use super::tables::{Extent, Tables};
use super::{Core, Transfers};
use crate::memory::{Buffer, RegionStride, Space};

/// A move of rows, or of a part of them.
pub(crate) struct ListOperation {
    pub(crate) kind: OpKind,
    /// The view and all that it depends on.
    pub(crate) view: [Option<SentDescription>; 3],
    pub(crate) local: Part,
    /// Our regions that contain the rows.
    pub(crate) over: Arc<[proto::RegionRef]>,
    pub(crate) len: u64,
    pub(crate) imm: Option<u32>,
    pub(crate) notice: Vec<u8>,
    /// Dropped when the operation is over, under the worker's lock.
    pub(crate) keep: Arc<dyn Any + Send + Sync>,
    /// The point in a stream of that GPU before which no row is touched. The GPU was [admitted](crate::progress::admit).
    pub(crate) after: Option<(u32, StreamPoint)>,
}

/// The rows of a layout: regions, and strides in them.
pub(crate) enum RowsOf<'a> {
    /// Of the peer's memory, by its keys.
    Peer(&'a [proto::RegionKey], &'a [RegionStride]),
    /// Of ours: base and length of the regions, and whose memory they are.
    Own(&'a [(u64, u64)], &'a [RegionStride], Space),
}

impl Core {
    /// Describes rows to the peer. `None`: rows of ours that it could not copy anyway.
    ///
    /// # Errors
    /// `PeerDead`, `Closed`; `Exhausted` when the peer would not take that much.
    pub(crate) fn describe_rows(&mut self, endpoint: EndpointId, rows: RowsOf<'_>) -> Result<Option<SentDescription>> {
        let (sort, mail) = match rows {
            RowsOf::Peer(keys, strides) => (Sort::Rows, wire::put_rows(keys, strides)),
            RowsOf::Own(memory, strides, space) => match self.transfers.reachable(endpoint, memory, strides, space) {
                Some(rows) => (Sort::Theirs, wire::put_theirs(&rows)),
                None => return Ok(None),
            },
        };
        let weight = wire::rows_weight(&mail) * if sort == Sort::Theirs { 2 } else { 1 };
        self.describe(endpoint, sort, mail, weight, &[]).map(Some)
    }

    /// Describes a pair of lists (a view) to the peer. `even`: the rows of each side are equally long.
    ///
    /// # Errors
    /// As [`Core::describe_rows`].
    pub(crate) fn describe_view(
        &mut self,
        endpoint: EndpointId,
        (rows, index, even): (&SentDescription, &Index, Option<u64>),
        theirs: Option<(&SentDescription, &Index, Option<u64>)>,
    ) -> Result<SentDescription> {
        let paired = theirs.map(|(sent, index, _)| (sent.id, index.clone()));
        let mail = wire::put_view(&wire::ViewOf { rows: rows.id, index: index.clone(), theirs: paired });
        let weight = theirs.map_or(0, |(_, index, even)| wire::weight(even, index));
        let weight = wire::weight(even, index).saturating_add(weight);
        let of: Vec<_> = theirs.iter().map(|(sent, ..)| sent.mail).chain([rows.mail]).flatten().collect();
        self.describe(endpoint, Sort::View, mail, weight, &of)
    }

    /// `of`: mails that this one refers to and that must arrive first.
    fn describe(
        &mut self,
        endpoint: EndpointId,
        sort: Sort,
        mail: Vec<u8>,
        weight: u64,
        of: &[OpId],
    ) -> Result<SentDescription> {
        self.check_alive(endpoint, "prepare")?;
        let outbox = self.outbox(endpoint)?;
        if mail.len() as u64 > wire::MAIL_MAX || !outbox.charge(weight) {
            let detail = format!("the peer holds at most {} bytes of lists for this end", wire::LISTS_MAX);
            let hint = "drop moves and layouts that are not needed, or make rows that are strides";
            return Err(Error::new(ErrorKind::Exhausted, "prepare", detail).with_hint(hint));
        }
        let id = outbox.id();
        let mails = outbox.outstanding(of.iter().copied());
        let mail = self.transfers.mail(endpoint, (sort, id), mail, mails);
        self.transfers.settle(endpoint);
        Ok(SentDescription { sort, id, weight, mail })
    }

    /// Withdraws descriptions from the peer.
    pub(crate) fn withdraw(&mut self, endpoint: EndpointId, sent: &[SentDescription]) {
        if self.check_alive(endpoint, "drop").is_err() {
            return;
        }
        let Ok(outbox) = self.outbox(endpoint) else { return };
        sent.iter().for_each(|sent| outbox.discharge(sent));
        let mails = outbox.outstanding(sent.iter().filter_map(|sent| sent.mail));
        let dropped: Vec<_> = sent.iter().map(|sent| (sent.sort, sent.id)).collect();
        self.transfers.withdraw(endpoint, &dropped, mails);
        self.transfers.settle(endpoint);
    }

    /// Starts to move rows.
    ///
    /// # Errors
    /// `PeerDead`, `Closed`. Later failures are the operation's outcome.
    pub(crate) fn start_list(&mut self, endpoint: EndpointId, what: ListOperation) -> Result<OpId> {
        let ListOperation { kind, view, local, over, len, imm, notice, keep, after } = what;
        self.check_alive(endpoint, kind.name())?;
        let from = local.from;
        // SAFETY: no address; the rows' memory is kept by `keep`.
        let buffer = unsafe { Buffer::raw(std::ptr::null_mut(), len as usize, Some(keep)) };
        let op = self.operations().insert(kind, Some(endpoint), 0, buffer);
        let outbox = self.outbox(endpoint)?;
        let writes = kind == OpKind::Write;
        let behind = (writes && !notice.is_empty()).then(|| outbox.id());
        let [Some(of), ..] = &view else { return Err(gone(kind.name())) };
        let key = Named::View { id: of.id, behind, counts: imm.is_some() }.key();
        let operation = match writes {
            // Always with an immediate: the owner is to hear of the end.
            true => Operation::Write { key, offset: from, imm: Some(imm.unwrap_or(0)) },
            false => Operation::Read { key, offset: from },
        };
        let paired = view[2].is_some();
        let mails = outbox.outstanding(view.iter().flatten().filter_map(|sent| sent.mail));
        let follow_up = match behind {
            Some(id) => Some(FollowUp::Forget(id)),
            None => (!notice.is_empty()).then(|| FollowUp::Notify(None, notice.clone())),
        };
        if let Some(entry) = self.operations().op_mut(op) {
            entry.set_part(local, follow_up);
            entry.set_over(over);
        }
        let cost = behind.map_or(0, |_| cost(notice.len()));
        let after = after.and_then(|(ordinal, point)| self.transfers.gpu.wait_for(ordinal, point));
        let notice = behind.map(|id| (id, notice));
        self.transfers
            .begin_or_wait(endpoint, Waiting { op, operation, mails, after, notice, cost, ordered: false, paired });
        self.transfers.settle(endpoint);
        Ok(op)
    }

    /// Starts to notify the peer. The operation is finished when the notice is in the peer's queue.
    ///
    /// # Errors
    /// `PeerDead`, `Closed`.
    pub(crate) fn notify(&mut self, endpoint: EndpointId, bytes: Vec<u8>) -> Result<OpId> {
        self.check_alive(endpoint, OpKind::Notice.name())?;
        let op = self.transfers.notify(endpoint, bytes);
        self.transfers.settle(endpoint);
        Ok(op)
    }

    /// Takes at most `limit` notices, the oldest first.
    pub(crate) fn take_notices(&mut self, limit: usize) -> Vec<Raised> {
        let hosted = &mut self.transfers.tables.hosted;
        let mut taken = Vec::new();
        while taken.len() < limit
            && let Some(raised) = hosted.take_notice()
        {
            taken.push(raised);
        }
        let mut of: Vec<_> = taken.iter().map(|raised| raised.from.endpoint).collect();
        of.dedup();
        for endpoint in of {
            self.transfers.return_credit(endpoint);
            self.transfers.settle(endpoint);
        }
        taken
    }

    /// Whether there are notices to take.
    pub(crate) fn has_notices(&self) -> bool {
        self.transfers.tables.hosted.has_notices()
    }

    /// Runs the follow-up actions of finished operations.
    #[cold]
    pub(crate) fn follow_up(&mut self) {
        for (endpoint, follow_up, good) in self.operations().take_follow_ups() {
            match follow_up {
                FollowUp::Notify(count, bytes) if good && self.check_alive(endpoint, "notify").is_ok() => {
                    if let Some((key, imm)) = count {
                        self.transfers.count_at(endpoint, key, imm);
                    }
                    if !bytes.is_empty() {
                        let op = self.transfers.notify(endpoint, bytes);
                        self.operations().detach(op);
                    }
                }
                FollowUp::Forget(id) if !good && self.check_alive(endpoint, "drop").is_ok() => {
                    // Not before the notice, which may go in chunks: the peer would keep it, and its credit, for ever.
                    let mails = self.outbox(endpoint).map(|outbox| outbox.long.iter().copied().collect());
                    self.transfers.withdraw(endpoint, &[(Sort::Behind, id)], mails.unwrap_or_default());
                }
                _ => {}
            }
            self.transfers.settle(endpoint);
        }
    }

    /// Removes an operation that waits in the outbox; false if it is not there.
    pub(super) fn leave_outbox(&mut self, op: OpId, endpoint: EndpointId) -> bool {
        self.outbox(endpoint).is_ok_and(|outbox| outbox.leave(op))
    }

    fn outbox(&mut self, endpoint: EndpointId) -> Result<&mut Outbox> {
        let peer = self.transfers.tables.peers.get_mut(endpoint);
        peer.map(|peer| &mut peer.outbox).ok_or_else(|| gone("prepare"))
    }
}

/// Begins the move that waits for the ticket's point in a stream, or fails it.
pub(super) fn stream_reached(transfers: &mut Transfers, ticket: u64, result: Result<()>) {
    let tables = &mut transfers.tables;
    let found = tables.peers.ids().into_iter().find_map(|endpoint| {
        let op = tables.peers.get_mut(endpoint)?.outbox.reached(ticket)?;
        Some((endpoint, op))
    });
    let Some((endpoint, op)) = found else { return };
    if let Err(error) = result {
        let what = tables.operations.op(op).map_or(String::new(), |entry| entry.kind().name().to_owned());
        if tables.peers.get_mut(endpoint).is_some_and(|peer| peer.outbox.leave(op)) {
            tables.operations.finish(op, Err(Box::new(Error { operation: what, ..error })));
        }
    }
    transfers.begin_waiting(endpoint);
    transfers.settle(endpoint);
}

impl Transfers {
    /// Sends a mail, once `mails` have arrived. `Some`: it waits for those or goes in chunks, and later frames may
    /// overtake it.
    fn mail(&mut self, endpoint: EndpointId, of: (Sort, u32), bytes: Vec<u8>, mails: Vec<OpId>) -> Option<OpId> {
        let (op, operation) = self.put_mail(endpoint, OpKind::Write, of, bytes);
        self.tables.operations.detach(op);
        if mails.is_empty() {
            return self.start_mail(endpoint, op, operation);
        }
        let peer = self.tables.peers.get_mut(endpoint)?;
        peer.outbox.long.insert(op);
        peer.outbox.wait(Waiting {
            op,
            operation,
            mails,
            after: None,
            notice: None,
            cost: 0,
            ordered: false,
            paired: false,
        });
        Some(op)
    }

    /// Enters a mail into the table.
    fn put_mail(
        &mut self,
        endpoint: EndpointId,
        kind: OpKind,
        (sort, id): (Sort, u32),
        bytes: Vec<u8>,
    ) -> (OpId, Operation) {
        let op = self.tables.operations.insert(kind, Some(endpoint), 0, bytes.into());
        (op, Named::Mail { sort, id }.put())
    }

    fn start_mail(&mut self, endpoint: EndpointId, op: OpId, operation: Operation) -> Option<OpId> {
        let entry = self.tables.operations.op(op)?;
        let (ptr, len) = (entry.ptr(), entry.len());
        let lane = self.tables.peers.get(endpoint).and_then(|peer| peer.message_lane());
        let eager = lane.and_then(|lane| self.tables.lanes.get(lane)).map_or(0, |lane| lane.eager_max());
        let offer = if len > eager { self.offer(endpoint, op, Space::Host, (ptr, len)) } else { None };
        let now = self.tables.clock.now();
        let peer = self.tables.peers.get_mut(endpoint)?;
        peer.protocol.start(now, op, operation, len as u64, offer, true);
        // Another lane for messages goes as far with the first frame.
        (len > eager && peer.outbox.long.insert(op)).then_some(op)
    }

    /// Makes the peer count an immediate in that region, by a zero-length write.
    fn count_at(&mut self, endpoint: EndpointId, key: proto::RegionKey, imm: u32) {
        let tables = &mut self.tables;
        let op = tables.operations.insert(OpKind::Write, Some(endpoint), 0, Vec::new().into());
        tables.operations.detach(op);
        let now = tables.clock.now();
        if let Some(peer) = tables.peers.get_mut(endpoint) {
            peer.protocol.start(now, op, Operation::Write { key, offset: 0, imm: Some(imm) }, 0, None, true);
        }
    }

    fn notify(&mut self, endpoint: EndpointId, bytes: Vec<u8>) -> OpId {
        let cost = cost(bytes.len());
        let (op, operation) = self.put_mail(endpoint, OpKind::Notice, (Sort::Notice, 0), bytes);
        self.begin_or_wait(
            endpoint,
            Waiting { op, operation, mails: Vec::new(), after: None, notice: None, cost, ordered: true, paired: false },
        );
        op
    }

    fn withdraw(&mut self, endpoint: EndpointId, dropped: &[(Sort, u32)], mails: Vec<OpId>) {
        let (op, operation) = self.put_mail(endpoint, OpKind::Write, (Sort::Drop, 0), wire::put_drop(dropped));
        self.tables.operations.detach(op);
        self.begin_or_wait(
            endpoint,
            Waiting { op, operation, mails, after: None, notice: None, cost: 0, ordered: false, paired: false },
        );
    }

    /// Tells the peer how many of its notices were taken, if it is time.
    pub(super) fn return_credit(&mut self, endpoint: EndpointId) {
        let tables = &mut self.tables;
        let alive = tables.peers.get(endpoint).is_some_and(|peer| peer.is_alive());
        if alive && let Some(taken) = tables.hosted.credit_due(endpoint) {
            self.mail(endpoint, (Sort::Credit, 0), taken.to_le_bytes().into(), Vec::new());
        }
    }

    fn begin_or_wait(&mut self, endpoint: EndpointId, waiting: Waiting) {
        let Some(peer) = self.tables.peers.get_mut(endpoint) else { return };
        if peer.outbox.may_begin(&waiting) {
            self.begin(endpoint, waiting);
        } else {
            peer.outbox.wait(waiting);
        }
    }

    /// Submits operations of the outbox, as far as their mails have arrived and the credit suffices.
    pub(super) fn begin_waiting(&mut self, endpoint: EndpointId) {
        while let Some(waiting) = self.tables.peers.get_mut(endpoint).and_then(|peer| peer.outbox.ready()) {
            self.begin(endpoint, waiting);
        }
    }

    fn begin(&mut self, endpoint: EndpointId, waiting: Waiting) {
        let Waiting { op, operation, notice, ordered, paired, .. } = waiting;
        if let Some((_, bytes)) = &notice
            && let Some((put, len)) = pack(self, endpoint, (op, operation), bytes, paired)
        {
            let now = self.tables.clock.now();
            if let Some(peer) = self.tables.peers.get_mut(endpoint) {
                peer.protocol.start(now, op, put, len, None, true);
            }
            return;
        }
        if let Some((id, bytes)) = notice
            && let Some(mail) = self.mail(endpoint, (Sort::Behind, id), bytes, Vec::new())
        {
            let mails = vec![mail];
            let waiting = Waiting { op, operation, mails, after: None, notice: None, cost: 0, ordered: false, paired };
            if let Some(peer) = self.tables.peers.get_mut(endpoint) {
                peer.outbox.wait(waiting);
            }
            return;
        }
        let Some(entry) = self.tables.operations.op(op) else { return };
        if entry.part().is_none() {
            let long = self.start_mail(endpoint, op, operation);
            if let Some(peer) = self.tables.peers.get_mut(endpoint).filter(|_| ordered && long.is_some()) {
                peer.outbox.notice = long;
            }
            return;
        }
        let len = entry.len() as u64;
        let space = Space::of(entry.part().and_then(|part| part.gpu.as_ref()));
        let offer = if paired { self.offer_pair(endpoint, len, space) } else { None };
        if space == Space::Gpu
            && offer.is_some()
            && let Some(entry) = self.tables.operations.op_mut(op)
        {
            entry.set_direct(DirectKind::CudaIpc);
        }
        let now = self.tables.clock.now();
        if let Some(peer) = self.tables.peers.get_mut(endpoint) {
            peer.protocol.start(now, op, operation, len, offer, space == Space::Host);
        }
    }

    /// Whether the peer is to copy `len` bytes between the lists of a view: where it can, and they are too long to be
    /// carried. If it can't after all, it says so, and they are carried.
    fn offer_pair(&mut self, endpoint: EndpointId, len: u64, space: Space) -> Option<Offer> {
        let tables = &self.tables;
        let lane = tables.peers.get(endpoint)?.message_lane()?;
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        let copies = match space {
            Space::Host => tables.lanes.get(lane)?.copies_directly(len, || true),
            Space::Gpu => self.gpu.is_linked(endpoint),
        };
        let mut descriptor = [0; 24];
        descriptor[0] = PAIRED;
        copies.then_some(Offer { descriptor, slot: None })
    }

    /// A mail in chunks has arrived, or failed: then what refers to it fails at the peer.
    #[inline]
    pub(super) fn mail_ended(&mut self, endpoint: EndpointId, op: OpId) {
        let Some(peer) = self.tables.peers.get_mut(endpoint) else { return };
        if !peer.outbox.long.is_empty() && peer.outbox.long.remove(&op) {
            self.begin_waiting(endpoint);
        }
    }

    /// The peer has ended: what waits fails, and what it has told is forgotten.
    pub(super) fn end_lists(&mut self, endpoint: EndpointId, why: &str) {
        let tables = &mut self.tables;
        tables.hosted.forget(endpoint);
        let Some(peer) = tables.peers.get_mut(endpoint) else { return };
        for op in peer.outbox.give_up() {
            tables.fail(op, ErrorKind::PeerDead, why, Some(endpoint));
        }
    }

    /// How the peer can reach rows of ours: only by mapping them. By the kernel (CMA) one end would copy it all and pin
    /// each page, which takes longer than two copies at two ends. `None`: over this endpoint it cannot.
    fn reachable(
        &mut self,
        endpoint: EndpointId,
        memory: &[(u64, u64)],
        strides: &[RegionStride],
        space: Space,
    ) -> Option<TheirRows> {
        let Transfers { tables, gpu, polled, .. } = self;
        let lane = tables.peers.get(endpoint)?.message_lane();
        let domain = create_domain(tables, (gpu, polled), (endpoint, lane), space).ok()?;
        let share = |(base, len): &(u64, u64)| {
            let descriptor = domain.share(*base as *const u8, usize::try_from(*len).ok()?).ok()??;
            Some(Reachable { descriptor, len: *len })
        };
        let memory = memory.iter().map(share).collect::<Option<_>>()?;
        if space == Space::Gpu {
            self.pass_notes(endpoint);
        }
        Some(TheirRows { memory, strides: strides.to_vec() })
    }
}

/// Makes one write of a notice and the rows of a short one, for which the peer makes memory, and its length. `None`:
/// the rows are long, or better spread over several rails, and the notice goes ahead of them.
fn pack(
    transfers: &mut Transfers,
    endpoint: EndpointId,
    (op, operation): (OpId, Operation),
    notice: &[u8],
    paired: bool,
) -> Option<(Operation, u64)> {
    let Operation::Write { key, offset, imm } = operation else { return None };
    let Named::View { id, counts, .. } = Named::of(&key)? else { return None };
    let entry = transfers.tables.operations.op(op)?;
    let rows = entry.len();
    let Part { list, from, gpu: None } = entry.part()?.clone() else { return None };
    let peer = transfers.tables.peers.get(endpoint)?;
    let lane = peer.message_lane()?;
    if peer.protocol.spreads_write(transfers.tables.clock.now(), rows as u64) {
        return None;
    }
    let ahead = PUT_AHEAD + notice.len();
    let len = ahead + rows;
    if len > transfers.tables.lanes.get(lane)?.eager_max()
        || paired && transfers.offer_pair(endpoint, rows as u64, Space::Host).is_some()
    {
        return None;
    }
    let mut bytes = Vec::with_capacity(len);
    bytes.extend(wire::put_ahead(offset, imm.filter(|_| counts)));
    bytes.extend(notice);
    bytes.resize(len, 0);
    // SAFETY: the rows are memory that the operation keeps.
    unsafe { list.copy_out(from, bytes[ahead..].as_mut_ptr(), rows as u64) };
    transfers.tables.operations.op_mut(op)?.pack(bytes, ahead);
    Some((Named::Put { id, notice: notice.len() as u32 }.put(), len as u64))
}

impl Tables {
    /// Cancels rows with a notice in one put that has not begun: the peer is never notified of it, so that the credit for the
    /// notice returns at once. False: it is none, or has begun.
    #[cold]
    pub(super) fn withdraw_packed(&mut self, endpoint: EndpointId, op: OpId, why: &proto::Failure) -> bool {
        let ahead = self.operations.op(op).map_or(0, |entry| entry.ahead());
        let Some(peer) = self.peers.get_mut(endpoint).filter(|_| ahead > 0) else { return false };
        if !peer.protocol.withdraw(op, why) {
            return false;
        }
        peer.outbox.return_credit(cost(ahead - PUT_AHEAD));
        true
    }

    /// The part of a list that the protocol names, and how many bytes there are from its start on; `None`: it is one
    /// piece, or over.
    #[cold]
    pub(super) fn part(&self, memory: Memory) -> Option<(Part, u64)> {
        match memory {
            Memory::Op(op) => {
                let op = self.operations.op(op)?;
                op.part().map(|part| (part.clone(), op.len() as u64))
            }
            Memory::Region { region, base, .. } => match self.hosted.memory(region)? {
                Where::Rows(list, gpu) => {
                    let left = list.bytes().checked_sub(base)?;
                    Some((Part { list: list.clone(), from: base, gpu: gpu.cloned() }, left))
                }
                Where::Flat(..) => None,
            },
        }
    }

    /// Acts on writes of that peer whose bytes are in place. At once: the protocol's events come later.
    #[inline]
    pub(super) fn take_arrived(&mut self, endpoint: EndpointId) {
        while let Some((region, imm)) = self.peers.get_mut(endpoint).and_then(|peer| peer.protocol.arrived()) {
            self.arrived(endpoint, region, imm);
        }
    }

    /// All bytes of a write are in place: its immediate counts, or it is a mail.
    pub(super) fn arrived(&mut self, endpoint: EndpointId, region: proto::RegionRef, imm: u32) {
        let what = if Hosted::is_lent(region) {
            self.hosted.arrived(&self.regions, region)
        } else {
            Arrived::Counts(region, None)
        };
        match what {
            Arrived::Counts(region, of) => self.regions.count(region, of.unwrap_or(imm)),
            Arrived::Credit(taken) => {
                if let Some(peer) = self.peers.get_mut(endpoint) {
                    peer.outbox.credit(taken);
                }
            }
            Arrived::Nothing => {}
        }
        self.operations.report();
    }

    /// The memory of a mail that comes in; `None`: it is not one, or over.
    #[cold]
    pub(super) fn lent(&self, region: proto::RegionRef, base: u64) -> Option<Extent> {
        match self.hosted.memory(region)? {
            Where::Flat(ptr, len) => (base <= len).then(|| (ptr.wrapping_add(base as usize), len - base, None)),
            Where::Rows(..) => None,
        }
    }

    /// A frame with bytes of a list, which goes by itself where the lane takes it, and as a copy otherwise.
    #[cold]
    pub(super) fn frame_of_rows(&mut self, endpoint: EndpointId, lane: LaneId, out: &proto::Out) -> Option<Tx> {
        let proto::Body::Memory { memory, offset, len } = out.body else { return None };
        // Rows of GPU memory are staged; only a peer that breaks the protocol has them go in another frame.
        let (Part { list, from, gpu: None }, have) = self.part(memory)? else { return None };
        offset.checked_add(u64::from(len)).filter(|end| *end <= have)?;
        let from = from + offset;
        let (payload, token) = if self.lanes.get(lane)?.takes_lists() {
            let grant = self.loan(endpoint, memory);
            let list = Some(Box::new((list, from)));
            (Payload { len: len as usize, grant, list, ..Payload::EMPTY }, 0)
        } else {
            let mut bytes = vec![0; len as usize];
            // SAFETY: the rows are memory of an operation or of regions that the protocol has not released, and which
            // are given back only under the worker's lock, which is held.
            unsafe { list.copy_out(from, bytes.as_mut_ptr(), bytes.len() as u64) };
            self.lanes.get_mut(lane)?.hold(&bytes)
        };
        Some(Tx { head: out.head, payload, token })
    }

    /// Where bytes for a list go: there, where the lane takes lists, and otherwise into the lane's own memory first.
    #[cold]
    pub(super) fn place_rows(
        &mut self,
        endpoint: EndpointId,
        lane: LaneId,
        (memory, offset, len): (Memory, u64, u32),
    ) -> Place {
        let Some((Part { list, from, gpu }, have)) = self.part(memory) else { return Place::Discard };
        if offset.checked_add(u64::from(len)).is_none_or(|end| end > have) {
            return Place::Refuse(format!("{len} bytes at {offset} of a list of {have} bytes"));
        }
        let (from, len) = (from + offset, len as usize);
        let Some(grant) = self.loan(endpoint, memory) else { return Place::Discard };
        let Some(record) = self.lanes.get_mut(lane) else { return Place::Discard };
        if record.takes_lists() {
            return Place::Rows { list, from, len, grant: Some(grant), token: 0 };
        }
        let returns = &mut self.operations.returns;
        let dst = record.rows.buffer(Part { list, from, gpu }, len, grant.clone(), returns);
        Place::Into { dst, len, grant: Some(grant), token: ROWS }
    }
}
