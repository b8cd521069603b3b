//! GPU memory between two processes: copied by the GPUs where they reach each other, through host memory where not;
//! streams that wait for requests; puts with signals, captured in a graph; a process that is killed.
//!
//! Skipped, visibly, where there is no GPU. The other process is on the last GPU that there is.
#![allow(unsafe_code)]

use std::process::{Child, Command};
use std::time::Duration;

use crossrail::{
    Buffer, ConnectOptions, Context, Endpoint, ErrorKind, Memory, Outcome, Place, Protocol, Ready, Receipt, RegionKey,
    Request, Settings, Shared, Signal, Worker, WorkerOptions,
};
use crossrail_cuda::{Cuda, Stream};
use crossrail_locks::{Mutex, MutexGuard};

#[path = "gpu/pushing.rs"]
mod pushing;
#[path = "gpu/rows.rs"]
mod rows;
#[path = "../../cuda/tests/support/mod.rs"]
#[allow(dead_code)]
mod support;

const LIMIT: Option<Duration> = Some(Duration::from_secs(60));
const ADDRESS: &str = "GPU_TEST_ADDRESS";
const ORDINAL: &str = "GPU_TEST_ORDINAL";
const PAIRS: &str = "GPU_TEST_SETTINGS";
const TOLD: u64 = 1 << 40;
const ANSWER: u64 = 1 << 41;
const WORDS: usize = 4096;
const RAILS: &str = "127.0.0.1,127.0.0.2,127.0.0.3,127.0.0.4";

/// One test at a time: they count the GPUs' free memory.
static TURN: Mutex<()> = Mutex::new(());

/// This process, and another one that does what it is told.
struct Pair {
    cuda: Cuda,
    context: Context,
    worker: Worker,
    to: Endpoint,
    child: Keeper,
    _turn: MutexGuard<'static, ()>,
}

struct Keeper(Child);

impl Drop for Keeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn settings(pairs: &str) -> Settings {
    Settings::from_pairs(pairs.split(';').filter_map(|pair| pair.split_once('='))).unwrap()
}

fn pair(pairs: &str) -> Option<Pair> {
    let cuda = support::cuda()?;
    let turn = TURN.lock();
    let last = cuda.devices().unwrap().len() as u32 - 1;
    let context = Context::new(settings(pairs)).unwrap();
    let worker = Worker::new(&context, WorkerOptions::default()).unwrap();
    let (to, child) = start(&worker, pairs, last);
    Some(Pair { cuda, context, worker, to, child, _turn: turn })
}

fn start(worker: &Worker, pairs: &str, ordinal: u32) -> (Endpoint, Keeper) {
    let address: String = worker.address().iter().map(|byte| format!("{byte:02x}")).collect();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "role_other_process", "--nocapture", "--test-threads", "1"])
        .env(ADDRESS, address)
        .env(ORDINAL, ordinal.to_string())
        .env(PAIRS, pairs)
        .spawn()
        .unwrap();
    let child = Keeper(child);
    (worker.accept(LIMIT).unwrap(), child)
}

fn bytes_of_hex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap()).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn pattern(len: usize, seed: u64) -> Vec<u8> {
    (0..len as u64).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(seed) >> 29) as u8).collect()
}

fn stream(cuda: &Cuda, ordinal: u32) -> Stream {
    let context = crossrail_cuda::Context::primary(&cuda.device(ordinal).unwrap()).unwrap();
    Stream::new(&context).unwrap()
}

impl Pair {
    /// Has the other process do something; its answer.
    fn tell(&self, words: &str) -> String {
        done(words, self.to.send(words.as_bytes().to_vec(), TOLD).unwrap());
        let answer = self.worker.recv(vec![0; WORDS], ANSWER, u64::MAX, Some(&self.to)).unwrap();
        let receipt = done(words, &answer);
        let bytes = answer.into_vec().unwrap();
        String::from_utf8(bytes[..receipt.bytes as usize].to_vec()).unwrap()
    }

    fn filled(&self, place: Place, bytes: &[u8]) -> Memory {
        let memory = self.context.alloc_on(bytes.len(), place).unwrap();
        memory.fill_from(0, bytes).unwrap();
        memory
    }

    /// Sends to the other process and back, by message and by region, memory of these kinds; how it went.
    fn round(&self, mine: Place, theirs: &str, size: usize, expected: Option<Protocol>) {
        let what = format!("{mine} to {theirs}, {size} bytes");
        let (bytes, offset) = (pattern(size, size as u64), 5);
        let source = self.filled(mine, &[&[0; 5][..], &bytes].concat());
        let part = |memory: &Memory| memory.slice(offset..offset + size).unwrap();
        self.tell(&format!("alloc {theirs} {}", size + 9));
        self.tell(&format!("recv 3 {size} 7"));
        let receipt = done(&what, self.to.send(part(&source), 7).unwrap());
        let as_expected = |protocol: Protocol| expected.is_none_or(|expected| expected == protocol);
        // Long ones are written by the sender's GPU, and so is what is read.
        let pushed = |receipt: &Receipt| receipt.protocol == Protocol::CudaIpc && size > FETCHED;
        assert!(as_expected(receipt.protocol), "{what}: {receipt:?}");
        assert_eq!(receipt.pushed, pushed(&receipt), "{what}: {receipt:?}");
        assert_eq!(self.tell("wait"), receipt.protocol.to_string(), "{what}");
        assert_eq!(self.tell(&format!("check 3 {size} {size}")), "good", "{what}: sent");

        let back = self.context.alloc_on(size + 5, mine).unwrap();
        let receive = self.worker.recv(part(&back), 8, u64::MAX, Some(&self.to)).unwrap();
        self.tell(&format!("send 3 {size} 8"));
        let received = done(&what, &receive);
        assert!(as_expected(received.protocol), "{what}: {received:?}");
        assert_eq!(received.pushed, pushed(&received), "{what}: {received:?}");
        self.tell("wait");
        assert_eq!(bytes_of(&back)[5..], bytes, "{what}: received");

        let key = RegionKey::from_bytes(&bytes_of_hex(&self.tell("register"))).unwrap();
        let other = pattern(size, 99);
        source.fill_from(offset, &other).unwrap();
        let written = done(&what, self.to.write(part(&source), &key, 1, None).unwrap());
        assert!(as_expected(written.protocol), "{what}: {written:?}");
        assert_eq!(written.pushed, pushed(&written), "{what}: {written:?}");
        assert_eq!(self.tell(&format!("check 1 {size} 99")), "good", "{what}: written");
        let read = done(&what, self.to.read(part(&back), &key, 1).unwrap());
        // A frame that asks for bytes has none with it.
        let answered = if expected == Some(Protocol::Eager) { Some(Protocol::Chunks) } else { expected };
        assert!(answered.is_none_or(|answered| answered == read.protocol), "{what}: {read:?}");
        assert_eq!(read.pushed, read.protocol == Protocol::CudaIpc, "{what}: {read:?}");
        assert_eq!(bytes_of(&back)[5..], other, "{what}: read");
        self.tell("free");
    }
}

fn bytes_of(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    memory.copy_to(0, &mut bytes).unwrap();
    bytes
}

fn done(what: &str, request: impl std::borrow::Borrow<Request>) -> Receipt {
    request.borrow().wait(LIMIT).unwrap_or_else(|error| panic!("{what}: {error}"))
}

const DIRECT: &str = "CROSSRAIL_TLS=shm,cuda_ipc";
/// What the receiving end copies itself.
const FETCHED: usize = 1 << 20;
const SIZES: [usize; 8] = [1, 4096, 65_537, 1 << 20, (1 << 20) + 1, (3 << 20) + 1, 64 << 20, 5];

#[test]
fn one_copy_between_processes_at_every_size() {
    let Some(pair) = pair(DIRECT) else { return };
    let chosen = pair.to.explain();
    assert!(chosen.candidates.iter().any(|way| way.lane == "cuda_ipc" && way.reason.is_none()), "{chosen}");
    for size in SIZES {
        pair.round(Place::Gpu(0), "gpu", size, Some(Protocol::CudaIpc));
    }
}

#[test]
fn between_gpu_and_host_chunks_carry_it() {
    let Some(pair) = pair(DIRECT) else { return };
    for (size, expected) in
        [(1, None), (4096, None), (100_001, Some(Protocol::Chunks)), ((3 << 20) + 1, Some(Protocol::Chunks))]
    {
        pair.round(Place::Gpu(0), "cpu", size, expected);
        pair.round(Place::Host, "gpu", size, expected);
    }
}

#[test]
fn over_tcp_with_every_unpack_and_several_rails() {
    for unpack in ["kernel", "d2d", "host"] {
        for rails in ["127.0.0.1", RAILS] {
            let Some(pair) =
                pair(&format!("CROSSRAIL_TLS=tcp;CROSSRAIL_NET_DEVICES={rails};CROSSRAIL_UNPACK={unpack}"))
            else {
                return;
            };
            for size in SIZES {
                let expected = if size <= 64 << 10 { Protocol::Eager } else { Protocol::Chunks };
                pair.round(Place::Gpu(0), "gpu", size, Some(expected));
            }
        }
    }
}

#[test]
fn traffic_both_ways_overlaps() {
    for pairs in [DIRECT, "CROSSRAIL_TLS=tcp;CROSSRAIL_CHUNK=256K;CROSSRAIL_BOUNCE=4M"] {
        let Some(pair) = pair(pairs) else { return };
        let size = 9_000_001;
        let mut requests = Vec::new();
        let mut memories = Vec::new();
        for at in 0..8_u64 {
            pair.tell(&format!("alloc gpu {size}"));
            pair.tell(&format!("recv 0 {size} {at}"));
            pair.tell(&format!("alloc gpu {size}"));
            pair.tell(&format!("fill {}", 50 + at));
            let back = pair.context.alloc_on(size, Place::Gpu(0)).unwrap();
            requests.push(pair.worker.recv(&back, 100 + at, u64::MAX, Some(&pair.to)).unwrap());
            pair.tell(&format!("send 0 {size} {}", 100 + at));
            let source = pair.filled(Place::Gpu(0), &pattern(size, at));
            requests.push(pair.to.send(&source, at).unwrap());
            memories.push((back, 50 + at));
        }
        for request in requests {
            done(pairs, request);
        }
        for (back, seed) in memories {
            assert_eq!(bytes_of(&back), pattern(size, seed), "{pairs}");
        }
        pair.tell("wait");
        for at in (0..8).rev() {
            pair.tell("free");
            assert_eq!(pair.tell(&format!("check 0 {size} {at}")), "good", "{pairs}");
            pair.tell("free");
        }
    }
}

#[test]
fn streams_order_transfers() {
    for pairs in [DIRECT, "CROSSRAIL_TLS=tcp"] {
        let Some(pair) = pair(pairs) else { return };
        let size = 8 << 20;
        let stream = stream(&pair.cuda, 0);
        let source = pair.context.alloc_on(size, Place::Gpu(0)).unwrap();
        pair.tell(&format!("alloc gpu {size}"));
        for value in [3_u8, 4] {
            pair.tell(&format!("recv 0 {size} 1"));
            // Much to do first, and then what is sent: nobody waits for it here.
            // SAFETY: the memory lives on, and is sent only after this.
            let ready = unsafe {
                for filler in 0..200_u8 {
                    stream.fill(source.ptr() as u64, filler, size).unwrap();
                }
                stream.fill(source.ptr() as u64, value, size).unwrap();
                Ready::on_stream(&pair.context, 0, stream.handle()).unwrap()
            };
            let send = pair.to.send(Buffer::from(&source).after(ready).unwrap(), 1).unwrap();
            done(pairs, send);
            pair.tell("wait");
            assert_eq!(pair.tell(&format!("all 0 {size} {value}")), "good", "{pairs}");
        }
        // Received, and then copied by a stream that waited for it.
        let (target, copy) =
            (pair.context.alloc_on(size, Place::Gpu(0)).unwrap(), pair.context.alloc_on(size, Place::Gpu(0)).unwrap());
        let receive = pair.worker.recv(&target, 2, u64::MAX, Some(&pair.to)).unwrap();
        // SAFETY: everything lives until the stream is done.
        unsafe {
            receive.wait_on(stream.handle(), 0).unwrap();
            stream.copy(copy.ptr() as u64, target.ptr() as u64, size).unwrap();
        }
        assert!(!stream.is_done().unwrap(), "{pairs}: nothing was sent yet");
        pair.tell(&format!("send 0 {size} 2"));
        stream.wait(Duration::from_secs(30)).unwrap();
        assert!(bytes_of(&copy).iter().all(|byte| *byte == 4), "{pairs}");
        done(pairs, &receive);
        // One that fails lets the stream go on too.
        let never = pair.worker.recv(&target, 3, u64::MAX, Some(&pair.to)).unwrap();
        // SAFETY: as above.
        unsafe { never.wait_on(stream.handle(), 0).unwrap() };
        never.cancel();
        stream.wait(Duration::from_secs(30)).unwrap();
        let captured = stream.record(|stream| {
            let pending = pair.worker.recv(&target, 4, u64::MAX, Some(&pair.to))?;
            // SAFETY: as above.
            let refused = unsafe { pending.wait_on(stream.handle(), 0) };
            pending.cancel();
            refused
        });
        let error = captured.expect_err("a graph cannot wait for a request");
        assert!(error.to_string().contains("Mapped::put"), "{error}");
    }
}

/// Nothing was warmed up here: slots and lists are made, and grow, while streams wait for what needs them.
#[test]
fn transfers_end_while_as_many_streams_wait_for_them_as_may() {
    let staged = ["kernel", "host"].map(|unpack| format!("CROSSRAIL_TLS=tcp;CROSSRAIL_UNPACK={unpack}"));
    for pairs in [DIRECT, "CROSSRAIL_TLS=shm", &staged[0], &staged[1]] {
        let Some(pair) = pair(pairs) else { return };
        let streams: Vec<Stream> = (0..crossrail_cuda::max_waiting_streams()).map(|_| stream(&pair.cuda, 0)).collect();
        let one_more = stream(&pair.cuda, 0);
        for (round, size) in [100_001, 6 << 20, 64 << 20].into_iter().enumerate() {
            let (target, spare) = (
                pair.context.alloc_on(size, Place::Gpu(0)).unwrap(),
                pair.context.alloc_on(size, Place::Gpu(0)).unwrap(),
            );
            pair.tell(&format!("alloc gpu {size}"));
            pair.tell(&format!("fill {round}"));
            let receive = pair.worker.recv(&target, 2, u64::MAX, Some(&pair.to)).unwrap();
            for stream in &streams {
                // SAFETY: the streams live until they are done.
                unsafe { receive.wait_on(stream.handle(), 0).unwrap() };
            }
            // SAFETY: as above.
            let refused = unsafe { receive.wait_on(one_more.handle(), 0).unwrap_err() };
            assert_eq!(refused.kind, ErrorKind::Exhausted, "{refused}");
            assert!(refused.to_string().contains(&format!("{:#x}", streams[0].handle())), "{refused}");
            // What is freed, allocated and copied meanwhile waits for none of them.
            drop(spare);
            let other = pair.filled(Place::Gpu(0), &pattern(size, 77));
            assert!(streams.iter().all(|stream| !stream.is_done().unwrap()), "{pairs}: nothing was sent yet");
            pair.tell(&format!("send 0 {size} 2"));
            for stream in &streams {
                stream.wait(Duration::from_secs(20)).unwrap_or_else(|error| panic!("{pairs}, {size} bytes: {error}"));
            }
            done(pairs, &receive);
            assert_eq!(bytes_of(&target), pattern(size, round as u64), "{pairs}");
            assert_eq!(bytes_of(&other), pattern(size, 77), "{pairs}");
            pair.tell("wait");
            pair.tell("free");
        }
        assert!(
            crossrail_cuda::wait_for_releases(Duration::from_secs(20)),
            "{pairs}: what was dropped is given back in the end"
        );
    }
}

#[test]
fn puts_and_signals_and_a_graph_of_them() {
    let Some(pair) = pair(DIRECT) else { return };
    let (size, flag) = (300_007, 400_000);
    pair.tell(&format!("alloc gpu {}", 1 << 20));
    let shared = Shared::from_bytes(&bytes_of_hex(&pair.tell("share"))).unwrap();
    let mapped = pair.to.map(&shared, LIMIT).unwrap();
    let Place::Gpu(ordinal) = mapped.place() else { panic!("{mapped:?}") };
    for gpu in 0..pair.cuda.devices().unwrap().len() as u32 {
        let named = pair.to.map_on(&shared, Some(gpu), LIMIT).unwrap();
        assert_eq!(named.place(), Place::Gpu(gpu));
    }
    pair.to.map_on(&shared, Some(99), LIMIT).unwrap_err();
    let stream = stream(&pair.cuda, ordinal);
    let source = pair.filled(Place::Gpu(ordinal), &pattern(size, 1));
    let put = |value: u64| {
        // SAFETY: the memory and the mapping live until the stream is done.
        unsafe { mapped.put(3, source.ptr() as u64, size, stream.handle(), Some(Signal { offset: flag, value })) }
    };
    put(1).unwrap();
    assert_eq!(pair.tell(&format!("await {flag} 1")), "Reached");
    assert_eq!(pair.tell(&format!("check 3 {size} 1")), "good");
    assert_eq!(pair.tell(&format!("await {flag} 9")), "TimedOut");
    let graph = stream.record(|_| put(2)).unwrap();
    assert_eq!(pair.tell(&format!("word {flag}")), "1", "a capture carries nothing out");
    for round in 0..100_u64 {
        source.fill_from(0, &pattern(size, round)).unwrap();
        // SAFETY: what was captured is still there.
        unsafe { graph.launch(&stream).unwrap() };
        stream.wait(Duration::from_secs(30)).unwrap();
        if round % 20 == 0 {
            assert_eq!(pair.tell(&format!("await {flag} 2")), "Reached");
            assert_eq!(pair.tell(&format!("check 3 {size} {round}")), "good", "replay {round}");
        }
    }
    let mut bytes = vec![0; size];
    mapped.copy_to(3, &mut bytes).unwrap();
    assert_eq!(bytes, pattern(size, 99));
    // SAFETY: refused before anything is put in.
    let outside = unsafe { mapped.put((1 << 20) - 1, source.ptr() as u64, 2, stream.handle(), None) };
    assert_eq!(outside.unwrap_err().kind, ErrorKind::Usage);
}

#[test]
fn a_killed_process_fails_its_transfers_and_gives_its_memory_back() {
    for pairs in [DIRECT, "CROSSRAIL_TLS=tcp"] {
        let Some(mut pair) = pair(pairs) else { return };
        let size = 512 << 20;
        let source = pair.context.alloc_on(size, Place::Gpu(0)).unwrap();
        pair.tell(&format!("alloc gpu {size}"));
        for at in 0..3 {
            pair.tell(&format!("recv 0 {size} {at}"));
        }
        let sends: Vec<_> = (0..3).map(|at| pair.to.send(&source, at).unwrap()).collect();
        pair.child.0.kill().unwrap();
        for send in sends {
            if let Err(error) = send.wait(LIMIT) {
                assert!(matches!(error.kind, ErrorKind::PeerDead | ErrorKind::Closed), "{pairs}: {error}");
            }
        }
        let last = pair.cuda.devices().unwrap().len() as u32 - 1;
        (pair.to, pair.child) = start(&pair.worker, pairs, last);
        let expected = if pairs == DIRECT { Protocol::CudaIpc } else { Protocol::Chunks };
        pair.round(Place::Gpu(0), "gpu", 1 << 20, Some(expected));
    }
}

#[test]
fn a_wrong_claim_is_refused_with_what_the_memory_is() {
    let Some(pair) = pair(DIRECT) else { return };
    let memory = pair.context.alloc_on(4096, Place::Gpu(0)).unwrap();
    let host = vec![0_u8; 4096];
    let none = pair.cuda.devices().unwrap().len() as u32;
    for (ptr, len, ordinal) in
        [(host.as_ptr() as u64, 4096, 0), (memory.ptr() as u64, 1 << 40, 0), (memory.ptr() as u64, 4096, none)]
    {
        // SAFETY: refused before anything touches it.
        let error = pair.to.send(unsafe { Buffer::device(ptr, len, ordinal, None, None) }, 1).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Usage, "{error}");
    }
    pair.round(Place::Gpu(0), "gpu", 1000, Some(Protocol::CudaIpc));
}

/// Not a test by itself: the other process.
#[test]
fn role_other_process() {
    let (Ok(address), Ok(ordinal), Ok(pairs)) = (std::env::var(ADDRESS), std::env::var(ORDINAL), std::env::var(PAIRS))
    else {
        return;
    };
    let ordinal: u32 = ordinal.parse().unwrap();
    let context = Context::new(settings(&pairs)).unwrap();
    let worker = Worker::new(&context, WorkerOptions::default()).unwrap();
    let to = worker.connect(&bytes_of_hex(&address), &ConnectOptions::default()).unwrap();
    let mut other = Other { context, worker, to, ordinal, memory: Vec::new(), region: None, requests: Vec::new() };
    loop {
        let told = other.worker.recv(vec![0; WORDS], TOLD, u64::MAX, Some(&other.to)).unwrap();
        let Ok(receipt) = told.wait(Some(Duration::from_secs(120))) else { return };
        let words = String::from_utf8(told.into_vec().unwrap()[..receipt.bytes as usize].to_vec()).unwrap();
        let words: Vec<&str> = words.split(' ').collect();
        let answer = other.obey(&words);
        if other.to.send(answer.into_bytes(), ANSWER).and_then(|send| send.wait(LIMIT)).is_err() {
            return;
        }
    }
}

struct Other {
    context: Context,
    worker: Worker,
    to: Endpoint,
    ordinal: u32,
    memory: Vec<Memory>,
    region: Option<crossrail::Region>,
    requests: Vec<Request>,
}

impl Other {
    /// Does something with the memory that was allocated last.
    fn obey(&mut self, words: &[&str]) -> String {
        let number = |at: usize| words[at].parse::<u64>().unwrap();
        let part = |memory: &Memory| memory.slice(number(1) as usize..(number(1) + number(2)) as usize).unwrap();
        let seen = |memory: &Memory| {
            let mut bytes = vec![0; number(2) as usize];
            memory.copy_to(number(1) as usize, &mut bytes).unwrap();
            bytes
        };
        let verdict = |good: bool| if good { "good" } else { "bad" }.to_owned();
        let last = self.memory.last();
        match words[0] {
            "alloc" => {
                let place = if words[1] == "gpu" { Place::Gpu(self.ordinal) } else { Place::Host };
                self.memory.push(self.context.alloc_on(number(2) as usize, place).unwrap());
                "done".to_owned()
            }
            "free" => {
                self.region = None;
                self.memory.pop();
                "done".to_owned()
            }
            "fill" => {
                let memory = last.unwrap();
                memory.fill_from(0, &pattern(memory.len(), number(1))).unwrap();
                "done".to_owned()
            }
            "check" => verdict(seen(last.unwrap()) == pattern(number(2) as usize, number(3))),
            "all" => verdict(seen(last.unwrap()).iter().all(|byte| u64::from(*byte) == number(3))),
            "recv" => {
                let buffer = part(last.unwrap());
                self.requests.push(self.worker.recv(buffer, number(3), u64::MAX, Some(&self.to)).unwrap());
                "posted".to_owned()
            }
            "send" => {
                self.requests.push(self.to.send(part(last.unwrap()), number(3)).unwrap());
                "started".to_owned()
            }
            "wait" => {
                let ended = self.requests.drain(..).map(|request| done("other process", request).protocol.to_string());
                ended.last().unwrap_or_default()
            }
            "put" | "get" => {
                let (buffer, key) = (part(last.unwrap()), RegionKey::from_bytes(&bytes_of_hex(words[3])).unwrap());
                let request = if words[0] == "put" {
                    self.to.write(buffer, &key, 0, None).unwrap()
                } else {
                    self.to.read(buffer, &key, 0).unwrap()
                };
                self.requests.push(request);
                "started".to_owned()
            }
            // How what was begun has ended, well or not.
            "end" => {
                let ended = self.requests.drain(..).map(|request| match request.wait(LIMIT) {
                    Ok(_) => "good".to_owned(),
                    Err(error) => format!("{:?}", error.kind),
                });
                ended.last().unwrap_or_default()
            }
            "register" => {
                let region = self.worker.register(last.unwrap()).unwrap();
                hex(&self.region.insert(region).key().to_bytes())
            }
            "share" => hex(&self.to.share(last.unwrap()).unwrap().to_bytes()),
            "word" => {
                let mut bytes = [0; 8];
                last.unwrap().copy_to(number(1) as usize, &mut bytes).unwrap();
                u64::from_le_bytes(bytes).to_string()
            }
            "await" => {
                let stream = stream(&Cuda::load().unwrap(), self.ordinal);
                let limit = Duration::from_millis(if number(2) > 2 { 50 } else { 20_000 });
                // SAFETY: the memory lives until the stream is done.
                let awaited =
                    unsafe { last.unwrap().await_signal(number(1) as usize, number(2), stream.handle(), limit) };
                let awaited = awaited.unwrap();
                stream.wait(Duration::from_secs(30)).unwrap();
                assert_ne!(awaited.outcome(), Outcome::Pending);
                format!("{:?}", awaited.outcome())
            }
            other => panic!("what is {other}?"),
        }
    }
}
