//! Callbacks of requests that close the worker they run on, or do not return.

use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crossrail::{ConnectOptions, Context, Settings, Worker, WorkerOptions, close_all};

const LIMIT: Duration = Duration::from_secs(120);
const SIZE: usize = 8 << 20;
/// Lanes under the worker's lock, and outside it: polled by the worker's thread, and by threads of their own.
const WAYS: [&[(&str, &str)]; 3] = [
    &[("CROSSRAIL_TLS", "shm")],
    &[("CROSSRAIL_TLS", "tcp"), ("CROSSRAIL_NET_DEVICES", "127.0.0.1,127.0.0.2"), ("CROSSRAIL_IO_THREADS", "1")],
    &[("CROSSRAIL_TLS", "tcp"), ("CROSSRAIL_NET_DEVICES", "127.0.0.1,127.0.0.2"), ("CROSSRAIL_IO_THREADS", "2")],
];

fn worker(settings: &[(&str, &str)]) -> Worker {
    let context = Context::new(Settings::from_pairs(settings.iter().copied()).unwrap()).unwrap();
    Worker::new(&context, WorkerOptions::default()).unwrap()
}

/// Runs `callback` on a thread of the worker that receives, as that of a receive. What it returns is received.
fn called_back<T: Send + 'static>(
    worker_of: &Worker,
    from: &Worker,
    callback: impl FnOnce() -> T + Send + 'static,
) -> Receiver<T> {
    let (tell, told) = channel();
    let to = from.connect(&worker_of.address(), &ConnectOptions::default()).unwrap();
    let receive = worker_of.recv(vec![0; SIZE], 1, u64::MAX, None).unwrap();
    receive.on_complete(move |result| {
        result.unwrap();
        let _ = tell.send(callback());
    });
    let send = to.send(vec![1; SIZE], 1).unwrap();
    // It may end with the worker that receives.
    std::thread::spawn(move || send.wait(Some(LIMIT)).is_ok());
    told
}

#[test]
fn a_callback_may_close_its_worker() {
    for way in WAYS {
        let (a, b) = (worker(way), worker(way));
        let closed = called_back(&b, &a, {
            let b = b.clone();
            move || b.close().unwrap()
        });
        closed.recv_timeout(LIMIT).unwrap_or_else(|_| panic!("{way:?}: the callback did not return"));
    }
}

/// Ten seconds pass, for all ways at once.
#[test]
fn a_callback_that_does_not_return_keeps_no_worker_open() {
    std::thread::scope(|scope| WAYS.iter().for_each(|way| drop(scope.spawn(|| check_close_without_callback(way)))));
}

fn check_close_without_callback(way: &[(&str, &str)]) {
    let (a, b) = (worker(way), worker(way));
    let (begin, begun) = channel();
    let (release, released) = channel::<()>();
    let ended = called_back(&b, &a, move || {
        begin.send(()).unwrap();
        released.recv()
    });
    begun.recv_timeout(LIMIT).unwrap_or_else(|_| panic!("{way:?}: nothing was received"));
    let (tell, closed) = channel();
    std::thread::spawn(move || {
        b.close().unwrap();
        tell.send(()).unwrap();
    });
    closed.recv_timeout(LIMIT).unwrap_or_else(|_| panic!("{way:?}: the worker did not close"));
    release.send(()).unwrap_or_else(|_| panic!("{way:?}: the callback was over"));
    ended.recv_timeout(LIMIT).unwrap_or_else(|_| panic!("{way:?}: its thread did not end")).unwrap();
}

/// As at the end of a process, which closes all its workers: they wait for callbacks together, not one after the other.
#[test]
fn callbacks_that_do_not_return_keep_many_workers_open_no_longer_than_one() {
    let from = worker(WAYS[0]);
    let (release, workers): (Vec<_>, Vec<_>) = (0..4)
        .map(|_| {
            let to = worker(WAYS[0]);
            let (begin, begun) = channel();
            let (release, released) = channel::<()>();
            called_back(&to, &from, move || {
                begin.send(()).unwrap();
                released.recv()
            });
            begun.recv_timeout(LIMIT).expect("nothing was received");
            (release, to)
        })
        .unzip();
    let began = Instant::now();
    close_all(workers.iter());
    assert!(began.elapsed() < Duration::from_secs(20), "closing took {:?}", began.elapsed());
    drop(release);
}
