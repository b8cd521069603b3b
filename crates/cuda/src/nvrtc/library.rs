//! libnvrtc: its search path, its functions, and compilation.
//!
//! Types and signatures are cudarc's, checked by the compiler. The library is not loaded by cudarc, because the choice
//! between several installed versions must not depend on the loader's search order, and because NVIDIA's Python
//! packages install it where the loader does not look.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, OsStr, OsString, c_char, c_int, c_void};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crossrail_types::{Error, ErrorKind, Result};
use cudarc::nvrtc::sys;
use libloading::os::unix;

use crate::driver::{Cuda, version_text};
use crate::raw::loader_message;

const COMPILATION_FAILED: u32 = 6;

/// The supported major versions, newest first.
const MAJORS: [&str; 2] = ["13", "12"];

/// The search path for NVRTC. Libraries already loaded into the process (by PyTorch) come first, then these folders,
/// then the loader's default path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SearchPath {
    /// Folders that may hold `libnvrtc.so.*`.
    pub folders: Vec<PathBuf>,
}

impl SearchPath {
    /// The standard search path: the Python environment of this code and of the interpreter; the active virtual
    /// environment (`VIRTUAL_ENV`); `CUDA_PATH` and `CUDA_HOME`; `/usr/local/cuda`.
    pub fn standard() -> SearchPath {
        let mut path = SearchPath::default();
        if let Some(packages) = own_file().as_deref().and_then(packages_of) {
            path.add_site_packages(packages);
        }
        if let Some(root) = std::env::args_os().next().as_deref().and_then(environment_of) {
            path.add_environment(&root);
        }
        if let Some(environment) = std::env::var_os("VIRTUAL_ENV") {
            path.add_environment(Path::new(&environment));
        }
        let named = ["CUDA_PATH", "CUDA_HOME"].into_iter().filter_map(std::env::var_os);
        for root in named.chain([OsString::from("/usr/local/cuda")]) {
            path.folders.push(Path::new(&root).join("lib64"));
            path.folders.push(Path::new(&root).join("targets/x86_64-linux/lib"));
        }
        path
    }

    /// Adds the folders of NVIDIA's packages in a virtual environment.
    pub fn add_environment(&mut self, root: &Path) {
        for python in entries(&root.join("lib")) {
            self.add_site_packages(&python.join("site-packages"));
        }
    }

    /// Adds the folders of NVIDIA's packages in a `site-packages` folder.
    pub fn add_site_packages(&mut self, folder: &Path) {
        self.folders.extend(entries(&folder.join("nvidia")).map(|package| package.join("lib")));
    }
}

/// The file that contains this code: the extension module or the program.
fn own_file() -> Option<PathBuf> {
    path_of(own_file as *const () as *const c_void)
}

/// The `site-packages` folder that contains a file.
fn packages_of(file: &Path) -> Option<&Path> {
    let named =
        |folder: &&Path| folder.file_name().is_some_and(|name| name == "site-packages" || name == "dist-packages");
    file.ancestors().find(named)
}

/// The virtual environment of the interpreter that runs this process.
fn environment_of(program: &OsStr) -> Option<PathBuf> {
    let root = Path::new(program).parent()?.parent()?;
    root.join("pyvenv.cfg").is_file().then(|| root.to_owned())
}

/// The entries of a folder, sorted for reproducible results.
fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> {
    let found = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut found: Vec<PathBuf> = found.collect();
    found.sort_by(|a, b| b.cmp(a));
    found.into_iter()
}

/// NVRTC was not found. `Display` lists the search path and a remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotFound {
    /// Every candidate, with the reason why it was rejected.
    pub tried: Vec<String>,
}

impl fmt::Display for NotFound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NVRTC was not found ({}); pip install nvidia-cuda-nvrtc, or set CUDA_PATH", self.tried.join("; "))
    }
}

impl std::error::Error for NotFound {}

macro_rules! table {
    ($( $name:ident($($arg:ty),* $(,)?); )+) => {
        $( const _: unsafe fn($($arg),*) -> sys::nvrtcResult = sys::$name; )+

        #[allow(non_snake_case)]
        struct Raw {
            $( $name: unsafe extern "C" fn($($arg),*) -> u32, )+
            nvrtcGetErrorString: unsafe extern "C" fn(u32) -> *const c_char,
            _library: unix::Library,
        }

        impl Raw {
            fn new(library: unix::Library) -> std::result::Result<Raw, &'static str> {
                Ok(Raw {
                    $( $name: symbol(&library, stringify!($name))?, )+
                    nvrtcGetErrorString: symbol(&library, "nvrtcGetErrorString")?,
                    _library: library,
                })
            }
        }
    };
}

fn symbol<F: Copy>(library: &unix::Library, name: &'static str) -> std::result::Result<F, &'static str> {
    // SAFETY: F is the function type in the table for this name, which the compiler has checked against cudarc's
    // declaration. The result is copied into a `Raw`, which keeps the library loaded.
    unsafe { library.get::<F>(name.as_bytes()) }.map(|found| *found).map_err(|_| name)
}

table! {
    nvrtcVersion(*mut c_int, *mut c_int);
    nvrtcCreateProgram(
        *mut sys::nvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char,
    );
    nvrtcDestroyProgram(*mut sys::nvrtcProgram);
    nvrtcCompileProgram(sys::nvrtcProgram, c_int, *const *const c_char);
    nvrtcGetProgramLogSize(sys::nvrtcProgram, *mut usize);
    nvrtcGetProgramLog(sys::nvrtcProgram, *mut c_char);
    nvrtcGetCUBINSize(sys::nvrtcProgram, *mut usize);
    nvrtcGetCUBIN(sys::nvrtcProgram, *mut c_char);
}

/// The source of a program. All headers are given here; none are read from disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source<'a> {
    /// The file name, for messages.
    pub name: &'a str,
    /// The source text.
    pub text: &'a str,
    /// The headers: name as included, and text.
    pub headers: &'a [(&'a str, &'a str)],
}

/// NVRTC, loaded. Clones share it. May be used from any thread, concurrently.
#[derive(Clone)]
pub struct Library {
    raw: Arc<Raw>,
    version: (u32, u32),
    file: String,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NVRTC {}.{} ({})", self.version.0, self.version.1, self.file)
    }
}

impl Library {
    /// Loads the first NVRTC of `path`.
    ///
    /// # Errors
    /// [`NotFound`], with every candidate that was tried.
    pub fn find(path: &SearchPath) -> std::result::Result<Library, NotFound> {
        let mut tried = Vec::new();
        for name in MAJORS.map(|major| format!("libnvrtc.so.{major}")) {
            if let Some(library) = loaded(&name)
                && let Ok(found) = Library::start(library, &name)
            {
                return Ok(found);
            }
        }
        for folder in &path.folders {
            match MAJORS.map(|major| folder.join(format!("libnvrtc.so.{major}"))).into_iter().find(|file| file.exists())
            {
                None => tried.push(format!("{}: not found", folder.display())),
                Some(file) => match Library::open(&file) {
                    Ok(found) => return Ok(found),
                    Err(why) => tried.push(why),
                },
            }
        }
        for name in MAJORS.map(|major| format!("libnvrtc.so.{major}")) {
            match Library::open(Path::new(&name)) {
                Ok(found) => return Ok(found),
                Err(why) => tried.push(why),
            }
        }
        Err(NotFound { tried })
    }

    /// The version: major, minor.
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// Checks that this driver can load the code that this library generates.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`], with both versions, if the driver supports only an older major version of CUDA.
    pub fn check(&self, cuda: &Cuda) -> Result<()> {
        let (major, minor) = self.version;
        let driver = cuda.version() / 1000;
        if major <= driver {
            return Ok(());
        }
        let detail = format!(
            "NVRTC {major}.{minor} requires a newer driver than this one, which supports CUDA {} at most",
            version_text(cuda.version())
        );
        Err(Error::new(ErrorKind::Unsupported, "kernels", detail)
            .with_hint(format!("update NVIDIA's driver, or pip install 'nvidia-cuda-nvrtc-cu{driver}'")))
    }

    /// The file it was loaded from.
    pub fn file(&self) -> &str {
        &self.file
    }

    fn open(file: &Path) -> std::result::Result<Library, String> {
        // SAFETY: NVIDIA's library, found by its name.
        let library = unsafe { unix::Library::open(Some(file), unix::RTLD_NOW | unix::RTLD_LOCAL) };
        let library = library.map_err(|why| loader_message(&why))?;
        Library::start(library, &file.to_string_lossy())
    }

    fn start(library: unix::Library, file: &str) -> std::result::Result<Library, String> {
        let raw = Raw::new(library).map_err(|name| format!("{file}: lacks {name}"))?;
        let path = path_of(raw.nvrtcVersion as *const c_void);
        if let Some(path) = &path {
            load_builtins(path);
        }
        let (mut major, mut minor): (c_int, c_int) = (0, 0);
        // SAFETY: both are valid out pointers.
        match unsafe { (raw.nvrtcVersion)(&mut major, &mut minor) } {
            0 => {
                let version = (u32::try_from(major).unwrap_or(0), u32::try_from(minor).unwrap_or(0));
                let file = path.map_or_else(|| file.to_owned(), |path| path.to_string_lossy().into_owned());
                Ok(Library { raw: Arc::new(raw), version, file })
            }
            code => Err(format!("{file}: nvrtcVersion: {}", describe(&raw, code))),
        }
    }

    /// Compiles `source` with `options` to machine code and a log. A compilation error contains the log.
    pub(super) fn compile(&self, source: &Source<'_>, options: &[String]) -> Result<(Vec<u8>, String)> {
        let operation = format!("compile {}", source.name);
        let program = Program::new(&self.raw, source, &operation)?;
        let options: Vec<CString> = options.iter().map(|text| terminated(text, &operation)).collect::<Result<_>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|text| text.as_ptr()).collect();
        let count = count(pointers.len(), &operation)?;
        // SAFETY: the program is alive; the array has `count` C strings.
        let code = unsafe { (self.raw.nvrtcCompileProgram)(program.handle, count, pointers.as_ptr()) };
        let log = program.log(&operation)?;
        if code != 0 {
            let what = describe(&self.raw, code);
            let kind = if code == COMPILATION_FAILED { ErrorKind::Unsupported } else { ErrorKind::Io };
            let detail = format!("nvrtcCompileProgram: {what}; log:\n{}", log.trim_end());
            return Err(
                Error::new(kind, operation, detail).with_hint(format!("{self:?}, options {}", options_text(&options)))
            );
        }
        Ok((program.image(&operation)?, log))
    }
}

/// Loads libnvrtc-builtins, which NVRTC opens by name when it compiles, from NVRTC's own folder: NVIDIA's Python
/// packages install it outside the loader's search path. If it is missing, compiling fails with a message of NVRTC.
fn load_builtins(nvrtc: &Path) {
    let (Some(folder), Some(major)) = (nvrtc.parent(), nvrtc.extension()) else { return };
    let prefix = format!("libnvrtc-builtins.so.{}.", major.to_string_lossy());
    for file in entries(folder) {
        if !file.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix)) {
            continue;
        }
        // SAFETY: NVIDIA's library, which has no initialisers.
        if let Ok(library) = unsafe { unix::Library::open(Some(&file), unix::RTLD_NOW | unix::RTLD_GLOBAL) } {
            // It must stay loaded: NVRTC opens it by name for every compilation.
            std::mem::forget(library);
        }
    }
}

/// The file that a function is loaded from.
fn path_of(function: *const c_void) -> Option<PathBuf> {
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: any address is permitted; `info` is a valid out pointer.
    if unsafe { libc::dladdr(function, &mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: not null, a C string, and valid while the library is loaded, which the caller ensures.
    Some(PathBuf::from(OsStr::from_bytes(unsafe { CStr::from_ptr(info.dli_fname) }.to_bytes())))
}

/// The library with this name, if the process has already loaded it.
fn loaded(name: &str) -> Option<unix::Library> {
    // SAFETY: loads nothing; it only increments the reference count of a loaded library.
    unsafe { unix::Library::open(Some(name), unix::RTLD_NOW | libc::RTLD_NOLOAD) }.ok()
}

fn describe(raw: &Raw, code: u32) -> String {
    // SAFETY: any code is permitted; the result is a static C string or null.
    let text = unsafe { (raw.nvrtcGetErrorString)(code) };
    if text.is_null() {
        return format!("code {code}");
    }
    // SAFETY: not null, a C string, and part of a library that stays loaded meanwhile.
    format!("{} ({code})", unsafe { CStr::from_ptr(text) }.to_string_lossy())
}

fn options_text(options: &[CString]) -> String {
    options.iter().map(|text| text.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

fn terminated(text: &str, operation: &str) -> Result<CString> {
    CString::new(text)
        .map_err(|_| Error::new(ErrorKind::Usage, operation, "the source or an option contains a zero byte"))
}

fn count(len: usize, operation: &str) -> Result<c_int> {
    c_int::try_from(len).map_err(|_| Error::new(ErrorKind::Usage, operation, "too many headers or options"))
}

/// An NVRTC program, destroyed on drop.
struct Program<'a> {
    raw: &'a Raw,
    handle: sys::nvrtcProgram,
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: created by `new`, destroyed once.
        unsafe { (self.raw.nvrtcDestroyProgram)(&mut self.handle) };
    }
}

impl<'a> Program<'a> {
    fn new(raw: &'a Raw, source: &Source<'_>, operation: &str) -> Result<Program<'a>> {
        let text = terminated(source.text, operation)?;
        let name = terminated(source.name, operation)?;
        let mut owned = Vec::new();
        for (name, text) in source.headers {
            owned.push((terminated(name, operation)?, terminated(text, operation)?));
        }
        let names: Vec<*const c_char> = owned.iter().map(|(name, _)| name.as_ptr()).collect();
        let texts: Vec<*const c_char> = owned.iter().map(|(_, text)| text.as_ptr()).collect();
        let count = count(owned.len(), operation)?;
        let mut handle: sys::nvrtcProgram = std::ptr::null_mut();
        // SAFETY: all texts are C strings and outlive the call, which copies them; both arrays have `count` entries.
        let code = unsafe {
            let (names, texts) = (names.as_ptr(), texts.as_ptr());
            (raw.nvrtcCreateProgram)(&mut handle, text.as_ptr(), name.as_ptr(), count, texts, names)
        };
        checked(raw, operation, "nvrtcCreateProgram", code)?;
        Ok(Program { raw, handle })
    }

    fn log(&self, operation: &str) -> Result<String> {
        let (size, read) = (self.raw.nvrtcGetProgramLogSize, self.raw.nvrtcGetProgramLog);
        let mut bytes = self.bytes(operation, "nvrtcGetProgramLog", size, read)?;
        bytes.truncate(bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len()));
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn image(&self, operation: &str) -> Result<Vec<u8>> {
        self.bytes(operation, "nvrtcGetCUBIN", self.raw.nvrtcGetCUBINSize, self.raw.nvrtcGetCUBIN)
    }

    fn bytes(&self, operation: &str, call: &str, size: Query<*mut usize>, read: Query<*mut c_char>) -> Result<Vec<u8>> {
        let mut len = 0;
        // SAFETY: the program is alive; `len` is a valid out pointer.
        checked(self.raw, operation, call, unsafe { size(self.handle, &mut len) })?;
        let mut bytes = vec![0_u8; len];
        // SAFETY: the program is alive; the buffer has the size it reported.
        checked(self.raw, operation, call, unsafe { read(self.handle, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }
}

/// A query about a program.
type Query<T> = unsafe extern "C" fn(sys::nvrtcProgram, T) -> u32;

fn checked(raw: &Raw, operation: &str, call: &str, code: u32) -> Result<()> {
    match code {
        0 => Ok(()),
        code => Err(Error::new(ErrorKind::Io, operation, format!("{call}: {}", describe(raw, code)))),
    }
}
