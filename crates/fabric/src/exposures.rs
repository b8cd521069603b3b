//! The memory that this end has exposed, and how the peer's access to it ends.
//!
//! Closing a registration does not stop a write that is arriving, with every provider. So a peer that has used a key is
//! asked to stop, and confirms once all that it wrote was counted here; only then is the memory returned.
#![allow(unsafe_code)]

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_transport::placing::{Extent, Key, Revoked};
use crossrail_transport::{Kept, Loan};
use crossrail_types::LaneId;

use crate::port::{Port, Registered};
use crate::wire::{Frame, Remote};

/// Time after which a peer that does not confirm is lost, and its access with it.
const CONFIRMED_WITHIN: Duration = Duration::from_secs(3);

enum State {
    /// `true`: the peer has asked about the key, so it may be writing.
    Open(bool),
    /// The peer was asked to stop.
    Stopping(Instant),
    Ended,
}

struct Exposure {
    key: Key,
    memory: Extent,
    loan: Arc<Loan>,
    kept: Option<Kept>,
    registered: Registered,
    remote: Remote,
    state: State,
}

/// Keys of one object's exposures. They are drawn at random and contain no registrations, which each rail has for itself.
#[derive(Debug, Default)]
pub(crate) struct Keys {
    made: usize,
    random: RandomState,
}

impl Keys {
    /// A new key, for so much memory. Its id has the index of the exposure in its lowest bits.
    ///
    /// # Errors
    /// None is left.
    pub(crate) fn draw(&mut self, len: usize) -> Result<Key, String> {
        let index = self.made;
        if index >= INDEX {
            return Err(format!("memory was exposed {INDEX} times already; connect anew"));
        }
        self.made += 1;
        let word = |at: usize| {
            let mut hasher = self.random.build_hasher();
            hasher.write_usize(index * 4 + at);
            hasher.finish()
        };
        let mut key = Key::new(word(0) << 16 | index as u64, len as u64);
        key.0[16..24].copy_from_slice(&word(1).to_le_bytes());
        key.0[24..].copy_from_slice(&word(2).to_le_bytes());
        Ok(key)
    }
}

/// See the module.
#[derive(Default)]
pub(crate) struct Exposures {
    /// By the index in a key's id; `None`: exposed before this rail was there.
    all: Vec<Option<Exposure>>,
    /// Those that are not ended.
    live: Vec<usize>,
    lane: Option<LaneId>,
}

/// Bits of a key's id that are its index.
const INDEX: usize = 1 << 16;

impl Exposures {
    /// Registers memory for the peer's writes by that key.
    ///
    /// # Safety
    /// The memory must be valid until its loan is returned or the port is dropped.
    pub(crate) unsafe fn expose(
        &mut self,
        port: &mut Port,
        key: Key,
        (memory, loan): (&Extent, &Arc<Loan>),
    ) -> Result<(), String> {
        let lane = self.lane.unwrap_or(LaneId(u32::MAX));
        let kept = loan.keep(lane).ok_or("its owner has recalled it")?;
        // SAFETY: as the caller guarantees; the loan is kept until the registration is closed.
        let (registered, remote) =
            unsafe { port.register(memory, true) }.map_err(|error| format!("{}: {}", error.operation, error.detail))?;
        let at = key.id() as usize % INDEX;
        self.all.resize_with(self.all.len().max(at + 1), || None);
        self.live.push(at);
        let loan = Arc::clone(loan);
        let state = State::Open(false);
        self.all[at] = Some(Exposure { key, memory: *memory, loan, kept: Some(kept), registered, remote, state });
        Ok(())
    }

    /// The exposure of that id.
    fn of(&mut self, id: u64) -> Option<(usize, &mut Exposure)> {
        let at = id as usize % INDEX;
        let exposure = self.all.get_mut(at)?.as_mut().filter(|exposure| exposure.key.id() == id)?;
        Some((at, exposure))
    }

    /// Ends the access by that key.
    pub(crate) fn revoke(&mut self, port: &mut Port, key: &Key, frames: &mut Vec<Frame>) -> Result<Revoked, String> {
        match self.of(key.id()).map(|(at, _)| at) {
            Some(at) => self.end(at, port, frames),
            None => Ok(Revoked::Now),
        }
    }

    fn end(&mut self, at: usize, port: &mut Port, frames: &mut Vec<Frame>) -> Result<Revoked, String> {
        let Some(exposure) = self.all[at].as_mut() else { return Ok(Revoked::Now) };
        match exposure.state {
            State::Open(true) => {
                exposure.state = State::Stopping(Instant::now());
                frames.push(Frame::Stop(exposure.key.id()));
                Ok(Revoked::OnceReturned)
            }
            State::Open(false) => self.close(at, port).map(|()| Revoked::Now),
            State::Stopping(_) => Ok(Revoked::OnceReturned),
            State::Ended => Ok(Revoked::Now),
        }
    }

    fn close(&mut self, at: usize, port: &mut Port) -> Result<(), String> {
        let Some(exposure) = self.all[at].as_mut() else { return Ok(()) };
        port.unregister(exposure.registered).map_err(|error| error.detail)?;
        exposure.state = State::Ended;
        exposure.kept = None;
        self.live.retain(|live| *live != at);
        Ok(())
    }

    /// Ends the access to memory whose loan was recalled. Whether there was any.
    ///
    /// # Errors
    /// The peer did not confirm in time, or a registration cannot be closed.
    pub(crate) fn look(&mut self, port: &mut Port, frames: &mut Vec<Frame>) -> Result<bool, String> {
        let mut moved = false;
        for turn in (0..self.live.len()).rev() {
            let at = self.live[turn];
            let Some(exposure) = &self.all[at] else { continue };
            match exposure.state {
                State::Open(_) if exposure.loan.is_recalled() => {
                    self.end(at, port, frames)?;
                    moved = true;
                }
                State::Stopping(since) if since.elapsed() > CONFIRMED_WITHIN => {
                    let len = exposure.memory.len;
                    let limit = CONFIRMED_WITHIN;
                    return Err(format!("it did not confirm within {limit:?} that it writes no more to {len} bytes"));
                }
                _ => {}
            }
        }
        Ok(moved)
    }

    /// The peer asks about a key: it is going to write by it.
    ///
    /// # Errors
    /// It was not issued as it is.
    pub(crate) fn check(&mut self, bytes: [u8; 32]) -> Result<Frame, String> {
        let key = Key(bytes);
        let Some((_, exposure)) = self.of(key.id()) else {
            return Err("a write by a key that was not issued".to_owned());
        };
        if exposure.key != key {
            let (claimed, len) = (key.len(), exposure.memory.len);
            return Err(format!("a write by a key that was not issued so: {claimed} bytes of {len} exposed"));
        }
        let valid = matches!(exposure.state, State::Open(_)) && !exposure.loan.is_recalled();
        if valid {
            exposure.state = State::Open(true);
        }
        Ok(Frame::Checked { id: key.id(), remote: valid.then_some(exposure.remote) })
    }

    /// The peer writes by that key no more, and all that it wrote was counted.
    ///
    /// # Errors
    /// It was not asked to stop.
    pub(crate) fn stopped(&mut self, id: u64, port: &mut Port) -> Result<(), String> {
        match self.of(id) {
            Some((at, exposure)) if matches!(exposure.state, State::Stopping(_)) => self.close(at, port),
            _ => Err("it confirmed what it was not asked".to_owned()),
        }
    }

    /// A registration that contains that memory, for writes from it.
    pub(crate) fn containing(&self, from: &Extent) -> Option<Registered> {
        let end = from.at.checked_add(from.len as u64)?;
        let holds = |exposure: &&Exposure| {
            let memory = &exposure.memory;
            memory.gpu == from.gpu && memory.at <= from.at && end <= memory.at + memory.len as u64
        };
        self.live.iter().filter_map(|at| self.all[*at].as_ref()).find(holds).map(|exposure| exposure.registered)
    }

    /// A peer was asked to stop and has not confirmed.
    pub(crate) fn is_stopping(&self) -> bool {
        let mut live = self.live.iter().filter_map(|at| self.all[*at].as_ref());
        live.any(|exposure| matches!(exposure.state, State::Stopping(_)))
    }
}
