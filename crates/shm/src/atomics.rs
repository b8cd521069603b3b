//! The atomics of shared memory: those of the standard library, or the model checker's in its build (`--cfg loom`),
//! which runs the [models](crate) in every order that the memory model allows.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU64, fence};
