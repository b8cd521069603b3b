//! Groups over a real etcd.

#[path = "etcd/server.rs"]
#[allow(dead_code, reason = "shared with the tests of the backend")]
mod server;

use std::thread;
use std::time::{Duration, Instant};

use crossrail_control::{Group, GroupOptions, RankState};
use crossrail_types::{ErrorKind, LogLevel, Settings};

use server::Etcd;

const LONG: Option<Duration> = Some(Duration::from_secs(20));

fn settings() -> Settings {
    Settings { log: LogLevel::Error, timeout: Duration::from_secs(20), ..Settings::default() }
}

fn join(etcd: &Etcd, rank: Option<u32>) -> Group {
    let options = GroupOptions { rank, size: Some(3), store: Some(etcd.address()), ..GroupOptions::default() };
    Group::join(options, &settings()).unwrap()
}

/// Waits until `what` is so; looks whenever `group` changes, and every few milliseconds.
fn until(what: impl Fn() -> bool, group: &Group) {
    let end = Instant::now() + Duration::from_secs(20);
    while !what() {
        assert!(Instant::now() < end, "it never came to pass");
        group.wait_change(group.changes(), Instant::now() + Duration::from_millis(5));
    }
}

/// All of `groups` at one barrier.
fn meet(groups: &[Group]) {
    let ranks: Vec<u32> = groups.iter().map(Group::rank).collect();
    thread::scope(|scope| {
        for group in groups {
            scope.spawn(|| group.barrier("step", &ranks, LONG).unwrap());
        }
    });
}

#[test]
fn ranks_come_meet_and_leave() {
    let Some(etcd) = Etcd::start(&[]) else { return };
    let mut groups: Vec<Group> = (0..3).map(|_| join(&etcd, None)).collect();
    assert_eq!(groups.iter().map(Group::rank).collect::<Vec<_>>(), [0, 1, 2]);
    assert!(groups.iter().all(|group| !group.serves_store() && group.store_address() == etcd.address()));
    for (round, group) in groups.iter().enumerate() {
        group.publish("address", &[round as u8]).unwrap();
    }
    for _ in 0..20 {
        meet(&groups);
    }
    assert_eq!(groups[2].collect("address", &[1, 0, 2], LONG).unwrap(), [[1], [0], [2]]);
    let last = groups.pop().unwrap();
    last.leave().unwrap();
    until(|| groups[0].state(2) == RankState::Left, &groups[0]);
    assert_eq!(groups[0].barrier("step", &[0, 2], LONG).unwrap_err().kind, ErrorKind::PeerDead);
    meet(&groups);
    drop(groups);
    let (left, _) = crossrail_control::Store::list(&etcd.open(), "", server::soon()).unwrap();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn when_etcd_is_away_that_is_said_and_the_group_stays() {
    let Some(mut etcd) = Etcd::start(&[]) else { return };
    let groups = [join(&etcd, Some(0)), join(&etcd, Some(1))];
    groups[1].publish("address", b"one").unwrap();
    meet(&groups);
    etcd.stop();
    until(|| groups.iter().all(|group| group.control_error().is_some()), &groups[0]);
    assert_eq!(groups[0].state(1), RankState::Alive);
    assert_eq!(groups[0].publish("late", b"").unwrap_err().kind, ErrorKind::Unreachable);
    etcd.restart();
    until(|| groups.iter().all(|group| group.control_error().is_none()), &groups[0]);
    meet(&groups);
    assert_eq!(groups[0].collect("address", &[1], LONG).unwrap(), [b"one"]);
    assert_eq!(groups[0].state(1), RankState::Alive);
}
