//! A [`Placing`] over emulated NICs: the worked example, and rails that a seed makes reorder, delay and repeat.
//!
//! One queue pair per rail. A device moves pieces of writes in any order, and delivers the immediate of a write once its
//! last byte is in place, sometimes twice. A write that ends is acknowledged after a delay. When a rail is lost, its
//! device stops at both ends at once, and only what it had not delivered goes over another rail.
#![allow(unsafe_code)] // the devices' copies

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{
    Counter, Counters, Event, Exposed, Extent, Imm, Key, Limits, Placing, RailReport, Revoked, Seen, Toggles,
    WriteError,
};
use crate::{LaneError, Loan, Post};

/// Bytes that a device moves at a time.
const STEP: usize = 64 * 1024;
const IN_FLIGHT: usize = 256;

/// Two ends that are each other's peer. `seed`: what their rails do.
pub fn pair(rails: usize, seed: u64) -> (DryPlacing, DryPlacing, Saw) {
    let port = || Port { exposed: Exposed::default(), inbound: VecDeque::new(), acks: VecDeque::new(), alive: true };
    let rail = |at| Rail { name: format!("dry/{at}"), ops: [VecDeque::new(), VecDeque::new()], lost: false };
    let wire = Wire { ports: [port(), port()], rails: (0..rails).map(rail).collect(), dice: seed, error: [None, None] };
    let wire = Arc::new(Mutex::new(wire));
    (DryPlacing::new(0, &wire), DryPlacing::new(1, &wire), Saw(wire))
}

/// Breaks rails.
#[derive(Clone)]
pub struct Saw(Arc<Mutex<Wire>>);

impl Saw {
    /// That rail is lost.
    pub fn lose(&self, rail: usize) {
        let mut wire = lock(&self.0);
        let Some(rail) = wire.rails.get_mut(rail) else { return };
        rail.lost = true;
        let left = [std::mem::take(&mut rail.ops[0]), std::mem::take(&mut rail.ops[1])];
        // The devices have stopped: another rail begins each write anew.
        for (side, ops) in left.into_iter().enumerate() {
            for op in ops {
                wire.post(side, Op { done: 0, ..op });
            }
        }
    }
}

fn lock(wire: &Mutex<Wire>) -> MutexGuard<'_, Wire> {
    wire.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One write in flight.
struct Op {
    from: Vec<Extent>,
    key: u64,
    at: u64,
    word: u32,
    token: u64,
    len: usize,
    done: usize,
}

struct Port {
    exposed: Exposed,
    /// Immediates that the device has delivered.
    inbound: VecDeque<u32>,
    /// Ends of writes.
    acks: VecDeque<(u64, Result<(), WriteError>)>,
    alive: bool,
}

struct Rail {
    name: String,
    ops: [VecDeque<Op>; 2],
    lost: bool,
}

/// State that both ends share.
pub struct Wire {
    ports: [Port; 2],
    rails: Vec<Rail>,
    dice: u64,
    /// An error that a device found in the writes to that port.
    error: [Option<String>; 2],
}

// SAFETY: addresses are dereferenced by `Wire::run` only, under the rules of the caller that exposed or wrote them.
unsafe impl Send for Wire {}

impl Wire {
    fn roll(&mut self, sides: usize) -> usize {
        self.dice = self.dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.dice >> 33) as usize % sides.max(1)
    }

    /// Gives a write to a rail; none: it stays undone.
    fn post(&mut self, side: usize, op: Op) {
        let up: Vec<usize> = (0..self.rails.len()).filter(|at| !self.rails[*at].lost).collect();
        let at = self.roll(up.len());
        if let Some(rail) = up.get(at) {
            self.rails[*rail].ops[side].push_back(op);
        }
    }

    /// The devices run whichever end is polled. True if anything moved.
    fn run(&mut self) -> bool {
        let mut moved = false;
        for at in 0..self.rails.len() {
            for side in [0, 1] {
                // Delayed, or any of those that wait.
                let count = self.rails[at].ops[side].len();
                let which = self.roll(count);
                if count == 0 || self.roll(4) == 0 || !self.ports[1 - side].alive {
                    continue;
                }
                moved = true;
                if self.step(at, side, which) {
                    self.rails[at].ops[side].remove(which);
                }
            }
        }
        moved
    }

    /// One piece of a write. Whether that was its end.
    fn step(&mut self, at: usize, side: usize, which: usize) -> bool {
        let op = &mut self.rails[at].ops[side][which];
        let n = (op.len - op.done).min(STEP);
        let target = match self.ports[1 - side].exposed.find(op.key, op.at + op.done as u64, n as u64) {
            Ok(target) => target,
            Err(wrong) => {
                self.error[1 - side] = Some(format!("a write of {} bytes to byte {} {wrong}", op.len, op.at));
                return true;
            }
        };
        let usage = target.loan.enter();
        if target.revoked || usage.is_none() {
            let token = op.token;
            self.ports[side].acks.push_back((token, Err(WriteError::Revoked)));
            return true;
        }
        let (mut skip, mut left, mut to) = (op.done, n, target.memory.at as *mut u8);
        for extent in &op.from {
            let part = extent.part(skip, left);
            (skip, left) = (skip.saturating_sub(extent.len), left - part.len);
            // SAFETY: both are valid: the writer's until the end that follows, the target's while the loan is entered.
            unsafe {
                std::ptr::copy_nonoverlapping(part.at as *const u8, to, part.len);
                to = to.add(part.len);
            }
        }
        drop(usage);
        op.done += n;
        if op.done < op.len {
            return false;
        }
        let (word, token) = (op.word, op.token);
        // Delivered in any order among those that were not polled yet, at times twice.
        for _ in 0..1 + usize::from(self.roll(3) == 0) {
            let place = self.roll(self.ports[1 - side].inbound.len() + 1);
            self.ports[1 - side].inbound.insert(place, word);
        }
        self.ports[side].acks.push_back((token, Ok(())));
        true
    }
}

/// One end of [`pair`].
pub struct DryPlacing {
    me: usize,
    wire: Arc<Mutex<Wire>>,
    peer: String,
    limits: Limits,
    counters: Counters,
    toggles: Toggles,
    seen: Seen,
    in_flight: Vec<u64>,
    failed: Option<LaneError>,
}

impl DryPlacing {
    fn new(me: usize, wire: &Arc<Mutex<Wire>>) -> DryPlacing {
        DryPlacing {
            me,
            wire: Arc::clone(wire),
            peer: format!("dry peer {}", 1 - me),
            limits: Limits { in_flight: IN_FLIGHT, write: 64 << 20, gather: 4, gpu: false },
            counters: Counters::default(),
            toggles: Toggles::default(),
            seen: Seen::default(),
            in_flight: Vec::new(),
            failed: None,
        }
    }

    fn turn(&mut self, events: &mut dyn FnMut(Event)) -> Result<bool, LaneError> {
        let mut wire = lock(&self.wire);
        let gone = !wire.ports[1 - self.me].alive;
        let mut moved = wire.run();
        while let Some(word) = wire.ports[self.me].inbound.pop_front() {
            let (imm, mark) = Imm::of(word);
            self.counters.check(imm).map_err(|why| LaneError::Protocol(format!("{}: {why}", self.peer)))?;
            if self.seen.is_new(imm, mark) {
                moved = true;
                events(Event::Arrived(imm));
            }
        }
        if let Some(why) = wire.error[self.me].take() {
            return Err(LaneError::Protocol(format!("{}: {why}", self.peer)));
        }
        // Late, and some of them only.
        for _ in 0..wire.roll(8) {
            let Some((token, result)) = wire.ports[self.me].acks.pop_front() else { break };
            self.in_flight.retain(|known| *known != token);
            moved = true;
            events(Event::Ended { token, result });
        }
        if gone {
            return Err(LaneError::Closed(format!("{}: it was dropped", self.peer)));
        }
        if wire.rails.iter().all(|rail| rail.lost) {
            let names: Vec<&str> = wire.rails.iter().map(|rail| rail.name.as_str()).collect();
            return Err(LaneError::Down(format!("{}: all rails are lost: {}", self.peer, names.join(", "))));
        }
        Ok(moved)
    }
}

impl Placing for DryPlacing {
    fn peer(&self) -> &str {
        &self.peer
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    unsafe fn expose(&mut self, memory: &Extent, loan: &Arc<Loan>) -> Result<Key, String> {
        lock(&self.wire).ports[self.me].exposed.add(*memory, Arc::clone(loan))
    }

    fn revoke(&mut self, key: &Key) -> Revoked {
        lock(&self.wire).ports[self.me].exposed.revoke(key.id());
        Revoked::Now
    }

    fn count(&mut self, pieces: u16) -> Option<Counter> {
        self.counters.open(pieces)
    }

    unsafe fn write(&mut self, from: &[Extent], to: &Key, at: u64, imm: Imm, token: u64) -> Result<Post, LaneError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let len = self.limits.check(from, to, at, imm)?;
        if self.in_flight.len() >= IN_FLIGHT {
            return Ok(Post::Full);
        }
        self.in_flight.push(token);
        let word = imm.word(self.toggles.next(imm));
        let op = Op { from: from.to_vec(), key: to.id(), at, word, token, len, done: 0 };
        lock(&self.wire).post(self.me, op);
        Ok(Post::Held)
    }

    fn poll(&mut self, events: &mut dyn FnMut(Event)) -> Result<bool, LaneError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.turn(events).map_err(|error| {
            self.close();
            for token in self.in_flight.drain(..) {
                events(Event::Ended { token, result: Err(WriteError::Lost) });
            }
            self.failed.insert(error).clone()
        })
    }

    fn rails(&self) -> Vec<RailReport> {
        let report = |rail: &Rail| RailReport {
            name: rail.name.clone(),
            lost: rail.lost.then(|| "lost".to_owned()),
            tx_bytes: 0,
            rx_bytes: 0,
            tx_pieces: 0,
            reposted: 0,
        };
        lock(&self.wire).rails.iter().map(report).collect()
    }
}

impl DryPlacing {
    /// Ends the queue pairs: the devices touch none of this end's memory from then on.
    fn close(&mut self) {
        let mut wire = lock(&self.wire);
        wire.ports[self.me].alive = false;
        wire.ports[self.me].exposed = Exposed::default();
        for rail in &mut wire.rails {
            rail.ops[self.me].clear();
        }
    }
}

impl Drop for DryPlacing {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use super::super::conformance::{self, Pair};
    use super::*;

    #[test]
    fn lost_rails_lose_and_repeat_nothing() {
        conformance::run_losses("dry", 0..20, &mut || {
            let (a, b, saw) = pair(4, 9);
            Pair { a: Box::new(a), b: Box::new(b), rails: 4, lose: Box::new(move |rail| saw.lose(rail)) }
        });
    }

    #[test]
    fn conforms() {
        for (rails, seed) in [(1, 3), (2, 4), (4, 5), (4, 6)] {
            conformance::run(&format!("dry, {rails} rails, seed {seed}"), &mut || {
                let (a, b, saw) = pair(rails, seed);
                Pair { a: Box::new(a), b: Box::new(b), rails, lose: Box::new(move |rail| saw.lose(rail)) }
            });
        }
    }
}
