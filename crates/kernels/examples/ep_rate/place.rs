//! One rank's GPU, and bytes to and from it.

use std::time::Duration;

use crossrail_cuda::nvrtc::Compiler;
use crossrail_cuda::{Context, Device, DeviceMemory, PinnedMemory, Stream};
use crossrail_kernels::ep::{EP_FAULTS, EpCommon, EpFault, EpKernels, Layout, Shape};

use crate::Outcome;

pub(crate) const LIMIT: Duration = Duration::from_secs(30);
/// The longest wait in a kernel.
const LIMIT_NS: u64 = 2_000_000_000;
/// More than the second cache of any GPU.
const FLUSH: usize = 256 << 20;

/// What a rank has in any layout.
pub(crate) struct Place {
    pub(crate) stream: Stream,
    pub(crate) kernels: EpKernels,
    pub(crate) heap: DeviceMemory,
    peers: DeviceMemory,
    faults: PinnedMemory,
    /// Two handles: of the tokens that are timed, and of none, when ranks only meet.
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
    let bases: Vec<u8> = places.iter().flat_map(|place| place.heap.address().to_le_bytes()).collect();
    for place in &places {
        put(&place.stream, &place.peers, &bases)?;
        // SAFETY: the memory is the place's and nobody uses it yet.
        unsafe { place.stream.fill(place.heap.address(), 0, place.heap.len())? };
        place.stream.wait(LIMIT)?;
    }
    Ok(places)
}

impl Place {
    fn new(context: &Context, compiler: &Compiler, shape: &Shape, of: (Layout, u32)) -> Outcome<Place> {
        let new = |bytes: usize| DeviceMemory::new(context, bytes.max(16));
        let handle = shape.handle_bytes(of.0) as usize;
        let faults = PinnedMemory::new(context, size_of::<EpFault>() * EP_FAULTS as usize)?;
        // SAFETY: new memory of that size.
        unsafe { faults.as_ptr().write_bytes(0, faults.len()) };
        Ok(Place {
            stream: Stream::new(context)?,
            kernels: EpKernels::load(context, compiler, shape, LIMIT)?,
            heap: new(shape.heap_bytes() as usize)?,
            peers: new(8 * shape.ranks as usize)?,
            faults,
            handles: [new(handle)?, new(handle)?],
            flush: new(FLUSH)?,
            number: of.1,
        })
    }

    /// What a launch takes; the second handle is for when ranks only meet, with 0 tokens.
    pub(crate) fn common(&self, layout: Layout, tokens: u32, phases: u32) -> EpCommon {
        let shape = self.kernels.shape();
        EpCommon {
            heap: shape.heap(),
            parts: shape.handle(layout),
            base: self.heap.address(),
            peers: self.peers.address(),
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

    /// Puts in: the second cache is overwritten.
    pub(crate) fn make_cold(&self) -> Outcome<()> {
        // SAFETY: the area is the place's, for this alone.
        unsafe { self.stream.fill(self.flush.address(), 0, self.flush.len())? };
        Ok(())
    }

    /// Waits for what was put in. An error when the kernels waited for another rank in vain.
    pub(crate) fn finish(&self) -> Outcome<()> {
        self.stream.wait(LIMIT).map_err(|error| format!("rank {}: {error}", self.number))?;
        // SAFETY: pinned memory of that size, and the kernels are done.
        let faults = unsafe { self.faults.as_ptr().cast::<EpFault>().read_volatile() };
        if faults.number != 0 {
            return Err(format!("rank {} did not hear of rank {}: {faults:?}", self.number, faults.rank).into());
        }
        Ok(())
    }

    /// New memory on this GPU with these bytes.
    pub(crate) fn there(&self, bytes: &[u8]) -> Outcome<DeviceMemory> {
        let memory = DeviceMemory::new(self.stream.context(), bytes.len().max(16))?;
        put(&self.stream, &memory, bytes)?;
        Ok(memory)
    }
}

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
