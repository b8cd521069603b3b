use super::*;
use crate::Revision;

const TTL: Duration = Duration::from_secs(1);

fn row(pid: u32, incarnation: u64) -> Row {
    Row {
        incarnation,
        size: 4,
        local_rank: 0,
        node: "n".to_owned(),
        process: Process { host: "h".to_owned(), pid, began: 1, space: "elsewhere".to_owned() },
        ttl_ms: 1000,
        serves_store: false,
        left: None,
    }
}

fn entry(rank: u32, row: &Row) -> Entry {
    Entry { key: rank_key("crossrail/g/member/", rank), value: row.encode().unwrap(), revision: Revision(1) }
}

fn leaving(why: &str) -> Leaving {
    Leaving { why: why.to_owned(), met: vec![(77, 3)] }
}

fn gone(rank: u32) -> Event {
    Event::Gone { key: rank_key("crossrail/g/member/", rank), revision: Revision(2) }
}

fn at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_millis(seconds * 1000 + 7)
}

/// Rank 0's view of rank 1, which came after it.
fn with_one(now: Instant) -> Roster {
    let mut roster = Roster::new(0, &[], now);
    roster.set_own(row(1, 1));
    roster.event(&Event::Put(entry(1, &row(2, 10))), now, at(0));
    roster
}

#[test]
fn rows_are_read_as_written_and_foreign_ones_are_named() {
    let mine = Row { process: Process::this(), left: Some(leaving("why")), ..row(1, 9) };
    assert_eq!(Row::decode(3, &mine.encode().unwrap()).unwrap(), mine);
    for bytes in [&b""[..], b"\x02", b"\x01", b"\x01\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", b"rank"] {
        let error = Row::decode(3, bytes).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Protocol);
        assert!(error.to_string().contains("rank 3"), "{error}");
    }
}

#[test]
fn this_process_runs_and_others_may_not() {
    let this = Process::this();
    assert_eq!(this.runs(), Some(true));
    assert!(this.name().ends_with(&format!(":{}", std::process::id())));
    let earlier = Process { began: this.began.wrapping_sub(1), ..this.clone() };
    assert_eq!(earlier.runs(), Some(false), "its number has been used again");
    let elsewhere = Process { space: "elsewhere".to_owned(), ..this.clone() };
    assert_eq!(elsewhere.runs(), None);
    let mut child = std::process::Command::new("true").spawn().unwrap();
    let pid = child.id();
    child.wait().unwrap();
    assert_eq!(Process { pid, ..this }.runs(), Some(false));
}

#[test]
fn a_member_comes_dies_and_comes_again() {
    let now = Instant::now();
    let mut roster = with_one(now);
    assert_eq!((roster.state(1), roster.state(2), roster.changes()), (RankState::Alive, RankState::Absent, 1));
    assert_eq!(roster.incarnation(1), Some(10));
    roster.event(&gone(1), now, at(3661));
    assert_eq!(roster.state(1), RankState::Dead("its lease ended (noticed at 01:01:01.007 UTC)".to_owned()));
    assert_eq!((roster.incarnation(1), roster.changes()), (None, 2));
    let (rank, name, what) = roster.lost_of(&[0, 1]).unwrap();
    assert_eq!((rank, name.as_str()), (1, "rank 1 (h:2)"));
    assert!(what.starts_with("died: its lease ended"), "{what}");
    roster.event(&gone(1), now, at(9));
    assert_eq!(roster.changes(), 2, "a death counts once");
    roster.event(&Event::Put(entry(1, &row(3, 11))), now, at(9));
    assert_eq!((roster.state(1), roster.incarnation(1), roster.changes()), (RankState::Alive, Some(11), 3));
    assert_eq!(roster.members().iter().map(|member| member.rank).collect::<Vec<_>>(), [0, 1]);
}

#[test]
fn who_leaves_is_not_dead() {
    let now = Instant::now();
    let mut roster = with_one(now);
    let note = Row { left: Some(leaving("sizes disagree")), ..row(2, 10) };
    roster.event(&Event::Put(entry(1, &note)), now, at(0));
    roster.event(&gone(1), now, at(0));
    assert_eq!((roster.state(1), roster.changes()), (RankState::Left, 2));
    assert_eq!(roster.lost_of(&[1]).unwrap().2, "left the group: sizes disagree");
    assert_eq!(roster.members().len(), 1);
    assert!(roster.left_after(1, 77, 2) && !roster.left_after(1, 77, 3) && !roster.left_after(1, 78, 0));
}

#[test]
fn a_store_that_lost_everything_gives_its_members_time() {
    let now = Instant::now();
    let mut roster = with_one(now);
    roster.event(&Event::Put(entry(2, &row(3, 20))), now, at(0));
    roster.resync(&[], now, TTL);
    assert_eq!((roster.state(1), roster.changes()), (RankState::Alive, 2));
    roster.event(&Event::Put(entry(1, &row(2, 12))), now, at(0));
    roster.expire(now + TTL / 2, at(0));
    assert_eq!((roster.state(1), roster.state(2)), (RankState::Alive, RankState::Alive));
    roster.expire(now + TTL, at(0));
    assert_eq!(roster.state(1), RankState::Alive);
    assert!(matches!(roster.state(2), RankState::Dead(why) if why.contains("did not come back")));
}

#[test]
fn what_a_dead_job_left_behind_was_never_there() {
    let now = Instant::now();
    // On another machine: it may be alive, until its lease ends.
    let mut roster = Roster::new(0, &[entry(1, &row(2, 10)), entry(2, &row(3, 20))], now);
    assert_eq!((roster.state(1), roster.changes()), (RankState::Alive, 0));
    roster.event(&gone(1), now + TTL / 2, at(0));
    assert_eq!(roster.state(1), RankState::Absent);
    roster.event(&gone(2), now + TTL * 2, at(0));
    assert!(matches!(roster.state(2), RankState::Dead(_)), "it was renewed meanwhile, so it lived");
    // On this machine that can be seen at once.
    let gone_process = Process { began: 0, ..Process::this() };
    let left_behind = Row { process: gone_process, ..row(2, 10) };
    assert_eq!(Roster::new(0, &[entry(1, &left_behind)], now).state(1), RankState::Absent);
}

#[test]
fn another_size_is_found() {
    let now = Instant::now();
    let mut roster = with_one(now);
    assert!(roster.other_size(4).is_none());
    roster.event(&Event::Put(entry(2, &Row { size: 8, ..row(5, 3) })), now, at(0));
    assert_eq!(roster.other_size(4).map(|(rank, row)| (rank, row.size)), Some((2, 8)));
}

#[test]
fn whether_the_one_that_serves_the_store_is_there() {
    let now = Instant::now();
    let mut roster = with_one(now);
    assert_eq!(roster.server_is_there(), None);
    roster.event(&Event::Put(entry(2, &Row { serves_store: true, ..row(5, 3) })), now, at(0));
    assert_eq!(roster.server_is_there(), Some(true));
    roster.event(&gone(2), now, at(0));
    assert_eq!(roster.server_is_there(), Some(false));
}

#[test]
fn keys_sort_as_ranks_and_give_them_back() {
    let keys: Vec<String> = [9, 10, 1234].map(|rank| rank_key("p/", rank)).into();
    assert!(keys.is_sorted());
    assert_eq!(key_rank(&keys[2]), Some(1234));
    assert_eq!(key_rank("p/x"), None);
}

#[test]
fn a_search_continues_where_a_rank_was_missing_and_checks_all_at_the_end() {
    let ranks = [3, 5, 9];
    let mut search = Search::new(&ranks);
    assert_eq!(search.all(|_| None), None);
    assert_eq!(search.all(|rank| (rank < 9).then_some(1)), None);
    // Rank 3 has left meanwhile.
    assert_eq!(search.all(|rank| (rank > 3).then_some(1)), None);
    assert_eq!(search.all(|rank| Some(rank.into())), Some(vec![3, 5, 9]));
}
