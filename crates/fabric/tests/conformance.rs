//! The conformance suite of one-sided writes, over providers of a real libfabric that need no NIC.

mod common;

use std::time::Instant;

use common::{offer, pair, streams};
use crossrail_fabric::{attach, attach_rail};
use crossrail_transport::placing::conformance;
use crossrail_types::ErrorKind;

fn conforms(provider: &str) {
    let Some(offer) = offer(provider) else { return };
    eprintln!("{offer:?}");
    conformance::run(&offer.to_string(), &mut || pair(&offer));
}

#[test]
fn tcp() {
    conforms("tcp");
}

#[test]
fn net() {
    conforms("net");
}

#[test]
fn shm() {
    conforms("shm");
}

/// Closing one end unmaps what the other still polls. The suite drives both ends by one thread, and so may have them.
#[test]
fn rails_of_one_process_are_refused_over_shm() {
    let Some(offer) = offer("shm") else { return };
    let (here, there) = streams();
    let deadline = Instant::now() + common::LIMIT;
    let ends = std::thread::scope(|scope| {
        let other = scope.spawn(|| attach_rail(there, &offer, ("a", "fabric/shm"), None, deadline).err());
        [attach_rail(here, &offer, ("b", "fabric/shm"), Some(0), deadline).err(), other.join().expect("no panic")]
    });
    for error in ends {
        let error = error.expect("refused");
        assert_eq!(error.kind, ErrorKind::Unsupported, "{error}");
        assert!(error.to_string().contains("both ends are in one process"), "{error}");
    }
}

#[test]
fn joining_ends_at_its_deadline() {
    let Some(offer) = offer("tcp") else { return };
    let (here, _silent) = streams();
    let error = attach(here, &offer, "nobody", "fabric/tcp", Instant::now()).err().expect("nobody answers");
    assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
    assert!(error.to_string().contains("nobody"), "{error}");
}

#[test]
fn a_peer_that_introduces_itself_otherwise_is_refused() {
    use std::io::Write;
    let Some(offer) = offer("tcp") else { return };
    let (here, mut there) = streams();
    there.write_all(&[7; 4096]).expect("room");
    let deadline = Instant::now() + common::LIMIT;
    let error = attach(here, &offer, "a stranger", "fabric/tcp", deadline).err().expect("refused");
    assert_eq!(error.kind, ErrorKind::Protocol, "{error}");
}
