//! Shared memory: rings for small messages, single copies for large ones.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use crossrail_handshake::{Hello, Session, Stream};
use crossrail_shm::{Arena, Options, Side};
use crossrail_types::{EndpointId, Error, ErrorKind, Result};

use super::Sessions;
use super::costs::{self, Cost, EAGER_LIMIT};
use super::dialling::DIAL_MAX;
use super::explain::{self, Candidate};
use super::transport::{Attempt, Availability, Choice, Control, Local, Refused, Transport};
use crate::core::LaneRecord;

/// See the module.
pub(super) struct Shm;

impl Transport for Shm {
    fn name(&self) -> &'static str {
        "shm"
    }

    fn availability(&self, _local: &Local<'_>) -> Availability {
        // Tested by a trial allocation.
        match Arena::new().alloc(1) {
            Ok(_) => Availability::Usable(
                "rings, mapped memory (Context.alloc); single copy by CMA is tried with each peer".to_owned(),
            ),
            Err(error) => Availability::Unusable(error.to_string(), error.hint),
        }
    }

    fn control(&self) -> Control {
        Control::Unix
    }

    fn obstacle(&self, sessions: &Sessions, peer: &Hello) -> Option<String> {
        sessions.apart(peer)
    }

    fn candidates(&self, _sessions: &Sessions, _peer: &Hello) -> Vec<Candidate> {
        vec![explain::candidate("shm", "shm", None, &Cost::SHM_CMA)]
    }

    fn connect(&self, sessions: &Arc<Sessions>, session: Session, attempt: &Attempt) -> Result<EndpointId> {
        attach(sessions, session, Side::Connector, &attempt.refused, attempt.deadline)
    }

    fn accept(&self, sessions: &Arc<Sessions>, session: Session) -> Result<()> {
        let deadline = Instant::now() + DIAL_MAX;
        let endpoint = attach(sessions, session, Side::Acceptor, &Refused::default(), deadline)?;
        sessions.arrived(endpoint);
        Ok(())
    }
}

impl Sessions {
    /// Logs that large messages take two copies through the ring, where one would do; with further peers for debugging.
    fn warn_of_cma(&self, peer: &str, why: &str) {
        let text = format_args!("{peer}: no single copies by CMA, large messages go through the shared ring: {why}");
        match self.warned_of_cma.swap(true, Ordering::Relaxed) {
            false => self.log.warn(text),
            true => self.log.debug(text),
        }
    }
}

fn attach(
    sessions: &Arc<Sessions>,
    session: Session,
    side: Side,
    refused: &Refused,
    deadline: Instant,
) -> Result<EndpointId> {
    let peer = session.peer;
    let Stream::Unix(stream) = session.stream else {
        return Err(Error::new(ErrorKind::Unsupported, "connect", "shm needs a Unix socket").with_peer(peer.name));
    };
    let id = sessions.reserve_lane();
    let arena = sessions.environment.arena().clone();
    let lane = crossrail_shm::attach(stream, side, id, arena, Options::default(), deadline)
        .map_err(|error| error.with_peer(&peer.name))?;
    // The receiver pulls, and only from a sender that knows that it can.
    let cma = lane.report().cma_pull.clone().and_then(|()| match lane.peer_copies() {
        true => Ok(()),
        false => Err("the peer cannot access this process; its log says why".to_owned()),
    });
    if let Err(why) = &cma {
        sessions.warn_of_cma(&peer.name, why);
    }
    let bulk = if cma.is_ok() { Cost::SHM_CMA } else { Cost::SHM_RING };
    let carried = costs::eager_max(&Cost::SHM_RING, &bulk, EAGER_LIMIT);
    let mapped = costs::eager_max(&Cost::SHM_RING, &Cost::SHM_MAPPED, EAGER_LIMIT);
    let way = |name: &str, cost: &Cost| explain::candidate(name, "shm", None, cost);
    let by_mapping = way("shm(mapped)", &Cost::SHM_MAPPED).chosen(&["large, Context.alloc"]);
    let (carrier, rows) = match &cma {
        Ok(()) => (
            "shm(cma)",
            vec![
                by_mapping,
                way("shm(cma)", &Cost::SHM_CMA).chosen(&["large"]),
                way("shm(ring)", &Cost::SHM_RING).chosen(&["small"]),
            ],
        ),
        Err(why) => (
            "shm(ring)",
            vec![
                by_mapping,
                way("shm(ring)", &Cost::SHM_RING).chosen(&["small", "large"]),
                way("shm(cma)", &Cost::SHM_CMA).missed(why),
            ],
        ),
    };
    let mut large = format!(
        "{}, {}",
        explain::from_size(mapped, "shm(mapped) for Context.alloc memory"),
        explain::from_size(carried, carrier)
    );
    if super::cuda_ipc::reason(sessions, &peer, refused).is_none() {
        large.push_str(", cuda_ipc for GPU memory (above 1M the sender's GPU copies)");
    }
    let choice = Choice { small: "shm".to_owned(), large, rows };
    let endpoint = sessions.add_endpoint(&Shm, &peer.name, Some(&peer), choice, refused)?;
    let record = LaneRecord::of(&lane, "shm", EAGER_LIMIT).copied_above(carried, mapped).resting();
    sessions.add_polled_lane(endpoint, Box::new(lane), record, true)?;
    Ok(endpoint)
}
