//! The memory that this end has exposed, and how the peer's access to it ends.
//!
//! Closing a registration does not stop a write that is arriving, with every provider. So a peer that has used a key is
//! asked to stop, and confirms once all that it wrote was counted here; only then is the memory returned.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_transport::placing::{Exposed, Extent, Key, Revoked, Wrong};
use crossrail_transport::{Kept, Loan};
use crossrail_types::LaneId;

use crate::port::{Port, Registered};
use crate::wire::Frame;

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
    state: State,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Exposures {
    exposed: Exposed,
    /// By the index in a key's id.
    all: Vec<Exposure>,
    /// Those that are not ended.
    live: Vec<usize>,
    lane: Option<LaneId>,
}

/// Bits of a key's id that are its index: see [`Exposed`].
const INDEX: usize = 1 << 16;

impl Exposures {
    /// Registers memory for the peer's writes.
    ///
    /// # Safety
    /// The memory must be valid until its loan is returned or the port is dropped.
    pub(crate) unsafe fn expose(&mut self, port: &mut Port, memory: &Extent, loan: &Arc<Loan>) -> Result<Key, String> {
        let lane = self.lane.unwrap_or(LaneId(u32::MAX));
        let kept = loan.keep(lane).ok_or("its owner has recalled it")?;
        // SAFETY: as the caller guarantees; the loan is kept until the registration is closed.
        let (registered, remote) =
            unsafe { port.register(memory, true) }.map_err(|error| format!("{}: {}", error.operation, error.detail))?;
        let added = self.exposed.add(*memory, Arc::clone(loan));
        let mut key = match added {
            Ok(key) => key,
            Err(why) => {
                let _ = port.unregister(registered);
                return Err(why);
            }
        };
        key.0[16..24].copy_from_slice(&remote.key.to_le_bytes());
        key.0[24..32].copy_from_slice(&remote.base.to_le_bytes());
        self.live.push(self.all.len());
        self.all.push(Exposure {
            key,
            memory: *memory,
            loan: Arc::clone(loan),
            kept: Some(kept),
            registered,
            state: State::Open(false),
        });
        Ok(key)
    }

    /// Ends the access by that key.
    pub(crate) fn revoke(&mut self, port: &mut Port, key: &Key, frames: &mut Vec<Frame>) -> Result<Revoked, String> {
        match self.exposed.revoke(key.id()) {
            Some(_) => self.end(key.id() as usize % INDEX, port, frames),
            None => Ok(self.all.get(key.id() as usize % INDEX).map_or(Revoked::Now, |known| match known.state {
                State::Stopping(_) => Revoked::OnceReturned,
                _ => Revoked::Now,
            })),
        }
    }

    fn end(&mut self, at: usize, port: &mut Port, frames: &mut Vec<Frame>) -> Result<Revoked, String> {
        let Some(exposure) = self.all.get_mut(at) else { return Ok(Revoked::Now) };
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
        let exposure = &mut self.all[at];
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
            match self.all[at].state {
                State::Open(_) if self.all[at].loan.is_recalled() => {
                    self.exposed.revoke(self.all[at].key.id());
                    self.end(at, port, frames)?;
                    moved = true;
                }
                State::Stopping(since) if since.elapsed() > CONFIRMED_WITHIN => {
                    let len = self.all[at].memory.len;
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
        match self.exposed.find(key.id(), 0, 0) {
            Ok(_) => {}
            Err(wrong @ (Wrong::Key | Wrong::Bounds(_))) => return Err(format!("a write {wrong}")),
        }
        let exposure = &mut self.all[key.id() as usize % INDEX];
        if exposure.key != key {
            let (claimed, len) = (key.len(), exposure.memory.len);
            return Err(format!("a write by a key that was not issued so: {claimed} bytes of {len} exposed"));
        }
        let valid = matches!(exposure.state, State::Open(_)) && !exposure.loan.is_recalled();
        if valid {
            exposure.state = State::Open(true);
        }
        Ok(Frame::Checked { id: key.id(), valid })
    }

    /// The peer writes by that key no more, and all that it wrote was counted.
    ///
    /// # Errors
    /// It was not asked to stop.
    pub(crate) fn stopped(&mut self, id: u64, port: &mut Port) -> Result<(), String> {
        let at = id as usize % INDEX;
        let is_it = |known: &Exposure| known.key.id() == id && matches!(known.state, State::Stopping(_));
        if !self.all.get(at).is_some_and(is_it) {
            return Err("it confirmed what it was not asked".to_owned());
        }
        self.close(at, port)
    }

    /// A registration that contains that memory, for writes from it.
    pub(crate) fn containing(&self, from: &Extent) -> Option<Registered> {
        let end = from.at.checked_add(from.len as u64)?;
        let holds = |exposure: &&Exposure| {
            let memory = &exposure.memory;
            memory.gpu == from.gpu && memory.at <= from.at && end <= memory.at + memory.len as u64
        };
        self.live.iter().map(|at| &self.all[*at]).find(holds).map(|exposure| exposure.registered)
    }

    /// A peer was asked to stop and has not confirmed.
    pub(crate) fn is_stopping(&self) -> bool {
        self.live.iter().any(|at| matches!(self.all[*at].state, State::Stopping(_)))
    }
}
