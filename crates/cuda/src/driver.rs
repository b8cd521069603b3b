//! Loading the driver, and the reasons why it may be absent.
#![allow(unsafe_code)]

use std::ffi::{CStr, OsStr, c_char, c_int};
use std::fmt;
use std::fs::File;
use std::io::ErrorKind as IoKind;
use std::sync::Arc;

use crossrail_types::{Error, ErrorKind, Reason, Result};
use libloading::Library;

use crate::raw::{Code, Raw, loader_message};

/// The oldest supported driver, by the CUDA version that it supports (1000 * major + 10 * minor): CUDA 12.0.
pub const MIN_DRIVER: u32 = 12_000;

const LIBRARY: &str = "libcuda.so.1";
const CONTROL_DEVICE: &str = "/dev/nvidiactl";
const OUT_OF_MEMORY: Code = 2;
const NO_DEVICE: Code = 100;
const NOT_SUPPORTED: Code = 801;

/// Why CUDA cannot be used on this machine. `Display` renders one line, including a remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Absent {
    /// The driver library could not be loaded; with the loader's message.
    NoLibrary(String),
    /// The driver supports only CUDA versions before [`MIN_DRIVER`].
    TooOld {
        /// The version it supports, as 1000 * major + 10 * minor.
        found: u32,
    },
    /// The driver reports a supported version but lacks a function.
    Incomplete(&'static str),
    /// The driver is loaded but sees no GPU.
    NoDevice,
    /// This user has no permission to open the GPU's device file.
    Permission(&'static str),
    /// `cuInit` or one of the first queries failed; with the call, and the name, number and text of the code.
    Failed(String),
}

/// A failed call of the driver's: the source of the [`Error`] that reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverError {
    /// The code (`CUresult`).
    pub code: u32,
    text: String,
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for DriverError {}

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
            Absent::Failed(why) => write!(f, "the CUDA driver failed to start: {why}"),
        }
    }
}

impl std::error::Error for Absent {}

/// Formats a version: `12.4` for 12040.
pub(crate) fn version_text(version: u32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// The CUDA driver. Clones share it; may be used from any thread.
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
    /// Loads and initialises the driver of this machine. Creates no context and allocates no GPU memory.
    ///
    /// # Errors
    /// [`Absent`], which is a state of the machine rather than a failure.
    pub fn load() -> std::result::Result<Cuda, Absent> {
        // SAFETY: NVIDIA's driver, found by the system's loader under its name, as in every CUDA program.
        unsafe { Cuda::load_from(LIBRARY) }
    }

    /// Like [`Cuda::load`], from the given file.
    ///
    /// # Safety
    /// The file must be a CUDA driver, whose functions behave as documented by NVIDIA.
    ///
    /// # Errors
    /// As [`Cuda::load`].
    pub unsafe fn load_from(file: impl AsRef<OsStr>) -> std::result::Result<Cuda, Absent> {
        // SAFETY: guaranteed by the caller.
        let library = unsafe { Library::new(file.as_ref()) }.map_err(|why| Absent::NoLibrary(loader_message(&why)))?;
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

    /// The newest CUDA version that the driver supports, as 1000 * major + 10 * minor.
    pub fn version(&self) -> u32 {
        self.version
    }

    pub(crate) fn device_count(&self) -> Result<u32> {
        let mut count: c_int = 0;
        // SAFETY: `count` is a valid out pointer.
        self.check("cuda devices", "cuDeviceGetCount", unsafe { (self.raw().cuDeviceGetCount)(&mut count) })?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    pub(crate) fn raw(&self) -> &Raw {
        &self.raw
    }

    /// An optional function; [`ErrorKind::Unsupported`] if the driver lacks it.
    pub(crate) fn optional<F: Copy>(&self, operation: &str, call: &str, function: Option<F>) -> Result<F> {
        function.ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, operation, format!("this CUDA driver lacks {call}"))
                .with_reason(Reason::DriverTooOld)
                .with_hint("update NVIDIA's driver; everything else works without it")
        })
    }

    /// Turns the code of a call into a result; the error has the call, and the name, number and text of the code.
    pub(crate) fn check(&self, operation: &str, call: &str, code: Code) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let (kind, reason) = match code {
            OUT_OF_MEMORY => (ErrorKind::Exhausted, Some(Reason::Memory)),
            NOT_SUPPORTED => (ErrorKind::Unsupported, Some(Reason::DeviceUnsupported)),
            _ => (ErrorKind::Io, None),
        };
        let text = self.failed(call, code);
        let source = DriverError { code, text: text.clone() };
        Err(Error { reason, ..Error::new(kind, operation, text).with_source(source) })
    }

    /// `cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory`.
    fn failed(&self, call: &str, code: Code) -> String {
        let name = self.text(self.raw().cuGetErrorName, code).unwrap_or("unknown error code");
        let text = self.text(self.raw().cuGetErrorString, code).unwrap_or("no description");
        format!("{call}: {name} ({code}): {text}")
    }

    fn text(&self, ask: unsafe extern "C" fn(Code, *mut *const c_char) -> Code, code: Code) -> Option<&str> {
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: `text` is a valid out pointer; for an unknown code the driver returns an error and null.
        let answer = unsafe { ask(code, &mut text) };
        if answer != 0 || text.is_null() {
            return None;
        }
        // SAFETY: the driver returns a static C string, and stays loaded while `self`, from which the result borrows,
        // is alive.
        unsafe { CStr::from_ptr(text) }.to_str().ok()
    }

    /// Classifies an error code of `cuInit`. The driver reports an unreadable device file as a missing GPU.
    fn diagnose(&self, code: Code) -> Absent {
        match File::open(CONTROL_DEVICE) {
            Err(error) if error.kind() == IoKind::PermissionDenied => Absent::Permission(CONTROL_DEVICE),
            _ if code == NO_DEVICE => Absent::NoDevice,
            _ => Absent::Failed(self.failed("cuInit", code)),
        }
    }
}

/// The CUDA version that the driver in `library` supports. Queried before all else, because an old driver lacks
/// functions.
fn version_of(library: &Library) -> std::result::Result<u32, Absent> {
    type Ask = unsafe extern "C" fn(*mut c_int) -> Code;
    const NAME: &str = "cuDriverGetVersion";
    // SAFETY: the function has had this signature since CUDA 2.2; it is used only while the library is loaded.
    let ask = unsafe { library.get::<Ask>(NAME.as_bytes()) }.map_err(|_| Absent::Incomplete(NAME))?;
    let mut version: c_int = 0;
    // SAFETY: `version` is a valid out pointer; the call needs no initialisation.
    match unsafe { ask(&mut version) } {
        0 => Ok(u32::try_from(version).unwrap_or(0)),
        code => Err(Absent::Failed(format!("{NAME}: code {code}"))),
    }
}
