//! One rank of a test: its group, its buffer, and memory of its GPU.

#![allow(unsafe_code)]

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crossrail::{Context, Settings};
use crossrail_control::{Group, GroupOptions, StoreServer};
use crossrail_cuda::{Cuda, Device, DeviceMemory, Event, PinnedMemory, Stream};
use crossrail_ep_cuda::{Config, DeviceBuffer, DeviceOptions, Layout, Link, LinkKind, OnLoss, Payload, Scale, Shape};
use crossrail_types::Filter;

pub(crate) const F32: Payload = Payload::Fp8(Scale::F32);
pub(crate) const PACKED: Payload = Payload::Fp8(Scale::Ue8m0);
/// How long anything may take before the test fails.
pub(crate) const LIMIT: Duration = Duration::from_secs(10);
/// What outputs are filled with before.
pub(crate) const POISON: u8 = 0xa5;
/// Bytes of a rank's memory on its GPU.
const ROOM: usize = 96 << 20;
const PINNED: usize = 1 << 20;

/// What a test is about.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) ranks: u32,
    pub(crate) nodes: u32,
    pub(crate) layouts: Vec<Layout>,
    pub(crate) payload: Payload,
    pub(crate) prereduce: bool,
    pub(crate) hidden: usize,
    pub(crate) tokens: usize,
    pub(crate) local: usize,
    pub(crate) topk: usize,
    pub(crate) timeout: Duration,
    /// The same for rank 0 alone.
    pub(crate) hasty: Option<Duration>,
    /// Whether GPUs may reach each other's memory.
    pub(crate) direct: bool,
}

impl Case {
    pub(crate) fn new(layout: Layout, payload: Payload) -> Case {
        Case {
            ranks: 4,
            nodes: 1,
            layouts: vec![layout],
            payload,
            prereduce: true,
            hidden: 384,
            tokens: 14,
            local: 3,
            topk: 5,
            timeout: Duration::from_secs(4),
            hasty: None,
            direct: true,
        }
    }

    /// As many values in a row as large models have.
    pub(crate) fn wide(layout: Layout, payload: Payload) -> Case {
        Case { hidden: 7168, tokens: 20, local: 8, topk: 8, ..Case::new(layout, payload) }
    }

    /// All that kernels are compiled for, here: no other test has another shape.
    pub(crate) fn all() -> Vec<Case> {
        vec![
            Case::new(Layout::Expert, Payload::Bf16),
            Case { prereduce: false, ..Case::new(Layout::Expert, F32) },
            Case::new(Layout::Expert, PACKED),
            Case::wide(Layout::Expert, F32),
            Case::new(Layout::Rank, Payload::Bf16),
            Case::new(Layout::Rank, F32),
            Case::new(Layout::Rank, PACKED),
            Case::wide(Layout::Rank, Payload::Bf16),
        ]
    }

    pub(crate) fn everybody(&self) -> Vec<u32> {
        (0..self.ranks).collect()
    }

    pub(crate) fn config(&self) -> Config {
        Config {
            ranks: self.ranks,
            max_tokens: self.tokens,
            hidden: self.hidden,
            experts: self.local * self.ranks as usize,
            topk: self.topk,
            payload: self.payload,
            layouts: self.layouts.clone(),
            prereduce: self.prereduce,
            share_node: true,
            timeout: self.timeout,
            on_loss: OnLoss::Mask,
        }
    }
}

/// Says what a rank's heap says when its test fails.
struct Witness(u32, DeviceBuffer);

impl Drop for Witness {
    fn drop(&mut self) {
        if thread::panicking() {
            let Witness(me, buffer) = self;
            eprintln!(
                "rank {me}: faults {:?}\n    {}",
                buffer.faults(),
                buffer.report().unwrap_or_else(|e| e.to_string())
            );
        }
    }
}

/// One rank.
pub(crate) struct Rank {
    _witness: Witness,
    pub(crate) me: u32,
    pub(crate) case: Case,
    pub(crate) gpus: u32,
    pub(crate) context: Context,
    pub(crate) group: Group,
    pub(crate) buffer: DeviceBuffer,
    pub(crate) gpu: Gpu,
}

impl Rank {
    /// Rank `me` of `case`, on one of `gpus` GPUs, not connected.
    pub(crate) fn join(case: &Case, me: u32, store: &str, gpus: u32) -> Rank {
        let tls = if case.direct { Filter::All } else { Filter::Only(vec!["shm".to_owned(), "tcp".to_owned()]) };
        let context = Context::new(Settings { tls, ..settings() }).expect("a context");
        let gpu = Gpu::new(me % gpus);
        let group = join_group(case, me, store);
        let buffer = make_buffer(case, &group, &context, "experts", gpu.ordinal, gpus);
        Rank { _witness: Witness(me, buffer.clone()), me, case: case.clone(), gpus, context, group, buffer, gpu }
    }

    pub(crate) fn shape(&self) -> Shape {
        *self.buffer.shape()
    }

    pub(crate) fn connect(&self, ranks: &[u32]) {
        self.buffer.connect(ranks, true, Some(LIMIT)).unwrap_or_else(|error| panic!("rank {}: {error}", self.me));
        if self.case.nodes == 1 && self.case.direct && gpus_reach_each_other(self.gpus) {
            let near = |link: &Link| link.rank == self.me || link.kind == LinkKind::Heap;
            assert!(self.buffer.links().iter().all(near), "rank {}: {:?}", self.me, self.buffer.links());
        }
    }

    /// Connects another buffer of this rank to all.
    pub(crate) fn connect_other(&self, other: &DeviceBuffer) {
        let all = self.case.everybody();
        other.connect(&all, true, Some(LIMIT)).unwrap_or_else(|error| panic!("rank {}: {error}", self.me));
    }

    /// All of `ranks` have come here.
    pub(crate) fn meet(&self, name: &str, ranks: &[u32]) {
        let met = self.group.barrier(name, ranks, Some(LIMIT));
        met.unwrap_or_else(|error| panic!("rank {}: barrier {name}: {error}", self.me));
    }

    /// How long a step took, as rank 0 sees it.
    pub(crate) fn timed(&self, what: &str, step: impl FnOnce()) {
        let began = Instant::now();
        step();
        if self.me == 0 {
            println!("note: {what}: {:.1} ms", 1e3 * began.elapsed().as_secs_f64());
        }
    }

    /// [`Rank::connect`], and how long its parts took, as rank 0 sees it.
    pub(crate) fn timed_connect(&self, what: &str, ranks: &[u32]) {
        self.timed(what, || self.connect(ranks));
        if self.me == 0 {
            let parts = self.buffer.setup_timings().connect.into_iter();
            let parts: Vec<String> =
                parts.map(|(part, took)| format!("{part} {:.1}", 1e3 * took.as_secs_f64())).collect();
            println!("note: ms of it: {}", parts.join(", "));
        }
    }

    /// Ends it, in order.
    pub(crate) fn leave(self) {
        self.gpu.wait();
        self.timed("destroy", || self.buffer.destroy().expect("destroy"));
        self.group.leave().expect("leave");
    }
}

pub(crate) fn settings() -> Settings {
    Settings { timeout: LIMIT, ..Settings::default() }
}

pub(crate) fn join_group(case: &Case, me: u32, store: &str) -> Group {
    let options = GroupOptions {
        rank: Some(me),
        size: Some(case.ranks),
        node: Some("one node".to_owned()),
        store: Some(store.to_owned()),
        ..GroupOptions::default()
    };
    Group::join(options, &settings()).expect("join")
}

/// What a buffer of `case` on that GPU has beside its configuration.
pub(crate) fn options(case: &Case, me: u32, ordinal: u32, gpus: u32) -> DeviceOptions {
    // Its launches fit on the GPU beside those of the other ranks there, and of a second buffer.
    let there = case.ranks.div_ceil(gpus);
    let multiprocessors = primary(ordinal).device().multiprocessors().expect("multiprocessors");
    DeviceOptions {
        ordinal,
        num_sms: Some((multiprocessors / (2 * there)).clamp(1, 12)),
        regions: 2,
        node: (case.nodes > 1).then(|| me * case.nodes / case.ranks),
        ..DeviceOptions::default()
    }
}

pub(crate) fn make_buffer(
    case: &Case,
    group: &Group,
    context: &Context,
    name: &str,
    ordinal: u32,
    gpus: u32,
) -> DeviceBuffer {
    let options = options(case, group.rank(), ordinal, gpus);
    let timeout = case.hasty.filter(|_| group.rank() == 0).unwrap_or(case.timeout);
    DeviceBuffer::new(group, context, name, Config { timeout, ..case.config() }, options)
        .unwrap_or_else(|error| panic!("{error}"))
}

pub(crate) fn store() -> StoreServer {
    StoreServer::start("127.0.0.1:0", &settings()).expect("a store")
}

/// Runs `body` on every rank as a thread, each connected to all.
pub(crate) fn on_ranks(case: &Case, gpus: u32, body: impl Fn(&Rank) + Send + Sync + 'static) {
    on_ranks_apart(case, gpus, move |rank| {
        rank.timed("connect", || rank.connect(&rank.case.everybody()));
        body(&rank);
        rank.buffer.sync(Some(LIMIT)).unwrap_or_else(|error| panic!("rank {}: sync: {error}", rank.me));
        rank.leave();
    });
}

/// Runs `body` on every rank as a thread; nobody is connected.
pub(crate) fn on_ranks_apart(case: &Case, gpus: u32, body: impl Fn(Rank) + Send + Sync + 'static) {
    let store = store();
    on_these(case, 0..case.ranks, &store.address(), gpus, body);
}

/// The same on these ranks; the others are elsewhere.
pub(crate) fn on_these(
    case: &Case,
    ranks: Range<u32>,
    store: &str,
    gpus: u32,
    body: impl Fn(Rank) + Send + Sync + 'static,
) {
    let body = Arc::new(body);
    let threads: Vec<_> = ranks
        .map(|me| {
            let (case, store, body) = (case.clone(), store.to_owned(), body.clone());
            let run = move || body(Rank::join(&case, me, &store, gpus));
            (me, thread::Builder::new().name(format!("rank {me}")).spawn(run).expect("a thread"))
        })
        .collect();
    let failed: Vec<u32> =
        threads.into_iter().filter_map(|(rank, thread)| thread.join().is_err().then_some(rank)).collect();
    assert!(failed.is_empty(), "ranks {failed:?} failed: {case:?}");
}

fn gpus_reach_each_other(gpus: u32) -> bool {
    let devices = Cuda::load().expect("CUDA").devices().expect("devices");
    let used = &devices[..gpus as usize];
    let reaches =
        |one: &Device, other: &Device| one.ordinal() == other.ordinal() || one.reaches(other).unwrap_or(false);
    used.iter().all(|one| used.iter().all(|other| reaches(one, other)))
}

/// The context that PyTorch would use too.
pub(crate) fn primary(ordinal: u32) -> crossrail_cuda::Context {
    let cuda = Cuda::load().expect("CUDA");
    crossrail_cuda::Context::primary(&cuda.device(ordinal).expect("a GPU")).expect("its context")
}

/// Memory of a GPU and a stream on it, for one thread. Nothing is freed before the end: the driver waits for all kernels
/// then, and those wait for other ranks.
pub(crate) struct Gpu {
    pub(crate) ordinal: u32,
    pub(crate) stream: Stream,
    memory: DeviceMemory,
    used: Cell<usize>,
    pinned: PinnedMemory,
    done: Event,
}

impl Gpu {
    pub(crate) fn new(ordinal: u32) -> Gpu {
        let context = primary(ordinal);
        let gpu = Gpu {
            ordinal,
            stream: Stream::new(&context).expect("a stream"),
            memory: DeviceMemory::new(&context, ROOM).expect("memory"),
            used: Cell::new(0),
            pinned: PinnedMemory::new(&context, PINNED).expect("pinned memory"),
            done: Event::new(&context).expect("an event"),
        };
        // What the driver itself needs for fills and copies is there before any kernel waits.
        let place = gpu.put(&[1; 64]);
        assert_eq!(gpu.read(place, 64), [1; 64]);
        gpu.reset();
        gpu
    }

    /// All memory is free again.
    pub(crate) fn reset(&self) {
        self.wait();
        self.used.set(0);
    }

    /// Waits for all that is in the stream.
    pub(crate) fn wait(&self) {
        self.done.record(&self.stream).expect("record");
        self.done.wait(LIMIT).expect("the stream's work");
    }

    /// `len` bytes that are filled with poison.
    pub(crate) fn room(&self, len: usize) -> u64 {
        let at = self.used.get();
        assert!(at + len <= ROOM, "{len} bytes more than there is room for");
        self.used.set((at + len).next_multiple_of(256));
        let address = self.memory.address() + at as u64;
        self.poison(address, len);
        address
    }

    /// Fills these bytes of its memory once more.
    pub(crate) fn poison(&self, address: u64, len: usize) {
        if len > 0 {
            // SAFETY: our own, and nobody else uses it.
            unsafe { self.stream.fill(address, POISON, len).expect("fill") };
        }
    }

    /// These bytes on the GPU.
    pub(crate) fn put(&self, bytes: &[u8]) -> u64 {
        let address = self.room(bytes.len());
        self.write(address, bytes);
        address
    }

    pub(crate) fn write(&self, address: u64, bytes: &[u8]) {
        for (part, at) in bytes.chunks(PINNED).zip((address..).step_by(PINNED)) {
            // SAFETY: the area is ours and no copy uses it; the target is inside our memory.
            unsafe {
                std::ptr::copy_nonoverlapping(part.as_ptr(), self.pinned.as_ptr(), part.len());
                self.stream.copy_in(at, self.pinned.as_ptr(), part.len()).expect("copy");
            }
            self.wait();
        }
    }

    /// What is there, once all that is in the stream is done.
    pub(crate) fn read(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        for (part, at) in bytes.chunks_mut(PINNED).zip((address..).step_by(PINNED)) {
            // SAFETY: the area is ours and no copy uses it; the source is memory that the caller knows.
            unsafe { self.stream.copy_out(self.pinned.as_ptr(), at, part.len()).expect("copy") };
            self.wait();
            // SAFETY: as above; the copy is done.
            unsafe { std::ptr::copy_nonoverlapping(self.pinned.as_ptr(), part.as_mut_ptr(), part.len()) };
        }
        bytes
    }

    pub(crate) fn write_all<T: Bytes>(&self, address: u64, values: &[T]) {
        self.write(address, &bytes_of(values));
    }

    pub(crate) fn put_all<T: Bytes>(&self, values: &[T]) -> u64 {
        self.put(&bytes_of(values))
    }

    pub(crate) fn read_all<T: Bytes>(&self, address: u64, count: usize) -> Vec<T> {
        self.read(address, count * size_of::<T>()).chunks_exact(size_of::<T>()).map(T::from_bytes).collect()
    }
}

pub(crate) fn bytes_of<T: Bytes>(values: &[T]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(size_of_val(values));
    values.iter().for_each(|value| value.append_to(&mut bytes));
    bytes
}

/// A number as GPUs have it.
pub(crate) trait Bytes: Sized {
    fn append_to(&self, bytes: &mut Vec<u8>);
    fn from_bytes(bytes: &[u8]) -> Self;
}

macro_rules! numbers {
    ($($type:ty),+) => {
        $(impl Bytes for $type {
            fn append_to(&self, bytes: &mut Vec<u8>) {
                bytes.extend(self.to_le_bytes());
            }

            fn from_bytes(bytes: &[u8]) -> $type {
                <$type>::from_le_bytes(bytes.try_into().expect("as many bytes"))
            }
        })+
    };
}

numbers!(u16, u32, i32, i64, f32);
