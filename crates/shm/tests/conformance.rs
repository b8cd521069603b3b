//! The suite that every backend runs.

mod common;

use crossrail_shm::Options;

#[test]
fn shared_memory_lanes_conform() {
    crossrail_transport::conformance::run("shm", &mut || {
        let (a, b) = common::pair(&Options::default());
        (Box::new(a), Box::new(b))
    });
}

#[test]
fn smallest_rings_conform() {
    crossrail_transport::conformance::run("shm, smallest rings", &mut || {
        let (a, b) = common::pair(&Options { ring_bytes: 0, cma: false });
        (Box::new(a), Box::new(b))
    });
}

#[test]
fn shared_memory_lanes_end_at_any_stage() {
    crossrail_transport::conformance::run_endings("shm", 0..12, &mut || {
        let (a, b) = common::pair(&Options::default());
        (Box::new(a), Box::new(b))
    });
}
