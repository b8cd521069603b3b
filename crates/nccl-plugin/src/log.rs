//! NCCL's logger: all of this library's log lines go there, and none to stdout or stderr.
#![allow(unsafe_code)]

use std::ffi::{CString, c_int};
use std::fmt;
use std::sync::OnceLock;

use crossrail_locks::PerProcess;
use crossrail_nccl_abi::{LOG_INFO, LOG_TRACE, LOG_WARN, Logger, SUBSYSTEM_INIT, SUBSYSTEM_NET};
use crossrail_types::{Log, LogLevel};

static LOGGER: PerProcess<OnceLock<Logger>> = PerProcess::new();

/// Sends the log lines of this process to `logger`. Only the first call has an effect: NCCL has one logger.
pub(crate) fn install(logger: Option<Logger>) {
    if let Some(logger) = logger {
        let _ = LOGGER.set(logger);
        Log::redirect(|level, line| write(level_of(level), line));
    }
}

/// Something failed; NCCL also keeps the last such line as its last error.
pub(crate) fn warn(line: fmt::Arguments<'_>) {
    write(LOG_WARN, line);
}

/// Decisions worth knowing.
pub(crate) fn info(line: fmt::Arguments<'_>) {
    write(LOG_INFO, line);
}

fn level_of(level: LogLevel) -> c_int {
    match level {
        LogLevel::Off | LogLevel::Error | LogLevel::Warn => LOG_WARN,
        LogLevel::Info => LOG_INFO,
        LogLevel::Debug => LOG_TRACE,
    }
}

fn write(level: c_int, line: fmt::Arguments<'_>) {
    let Some(logger) = LOGGER.get() else { return };
    let text = format!("NET/Crossrail : {line}").replace('\0', " ");
    if let Ok(text) = CString::new(text) {
        // SAFETY: the format has one `%s`, whose argument is a string that lives through the call.
        unsafe {
            logger(level, SUBSYSTEM_INIT | SUBSYSTEM_NET, c"crossrail".as_ptr(), 0, c"%s".as_ptr(), text.as_ptr());
        }
    }
}
