//! Ranks that come together while one of them is still making its buffer.
#![allow(missing_docs)]

use std::thread;
use std::time::{Duration, Instant};

use crossrail::{Context, Settings};
use crossrail_control::{Group, GroupOptions, StoreServer};
use crossrail_ep::hello::Parameters;
use crossrail_ep::meeting::Meeting;
use crossrail_ep::{Config, Layout, Payload};
use crossrail_types::ErrorKind;

/// How long a rank waits for another one to connect.
const PATIENCE: Duration = Duration::from_millis(300);
const LONG: Duration = Duration::from_secs(20);

fn meeting_of(rank: u32, store: &str) -> (Group, Meeting) {
    let settings = Settings::default();
    let options = GroupOptions {
        rank: Some(rank),
        size: Some(2),
        node: Some("node".to_owned()),
        store: Some(store.to_owned()),
        ..GroupOptions::default()
    };
    let group = Group::join(options, &settings).expect("join");
    let context = Context::new(settings).expect("a context");
    let config = Config {
        ranks: 2,
        max_tokens: 4,
        hidden: 128,
        experts: 2,
        topk: 1,
        payload: Payload::Bf16,
        layouts: vec![Layout::Expert],
        prereduce: true,
        share_node: true,
        timeout: LONG,
        on_loss: crossrail_ep::OnLoss::Raise,
    };
    let parameters = Parameters::of(&config);
    let meeting = Meeting::new(&group, &context, "experts", rank.into(), "node".to_owned(), true, parameters);
    (group, meeting.expect("a meeting"))
}

fn two() -> (StoreServer, (Group, Meeting), (Group, Meeting)) {
    let server = StoreServer::start("127.0.0.1:0", &Settings::default()).expect("a store");
    let (first, second) = (meeting_of(0, &server.address()), meeting_of(1, &server.address()));
    (server, first, second)
}

#[test]
fn time_to_connect_begins_when_the_other_has_made_its_buffer() {
    let (_server, (group, meeting), (other_group, other)) = two();
    meeting.begin().expect("begin");
    meeting.announce().expect("announce");
    other.begin().expect("begin");
    let began = Instant::now();
    let waits = thread::spawn(move || {
        let (ends, deadline) = meeting.connect(&[1], began + PATIENCE).expect("connect");
        assert_eq!(ends[0].rank, 1);
        assert!(deadline > began + PATIENCE, "the time left is that from when the other was there");
        (began.elapsed(), meeting)
    });
    // What it makes takes longer than the other has patience.
    thread::sleep(3 * PATIENCE);
    assert!(!waits.is_finished());
    other.announce().expect("announce");
    let (ends, _) = other.connect(&[0], Instant::now() + LONG).expect("connect");
    assert_eq!(ends[0].rank, 0);
    let (took, meeting) = waits.join().expect("the first rank");
    assert!(took >= 3 * PATIENCE && took < LONG / 2, "{took:?}");
    drop((meeting, other));
    other_group.leave().expect("leave");
    group.leave().expect("leave");
}

#[test]
fn a_rank_that_makes_nothing_or_has_failed_to_is_not_waited_for() {
    let (_server, (group, meeting), (other_group, other)) = two();
    let refused = |meeting: &Meeting| {
        let began = Instant::now();
        let error = meeting.connect(&[1], began + PATIENCE).err().expect("nobody is there");
        assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
        assert!(error.to_string().contains("rank 1"), "{error}");
        began.elapsed()
    };
    assert!(refused(&meeting) < LONG / 2);
    other.begin().expect("begin");
    drop(other);
    assert!(refused(&meeting) < LONG / 2);
    other_group.leave().expect("leave");
    group.leave().expect("leave");
}
