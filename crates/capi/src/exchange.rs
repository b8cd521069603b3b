//! Exchanges of an expert buffer: a dispatch, a combine or a barrier in flight, and how it ended.

use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crossrail_ep_host as ep;
use crossrail_ep_host::{Input, Tensor, TensorMut};
use crossrail_locks::{Apart, Mutex};
use crossrail_types::{Error, ErrorKind, Result};

use crate::abi::{self, BY_EXPERT, BY_RANK, OK, PENDING, XrailError, read, write};
use crate::experts::{self, Buffer, Experts, Native, dtype_of, layout_of};
use crate::failure::{Failure, Kept, Outcome, busy, usage};
use crate::guard::{self, Object, place, slice, timeout};
use crate::output;

type Checked<T> = std::result::Result<T, Box<Failure>>;

/// A handle.
pub(crate) struct Exchange {
    buffer: Arc<Buffer>,
    operation: &'static str,
    /// None once it is over.
    running: Mutex<Option<Running>>,
    over: OnceLock<Checked<Over>>,
    /// The failure as C reads it, once a caller has asked for it.
    error: OnceLock<Box<Kept>>,
}

enum Running {
    Dispatch(ep::Pending<ep::Dispatched>),
    Combine(ep::Pending<ep::Combined>),
    Sync(ep::Pending<()>),
    /// A barrier of GPUs, which blocks its thread.
    Apart(Apart<()>),
}

enum Over {
    Dispatch(Box<Received>),
    Combine(ep::Combined),
    Sync,
}

/// A dispatch's result, and the numbers of its handle as C reads them.
struct Received {
    native: ep::Dispatched,
    offsets: Vec<i64>,
    topk_idx: Vec<i64>,
    topk_weights: Vec<f32>,
}

impl Received {
    fn new(native: ep::Dispatched) -> Received {
        let handle = &native.handle;
        let (offsets, topk_idx, topk_weights) = match handle.layout() {
            ep::Layout::Expert => Default::default(),
            ep::Layout::Rank => {
                let weights = if handle.has_weights() { handle.topk_weights() } else { Vec::new() };
                (handle.offsets(), handle.topk_idx(), weights)
            }
        };
        Received { offsets, topk_idx, topk_weights, native }
    }
}

impl Running {
    fn finish_within(&mut self, limit: Duration) -> Result<Option<Over>> {
        Ok(match self {
            Running::Dispatch(one) => one.finish_within(limit)?.map(|all| Over::Dispatch(Box::new(Received::new(all)))),
            Running::Combine(one) => one.finish_within(limit)?.map(Over::Combine),
            Running::Sync(one) => one.finish_within(limit)?.map(|()| Over::Sync),
            Running::Apart(one) => match one.wait(Some(limit)) {
                Ok(ended) => ended.map(|()| Some(Over::Sync))?,
                Err(_) => None, // not by then
            },
        })
    }
}

impl Exchange {
    fn handle(buffer: &Arc<Buffer>, operation: &'static str, running: Running) -> *mut Exchange {
        Box::into_raw(Box::new(Exchange {
            buffer: Arc::clone(buffer),
            operation,
            running: Mutex::new(Some(running)),
            over: OnceLock::new(),
            error: OnceLock::new(),
        }))
    }

    /// Drives it for at most `limit`; whether it is over.
    fn advance(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        // Another thread that drives it has the lock until it is over, or that thread's limit has passed.
        let Some(mut running) = self.running.try_lock_until(until) else { return self.over.get().is_some() };
        let Some(one) = running.as_mut() else { return true };
        let over = match one.finish_within(until.saturating_duration_since(Instant::now())) {
            Ok(None) => return false,
            Ok(Some(over)) => Ok(over),
            Err(error) => Err(error.into()),
        };
        *running = None;
        let _ = self.over.set(over);
        true
    }

    /// True if it is over, in the process that has begun it.
    fn is_over_here(&self) -> bool {
        self.buffer.origin.is_here() && self.over.get().is_some()
    }

    /// The outcome.
    fn outcome(&self) -> Checked<&Over> {
        match self.over.get() {
            None => Err(busy(self.operation, "the exchange runs", "wait for its outcome")),
            Some(Ok(over)) => Ok(over),
            Some(Err(failure)) => {
                self.error.get_or_init(|| Kept::new(failure));
                Err(failure.clone())
            }
        }
    }

    /// Waits for the outcome.
    ///
    /// # Safety
    /// As the header states for `receipt`.
    unsafe fn wait(&self, operation: &str, timeout_us: i64, receipt: *mut abi::ExchangeReceipt) -> Outcome {
        let limit = timeout(operation, timeout_us)?.unwrap_or(self.buffer.timeout);
        // SAFETY: by the contract. A receipt that cannot be written is refused before the wait.
        unsafe { abi::check_size(operation, receipt) }?;
        let running = || Error::new(ErrorKind::Timeout, operation, format!("the {} continues", self.operation));
        let over = self.buffer.waits.within(|| self.advance(limit).then_some(()).ok_or_else(running))?;
        if over.is_none() {
            return Ok(PENDING);
        }
        let told = receipt_of(self.outcome()?);
        // SAFETY: by the contract.
        unsafe { write(operation, receipt, &told) }?;
        Ok(OK)
    }

    fn missing(&self) -> Checked<&[u32]> {
        Ok(match self.outcome()? {
            Over::Dispatch(all) => &all.native.missing,
            Over::Combine(all) => &all.missing,
            Over::Sync => &[],
        })
    }

    /// Result of a dispatch.
    fn received(&self, operation: &str) -> Checked<&Received> {
        match self.outcome()? {
            Over::Dispatch(all) => Ok(all),
            _ => Err(usage(operation, format!("the exchange is a {}, not a dispatch", self.operation))),
        }
    }
}

fn receipt_of(over: &Over) -> abi::ExchangeReceipt {
    let (missing, bytes, timing) = match over {
        Over::Dispatch(all) => (all.native.missing.len(), all.native.bytes, all.native.timing),
        Over::Combine(all) => (all.missing.len(), all.bytes, all.timing),
        Over::Sync => Default::default(),
    };
    let ep::Bytes { logical, wire, network } = bytes;
    let ep::Timing { cast_us, copy_us, sum_us, wait_us, total_us } = timing;
    abi::ExchangeReceipt {
        struct_size: 0,
        missing: missing as u32,
        logical_bytes: logical,
        wire_bytes: wire,
        network_bytes: network,
        cast_us,
        copy_us,
        sum_us,
        wait_us,
        total_us,
    }
}

impl Object for Exchange {
    type Owner = Buffer;

    fn owner(&self) -> &Buffer {
        &self.buffer
    }

    fn check(&self, operation: &str) -> Result<()> {
        self.buffer.origin.check(operation)
    }
}

/// Bytes of `count` rows of `row` bytes.
fn bytes_of(operation: &str, count: usize, row: usize) -> Checked<usize> {
    let size = count.checked_mul(row).filter(|size| isize::try_from(*size).is_ok());
    size.ok_or_else(|| usage(operation, format!("{count} rows of {row} bytes")))
}

/// The caller's memory that an operation reads.
///
/// # Safety
/// `at` is null, or readable for `size` bytes until the operation is over, and not written meanwhile.
unsafe fn tensor(operation: &str, what: &str, at: *const c_void, size: usize) -> Checked<Tensor> {
    if size == 0 {
        return Ok(Tensor::from(Vec::<u8>::new()));
    }
    if at.is_null() {
        return Err(usage(operation, format!("{what} is NULL")));
    }
    // SAFETY: by the contract.
    Ok(unsafe { Tensor::raw(at.cast(), size, None) })
}

/// Sends this rank's tokens to the ranks of their experts.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_experts_dispatch(
    experts: *mut Experts,
    x: *const c_void,
    topk_idx: *const i64,
    topk_weights: *const f32,
    tokens: usize,
    options: *const abi::DispatchOptions,
    out: *mut *mut Exchange,
) -> i32 {
    const OPERATION: &str = "dispatch";
    // SAFETY: by the contract.
    let arguments = |buffer: &Buffer| unsafe {
        let given = read(OPERATION, options, 0)?;
        let config = buffer.host(OPERATION)?.config();
        let layout = layout_of(OPERATION, given.layout)?;
        let handle = match given.repeated.cast::<Exchange>().as_ref() {
            None => None,
            Some(before) => Some(before.received(OPERATION)?.native.handle.clone()),
        };
        let selections = if handle.is_some() { 0 } else { bytes_of(OPERATION, tokens, config.topk)? };
        let indices = tensor(OPERATION, "topk_idx", topk_idx.cast(), bytes_of(OPERATION, selections, 8)?)?;
        let weights = || tensor(OPERATION, "topk_weights", topk_weights.cast(), bytes_of(OPERATION, selections, 4)?);
        let input = Input {
            x: tensor(OPERATION, "x", x, bytes_of(OPERATION, tokens, 2 * config.hidden)?)?,
            topk_idx: indices,
            topk_weights: if topk_weights.is_null() || handle.is_some() { None } else { Some(weights()?) },
        };
        let alignment = (given.alignment as usize).max(1);
        Ok::<_, Box<Failure>>((input, ep::DispatchOptions { layout, handle, alignment, refuse: None }))
    };
    // SAFETY: by the contract.
    unsafe {
        experts::with(OPERATION, experts, |buffer| {
            let (out, native) = (place(OPERATION, out)?, buffer.host(OPERATION)?);
            // The other ranks wait for this one also where its call is wrong: it takes part, and the exchange fails.
            let pending = match arguments(buffer) {
                Ok((input, options)) => native.dispatch(input, options)?,
                Err(failure) => native.refuse_dispatch(failure.error)?,
            };
            out.set(Exchange::handle(buffer, OPERATION, Running::Dispatch(pending)));
            Ok(OK)
        })
    }
}

/// Returns the experts' outputs, and sums them.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_experts_combine(
    experts: *mut Experts,
    dispatch: *mut Exchange,
    y: *const c_void,
    y_size: usize,
    options: *const abi::CombineOptions,
    sums: *mut c_void,
    sums_size: usize,
    out: *mut *mut Exchange,
) -> i32 {
    const OPERATION: &str = "combine";
    // SAFETY: by the contract.
    let arguments = |buffer: &Buffer| unsafe {
        let given = read(OPERATION, options, 0)?;
        let before = dispatch.as_ref().ok_or_else(|| usage(OPERATION, "the dispatch is NULL"))?;
        let handle = before.received(OPERATION)?.native.handle.clone();
        let config = buffer.host(OPERATION)?.config();
        let wide = bytes_of(OPERATION, handle.tokens(), 2 * config.hidden)?;
        let weights = bytes_of(OPERATION, handle.tokens(), 4 * config.topk)?;
        let biases = [given.bias, given.bias2].into_iter().filter(|bias| !bias.is_null());
        if sums.is_null() && sums_size > 0 {
            return Err(usage(OPERATION, "the place of the sums is NULL"));
        }
        let at = if sums_size == 0 { std::ptr::NonNull::<u8>::dangling().as_ptr() } else { sums.cast() };
        let options = ep::CombineOptions {
            weights: match given.topk_weights.is_null() {
                true => None,
                false => Some(tensor(OPERATION, "topk_weights", given.topk_weights.cast(), weights)?),
            },
            bias: biases.map(|bias| tensor(OPERATION, "bias", bias, wide)).collect::<Checked<_>>()?,
            out: Some(TensorMut::raw(at, sums_size, None)),
            refuse: None,
        };
        Ok((tensor(OPERATION, "y", y, y_size)?, handle, options))
    };
    // SAFETY: by the contract.
    unsafe {
        experts::with(OPERATION, experts, |buffer| {
            let (out, native) = (place(OPERATION, out)?, buffer.host(OPERATION)?);
            // As in a dispatch.
            let pending = match arguments(buffer) {
                Ok((y, handle, options)) => native.combine(y, &handle, options)?,
                Err(failure) => native.refuse_combine(failure.error)?,
            };
            out.set(Exchange::handle(buffer, OPERATION, Running::Combine(pending)));
            Ok(OK)
        })
    }
}

/// A barrier.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_experts_sync(experts: *mut Experts, out: *mut *mut Exchange) -> i32 {
    const OPERATION: &str = "sync";
    // SAFETY: by the contract.
    unsafe {
        experts::with(OPERATION, experts, |buffer| {
            let out = place(OPERATION, out)?;
            let running = match &buffer.native {
                Native::Host(native) => Running::Sync(native.sync()?),
                Native::Gpu(native) => {
                    let native = native.clone();
                    Running::Apart(Apart::start(OPERATION, move || native.sync(None))?)
                }
            };
            out.set(Exchange::handle(buffer, OPERATION, running));
            Ok(OK)
        })
    }
}

/// Waits for the outcome.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_exchange_wait(
    exchange: *mut Exchange,
    timeout_us: i64,
    receipt: *mut abi::ExchangeReceipt,
) -> i32 {
    const OPERATION: &str = "exchange_wait";
    // SAFETY: by the contract.
    unsafe { guard::with(OPERATION, exchange, |exchange| exchange.wait(OPERATION, timeout_us, receipt)) }
}

/// Waits, and frees what is over.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_exchange_finish(
    exchange: *mut *mut Exchange,
    timeout_us: i64,
    receipt: *mut abi::ExchangeReceipt,
) -> i32 {
    const OPERATION: &str = "exchange_finish";
    // SAFETY: by the contract.
    let Some(place) = (unsafe { exchange.as_mut() }) else {
        return guard::call(OPERATION, None, || Err(usage(OPERATION, "the place of the exchange is NULL")));
    };
    if place.is_null() {
        return OK;
    }
    // SAFETY: by the contract.
    let result = unsafe { guard::with(OPERATION, *place, |exchange| exchange.wait(OPERATION, timeout_us, receipt)) };
    // SAFETY: by the contract; the reference ends here.
    let is_over = unsafe { &**place }.is_over_here();
    if is_over {
        // SAFETY: from `into_raw`, once: the place is cleared.
        guard::quietly(OPERATION, None, || drop(unsafe { Box::from_raw(std::mem::replace(place, null_mut())) }));
    }
    result
}

/// Frees what is over.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_exchange_free(exchange: *mut Exchange) -> i32 {
    const OPERATION: &str = "exchange_free";
    // SAFETY: by the contract.
    let Some(one) = (unsafe { exchange.as_ref() }) else { return OK };
    if !one.buffer.origin.is_here() {
        return OK; // the parent's
    }
    let body = || match one.advance(Duration::ZERO) {
        true => Ok(OK),
        false => Err(busy(OPERATION, "the exchange runs, so its memory is in use", "finish it, or close the buffer")),
    };
    match guard::call_of(OPERATION, || Some(&*one.buffer), body) {
        OK => {
            // SAFETY: from `into_raw`, once, and no longer used.
            guard::quietly(OPERATION, None, || drop(unsafe { Box::from_raw(exchange) }));
            OK
        }
        failed => failed,
    }
}

/// Why it failed.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_exchange_error(exchange: *mut Exchange) -> *const XrailError {
    // SAFETY: by the contract.
    let Some(exchange) = (unsafe { exchange.as_ref() }) else { return null() };
    match exchange.over.get() {
        Some(Err(failure)) => exchange.error.get_or_init(|| Kept::new(failure)).as_c(),
        _ => null(),
    }
}

/// Ranks without a part in it.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_exchange_missing(
    exchange: *mut Exchange,
    ranks: *mut *mut u32,
    count: *mut usize,
) -> i32 {
    const OPERATION: &str = "exchange_missing";
    // SAFETY: by the contract.
    unsafe {
        guard::with(OPERATION, exchange, |exchange| {
            let (ranks, count) = (place(OPERATION, ranks)?, place(OPERATION, count)?);
            let missing = exchange.missing()?;
            ranks.set(output::numbers(OPERATION, missing)?);
            count.set(missing.len());
            Ok(OK)
        })
    }
}

fn at<T>(numbers: &[T]) -> *const T {
    if numbers.is_empty() { null() } else { numbers.as_ptr() }
}

/// Result of a dispatch.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_exchange_delivered(exchange: *mut Exchange, out: *mut abi::Delivered) -> i32 {
    const OPERATION: &str = "exchange_delivered";
    // SAFETY: by the contract.
    unsafe {
        guard::with(OPERATION, exchange, |exchange| {
            place(OPERATION, out)?;
            let Received { native, offsets, topk_idx, topk_weights } = exchange.received(OPERATION)?;
            let ep::Dispatched { handle, rows, scales, counts, .. } = native;
            let config = exchange.buffer.host(OPERATION)?.config();
            let memory = |part: &ep::Placed| part.memory.ptr().wrapping_add(part.offset).cast::<c_void>();
            let by_expert = handle.layout() == ep::Layout::Expert;
            let told = abi::Delivered {
                struct_size: 0,
                layout: if by_expert { BY_EXPERT } else { BY_RANK },
                dtype: dtype_of(config.payload),
                experts: config.local_experts() as u32,
                places: if by_expert { config.ranks as usize * config.max_tokens } else { handle.rows() },
                rows: memory(rows),
                rows_size: rows.len,
                scales: scales.as_ref().map_or(null_mut(), memory),
                scales_size: scales.as_ref().map_or(0, |scales| scales.len),
                counts: at(counts),
                ranges: if by_expert { at(handle.ranges()) } else { null() },
                offsets: at(offsets),
                topk_idx: at(topk_idx),
                topk_weights: at(topk_weights),
            };
            write(OPERATION, out, &told)?;
            Ok(OK)
        })
    }
}

/// Token numbers of the rows of the expert layout.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_exchange_sources(exchange: *mut Exchange, out: *mut i32, count: usize) -> i32 {
    const OPERATION: &str = "exchange_sources";
    // SAFETY: by the contract.
    unsafe {
        guard::with(OPERATION, exchange, |exchange| {
            place(OPERATION, out)?;
            slice(OPERATION, out.cast_const(), count)?;
            let handle = &exchange.received(OPERATION)?.native.handle;
            let config = exchange.buffer.host(OPERATION)?.config();
            let places = config.ranks as usize * config.max_tokens;
            if handle.layout() != ep::Layout::Expert {
                return Err(usage(OPERATION, "sources are those of the expert layout"));
            }
            if count != config.local_experts() * places {
                let wanted = format!("[{}, {places}]", config.local_experts());
                return Err(usage(OPERATION, format!("room for {count} numbers, where they are {wanted}")));
            }
            // The caller's memory may be uninitialised: it is written before there is a reference to it.
            for index in 0..count {
                out.add(index).write(-1);
            }
            handle.sources(places, std::slice::from_raw_parts_mut(out, count));
            Ok(OK)
        })
    }
}
