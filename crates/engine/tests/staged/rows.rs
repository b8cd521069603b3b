//! Moves of rows: gathered into chunks at one end, scattered from them at the other.

use std::time::Duration;

use crossrail::{ErrorKind, Memory, Move, MoveKind, MoveOptions, Place, Protocol, Ready, Region, Row, StartOptions};

use super::{LIMIT, Pair, bytes_of, done, each, filled, gpus, pattern, still_works, until};

/// Rows of a GPU's memory at each end, in orders of their own, and what both memories are after the move.
struct Rows {
    own: Memory,
    other: Memory,
    region: Region,
    prepared: Move,
    expected: [Vec<u8>; 2],
    _local: Region,
}

/// 900 rows of 528 bytes and 300 of 2,305, of which three quarters move; no row is aligned as its partner is.
fn rows(pair: &Pair, kind: MoveKind) -> Rows {
    const PARTS: [(u64, u64); 2] = [(900, 528), (300, 2_305)];
    let size = 3 << 20;
    let (own, other) =
        (filled(&pair.one, Place::Gpu(0), &pattern(size, 5)), filled(&pair.other, Place::Gpu(1), &pattern(size, 3)));
    let (local, region) = (pair.a.register(&own).unwrap(), pair.b.register(&other).unwrap());
    let key = region.key();
    let layout = |gap: u64| {
        let mut at = gap;
        PARTS.map(|(count, len)| {
            at += count * (len + gap);
            (at - count * (len + gap), len, len + gap, count)
        })
    };
    let (near, far) = (layout(3), layout(8));
    let index = |factor: u64| -> Vec<u32> {
        let of = |first: u64, count: u64| (0..count * 3 / 4).map(move |n| (first + n * factor % count) as u32);
        of(0, 900).chain(of(900, 300)).collect()
    };
    let (ours, theirs) = (index(7), index(11));
    let mine =
        pair.a.layout(&near.map(|(offset, len, stride, count)| Row { region: &local, offset, len, stride, count }));
    let there =
        pair.ab.layout(&far.map(|(offset, len, stride, count)| Row { region: &key, offset, len, stride, count }));
    let options = MoveOptions { local_index: Some(&ours), remote_index: Some(&theirs), ..MoveOptions::default() };
    let prepared = pair.ab.prepare(kind, &mine.unwrap(), &there.unwrap(), options).unwrap();
    let mut expected = [pattern(size, 5), pattern(size, 3)];
    let place = |layout: &[(u64, u64, u64, u64)], index: u32| {
        let (part, row) = if index < 900 { (layout[0], index) } else { (layout[1], index - 900) };
        ((part.0 + u64::from(row) * part.2) as usize, part.1 as usize)
    };
    for (a, b) in ours.iter().zip(&theirs) {
        let ((a, len), (b, _)) = (place(&near, *a), place(&far, *b));
        let [mine, other] = &mut expected;
        match kind {
            MoveKind::Read => mine[a..a + len].copy_from_slice(&other[b..b + len]),
            MoveKind::Write => other[b..b + len].copy_from_slice(&mine[a..a + len]),
        }
    }
    Rows { own, other, region, prepared, expected, _local: local }
}

#[test]
fn rows_of_gpus_move_as_one_transfer() {
    each(|transport, pair| {
        for kind in [MoveKind::Read, MoveKind::Write] {
            let rows = rows(&pair, kind);
            let what = format!("{transport}, {kind:?}: {:?}", rows.prepared.explain());
            assert_eq!(rows.prepared.explain().how, "one transfer", "{what}");
            for _ in 0..2 {
                let receipt = done(&what, rows.prepared.start(StartOptions::default()).unwrap());
                assert_eq!((receipt.bytes, receipt.protocol), (rows.prepared.nbytes(), Protocol::Chunks), "{what}");
            }
            assert!(bytes_of(&rows.own) == rows.expected[0], "{what}: ours");
            assert!(bytes_of(&rows.other) == rows.expected[1], "{what}: theirs");
        }
    });
}

#[test]
fn rows_of_gpus_end_with_their_region_or_their_request() {
    each(|transport, pair| {
        for (kind, cancelled) in [(MoveKind::Read, false), (MoveKind::Write, false), (MoveKind::Write, true)] {
            let what = format!("{transport}, {kind:?}, cancelled: {cancelled}");
            let rows = rows(&pair, kind);
            let (here, there) = (gpus(&pair.one), gpus(&pair.other));
            here.iter().chain(&there).for_each(|gpu| gpu.set_delay(Duration::from_millis(150)));
            let request = rows.prepared.start(StartOptions::default()).unwrap();
            std::thread::sleep(Duration::from_millis(15));
            let expected = if cancelled {
                request.cancel();
                ErrorKind::Cancelled
            } else {
                rows.region.deregister().unwrap();
                ErrorKind::Region
            };
            if !cancelled {
                rows.other.fill_from(0, &vec![3; rows.other.len()]).unwrap();
            }
            let error = request.wait(LIMIT).expect_err(&what);
            assert_eq!(error.kind, expected, "{what}: {error}");
            here.iter().chain(&there).for_each(|gpu| gpu.set_delay(Duration::ZERO));
            still_works(&what, &pair);
            let untouched = !cancelled && bytes_of(&rows.other).iter().any(|byte| *byte != 3);
            assert!(!untouched, "{what}: written after the end");
        }
    });
}

#[test]
#[allow(unsafe_code)]
fn rows_of_gpus_wait_for_a_stream() {
    each(|transport, pair| {
        for kind in [MoveKind::Write, MoveKind::Read] {
            let what = format!("{transport}, {kind:?}");
            let rows = rows(&pair, kind);
            let stream = gpus(&pair.one)[0].stream();
            // SAFETY: a simulated stream's handle is no pointer.
            let now = || unsafe { Ready::on_stream(&pair.one, 0, stream.handle()) }.unwrap();
            let before = [bytes_of(&rows.own), bytes_of(&rows.other)];
            // What the stream has yet to compute, or to use, is other bytes than those that are moved at its end.
            rows.own.fill_from(0, &vec![7; rows.own.len()]).unwrap();
            stream.put_in();
            let request = rows.prepared.start(StartOptions { after: Some(now()), ..StartOptions::default() }).unwrap();
            std::thread::sleep(Duration::from_millis(15));
            assert!(!request.is_done(), "{what}: before the stream");
            assert!(bytes_of(&rows.other) == before[1], "{what}: written before the stream");
            assert!(bytes_of(&rows.own).iter().all(|byte| *byte == 7), "{what}: read before the stream");
            rows.own.fill_from(0, &before[0]).unwrap();
            stream.finish();
            let receipt = done(&what, request);
            assert_eq!((receipt.bytes, receipt.protocol), (rows.prepared.nbytes(), Protocol::Chunks), "{what}");
            assert!(bytes_of(&rows.own) == rows.expected[0], "{what}: ours");
            assert!(bytes_of(&rows.other) == rows.expected[1], "{what}: theirs");
            let again = rows.prepared.start(StartOptions { after: Some(now()), ..StartOptions::default() }).unwrap();
            assert_eq!(done(&what, again).protocol, Protocol::Chunks, "{what}");
        }
    });
}

#[test]
#[allow(unsafe_code)]
fn rows_that_wait_for_a_stream_hold_nothing_else_up() {
    each(|transport, pair| {
        let rows = rows(&pair, MoveKind::Write);
        let stream = gpus(&pair.one)[0].stream();
        // SAFETY: a simulated stream's handle is no pointer.
        let now = || unsafe { Ready::on_stream(&pair.one, 0, stream.handle()) }.unwrap();
        let start = |notice| {
            let after = Some(now());
            rows.prepared.start(StartOptions { after, notice: Some(notice), ..StartOptions::default() }).unwrap()
        };
        let notices = |count: usize| {
            let mut all = Vec::new();
            until(transport, || {
                all.extend(pair.b.notices(8).into_iter().map(|notice| notice.bytes));
                all.len() >= count
            });
            all
        };
        stream.put_in();
        let cancelled = start(b"never");
        cancelled.cancel();
        assert_eq!(cancelled.wait(LIMIT).unwrap_err().kind, ErrorKind::Cancelled, "{transport}");
        let first = start(b"first");
        let message = pair.ab.send(vec![5; 100], 9).unwrap();
        done(transport, pair.b.recv(vec![0; 100], 9, u64::MAX, None).unwrap());
        done(transport, message);
        done(transport, pair.ab.notify(b"second").unwrap());
        assert!(!first.is_done(), "{transport}: before the stream");
        stream.finish();
        done(transport, first);
        assert_eq!(notices(2), [&b"second"[..], b"first"], "{transport}");
        assert!(bytes_of(&rows.other) == rows.expected[1], "{transport}: theirs");

        let broken = gpus(&pair.one)[0].stream();
        broken.put_in();
        // SAFETY: as above.
        let after = Some(unsafe { Ready::on_stream(&pair.one, 0, broken.handle()) }.unwrap());
        let failed = rows.prepared.start(StartOptions { after, notice: Some(b"no"), ..Default::default() }).unwrap();
        broken.fail();
        let error = failed.wait(LIMIT).unwrap_err();
        assert_eq!((error.kind, &*error.operation), (ErrorKind::Io, "write"), "{transport}: {error}");
        still_works(transport, &pair);

        stream.put_in();
        let lost = start(b"lost");
        pair.b.close().unwrap();
        assert_eq!(lost.wait(LIMIT).unwrap_err().kind, ErrorKind::PeerDead, "{transport}");
        stream.finish();
    });
}

/// What leases of blocks rest upon.
#[test]
fn memory_that_is_registered_twice_ends_once_for_each_key() {
    each(|transport, pair| {
        let size = 200 * 528;
        let (own, other) =
            (filled(&pair.one, Place::Gpu(0), &pattern(size, 5)), filled(&pair.other, Place::Gpu(1), &vec![3; size]));
        let local = pair.a.register(&own).unwrap();
        let [whole, lease] = [(), ()].map(|()| pair.b.register(&other).unwrap());
        let mine = pair.a.layout(&[Row { region: &local, offset: 0, len: 528, stride: 528, count: 200 }]).unwrap();
        let [by_whole, by_lease] = [&whole, &lease].map(|region| {
            let row = Row { region: &region.key(), offset: 0, len: 528, stride: 528, count: 200 };
            let there = pair.ab.layout(&[row]).unwrap();
            pair.ab.prepare(MoveKind::Read, &mine, &there, MoveOptions::default()).unwrap()
        });
        done(transport, by_lease.start(StartOptions::default()).unwrap());
        assert!(bytes_of(&own).iter().all(|byte| *byte == 3), "{transport}");
        lease.deregister().unwrap();
        other.fill_from(0, &vec![9; size]).unwrap();
        let error = by_lease.start(StartOptions::default()).unwrap().wait(LIMIT).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Region, "{transport}: {error}");
        assert!(bytes_of(&own).iter().all(|byte| *byte == 3), "{transport}: bytes of after the end");
        done(transport, by_whole.start(StartOptions::default()).unwrap());
        assert!(bytes_of(&own).iter().all(|byte| *byte == 9), "{transport}");
    });
}

/// The first row and the last are host memory, and the long one between them is a GPU's that takes its time: what ends
/// last is not the run that is begun last.
#[test]
fn the_immediate_of_runs_counts_once_behind_all_of_them_in_the_region_of_the_first() {
    const LONG: usize = 300_007;
    each(|transport, pair| {
        let (short, long) = (pattern(64, 7), pattern(LONG, 8));
        let sources = [filled(&pair.one, Place::Host, &short), filled(&pair.one, Place::Gpu(0), &long)];
        let targets = [Place::Host, Place::Gpu(1), Place::Host].map(|place| pair.other.alloc_on(LONG, place).unwrap());
        let [first, gpu, last] = targets.each_ref().map(|memory| pair.b.register(memory).unwrap());
        let [host, device] = sources.each_ref().map(|memory| pair.a.register(memory).unwrap());
        let own = |region, offset, len| Row { region, offset, len, stride: len, count: 1 };
        let (begin, middle, end) = (first.key(), gpu.key(), last.key());
        let theirs = |region, offset, len| Row { region, offset, len, stride: len, count: 1 };
        let mine = pair.a.layout(&[own(&host, 0, 32), own(&device, 0, LONG as u64), own(&host, 32, 32)]).unwrap();
        let there = gpus(&pair.other);
        let options = MoveOptions { imm: Some(9), notice: b"all", ..MoveOptions::default() };
        let prepare = |end| {
            let rows = [theirs(&begin, 0, 32), theirs(&middle, 0, LONG as u64), theirs(end, 100, 32)];
            let prepared = pair.ab.prepare(MoveKind::Write, &mine, &pair.ab.layout(&rows).unwrap(), options).unwrap();
            assert_eq!(prepared.explain().how, "an operation per run", "{transport}");
            prepared
        };
        // The last row is in the region of the first, then in one of its own.
        for (before, end) in (0..).zip([&begin, &end]) {
            there.iter().for_each(|gpu| gpu.set_delay(Duration::from_millis(50)));
            let request = prepare(end).start(StartOptions::default()).unwrap();
            first.wait_imm(9, before + 1, LIMIT).unwrap();
            assert!(request.is_done(), "{transport}: counted before a run has ended");
            there.iter().for_each(|gpu| gpu.set_delay(Duration::ZERO));
            assert!(bytes_of(&targets[1]) == long, "{transport}: counted before the long row");
            done(transport, request);
            assert!(pair.b.wait_notice(Duration::from_secs(10)), "{transport}");
            assert_eq!(pair.b.notices(9).len(), 1, "{transport}");
            assert_eq!((first.imm_count(9), last.imm_count(9)), (before + 1, 0), "{transport}");
        }
        // A run that fails: the region of the long row is gone.
        let prepared = prepare(&end);
        gpu.deregister().unwrap();
        let error = prepared.start(StartOptions::default()).unwrap().wait(LIMIT).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Region, "{transport}: {error}");
        still_works(transport, &pair);
        assert_eq!((first.imm_count(9), last.imm_count(9)), (2, 0), "{transport}: counted although a run failed");
        assert!(pair.b.notices(9).is_empty(), "{transport}: notified although a run failed");
    });
}
