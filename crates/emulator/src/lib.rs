//! An emulated GPU: runs the CUDA kernels of this repository on processors, and checks every access to memory.
//!
//! The kernels' sources are compiled by the C++ compiler, with `csrc/emulate` in place of what only a GPU provides. All
//! ranks, blocks and threads of all launches run interleaved in one thread, in an order that a seed chooses; bulk copies
//! complete late; each plain load and store is checked for races. A failed run names the thread and what it did, and the
//! same seed reproduces it.
//!
//! ```text
//! let Some(mut emulator) = Emulator::build("kernels/put.cu", &[]) else { return };
//! let memory = emulator.memory("target", 4096);
//! emulator.launch("crossrail_put", &args, Grid { blocks: 2, threads: 256, shared: 0 });
//! emulator.run(7).unwrap();
//! ```
//!
//! [`job`] and [`job_rank`] run dispatch and combine on all ranks of a job, on anything that implements [`Gpus`], and
//! compare the results with [`reference`]. Only tests depend on this crate.
#![allow(unsafe_code)]

mod build;
pub mod coding;
pub mod job;
pub mod job_rank;
mod numbers;
pub mod reference;
pub mod shapes;
mod wire;

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ffi::{CStr, CString, c_char};
use std::rc::{Rc, Weak};
use std::sync::Arc;

use crossrail_cuda::{Grid, KernelArgs};

pub use self::build::{Build, Library};
pub use self::numbers::Numbers;

/// Streams n, n + STREAMS, ... belong to one GPU: what its threads release at GPU scope is visible to each other only.
pub const STREAMS: u32 = 1000;
/// Upper bound on the processor time of one run, unless a test sets another.
const LIMIT_MS: u64 = 60_000;

/// GPUs on which a job's kernels run: emulated or real. A rank is a stream; launches are queued and run together.
pub trait Gpus {
    /// Memory that kernels may access.
    type Memory: GpuMemory;

    /// Allocates memory filled with noise, 256-byte aligned. A name that ends with a rank's number places it on that
    /// rank's GPU.
    fn memory(&mut self, name: &str, bytes: usize) -> Self::Memory;

    /// Queues a launch that begins when the launches queued before on this stream have ended.
    fn launch_on<A: KernelArgs + 'static>(&mut self, stream: u32, kernel: &str, args: &A, grid: Grid);

    /// Runs all queued launches to their end.
    ///
    /// # Errors
    /// What a thread did that it must not, or what all threads wait for when none makes progress.
    fn run(&mut self, seed: u64) -> Result<(), String>;

    /// Allocates zeroed memory, as heaps are when they are created.
    fn zeroed(&mut self, name: &str, bytes: usize) -> Self::Memory {
        let memory = self.memory(name, bytes);
        memory.write(0, &vec![0u8; bytes]);
        memory
    }

    /// Allocates memory that holds these values.
    fn memory_of<T: Number>(&mut self, name: &str, values: &[T]) -> Self::Memory {
        let memory = self.memory(name, size_of_val(values));
        memory.write(0, values);
        memory
    }
}

/// Memory that kernels may access. Clones are the same memory. A test reads and writes it between runs.
pub trait GpuMemory: Clone {
    /// Its address, as kernels take it.
    fn address(&self) -> u64;

    /// Its size in bytes.
    fn len(&self) -> usize;

    /// Reads `count` values from byte offset `at`.
    fn read<T: Number>(&self, at: usize, count: usize) -> Vec<T>;

    /// Writes values to byte offset `at`.
    fn write<T: Number>(&self, at: usize, values: &[T]);

    /// Whether its size is zero.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All of its bytes.
    fn bytes(&self) -> Vec<u8> {
        self.read(0, self.len())
    }
}

/// Emulated GPUs with the kernels that run on them. Kernels may access the memory allocated here and no other.
pub struct Emulator {
    library: Arc<Library>,
    queue: Vec<Launch>,
    areas: Vec<Weak<Area>>,
    next_stream: u32,
    /// Blocks of each launch that begin only as others end, as where other processes occupy multiprocessors.
    pub late_blocks: u32,
    /// Upper bound on the processor time of one run in milliseconds.
    pub limit_ms: u64,
}

struct Launch {
    kernel: String,
    args: Vec<u64>,
    bytes: usize,
    grid: Grid,
    stream: u32,
}

impl Emulator {
    /// Compiles one source (a path below `csrc`) with these definitions (`EP_H=7168`). `None` without a C++ compiler,
    /// after a message; with `CI=true` that fails.
    pub fn build(source: &str, defines: &[String]) -> Option<Emulator> {
        Build::new(&[source]).defines(defines).emulator()
    }

    /// Emulates kernels that are compiled already.
    pub fn new(library: &Arc<Library>) -> Emulator {
        // Above the streams that callers number.
        Emulator {
            library: Arc::clone(library),
            queue: Vec::new(),
            areas: Vec::new(),
            next_stream: 500,
            late_blocks: 0,
            limit_ms: LIMIT_MS,
        }
    }

    /// Memory of the caller, which kernels may access as long as the result exists. Accesses of the caller are not checked.
    ///
    /// # Safety
    /// The memory must outlive the result; the caller must not access it during calls of the result.
    pub unsafe fn lend(&mut self, name: &str, at: u64, bytes: usize) -> Memory {
        let layout = Layout::from_size_align(bytes, 8).expect("a size that there is");
        let memory = Memory(Rc::new(Area { name: c_string(name), at: at as *mut u8, layout, is_lent: true }));
        self.areas.push(Rc::downgrade(&memory.0));
        memory
    }

    /// Queues a launch on a stream of its own: it runs concurrently with all others of the next run.
    pub fn launch<A: KernelArgs + 'static>(&mut self, kernel: &str, args: &A, grid: Grid) {
        let stream = self.next_stream;
        self.next_stream = 500 + (self.next_stream - 499) % 500;
        self.launch_on(stream, kernel, args, grid);
    }
}

impl Gpus for Emulator {
    type Memory = Memory;

    fn memory(&mut self, name: &str, bytes: usize) -> Memory {
        let memory = Memory(Rc::new(Area::new(name, bytes)));
        let mut noise = Numbers(0x5eed ^ (bytes as u64) << 8 ^ self.areas.len() as u64);
        memory.write(0, &noise.bytes(bytes));
        self.areas.push(Rc::downgrade(&memory.0));
        memory
    }

    /// Streams are numbered below 500, or [`STREAMS`] more for a second one of the same GPU.
    fn launch_on<A: KernelArgs + 'static>(&mut self, stream: u32, kernel: &str, args: &A, grid: Grid) {
        let mut words = vec![0u64; size_of::<A>().div_ceil(8)];
        // SAFETY: `A` is repr(C) and Copy, and the words are as many bytes or more.
        unsafe {
            std::ptr::copy_nonoverlapping(
                std::ptr::from_ref(args).cast::<u8>(),
                words.as_mut_ptr().cast(),
                size_of::<A>(),
            );
        }
        self.queue.push(Launch { kernel: kernel.to_owned(), args: words, bytes: size_of::<A>(), grid, stream });
    }

    /// The seed chooses the order; errors name it.
    fn run(&mut self, seed: u64) -> Result<(), String> {
        let queue = std::mem::take(&mut self.queue);
        let names: Vec<CString> = queue.iter().map(|launch| c_string(&launch.kernel)).collect();
        let mut launches = Vec::new();
        for (launch, name) in queue.iter().zip(&names) {
            let (entry, bytes) = self.library.kernel(&launch.kernel);
            assert_eq!(bytes, launch.bytes, "{}: the size of what it takes", launch.kernel);
            launches.push(RawLaunch {
                kernel: name.as_ptr(),
                entry,
                args: launch.args.as_ptr().cast(),
                args_bytes: launch.bytes as u64,
                blocks: launch.grid.blocks,
                threads: launch.grid.threads,
                shared: launch.grid.shared,
                stream: launch.stream,
                device: launch.stream % STREAMS,
                admitted: launch.grid.blocks.saturating_sub(self.late_blocks).max(1),
            });
        }
        self.areas.retain(|area| area.strong_count() > 0);
        let areas: Vec<Rc<Area>> = self.areas.iter().filter_map(Weak::upgrade).collect();
        let raw_areas: Vec<RawArea> = areas
            .iter()
            .map(|area| RawArea { name: area.name.as_ptr(), base: area.at as u64, bytes: area.layout.size() as u64 })
            .collect();
        // SAFETY: names, arguments and areas live until the call is over.
        let text = unsafe {
            self.library.run()(
                launches.as_ptr(),
                launches.len(),
                raw_areas.as_ptr(),
                raw_areas.len(),
                seed,
                self.limit_ms,
            )
        };
        if text.is_null() {
            return Ok(());
        }
        // SAFETY: a string that ends in 0; it is freed once.
        let message = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
        // SAFETY: as above.
        unsafe { self.library.free()(text) };
        Err(format!("seed {seed}: {}", self.library.located(&message)))
    }
}

/// Mirrors `EmulateLaunch` of `csrc/emulate/machine.cpp`.
#[repr(C)]
pub(crate) struct RawLaunch {
    kernel: *const c_char,
    entry: build::Entry,
    args: *const u8,
    args_bytes: u64,
    blocks: u32,
    threads: u32,
    shared: u32,
    stream: u32,
    device: u32,
    admitted: u32,
}

/// Mirrors `EmulateArea` of `csrc/emulate/machine.cpp`.
#[repr(C)]
pub(crate) struct RawArea {
    name: *const c_char,
    base: u64,
    bytes: u64,
}

fn c_string(text: &str) -> CString {
    CString::new(text).expect("a name without zeros")
}

/// Memory of an emulated GPU.
#[derive(Clone)]
pub struct Memory(Rc<Area>);

struct Area {
    name: CString,
    at: *mut u8,
    layout: Layout,
    /// The caller's: it is not freed here.
    is_lent: bool,
}

impl Area {
    fn new(name: &str, bytes: usize) -> Area {
        let layout = Layout::from_size_align(bytes.max(1), 256).expect("a size that there is");
        // SAFETY: not of size 0.
        let at = unsafe { alloc_zeroed(layout) };
        if at.is_null() {
            handle_alloc_error(layout);
        }
        Area { name: c_string(name), at, layout, is_lent: false }
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        if !self.is_lent {
            // SAFETY: allocated like this.
            unsafe { dealloc(self.at, self.layout) };
        }
    }
}

impl GpuMemory for Memory {
    fn address(&self) -> u64 {
        self.0.at as u64
    }

    fn len(&self) -> usize {
        self.0.layout.size()
    }

    fn read<T: Number>(&self, at: usize, count: usize) -> Vec<T> {
        assert!(at + count * size_of::<T>() <= self.len(), "{count} values at {at} of {}", self.len());
        let mut values = Vec::with_capacity(count);
        // SAFETY: inside the area, which nobody changes meanwhile; any bits are a number; there is room for so many.
        unsafe {
            let bytes = values.as_mut_ptr() as *mut u8;
            std::ptr::copy_nonoverlapping(self.0.at.add(at), bytes, count * size_of::<T>());
            values.set_len(count);
        }
        values
    }

    fn write<T: Number>(&self, at: usize, values: &[T]) {
        assert!(at + size_of_val(values) <= self.len(), "{} values at {at} of {}", values.len(), self.len());
        // SAFETY: inside the area, as above.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr().cast(), self.0.at.add(at), size_of_val(values)) };
    }
}

/// Plain numbers: every bit pattern is a value.
pub trait Number: Copy {}
impl Number for u8 {}
impl Number for u16 {}
impl Number for u32 {}
impl Number for u64 {}
impl Number for i32 {}
impl Number for i64 {}
impl Number for f32 {}
