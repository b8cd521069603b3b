//! GPU memory of peers on this machine, reached directly: a link beside the shared-memory lane of each, and the notes
//! about allocations that the two ends exchange over that lane's socket.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use crossrail_cuda_ipc::{Gpus, Link};
use crossrail_transport::LaneError;
use crossrail_types::{EndpointId, LaneId};

use crate::core::polled_lanes::PolledLanes;
use crate::core::tables::Tables;

/// How long an allocation that an announcement named may take to arrive.
const NOTE_LIMIT: Duration = Duration::from_secs(5);
/// Passes in which nothing moved between two checks for notes.
const NOTES_EVERY: u32 = 16;

/// How a peer's GPU memory can be reached.
pub(crate) enum Reach {
    /// Only through host memory, for this reason.
    Staged(String),
    /// CUDA IPC is possible; the link is created on first use.
    Possible,
    /// Over this link.
    Linked(Box<Link>),
}

/// A lane over which a note could not be passed: it must be dropped.
pub(in crate::core) struct NoteFailed {
    pub(in crate::core) endpoint: EndpointId,
    pub(in crate::core) lane: LaneId,
    pub(in crate::core) error: LaneError,
}

/// See the module.
#[derive(Default)]
pub(super) struct IpcLinks {
    /// The means of copying between processes; `None`: no GPU was used yet.
    gpus: Option<Result<Arc<Gpus>, String>>,
    reach: HashMap<EndpointId, Reach>,
    /// Links in `reach`.
    open: u32,
    /// Peers for which a log line says that GPU memory is staged.
    warned: HashSet<EndpointId>,
}

impl IpcLinks {
    /// The first call decides.
    pub(super) fn set_gpus(&mut self, gpus: Result<Arc<Gpus>, String>) {
        self.gpus.get_or_insert(gpus);
    }

    pub(super) fn set_reach(&mut self, endpoint: EndpointId, reach: Reach) {
        self.reach.insert(endpoint, reach);
    }

    /// Whether there is any link.
    #[inline]
    pub(super) fn is_any_open(&self) -> bool {
        self.open > 0
    }

    /// The link to that peer, if it was created.
    pub(super) fn get(&mut self, endpoint: EndpointId) -> Option<&mut Link> {
        match self.reach.get_mut(&endpoint) {
            Some(Reach::Linked(link)) => Some(link),
            _ => None,
        }
    }

    pub(super) fn is_open(&self, endpoint: EndpointId) -> bool {
        matches!(self.reach.get(&endpoint), Some(Reach::Linked(_)))
    }

    /// The link to that peer, created on first use. `Err`: why there is none.
    pub(super) fn link(&mut self, tables: &Tables, endpoint: EndpointId) -> Result<&mut Link, String> {
        const NO_GPU: &str = "no GPU of this process is in use";
        let gone = || "the peer is gone".to_owned();
        tables.peers.get(endpoint).filter(|peer| peer.is_alive()).ok_or_else(gone)?;
        let Some(reach) = self.reach.get_mut(&endpoint) else {
            return Err("only endpoints over shm can".to_owned());
        };
        if matches!(reach, Reach::Possible) {
            let gpus = self.gpus.clone().unwrap_or_else(|| Err(NO_GPU.to_owned()))?;
            *reach = Reach::Linked(Box::new(Link::new(gpus, NOTE_LIMIT)));
            self.open += 1;
        }
        match reach {
            Reach::Linked(link) => Ok(link),
            Reach::Staged(why) => Err(why.clone()),
            Reach::Possible => Err(NO_GPU.to_owned()),
        }
    }

    /// Logs once per peer that GPU memory is staged through host memory.
    pub(super) fn warn(&mut self, tables: &Tables, endpoint: EndpointId, why: &str) {
        if self.warned.insert(endpoint) {
            let name = tables.peers.name(endpoint);
            tables.log.warn(format_args!("{name}: no direct copy of GPU memory ({why}); through host memory instead"));
        }
    }

    /// Passes the link's notes to the lane, as far as that has room; whether there were any.
    pub(super) fn pass_notes(
        &mut self,
        tables: &Tables,
        polled: &mut PolledLanes,
        endpoint: EndpointId,
    ) -> Result<bool, NoteFailed> {
        let Some(id) = tables.peers.get(endpoint).and_then(|peer| peer.message_lane()) else { return Ok(false) };
        let (Some(lane), Some(link)) = (polled.get_mut(id), self.get(endpoint)) else { return Ok(false) };
        let mut moved = false;
        while let Some((note, files)) = link.outgoing() {
            match lane.send_note(note, &files) {
                Ok(true) => {
                    link.sent();
                    moved = true;
                }
                Ok(false) => break,
                Err(error) => return Err(NoteFailed { endpoint, lane: id, error }),
            }
        }
        Ok(moved)
    }

    /// Exchanges notes between all links and their lanes; whether there were any. `moved`: something else did in this
    /// pass, so notes may have arrived.
    #[cold]
    pub(super) fn exchange_notes(
        &mut self,
        tables: &Tables,
        polled: &mut PolledLanes,
        (moved, passes): (bool, u32),
    ) -> Result<bool, NoteFailed> {
        let check = moved || passes.is_multiple_of(NOTES_EVERY);
        let mut any = false;
        for at in 0..polled.len() {
            let Some(inside) = polled.at(at) else { break };
            let endpoint = inside.endpoint;
            let Some(link) = self.get(endpoint) else { continue };
            while check && let Some(passed) = inside.lane.recv_note() {
                any = true;
                if let Err(why) = link.incoming(&passed.note, passed.files) {
                    return Err(NoteFailed { endpoint, lane: inside.id, error: LaneError::Protocol(why) });
                }
            }
            any |= self.pass_notes(tables, polled, endpoint)?;
        }
        Ok(any)
    }

    /// Unmaps memory that its owners have freed, a little at a time; the peers that must be notified.
    pub(super) fn tidy(&mut self) -> Vec<EndpointId> {
        let mut notify = Vec::new();
        for (endpoint, reach) in &mut self.reach {
            if let Reach::Linked(link) = reach
                && link.tidy()
            {
                notify.push(*endpoint);
            }
        }
        notify
    }

    /// Nothing refers to that peer any more.
    pub(super) fn forget(&mut self, endpoint: EndpointId) {
        self.end(endpoint);
        self.reach.remove(&endpoint);
        self.warned.remove(&endpoint);
    }

    /// The peer has ended: its link is dropped, after its copies have ended.
    pub(super) fn end(&mut self, endpoint: EndpointId) {
        let ended = self.reach.insert(endpoint, Reach::Staged("the peer is gone".to_owned()));
        if matches!(ended, Some(Reach::Linked(_))) {
            self.open -= 1;
        }
    }
}
