//! One-sided writes to oneself: a rank is a peer of its own, and NCCL's barriers signal it.
#![allow(unsafe_code)] // the copies

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossrail::placing::{
    Counter, Counters, Event, Exposed, Extent, Imm, Key, LaneError, Limits, Loan, Placing, Post, RailReport, Revoked,
    WriteError,
};
use crossrail_locks::Mutex;
use crossrail_types::{Error, Result};
use nix::sys::eventfd::{EfdFlags, EventFd};

const IN_FLIGHT: usize = 256;

/// Two ends that are each other's peer: a write is in place when it is posted.
pub(crate) fn pair() -> Result<(Mirror, Mirror)> {
    let side = || -> Result<Side> {
        let event = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|error| Error::io("connect", "eventfd", &error.into()))?;
        Ok(Side { state: Mutex::default(), sleeps: AtomicBool::new(false), event })
    };
    let sides = Arc::new([side()?, side()?]);
    Ok((Mirror::new(0, &sides), Mirror::new(1, &sides)))
}

/// One end's half of the state.
struct Side {
    state: Mutex<State>,
    /// The driver is about to sleep.
    sleeps: AtomicBool,
    event: EventFd,
}

#[derive(Default)]
struct State {
    exposed: Exposed,
    counters: Counters,
    events: VecDeque<Event>,
}

/// See [`pair`].
pub(crate) struct Mirror {
    side: usize,
    sides: Arc<[Side; 2]>,
    limits: Limits,
}

impl Mirror {
    fn new(side: usize, sides: &Arc<[Side; 2]>) -> Mirror {
        let limits = Limits { in_flight: IN_FLIGHT, write: 1 << 30, gather: 4, gpu: false };
        Mirror { side, sides: Arc::clone(sides), limits }
    }

    fn mine(&self) -> &Side {
        &self.sides[self.side]
    }

    fn theirs(&self) -> &Side {
        &self.sides[1 - self.side]
    }
}

impl Side {
    fn ring(&self) {
        if self.sleeps.swap(false, Ordering::SeqCst) {
            // A full counter is readable, too.
            let _ = self.event.write(1);
        }
    }
}

impl Placing for Mirror {
    fn peer(&self) -> &str {
        "this rank"
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    unsafe fn expose(&mut self, memory: &Extent, loan: &Arc<Loan>) -> std::result::Result<Key, String> {
        self.mine().state.lock().exposed.add(*memory, Arc::clone(loan))
    }

    fn revoke(&mut self, key: &Key) -> Revoked {
        self.mine().state.lock().exposed.revoke(key.id());
        Revoked::Now
    }

    fn count(&mut self, pieces: u16) -> Option<Counter> {
        self.mine().state.lock().counters.open(pieces)
    }

    unsafe fn write(
        &mut self,
        from: &[Extent],
        to: &Key,
        at: u64,
        imm: Imm,
        token: u64,
    ) -> std::result::Result<Post, LaneError> {
        let len = self.limits.check(from, to, at, imm)?;
        let result = {
            let mut theirs = self.theirs().state.lock();
            if theirs.events.len() >= IN_FLIGHT {
                return Ok(Post::Full);
            }
            theirs.counters.check(imm).map_err(LaneError::Protocol)?;
            let target = theirs.exposed.find(to.id(), at, len as u64);
            let target = target.map_err(|wrong| LaneError::Protocol(wrong.to_string()))?;
            let entered = target.loan.enter().filter(|_| !target.revoked);
            if entered.is_some() {
                let mut to = target.memory.at;
                for extent in from {
                    // SAFETY: promised by the callers of `expose` and `write`; the target was checked.
                    unsafe {
                        std::ptr::copy_nonoverlapping(extent.at as *const u8, to as *mut u8, extent.len);
                    }
                    to += extent.len as u64;
                }
            }
            let is_in_place = entered.is_some();
            drop(entered);
            if is_in_place {
                theirs.events.push_back(Event::Arrived(imm));
            }
            if is_in_place { Ok(()) } else { Err(WriteError::Revoked) }
        };
        self.theirs().ring();
        self.mine().state.lock().events.push_back(Event::Ended { token, result });
        Ok(Post::Held)
    }

    fn poll(&mut self, events: &mut dyn FnMut(Event)) -> std::result::Result<bool, LaneError> {
        let taken = std::mem::take(&mut self.mine().state.lock().events);
        let moved = !taken.is_empty();
        taken.into_iter().for_each(events);
        Ok(moved)
    }

    fn fd(&self) -> Option<RawFd> {
        Some(self.mine().event.as_fd().as_raw_fd())
    }

    fn arm(&mut self) -> bool {
        let mine = self.mine();
        // What was rung for is seen below.
        let _ = mine.event.read();
        mine.sleeps.store(true, Ordering::SeqCst);
        mine.state.lock().events.is_empty()
    }

    fn rails(&self) -> Vec<RailReport> {
        Vec::new()
    }
}
