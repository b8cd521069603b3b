//! The driver: loaded, or absent with the reason.
#![allow(unsafe_code)]

use std::ffi::{CStr, OsStr, c_char, c_int};
use std::fmt;
use std::fs::File;
use std::io::ErrorKind as IoKind;
use std::sync::Arc;

use crossrail_types::{Error, ErrorKind, Result};
use libloading::Library;

use crate::raw::{Code, Raw, loader_words};

/// The oldest driver that is used, as the CUDA version it supports (1000 * major + 10 * minor): CUDA 12.0.
pub const MIN_DRIVER: u32 = 12_000;

const LIBRARY: &str = "libcuda.so.1";
const CONTROL_DEVICE: &str = "/dev/nvidiactl";
const OUT_OF_MEMORY: Code = 2;
const NO_DEVICE: Code = 100;
const NOT_SUPPORTED: Code = 801;

/// Why there is no CUDA on this machine. `Display` says it in one line, with what would help.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Absent {
    /// The driver's library could not be loaded; the loader's words.
    NoLibrary(String),
    /// The driver supports only an older CUDA than [`MIN_DRIVER`]; both as 1000 * major + 10 * minor.
    TooOld {
        /// What it supports.
        found: u32,
    },
    /// The driver says it is new enough but lacks a function.
    Incomplete(&'static str),
    /// The driver is there but sees no GPU.
    NoDevice,
    /// The GPU's device file exists but this user may not open it.
    Permission(&'static str),
    /// `cuInit` or one of the first questions failed; call, code's name, number and text.
    Failed(String),
}

impl fmt::Display for Absent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Absent::NoLibrary(why) => write!(f, "no CUDA driver: {why}; install NVIDIA's driver to use GPUs"),
            Absent::TooOld { found } => write!(
                f,
                "the CUDA driver is too old: it supports CUDA {}, at least {} is needed; update NVIDIA's driver",
                version_text(*found),
                version_text(MIN_DRIVER)
            ),
            Absent::Incomplete(name) => write!(f, "the CUDA driver lacks {name}; reinstall NVIDIA's driver"),
            Absent::NoDevice => write!(f, "the CUDA driver sees no GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES"),
            Absent::Permission(path) => write!(f, "no permission to open {path}; let this user open /dev/nvidia*"),
            Absent::Failed(why) => write!(f, "the CUDA driver does not start: {why}"),
        }
    }
}

impl std::error::Error for Absent {}

/// `12.4` for 12040.
pub(crate) fn version_text(version: u32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// The CUDA driver. Clones share it; usable from any thread.
#[derive(Clone)]
pub struct Cuda {
    raw: Arc<Raw>,
    version: u32,
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cuda({})", version_text(self.version))
    }
}

impl Cuda {
    /// Loads and starts the driver of this machine. No context is made and no GPU memory taken.
    ///
    /// # Errors
    /// [`Absent`]: a state of the machine, not a failure.
    pub fn load() -> std::result::Result<Cuda, Absent> {
        // SAFETY: NVIDIA's driver, found under its name by the system's loader, as every CUDA program loads it.
        unsafe { Cuda::load_from(LIBRARY) }
    }

    /// Like [`Cuda::load`], from a given file.
    ///
    /// # Safety
    /// The file must be a CUDA driver: its functions must do what their names say.
    ///
    /// # Errors
    /// As [`Cuda::load`].
    pub unsafe fn load_from(file: impl AsRef<OsStr>) -> std::result::Result<Cuda, Absent> {
        // SAFETY: the caller vouches for the file.
        let library = unsafe { Library::new(file.as_ref()) }.map_err(|why| Absent::NoLibrary(loader_words(&why)))?;
        let found = version_of(&library)?;
        if found < MIN_DRIVER {
            return Err(Absent::TooOld { found });
        }
        let raw = Raw::new(library).map_err(Absent::Incomplete)?;
        let cuda = Cuda { raw: Arc::new(raw), version: found };
        // SAFETY: cuInit takes a number and may be called repeatedly, from any thread.
        match unsafe { (cuda.raw().cuInit)(0) } {
            0 => {}
            code => return Err(cuda.diagnose(code)),
        }
        match cuda.device_count() {
            Ok(0) => Err(cuda.diagnose(NO_DEVICE)),
            Ok(_) => Ok(cuda),
            Err(error) => Err(Absent::Failed(error.detail)),
        }
    }

    /// The newest CUDA that the driver supports, as 1000 * major + 10 * minor.
    pub fn version(&self) -> u32 {
        self.version
    }

    pub(crate) fn device_count(&self) -> Result<u32> {
        let mut count: c_int = 0;
        // SAFETY: `count` is a valid place for one int.
        self.check("cuda devices", "cuDeviceGetCount", unsafe { (self.raw().cuDeviceGetCount)(&mut count) })?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    pub(crate) fn raw(&self) -> &Raw {
        &self.raw
    }

    /// A function that not every driver has.
    pub(crate) fn optional<F: Copy>(&self, operation: &str, call: &str, function: Option<F>) -> Result<F> {
        function.ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, operation, format!("this CUDA driver lacks {call}"))
                .with_hint("update NVIDIA's driver; everything else works without it")
        })
    }

    /// Nothing for success; else an error with the call, the code's name, number and text.
    pub(crate) fn check(&self, operation: &str, call: &str, code: Code) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let kind = match code {
            OUT_OF_MEMORY => ErrorKind::Exhausted,
            NOT_SUPPORTED => ErrorKind::Unsupported,
            _ => ErrorKind::Io,
        };
        Err(Error::new(kind, operation, self.failed(call, code)))
    }

    /// `cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory`.
    fn failed(&self, call: &str, code: Code) -> String {
        let name = self.text(self.raw().cuGetErrorName, code).unwrap_or("an unknown code");
        let text = self.text(self.raw().cuGetErrorString, code).unwrap_or("this driver does not describe it");
        format!("{call}: {name} ({code}): {text}")
    }

    fn text(&self, ask: unsafe extern "C" fn(Code, *mut *const c_char) -> Code, code: Code) -> Option<&str> {
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: `text` is a valid place for the answer; an unknown code is answered with an error and null.
        let answer = unsafe { ask(code, &mut text) };
        if answer != 0 || text.is_null() {
            return None;
        }
        // SAFETY: the driver answers with constant, terminated text of its own, and stays loaded while `self`, from
        // which the answer borrows, is alive.
        unsafe { CStr::from_ptr(text) }.to_str().ok()
    }

    /// What `cuInit`'s code means: an unreadable device file looks like no GPU at all.
    fn diagnose(&self, code: Code) -> Absent {
        match File::open(CONTROL_DEVICE) {
            Err(error) if error.kind() == IoKind::PermissionDenied => Absent::Permission(CONTROL_DEVICE),
            _ if code == NO_DEVICE => Absent::NoDevice,
            _ => Absent::Failed(self.failed("cuInit", code)),
        }
    }
}

/// The CUDA version that the driver in `library` supports; asked first, since an old one lacks functions.
fn version_of(library: &Library) -> std::result::Result<u32, Absent> {
    type Ask = unsafe extern "C" fn(*mut c_int) -> Code;
    const NAME: &str = "cuDriverGetVersion";
    // SAFETY: the function has had this signature since CUDA 2.2; it is used only while the library is loaded.
    let ask = unsafe { library.get::<Ask>(NAME.as_bytes()) }.map_err(|_| Absent::Incomplete(NAME))?;
    let mut version: c_int = 0;
    // SAFETY: `version` is a valid place for one int; the call needs no initialization.
    match unsafe { ask(&mut version) } {
        0 => Ok(u32::try_from(version).unwrap_or(0)),
        code => Err(Absent::Failed(format!("{NAME}: code {code}"))),
    }
}
