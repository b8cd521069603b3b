//! Mutexes and conditions whose waiting threads only the kernel knows.
//!
//! A forked child has the memory of its parent's threads, but not the threads. Locks that list their waiting threads in
//! memory of the process have threads in these lists that do not exist in the child, and write into what was theirs. A
//! mutex here is a word on which threads sleep by `futex(2)`: a lock that the child makes has nothing of the parent's.
//!
//! Unlike [`std::sync`]: no poisoning, a lock can be handed to a thread that waits for it ([`MutexGuard::bump`]), and a
//! wait for it can have a deadline ([`Mutex::try_lock_until`]).
//!
//! Locks of objects are safe at a fork because the child is refused the objects. Those of statics are safe because the child
//! has statics of its own: [`PerProcess`].

#[cfg(not(loom))]
mod condvar;
mod futex;
#[cfg(all(test, loom))]
mod models;
#[cfg(not(loom))]
mod mutex;
mod process;
mod word;

#[cfg(not(loom))]
pub use self::condvar::{Condvar, WaitTimeoutResult};
#[cfg(not(loom))]
pub use self::mutex::{Mutex, MutexGuard, RawMutex};
pub use self::process::{PerProcess, watch_forks};
