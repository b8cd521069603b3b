//! What the tests of lanes share.
#![allow(dead_code)]

use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_transport::conformance::skip;
use crossrail_types::{LaneId, Log, LogLevel};
use crossrail_ucx::{Fabric, Library, UcxLane, attach};

pub(crate) const LIMIT: Duration = Duration::from_secs(20);

/// UCX; `None` where there is none, which is reported.
pub(crate) fn library() -> Option<&'static Library> {
    let place = std::env::var_os("CROSSRAIL_UCX_LIBRARY").map(PathBuf::from);
    match Library::load(place.as_deref(), Log(LogLevel::Warn)) {
        Ok(library) => Some(library),
        Err(absent) => {
            skip(&absent.why);
            None
        }
    }
}

/// UCX, with some of its transports and one device; `None` where there is none, which is reported.
pub(crate) fn fabric(transports: &[&str], device: Option<&str>) -> Option<Arc<Fabric>> {
    let transports: Vec<String> = transports.iter().map(|name| (*name).to_owned()).collect();
    Some(Fabric::open(library()?, Some(&transports), device).expect("a fabric"))
}

/// Two ends of a TCP connection.
pub(crate) fn streams() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
    let dialled = TcpStream::connect(listener.local_addr().expect("bound")).expect("dial");
    (dialled, listener.accept().expect("accept").0)
}

/// Two lanes that are each other's peer.
pub(crate) fn pair(fabric: &Arc<Fabric>) -> (UcxLane, UcxLane) {
    let (here, there) = streams();
    let deadline = Instant::now() + LIMIT;
    std::thread::scope(|scope| {
        let other = scope.spawn(|| attach(there, fabric, LaneId(2), "ucx", deadline));
        let lane = attach(here, fabric, LaneId(1), "ucx", deadline).expect("a lane");
        (lane, other.join().expect("no panic").expect("the other lane"))
    })
}
