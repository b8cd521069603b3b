//! The conformance suite of lanes, over providers of a real libfabric that need no NIC.

mod common;

use std::time::Instant;

use common::{LIMIT, lanes, offer, streams};
use crossrail_fabric::attach_lane;
use crossrail_transport::conformance;
use crossrail_types::{ErrorKind, LaneId};

fn conforms(provider: &str) {
    let Some(offer) = offer(provider) else { return };
    conformance::run(&format!("fabric:{}", offer.provider), &mut || {
        let (a, b) = lanes(&offer);
        (Box::new(a), Box::new(b))
    });
}

#[test]
fn tcp() {
    conforms("tcp");
}

#[test]
fn net() {
    conforms("net");
}

/// The provider reads the memory of an end that was closed, if that was in the same process.
#[test]
fn shm_within_one_process_is_refused() {
    let Some(offer) = offer("shm") else { return };
    let (here, there) = streams();
    let deadline = Instant::now() + LIMIT;
    std::thread::scope(|scope| {
        let other = scope.spawn(|| attach_lane(there, &offer, LaneId(2), ("b", "fabric/lo"), deadline).err());
        let error = attach_lane(here, &offer, LaneId(1), ("a", "fabric/lo"), deadline).err().expect("refused");
        assert_eq!(error.kind, ErrorKind::Unsupported, "{error}");
        assert!(other.join().expect("no panic").is_some());
    });
}
