//! Kernels from source: compiled by NVRTC at run time, kept on disk.
//!
//! ```text
//! Library     libnvrtc, found where CUDA or Python's packages have it
//! Compiler    source + options + architecture -> Compiled, through the cache where there is one
//! Cache       a directory of compiled kernels, each under the hash of all that it came from
//! Compiled    machine code and the compiler's log; warnings and spills are read from the log
//! ```

mod cache;
mod compile;
mod library;
mod log;

pub use cache::Cache;
pub use compile::{Compiled, Compiler, Origin};
pub use library::{Library, NotFound, Places, Source};
pub use log::{KernelReport, Report};
