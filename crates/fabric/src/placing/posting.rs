//! Posting: frames, credits and parts of writes, in this order.
#![allow(unsafe_code)]

use std::time::Instant;

use crossrail_transport::placing::{Extent, Imm};

use super::{BUDGET, COPIED, FabricPlacing, Held, Op, Outcome};
use crate::outgoing::Part;
use crate::port::{GATHER, Registered, Write};
use crate::wire::{Remote, SLOT, SLOTS, Word};

impl FabricPlacing {
    /// Posts what the provider takes. Whether it took anything.
    pub(crate) fn post(&mut self) -> Outcome<bool> {
        if self.broken.is_some() {
            return Ok(false);
        }
        let mut moved = false;
        self.full = false;
        if let Some(taken) = self.inbox.due()
            && self.post_bare(taken)?
        {
            self.inbox.told(taken);
            moved = true;
        }
        while self.outbox.is_ready() && self.post_frame()? {
            moved = true;
        }
        let mut budget = BUDGET;
        while budget > 0
            && !self.full
            && let Some(part) = self.out.next(self.cut)
        {
            if !self.post_part(&part)? {
                break;
            }
            budget = budget.saturating_sub(part.len.max(64));
            moved = true;
        }
        // Announcements of writes whose last part was posted just now.
        self.enqueue();
        while self.outbox.is_ready() && !self.full && self.post_frame()? {
            moved = true;
        }
        Ok(moved)
    }

    /// Posts a write without bytes that returns credit, or is the hello.
    pub(crate) fn post_bare(&mut self, taken: u32) -> Outcome<bool> {
        let nothing = Extent { at: self.staging.address(), len: 0, gpu: None };
        // SAFETY: no bytes.
        unsafe { self.put(&[(nothing, self.staged)], self.theirs, 0, Word::Credit(taken).encode(), Op::Bare) }
    }

    fn post_frame(&mut self) -> Outcome<bool> {
        let Some((frame, number)) = self.outbox.front() else { return Ok(false) };
        frame.encode(&mut self.bytes);
        let at = number as usize % SLOTS * SLOT;
        self.staging.write(at, &self.bytes);
        let from = Extent { at: self.staging.address() + at as u64, len: self.bytes.len(), gpu: None };
        let op = Op::Frame { slot: number as usize % SLOTS };
        // SAFETY: the slot is not written again before its completion.
        let posted =
            unsafe { self.put(&[(from, self.staged)], self.theirs, at as u64, Word::Frame(number).encode(), op) }?;
        if posted {
            self.outbox.posted();
        }
        Ok(posted)
    }

    fn post_part(&mut self, part: &Part) -> Outcome<bool> {
        let Some(op) = self.free.last().copied() else {
            self.full = true;
            return Ok(false);
        };
        let nothing = Extent { at: self.staging.address(), len: 0, gpu: None };
        let mut from = [(nothing, self.staged); GATHER];
        let mut registered = [None; GATHER];
        let mut count = part.count;
        let extents = &part.extents[..part.count];
        let in_host = extents.iter().all(|extent| extent.gpu.is_none());
        if self.local && in_host && part.len <= COPIED {
            let start = SLOTS * SLOT + op * COPIED;
            let mut at = start;
            for extent in extents {
                // SAFETY: readable until the write ends, as the caller of `write` guarantees.
                unsafe { self.staging.fill(at, extent.at as *const u8, extent.len) };
                at += extent.len;
            }
            from[0].0 = Extent { at: self.staging.address() + start as u64, len: part.len, gpu: None };
            count = 1;
        } else {
            registered = self.registered(part)?;
            for (at, extent) in extents.iter().enumerate() {
                let needs = self.local || extent.gpu.is_some();
                from[at] = (*extent, registered[at].or_else(|| self.containing(extent).filter(|_| needs)));
            }
        }
        let word = self.out.word(part);
        let op = Op::Write { write: part.write, registered };
        // SAFETY: as above.
        let posted = unsafe { self.put(&from[..count.max(1)], part.to, part.at, word, op) };
        if posted == Ok(true) {
            self.held = None;
            self.out.posted(part, word, &mut self.frames);
            self.stats[2] += 1;
            self.owed.answered();
        } else {
            self.out.unpost(part);
        }
        posted
    }

    /// Registrations of those extents of a part that need one of their own. They are held until the part was posted, or
    /// its write has ended.
    fn registered(&mut self, part: &Part) -> Outcome<[Option<Registered>; GATHER]> {
        let mut registered = [None; GATHER];
        match self.held.take() {
            Some(held) if held.part == *part => registered = held.registered,
            Some(held) => self.forget(held.registered),
            None => {}
        }
        for (at, extent) in part.extents[..part.count].iter().enumerate() {
            if (self.local || extent.gpu.is_some())
                && registered[at].is_none()
                && self.containing(extent).is_none()
                && let Some(port) = self.port.as_mut()
            {
                // SAFETY: valid until the write ends, as the caller of `write` guarantees; closed before that.
                match unsafe { port.register(extent, false) } {
                    Ok((number, _)) => registered[at] = Some(number),
                    Err(error) => {
                        self.forget(registered);
                        return Err(self.down(&format!("{}: {}", error.operation, error.detail)));
                    }
                }
            }
        }
        if registered.iter().any(Option::is_some) {
            self.held = Some(Held { part: *part, registered });
        }
        Ok(registered)
    }

    /// Closes the registrations that are held.
    pub(super) fn let_go(&mut self) {
        if let Some(held) = self.held.take() {
            self.forget(held.registered);
        }
    }

    /// A registration for reading that memory.
    fn containing(&self, from: &Extent) -> Option<Registered> {
        let holds = |(memory, _): &&(Extent, Registered)| {
            memory.gpu == from.gpu && memory.at <= from.at && from.at + from.len as u64 <= memory.at + memory.len as u64
        };
        let own = self.adopted.iter().find(holds).map(|(_, registered)| *registered);
        own.or_else(|| self.exposures.containing(from))
    }

    fn forget(&mut self, registered: [Option<Registered>; GATHER]) {
        if let Some(port) = self.port.as_mut() {
            for registered in registered.into_iter().flatten() {
                let _ = port.unregister(registered);
            }
        }
    }

    /// Posts one operation; false: there is no room.
    ///
    /// # Safety
    /// As [`Port::write`].
    unsafe fn put(
        &mut self,
        from: &[(Extent, Option<Registered>)],
        to: Remote,
        at: u64,
        data: u32,
        op: Op,
    ) -> Outcome<bool> {
        let (Some(context), Some(port)) = (self.free.last().copied(), self.port.as_mut()) else {
            self.full = true;
            return Ok(false);
        };
        // SAFETY: as the caller guarantees; the context is free.
        match unsafe { port.write(&Write { from, to, at, data, context }) } {
            Ok(true) => {
                self.free.pop();
                self.ops[context] = op;
                self.stats[0] += from.iter().map(|(extent, _)| extent.len as u64).sum::<u64>();
                Ok(true)
            }
            Ok(false) => {
                self.full = true;
                Ok(false)
            }
            Err(why) => {
                self.broken.get_or_insert_with(|| (Instant::now(), why));
                self.look = true;
                Ok(false)
            }
        }
    }

    /// Acknowledges what has arrived.
    pub(super) fn acknowledge(&mut self) -> Outcome<()> {
        self.owed.acknowledge(&mut self.outbox).map_err(|why| self.blame(&why))
    }

    // ---- for lanes

    /// Registers memory for own writes from it until the port is closed.
    ///
    /// # Safety
    /// The memory must be valid until then.
    pub(crate) unsafe fn adopt(&mut self, memory: &Extent) -> crossrail_types::Result<()> {
        if self.local
            && let Some(port) = self.port.as_mut()
        {
            // SAFETY: as the caller guarantees.
            let (registered, _) = unsafe { port.register(memory, false) }?;
            self.adopted.push((*memory, registered));
        }
        Ok(())
    }

    /// Registers memory for one write by the peer.
    ///
    /// # Safety
    /// The memory must be valid until the registration is closed by [`FabricPlacing::take_back`] or with the port.
    pub(crate) unsafe fn lend(&mut self, memory: &Extent) -> crossrail_types::Result<(Registered, Remote)> {
        let gone = || crossrail_types::Error::new(crossrail_types::ErrorKind::Closed, "fabric", "the peer is lost");
        // SAFETY: as the caller guarantees.
        unsafe { self.port.as_mut().ok_or_else(gone)?.register(memory, true) }
    }

    /// Closes a registration whose write has arrived.
    pub(crate) fn take_back(&mut self, registered: Registered) {
        if let Some(port) = self.port.as_mut() {
            // Nothing is written by it any more, closed or not.
            let _ = port.unregister(registered);
        }
    }

    /// Queues a write to memory that the peer has named itself; false: there are too many.
    ///
    /// # Safety
    /// As [`Placing::write`].
    pub(crate) unsafe fn write_to(&mut self, from: &Extent, to: (Remote, u64), imm: Imm, token: u64) -> bool {
        self.failed.is_none() && self.out.queue_to(from, to, imm, token, self.cut)
    }

    /// True once it has failed, or is about to.
    pub(crate) fn has_failed(&self) -> bool {
        self.failed.is_some() || self.ending.is_some()
    }

    /// Nothing is queued, and the provider is done with everything posted.
    pub(crate) fn has_handed_over(&self) -> bool {
        self.is_quiet() && self.out.is_empty() && !self.outbox.is_waiting()
    }
}
