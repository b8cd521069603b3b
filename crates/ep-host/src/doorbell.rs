//! Sleeping until another process writes into the heap.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::heap::Doorbell;

/// Announces a write into the doorbell's heap: wakes its rank if it sleeps.
#[inline]
pub(crate) fn ring(doorbell: &Doorbell) {
    doorbell.rings.fetch_add(1, Ordering::SeqCst);
    if doorbell.sleeping.load(Ordering::SeqCst) != 0 {
        wake(&doorbell.rings);
    }
}

/// Sleeps until a peer rings, for at most `limit`; not at all if `ready` is true once `sleeping` is set.
///
/// No wake-up is lost: if the writer rings before `rings` is loaded here, `ready` sees the write that the ring announces;
/// if it rings later, the futex sees a changed value and returns at once, or the writer sees `sleeping` and wakes it.
pub(crate) fn sleep(doorbell: &Doorbell, limit: Duration, ready: impl Fn() -> bool) {
    doorbell.sleeping.store(1, Ordering::SeqCst);
    let seen = doorbell.rings.load(Ordering::SeqCst);
    if !ready() {
        let limit = libc::timespec {
            tv_sec: limit.as_secs() as libc::time_t,
            tv_nsec: i64::from(limit.subsec_nanos()) as libc::c_long,
        };
        // SAFETY: a live futex word (shared between processes: no PRIVATE flag) and a timespec that outlives the
        // call. Whatever the result, the caller polls again.
        unsafe { libc::syscall(libc::SYS_futex, doorbell.rings.as_ptr(), libc::FUTEX_WAIT, seen, &raw const limit) };
    }
    doorbell.sleeping.store(0, Ordering::SeqCst);
}

#[cold]
fn wake(word: &AtomicU32) {
    // SAFETY: a live futex word; without a sleeper the call does nothing.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}
