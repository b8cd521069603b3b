//! Staging on a real GPU: a stream for each direction, and the unpacker.
#![allow(unsafe_code)]

use std::any::Any;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use crossrail_cuda::{Context, Deferred, Event, PointerInfo, RegisteredMemory, Stream};
use crossrail_shm::Arena;
use crossrail_topology::Placement;
use crossrail_types::{Error, ErrorKind, Result, Settings};

use super::bounce::Bounce;
use super::stager::{Stager, StagerSetup};
use super::{ChunkMemory, CopyEngine, Mark, SlotCopy};
use crate::pointer;
use crate::stream_support::StreamSupport;
use crate::unpack::{Piece, Source, UnpackMode, Unpacker};

/// Blocks of an unpack kernel, at most. Slots are host memory, and 16 blocks saturate its link (each has 32 KiB of
/// loads in flight); the rest of the GPU is left to the user.
const BLOCKS: u32 = 32;

impl Stager {
    /// Staging on a real GPU.
    pub(crate) fn cuda(context: &Context, settings: &Settings, arena: &Arc<Arena>) -> Result<Stager> {
        let (context, settings) = (context.clone(), settings.clone());
        let name = format!("cuda:{}", context.device().ordinal());
        Stager::start(&name, &settings.clone(), arena, move |setup| {
            // Current for the thread's lifetime: no call has to set it, and none disturbs a capture.
            match context.enter() {
                Ok(_entered) => {
                    // Near the GPU, as its bounce memory is; if that is refused, the thread runs anywhere.
                    if let Ok(node @ Some(_)) = context.device().numa_node() {
                        let _ = Placement::here(settings.affinity).stay_near(node);
                    }
                    let made = make(&context, &settings, &setup);
                    setup.run(made);
                }
                Err(error) => setup.run(Err(error)),
            }
        })
    }
}

fn make(context: &Context, settings: &Settings, setup: &StagerSetup) -> Result<(Box<dyn CopyEngine>, Arc<Bounce>)> {
    // The unpacker first: it fails if kernels cannot be compiled, and pinning takes longest.
    let mut unpacker = Unpacker::new(context, settings.unpack, settings)?;
    let mut packer = Unpacker::new(context, settings.unpack, settings)?;
    unpacker.set_blocks(BLOCKS);
    packer.set_blocks(BLOCKS);
    // High priority: streams of one priority share a few hardware queues, and behind a caller's stream that waits for
    // this transfer (`wait_on`) in the same queue neither would ever continue.
    let (packs, unpacks) = (Stream::urgent(context)?, Stream::urgent(context)?);
    let mut map = (std::ptr::null(), 0);
    let bounce = Bounce::new(&setup.arena, setup.layout, setup.wake_up.clone(), |segment, len| {
        let null = || Error::new(ErrorKind::Io, "bounce memory", "the segment is mapped at address 0");
        let first = NonNull::new(segment.ptr()).ok_or_else(null)?;
        if let Some(node) = context.device().numa_node()? {
            prefer_node(first, len, node);
        }
        // SAFETY: the segment keeps the memory mapped; it is kept beside the registration and dropped after it.
        let pinned = unsafe { RegisteredMemory::new(context, first, len)? };
        map = (segment.ptr().cast_const(), pinned.address());
        Ok(Box::new(Deferred::when_idle((pinned, segment.clone()), context)) as Box<dyn Any + Send + Sync>)
    })?;
    let engine = CudaCopyEngine {
        context: context.clone(),
        stream_support: StreamSupport::of(context),
        packs,
        unpacks,
        unpacker,
        packer,
        host: map.0,
        address: map.1,
        events: BTreeMap::new(),
        idle: Vec::new(),
        marks: 0,
        list: Vec::new(),
        limit: settings.timeout,
    };
    Ok((Box::new(engine), bounce))
}

struct CudaCopyEngine {
    context: Context,
    stream_support: Arc<StreamSupport>,
    packs: Stream,
    unpacks: Stream,
    unpacker: Unpacker,
    /// Gathers what is packed.
    packer: Unpacker,
    /// First byte of the bounce memory, for the host and for the GPU.
    host: *const u8,
    address: u64,
    /// By mark.
    events: BTreeMap<u64, Event>,
    idle: Vec<Event>,
    marks: u64,
    list: Vec<Piece>,
    limit: Duration,
}

// SAFETY: the address is a number here; the slots' owners answer for what is there.
unsafe impl Send for CudaCopyEngine {}

impl CudaCopyEngine {
    /// A slot's device address.
    fn slot(&self, copy: &SlotCopy) -> u64 {
        self.address + (copy.host as usize - self.host as usize) as u64
    }

    /// Submits the copy of a chunk's pieces into its slot: by one kernel, as they are unpacked, or one by one.
    fn gather(&mut self, copy: &SlotCopy) -> Result<()> {
        let slot = self.slot(copy);
        let mut list = std::mem::take(&mut self.list);
        list.clear();
        let piece = |(src, at, len)| Piece { src, dst: slot + at as u64, len: len as u64 };
        list.extend(copy.pieces().map(piece));
        let by_kernel = self.packer.mode() == UnpackMode::Kernel;
        let launched = by_kernel.then(|| {
            // Only `host` uses the source's range.
            let source = Source::Device { address: 0, len: 0 };
            // SAFETY: as for `pack`; the slots are mapped for the GPU.
            self.stream_support.unless_waited_for(|| unsafe { self.packer.unpack(&self.packs, &list, source) })
        });
        self.list = list;
        match launched.flatten() {
            Some(submitted) => submitted,
            // SAFETY: as for `pack`; the slot is as long as all pieces.
            None => copy
                .pieces()
                .try_for_each(|(address, at, len)| unsafe { self.packs.copy_out(copy.host.add(at), address, len) }),
        }
    }

    /// Records an event behind the work in the stream; if that fails, waits for the stream.
    fn mark(&mut self, of: fn(&CudaCopyEngine) -> &Stream) -> Result<Mark> {
        let event = self.idle.pop().map_or_else(|| Event::new(&self.context), Ok);
        let recorded = event.and_then(|event| event.record(of(self)).map(|()| event));
        match recorded {
            Ok(event) => {
                self.marks += 1;
                self.events.insert(self.marks, event);
                Ok(Mark(self.marks))
            }
            Err(error) => {
                self.settle(of);
                Err(error)
            }
        }
    }

    /// Waits until the stream is empty, as far as that can be known.
    fn settle(&self, of: fn(&CudaCopyEngine) -> &Stream) {
        // A lost context returns an error, and executes nothing any more.
        let _ = of(self).wait(self.limit);
    }
}

impl CopyEngine for CudaCopyEngine {
    fn check(&mut self, copy: &SlotCopy) -> Result<()> {
        if let ChunkMemory::At(address) = copy.memory {
            return pointer::check(&self.context, address, copy.len.max(1));
        }
        // Pieces of one allocation take one question.
        let mut known = 0..0;
        for (address, _, len) in copy.pieces() {
            let end = address.saturating_add(len as u64);
            if known.start <= address && end <= known.end {
                continue;
            }
            pointer::check(&self.context, address, len.max(1))?;
            if let Some((base, len)) = PointerInfo::extent(&self.context, address)? {
                known = base..base.saturating_add(len as u64);
            }
        }
        Ok(())
    }

    fn pack(&mut self, copy: &SlotCopy) -> Result<Mark> {
        let submitted = match copy.memory {
            // SAFETY: the slot belongs to the ticket; the device memory was checked, and belongs to the operation until
            // it is done.
            ChunkMemory::At(address) => unsafe { self.packs.copy_out(copy.host, address, copy.len) },
            ChunkMemory::Pieces(_) => self.gather(copy),
        };
        if let Err(error) = submitted {
            self.settle(|engine| &engine.packs);
            return Err(error);
        }
        self.mark(|engine| &engine.packs)
    }

    fn unpack(&mut self, copies: &[SlotCopy]) -> Result<Mark> {
        let mut list = std::mem::take(&mut self.list);
        list.clear();
        for copy in copies {
            let slot = self.slot(copy);
            let piece = |(dst, at, len)| Piece { src: slot + at as u64, dst, len: len as u64 };
            list.extend(copy.pieces().map(piece));
        }
        let source = Source::Pinned { host: self.host, address: self.address };
        // SAFETY: as for `pack`; operations that overlap are the user's mistake, as with any transfer.
        let submitted = unsafe {
            // While streams wait, a kernel may not be scheduled before one of them continues; a copy is.
            let launched = self.stream_support.unless_waited_for(|| self.unpacker.unpack(&self.unpacks, &list, source));
            launched.unwrap_or_else(|| self.unpacker.without_kernel(&self.unpacks, &list, source))
        };
        self.list = list;
        if let Err(error) = submitted {
            self.settle(|engine| &engine.unpacks);
            return Err(error);
        }
        self.mark(|engine| &engine.unpacks)
    }

    fn is_done(&mut self, mark: Mark) -> Result<bool> {
        let Some(event) = self.events.get(&mark.0) else { return Ok(true) };
        let answer = event.is_done();
        if !matches!(answer, Ok(false))
            && let Some(event) = self.events.remove(&mark.0)
        {
            self.idle.push(event);
        }
        answer
    }
}

/// Asks for the memory's pages, none of which exists yet, to be allocated on that NUMA node. This is advice: where the
/// system does not allow it, they come from the node that this thread runs on.
fn prefer_node(first: NonNull<u8>, len: usize, node: u32) {
    const MPOL_PREFERRED: libc::c_ulong = 1;
    const BITS: u32 = 64;
    let mut mask = [0_u64; 16];
    let Some(word) = mask.get_mut((node / BITS) as usize) else { return };
    *word = 1 << (node % BITS);
    let nodes = (mask.len() * BITS as usize) as libc::c_ulong;
    // SAFETY: the range is mapped and ours; the mask has as many bits as are named.
    unsafe { libc::syscall(libc::SYS_mbind, first.as_ptr(), len, MPOL_PREFERRED, mask.as_ptr(), nodes, 0_u32) };
}
