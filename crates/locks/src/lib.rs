//! Futex-based mutexes and condition variables that are safe to use in a forked child.
//!
//! A forked child has a copy of its parent's memory, but none of the other threads. A lock that keeps a list of waiting
//! threads in process memory then lists threads that do not exist in the child, and writes into their former stacks. A
//! mutex here is a word on which threads sleep by `futex(2)`: a lock created in the child shares no state with the
//! parent's threads.
//!
//! Unlike [`std::sync`]: no poisoning, a lock can be handed to a thread that waits for it ([`MutexGuard::bump`]), and a
//! wait for it can have a deadline ([`Mutex::try_lock_until`]).
//!
//! Locks in objects are safe because the child is denied use of the parent's objects, locks in statics because each
//! process has its own statics: [`PerProcess`].
//!
//! Signals are here as well: which threads take them ([`signals_blocked`]), SIGPIPE ([`without_sigpipe`]), and calls that
//! cannot be interrupted ([`Apart`]).

#[cfg(not(loom))]
mod apart;
#[cfg(not(loom))]
mod condvar;
mod futex;
#[cfg(all(test, loom))]
mod models;
#[cfg(not(loom))]
mod mutex;
mod process;
mod signals;
mod word;

#[cfg(not(loom))]
pub use self::apart::Apart;
#[cfg(not(loom))]
pub use self::condvar::{Condvar, WaitTimeoutResult};
#[cfg(not(loom))]
pub use self::mutex::{Mutex, MutexGuard, RawMutex};
pub use self::process::{PerProcess, watch_forks};
#[cfg(not(loom))]
pub use self::signals::keeping_handlers;
pub use self::signals::{ignores_sigpipe, signals_blocked, without_sigpipe};
