//! Errors as C reads them.

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::mem::size_of;

use crossrail_types::{Error, ErrorKind, Reason};

use crate::abi::{BUSY, INTERNAL, INTERRUPTED, XrailError};

/// Why a function fails: its result, and the texts.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) result: i32,
    pub(crate) error: Error,
}

impl From<Error> for Box<Failure> {
    #[cold]
    fn from(error: Error) -> Box<Failure> {
        let result = if error.reason == Some(Reason::InFlight) { BUSY } else { -error.kind.number() };
        Box::new(Failure { result, error })
    }
}

impl From<Box<Error>> for Box<Failure> {
    #[cold]
    fn from(error: Box<Error>) -> Box<Failure> {
        (*error).into()
    }
}

/// What functions of this crate return: `OK`, `PENDING`, or why not.
pub(crate) type Outcome = Result<i32, Box<Failure>>;

#[cold]
pub(crate) fn usage(operation: &str, detail: impl Into<String>) -> Box<Failure> {
    Error::new(ErrorKind::Usage, operation, detail).into()
}

#[cold]
pub(crate) fn busy(operation: &str, detail: &str, hint: &str) -> Box<Failure> {
    Box::new(Failure { result: BUSY, error: Error::new(ErrorKind::Usage, operation, detail).with_hint(hint) })
}

/// A wait that `xrail_worker_interrupt` has ended; it would have timed out otherwise.
#[cold]
pub(crate) fn interrupted(error: Error) -> Box<Failure> {
    let detail = format!("the wait was interrupted: {}", error.detail);
    Box::new(Failure { result: INTERRUPTED, error: Error { detail, ..error } })
}

#[cold]
pub(crate) fn internal(operation: &str, panic: &str) -> Box<Failure> {
    let detail = format!("a bug in Crossrail: {panic}");
    let error = Error::new(ErrorKind::Closed, operation, detail)
        .with_hint("please report it; the worker, or the expert buffer, is closed");
    Box::new(Failure { result: INTERNAL, error })
}

/// The name of a result, as `peer_dead`.
pub(crate) fn name_of(result: i32) -> &'static str {
    match result {
        crate::abi::OK => "ok",
        crate::abi::PENDING => "pending",
        INTERNAL => "internal",
        BUSY => "busy",
        INTERRUPTED => "interrupted",
        _ => ErrorKind::ALL.iter().find(|kind| -kind.number() == result).map_or("unknown", |kind| kind.name()),
    }
}

/// A struct of C's with the texts that it points to.
pub(crate) struct Kept {
    error: XrailError,
    _texts: [CString; 7],
}

// SAFETY: its pointers are into texts that it owns and never changes.
unsafe impl Send for Kept {}
// SAFETY: as above.
unsafe impl Sync for Kept {}

/// `text` as C has it: what follows a zero byte in it would be lost, so zero bytes are left out.
pub(crate) fn c_text(text: &str) -> CString {
    let bytes: Vec<u8> = text.bytes().filter(|byte| *byte != 0).collect();
    CString::new(bytes).unwrap_or_default()
}

impl Kept {
    #[cold]
    pub(crate) fn new(failure: &Failure) -> Box<Kept> {
        let Failure { result, error } = failure;
        let optional = |text: &Option<String>| c_text(text.as_deref().unwrap_or_default());
        let texts = [
            c_text(error.reason.map_or("", Reason::name)),
            c_text(&error.operation),
            c_text(&error.detail),
            optional(&error.peer),
            optional(&error.lane),
            optional(&error.hint),
            c_text(&error.to_string()),
        ];
        let (done, total) = error.progress.unwrap_or_default();
        let waited = error.waited.unwrap_or_default().as_micros();
        let [reason, operation, detail, peer, lane, hint, text] = [0, 1, 2, 3, 4, 5, 6].map(|at| texts[at].as_ptr());
        let error = XrailError {
            struct_size: size_of::<XrailError>() as u32,
            result: *result,
            os_error: error.os_code().unwrap_or(0),
            reserved: 0,
            done,
            total,
            waited_us: i64::try_from(waited).unwrap_or(i64::MAX),
            reason,
            operation,
            detail,
            peer,
            lane,
            hint,
            text,
        };
        Box::new(Kept { error, _texts: texts })
    }

    pub(crate) fn as_c(&self) -> *const XrailError {
        &raw const self.error
    }
}

thread_local! {
    static LAST: RefCell<Option<Box<Kept>>> = const { RefCell::new(None) };
}

/// Keeps a failure as this thread's last, and returns its result.
#[cold]
#[inline(never)]
pub(crate) fn keep(failure: &Failure) -> i32 {
    let kept = Kept::new(failure);
    // Not where the thread is ending, and has lost its last error already.
    let _ = LAST.try_with(|last| last.replace(Some(kept)));
    failure.result
}

struct Nothing(XrailError);

// SAFETY: its pointers are to a constant.
unsafe impl Sync for Nothing {}

const EMPTY: *const c_char = c"".as_ptr();

static NOTHING: Nothing = Nothing(XrailError {
    struct_size: size_of::<XrailError>() as u32,
    result: 0,
    os_error: 0,
    reserved: 0,
    done: 0,
    total: 0,
    waited_us: 0,
    reason: EMPTY,
    operation: EMPTY,
    detail: EMPTY,
    peer: EMPTY,
    lane: EMPTY,
    hint: EMPTY,
    text: EMPTY,
});

/// The last failure of this thread; never null.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn xrail_last_error() -> *const XrailError {
    let last = LAST.try_with(|last| last.borrow().as_ref().map(|kept| kept.as_c())).ok().flatten();
    last.unwrap_or(&raw const NOTHING.0)
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;
    use std::time::Duration;

    use super::*;

    fn last() -> (XrailError, String) {
        // SAFETY: never null, and this thread fails in nothing until it is copied.
        let error = unsafe { *xrail_last_error() };
        // SAFETY: a text, as long as the error is this thread's last.
        let text = unsafe { CStr::from_ptr(error.text) }.to_str().expect("UTF-8").to_owned();
        (error, text)
    }

    #[test]
    fn the_last_error_is_this_threads_and_has_all_that_is_known() {
        assert_eq!((last().0.result, last().1), (0, String::new()));
        let io = std::io::Error::from_raw_os_error(111);
        let error = Error::io("connect", "connect", &io).with_peer("a\0b").with_progress(3, 8);
        assert_eq!(keep(&Box::from(error.with_waited(Duration::from_millis(2)))), -13);
        let (kept, text) = last();
        assert_eq!((kept.os_error, kept.done, kept.total, kept.waited_us), (111, 3, 8, 2000));
        assert!(text.contains("peer ab") && text.contains("3 of 8 bytes"), "{text}");
        std::thread::spawn(|| assert_eq!(last().0.result, 0)).join().expect("another thread has none");
    }

    #[test]
    fn every_result_has_a_name() {
        assert_eq!(
            [1, 0, -7, -16, -17, -18, -99].map(name_of),
            ["pending", "ok", "peer_dead", "internal", "busy", "interrupted", "unknown"]
        );
    }
}
