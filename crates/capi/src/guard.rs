//! The frame of every function: arguments from C, panics, results.

use std::any::Any;
use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use crossrail_types::{ErrorKind, Origin};

use crate::abi::{DEFAULT, OK};
use crate::failure::{Failure, Outcome, internal, keep, usage};

/// Longest wait.
const LONGEST_US: i64 = 1_000_000_000_000_000;

/// Runs `body`, and returns its result. A failure becomes this thread's last error. A panic is a bug: it ends `worker`,
/// whose state may be half changed.
#[inline(always)]
pub(crate) fn call(operation: &'static str, worker: Option<&crossrail::Worker>, body: impl FnOnce() -> Outcome) -> i32 {
    call_of(operation, || worker, body)
}

/// [`call`] with an object that a panic ends, which is looked up only where it is needed.
#[inline(always)]
pub(crate) fn call_of<'a, T: Ends + 'a>(
    operation: &'static str,
    object: impl FnOnce() -> Option<&'a T>,
    body: impl FnOnce() -> Outcome,
) -> i32 {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(result)) => result,
        Ok(Err(failure)) => failed(operation, object(), failure),
        Err(panic) => panicked(operation, object(), &*panic),
    }
}

/// An object that a panic ends.
pub(crate) trait Ends {
    /// The text of the panic that has ended it.
    fn failure(&self) -> Option<&str>;
    /// Ends it.
    fn fail(&self, text: &str);
}

impl Ends for crossrail::Worker {
    fn failure(&self) -> Option<&str> {
        crossrail::Worker::failure(self)
    }

    fn fail(&self, text: &str) {
        crossrail::Worker::fail(self, text);
    }
}

/// An object that C has a handle of.
pub(crate) trait Object {
    type Owner: Ends;
    /// The object that a panic of a call ends.
    fn owner(&self) -> &Self::Owner;
    /// Fails where the object cannot be used, as in a forked child.
    #[inline(always)]
    fn check(&self, _operation: &str) -> crossrail_types::Result<()> {
        Ok(())
    }
}

/// [`call`] for a handle.
///
/// # Safety
/// As [`handle`].
#[inline(always)]
pub(crate) unsafe fn with<T: Object>(
    operation: &'static str,
    pointer: *const T,
    body: impl FnOnce(&T) -> Outcome,
) -> i32 {
    // SAFETY: by the contract.
    let object = unsafe { pointer.as_ref() };
    call_of(
        operation,
        || object.map(T::owner),
        || {
            let Some(object) = object else { return Err(null(operation, "a handle")) };
            object.check(operation)?;
            body(object)
        },
    )
}

/// [`call`] of a function without a result.
#[inline(always)]
pub(crate) fn quietly(operation: &'static str, worker: Option<&crossrail::Worker>, body: impl FnOnce()) {
    let done = || {
        body();
        Ok(OK)
    };
    call(operation, worker, done);
}

/// Drops the object of a handle; in a forked child it stays the parent's.
///
/// # Safety
/// `object` is null or from `Box::into_raw`, and not used after this.
pub(crate) unsafe fn free<T>(operation: &'static str, object: *mut T, origin: impl FnOnce(&T) -> Origin) {
    if object.is_null() {
        return;
    }
    quietly(operation, None, || {
        // SAFETY: by the contract, once.
        let object = unsafe { Box::from_raw(object) };
        if origin(&object).is_here() { drop(object) } else { std::mem::forget(object) }
    });
}

#[cold]
#[inline(never)]
fn failed(operation: &'static str, object: Option<&impl Ends>, failure: Box<Failure>) -> i32 {
    // What fails because a panic has closed the object says so.
    let closed = matches!(failure.error.kind, ErrorKind::Closed | ErrorKind::Timeout | ErrorKind::PeerDead);
    match object.and_then(Ends::failure).filter(|_| closed) {
        Some(panic) => keep(&internal(operation, panic)),
        None => keep(&failure),
    }
}

#[cold]
#[inline(never)]
fn panicked(operation: &'static str, object: Option<&impl Ends>, panic: &(dyn Any + Send)) -> i32 {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic without text");
    if let Some(object) = object {
        object.fail(text);
    }
    keep(&internal(operation, text))
}

/// What a handle from C refers to.
///
/// # Safety
/// `pointer` is null, or was returned by this library as a `T` that has not been freed, and is not freed during `'a`.
#[inline(always)]
pub(crate) unsafe fn handle<'a, T>(operation: &str, pointer: *const T) -> Result<&'a T, Box<Failure>> {
    // SAFETY: by the contract.
    match unsafe { pointer.as_ref() } {
        Some(handle) => Ok(handle),
        None => Err(null(operation, "a handle")),
    }
}

#[cold]
fn null(operation: &str, what: &str) -> Box<Failure> {
    usage(operation, format!("{what} is NULL"))
}

/// A place for a result; null is refused before anything is done.
///
/// # Safety
/// `out` is null, or valid for writes during `'a`.
#[inline(always)]
pub(crate) unsafe fn place<'a, T>(operation: &str, out: *mut T) -> Result<Place<'a, T>, Box<Failure>> {
    if out.is_null() {
        return Err(null(operation, "the place of a result"));
    }
    Ok(Place(out, std::marker::PhantomData))
}

/// See [`place`]. What is there may be uninitialised.
pub(crate) struct Place<'a, T>(*mut T, std::marker::PhantomData<&'a mut T>);

impl<T> Place<'_, T> {
    #[inline(always)]
    pub(crate) fn set(self, value: T) {
        // SAFETY: valid for a write, by `place`.
        unsafe { self.0.write(value) };
    }
}

/// Text from C.
///
/// # Safety
/// `text` is null, or ends in a zero byte, and stays during `'a`.
pub(crate) unsafe fn text<'a>(operation: &str, text: *const c_char) -> Result<&'a str, Box<Failure>> {
    if text.is_null() {
        return Err(null(operation, "a text"));
    }
    // SAFETY: by the contract.
    unsafe { CStr::from_ptr(text) }.to_str().map_err(|_| usage(operation, "a text that is not UTF-8"))
}

/// [`text`], `None` for null.
///
/// # Safety
/// As [`text`].
pub(crate) unsafe fn optional_text<'a>(operation: &str, at: *const c_char) -> Result<Option<&'a str>, Box<Failure>> {
    // SAFETY: by the contract.
    if at.is_null() { Ok(None) } else { unsafe { text(operation, at) }.map(Some) }
}

/// An array from C.
///
/// # Safety
/// `at` is null, or points to `count` values that stay during `'a`.
pub(crate) unsafe fn slice<'a, T>(operation: &str, at: *const T, count: usize) -> Result<&'a [T], Box<Failure>> {
    if count == 0 {
        return Ok(&[]);
    }
    if at.is_null() {
        return Err(null(operation, "an array"));
    }
    if !at.is_aligned() || count.checked_mul(size_of::<T>()).is_none_or(|size| size > isize::MAX as usize) {
        return Err(usage(operation, format!("an array of {count} elements at {at:?}")));
    }
    // SAFETY: by the contract, and the checks above.
    Ok(unsafe { std::slice::from_raw_parts(at, count) })
}

/// A wait's limit; `None`: CROSSRAIL_TIMEOUT.
pub(crate) fn timeout(operation: &str, timeout_us: i64) -> Result<Option<Duration>, Box<Failure>> {
    match timeout_us {
        DEFAULT => Ok(None),
        0.. => Ok(Some(Duration::from_micros(timeout_us.min(LONGEST_US).unsigned_abs()))),
        _ => Err(usage(operation, format!("a timeout of {timeout_us} us"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::INTERNAL;

    #[test]
    fn a_panic_ends_the_worker_and_is_told_as_what_it_is() {
        let context = crossrail::Context::new(crossrail::Settings::default()).expect("a context");
        let worker = crossrail::Worker::new(&context, crossrail::WorkerOptions::default()).expect("a worker");
        let inbox = worker.recv(vec![0; 8], 1, u64::MAX, None).expect("a receive");
        assert_eq!(call("send", Some(&worker), || panic!("at the wrong time")), INTERNAL);
        assert_eq!(worker.failure(), Some("at the wrong time"));
        let after = call("recv", Some(&worker), || Ok(worker.check("recv").map(|()| OK)?));
        assert_eq!(after, INTERNAL, "what fails for that reason says so");
        assert!(inbox.wait(None).is_err());
    }

    #[test]
    fn limits_are_clamped_and_negative_ones_refused() {
        assert_eq!(timeout("wait", i64::MAX).expect("for ever"), Some(Duration::from_secs(1_000_000_000)));
        assert_eq!((timeout("wait", -1).expect("the default"), timeout("wait", -2).is_err()), (None, true));
    }
}
