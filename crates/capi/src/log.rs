//! Log lines: to a function of the program's, or to stderr.

use std::ffi::{c_char, c_int, c_void};
use std::fmt;
use std::io::Write;
use std::os::fd::AsFd;
use std::sync::OnceLock;

use crossrail_locks::{PerProcess, without_sigpipe};
use crossrail_types::{Log, LogLevel};

use crate::abi::OK;
use crate::failure::{busy, c_text, usage};
use crate::guard;

type LogFn = unsafe extern "C" fn(user: *mut c_void, level: c_int, line: *const c_char);

struct Sink {
    log: LogFn,
    user: *mut c_void,
}

// SAFETY: the program lets any thread call the function with its pointer.
unsafe impl Send for Sink {}
// SAFETY: as above.
unsafe impl Sync for Sink {}

static SINK: PerProcess<OnceLock<Sink>> = PerProcess::new();

/// Has log lines come here, so that those to a stderr that nobody reads do not end the program.
pub(crate) fn install() {
    Log::redirect(write);
}

fn write(level: LogLevel, line: fmt::Arguments<'_>) {
    match SINK.get() {
        Some(sink) => {
            let line = c_text(&line.to_string());
            // SAFETY: as the program promises of its function.
            unsafe { (sink.log)(sink.user, level as c_int, line.as_ptr()) };
        }
        None => {
            let line = format!("crossrail: {level}: {line}\n");
            // Past the standard library's lock, which a thread of the parent may have held at a fork. Without a stderr
            // there is nobody to report that to.
            let _ = without_sigpipe(|| {
                let stderr = std::io::stderr().as_fd().try_clone_to_owned()?;
                std::fs::File::from(stderr).write_all(line.as_bytes())
            });
        }
    }
}

/// Has log lines of this process go to `log`.
///
/// # Safety
/// Any thread may call `log` with `user` until the process ends.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_set_log(log: Option<LogFn>, user: *mut c_void) -> i32 {
    const OPERATION: &str = "set_log";
    guard::call(OPERATION, None, || {
        let log = log.ok_or_else(|| usage(OPERATION, "the function is NULL"))?;
        install();
        match SINK.set(Sink { log, user }) {
            Ok(()) => Ok(OK),
            Err(_) => Err(busy(OPERATION, "log lines go to another function already", "set it once per process")),
        }
    })
}
