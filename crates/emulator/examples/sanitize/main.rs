//! Every kernel on small and odd shapes, verified, for a checker to look at from outside:
//!
//!     cargo build --release -p crossrail-emulator --example sanitize
//!     compute-sanitizer --tool memcheck target/release/examples/sanitize
//!     compute-sanitizer --tool racecheck target/release/examples/sanitize
//!
//! Every area is an allocation of its own, so that a byte touched beside it is seen. With a second GPU that the first
//! reaches, destinations there are tried too. Exits 0 when all bytes are right.
#![allow(unsafe_code)]

#[path = "../../tests/gpu/device.rs"]
mod device;
mod ep;
#[path = "../../../cuda/tests/support/mod.rs"]
#[allow(dead_code)]
mod support;

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use crossrail_cuda::nvrtc::{Compiler, Library, SearchPath};
use crossrail_cuda::{Context, Cuda, DeviceMemory, PinnedMemory, Stream, wait_for_releases};
use crossrail_kernels::{
    FLAG_REACHED, FLAG_TIMED_OUT, FlagAwaitArgs, FlagWriteArgs, Kernels, Piece, PutArgs, RowCount, RowList, RowStride,
    ScatterList, UnpackArgs, table_words, write_table,
};

/// Under a checker everything takes long.
const LIMIT: Duration = Duration::from_secs(60);
const LENGTHS: [usize; 12] = [1, 15, 16, 17, 63, 64, 65, 511, 4097, 33_000, 70_001, 200_003];

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    let outcome = run();
    // The driver must not go while memory is still given back to it.
    wait_for_releases(LIMIT);
    match outcome {
        Ok(checks) => {
            println!("{checks} launches, all bytes right");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("sanitize: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Outcome<usize> {
    let cuda = Cuda::load()?;
    let mut places = SearchPath::standard();
    places.add_environment(&std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv"));
    let compiler = Compiler::new(Library::find(&places)?, None);
    let devices = cuda.devices()?;
    let first = devices.first().ok_or("there is no GPU")?;
    let context = Context::primary(first)?;
    let mut targets = vec![context.clone()];
    if let Some(second) = devices.get(1).filter(|second| first.reaches(second).unwrap_or(false)) {
        let second = Context::primary(second)?;
        context.enable_peer(&second)?;
        targets.push(second);
    }
    let kernels = Kernels::load(&context, &compiler, LIMIT)?;
    let mut checks = 0;
    for target in &targets {
        let (stream, target) = (Stream::new(&context)?, Stream::new(target)?);
        let mut bench = Bench { stream, target, kernels: &kernels, checks: 0 };
        bench.copies()?;
        bench.unpack()?;
        bench.rows()?;
        bench.flags()?;
        checks += bench.checks;
    }
    Ok(checks + ep::all()?)
}

struct Bench<'a> {
    /// What kernels are launched in; sources are its GPU's.
    stream: Stream,
    /// A stream of the GPU whose memory destinations are.
    target: Stream,
    kernels: &'a Kernels,
    checks: usize,
}

/// Bytes without a pattern, the same every time.
fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut number = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (number >> 56) as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

impl Bench<'_> {
    fn pinned(&self, bytes: &[u8]) -> Outcome<PinnedMemory> {
        let memory = PinnedMemory::new(self.stream.context(), bytes.len())?;
        // SAFETY: the memory is new and as long as the bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), memory.as_ptr(), bytes.len()) };
        Ok(memory)
    }

    /// A new area with these bytes, on the GPU of `stream`.
    fn put_down(&self, stream: &Stream, bytes: &[u8]) -> Outcome<DeviceMemory> {
        let (memory, pinned) = (DeviceMemory::new(stream.context(), bytes.len())?, self.pinned(bytes)?);
        // SAFETY: both areas are valid and nobody else's until the wait is over.
        unsafe { stream.copy(memory.address(), pinned.address(), bytes.len())? };
        stream.wait(LIMIT)?;
        Ok(memory)
    }

    /// Waits for what is under way, and compares.
    fn verify(&mut self, memory: &DeviceMemory, expected: &[u8], what: &str) -> Outcome<()> {
        self.stream.wait(LIMIT)?;
        let pinned = PinnedMemory::new(self.stream.context(), memory.len())?;
        // SAFETY: both areas are valid; the bytes are read after the wait.
        let found = unsafe {
            self.target.copy(pinned.address(), memory.address(), memory.len())?;
            self.target.wait(LIMIT)?;
            std::slice::from_raw_parts(pinned.as_ptr(), memory.len())
        };
        self.checks += 1;
        match found.iter().zip(expected).position(|(a, b)| a != b) {
            None => Ok(()),
            Some(at) => Err(format!("{what}: byte {at} of {} is wrong", expected.len()).into()),
        }
    }

    /// Puts, from places off alignment by `from` to places off by `to`.
    fn copies(&mut self) -> Outcome<()> {
        for len in LENGTHS.into_iter().chain([16384, 229381]) {
            for (from, to) in [(0, 0), (5, 5), (3, 12), (0, 1)] {
                for blocks in [None, Some(2), Some(3)] {
                    self.put(blocks, len, (from, to))?;
                }
            }
        }
        Ok(())
    }

    fn put(&mut self, blocks: Option<u32>, len: usize, (from, to): (usize, usize)) -> Outcome<()> {
        let sent = bytes(len as u64, from + len);
        let (source, target) = (self.put_down(&self.stream, &sent)?, self.put_down(&self.target, &vec![0; to + len])?);
        let signal = self.pinned(&[0; 8])?;
        let put = PutArgs {
            dst: target.address() + to as u64,
            src: source.address() + from as u64,
            len: len as u64,
            part: 0,
            signal: signal.address(),
            value: 1,
        };
        // SAFETY: all areas are valid and nobody else's until `verify` has waited.
        unsafe { self.kernels.put(&self.stream, &put, blocks)? };
        let expected = [vec![0; to], sent[from..].to_vec()].concat();
        self.verify(&target, &expected, &format!("put of {len} bytes, {from} to {to}"))?;
        // SAFETY: the launch is over.
        let signalled = unsafe { signal.as_ptr().cast::<u64>().read() };
        if signalled != 1 {
            return Err(format!("put of {len} bytes: the signal is {signalled}").into());
        }
        Ok(())
    }

    /// One list of all lengths and many alignments, sources and the list in device memory and in host memory.
    fn unpack(&mut self) -> Outcome<()> {
        for on_host in [false, true] {
            let (mut devices, mut hosts, mut list, mut expected) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
            for (i, len) in LENGTHS.into_iter().enumerate() {
                for shift in [0, 1, 7, 12] {
                    let sent = bytes((i + shift) as u64, len);
                    let source = if on_host {
                        hosts.push(self.pinned(&sent)?);
                        hosts.last().map(PinnedMemory::address)
                    } else {
                        devices.push(self.put_down(&self.stream, &sent)?);
                        devices.last().map(DeviceMemory::address)
                    };
                    expected.resize(expected.len().next_multiple_of(16) + shift, 0);
                    list.push((source.unwrap_or_default(), expected.len(), len));
                    expected.extend(sent);
                }
            }
            let target = self.put_down(&self.target, &vec![0; expected.len()])?;
            let mut pieces = ScatterList::default();
            for (source, at, len) in list {
                pieces.push(source, target.address() + at as u64, len as u64);
            }
            let (list, count) =
                (PinnedMemory::new(self.stream.context(), size_of_val(pieces.pieces()))?, pieces.pieces().len());
            // SAFETY: the memory is long enough and aligned to a page.
            unsafe { std::ptr::copy_nonoverlapping(pieces.pieces().as_ptr(), list.as_ptr().cast::<Piece>(), count) };
            let device_list = DeviceMemory::new(self.stream.context(), list.len())?;
            let place = if on_host { list.address() } else { device_list.address() };
            // SAFETY: all areas are valid and nobody else's until `verify` has waited.
            unsafe {
                self.stream.copy(device_list.address(), list.address(), list.len())?;
                let args = UnpackArgs { pieces: place, count: count as u64 };
                self.kernels.unpack(&self.stream, &args, Some(3))?;
            }
            self.verify(&target, &expected, "unpack")?;
        }
        Ok(())
    }

    /// Rows of all lengths from one order to another, off alignment by nothing and by odd numbers.
    fn rows(&mut self) -> Outcome<()> {
        for odd in [0, 3] {
            let index: Vec<u32> = (0..2 * LENGTHS.len() as u32).map(|row| row ^ 1).collect();
            let (mut strides, mut at) = ([Vec::new(), Vec::new()], [0, odd]);
            for (i, len) in LENGTHS.into_iter().enumerate() {
                for ((strides, at), gap) in strides.iter_mut().zip(&mut at).zip([odd, 16]) {
                    let (len, stride, first) = (len as u64, (len + gap) as u64, 2 * i as u64);
                    strides.push(RowStride { base: *at as u64, stride, len, first });
                    *at += 2 * stride as usize;
                }
            }
            let sent = bytes(odd as u64, at[0] - odd);
            let mut expected = vec![0; at[1] - 16];
            for ((from, to), len) in strides[0].iter().zip(&strides[1]).zip(LENGTHS) {
                for row in 0..2 {
                    let (from, to) = (from.base + (row ^ 1) * from.stride, to.base + row * to.stride);
                    expected[to as usize..to as usize + len].copy_from_slice(&sent[from as usize..from as usize + len]);
                }
            }
            let source = self.put_down(&self.stream, &sent)?;
            let target = self.put_down(&self.target, &vec![0; expected.len()])?;
            strides[0].iter_mut().for_each(|stride| stride.base += source.address());
            strides[1].iter_mut().for_each(|stride| stride.base += target.address());
            let src = RowList { strides: &strides[0], even: Some(2), index: &index, step: 0 };
            let dst = RowList { strides: &strides[1], even: None, index: &[], step: 0 };
            let longest = LENGTHS.into_iter().max().unwrap_or(0) as u64;
            let count = RowCount { first: 0, rows: index.len() as u64, bytes: sent.len() as u64, longest };
            let mut words = vec![0; table_words(&src, &dst)];
            let table = PinnedMemory::new(self.stream.context(), 8 * words.len())?;
            let args = write_table(&src, &dst, (&mut words, table.address()), count, 3);
            // SAFETY: the table is as long as that; all areas are valid and nobody else's until `verify` has waited.
            unsafe {
                std::ptr::copy_nonoverlapping(words.as_ptr(), table.as_ptr().cast(), words.len());
                self.kernels.rows(&self.stream, &args, Some(3))?;
            }
            self.verify(&target, &expected, "rows")?;
        }
        Ok(())
    }

    fn flags(&mut self) -> Outcome<()> {
        let (flag, outcome) = (self.put_down(&self.target, &[0; 8])?, self.pinned(&[0; 8])?);
        for (written, awaited, limit_ns, expected) in
            [(5, 5, 10_000_000_000, FLAG_REACHED), (6, 7, 1_000_000, FLAG_TIMED_OUT)]
        {
            let write = FlagWriteArgs { flag: flag.address(), value: written };
            let wait = FlagAwaitArgs { flag: flag.address(), value: awaited, limit_ns, outcome: outcome.address() };
            // SAFETY: flag and outcome live until the wait is over.
            unsafe {
                self.kernels.flag_write(&self.stream, &write)?;
                self.kernels.flag_await(&self.stream, &wait)?;
            }
            self.verify(&flag, &written.to_le_bytes(), "flag")?;
            // SAFETY: the launches are over.
            let said = unsafe { outcome.as_ptr().cast::<u64>().read() };
            if said != expected {
                return Err(format!("a wait for {awaited} at {written} said {said}").into());
            }
        }
        Ok(())
    }
}
