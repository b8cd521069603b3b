//! The operations: how a call comes into a stream.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use crossrail_cuda::{Capture, Entered, Stream};
use crossrail_ep::Layout;
use crossrail_kernels::ep::{EP_ANNOUNCE, EP_RECEIVE, EP_SEND, EpCombineArgs, EpCommon, EpDispatchArgs};
use crossrail_types::{Error, ErrorKind, Result};
use parking_lot::MutexGuard;

use crate::buffer::{DeviceBuffer, Inner, State};
use crate::done::{Count, Done};
use crate::handles::{DeviceHandle, layout_of};
use crate::operands::{ExpertCombine, ExpertDispatch, InScales, RankCombine, RankDispatch, Split, Tokens};
use crate::order::Kind;
use crate::regions::RegionLease;

/// How long a launch waits for memory that is being freed.
const FREES: Duration = Duration::from_millis(100);

/// An operation that was put into a stream.
#[derive(Debug)]
pub struct Enqueued {
    /// For the combine: of the dispatch, or the one that was given.
    pub handle: DeviceHandle,
    /// Behind what was put in.
    pub done: Done,
    /// What the GPU will tell the host, if that was asked for.
    pub count: Option<Count>,
    /// The rest of an operation that was split.
    pub pending: Option<Pending>,
}

/// What is left of an operation that was split: it must be finished, in the order of sending. When it is dropped
/// instead, the ranks are out of step, and later calls say so.
#[derive(Debug)]
pub struct Pending {
    buffer: DeviceBuffer,
    number: u64,
    launch: Launch,
    finished: bool,
}

/// One of the four kernels, with what it takes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Args {
    DispatchExpert(EpDispatchArgs),
    DispatchRank(EpDispatchArgs),
    CombineExpert(EpCombineArgs),
    CombineRank(EpCombineArgs),
}

impl Args {
    pub(crate) fn kind(&self) -> Kind {
        match self {
            Args::DispatchExpert(_) | Args::DispatchRank(_) => Kind::Dispatch,
            Args::CombineExpert(_) | Args::CombineRank(_) => Kind::Combine,
        }
    }

    /// The phases of all of it.
    pub(crate) fn phases(&self) -> u32 {
        match self {
            Args::DispatchRank(_) => EP_ANNOUNCE | EP_SEND | EP_RECEIVE,
            _ => EP_SEND | EP_RECEIVE,
        }
    }

    /// Those of its phases.
    pub(crate) fn with(mut self, phases: u32) -> Args {
        match &mut self {
            Args::DispatchExpert(args) | Args::DispatchRank(args) => args.common.phases = phases,
            Args::CombineExpert(args) | Args::CombineRank(args) => args.common.phases = phases,
        }
        self
    }
}

/// A call that is about to be put in, or the rest of one.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    pub(crate) args: Args,
    pub(crate) handle: DeviceHandle,
    count: Option<Count>,
}

/// A call that was let in.
struct Call<'a> {
    state: MutexGuard<'a, State>,
    stream: Stream,
    captured: bool,
    /// The GPU's context is current, once for all that is asked of the driver.
    _entered: Entered<'a>,
}

impl DeviceBuffer {
    /// Puts a dispatch in the expert layout into `stream`.
    ///
    /// # Safety
    /// `stream` must be a live stream's handle, or 0 for the default stream. All addresses must be valid for what the
    /// fields say until [`Enqueued::done`] (of the rest, for a split one), inputs unchanged and outputs touched by nobody
    /// else; of a captured one as long as the graph is used.
    ///
    /// # Errors
    /// `Usage` for a call that makes no sense; `Closed`; what the driver says. Ranks that are lost are no error.
    pub unsafe fn dispatch_expert(&self, call: &ExpertDispatch, stream: u64, split: Split) -> Result<Enqueued> {
        let inner = &self.0;
        inner.check_layout(Layout::Expert, "dispatch")?;
        inner.check_tokens(&call.input)?;
        // SAFETY: the caller vouches for the stream.
        let mut let_in = unsafe { inner.enter(Kind::Dispatch, stream, split)? };
        let input = &call.input;
        let handle = inner.new_handle(Layout::Expert, input, &let_in)?;
        let out = &call.out;
        let args = EpDispatchArgs {
            out_x: out.x,
            out_scales: out.scales,
            out_scale_expert: out.scale_expert,
            out_scale_row: out.scale_row,
            out_scale_block: out.scale_block,
            out_counts: out.counts,
            out_ranges: out.ranges,
            out_source: out.source,
            stats: call.stats,
            ..inner.dispatch_args(&handle, input, call.waits)
        };
        let launch = Launch { args: Args::DispatchExpert(args), handle, count: None };
        self.begin(&mut let_in, launch, split)
    }

    /// Puts a combine in the expert layout into `stream`, with the handle of its dispatch.
    ///
    /// # Safety
    /// As [`DeviceBuffer::dispatch_expert`].
    ///
    /// # Errors
    /// As there; `Usage` for a handle of another buffer.
    pub unsafe fn combine_expert(
        &self,
        call: &ExpertCombine,
        handle: &DeviceHandle,
        stream: u64,
        split: Split,
    ) -> Result<Enqueued> {
        let inner = &self.0;
        inner.check_handle(handle, Layout::Expert, "combine")?;
        // SAFETY: the caller vouches for the stream.
        let mut let_in = unsafe { inner.enter(Kind::Combine, stream, split)? };
        let args = EpCombineArgs {
            topk_weights: if handle.has_weights() { 0 } else { call.topk_weights },
            ..inner.combine_args(handle, (call.y, call.y_stride), (call.out, call.out_stride), call.bias, call.waits)
        };
        let launch = Launch { args: Args::CombineExpert(args), handle: handle.clone(), count: None };
        self.begin(&mut let_in, launch, split)
    }

    /// Puts a dispatch in the rank layout into `stream`. Other ranks write into the region from when this runs.
    ///
    /// # Safety
    /// As [`DeviceBuffer::dispatch_expert`]; nobody reads the region from when this runs until it is done.
    ///
    /// # Errors
    /// As there; `Usage` for a region or a handle of another buffer.
    pub unsafe fn dispatch_rank(&self, call: &RankDispatch, stream: u64, split: Split) -> Result<Enqueued> {
        let inner = &self.0;
        inner.check_layout(Layout::Rank, "dispatch")?;
        inner.check_tokens(&call.input)?;
        inner.check_rank_call(call)?;
        // SAFETY: the caller vouches for the stream.
        let mut let_in = unsafe { inner.enter(Kind::Dispatch, stream, split)? };
        call.region.before(&let_in.stream, let_in.captured)?;
        let handle = match call.cached {
            Some(handle) => handle.clone(),
            None => inner.new_handle(Layout::Rank, &call.input, &let_in)?,
        };
        let count = match &inner.counts {
            Some(counts) if call.count => Some(counts.take()?),
            _ => None,
        };
        let [count_word, count_host, said_host] = count.as_ref().map(Count::addresses).unwrap_or_default();
        let args = EpDispatchArgs {
            out_counts: call.counts,
            stats: call.stats,
            out_offsets: call.offsets,
            count_word,
            count_host,
            said_host,
            say: call.say,
            worst_rows: call.worst_rows,
            region: call.region.index,
            alignment: call.alignment,
            cached: call.cached.is_some().into(),
            ..inner.dispatch_args(&handle, &call.input, call.waits)
        };
        let launch = Launch { args: Args::DispatchRank(args), handle, count };
        let enqueued = self.begin(&mut let_in, launch, split)?;
        call.region.is_used_until(&enqueued.done);
        Ok(enqueued)
    }

    /// Puts a combine in the rank layout into `stream`, with the handle of its dispatch.
    ///
    /// # Safety
    /// As [`DeviceBuffer::dispatch_expert`].
    ///
    /// # Errors
    /// As there; `Usage` for a handle of another buffer.
    pub unsafe fn combine_rank(
        &self,
        call: &RankCombine,
        handle: &DeviceHandle,
        stream: u64,
        split: Split,
    ) -> Result<Enqueued> {
        let inner = &self.0;
        inner.check_handle(handle, Layout::Rank, "combine")?;
        // SAFETY: the caller vouches for the stream.
        let mut let_in = unsafe { inner.enter(Kind::Combine, stream, split)? };
        let args = EpCombineArgs {
            y_rows: call.y_rows,
            y_weights: call.y_weights,
            out_weights: call.out_weights,
            ..inner.combine_args(handle, (call.y, call.y_stride), (call.out, call.out_stride), call.bias, call.waits)
        };
        let launch = Launch { args: Args::CombineRank(args), handle: handle.clone(), count: None };
        self.begin(&mut let_in, launch, split)
    }

    fn begin(&self, call: &mut Call, launch: Launch, split: Split) -> Result<Enqueued> {
        let (all, kind) = (launch.args.phases(), launch.args.kind());
        let phases = if split == Split::Send { all & !EP_RECEIVE } else { all };
        let done = self.0.run(call, &launch, phases)?;
        let (handle, count) = (launch.handle.clone(), launch.count.clone());
        let pending = (split == Split::Send).then(|| {
            let number = call.state.order.sent(kind);
            Pending { buffer: self.clone(), number, launch, finished: false }
        });
        Ok(Enqueued { handle, done, count, pending })
    }
}

impl Pending {
    /// Puts the rest of the operation into `stream`, which need not be the one that it was sent in, but comes behind it.
    ///
    /// # Safety
    /// As [`DeviceBuffer::dispatch_expert`]; the stream must wait for what was sent.
    ///
    /// # Errors
    /// `Usage` when another one was sent before, with the operation in `self` lost; `Closed`; what the driver says.
    pub unsafe fn finish(mut self, stream: u64) -> Result<Done> {
        // SAFETY: the caller vouches for the stream.
        unsafe { self.finish_in(stream) }
    }

    /// [`Pending::finish`] that leaves it for another try when it fails.
    ///
    /// # Safety
    /// As there.
    ///
    /// # Errors
    /// As there; `Usage` when it was finished already.
    pub unsafe fn finish_in(&mut self, stream: u64) -> Result<Done> {
        let kind = self.launch.args.kind();
        if self.finished {
            return Err(Error::new(ErrorKind::Usage, kind.name(), "the operation was finished already"));
        }
        let inner = self.buffer.0.clone();
        // SAFETY: the caller vouches for the stream.
        let mut call = unsafe { inner.open(kind.name(), stream)? };
        call.state.order.check_receive(kind, self.number)?;
        let done = inner.run(&mut call, &self.launch, EP_RECEIVE)?;
        call.state.order.received(kind);
        self.finished = true;
        Ok(done)
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if !self.finished {
            self.buffer.0.state.lock().order.drop(self.launch.args.kind());
        }
    }
}

impl Inner {
    pub(crate) fn check_layout(&self, layout: Layout, operation: &str) -> Result<()> {
        if self.config.has(layout) {
            return Ok(());
        }
        let error = Error::new(ErrorKind::Usage, operation, format!("the buffer was not made for the {layout} layout"));
        Err(error.with_hint("name it in layouts"))
    }

    pub(crate) fn check_handle(&self, handle: &DeviceHandle, layout: Layout, operation: &str) -> Result<()> {
        self.check_layout(layout, operation)?;
        let wrong = |text: &str| Err(Error::new(ErrorKind::Usage, operation, text));
        if handle.0.buffer != self.id {
            return wrong("the handle is of another buffer");
        }
        if handle.layout() != layout {
            let text =
                format!("the handle is of a dispatch in the {} layout, not the {layout} layout", handle.layout());
            return wrong(&text);
        }
        Ok(())
    }

    fn check_tokens(&self, input: &Tokens) -> Result<()> {
        let wrong = |text: String| Err(Error::new(ErrorKind::Usage, "dispatch", text));
        let most = self.shape.max_tokens;
        if input.tokens > most {
            return wrong(format!("{} tokens are more than max_tokens_per_rank, {most}", input.tokens));
        }
        if !matches!(input.idx_bytes, 4 | 8) {
            return wrong(format!("experts' numbers of {} bytes, not 4 or 8", input.idx_bytes));
        }
        if input.scales.is_some() && self.config.payload == crossrail_ep::Payload::Bf16 {
            return wrong("x is fp8, and the buffer's dispatch_dtype is bf16".to_owned());
        }
        Ok(())
    }

    fn check_rank_call(&self, call: &RankDispatch) -> Result<()> {
        let wrong = |text: String| Err(Error::new(ErrorKind::Usage, "dispatch", text));
        if call.region.buffer != self.id {
            return wrong("the region is of another buffer".to_owned());
        }
        if call.alignment == 0 {
            return wrong("expert_alignment is 0".to_owned());
        }
        let Some(handle) = call.cached else { return Ok(()) };
        self.check_handle(handle, Layout::Rank, "dispatch")?;
        if handle.tokens() != call.input.tokens {
            return wrong(format!("{} tokens where the handle is of {}", call.input.tokens, handle.tokens()));
        }
        Ok(())
    }

    /// Lets a new operation in.
    ///
    /// # Safety
    /// `stream` must be a live stream's handle, or 0.
    unsafe fn enter(&self, kind: Kind, stream: u64, split: Split) -> Result<Call<'_>> {
        // SAFETY: the caller vouches for the stream.
        let mut call = unsafe { self.open(kind.name(), stream)? };
        call.state.order.check(kind, split == Split::Send)?;
        self.miss(&mut call.state);
        Ok(call)
    }

    /// # Safety
    /// `stream` must be a live stream's handle, or 0.
    unsafe fn open(&self, operation: &str, stream: u64) -> Result<Call<'_>> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(Error::new(ErrorKind::Closed, operation, "the buffer was destroyed"));
        }
        let entered = self.cuda.enter()?;
        self.drain(&mut state);
        // SAFETY: the caller vouches for the stream.
        let stream = unsafe { Stream::borrow(&self.cuda, stream)? };
        let captured = match stream.capture()? {
            Capture::None => false,
            Capture::Active => true,
            Capture::Broken => {
                let text = "the stream is being captured, and something that cannot be has broken the capture";
                return Err(Error::new(ErrorKind::Usage, operation, text));
            }
        };
        if captured && state.has_far() {
            let text = "the host carries rows to ranks that this GPU does not reach, and cannot in a graph";
            let error = Error::new(ErrorKind::Usage, operation, text);
            return Err(error.with_hint("links() tells which ranks are reached by the network"));
        }
        Ok(Call { state, stream, captured, _entered: entered })
    }

    fn new_handle(&self, layout: Layout, input: &Tokens, call: &Call) -> Result<DeviceHandle> {
        let pool = self.handles[usize::from(layout == Layout::Rank)].as_ref();
        let none = || Error::new(ErrorKind::Usage, "dispatch", format!("the buffer has no {layout} layout"));
        let what = (input.tokens, input.topk_weights != 0);
        DeviceHandle::new(pool.ok_or_else(none)?, self.id, layout, what, &call.stream, call.captured)
    }

    fn common(&self, handle: &DeviceHandle, waits: u64) -> EpCommon {
        EpCommon {
            heap: self.heap.parts,
            parts: self.shape.handle(layout_of(handle.layout())),
            base: self.heap.base(),
            peers: self.heap.peers(),
            handle: handle.0.address,
            faults: self.faults_at,
            waits,
            limit_ns: u64::try_from(self.config.timeout.as_nanos()).unwrap_or(u64::MAX),
            rank: self.me,
            phases: 0,
            tokens: handle.tokens(),
            max_tokens: self.shape.max_tokens,
        }
    }

    fn dispatch_args(&self, handle: &DeviceHandle, input: &Tokens, waits: u64) -> EpDispatchArgs {
        let scales = input.scales.unwrap_or(InScales { address: 0, row: 0, block: 0 });
        EpDispatchArgs {
            common: self.common(handle, waits),
            x: input.x,
            x_stride: input.x_stride,
            in_scales: scales.address,
            in_scale_row: scales.row,
            in_scale_block: scales.block,
            topk_idx: input.topk_idx,
            topk_weights: input.topk_weights,
            out_x: 0,
            out_scales: 0,
            out_scale_expert: 0,
            out_scale_row: 0,
            out_scale_block: 0,
            out_counts: 0,
            out_ranges: 0,
            out_source: 0,
            stats: 0,
            out_offsets: 0,
            count_word: 0,
            count_host: 0,
            said_host: 0,
            say: 0,
            reserved: 0,
            worst_rows: 0,
            marks: 0,
            region: 0,
            alignment: 1,
            cached: 0,
            x_fp8: input.scales.is_some().into(),
            idx_bytes: input.idx_bytes,
            queue: 0,
        }
    }

    fn combine_args(
        &self,
        handle: &DeviceHandle,
        y: (u64, u64),
        out: (u64, u64),
        bias: [u64; 2],
        waits: u64,
    ) -> EpCombineArgs {
        EpCombineArgs {
            common: self.common(handle, waits),
            y: y.0,
            y_stride: y.1,
            topk_weights: 0,
            y_weights: 0,
            out_weights: 0,
            bias0: bias[0],
            bias1: bias[1],
            out: out.0,
            out_stride: out.1,
            marks: 0,
            y_rows: 0,
            senders: 0,
            queue: 0,
        }
    }

    /// Puts these phases in, and carries what is for ranks out of reach.
    fn run(&self, call: &mut Call, launch: &Launch, phases: u32) -> Result<Done> {
        // From the launch to `recent` nothing is freed: the driver would wait for the kernel, and other ranks of this
        // process could not launch theirs, which it waits for.
        let _kept = (!call.captured).then(|| self.cuda.pause_releases(FREES));
        if call.state.has_far() {
            self.run_far(&mut call.state, &call.stream, launch, phases)?;
        } else {
            self.launch(&call.stream, &launch.args.with(phases), self.blocks)?;
        }
        let done = self.events.record(&call.stream, call.captured)?;
        launch.handle.is_used_until(&done);
        if let Some(count) = &launch.count {
            count.is_told_by(&done);
        }
        if !call.captured {
            self.recent.push(&done);
        }
        Ok(done)
    }

    pub(crate) fn launch(&self, stream: &Stream, args: &Args, blocks: u32) -> Result<()> {
        // SAFETY: heaps, table, ring and handle are ours, laid out for this shape, and kept until kernels are done; the
        // order of operations was checked; callers vouch for their own addresses.
        unsafe {
            match args {
                Args::DispatchExpert(args) => self.kernels.dispatch_expert(stream, args, blocks),
                Args::DispatchRank(args) => self.kernels.dispatch_rank(stream, args, blocks),
                Args::CombineExpert(args) => self.kernels.combine_expert(stream, args, blocks),
                Args::CombineRank(args) => self.kernels.combine_rank(stream, args, blocks),
            }
        }
    }
}

/// The buffer stays while operations of it may be finished.
const _: fn() = || {
    fn shared<T: Send + Sync>() {}
    shared::<(DeviceBuffer, DeviceHandle, Done, RegionLease, Arc<Inner>)>();
};
