//! The hostile libfabric of `tests/fabric/hostile`, compiled and loaded.
#![allow(unsafe_code, dead_code)]

use std::ffi::{CString, c_char, c_int, c_uint};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crossrail_fabric::Library;
use crossrail_transport::conformance::skip;

const SOURCES: [&str; 6] = ["control.c", "endpoint.c", "info.c", "memory.c", "network.c", "objects.c"];
const FLAGS: [&str; 6] = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-g"];

/// The folder of the C sources.
pub(crate) fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fabric")
}

/// Compiles with the C compiler; false: there is none, which is reported.
pub(crate) fn compile(arguments: &[&str]) -> bool {
    match Command::new("cc").args(FLAGS).args(arguments).current_dir(sources()).output() {
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => {
            skip(&format!("there is no C compiler: {error}"));
            return false;
        }
    }
    true
}

/// A path for a file of this process.
pub(crate) fn place(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fabric-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    folder.join(name)
}

/// The compiled library.
pub(crate) fn library() -> Option<&'static Path> {
    static PATH: OnceLock<Option<PathBuf>> = OnceLock::new();
    let path = PATH.get_or_init(|| {
        let path = place("libfabric.so.1");
        let sources: Vec<String> = SOURCES.iter().chain(&["queues.c"]).map(|name| format!("hostile/{name}")).collect();
        let mut arguments = vec!["-shared", "-fPIC", "-Wl,-soname,libfabric.so.1"];
        arguments.extend(["-Wl,--version-script=hostile/hostile.map", "-o", path.to_str().expect("text")]);
        arguments.extend(sources.iter().map(String::as_str));
        arguments.push("-lpthread");
        compile(&arguments).then_some(path)
    });
    path.as_deref()
}

/// The functions for tests. One run at a time.
pub(crate) struct Hostile {
    library: libloading::Library,
    pub(crate) fabric: &'static Library,
}

impl Hostile {
    /// Loads it as the libfabric of this process.
    pub(crate) fn load() -> Option<Hostile> {
        let path = library()?;
        let fabric = Library::load(Some(path)).expect("it has what this crate needs");
        // SAFETY: the same file once more: loaded already.
        let library = unsafe { libloading::Library::new(path) }.expect("loaded before");
        Some(Hostile { library, fabric })
    }

    /// Begins a run, in which the seed decides all but `options`, as `tx=8,iov=1`.
    pub(crate) fn begin(&self, seed: u64, options: &str) {
        let options = CString::new(options).expect("no zeros");
        // SAFETY: as control.c declares it.
        unsafe {
            let begin = self.library.get::<unsafe extern "C" fn(u64, *const c_char)>(b"hostile_begin\0");
            begin.expect("exported")(seed, options.as_ptr());
        }
    }

    /// The violations until now; with `ended` also what is open, which must be nothing.
    pub(crate) fn violations(&self, ended: bool) -> String {
        let mut text = vec![0u8; 1 << 14];
        // SAFETY: as control.c declares it; it writes at most that many bytes.
        let len = unsafe {
            let report =
                self.library.get::<unsafe extern "C" fn(*mut c_char, usize, c_int) -> usize>(b"hostile_report\0");
            report.expect("exported")(text.as_mut_ptr().cast(), text.len(), ended.into())
        };
        text.truncate(len.min((1 << 14) - 1));
        String::from_utf8_lossy(&text).into_owned()
    }

    fn number(&self, function: &[u8], name: &str) -> u64 {
        let name = CString::new(name).expect("no zeros");
        // SAFETY: as control.c declares it.
        unsafe {
            let function = self.library.get::<unsafe extern "C" fn(*const c_char) -> u64>(function);
            function.expect("exported")(name.as_ptr())
        }
    }

    /// Number of events of this kind in this run.
    pub(crate) fn count(&self, name: &str) -> u64 {
        self.number(b"hostile_count\0", name)
    }

    /// Value of an option in this run.
    pub(crate) fn option(&self, name: &str) -> u64 {
        self.number(b"hostile_option\0", name)
    }

    /// Loses the link of a device: 0: silently, 1: by errors, 2: while its writes complete.
    pub(crate) fn lose(&self, device: &str, kind: u32) -> u32 {
        let device = CString::new(device).expect("no zeros");
        // SAFETY: as control.c declares it.
        unsafe {
            let lose = self.library.get::<unsafe extern "C" fn(*const c_char, c_uint) -> c_uint>(b"hostile_lose\0");
            lose.expect("exported")(device.as_ptr(), kind)
        }
    }

    /// Signal handlers of the library that are installed.
    pub(crate) fn handlers(&self) -> u32 {
        // SAFETY: as objects.c declares it.
        unsafe { self.library.get::<unsafe extern "C" fn() -> c_uint>(b"hostile_handlers\0").expect("exported")() }
    }
}
