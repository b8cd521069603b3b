//! Memory of GPUs, simulated ones: every operation, between every two kinds of memory, over the links that only know
//! host memory.

use std::time::Duration;

use crossrail::{
    Buffer, ConnectOptions, Context, Endpoint, ErrorKind, Memory, Place, Request, Settings, Worker, WorkerOptions,
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
                    assert_eq!(out.pack_us > 0.0, from != Place::Host && size > 0, "{what}: {out:?}");
                }
            }
        }
    });
}
