//! Lists and notices between two workers of one process, over every transport.
#![allow(unsafe_code)] // pools are registered by their addresses

use std::time::{Duration, Instant};

use crossrail::{
    Addresses, ConnectOptions, Context, Description, Endpoint, ErrorKind, Layout, Memory, Move, MoveKind, MoveOptions,
    NOTICE_MAX, Notice, Place, Region, Row, Settings, StartOptions, Worker, WorkerOptions,
};

const LIMIT: Option<Duration> = Some(Duration::from_secs(20));

/// Pseudo-random numbers from a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }

    /// Numbers below `count` in any order.
    fn order(&mut self, count: u32) -> Vec<u32> {
        let mut all: Vec<u32> = (0..count).collect();
        for at in (1..all.len()).rev() {
            all.swap(at, self.below(at as u64 + 1) as usize);
        }
        all
    }
}

struct Pair {
    a: Worker,
    b: Worker,
    ab: Endpoint,
    ba: Endpoint,
    contexts: (Context, Context),
}

fn pair_of(pairs: &[(&str, &str)]) -> Pair {
    let context = || Context::new(Settings::from_pairs(pairs.iter().copied()).unwrap()).unwrap();
    let contexts = (context(), context());
    let options = |name: &str| WorkerOptions { name: Some(name.to_owned()), ..WorkerOptions::default() };
    let a = Worker::new(&contexts.0, options("a")).unwrap();
    let b = Worker::new(&contexts.1, options("b")).unwrap();
    let ab = a.connect(&b.address(), &ConnectOptions::default()).unwrap();
    let ba = b.accept(LIMIT).unwrap();
    Pair { a, b, ab, ba, contexts }
}

const RAILS: &str = "127.0.0.1,127.0.0.2,127.0.0.3,127.0.0.4";

fn each(mut body: impl FnMut(&str, Pair)) {
    body("shm", pair_of(&[("CROSSRAIL_TLS", "shm")]));
    body("tcp", pair_of(&[("CROSSRAIL_TLS", "tcp"), ("CROSSRAIL_CHUNK", "64K")]));
    let rails = [("CROSSRAIL_TLS", "tcp"), ("CROSSRAIL_NET_DEVICES", RAILS), ("CROSSRAIL_CHUNK", "64K")];
    body("tcp x 4", pair_of(&rails));
    let threads = [rails[0], rails[1], ("CROSSRAIL_IO_THREADS", "2"), ("CROSSRAIL_CHANNELS", "2")];
    body("tcp, io threads", pair_of(&threads));
    body("tcp, checksums", pair_of(&[("CROSSRAIL_TLS", "tcp"), ("CROSSRAIL_CHECKSUM", "crc")]));
}

/// Memory that was registered at its address, and what it holds.
struct Pool {
    bytes: Vec<u8>,
    shared: Option<Memory>,
    region: Region,
}

impl Pool {
    fn of(worker: &Worker, shared: Option<&Context>, len: usize, seed: u64) -> Pool {
        let mut bytes: Vec<u8> = (0..len as u64).map(|at| (at.wrapping_mul(31) + seed) as u8).collect();
        let shared = shared.map(|context| context.alloc(len).unwrap());
        let at = match &shared {
            Some(memory) => {
                memory.fill_from(0, &bytes).unwrap();
                memory.ptr() as u64
            }
            None => bytes.as_mut_ptr() as u64,
        };
        // SAFETY: a pool outlives its region.
        let region = unsafe { worker.register_range(at, len as u64, Place::Host).unwrap() };
        Pool { bytes, shared, region }
    }

    fn base(&self) -> u64 {
        self.region.base()
    }

    fn contents(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.bytes.len()];
        match &self.shared {
            Some(memory) => memory.copy_to(0, &mut bytes).unwrap(),
            // SAFETY: the vector's own memory, in which nobody writes at present.
            None => unsafe { std::ptr::copy_nonoverlapping(self.base() as *const u8, bytes.as_mut_ptr(), bytes.len()) },
        }
        bytes
    }
}

fn words(rows: &[(u64, u64)]) -> Vec<u64> {
    rows.iter().flat_map(|(at, len)| [*at, *len, 0]).collect()
}

fn local(worker: &Worker, pool: &Pool, rows: &[(u64, u64)]) -> Layout {
    let rows: Vec<_> = rows.iter().map(|(at, len)| (pool.base() + at, *len)).collect();
    worker.layout_at(std::slice::from_ref(&pool.region), Addresses::new(&words(&rows), 3).unwrap()).unwrap()
}

fn remote(endpoint: &Endpoint, owner: &Worker, pool: &Pool, rows: &[(u64, u64)]) -> Layout {
    let described = owner.describe(std::slice::from_ref(&pool.region)).unwrap();
    let description = Description::parse(&described).unwrap();
    let rows: Vec<_> = rows.iter().map(|(at, len)| (pool.base() + at, *len)).collect();
    endpoint.layout_at(&description, Addresses::new(&words(&rows), 3).unwrap()).unwrap()
}

/// What `to` holds after rows were copied from `from`.
fn copied(to: &[u8], from: &[u8], pairs: impl Iterator<Item = ((u64, u64), (u64, u64))>) -> Vec<u8> {
    let mut expected = to.to_vec();
    for ((at, len), (source, _)) in pairs {
        expected[at as usize..][..len as usize].copy_from_slice(&from[source as usize..][..len as usize]);
    }
    expected
}

fn finish(request: crossrail::Result<crossrail::Request>, what: &str) -> crossrail::Receipt {
    let request = request.unwrap_or_else(|error| panic!("{what}: {error}"));
    request.wait(LIMIT).unwrap_or_else(|error| panic!("{what}: {error}"))
}

fn notices(worker: &Worker, count: usize) -> Vec<Notice> {
    let mut all = Vec::new();
    let begun = Instant::now();
    while all.len() < count {
        assert!(begun.elapsed() < Duration::from_secs(20), "{} of {count} notices", all.len());
        worker.wait_notice(Duration::from_secs(1));
        all.extend(worker.notices(count - all.len()));
    }
    all
}

#[test]
fn rows_of_any_length_move_to_rows_anywhere_in_both_directions() {
    each(|transport, pair| {
        for (round, shared) in [(0u64, false), (1, true), (2, false), (3, true)] {
            let mut random = Random(round);
            let even = round < 2;
            let count = 700;
            let (mut ours, mut theirs, mut at, mut to) = (Vec::new(), Vec::new(), 3, 11);
            for _ in 0..count {
                let len = if even { 577 } else { 1 + random.below(900) };
                ours.push((at, len));
                theirs.push((to, len));
                at += len + random.below(3) * 7;
                to += len + random.below(2) * 5;
            }
            let len = at.max(to) as usize + 50;
            let contexts = &pair.contexts;
            let here = Pool::of(&pair.a, shared.then_some(&contexts.0), len, 5);
            let there = Pool::of(&pair.b, shared.then_some(&contexts.1), len, 9);
            let (mine, yours) = (local(&pair.a, &here, &ours), remote(&pair.ab, &pair.b, &there, &theirs));
            assert_eq!((mine.rows(), yours.rows()), (count, count));
            let index = random.order(count as u32);
            let index = &index[..600];
            for kind in [MoveKind::Write, MoveKind::Read] {
                let (before, source) = match kind {
                    MoveKind::Write => (there.contents(), here.contents()),
                    MoveKind::Read => (here.contents(), there.contents()),
                };
                let options = MoveOptions { local_index: Some(index), remote_index: Some(index), ..Default::default() };
                let prepared = pair.ab.prepare(kind, &mine, &yours, options).unwrap();
                let what = format!("{transport}, round {round}, {kind:?}");
                for part in [0..250, 250..600] {
                    let options = StartOptions { rows: Some(part), ..Default::default() };
                    finish(prepared.start(options), &what);
                }
                let pairs = index.iter().map(|row| (ours[*row as usize], theirs[*row as usize]));
                let (after, expected) = match kind {
                    MoveKind::Write => (there.contents(), copied(&before, &source, pairs.map(|(a, b)| (b, a)))),
                    MoveKind::Read => (here.contents(), copied(&before, &source, pairs)),
                };
                assert!(after == expected, "{what}");
                assert_eq!(prepared.nbytes(), index.iter().map(|row| ours[*row as usize].1).sum::<u64>());
            }
        }
    });
}

/// Rows that take longer to tell than the view of all of them.
#[test]
fn rows_that_are_no_strides_move_as_soon_as_they_are_prepared() {
    each(|name, pair| {
        let rows: Vec<(u64, u64)> = (0..4000).map(|row| (row * 64 + row % 7, 1 + row % 50)).collect();
        let (here, there) = (Pool::of(&pair.a, None, 256 << 10, 1), Pool::of(&pair.b, None, 256 << 10, 2));
        let (mine, yours) = (local(&pair.a, &here, &rows), remote(&pair.ab, &pair.b, &there, &rows));
        assert!(yours.strides() > 3000, "{name}: {} strides", yours.strides());
        let expected = copied(&there.contents(), &here.contents(), rows.iter().copied().zip(rows.iter().copied()));
        let of = pair.ab.prepare(MoveKind::Write, &mine, &yours, MoveOptions::default()).unwrap();
        finish(of.start(StartOptions::default()), name);
        assert!(there.contents() == expected, "{name}");
    });
}

#[test]
fn a_notice_is_raised_behind_the_bytes_of_its_move_and_each_start_has_its_own() {
    each(|transport, pair| {
        for shared in [false, true] {
            let here = Pool::of(&pair.a, shared.then_some(&pair.contexts.0), 1 << 20, 1);
            let there = Pool::of(&pair.b, shared.then_some(&pair.contexts.1), 1 << 20, 2);
            let rows: Vec<_> = (0..400u64).map(|row| (row * 2304, 2304)).collect();
            let (mine, yours) = (local(&pair.a, &here, &rows), remote(&pair.ab, &pair.b, &there, &rows));
            for kind in [MoveKind::Write, MoveKind::Read] {
                let options = MoveOptions { notice: b"first", ..Default::default() };
                let prepared = pair.ab.prepare(kind, &mine, &yours, options).unwrap();
                for (at, notice) in [None, Some(&b"other"[..]), Some(&[7; 200_000]), Some(b"")].into_iter().enumerate()
                {
                    let start = StartOptions { notice, ..Default::default() };
                    let request = prepared.start(start).unwrap();
                    let expected = notice.unwrap_or(b"first");
                    if !expected.is_empty() {
                        let raised = notices(&pair.b, 1).remove(0);
                        assert_eq!((raised.peer.as_str(), raised.endpoint), ("a", pair.ba.id()), "{transport}");
                        assert!(raised.bytes == expected, "{transport}, start {at}");
                        if kind == MoveKind::Write {
                            let end = 400 * 2304;
                            assert!(there.contents()[..end] == here.contents()[..end], "{transport}, start {at}");
                        }
                    }
                    request.wait(LIMIT).unwrap();
                }
                assert!(pair.b.notices(9).is_empty());
            }
        }
    });
}

#[test]
fn notices_come_in_order_in_both_directions_and_none_is_lost_where_nobody_takes_them() {
    each(|transport, pair| {
        // More than the peer holds: the rest waits at this end.
        let long = vec![3; 1 << 20];
        let requests: Vec<_> = (0..40u8).map(|at| pair.ab.notify(&[&[at], &long[..]].concat()).unwrap()).collect();
        let short: Vec<_> = (0..2000u32).map(|at| pair.ba.notify(&at.to_le_bytes()).unwrap()).collect();
        for (at, notice) in notices(&pair.a, 2000).into_iter().enumerate() {
            assert_eq!(notice.bytes, (at as u32).to_le_bytes(), "{transport}");
            assert_eq!(notice.peer, "b", "{transport}");
        }
        assert!(!requests[39].is_done(), "{transport}: all were taken by nobody");
        for (at, notice) in notices(&pair.b, 40).into_iter().enumerate() {
            assert!(notice.bytes[0] == at as u8 && notice.bytes.len() == long.len() + 1, "{transport}");
        }
        requests.iter().chain(&short).for_each(|request| drop(request.wait(LIMIT).unwrap()));
        let error = pair.ab.notify(&vec![0; NOTICE_MAX + 1]).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Usage);
        finish(pair.ab.notify(b""), transport);
        assert!(notices(&pair.b, 1)[0].bytes.is_empty());
    });
}

#[test]
fn the_event_descriptor_tells_of_notices() {
    let pair = pair_of(&[("CROSSRAIL_TLS", "shm")]);
    let mut poll = libc::pollfd { fd: pair.b.event_fd(), events: libc::POLLIN, revents: 0 };
    pair.b.drain_events();
    finish(pair.ab.notify(b"wake"), "notify");
    // SAFETY: one valid entry, which outlives the call.
    let ready = unsafe { libc::poll(&mut poll, 1, 10_000) };
    assert_eq!((ready, pair.b.notices(1)[0].bytes.as_slice()), (1, &b"wake"[..]));
}

#[test]
fn the_event_descriptor_tells_of_notices_once_nobody_polls_for_them_any_more() {
    let pair = pair_of(&[("CROSSRAIL_TLS", "shm")]);
    for round in 0..20 {
        // The background thread leaves progress to those that poll.
        for _ in 0..20 {
            let sent = pair.ab.notify(b"polled").unwrap();
            let begun = Instant::now();
            while pair.b.notices(1).is_empty() {
                assert!(Some(begun.elapsed()) < LIMIT, "round {round}: no notice");
            }
            sent.wait(LIMIT).unwrap();
        }
        let mut poll = libc::pollfd { fd: pair.b.event_fd(), events: libc::POLLIN, revents: 0 };
        pair.b.drain_events();
        assert!(pair.b.notices(1).is_empty());
        finish(pair.ab.notify(b"wake"), "notify");
        // SAFETY: one valid entry, which outlives the call.
        let ready = unsafe { libc::poll(&mut poll, 1, 10_000) };
        assert_eq!((ready, pair.b.notices(1)[0].bytes.as_slice()), (1, &b"wake"[..]), "round {round}");
    }
}

#[test]
fn what_does_not_pair_is_refused_and_a_move_in_flight_is_not_started_again() {
    let pair = pair_of(&[("CROSSRAIL_TLS", "tcp")]);
    let (here, there) = (Pool::of(&pair.a, None, 1 << 22, 1), Pool::of(&pair.b, None, 1 << 22, 2));
    let rows: Vec<_> = (0..1000u64).map(|row| (row * 4096, 4096)).collect();
    let (mine, yours) = (local(&pair.a, &here, &rows), remote(&pair.ab, &pair.b, &there, &rows));
    let refused = |local: &Layout, remote: &Layout, options: MoveOptions<'_>| {
        let error = pair.ab.prepare(MoveKind::Write, local, remote, options).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Usage, "{error}");
        error.detail
    };
    let index = |local: &'static [u32], remote: &'static [u32]| MoveOptions {
        local_index: Some(local),
        remote_index: Some(remote),
        ..Default::default()
    };
    assert!(refused(&mine, &yours, index(&[1, 2], &[1])).contains("2 local and 1 remote"));
    assert!(refused(&mine, &yours, index(&[1, 1000], &[1, 2])).contains("row 1000"));
    refused(&mine, &yours, index(&[], &[]));
    refused(&yours, &mine, MoveOptions::default());
    refused(&mine.split(2, 0).unwrap(), &yours, MoveOptions::default());
    let prepared = pair.ab.prepare(MoveKind::Write, &mine, &yours, MoveOptions::default()).unwrap();
    assert_eq!((prepared.runs(), prepared.rows()), (1, 1000));
    let request = prepared.start(StartOptions::default()).unwrap();
    if prepared.is_in_flight() {
        let again = prepared.start(StartOptions::default());
        assert!(again.is_err_and(|error| error.kind == ErrorKind::Usage) || !prepared.is_in_flight());
    }
    request.wait(LIMIT).unwrap();
    finish(prepared.start(StartOptions::default()), "again");
    let beyond = StartOptions { rows: Some(5..1001), ..Default::default() };
    assert_eq!(prepared.start(beyond).unwrap_err().kind, ErrorKind::Usage);
    here.region.deregister().unwrap();
    assert_eq!(prepared.start(StartOptions::default()).unwrap_err().kind, ErrorKind::Region);
}

#[test]
fn split_rows_go_to_their_parts() {
    each(|transport, pair| {
        let (here, there) = (Pool::of(&pair.a, None, 64_000, 1), Pool::of(&pair.b, None, 64_000, 2));
        let whole: Vec<_> = (0..100u64).map(|row| (row * 640, 600)).collect();
        let thirds: Vec<_> = (0..100u64).map(|row| (row * 640 + 1, 200)).collect();
        let (mine, yours) = (local(&pair.a, &here, &thirds), remote(&pair.ab, &pair.b, &there, &whole));
        let before = there.contents();
        let part = yours.split(3, 2).unwrap().slice(10, 90).unwrap();
        let mine = mine.slice(10, 90).unwrap();
        finish(
            pair.ab.prepare(MoveKind::Write, &mine, &part, MoveOptions::default()).unwrap().start(Default::default()),
            transport,
        );
        let pairs = (10..90usize).map(|row| ((whole[row].0 + 400, 200), thirds[row]));
        assert!(there.contents() == copied(&before, &here.contents(), pairs), "{transport}");
    });
}

#[test]
fn rows_by_keys_count_the_immediate_of_their_write() {
    each(|transport, pair| {
        let here = Pool::of(&pair.a, None, 4096, 1);
        let there = [Pool::of(&pair.b, None, 4096, 2), Pool::of(&pair.b, None, 4096, 3)];
        let keys = [there[0].region.key(), there[1].region.key()];
        let row = |region, offset| Row { region, offset, len: 16, stride: 64, count: 10 };
        let yours = pair.ab.layout(&[row(&keys[1], 5), row(&keys[0], 100)]).unwrap();
        let mine = pair.a.layout(&[Row { region: &here.region, offset: 0, len: 16, stride: 16, count: 20 }]).unwrap();
        let options = MoveOptions { imm: Some(7), ..Default::default() };
        let prepared = pair.ab.prepare(MoveKind::Write, &mine, &yours, options).unwrap();
        for times in 1..=2 {
            finish(prepared.start(StartOptions::default()), transport);
            there[1].region.wait_imm(7, times, LIMIT).unwrap();
        }
        assert_eq!(there[0].region.imm_count(7), 0);
        let sources = here.contents();
        for (pool, offset, first) in [(&there[1], 5, 0), (&there[0], 100, 10)] {
            let pairs = (0..10).map(|k| ((offset + 64 * k, 16), ((first + k) * 16, 16)));
            assert!(pool.contents() == copied(&pool.bytes, &sources, pairs), "{transport}");
        }
        // Of a part, whose first row is in the other region.
        let (mine, yours) = (mine.slice(9, 20).unwrap(), yours.slice(9, 20).unwrap().slice(1, 11).unwrap());
        let part = pair.ab.prepare(MoveKind::Write, &mine.slice(1, 11).unwrap(), &yours, options).unwrap();
        finish(part.start(StartOptions::default()), transport);
        there[0].region.wait_imm(7, 1, LIMIT).unwrap();
        assert_eq!(there[1].region.imm_count(7), 2, "{transport}");
        let error = pair.ab.layout(&[row(&keys[1], 4096 - 64 * 9 - 15)]).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Usage);
    });
}

/// A move of 2 MiB in rows of 4 KiB.
fn long_move(pair: &Pair, shared: bool, kind: MoveKind) -> (Pool, Pool, Move) {
    let len = 2 << 20;
    let here = Pool::of(&pair.a, shared.then_some(&pair.contexts.0), len, 1);
    let there = Pool::of(&pair.b, shared.then_some(&pair.contexts.1), len, 2);
    let rows: Vec<_> = (0..512u64).map(|row| (row * 4096, 4096)).collect();
    let (mine, yours) = (local(&pair.a, &here, &rows), remote(&pair.ab, &pair.b, &there, &rows));
    let index = Random(3).order(512);
    let options = MoveOptions { local_index: Some(&index), notice: b"done", ..Default::default() };
    let prepared = pair.ab.prepare(kind, &mine, &yours, options).unwrap();
    (here, there, prepared)
}

#[test]
fn a_cancelled_move_touches_nothing_once_it_is_over() {
    each(|transport, pair| {
        for (shared, kind) in
            [(false, MoveKind::Write), (true, MoveKind::Write), (false, MoveKind::Read), (true, MoveKind::Read)]
        {
            let (here, there, prepared) = long_move(&pair, shared, kind);
            for _ in 0..6 {
                let request = prepared.start(StartOptions::default()).unwrap();
                request.cancel();
                match request.wait(LIMIT) {
                    Ok(_) => assert_eq!(notices(&pair.b, 1)[0].bytes, b"done"),
                    Err(error) => assert_eq!(error.kind, ErrorKind::Cancelled, "{transport}: {error}"),
                }
                let target = if kind == MoveKind::Write { &there } else { &here };
                let seen = target.contents();
                finish(pair.ba.notify(b"a round trip"), transport);
                assert!(target.contents() == seen, "{transport}: bytes came after the end");
                notices(&pair.a, 1);
            }
        }
        // Notices of cancelled moves take no credit away.
        let requests: Vec<_> = (0..8).map(|_| pair.ab.notify(&[1; NOTICE_MAX]).unwrap()).collect();
        assert_eq!(notices(&pair.b, 8).len(), 8);
        requests.iter().for_each(|request| drop(request.wait(LIMIT).unwrap()));
    });
}

#[test]
fn a_region_that_is_deregistered_ends_moves_over_it_and_is_left_alone() {
    each(|transport, pair| {
        for (shared, kind) in
            [(false, MoveKind::Write), (true, MoveKind::Write), (false, MoveKind::Read), (true, MoveKind::Read)]
        {
            let (_here, there, prepared) = long_move(&pair, shared, kind);
            let request = prepared.start(StartOptions::default()).unwrap();
            there.region.deregister().unwrap();
            let seen = there.contents();
            match request.wait(LIMIT) {
                Ok(_) => drop(notices(&pair.b, 1)),
                Err(error) => assert_eq!(error.kind, ErrorKind::Region, "{transport}: {error}"),
            }
            finish(pair.ab.notify(b"a round trip"), transport);
            notices(&pair.b, 1);
            assert!(there.contents() == seen, "{transport}: bytes came after deregister");
            let error = prepared.start(StartOptions::default()).unwrap().wait(LIMIT).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Region, "{transport}: {error}");
        }
        // The endpoint goes on.
        let (_here, _there, prepared) = long_move(&pair, false, MoveKind::Write);
        finish(prepared.start(StartOptions::default()), transport);
    });
}

#[test]
fn moves_and_notices_with_a_peer_that_ends_fail_and_nothing_is_written_afterwards() {
    for (at, shared) in [(0, false), (1, true), (2, false), (3, true)] {
        each(|transport, pair| {
            let kind = if at < 2 { MoveKind::Write } else { MoveKind::Read };
            let (here, _there, prepared) = long_move(&pair, shared, kind);
            let request = prepared.start(StartOptions::default()).unwrap();
            let held: Vec<_> = (0..8).map(|_| pair.ab.notify(&[1; NOTICE_MAX]).unwrap()).collect();
            pair.b.close().unwrap();
            for request in held.iter().chain([&request]) {
                if let Err(error) = request.wait(LIMIT) {
                    assert!(matches!(error.kind, ErrorKind::PeerDead | ErrorKind::Closed), "{transport}: {error}");
                }
            }
            let seen = here.contents();
            let error = match prepared.start(StartOptions::default()) {
                Ok(request) => request.wait(LIMIT).unwrap_err(),
                Err(error) => error,
            };
            assert!(matches!(error.kind, ErrorKind::PeerDead | ErrorKind::Closed), "{transport}: {error}");
            assert!(here.contents() == seen, "{transport}");
        });
    }
}

#[test]
fn a_worker_that_admits_is_reached_by_name_from_both_ends() {
    let settings = || Settings::from_pairs([("CROSSRAIL_TLS", "shm,tcp")]).unwrap();
    let context = Context::new(settings()).unwrap();
    let options = |name: &str| WorkerOptions { name: Some(name.to_owned()), admit: true, ..Default::default() };
    let (a, b) = (Worker::new(&context, options("left")).unwrap(), Worker::new(&context, options("right")).unwrap());
    assert!(b.peer("left").is_none());
    let described = Description::parse(&b.describe(&[]).unwrap()).unwrap();
    assert_eq!(described.name(), "right");
    a.connect(described.address(), &ConnectOptions::default()).unwrap();
    finish(a.peer("right").expect("a peer").notify(b"hello"), "notify");
    assert_eq!(notices(&b, 1)[0].peer, "left");
    finish(b.peer("left").expect("a peer").notify(b"and back"), "notify");
    assert_eq!(notices(&a, 1)[0].bytes, b"and back");
    assert_eq!(b.accept(Some(Duration::ZERO)).unwrap_err().kind, ErrorKind::Timeout);
}

#[test]
fn a_worker_moves_rows_to_itself() {
    let context = Context::new(Settings::default()).unwrap();
    let worker = Worker::new(&context, WorkerOptions::default()).unwrap();
    let own = worker.connect(&worker.address(), &ConnectOptions::default()).unwrap();
    let (here, there) = (Pool::of(&worker, None, 1 << 20, 1), Pool::of(&worker, None, 1 << 20, 2));
    let rows: Vec<_> = (0..1000u64).map(|row| (row * 1000, 999)).collect();
    let (mine, yours) = (local(&worker, &here, &rows), remote(&own, &worker, &there, &rows));
    let prepared = own.prepare(MoveKind::Write, &mine, &yours, MoveOptions::default()).unwrap();
    let before = there.contents();
    finish(prepared.start(StartOptions::default()), "self");
    let pairs = rows.iter().map(|row| (*row, *row));
    assert!(there.contents() == copied(&before, &here.contents(), pairs));
}
