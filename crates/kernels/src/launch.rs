//! The launchers: one for each kernel.
#![allow(unsafe_code)]

use std::time::Duration;

use crossrail_cuda::nvrtc::{Compiled, Compiler, Source};
use crossrail_cuda::{Context, Function, Grid, Module, Stream};
use crossrail_types::{Error, ErrorKind, Result};

use crate::args::{COPY_THREADS, FlagAwaitArgs, FlagWriteArgs, PutArgs, ROWS_THREADS, RowsArgs, UnpackArgs};
use crate::rows::ROWS_WARPS;
use crate::sources;

const WARPS: u64 = COPY_THREADS as u64 / 32;
/// How many blocks of a launch there are for each multiprocessor, at most. Two run at once (`crossrail_unpack` takes 128
/// registers a thread); two more even out what is left at the end. From 2 to 8 the rates differ by 1 %.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 4;
/// The least that a warp of `crossrail_put` takes: one 16-byte load of each lane.
const PUT_LEAST_PART: u64 = 512;
/// The longest put that is one block's: what its threads have under way at once.
const PUT_ONE_BLOCK: u64 = 32 << 10;
/// The most that a warp of `crossrail_put` takes.
const PUT_MOST_PART: u64 = 16384;

/// The kernels, compiled for and loaded on one GPU. Usable from any thread.
#[derive(Debug)]
pub struct Kernels {
    unpack: Function,
    rows: Function,
    put: Function,
    flag_write: Function,
    flag_await: Function,
    multiprocessors: u32,
    compiled: Vec<(&'static str, Compiled)>,
}

impl Kernels {
    /// Compiles what is not in the compiler's cache, for at most `limit` per kernel waiting for other processes that
    /// compile the same, and loads it in `context`.
    ///
    /// # Errors
    /// A compiler that is too new for the driver; a kernel that does not compile, with the log; a failed call.
    pub fn load(context: &Context, compiler: &Compiler, limit: Duration) -> Result<Kernels> {
        compiler.library().check(context.device().cuda())?;
        let arch = context.device().arch()?;
        let mut compiled = Vec::new();
        let mut load = |source: &Source<'static>| -> Result<Module> {
            let code = compiler.compile(source, arch, &[], limit)?;
            let module = Module::load(context, &code)?;
            compiled.push((source.name, code));
            Ok(module)
        };
        let flag = load(&sources::FLAG)?;
        Ok(Kernels {
            unpack: load(&sources::UNPACK)?.function("crossrail_unpack")?,
            rows: load(&sources::ROWS)?.function("crossrail_rows")?,
            put: load(&sources::PUT)?.function("crossrail_put")?,
            flag_write: flag.function("crossrail_flag_write")?,
            flag_await: flag.function("crossrail_flag_await")?,
            multiprocessors: context.device().multiprocessors()?.max(1),
            compiled,
        })
    }

    /// What was compiled or found in the cache, by the name of its source: logs, warnings, where it came from.
    pub fn compiled(&self) -> &[(&'static str, Compiled)] {
        &self.compiled
    }

    /// The most blocks that a launch of `unpack` makes use of.
    pub fn most_blocks(&self) -> u32 {
        BLOCKS_PER_MULTIPROCESSOR.saturating_mul(self.multiprocessors)
    }

    /// Enqueues the copies of a list, by `blocks` blocks; `None`: as many as help. An empty list launches nothing.
    ///
    /// # Safety
    /// The list and all sources must stay valid and unchanged, and destinations valid and untouched by others, until
    /// this is done. Destinations must not overlap each other or any source.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] for 0 blocks or a list that is not 8-byte aligned; a failed call.
    pub unsafe fn unpack(&self, stream: &Stream, args: &UnpackArgs, blocks: Option<u32>) -> Result<()> {
        aligned("unpack", "the list", args.pieces)?;
        let useful = args.count.div_ceil(WARPS);
        let Some(blocks) = block_count("unpack", useful, blocks, self.most_blocks())? else { return Ok(()) };
        // SAFETY: the kernel takes `UnpackArgs`; the caller vouches for the rest.
        unsafe { self.unpack.launch(stream, copying(blocks), args) }
    }

    /// Enqueues a move of rows by at most `blocks` blocks, each of which occupies a multiprocessor; `None`: as many as
    /// help. Both ends may be memory of any GPU with peer access, or mapped host memory. Zero units launch nothing.
    ///
    /// # Safety
    /// The tables and all source rows must stay valid and unchanged, and destination rows valid and untouched by
    /// others, until this is done; every index must name a row, and rows in the same place must be of the same length.
    /// Destinations must not overlap each other or any source.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] for 0 blocks, misaligned tables, or a shape that the kernel does not take; a failed call.
    pub unsafe fn rows(&self, stream: &Stream, args: &RowsArgs, blocks: Option<u32>) -> Result<()> {
        for end in [&args.src, &args.dst] {
            aligned("rows", "a table of strides", end.strides)?;
            aligned("rows", "a table of indices", end.index)?;
        }
        let part = (16..1 << 31).contains(&args.part) && args.part.is_multiple_of(16);
        if !(1..=32).contains(&args.batch) || args.parts == 0 || !part {
            return Err(Error::new(ErrorKind::Usage, "rows", format!("no such shape: {args:?}")));
        }
        let useful = args.units.div_ceil(args.batch * ROWS_WARPS);
        let Some(blocks) = block_count("rows", useful, blocks, self.multiprocessors)? else { return Ok(()) };
        let grid = Grid { blocks, threads: ROWS_THREADS, shared: 0 };
        // SAFETY: the kernel takes `RowsArgs`; the caller vouches for the rest.
        unsafe { self.rows.launch(stream, grid, args) }
    }

    /// Enqueues a copy by `blocks` blocks (`None`: as many as help), which then sets the signal to the value. The
    /// signal is a release: a GPU or host that reads it with acquire also sees the bytes and all earlier work of the
    /// stream. The bytes, the signal, or both may be absent. Can be captured in a graph.
    ///
    /// A put of several blocks with a signal takes two launches, and therefore slightly longer.
    ///
    /// # Safety
    /// Both areas and the signal must stay valid until this is done. Until then `src` must not be written, nor `dst`
    /// accessed. The areas must not overlap.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] for 0 blocks, a part that is not a multiple of 16, or a signal that is not 8-byte
    /// aligned; a failed call.
    pub unsafe fn put(&self, stream: &Stream, args: &PutArgs, blocks: Option<u32>) -> Result<()> {
        aligned("put", "the signal", args.signal)?;
        let (useful, part) = put_shape(args, blocks.unwrap_or(self.multiprocessors).max(1))?;
        let Some(blocks) = block_count("put", useful, blocks, self.multiprocessors)? else { return Ok(()) };
        let mut whole = PutArgs { part, ..*args };
        let apart = blocks > 1 && args.signal != 0;
        if apart {
            whole.signal = 0;
        }
        // SAFETY: the kernel takes `PutArgs`; the caller vouches for the rest.
        unsafe { self.put.launch(stream, copying(blocks), &whole)? };
        if !apart {
            return Ok(());
        }
        // SAFETY: the caller vouches for the signal.
        unsafe { self.flag_write(stream, &FlagWriteArgs { flag: args.signal, value: args.value }) }
    }

    /// Enqueues a release store of the value to the flag: a reader that acquires it also sees all earlier work of the
    /// stream.
    ///
    /// # Safety
    /// The flag must stay valid until this is done.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] for a flag that is not 8-byte aligned; a failed call.
    pub unsafe fn flag_write(&self, stream: &Stream, args: &FlagWriteArgs) -> Result<()> {
        aligned("flag write", "the flag", args.flag)?;
        // SAFETY: the kernel takes `FlagWriteArgs`; the caller vouches for the rest.
        unsafe { self.flag_write.launch(stream, ONE_WARP, args) }
    }

    /// Enqueues a wait until the flag reaches the value or `limit_ns` has elapsed. It writes the result to `outcome`:
    /// [`crate::FLAG_REACHED`] or [`crate::FLAG_TIMED_OUT`].
    ///
    /// Do not free GPU memory or load kernels in this process while it waits: the driver then synchronizes with the
    /// whole GPU and blocks calls of other threads, even an event query, up to the limit.
    ///
    /// # Safety
    /// Flag and outcome must stay valid until this is done, and the outcome must not be written meanwhile.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] for addresses that are not 8-byte aligned; a failed call.
    pub unsafe fn flag_await(&self, stream: &Stream, args: &FlagAwaitArgs) -> Result<()> {
        aligned("flag wait", "the flag", args.flag)?;
        aligned("flag wait", "the outcome", args.outcome)?;
        // SAFETY: the kernel takes `FlagAwaitArgs`; the caller vouches for the rest.
        unsafe { self.flag_await.launch(stream, ONE_WARP, args) }
    }
}

/// How many blocks to launch for `useful` blocks' worth of work; `None` when there is no work.
fn block_count(operation: &str, useful: u64, asked: Option<u32>, most: u32) -> Result<Option<u32>> {
    if asked == Some(0) {
        return Err(Error::new(ErrorKind::Usage, operation, "0 blocks do nothing"));
    }
    let blocks = u32::try_from(useful).unwrap_or(u32::MAX).min(asked.unwrap_or(most));
    Ok((blocks > 0).then_some(blocks))
}

/// How many blocks a put can make use of, and the part that each of their warps then takes: one block for short ones,
/// else as many of the `most` as give every lane something to do.
fn put_shape(args: &PutArgs, most: u32) -> Result<(u64, u64)> {
    if !args.part.is_multiple_of(16) {
        let detail = format!("parts of {} bytes are not a multiple of 16", args.part);
        return Err(Error::new(ErrorKind::Usage, "put", detail));
    }
    if args.len == 0 {
        return Ok((u64::from(args.signal != 0), PUT_LEAST_PART));
    }
    let blocks = if args.len <= PUT_ONE_BLOCK { 1 } else { u64::from(most) };
    let part = match args.part {
        0 => args.len.div_ceil(WARPS * blocks).next_multiple_of(PUT_LEAST_PART).min(PUT_MOST_PART),
        part => part,
    };
    Ok((args.len.div_ceil(part.saturating_mul(WARPS)), part))
}

fn copying(blocks: u32) -> Grid {
    Grid { blocks, threads: COPY_THREADS, shared: 0 }
}

const ONE_WARP: Grid = Grid { blocks: 1, threads: 32, shared: 0 };

fn aligned(operation: &str, what: &str, address: u64) -> Result<()> {
    if address.is_multiple_of(8) {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Usage, operation, format!("{what} at {address:#x} is not 8-byte aligned")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: PutArgs = PutArgs::ZERO;

    #[test]
    fn short_puts_are_one_block_and_long_ones_fill_the_gpu() {
        let shape = |len| put_shape(&PutArgs { len, ..NOTHING }, 132).unwrap();
        assert_eq!(shape(1), (1, 512));
        assert_eq!(shape(4 << 10), (1, 512));
        assert_eq!(shape((4 << 10) + 1), (1, 1024));
        assert_eq!(shape(32 << 10), (1, 4096));
        assert_eq!(shape((32 << 10) + 1), (9, 512));
        assert_eq!(shape(1 << 20), (128, 1024));
        assert_eq!(shape(1 << 30), (8192, PUT_MOST_PART));
        for len in (0..40).map(|bits| (1_u64 << bits) + 7) {
            let (blocks, part) = shape(len);
            assert!(blocks * part * WARPS >= len && (blocks - 1) * part * WARPS < len, "{len}");
        }
    }

    #[test]
    fn a_put_of_nothing_is_a_signal_or_nothing() {
        assert_eq!(put_shape(&NOTHING, 132).unwrap().0, 0);
        assert_eq!(put_shape(&PutArgs { signal: 8, ..NOTHING }, 132).unwrap().0, 1);
        assert_eq!(put_shape(&PutArgs { len: 100, part: 24, ..NOTHING }, 1).unwrap_err().kind, ErrorKind::Usage);
        assert_eq!(put_shape(&PutArgs { len: 100, part: 16, ..NOTHING }, 1).unwrap(), (1, 16));
    }

    #[test]
    fn the_number_of_blocks_is_what_helps() {
        assert_eq!(block_count("copy", 0, None, 8).unwrap(), None);
        assert_eq!(block_count("copy", 3, None, 8).unwrap(), Some(3));
        assert_eq!(block_count("copy", u64::MAX, None, 8).unwrap(), Some(8));
        assert_eq!(block_count("copy", u64::MAX, Some(9), 8).unwrap(), Some(9));
        assert_eq!(block_count("copy", 3, Some(0), 8).unwrap_err().kind, ErrorKind::Usage);
    }
}
