//! Staging on real GPUs. Visibly skipped where there is no GPU; tests that need two, where there is one.
#![allow(unsafe_code)]

#[allow(dead_code)] // Other tests use the rest of it.
#[path = "../../cuda/tests/support/mod.rs"]
mod support;

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crossrail_cuda::{Context, Cuda, DeviceMemory, PinnedMemory, Stream};
use crossrail_locks::{Condvar, Mutex, MutexGuard};
use crossrail_shm::Arena;
use crossrail_types::{ErrorKind, Settings};

use crossrail_gpu::unpack::{Piece, Source, UnpackMode, Unpacker};
use crossrail_gpu::{Completion, Device, DeviceAlloc, Devices, Direction, Slot, StagingListener, StagingQueue};

const LIMIT: Duration = Duration::from_secs(20);
const CHUNK: usize = 256 << 10;
/// Slots each way.
const SLOTS: usize = 8;
const MODES: [UnpackMode; 3] = [UnpackMode::Kernel, UnpackMode::D2d, UnpackMode::Host];
/// Set in the children of tests that need a process of their own: the test's name.
const CHILD: &str = "GPU_STAGING_CHILD";

/// One test at a time: freeing GPU memory waits for all of the GPU's work.
static TURN: Mutex<()> = Mutex::new(());

#[derive(Default)]
struct Told {
    done: Mutex<VecDeque<Completion>>,
    changed: Condvar,
}

impl StagingListener for Told {
    fn completed(&self, done: Vec<Completion>) -> bool {
        self.done.lock().extend(done);
        self.changed.notify_all();
        true
    }
}

impl Told {
    fn next(&self) -> Completion {
        let deadline = Instant::now() + LIMIT;
        let mut done = self.done.lock();
        while done.is_empty() {
            assert!(!self.changed.wait_until(&mut done, deadline).timed_out(), "nothing was told");
        }
        done.pop_front().expect("just looked")
    }
}

struct Bed {
    device: Arc<Device>,
    devices: Arc<Devices>,
    told: Arc<Told>,
    queue: StagingQueue,
    _turn: MutexGuard<'static, ()>,
}

fn settings(unpack: UnpackMode) -> Settings {
    Settings { chunk: CHUNK, bounce: 2 * SLOTS * CHUNK, timeout: LIMIT, unpack, ..Settings::default() }
}

/// The GPUs of this machine, if there are so many.
fn gpus(count: usize) -> Option<Cuda> {
    let cuda = support::cuda()?;
    let found = cuda.devices().unwrap().len();
    if found < count {
        support::skip(&format!("needs {count} GPUs, there are {found}"));
        return None;
    }
    Some(cuda)
}

fn bed(unpack: UnpackMode) -> Option<Bed> {
    let cuda = gpus(1)?;
    let turn = TURN.lock();
    if unpack == UnpackMode::Kernel && !compiles(&cuda) {
        return None;
    }
    let devices = Devices::new(&settings(unpack), Arena::new());
    let device = devices.device(0).unwrap();
    let told = Arc::new(Told::default());
    let queue = device.stager().unwrap().attach(Arc::downgrade(&told) as Weak<dyn StagingListener>);
    Some(Bed { device, devices, told, queue, _turn: turn })
}

/// Whether this process finds a compiler for kernels; says so if not.
fn compiles(cuda: &Cuda) -> bool {
    let context = Context::primary(&cuda.device(0).unwrap()).unwrap();
    match Unpacker::new(&context, UnpackMode::Kernel, &settings(UnpackMode::Kernel)) {
        Ok(_) => true,
        Err(why) => {
            assert!(why.to_string().contains("CROSSRAIL_UNPACK=d2d"), "{why}");
            assert!(std::env::var_os("TEST_GPU").is_none(), "TEST_GPU is set, but {why}");
            support::skip(&why.to_string());
            false
        }
    }
}

impl Bed {
    fn alloc(&self, len: usize) -> DeviceAlloc {
        self.devices.alloc(0, len).unwrap()
    }

    fn filled(&self, bytes: &[u8]) -> DeviceAlloc {
        let memory = self.alloc(bytes.len());
        self.device.copy_in(memory.ptr(), bytes).unwrap();
        memory
    }

    fn slot(&self, way: Direction) -> Slot {
        self.queue.slot(way, CHUNK).expect("a free slot")
    }

    fn arrived(&self, bytes: &[u8]) -> Slot {
        let slot = self.slot(Direction::In);
        fill(&slot, bytes);
        slot
    }

    fn bytes(&self, memory: &DeviceAlloc) -> Vec<u8> {
        let mut bytes = vec![0; memory.len()];
        self.device.copy_out(memory.ptr(), &mut bytes).unwrap();
        bytes
    }

    fn free(&self, way: Direction) -> usize {
        let taken: Vec<Slot> = std::iter::from_fn(|| self.queue.slot(way, CHUNK)).collect();
        taken.len()
    }
}

fn fill(slot: &Slot, bytes: &[u8]) {
    assert!(bytes.len() <= slot.len());
    // SAFETY: the slot is the caller's and long enough.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), slot.ptr(), bytes.len()) };
}

fn held(slot: &Slot, len: usize) -> &[u8] {
    assert!(len <= slot.len());
    // SAFETY: the slot is the caller's and long enough.
    unsafe { std::slice::from_raw_parts(slot.ptr(), len) }
}

fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut number = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        number ^= number << 13;
        number ^= number >> 7;
        number ^= number << 17;
        number as u8
    };
    (0..len).map(|_| next()).collect()
}

/// Runs the test again in a process of its own, and `true` there. What happens to the GPU there stays there.
fn alone(test: &str) -> bool {
    if std::env::var_os(CHILD).is_some_and(|name| name == *test) {
        return true;
    }
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    // A fault in one process ends work of others on the same GPU.
    let _turn = TURN.lock();
    let output = command.args(["--exact", test, "--nocapture"]).env(CHILD, test).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.contains("1 passed"), "{out}{err}");
    false
}

#[test]
fn bytes_go_out_and_come_in_at_any_offset_and_size_in_all_modes() {
    for mode in MODES {
        let Some(bed) = bed(mode) else { return };
        let mut ticket = 0;
        for len in [1, 2, 15, 16, 63, 4097, CHUNK - 3, CHUNK] {
            for offset in [0, 1, 3, 8, 17] {
                let sent = pattern(CHUNK + 64, ticket + 1);
                let source = bed.filled(&sent);
                bed.queue.pack(ticket, source.ptr() + offset as u64, bed.slot(Direction::Out), len);
                let done = bed.told.next();
                done.result.unwrap();
                let slot = done.slot.expect("a pack's slot comes back");
                assert_eq!(held(&slot, len), &sent[offset..offset + len], "{mode}: {len} at {offset}");

                let before = pattern(CHUNK + 64, 77);
                let target = bed.filled(&before);
                let place = (offset * 7) % 64;
                bed.queue.unpack(ticket + 1, bed.arrived(&sent[..len]), target.ptr() + place as u64, len);
                let done = bed.told.next();
                assert!(done.result.is_ok() && done.slot.is_none() && done.ticket == ticket + 1, "{done:?}");
                let mut expected = before;
                expected[place..place + len].copy_from_slice(&sent[..len]);
                assert!(bed.bytes(&target) == expected, "{mode}: {len} to {place}");
                ticket += 2;
            }
        }
        assert_eq!((bed.free(Direction::Out), bed.free(Direction::In)), (SLOTS, SLOTS));
        assert_eq!(bed.device.check(bed.alloc(1).ptr(), 1), Ok(()));
    }
}

/// Everything out of one memory and into another, through all slots at once; the two ways never stop each other.
#[test]
fn traffic_both_ways_through_few_slots_is_whole() {
    const LEN: usize = 48 * CHUNK - 12_345;
    for mode in MODES {
        let Some(bed) = bed(mode) else { return };
        let sent = pattern(LEN, 5);
        let (source, target) = (bed.filled(&sent), bed.alloc(LEN));
        let chunks = LEN.div_ceil(CHUNK);
        let len_of = |chunk: usize| CHUNK.min(LEN - chunk * CHUNK);
        let (mut packed, mut unpacked) = (0, 0);
        let mut full: VecDeque<(usize, Slot)> = VecDeque::new();
        while unpacked < chunks {
            while packed < chunks
                && let Some(slot) = bed.queue.slot(Direction::Out, CHUNK)
            {
                let at = (packed * CHUNK) as u64;
                bed.queue.pack(packed as u64, source.ptr() + at, slot, len_of(packed));
                packed += 1;
            }
            while let Some((chunk, slot)) = full.pop_front() {
                let Some(into) = bed.queue.slot(Direction::In, CHUNK) else {
                    full.push_front((chunk, slot));
                    break;
                };
                fill(&into, held(&slot, len_of(chunk)));
                let at = (chunk * CHUNK) as u64;
                bed.queue.unpack((1 << 32) + chunk as u64, into, target.ptr() + at, len_of(chunk));
            }
            let done = bed.told.next();
            done.result.unwrap();
            match done.slot {
                Some(slot) => full.push_back((done.ticket as usize, slot)),
                None => unpacked += 1,
            }
        }
        assert!(bed.bytes(&target) == sent, "{mode}");
        let stats = bed.device.stager().unwrap().stats();
        assert_eq!((stats.packed, stats.unpacked), (LEN as u64, LEN as u64));
        assert!(stats.batches <= chunks as u64 && stats.pack_ns > 0 && stats.unpack_ns > 0, "{stats:?}");
    }
}

#[test]
fn several_devices_are_staged_in_one_process() {
    let Some(_cuda) = gpus(2) else { return };
    let Some(first) = bed(UnpackMode::D2d) else { return };
    let second = first.devices.device(1).unwrap();
    let told = Arc::new(Told::default());
    let queue = second.stager().unwrap().attach(Arc::downgrade(&told) as Weak<dyn StagingListener>);
    let sent = pattern(CHUNK, 9);
    let (source, target) = (first.filled(&sent), first.devices.alloc(1, CHUNK).unwrap());
    first.queue.pack(1, source.ptr(), first.slot(Direction::Out), CHUNK);
    let slot = first.told.next().slot.unwrap();
    let into = queue.slot(Direction::In, CHUNK).unwrap();
    fill(&into, held(&slot, CHUNK));
    queue.unpack(1, into, target.ptr(), CHUNK);
    told.next().result.unwrap();
    let mut bytes = vec![0; CHUNK];
    second.copy_out(target.ptr(), &mut bytes).unwrap();
    assert!(bytes == sent);

    // Memory of the other one is refused, and by its name.
    let error = first.devices.check(target.ptr(), CHUNK, 0).unwrap_err();
    assert!(error.kind == ErrorKind::Usage && error.to_string().contains("memory of cuda:1"), "{error}");
    first.queue.pack(2, target.ptr(), first.slot(Direction::Out), CHUNK);
    assert!(first.told.next().result.unwrap_err().to_string().contains("memory of cuda:1"));
}

#[test]
fn what_is_no_memory_of_the_device_is_refused() {
    let Some(bed) = bed(UnpackMode::D2d) else { return };
    let context = bed.device.cuda().unwrap();
    let (plain, pinned) = (DeviceMemory::new(context, 4096).unwrap(), PinnedMemory::new(context, 4096).unwrap());
    let own = bed.alloc(3 << 20);
    bed.devices.check(plain.address(), 4096, 0).unwrap();
    bed.devices.check(own.ptr() + 5, (3 << 20) - 5, 0).unwrap();
    let host = vec![0_u8; 4096];
    for (ptr, len, what) in [
        (pinned.address(), 4096, "pinned host memory"),
        (host.as_ptr() as u64, 4096, "no memory that the CUDA driver knows"),
        (own.ptr(), 1 << 40, "only the first"),
        (u64::MAX, 2, "no range"),
        (0, 1, "no memory that the CUDA driver knows"),
    ] {
        let error = bed.devices.check(ptr, len, 0).unwrap_err();
        assert!(error.kind == ErrorKind::Usage && error.to_string().contains(what), "{error}");
    }
    let error = bed.devices.device(1000).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Usage, "{error}");
    // New memory reads as zeros.
    assert!(bed.bytes(&own).iter().all(|byte| *byte == 0));
}

#[test]
fn memory_that_is_freed_fails_its_own_ticket_and_the_next_one_works() {
    for mode in MODES {
        let Some(bed) = bed(mode) else { return };
        let (kept, gone) = (bed.alloc(CHUNK), bed.alloc(CHUNK));
        let old = gone.ptr();
        drop(gone);
        assert!(crossrail_cuda::wait_for_releases(LIMIT));
        bed.queue.unpack(1, bed.arrived(&pattern(CHUNK, 1)), kept.ptr(), CHUNK);
        bed.queue.unpack(2, bed.arrived(&pattern(CHUNK, 2)), old, CHUNK);
        bed.queue.pack(3, old, bed.slot(Direction::Out), CHUNK);
        let mut done: Vec<Completion> = (0..3).map(|_| bed.told.next()).collect();
        done.sort_by_key(|done| done.ticket);
        assert!(done[0].result.is_ok());
        for failed in &done[1..] {
            let error = failed.result.as_ref().unwrap_err();
            assert!(error.kind == ErrorKind::Usage && error.to_string().contains("freed"), "{error}");
        }
        drop(done);
        assert!(bed.bytes(&kept) == pattern(CHUNK, 1));
        bed.queue.pack(4, kept.ptr(), bed.slot(Direction::Out), CHUNK);
        bed.told.next().result.unwrap();
        assert_eq!((bed.free(Direction::Out), bed.free(Direction::In)), (SLOTS, SLOTS));
    }
}

#[test]
fn more_memory_than_there_is_names_what_was_asked_for_and_what_is_free() {
    let Some(bed) = bed(UnpackMode::D2d) else { return };
    let total = bed.device.cuda().unwrap().memory().unwrap().total as usize;
    let error = bed.devices.alloc(0, total + (1 << 30)).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Exhausted, "{error}");
    assert!(error.detail.contains("requested") && error.detail.contains("are free"), "{error}");
    bed.alloc(1 << 20);
}

#[test]
fn the_three_ways_agree_on_every_list() {
    let Some(cuda) = gpus(1) else { return };
    let turn = TURN.lock();
    if !compiles(&cuda) {
        return;
    }
    let context = Context::primary(&cuda.device(0).unwrap()).unwrap();
    let stream = Stream::new(&context).unwrap();
    let sent = pattern(1 << 20, 3);
    let (pinned, device) =
        (PinnedMemory::new(&context, 1 << 20).unwrap(), DeviceMemory::new(&context, 1 << 20).unwrap());
    let (target, back) = (DeviceMemory::new(&context, 2 << 20).unwrap(), PinnedMemory::new(&context, 2 << 20).unwrap());
    // SAFETY: the memory is as long as that; the copy is waited for.
    unsafe {
        std::ptr::copy_nonoverlapping(sent.as_ptr(), pinned.as_ptr(), sent.len());
        stream.copy(device.address(), pinned.address(), sent.len()).unwrap();
    }
    stream.wait(LIMIT).unwrap();
    for (shape, list) in lists().into_iter().enumerate() {
        let mut expected = vec![0; 2 << 20];
        for (src, dst, len) in &list {
            expected[*dst..dst + len].copy_from_slice(&sent[*src..src + len]);
        }
        for mode in MODES {
            let mut unpacker = Unpacker::new(&context, mode, &settings(mode)).unwrap();
            for (source, start) in [
                (Source::Pinned { host: pinned.as_ptr(), address: pinned.address() }, pinned.address()),
                (Source::Device { address: device.address(), len: sent.len() }, device.address()),
            ] {
                let pieces: Vec<Piece> = list
                    .iter()
                    .map(|(src, dst, len)| Piece {
                        src: start + *src as u64,
                        dst: target.address() + *dst as u64,
                        len: *len as u64,
                    })
                    .collect();
                // SAFETY: all areas are valid until the wait is over, and the destinations are apart.
                unsafe {
                    stream.fill(target.address(), 0, 2 << 20).unwrap();
                    // More lists at once than there are beds.
                    for _ in 0..3 {
                        unpacker.unpack(&stream, &pieces, source).unwrap();
                    }
                    stream.copy(back.address(), target.address(), 2 << 20).unwrap();
                }
                stream.wait(LIMIT).unwrap();
                // SAFETY: the copy is done.
                let found = unsafe { std::slice::from_raw_parts(back.as_ptr(), 2 << 20) };
                assert!(found == expected, "list {shape} by {mode} from {source:?}");
            }
        }
    }
    drop(turn);
}

/// Lists of (source, destination, length): dense in order, dense in disorder, with gaps, odd, empty.
fn lists() -> Vec<Vec<(usize, usize, usize)>> {
    let disorder = |count: usize, i: usize| (i * 37 + 11) % count;
    vec![
        Vec::new(),
        vec![(0, 0, 1 << 20)],
        (0..256).map(|i| (i * 4096, i * 4096, 4096)).collect(),
        (0..256).map(|i| (i * 4096, disorder(256, i) * 4096, 4096)).collect(),
        (0..128).map(|i| (i * 1001, disorder(128, i) * 2048 + i % 17, 1 + (i * 13) % 1001)).collect(),
        vec![(5, 0, 0), (3, 1 << 20, 1), (1, (1 << 20) + 1, 70_001), (0, 7, 3)],
    ]
}

#[test]
fn an_event_is_told_once_the_stream_is_there() {
    let Some(bed) = bed(UnpackMode::D2d) else { return };
    let context = bed.device.cuda().unwrap();
    let stream = Stream::new(context).unwrap();
    let memory = DeviceMemory::new(context, 256 << 20).unwrap();
    for ticket in 0..4 {
        // SAFETY: the memory is nobody else's until the stream is done.
        unsafe { stream.fill(memory.address(), ticket as u8, memory.len()).unwrap() };
        // SAFETY: the stream is alive.
        bed.queue.wait_for(ticket, unsafe { bed.device.stream_point(stream.handle()).unwrap() });
    }
    for ticket in 0..4 {
        let done = bed.told.next();
        assert!(done.ticket == ticket && done.result.is_ok(), "{done:?}");
    }
    assert!(stream.is_done().unwrap());
    // What a capture records is not carried out: waiting for it would never end.
    let refused = Mutex::new(None);
    let graph = stream.record(|stream| {
        // SAFETY: the stream is alive.
        *refused.lock() = unsafe { bed.device.stream_point(stream.handle()) }.err();
        Ok(())
    });
    graph.unwrap();
    let error = refused.lock().take().expect("refused");
    assert!(error.kind == ErrorKind::Usage && error.to_string().contains("captured"), "{error}");
}

#[test]
fn bounce_memory_is_on_the_gpus_numa_node() {
    let Some(bed) = bed(UnpackMode::D2d) else { return };
    let Some(node) = bed.device.cuda().unwrap().device().numa_node().unwrap() else {
        return support::skip("this machine does not say on which NUMA node its GPUs are");
    };
    let slots: Vec<Slot> = std::iter::from_fn(|| bed.queue.slot(Direction::In, CHUNK)).collect();
    for slot in &slots {
        let mut page = slot.ptr().cast::<libc::c_void>();
        let mut status = -1;
        // SAFETY: with no target nodes, move_pages only says where one page is.
        let answer = unsafe {
            libc::syscall(libc::SYS_move_pages, 0, 1_usize, &mut page, std::ptr::null::<libc::c_int>(), &mut status, 0)
        };
        if answer != 0 {
            return support::skip("move_pages is not allowed here");
        }
        assert_eq!(status, i32::try_from(node).unwrap());
    }
}

#[test]
fn everything_is_given_back() {
    let Some(cuda) = gpus(1) else { return };
    if !alone("everything_is_given_back") {
        return;
    }
    let context = Context::primary(&cuda.device(0).unwrap()).unwrap();
    let once = |round: &str| {
        let bed = bed(UnpackMode::D2d).unwrap();
        let memory = bed.alloc(CHUNK);
        for ticket in 0..3 {
            bed.queue.pack(ticket, memory.ptr(), bed.slot(Direction::Out), CHUNK);
            bed.queue.unpack(10 + ticket, bed.slot(Direction::In), memory.ptr(), CHUNK);
        }
        // Dropped with work under way: who put it in first, then what it works on, which operations keep as long.
        drop(bed);
        drop(memory);
        assert!(crossrail_cuda::wait_for_releases(LIMIT), "{round}: not given back");
        assert!(context.memory().is_ok(), "{round}: the context is lost");
    };
    // The driver keeps some of what it made for the first.
    once("first");
    once("second");
    let count = |path: &str| std::fs::read_dir(path).unwrap().count();
    let mappings = || std::fs::read_to_string("/proc/self/maps").unwrap().matches("crossrail-segment").count();
    let figures = || (count("/proc/self/task"), count("/proc/self/fd"), mappings());
    let (before, free) = (figures(), context.memory().unwrap().free);
    for round in ["third", "fourth", "fifth", "sixth", "seventh"] {
        once(round);
    }
    assert_eq!(figures(), before, "threads, descriptors, mappings");
    assert!(free.abs_diff(context.memory().unwrap().free) < 4 << 20, "GPU memory");
}

#[test]
fn after_the_context_is_lost_every_ticket_fails_with_the_reason() {
    let Some(cuda) = gpus(1) else { return };
    if !compiles(&cuda) || !alone("after_the_context_is_lost_every_ticket_fails_with_the_reason") {
        return;
    }
    let bed = bed(UnpackMode::Kernel).unwrap();
    let memory = bed.alloc(CHUNK);
    bed.queue.pack(0, memory.ptr(), bed.slot(Direction::Out), CHUNK);
    bed.told.next().result.unwrap();
    let context = bed.device.cuda().unwrap().clone();
    let stream = Stream::new(&context).unwrap();
    let list = [Piece { src: 0x1000, dst: memory.ptr(), len: 4096 }];
    let source = Source::Device { address: 0x1000, len: 4096 };
    let mut unpacker = Unpacker::new(&context, UnpackMode::Kernel, &settings(UnpackMode::Kernel)).unwrap();
    // SAFETY: it is not: the source does not exist, and the context of this process is lost.
    unsafe { unpacker.unpack(&stream, &list, source).unwrap() };
    stream.wait(LIMIT).unwrap_err();
    for ticket in 1..5 {
        bed.queue.pack(ticket, memory.ptr(), bed.slot(Direction::Out), CHUNK);
        let error = bed.told.next().result.unwrap_err();
        assert!(error.to_string().contains("CUDA_ERROR"), "{error}");
        bed.queue.unpack(ticket + 100, bed.slot(Direction::In), memory.ptr(), CHUNK);
        bed.told.next().result.unwrap_err();
    }
    bed.queue.quiesce(|_| true).unwrap();
    assert_eq!((bed.free(Direction::Out), bed.free(Direction::In)), (SLOTS, SLOTS));
}
