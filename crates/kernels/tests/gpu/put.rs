//! Puts: bytes and then a signal, seen in that order by the host, another GPU, another process.

use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crossrail_cuda::{Allocation, DeviceMemory, Mapping, PinnedMemory};
use crossrail_kernels::{FLAG_REACHED, FlagAwaitArgs, FlagWriteArgs, PutArgs};
use crossrail_types::ErrorKind;

use crate::{Gpu, LIMIT, Numbers, assert_same, support};

/// Short, odd, one block's most, and several blocks'.
const LENGTHS: [usize; 9] = [1, 15, 4095, 4096, 32 << 10, (32 << 10) + 1, 100_003, 1 << 20, (1 << 20) + 13];
const LONGEST: usize = (1 << 20) + 13;
const ROUNDS: u64 = 40;
const POISON: u8 = 0xee;
/// What the child of `another_process_sees_the_bytes_before_the_signal` is told: its GPU, and the memory's length.
const CHILD: &str = "GPU_TEST_PUT_CHILD";

/// Where things are in memory that both sides share.
const SIGNAL: u64 = 0;
const ACK: u64 = 64;
const DATA: u64 = 4096;
const SHARED: usize = DATA as usize + LONGEST + 64;

/// The word that the host shares with the GPU.
fn word(memory: &PinnedMemory) -> &AtomicU64 {
    // SAFETY: aligned to a page, 8 bytes or more, that only atomics touch.
    unsafe { AtomicU64::from_ptr(memory.as_ptr().cast()) }
}

fn await_word(word: &AtomicU64, value: u64) {
    let started = Instant::now();
    while word.load(Ordering::Acquire) != value {
        assert!(started.elapsed() < LIMIT, "the signal never became {value}");
        std::hint::spin_loop();
    }
}

/// A put's length, and how far its ends are from aligned places, for each round.
fn shape(round: u64) -> (usize, u64, u64) {
    let len = LENGTHS[round as usize % LENGTHS.len()];
    let shift = [(0, 0), (16, 0), (7, 7), (3, 12), (0, 1)][round as usize % 5];
    (len, shift.0, shift.1)
}

#[test]
fn a_put_takes_any_length_alignment_and_number_of_blocks() {
    let Some(gpu) = Gpu::new() else { return };
    let bytes = Numbers(0xa).bytes(LONGEST + 64);
    let (source, target) = (gpu.device(&bytes), gpu.device(&vec![POISON; LONGEST + 64]));
    let signal = gpu.pinned(&[0; 8]);
    let mut expected = vec![POISON; LONGEST + 64];
    let mut value = 0;
    for round in 0..LENGTHS.len() as u64 * 5 {
        let (len, from, to) = shape(round);
        for blocks in [None, Some(1), Some(7)] {
            value += 1;
            let args = PutArgs {
                dst: target.address() + to,
                src: source.address() + from,
                len: len as u64,
                part: if round % 2 == 0 { 0 } else { 48 },
                signal: signal.address(),
                value,
            };
            // SAFETY: all areas are valid and nobody else's until the wait is over.
            unsafe {
                gpu.stream.fill(target.address(), POISON, target.len()).unwrap();
                gpu.kernels.put(&gpu.stream, &args, blocks).unwrap();
            }
            gpu.stream.wait(LIMIT).unwrap();
            assert_eq!(word(&signal).load(Ordering::Acquire), value);
            let (from, to) = (from as usize, to as usize);
            expected.fill(POISON);
            expected[to..to + len].copy_from_slice(&bytes[from..from + len]);
            assert_same(&gpu.bytes(&target), &expected, &format!("{len} bytes, {from} to {to}, {blocks:?} blocks"));
        }
    }
}

#[test]
fn a_put_may_be_a_signal_alone_or_none() {
    let Some(gpu) = Gpu::new() else { return };
    let (source, target, signal) = (gpu.device(&[7; 64]), gpu.device(&[0; 64]), gpu.pinned(&[0; 8]));
    let none = PutArgs { dst: target.address(), src: source.address(), len: 0, part: 0, signal: 0, value: 0 };
    // SAFETY: all areas are valid and nobody else's until the waits are over.
    unsafe {
        gpu.kernels.put(&gpu.stream, &none, None).unwrap();
        gpu.kernels.put(&gpu.stream, &PutArgs { signal: signal.address(), value: 3, ..none }, None).unwrap();
        gpu.stream.wait(LIMIT).unwrap();
        assert_eq!(word(&signal).load(Ordering::Acquire), 3);
        assert_eq!(gpu.bytes(&target), [0; 64]);
        gpu.kernels.put(&gpu.stream, &PutArgs { len: 64, ..none }, None).unwrap();
        gpu.stream.wait(LIMIT).unwrap();
        assert_eq!(gpu.bytes(&target), [7; 64]);
        let odd = [PutArgs { signal: signal.address() + 4, ..none }, PutArgs { len: 64, part: 8, ..none }];
        for args in odd {
            assert_eq!(gpu.kernels.put(&gpu.stream, &args, None).unwrap_err().kind, ErrorKind::Usage);
        }
        let error = gpu.kernels.put(&gpu.stream, &PutArgs { len: 64, ..none }, Some(0)).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Usage);
    }
}

#[test]
fn the_host_sees_the_bytes_before_the_signal() {
    let Some(gpu) = Gpu::new() else { return };
    let signal = gpu.pinned(&[0; 8]);
    let target = gpu.pinned(&vec![POISON; LONGEST + 64]);
    let sources: Vec<(Vec<u8>, DeviceMemory)> = (0..3)
        .map(|seed| {
            let bytes = Numbers(0x51 + seed).bytes(LONGEST + 64);
            let memory = gpu.device(&bytes);
            (bytes, memory)
        })
        .collect();
    for round in 0..5 * ROUNDS {
        let (len, from, to) = shape(round);
        let (bytes, source) = &sources[round as usize % sources.len()];
        // SAFETY: the put of the last round is done, as its signal said.
        unsafe { target.as_ptr().write_bytes(POISON, target.len()) };
        let args = PutArgs {
            dst: target.address() + to,
            src: source.address() + from,
            len: len as u64,
            part: 0,
            signal: signal.address(),
            value: round + 1,
        };
        // SAFETY: all areas are valid and nobody else's until the signal.
        unsafe { gpu.kernels.put(&gpu.stream, &args, None).unwrap() };
        await_word(word(&signal), round + 1);
        // SAFETY: the signal says that the bytes are there and nobody writes them any more.
        let found = unsafe { std::slice::from_raw_parts(target.as_ptr().add(to as usize), len) };
        assert_same(found, &bytes[from as usize..from as usize + len], &format!("round {round}"));
    }
    gpu.stream.wait(LIMIT).unwrap();
}

/// Puts by `from`, awaited by a kernel of `to`, which then takes a copy: before the signal that copy must not begin.
fn a_waiting_kernel_sees_the_bytes(from: &Gpu, to: &Gpu) {
    let (target, copy) = (to.device(&vec![POISON; SHARED]), to.device(&vec![0; LONGEST]));
    let (back, outcome) = (to.pinned(&vec![0; LONGEST]), to.pinned(&[0; 8]));
    let sources: Vec<(Vec<u8>, DeviceMemory)> = (0..3)
        .map(|seed| {
            let bytes = Numbers(0x77 + seed).bytes(LONGEST + 64);
            let memory = from.device(&bytes);
            (bytes, memory)
        })
        .collect();
    // SAFETY: the memory is valid until the wait is over.
    unsafe { to.stream.fill(target.address(), 0, DATA as usize).unwrap() };
    to.stream.wait(LIMIT).unwrap();
    let limit_ns = LIMIT.as_nanos() as u64;
    for round in 0..ROUNDS {
        let (len, start, end) = shape(round);
        let (bytes, source) = &sources[round as usize % sources.len()];
        let place = target.address() + DATA + end;
        let wait =
            FlagAwaitArgs { flag: target.address() + SIGNAL, value: round + 1, limit_ns, outcome: outcome.address() };
        let args = PutArgs {
            dst: place,
            src: source.address() + start,
            len: len as u64,
            part: 0,
            signal: target.address() + SIGNAL,
            value: round + 1,
        };
        word(&outcome).store(0, Ordering::Release);
        // SAFETY: all areas are valid, and nobody else's, until the waits are over; the copy is ordered by the signal.
        unsafe {
            to.stream.fill(target.address() + DATA, POISON, LONGEST + 64).unwrap();
            to.stream.wait(LIMIT).unwrap();
            to.kernels.flag_await(&to.stream, &wait).unwrap();
            let taken = PutArgs { dst: copy.address(), src: place, len: len as u64, ..PutArgs::ZERO };
            to.kernels.put(&to.stream, &taken, None).unwrap();
            to.stream.copy(back.address(), copy.address(), len).unwrap();
            from.kernels.put(&from.stream, &args, None).unwrap();
        }
        to.stream.wait(LIMIT).unwrap();
        assert_eq!(word(&outcome).load(Ordering::Acquire), FLAG_REACHED);
        // SAFETY: the copy is done.
        let found = unsafe { std::slice::from_raw_parts(back.as_ptr(), len) };
        assert_same(found, &bytes[start as usize..start as usize + len], &format!("round {round}"));
        from.stream.wait(LIMIT).unwrap();
    }
}

#[test]
fn a_waiting_kernel_of_the_same_gpu_sees_the_bytes_before_the_signal() {
    let Some(gpu) = Gpu::new() else { return };
    a_waiting_kernel_sees_the_bytes(&gpu, &Gpu::numbered(0));
}

#[test]
fn a_waiting_kernel_of_another_gpu_sees_the_bytes_before_the_signal() {
    let Some((first, second)) = Gpu::pair() else { return };
    a_waiting_kernel_sees_the_bytes(&first, &second);
    a_waiting_kernel_sees_the_bytes(&second, &first);
}

#[test]
fn a_recorded_put_signals_each_time_it_is_launched() {
    let Some(gpu) = Gpu::new() else { return };
    let signal = gpu.pinned(&[0; 8]);
    let (source, target) = (gpu.device(&vec![0; LONGEST]), gpu.pinned(&vec![0; LONGEST]));
    let args = PutArgs {
        dst: target.address(),
        src: source.address(),
        len: LONGEST as u64,
        part: 0,
        signal: signal.address(),
        value: 9,
    };
    // SAFETY: all areas are valid as long as the graph is launched.
    let graph = gpu.stream.record(|stream| unsafe { gpu.kernels.put(stream, &args, None) }).unwrap();
    assert_eq!(word(&signal).load(Ordering::Acquire), 0);
    for round in 1..20_u8 {
        word(&signal).store(0, Ordering::Release);
        // SAFETY: as above.
        unsafe {
            gpu.stream.fill(source.address(), round, LONGEST).unwrap();
            graph.launch(&gpu.stream).unwrap();
        }
        await_word(word(&signal), 9);
        // SAFETY: the signal says that the bytes are there.
        let found = unsafe { std::slice::from_raw_parts(target.as_ptr(), LONGEST) };
        assert!(found.iter().all(|byte| *byte == round), "round {round}");
        gpu.stream.wait(LIMIT).unwrap();
    }
}

/// Not a test by itself: the process that waits. Its standard input is the memory's descriptor.
#[test]
fn put_child_process() {
    let Ok(told) = std::env::var(CHILD) else { return };
    let (ordinal, len) = told.split_once(' ').unwrap();
    let gpu = Gpu::numbered(ordinal.parse().unwrap());
    let allocation = Allocation::import(&gpu.context, std::io::stdin().as_fd(), len.parse().unwrap()).unwrap();
    let memory = allocation.map(&[&gpu.context]).unwrap();
    let (copy, back, outcome) = (gpu.device(&vec![0; LONGEST]), gpu.pinned(&vec![0; LONGEST]), gpu.pinned(&[0; 8]));
    let bytes = Numbers(0x2b).bytes(LONGEST + 64);
    let limit_ns = LIMIT.as_nanos() as u64;
    // Poisoned, then ready for the first: the other side waits for each of these.
    for round in 0..=ROUNDS {
        // SAFETY: the other process writes only between this acknowledgement and its next signal.
        unsafe {
            gpu.stream.fill(memory.address() + DATA, POISON, LONGEST + 64).unwrap();
            let ack = FlagWriteArgs { flag: memory.address() + ACK, value: round + 1 };
            gpu.kernels.flag_write(&gpu.stream, &ack).unwrap();
        }
        if round == ROUNDS {
            break;
        }
        let (len, start, end) = shape(round);
        let flag = memory.address() + SIGNAL;
        let wait = FlagAwaitArgs { flag, value: round + 1, limit_ns, outcome: outcome.address() };
        let taken =
            PutArgs { dst: copy.address(), src: memory.address() + DATA + end, len: len as u64, ..PutArgs::ZERO };
        // SAFETY: as above; the copies are ordered behind the signal.
        unsafe {
            gpu.kernels.flag_await(&gpu.stream, &wait).unwrap();
            gpu.kernels.put(&gpu.stream, &taken, None).unwrap();
            gpu.stream.copy(back.address(), copy.address(), len).unwrap();
        }
        gpu.stream.wait(LIMIT).unwrap();
        assert_eq!(word(&outcome).load(Ordering::Acquire), FLAG_REACHED, "round {round}");
        // SAFETY: the copy is done.
        let found = unsafe { std::slice::from_raw_parts(back.as_ptr(), len) };
        assert_same(found, &bytes[start as usize..start as usize + len], &format!("round {round}"));
    }
    gpu.stream.wait(LIMIT).unwrap();
}

/// Puts by `gpu` into memory that a child process maps on the GPU `ordinal`, whose memory it is.
fn into_another_process(gpu: &Gpu, allocation: &Allocation, memory: &Mapping, ordinal: u32) {
    let outcome = gpu.pinned(&[0; 8]);
    let bytes = Numbers(0x2b).bytes(LONGEST + 64);
    let source = gpu.device(&bytes);
    let zeros = gpu.device(&vec![0; DATA as usize]);
    let clear = PutArgs { dst: memory.address(), src: zeros.address(), len: DATA, ..PutArgs::ZERO };
    // SAFETY: both areas are valid, and nobody else has the memory yet.
    unsafe { gpu.kernels.put(&gpu.stream, &clear, None).unwrap() };
    gpu.stream.wait(LIMIT).unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "put::put_child_process", "--nocapture"])
        .env(CHILD, format!("{ordinal} {}", allocation.len()))
        .stdin(Stdio::from(allocation.export().unwrap()))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Its start takes a while: it compiles its kernels.
    let limit_ns = 3 * LIMIT.as_nanos() as u64;
    let mut reached = true;
    for round in 0..=ROUNDS {
        let flag = memory.address() + ACK;
        let wait = FlagAwaitArgs { flag, value: round + 1, limit_ns, outcome: outcome.address() };
        let (len, start, end) = shape(round);
        let args = PutArgs {
            dst: memory.address() + DATA + end,
            src: source.address() + start,
            len: len as u64,
            part: 0,
            signal: memory.address() + SIGNAL,
            value: round + 1,
        };
        // SAFETY: all areas live until the waits are over; the child gives the data area back by its acknowledgement.
        unsafe {
            gpu.kernels.flag_await(&gpu.stream, &wait).unwrap();
            if round < ROUNDS {
                gpu.kernels.put(&gpu.stream, &args, None).unwrap();
            }
        }
        gpu.stream.wait(4 * LIMIT).unwrap();
        reached = word(&outcome).load(Ordering::Acquire) == FLAG_REACHED;
        if !reached {
            break;
        }
    }
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && reached, "{}{said}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn another_process_sees_the_bytes_before_the_signal() {
    let Some(gpu) = Gpu::new() else { return };
    if !gpu.context.device().shares_memory().unwrap() {
        support::skip("memory of this GPU can't be shared");
        return;
    }
    let allocation = Allocation::new(&gpu.context, SHARED).unwrap();
    let memory = allocation.map(&[&gpu.context]).unwrap();
    into_another_process(&gpu, &allocation, &memory, 0);
}

#[test]
fn another_process_on_another_gpu_sees_the_bytes_before_the_signal() {
    let Some((first, second)) = Gpu::pair() else { return };
    let allocation = Allocation::new(&second.context, SHARED).unwrap();
    let memory = allocation.map(&[&first.context, &second.context]).unwrap();
    into_another_process(&first, &allocation, &memory, 1);
}
