//! No file descriptor leaks. A test binary of its own, because it counts the descriptors of its process.

mod common;

use std::time::Instant;

use common::{LIMIT, fabric, pair, streams};
use crossrail_transport::{Lane, Payload, Place, Sink, Tx};
use crossrail_types::{ErrorKind, Head, LaneId};
use crossrail_ucx::{UcxLane, attach};

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("proc").count()
}

/// Sends payloads, or receives them, one behind the other.
struct Endless(Vec<u8>);

impl Sink for Endless {
    fn next(&mut self, _lane: LaneId) -> Option<Tx> {
        let payload = Payload { ptr: self.0.as_ptr(), len: self.0.len(), ..Payload::EMPTY };
        Some(Tx { head: Head::new(1, self.0.len() as u32), payload, token: 0 })
    }
    fn sent(&mut self, _lane: LaneId, _token: u64) {}
    fn place(&mut self, _lane: LaneId, _head: &Head) -> Place {
        Place::Into { dst: self.0.as_mut_ptr(), len: self.0.len(), grant: None, token: 0 }
    }
    fn placed(&mut self, _lane: LaneId, _token: u64) {}
}

/// Polls both ends, each of which sends, until either has received `bytes`.
fn exchange(ends: &mut [(UcxLane, Endless); 2], bytes: u64) {
    let deadline = Instant::now() + LIMIT;
    while ends.iter().all(|(lane, _)| lane.stats().rx_bytes < bytes) {
        for (lane, sink) in &mut *ends {
            lane.poll(sink, 1 << 20, true).expect("both live");
        }
        assert!(Instant::now() < deadline, "nothing arrives");
    }
}

/// Drops both ends in mid-payload, after so many bytes, and checks that UCX touches their memory no more.
fn lose(fabric: &std::sync::Arc<crossrail_ucx::Fabric>, bytes: u64) {
    let (a, b) = pair(fabric);
    let mut ends = [(a, Endless(vec![1; 64 << 20])), (b, Endless(vec![2; 64 << 20]))];
    exchange(&mut ends, bytes);
    let [(a, mut of_a), (b, of_b)] = ends;
    drop(a);
    of_a.0.fill(3);
    drop(b);
    assert!(of_a.0.iter().all(|&byte| byte == 3), "written after the end of its lane");
    assert!(of_b.0.iter().all(|&byte| byte != 3), "sent after the end of its lane");
}

#[test]
fn no_descriptor_stays_open() {
    let Some(over_tcp) = fabric(&["tcp"], Some("lo")) else { return };
    drop(pair(&over_tcp));
    let before = open_descriptors();
    (0..4).for_each(|at| lose(&over_tcp, (3 << 20) + at * 700_001));
    assert_eq!(open_descriptors(), before, "after lanes lost in mid-payload");
    for (transports, device) in [(&["tcp"][..], Some("lo")), (&["posix", "sysv", "cma"][..], None)] {
        let Some(fabric) = fabric(transports, device) else { return };
        drop(pair(&fabric));
        let before = open_descriptors();
        for _ in 0..10 {
            drop(pair(&fabric));
            // A peer that closes, and one that introduces itself otherwise.
            let (here, there) = streams();
            drop(there);
            attach(here, &fabric, LaneId(1), "ucx", Instant::now() + LIMIT).expect_err("nobody is there");
            let (here, mut there) = streams();
            std::io::Write::write_all(&mut there, b"GET / HTTP/1.1\r\n\r\n").expect("connected");
            let error = attach(here, &fabric, LaneId(1), "ucx", Instant::now() + LIMIT).expect_err("another protocol");
            assert_eq!(error.kind, ErrorKind::Protocol, "{error}");
        }
        assert_eq!(open_descriptors(), before, "{transports:?}");
    }
}
