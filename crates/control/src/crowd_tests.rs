//! Cost of a rendezvous of a large group, for the store and for each rank: the store's contents and the ranks' rosters,
//! without processes and sockets.

use std::time::{Duration, Instant, SystemTime};

use crate::builtin::contents::{Contents, Outbox};
use crate::builtin::frames::{Answer, Change, Request, Value, encode};
use crate::membership::{Process, Roster, Row, rank_key};
use crate::{Entry, Event, Revision};

const MEMBERS: &str = "crossrail/g/member/";

/// Everything that is sent to the ranks.
#[derive(Default)]
struct Network {
    /// Answers, and their bytes, by rank.
    answers: Vec<(u64, u64)>,
    /// Changes of members, by rank.
    changes: Vec<Vec<Event>>,
    /// Waits that were answered.
    ended: usize,
}

impl Outbox for Network {
    fn send(&mut self, client: u64, call: u64, answer: &Answer<'_>) {
        let mut frame = Vec::new();
        encode(&mut frame, call, answer).expect("it fits a frame");
        let (answers, bytes) = &mut self.answers[client as usize];
        (*answers, *bytes) = (*answers + 1, *bytes + frame.len() as u64);
        match answer {
            Answer::Changes(changes) => self.changes[client as usize].extend(changes.iter().map(event)),
            Answer::Entries { more: false, .. } => self.ended += 1,
            _ => {}
        }
    }

    fn backlog(&self, _client: u64) -> usize {
        0
    }
}

fn event(change: &Change<'_>) -> Event {
    match change {
        Change::Put(item) => Event::Put(Entry {
            key: item.key.to_owned(),
            value: item.value.0.to_vec(),
            revision: Revision(item.revision),
        }),
        Change::Gone { key, revision } => Event::Gone { key: (*key).to_owned(), revision: Revision(*revision) },
    }
}

struct Crowd {
    contents: Contents,
    network: Network,
    now: Instant,
    ranks: u32,
    calls: u64,
}

impl Crowd {
    fn ask(&mut self, rank: u32, request: &Request<'_>) {
        self.calls += 1;
        self.contents.apply(self.now, u64::from(rank), self.calls, request, &mut self.network);
    }

    fn put(&mut self, rank: u32, key: &str, value: &[u8]) {
        self.ask(rank, &Request::Put { key, value: Value(value), lease: 0 });
    }

    /// Every rank puts a value under a key of its own and waits for those of all.
    fn exchange(&mut self, prefix: &str, value: &[u8]) {
        let keys: Vec<String> = (0..self.ranks).map(|rank| rank_key(prefix, rank)).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let timeout_us = 50_000;
        self.network.ended = 0;
        for rank in 0..self.ranks {
            self.put(rank, keys[rank as usize], value);
            self.ask(rank, &Request::Wait { keys: keys.clone(), timeout_us });
        }
        assert_eq!(self.network.ended, self.ranks as usize, "all have all values");
    }
}

/// Cost for one rank and for the store until the group has met, exchanged addresses and passed a barrier.
struct Cost {
    answers_per_rank: u64,
    bytes_per_rank: u64,
    store: Duration,
    rank: Duration,
}

fn meeting_of(ranks: u32) -> Cost {
    let network =
        Network { answers: vec![(0, 0); ranks as usize], changes: (0..ranks).map(|_| Vec::new()).collect(), ended: 0 };
    let mut crowd = Crowd { contents: Contents::new(0), network, now: Instant::now(), ranks, calls: 0 };
    let row = Row {
        incarnation: 7,
        size: ranks,
        local_rank: 0,
        node: "node".to_owned(),
        process: Process { host: "host".to_owned(), pid: 1, began: 1, space: "elsewhere".to_owned() },
        ttl_ms: 10_000,
        serves_store: false,
        left: None,
    };
    let began = Instant::now();
    for rank in 0..ranks {
        crowd.ask(rank, &Request::Watch { prefix: MEMBERS, after: 0 });
    }
    for rank in 0..ranks {
        crowd.put(rank, &rank_key(MEMBERS, rank), &row.encode().expect("a row"));
    }
    crowd.exchange("crossrail/g/address/", &[1; 300]);
    crowd.exchange("crossrail/g/barrier/", &[]);
    let store = began.elapsed();
    // What the last rank makes of the changes: it looks for all ranks after each, as a wait for members does.
    let events = std::mem::take(&mut crowd.network.changes[ranks as usize - 1]);
    let began = Instant::now();
    let mut roster = Roster::new(ranks - 1, &[], crowd.now);
    let mut present = 0;
    for event in &events {
        roster.event(event, crowd.now, SystemTime::UNIX_EPOCH);
        present = (0..ranks).filter(|rank| roster.incarnation(*rank).is_some()).count();
    }
    assert_eq!(present, ranks as usize);
    let (answers_per_rank, bytes_per_rank) = *crowd.network.answers.iter().max().expect("ranks");
    Cost { answers_per_rank, bytes_per_rank, store, rank: began.elapsed() }
}

#[test]
fn meeting_costs_each_rank_in_proportion_to_the_ranks() {
    let of = |ranks: u32| {
        let cost = meeting_of(ranks);
        println!(
            "{ranks} ranks: {} answers of {} bytes in all to each; the store took {:?}, a rank {:?}",
            cost.answers_per_rank, cost.bytes_per_rank, cost.store, cost.rank
        );
        cost
    };
    let (some, many) = (of(256), of(1024));
    // One for each member that joins, and for each of its own requests one or two.
    assert!(many.answers_per_rank <= 1024 + 16, "{} answers", many.answers_per_rank);
    assert!(many.bytes_per_rank <= 1024 * 1024, "{} bytes", many.bytes_per_rank);
    assert!(many.bytes_per_rank <= 5 * some.bytes_per_rank, "more than in proportion");
    // Four times the ranks are sixteen times the pairs; what grows with the third power takes 64 times as long.
    let factor = many.store.as_secs_f64() / some.store.as_secs_f64();
    assert!(factor < 40.0, "the store takes {factor:.1} times as long for four times the ranks");
}
