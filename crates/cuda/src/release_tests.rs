use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::ThreadId;

use super::*;
use crate::deferred::Deferred;

const LONG: Duration = Duration::from_secs(20);

/// Reports the thread that drops it; the drop waits for the gate, if there is one.
struct Reporter(Sender<ThreadId>, Option<Receiver<()>>);

impl Drop for Reporter {
    fn drop(&mut self) {
        if let Some(gate) = &self.1 {
            let _ = gate.recv();
        }
        let _ = self.0.send(std::thread::current().id());
    }
}

fn deferred(value: Reporter, timing: Timing, thread: &Arc<ReleaseThread>) -> Deferred<Reporter> {
    Deferred::with_timing(value, timing, Arc::clone(thread))
}

#[test]
fn values_are_dropped_on_the_release_thread_without_blocking_the_owner() {
    let (thread, (report, drops), (open, gate)) = (Arc::new(ReleaseThread::new(None)), channel(), channel());
    drop(deferred(Reporter(report.clone(), Some(gate)), Timing::WhenIdle, &thread));
    drop(deferred(Reporter(report, None), Timing::Immediate, &thread));
    assert!(!thread.wait_until_empty(Duration::from_millis(20)));
    open.send(()).expect("the drop waits");
    assert!(thread.wait_until_empty(LONG));
    let threads: Vec<ThreadId> = drops.iter().collect();
    assert!(threads.len() == 2 && threads.iter().all(|thread| *thread != std::thread::current().id()));
}

#[test]
fn only_blocking_releases_are_deferred_while_a_stream_waits() {
    let (thread, (report, drops), (soon, others)) = (Arc::new(ReleaseThread::new(None)), channel(), channel());
    let waits = Arc::new(AtomicBool::new(true));
    let (asked, gone) = (Arc::clone(&waits), Arc::new(()));
    thread.add_probe(Arc::new(move || Some(asked.load(Ordering::Relaxed))));
    let weak = Arc::downgrade(&gone);
    thread.add_probe(Arc::new(move || weak.upgrade().map(|_| true)));
    drop(deferred(Reporter(report, None), Timing::WhenIdle, &thread));
    drop(deferred(Reporter(soon, None), Timing::Immediate, &thread));
    others.recv_timeout(LONG).expect("immediate releases are not deferred");
    assert!(!thread.wait_until_empty(LONG), "reports deferred releases at once");
    assert!(thread.has_waiting_stream());
    waits.store(false, Ordering::Relaxed);
    assert!(drops.recv_timeout(Duration::from_millis(200)).is_err(), "the other stream still waits");
    drop(gone);
    drops.recv_timeout(LONG).expect("no stream waits any more");
    assert!(thread.wait_until_empty(LONG));
    assert!(!thread.has_waiting_stream());
    assert_eq!(thread.0.locked().probes.len(), 1, "a finished probe is removed");
}

#[test]
fn no_blocking_release_starts_during_a_pause() {
    let (thread, (report, drops)) = (Arc::new(ReleaseThread::new(None)), channel());
    let waits = Arc::new(AtomicBool::new(false));
    let asked = Arc::clone(&waits);
    thread.add_probe(Arc::new(move || Some(asked.load(Ordering::Relaxed))));
    let pause = thread.pause(LONG);
    drop(deferred(Reporter(report.clone(), None), Timing::WhenIdle, &thread));
    assert!(drops.recv_timeout(Duration::from_millis(50)).is_err(), "releases are paused");
    // The enqueued work waits from now on.
    waits.store(true, Ordering::Relaxed);
    drop(pause);
    assert!(drops.recv_timeout(Duration::from_millis(120)).is_err(), "a stream waits");
    waits.store(false, Ordering::Relaxed);
    drops.recv_timeout(LONG).expect("no stream waits any more");
    // It was told from within the call, which may go on for a moment: the next one is meant below.
    drop(thread.pause(LONG));

    // A pause waits for a call in progress, but no longer than the limit.
    let ((open, gate), short) = (channel(), Duration::from_millis(20));
    drop(deferred(Reporter(report, Some(gate)), Timing::WhenIdle, &thread));
    let started = Instant::now();
    while !thread.0.locked().in_blocking_call {
        assert!(started.elapsed() < LONG);
        std::thread::yield_now();
    }
    let started = Instant::now();
    drop(thread.pause(short));
    assert!(started.elapsed() >= short);
    let opener = std::thread::spawn(move || open.send(()).expect("the drop waits"));
    drop(thread.pause(LONG));
    assert!(!thread.0.locked().in_blocking_call, "the pause waited for the call");
    opener.join().expect("opened");
    drops.recv_timeout(LONG).expect("dropped");
}

#[test]
fn the_thread_ends_with_the_last_user_and_drops_everything() {
    let (report, drops) = channel();
    let thread = Arc::new(ReleaseThread::new(None));
    let queue = Arc::downgrade(&thread.0);
    thread.add_probe(Arc::new(|| Some(true)));
    // The value holds the last reference to the thread, as memory does to its context.
    let (own, value) = (Arc::clone(&thread), Reporter(report, None));
    drop(Deferred::with_timing((value, own), Timing::Immediate, thread));
    drops.recv_timeout(LONG).expect("dropped");
    let started = Instant::now();
    while queue.upgrade().is_some() {
        assert!(started.elapsed() < LONG, "the thread did not end");
        std::thread::yield_now();
    }
}
