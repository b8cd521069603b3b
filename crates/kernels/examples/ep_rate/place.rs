//! One rank's GPU, and bytes to and from it.

use std::time::Duration;

use crossrail_cuda::nvrtc::Compiler;
use crossrail_cuda::{Context, Device, DeviceMemory, PinnedMemory, Stream, wait_for_releases};
use crossrail_kernels::ep::{EpCommon, EpFault, EpKernels, EpRing, Layout, Shape, faults_of, stage_name};

use crate::Outcome;

/// For what the host waits for, but for kernels.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);
/// For kernels: longer than all that one of them waits for by itself.
const KERNEL_LIMIT: Duration = Duration::from_secs(4);
/// The longest wait in a kernel.
const LIMIT_NS: u64 = 1_000_000_000;
/// Bytes of a heap that are read at a time.
const LOOK: usize = 4 << 20;
/// More than the L2 cache of any GPU.
const FLUSH: usize = 256 << 20;

/// What a rank has in any layout.
pub(crate) struct Place {
    pub(crate) stream: Stream,
    /// Copies the heap while kernels run.
    aside: Stream,
    seen: PinnedMemory,
    pub(crate) kernels: EpKernels,
    pub(crate) heap: DeviceMemory,
    /// All heaps, inboxes at all ranks, all inboxes here, and a ring.
    peers: DeviceMemory,
    faults: PinnedMemory,
    /// Two handles: one for the timed tokens, one for the barrier with no tokens.
    handles: [DeviceMemory; 2],
    flush: DeviceMemory,
    number: u32,
}

/// All ranks of a shape, a GPU each, which reach each other.
pub(crate) fn places(devices: &[Device], compiler: &Compiler, shape: &Shape, layout: Layout) -> Outcome<Vec<Place>> {
    let contexts: Vec<Context> = devices.iter().map(Context::primary).collect::<Result<_, _>>()?;
    for (i, one) in contexts.iter().enumerate() {
        for other in contexts.iter().enumerate().filter(|(j, _)| *j != i).map(|(_, other)| other) {
            one.enable_peer(other)?;
        }
    }
    let places: Vec<Place> = contexts
        .iter()
        .zip(0..)
        .map(|(context, number)| Place::new(context, compiler, shape, (layout, number)))
        .collect::<Outcome<_>>()?;
    let (bases, heap) = (places.iter().map(|place| place.heap.address()).collect::<Vec<u64>>(), shape.heap());
    for place in &places {
        let to = bases.iter().map(|base| base + heap.inbox(place.number));
        let from = (0..shape.ranks).map(|rank| place.heap.address() + heap.inbox(rank));
        // No rank is far: the one ring stays empty.
        let ring = [0; size_of::<EpRing>() / 8];
        let table: Vec<u8> =
            bases.iter().copied().chain(to).chain(from).chain(ring).flat_map(u64::to_le_bytes).collect();
        put(&place.stream, &place.peers, &table)?;
        place.clear()?;
    }
    Ok(places)
}

impl Place {
    fn new(context: &Context, compiler: &Compiler, shape: &Shape, of: (Layout, u32)) -> Outcome<Place> {
        let new = |bytes: usize| DeviceMemory::new(context, bytes.max(16));
        let handle = shape.handle_bytes(of.0) as usize;
        let heap = shape.heap_bytes() as usize;
        let faults = PinnedMemory::new(context, size_of::<EpFault>() * faults_of(shape) as usize)?;
        // SAFETY: new memory of that size.
        unsafe { faults.as_ptr().write_bytes(0, faults.len()) };
        Ok(Place {
            stream: Stream::new(context)?,
            aside: Stream::new(context)?,
            seen: PinnedMemory::new(context, LOOK)?,
            kernels: EpKernels::load(context, compiler, shape, LIMIT)?,
            heap: new(heap)?,
            peers: new(24 * shape.ranks as usize + size_of::<EpRing>())?,
            faults,
            handles: [new(handle)?, new(handle)?],
            flush: new(FLUSH)?,
            number: of.1,
        })
    }

    /// Arguments of a launch; the second handle is for the barrier with 0 tokens.
    pub(crate) fn common(&self, layout: Layout, tokens: u32, phases: u32) -> EpCommon {
        let shape = self.kernels.shape();
        EpCommon {
            heap: shape.heap(),
            parts: shape.handle(layout),
            base: self.heap.address(),
            peers: self.peers.address(),
            to: self.peers.address() + 8 * u64::from(shape.ranks),
            from: self.peers.address() + 16 * u64::from(shape.ranks),
            rings: self.peers.address() + 24 * u64::from(shape.ranks),
            handle: self.handles[usize::from(tokens == 0)].address(),
            faults: self.faults.address(),
            waits: 0,
            limit_ns: LIMIT_NS,
            rank: self.number,
            phases,
            tokens,
            max_tokens: shape.max_tokens,
        }
    }

    /// Enqueues an overwrite of the L2 cache.
    pub(crate) fn make_cold(&self) -> Outcome<()> {
        // SAFETY: the area is the place's, for this alone.
        unsafe { self.stream.fill(self.flush.address(), 0, self.flush.len())? };
        Ok(())
    }

    /// Zeroes the heap and the fault ring. No kernel may run.
    pub(crate) fn clear(&self) -> Outcome<()> {
        // SAFETY: the memory is the place's and nobody uses it.
        unsafe {
            self.stream.fill(self.heap.address(), 0, self.heap.len())?;
            self.faults.as_ptr().write_bytes(0, self.faults.len());
        }
        Ok(self.stream.wait(LIMIT)?)
    }

    /// Report of the heap, also while kernels run.
    fn report(&self) -> String {
        match self.look() {
            Ok(bytes) => {
                let shape = self.kernels.shape();
                shape.report(&bytes, &(0..shape.ranks).map(Some).collect::<Vec<_>>())
            }
            Err(error) => format!("its heap cannot be read: {error}"),
        }
    }

    fn look(&self) -> Outcome<Vec<u8>> {
        let mut bytes = Vec::new();
        while bytes.len() < self.heap.len() {
            let len = (self.heap.len() - bytes.len()).min(self.seen.len());
            // SAFETY: both areas are as long; nobody else has the pinned one, which is read after the copy.
            unsafe {
                self.aside.copy(self.seen.address(), self.heap.address() + bytes.len() as u64, len)?;
                self.aside.wait(KERNEL_LIMIT)?;
                bytes.extend_from_slice(std::slice::from_raw_parts(self.seen.as_ptr(), len));
            }
        }
        Ok(bytes)
    }

    /// Faults that its kernels reported, oldest first.
    fn faults(&self) -> Vec<EpFault> {
        // SAFETY: pinned memory of that size; kernels write whole numbers, the first of them last.
        let one = |at: usize| unsafe { self.faults.as_ptr().cast::<EpFault>().add(at).read_volatile() };
        (0..self.faults.len() / size_of::<EpFault>()).map(one).filter(|fault| fault.number != 0).collect()
    }
    /// New memory on this GPU with these bytes.
    pub(crate) fn there(&self, bytes: &[u8]) -> Outcome<DeviceMemory> {
        let memory = DeviceMemory::new(self.stream.context(), bytes.len().max(16))?;
        put(&self.stream, &memory, bytes)?;
        Ok(memory)
    }
}

/// Releases memory before kernels that wait for each other are launched: a release in between would synchronize a whole
/// GPU and block the launches on the others.
pub(crate) fn settle() -> Outcome<()> {
    if wait_for_releases(LIMIT) { Ok(()) } else { Err("memory is not given back".into()) }
}

/// Synchronizes the streams of all ranks. On a hang, or when a kernel timed out on another rank, the error contains the
/// heap reports of all ranks.
pub(crate) fn finish<'a>(places: impl Iterator<Item = &'a Place> + Clone) -> Outcome<()> {
    let (mut said, mut stuck) = (Vec::new(), false);
    for place in places.clone() {
        if let Err(error) = place.stream.wait(KERNEL_LIMIT) {
            stuck = true;
            said.push(format!("rank {}: {error}", place.number));
        }
    }
    for place in places.clone() {
        let told = |fault: &EpFault| {
            let EpFault { number, epoch, seen, rank, stage } = *fault;
            let stage = stage_name(stage);
            format!("rank {}, fault {number}: operation {epoch}: {stage} of rank {rank}: saw {seen}", place.number)
        };
        said.extend(place.faults().iter().map(told));
    }
    if said.is_empty() {
        return Ok(());
    }
    said.extend(places.map(|place| format!("rank {}: {}", place.number, place.report())));
    let said = said.join("\n  ");
    Err(if stuck { Box::new(Stuck(said)) } else { said.into() })
}

/// Kernels do not end: nothing else can be tried in this process.
#[derive(Debug)]
pub(crate) struct Stuck(String);

impl std::fmt::Display for Stuck {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "kernels do not end\n  {}", self.0)
    }
}

impl std::error::Error for Stuck {}

/// Writes bytes to the memory, and waits.
pub(crate) fn put(stream: &Stream, memory: &DeviceMemory, bytes: &[u8]) -> Outcome<()> {
    let pinned = PinnedMemory::new(stream.context(), bytes.len().max(1))?;
    // SAFETY: both areas are as long, and nobody else's until the wait is over.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), pinned.as_ptr(), bytes.len());
        stream.copy(memory.address(), pinned.address(), bytes.len())?;
    }
    Ok(stream.wait(LIMIT)?)
}

/// Reads bytes of GPU memory.
pub(crate) fn take(stream: &Stream, address: u64, len: usize) -> Outcome<Vec<u8>> {
    let pinned = PinnedMemory::new(stream.context(), len.max(1))?;
    // SAFETY: both areas are as long; the bytes are read after the copy is done.
    unsafe {
        stream.copy(pinned.address(), address, len)?;
        stream.wait(LIMIT)?;
        Ok(std::slice::from_raw_parts(pinned.as_ptr(), len).to_vec())
    }
}

pub(crate) fn words(stream: &Stream, memory: &DeviceMemory) -> Outcome<Vec<u32>> {
    let bytes = take(stream, memory.address(), memory.len())?;
    Ok(bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
}
