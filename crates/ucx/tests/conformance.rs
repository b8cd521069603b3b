//! The conformance suite of crossrail-transport, over UCX's own transports, and what joining promises.

mod common;

use std::time::Instant;

use common::{fabric, pair, streams};
use crossrail_transport::conformance;
use crossrail_types::{ErrorKind, LaneId};
use crossrail_ucx::attach;

#[test]
fn tcp() {
    let Some(fabric) = fabric(&["tcp"], Some("lo")) else { return };
    conformance::run("ucx:tcp", &mut || {
        let (a, b) = pair(&fabric);
        assert_eq!((a.selected(), b.selected()), ("tcp/lo", "tcp/lo"));
        (Box::new(a), Box::new(b))
    });
}

#[test]
fn posix() {
    let Some(fabric) = fabric(&["posix"], None) else { return };
    conformance::run("ucx:posix", &mut || {
        let (a, b) = pair(&fabric);
        assert_eq!(a.selected(), "posix/memory");
        (Box::new(a), Box::new(b))
    });
}

#[test]
fn memory_with_single_copies() {
    let Some(fabric) = fabric(&["posix", "sysv", "cma"], None) else { return };
    conformance::run("ucx:posix,sysv,cma", &mut || {
        let (a, b) = pair(&fabric);
        (Box::new(a), Box::new(b))
    });
}

#[test]
fn joining_ends_at_its_deadline() {
    let Some(fabric) = fabric(&["tcp"], Some("lo")) else { return };
    let (here, _silent) = streams();
    let error = attach(here, &fabric, LaneId(1), "ucx", Instant::now()).expect_err("nobody answers");
    assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
}
