//! GPU memory of a peer on this machine, reached directly: a link beside the shared-memory lane, and the notes about
//! allocations that the two ends pass each other over that lane's socket.

use std::time::Duration;

use crossrail_cuda_ipc::Link;
use crossrail_transport::{Direct, LaneError};
use crossrail_types::{EndpointId, LaneId, OpId};
use proto::Offer;

use crate::core::tables::State;
use crate::core::{Core, Inside};
use crossrail_proto as proto;

/// How long an allocation that an announcement named may take to arrive.
const NOTE_LIMIT: Duration = Duration::from_secs(5);
/// Passes in which nothing moved between two looks for notes.
const NOTES_EVERY: u32 = 16;

/// What a peer's GPU memory can be reached by.
pub(crate) enum Reach {
    /// Nothing but host memory, for this reason.
    Not(String),
    /// A link, once GPU memory is used.
    May,
    /// This one.
    By(Box<Link>),
}

impl Reach {
    pub(crate) fn link(&mut self) -> Option<&mut Link> {
        match self {
            Reach::By(link) => Some(link),
            _ => None,
        }
    }
}

/// The direct side of a lane, or of the link beside it.
pub(crate) fn direct<'a>(
    inside: &'a mut [Inside],
    st: &'a mut State,
    endpoint: EndpointId,
    lane: LaneId,
    gpu: bool,
) -> Option<&'a mut dyn Direct> {
    if gpu {
        return st.peer(endpoint)?.reach.link().map(|link| link as &mut dyn Direct);
    }
    inside.iter_mut().find(|inside| inside.id == lane)?.lane.direct()
}

impl Core {
    /// The link to that peer's GPU memory, made when it is first asked for. `Err`: why there is none.
    pub(crate) fn link(&mut self, endpoint: EndpointId) -> Result<&mut Link, String> {
        let domain = self.st.staging.domain();
        let Some(peer) = self.st.peer(endpoint).filter(|peer| peer.alive) else {
            return Err("the peer is gone".into());
        };
        if matches!(peer.reach, Reach::May) {
            peer.reach = Reach::By(Box::new(Link::new(domain?, NOTE_LIMIT)));
            self.links += 1;
        }
        let Some(peer) = self.st.peer(endpoint) else { return Err("the peer is gone".into()) };
        match &mut peer.reach {
            Reach::By(link) => Ok(link),
            Reach::Not(why) => Err(why.clone()),
            Reach::May => Err("no GPU of this process is in use".into()),
        }
    }

    /// How the peer could reach memory of a GPU of ours.
    pub(crate) fn offer_gpu(&mut self, endpoint: EndpointId, op: OpId, ptr: *mut u8, len: usize) -> Option<Offer> {
        if len == 0 {
            return None;
        }
        let link = self.link(endpoint).ok()?;
        let described = link.describe(ptr, len).ok_or_else(|| link.why_not().unwrap_or("it cannot").to_owned());
        let (descriptor, kind) = match described {
            Ok(described) => described,
            Err(why) => {
                self.warn_gpu(endpoint, &why);
                return None;
            }
        };
        if let Some(op) = self.st.ops.op_mut(op) {
            op.direct = Some(kind);
        }
        self.pass_notes(endpoint);
        Some(Offer { descriptor, slot: None })
    }

    /// Says once for each peer that GPU memory goes the long way.
    pub(crate) fn warn_gpu(&mut self, endpoint: EndpointId, why: &str) {
        let Some(peer) = self.st.peer(endpoint) else { return };
        if std::mem::replace(&mut peer.warned_gpu, true) {
            return;
        }
        let name = peer.name().to_owned();
        self.st.log.warn(format_args!("{name}: no direct copy of GPU memory ({why}); through host memory instead"));
    }

    /// Passes what the link has to say, as far as there is room.
    pub(crate) fn pass_notes(&mut self, endpoint: EndpointId) -> bool {
        let Some(lane) = self.st.peer(endpoint).and_then(|peer| peer.inside) else { return false };
        let Some(inside) = self.inside.iter_mut().find(|inside| inside.id == lane) else { return false };
        let Some(link) = self.st.peer(endpoint).and_then(|peer| peer.reach.link()) else { return false };
        let mut moved = false;
        while let Some((note, files)) = link.outgoing() {
            match inside.lane.pass(note, &files) {
                Ok(true) => {
                    link.sent();
                    moved = true;
                }
                Ok(false) => break,
                Err(error) => {
                    self.drop_inside(endpoint, lane, &error);
                    break;
                }
            }
        }
        moved
    }

    /// Carries notes between links and their lanes; whether there were any. `moved`: something else did.
    #[cold]
    pub(crate) fn pump_notes(&mut self, moved: bool) -> bool {
        let look = moved || self.passes().is_multiple_of(NOTES_EVERY);
        let mut any = false;
        let mut at = 0;
        while at < self.inside.len() {
            let Inside { id, endpoint, lane, .. } = &mut self.inside[at];
            let (id, endpoint) = (*id, *endpoint);
            at += 1;
            let Some(link) = self.st.peer(endpoint).and_then(|peer| peer.reach.link()) else { continue };
            let mut wrong = None;
            while look && let Some(passed) = lane.passed() {
                any = true;
                if let Err(why) = link.incoming(&passed.note, passed.files) {
                    wrong = Some(why);
                    break;
                }
            }
            if let Some(why) = wrong {
                self.drop_inside(endpoint, id, &LaneError::Protocol(why));
                return true;
            }
            any |= self.pass_notes(endpoint);
        }
        any
    }

    /// Lets go of memory that its owners have freed, a little at a time.
    pub(crate) fn tidy_links(&mut self) {
        for at in 0..self.st.peers.len() as u32 {
            let tell = self.st.peer(EndpointId(at)).and_then(|peer| peer.reach.link()).is_some_and(|link| link.tidy());
            if tell {
                self.pass_notes(EndpointId(at));
            }
        }
    }

    /// The peer is gone: its link goes too, once its copies have ended.
    pub(crate) fn drop_link(&mut self, endpoint: EndpointId) {
        let Some(peer) = self.st.peer(endpoint) else { return };
        if matches!(std::mem::replace(&mut peer.reach, Reach::Not("the peer is gone".into())), Reach::By(_)) {
            self.links -= 1;
        }
    }
}
