//! Two processes, one of which is killed in the middle of a payload.

mod common;

use std::io::{BufRead, BufReader};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use common::{LIMIT, fabric};
use crossrail_transport::{Lane, LaneError, Payload, Place, Sink, Tx};
use crossrail_types::{Head, LaneId};
use crossrail_ucx::{UcxLane, attach};

/// Where the parent listens, and what the child uses: `ADDRESS tcp lo`.
const PARENT: &str = "CROSSRAIL_TEST_UCX_PARENT";
/// Bytes of a payload.
const LARGE: usize = 64 << 20;

/// Sends one large payload after the other, and receives into memory of the same length.
struct Traffic {
    outgoing: Vec<u8>,
    incoming: Vec<u8>,
    sends: bool,
}

impl Traffic {
    fn new(sends: bool) -> Traffic {
        Traffic { outgoing: vec![7; if sends { LARGE } else { 0 }], incoming: vec![0; LARGE], sends }
    }
}

impl Sink for Traffic {
    fn next(&mut self, _lane: LaneId) -> Option<Tx> {
        let payload = Payload { ptr: self.outgoing.as_ptr(), len: LARGE, ..Payload::EMPTY };
        self.sends.then(|| Tx { head: Head::new(1, LARGE as u32), payload, token: 0 })
    }
    fn sent(&mut self, _lane: LaneId, _token: u64) {}
    fn place(&mut self, _lane: LaneId, _head: &Head) -> Place {
        Place::Into { dst: self.incoming.as_mut_ptr(), len: LARGE, grant: None, token: 0 }
    }
    fn placed(&mut self, _lane: LaneId, _token: u64) {}
}

/// A lane of this process over the given connection.
fn lane(stream: TcpStream, transports: &str, device: Option<&str>) -> Option<UcxLane> {
    let fabric = fabric(&transports.split(',').collect::<Vec<_>>(), device)?;
    Some(attach(stream, &fabric, LaneId(1), "ucx", Instant::now() + LIMIT).expect("a lane"))
}

#[test]
#[ignore = "the child of the tests below"]
fn role_carries_until_it_is_killed() {
    let Ok(told) = std::env::var(PARENT) else { return };
    let [address, transports, device, way] = told.split(' ').collect::<Vec<_>>().try_into().expect("four words");
    let stream = TcpStream::connect(address).expect("connect");
    let mut lane = lane(stream, transports, Some(device).filter(|name| !name.is_empty())).expect("UCX");
    let mut traffic = Traffic::new(way != "in");
    let mut told = false;
    // Until it is killed, or its parent is no more.
    while lane.poll(&mut traffic, 1 << 20, true).is_ok() {
        let stats = lane.stats();
        if !told && stats.rx_bytes + stats.tx_bytes > 4 << 20 {
            println!("\ncarries");
            told = true;
        }
    }
}

struct Doomed(Child);

impl Drop for Doomed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Kills a peer in the middle of payloads that go to it (`in`), come from it (`out`), or both; the lane must say so.
fn killed(transports: &str, device: &str, way: &str) {
    let named = Some(device).filter(|name| !name.is_empty());
    if fabric(&transports.split(',').collect::<Vec<_>>(), named).is_none() {
        return;
    }
    let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
    let address = listener.local_addr().expect("bound");
    let child = Command::new(std::env::current_exe().expect("this test"))
        .args(["role_carries_until_it_is_killed", "--exact", "--ignored", "--nocapture"])
        .env(PARENT, format!("{address} {transports} {device} {way}"))
        .stdout(Stdio::piped())
        .spawn()
        .expect("spawn");
    let mut child = Doomed(child);
    let mut lines = BufReader::new(child.0.stdout.take().expect("piped")).lines();
    let mut lane = lane(listener.accept().expect("accept").0, transports, named).expect("UCX");
    let mut traffic = Traffic::new(way != "out");
    let killer = std::thread::spawn(move || {
        assert!(lines.any(|line| line.is_ok_and(|line| line == "carries")), "the child has ended early");
        child.0.kill().expect("kill");
        child.0.wait().expect("wait");
    });
    let mut died = None;
    let error = loop {
        if let Err(error) = lane.poll(&mut traffic, 1 << 20, true) {
            break error;
        }
        if killer.is_finished() {
            let since = died.get_or_insert_with(Instant::now).elapsed();
            assert!(since < LIMIT, "{transports}, {way}: no error after {since:?}");
        }
    };
    killer.join().expect("the child carried until it was killed");
    assert!(matches!(error, LaneError::Closed(_) | LaneError::Down(_)), "{transports}, {way}: {error}");
}

#[test]
fn a_killed_peer_ends_a_lane_over_tcp() {
    ["in", "out", "both"].iter().for_each(|way| killed("tcp", "lo", way));
}

#[test]
fn a_killed_peer_ends_a_lane_over_shared_memory() {
    killed("posix", "", "both");
    killed("sysv", "", "both");
}

#[test]
fn a_killed_peer_ends_a_lane_over_single_copies() {
    ["in", "out", "both"].iter().for_each(|way| killed("posix,sysv,cma", "", way));
}
