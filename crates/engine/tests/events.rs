//! Waits for any of several requests and for any event, long limits, and what a panic on a worker's thread does.

use std::time::{Duration, Instant};

use crossrail::{ConnectOptions, Context, Endpoint, ErrorKind, Settings, Worker, WorkerOptions};

const LIMIT: Option<Duration> = Some(Duration::from_secs(20));
const SHORT: Option<Duration> = Some(Duration::from_millis(5));
const ANY: u64 = u64::MAX;

fn pair() -> (Worker, Worker, Endpoint, Endpoint) {
    let context = Context::new(Settings::default()).expect("a context");
    let worker = |name: &str| {
        let options = WorkerOptions { name: Some(name.to_owned()), ..WorkerOptions::default() };
        Worker::new(&context, options).expect("a worker")
    };
    let (a, b) = (worker("a"), worker("b"));
    let (to_b, to_a) = std::thread::scope(|scope| {
        let dialling = scope.spawn(|| a.connect(&b.address(), &ConnectOptions::default()));
        let accepted = b.accept(Some(Duration::MAX)).expect("a peer, whatever the limit");
        (dialling.join().expect("no panic").expect("an endpoint"), accepted)
    });
    (a, b, to_b, to_a)
}

#[test]
fn a_wait_for_any_finds_the_one_that_is_finished() {
    let (_a, b, to_b, to_a) = pair();
    let inboxes: Vec<_> = (0..4).map(|tag| b.recv(vec![0; 8], tag, ANY, Some(&to_a)).expect("a receive")).collect();
    let all: Vec<_> = inboxes.iter().collect();
    assert_eq!(b.wait_any(&all, SHORT).unwrap_err().kind, ErrorKind::Timeout);
    let sent = to_b.send(vec![1; 8], 2).expect("a message");
    assert_eq!(b.wait_any(&all, LIMIT), Ok(2));
    inboxes[2].wait(LIMIT).expect("a message");
    assert_eq!(b.wait_any(&all, LIMIT), Ok(2), "also where its outcome has been collected");
    assert_eq!(b.wait_any(&[&inboxes[0], &sent], SHORT).unwrap_err().kind, ErrorKind::Usage, "of two workers");
    assert_eq!(b.wait_any(&[], SHORT).unwrap_err().kind, ErrorKind::Usage);
    sent.wait(Some(Duration::MAX)).expect("its end");
}

#[test]
fn a_wait_for_events_misses_none() {
    let (a, b, to_b, to_a) = pair();
    let mut seen = b.events();
    let inbox = b.recv(vec![0; 8], 1, ANY, Some(&to_a)).expect("a receive");
    to_b.send(vec![1; 8], 1).expect("a message").wait(LIMIT).expect("its end");
    // It may have ended before this call, on the background thread.
    while inbox.test().is_none() {
        seen = b.wait_event(seen, LIMIT).expect("an event");
    }
    let noted = to_b.notify(b"note").expect("a notice");
    while b.notices(1).is_empty() {
        seen = b.wait_event(seen, LIMIT).expect("an event");
    }
    noted.wait(LIMIT).expect("its end");
    // Nothing but what may be left of these.
    while let Ok(more) = b.wait_event(seen, SHORT) {
        seen = more;
    }
    a.close().unwrap();
    while to_a.is_alive() {
        seen = b.wait_event(seen, LIMIT).expect("the peer's end");
    }
    b.close().unwrap();
    assert_eq!(b.wait_event(seen, LIMIT).unwrap_err().kind, ErrorKind::Closed);
}

#[test]
fn a_panic_on_a_thread_of_the_worker_ends_it_with_the_text() {
    let (_a, b, to_b, to_a) = pair();
    let inbox = b.recv(vec![0; 8], 1, ANY, Some(&to_a)).expect("a receive");
    let other = b.recv(vec![0; 8], 2, ANY, Some(&to_a)).expect("a receive");
    inbox.on_complete(|_| panic!("in the middle of something"));
    to_b.send(vec![1; 8], 1).expect("a message");
    // No caller makes progress for b: its own thread receives the message.
    let deadline = Instant::now() + LIMIT.expect("a limit");
    while b.failure().is_none() {
        assert!(Instant::now() < deadline, "the panic is not reported");
        std::thread::sleep(Duration::from_millis(1));
    }
    let text = b.failure().expect("a text");
    assert!(text.contains("crossrail-progress") && text.contains("in the middle of something"), "{text}");
    assert_eq!(other.wait(LIMIT).unwrap_err().kind, ErrorKind::Closed, "what was in flight has ended");
    assert_eq!(b.check("send").unwrap_err().kind, ErrorKind::Closed);
    assert!(b.recv(vec![0; 8], 3, ANY, Some(&to_a)).and_then(|late| late.wait(LIMIT)).is_err());
    b.close().unwrap();
}

#[test]
fn a_request_is_over_when_nothing_uses_its_buffer() {
    let (_a, b, to_b, to_a) = pair();
    let mut inbox = b.recv(vec![0; 8], 1, ANY, Some(&to_a)).expect("a receive");
    assert!(!inbox.is_over());
    to_b.send(vec![1; 8], 1).expect("a message").wait(LIMIT).expect("its end");
    inbox.wait(LIMIT).expect("a message");
    assert!(inbox.is_over());
    to_b.close(Some(Duration::MAX)).expect("a good end");
}
