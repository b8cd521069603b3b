//! Real GPUs as [`Gpus`]: what runs on the emulator runs here. A rank is a stream; ranks take turns over the GPUs that can
//! access each other, so that one GPU serves all ranks if need be.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crossrail_cuda::nvrtc::{Compiled, Compiler};
use crossrail_cuda::{
    Context, Device, DeviceMemory, Function, Grid, KernelArgs, Module, PinnedMemory, Stream, wait_for_releases,
};
use crossrail_emulator::{GpuMemory, Gpus, Number, Numbers};
use crossrail_kernels::{mangled, sources};

use crate::support;

/// For all that a run does, unless told otherwise.
const LIMIT: Duration = Duration::from_secs(15);
/// Bytes that are copied at a time.
const STAGE: usize = 1 << 20;

/// One test at a time: freeing memory waits for the GPU, and would wait for a kernel that waits for another test.
static TURN: Mutex<()> = Mutex::new(());

/// Made by the first test, and kept: that takes longer than most tests.
static CONTEXTS: Mutex<Vec<Context>> = Mutex::new(Vec::new());

/// What is compiled.
#[derive(Clone)]
pub(crate) struct Build {
    sources: Vec<String>,
    defines: Vec<String>,
}

impl Build {
    /// Of these sources.
    pub(crate) fn new(sources: &[&str]) -> Build {
        Build { sources: sources.iter().map(|source| (*source).to_owned()).collect(), defines: Vec::new() }
    }

    pub(crate) fn defines(mut self, defines: &[String]) -> Build {
        self.defines.extend_from_slice(defines);
        self
    }

    /// `None` where there is no GPU with bulk copies, or no compiler, which is said.
    pub(crate) fn gpus(&self) -> Option<DeviceGpus> {
        let (cuda, library) = (support::cuda()?, support::nvrtc()?);
        let devices = cuda.devices().unwrap();
        let first = devices.first()?;
        let arch = first.arch().unwrap();
        if !sources::has_bulk(arch) {
            support::skip("needs a GPU of architecture 9.0 or later");
            return None;
        }
        let alike = |other: &&Device| {
            let reaches = first.reaches(other).unwrap() && other.reaches(first).unwrap();
            other.ordinal() == first.ordinal() || reaches && other.arch().unwrap() == arch
        };
        let all = [sources::EP_EXPERT, sources::EP_CODED, sources::EP_RANK, sources::EP_SLOTS];
        let options: Vec<&str> = self.defines.iter().map(String::as_str).collect();
        let compiler = Compiler::new(library, None);
        let compile = |name: &String| {
            let source = all.iter().find(|source| source.name == name).unwrap();
            compiler.compile(source, arch, &options, LIMIT).unwrap()
        };
        let compiled: Vec<Compiled> = self.sources.iter().map(compile).collect();
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let mut contexts = CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner);
        // One in which a kernel has failed is lost, and made anew.
        let is_lost = |context: &Context| Stream::new(context).and_then(|stream| stream.wait(LIMIT)).is_err();
        if contexts.is_empty() || contexts.iter().any(is_lost) {
            contexts.clear();
            contexts.extend(devices.iter().filter(alike).map(|device| Context::primary(device).unwrap()));
            for one in contexts.iter() {
                for other in contexts.iter().filter(|other| other.device().ordinal() != one.device().ordinal()) {
                    one.enable_peer(other).unwrap();
                }
            }
        }
        let turn = Rc::new(turn);
        let gpus = contexts.iter().map(|context| Rc::new(Gpu::new(context, &compiled, &turn))).collect();
        Some(DeviceGpus { gpus, functions: HashMap::new(), streams: HashMap::new(), queue: Vec::new(), limit: LIMIT })
    }
}

struct Gpu {
    modules: Vec<Kernels>,
    stream: Stream,
    pinned: PinnedMemory,
    /// Until the last memory is given back.
    _turn: Rc<MutexGuard<'static, ()>>,
}

impl Gpu {
    fn new(context: &Context, compiled: &[Compiled], turn: &Rc<MutexGuard<'static, ()>>) -> Gpu {
        Gpu {
            modules: compiled.iter().map(|code| Kernels::load(context, code)).collect(),
            stream: Stream::new(context).unwrap(),
            pinned: PinnedMemory::new(context, STAGE).unwrap(),
            _turn: Rc::clone(turn),
        }
    }
}

/// A module, and the machine code that tells which kernels it has. Asking the driver for one that it lacks is an error
/// that memory checkers report.
struct Kernels {
    module: Module,
    image: Vec<u8>,
}

impl Kernels {
    fn load(context: &Context, compiled: &Compiled) -> Kernels {
        Kernels { module: Module::load(context, compiled).unwrap(), image: compiled.image().to_vec() }
    }

    /// A cubin is an ELF file in which each kernel has a section `.text.` with its name.
    fn function(&self, kernel: &str) -> Option<Function> {
        let section = format!(".text.{kernel}\0");
        let has_it = self.image.windows(section.len()).any(|bytes| bytes == section.as_bytes());
        has_it.then(|| self.module.function(kernel).unwrap())
    }
}

type Start = Box<dyn Fn(&Function, &Stream) -> crossrail_types::Result<()>>;

struct Launch {
    kernel: String,
    rank: u32,
    shared: u32,
    start: Start,
}

/// Kernels on GPUs, and launches that wait to be run.
pub(crate) struct DeviceGpus {
    gpus: Vec<Rc<Gpu>>,
    functions: HashMap<(String, usize), Function>,
    streams: HashMap<u32, Stream>,
    queue: Vec<Launch>,
    /// The longest that a run may take.
    pub(crate) limit: Duration,
}

impl Gpus for DeviceGpus {
    type Memory = Memory;

    /// Memory of the GPU of the rank whose number the name ends with, or of the first; full of noise.
    fn memory(&mut self, name: &str, bytes: usize) -> Memory {
        let rank = name.split(' ').next_back().and_then(|word| word.parse::<usize>().ok()).unwrap_or(0);
        let gpu = Rc::clone(&self.gpus[rank % self.gpus.len()]);
        let memory = DeviceMemory::new(gpu.stream.context(), bytes.max(1)).unwrap();
        let memory = Memory(Rc::new(Area { memory, gpu }));
        memory.write(0, &Numbers(0x5eed ^ (bytes as u64) << 8).bytes(bytes));
        memory
    }

    /// Queues a launch on a rank's stream.
    fn launch_on<A: KernelArgs + 'static>(&mut self, rank: u32, kernel: &str, args: &A, grid: Grid) {
        let (args, kernel) = (*args, mangled::<A>(kernel));
        // SAFETY: each kernel is launched with what it takes; the memory that is named lives until the run is over.
        let start = move |function: &Function, stream: &Stream| unsafe { function.launch(stream, grid, &args) };
        self.queue.push(Launch { kernel, rank, shared: grid.shared, start: Box::new(start) });
    }

    /// Runs all queued launches to their end. Orders are the GPUs' own, the seed is for messages.
    ///
    /// # Errors
    /// A call that failed. When kernels do not end, the process does: their memory cannot be given back.
    fn run(&mut self, seed: u64) -> Result<(), String> {
        let queue = std::mem::take(&mut self.queue);
        let in_words = |error: crossrail_types::Error| format!("seed {seed}: {error}");
        for launch in &queue {
            let number = launch.rank as usize % self.gpus.len();
            let gpu = &self.gpus[number];
            let function = match self.functions.entry((launch.kernel.clone(), number)) {
                std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
                std::collections::hash_map::Entry::Vacant(new) => {
                    let found = gpu.modules.iter().find_map(|module| module.function(&launch.kernel));
                    new.insert(found.ok_or_else(|| format!("seed {seed}: there is no kernel {}", launch.kernel))?)
                }
            };
            function.allow_shared(launch.shared).map_err(in_words)?;
            let context = gpu.stream.context();
            self.streams.entry(launch.rank).or_insert_with(|| Stream::new(context).unwrap());
        }
        assert!(wait_for_releases(self.limit), "memory is not given back");
        for launch in &queue {
            let function = &self.functions[&(launch.kernel.clone(), launch.rank as usize % self.gpus.len())];
            (launch.start)(function, &self.streams[&launch.rank]).map_err(in_words)?;
        }
        for (rank, stream) in &self.streams {
            if let Err(error) = stream.wait(self.limit) {
                eprintln!("seed {seed}: rank {rank}: {error}: kernels do not end");
                std::process::exit(101);
            }
        }
        Ok(())
    }
}

/// Memory of a GPU. Clones are the same memory. A test reads and writes it between runs.
#[derive(Clone)]
pub(crate) struct Memory(Rc<Area>);

struct Area {
    memory: DeviceMemory,
    gpu: Rc<Gpu>,
}

impl GpuMemory for Memory {
    fn address(&self) -> u64 {
        self.0.memory.address()
    }

    fn len(&self) -> usize {
        self.0.memory.len()
    }

    /// `count` values from byte `at` on.
    fn read<T: Number>(&self, at: usize, count: usize) -> Vec<T> {
        let bytes = count * size_of::<T>();
        assert!(at + bytes <= self.len(), "{count} values at {at} of {}", self.len());
        let mut values: Vec<T> = Vec::with_capacity(count);
        let (gpu, to) = (&self.0.gpu, values.as_mut_ptr().cast::<u8>());
        for done in (0..bytes).step_by(STAGE) {
            let len = STAGE.min(bytes - done);
            // SAFETY: inside both areas, which nobody touches meanwhile; there is room for so many values.
            unsafe {
                gpu.stream.copy(gpu.pinned.address(), self.address() + (at + done) as u64, len).unwrap();
                gpu.stream.wait(LIMIT).unwrap();
                std::ptr::copy_nonoverlapping(gpu.pinned.as_ptr(), to.add(done), len);
            }
        }
        // SAFETY: all were written, and any bits are a number.
        unsafe { values.set_len(count) };
        values
    }

    /// Writes values from byte `at` on.
    fn write<T: Number>(&self, at: usize, values: &[T]) {
        let bytes = size_of_val(values);
        assert!(at + bytes <= self.len(), "{} values at {at} of {}", values.len(), self.len());
        let (gpu, from) = (&self.0.gpu, values.as_ptr().cast::<u8>());
        for done in (0..bytes).step_by(STAGE) {
            let len = STAGE.min(bytes - done);
            // SAFETY: as above.
            unsafe {
                std::ptr::copy_nonoverlapping(from.add(done), gpu.pinned.as_ptr(), len);
                gpu.stream.copy(self.address() + (at + done) as u64, gpu.pinned.address(), len).unwrap();
                gpu.stream.wait(LIMIT).unwrap();
            }
        }
    }
}
