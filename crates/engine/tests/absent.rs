//! A receiver that posts its receives and then does something else: its messages must not wait until it comes back.

use std::time::{Duration, Instant};

use crossrail::{ConnectOptions, Context, Endpoint, Settings, Worker, WorkerOptions};

const LIMIT: Option<Duration> = Some(Duration::from_secs(20));
/// The background thread's longest sleep is twice that.
const AT_ONCE: Duration = Duration::from_millis(50);
const SIZES: [usize; 2] = [1000, 3 << 20];

struct Pair {
    a: Worker,
    b: Worker,
    ab: Endpoint,
    _ba: Endpoint,
}

fn pair_of(pairs: &[(&str, &str)], options: impl Fn() -> WorkerOptions) -> Pair {
    let context = || Context::new(Settings::from_pairs(pairs.iter().copied()).unwrap()).unwrap();
    let a = Worker::new(&context(), options()).unwrap();
    let b = Worker::new(&context(), options()).unwrap();
    let (ab, ba) = std::thread::scope(|scope| {
        let accepted = scope.spawn(|| b.accept(LIMIT).unwrap());
        let ab = a.connect(&b.address(), &ConnectOptions::default()).unwrap();
        (ab, accepted.join().unwrap())
    });
    Pair { a, b, ab, _ba: ba }
}

/// One after the other: what is measured is how long others sleep.
fn each(options: impl Fn() -> WorkerOptions, mut body: impl FnMut(&str, Pair)) {
    static ONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _alone = ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    const RAILS: (&str, &str) = ("CROSSRAIL_NET_DEVICES", "127.0.0.1,127.0.0.2");
    for (name, settings) in [
        ("shm", vec![("CROSSRAIL_TLS", "shm")]),
        ("tcp", vec![("CROSSRAIL_TLS", "tcp")]),
        ("tcp x 2, io threads", vec![("CROSSRAIL_TLS", "tcp"), RAILS, ("CROSSRAIL_IO_THREADS", "2")]),
    ] {
        body(name, pair_of(&settings, &options));
    }
}

/// The fastest of five: other processes may be in the way now and then, an omission always is.
fn fastest(mut once: impl FnMut() -> Duration) -> Duration {
    (0..5).map(|_| once()).min().unwrap_or_default()
}

#[test]
fn a_posted_receive_finishes_while_its_caller_is_elsewhere() {
    each(WorkerOptions::default, |transport, pair| {
        for size in SIZES {
            let took = fastest(|| {
                let receive = pair.b.recv(vec![0; size], 1, u64::MAX, None).unwrap();
                let began = Instant::now();
                pair.ab.send(vec![7; size], 1).unwrap().wait(LIMIT).unwrap();
                let took = began.elapsed();
                receive.wait(LIMIT).unwrap();
                took
            });
            assert!(took < AT_ONCE, "{transport}, {size} bytes: the sender heard of it after {took:?}");
        }
    });
}

#[test]
fn a_message_that_came_first_is_confirmed_when_its_receive_is_posted() {
    each(WorkerOptions::default, |transport, pair| {
        for size in SIZES {
            let took = fastest(|| {
                let send = pair.ab.send(vec![7; size], 1).unwrap();
                // Until everybody at the receiver sleeps.
                std::thread::sleep(Duration::from_millis(10));
                let receive = pair.b.recv(vec![0; size], 1, u64::MAX, None).unwrap();
                let began = Instant::now();
                send.wait(LIMIT).unwrap();
                let took = began.elapsed();
                receive.wait(LIMIT).unwrap();
                took
            });
            assert!(took < AT_ONCE, "{transport}, {size} bytes: the sender heard of it after {took:?}");
        }
    });
}

#[test]
fn a_wait_without_a_background_thread_ends_with_what_it_waits_for() {
    let options = || WorkerOptions { background: false, ..WorkerOptions::default() };
    each(options, |transport, pair| {
        for size in SIZES {
            let took = std::thread::scope(|scope| {
                fastest(|| {
                    let receive = pair.b.recv(vec![0; size], 1, u64::MAX, None).unwrap();
                    let waits = scope.spawn(move || receive.wait(LIMIT).unwrap());
                    // Until it sleeps.
                    std::thread::sleep(Duration::from_millis(10));
                    let began = Instant::now();
                    let send = pair.ab.send(vec![7; size], 1).unwrap();
                    while !waits.is_finished() {
                        assert!(began.elapsed() < LIMIT.unwrap_or_default(), "{transport}, {size} bytes");
                        pair.a.progress();
                    }
                    let took = began.elapsed();
                    while send.test().is_none() {
                        assert!(began.elapsed() < LIMIT.unwrap_or_default(), "{transport}, {size} bytes");
                        pair.b.progress();
                    }
                    took
                })
            });
            assert!(took < AT_ONCE, "{transport}, {size} bytes: it took {took:?}");
        }
    });
}

#[test]
fn a_long_message_is_confirmed_before_its_receiver_goes_on() {
    let options = || WorkerOptions { background: false, ..WorkerOptions::default() };
    each(options, |transport, pair| {
        for _ in 0..5 {
            let receive = pair.b.recv(vec![0; 3 << 20], 1, u64::MAX, None).unwrap();
            let send = pair.ab.send(vec![7; 3 << 20], 1).unwrap();
            std::thread::scope(|scope| {
                let waits = scope.spawn(move || receive.wait(LIMIT).unwrap());
                while !waits.is_finished() {
                    pair.a.progress();
                }
            });
            // The receiver works on what came, and makes no progress for others any more.
            let began = Instant::now();
            while send.test().is_none() {
                assert!(began.elapsed() < Duration::from_secs(10), "{transport}: the sender does not hear of the end");
                pair.a.progress();
            }
        }
    });
}
