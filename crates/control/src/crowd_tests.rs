//! Cost of a rendezvous of a large group, for the store and for each rank: the store's contents and the ranks' rosters,
//! without processes and sockets.

use std::time::{Duration, Instant, SystemTime};

use crate::builtin::contents::{Contents, Outbox};
use crate::builtin::frames::{Answer, Change, Request, Value, encode};
use crate::membership::{Process, Roster, Row, Search, rank_key};
use crate::{Entry, Event, Revision};

const MEMBERS: &str = "crossrail/g/member/";

/// Everything that is sent to the ranks.
#[derive(Default)]
struct Network {
    /// Requests and answers, and their bytes, by rank.
    requests: Vec<(u64, u64)>,
    answers: Vec<(u64, u64)>,
    /// Changes of members that rank `watched` has received.
    changes: Vec<Event>,
    watched: u64,
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
            Answer::Changes(changes) if client == self.watched => self.changes.extend(changes.iter().map(event)),
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
    most_memory: u64,
}

/// Memory of this process in bytes, as far as it is resident; other tests may run in it.
fn memory() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    text.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * 4096
}

impl Crowd {
    fn ask(&mut self, rank: u32, request: &Request<'_>) {
        self.calls += 1;
        let mut frame = Vec::new();
        encode(&mut frame, self.calls, request).expect("it fits a frame");
        let (requests, bytes) = &mut self.network.requests[rank as usize];
        (*requests, *bytes) = (*requests + 1, *bytes + frame.len() as u64);
        self.contents.apply(self.now, u64::from(rank), self.calls, request, &mut self.network);
    }

    fn put(&mut self, rank: u32, key: &str, value: &[u8]) {
        self.ask(rank, &Request::Put { key, value: Value(value), lease: 0 });
    }

    /// Every rank puts a value under a key of its own.
    fn announce(&mut self, prefix: &str, value: &[u8]) {
        for rank in 0..self.ranks {
            self.put(rank, &rank_key(prefix, rank), value);
        }
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
            if rank + 2 == self.ranks {
                self.most_memory = self.most_memory.max(memory());
            }
        }
        assert_eq!(self.network.ended, self.ranks as usize, "all have all values");
    }
}

/// Cost for one rank and for the store until the group has met, its expert buffers have announced their construction and
/// exchanged addresses, and all have passed a barrier.
struct Cost {
    /// Of the busiest rank: number and bytes.
    requests: (u64, u64),
    answers: (u64, u64),
    store: Duration,
    rank: Duration,
    memory: u64,
}

fn meeting_of(ranks: u32) -> Cost {
    let none = vec![(0, 0); ranks as usize];
    let network =
        Network { requests: none.clone(), answers: none, watched: u64::from(ranks) - 1, ..Network::default() };
    let before = memory();
    let mut crowd = Crowd { contents: Contents::new(0), network, now: Instant::now(), ranks, calls: 0, most_memory: 0 };
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
    crowd.announce("crossrail/g/ep/making/", &[1; 200]);
    crowd.exchange("crossrail/g/ep/address/", &[1; 300]);
    for rank in 0..ranks {
        crowd.ask(rank, &Request::Delete(&rank_key("crossrail/g/ep/making/", rank)));
    }
    crowd.exchange("crossrail/g/barrier/", &[]);
    let store = began.elapsed();
    // What the last rank makes of the changes: it looks for all ranks after each, as a wait for members does.
    let events = std::mem::take(&mut crowd.network.changes);
    let began = Instant::now();
    let mut roster = Roster::new(ranks - 1, &[], crowd.now);
    let numbers: Vec<u32> = (0..ranks).collect();
    let mut search = Search::new(&numbers);
    let mut present = None;
    for event in &events {
        roster.event(event, crowd.now, SystemTime::UNIX_EPOCH);
        present = search.all(|rank| roster.incarnation(rank));
    }
    assert!(present.is_some_and(|there| there.len() == ranks as usize));
    let most = |counts: &[(u64, u64)]| *counts.iter().max().expect("ranks");
    let Network { requests, answers, .. } = &crowd.network;
    let memory = crowd.most_memory.saturating_sub(before);
    Cost { requests: most(requests), answers: most(answers), store, rank: began.elapsed(), memory }
}

#[test]
fn meeting_costs_each_rank_in_proportion_to_the_ranks() {
    let of = |ranks: u32| {
        let cost = meeting_of(ranks);
        let Cost { requests, answers, store, rank, memory } = &cost;
        println!(
            "{ranks} ranks: each sends {} requests of {} bytes in all and receives {} answers of {} bytes; the store takes \
             {store:?} and some {} MB for all ranks, a rank {rank:?}",
            requests.0,
            requests.1,
            answers.0,
            answers.1,
            memory >> 20
        );
        cost
    };
    let (some, many) = (of(256), of(1024));
    // One for each member that joins, and for each of its own requests one or two.
    assert!(many.answers.0 <= 1024 + 16, "{:?} answers", many.answers);
    assert!(many.answers.1 <= 1024 * 1024, "{:?} bytes", many.answers);
    assert!(many.answers.1 <= 5 * some.answers.1, "more than in proportion");
    assert!(many.requests.0 == some.requests.0 && many.requests.1 <= 5 * some.requests.1, "{:?}", many.requests);
    // Four times the ranks are sixteen times the pairs; what grows with the third power takes 64 times as long.
    let factor = many.store.as_secs_f64() / some.store.as_secs_f64();
    assert!(factor < 40.0, "the store takes {factor:.1} times as long for four times the ranks");
    let factor = many.rank.as_secs_f64() / some.rank.as_secs_f64();
    assert!(factor < 12.0, "a rank takes {factor:.1} times as long for four times the ranks");
}
