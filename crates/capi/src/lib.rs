//! The C interface: one `extern "C"` function for each of `include/crossrail.h` and `crossrail_experts.h`, whose
//! comments are the reference.
//!
//! ```text
//! abi         structs and numbers as C has them; what grows is read and written by its size
//! failure     errors as C reads them: of this thread's last call, of a request
//! guard       the frame of every function: arguments, panics, results
//! output      bytes, texts and arrays that the caller frees
//! texts       what the engine reports, as text and as JSON
//! shared      what the handles of one worker's objects share; requests of its pool and queue
//! waits       waits that another thread ends
//! gpu_args    arguments of operations on GPUs, checked
//! log context worker endpoint region operations requests lists group experts exchange gpu gpu_calls
//!             the functions
//! ```
//!
//! A handle is a `Box` as a raw pointer; handles keep what they depend on, so that they are freed in any order. Nothing
//! here makes progress, waits or decides by itself: that is the engine's, and that of the crates of groups and experts.
#![allow(unsafe_code)] // pointers from C; each function names what it requires

mod abi;
mod context;
mod endpoint;
mod exchange;
mod experts;
mod failure;
mod gpu;
mod gpu_args;
mod gpu_calls;
mod group;
mod guard;
mod lists;
mod log;
mod operations;
mod output;
mod region;
mod requests;
mod shared;
mod texts;
mod waits;
mod worker;
