//! The operations: checks, order, and what is enqueued in the caller's stream.
#![allow(unsafe_code)]

use std::sync::Arc;

use crossrail_cuda::{Capture, Entered, Stream};
use crossrail_ep::{Config, Layout, Payload};
use crossrail_kernels::ep::{EP_RECEIVE, EpCombineArgs, EpCommon, EpDispatchArgs};
use crossrail_locks::MutexGuard;
use crossrail_types::{Error, ErrorKind, Result};

use crate::buffer::DeviceBuffer;
use crate::completion::Completion;
use crate::counts::Counts;
use crate::handles::{DeviceHandle, layout_of};
use crate::inner::Inner;
use crate::launch::{Args, Launch};
use crate::lease::RegionLease;
use crate::membership::State;
use crate::outstanding::Operation;

/// Whether an operation is enqueued whole. On the GPU, operations of one buffer, halves included, run one after the
/// other: a caller that uses several streams makes each wait for what was enqueued before
/// ([`crate::Completion::wait`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Split {
    /// All of it.
    #[default]
    Whole,
    /// Only the half that sends; [`crate::Pending::finish`] enqueues the half that receives. Other work may run
    /// between.
    Send,
}

/// Host objects of a dispatch in the rank layout, beside its [`EpDispatchArgs`].
#[derive(Clone, Copy, Debug)]
pub struct RankDispatch<'a> {
    /// Memory of the result.
    pub region: &'a RegionLease,
    /// Repeats the routing of an earlier dispatch, on every rank: `topk_idx` and `topk_weights` are not read.
    pub cached: Option<&'a DeviceHandle>,
    /// Whether the host wants to know the counts ([`Enqueued::count`]).
    pub count: bool,
}

/// An operation that was enqueued in a stream.
#[derive(Debug)]
pub struct Enqueued {
    /// Of a dispatch: its new handle, for the combine. Of a combine: the one it was called with.
    pub handle: DeviceHandle,
    /// Completion of what was enqueued.
    pub done: Completion,
    /// Counts that the GPU will report to the host, if they were requested.
    pub count: Option<Counts>,
    /// The second half of a split operation.
    pub pending: Option<Pending>,
}

/// The second half of a split operation, which must be finished in the order of sending. If it is dropped instead, the
/// ranks are out of step, and later calls fail with that reason.
#[derive(Debug)]
pub struct Pending {
    buffer: DeviceBuffer,
    number: u64,
    launch: Launch,
    finished: bool,
}

/// Refuses what a dispatch in a layout refuses of its arguments, also before a buffer enqueues one.
///
/// # Errors
/// `Usage`.
pub fn check_dispatch(config: &Config, layout: Layout, args: &EpDispatchArgs) -> Result<()> {
    let wrong = |text: String| Err(Error::new(ErrorKind::Usage, "dispatch", text));
    check_layout(config, layout, "dispatch")?;
    let (tokens, most) = (args.common.tokens, config.max_tokens);
    if tokens as usize > most {
        return wrong(format!("{tokens} tokens are more than max_tokens_per_rank, {most}"));
    }
    if !matches!(args.idx_bytes, 4 | 8) {
        return wrong(format!("expert ids of {} bytes, not 4 or 8", args.idx_bytes));
    }
    if args.x_fp8 != 0 && config.payload == Payload::Bf16 {
        return wrong("x is fp8 rows with scales, and the buffer's dispatch_dtype is bf16".to_owned());
    }
    Ok(())
}

fn check_layout(config: &Config, layout: Layout, operation: &str) -> Result<()> {
    if config.has(layout) {
        return Ok(());
    }
    let error = Error::new(ErrorKind::Usage, operation, format!("the buffer was not made for the {layout} layout"));
    Err(error.with_hint("name it in layouts"))
}

/// A call that was admitted, holding the state's lock.
struct Call<'a> {
    state: MutexGuard<'a, State>,
    stream: Stream,
    captured: bool,
    /// Makes the GPU's context current once for all driver calls of the operation.
    _entered: Entered<'a>,
}

impl DeviceBuffer {
    /// Enqueues a dispatch in the expert layout in `stream`.
    ///
    /// # Safety
    /// `stream` must be a live stream's handle, or 0 for the default stream. All addresses in `args` must be valid for
    /// what their fields say until [`Enqueued::done`] (of the rest, for a split one), inputs unchanged and outputs not
    /// accessed by others; of a captured one as long as the graph is used.
    ///
    /// # Errors
    /// `Usage` for invalid arguments; `Closed`; errors of the driver; `PeerDead` when an earlier operation lost a rank,
    /// unless the buffer masks lost ranks.
    pub unsafe fn dispatch_expert(&self, args: &EpDispatchArgs, stream: u64, split: Split) -> Result<Enqueued> {
        let inner = &self.0;
        check_dispatch(&inner.config, Layout::Expert, args)?;
        // SAFETY: the caller vouches for the stream.
        let mut call = unsafe { inner.enter(Operation::Dispatch, stream, split)? };
        let handle = inner.new_handle(Layout::Expert, args, &call)?;
        let args = EpDispatchArgs { common: inner.common(&handle, args.common.waits), ..*args };
        self.begin(&mut call, Launch { args: Args::DispatchExpert(args), handle, count: None }, split)
    }

    /// Enqueues a combine in the expert layout in `stream`, with the handle of its dispatch.
    ///
    /// # Safety
    /// As [`DeviceBuffer::dispatch_expert`].
    ///
    /// # Errors
    /// As there; `Usage` for a handle of another buffer.
    pub unsafe fn combine_expert(
        &self,
        args: &EpCombineArgs,
        handle: &DeviceHandle,
        stream: u64,
        split: Split,
    ) -> Result<Enqueued> {
        let topk_weights = if handle.has_weights() { 0 } else { args.topk_weights };
        let args = EpCombineArgs { topk_weights, ..*args };
        // SAFETY: the caller vouches for the stream.
        unsafe { self.combine(Layout::Expert, args, handle, stream, split) }
    }

    /// Enqueues a dispatch in the rank layout in `stream`. Other ranks write into the region from when it starts to
    /// run.
    ///
    /// # Safety
    /// As [`DeviceBuffer::dispatch_expert`]; the region is not read from when this starts to run until it is done.
    ///
    /// # Errors
    /// As there; `Usage` for a region or a handle of another buffer.
    pub unsafe fn dispatch_rank(
        &self,
        args: &EpDispatchArgs,
        of: RankDispatch<'_>,
        stream: u64,
        split: Split,
    ) -> Result<Enqueued> {
        let inner = &self.0;
        let RankDispatch { region, cached, .. } = of;
        check_dispatch(&inner.config, Layout::Rank, args)?;
        inner.check_rank_dispatch(args, region, cached)?;
        // SAFETY: the caller vouches for the stream.
        let mut call = unsafe { inner.enter(Operation::Dispatch, stream, split)? };
        region.before(&call.stream, call.captured)?;
        let handle = match cached {
            Some(handle) => handle.clone(),
            None => inner.new_handle(Layout::Rank, args, &call)?,
        };
        let count = if of.count { inner.results.counts()? } else { None };
        let [count_word, count_host, host_words] = count.as_ref().map(Counts::addresses).unwrap_or_default();
        let args = EpDispatchArgs {
            common: inner.common(&handle, args.common.waits),
            region: region.index,
            cached: cached.is_some().into(),
            count_word,
            count_host,
            host_words,
            ..*args
        };
        let enqueued = self.begin(&mut call, Launch { args: Args::DispatchRank(args), handle, count }, split)?;
        region.is_used_until(&enqueued.done);
        Ok(enqueued)
    }

    /// Enqueues a combine in the rank layout in `stream`, with the handle of its dispatch.
    ///
    /// # Safety
    /// As [`DeviceBuffer::dispatch_expert`].
    ///
    /// # Errors
    /// As there; `Usage` for a handle of another buffer.
    pub unsafe fn combine_rank(
        &self,
        args: &EpCombineArgs,
        handle: &DeviceHandle,
        stream: u64,
        split: Split,
    ) -> Result<Enqueued> {
        // SAFETY: the caller vouches for the stream.
        unsafe { self.combine(Layout::Rank, *args, handle, stream, split) }
    }

    /// # Safety
    /// As [`DeviceBuffer::dispatch_expert`].
    unsafe fn combine(
        &self,
        layout: Layout,
        mut args: EpCombineArgs,
        handle: &DeviceHandle,
        stream: u64,
        split: Split,
    ) -> Result<Enqueued> {
        let inner = &self.0;
        inner.check_handle(handle, layout, "combine")?;
        // SAFETY: the caller vouches for the stream.
        let mut call = unsafe { inner.enter(Operation::Combine, stream, split)? };
        args.common = inner.common(handle, args.common.waits);
        let args = match layout {
            Layout::Expert => Args::CombineExpert(args),
            Layout::Rank => Args::CombineRank(args),
        };
        self.begin(&mut call, Launch { args, handle: handle.clone(), count: None }, split)
    }

    fn begin(&self, call: &mut Call, launch: Launch, split: Split) -> Result<Enqueued> {
        let (all, kind) = (launch.args.phases(), launch.args.kind());
        let phases = if split == Split::Send { all & !EP_RECEIVE } else { all };
        let done = self.0.run(call, &launch, phases)?;
        self.0.membership.agreement().operation_begun();
        self.0.sight.begun(kind, call.state.members());
        if kind == Operation::Dispatch {
            self.0.results.dispatched(&launch.handle);
        }
        let (handle, count) = (launch.handle.clone(), launch.count.clone());
        let pending = (split == Split::Send).then(|| {
            let number = self.0.launches.outstanding().sent(kind);
            Pending { buffer: self.clone(), number, launch, finished: false }
        });
        Ok(Enqueued { handle, done, count, pending })
    }
}

impl Pending {
    /// Enqueues the second half in `stream`, which may differ from the stream of the first half but must wait for it.
    ///
    /// # Safety
    /// As [`DeviceBuffer::dispatch_expert`]; the stream must wait for the first half.
    ///
    /// # Errors
    /// `Usage` if another operation was sent before, and this one is then lost; `Closed`; what the driver reports.
    pub unsafe fn finish(mut self, stream: u64) -> Result<Completion> {
        // SAFETY: the caller vouches for the stream.
        unsafe { self.finish_in(stream) }
    }

    /// [`Pending::finish`] that can be repeated after a failure.
    ///
    /// # Safety
    /// As there.
    ///
    /// # Errors
    /// As there; `Usage` when it was finished already.
    pub unsafe fn finish_in(&mut self, stream: u64) -> Result<Completion> {
        let kind = self.launch.args.kind();
        if self.finished {
            return Err(Error::new(ErrorKind::Usage, kind.name(), "the operation has been finished already"));
        }
        let inner = self.buffer.0.clone();
        // SAFETY: the caller vouches for the stream.
        let mut call = unsafe { inner.open(kind.name(), stream)? };
        inner.launches.outstanding().check_receive(kind, self.number)?;
        let done = inner.run(&mut call, &self.launch, EP_RECEIVE)?;
        inner.launches.outstanding().received(kind);
        self.finished = true;
        Ok(done)
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if !self.finished {
            // Not while a call is being admitted.
            let _state = self.buffer.0.membership.lock();
            self.buffer.0.launches.outstanding().dropped(self.launch.args.kind());
        }
    }
}

impl Inner {
    pub(crate) fn check_handle(&self, handle: &DeviceHandle, layout: Layout, operation: &str) -> Result<()> {
        check_layout(&self.config, layout, operation)?;
        let wrong = |text: &str| Err(Error::new(ErrorKind::Usage, operation, text));
        if handle.0.buffer != self.results.buffer() {
            return wrong("the handle is of another buffer");
        }
        if handle.layout() != layout {
            let text =
                format!("the handle is of a dispatch in the {} layout, not the {layout} layout", handle.layout());
            return wrong(&text);
        }
        Ok(())
    }

    fn check_rank_dispatch(
        &self,
        args: &EpDispatchArgs,
        region: &RegionLease,
        cached: Option<&DeviceHandle>,
    ) -> Result<()> {
        let wrong = |text: String| Err(Error::new(ErrorKind::Usage, "dispatch", text));
        if region.buffer != self.results.buffer() {
            return wrong("the region is of another buffer".to_owned());
        }
        if args.expert_alignment == 0 {
            return wrong("expert_alignment is 0".to_owned());
        }
        let Some(handle) = cached else { return Ok(()) };
        self.check_handle(handle, Layout::Rank, "dispatch")?;
        if handle.tokens() != args.common.tokens {
            return wrong(format!("{} tokens where the handle is of {}", args.common.tokens, handle.tokens()));
        }
        Ok(())
    }

    /// Admits a new operation.
    ///
    /// # Safety
    /// `stream` must be a live stream's handle, or 0.
    unsafe fn enter(&self, kind: Operation, stream: u64, split: Split) -> Result<Call<'_>> {
        // SAFETY: the caller vouches for the stream.
        let mut call = unsafe { self.open(kind.name(), stream)? };
        self.launches.outstanding().check(kind, split == Split::Send)?;
        self.record_departures(&mut call.state);
        self.refuse_losses(&call.state, kind.name())?;
        Ok(call)
    }

    /// # Safety
    /// `stream` must be a live stream's handle, or 0.
    unsafe fn open(&self, operation: &str, stream: u64) -> Result<Call<'_>> {
        let mut state = self.membership.lock();
        state.refuse_closed(operation)?;
        let entered = self.launches.enter()?;
        self.process_losses(&mut state);
        // SAFETY: the caller vouches for the stream.
        let stream = unsafe { self.launches.stream(stream)? };
        let captured = match stream.capture()? {
            Capture::None => false,
            Capture::Active => true,
            Capture::Broken => {
                let text = "the stream's capture is invalid: an operation that cannot be captured has broken it";
                return Err(Error::new(ErrorKind::Usage, operation, text));
            }
        };
        Ok(Call { state, stream, captured, _entered: entered })
    }

    /// Arguments that all operations have, filled in with what only the buffer knows.
    fn common(&self, handle: &DeviceHandle, waits: u64) -> EpCommon {
        EpCommon {
            heap: self.heap.layout(),
            parts: self.shape.handle(layout_of(handle.layout())),
            base: self.heap.base(),
            peers: self.heap.peers(),
            to: self.heap.to(),
            from: self.heap.from(),
            rings: self.heap.rings(),
            handle: handle.0.address,
            faults: self.launches.faults_at(),
            waits,
            limit_ns: u64::try_from(self.config.timeout.as_nanos()).unwrap_or(u64::MAX),
            rank: self.me,
            phases: 0,
            tokens: handle.tokens(),
            max_tokens: self.shape.max_tokens,
        }
    }

    fn new_handle(&self, layout: Layout, args: &EpDispatchArgs, call: &Call) -> Result<DeviceHandle> {
        self.results.handle(layout, args.common.tokens, args.topk_weights != 0, call.captured)
    }

    /// Enqueues these phases.
    fn run(&self, call: &mut Call, launch: &Launch, phases: u32) -> Result<Completion> {
        let _kept = (!call.captured).then(|| self.launches.pause_releases());
        // Outside of graphs the host takes longer than what an early launch gains, and an event stands between
        // operations.
        let (args, blocks) = (launch.args.with(phases), self.launches.blocks());
        self.launches.launch(&call.stream, &args, blocks, call.captured)?;
        if let Some(proxy) = self.proxy.get() {
            proxy.wake(call.captured);
        }
        let done = self.launches.record(&call.stream, call.captured)?;
        launch.handle.is_used_until(&done);
        if let Some(count) = &launch.count {
            count.set_completion(&done);
        }
        if !call.captured {
            self.launches.keep(&done);
        }
        Ok(done)
    }
}

/// Handles, leases and completions move between threads.
const _: fn() = || {
    fn shared<T: Send + Sync>() {}
    shared::<(DeviceBuffer, DeviceHandle, Completion, RegionLease, Arc<Inner>)>();
};
