//! The UCX library of this process: loaded at run time, or absent and why.
#![allow(unsafe_code)]

use std::collections::BTreeSet;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::sync::OnceLock;

use crossrail_locks::{PerProcess, keeping_handlers};
use crossrail_transport::LaneError;
pub use crossrail_transport::library::Absent;
use crossrail_transport::library::{Foreign, text};
use crossrail_types::{Error, ErrorKind, Log};

use crate::raw::{self, Raw, Status};

const FOREIGN: Foreign = Foreign {
    link: "ucx",
    name: "UCX",
    soname: "libucp.so.0",
    variable: "CROSSRAIL_UCX_LIBRARY",
    fix: "apt install libucx0 (Debian, Ubuntu), dnf install ucx (Fedora, RHEL), or pip install libucx-cu12 and set \
          CROSSRAIL_UCX_LIBRARY to its folder libucx/lib",
};
/// The oldest version whose functions and constants are those that this crate uses.
const OLDEST: (u32, u32) = (1, 12);

/// UCX as this process has loaded it. It stays loaded until the process ends.
pub struct Library {
    pub(crate) raw: Raw,
    version: (u32, u32, u32),
    text: String,
}

impl Library {
    /// Loads the library on the first call; later calls return what the first one found. `place`: its file, or the
    /// folder that contains it; by default the dynamic linker searches. `log` receives UCX's own log lines.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub fn load(place: Option<&Path>, log: Log) -> Result<&'static Library, Absent> {
        static LOADED: PerProcess<OnceLock<Result<Library, Absent>>> = PerProcess::new();
        LOADED.get_or_init(|| Library::open(place, log)).as_ref().map_err(Clone::clone)
    }

    fn open(place: Option<&Path>, log: Log) -> Result<Library, Absent> {
        // SAFETY: UCX's initialisers read the environment and install handlers, which are replaced.
        let (library, path) = keeping_handlers(|| unsafe { FOREIGN.open(place) })?;
        let raw = Raw::new(library).map_err(|name| {
            let (major, minor) = OLDEST;
            FOREIGN.absent(format!("{} has no function {name}: it is older than UCX {major}.{minor}", path.display()))
        })?;
        let mut version: (c_uint, c_uint, c_uint) = (0, 0, 0);
        // SAFETY: writes three numbers; the text is static.
        let text = unsafe {
            (raw.ucp_get_version)(&mut version.0, &mut version.1, &mut version.2);
            text((raw.ucp_get_version_string)())
        };
        is_known((version.0, version.1), &text)?;
        LOG.get_or_init(|| log);
        // SAFETY: the handler is a function of this library, which is never unloaded before UCX.
        unsafe { (raw.ucs_log_push_handler)(log_line) };
        Ok(Library { raw, version, text })
    }

    /// `1.13.1`.
    pub fn version(&self) -> &str {
        &self.text
    }

    pub(crate) fn number(&self) -> (u32, u32) {
        (self.version.0, self.version.1)
    }

    /// UCX's own text for a status.
    pub(crate) fn status(&self, status: Status) -> String {
        // SAFETY: the texts are static.
        text_of(unsafe { (self.raw.ucs_status_string)(status) }, status)
    }

    /// `Ok`, or the failed call with UCX's text.
    pub(crate) fn check(&self, call: &'static str, status: Status) -> Result<(), Error> {
        if status == raw::OK {
            return Ok(());
        }
        let kind = match status {
            -4 => ErrorKind::Exhausted,
            -6 | -14 | -24 => ErrorKind::Unreachable,
            -20 | -80 => ErrorKind::Timeout,
            -8 | -22 => ErrorKind::Unsupported,
            _ => ErrorKind::Io,
        };
        Err(Error::new(kind, "ucx", format!("{call}: {}", self.status(status))))
    }
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "UCX {}", self.text)
    }
}

/// Whether the interface of that version is the one that this crate was written for.
fn is_known(version: (u32, u32), text: &str) -> Result<(), Absent> {
    let (major, minor) = OLDEST;
    if version.0 != major {
        let why = format!("the UCX found is {text}, of another major version than {major}");
        return Err(FOREIGN.absent(why));
    }
    if version.1 < minor {
        return Err(FOREIGN.absent(format!("the UCX found is {text}; {major}.{minor} is the oldest that works")));
    }
    Ok(())
}

/// The files of UCX that this process has mapped, each once: more than one means that two libraries of this process
/// brought their own, which share nothing but the process's memory hooks.
pub fn loaded_files() -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    files_in(&maps)
}

fn files_in(maps: &str) -> Vec<String> {
    let paths = maps.lines().filter_map(|line| line.split_once('/').map(|(_, path)| format!("/{path}")));
    let is_ucp = |path: &String| {
        let name = path.rsplit('/').next().unwrap_or_default();
        name.starts_with("libucp.so") || name.starts_with("libucp-")
    };
    paths.filter(is_ucp).collect::<BTreeSet<_>>().into_iter().collect()
}

fn text_of(ptr: *const c_char, status: Status) -> String {
    // SAFETY: one of UCX's static texts.
    format!("{} ({status})", unsafe { text(ptr) })
}

static LOG: PerProcess<OnceLock<Log>> = PerProcess::new();

/// Passes a log line of UCX on to our log. UCX would print it on stdout, which belongs to the program.
unsafe extern "C" fn log_line(
    _file: *const c_char,
    _line: c_uint,
    _function: *const c_char,
    level: c_int,
    _component: *const c_void,
    format: *const c_char,
    args: *mut c_void,
) -> c_int {
    unsafe extern "C" {
        fn vsnprintf(to: *mut c_char, len: usize, format: *const c_char, args: *mut c_void) -> c_int;
    }
    let mut line = [0_u8; 512];
    // SAFETY: UCX passes a format and its arguments; vsnprintf writes at most the length, with a zero.
    unsafe { vsnprintf(line.as_mut_ptr().cast(), line.len(), format, args) };
    let line = CStr::from_bytes_until_nul(&line).unwrap_or_default().to_string_lossy();
    if let Some(log) = LOG.get() {
        // UCX logs every connection that ends as an error, whichever end closed it; the lane reports the relevant ones.
        if level <= raw::LOG_WARN {
            log.info(format_args!("UCX: {line}"))
        } else {
            log.debug(format_args!("UCX: {line}"))
        }
    }
    raw::LOG_STOP
}

/// A lane's error with UCX's text.
pub(crate) fn lane_error(library: &Library, what: &str, status: Status) -> LaneError {
    let text = format!("{what}: {}", library.status(status));
    if status == raw::ERR_CONNECTION_RESET { LaneError::Closed(text) } else { LaneError::Down(text) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_another_interface_are_refused_by_name() {
        for known in [(1, 12), (1, 13), (1, 22), (1, 30)] {
            assert_eq!(is_known(known, "x"), Ok(()));
        }
        let error = is_known((2, 0), "2.0.1").expect_err("another major version");
        assert!(error.why.contains("2.0.1") && error.why.contains("another major version"), "{error:?}");
        let error = is_known((1, 11), "1.11.2").expect_err("too old");
        assert!(error.why.contains("1.11.2") && error.why.contains("1.12 is the oldest"), "{error:?}");
    }

    #[test]
    fn two_libraries_are_counted_once_each() {
        let maps = "7f00-7f10 r-xp 00000000 08:01 1  /usr/lib/x86_64-linux-gnu/libucp.so.0.0.0\n\
                    7f10-7f20 rw-p 00000000 08:01 1  /usr/lib/x86_64-linux-gnu/libucp.so.0.0.0\n\
                    7f20-7f30 r-xp 00000000 08:01 2  /venv/nixl.libs/libucp-1a2b.so.0.0.0\n\
                    7f30-7f40 r-xp 00000000 08:01 3  /usr/lib/libucs.so.0.0.0\n7f40-7f50 rw-p 0 0:0 0\n";
        let found = files_in(maps);
        assert_eq!(found, ["/usr/lib/x86_64-linux-gnu/libucp.so.0.0.0", "/venv/nixl.libs/libucp-1a2b.so.0.0.0"]);
    }
}
