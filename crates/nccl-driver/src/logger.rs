//! The logger that plugins get. Their last warning goes into our errors, as NCCL keeps it for its own.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_ulong};

use crossrail_locks::{Mutex, PerProcess};
use crossrail_nccl_abi::{LOG_WARN, Logger};

static LAST_WARNING: PerProcess<Mutex<Option<String>>> = PerProcess::new();

unsafe extern "C" {
    fn crossrail_nccl_logger(
        level: c_int,
        flags: c_ulong,
        file: *const c_char,
        line: c_int,
        format: *const c_char,
        ...
    );
}

/// The function to pass to `init`.
pub(crate) fn function() -> Logger {
    crossrail_nccl_logger
}

/// The last warning that a plugin has logged, once.
pub(crate) fn take_warning() -> Option<String> {
    LAST_WARNING.lock().take()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn crossrail_nccl_line(level: c_int, text: *const c_char) {
    if level == LOG_WARN && !text.is_null() {
        // SAFETY: the C half passes a string that it has terminated.
        let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
        *LAST_WARNING.lock() = Some(text.chars().filter(|c| !c.is_control()).take(500).collect());
    }
}
