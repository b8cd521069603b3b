//! Two real processes: killed, in PID namespaces of their own, and without permission to ptrace.

mod common;

use std::io::{BufRead, BufReader};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;
use std::time::{Duration, Instant};

use common::{Keeper, child, exercise, join, listener, post, sleep, socket_of_parent};
use crossrail_shm::{Arena, Options, ShmLane, Side};
use crossrail_transport::conformance::skip;
use crossrail_transport::{Lane, LaneError};

const FRAMES: usize = 300;

fn connect() -> Option<(ShmLane, std::sync::Arc<Arena>)> {
    let stream = UnixStream::connect_addr(&socket_of_parent()?).expect("connect");
    let arena = Arena::new();
    Some((join(stream, Side::Connector, arena.clone(), &Options::default()), arena))
}

#[test]
#[ignore = "a child of a_killed_peer_loses_nothing_that_it_had_sent"]
fn role_sends_and_dies() {
    let Some((mut lane, _arena)) = connect() else { return };
    let mut sink = Keeper::default();
    for i in 0..FRAMES {
        post(&mut lane, &mut sink, 3, &vec![i as u8; i * 5]).expect("post");
    }
    std::process::abort();
}

#[test]
fn a_killed_peer_loses_nothing_that_it_had_sent() {
    for sleeps in [false, true] {
        let (listener, name) = listener();
        let mut child = child(&[], "role_sends_and_dies", &name).expect("spawn");
        let (stream, _) = listener.accept().expect("accept");
        let mut lane = join(stream, Side::Acceptor, Arena::new(), &Options::default());
        if !sleeps {
            // It is dead before we look for the first time.
            assert!(!child.wait().expect("wait").success());
        }
        let mut sink = Keeper::default();
        let error = loop {
            match lane.poll(&mut sink, 100_000, !sleeps) {
                Ok(moved) if sleeps && !moved => sleep(&mut lane),
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        assert!(matches!(error, LaneError::Closed(_)), "{error}");
        assert_eq!(sink.arrived.len(), FRAMES);
        for (i, (kind, payload)) in sink.arrived.iter().enumerate() {
            assert!(*kind == 3 && *payload == vec![i as u8; i * 5], "frame {i}");
        }
        let status = child.wait().expect("wait");
        assert!(!status.success(), "{status}");
    }
}

#[test]
#[ignore = "a child of a_lane_ends_when_the_peer_has_let_go"]
fn role_lets_go() {
    let Some((mut lane, _arena)) = connect() else { return };
    let mut sink = Keeper::default();
    post(&mut lane, &mut sink, 3, b"there").expect("post");
    // Until the other end parts, or for ever.
    while lane.poll(&mut sink, 1000, true).is_ok() {
        std::thread::yield_now();
    }
    drop(lane);
    // Alive, and done with the lane.
    std::thread::park();
}

#[test]
fn a_lane_ends_when_the_peer_has_let_go() {
    const LONG: Duration = Duration::from_secs(20);
    let (mut a, b) = common::pair(&Options::default());
    assert!(!a.close_and_wait(Duration::from_millis(20)), "the other end is open");
    drop(b);
    assert!(a.close_and_wait(LONG));

    for dies in [true, false] {
        let (listener, name) = listener();
        let mut child = child(&[], "role_lets_go", &name).expect("spawn");
        let (stream, _) = listener.accept().expect("accept");
        let mut lane = join(stream, Side::Acceptor, Arena::new(), &Options::default());
        let mut sink = Keeper::default();
        common::hear(&mut lane, &mut sink).expect("a frame");
        if dies {
            child.kill().expect("kill");
        }
        let began = Instant::now();
        assert!(lane.close_and_wait(LONG), "dies: {dies}");
        assert!(began.elapsed() < LONG / 2, "dies: {dies}");
        assert_eq!(child.try_wait().expect("wait").is_some(), dies, "it has ended, or lives on");
        let _ = child.kill();
        child.wait().expect("wait");
    }
}

#[test]
#[ignore = "a child of pid_namespaces_of_their_own_do_not_matter"]
fn role_accepts() {
    let Some(address) = socket_of_parent() else { return };
    let listener = UnixListener::bind_addr(&address).expect("bind");
    println!("\nlistening");
    let (stream, _) = listener.accept().expect("accept");
    let arena = Arena::new();
    let mut lane = join(stream, Side::Acceptor, arena.clone(), &Options::default());
    expect_no_cma(&lane);
    exercise(&mut lane, &arena, false);
}

#[test]
#[ignore = "a child of pid_namespaces_of_their_own_do_not_matter"]
fn role_connects() {
    let Some((mut lane, arena)) = connect() else { return };
    expect_no_cma(&lane);
    exercise(&mut lane, &arena, true);
}

fn expect_no_cma(lane: &ShmLane) {
    let report = lane.report();
    assert!(report.cma_pull.as_ref().is_err_and(|why| why.contains("PID namespace")), "{report:?}");
    assert!(report.cma_push.is_err(), "{report:?}");
}

#[test]
fn pid_namespaces_of_their_own_do_not_matter() {
    const UNSHARE: [&str; 4] = ["unshare", "--pid", "--fork", "--kill-child"];
    if !Command::new("unshare").args(&UNSHARE[1..]).arg("true").status().is_ok_and(|status| status.success()) {
        return skip("unshare --pid is not permitted here");
    }
    let (_, name) = listener();
    let mut acceptor = child(&UNSHARE, "role_accepts", &name).expect("spawn");
    let mut lines = BufReader::new(acceptor.stdout.take().expect("piped")).lines();
    assert!(lines.any(|line| line.is_ok_and(|line| line == "listening")), "the acceptor died");
    let mut connector = child(&UNSHARE, "role_connects", &name).expect("spawn");
    assert!(connector.wait().expect("wait").success());
    lines.for_each(drop);
    assert!(acceptor.wait().expect("wait").success());
}

#[test]
#[ignore = "a child of a_peer_without_ptrace_permission_is_told_so_and_works"]
fn role_is_nobody() {
    let Some((mut lane, arena)) = connect() else { return };
    let report = lane.report();
    assert!(report.cma_pull.as_ref().is_err_and(|why| why.contains("ptrace permission")), "{report:?}");
    assert!(report.cma_push.is_err(), "{report:?}");
    exercise(&mut lane, &arena, true);
}

#[test]
fn a_peer_without_ptrace_permission_is_told_so_and_works() {
    const NOBODY: [&str; 5] = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"];
    let own = std::env::current_exe().expect("this test");
    let may = Command::new("setpriv").args(&NOBODY[1..]).arg(own).arg("--list").output();
    if !may.is_ok_and(|output| output.status.success()) {
        return skip("cannot run as another user here (needs root and setpriv)");
    }
    let (listener, name) = listener();
    let mut child = child(&NOBODY, "role_is_nobody", &name).expect("spawn");
    let (stream, _) = listener.accept().expect("accept");
    let arena = Arena::new();
    let mut lane = join(stream, Side::Acceptor, arena.clone(), &Options::default());
    exercise(&mut lane, &arena, false);
    assert!(child.wait().expect("wait").success());
}
