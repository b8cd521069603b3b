//! Copies of rows: one kernel moves them all, or copy engines where rows are long.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Instant;

use crossrail_cuda::{Context, PointerInfo};
use crossrail_kernels::{Kernels, RowCount, RowList, RowStride, table_words, write_table};
use crossrail_transport::{Copy, Index, List, Step};
use crossrail_types::Result;

use super::Link;
use super::copies::{CopyStage, LinkStreams, PendingCopy, RowsCopy, RowsInFlight, StreamClass, check_local, is_long};
use crate::copy_stream::CompletionWatch;
use crate::gpu::Gpu;
use crate::row_table::LentTable;

/// From this mean length on, in bytes, copy engines move runs of rows as fast as a kernel does, which would occupy
/// multiprocessors.
const LONG_RUN: u64 = 256 << 10;
/// Runs that are looked at to find the mean.
const SAMPLES: u32 = 4;
/// Maximum number of runs that copy engines are given in one step.
const RUNS_PER_STEP: u32 = 64;
/// The longest row that the kernel takes.
const LONGEST_ROW: u64 = 64 << 30;

impl RowsCopy {
    /// Destination and source.
    fn ends(&self) -> (&List, &List) {
        match self.copy {
            Copy::Pull => (&self.local, &self.remote),
            Copy::Push => (&self.remote, &self.local),
        }
    }

    /// Whether the first runs, which stand for all, are long on average.
    fn has_long_runs(&self, end: u64) -> bool {
        let (mut dst, mut src) = (self.local.cursor(self.from), self.remote.cursor(self.from));
        let (mut room, mut have, mut at, mut runs) = (0, 0, self.from, 0);
        while at < end && runs < SAMPLES {
            if room == 0 {
                room = dst.piece(LONG_RUN).map_or(0, |(_, len)| len);
            }
            if have == 0 {
                have = src.piece(LONG_RUN).map_or(0, |(_, len)| len);
            }
            let len = u64::min(room, have);
            if len == 0 {
                break;
            }
            (room, have, at, runs) = (room - len, have - len, at + len, runs + 1);
        }
        runs > 0 && (at - self.from) / u64::from(runs) >= LONG_RUN
    }
}

impl Link {
    /// Starts to copy rows. The result is for [`Link::step_rows`], [`Link::stopped`] and [`Link::ended`].
    ///
    /// # Safety
    /// The rows of both lists must be valid, for writing at the destination, until the copy is over.
    ///
    /// # Errors
    /// Why they cannot be copied. Nothing has been.
    pub unsafe fn start_rows(&mut self, copy: RowsCopy) -> std::result::Result<u64, String> {
        let first = copy.local.cursor(copy.from).piece(1).map(|(address, _)| address).ok_or("there are no rows")?;
        let end = copy.from.checked_add(copy.len).filter(|end| *end <= copy.local.bytes().min(copy.remote.bytes()));
        let end = end.ok_or_else(|| format!("{} bytes from {} on are beyond the lists", copy.len, copy.from))?;
        let gpu = self.gpus.gpu(self.local_device(first)?).map_err(|error| error.to_string())?;
        let _entered = gpu.context.enter();
        check_rows(&gpu.context, &copy.local).map_err(|error| error.to_string())?;
        gpu.count_copy();
        let class = if is_long(copy.len as usize) { StreamClass::Long } else { StreamClass::Short };
        let stream = self.streams.choose(Arc::clone(&gpu), copy.copy, class).map_err(|error| error.to_string())?;
        let by_kernel = gpu.kernels().ok().filter(|_| !gpu.context.has_waiting_stream() && !copy.has_long_runs(end));
        let by_kernel = by_kernel.filter(|_| !copy.local.rows().has_empty() && !copy.remote.rows().has_empty());
        let range = copy.local.place(copy.from).zip(copy.local.place(end));
        let mut rows = RowsInFlight { copy, table: None };
        let stage = match by_kernel.zip(range) {
            // SAFETY: guaranteed by the caller; the local rows were just checked.
            Some((kernels, (first, last))) => unsafe {
                self.streams.launch_rows(stream, &gpu, kernels, &mut rows, (first, last - first))
            },
            None => CopyStage::Rows { stream, done: rows.copy.from },
        };
        self.last_copy += 1;
        let pending = PendingCopy::of_rows(CompletionWatch::new(Instant::now()), stage, rows);
        self.copies.insert(self.last_copy, pending);
        Ok(self.last_copy)
    }

    /// Advances a copy that [`Link::start_rows`] has started, without waiting.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn step_rows(&mut self, state: u64) -> Step {
        let Some(mut copy) = self.copies.remove(&state) else {
            return Step::Failed("the copy has been given up".into());
        };
        if let (CopyStage::Rows { stream, done }, Some(rows)) = (&copy.stage, &copy.rows) {
            let (stream, done) = (*stream, *done);
            // SAFETY: guaranteed by the caller.
            copy.stage = unsafe { self.streams.submit_rows(stream, &rows.copy, done) };
        }
        let len = copy.rows.as_ref().map_or(0, |rows| rows.copy.len);
        self.settle(copy, state, len)
    }
}

impl LinkStreams {
    /// Enqueues the kernel that copies `rows` rows from place `first` on, behind its table, and a marker.
    ///
    /// # Safety
    /// As [`Link::start_rows`]; the local rows must be mapped.
    unsafe fn launch_rows(
        &mut self,
        index: usize,
        gpu: &Arc<Gpu>,
        (kernels, blocks): (&Kernels, u32),
        rows: &mut RowsInFlight,
        (first, count): (u64, u64),
    ) -> CopyStage {
        let stream = &mut self.stream(index);
        let mut launch = || -> Result<()> {
            let (dst, src) = rows.copy.ends();
            let strides = (strides(dst), strides(src));
            let lists = (row_list(dst, &strides.0), row_list(src, &strides.1));
            let words = table_words(&lists.1, &lists.0);
            let table = rows.table.insert(LentTable::take(&gpu.tables, &gpu.context, words)?);
            let longest = dst.rows().strides().iter().map(|stride| stride.len).max().unwrap_or(0);
            let count = RowCount { first, rows: count, bytes: rows.copy.len, longest: longest.min(LONGEST_ROW) };
            let args = write_table(&lists.1, &lists.0, table.words(), count, blocks);
            table.upload(stream.stream(), words)?;
            // SAFETY: the table is behind its upload in the stream, and kept until the marker is reached; lists name
            // existing rows only, and both are of the same lengths; the caller vouches for the rows.
            unsafe { kernels.rows(stream.stream(), &args, Some(blocks)) }
        };
        let failed = launch().err().map(|error| error.to_string());
        CopyStage::InFlight { stream: index, marker: stream.enqueue_marker(), spans: Vec::new(), failed }
    }

    /// Enqueues copies of further runs, from byte `done` of the lists on, and a marker behind the last one.
    ///
    /// # Safety
    /// As [`Link::start_rows`].
    unsafe fn submit_rows(&mut self, index: usize, copy: &RowsCopy, mut done: u64) -> CopyStage {
        let stream = &mut self.stream(index);
        let (dst, src) = copy.ends();
        let (mut to, mut from) = (dst.cursor(done), src.cursor(done));
        let (mut room, mut have) = ((0, 0), (0, 0));
        let (end, mut failed) = (copy.from + copy.len, None);
        for _ in 0..RUNS_PER_STEP {
            if room.1 == 0 {
                room = to.piece(end - done).unwrap_or((0, 0));
            }
            if have.1 == 0 {
                have = from.piece(end - done).unwrap_or((0, 0));
            }
            let len = u64::min(room.1, have.1);
            if len == 0 {
                break;
            }
            // SAFETY: inside rows of both lists, which the caller vouches for.
            if let Err(error) = unsafe { stream.copy(room.0, have.0, len as usize) } {
                failed = Some(error.to_string());
                break;
            }
            (room, have) = ((room.0 + len, room.1 - len), (have.0 + len, have.1 - len));
            done += len;
        }
        if done < end && failed.is_none() {
            return CopyStage::Rows { stream: index, done };
        }
        CopyStage::InFlight { stream: index, marker: stream.enqueue_marker(), spans: Vec::new(), failed }
    }
}

fn strides(list: &List) -> Vec<RowStride> {
    let mut first = 0;
    let next = |stride: &crossrail_transport::Stride| {
        let entry = RowStride { base: stride.at, stride: stride.stride, len: stride.len, first };
        first += stride.count;
        entry
    };
    list.rows().strides().iter().map(next).collect()
}

fn row_list<'a>(list: &'a List, strides: &'a [RowStride]) -> RowList<'a> {
    let counts = list.rows().strides();
    let even = counts.first().map(|stride| stride.count).filter(|even| counts.iter().all(|s| s.count == *even));
    let (index, step): (&[u32], u64) = match list.index() {
        Index::All => (&[], 0),
        Index::Some(index) => (index, 0),
        Index::Repeated { block, step, .. } => (block, *step),
    };
    RowList { strides, even: even.and_then(|even| u32::try_from(even).ok()), index, step }
}

/// Checks that all rows are mapped: their owner may have freed some since they were registered, and a kernel that
/// accesses an unmapped address destroys the whole context. Rows of one allocation take one call.
fn check_rows(context: &Context, list: &List) -> Result<()> {
    let mut known = (0, 0);
    for stride in list.rows().strides().iter().filter(|stride| stride.len > 0) {
        let (first, end) = stride.extent().unwrap_or((stride.at, u64::MAX));
        if known.0 <= first && end <= known.1 {
            continue;
        }
        check_local(context, first, (end - first) as usize)?;
        if let Some((base, len)) = PointerInfo::extent(context, first)? {
            known = (base, base.saturating_add(len as u64));
        }
    }
    Ok(())
}
