//! Memory of a peer on this machine, for mapping it here.

use crossrail_cuda_ipc::Link;
use crossrail_transport::Direct;
use crossrail_types::{EndpointId, Error, ErrorKind, Result};

use super::{Core, gone};

impl Core {
    /// The link to that peer's GPU memory, if the peer is there and has one.
    pub(crate) fn link_of(&mut self, endpoint: EndpointId, what: &'static str) -> Result<&mut Link> {
        let name = self.reachable(endpoint, what)?;
        self.link(endpoint).map_err(|why| {
            Error::new(ErrorKind::Unsupported, what, format!("GPU memory: {why}"))
                .with_peer(name)
                .with_hint("write and read it by key (Worker::register)")
        })
    }

    /// The name of a peer that is there.
    fn reachable(&mut self, endpoint: EndpointId, what: &'static str) -> Result<String> {
        if self.closed {
            return Err(gone(what));
        }
        let Some(peer) = self.st.peer(endpoint) else { return Err(gone(what)) };
        let name = peer.name().to_owned();
        if !peer.alive {
            return Err(Error::new(ErrorKind::PeerDead, what, peer.why_dead.clone()).with_peer(name));
        }
        Ok(name)
    }

    /// The direct side of the lane that is polled under the lock, or of the link beside it, if the peer is there and
    /// has one.
    pub(crate) fn direct_of(&mut self, endpoint: EndpointId, what: &'static str, gpu: bool) -> Result<&mut dyn Direct> {
        if gpu {
            return self.link_of(endpoint, what).map(|link| link as &mut dyn Direct);
        }
        let name = self.reachable(endpoint, what)?;
        let Some(peer) = self.st.peer(endpoint) else { return Err(gone(what)) };
        let (lane, lanes) = (peer.inside, peer.lanes.clone());
        let at = self.inside.iter().position(|inside| Some(inside.id) == lane && inside.lane.caps().direct);
        if let Some(direct) = at.and_then(|at| self.inside[at].lane.direct()) {
            return Ok(direct);
        }
        let mut used: Vec<_> = lanes.into_iter().filter_map(|id| self.st.lane(id).map(|lane| lane.transport)).collect();
        used.dedup();
        let detail = format!("only memory reached over shm can be mapped; this endpoint uses {}", used.join(", "));
        Err(Error::new(ErrorKind::Unsupported, what, detail)
            .with_peer(name)
            .with_hint("write and read it by key (Worker::register), or let both ends use shm"))
    }
}
