//! [`Place::Wait`](crate::Place::Wait): the sink has no place for a payload yet.

use crate::LaneError;

use super::cap;
use super::harness::{End, HELD, PLAIN, drive};

/// Enough of them together to fill whatever buffers there are.
const LARGE: usize = 2 << 20;

/// Polls both until nothing moves, and nothing is left that a lane sends before its owner sleeps.
fn settle(a: &mut End, b: &mut End) {
    let mut quiet = 0;
    while quiet < 50 {
        let moved = a.step(1 << 20) | b.step(1 << 20) | a.sleepy_step() | b.sleepy_step();
        quiet = if moved { 0 } else { quiet + 1 };
    }
}

pub(super) fn head(mut a: End, mut b: End) {
    let large = cap(&a, LARGE);
    let sizes = [500, cap(&a, 300_000), 100, large, 0, 7];
    b.sink.hold = true;
    for (seq, len) in sizes.iter().enumerate() {
        a.queue(if seq % 2 == 1 { HELD } else { PLAIN }, seq as u32, *len);
    }
    for seq in 0..20 {
        b.queue(PLAIN, seq, 1000);
    }
    drive(&mut a, &mut b, 1 << 20, |a, b| a.is_through(20) && b.all_sent() && b.sink.asked > 0);
    settle(&mut a, &mut b);
    assert_eq!(b.heads(), 1, "{}: heads while one waits", b.label);
    let before = b.sink.asked;
    for probe in [true, false, true, false] {
        assert_eq!(b.try_step(1 << 20, probe), Ok(false), "{}: waiting is not moving", b.label);
    }
    assert_eq!(b.sink.asked, before + 4, "{}: asked again at each poll, once", b.label);
    b.queue(PLAIN, 20, 64);
    drive(&mut a, &mut b, 1 << 20, |a, _| a.is_through(21));
    assert_eq!(b.heads(), 1, "{}: heads while one waits", b.label);
    for heads in [3, 5, 6] {
        let asked = b.sink.asked;
        b.sink.hold = false;
        while b.heads() < heads - 1 {
            a.step(4096);
            b.step(1);
        }
        b.sink.hold = true;
        if heads < 6 {
            drive(&mut a, &mut b, 1 << 20, |_, b| b.sink.asked > asked || b.heads() > heads);
        }
    }
    b.sink.hold = false;
    drive(&mut a, &mut b, 1 << 20, |a, b| a.all_sent() && b.is_through(sizes.len()));
    b.expect_intact(0, &sizes);
}

pub(super) fn asleep(mut a: End, mut b: End) {
    if a.lane.fd().is_none() || b.lane.fd().is_none() {
        eprintln!("{}: skipped: no descriptor to sleep on", a.label);
        return;
    }
    let large = cap(&a, LARGE);
    b.sink.hold = true;
    a.queue(HELD, 0, large);
    for seq in 1..6 {
        a.queue(PLAIN, seq, large);
    }
    b.watch();
    a.watch();
    drive(&mut a, &mut b, 1 << 20, |_, b| b.sink.asked > 0);
    settle(&mut a, &mut b);
    assert!(b.lane.arm(), "{}: what waits keeps nobody awake", b.label);
    b.lane.disarm();
    b.sink.hold = false;
    // Nothing new has come since: that the head is asked for again must not need it.
    std::thread::scope(|scope| {
        scope.spawn(|| a.sleep_until(|end| end.all_sent()));
        b.sleep_until(|end| end.is_through(6));
    });
    b.expect_intact(0, &[large; 6]);
}

pub(super) fn closed(mut a: End, mut b: End) {
    b.sink.hold = true;
    a.queue(PLAIN, 0, 1000);
    a.queue(HELD, 1, 1000);
    a.queue(PLAIN, 2, 1000);
    while !a.all_sent() {
        a.step(1 << 20);
    }
    drop(a);
    b.lane.ready(true, true); // the end can be seen by now, behind what waits
    while b.sink.asked < 100 {
        b.step(1 << 20);
    }
    b.queue(PLAIN, 0, 10);
    for _ in 0..10 {
        b.step(1 << 20);
    }
    assert!(b.lane.arm(), "{}: what waits keeps nobody awake", b.label);
    b.lane.disarm();
    b.sink.hold = false;
    match b.poll_to_the_end() {
        LaneError::Closed(_) | LaneError::Down(_) => {}
        other => panic!("{}: closed by the peer, yet {other:?}", b.label),
    }
    b.expect_intact(0, &[1000; 3]);
}
