//! Staging by CUDA: a stream for each way, and the unpacker.
#![allow(unsafe_code)]

use std::any::Any;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use crossrail_cuda::{Context, Event, Later, RegisteredMemory, Stream};
use crossrail_shm::Arena;
use crossrail_types::{Error, ErrorKind, Result, Settings};

use super::bounce::Bounce;
use super::stager::{Stager, Start};
use super::unpack::{Piece, Source, Unpacker};
use super::{Gpu, Mark, Part};
use crate::device::{Calls, check_cuda};

/// The blocks that an unpack may take. Slots are host memory, whose link 16 blocks fill (each has 32 KiB of loads under way);
/// the rest of the GPU is left to whoever computes there.
const BLOCKS: u32 = 32;

impl Stager {
    /// Staging on a real GPU.
    pub(crate) fn cuda(context: &Context, settings: &Settings, arena: &Arc<Arena>) -> Result<Stager> {
        let (context, settings) = (context.clone(), settings.clone());
        let name = format!("cuda:{}", context.device().ordinal());
        Stager::start(&name, &settings.clone(), arena, move |start| {
            // For as long as the thread lives: its calls need not make it current one by one, and disturb no capture.
            match context.enter() {
                Ok(_entered) => {
                    let made = make(&context, &settings, &start);
                    start.run(made);
                }
                Err(error) => start.run(Err(error)),
            }
        })
    }
}

fn make(context: &Context, settings: &Settings, start: &Start) -> Result<(Box<dyn Gpu>, Arc<Bounce>)> {
    // What may be missing first: the pinned memory takes longest.
    let mut unpacker = Unpacker::new(context, settings.unpack, settings)?;
    unpacker.set_blocks(BLOCKS);
    // Not of callers' priority: streams of one priority share a few queues, and behind a caller's stream that waits for this
    // transfer (`wait_on`), in the same queue, neither would ever go on.
    let (packs, unpacks) = (Stream::urgent(context)?, Stream::urgent(context)?);
    let mut map = (std::ptr::null(), 0);
    let bounce = Bounce::new(&start.arena, start.cut, start.bell.clone(), |segment, len| {
        let nowhere = || Error::new(ErrorKind::Io, "bounce memory", "it is nowhere");
        let first = NonNull::new(segment.ptr()).ok_or_else(nowhere)?;
        if let Some(node) = context.device().numa_node()? {
            prefer_node(first, len, node);
        }
        // SAFETY: the segment, which keeps it mapped, is kept with it, and dropped after it.
        let pinned = unsafe { RegisteredMemory::new(context, first, len)? };
        map = (segment.ptr().cast_const(), pinned.address());
        Ok(Box::new(Later::when_quiet((pinned, segment.clone()), context)) as Box<dyn Any + Send + Sync>)
    })?;
    let gpu = CudaGpu {
        context: context.clone(),
        calls: Calls::of(context),
        packs,
        unpacks,
        unpacker,
        host: map.0,
        address: map.1,
        events: BTreeMap::new(),
        idle: Vec::new(),
        marks: 0,
        list: Vec::new(),
        limit: settings.timeout,
    };
    Ok((Box::new(gpu), bounce))
}

struct CudaGpu {
    context: Context,
    calls: Arc<Calls>,
    packs: Stream,
    unpacks: Stream,
    unpacker: Unpacker,
    /// Where the bounce memory begins, for the host and for the GPU.
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
unsafe impl Send for CudaGpu {}

impl CudaGpu {
    /// A slot's place as the GPU sees it.
    fn slot(&self, part: &Part) -> u64 {
        self.address + (part.host as usize - self.host as usize) as u64
    }

    /// An event behind what is in the stream; if there can be none, the stream is waited for.
    fn mark(&mut self, of: fn(&CudaGpu) -> &Stream) -> Result<Mark> {
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

    /// Waits until nothing of ours is in the stream, as far as that can be known.
    fn settle(&self, of: fn(&CudaGpu) -> &Stream) {
        // A context that is lost answers with an error, and carries nothing out any more.
        let _ = of(self).wait(self.limit);
    }
}

impl Gpu for CudaGpu {
    fn check(&mut self, part: &Part) -> Result<()> {
        check_cuda(&self.context, part.memory, part.len.max(1))
    }

    fn pack(&mut self, part: &Part) -> Result<Mark> {
        // SAFETY: the slot is the ticket's, the device's memory was checked, and is the operation's until it is done.
        unsafe { self.packs.copy_out(part.host, part.memory, part.len)? };
        self.mark(|gpu| &gpu.packs)
    }

    fn unpack(&mut self, parts: &[Part]) -> Result<Mark> {
        let mut list = std::mem::take(&mut self.list);
        list.clear();
        list.extend(parts.iter().map(|part| Piece { src: self.slot(part), dst: part.memory, len: part.len as u64 }));
        let source = Source::Pinned { host: self.host, address: self.address };
        // SAFETY: as for `pack`; operations that overlap are the user's mistake, as with any transfer.
        let put_in = unsafe {
            // Where many streams wait, a kernel may not get its turn before one of them goes on; a copy does.
            let launched = self.calls.unless_waited_for(|| self.unpacker.unpack(&self.unpacks, &list, source));
            launched.unwrap_or_else(|| self.unpacker.without_kernel(&self.unpacks, &list, source))
        };
        self.list = list;
        if let Err(error) = put_in {
            self.settle(|gpu| &gpu.unpacks);
            return Err(error);
        }
        self.mark(|gpu| &gpu.unpacks)
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

/// Asks for the memory's pages, none of which exists yet, to be taken from that NUMA node. Advice: where the system
/// does not allow it, they come from wherever this thread runs.
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
