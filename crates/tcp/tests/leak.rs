//! No file descriptor leaks. A test binary of its own, because it counts the descriptors of its process.

mod common;

use std::io::Write;
use std::time::Instant;

use common::{Keeper, PATIENCE, binding, lane, lane_and_socket, poll_to_error, streams};
use crossrail_tcp::{LinkWatch, dial, listen};

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("proc").count()
}

#[test]
fn no_descriptor_stays_open() {
    let before = open_descriptors();
    for _ in 0..50 {
        let (dialled, accepted) = streams("127.0.0.1", "127.0.0.1");
        drop((lane(dialled), lane(accepted)));
        let (mut broken, mut peer) = lane_and_socket();
        peer.write_all(&[0xFF; 64]).expect("connected");
        poll_to_error(&mut broken, &mut Keeper::default());
        let refused = listen(&binding("127.0.0.1"), 0).expect("listen").local_addr().expect("bound");
        dial(None, refused, Instant::now() + PATIENCE).expect_err("it is closed");
        listen(&binding("198.51.100.7"), 0).expect_err("not our address");
        drop(LinkWatch::new().expect("netlink"));
    }
    assert_eq!(open_descriptors(), before);
}
