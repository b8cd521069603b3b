//! Lanes that are dropped at any stage, and peers that are killed: UCX asserts what it believes of its own state, and
//! ends the process if that is not so.

mod common;

use std::time::{Duration, Instant};

use common::{LIMIT, fabric, pair, streams};
use crossrail_transport::conformance;
use crossrail_types::{ErrorKind, LaneId};
use crossrail_ucx::attach;

/// UCX's transports, and the device of each.
const TRANSPORTS: [(&[&str], Option<&str>); 6] = [
    (&["tcp"], Some("lo")),
    (&["posix"], None),
    (&["sysv"], None),
    (&["posix", "cma"], None),
    (&["posix", "sysv", "cma"], None),
    (&["tcp", "cma"], Some("lo")),
];

#[test]
fn lanes_are_dropped_at_any_stage() {
    // Seeds 1021 and 2008 once ended the process. CROSSRAIL_TEST_ENDINGS=FROM:COUNT runs others, and more.
    let given = std::env::var("CROSSRAIL_TEST_ENDINGS").unwrap_or("1021:4 2008:1".to_owned());
    let ranges = given.split(' ').map(|range| {
        let (first, count) = range.split_once(':').expect("FROM:COUNT");
        let (first, count): (u64, u64) = (first.parse().expect("a seed"), count.parse().expect("a count"));
        first..first + count
    });
    let seeds: Vec<_> = ranges.collect();
    for (transports, device) in TRANSPORTS {
        let Some(fabric) = fabric(transports, device) else { return };
        for seeds in &seeds {
            conformance::run_endings(&format!("ucx:{}", transports.join(",")), seeds.clone(), &mut || {
                let (a, b) = pair(&fabric);
                (Box::new(a), Box::new(b))
            });
        }
    }
}

#[test]
fn joining_is_given_up_at_any_stage() {
    for (transports, device) in TRANSPORTS {
        let Some(fabric) = fabric(transports, device) else { return };
        // Where it connects by sockets, moments matter.
        let few = [0, 100, 1000, 3000, 10_000];
        let given: Vec<u64> = if device.is_some() { (0..60).map(|step| step * 50).collect() } else { few.to_vec() };
        for micros in given {
            let (here, there) = streams();
            let deadline = Instant::now() + Duration::from_micros(micros);
            std::thread::scope(|scope| {
                scope.spawn(|| attach(there, &fabric, LaneId(2), "ucx", deadline).map(drop));
                let joined = attach(here, &fabric, LaneId(1), "ucx", Instant::now() + LIMIT);
                // The other end has given it up, or was in time.
                if let Err(error) = joined {
                    assert_ne!(error.kind, ErrorKind::Timeout, "{transports:?}, {micros} us: {error}");
                }
            });
        }
    }
}
