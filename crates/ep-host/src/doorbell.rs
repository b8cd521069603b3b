//! Sleeping until another process has written something.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::heap::Doorbell;

/// After a write into a heap: wakes its rank if it sleeps.
#[inline]
pub(crate) fn ring(doorbell: &Doorbell) {
    doorbell.rings.fetch_add(1, Ordering::SeqCst);
    if doorbell.sleeping.load(Ordering::SeqCst) != 0 {
        wake(&doorbell.rings);
    }
}

/// Sleeps until somebody rings, at most `limit`; not at all when `ready` says after the announcement that it need
/// not.
///
/// Either the writer's ring comes before the load of `rings` here, then `ready` sees what was written before it; or
/// it comes after it, then the kernel sees another value, or the writer sees that this rank sleeps.
pub(crate) fn sleep(doorbell: &Doorbell, limit: Duration, ready: impl Fn() -> bool) {
    doorbell.sleeping.store(1, Ordering::SeqCst);
    let seen = doorbell.rings.load(Ordering::SeqCst);
    if !ready() {
        let limit = libc::timespec {
            tv_sec: limit.as_secs() as libc::time_t,
            tv_nsec: i64::from(limit.subsec_nanos()) as libc::c_long,
        };
        // SAFETY: a live futex word (shared between processes: no PRIVATE flag) and a timespec that outlives the
        // call. Every result means the same: look again.
        unsafe { libc::syscall(libc::SYS_futex, doorbell.rings.as_ptr(), libc::FUTEX_WAIT, seen, &raw const limit) };
    }
    doorbell.sleeping.store(0, Ordering::SeqCst);
}

#[cold]
fn wake(word: &AtomicU32) {
    // SAFETY: a live futex word. Whoever doesn't sleep isn't woken.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}
