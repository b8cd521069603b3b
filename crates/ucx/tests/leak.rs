//! No file descriptor leaks. A test binary of its own, because it counts the descriptors of its process.

mod common;

use std::time::Instant;

use common::{LIMIT, fabric, pair, streams};
use crossrail_types::{ErrorKind, LaneId};
use crossrail_ucx::attach;

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("proc").count()
}

#[test]
fn no_descriptor_stays_open() {
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
