//! What can be said without a second process: layouts, routing, and what other ranks' bytes may not do.

use std::thread;
use std::time::Duration;

use crossrail::{Context, Settings};
use crossrail_control::{Group, GroupOptions, StoreServer};
use crossrail_ep::{Config, Layout, Payload, Scale};
use crossrail_types::{Error, ErrorKind};

use crate::buffer::ExpertBuffer;
use crate::dispatch::DispatchOptions;
use crate::heap::{Areas, HEADER, Header};
use crate::routes::{Destination, NO_EXPERT, Received, Sent};
use crate::tensor::Input;

fn config() -> Config {
    Config {
        ranks: 3,
        max_tokens: 5,
        hidden: 256,
        experts: 6,
        topk: 4,
        payload: Payload::Fp8(Scale::F32),
        layouts: vec![Layout::Expert, Layout::Rank],
        prereduce: true,
        share_node: true,
        timeout: Duration::from_secs(1),
        on_loss: crossrail_ep::OnLoss::Raise,
    }
}

fn input(config: &Config, idx: &[i64], weights: Option<Vec<f32>>) -> Input {
    let tokens = idx.len() / config.topk;
    Input {
        x: vec![0u16; tokens * config.hidden].into(),
        topk_idx: idx.to_vec().into(),
        topk_weights: weights.map(Into::into),
    }
}

#[test]
fn nothing_of_a_heap_overlaps() {
    for (prereduce, payload) in
        [(true, Payload::Fp8(Scale::Ue8m0)), (false, Payload::Fp8(Scale::F32)), (true, Payload::Bf16)]
    {
        let config = Config { prereduce, payload, ..config() };
        let areas = Areas::new(&config);
        let tokens = config.max_tokens;
        let mut ranges = vec![(0, 128)];
        for rank in 0..3 {
            ranges.push((areas.words(rank), 128));
        }
        for parity in 0..2 {
            for rank in 0..3 {
                let slot = areas.slot(parity, rank);
                ranges.push((slot, HEADER + tokens * areas.meta_stride));
                ranges.push((slot + areas.slot_rows(), tokens * areas.row));
                ranges.push((slot + areas.slot_scales(), tokens * areas.scale));
                let back = areas.back(parity, rank);
                ranges.push((back, HEADER));
                ranges.push((back + areas.back_weights(), HEADER + tokens * config.topk * 4));
                let most = if prereduce { 1 } else { config.most_local() };
                ranges.push((back + areas.back_rows(), tokens * most * areas.wide));
            }
            ranges.push((areas.rank_rows(parity), 3 * tokens * areas.row));
            ranges.push((areas.rank_scales(parity), 3 * tokens * areas.scale));
        }
        ranges.sort_unstable();
        for pair in ranges.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:?} of {ranges:?}");
        }
        let (last, len) = ranges[ranges.len() - 1];
        assert!(last + len <= areas.heap);
    }
}

#[test]
fn the_plan_adds_up_and_grows_with_tokens() {
    let plan = ExpertBuffer::plan(&config(), 1, 1).expect("a plan");
    let areas = Areas::new(&config());
    let heap = areas.heap as u64;
    let of = |name: &str| plan.kinds.iter().find(|(kind, _)| *kind == name).map_or(0, |(_, bytes)| *bytes);
    assert_eq!(of("control words") + of("dispatch slots") + of("combine slots") + of("rank-layout rows"), heap);
    assert!(of("expert-layout rows") >= 2 * 2 * 15 * (256 + 8) as u64 && of("staging for other nodes") > 0);
    let free = plan.free.expect("Linux tells");
    let largest = plan.largest_tokens.expect("Linux tells");
    let fits = Config { max_tokens: largest, ..config() };
    assert!(ExpertBuffer::plan(&fits, 1, 1).expect("a plan").total() <= free);
    if largest < 1 << 24 {
        let one_more = Config { max_tokens: largest + 1, ..config() };
        assert!(ExpertBuffer::plan(&one_more, 1, 1).expect("a plan").total() > free);
    }
    let shared = ExpertBuffer::plan(&config(), 1, 3).expect("a plan");
    let third = Config { max_tokens: shared.largest_tokens.expect("Linux tells"), ..config() };
    assert!(ExpertBuffer::plan(&third, 1, 1).expect("a plan").total() <= shared.free.expect("Linux tells") / 3);
    assert!(shared.to_string().contains("for 3 ranks of this machine"), "{shared}");
    let huge = Config { max_tokens: 1 << 24, hidden: 1 << 17, ..config() };
    let error = ExpertBuffer::plan(&huge, 0, 1).expect("a plan").check().expect_err("petabytes");
    assert_eq!(error.kind, ErrorKind::Exhausted);
    assert!(error.detail.contains("dispatch slots") && error.detail.contains("in all"), "{error}");
}

#[test]
fn a_token_goes_once_to_each_rank() {
    let config = config();
    let idx = [0, 1, 4, -1, -1, -1, -1, -1, 5, 2, 3, 4];
    let sent = Sent::new(&config, Layout::Expert, &input(&config, &idx, None), &|_| true).expect("good ids");
    assert_eq!(sent.destinations_of(0), [Destination { rank: 0, row: 0 }, Destination { rank: 2, row: 0 }]);
    assert!(sent.destinations_of(1).is_empty());
    assert_eq!(sent.destinations_of(2), [Destination { rank: 1, row: 0 }, Destination { rank: 2, row: 1 }]);
    assert_eq!((sent.to[2].tokens.as_slice(), sent.to[2].first.as_slice()), (&[0, 2][..], &[0, 1, 3][..]));
    assert_eq!(sent.selections, 7);
    let without = Sent::new(&config, Layout::Expert, &input(&config, &idx, None), &|rank| rank != 2).expect("good ids");
    assert!(without.to[2].tokens.is_empty());
    assert_eq!(without.selections, 4);
}

#[test]
fn every_selection_counts_as_long_as_there_is_room() {
    let config = config();
    let sent = |config: &Config, layout, idx: &[i64]| Sent::new(config, layout, &input(config, idx, None), &|_| true);
    let twice = [3, 1, 3, 5];
    let one = sent(&config, Layout::Expert, &twice).expect("a row for each of two selections");
    assert_eq!((one.selections, &one.to[1].tokens[..], &one.to[1].first[..]), (4, &[0][..], &[0, 2][..]));
    // Five tokens: an expert has five rows for this rank.
    let fits = [[0, 0, 1, 1], [0, 0, 1, 1], [0, 1, 2, 3], [2; 4], [4; 4]].concat();
    sent(&config, Layout::Expert, &fits).expect("five selections of an expert at most");
    let many = [[3, 1, 3, 5], [3, 3, 3, 3], [0; 4]].concat();
    let error = sent(&config, Layout::Expert, &many).expect_err("six selections of expert 3");
    assert!(error.kind == ErrorKind::Usage && error.detail.contains("topk_idx[1, 3]: expert 3"), "{error}");
    assert!(error.detail.contains("more than 5 times"), "{error}");
    let unreachable = Sent::new(&config, Layout::Expert, &input(&config, &many, None), &|rank| rank != 1);
    assert_eq!(unreachable.expect("nothing is sent to rank 1").selections, 6);
    assert_eq!(sent(&config, Layout::Rank, &many).expect("one row for a token").selections, 12);
    let whole = Config { prereduce: false, ..config };
    assert_eq!(sent(&whole, Layout::Expert, &twice).expect("two outputs").selections, 4);
    let error = sent(&whole, Layout::Expert, &[3, 2, 3, 5]).expect_err("three outputs");
    assert!(error.detail.contains("topk_idx[0], rank 1: 3 selections of a token"), "{error}");
    assert_eq!(sent(&whole, Layout::Rank, &[3, 2, 3, 5]).expect("one row").selections, 4);
}

#[test]
fn metadata_comes_back_as_it_was_written() {
    let config = config();
    let areas = Areas::new(&config);
    let idx = [0, 1, 4, -1, 5, 2, 3, 4];
    let weights: Vec<f32> = (0..8).map(|i| i as f32 / 8.0).collect();
    let input = input(&config, &idx, Some(weights.clone()));
    let sent = Sent::new(&config, Layout::Expert, &input, &|_| true).expect("good ids");
    let mut bytes = Vec::new();
    sent.metadata(&config, &areas, 2, &input, &mut bytes);
    let received = Received::read(&config, Layout::Expert, &areas, &bytes, true).expect("our own");
    assert_eq!(received.tokens, [0, 1]);
    assert_eq!(received.experts, [NO_EXPERT, NO_EXPERT, 0, NO_EXPERT, 1, NO_EXPERT, NO_EXPERT, 0]);
    assert_eq!(received.weights, weights);
}

#[test]
fn metadata_of_others_is_checked() {
    let config = config();
    let areas = Areas::new(&config);
    let mut entry = vec![0u8; areas.meta_stride];
    Received::read(&config, Layout::Expert, &areas, &entry, true).expect("token 0 for expert 0");
    entry[8..10].copy_from_slice(&2u16.to_ne_bytes());
    assert!(
        Received::read(&config, Layout::Expert, &areas, &entry, true).is_err_and(|why| why.contains("expert 2 of 2"))
    );
    entry[8..10].copy_from_slice(&0u16.to_ne_bytes());
    entry[..4].copy_from_slice(&5u32.to_ne_bytes());
    assert!(Received::read(&config, Layout::Expert, &areas, &entry, true).is_err_and(|why| why.contains("token 5")));
    let mut random = 7u64;
    for _ in 0..2000 {
        let bytes: Vec<u8> = (0..3 * areas.meta_stride)
            .map(|_| {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (random >> 56) as u8 & 3
            })
            .collect();
        if let Ok(received) = Received::read(&config, Layout::Expert, &areas, &bytes, true) {
            assert!(received.experts.iter().all(|expert| *expert == NO_EXPERT || *expert < 2));
            assert!(received.tokens.iter().all(|token| *token < 5));
        }
    }
}

/// An expert has so many rows for each rank: what it is sent beyond them would lie behind its memory.
#[test]
fn metadata_has_no_more_rows_than_there_is_memory_for() {
    let config = config();
    let areas = Areas::new(&config);
    let rows = |experts: [u16; 4]| {
        let mut entry = vec![0u8; areas.meta_stride];
        entry[8..16].as_chunks_mut::<2>().0.iter_mut().zip(experts).for_each(|(to, id)| *to = id.to_ne_bytes());
        entry.repeat(config.max_tokens)
    };
    let read = |config: &Config, layout, experts| Received::read(config, layout, &areas, &rows(experts), true);
    assert!(read(&config, Layout::Expert, [0, 1, NO_EXPERT, NO_EXPERT]).is_ok());
    for experts in [[0, 0, NO_EXPERT, NO_EXPERT], [1; 4]] {
        let why = read(&config, Layout::Expert, experts).expect_err("10 rows of an expert, or 20");
        assert!(why.contains("more than 5 times"), "{why}");
        read(&config, Layout::Rank, experts).expect("a token has one row");
    }
    // Two experts: two outputs of a token can be returned.
    let whole = Config { prereduce: false, max_tokens: 20, ..config.clone() };
    read(&whole, Layout::Expert, [NO_EXPERT, 1, 1, NO_EXPERT]).expect("two outputs");
    let why = read(&whole, Layout::Expert, [NO_EXPERT, 1, 1, 0]).expect_err("three outputs");
    assert!(why.contains("3 selections of a token") && why.contains("2 outputs"), "{why}");
    read(&whole, Layout::Rank, [1; 4]).expect("one row");
}

#[test]
fn wrong_ids_are_named_by_place() {
    let config = config();
    for (idx, text) in [
        ([0, 1, 2, 6], "topk_idx[0, 3] is 6"),
        ([0, -2, 2, 5], "topk_idx[0, 1] is -2"),
        ([i64::MAX, 1, 2, 5], "topk_idx[0, 0]"),
    ] {
        let error = Sent::new(&config, Layout::Expert, &input(&config, &idx, None), &|_| true).expect_err(text);
        assert!(error.kind == ErrorKind::Usage && error.detail.contains(text), "{error}");
    }
    let many = vec![-1; 6 * 4];
    let error = Sent::new(&config, Layout::Expert, &input(&config, &many, None), &|_| true).expect_err("6 tokens");
    assert!(error.detail.contains("6 tokens are more than max_tokens_per_rank, 5"), "{error}");
    let short = Input { x: vec![0u16; 10].into(), ..input(&config, &[0, 1, 2, 3], None) };
    let error = Sent::new(&config, Layout::Expert, &short, &|_| true).expect_err("short x");
    assert!(error.detail.contains("bf16 [1, 256]"), "{error}");
}

#[test]
fn a_header_keeps_what_fits_of_a_text() {
    let why = "ä".repeat(200);
    let header = Header::failed(3, &Error::new(ErrorKind::Usage, "dispatch", why.clone()));
    let error = header.failure(2, "dispatch").expect("a failure");
    let text = error.detail.strip_prefix("the call of rank 2 failed: ").expect("the rank");
    assert!(!text.is_empty() && why.starts_with(text) && header.rows == 0);
    assert_eq!(Header::new(3, 7, 0).failure(2, "dispatch"), None);
    let wild = Header { flags: 1, text_len: u32::MAX, ..Header::new(1, 0, 0) };
    assert!(wild.failure(2, "dispatch").is_some());
}

/// Grants carry half of an operation's number. The first whose half is 0 finds words that nobody has written, which are 0
/// too: it must not take them for the grant of row 0.
#[test]
fn numbers_wrap() {
    for share_node in [true, false] {
        let server = StoreServer::start("127.0.0.1:0", &Settings::default()).expect("a store");
        let ranks = (0..3u32).map(|rank| {
            let store = Some(server.address());
            thread::spawn(move || {
                let options = GroupOptions {
                    rank: Some(rank),
                    size: Some(3),
                    local_rank: Some(rank),
                    store,
                    ..Default::default()
                };
                let group = Group::join(options, &Settings::default()).expect("join");
                let context = Context::new(Settings::default()).expect("a context");
                let timeout = Duration::from_secs(20);
                let config = Config { payload: Payload::Bf16, share_node, timeout, ..config() };
                let buffer = ExpertBuffer::new(&group, &context, "experts", config.clone()).expect("a buffer");
                {
                    let mut view = buffer.0.view.lock();
                    let last = u64::from(u32::MAX);
                    (view.operations, view.dispatches, view.combines) = (last, last, last);
                    view.peers[rank as usize].as_mut().expect("this rank").floor = [last; 2];
                }
                buffer.connect(&[0, 1, 2], true, None).expect("connect");
                for _ in 0..6 {
                    let mut input = input(&config, &[0, 2, 4, -1, 1, 3, 5, -1], None);
                    input.x = vec![rank as u16 + 1; 2 * config.hidden].into();
                    let options = DispatchOptions { layout: Layout::Rank, ..DispatchOptions::default() };
                    let came = buffer.dispatch(input, options).and_then(|pending| pending.finish()).expect("dispatch");
                    let mut bytes = vec![0; came.rows.len];
                    came.rows.memory.copy_to(came.rows.offset, &mut bytes).expect("the rows");
                    let firsts: Vec<u8> = bytes.chunks(2 * config.hidden).map(|row| row[0]).collect();
                    assert_eq!(firsts, [1, 1, 2, 2, 3, 3], "rank {rank}");
                    let options = crate::CombineOptions::default();
                    let sums = buffer.combine(bytes.into(), &came.handle, options).and_then(|pending| pending.finish());
                    assert_eq!(sums.expect("combine").missing, [0; 0]);
                }
                assert!(buffer.0.view.lock().operations > 1 << 32);
                let error = buffer.mask(&[(rank + 1) % 3, 7]).expect_err("there is no rank 7");
                assert_eq!((error.kind, buffer.masked()), (ErrorKind::Usage, vec![]), "all of them or none");
                buffer.destroy().expect("destroy");
            })
        });
        for rank in ranks.collect::<Vec<_>>() {
            rank.join().expect("a rank");
        }
    }
}
