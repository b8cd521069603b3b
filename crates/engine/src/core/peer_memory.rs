//! Memory of a peer on this machine, for mapping it here.

use crossrail_cuda_ipc::Link;
use crossrail_transport::Domain;
use crossrail_types::{EndpointId, Error, ErrorKind, Result};

use super::{Core, Transfers, gone};

impl Core {
    /// The link to that peer's GPU memory, if the peer is alive and has one.
    ///
    /// # Errors
    /// `Unsupported` with the reason; `PeerDead`, `Closed`.
    pub(crate) fn link_of(&mut self, endpoint: EndpointId, what: &'static str) -> Result<&mut Link> {
        let name = self.reachable(endpoint, what)?;
        let Transfers { tables, gpu, .. } = &mut self.transfers;
        gpu.link(tables, endpoint).map_err(|why| {
            Error::new(ErrorKind::Unsupported, what, format!("GPU memory: {why}"))
                .with_peer(name)
                .with_hint("write and read it by key (Worker::register)")
        })
    }

    /// The name of a peer that is alive.
    fn reachable(&self, endpoint: EndpointId, what: &'static str) -> Result<String> {
        let peer = self.transfers.tables.peers.get(endpoint).filter(|_| !self.closed);
        let peer = peer.ok_or_else(|| gone(what))?;
        if !peer.is_alive() {
            return Err(peer.dead(what));
        }
        Ok(peer.name().to_owned())
    }

    /// What the lane that is polled under the lock makes of memory, or the link beside it (`gpu`), if the peer is alive
    /// and has one.
    ///
    /// # Errors
    /// `Unsupported` with the reason; `PeerDead`, `Closed`.
    pub(crate) fn domain_of(&mut self, endpoint: EndpointId, what: &'static str, gpu: bool) -> Result<&mut dyn Domain> {
        if gpu {
            return self.link_of(endpoint, what).map(|link| link as &mut dyn Domain);
        }
        let name = self.reachable(endpoint, what)?;
        let Transfers { tables, polled, .. } = &mut self.transfers;
        let peer = tables.peers.get(endpoint).ok_or_else(|| gone(what))?;
        let lane = peer.message_lane().filter(|id| polled.get_mut(*id).is_some_and(|lane| lane.caps().direct));
        if let Some(domain) = lane.and_then(|id| polled.domain(id)) {
            return Ok(domain);
        }
        let lanes = peer.lanes().iter().filter_map(|id| tables.lanes.get(*id));
        let mut used: Vec<_> = lanes.map(|lane| lane.transport()).collect();
        used.dedup();
        let detail = format!("only memory reached over shm can be mapped; this endpoint uses {}", used.join(", "));
        Err(Error::new(ErrorKind::Unsupported, what, detail)
            .with_peer(name)
            .with_hint("write and read it by key (Worker::register), or let both ends use shm"))
    }
}
