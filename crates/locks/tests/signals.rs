//! Signals on threads of the library, and writes to a pipe without a reader.
#![allow(unsafe_code)]

use std::io::{self, Write};

use crossrail_locks::{ignores_sigpipe, keeping_handlers, signals_blocked, without_sigpipe};
use nix::sys::signal::{SigHandler, SigSet, Signal, signal};

// One test: dispositions are the whole process's.
#[test]
fn sigpipe_is_discarded_and_threads_inherit_blocked_signals() {
    // A program that nohup starts inherits it ignored.
    // SAFETY: the default disposition runs no handler.
    unsafe { signal(Signal::SIGHUP, SigHandler::SigDfl) }.unwrap();
    // SAFETY: ignoring a signal runs no handler.
    keeping_handlers(|| unsafe { signal(Signal::SIGHUP, SigHandler::SigIgn) }).unwrap();
    // SAFETY: the default disposition runs no handler.
    let after = unsafe { signal(Signal::SIGHUP, SigHandler::SigDfl) }.unwrap();
    assert_eq!(after, SigHandler::SigDfl, "as before the call");

    assert!(ignores_sigpipe(), "as Rust's runtime has it");
    // SAFETY: the default disposition runs no handler.
    unsafe { signal(Signal::SIGPIPE, SigHandler::SigDfl) }.unwrap();
    assert!(!ignores_sigpipe());
    let before = SigSet::thread_get_mask().unwrap();
    let (reader, mut writer) = io::pipe().unwrap();
    drop(reader);
    // The default would end the process.
    let error = without_sigpipe(|| writer.write(b"x")).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    assert_eq!(without_sigpipe(|| Ok(1)).unwrap(), 1);
    assert_eq!(SigSet::thread_get_mask().unwrap(), before);

    let masks = signals_blocked(|| std::thread::spawn(|| SigSet::thread_get_mask().unwrap())).join().unwrap();
    for blocked in [Signal::SIGINT, Signal::SIGUSR1, Signal::SIGALRM, Signal::SIGPIPE, Signal::SIGCHLD] {
        assert!(masks.contains(blocked), "{blocked}");
    }
    for kept in [Signal::SIGSEGV, Signal::SIGBUS, Signal::SIGPROF] {
        assert!(!masks.contains(kept), "{kept}");
    }
    assert_eq!(SigSet::thread_get_mask().unwrap(), before);
}
