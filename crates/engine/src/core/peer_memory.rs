//! Memory of a peer on this machine: which link reaches it.

use crossrail_cuda_ipc::Link;
use crossrail_transport::{Descriptor, Domain};
use crossrail_types::{EndpointId, Error, ErrorKind, LaneId, Result};

use super::Core;
use super::gpu::GpuMemory;
use super::polled_lanes::PolledLanes;
use super::tables::Tables;
use crate::memory::Space;

/// The domain in which memory of that space is shared with a peer: that of `lane`, the one for its messages, or the
/// link between GPUs beside it. `None`: there is none, or not yet.
#[inline]
pub(super) fn domain<'a>(
    (gpu, polled): (&'a mut GpuMemory, &'a mut PolledLanes),
    (endpoint, lane): (EndpointId, Option<LaneId>),
    space: Space,
) -> Option<&'a mut dyn Domain> {
    match space {
        Space::Host => polled.domain(lane?),
        Space::Gpu => Some(gpu.existing_link(endpoint)?),
    }
}

/// [`domain`], which is created here if it is not there.
///
/// # Errors
/// Why there is none.
#[inline]
pub(super) fn create_domain<'a>(
    tables: &Tables,
    (gpu, polled): (&'a mut GpuMemory, &'a mut PolledLanes),
    (endpoint, lane): (EndpointId, Option<LaneId>),
    space: Space,
) -> std::result::Result<&'a mut dyn Domain, String> {
    if space == Space::Gpu
        && let Err(why) = gpu.link(tables, endpoint)
        && !gpu.is_linked(endpoint)
    {
        return Err(why);
    }
    domain((gpu, polled), (endpoint, lane), space).ok_or_else(|| only_over_shm(tables, endpoint))
}

#[cold]
fn only_over_shm(tables: &Tables, endpoint: EndpointId) -> String {
    let lanes = tables.peers.get(endpoint).map_or(&[][..], |peer| peer.lanes());
    let mut used: Vec<_> = lanes.iter().filter_map(|id| Some(tables.lanes.get(*id)?.transport())).collect();
    used.dedup();
    format!("only memory reached over shm can be mapped; this endpoint uses {}", used.join(", "))
}

/// Whose memory a peer describes so.
pub(super) fn space_of(descriptor: &Descriptor) -> Space {
    if Link::knows(descriptor) { Space::Gpu } else { Space::Host }
}

impl Core {
    /// The domain in which memory of that space is shared with a peer, if the peer is alive and there is one.
    ///
    /// # Errors
    /// `Unsupported` with the reason; `PeerDead`, `Closed`.
    pub(crate) fn domain_of(
        &mut self,
        endpoint: EndpointId,
        what: &'static str,
        space: Space,
    ) -> Result<&mut dyn Domain> {
        self.check_alive(endpoint, what)?;
        let of = &mut self.transfers;
        let lane = of.tables.peers.get(endpoint).and_then(|peer| peer.message_lane());
        create_domain(&of.tables, (&mut of.gpu, &mut of.polled), (endpoint, lane), space).map_err(|why| {
            let (detail, hint) = match space {
                Space::Host => (why, "write and read it by key (Worker::register), or let both ends use shm"),
                Space::Gpu => (format!("GPU memory: {why}"), "write and read it by key (Worker::register)"),
            };
            Error::new(ErrorKind::Unsupported, what, detail).with_peer(of.tables.peers.name(endpoint)).with_hint(hint)
        })
    }
}
