//! Groups over the built-in store, in one process and with children that are killed.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crossrail_control::{Group, GroupOptions, RankState, StoreServer, open};
use crossrail_types::{ErrorKind, LogLevel, Reason, Settings};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const SHORT: Option<Duration> = Some(Duration::from_millis(200));
const LONG: Option<Duration> = Some(Duration::from_secs(40));
/// What ends before its limit ends within this, on a machine that does many other things.
const SOON: Duration = Duration::from_secs(20);

fn settings() -> Settings {
    Settings { log: LogLevel::Error, timeout: Duration::from_secs(40), ..Settings::default() }
}

fn server() -> StoreServer {
    StoreServer::start("127.0.0.1:0", &settings()).unwrap()
}

fn options(store: &str, rank: Option<u32>, size: u32) -> GroupOptions {
    GroupOptions { rank, size: Some(size), store: Some(store.to_owned()), ..GroupOptions::default() }
}

fn join(server: &StoreServer, rank: u32, size: u32) -> Group {
    Group::join(options(&server.address(), Some(rank), size), &settings()).unwrap()
}

fn keys(store: &str) -> Vec<String> {
    let deadline = Instant::now() + SOON;
    let (entries, _) = open(store, &settings(), deadline).unwrap().list("", deadline).unwrap();
    entries.into_iter().map(|entry| entry.key).collect()
}

/// Runs `work` as each of `size` ranks, each in a thread.
fn ranks<T: Send>(server: &StoreServer, size: u32, work: impl Fn(&Group) -> T + Sync) -> Vec<T> {
    let run = |rank| work(&join(server, rank, size));
    let run = &run;
    thread::scope(|scope| {
        let threads: Vec<_> = (0..size).map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Waits until `what` is so; looks whenever `group` changes, and every few milliseconds.
fn until(what: impl Fn() -> bool, group: &Group) {
    let end = Instant::now() + SOON;
    while !what() {
        assert!(Instant::now() < end, "it never came to pass");
        group.wait_change(group.changes(), Instant::now() + Duration::from_millis(5));
    }
}

#[test]
fn ranks_meet_any_number_of_times_and_tell_each_other() {
    let server = server();
    let all: Vec<u32> = (0..5).collect();
    ranks(&server, 5, |group| {
        assert_eq!((group.size(), group.local_rank() < 5), (5, true));
        group.publish("address", format!("at {}", group.rank()).as_bytes()).unwrap();
        let told = group.collect("address", &[4, 0, group.rank()], LONG).unwrap();
        assert_eq!(told, [&b"at 4"[..], b"at 0", format!("at {}", group.rank()).as_bytes()]);
        for round in 0..40 {
            group.publish("round", &[round]).unwrap();
            group.barrier("told", &all, LONG).unwrap();
            let rounds = group.collect("round", &all, LONG).unwrap();
            assert_eq!(rounds, vec![vec![round]; 5]);
            group.barrier("read", &all, LONG).unwrap();
        }
        assert!(keys(&server.address()).len() < 5 * (2 + 1 + 1 + 2 * 34), "old meetings are deleted");
        let pair: Vec<u32> = if group.rank() % 2 == 0 { vec![0, 2, 4] } else { vec![3, 1, 3] };
        group.barrier("told", &pair, LONG).unwrap();
        group.withdraw("address").unwrap();
        group.barrier("", &all, LONG).unwrap();
        assert_eq!(group.collect("address", &all, SHORT).unwrap_err().kind, ErrorKind::Timeout);
        assert_eq!(group.members().len(), 5);
        group.barrier("end", &all, LONG).unwrap();
        group.leave().unwrap();
        assert_eq!(group.barrier("end", &all, LONG).unwrap_err().kind, ErrorKind::Closed);
        assert_eq!(group.publish("a", b"").unwrap_err().kind, ErrorKind::Closed);
    });
    assert_eq!(keys(&server.address()), Vec::<String>::new());
    ranks(&server, 5, |group| group.barrier("end", &all, LONG).unwrap());
}

#[test]
fn ranks_are_handed_out_lowest_first() {
    let server = server();
    let enter = |node: &str| {
        let options = GroupOptions { node: Some(node.to_owned()), ..options(&server.address(), None, 4) };
        Group::join(options, &settings()).unwrap()
    };
    let mut groups: Vec<Group> = ["a", "b", "a"].into_iter().map(enter).collect();
    let numbers: Vec<_> = groups.iter().map(|group| (group.rank(), group.local_rank())).collect();
    assert_eq!(numbers, [(0, 0), (1, 0), (2, 1)]);
    drop(groups.remove(0));
    let again = enter("b");
    assert_eq!((again.rank(), again.local_rank()), (0, 1));
    let next = enter("a");
    assert_eq!((next.rank(), next.local_rank()), (3, 0));
    let full = Group::join(options(&server.address(), None, 4), &settings()).unwrap_err();
    assert_eq!((full.kind, full.detail.as_str()), (ErrorKind::Exhausted, "all 4 ranks are taken"));
    // The size is known from those that are there.
    drop(next);
    let options = GroupOptions { size: None, ..options(&server.address(), None, 4) };
    assert_eq!(Group::join(options, &settings()).unwrap().size(), 4);
}

#[test]
fn many_at_once_get_different_ranks() {
    let server = server();
    let all: Vec<u32> = (0..8).collect();
    let mut numbers: Vec<(u32, u32)> = thread::scope(|scope| {
        let enter = || {
            let group = Group::join(options(&server.address(), None, 8), &settings()).unwrap();
            group.barrier("all", &all, LONG).unwrap();
            (group.rank(), group.local_rank())
        };
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(enter)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    numbers.sort_unstable();
    assert_eq!(numbers.iter().map(|(rank, _)| *rank).collect::<Vec<_>>(), all);
    numbers.sort_unstable_by_key(|(_, local)| *local);
    assert_eq!(numbers.iter().map(|(_, local)| *local).collect::<Vec<_>>(), all);
}

#[test]
fn a_rank_taken_twice_and_sizes_that_disagree_name_the_other_process() {
    let server = server();
    let first = join(&server, 1, 4);
    let me = format!("rank 1 ({})", first.members()[0].process);
    let taken = Group::join(options(&server.address(), Some(1), 4), &settings()).unwrap_err();
    assert_eq!((taken.kind, taken.peer.as_deref()), (ErrorKind::Mismatch, Some(me.as_str())));
    let differs = Group::join(options(&server.address(), Some(2), 8), &settings()).unwrap_err();
    assert_eq!((differs.kind, differs.peer.as_deref()), (ErrorKind::Mismatch, Some(me.as_str())));
    assert_eq!(differs.detail, "rank 2 was told of 8 ranks, rank 1 of 4");
    // Whoever waits for the one that was turned away hears why.
    until(|| first.state(2) == RankState::Left, &first);
    let lost = first.barrier("x", &[1, 2], LONG).unwrap_err();
    assert_eq!((lost.kind, lost.reason), (ErrorKind::PeerDead, Some(Reason::Closed)));
    assert!(lost.detail.contains("sizes disagree: rank 2 was told of 8 ranks"), "{lost}");
    // Groups of other names do not meet.
    let other = GroupOptions { name: "other".to_owned(), ..options(&server.address(), Some(1), 8) };
    assert_eq!(Group::join(other, &settings()).unwrap().members().len(), 1);
}

#[test]
fn who_does_not_come_is_named() {
    let server = server();
    let (first, second) = (join(&server, 0, 4), join(&server, 1, 4));
    let absent = first.barrier("start", &[0, 1, 3], SHORT).unwrap_err();
    assert_eq!(absent.kind, ErrorKind::Timeout);
    assert!(absent.detail.starts_with("\"start\": rank 3 (never joined) did not arrive in time"), "{absent}");
    first.wait_members(&[1], LONG).unwrap();
    let process = &second.members()[0].process;
    let late = first.barrier("start", &[0, 1], SHORT).unwrap_err();
    assert!(late.detail.starts_with(&format!("\"start\": rank 1 ({process}) did not arrive in time")), "{late}");
    let silent = first.collect("address", &[1], SHORT).unwrap_err();
    assert!(silent.detail.starts_with(&format!("\"address\": rank 1 ({process}) did not arrive")), "{silent}");
    // The same meeting can be waited for again.
    thread::scope(|scope| {
        scope.spawn(|| second.barrier("start", &[0, 1], LONG).unwrap());
        first.barrier("start", &[0, 1], LONG).unwrap();
    });
    for (ranks, text) in [(&[0, 4][..], "rank 4 of a group of 4"), (&[1], "this is rank 0")] {
        let error = first.barrier("start", ranks, LONG).unwrap_err();
        assert!(error.kind == ErrorKind::Usage && error.detail.contains(text), "{error}");
    }
    assert_eq!(first.wait_members(&[2], SHORT).unwrap_err().kind, ErrorKind::Timeout);
    assert_eq!(first.publish("", b"x").unwrap_err().kind, ErrorKind::Usage);
    assert_eq!(first.publish("a", &vec![0; 1 << 20]).unwrap_err().kind, ErrorKind::Usage);
    first.barrier("alone", &[0], Some(Duration::MAX)).unwrap();
}

/// The other process of [`Other`]: joins, says so, and stays until killed.
#[test]
fn child() {
    let Ok(told) = std::env::var("GROUP_TEST_CHILD") else { return };
    let (store, rank) = told.split_once(' ').unwrap();
    let group = Group::join(options(store, Some(rank.parse().unwrap()), 4), &settings()).unwrap();
    group.publish("address", b"child").unwrap();
    println!("\njoined");
    let _ = std::io::stdin().read(&mut [0]);
}

/// A rank in a process of its own.
struct Other(Child);

impl Other {
    fn join(server: &StoreServer, rank: u32) -> Other {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture"])
            .env("GROUP_TEST_CHILD", format!("{} {rank}", server.address()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.map_while(Result::ok).any(|line| line == "joined"));
        Other(child)
    }

    fn kill(self) -> Instant {
        drop(self);
        Instant::now()
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn a_death_is_noticed_within_its_lease_and_ends_waits_at_once() {
    let server = server();
    let group = join(&server, 0, 4);
    let other = join(&server, 2, 4);
    let child = Other::join(&server, 1);
    assert_eq!(group.collect("address", &[1], LONG).unwrap(), [b"child"]);
    let before = group.changes();
    thread::scope(|scope| {
        let meeting = scope.spawn(|| (group.barrier("step", &[0, 1], LONG).unwrap_err(), Instant::now()));
        let collecting = scope.spawn(|| (other.collect("never", &[1, 0], LONG).unwrap_err(), Instant::now()));
        let died = child.kill();
        for (error, noticed) in [meeting.join().unwrap(), collecting.join().unwrap()] {
            assert_eq!(error.kind, ErrorKind::PeerDead, "{error}");
            assert!(error.peer.as_deref().is_some_and(|peer| peer.starts_with("rank 1 (")), "{error}");
            let after = noticed - died;
            assert!(after < SOON, "noticed after {after:?}");
        }
    });
    assert!(group.wait_change(before, Instant::now()) > before);
    assert!(matches!(group.state(1), RankState::Dead(why) if why.contains("its lease ended")));
    assert_eq!(group.barrier("step", &[0, 1], LONG).unwrap_err().kind, ErrorKind::PeerDead);
    // Those that are left go on, and a successor may come.
    thread::scope(|scope| {
        scope.spawn(|| other.barrier("step", &[0, 2], LONG).unwrap());
        group.barrier("step", &[0, 2], LONG).unwrap();
    });
    let again = Group::join(options(&server.address(), None, 4), &settings()).unwrap();
    assert_eq!(again.rank(), 1);
    group.wait_members(&[1], LONG).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| again.barrier("step", &[0, 1], LONG).unwrap());
        group.barrier("step", &[0, 1], LONG).unwrap();
    });
    assert_eq!(group.collect("address", &[1], SHORT).unwrap_err().kind, ErrorKind::Timeout);
}

#[test]
fn a_process_that_stood_still_is_back_with_what_it_told() {
    let server = server();
    let group = join(&server, 0, 4);
    let child = Other::join(&server, 1);
    let id = Pid::from_raw(i32::try_from(child.0.id()).unwrap());
    kill(id, Signal::SIGSTOP).unwrap();
    until(|| matches!(group.state(1), RankState::Dead(_)), &group);
    assert_eq!(group.collect("address", &[1], LONG).unwrap_err().kind, ErrorKind::PeerDead);
    kill(id, Signal::SIGCONT).unwrap();
    group.wait_members(&[1], LONG).unwrap();
    assert_eq!(group.collect("address", &[1], LONG).unwrap(), [b"child"]);
    child.kill();
}

#[test]
fn what_a_killed_job_left_behind_confuses_nobody() {
    let server = server();
    let dead: Vec<Other> = (0..2).map(|rank| Other::join(&server, rank)).collect();
    for other in dead {
        other.kill();
    }
    let began = Instant::now();
    // Of another size than theirs, too.
    let told = ranks(&server, 2, |group| {
        group.publish("address", b"new").unwrap();
        group.barrier("start", &[0, 1], LONG).unwrap();
        let told = group.collect("address", &[0, 1], LONG).unwrap();
        group.barrier("end", &[0, 1], LONG).unwrap();
        told
    });
    assert_eq!(told, vec![vec![b"new".to_vec(), b"new".to_vec()]; 2]);
    assert!(began.elapsed() < SOON);
}

#[test]
fn when_the_store_comes_back_the_group_is_as_before() {
    let before = server();
    let address = before.address();
    let (first, second) = (join(&before, 0, 2), join(&before, 1, 2));
    let meet = || {
        thread::scope(|scope| {
            scope.spawn(|| second.barrier("step", &[0, 1], LONG).unwrap());
            first.barrier("step", &[0, 1], LONG).unwrap();
        });
    };
    second.publish("address", b"second").unwrap();
    meet();
    drop(before);
    until(|| first.control_error().is_some() && second.control_error().is_some(), &first);
    assert_eq!(first.control_error().unwrap().kind, ErrorKind::Unreachable);
    let lost = first.collect("address", &[1], LONG).unwrap_err();
    assert_eq!(lost.kind, ErrorKind::Unreachable, "{lost}");
    assert_eq!((first.state(1), first.members().len()), (RankState::Alive, 2));
    let after = StoreServer::start(address.trim_start_matches("tcp://"), &settings()).unwrap();
    until(|| first.control_error().is_none() && second.control_error().is_none(), &first);
    assert_eq!(first.collect("address", &[1], LONG).unwrap(), [b"second"]);
    meet();
    assert_eq!(first.state(1), RankState::Alive);
    second.leave().unwrap();
    until(|| first.state(1) == RankState::Left, &first);
    drop(first);
    drop(after);
}

#[test]
fn rank_0_serves_the_store_until_the_others_have_left() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let address = format!("tcp://127.0.0.1:{port}");
    let enter = |rank| {
        let group = Group::join(options(&address, Some(rank), 3), &settings()).unwrap();
        assert_eq!((group.serves_store(), group.store_address()), (rank == 0, address.clone()));
        group.barrier("all", &[0, 1, 2], LONG).unwrap();
        group.leave().unwrap();
        assert_eq!(group.control_error(), None);
    };
    let enter = &enter;
    thread::scope(|scope| (0..3).for_each(|rank| drop(scope.spawn(move || enter(rank)))));
    let soon = || Instant::now() + Duration::from_millis(200);
    let gone = open(&address, &settings(), soon()).and_then(|store| store.get("a", soon())).unwrap_err();
    assert!(matches!(gone.kind, ErrorKind::Unreachable | ErrorKind::Timeout), "{gone}");
    // A group of one needs nothing and nobody.
    let alone = Group::join(GroupOptions { size: Some(1), ..GroupOptions::default() }, &settings()).unwrap();
    alone.barrier("", &[0], SHORT).unwrap();
    assert!(alone.serves_store() && alone.store_address().starts_with("tcp://127.0.0.1:"));
}

#[test]
fn what_cannot_be_joined_says_why() {
    // No test listens at a privileged port.
    let time = Some(Duration::from_secs(2));
    let refused = GroupOptions { timeout: time, ..options("tcp://127.0.0.1:1", Some(1), 2) };
    let error = Group::join(refused, &settings()).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unreachable);
    assert!(error.to_string().contains("127.0.0.1:1"), "{error}");
    let server = server();
    let base = options(&server.address(), Some(0), 2);
    for (bad, text) in [
        (GroupOptions { name: "a/b".to_owned(), ..base.clone() }, "not a group's name"),
        (GroupOptions { name: String::new(), ..base.clone() }, "not a group's name"),
        (GroupOptions { lease: Duration::ZERO, ..base.clone() }, "a lease of 0"),
        (GroupOptions { rank: Some(2), ..base.clone() }, "rank 2 of 2"),
        (GroupOptions { size: None, ..base.clone() }, "the number of ranks is not set"),
    ] {
        let error = Group::join(bad, &settings()).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Usage);
        assert!(error.detail.contains(text), "{error} lacks {text}");
    }
    assert_eq!(keys(&server.address()), Vec::<String>::new());
}
