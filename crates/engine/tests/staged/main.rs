//! Memory of GPUs, simulated ones: every operation, between every two kinds of memory, over the links that only know
//! host memory.
#![allow(unsafe_code)]

mod rows;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossrail::{
    Buffer, ConnectOptions, Context, Endpoint, ErrorKind, Memory, Op, Place, Protocol, Ready, Request, Settings,
    Simulated, Worker, WorkerOptions,
};

const LIMIT: Option<Duration> = Some(Duration::from_secs(20));

struct Pair {
    one: Context,
    other: Context,
    a: Worker,
    b: Worker,
    ab: Endpoint,
    ba: Endpoint,
}

fn context(pairs: &[(&str, &str)]) -> Context {
    Context::with_simulated_gpus(Settings::from_pairs(pairs.iter().copied()).unwrap(), 2).unwrap()
}

fn pair_of(pairs: &[(&str, &str)]) -> Pair {
    let (one, other) = (context(pairs), context(pairs));
    let a = Worker::new(&one, WorkerOptions::default()).unwrap();
    let b = Worker::new(&other, WorkerOptions::default()).unwrap();
    let ab = a.connect(&b.address(), &ConnectOptions::default()).unwrap();
    let ba = b.accept(LIMIT).unwrap();
    Pair { one, other, a, b, ab, ba }
}

/// Over shared memory, and over one to four rails, with chunks of 64K and eight slots each way.
fn each(mut body: impl FnMut(&str, Pair)) {
    let _alone = alone();
    const SMALL: [(&str, &str); 2] = [("CROSSRAIL_CHUNK", "64K"), ("CROSSRAIL_BOUNCE", "1M")];
    const FOUR: &str = "127.0.0.1,127.0.0.2,127.0.0.3,127.0.0.4";
    for (name, settings) in [
        ("shm", vec![("CROSSRAIL_TLS", "shm")]),
        ("tcp", vec![("CROSSRAIL_TLS", "tcp")]),
        ("tcp x 2", vec![("CROSSRAIL_TLS", "tcp"), ("CROSSRAIL_NET_DEVICES", "127.0.0.1,127.0.0.2")]),
        (
            "tcp x 4, io threads",
            vec![("CROSSRAIL_TLS", "tcp"), ("CROSSRAIL_NET_DEVICES", FOUR), ("CROSSRAIL_IO_THREADS", "2")],
        ),
    ] {
        let settings: Vec<_> = settings.into_iter().chain(SMALL).collect();
        body(name, pair_of(&settings));
    }
}

/// One test at a time: each has a dozen threads that must not look dead to each other.
fn alone() -> std::sync::MutexGuard<'static, ()> {
    static ONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn pattern(len: usize, seed: u64) -> Vec<u8> {
    (0..len as u64).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(seed) >> 29) as u8).collect()
}

fn filled(context: &Context, place: Place, bytes: &[u8]) -> Memory {
    let memory = context.alloc_on(bytes.len(), place).unwrap();
    memory.fill_from(0, bytes).unwrap();
    memory
}

fn bytes_of(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    memory.copy_to(0, &mut bytes).unwrap();
    bytes
}

fn done(what: &str, request: Request) -> crossrail::Receipt {
    request.wait(LIMIT).unwrap_or_else(|error| panic!("{what}: {error}"))
}

const KINDS: [(Place, Place); 3] =
    [(Place::Gpu(0), Place::Gpu(1)), (Place::Host, Place::Gpu(0)), (Place::Gpu(1), Place::Host)];

/// Longest message whose bytes may go without the peer's consent.
const UNASKED_MAX: usize = 64 << 10;

#[test]
fn messages_of_every_size_arrive_whole_whatever_memory_they_are_in() {
    each(|transport, pair| {
        for (from, to) in KINDS {
            for (at, size) in [0, 1, 7, 4097, 65_535, 65_536, 65_537, 300_001, (3 << 20) + 5].into_iter().enumerate() {
                let what = format!("{transport}, {from} to {to}, {size} bytes");
                let sent = pattern(size, at as u64);
                for unexpected in [false, true] {
                    let source = filled(&pair.one, from, &sent);
                    let target = pair.other.alloc_on(size, to).unwrap();
                    let post = || pair.b.recv(&target, at as u64, u64::MAX, None).unwrap();
                    let posted = (!unexpected).then(post);
                    let send = pair.ab.send(&source, at as u64).unwrap();
                    if unexpected {
                        pair.a.progress();
                        pair.b.progress();
                    }
                    let receipt = done(&what, posted.unwrap_or_else(post));
                    assert_eq!(receipt.bytes, size as u64, "{what}");
                    let out = done(&what, send);
                    assert_eq!(bytes_of(&target), sent, "{what}");
                    // A message that goes unasked is copied out of the GPU before it becomes a chunk.
                    let staged = from != Place::Host && out.protocol == Protocol::Chunks && size > UNASKED_MAX;
                    assert_eq!(out.pack_us > 0.0, staged, "{what}: {out:?}");
                    assert!(out.protocol == Protocol::Eager || size > 4097, "{what}: {out:?}");
                }
            }
        }
    });
}

/// Both ends of a sharing of GPUs, to be held and made to fail.
fn gpus(context: &Context) -> [Simulated; 2] {
    [0, 1].map(|ordinal| context.simulated_gpu(ordinal).unwrap())
}

fn until(what: &str, mut there: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !there() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}

/// The endpoint still carries memory of both kinds, both ways.
fn still_works(what: &str, pair: &Pair) {
    let bytes = pattern(200_001, 77);
    for (place, from, to) in [(Place::Gpu(0), &pair.ab, &pair.ba), (Place::Host, &pair.ba, &pair.ab)] {
        let (here, there) =
            if std::ptr::eq(from, &pair.ab) { (&pair.one, &pair.other) } else { (&pair.other, &pair.one) };
        let worker = if std::ptr::eq(from, &pair.ab) { &pair.b } else { &pair.a };
        let (source, target) = (filled(here, place, &bytes), there.alloc_on(bytes.len(), Place::Gpu(1)).unwrap());
        let receive = worker.recv(&target, 999, u64::MAX, Some(to)).unwrap();
        done(what, from.send(&source, 999).unwrap());
        done(what, receive);
        assert_eq!(bytes_of(&target), bytes, "{what}");
    }
}

#[test]
fn regions_of_gpus_are_written_and_read_at_odd_places_and_counted() {
    each(|transport, pair| {
        let memory = pair.other.alloc_on(1 << 20, Place::Gpu(1)).unwrap();
        let region = pair.b.register(&memory).unwrap();
        let key = region.key();
        for (place, offset) in [(Place::Gpu(0), 1003_usize), (Place::Host, 77)] {
            for (at, size) in [0, 1, 8, 999, 64_000, 70_001, 500_003].into_iter().enumerate() {
                let what = format!("{transport}, {place}, {size} bytes");
                let bytes = pattern(size, at as u64 + 5);
                let local = filled(&pair.one, place, &[&[0; 3][..], &bytes].concat());
                let part = || local.slice(3..3 + size).unwrap();
                let before = region.imm_count(3);
                done(&what, pair.ab.write(part(), &key, offset as u64, Some(3)).unwrap());
                region.wait_imm(3, before + 1, LIMIT).unwrap();
                let mut seen = vec![0; size];
                memory.copy_to(offset, &mut seen).unwrap();
                assert_eq!(seen, bytes, "{what}: write");
                let back = pair.one.alloc_on(size + 3, place).unwrap();
                done(&what, pair.ab.read(back.slice(3..3 + size).unwrap(), &key, offset as u64).unwrap());
                assert_eq!(bytes_of(&back)[3..], bytes, "{what}: read");
                assert_eq!(bytes_of(&back)[..3], [0; 3], "{what}: read");
            }
        }
        let error = pair.ab.write(&pair.one.alloc_on(2, Place::Gpu(0)).unwrap(), &key, (1 << 20) - 1, None).unwrap();
        assert_eq!(error.wait(LIMIT).unwrap_err().kind, ErrorKind::Region, "{transport}");
    });
}

#[test]
fn much_at_once_both_ways_needs_no_more_slots_than_there_are() {
    each(|transport, pair| {
        let size = 1_300_007;
        let mut requests = Vec::new();
        let mut targets = Vec::new();
        for at in 0..6_u64 {
            for (place, other) in
                [(Place::Gpu(0), Place::Gpu(1)), (Place::Gpu(1), Place::Host), (Place::Host, Place::Gpu(0))]
            {
                for way in 0..2_u64 {
                    let tag = at * 10
                        + way
                        + if place == Place::Host { 100 } else { 0 }
                        + if other == Place::Host { 200 } else { 0 };
                    let (here, there, from, worker) = if way == 0 {
                        (&pair.one, &pair.other, &pair.ab, &pair.b)
                    } else {
                        (&pair.other, &pair.one, &pair.ba, &pair.a)
                    };
                    let bytes = pattern(size, tag);
                    let target = there.alloc_on(size, other).unwrap();
                    requests.push(worker.recv(&target, tag, u64::MAX, None).unwrap());
                    requests.push(from.send(&filled(here, place, &bytes), tag).unwrap());
                    targets.push((target, tag));
                }
            }
        }
        for request in requests {
            done(transport, request);
        }
        for (target, tag) in targets {
            assert_eq!(bytes_of(&target), pattern(size, tag), "{transport}, {tag}");
        }
    });
}

#[test]
fn a_receiver_without_slots_waits_and_everything_else_goes_on() {
    each(|transport, pair| {
        let [_, slow] = gpus(&pair.other);
        let bytes = pattern(3 << 20, 4);
        let target = pair.other.alloc_on(bytes.len(), Place::Gpu(1)).unwrap();
        slow.hold_unpacks(true);
        let receive = pair.b.recv(&target, 1, u64::MAX, None).unwrap();
        let send = pair.ab.send(&filled(&pair.one, Place::Gpu(0), &bytes), 1).unwrap();
        // Longer than a silent lane is given.
        let until = Instant::now() + Duration::from_millis(700);
        let mut messages = 0;
        while Instant::now() < until {
            let small = pair.b.recv(vec![0; 8], 2, u64::MAX, None).unwrap();
            done(transport, pair.ab.send(vec![7; 8], 2).unwrap());
            done(transport, small);
            messages += 1;
        }
        assert!(messages > 10, "{transport}: {messages} messages beside it");
        assert!(!send.is_done() && !receive.is_done(), "{transport}");
        slow.hold_unpacks(false);
        done(transport, receive);
        let receipt = done(transport, send);
        assert_eq!(bytes_of(&target), bytes, "{transport}");
        // With more threads than cores a lane may be late for other reasons.
        if !transport.contains("io threads") {
            assert_eq!(receipt.notes(), &[] as &[String], "{transport}: a lane was given up");
        }
    });
}

#[test]
fn a_sender_that_packs_slowly_is_not_taken_for_dead() {
    each(|transport, pair| {
        let [slow, _] = gpus(&pair.one);
        let bytes = pattern(400_000, 4);
        slow.hold_packs(true);
        let target = pair.other.alloc_on(bytes.len(), Place::Gpu(1)).unwrap();
        let receive = pair.b.recv(&target, 1, u64::MAX, None).unwrap();
        let send = pair.ab.send(&filled(&pair.one, Place::Gpu(0), &bytes), 1).unwrap();
        assert_eq!(send.wait(Some(Duration::from_millis(700))).unwrap_err().kind, ErrorKind::Timeout);
        slow.hold_packs(false);
        done(transport, receive);
        assert_eq!(done(transport, send).notes(), &[] as &[String], "{transport}");
        assert_eq!(bytes_of(&target), bytes, "{transport}");
    });
}

#[test]
fn a_cancelled_transfer_leaves_memory_alone() {
    each(|transport, pair| {
        for (end, held) in [("sender", "packs"), ("sender", "unpacks"), ("receiver", "packs"), ("receiver", "unpacks")]
        {
            let what = format!("{transport}, {end} cancels, {held} held");
            let ([packs, _], [_, unpacks]) = (gpus(&pair.one), gpus(&pair.other));
            let bytes = pattern(2 << 20, 4);
            let source = filled(&pair.one, Place::Gpu(0), &bytes);
            let target = pair.other.alloc_on(bytes.len(), Place::Gpu(1)).unwrap();
            packs.hold_packs(held == "packs");
            unpacks.hold_unpacks(held == "unpacks");
            let receive = pair.b.recv(&target, 1, u64::MAX, None).unwrap();
            let send = pair.ab.send(&source, 1).unwrap();
            std::thread::sleep(Duration::from_millis(20));
            let release = Arc::new(AtomicBool::new(false));
            let releaser = {
                let (release, packs, unpacks) = (release.clone(), packs.clone(), unpacks.clone());
                std::thread::spawn(move || {
                    // What the GPU is at is waited for: it must come to an end by itself.
                    let deadline = Instant::now() + Duration::from_millis(100);
                    while !release.load(Ordering::Acquire) && Instant::now() < deadline {
                        std::thread::yield_now();
                    }
                    packs.hold_packs(false);
                    unpacks.hold_unpacks(false);
                })
            };
            if end == "sender" {
                send.cancel()
            } else {
                receive.cancel()
            };
            let kinds = [&send, &receive].map(|request| request.wait(LIMIT).map(|_| ()).map_err(|error| error.kind));
            release.store(true, Ordering::Release);
            releaser.join().unwrap();
            assert_eq!(kinds, [Err(ErrorKind::Cancelled); 2], "{what}");
            target.fill_from(0, &vec![9; bytes.len()]).unwrap();
            still_works(&what, &pair);
            assert!(bytes_of(&target).iter().all(|byte| *byte == 9), "{what}: written after the end");
        }
    });
}

#[test]
fn a_region_may_be_deregistered_under_a_transfer() {
    each(|transport, pair| {
        for operation in ["write", "read"] {
            let what = format!("{transport}, {operation}");
            let (here, there) = (gpus(&pair.one), gpus(&pair.other));
            let size = 2 << 20;
            let memory = pair.other.alloc_on(size, Place::Gpu(1)).unwrap();
            let local = pair.one.alloc_on(size, Place::Gpu(0)).unwrap();
            let region = pair.b.register(&memory).unwrap();
            here.iter().chain(&there).for_each(|gpu| gpu.set_delay(Duration::from_millis(3)));
            let request = match operation {
                "write" => pair.ab.write(&local, &region.key(), 0, None).unwrap(),
                _ => pair.ab.read(&local, &region.key(), 0).unwrap(),
            };
            std::thread::sleep(Duration::from_millis(15));
            region.deregister().unwrap();
            memory.fill_from(0, &vec![3; size]).unwrap();
            let error = request.wait(LIMIT).expect_err(&what);
            assert_eq!(error.kind, ErrorKind::Region, "{what}: {error}");
            here.iter().chain(&there).for_each(|gpu| gpu.set_delay(Duration::ZERO));
            still_works(&what, &pair);
            assert!(bytes_of(&memory).iter().all(|byte| *byte == 3), "{what}: written after the end");
        }
    });
}

#[test]
fn memory_that_fails_ends_its_transfer_at_both_ends_and_nothing_else() {
    each(|transport, pair| {
        let ([packs, _], [_, unpacks]) = (gpus(&pair.one), gpus(&pair.other));
        for side in ["pack", "unpack"] {
            for operation in ["send", "write", "read"] {
                let what = format!("{transport}, {operation}, {side} fails");
                let (local, target) = (
                    pair.one.alloc_on(900_001, Place::Gpu(0)).unwrap(),
                    pair.other.alloc_on(900_001, Place::Gpu(1)).unwrap(),
                );
                let reads = operation == "read";
                let (from, to) = if reads { (&unpacks, &packs) } else { (&packs, &unpacks) };
                match side {
                    "pack" => from.fail_packs(1, "an illegal address"),
                    _ => to.fail_unpacks(1, "an illegal address"),
                }
                let region = pair.b.register(&target).unwrap();
                let receive = (operation == "send").then(|| pair.b.recv(&target, 1, u64::MAX, None).unwrap());
                let request = match operation {
                    "send" => pair.ab.send(&local, 1),
                    "write" => pair.ab.write(&local, &region.key(), 0, None),
                    _ => pair.ab.read(&local, &region.key(), 0),
                };
                for request in [Some(request.unwrap()), receive].into_iter().flatten() {
                    let error = request.wait(LIMIT).expect_err(&what);
                    assert_eq!(error.kind, ErrorKind::Io, "{what}: {error}");
                    assert!(error.to_string().contains("illegal address"), "{what}: {error}");
                }
                still_works(&what, &pair);
            }
        }
    });
}

#[test]
fn truncation_is_told_at_both_ends() {
    each(|transport, pair| {
        for unexpected in [false, true] {
            let source = pair.one.alloc_on(100_000, Place::Gpu(0)).unwrap();
            let target = pair.other.alloc_on(99_999, Place::Gpu(1)).unwrap();
            let post = || pair.b.recv(&target, 5, u64::MAX, None).unwrap();
            let posted = (!unexpected).then(post);
            let send = pair.ab.send(&source, 5).unwrap();
            let receive = posted.unwrap_or_else(post);
            for request in [send, receive] {
                assert_eq!(request.wait(LIMIT).unwrap_err().kind, ErrorKind::Truncated, "{transport}");
            }
        }
        still_works(transport, &pair);
    });
}

#[test]
fn a_batch_takes_every_kind() {
    each(|transport, pair| {
        let region_memory = pair.other.alloc_on(300_000, Place::Gpu(0)).unwrap();
        let region = pair.b.register(&region_memory).unwrap();
        let (a, b) = (pattern(150_000, 1), pattern(90_000, 2));
        let (gpu, host) = (filled(&pair.one, Place::Gpu(1), &a), filled(&pair.one, Place::Host, &b));
        let target = pair.other.alloc_on(b.len(), Place::Gpu(1)).unwrap();
        let receive = pair.b.recv(&target, 8, u64::MAX, None).unwrap();
        let back = pair.one.alloc_on(a.len(), Place::Host).unwrap();
        let ops = vec![
            Op::Write { local: (&gpu).into(), remote: region.key(), offset: 11, imm: Some(1) },
            Op::Send { buffer: (&host).into(), tag: 8 },
        ];
        assert_eq!(done(transport, pair.ab.batch(ops).unwrap()).protocol, Protocol::Batch);
        done(transport, receive);
        let read = vec![Op::Read { local: (&back).into(), remote: region.key(), offset: 11 }];
        done(transport, pair.ab.batch(read).unwrap());
        assert_eq!((bytes_of(&back), bytes_of(&target)), (a, b), "{transport}");
    });
}

#[test]
fn what_is_not_ready_waits_in_its_order() {
    each(|transport, pair| {
        let ([gpu, _], [other, _]) = (gpus(&pair.one), gpus(&pair.other));
        let (stream, late) = (gpu.stream(), other.stream());
        stream.put_in();
        late.put_in();
        let source = pair.one.alloc_on(70_000, Place::Gpu(0)).unwrap();
        let targets = [0, 1].map(|_| pair.other.alloc_on(70_000, Place::Gpu(0)).unwrap());
        // SAFETY: a simulated stream's handle is no pointer.
        let (ready, ready_late) = unsafe {
            let ready = Ready::on_stream(&pair.one, 0, stream.handle()).unwrap();
            (ready, Ready::on_stream(&pair.other, 0, late.handle()).unwrap())
        };
        let waits = Buffer::from(&targets[0]).after(ready_late).unwrap();
        let receives =
            [pair.b.recv(waits, 1, u64::MAX, None).unwrap(), pair.b.recv(&targets[1], 1, u64::MAX, None).unwrap()];
        let first = pair.ab.send(Buffer::from(&source).after(ready).unwrap(), 1).unwrap();
        let second = pair.ab.send(vec![2; 70_000], 1).unwrap();
        let cancelled = pair.ab.send(vec![3; 70_000], 1).unwrap();
        cancelled.cancel();
        assert_eq!(cancelled.wait(LIMIT).unwrap_err().kind, ErrorKind::Cancelled, "{transport}");
        std::thread::sleep(Duration::from_millis(5));
        assert!(!first.is_done() && !second.is_done(), "{transport}: something went before its turn");
        // What the stream was at becomes what is sent.
        source.fill_from(0, &[1; 70_000]).unwrap();
        stream.finish();
        std::thread::sleep(Duration::from_millis(5));
        assert!(!receives[0].is_done() && !receives[1].is_done(), "{transport}: received before it was ready");
        targets[0].fill_from(0, &[8; 70_000]).unwrap();
        late.finish();
        for request in [first, second].into_iter().chain(receives) {
            done(transport, request);
        }
        assert!(bytes_of(&targets[0]).iter().all(|byte| *byte == 1), "{transport}: order");
        assert!(bytes_of(&targets[1]).iter().all(|byte| *byte == 2), "{transport}: order");
        still_works(transport, &pair);
    });
}

#[test]
fn memory_is_what_it_claims_or_refused() {
    let _alone = alone();
    let pair = pair_of(&[("CROSSRAIL_TLS", "tcp")]);
    let memory = pair.one.alloc_on(1000, Place::Gpu(0)).unwrap();
    let host = vec![0_u8; 1000];
    // SAFETY: nothing of it is touched: the claims are wrong.
    let claims = unsafe {
        [
            ("another GPU", Buffer::device(memory.ptr() as u64, 1000, 1, None, None)),
            ("longer", Buffer::device(memory.ptr() as u64, 1 << 30, 0, None, None)),
            ("host memory", Buffer::device(host.as_ptr() as u64, 1000, 0, None, None)),
            ("no such GPU", Buffer::device(memory.ptr() as u64, 1000, 7, None, None)),
        ]
    };
    for (what, buffer) in claims {
        let error = pair.ab.send(buffer, 1).expect_err(what);
        assert_eq!(error.kind, ErrorKind::Usage, "{what}: {error}");
    }
    // SAFETY: the memory outlives the transfer.
    let buffer = unsafe { Buffer::device(memory.ptr() as u64 + 1, 999, 0, None, None) };
    let target = pair.other.alloc_on(999, Place::Host).unwrap();
    let receive = pair.b.recv(&target, 1, u64::MAX, None).unwrap();
    done("part", pair.ab.send(buffer, 1).unwrap());
    done("part", receive);
    still_works("claims", &pair);
}

#[test]
fn a_peer_that_goes_in_mid_transfer_fails_its_own_requests_only() {
    each(|transport, pair| {
        let Pair { one, other, a, b, ab, ba } = pair;
        let ([packs, _], [_, unpacks]) = (gpus(&one), gpus(&other));
        packs.set_delay(Duration::from_millis(2));
        unpacks.set_delay(Duration::from_millis(2));
        let source = one.alloc_on(6 << 20, Place::Gpu(0)).unwrap();
        let target = other.alloc_on(6 << 20, Place::Gpu(1)).unwrap();
        let receive = b.recv(&target, 1, u64::MAX, None).unwrap();
        let back = one.alloc_on(6 << 20, Place::Gpu(1)).unwrap();
        let returning = a.recv(&back, 1, u64::MAX, None).unwrap();
        let requests = [ab.send(&source, 1).unwrap(), ba.send(&target, 1).unwrap()];
        std::thread::sleep(Duration::from_millis(10));
        b.close().unwrap();
        drop((ba, b));
        for request in requests.iter().take(1).chain([&returning]) {
            let error = request.wait(LIMIT).expect_err(transport);
            assert!(matches!(error.kind, ErrorKind::PeerDead | ErrorKind::Closed), "{transport}: {error}");
        }
        drop((receive, requests, returning));
        // The memory is free again, and so is every slot.
        until("GPU memory is given back", || {
            let memory = other.alloc_on(64, Place::Gpu(1));
            memory.is_ok()
        });
        let c = Worker::new(&other, WorkerOptions::default()).unwrap();
        let ac = a.connect(&c.address(), &ConnectOptions::default()).unwrap();
        let ca = c.accept(LIMIT).unwrap();
        packs.set_delay(Duration::ZERO);
        unpacks.set_delay(Duration::ZERO);
        still_works(transport, &Pair { one, other, a, b: c, ab: ac, ba: ca });
    });
}

#[test]
fn a_lost_rail_s_chunks_go_over_the_others() {
    const FOUR: &str = "127.0.0.1,127.0.0.2,127.0.0.3,127.0.0.4";
    let _alone = alone();
    let pair = pair_of(&[
        ("CROSSRAIL_TLS", "tcp"),
        ("CROSSRAIL_NET_DEVICES", FOUR),
        ("CROSSRAIL_CHUNK", "64K"),
        ("CROSSRAIL_BOUNCE", "1M"),
        ("CROSSRAIL_LOG", "off"),
    ]);
    let ([packs, _], [_, unpacks]) = (gpus(&pair.one), gpus(&pair.other));
    for round in 0..4_u64 {
        packs.set_delay(Duration::from_micros(300));
        unpacks.set_delay(Duration::from_micros(300));
        let bytes = pattern(8 << 20, round);
        let target = pair.other.alloc_on(bytes.len(), Place::Gpu(1)).unwrap();
        // A rail that was cut before is dialled again in the background.
        let rail = format!("127.0.0.{}", 2 + round % 3);
        until("the rail comes back", || !connections(&rail).is_empty());
        let receive = pair.b.recv(&target, 1, u64::MAX, None).unwrap();
        let send = pair.ab.send(&filled(&pair.one, Place::Gpu(0), &bytes), 1).unwrap();
        std::thread::sleep(Duration::from_millis(8));
        assert!(cut(&rail) > 0, "no connection was found");
        done("lost rail", receive);
        done("lost rail", send);
        assert_eq!(bytes_of(&target), bytes, "round {round}");
    }
    packs.set_delay(Duration::ZERO);
    unpacks.set_delay(Duration::ZERO);
    still_works("lost rails", &pair);
}

/// Ends this process's connections from or to that address; how many there were.
fn cut(address: &str) -> usize {
    use nix::sys::socket::{Shutdown, shutdown};
    connections(address).into_iter().filter(|fd| shutdown(*fd, Shutdown::Both).is_ok()).count()
}

/// This process's connections from or to that address.
fn connections(address: &str) -> Vec<i32> {
    use nix::sys::socket::{SockaddrStorage, getpeername, getsockname};
    let is = |name: nix::Result<SockaddrStorage>| {
        name.is_ok_and(|name| name.as_sockaddr_in().is_some_and(|name| name.ip().to_string() == address))
    };
    let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let open = open.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    open.filter(|fd| is(getpeername(*fd)) && is(getsockname(*fd))).collect()
}

#[test]
fn a_worker_with_itself_and_info() {
    let _alone = alone();
    let context = context(&[]);
    let worker = Worker::new(&context, WorkerOptions::default()).unwrap();
    let to = worker.connect(&worker.address(), &ConnectOptions::default()).unwrap();
    let bytes = pattern(300_000, 3);
    let target = context.alloc_on(bytes.len(), Place::Gpu(1)).unwrap();
    let receive = worker.recv(&target, 1, u64::MAX, None).unwrap();
    done("self", to.send(&filled(&context, Place::Gpu(0), &bytes), 1).unwrap());
    done("self", receive);
    assert_eq!(bytes_of(&target), bytes);
    assert_eq!(bounce(&context), [128 << 20; 2]);
}

fn bounce(context: &Context) -> Vec<u64> {
    let crossrail::CudaState::Present(cuda) = context.info().unwrap().cuda else { panic!("GPUs are there") };
    cuda.devices.iter().map(|gpu| gpu.bounce_bytes).collect()
}

#[test]
fn memory_that_is_only_shared_takes_no_bounce_memory() {
    let _alone = alone();
    let pair = pair_of(&[("CROSSRAIL_TLS", "shm")]);
    let memory = pair.one.alloc_on(4096, Place::Gpu(1)).unwrap();
    // Simulated memory can't be passed on, which is found out last.
    let error = pair.ab.share(&memory).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unsupported, "{error}");
    assert_eq!(bounce(&pair.one), [0; 2]);
}

#[test]
fn a_trace_has_a_track_for_each_stager_and_stream() {
    let _alone = alone();
    let folder = std::env::temp_dir().join(format!("crossrail-staged-{}", std::process::id()));
    let (size, traces) = (1 << 20, folder.to_str().unwrap());
    {
        let pair = pair_of(&[("CROSSRAIL_TLS", "tcp"), ("CROSSRAIL_CHUNK", "64K"), ("CROSSRAIL_TRACE", traces)]);
        let stream = gpus(&pair.one)[0].stream();
        let source = filled(&pair.one, Place::Gpu(0), &pattern(size, 5));
        let target = pair.other.alloc_on(size, Place::Gpu(1)).unwrap();
        stream.put_in();
        // SAFETY: a simulated stream's handle is no pointer.
        let ready = unsafe { Ready::on_stream(&pair.one, 0, stream.handle()).unwrap() };
        let receive = pair.b.recv(&target, 1, u64::MAX, None).unwrap();
        let send = pair.ab.send(Buffer::from(&source).after(ready).unwrap(), 1).unwrap();
        stream.finish();
        done("the receive", receive);
        done("the send", send);
        pair.a.close().unwrap();
        pair.b.close().unwrap();
    }
    let files = std::fs::read_dir(&folder).unwrap().map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap());
    let text: String = files.collect();
    std::fs::remove_dir_all(&folder).unwrap();
    for track in ["stager of cuda:0, packs", "stager of cuda:1, unpacks", "stream 0x"] {
        assert!(text.contains(track), "{track} is not in {text}");
    }
    for (name, bytes) in [("pack", size), ("unpack", size), ("wait for stream", 0)] {
        let slices = text.lines().filter(|line| line.contains(&format!("\"X\",\"name\":\"{name}\",")));
        let of = |line: &str| line.rsplit_once(':').unwrap().1.trim_end_matches(['}', ',']).parse::<usize>().unwrap();
        assert_eq!(slices.map(of).reduce(|all, one| all + one), Some(bytes), "{name} in {text}");
    }
}
