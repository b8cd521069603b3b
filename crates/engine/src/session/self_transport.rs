//! A worker with itself.

use std::sync::Arc;

use crossrail_handshake::Hello;
use crossrail_types::{EndpointId, Result};

use super::Sessions;
use super::costs::{Cost, EAGER_LIMIT};
use super::explain::{self, Candidate};
use super::transport::{Availability, Choice, Local, Refused, Transport};
use crate::core::LaneRecord;

/// Two endpoints of one worker, joined by a loopback lane.
pub(super) struct SelfTransport;

impl Transport for SelfTransport {
    fn name(&self) -> &'static str {
        "self"
    }

    fn availability(&self, _local: &Local<'_>) -> Availability {
        Availability::Usable("a worker with itself".to_owned())
    }

    /// Other workers are never reached this way; [`connect`] needs no session.
    fn obstacle(&self, _sessions: &Sessions, _peer: &Hello) -> Option<String> {
        Some("the peer is another worker".to_owned())
    }

    fn candidates(&self, _sessions: &Sessions, _peer: &Hello) -> Vec<Candidate> {
        Vec::new()
    }
}

/// Makes both endpoints; the one for the caller.
pub(super) fn connect(sessions: &Arc<Sessions>) -> Result<EndpointId> {
    let name = sessions.name();
    let row = explain::candidate("self", "self", None, &Cost::SELF).chosen(&["small", "large"]);
    let choice = || Choice { small: "self".to_owned(), large: "self".to_owned(), rows: vec![row.clone()] };
    let refused = Refused::default();
    let (here, there) = (
        sessions.add_endpoint(&SelfTransport, &name, None, choice(), &refused)?,
        sessions.add_endpoint(&SelfTransport, &name, None, choice(), &refused)?,
    );
    let (a, b) = (sessions.reserve_lane(), sessions.reserve_lane());
    let (one, other) = crossrail_transport::loopback::pair(a, b)?;
    for (endpoint, lane) in [(here, one), (there, other)] {
        let record = LaneRecord::of(&lane, "self", EAGER_LIMIT);
        sessions.add_polled_lane(endpoint, Box::new(lane), record, true)?;
    }
    Ok(here)
}
