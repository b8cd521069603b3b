//! The end of a connection: a goodbye, a violation, a death.

use crossrail_types::LaneId;

use super::Peer;
use crate::peer::incoming::{Ending, InKind};
use crate::peer::open::What;
use crate::peer::outgoing::{After, Kind};
use crate::{Event, Failure, Matcher, Memory, Time};

/// Lanes that may fail by violations, one after the other, with nothing in between that made sense.
const VIOLATIONS_MAX: u32 = 8;

/// Lanes that have failed by violations since the peer last made sense.
#[derive(Debug, Default)]
pub(super) struct Violations {
    count: u32,
    /// Frames of the stream and chunks consumed until the last one.
    mark: (u32, u32),
    /// Chunks consumed on lanes that are gone.
    pub(super) gone: u32,
}

impl Peer {
    /// The peer broke the protocol on `lane`, and what it sent there has changed nothing: that lane is to fail alone,
    /// unless it is the only one, or loses nothing by contract, or lanes have failed this way time after time with
    /// nothing in between that made sense.
    pub(super) fn violated(&mut self, lane: LaneId, why: &str) {
        let count = self.count_violation(0);
        let alone = self.lanes.find(lane).is_some_and(|at| !self.lanes[at].spec.reliable) && self.lanes.len() > 1;
        if !alone || count > VIOLATIONS_MAX {
            self.answers.break_off(why.to_owned(), &mut self.events);
        }
    }

    /// What a lane brought had been changed on the way, and it is about to go down: alone, unless lanes have failed this
    /// way time after time with nothing in between that made sense.
    pub fn corrupted(&mut self, why: &str) {
        self.stir();
        if self.count_violation(self.violations.gone) > VIOLATIONS_MAX {
            self.answers.break_off(why.to_owned(), &mut self.events);
        }
    }

    /// How many lanes have failed since the peer last made sense, the present one included. `before`: chunks consumed on
    /// lanes that count and are gone.
    fn count_violation(&mut self, before: u32) -> u32 {
        let gone = self.violations.gone;
        let chunks = self.lanes.consumed(before);
        let mark = (self.stream.consumed_in_all(), chunks);
        let count = if self.violations.mark == mark { self.violations.count + 1 } else { 1 };
        self.violations = Violations { count, mark, gone };
        count
    }

    /// The peer has finished and says so: what we still want of it fails.
    pub(super) fn bye(&mut self, now: Time, matcher: &mut Matcher) {
        if self.answers.hear_bye() {
            self.fail_all(now, &Failure::Closed, matcher);
            self.events.push(Event::Bye);
        }
    }

    /// Ends everything under way without another word to the peer. Only direct copies and unpacks are waited for.
    pub(super) fn fail_all(&mut self, now: Time, why: &Failure, matcher: &mut Matcher) {
        self.answers.clear();
        self.active.clear();
        self.follow = None;
        self.stream.silence();
        self.lanes.silence();
        if let Some(open) = self.stream.take_received()
            && let What::Receive { op, tag, .. } = open.what
        {
            self.events.revoke(Memory::Op(op));
            self.events.fail(op, why.clone(), 0, tag);
        }
        self.fail_incoming(why);
        self.fail_all_counted(why);
        self.delivered.clear();
        self.fail_outgoing(now, why);
        while let Some(queued) = self.queue.pop_front() {
            self.events.fail(queued.op, why.clone(), 0, 0);
        }
        self.fail_arrivals(why, matcher);
        for op in matcher.peer_dead(self.id) {
            self.events.fail(op, why.clone(), 0, 0);
        }
        self.answers.clear();
    }

    /// The engine has given up all direct copies and unpacks.
    pub(super) fn forget_jobs(&mut self) {
        self.jobs.clear();
        for (_, incoming) in &mut self.ins {
            incoming.job = None;
            incoming.landed = 0;
        }
        for (_, outgoing) in &mut self.outs {
            if outgoing.rest().job.is_some() {
                outgoing.more().job = None;
            }
        }
    }

    fn fail_incoming(&mut self, why: &Failure) {
        let all: Vec<u32> = self.ins.iter().map(|(i, _)| i as u32).collect();
        for index in all {
            let incoming = &mut self.ins[index as usize];
            if matches!(incoming.kind, InKind::Read { .. }) {
                if incoming.landed > 0 {
                    self.leave_read(index);
                } else {
                    self.ins.remove(index as usize);
                }
                continue;
            }
            incoming.helped = false;
            match incoming.ending.as_mut() {
                Some(ending) => ending.told = true,
                None => {
                    incoming.ending = Some(Ending { why: why.clone(), told: true });
                    let memory = incoming.memory();
                    self.events.revoke(memory);
                }
            }
            let incoming = &mut self.ins[index as usize];
            if let (Some(job), false) = (incoming.job, incoming.stopping) {
                incoming.stopping = true;
                self.events.stop(job);
            }
            self.step_ending(index);
        }
    }

    fn fail_outgoing(&mut self, now: Time, why: &Failure) {
        let all: Vec<u32> = self.outs.iter().map(|(i, _)| i as u32).collect();
        for index in all {
            let outgoing = &mut self.outs[index as usize];
            if outgoing.kind == Kind::Serve && outgoing.rest().job.is_none() {
                let memory = outgoing.memory();
                self.events.revoke(memory);
            }
            // The peer's word on it, if it was heard already, stands.
            let result = match &outgoing.rest().after {
                After::Finish(result) => result.clone(),
                _ => Err(why.clone()),
            };
            self.finish_out(now, index, result);
        }
    }

    fn fail_arrivals(&mut self, why: &Failure, matcher: &mut Matcher) {
        let all: Vec<u32> = self.arrivals.iter().map(|(i, _)| i as u32).collect();
        for arrival in all {
            let kept = &self.arrivals[arrival as usize];
            if kept.over || (kept.eager && kept.complete) {
                continue;
            }
            let (accepted, tag, eager) = (kept.accepted, kept.tag, kept.eager);
            matcher.forget(self.id, arrival);
            self.remove_kept(arrival);
            if eager {
                self.events.push(Event::DropArrival { arrival });
            }
            if let Some((op, _)) = accepted {
                self.events.fail(op, why.clone(), 0, tag);
            }
        }
    }
}
