//! What the tests share: a real libfabric, and pairs of objects over its providers that need no NIC.
#![allow(dead_code)]

use std::net::{IpAddr, Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crossrail_fabric::{FabricLane, FabricPlacing, Library, Offer, VARIABLE, Wanted, attach, attach_lane};
use crossrail_transport::conformance::skip;
use crossrail_transport::placing::conformance::Pair;
use crossrail_types::LaneId;

pub(crate) const LIMIT: Duration = Duration::from_secs(20);

/// An offer of that provider on loopback; `None` where there is none, which is reported.
pub(crate) fn offer(provider: &str) -> Option<Offer> {
    let place = std::env::var_os(VARIABLE).map(PathBuf::from);
    let library = match Library::load(place.as_deref()) {
        Ok(library) => library,
        Err(absent) => {
            skip(&absent.why);
            return None;
        }
    };
    let address = (provider != "shm").then_some(IpAddr::V4(Ipv4Addr::LOCALHOST));
    match library.offers(&Wanted { provider: Some(provider), address, ..Wanted::default() }) {
        Ok(offers) => offers.into_iter().next(),
        Err(error) => {
            // A library has some of them: `net` is part of `tcp` from 1.18 on.
            eprintln!("skipped: {provider}: {error}");
            None
        }
    }
}

/// Two ends of a TCP connection.
pub(crate) fn streams() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
    let dialled = TcpStream::connect(listener.local_addr().expect("bound")).expect("dial");
    (dialled, listener.accept().expect("accept").0)
}

/// Two objects that are each other's peer, and the connection beside them.
pub(crate) fn objects(offer: &Offer) -> (FabricPlacing, FabricPlacing, TcpStream) {
    let (here, there) = streams();
    let beside = here.try_clone().expect("a descriptor");
    let deadline = Instant::now() + LIMIT;
    let rail = format!("fabric/{offer}");
    std::thread::scope(|scope| {
        let other = scope.spawn(|| attach(there, offer, "peer of b", &rail, deadline));
        let one = attach(here, offer, "peer of a", &rail, deadline).expect("an object");
        (one, other.join().expect("no panic").expect("the other object"), beside)
    })
}

/// For the conformance suite.
pub(crate) fn pair(offer: &Offer) -> Pair {
    let (a, b, beside) = objects(offer);
    let lose = Box::new(move |_rail| {
        let _ = beside.shutdown(Shutdown::Both);
    });
    Pair { a: Box::new(a), b: Box::new(b), rails: 1, lose }
}

/// Two lanes that are each other's peer.
pub(crate) fn lanes(offer: &Offer) -> (FabricLane, FabricLane) {
    let (here, there) = streams();
    let deadline = Instant::now() + LIMIT;
    std::thread::scope(|scope| {
        let other = scope.spawn(|| attach_lane(there, offer, LaneId(2), ("peer of b", "fabric/lo"), deadline));
        let lane = attach_lane(here, offer, LaneId(1), ("peer of a", "fabric/lo"), deadline).expect("a lane");
        (lane, other.join().expect("no panic").expect("the other lane"))
    })
}
