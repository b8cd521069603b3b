//! Groups whose store is etcd.

use std::thread;
use std::time::{Duration, Instant};

use crossrail_control::{Group, GroupOptions, RankState};
use crossrail_types::{LogLevel, Settings};

use crate::server::{Etcd, within};

const LONG: Option<Duration> = Some(Duration::from_secs(15));

fn join(etcd: &Etcd, rank: Option<u32>, size: u32) -> Group {
    let settings = Settings { log: LogLevel::Error, ..Settings::default() };
    let store = Some(etcd.address());
    Group::join(GroupOptions { rank, size: Some(size), store, ..GroupOptions::default() }, &settings).unwrap()
}

#[test]
fn ranks_meet_at_etcd() {
    let Some(etcd) = Etcd::start(&[]) else { return };
    let all = [0, 1, 2, 3];
    let mut ranks = thread::scope(|scope| {
        let work = || {
            let group = join(&etcd, None, 4);
            assert_eq!((group.store_address(), group.serves_store()), (etcd.address(), false));
            for round in 0..10 {
                group.publish("round", &[round]).unwrap();
                group.barrier("told", &all, LONG).unwrap();
                assert_eq!(group.collect("round", &all, LONG).unwrap(), vec![vec![round]; 4]);
                group.barrier("read", &all, LONG).unwrap();
            }
            let rank = group.rank();
            group.leave().unwrap();
            rank
        };
        let threads = all.map(|_| scope.spawn(work));
        threads.map(|thread| thread.join().unwrap())
    });
    ranks.sort_unstable();
    assert_eq!(ranks, all);
}

/// Waits until `group` sees what it should.
fn wait_for(group: &Group, what: &str, holds: impl Fn(&Group) -> bool) {
    let until = within(Duration::from_secs(20));
    loop {
        let seen = group.changes();
        if holds(group) {
            return;
        }
        assert!(Instant::now() < until, "never: {what}; members {:?}, {:?}", group.members(), group.control_error());
        group.wait_change(seen, within(Duration::from_millis(100)));
    }
}

#[test]
fn a_group_outlives_an_absence_of_etcd() {
    let Some(mut etcd) = Etcd::start(&[]) else { return };
    let (one, two) = (join(&etcd, Some(0), 3), join(&etcd, Some(1), 3));
    wait_for(&one, "both are there", |group| group.state(1) == RankState::Alive);

    etcd.stop();
    for group in [&one, &two] {
        wait_for(group, "the store is missed", |group| group.control_error().is_some());
        let error = group.publish("k", b"").unwrap_err();
        assert!(error.to_string().contains(&etcd.address()), "{error}");
    }
    assert_eq!((one.state(1), two.state(0)), (RankState::Alive, RankState::Alive), "nobody died of it");

    etcd.restart();
    for group in [&one, &two] {
        wait_for(group, "the store is back", |group| group.control_error().is_none());
    }
    let (mine, other) = thread::scope(|scope| {
        let other = scope.spawn(|| two.barrier("back", &[0, 1], LONG));
        (one.barrier("back", &[0, 1], LONG), other.join().unwrap())
    });
    mine.and(other).unwrap();
    assert_eq!((one.state(1), two.state(0)), (RankState::Alive, RankState::Alive));

    // Joining goes on as well, and leaving is seen.
    let three = join(&etcd, None, 3);
    assert_eq!(three.rank(), 2);
    wait_for(&one, "the third is there", |group| group.state(2) == RankState::Alive);
    three.leave().unwrap();
    wait_for(&one, "the third has left", |group| group.state(2) == RankState::Left);
}
