//! The loops on GPU memory, which is simulated here: any touch of it by the processor is a fault.

use std::time::Duration;

use crossrail::{ConnectOptions, Context, Endpoint, ErrorKind, Settings, Worker, WorkerOptions};
use crossrail_bench::{
    BandwidthPlan, LatencyPlan, MemoryKind, MeshPlan, MeshRank, P2pPlan, Role, Session, Unobserved, Verify, bandwidth,
    latency, mesh_all, mesh_pair, p2p, write_latency,
};
use crossrail_types::Result;

struct Pair {
    context: Context,
    ends: [(Worker, Endpoint); 2],
}

fn settings(transport: &str) -> Settings {
    let mut settings = Settings::default();
    settings.set("tls", transport).unwrap();
    settings.set("chunk", "64K").unwrap();
    settings.set("bounce", "2M").unwrap();
    settings.timeout = Duration::from_secs(20);
    settings
}

fn pair(transport: &str) -> Pair {
    pair_with(settings(transport))
}

fn pair_with(settings: Settings) -> Pair {
    let context = Context::with_simulated_gpus(settings, 2).unwrap();
    let worker = || Worker::new(&context, WorkerOptions::default()).unwrap();
    let (a, b) = (worker(), worker());
    let dialled = a.connect(&b.address(), &ConnectOptions::default()).unwrap();
    let accepted = b.accept(None).unwrap();
    Pair { context, ends: [(a, dialled), (b, accepted)] }
}

/// Runs one end each on two threads.
fn both<T: Send>(
    pair: &Pair,
    kinds: [MemoryKind; 2],
    run: impl Fn(&mut Session<'_>) -> Result<T> + Sync,
) -> [Result<T>; 2] {
    std::thread::scope(|scope| {
        let started: Vec<_> = pair
            .ends
            .iter()
            .zip([Role::Driver, Role::Echo])
            .zip(kinds)
            .map(|(((worker, endpoint), role), memory)| {
                let (context, run) = (&pair.context, &run);
                scope.spawn(move || {
                    run(&mut Session { context, worker, endpoint, role, memory, observer: &mut Unobserved })
                })
            })
            .collect();
        let outcomes: Vec<_> = started.into_iter().map(|thread| thread.join().unwrap()).collect();
        outcomes.try_into().unwrap_or_else(|_| unreachable!())
    })
}

const KINDS: [[MemoryKind; 2]; 3] = [
    [MemoryKind::Gpu(0), MemoryKind::Gpu(1)],
    [MemoryKind::Gpu(0), MemoryKind::Shared],
    [MemoryKind::Ordinary, MemoryKind::Gpu(0)],
];

#[test]
fn every_loop_verifies_on_gpu_memory() {
    for transport in ["tcp", "shm"] {
        let pair = pair(transport);
        for kinds in KINDS {
            for size in [0, 1, 4097, 300_001] {
                let plan = LatencyPlan { size, iters: 5, warmup: 1 };
                let [driver, echo] = both(&pair, kinds, |session| latency(session, plan));
                assert!(!driver.unwrap().samples_us.is_empty());
                echo.unwrap();
                let [driver, echo] = both(&pair, kinds, |session| write_latency(session, plan));
                assert!(!driver.unwrap().samples_us.is_empty());
                echo.unwrap();
                let plan = BandwidthPlan { size, iters: 2, warmup: 1, window: 3 };
                let [driver, echo] = both(&pair, kinds, |session| bandwidth(session, plan));
                assert_eq!(driver.unwrap().samples_us.len(), 2);
                echo.unwrap();
            }
        }
    }
}

#[test]
fn p2p_tells_what_staging_took() {
    for transport in ["tcp", "shm"] {
        let pair = pair(transport);
        for kinds in KINDS {
            let plan = P2pPlan { size: 3_000_001, iters: 2, warmup: 1, verify: Verify::Full };
            let [driver, echo] = both(&pair, kinds, |session| p2p(session, plan));
            let rows = driver.unwrap();
            assert_eq!(rows, echo.unwrap());
            for row in rows {
                let (sent, received) = (&row.sender.receipt, &row.receiver.receipt);
                assert_eq!((sent.bytes, received.bytes), (3_000_001, 3_000_001));
                assert_eq!(sent.protocol, "chunks");
                assert_eq!(sent.pack_us > 0.0, matches!(kinds[0], MemoryKind::Gpu(_)), "{row:?}");
                assert_eq!(received.unpack_us > 0.0, matches!(kinds[1], MemoryKind::Gpu(_)), "{row:?}");
            }
        }
    }
}

#[test]
fn a_short_message_waits_for_no_stager() {
    for (transport, longest) in [("tcp", 64 << 10), ("shm", 4096)] {
        let pair = pair(transport);
        let gpus = [0, 1].map(|ordinal| pair.context.simulated_gpu(ordinal).unwrap());
        gpus.iter().for_each(|gpu| {
            gpu.hold_packs(true);
            gpu.hold_unpacks(true);
        });
        for size in [8, 4096, longest] {
            let [driver, echo] =
                both(&pair, KINDS[0], |session| latency(session, LatencyPlan { size, iters: 3, warmup: 1 }));
            assert!(!driver.unwrap().samples_us.is_empty());
            echo.unwrap();
        }
        gpus.iter().for_each(|gpu| {
            gpu.hold_packs(false);
            gpu.hold_unpacks(false);
        });
    }
}

/// A stage that takes so long that nothing else does, on a busy machine either.
const SLOW: Duration = Duration::from_millis(400);

#[test]
fn the_stage_that_is_slow_is_the_one_that_was_waited_for() {
    // Three chunks for four slots each way: bounce memory is never short.
    let plan = P2pPlan { size: 3 << 16, iters: 1, warmup: 0, verify: Verify::Full };
    for transport in ["tcp", "shm"] {
        let pair = pair(transport);
        let (source, target) = (pair.context.simulated_gpu(0).unwrap(), pair.context.simulated_gpu(1).unwrap());
        let run = || {
            let [driver, echo] = both(&pair, KINDS[0], |session| p2p(session, plan));
            echo.unwrap();
            let row = driver.unwrap().remove(0);
            (row.sender.receipt.held, row.receiver.receipt.held, row)
        };
        let slow = SLOW.as_micros() as f64;
        source.set_pack_delay(SLOW);
        let (sent, received, row) = run();
        assert!(sent.pack_us > 0.5 * slow && sent.pack_us <= row.sender.us, "{transport}, packs: {row:?}");
        assert!(sent.pack_us > received.unpack_us + received.slot_us + sent.slot_us, "{transport}: {row:?}");
        source.set_pack_delay(Duration::ZERO);
        target.set_unpack_delay(SLOW);
        let (sent, received, row) = run();
        assert!(received.unpack_us > 0.5 * slow && received.unpack_us <= row.receiver.us, "{transport}: {row:?}");
        assert!(received.unpack_us > sent.pack_us + received.slot_us + sent.slot_us, "{transport}: {row:?}");
    }
}

#[test]
fn bounce_memory_that_an_unpack_holds_is_waited_for_at_the_sender() {
    let mut settings = settings("tcp");
    settings.set("chunk", "256K").unwrap();
    settings.set("bounce", "1M").unwrap();
    let pair = pair_with(settings);
    pair.context.simulated_gpu(1).unwrap().set_unpack_delay(SLOW);
    // Eight chunks for two slots each way.
    let plan = P2pPlan { size: 8 << 18, iters: 1, warmup: 0, verify: Verify::Full };
    let [driver, echo] = both(&pair, KINDS[0], |session| p2p(session, plan));
    echo.unwrap();
    let row = driver.unwrap().remove(0);
    assert!(row.sender.receipt.held.slot_us > 0.5 * SLOW.as_micros() as f64, "{row:?}");
    assert!(
        row.receiver.receipt.held.unpack_us > row.sender.receipt.held.slot_us,
        "and the receiver knows why: {row:?}"
    );
}

#[test]
fn a_gpu_that_is_not_there_is_named_at_once() {
    let pair = pair("shm");
    let began = std::time::Instant::now();
    let kinds = [MemoryKind::Gpu(7), MemoryKind::Gpu(7)];
    for outcome in
        both(&pair, kinds, |session| p2p(session, P2pPlan { size: 1, iters: 1, warmup: 0, verify: Verify::Full }))
    {
        let error = outcome.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Usage);
        assert!(error.to_string().contains("cuda:7"), "{error}");
    }
    assert!(began.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_mesh_of_gpus() {
    let context = Context::with_simulated_gpus(settings("tcp"), 3).unwrap();
    let mut ranks: Vec<(Worker, Vec<Option<Endpoint>>)> =
        (0..3).map(|_| (Worker::new(&context, WorkerOptions::default()).unwrap(), vec![None; 3])).collect();
    for from in 0..3 {
        for to in 0..from {
            let dialled = ranks[from].0.connect(&ranks[to].0.address(), &ConnectOptions::default()).unwrap();
            let accepted = ranks[to].0.accept(None).unwrap();
            ranks[from].1[to] = Some(dialled);
            ranks[to].1[from] = Some(accepted);
        }
    }
    let plan = MeshPlan {
        size: 200_000,
        iters: 2,
        warmup: 1,
        window: 2,
        small: 8,
        trips: 5,
        patience: Duration::from_secs(20),
    };
    let context = &context;
    std::thread::scope(|scope| {
        let started: Vec<_> = ranks
            .iter()
            .enumerate()
            .map(|(rank, (worker, peers))| {
                scope.spawn(move || {
                    let memory = MemoryKind::Gpu(rank as u32);
                    let mine = &mut MeshRank { context, worker, rank, peers, memory, observer: &mut Unobserved };
                    let pairs = [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)];
                    let pairs: Vec<_> =
                        pairs.into_iter().filter_map(|pair| mesh_pair(mine, pair, plan).unwrap()).collect();
                    (pairs, mesh_all(mine, plan).unwrap())
                })
            })
            .collect();
        for thread in started {
            let (pairs, samples) = thread.join().unwrap();
            assert_eq!((pairs.len(), samples.all_us.len()), (2, 2));
            assert_eq!(samples.all_bytes, 2 * 2 * 200_000);
        }
    });
}
