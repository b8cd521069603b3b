//! What the peer asks for: long messages, writes, reads.

use crossrail_types::LaneId;

use super::Peer;
use super::theirs::Their;
use crate::frame::{self, Frame};
use crate::peer::incoming::{InKind, InStage};
use crate::peer::kept::Kept;
use crate::peer::outgoing::ServeOf;
use crate::{Access, Body, Failure, Host, Matcher, Time};

impl Peer {
    pub(super) fn announced(
        &mut self,
        now: Time,
        their: u32,
        tag: u64,
        announce: frame::Announce,
        matcher: &mut Matcher,
    ) -> Result<(), String> {
        let frame::Announce { len, offer } = announce;
        if len == 0 {
            return Err("announcement of an empty message".to_owned());
        }
        if self.answers.closing() {
            self.answers.tell_failed(their, &Failure::Closed, &mut self.events);
            return Ok(());
        }
        if self.theirs.at(their) != Their::Free {
            return Err(format!("operation {their} begun twice"));
        }
        let Some((op, capacity)) = matcher.arrive(self.id, tag) else {
            return self.keep(their, Kept::new(their, tag, len, false, offer), matcher).map(drop);
        };
        if len > capacity {
            self.truncated(op, tag, their, len, capacity);
            return Ok(());
        }
        if let Err(why) = self.theirs.claim(their, Their::Open) {
            self.events.fail(op, Failure::PeerDead(why.clone()), 0, tag);
            return Err(why);
        }
        self.begin_transfer(now, their, InKind::Receive { op, tag }, len, offer);
        Ok(())
    }

    pub(super) fn written(&mut self, now: Time, of: WriteOf, host: &mut Host<'_>) -> Result<(), String> {
        let WriteOf { op, len, imm, data, write } = of;
        if len == 0 && !data {
            return Err("write of nothing without data".to_owned());
        }
        if self.answers.closing() {
            self.answers.tell_failed(op, &Failure::Closed, &mut self.events);
            return Ok(());
        }
        let region = match host.regions.resolve(&write.key, write.offset, len, Access::Write) {
            Ok(region) => region,
            Err(fault) => {
                self.answers.tell_failed(op, &Failure::Region(fault), &mut self.events);
                return Ok(());
            }
        };
        self.theirs.claim(op, Their::Open)?;
        let kind = InKind::Write { region, base: write.offset, imm: imm.then_some(write.imm) };
        if data {
            let index = self.begin_in(now, op, kind, len);
            self.ins[index as usize].stage = InStage::Data;
            self.theirs.set(op, Their::In(index));
        } else {
            self.begin_transfer(now, op, kind, len, write.offer);
        }
        Ok(())
    }

    pub(super) fn read(&mut self, now: Time, of: ServeRequest, host: &mut Host<'_>) -> Result<(), String> {
        let ServeRequest { op, target, read, chunks, lane } = of;
        let resolved = if self.answers.closing() {
            Err(Failure::Closed)
        } else {
            let found = host.regions.resolve(&read.key, read.offset, read.len, Access::Read);
            found.map_err(Failure::Region)
        };
        let region = match resolved {
            Ok(region) => region,
            Err(why) => {
                let (code, _) = frame::encode_failure(&why);
                self.answers.tell(Frame::ReadFailed { serve: 0, target, code }, Body::None, &mut self.events);
                return Ok(());
            }
        };
        self.theirs.claim(op, Their::Open)?;
        let of_lane = self.stream.lane().and_then(|l| self.lanes.find(l)).map(|at| &self.lanes[at].spec);
        let eager = !chunks && host.regions.eager(region);
        let eager_max = of_lane.filter(|_| eager).map_or(0, |s| u64::from(s.eager_max.min(s.max_payload)));
        let descriptor = read.descriptor.filter(|_| read.len > 0);
        let serve = ServeOf { their: op, target, region, base: read.offset, len: read.len, descriptor, lane };
        let index = self.begin_serve(now, serve, eager_max);
        self.theirs.set(op, Their::Serve(index));
        Ok(())
    }
}

pub(super) struct WriteOf {
    pub(super) op: u32,
    pub(super) len: u64,
    pub(super) imm: bool,
    pub(super) data: bool,
    pub(super) write: frame::Write,
}

pub(super) struct ServeRequest {
    pub(super) op: u32,
    pub(super) target: frame::Target,
    pub(super) read: frame::Read,
    /// Never in one frame.
    pub(super) chunks: bool,
    pub(super) lane: LaneId,
}
