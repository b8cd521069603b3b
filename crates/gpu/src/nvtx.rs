//! Ranges that profilers show on their time line (NVTX, version 3).
//!
//! A profiler names its library in `NVTX_INJECTION64_PATH`. It is loaded when the first range begins, and writes its
//! callbacks into tables that it requests from us. Without a profiler, a range costs one load.
#![allow(unsafe_code)]

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use crossrail_locks::PerProcess;

use libloading::Library;

const VERSION: u32 = 3;
/// Tables that a tool may ask for.
const CALLBACKS: u32 = 1;
const VERSION_INFO: u32 = 3;
/// Modules: core, CUDA, OpenCL, CUDA runtime, core 2, sync; and how many functions each has, number 0 being none.
const FUNCTIONS: [usize; 7] = [0, 16, 9, 15, 7, 16, 7];
const MOST: usize = 16;
const CORE: usize = 1;
const RANGE_START: usize = 5;
const RANGE_END: usize = 7;

type Start = unsafe extern "C" fn(*const c_char) -> u64;
type End = unsafe extern "C" fn(u64);
type Initialize = unsafe extern "C" fn(extern "C" fn(u32) -> *const c_void) -> c_int;
type Cell = AtomicPtr<c_void>;

/// What one module's functions are: pointers to cells, into which the tool writes.
type Table = [*const Cell; MOST + 1];

#[repr(C)]
struct Callbacks {
    size: usize,
    module: extern "C" fn(c_uint, *mut *const *const Cell, *mut c_uint) -> c_int,
}

#[repr(C)]
struct VersionInfo {
    size: usize,
    version: u32,
    reserved: u32,
    told: extern "C" fn(u32),
}

static EXPORTED: Callbacks = Callbacks { size: size_of::<Callbacks>(), module };
static ABOUT: VersionInfo = VersionInfo { size: size_of::<VersionInfo>(), version: VERSION, reserved: 0, told };
static CELLS: [[Cell; MOST + 1]; 7] = [const { [const { AtomicPtr::new(null_mut()) }; MOST + 1] }; 7];
static TABLES: Tables = Tables(tables());
static TOOL: PerProcess<OnceLock<Option<Tool>>> = PerProcess::new();

struct Tables([Table; 7]);

// SAFETY: constant addresses of atomics.
unsafe impl Sync for Tables {}

const fn tables() -> [Table; 7] {
    let mut tables = [[std::ptr::null::<Cell>(); MOST + 1]; 7];
    let mut module = 1;
    while module < tables.len() {
        let mut function = 1;
        while function < FUNCTIONS[module] {
            tables[module][function] = &raw const CELLS[module][function];
            function += 1;
        }
        module += 1;
    }
    tables
}

extern "C" fn export(table: u32) -> *const c_void {
    match table {
        CALLBACKS => (&raw const EXPORTED).cast(),
        VERSION_INFO => (&raw const ABOUT).cast(),
        _ => std::ptr::null(),
    }
}

extern "C" fn module(module: c_uint, table: *mut *const *const Cell, size: *mut c_uint) -> c_int {
    let Some(found) = TABLES.0.get(module as usize).filter(|_| module != 0) else { return 0 };
    // SAFETY: the tool gives places for the answers, or null for what it does not want.
    unsafe {
        if let Some(table) = table.as_mut() {
            *table = found.as_ptr();
        }
        if let Some(size) = size.as_mut() {
            *size = FUNCTIONS[module as usize] as c_uint;
        }
    }
    1
}

extern "C" fn told(_version: u32) {}

/// Callbacks of a profiler.
struct Tool {
    start: Start,
    end: End,
    _library: Option<Library>,
}

impl Tool {
    /// The profiler that the environment names.
    fn find() -> Option<Tool> {
        let path = std::env::var_os("NVTX_INJECTION64_PATH")?;
        // SAFETY: the user who sets this variable accepts this library in the process, as with every program with NVTX.
        let library = unsafe { Library::new(path) }.ok()?;
        // SAFETY: the function has this signature in every such library; it is called while the library is loaded.
        let initialize = unsafe { *library.get::<Initialize>(b"InitializeInjectionNvtx2").ok()? };
        // SAFETY: as above.
        unsafe { Tool::begin(initialize, Some(library)) }
    }

    /// # Safety
    /// `initialize` must be a tool's entry point, and stay loaded as long as `library`.
    unsafe fn begin(initialize: Initialize, library: Option<Library>) -> Option<Tool> {
        // SAFETY: the tables that it asks for are static, and as NVTX describes them.
        if unsafe { initialize(export) } == 0 {
            return None;
        }
        let function = |number: usize| {
            let function = CELLS[CORE][number].load(Ordering::Acquire);
            (!function.is_null()).then_some(function)
        };
        let (start, end) = (function(RANGE_START)?, function(RANGE_END)?);
        // SAFETY: a tool writes functions of these types at these numbers.
        let (start, end) =
            unsafe { (std::mem::transmute::<*mut c_void, Start>(start), std::mem::transmute::<*mut c_void, End>(end)) };
        Some(Tool { start, end, _library: library })
    }
}

/// A range, from when it is made until it is dropped; on any threads.
#[derive(Debug, Default)]
pub(crate) struct Range(Option<u64>);

impl Range {
    /// `name` is called only with a profiler attached.
    #[inline]
    pub(crate) fn start(name: impl FnOnce() -> String) -> Range {
        let Some(tool) = TOOL.get_or_init(Tool::find) else { return Range(None) };
        let Ok(name) = CString::new(name()) else { return Range(None) };
        // SAFETY: the text ends with zero, and the tool copies it.
        Range(Some(unsafe { (tool.start)(name.as_ptr()) }))
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        if let (Some(id), Some(Some(tool))) = (self.0, TOOL.get()) {
            // SAFETY: the tool's own number, ended once.
            unsafe { (tool.end)(id) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;
    use std::sync::Mutex;

    use super::*;

    static HEARD: Mutex<Vec<String>> = Mutex::new(Vec::new());

    unsafe extern "C" fn start(name: *const c_char) -> u64 {
        // SAFETY: the caller gives terminated text.
        let name = unsafe { CStr::from_ptr(name) };
        let mut heard = HEARD.lock().unwrap();
        heard.push(format!("begin {}", name.to_str().unwrap()));
        heard.len() as u64
    }

    unsafe extern "C" fn end(id: u64) {
        HEARD.lock().unwrap().push(format!("end {id}"));
    }

    /// A profiler, as one does it in C.
    unsafe extern "C" fn initialize(export: extern "C" fn(u32) -> *const c_void) -> c_int {
        assert!(export(2).is_null() && export(99).is_null());
        // SAFETY: the tables are what NVTX describes.
        let (about, callbacks) =
            unsafe { (&*export(VERSION_INFO).cast::<VersionInfo>(), &*export(CALLBACKS).cast::<Callbacks>()) };
        assert_eq!((about.version, about.size, callbacks.size), (3, 24, 16));
        for (number, count) in FUNCTIONS.iter().enumerate().skip(1) {
            let (mut table, mut size) = (std::ptr::null(), 0);
            assert_eq!((callbacks.module)(number as c_uint, &mut table, &mut size), 1);
            assert_eq!(size as usize, *count);
            for function in 1..*count {
                // SAFETY: a table has as many entries as it says, and each but the first is a cell.
                let cell = unsafe { &**table.add(function) };
                let heard = match (number, function) {
                    (CORE, RANGE_START) => start as *mut c_void,
                    (CORE, RANGE_END) => end as *mut c_void,
                    _ => null_mut(),
                };
                cell.store(heard, Ordering::Release);
            }
        }
        let (mut table, mut size) = (std::ptr::null(), 0);
        assert_eq!((callbacks.module)(0, &mut table, &mut size), 0);
        assert_eq!((callbacks.module)(7, &mut table, null_mut()), 0);
        1
    }

    #[test]
    fn a_profiler_hears_of_ranges() {
        // SAFETY: a tool's entry point.
        let tool = unsafe { Tool::begin(initialize, None) };
        assert!(TOOL.set(tool).is_ok() || TOOL.get().is_some());
        if TOOL.get().is_some_and(Option::is_none) {
            // Another test of this process was first, and found that nobody listens.
            let name = CString::new("unpack").unwrap();
            // SAFETY: a tool's entry point; the text ends with zero.
            let tool = unsafe { Tool::begin(initialize, None) }.unwrap();
            // SAFETY: as above.
            unsafe { (tool.end)((tool.start)(name.as_ptr())) };
        } else {
            drop(Range::start(|| "unpack".to_owned()));
        }
        let heard = HEARD.lock().unwrap();
        let begun = heard.iter().position(|line| line == "begin unpack").expect("a range began");
        assert!(heard.contains(&format!("end {}", begun + 1)), "{heard:?}");
    }
}
