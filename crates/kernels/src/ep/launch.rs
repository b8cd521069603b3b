//! The launchers: one for each kernel.
#![allow(unsafe_code)]

use std::time::Duration;

use crossrail_cuda::nvrtc::{Compiler, Source};
use crossrail_cuda::{Context, Function, Grid, KernelArgs, Module, Stream};
use crossrail_types::{Error, ErrorKind, Result};

use super::{
    EP_ANNOUNCE, EP_RANK_BLOCKS, EP_RECEIVE, EP_SEND, EP_WIRE_BF16, EP_WIRE_FP8, EP_WIRE_LOGFMT10, EpCombineArgs,
    EpCommon, EpDispatchArgs, Shape,
};
use crate::{mangled, run_concurrently, sources};

/// Qualified name of the kernel that dispatches in the expert layout. Profilers show it; tests written for DeepEP look
/// for kernels named `...::dispatch` and `...::combine`.
pub const EXPERT_DISPATCH: &str = "crossrail::ep::expert::dispatch";
/// Qualified name of the kernel that combines in the expert layout.
pub const EXPERT_COMBINE: &str = "crossrail::ep::expert::combine";
/// Qualified name of the kernel that combines in the expert layout with rows in LogFMT-10.
pub const EXPERT_COMBINE_LOGFMT10: &str = "crossrail::ep::expert::logfmt10::combine";
/// Qualified name of the kernel that combines in the expert layout with rows in e4m3.
pub const EXPERT_COMBINE_FP8: &str = "crossrail::ep::expert::fp8::combine";
/// Qualified name of the kernel that dispatches in the rank layout.
pub const RANK_DISPATCH: &str = "crossrail::ep::rank::dispatch";
/// Qualified name of the kernel that combines in the rank layout.
pub const RANK_COMBINE: &str = "crossrail::ep::rank::combine";

/// The first driver that captures launches which begin early, as 1000 * major + 10 * minor.
const EARLY_FROM: u32 = 12030;

/// The kernels of expert parallelism, compiled for one shape and loaded on one GPU. Usable from any thread.
#[derive(Debug)]
pub struct EpKernels {
    shape: Shape,
    expert: Option<Pair>,
    coded: Option<Coded>,
    rank: Option<Pair>,
    /// Whether they are compiled to be launched early.
    early: bool,
    multiprocessors: u32,
}

/// Those of one layout.
#[derive(Debug)]
struct Pair {
    dispatch: Function,
    combine: Function,
    /// Threads of a block of each.
    threads: [u32; 2],
    /// Bytes of shared memory of a block of each.
    shared: [u32; 2],
}

/// Those that combine in the expert layout with coded rows; their blocks are those of [`Pair::combine`].
#[derive(Debug)]
struct Coded {
    logfmt10: Function,
    fp8: Function,
}

impl Pair {
    /// Of dispatch (0) or combine (1).
    fn grid(&self, blocks: u32, kernel: usize) -> Grid {
        Grid { blocks, threads: self.threads[kernel], shared: self.shared[kernel] }
    }
}

impl EpKernels {
    /// Compiles what is not in the compiler's cache for this shape, for at most `limit` per source waiting for other
    /// processes that compile the same, and loads it in `context`. It takes seconds when nothing is kept: do it before
    /// any other rank waits for this one.
    ///
    /// # Errors
    /// As [`Shape::check`]; a compiler that is too new for the driver; a kernel that does not compile, with the log; a
    /// GPU with too little shared memory; a failed call.
    pub fn load(context: &Context, compiler: &Compiler, shape: &Shape, limit: Duration) -> Result<EpKernels> {
        shape.check()?;
        compiler.library().check(context.device().cuda())?;
        let arch = context.device().arch()?;
        let bulk = sources::has_bulk(arch);
        // Some newer GPUs, for desktops, have bulk copies but not that much shared memory.
        let rank_bulk =
            bulk && context.device().shared_memory()? >= shape.rank_shared(true).into_iter().fold(0, u32::max);
        let module = |source: &Source<'static>, defines: &[String]| {
            let options: Vec<&str> = defines.iter().map(String::as_str).collect();
            Module::load(context, &compiler.compile(source, arch, &options, limit)?)
        };
        let load = |source: &Source<'static>, names: [&str; 2], defines: &[String], threads, shared: [u32; 2]| {
            let module = module(source, defines)?;
            let dispatch = module.function(&mangled::<EpDispatchArgs>(names[0]))?;
            let combine = module.function(&mangled::<EpCombineArgs>(names[1]))?;
            dispatch.allow_shared(shared[0])?;
            combine.allow_shared(shared[1])?;
            Ok::<_, Error>(Pair { dispatch, combine, threads, shared })
        };
        let coded = || {
            let module = module(&sources::EP_CODED, &shape.defines(bulk))?;
            let combine = |name: &str| {
                let function = module.function(&mangled::<EpCombineArgs>(name))?;
                function.allow_shared(shape.expert_shared()[1])?;
                Ok::<_, Error>(function)
            };
            let (logfmt10, fp8) = (combine(EXPERT_COMBINE_LOGFMT10)?, combine(EXPERT_COMBINE_FP8)?);
            Ok::<_, Error>(Coded { logfmt10, fp8 })
        };
        let expert = || {
            let names = [EXPERT_DISPATCH, EXPERT_COMBINE];
            load(&sources::EP_EXPERT, names, &shape.defines(bulk), shape.expert_threads(), shape.expert_shared())
        };
        let rank = || {
            let names = [RANK_DISPATCH, RANK_COMBINE];
            if shape.slotted() {
                let (defines, shared) = (shape.slot_defines(bulk), shape.slot_shared());
                return load(&sources::EP_SLOTS, names, &defines, shape.expert_threads(), shared);
            }
            let (defines, shared) = (shape.rank_defines(rank_bulk), shape.rank_shared(rank_bulk));
            load(&sources::EP_RANK, names, &defines, [shape.rank_threads(); 2], shared)
        };
        // Each takes a second or more to compile.
        let coded = || shape.has_coded().then(&coded);
        let rank = || shape.rank_layout.then(&rank);
        let (coded, (rank, expert)) =
            run_concurrently(coded, || run_concurrently(rank, || shape.expert_layout.then(expert)));
        let panicked = || Error::new(ErrorKind::Io, "kernels", "loading them panicked");
        let (coded, rank) = (coded.ok_or_else(panicked)?, rank.ok_or_else(panicked)?);
        Ok(EpKernels {
            shape: *shape,
            expert: expert.transpose()?,
            coded: coded.transpose()?,
            rank: rank.transpose()?,
            early: shape.tuning().early && bulk && context.device().cuda().version() >= EARLY_FROM,
            multiprocessors: context.device().multiprocessors()?.max(1),
        })
    }

    /// What they were compiled for.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The most blocks of a launch: all of them must run at once, as they wait for other ranks.
    pub fn most_blocks(&self) -> u32 {
        self.multiprocessors
    }

    /// Enqueues a dispatch in the expert layout, or the phases of one that `args` names. Can be captured. With `early`,
    /// if compiled in, it may start before the preceding kernel of the stream ends, and waits for it by itself.
    ///
    /// # Safety
    /// All addresses must be valid for what the fields say until this is done, and not be touched by others meanwhile;
    /// `common.heap` and `common.parts` must be this shape's. The same operations must be put in on all ranks, in the
    /// same order; a phase comes after the phases before it. No more than `most_blocks` blocks of all that run at once on
    /// this GPU may wait for others.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] for a layout that the shape has not, phases that are none, too many tokens, rows that are
    /// not aligned, or a number of blocks that is not from 1 to `most_blocks`; a failed call.
    pub unsafe fn dispatch_expert(
        &self,
        stream: &Stream,
        args: &EpDispatchArgs,
        blocks: u32,
        early: bool,
    ) -> Result<()> {
        let pair = self.pair("dispatch", &self.expert, &args.common, EP_SEND | EP_RECEIVE, blocks)?;
        aligned("dispatch", &[("x", args.x | args.x_stride), ("out", args.out_x)])?;
        // SAFETY: the kernel takes `EpDispatchArgs`; the caller vouches for the rest.
        unsafe { self.start(&pair.dispatch, stream, pair.grid(blocks, 0), args, early) }
    }

    /// Enqueues a combine in the expert layout, or the phases of one that `args` names. Can be captured.
    ///
    /// # Safety
    /// As [`EpKernels::dispatch_expert`]; the handle must be of a dispatch of this buffer that is done by then.
    ///
    /// # Errors
    /// As there.
    pub unsafe fn combine_expert(&self, stream: &Stream, args: &EpCombineArgs, blocks: u32, early: bool) -> Result<()> {
        let pair = self.pair("combine", &self.expert, &args.common, EP_SEND | EP_RECEIVE, blocks)?;
        let out = args.out | args.out_stride | args.bias[0] | args.bias[1];
        aligned("combine", &[("y", args.y | args.y_stride), ("out and bias", out)])?;
        let combine = match (args.wire, &self.coded) {
            (EP_WIRE_BF16, _) => &pair.combine,
            (EP_WIRE_LOGFMT10, Some(coded)) => &coded.logfmt10,
            (EP_WIRE_FP8, Some(coded)) => &coded.fp8,
            (EP_WIRE_LOGFMT10 | EP_WIRE_FP8, None) => {
                let detail = match self.shape.tuning().node {
                    0 => format!("coded rows need blocks of 128 elements, and hidden is {}", self.shape.hidden),
                    _ => "rows that go once to each node return as bf16".to_owned(),
                };
                return Err(Error::new(ErrorKind::Usage, "combine", detail));
            }
            (wire, _) => return Err(Error::new(ErrorKind::Usage, "combine", format!("unknown wire format {wire}"))),
        };
        // SAFETY: the kernel takes `EpCombineArgs`; the caller vouches for the rest.
        unsafe { self.start(combine, stream, pair.grid(blocks, 1), args, early) }
    }

    /// Enqueues a dispatch in the rank layout, or the phases of one that `args` names. Can be captured.
    ///
    /// # Safety
    /// As [`EpKernels::dispatch_expert`]; the region must not be used otherwise until its result is released.
    ///
    /// # Errors
    /// As there.
    pub unsafe fn dispatch_rank(&self, stream: &Stream, args: &EpDispatchArgs, blocks: u32, early: bool) -> Result<()> {
        let phases = EP_ANNOUNCE | EP_SEND | EP_RECEIVE;
        let pair = self.pair("dispatch", &self.rank, &args.common, phases, blocks)?;
        aligned("dispatch", &[("x", args.x | args.x_stride)])?;
        if blocks > EP_RANK_BLOCKS {
            let detail = format!("{blocks} blocks are more than the {EP_RANK_BLOCKS} that the rank layout takes");
            return Err(Error::new(ErrorKind::Usage, "dispatch", detail));
        }
        // SAFETY: the kernel takes `EpDispatchArgs`; the caller vouches for the rest.
        unsafe { self.start(&pair.dispatch, stream, pair.grid(blocks, 0), args, early) }
    }

    /// Enqueues a combine in the rank layout, or the phases of one that `args` names. Can be captured.
    ///
    /// # Safety
    /// As [`EpKernels::combine_expert`].
    ///
    /// # Errors
    /// As there.
    pub unsafe fn combine_rank(&self, stream: &Stream, args: &EpCombineArgs, blocks: u32, early: bool) -> Result<()> {
        let pair = self.pair("combine", &self.rank, &args.common, EP_SEND | EP_RECEIVE, blocks)?;
        if args.wire != EP_WIRE_BF16 {
            let detail = "the rank layout returns rows as bf16: LogFMT-10 and fp8 are the expert layout's";
            return Err(Error::new(ErrorKind::Usage, "combine", detail));
        }
        let out = args.out | args.out_stride | args.bias[0] | args.bias[1];
        aligned("combine", &[("y", args.y | args.y_stride), ("out and bias", out)])?;
        // SAFETY: the kernel takes `EpCombineArgs`; the caller vouches for the rest.
        unsafe { self.start(&pair.combine, stream, pair.grid(blocks, 1), args, early) }
    }

    /// # Safety
    /// As [`EpKernels::dispatch_expert`]; the kernel must take `A`.
    unsafe fn start<A: KernelArgs>(
        &self,
        kernel: &Function,
        stream: &Stream,
        grid: Grid,
        args: &A,
        early: bool,
    ) -> Result<()> {
        let early = early && self.early;
        // SAFETY: the caller guarantees the kernel and its arguments; compiled for it, kernels wait for those before them.
        unsafe { if early { kernel.launch_early(stream, grid, args) } else { kernel.launch(stream, grid, args) } }
    }

    fn pair<'a>(
        &self,
        operation: &str,
        pair: &'a Option<Pair>,
        common: &EpCommon,
        phases: u32,
        blocks: u32,
    ) -> Result<&'a Pair> {
        let wrong = |detail: String| Err(Error::new(ErrorKind::Usage, operation, detail));
        let Some(pair) = pair else { return wrong("the buffer was not made for this layout".into()) };
        if common.phases == 0 || common.phases & !phases != 0 {
            return wrong(format!("{} names no phases of this operation", common.phases));
        }
        if common.tokens > common.max_tokens || common.max_tokens != self.shape.max_tokens {
            return wrong(format!("{} tokens where {} are the most", common.tokens, self.shape.max_tokens));
        }
        if !(1..=self.multiprocessors).contains(&blocks) {
            return wrong(format!("{blocks} blocks are not from 1 to {}, which run at once", self.multiprocessors));
        }
        Ok(pair)
    }
}

fn aligned(operation: &str, places: &[(&str, u64)]) -> Result<()> {
    match places.iter().find(|(_, address)| !address.is_multiple_of(16)) {
        None => Ok(()),
        Some((what, _)) => {
            Err(Error::new(ErrorKind::Usage, operation, format!("rows of {what} are not aligned to 16 bytes")))
        }
    }
}
