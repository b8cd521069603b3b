//! Notices forks of this process.
#![allow(unsafe_code)]

use std::sync::Once;

extern "C" fn in_child() {
    crossrail_types::count_fork();
}

/// Has every fork from now on counted in the child.
pub(super) fn watch() {
    static WATCHING: Once = Once::new();
    // SAFETY: the handler only adds to an atomic counter, which any thread may do at any time. It fails only without
    // memory; then forks go unnoticed.
    WATCHING.call_once(|| unsafe {
        libc::pthread_atfork(None, None, Some(in_child));
    });
}
