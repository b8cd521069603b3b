//! The launchers: one for each kernel.
#![allow(unsafe_code)]

use std::time::Duration;

use crossrail_cuda::nvrtc::{Compiled, Compiler, Source};
use crossrail_cuda::{Context, Function, Grid, Module, Stream};
use crossrail_types::{Error, ErrorKind, Result};

use crate::args::{COPY_PART, COPY_THREADS, CopyArgs, FlagAwaitArgs, FlagWriteArgs, UnpackArgs};
use crate::sources;

const WARPS: u64 = COPY_THREADS as u64 / 32;
/// How many blocks of a launch there are for each multiprocessor, at most. Two run at once (`crossrail_unpack` takes 128
/// registers a thread); two more even out what is left at the end. From 2 to 8 the rates differ by 1 %.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 4;

/// The kernels, compiled for and loaded on one GPU. Usable from any thread.
#[derive(Debug)]
pub struct Kernels {
    unpack: Function,
    copy: Function,
    flag_write: Function,
    flag_await: Function,
    most_blocks: u32,
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
            copy: load(&sources::COPY)?.function("crossrail_copy")?,
            flag_write: flag.function("crossrail_flag_write")?,
            flag_await: flag.function("crossrail_flag_await")?,
            most_blocks: BLOCKS_PER_MULTIPROCESSOR * context.device().multiprocessors()?.max(1),
            compiled,
        })
    }

    /// What was compiled or found in the cache, by the name of its source: logs, warnings, where it came from.
    pub fn compiled(&self) -> &[(&'static str, Compiled)] {
        &self.compiled
    }

    /// The most blocks that a launch makes use of.
    pub fn most_blocks(&self) -> u32 {
        self.most_blocks
    }

    /// Puts in: every piece of the list goes to its place. `blocks`: how many to use, `None` for as many as help.
    /// An empty list is nothing.
    ///
    /// # Safety
    /// The list and all sources must stay valid and unchanged, and destinations valid and untouched by others, until
    /// this is done. Destinations must not overlap each other or any source.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] for 0 blocks or a list that is not 8-byte aligned; a failed call.
    pub unsafe fn unpack(&self, stream: &Stream, args: &UnpackArgs, blocks: Option<u32>) -> Result<()> {
        aligned("unpack", "the list", args.pieces)?;
        let Some(grid) = self.grid("unpack", args.count.div_ceil(WARPS), blocks)? else { return Ok(()) };
        // SAFETY: the kernel takes `UnpackArgs`; the caller vouches for the rest.
        unsafe { self.unpack.launch(stream, grid, args) }
    }

    /// Puts in: a copy by `blocks` blocks, `None` for as many as help. An empty copy is nothing.
    ///
    /// # Safety
    /// Both areas must stay valid until this is done; nobody may write `src`, or touch `dst`, meanwhile. They must
    /// not overlap.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] for 0 blocks; a failed call.
    pub unsafe fn copy(&self, stream: &Stream, args: &CopyArgs, blocks: Option<u32>) -> Result<()> {
        let Some(grid) = self.grid("copy", args.len.div_ceil(COPY_PART * WARPS), blocks)? else { return Ok(()) };
        // SAFETY: the kernel takes `CopyArgs`; the caller vouches for the rest.
        unsafe { self.copy.launch(stream, grid, args) }
    }

    /// Puts in: the flag becomes the value. Whoever sees it there also sees what the stream did before.
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

    /// Puts in: the stream goes on when the flag has reached the value, or `limit_ns` is over. Which it was is at
    /// `outcome` then: [`crate::FLAG_REACHED`] or [`crate::FLAG_TIMED_OUT`].
    ///
    /// While it waits, nobody in this process should free GPU memory or load kernels: the driver waits for the whole
    /// GPU then, and lets other threads' calls wait with it, even a question to an event, up to the limit.
    ///
    /// # Safety
    /// Flag and outcome must stay valid until this is done; nobody may write the outcome meanwhile.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] for addresses that are not 8-byte aligned; a failed call.
    pub unsafe fn flag_await(&self, stream: &Stream, args: &FlagAwaitArgs) -> Result<()> {
        aligned("flag wait", "the flag", args.flag)?;
        aligned("flag wait", "the outcome", args.outcome)?;
        // SAFETY: the kernel takes `FlagAwaitArgs`; the caller vouches for the rest.
        unsafe { self.flag_await.launch(stream, ONE_WARP, args) }
    }

    /// A grid for `useful` blocks' worth of work; `None` when there is no work.
    fn grid(&self, operation: &str, useful: u64, blocks: Option<u32>) -> Result<Option<Grid>> {
        if blocks == Some(0) {
            return Err(Error::new(ErrorKind::Usage, operation, "0 blocks do nothing"));
        }
        let most = blocks.unwrap_or(self.most_blocks);
        let blocks = u32::try_from(useful).unwrap_or(u32::MAX).min(most);
        Ok((blocks > 0).then_some(Grid { blocks, threads: COPY_THREADS, shared: 0 }))
    }
}

const ONE_WARP: Grid = Grid { blocks: 1, threads: 32, shared: 0 };

fn aligned(operation: &str, what: &str, address: u64) -> Result<()> {
    if address.is_multiple_of(8) {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Usage, operation, format!("{what} at {address:#x} is not 8-byte aligned")))
}
