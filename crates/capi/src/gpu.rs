//! Dispatch and combine of an expert buffer in GPU memory: operations that are enqueued in the caller's stream.

use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crossrail_ep_cuda as ep;
use crossrail_ep_host::{Layout, Payload};
use crossrail_locks::Mutex;
use crossrail_types::{Error, ErrorKind, Result};

use crate::abi::{self, BY_EXPERT, COUNTS, IDS_32, OK, PENDING, SEND_ONLY, read, write};
use crate::experts::{self, Buffer, Experts};
use crate::failure::usage;
use crate::gpu_args::{Checked, Combine, Dispatch, Tokens};
use crate::guard::{self, Object, place, timeout};

/// A handle.
pub(crate) struct Enqueued {
    buffer: Arc<Buffer>,
    operation: &'static str,
    handle: ep::DeviceHandle,
    count: Option<ep::Counts>,
    rest: Mutex<Rest>,
    stream: u64,
    region: Option<Region>,
    /// Rank layout: rows of the result; 0: not known on the host.
    rows: AtomicU64,
    /// The caller's arrays of a dispatch.
    given: abi::Delivered,
}

// SAFETY: addresses among them are only handed back.
unsafe impl Send for Enqueued {}
// SAFETY: as above.
unsafe impl Sync for Enqueued {}

/// Memory of a result in the rank layout, and the streams that use it.
struct Region {
    lease: ep::RegionLease,
    users: Mutex<Vec<u64>>,
}

impl Drop for Region {
    fn drop(&mut self) {
        for stream in std::mem::take(self.users.get_mut()) {
            // SAFETY: the header requires that streams outlive this. Without a driver nothing uses the region.
            let _ = unsafe { self.lease.free_after(stream) };
        }
    }
}

/// The half that is not enqueued yet, and the completion of what is.
struct Rest {
    pending: Option<ep::Pending>,
    done: ep::Completion,
}

impl Enqueued {
    /// Enqueues the receiving half.
    ///
    /// # Safety
    /// `stream` is a live stream's handle, or 0.
    unsafe fn receive(&self, stream: u64) -> Result<()> {
        let mut rest = self.rest.lock();
        let Some(pending) = rest.pending.as_mut() else {
            return Err(Error::new(
                ErrorKind::Usage,
                self.operation,
                "no half of the operation is left to be received",
            ));
        };
        // SAFETY: by the contract; the addresses are those of the beginning.
        rest.done = unsafe { pending.finish_in(stream)? };
        rest.pending = None;
        Ok(())
    }

    fn use_in(&self, stream: u64) {
        if let Some(region) = &self.region {
            let mut users = region.users.lock();
            if !users.contains(&stream) {
                users.push(stream);
            }
        }
    }
}

impl Drop for Enqueued {
    fn drop(&mut self) {
        if self.rest.get_mut().pending.is_some() {
            // SAFETY: the stream of the sending half. The other ranks wait for it; later calls report a failure.
            let _ = unsafe { self.receive(self.stream) };
        }
    }
}

impl Object for Enqueued {
    type Owner = Buffer;

    fn owner(&self) -> &Buffer {
        &self.buffer
    }

    fn check(&self, operation: &str) -> Result<()> {
        self.buffer.origin.check(operation)
    }
}

impl Enqueued {
    /// Enqueues a dispatch.
    ///
    /// # Safety
    /// As `xrail_gpu_dispatch` in the header.
    pub(crate) unsafe fn dispatch(buffer: &Arc<Buffer>, of: &Dispatch, stream: u64) -> Checked<Enqueued> {
        const OPERATION: &str = "dispatch";
        let native = buffer.gpu(OPERATION)?;
        if of.layout == Layout::Expert {
            // SAFETY: by the contract.
            let enqueued = unsafe { native.dispatch_expert(&of.args, stream, of.split)? };
            return Ok(Enqueued::of(buffer, OPERATION, enqueued, (stream, None, 0), of.given));
        }
        let _entered = native.enter()?;
        // SAFETY: by the contract.
        let lease = unsafe { native.take_region_for(stream)? };
        if of.count && lease.is_for_graph() {
            return Err(usage(OPERATION, "XRAIL_COUNTS while a graph is captured: give max_rows"));
        }
        let rank = ep::RankDispatch { region: &lease, cached: of.cached.as_ref(), count: of.count };
        // SAFETY: by the contract.
        let enqueued = unsafe { native.dispatch_rank(&of.args, rank, stream, of.split)? };
        let region = Region { lease, users: Mutex::default() };
        Ok(Enqueued::of(buffer, OPERATION, enqueued, (stream, Some(region), of.rows), of.given))
    }

    /// Enqueues the combine of this dispatch.
    ///
    /// # Safety
    /// As `xrail_gpu_combine` in the header.
    pub(crate) unsafe fn combine(&self, buffer: &Arc<Buffer>, of: &Combine, stream: u64) -> Checked<Enqueued> {
        const OPERATION: &str = "combine";
        let native = buffer.gpu(OPERATION)?;
        // SAFETY: by the contract.
        let enqueued = unsafe {
            match self.handle.layout() {
                Layout::Expert => native.combine_expert(&of.args, &self.handle, stream, of.split)?,
                Layout::Rank => native.combine_rank(&of.args, &self.handle, stream, of.split)?,
            }
        };
        Ok(Enqueued::of(buffer, OPERATION, enqueued, (stream, None, 0), abi::zeroed()))
    }

    fn of(
        buffer: &Arc<Buffer>,
        operation: &'static str,
        enqueued: ep::Enqueued,
        (stream, region, rows): (u64, Option<Region>, u64),
        given: abi::Delivered,
    ) -> Enqueued {
        let ep::Enqueued { handle, done, count, pending } = enqueued;
        let made = Enqueued {
            buffer: Arc::clone(buffer),
            operation,
            handle,
            count,
            rest: Mutex::new(Rest { pending, done }),
            stream,
            region,
            rows: AtomicU64::new(rows),
            given,
        };
        made.use_in(stream);
        made
    }

    /// Layout and tokens of the dispatch, and the rows of its result; 0: not known on the host.
    pub(crate) fn shape(&self) -> (Layout, u32, u64) {
        (self.handle.layout(), self.handle.tokens(), self.rows.load(Ordering::Relaxed))
    }

    /// The dispatch whose routing is to be repeated, and its rows.
    ///
    /// # Safety
    /// As the header states of `repeated`.
    pub(crate) unsafe fn repeated(given: &abi::GpuDispatchOptions) -> Option<(ep::DeviceHandle, u64)> {
        // SAFETY: by the contract.
        let before = unsafe { given.repeated.cast::<Enqueued>().as_ref() }?;
        Some((before.handle.clone(), before.rows.load(Ordering::Relaxed)))
    }

    pub(crate) fn into_handle(self) -> *mut Enqueued {
        Box::into_raw(Box::new(self))
    }
}

/// Enqueues a dispatch.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_gpu_dispatch(
    experts: *mut Experts,
    x: *const c_void,
    topk_idx: *const c_void,
    topk_weights: *const f32,
    tokens: usize,
    options: *const abi::GpuDispatchOptions,
    out: *mut *mut Enqueued,
) -> i32 {
    const OPERATION: &str = "dispatch";
    // SAFETY: by the contract.
    unsafe {
        experts::with(OPERATION, experts, |buffer| {
            let (out, config) = (place(OPERATION, out)?, buffer.gpu(OPERATION)?.config());
            let given = read(OPERATION, options, SEND_ONLY | COUNTS | IDS_32)?;
            let tokens = Tokens { x, topk_idx, topk_weights, count: tokens };
            let dispatch = Dispatch::of(config, &tokens, &given, Enqueued::repeated(&given))?;
            out.set(Enqueued::dispatch(buffer, &dispatch, given.stream as u64)?.into_handle());
            Ok(OK)
        })
    }
}

/// Enqueues a combine.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_gpu_combine(
    experts: *mut Experts,
    dispatch: *const Enqueued,
    y: *const c_void,
    options: *const abi::GpuCombineOptions,
    sums: *mut c_void,
    out: *mut *mut Enqueued,
) -> i32 {
    const OPERATION: &str = "combine";
    // SAFETY: by the contract.
    unsafe {
        experts::with(OPERATION, experts, |buffer| {
            let (out, config) = (place(OPERATION, out)?, buffer.gpu(OPERATION)?.config());
            let given = read(OPERATION, options, SEND_ONLY)?;
            let before = dispatch.as_ref().ok_or_else(|| usage(OPERATION, "the dispatch is NULL"))?;
            let combine = Combine::of(config, before.shape(), y, &given, sums)?;
            out.set(before.combine(buffer, &combine, given.stream as u64)?.into_handle());
            Ok(OK)
        })
    }
}

/// Enqueues the receiving half.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_enqueued_receive(enqueued: *mut Enqueued, stream: *mut c_void) -> i32 {
    const OPERATION: &str = "enqueued_receive";
    // SAFETY: by the contract.
    unsafe {
        guard::with(OPERATION, enqueued, |enqueued| {
            enqueued.receive(stream as u64)?;
            enqueued.use_in(stream as u64);
            Ok(OK)
        })
    }
}

/// Waits on the host for the number of rows.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_enqueued_rows(
    enqueued: *mut Enqueued,
    timeout_us: i64,
    rows: *mut u64,
    counts: *mut i32,
    count: usize,
) -> i32 {
    const OPERATION: &str = "enqueued_rows";
    // SAFETY: by the contract.
    unsafe {
        guard::with(OPERATION, enqueued, |enqueued| {
            let (out, limit) = (place(OPERATION, rows)?, timeout(OPERATION, timeout_us)?);
            let experts = enqueued.given.experts as usize;
            if !counts.is_null() && count != experts {
                return Err(usage(OPERATION, format!("room for {count} counts, where they are {experts}")));
            }
            let Some(asked) = &enqueued.count else {
                return Err(usage(OPERATION, "the dispatch was enqueued without XRAIL_COUNTS"));
            };
            let limit = limit.unwrap_or(enqueued.buffer.timeout);
            let Some((rows, listed)) = enqueued.buffer.waits.within(|| asked.wait(limit))? else { return Ok(PENDING) };
            enqueued.rows.store(rows.into(), Ordering::Relaxed);
            out.set(rows.into());
            if !counts.is_null() {
                std::ptr::copy_nonoverlapping(listed.as_ptr(), counts, experts.min(listed.len()));
            }
            Ok(OK)
        })
    }
}

/// Waits on the host until the operation is done.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_enqueued_wait(enqueued: *mut Enqueued, timeout_us: i64) -> i32 {
    const OPERATION: &str = "enqueued_wait";
    // SAFETY: by the contract.
    unsafe {
        guard::with(OPERATION, enqueued, |enqueued| {
            let limit = timeout(OPERATION, timeout_us)?.unwrap_or(enqueued.buffer.timeout);
            let done = enqueued.rest.lock().done.clone();
            let over = enqueued.buffer.waits.within(|| done.synchronize(limit))?;
            Ok(if over.is_some() { OK } else { PENDING })
        })
    }
}

/// Makes a stream wait for the operation.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_enqueued_before(enqueued: *mut Enqueued, stream: *mut c_void) -> i32 {
    const OPERATION: &str = "enqueued_before";
    // SAFETY: by the contract.
    unsafe {
        guard::with(OPERATION, enqueued, |enqueued| {
            let done = enqueued.rest.lock().done.clone();
            done.wait(stream as u64)?;
            enqueued.use_in(stream as u64);
            Ok(OK)
        })
    }
}

/// Addresses of a dispatch's result.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_enqueued_delivered(enqueued: *mut Enqueued, out: *mut abi::Delivered) -> i32 {
    const OPERATION: &str = "enqueued_delivered";
    // SAFETY: by the contract.
    unsafe {
        guard::with(OPERATION, enqueued, |enqueued| {
            place(OPERATION, out)?;
            let mut told = enqueued.given;
            if told.layout == 0 {
                return Err(usage(OPERATION, "the operation is a combine, not a dispatch"));
            }
            let config = enqueued.buffer.gpu(OPERATION)?.config();
            if let Some(Region { lease, .. }) = &enqueued.region {
                let view = lease.view();
                told.places = match enqueued.rows.load(Ordering::Relaxed) {
                    0 => view.most_rows as usize,
                    rows => rows as usize,
                };
                (told.rows, told.scales) = (view.rows as *mut c_void, null_mut());
                if config.payload != Payload::Bf16 {
                    told.scales = view.scales as *mut c_void;
                }
                told.topk_idx = view.topk_idx as *const i64;
                told.topk_weights = if told.topk_weights.is_null() { null() } else { view.topk_weights as *const f32 };
            } else {
                told.topk_weights = null();
            }
            let all = if told.layout == BY_EXPERT { config.local_experts() * told.places } else { told.places };
            told.rows_size = all * config.payload.row_bytes(config.hidden);
            told.scales_size = all * config.payload.scale_bytes(config.hidden);
            write(OPERATION, out, &told)?;
            Ok(OK)
        })
    }
}

/// Gives the handle back.
///
/// # Safety
/// `enqueued` is null or an operation, which is not used after this.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_enqueued_free(enqueued: *mut Enqueued) {
    // SAFETY: by the contract.
    unsafe { guard::free("enqueued_free", enqueued, |enqueued| enqueued.buffer.origin) };
}
