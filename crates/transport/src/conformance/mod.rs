//! What every backend must do, as one suite that every backend's own tests run.
//!
//! ```ignore
//! crossrail_transport::conformance::run("tcp", &mut || connected_pair());
//! ```
//!
//! Every backend also runs [`run_endings`], which drops lanes at random stages, and a link that reaches the
//! memory of the peer ([`Domain`](crate::Domain)) [`run_domain`].
//!
//! A failure panics with the backend's name, the check's name and what was seen. A check that a lane
//! cannot take part in (no descriptor to sleep on) is skipped with a line on stderr; those of rows where its
//! capabilities have no lists.

mod domain;
mod endings;
mod harness;
mod notes;
mod rows;
mod waiting;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::{COPIED_MAX, Lane, LaneError, Loan, Post};
pub use domain::{DomainEnd, DomainMemory, run_domain};
pub use endings::run_endings;
use harness::{DISCARD, End, LENT, PLAIN, REFUSE, SHORT, drive, frame, pattern};

/// Payloads are cut to this size even where a lane would carry more, to keep the suite short.
const LARGEST: usize = 8 << 20;

type Check = fn(End, End);
type MakePair<'a> = &'a mut dyn FnMut() -> (Box<dyn Lane>, Box<dyn Lane>);

/// Reports, bypassing the harness's capture, that a test can't run here.
///
/// # Panics
/// With `CI=true`: there, what tests need must be installed and permitted.
pub fn skip(why: &str) {
    use std::io::Write;
    assert!(std::env::var_os("CI").is_none_or(|ci| ci != "true"), "CI=true, but the test can't run: {why}");
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    let _ = std::io::stderr().write_all(format!("skipped: {test}: {why}\n").as_bytes());
}

/// Runs every check on fresh pairs of connected lanes.
///
/// # Panics
/// When a check fails.
pub fn run(name: &str, make_pair: MakePair<'_>) {
    let checks: [(&str, Check); 26] = [
        ("says what it is", says_what_it_is),
        ("order and sizes", order_and_sizes),
        ("frames taken between polls", taken_between_polls),
        ("small budgets", small_budgets),
        ("budget is kept", budget_is_kept),
        ("post", post),
        ("post of a large payload", post_large),
        ("push", push),
        ("short and discarded places", short_and_discarded),
        ("refuse", refuse),
        ("received memory recalled midway", received_memory_recalled),
        ("received memory recalled by another thread", received_memory_recalled_by_thread),
        ("sent memory recalled", sent_memory_recalled),
        ("dropped while its memory is recalled", dropped_while_recalled),
        ("dropped while its peer's memory is recalled", peer_dropped_while_recalled),
        ("close delivers what came before", close_delivers),
        ("close inside a frame", close_inside_frame),
        ("sleep and wake", sleep_and_wake),
        ("a head waits for a place", waiting::head),
        ("asleep while a head waits", waiting::asleep),
        ("closed while a head waits", waiting::closed),
        ("notes", notes::both_ways),
        ("notes that nobody takes", notes::untaken),
        ("rows at both ends", rows::both_ends),
        ("received rows recalled midway", rows::received_recalled),
        ("sent rows recalled midway", rows::sent_recalled),
    ];
    for (check, body) in checks {
        let (a, b) = make_pair();
        let label = format!("{name}: {check}");
        body(End::new(a, format!("{label}: a")), End::new(b, format!("{label}: b")));
    }
    for polls in 0..4 {
        let (a, b) = make_pair();
        let label = format!("{name}: dropped after {polls} polls of a large payload");
        dropped_midway(End::new(a, format!("{label}: a")), End::new(b, format!("{label}: b")), polls);
    }
}

fn cap(end: &End, len: usize) -> usize {
    len.min(end.lane.caps().max_payload)
}

fn says_what_it_is(a: End, b: End) {
    for end in [&a, &b] {
        assert!(!end.lane.name().is_empty(), "{}: no name", end.label);
        let caps = end.lane.caps();
        assert!(caps.max_payload >= 64 * 1024, "{}: max_payload {}", end.label, caps.max_payload);
        let stats = end.lane.stats();
        assert_eq!((stats.tx_bytes, stats.rx_bytes), (0, 0), "{}: bytes before any frame", end.label);
    }
    assert_eq!(a.lane.caps(), b.lane.caps(), "{}: the two ends differ", a.label);
}

fn sizes(end: &End) -> Vec<usize> {
    let largest = cap(end, LARGEST);
    // Links stop to copy at 4096, 8064 and 65536 bytes.
    let mut sizes: Vec<usize> = (0..40).chain([63, 64, 65, 1000, 4095, 4096, 4097, 8063, 8064, 8065, 16384]).collect();
    sizes.extend([65535, 65536, 65537, 1 << 20, largest, 3, 0, 1]);
    sizes.iter().map(|size| cap(end, *size)).collect()
}

fn order_and_sizes(mut a: End, mut b: End) {
    let sizes = sizes(&a);
    for (seq, len) in sizes.iter().enumerate() {
        a.queue(PLAIN, seq as u32, *len);
        b.queue(PLAIN, 1000 + seq as u32, *len);
    }
    let count = sizes.len();
    drive(&mut a, &mut b, 1 << 20, |a, b| a.is_through(count) && b.is_through(count));
    let wire: usize = sizes.iter().map(|len| len + crossrail_types::HEAD_LEN).sum();
    for (end, first) in [(&a, 1000), (&b, 0)] {
        end.expect_intact(first, &sizes);
        let stats = end.lane.stats();
        assert_eq!((stats.tx_bytes, stats.rx_bytes), (wire as u64, wire as u64), "{}: {stats:?}", end.label);
        assert!(stats.acked_bytes <= stats.tx_bytes, "{}: {stats:?}", end.label);
    }
}

/// A lane may offer short frames without a poll: in order, whole and counted, in between polled ones.
fn taken_between_polls(mut a: End, mut b: End) {
    let sizes: Vec<usize> = [8, 0, 24, 7, 25, 300, 8, 1, 70_000].map(|len| cap(&a, len)).repeat(100);
    for (seq, len) in sizes.iter().enumerate() {
        a.queue(PLAIN, seq as u32, *len);
    }
    for _ in &sizes {
        a.step(1 << 20);
        while b.take() {}
        // One that is not offered, if any has arrived.
        b.step(1);
    }
    drive(&mut a, &mut b, 1 << 20, |a, b| a.all_sent() && b.is_through(sizes.len()));
    b.expect_intact(0, &sizes);
    assert!(!b.take(), "{}: a frame that nobody sent", b.label);
    let wire: usize = sizes.iter().map(|len| len + crossrail_types::HEAD_LEN).sum();
    assert_eq!(b.lane.stats().rx_bytes, wire as u64, "{}: bytes received", b.label);
}

fn small_budgets(mut a: End, mut b: End) {
    let sizes = [300_000, 0, 5, 70_000, 32];
    for (seq, len) in sizes.iter().enumerate() {
        a.queue(PLAIN, seq as u32, cap(&a, *len));
    }
    drive(&mut a, &mut b, 1, |a, b| a.all_sent() && b.is_through(sizes.len()));
    b.expect_intact(0, &sizes.map(|len| cap(&a, len)));
}

fn budget_is_kept(mut a: End, mut b: End) {
    const BUDGET: usize = 64 * 1024;
    for seq in 0..512 {
        a.queue(PLAIN, seq, 16 * 1024);
    }
    drive(&mut a, &mut b, BUDGET, |a, b| {
        for end in [&a, &b] {
            assert!(end.most_in_one_poll <= BUDGET + (256 << 10), "{}: {}", end.label, end.most_in_one_poll);
        }
        a.all_sent() && b.is_through(512)
    });
    b.expect_intact(0, &[16 * 1024; 512]);
}

fn post(mut a: End, mut b: End) {
    let sizes = [0, 8, 1000, COPIED_MAX];
    let (mut sent, mut bytes) = (Vec::new(), 0);
    loop {
        let len = sizes[sent.len() % sizes.len()];
        let mut payload = pattern(sent.len() as u32, len);
        match a.lane.post(&frame(PLAIN, sent.len() as u32, &payload)) {
            Ok(Post::Taken) => sent.push(len),
            Ok(Post::Full) => break,
            other => panic!("{}: a post of {len} bytes gave {other:?}", a.label),
        }
        payload.fill(0xEE); // Taken: it is ours again
        bytes += len;
        assert!(bytes < 1 << 30, "{}: never full", a.label);
    }
    assert!(!sent.is_empty(), "{}: full from the start", a.label);
    a.queue(PLAIN, sent.len() as u32, 77);
    sent.push(77);
    drive(&mut a, &mut b, 1 << 20, |a, b| a.all_sent() && b.is_through(sent.len()));
    b.expect_intact(0, &sent);
    let again = a.lane.post(&frame(PLAIN, sent.len() as u32, &[]));
    assert_eq!(again, Ok(Post::Taken), "{}: no room after everything went out", a.label);
    sent.push(0);
    drive(&mut a, &mut b, 1 << 20, |_, b| b.is_through(sent.len()));
    assert_eq!(a.tokens_sent(), 1, "{}: sent() for posts that were Taken", a.label);
}

fn post_large(mut a: End, mut b: End) {
    let len = cap(&a, LARGEST);
    let payload = pattern(0, len);
    let mut tx = frame(PLAIN, 0, &payload);
    tx.token = 4242;
    let answer = a.lane.post(&tx).expect("a fresh lane takes a post");
    a.queue(PLAIN, if answer == Post::Full { 0 } else { 1 }, 500);
    let (count, sent) = match answer {
        Post::Full => (1, 1),
        Post::Taken => (2, 1),
        Post::Held => (2, 2),
    };
    drive(&mut a, &mut b, 1 << 20, |a, b| a.tokens_sent() >= sent && b.is_through(count));
    assert_eq!(a.tokens_sent(), sent, "{}: {answer:?}", a.label);
    let sizes = [len, 500];
    b.expect_intact(0, &sizes[2 - count..]);
    drop(payload);
}

fn push(mut a: End, mut b: End) {
    let sizes = [0, 8, 36, 1000, 1024, 1025, 4096, 3, cap(&a, 200_000), 5].repeat(40);
    let mut pushed = 0;
    for (seq, len) in sizes.iter().enumerate() {
        a.queue(PLAIN, seq as u32, *len);
        // Several at a time, and one alone.
        if seq % 7 < 2 && a.push(1 << 20) {
            pushed += 1;
        }
    }
    assert!(pushed == 0 || a.tokens_sent() > 0, "{}: nothing of what was pushed was sent", a.label);
    drive(&mut a, &mut b, 1 << 20, |a, b| a.all_sent() && b.is_through(sizes.len()));
    b.expect_intact(0, &sizes);
}

fn short_and_discarded(mut a: End, mut b: End) {
    let kinds = [(SHORT, 10), (PLAIN, 10), (DISCARD, 100_000), (DISCARD, 0), (SHORT, 1 << 20), (PLAIN, 3), (SHORT, 1)];
    for (seq, (kind, len)) in kinds.iter().enumerate() {
        a.queue(*kind, seq as u32, cap(&a, *len));
    }
    drive(&mut a, &mut b, 1 << 20, |a, b| a.all_sent() && b.heads() == kinds.len() && b.all_placed());
    for (seq, (kind, len)) in kinds.iter().enumerate() {
        match *kind {
            DISCARD => b.expect_untouched(seq),
            _ => b.expect_prefix(seq, seq as u32, cap(&a, *len)),
        }
    }
}

fn refuse(mut a: End, mut b: End) {
    a.queue(PLAIN, 0, 10);
    a.queue(REFUSE, 1, 10);
    match b.poll_against(&mut a) {
        LaneError::Protocol(why) => assert!(why.contains(harness::REFUSAL), "{}: {why}", b.label),
        other => panic!("{}: refused, yet {other:?}", b.label),
    }
    b.expect_intact(0, &[10]);
}

fn received_memory_recalled(mut a: End, mut b: End) {
    let len = cap(&a, LARGEST);
    let loan = Arc::new(Loan::default());
    b.sink.loan = Some(Arc::clone(&loan));
    a.queue(LENT, 0, len);
    a.queue(PLAIN, 1, 100);
    drive(&mut a, &mut b, 16 * 1024, |_, b| b.heads() == 1);
    assert!(!b.is_through(1), "{}: {len} bytes in one poll of 16 KiB", b.label);
    recall(&loan, &mut a, &mut b);
    b.poison(0);
    drive(&mut a, &mut b, 1 << 20, |a, b| a.all_sent() && b.heads() == 2 && b.is_placed(1));
    b.expect_poisoned(0);
    b.expect_prefix(1, 1, 100);
}

fn received_memory_recalled_by_thread(mut a: End, mut b: End) {
    let len = cap(&a, 4 << 20);
    for round in 0..20 {
        let loan = Arc::new(Loan::default());
        b.sink.loan = Some(Arc::clone(&loan));
        let recalled = Arc::clone(&loan);
        let at = b.heads();
        a.queue(LENT, 2 * round, len);
        a.queue(PLAIN, 2 * round + 1, 9);
        drive(&mut a, &mut b, 16 * 1024, |_, b| b.heads() > at);
        let owner = std::thread::spawn(move || {
            for _ in 0..round {
                std::thread::yield_now();
            }
            recalled.recall();
        });
        while !owner.is_finished() {
            a.step(64 * 1024);
            b.step(64 * 1024);
        }
        owner.join().expect("recalling does not panic");
        recall(&loan, &mut a, &mut b);
        b.poison(at);
        drive(&mut a, &mut b, 1 << 20, |_, b| b.heads() == at + 2 && b.is_placed(at + 1));
        b.expect_poisoned(at);
        b.expect_prefix(at + 1, 2 * round + 1, 9);
    }
}

fn sent_memory_recalled(mut a: End, mut b: End) {
    let len = cap(&a, LARGEST);
    let loan = Arc::new(Loan::default());
    a.queue_lent(0, len, &loan);
    a.queue(PLAIN, 1, 100);
    a.queue_lent(2, cap(&a, 1000), &loan);
    a.queue(PLAIN, 3, 100);
    while a.step(1 << 20) {}
    recall(&loan, &mut a, &mut b);
    a.poison_queued(0);
    drive(&mut a, &mut b, 1 << 20, |a, b| a.all_sent() && b.is_through(4));
    b.expect_prefix(1, 1, 100);
    b.expect_prefix(3, 3, 100);
}

/// Recalls memory, and polls both ends until it is returned. A lane that returns it later reports that.
fn recall(loan: &Loan, a: &mut End, b: &mut End) {
    let reported = a.sink.returned + b.sink.returned;
    if loan.recall() {
        return;
    }
    assert!(!loan.keepers().is_empty(), "{}: kept by nobody, and not returned", a.label);
    drive(a, b, 1 << 20, |_, _| loan.is_returned());
    assert!(a.sink.returned + b.sink.returned > reported, "{}: returned without a report", a.label);
}

/// A lane that ends returns what it keeps, whatever the other end does.
fn dropped_while_recalled(mut a: End, mut b: End) {
    let (sent, received) = (Arc::new(Loan::default()), Arc::new(Loan::default()));
    a.queue_lent(0, cap(&a, LARGEST), &sent);
    b.queue(LENT, 0, cap(&b, LARGEST));
    a.sink.loan = Some(Arc::clone(&received));
    drive(&mut a, &mut b, 16 * 1024, |a, _| a.heads() == 1);
    sent.recall();
    received.recall();
    let End { lane, mut sink, .. } = a;
    drop(lane);
    assert!(sent.is_returned() && received.is_returned(), "{}: memory kept by a lane that is gone", b.label);
    sink.poison_all();
    for _ in 0..64 {
        // The lane may end here.
        let _ = b.lane.poll(&mut b.sink, 1 << 20, true);
    }
    sink.expect_all_poisoned();
}

/// The end of the other lane does not return memory by itself, but that of this one does.
fn peer_dropped_while_recalled(mut a: End, mut b: End) {
    let received = Arc::new(Loan::default());
    b.sink.loan = Some(Arc::clone(&received));
    a.queue(LENT, 0, cap(&a, LARGEST));
    drive(&mut a, &mut b, 16 * 1024, |_, b| b.heads() == 1);
    drop(a);
    received.recall();
    let label = b.label.clone();
    let End { lane, mut sink, .. } = b;
    drop(lane);
    assert!(received.is_returned(), "{label}: memory kept by a lane that is gone");
    sink.poison_all();
    sink.expect_all_poisoned();
}

fn close_delivers(mut a: End, mut b: End) {
    for seq in 0..20 {
        a.queue(PLAIN, seq, 1000);
    }
    while !a.all_sent() {
        a.step(1 << 20);
    }
    drop(a);
    match b.poll_to_the_end() {
        LaneError::Closed(_) => {}
        other => panic!("{}: closed by the peer, yet {other:?}", b.label),
    }
    b.expect_intact(0, &[1000; 20]);
}

/// The other end drops its lane, too, before it has read to the end.
fn dropped_midway(mut a: End, mut b: End, polls: usize) {
    a.queue(PLAIN, 0, cap(&a, LARGEST));
    for _ in 0..4 {
        a.lane.poll(&mut a.sink, LARGEST, true).expect("the other end is there");
    }
    drop(a);
    for _ in 0..polls {
        // The lane may end here.
        let _ = b.lane.poll(&mut b.sink, 16 * 1024, true);
    }
}

fn close_inside_frame(mut a: End, mut b: End) {
    a.queue(PLAIN, 0, 10);
    a.queue(PLAIN, 1, cap(&a, LARGEST));
    drive(&mut a, &mut b, 16 * 1024, |_, b| b.heads() == 2);
    assert!(!b.is_placed(1), "{}: a large frame in one poll of 16 KiB", b.label);
    drop(a);
    b.poll_to_the_end();
    b.expect_prefix(0, 0, 10);
}

fn sleep_and_wake(mut a: End, mut b: End) {
    if a.lane.fd().is_none() || b.lane.fd().is_none() {
        eprintln!("{}: skipped: no descriptor to sleep on", a.label);
        return;
    }
    const ROUNDS: usize = 500;
    const BULK: usize = 16;
    let large = cap(&a, 1 << 20);
    let through = AtomicUsize::new(0);
    let play = |end: &mut End, opens: bool| {
        end.watch();
        if opens {
            end.queue(PLAIN, 0, 8);
        }
        let mut answered = 0;
        end.sleep_until(|end| {
            // The other end may be through with its rounds and into the bulk already.
            while answered < ROUNDS.min(end.heads()) && end.is_placed(answered) {
                answered += 1;
                if answered < ROUNDS || (answered == ROUNDS && !opens) {
                    end.queue(PLAIN, answered as u32, 8);
                }
            }
            answered == ROUNDS && end.all_sent()
        });
        for seq in 0..BULK {
            end.queue(PLAIN, seq as u32, large);
        }
        end.sleep_until(|end| end.is_through(ROUNDS + BULK) && end.all_sent());
        for seq in 0..BULK {
            end.expect_prefix(ROUNDS + seq, seq as u32, large);
        }
        through.fetch_add(1, Ordering::Relaxed);
        end.poll_while_other(|| through.load(Ordering::Relaxed) == 2);
    };
    // Both stay open until both are through: a close would wake the other by itself.
    std::thread::scope(|scope| {
        scope.spawn(|| play(&mut b, false));
        play(&mut a, true);
    });
    drop(a);
    b.sleep_until_error();
}
