//! Run-time compilation of kernels by NVRTC, with a cache on disk.
//!
//! ```text
//! Library     libnvrtc, found in the CUDA toolkit or in Python packages
//! Compiler    source + options + architecture -> Compiled, through the cache if there is one
//! Cache       a directory of compiled kernels, named by the hash of everything they were compiled from
//! Compiled    machine code, and the compiler's log with warnings and resource usage
//! ```

mod cache;
mod compile;
mod library;
mod log;

pub use cache::Cache;
pub use compile::{Compiled, Compiler, Origin};
pub use library::{Library, NotFound, SearchPath, Source};
pub use log::{KernelReport, Report};
