//! Ranks as threads of one process, with a store of their own: what comes out of dispatch and combine is what the dense
//! computation gives.
#![allow(missing_docs)]

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use crossrail::{Context, Settings};
use crossrail_control::{Group, GroupOptions, StoreServer};
use crossrail_ep_host::{
    CombineOptions, Config, DispatchOptions, Dispatched, ExpertBuffer, Input, Layout, LinkKind, OnLoss, Payload,
};
use crossrail_types::ErrorKind;

const HIDDEN: usize = 136;
const LOCAL: usize = 3;
const TOPK: usize = 4;
const TOKENS: usize = 7;

#[derive(Clone)]
struct Case {
    ranks: usize,
    nodes: usize,
    layout: Layout,
    prereduce: bool,
    rounds: u64,
}

/// What one rank does with its buffer.
type Body = fn(&ExpertBuffer, &Case, usize);

/// Runs `body` on every rank, each with a group and a buffer that is connected to all.
fn on_ranks(case: &Case, body: Body) {
    let settings = Settings::default();
    let server = StoreServer::start("127.0.0.1:0", &settings).expect("a store");
    let store = server.address();
    let threads: Vec<_> = (0..case.ranks)
        .map(|rank| {
            let (case, store) = (case.clone(), store.clone());
            thread::spawn(move || {
                let (group, buffer) = rank_of(&case, rank, &store);
                let all: Vec<u32> = (0..case.ranks as u32).collect();
                buffer.connect(&all, true, None).expect("connect");
                body(&buffer, &case, rank);
                buffer.destroy().expect("destroy");
                group.leave().expect("leave");
            })
        })
        .collect();
    for thread in threads {
        thread.join().expect("a rank failed");
    }
}

fn rank_of(case: &Case, rank: usize, store: &str) -> (Group, ExpertBuffer) {
    let settings = Settings::default();
    let options = GroupOptions {
        rank: Some(rank as u32),
        size: Some(case.ranks as u32),
        node: Some(format!("node {}", rank * case.nodes / case.ranks)),
        store: Some(store.to_owned()),
        ..GroupOptions::default()
    };
    let group = Group::join(options, &settings).expect("join");
    let context = Context::new(settings).expect("a context");
    let config = Config {
        ranks: case.ranks as u32,
        max_tokens: TOKENS,
        hidden: HIDDEN,
        experts: LOCAL * case.ranks,
        topk: TOPK.min(LOCAL * case.ranks),
        payload: Payload::Bf16,
        layouts: vec![case.layout],
        prereduce: case.prereduce,
        share_node: true,
        timeout: Duration::from_secs(20),
        on_loss: OnLoss::Raise,
    };
    let buffer = ExpertBuffer::new(&group, &context, "experts", config).expect("a buffer");
    (group, buffer)
}

fn narrow(value: f32) -> u16 {
    let bits = value.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

fn wide(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

struct Random(u64);

impl Random {
    fn next(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below
    }
}

struct Tokens {
    x: Vec<u16>,
    idx: Vec<i64>,
    weights: Vec<f32>,
    count: usize,
}

/// The tokens of one rank in one round; every rank can make everybody's.
fn tokens_of(case: &Case, rank: usize, round: u64) -> Tokens {
    let mut random = Random(round * 1009 + rank as u64 + 1);
    let experts = (LOCAL * case.ranks) as u64;
    let topk = TOPK.min(experts as usize);
    let count = if round % 5 == rank as u64 { 0 } else { 1 + random.next(TOKENS as u64) as usize };
    let mut tokens = Tokens { x: Vec::new(), idx: vec![-1; count * topk], weights: vec![0.0; count * topk], count };
    for token in 0..count {
        tokens.x.extend((0..HIDDEN).map(|_| narrow(random.next(1000) as f32 / 64.0 - 7.0)));
        for k in 0..topk {
            let expert = random.next(experts) as i64;
            let chosen = &mut tokens.idx[token * topk..(token + 1) * topk];
            if random.next(8) > 0 && !chosen.contains(&expert) {
                chosen[k] = expert;
            }
            tokens.weights[token * topk + k] = random.next(64) as f32 / 64.0;
        }
    }
    if round % 3 == 2 {
        repeat_experts(&mut tokens.idx, topk);
    }
    tokens
}

/// Every other token selects one expert twice and the next token does not: there is room for as many selections of an
/// expert as there are tokens, and without `prereduce` for three of a token at a rank.
fn repeat_experts(idx: &mut [i64], topk: usize) {
    for pair in idx.chunks_exact_mut(2 * topk) {
        let (token, next) = pair.split_at_mut(topk);
        let expert = token[0];
        token[2] = expert;
        token[3..].fill(-1);
        next.iter_mut().filter(|id| **id == expert).for_each(|id| *id = -1);
    }
}

fn row(came: &Dispatched, at: usize) -> Vec<u16> {
    let mut bytes = vec![0; 2 * HIDDEN];
    came.rows.memory.copy_to(came.rows.offset + at * 2 * HIDDEN, &mut bytes).expect("inside");
    bytes.as_chunks::<2>().0.iter().map(|pair| u16::from_le_bytes(*pair)).collect()
}

/// Every row that came is the one that was sent, at its place; gives the expert's outputs, which are the rows themselves.
fn check_rows(came: &Dispatched, case: &Case, me: usize, round: u64) -> Vec<u16> {
    let topk = TOPK.min(LOCAL * case.ranks);
    let most = case.ranks * TOKENS;
    let mut next = [0usize; LOCAL];
    let mut total = 0;
    let mut outputs = match case.layout {
        Layout::Expert => vec![0x7fc0; LOCAL * most * HIDDEN],
        Layout::Rank => Vec::new(),
    };
    let (local_idx, weights) = (came.handle.topk_idx(), came.handle.topk_weights());
    for source in 0..case.ranks {
        let sent = tokens_of(case, source, round);
        for token in 0..sent.count {
            let x = &sent.x[token * HIDDEN..(token + 1) * HIDDEN];
            let ids = &sent.idx[token * topk..(token + 1) * topk];
            let mine = |id: &i64| *id >= 0 && *id as usize / LOCAL == me;
            if !ids.iter().any(mine) {
                continue;
            }
            let mut weight = 0.0;
            for (k, id) in ids.iter().enumerate().filter(|(_, id)| mine(id)) {
                let local = *id as usize % LOCAL;
                assert_eq!(local_idx[total * topk + k], local as i64);
                weight += weights[total * topk + k];
                if case.layout == Layout::Expert {
                    let at = local * most + next[local];
                    assert_eq!(row(came, at), x, "rank {me}, round {round}: token {token} of {source} for {id}");
                    outputs[at * HIDDEN..(at + 1) * HIDDEN].copy_from_slice(x);
                }
                next[local] += 1;
            }
            if case.layout == Layout::Rank {
                assert_eq!(row(came, total), x, "rank {me}, round {round}: token {token} of {source}");
                outputs.extend(x.iter().map(|bits| narrow(wide(*bits) * weight)));
            }
            total += 1;
        }
    }
    assert_eq!(came.handle.rows(), total);
    assert_eq!(came.counts, next.map(|count| count as i32));
    outputs
}

fn exchange(buffer: &ExpertBuffer, case: &Case, me: usize) {
    let topk = TOPK.min(LOCAL * case.ranks);
    for round in 0..case.rounds {
        let sent = tokens_of(case, me, round);
        let early = round % 2 == 0 || case.layout == Layout::Rank;
        let input = Input {
            x: sent.x.clone().into(),
            topk_idx: sent.idx.clone().into(),
            topk_weights: early.then(|| sent.weights.clone().into()),
        };
        let options = DispatchOptions { layout: case.layout, ..DispatchOptions::default() };
        let came = buffer.dispatch(input, options).and_then(|pending| pending.finish()).expect("dispatch");
        let weights_now = (!early).then(|| sent.weights.clone().into());
        let outputs = if early { check_rows(&came, case, me, round) } else { copies(&came, case) };
        let options = CombineOptions { weights: weights_now, ..CombineOptions::default() };
        let combined = buffer.combine(outputs.into(), &came.handle, options).and_then(|pending| pending.finish());
        let out = combined.expect("combine").out.expect("no memory was given");
        assert_eq!(out.len(), sent.count * HIDDEN);
        for token in 0..sent.count {
            let pairs = sent.idx[token * topk..].iter().zip(&sent.weights[token * topk..]).take(topk);
            let weight: f32 = pairs.filter(|(id, _)| **id >= 0).map(|(_, weight)| weight).sum();
            let here = token * HIDDEN..(token + 1) * HIDDEN;
            for (got, x) in out[here.clone()].iter().zip(&sent.x[here]) {
                let (got, want) = (wide(*got), wide(*x) * weight);
                assert!((got - want).abs() <= 0.02 * want.abs().max(1.0), "rank {me}, round {round}: {got} for {want}");
            }
        }
    }
    assert!(buffer.faults().is_empty() && buffer.masked().is_empty());
}

/// The rows as they came, whatever they are.
fn copies(came: &Dispatched, case: &Case) -> Vec<u16> {
    (0..LOCAL * case.ranks * TOKENS).flat_map(|at| row(came, at)).collect()
}

#[test]
fn every_layout_and_way_gives_what_the_dense_computation_gives() {
    for (ranks, nodes) in [(1, 1), (2, 1), (3, 1), (5, 1), (2, 2), (4, 2), (5, 3)] {
        for (layout, prereduce) in [(Layout::Expert, true), (Layout::Expert, false), (Layout::Rank, true)] {
            on_ranks(&Case { ranks, nodes, layout, prereduce, rounds: 24 }, exchange);
        }
    }
}

#[test]
fn ranks_of_other_nodes_are_reached_through_the_engine() {
    let case = Case { ranks: 4, nodes: 2, layout: Layout::Rank, prereduce: true, rounds: 1 };
    on_ranks(&case, |buffer, _, me| {
        for link in buffer.links() {
            let want = match link.rank as usize {
                rank if rank == me => LinkKind::Myself,
                rank if rank / 2 == me / 2 => LinkKind::Heap,
                _ => LinkKind::Network,
            };
            assert_eq!(link.kind, want);
        }
    });
}

/// Whoever finds out first is gone by the time that others look for it: they must not wait for its next buffer.
#[test]
fn ranks_that_want_different_buffers_are_all_told_at_once() {
    for nodes in [1, 4] {
        let server = StoreServer::start("127.0.0.1:0", &Settings::default()).expect("a store");
        let started = Instant::now();
        let threads: Vec<_> = (0..4)
            .map(|rank| {
                let prereduce = rank == 1;
                let case = Case { ranks: 4, nodes, layout: Layout::Expert, prereduce, rounds: 0 };
                let store = server.address();
                thread::spawn(move || {
                    let (group, buffer) = rank_of(&case, rank, &store);
                    let error = buffer.connect(&[0, 1, 2, 3], true, Some(Duration::from_secs(60)));
                    buffer.destroy().expect("destroy");
                    // The others still look for this rank in the group.
                    (group, error.expect_err("one of them is different"))
                })
            })
            .collect();
        let ended: Vec<_> = threads.into_iter().map(|thread| thread.join().expect("a rank")).collect();
        for (group, error) in ended {
            assert_eq!(error.kind, ErrorKind::Mismatch, "{error}");
            assert!(error.to_string().contains("prereduce is ") && error.to_string().contains("rank 1"), "{error}");
            group.leave().expect("leave");
        }
        assert!(started.elapsed() < Duration::from_secs(20), "somebody waited");
    }
}

#[test]
fn a_wrong_call_is_heard_by_all_and_the_next_works() {
    let case = Case { ranks: 3, nodes: 1, layout: Layout::Rank, prereduce: true, rounds: 3 };
    on_ranks(&case, |buffer, case, me| {
        let id: i64 = if me == 1 { 77 } else { 0 };
        let input =
            Input { x: vec![0u16; HIDDEN].into(), topk_idx: vec![id, -1i64, -1, -1].into(), topk_weights: None };
        let options = DispatchOptions { layout: case.layout, ..DispatchOptions::default() };
        let error = buffer.dispatch(input, options).and_then(|pending| pending.finish()).expect_err("a wrong id");
        assert!(error.detail.contains("topk_idx[0, 0] is 77"), "{error}");
        assert!(me == 1 || error.detail.contains("rank 1"), "{error}");
        exchange(buffer, case, me);
    });
}

#[test]
fn threads_share_a_buffer() {
    let case = Case { ranks: 1, nodes: 1, layout: Layout::Expert, prereduce: true, rounds: 1 };
    on_ranks(&case, |buffer, case, me| {
        let dispatched = || {
            let sent = tokens_of(case, me, 1);
            let weights = Some(sent.weights.into());
            let input = Input { x: sent.x.into(), topk_idx: sent.idx.into(), topk_weights: weights };
            let pending = buffer.dispatch(input, DispatchOptions::default()).expect("dispatch");
            thread::yield_now();
            pending.finish().expect("finish")
        };
        let alone = dispatched();
        check_rows(&alone, case, me, 1);
        // A dispatch needs the slots of the last but one, which another thread may have begun and has to finish. The rows
        // are not looked at meanwhile: the next but one overwrites them.
        let several = || (0..50).for_each(|_| assert_eq!(dispatched().counts, alone.counts));
        thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(several))));
        check_rows(&dispatched(), case, me, 1);
        assert!(buffer.faults().is_empty() && buffer.masked().is_empty());
    });
}

/// A member's key may vanish while the rank lives: its lease ran out, or somebody deleted it. Once ranks are connected,
/// their connections say who is lost; while they connect, the store does.
#[test]
fn the_store_takes_no_rank_out_of_the_sums() {
    let settings = Settings::default();
    let server = StoreServer::start("127.0.0.1:0", &settings).expect("a store");
    let deadline = Instant::now() + Duration::from_secs(60);
    let store = crossrail_control::open(&server.address(), &settings, deadline).expect("the store");
    let case = Case { ranks: 3, nodes: 2, layout: Layout::Expert, prereduce: true, rounds: 40 };
    let ranks: Vec<_> = (0..case.ranks).map(|rank| rank_of(&case, rank, &server.address())).collect();
    thread::scope(|scope| {
        let (connected, each_connected) = mpsc::channel();
        let running: Vec<_> = ranks
            .iter()
            .enumerate()
            .map(|(rank, (group, buffer))| {
                let (case, connected) = (&case, connected.clone());
                scope.spawn(move || {
                    buffer.connect(&[0, 1, 2], true, None).expect("connect");
                    let seen = group.changes();
                    connected.send(rank).expect("whoever deletes keys waits for every rank");
                    exchange(buffer, case, rank);
                    // At least one key has vanished: with it gone, the sums are as whole as before.
                    assert!(group.wait_change(seen, deadline) > seen, "nobody has deleted a key");
                    exchange(buffer, case, rank);
                })
            })
            .collect();
        for _ in 0..case.ranks {
            each_connected.recv_timeout(Duration::from_secs(60)).expect("a rank did not connect");
        }
        while running.iter().any(|rank| !rank.is_finished()) {
            let (members, _) = store.list("crossrail/", deadline).expect("the keys");
            for member in members.iter().filter(|entry| entry.key.contains("/member/")) {
                store.delete(&member.key, deadline).expect("deleted");
            }
        }
    });
    for (_, buffer) in &ranks {
        buffer.destroy().expect("destroy");
    }
}

#[test]
fn after_different_operations_every_call_fails() {
    let case = Case { ranks: 3, nodes: 3, layout: Layout::Expert, prereduce: true, rounds: 3 };
    for nodes in [1, 3] {
        on_ranks(&Case { nodes, ..case.clone() }, |buffer, case, me| {
            exchange(buffer, case, me);
            let call = |which: usize| {
                let sent = tokens_of(case, me, 1);
                let input = Input { x: sent.x.into(), topk_idx: sent.idx.into(), topk_weights: None };
                match which {
                    0 => buffer.sync().and_then(|pending| pending.finish()),
                    _ => buffer
                        .dispatch(input, DispatchOptions::default())
                        .and_then(|pending| pending.finish())
                        .map(drop),
                }
            };
            let began = Instant::now();
            for turn in 0..3 {
                let error = call(if turn == 0 { me } else { 1 }).expect_err("the ranks called different operations");
                assert_eq!(error.kind, ErrorKind::Mismatch, "rank {me}, turn {turn}: {error}");
            }
            assert!(began.elapsed() < Duration::from_secs(10), "it waited for the limit");
        });
    }
}
