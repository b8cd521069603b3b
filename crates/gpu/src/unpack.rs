//! Scatters received bytes to their destinations in GPU memory, in one of three equivalent ways.
//!
//! ```text
//! kernel   one launch gathers the whole list
//! d2d      one copy for each entry, by the copy engines
//! host     a processor gathers the entries into one pinned area; then one copy for each dense run of destinations
//! ```
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use crossrail_kernels::{Kernels, ScatterList, UnpackArgs};
use crossrail_types::{Error, ErrorKind, Result, Settings};

pub use crossrail_cuda as cuda;
pub use crossrail_kernels::Piece;
pub use crossrail_types::Unpack as UnpackMode;

use cuda::{Context, Event, PinnedMemory, Stream};

/// How many lists may be in flight before the next call waits for the oldest.
const LISTS_IN_FLIGHT: usize = 2;
/// Minimum size of a list's memory: enough for a stager's batches, so that it is allocated once.
const LIST: usize = 128 << 10;

/// Memory that holds the entries' sources. `Piece::src` is the GPU's address in either case.
#[derive(Clone, Copy, Debug)]
pub enum Source {
    /// In pinned host memory, all of them in one mapping.
    Pinned {
        /// Where that begins for the host.
        host: *const u8,
        /// The same for the GPU.
        address: u64,
    },
    /// In device memory, all of them in one range. `host` copies the whole range to the host first.
    Device {
        /// Where the range begins.
        address: u64,
        /// Its length in bytes.
        len: usize,
    },
}

/// Unpacks lists of pieces in one of the three ways, with resources that are allocated once. One thread at a time.
pub struct Unpacker {
    context: Context,
    mode: UnpackMode,
    limit: Duration,
    /// For the mode that needs them.
    kernels: Option<Arc<Kernels>>,
    blocks: Option<u32>,
    list: ScatterList,
    buffers: [ListBuffer; LISTS_IN_FLIGHT],
    turn: usize,
    /// Staging memory for sources that the host gathers from device memory.
    landing: Option<PinnedMemory>,
}

/// Pinned memory of one list: the list itself, or its bytes, gathered.
struct ListBuffer {
    done: Event,
    area: Option<PinnedMemory>,
    /// The GPU may still use it; `done` is recorded.
    used: bool,
}

// SAFETY: a `Source` is a pair of addresses; the caller of `unpack` guarantees that they are valid.
unsafe impl Send for Source {}

impl Unpacker {
    /// One of the three, on `context`'s GPU; kernels are compiled, or found in the folder that `settings` name.
    ///
    /// # Errors
    /// `Unsupported` when the kernels can't be compiled; what the driver says.
    pub fn new(context: &Context, mode: UnpackMode, settings: &Settings) -> Result<Unpacker> {
        let limit = settings.timeout;
        let kernels = match mode {
            UnpackMode::Kernel => Some(crossrail_kernels::shared(context, settings, limit).map_err(|error| {
                let hint = "CROSSRAIL_UNPACK=d2d needs no compiler";
                let hint = error.hint.as_ref().map_or_else(|| hint.to_owned(), |own| format!("{own}; {hint}"));
                error.with_hint(hint)
            })?),
            UnpackMode::D2d | UnpackMode::Host => None,
        };
        let buffer = || Ok::<_, Error>(ListBuffer { done: Event::new(context)?, area: None, used: false });
        Ok(Unpacker {
            context: context.clone(),
            mode,
            limit,
            kernels,
            blocks: None,
            list: ScatterList::default(),
            buffers: [buffer()?, buffer()?],
            turn: 0,
            landing: None,
        })
    }

    /// Which of the three.
    pub fn mode(&self) -> UnpackMode {
        self.mode
    }

    /// How many blocks a kernel may take, at least 1; without this, as many as help.
    pub fn set_blocks(&mut self, blocks: u32) {
        self.blocks = Some(blocks.max(1));
    }

    /// Enqueues a copy of every entry of the list from its `src` to its `dst`. The list may be reused afterwards.
    /// `host` gathers before it returns and does not access the sources afterwards; for sources in device memory it
    /// synchronizes `stream` first.
    ///
    /// # Safety
    /// Sources must be in `source`, and valid and unchanged until this is done; destinations must be device memory
    /// that `stream`'s GPU reaches, valid and untouched by others until then. Destinations must not overlap each
    /// other or any source.
    ///
    /// # Errors
    /// `Usage` for a source outside `source`; `Timeout`; `Exhausted` for pinned memory; what the driver says. Some
    /// entries may be in flight then.
    pub unsafe fn unpack(&mut self, stream: &Stream, list: &[Piece], source: Source) -> Result<()> {
        // SAFETY: the caller vouches for the list.
        unsafe {
            match self.mode {
                UnpackMode::Kernel => self.by_kernel(stream, list),
                UnpackMode::D2d => by_copies(stream, list, source),
                UnpackMode::Host => self.by_host(stream, list, source),
            }
        }
    }

    /// As `unpack`, but launches no kernel.
    ///
    /// # Safety
    /// As there.
    ///
    /// # Errors
    /// As there.
    pub(crate) unsafe fn without_kernel(&mut self, stream: &Stream, list: &[Piece], source: Source) -> Result<()> {
        // SAFETY: the caller vouches for the list.
        unsafe {
            match self.mode {
                UnpackMode::Kernel | UnpackMode::D2d => by_copies(stream, list, source),
                UnpackMode::Host => self.by_host(stream, list, source),
            }
        }
    }

    unsafe fn by_kernel(&mut self, stream: &Stream, list: &[Piece]) -> Result<()> {
        let Some(kernels) = self.kernels.clone() else {
            return Err(Error::new(ErrorKind::Unsupported, "unpack", "no kernels were loaded"));
        };
        self.list.clear();
        for piece in list {
            self.list.push(piece.src, piece.dst, piece.len);
        }
        let (count, len) = (self.list.pieces().len(), size_of_val(self.list.pieces()));
        if count == 0 {
            return Ok(());
        }
        let blocks = self.blocks;
        let buffer = self.next_buffer()?;
        let area = reserve(&mut self.buffers[buffer].area, &self.context, len.max(LIST))?;
        let args = UnpackArgs { pieces: area.address(), count: count as u64 };
        // SAFETY: the area is long enough, aligned to a page, and no launch reads it; the caller vouches for the list.
        unsafe {
            std::ptr::copy_nonoverlapping(self.list.pieces().as_ptr(), area.as_ptr().cast::<Piece>(), count);
            kernels.unpack(stream, &args, blocks)?;
        }
        self.buffers[buffer].mark_in_use(stream)
    }

    unsafe fn by_host(&mut self, stream: &Stream, list: &[Piece], source: Source) -> Result<()> {
        let (host, address) = match source {
            Source::Pinned { host, address } => (host, address),
            Source::Device { address, len } => {
                let landing = reserve(&mut self.landing, &self.context, len)?;
                // SAFETY: the area is long enough, and nobody else's; the caller vouches for the source.
                unsafe { stream.copy_out(landing.as_ptr(), address, len)? };
                stream.wait(self.limit)?;
                (landing.as_ptr().cast_const(), address)
            }
        };
        let gathered = Gathered::of(list)?;
        if gathered.bytes == 0 {
            return Ok(());
        }
        let buffer = self.next_buffer()?;
        let area = reserve(&mut self.buffers[buffer].area, &self.context, gathered.bytes)?;
        for (piece, at) in list.iter().zip(&gathered.places) {
            let from = piece.src.checked_sub(address).ok_or_else(|| {
                let detail = format!("an entry's source, {:#x}, is before all sources, {address:#x}", piece.src);
                Error::new(ErrorKind::Usage, "unpack", detail)
            })?;
            // SAFETY: the places are inside the area, which no copy uses; the caller vouches for the sources.
            unsafe {
                let from = host.add(bytes(from));
                std::ptr::copy_nonoverlapping(from, area.as_ptr().add(*at), bytes(piece.len));
            }
        }
        for run in gathered.runs.iter().filter(|run| run.len > 0) {
            // SAFETY: inside the area; the caller vouches for the destinations.
            unsafe { stream.copy_in(run.dst, area.as_ptr().add(run.at), run.len)? };
        }
        self.buffers[buffer].mark_in_use(stream)
    }

    /// Index of a buffer that the GPU does not use; waits for the oldest if necessary.
    fn next_buffer(&mut self) -> Result<usize> {
        self.turn = (self.turn + 1) % LISTS_IN_FLIGHT;
        let buffer = &mut self.buffers[self.turn];
        if buffer.used {
            buffer.done.wait(self.limit)?;
            buffer.used = false;
        }
        Ok(self.turn)
    }
}

impl std::fmt::Debug for Unpacker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Unpacker({} on {:?})", self.mode, self.context)
    }
}

impl Drop for Unpacker {
    fn drop(&mut self) {
        // Pinned memory must not be freed while the GPU reads it: on a timeout it is leaked.
        for buffer in self.buffers.iter_mut().filter(|buffer| buffer.used) {
            if buffer.done.wait(self.limit).is_err_and(|error| error.kind == ErrorKind::Timeout) {
                std::mem::forget(buffer.area.take());
            }
        }
    }
}

impl ListBuffer {
    /// Marks it as used by all work enqueued in `stream` so far.
    fn mark_in_use(&mut self, stream: &Stream) -> Result<()> {
        if let Err(error) = self.done.record(stream) {
            // Without the event, its last use cannot be detected: leak it.
            std::mem::forget(self.area.take());
            return Err(error);
        }
        self.used = true;
        Ok(())
    }
}

/// # Safety
/// As [`Unpacker::unpack`].
unsafe fn by_copies(stream: &Stream, list: &[Piece], source: Source) -> Result<()> {
    for piece in list.iter().filter(|piece| piece.len > 0) {
        // SAFETY: the caller vouches for the list.
        unsafe {
            match source {
                Source::Pinned { host, address } => {
                    let from = host.wrapping_add(bytes(piece.src.wrapping_sub(address)));
                    stream.copy_in(piece.dst, from, bytes(piece.len))?;
                }
                Source::Device { .. } => stream.copy_within(piece.dst, piece.src, bytes(piece.len))?,
            }
        }
    }
    Ok(())
}

/// Pinned memory of at least `len` bytes in that place.
fn reserve<'a>(place: &'a mut Option<PinnedMemory>, context: &Context, len: usize) -> Result<&'a PinnedMemory> {
    if place.as_ref().is_some_and(|area| area.len() < len) {
        *place = None;
    }
    match place {
        Some(area) => Ok(area),
        empty => Ok(empty.insert(PinnedMemory::new(context, len.next_power_of_two())?)),
    }
}

/// A list laid out for one area: where each entry's bytes go in it, in the order of the destinations.
#[derive(Debug, PartialEq, Eq)]
struct Gathered {
    /// By entry.
    places: Vec<usize>,
    /// Dense runs of destinations.
    runs: Vec<Run>,
    bytes: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    at: usize,
    dst: u64,
    len: usize,
}

impl Gathered {
    fn of(list: &[Piece]) -> Result<Gathered> {
        let total = list.iter().try_fold(0_u64, |sum, piece| sum.checked_add(piece.len));
        let too_much = || Error::new(ErrorKind::Usage, "unpack", "the total length of the list's entries overflows");
        let total = usize::try_from(total.ok_or_else(too_much)?).map_err(|_| too_much())?;
        let first = list.iter().map(|piece| piece.dst).min().unwrap_or(0);
        let last = list.iter().map(|piece| piece.dst.saturating_add(piece.len)).max().unwrap_or(0);
        if last - first == total as u64 {
            // Destinations don't overlap, so together they are one run.
            let places = list.iter().map(|piece| bytes(piece.dst - first)).collect();
            return Ok(Gathered { places, runs: vec![Run { at: 0, dst: first, len: total }], bytes: total });
        }
        let mut order: Vec<usize> = (0..list.len()).collect();
        order.sort_unstable_by_key(|entry| list[*entry].dst);
        let (mut places, mut runs, mut at) = (vec![0; list.len()], Vec::<Run>::new(), 0);
        for entry in order {
            let piece = &list[entry];
            places[entry] = at;
            match runs.last_mut() {
                Some(run) if run.dst + run.len as u64 == piece.dst => run.len += bytes(piece.len),
                _ => runs.push(Run { at, dst: piece.dst, len: bytes(piece.len) }),
            }
            at += bytes(piece.len);
        }
        Ok(Gathered { places, runs, bytes: total })
    }
}

/// Converts a GPU memory length; `usize` has 64 bits.
fn bytes(len: u64) -> usize {
    len as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(dst: u64, len: u64) -> Piece {
        Piece { src: 0, dst, len }
    }

    #[test]
    fn dense_destinations_are_one_run_in_any_order() {
        let gathered = Gathered::of(&[piece(108, 4), piece(100, 8), piece(112, 1)]).unwrap();
        assert_eq!(gathered.places, [8, 0, 12]);
        assert_eq!(gathered.runs, [Run { at: 0, dst: 100, len: 13 }]);
        assert_eq!(Gathered::of(&[]).unwrap().bytes, 0);
    }

    #[test]
    fn gaps_begin_a_run() {
        let gathered = Gathered::of(&[piece(200, 8), piece(100, 4), piece(104, 4), piece(0, 2)]).unwrap();
        assert_eq!(gathered.places, [10, 2, 6, 0]);
        let runs = [(0, 0, 2), (2, 100, 8), (10, 200, 8)].map(|(at, dst, len)| Run { at, dst, len });
        assert_eq!(gathered.runs, runs);
        assert_eq!(gathered.bytes, 18);
        Gathered::of(&[piece(0, u64::MAX), piece(0, 2)]).unwrap_err();
    }
}
