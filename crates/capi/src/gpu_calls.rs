//! Prepared operations of an expert buffer in GPU memory: arguments are checked once, and launched as often as wanted.

use std::ffi::c_void;
use std::sync::Arc;

use crossrail_ep_cuda as ep;
use crossrail_ep_host::Layout;
use crossrail_types::Result;

use crate::abi::{self, COUNTS, IDS_32, OK, SEND_ONLY, read};
use crate::experts::{self, Buffer, Experts};
use crate::failure::usage;
use crate::gpu::Enqueued;
use crate::gpu_args::{Checked, Combine, Dispatch, Tokens};
use crate::guard::{self, Object, place};

/// A handle.
pub(crate) struct GpuCall {
    buffer: Arc<Buffer>,
    kind: Kind,
}

#[expect(clippy::large_enum_variant, reason = "each is in a box of its own")]
enum Kind {
    Dispatch(Dispatch),
    /// With layout and tokens of its dispatches.
    Combine(Combine, (Layout, u32)),
}

// SAFETY: addresses among them are only handed on.
unsafe impl Send for GpuCall {}
// SAFETY: as above.
unsafe impl Sync for GpuCall {}

impl Object for GpuCall {
    type Owner = Buffer;

    fn owner(&self) -> &Buffer {
        &self.buffer
    }

    fn check(&self, operation: &str) -> Result<()> {
        self.buffer.origin.check(operation)
    }
}

impl GpuCall {
    fn handle(buffer: &Arc<Buffer>, kind: Kind) -> *mut GpuCall {
        Box::into_raw(Box::new(GpuCall { buffer: Arc::clone(buffer), kind }))
    }

    /// # Safety
    /// As the header states.
    unsafe fn launch(&self, dispatch: Option<&Enqueued>, stream: u64) -> Checked<Enqueued> {
        const OPERATION: &str = "launch";
        match (&self.kind, dispatch) {
            // SAFETY: by the contract.
            (Kind::Dispatch(of), None) => unsafe { Enqueued::dispatch(&self.buffer, of, stream) },
            (Kind::Dispatch(_), Some(_)) => Err(usage(OPERATION, "a dispatch was given to the call of a dispatch")),
            (Kind::Combine(..), None) => Err(usage(OPERATION, "the dispatch is NULL")),
            (Kind::Combine(of, prepared), Some(before)) => {
                let (layout, tokens, rows) = before.shape();
                if (layout, tokens) != *prepared {
                    let (by, count) = prepared;
                    let of = format!("the combine is prepared for a dispatch of {count} tokens in the {by} layout");
                    return Err(usage(OPERATION, format!("{of}, not one of {tokens} in the {layout} layout")));
                }
                let mut args = of.args;
                if layout == Layout::Rank {
                    args.y_rows = rows;
                }
                // SAFETY: by the contract.
                unsafe { before.combine(&self.buffer, &Combine { args, split: of.split }, stream) }
            }
        }
    }
}

/// Prepares a dispatch.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_gpu_prepare_dispatch(
    experts: *mut Experts,
    x: *const c_void,
    topk_idx: *const c_void,
    topk_weights: *const f32,
    tokens: usize,
    options: *const abi::GpuDispatchOptions,
    out: *mut *mut GpuCall,
) -> i32 {
    const OPERATION: &str = "dispatch";
    // SAFETY: by the contract.
    unsafe {
        experts::with(OPERATION, experts, |buffer| {
            let (out, native) = (place(OPERATION, out)?, buffer.gpu(OPERATION)?);
            let given = read(OPERATION, options, SEND_ONLY | COUNTS | IDS_32)?;
            if !given.stream.is_null() {
                return Err(usage(OPERATION, "the stream is given to xrail_gpu_launch"));
            }
            let tokens = Tokens { x, topk_idx, topk_weights, count: tokens };
            let dispatch = Dispatch::of(native.config(), &tokens, &given, Enqueued::repeated(&given))?;
            ep::check_dispatch(native.config(), dispatch.layout, &dispatch.args)?;
            out.set(GpuCall::handle(buffer, Kind::Dispatch(dispatch)));
            Ok(OK)
        })
    }
}

/// Prepares the combine of a prepared dispatch.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_gpu_prepare_combine(
    dispatch: *const GpuCall,
    y: *const c_void,
    options: *const abi::GpuCombineOptions,
    sums: *mut c_void,
    out: *mut *mut GpuCall,
) -> i32 {
    const OPERATION: &str = "combine";
    // SAFETY: by the contract.
    unsafe {
        guard::with(OPERATION, dispatch, |call| {
            let (out, config) = (place(OPERATION, out)?, call.buffer.gpu(OPERATION)?.config());
            let given = read(OPERATION, options, SEND_ONLY)?;
            if !given.stream.is_null() {
                return Err(usage(OPERATION, "the stream is given to xrail_gpu_launch"));
            }
            let Kind::Dispatch(before) = &call.kind else {
                return Err(usage(OPERATION, "the call is a combine, not a dispatch"));
            };
            let of = (before.layout, before.args.common.tokens);
            let combine = Combine::of(config, (of.0, of.1, before.rows), y, &given, sums)?;
            out.set(GpuCall::handle(&call.buffer, Kind::Combine(combine, of)));
            Ok(OK)
        })
    }
}

/// Enqueues a prepared operation.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_gpu_launch(
    call: *mut GpuCall,
    dispatch: *const Enqueued,
    stream: *mut c_void,
    out: *mut *mut Enqueued,
) -> i32 {
    const OPERATION: &str = "launch";
    // SAFETY: by the contract.
    unsafe {
        guard::with(OPERATION, call, |call| {
            let out = place(OPERATION, out)?;
            out.set(call.launch(dispatch.as_ref(), stream as u64)?.into_handle());
            Ok(OK)
        })
    }
}

/// Gives the handle back.
///
/// # Safety
/// `call` is null or a prepared operation, which is not used after this.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_gpu_call_free(call: *mut GpuCall) {
    // SAFETY: by the contract.
    unsafe { guard::free("gpu_call_free", call, |call| call.buffer.origin) };
}
