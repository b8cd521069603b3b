//! How an operation runs: it waits for messages of other ranks, does what each makes possible, and loses ranks that
//! died or do not come.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_control::RankState;
use crossrail_ep::{Bytes, Fault};
use crossrail_types::{Error, ErrorKind, Result};
use parking_lot::MutexGuard;

use crate::buffer::{Inner, State};
use crate::peer::Message;
use crate::wait;

/// Where an operation's time went, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timing {
    /// Turning bf16 into fp8.
    pub cast_us: f64,
    /// Copying rows.
    pub copy_us: f64,
    /// Summing rows.
    pub sum_us: f64,
    /// Waiting for other ranks.
    pub wait_us: f64,
    /// All of it, from the call to the end.
    pub total_us: f64,
}

/// A message that is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wait {
    pub(crate) rank: usize,
    pub(crate) message: Message,
    pub(crate) parity: usize,
    pub(crate) number: u64,
}

/// What all operations have.
pub(crate) struct Common {
    pub(crate) name: &'static str,
    pub(crate) number: u64,
    pub(crate) parity: usize,
    pub(crate) began: Instant,
    /// How long another rank may take.
    limit: Duration,
    pub(crate) deadline: Instant,
    pub(crate) waits: Vec<Wait>,
    pub(crate) timing: Timing,
    pub(crate) bytes: Bytes,
    /// The first thing that went wrong; the operation is brought to its end all the same, so that nobody waits for
    /// it.
    pub(crate) failure: Option<Error>,
}

impl Common {
    pub(crate) fn new(name: &'static str, number: u64, parity: usize, limit: Duration) -> Common {
        let began = Instant::now();
        Common {
            name,
            number,
            parity,
            began,
            limit,
            deadline: began + limit,
            waits: Vec::new(),
            timing: Timing::default(),
            bytes: Bytes::default(),
            failure: None,
        }
    }

    pub(crate) fn expect(&mut self, rank: usize, message: Message) {
        self.waits.push(Wait { rank, message, parity: self.parity, number: self.number });
    }

    pub(crate) fn expect_number(&mut self, rank: usize, message: Message, number: u64) {
        self.waits.push(Wait { rank, message, parity: self.parity, number });
    }

    pub(crate) fn fail(&mut self, error: Error) {
        self.failure.get_or_insert(error);
    }
}

/// One kind of operation.
pub(crate) trait Machine: Send {
    type Output;

    fn common(&mut self) -> &mut Common;

    /// A message has come.
    fn arrived(&mut self, inner: &Inner, state: &mut State, wait: Wait);

    /// It will not come.
    fn lost(&mut self, inner: &Inner, state: &mut State, wait: Wait);

    /// Everything that could be seen now has been seen.
    fn settle(&mut self, inner: &Inner, state: &mut State);

    /// Nothing is waited for any more.
    fn finish(&mut self, inner: &Inner, state: &mut State) -> Self::Output;
}

/// An operation that was begun: [`finish`](Pending::finish) it, in the order of beginning. Dropping it finishes it
/// and forgets the result.
pub struct Pending<T> {
    machine: Option<Box<dyn Machine<Output = T>>>,
    inner: Arc<Inner>,
}

impl<T> Pending<T> {
    pub(crate) fn new(machine: Box<dyn Machine<Output = T>>, inner: Arc<Inner>) -> Pending<T> {
        Pending { machine: Some(machine), inner }
    }

    /// Waits until it is finished.
    ///
    /// # Errors
    /// `Usage` or another kind with the reason where this rank's or another rank's call was wrong (then named);
    /// `Closed` when the buffer was destroyed. Ranks that are lost are no error: they are masked, see
    /// [`ExpertBuffer::faults`](crate::ExpertBuffer::faults).
    pub fn finish(mut self) -> Result<T> {
        loop {
            if let Some(output) = self.finish_within(Duration::from_secs(3600))? {
                return Ok(output);
            }
        }
    }

    /// As [`Pending::finish`], but only for so long; `None`: it isn't finished yet.
    ///
    /// # Errors
    /// As for [`Pending::finish`], and `Usage` when it has been finished already.
    pub fn finish_within(&mut self, limit: Duration) -> Result<Option<T>> {
        let machine = self.machine.as_mut();
        let machine =
            machine.ok_or_else(|| Error::new(ErrorKind::Usage, "finish", "the operation was finished already"))?;
        let until = Instant::now() + limit;
        let outcome = self.inner.drive(machine.as_mut(), until);
        if !matches!(outcome, Ok(None)) {
            self.machine = None;
        }
        outcome
    }
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        if let Some(mut machine) = self.machine.take() {
            let until = machine.common().deadline + Duration::from_secs(1);
            // The others wait for its part; the result is not wanted.
            let _ = self.inner.drive(machine.as_mut(), until);
        }
    }
}

/// Between looks at whether the ranks that are waited for still live.
const LOOK_AROUND: Duration = Duration::from_millis(2);
/// The longest sleep.
const NAP: Duration = Duration::from_millis(20);
/// The longest sleep for the network while messages may come over shared memory too.
const SHORT_NAP: Duration = Duration::from_micros(300);

impl Inner {
    /// Runs `machine` until it is finished, or `until`.
    pub(crate) fn drive<T>(&self, machine: &mut dyn Machine<Output = T>, until: Instant) -> Result<Option<T>> {
        let mut state = self.state.lock();
        let mut idle: Option<Instant> = None;
        let mut looked = Instant::now();
        loop {
            if state.closed || self.meeting.is_ending() {
                return Err(Error::new(ErrorKind::Closed, machine.common().name, "the buffer was destroyed"));
            }
            let moved = self.look(machine, &mut state);
            if machine.common().waits.is_empty() {
                let output = machine.finish(self, &mut state);
                let common = machine.common();
                return match common.failure.take() {
                    Some(error) => Err(error),
                    None => Ok(Some(output)),
                };
            }
            if moved {
                idle = None;
                continue;
            }
            let now = Instant::now();
            let since = *idle.get_or_insert(now);
            if now.duration_since(looked) >= LOOK_AROUND {
                looked = now;
                if self.look_around(machine, &mut state, now) {
                    continue;
                }
            }
            if now >= until {
                return Ok(None);
            }
            self.pause(machine.common(), &mut state, now.duration_since(since), until - now);
            machine.common().timing.wait_us += now.elapsed().as_secs_f64() * 1e6;
        }
    }

    /// Takes every message that is there; whether there was one.
    pub(crate) fn look<T>(&self, machine: &mut dyn Machine<Output = T>, state: &mut State) -> bool {
        let mut moved = false;
        let mut at = 0;
        while let Some(wait) = machine.common().waits.get(at).copied() {
            let here = match &mut state.peers[wait.rank] {
                Some(peer) if !peer.masked => peer.has_told(&self.here, wait.parity, wait.message, wait.number),
                _ => {
                    machine.common().waits.remove(at);
                    machine.lost(self, state, wait);
                    moved = true;
                    continue;
                }
            };
            if here {
                machine.common().waits.remove(at);
                machine.arrived(self, state, wait);
                moved = true;
            } else {
                at += 1;
            }
        }
        machine.settle(self, state);
        moved
    }

    /// Masks ranks that died, are at another operation, or are overdue; whether there was one.
    fn look_around<T>(&self, machine: &mut dyn Machine<Output = T>, state: &mut State, now: Instant) -> bool {
        let common = machine.common();
        let (name, number, late) = (common.name, common.number, now >= common.deadline);
        let limit = common.limit;
        let waits = common.waits.clone();
        let mut lost = false;
        for wait in waits {
            let Some(peer) = state.peers[wait.rank].as_ref().filter(|peer| !peer.masked) else { continue };
            if let Some(other) = peer.is_elsewhere(&self.here, wait.message, wait.number) {
                let text =
                    format!("rank {} called {other} where this rank called {name} (operation {number})", wait.rank);
                let error = Error::new(ErrorKind::Mismatch, name, text)
                    .with_hint("all ranks call the same operations in the same order");
                machine.common().fail(error);
                self.mask_lost(state, wait, name, number, format!("it called {other}"));
                lost = true;
                continue;
            }
            let why = match self.group.state(wait.rank as u32) {
                RankState::Dead(why) => why,
                RankState::Left => "it has left the group".to_owned(),
                _ if !peer.is_alive() => peer.end(),
                _ if late => format!("nothing came for {:.3} s", limit.as_secs_f64()),
                _ => continue,
            };
            // What it said before it went counts: it may have finished and gone after the last look.
            let told = state.peers[wait.rank].as_mut();
            if told.is_some_and(|peer| peer.has_told(&self.here, wait.parity, wait.message, wait.number)) {
                lost = true;
                continue;
            }
            self.mask_lost(state, wait, name, number, why);
            lost = true;
        }
        if lost {
            // The others may have waited for it as long as we, and longer if they began later.
            machine.common().deadline = now + limit;
        }
        lost
    }

    fn mask_lost(&self, state: &mut State, wait: Wait, operation: &'static str, number: u64, why: String) {
        if let Some(peer) = &mut state.peers[wait.rank] {
            peer.masked = true;
        }
        let left = state.peers.iter().flatten().filter(|peer| !peer.masked).count() as u32;
        let fault = Fault { rank: wait.rank as u32, operation, number, stage: wait.message.what(), why, left };
        self.warn(&fault);
        state.faults.push(fault);
    }

    /// Waits a little: spins first, then sleeps until something was written.
    fn pause(&self, common: &Common, state: &mut MutexGuard<'_, State>, idle: Duration, left: Duration) {
        let network =
            common.waits.iter().any(|wait| state.peers[wait.rank].as_ref().is_some_and(|peer| peer.is_network()));
        if idle < state.spin {
            if network {
                self.worker.progress();
            } else {
                std::hint::spin_loop();
            }
            return;
        }
        let state: &mut State = state;
        if !network {
            let waits = &common.waits;
            let peers = std::cell::RefCell::new(&mut state.peers);
            wait::sleep(self.here.heap.bell(), NAP.min(left), || {
                let mut peers = peers.borrow_mut();
                waits.iter().any(|wait| {
                    peers[wait.rank]
                        .as_mut()
                        .is_none_or(|peer| peer.has_told(&self.here, wait.parity, wait.message, wait.number))
                })
            });
            return;
        }
        let mixed =
            common.waits.iter().any(|wait| state.peers[wait.rank].as_ref().is_some_and(|peer| !peer.is_network()));
        let limit = if mixed { SHORT_NAP } else { NAP };
        let seen = state.arrivals;
        // Nothing in time is no error: the caller looks again either way.
        state.arrivals = self.region.wait_arrival(seen, limit.min(left)).unwrap_or(seen);
    }
}
