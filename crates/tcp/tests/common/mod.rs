//! Connections and a sink for the tests of single lanes.
#![allow(dead_code, unreachable_pub)] // each test binary uses a part of this

use std::collections::VecDeque;
use std::net::{IpAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_tcp::{Binding, Options, TcpLane, dial, listen};
use crossrail_transport::{Lane, LaneError, Loan, Payload, Place, Sink, Tx};
use crossrail_types::{Head, LaneId};

pub const PATIENCE: Duration = Duration::from_secs(5);

pub fn binding(address: &str) -> Binding {
    Binding { device: None, address: address.parse::<IpAddr>().expect("an address") }
}

/// Connects two local addresses; returns the (dialled, accepted) streams.
pub fn streams(from: &str, to: &str) -> (TcpStream, TcpStream) {
    let listener = listen(&binding(to), 0).expect("listen");
    let port = listener.local_addr().expect("bound");
    let dialled = dial(Some(&binding(from)), port, Instant::now() + PATIENCE).expect("dial");
    (dialled, listener.accept().expect("accept").0)
}

pub fn lane(stream: TcpStream) -> TcpLane {
    TcpLane::new(stream, LaneId(1), "tcp/test".into(), &Options::default()).expect("options")
}

/// A lane, and the plain socket of its peer.
pub fn lane_and_socket() -> (TcpLane, TcpStream) {
    let (dialled, accepted) = streams("127.0.0.1", "127.0.0.1");
    (lane(accepted), dialled)
}

/// A sink that accepts every frame and keeps completed payloads.
#[derive(Default)]
pub struct Keeper {
    pub queue: VecDeque<Tx>,
    pub grant: Option<Arc<Loan>>,
    pub places: Vec<Vec<u8>>,
    pub placed: usize,
    pub sent: usize,
}

impl Sink for Keeper {
    fn next(&mut self, _: LaneId) -> Option<Tx> {
        self.queue.pop_front()
    }

    fn sent(&mut self, _: LaneId, _: u64) {
        self.sent += 1;
    }

    fn place(&mut self, _: LaneId, head: &Head) -> Place {
        // At most 1 MiB per destination, because a peer chooses the length.
        let len = (head.payload_len() as usize).min(1 << 20);
        self.places.push(vec![0; len]);
        let dst = self.places.last_mut().expect("just pushed").as_mut_ptr();
        Place::Into { dst, len, grant: self.grant.clone(), token: 0 }
    }

    fn placed(&mut self, _: LaneId, _: u64) {
        self.placed += 1;
    }
}

/// Polls until `done`; fails the test after a deadline.
pub fn poll_until(lane: &mut dyn Lane, sink: &mut Keeper, mut done: impl FnMut(&Keeper) -> bool) {
    let start = Instant::now();
    while !done(sink) {
        lane.poll(sink, 1 << 20, true).expect("a lane that works");
        assert!(start.elapsed() < PATIENCE, "no result within the deadline");
    }
}

/// Polls until the lane fails.
pub fn poll_to_error(lane: &mut dyn Lane, sink: &mut Keeper) -> LaneError {
    let start = Instant::now();
    loop {
        if let Err(error) = lane.poll(sink, 1 << 20, true) {
            return error;
        }
        assert!(start.elapsed() < PATIENCE, "no error within the deadline");
    }
}

/// A frame's bytes on the wire.
pub fn wire(payload: &[u8]) -> Vec<u8> {
    let mut bytes = Head::new(1, payload.len() as u32).0.to_vec();
    bytes.extend(payload);
    bytes
}

/// A frame that sends `payload`.
pub fn frame(payload: &[u8]) -> Tx {
    let head = Head::new(1, payload.len() as u32);
    Tx { head, payload: Payload { ptr: payload.as_ptr(), len: payload.len(), ..Payload::EMPTY }, token: 7 }
}
