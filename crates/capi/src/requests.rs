//! Requests: operations in flight, and how they ended.

use std::ffi::{c_char, c_void};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crossrail_types::{Error, ErrorKind, Result};

use crate::abi::{self, Finished, OK, PENDING, XrailError, write};
use crate::failure::{Failure, Kept, Outcome, busy, interrupted, usage};
use crate::guard::{self, Object, handle, place, slice, timeout};
use crate::output;
use crate::shared::{ENDED, Ended, FREE, Pool, QUEUED, Request, STARTING, Shared, same};
use crate::texts::{formatted, receipt_json, receipt_text};
use crate::worker::Worker;

/// A request's handle on its way into the queue, from the thread that sees it end.
struct Queueing(*mut Request);

// SAFETY: the request is `Send`, and owned by whoever has this.
unsafe impl Send for Queueing {}

/// What the caller has given for a request.
#[derive(Clone, Copy)]
pub(crate) struct Given {
    queue: bool,
    user: *mut c_void,
    out: *mut *mut Request,
}

impl Given {
    /// `out` may be null where the request is queued.
    ///
    /// # Safety
    /// `out` is null, or valid for a write until [`Given::start`].
    #[inline(always)]
    pub(crate) unsafe fn new(
        operation: &str,
        queue: bool,
        user: *mut c_void,
        out: *mut *mut Request,
    ) -> std::result::Result<Given, Box<Failure>> {
        if out.is_null() && !queue {
            return Err(usage(operation, "the place of the request is NULL"));
        }
        Ok(Given { queue, user, out })
    }

    /// Makes the handle of what has started.
    #[inline(always)]
    pub(crate) fn start(self, worker: &Arc<Shared>, started: Result<crossrail::Request>) -> Outcome {
        let native = started?;
        let Given { queue, user, out } = self;
        let mut request = Pool::take(worker);
        request.native = native;
        request.user = user;
        if queue {
            *request.queued.get_mut() = STARTING;
        }
        let request = Box::into_raw(request);
        if !out.is_null() {
            // SAFETY: valid for a write, by `new`.
            unsafe { out.write(request) };
        }
        if queue {
            enqueue_at_end(worker, request);
        }
        Ok(OK)
    }
}

/// Starts a short operation of the host's memory without options, in a request of the pool.
#[inline(always)]
pub(crate) fn start_plain(
    worker: &Arc<Shared>,
    out: *mut *mut Request,
    start: impl FnOnce(&mut crossrail::Request) -> std::result::Result<(), Box<Error>>,
) -> Outcome {
    let mut request = Pool::take(worker);
    if let Err(error) = start(&mut request.native) {
        Pool::give(request);
        return Err(error.into());
    }
    // SAFETY: valid for a write, as the callers have checked.
    unsafe { out.write(Box::into_raw(request)) };
    Ok(OK)
}

/// Puts the request into the worker's queue once it is over.
#[cold]
fn enqueue_at_end(worker: &Arc<Shared>, request: *mut Request) {
    let (queue, queueing) = (Arc::clone(&worker.finished), Queueing(request));
    // SAFETY: it is in no queue before this call says that it is done with it.
    let one = unsafe { &*request };
    one.native.on_complete(move |_| {
        let Queueing(request) = { queueing };
        // SAFETY: from `into_raw`, and not in the queue yet.
        let before = unsafe { &*request }.queued.swap(ENDED, Ordering::AcqRel);
        if before == QUEUED {
            // SAFETY: the call below has left it to this one.
            queue.push(Ended(unsafe { Box::from_raw(request) }));
        }
    });
    if one.queued.compare_exchange(STARTING, QUEUED, Ordering::AcqRel, Ordering::Acquire) == Err(ENDED) {
        // SAFETY: the callback has left it to this call.
        worker.finished.push(Ended(unsafe { Box::from_raw(request) }));
    }
}

impl Object for Request {
    type Owner = crossrail::Worker;

    #[inline(always)]
    fn owner(&self) -> &crossrail::Worker {
        &self.worker.native
    }
}

impl Request {
    /// Keeps how it failed, for `xrail_request_error`.
    #[cold]
    fn fail(&self, error: Error) -> Box<Failure> {
        let failure: Box<Failure> = error.into();
        self.error.get_or_init(|| Kept::new(&failure));
        failure
    }

    #[inline(always)]
    fn poll(&self) -> Outcome {
        match self.native.poll() {
            None => Ok(PENDING),
            Some(Ok(())) => Ok(OK),
            Some(Err(error)) => Err(self.fail(*error)),
        }
    }

    /// # Safety
    /// As the header states for `receipt`.
    unsafe fn test(&self, operation: &str, receipt: *mut abi::Receipt) -> Outcome {
        if receipt.is_null() {
            return self.poll();
        }
        match self.native.test() {
            None => Ok(PENDING),
            // SAFETY: by the contract.
            Some(Ok(all)) => unsafe { tell(operation, &all, receipt) },
            Some(Err(error)) => Err(self.fail(error)),
        }
    }

    /// # Safety
    /// As the header states for `receipt`.
    unsafe fn wait(&self, operation: &str, timeout_us: i64, receipt: *mut abi::Receipt) -> Outcome {
        let limit = timeout(operation, timeout_us)?;
        // SAFETY: by the contract.
        match unsafe { self.test(operation, receipt) } {
            Ok(PENDING) => {}
            over => return over,
        }
        match self.worker.waits.interruptible(|| self.native.wait(limit)) {
            // SAFETY: by the contract.
            (Ok(all), _) => unsafe { tell(operation, &all, receipt) },
            (Err(error), raised) if error.kind == ErrorKind::Timeout && !self.native.is_done() => match raised {
                true => Err(interrupted(error)),
                false => Err(error.into()),
            },
            (Err(error), _) => Err(self.fail(error)),
        }
    }
}

/// # Safety
/// As the header states for `receipt`.
#[inline(always)]
unsafe fn tell(operation: &str, all: &crossrail::Receipt, receipt: *mut abi::Receipt) -> Outcome {
    if !receipt.is_null() {
        let crossrail::Receipt { bytes, tag, match_us, window_us, wire_us, copy_us, .. } = *all;
        let told = abi::Receipt { struct_size: 0, reserved: 0, bytes, tag, match_us, window_us, wire_us, copy_us };
        // SAFETY: by the contract.
        unsafe { write(operation, receipt, &told) }?;
    }
    Ok(OK)
}

/// Makes progress once.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_test(request: *mut Request, receipt: *mut abi::Receipt) -> i32 {
    const OPERATION: &str = "test";
    // SAFETY: by the contract.
    unsafe {
        match request.as_ref().filter(|_| receipt.is_null()) {
            Some(plain) => guard::call_of(OPERATION, || Some(&plain.worker.native), || plain.poll()),
            None => test_at_length(request, receipt),
        }
    }
}

/// [`xrail_test`] with a receipt.
///
/// # Safety
/// As there.
#[cold]
#[inline(never)]
unsafe fn test_at_length(request: *mut Request, receipt: *mut abi::Receipt) -> i32 {
    const OPERATION: &str = "test";
    // SAFETY: by the contract.
    unsafe { guard::with(OPERATION, request, |request| request.test(OPERATION, receipt)) }
}

/// Waits for the outcome.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_wait(request: *mut Request, timeout_us: i64, receipt: *mut abi::Receipt) -> i32 {
    const OPERATION: &str = "wait";
    // SAFETY: by the contract.
    unsafe { guard::with(OPERATION, request, |request| request.wait(OPERATION, timeout_us, receipt)) }
}

/// Waits, and frees what is over.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_finish(
    request: *mut *mut Request,
    timeout_us: i64,
    receipt: *mut abi::Receipt,
) -> i32 {
    const OPERATION: &str = "finish";
    // SAFETY: by the contract.
    let Some(place) = (unsafe { request.as_mut() }) else {
        return guard::call(OPERATION, None, || Err(usage(OPERATION, "the place of the request is NULL")));
    };
    if place.is_null() {
        return OK;
    }
    // SAFETY: by the contract.
    let result = unsafe { guard::with(OPERATION, *place, |request| request.wait(OPERATION, timeout_us, receipt)) };
    // SAFETY: by the contract; the reference ends here.
    let is_over = unsafe { (**place).native.is_over() && (**place).queued.load(Ordering::Acquire) == FREE };
    if is_over {
        // SAFETY: from `into_raw`, once: the place is cleared.
        guard::quietly(OPERATION, None, || Pool::give(unsafe { Box::from_raw(std::mem::replace(place, null_mut())) }));
    }
    result
}

/// Waits until one of them is over.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_wait_any(
    requests: *const *mut Request,
    count: usize,
    timeout_us: i64,
    index: *mut usize,
) -> i32 {
    const OPERATION: &str = "wait_any";
    guard::call(OPERATION, None, || {
        // SAFETY: by the contract.
        let (handles, out) = unsafe { (slice(OPERATION, requests, count)?, place(OPERATION, index)?) };
        let limit = timeout(OPERATION, timeout_us)?;
        let (mut natives, mut places) = (Vec::with_capacity(count), Vec::with_capacity(count));
        let mut worker: Option<&Arc<Shared>> = None;
        for (at, request) in handles.iter().enumerate() {
            // SAFETY: by the contract.
            let Some(request) = (unsafe { request.as_ref() }) else { continue };
            same(OPERATION, worker.get_or_insert(&request.worker), &request.worker)?;
            natives.push(&request.native);
            places.push(at);
        }
        let worker = worker.ok_or_else(|| usage(OPERATION, "no requests"))?;
        let found = worker.waits.wait(|| worker.native.wait_any(&natives, limit))?;
        out.set(places[found]);
        Ok(OK)
    })
}

/// Requests of `XRAIL_QUEUE` that are over.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_take_finished(
    worker: *mut Worker,
    max: usize,
    out: *mut Finished,
    count: *mut usize,
) -> i32 {
    const OPERATION: &str = "take_finished";
    guard::call(OPERATION, None, || {
        // SAFETY: by the contract.
        let (worker, count) = unsafe { (handle(OPERATION, worker)?, place(OPERATION, count)?) };
        // SAFETY: by the contract.
        unsafe { place(OPERATION, out) }?;
        worker.0.check_origin(OPERATION)?;
        let mut taken = worker.0.finished.take(max);
        if taken.is_empty() && max > 0 {
            worker.0.native.progress();
            taken = worker.0.finished.take(max);
        }
        if taken.is_empty() {
            return Ok(PENDING);
        }
        count.set(taken.len());
        for (at, Ended(request)) in taken.into_iter().enumerate() {
            request.queued.store(FREE, Ordering::Release);
            let user = request.user;
            // SAFETY: there is room for `max`.
            unsafe { out.add(at).write(Finished { request: Box::into_raw(request).cast(), user }) };
        }
        Ok(OK)
    })
}

/// Asks both ends to stop.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_cancel(request: *mut Request) {
    // SAFETY: by the contract.
    if let Some(request) = unsafe { request.as_ref() } {
        guard::quietly("cancel", None, || request.native.cancel());
    }
}

/// Lets a stream wait for the request.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_wait_on_stream(request: *mut Request, stream: *mut c_void, device: u32) -> i32 {
    const OPERATION: &str = "wait_on_stream";
    // SAFETY: by the contract.
    unsafe {
        guard::with(OPERATION, request, |request| {
            let ordinal = device.checked_sub(1).ok_or_else(|| usage(OPERATION, "the host has no streams"))?;
            request.native.wait_on(stream as u64, ordinal)?;
            Ok(OK)
        })
    }
}

/// Why it failed; borrowed.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_request_error(request: *mut Request) -> *const XrailError {
    // SAFETY: by the contract.
    let Some(request) = (unsafe { request.as_ref() }) else { return std::ptr::null() };
    guard::quietly("request_error", None, || {
        if request.error.get().is_none()
            && request.native.is_done()
            && let Some(Err(error)) = request.native.test()
        {
            request.fail(error);
        }
    });
    request.error.get().map_or(std::ptr::null(), |kept| kept.as_c())
}

/// What it did.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_request_report(
    request: *mut Request,
    format: i32,
    text: *mut *mut c_char,
) -> i32 {
    const OPERATION: &str = "request_report";
    // SAFETY: by the contract.
    unsafe {
        guard::with(OPERATION, request, |request| {
            let out = place(OPERATION, text)?;
            match request.native.test() {
                None => Err(busy(OPERATION, "the request is not over", "wait for it")),
                Some(Err(error)) => Err(request.fail(error)),
                Some(Ok(all)) => {
                    let report = formatted(OPERATION, format, || receipt_text(&all), || receipt_json(&all))?;
                    out.set(output::text(OPERATION, &report)?);
                    Ok(OK)
                }
            }
        })
    }
}

/// Frees a request that is over.
///
/// # Safety
/// `request` is null or a request, which is not used after this unless it is busy.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_request_free(request: *mut Request) -> i32 {
    // SAFETY: by the contract; nobody else uses what is being freed.
    let Some(one) = (unsafe { request.as_mut() }) else { return OK };
    // Nothing here can panic.
    let is_plain = *one.queued.get_mut() == FREE && one.native.is_collected() && one.error.get().is_none();
    // SAFETY: from `into_raw`; not used after this.
    if is_plain && unsafe { Pool::give_plain(request) } {
        return OK;
    }
    // SAFETY: by the contract.
    unsafe { free_at_length(request) }
}

/// [`xrail_request_free`] of any request.
///
/// # Safety
/// As there; not null.
#[cold]
#[inline(never)]
unsafe fn free_at_length(request: *mut Request) -> i32 {
    const OPERATION: &str = "request_free";
    // SAFETY: by the contract.
    let one = unsafe { &mut *request };
    guard::call(OPERATION, None, || {
        if *one.queued.get_mut() != FREE || !one.native.is_over() {
            return Err(unfreed(OPERATION, one));
        }
        // SAFETY: from `into_raw`, once.
        Pool::give(unsafe { Box::from_raw(request) });
        Ok(OK)
    })
}

#[cold]
fn unfreed(operation: &str, request: &Request) -> Box<Failure> {
    match request.queued.load(Ordering::Acquire) {
        FREE => busy(operation, "the operation runs, and uses its buffer", "wait for it, or xrail_finish"),
        _ => busy(operation, "the request belongs to the worker's queue", "take it: xrail_take_finished"),
    }
}
