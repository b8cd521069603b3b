//! The kernels on a real GPU, against plain host code. Skipped, visibly, without one.
#![allow(unsafe_code)]

mod put;
mod rows;
#[path = "../../../cuda/tests/support/mod.rs"]
#[allow(dead_code)]
mod support;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossrail_cuda::nvrtc::{Compiler, Origin};
use crossrail_cuda::{Context, DeviceMemory, Event, PinnedMemory, Stream, wait_for_releases};
use crossrail_kernels::{
    FLAG_REACHED, FLAG_TIMED_OUT, FlagAwaitArgs, FlagWriteArgs, Kernels, LONGEST, Piece, PutArgs, ScatterList,
    UnpackArgs, shared,
};
use crossrail_types::{ErrorKind, Settings};

const LIMIT: Duration = Duration::from_secs(20);
/// Set for the child of `an_address_without_memory_is_an_error_that_says_so`.
const CHILD: &str = "GPU_TEST_CHILD";

/// One test at a time, and none while what another one dropped is being freed: that waits for the GPU, and holds up the
/// launch that a waiting kernel waits for.
static TURN: Mutex<()> = Mutex::new(());

struct Gpu {
    context: Context,
    stream: Stream,
    kernels: Arc<Kernels>,
    /// Dropped last: destroying a stream waits for the GPU as well.
    _turn: Option<MutexGuard<'static, ()>>,
}

/// Each GPU's kernels, compiled once for all tests.
static KERNELS: Mutex<Vec<(u32, Arc<Kernels>)>> = Mutex::new(Vec::new());

fn kernels(context: &Context) -> Arc<Kernels> {
    let ordinal = context.device().ordinal();
    let mut known = KERNELS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, kernels)) = known.iter().find(|(number, _)| *number == ordinal) {
        return Arc::clone(kernels);
    }
    let compiler = Compiler::new(support::nvrtc().unwrap(), None);
    let kernels = Arc::new(Kernels::load(context, &compiler, LIMIT).unwrap());
    known.push((ordinal, Arc::clone(&kernels)));
    kernels
}

impl Gpu {
    fn new() -> Option<Gpu> {
        support::cuda()?;
        support::nvrtc()?;
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(wait_for_releases(LIMIT));
        let mut gpu = Gpu::numbered(0);
        gpu._turn = Some(turn);
        Some(gpu)
    }

    /// Two that reach each other; else the test is skipped and says so.
    fn pair() -> Option<(Gpu, Gpu)> {
        let first = Gpu::new()?;
        let device = first.context.device();
        let other = device.cuda().devices().unwrap().into_iter().nth(1);
        let Some(other) = other else {
            support::skip("needs two GPUs");
            return None;
        };
        if !(device.reaches(&other).unwrap() && other.reaches(device).unwrap()) {
            support::skip("the two GPUs can't reach each other");
            return None;
        }
        let second = Gpu::numbered(1);
        first.context.enable_peer(&second.context).unwrap();
        second.context.enable_peer(&first.context).unwrap();
        Some((first, second))
    }

    fn numbered(ordinal: u32) -> Gpu {
        let context = Context::primary(&support::cuda().unwrap().device(ordinal).unwrap()).unwrap();
        let (kernels, stream) = (kernels(&context), Stream::new(&context).unwrap());
        Gpu { context, stream, kernels, _turn: None }
    }

    fn device(&self, bytes: &[u8]) -> DeviceMemory {
        let memory = DeviceMemory::new(&self.context, bytes.len()).unwrap();
        let pinned = self.pinned(bytes);
        // SAFETY: both areas are valid and nobody else's until the wait is over.
        unsafe { self.stream.copy(memory.address(), pinned.address(), bytes.len()).unwrap() };
        self.stream.wait(LIMIT).unwrap();
        drop(pinned);
        assert!(wait_for_releases(LIMIT));
        memory
    }

    fn pinned(&self, bytes: &[u8]) -> PinnedMemory {
        let memory = PinnedMemory::new(&self.context, bytes.len()).unwrap();
        // SAFETY: the memory is new and as long as the bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), memory.as_ptr(), bytes.len()) };
        memory
    }

    fn bytes(&self, memory: &DeviceMemory) -> Vec<u8> {
        let pinned = PinnedMemory::new(&self.context, memory.len()).unwrap();
        // SAFETY: both areas are valid; the bytes are read after the copy is done.
        unsafe {
            self.stream.copy(pinned.address(), memory.address(), memory.len()).unwrap();
            self.stream.wait(LIMIT).unwrap();
            std::slice::from_raw_parts(pinned.as_ptr(), memory.len()).to_vec()
        }
    }

    /// Unpacks a list that lies in device memory, or in host memory, into `target`.
    fn unpack(&self, pieces: &[Piece], on_host: bool, blocks: Option<u32>, target: &DeviceMemory) -> Vec<u8> {
        let mut list = Vec::new();
        for piece in pieces {
            [piece.src, piece.dst, piece.len].iter().for_each(|word| list.extend_from_slice(&word.to_ne_bytes()));
        }
        let (device, host) = (self.device(&list), self.pinned(&list));
        let address = if on_host { host.address() } else { device.address() };
        let args = UnpackArgs { pieces: address, count: pieces.len() as u64 };
        // SAFETY: the tests' lists name valid areas that don't overlap; all live until the wait is over.
        unsafe { self.kernels.unpack(&self.stream, &args, blocks).unwrap() };
        self.stream.wait(LIMIT).unwrap();
        self.bytes(target)
    }
}

/// What unpacking means.
fn reference(pieces: &[Piece], source: (u64, &[u8]), target: (u64, &mut [u8])) {
    for piece in pieces {
        let (from, to, len) = ((piece.src - source.0) as usize, (piece.dst - target.0) as usize, piece.len as usize);
        target.1[to..to + len].copy_from_slice(&source.1[from..from + len]);
    }
}

/// A small generator of numbers (xorshift), so that a failure is the same on every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.below(256) as u8).collect()
    }
}

fn assert_same(found: &[u8], expected: &[u8], what: &str) {
    if found == expected {
        return;
    }
    if let Some(at) = found.iter().zip(expected).position(|(a, b)| a != b) {
        panic!("{what}: byte {at} of {} is {} instead of {}", found.len(), found[at], expected[at]);
    }
    assert_eq!(found.len(), expected.len());
}

#[test]
fn unpack_takes_every_alignment_and_length() {
    let Some(gpu) = Gpu::new() else { return };
    let mut numbers = Numbers(0x5eed);
    let lengths = [0, 1, 15, 16, 17, 31, 63, 64, 65, 79, 80, 95, 511, 512, 513, 2047, 2048, 2065, 4096, 4111, 8192];
    let room: u64 = 8192 + 64;
    let count = 16 * 16 * lengths.len() as u64;
    let bytes = numbers.bytes((count * room) as usize);
    let (source, target) = (gpu.device(&bytes), gpu.device(&vec![0xaa; bytes.len()]));
    let mut pieces = Vec::new();
    for (i, len) in lengths.iter().enumerate() {
        for pair in 0..256 {
            let place = (i as u64 * 256 + pair) * room + 16;
            let (src, dst) = (source.address() + place + pair / 16, target.address() + place + pair % 16);
            pieces.push(Piece { src, dst, len: *len });
        }
    }
    let mut expected = vec![0xaa; bytes.len()];
    reference(&pieces, (source.address(), &bytes), (target.address(), &mut expected));
    assert_same(&gpu.unpack(&pieces, false, None, &target), &expected, "every alignment");
}

/// Each source is an allocation of its own, so that compute-sanitizer (memcheck) sees a byte read beside it.
#[test]
fn unpack_reads_nothing_beside_its_sources() {
    let Some(gpu) = Gpu::new() else { return };
    let mut numbers = Numbers(0xed6e);
    let (mut sources, mut pieces, mut expected) = (Vec::new(), Vec::new(), vec![0; 1 << 20]);
    let target = gpu.device(&expected);
    let mut to = 0;
    for len in [1, 64, 65, 79, 80, 100, 512, 529, 4096, 4097] {
        for offset in 0..16 {
            let bytes = numbers.bytes(len);
            to = usize::next_multiple_of(to, 16) + offset;
            let source = gpu.device(&bytes);
            let dst = target.address() + to as u64;
            pieces.push(Piece { src: source.address(), dst, len: len as u64 });
            expected[to..to + len].copy_from_slice(&bytes);
            sources.push(source);
            to += len;
        }
    }
    assert_same(&gpu.unpack(&pieces, false, None, &target), &expected, "sources of their own");
}

#[test]
fn unpack_takes_random_lists_from_device_and_host_memory() {
    let Some(gpu) = Gpu::new() else { return };
    for round in 0..6 {
        let mut numbers = Numbers(0x1234 + round);
        let bytes = numbers.bytes(4 << 20);
        let (device, host) = (gpu.device(&bytes), gpu.pinned(&bytes));
        let target = gpu.device(&vec![0x55; bytes.len()]);
        let base = if round % 2 == 0 { device.address() } else { host.address() };
        // Destinations one after the other, with gaps; sources anywhere.
        let (mut list, mut to) = (ScatterList::default(), 0);
        loop {
            let longest = if numbers.below(20) == 0 { 5 * LONGEST } else { 300 };
            let len = numbers.below(longest);
            to += numbers.below(20);
            if to + len > target.len() as u64 {
                break;
            }
            let from = numbers.below(bytes.len() as u64 - len);
            list.push(base + from, target.address() + to, len);
            to += len;
        }
        assert!(list.pieces().len() > 1000);
        let mut expected = vec![0x55; bytes.len()];
        reference(list.pieces(), (base, &bytes), (target.address(), &mut expected));
        let blocks = [None, Some(1), Some(7)][round as usize % 3];
        let found = gpu.unpack(list.pieces(), round % 4 < 2, blocks, &target);
        assert_same(&found, &expected, &format!("round {round}"));
    }
}

#[test]
fn a_put_takes_any_length_and_number_of_blocks() {
    let Some(gpu) = Gpu::new() else { return };
    let mut numbers = Numbers(0xc0);
    let bytes = numbers.bytes(3 << 20);
    let source = gpu.device(&bytes);
    for (len, blocks) in
        [(0, None), (1, None), (16_384, Some(1)), (100_001, Some(3)), (1 << 20, None), (2_222_222, None)]
    {
        for (from, to) in [(0, 0), (16, 48), (5, 5), (3, 14)] {
            let target = gpu.device(&vec![1; bytes.len()]);
            let args = PutArgs {
                dst: target.address() + to as u64,
                src: source.address() + from as u64,
                len: len as u64,
                ..PutArgs::ZERO
            };
            // SAFETY: both areas are valid and don't overlap; they live until the wait is over.
            unsafe { gpu.kernels.put(&gpu.stream, &args, blocks).unwrap() };
            gpu.stream.wait(LIMIT).unwrap();
            let mut expected = vec![1; bytes.len()];
            expected[to..to + len].copy_from_slice(&bytes[from..from + len]);
            assert_same(&gpu.bytes(&target), &expected, &format!("{len} bytes, {from} to {to}"));
        }
    }
}

#[test]
fn a_flag_is_written_after_what_came_before_it() {
    let Some(gpu) = Gpu::new() else { return };
    let len = 8 << 20;
    let source = gpu.device(&Numbers(7).bytes(len));
    let (target, flag) = (gpu.pinned(&vec![0; len]), gpu.pinned(&[0; 8]));
    // SAFETY: 8 aligned bytes that only atomics touch.
    let word = unsafe { AtomicU64::from_ptr(flag.as_ptr().cast()) };
    let copy = PutArgs { dst: target.address(), src: source.address(), len: len as u64, ..PutArgs::ZERO };
    let write = FlagWriteArgs { flag: flag.address(), value: 42 };
    // SAFETY: all areas are valid until the wait is over.
    unsafe {
        gpu.kernels.put(&gpu.stream, &copy, None).unwrap();
        gpu.kernels.flag_write(&gpu.stream, &write).unwrap();
    }
    let started = Instant::now();
    while word.load(Ordering::Acquire) != 42 {
        assert!(started.elapsed() < LIMIT, "the flag was never written");
        std::hint::spin_loop();
    }
    // SAFETY: the flag says that the copy is done.
    let found = unsafe { std::slice::from_raw_parts(target.as_ptr(), len) };
    assert_same(found, &gpu.bytes(&source), "what the flag announced");
    gpu.stream.wait(LIMIT).unwrap();
}

#[test]
fn a_stream_waits_for_a_flag_and_not_for_ever() {
    let Some(gpu) = Gpu::new() else { return };
    let (flag, outcome) = (gpu.pinned(&[0; 8]), gpu.pinned(&[0; 8]));
    // SAFETY: 8 aligned bytes each, that only atomics touch.
    let (word, said) =
        unsafe { (AtomicU64::from_ptr(flag.as_ptr().cast()), AtomicU64::from_ptr(outcome.as_ptr().cast())) };
    let mut args =
        FlagAwaitArgs { flag: flag.address(), value: 5, limit_ns: 10_000_000_000, outcome: outcome.address() };
    let event = Event::new(&gpu.context).unwrap();
    // SAFETY: flag and outcome live until the waits are over.
    unsafe { gpu.kernels.flag_await(&gpu.stream, &args).unwrap() };
    event.record(&gpu.stream).unwrap();
    word.store(4, Ordering::Release);
    let error = event.wait(Duration::from_millis(20)).unwrap_err();
    assert_eq!((error.kind, error.operation.as_str()), (ErrorKind::Timeout, "event on cuda:0"));
    assert_eq!(said.load(Ordering::Acquire), 0);
    word.store(6, Ordering::Release);
    event.wait(LIMIT).unwrap();
    assert_eq!(said.load(Ordering::Acquire), FLAG_REACHED);
    // Now a value that never comes.
    args.value = 7;
    args.limit_ns = 20_000_000;
    let started = Instant::now();
    // SAFETY: as above.
    unsafe { gpu.kernels.flag_await(&gpu.stream, &args).unwrap() };
    gpu.stream.wait(LIMIT).unwrap();
    assert_eq!(said.load(Ordering::Acquire), FLAG_TIMED_OUT);
    assert!(started.elapsed() >= Duration::from_millis(19), "{:?}", started.elapsed());
}

/// Not a test by itself: it loses its context, so it is a process of its own.
#[test]
fn child_process() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let gpu = Gpu::new().unwrap();
    let target = gpu.device(&[0; 64]);
    let pieces = gpu.pinned(&[0; size_of::<Piece>()]);
    let piece = Piece { src: 0x10, dst: target.address(), len: 64 };
    // SAFETY: the piece fits; the launch reads where there is no memory, which is what this process is for.
    unsafe {
        pieces.as_ptr().cast::<Piece>().write(piece);
        gpu.kernels.unpack(&gpu.stream, &UnpackArgs { pieces: pieces.address(), count: 1 }, None).unwrap();
    }
    let error = gpu.stream.wait(LIMIT).unwrap_err();
    println!("error: {:?} {error}", error.kind);
}

#[test]
fn an_address_without_memory_is_an_error_that_says_so() {
    if support::cuda().is_none() || support::nvrtc().is_none() {
        return;
    }
    // What recovers from the fault waits for the kernels of other processes, too.
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    let output = command.args(["--exact", "child_process", "--nocapture"]).env(CHILD, "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("Io stream on cuda:0: cuStreamQuery: CUDA_ERROR_ILLEGAL_ADDRESS (700)"), "{said}");
}

#[test]
fn what_makes_no_sense_is_refused_before_the_gpu_sees_it() {
    let Some(gpu) = Gpu::new() else { return };
    let memory = gpu.device(&[0; 64]);
    let at = memory.address();
    // SAFETY: every call is refused, or has nothing to do.
    unsafe {
        gpu.kernels.unpack(&gpu.stream, &UnpackArgs { pieces: 0, count: 0 }, None).unwrap();
        gpu.kernels.put(&gpu.stream, &PutArgs { dst: 0, src: 0, len: 0, ..PutArgs::ZERO }, None).unwrap();
        let odd = [
            gpu.kernels.unpack(&gpu.stream, &UnpackArgs { pieces: at + 4, count: 1 }, None),
            gpu.kernels.unpack(&gpu.stream, &UnpackArgs { pieces: at, count: 1 }, Some(0)),
            gpu.kernels.flag_write(&gpu.stream, &FlagWriteArgs { flag: at + 1, value: 1 }),
            gpu.kernels.flag_await(&gpu.stream, &FlagAwaitArgs { flag: at, value: 0, limit_ns: 0, outcome: at + 2 }),
        ];
        for refused in odd {
            assert_eq!(refused.unwrap_err().kind, ErrorKind::Usage);
        }
    }
    gpu.stream.wait(LIMIT).unwrap();
}

#[test]
fn a_process_has_one_set_of_kernels_for_each_gpu() {
    let Some(gpu) = Gpu::new() else { return };
    let folder = support::Folder::new();
    let settings = Settings { cache_dir: Some(folder.0.clone()), ..Settings::default() };
    let first = match shared(&gpu.context, &settings, LIMIT) {
        Ok(first) => first,
        // NVRTC of the tests' own environment is not where an installed package finds it.
        Err(error) => return support::skip(&error.to_string()),
    };
    assert!(first.compiled().iter().all(|(_, compiled)| compiled.origin() == &Origin::Compiled));
    assert!(Arc::ptr_eq(&first, &shared(&gpu.context, &settings, LIMIT).unwrap()));
    drop(first);
    let again = shared(&gpu.context, &settings, LIMIT).unwrap();
    assert!(again.compiled().iter().all(|(_, compiled)| compiled.origin() == &Origin::Cache));
}
