//! Gate between native code and the interpreter, closed at interpreter exit.
//!
//! While the interpreter is finalizing, a thread that acquires the GIL is terminated by `pthread_exit` (CPython before
//! 3.14). That unwinds the stack through Rust frames, which aborts the process. A thread acquires the GIL when it
//! returns from native code, but also in between: any Python code that runs, such as creating an exception or a
//! destructor, may release and reacquire the GIL.
//!
//! So a thread holds a [`Pass`] wherever that can happen above Rust frames. The interpreter waits for the threads that
//! passed before the gate closed ([`close`]); later threads block in native code until the process ends.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use crossrail_locks::{Condvar, Mutex, PerProcess};
use pyo3::ffi;
use pyo3::prelude::*;

/// Timeout of the interpreter's wait for threads, and of a blocked thread's wait for finalization. An `atexit` handler
/// that runs after [`close`] may join a thread blocked here: after this timeout that thread continues.
const PATIENCE: Duration = Duration::from_secs(1);

/// Time for the workers to close while threads are blocked at the gate, since a callback may wait for such a thread.
const CLOSING_MAX: Duration = Duration::from_secs(10);

static GATE: PerProcess<Gate> = PerProcess::new();

#[derive(Default)]
struct Gate {
    /// The thread that ends the interpreter; set once, by [`begin_to_close`].
    closed_by: OnceLock<ThreadId>,
    closing: AtomicBool,
    closed: AtomicBool,
    /// Threads inside a call from Python. Written with the GIL held only, which spares calls an atomic operation.
    inside: AtomicUsize,
    /// Threads without the GIL that are about to ask for it, and threads of ours that run callbacks.
    returning: AtomicUsize,
    /// Lock of `passed`, on which the closing thread waits for `inside` and `returning` to become 0.
    lock: Mutex<()>,
    passed: Condvar,
}

thread_local! {
    /// How many passes this thread has.
    static PASSES: Cell<u32> = const { Cell::new(0) };
    /// Whether this thread runs a callback. Closing the workers waits for callbacks, so they must not be blocked.
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

impl Gate {
    /// Whether this thread must block at the gate.
    #[inline]
    fn holds(&self) -> bool {
        self.closing.load(Ordering::SeqCst) && self.holds_this_thread()
    }

    #[cold]
    fn holds_this_thread(&self) -> bool {
        !IN_CALLBACK.get() && self.closed_by.get() != Some(&thread::current().id())
    }

    /// The GIL is held.
    #[inline]
    fn enter(&self) {
        self.inside.store(self.inside.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// The GIL is held.
    #[inline]
    fn leave(&self) {
        self.inside.store(self.inside.load(Ordering::Relaxed) - 1, Ordering::Relaxed);
        self.tell();
    }

    /// Without the GIL: this thread is about to ask for it.
    #[inline]
    fn begin_return(&self) {
        self.returning.fetch_add(1, Ordering::SeqCst);
        if self.holds() {
            self.end_return();
            hold(self);
            self.returning.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[inline]
    fn end_return(&self) {
        self.returning.fetch_sub(1, Ordering::SeqCst);
        self.tell();
    }

    #[inline]
    fn tell(&self) {
        if self.closed.load(Ordering::SeqCst) {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        let _ordered = self.lock.lock();
        self.passed.notify_all();
    }
}

/// Guard for a thread that holds the GIL and may release and reacquire it. The interpreter waits up to [`PATIENCE`] for
/// all passes before it finalizes. Dropped with the GIL held.
pub(crate) struct Pass {
    /// The gate of the process that made it; a forked child has its own.
    gate: &'static Gate,
    _of_this_thread: PhantomData<*const ()>,
}

impl Pass {
    /// Enters a call from Python. Blocks if the gate is closing, except on the thread that closes it.
    #[inline]
    pub(crate) fn enter(py: Python<'_>) -> Pass {
        let gate = GATE.here();
        if PASSES.get() == 0 && gate.holds() {
            hold_detached(py, gate);
        }
        Pass::new(gate)
    }

    #[inline]
    fn new(gate: &'static Gate) -> Pass {
        let passes = PASSES.get();
        if passes == 0 {
            gate.enter();
        }
        PASSES.set(passes + 1);
        Pass { gate, _of_this_thread: PhantomData }
    }
}

impl Drop for Pass {
    #[inline]
    fn drop(&mut self) {
        let passes = PASSES.get() - 1;
        PASSES.set(passes);
        if passes == 0 {
            self.gate.leave();
        }
    }
}

/// As [`Pass`], for a callback: does not need the GIL, and its thread is never blocked at the gate.
pub(crate) struct CallbackPass {
    gate: &'static Gate,
    outer: bool,
    _of_this_thread: PhantomData<*const ()>,
}

impl CallbackPass {
    /// `None`: the interpreter has ended.
    pub(crate) fn offered() -> Option<CallbackPass> {
        let gate = GATE.here();
        gate.returning.fetch_add(1, Ordering::SeqCst);
        let pass = CallbackPass { gate, outer: IN_CALLBACK.replace(true), _of_this_thread: PhantomData };
        (!gate.closed.load(Ordering::SeqCst)).then_some(pass)
    }
}

impl Drop for CallbackPass {
    fn drop(&mut self) {
        IN_CALLBACK.set(self.outer);
        self.gate.end_return();
    }
}

/// Releases the GIL and blocks the calling thread as [`hold`].
#[cold]
#[expect(clippy::disallowed_methods, reason = "the thread has a pass when it asks for the GIL")]
fn hold_detached(py: Python<'_>, gate: &'static Gate) {
    py.detach(|| {
        hold(gate);
        gate.returning.fetch_add(1, Ordering::SeqCst);
    });
    gate.end_return();
}

/// Blocks the calling thread until the process ends. Returns only if the interpreter has not finalized [`PATIENCE`]
/// after [`close`], or has not called it within [`CLOSING_MAX`].
#[cold]
fn hold(gate: &Gate) {
    let arrived = Instant::now();
    while is_initialized() {
        let closed = gate.closed.load(Ordering::SeqCst);
        let began = Instant::now();
        while let Some(left) = PATIENCE.checked_sub(began.elapsed()).filter(|left| !left.is_zero()) {
            thread::park_timeout(left);
        }
        if is_initialized() && (closed || arrived.elapsed() > CLOSING_MAX) {
            return;
        }
    }
    loop {
        thread::park();
    }
}

#[allow(unsafe_code)]
fn is_initialized() -> bool {
    // SAFETY: may be called by any thread at any time. It reads 0 from when the interpreter begins to finalize.
    unsafe { ffi::Py_IsInitialized() != 0 }
}

/// Suspends the passes of this thread while the GIL is released.
struct SuspendedPasses {
    gate: &'static Gate,
    passes: u32,
}

impl SuspendedPasses {
    #[inline]
    fn suspend(gate: &'static Gate) -> SuspendedPasses {
        let passes = PASSES.replace(0);
        if passes > 0 {
            gate.leave();
        }
        SuspendedPasses { gate, passes }
    }
}

impl Drop for SuspendedPasses {
    #[inline]
    fn drop(&mut self) {
        if self.passes > 0 {
            self.gate.enter();
        }
        PASSES.set(self.passes);
    }
}

/// Runs `work` without the GIL; other Python threads run meanwhile.
#[inline]
pub(crate) fn detached<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> T {
    detached_until(py, work).0
}

/// As [`detached`]. The interpreter does not end before the pass is dropped, so that the caller may run Python code
/// before it returns.
#[inline]
#[expect(clippy::disallowed_methods, reason = "the one place that calls it")]
pub(super) fn detached_until<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> (T, Pass) {
    let gate = GATE.here();
    let suspended = SuspendedPasses::suspend(gate);
    let result = py.detach(|| {
        let result = work();
        gate.begin_return();
        result
    });
    drop(suspended);
    let pass = Pass::new(gate);
    gate.end_return();
    (result, pass)
}

/// Has calls release the GIL while they wait for a worker's lock: other Python threads run meanwhile.
pub(crate) fn share_with_workers() {
    crossrail::set_caller_lock(crossrail::CallerLock {
        is_held: || PASSES.get() > 0,
        without: |wait| Python::attach(|py| detached(py, wait)),
    });
}

/// Reacquires the GIL for `work`, from within [`detached`].
pub(crate) fn attached<T>(work: impl FnOnce(Python<'_>) -> T) -> T {
    let gate = GATE.here();
    gate.begin_return();
    Python::attach(|py| {
        let _pass = Pass::new(gate);
        gate.end_return();
        work(py)
    })
}

/// From now on the calling thread alone returns to Python. Threads of ours may still call it.
pub(super) fn begin_to_close() {
    let gate = GATE.here();
    gate.closed_by.get_or_init(|| thread::current().id());
    gate.closing.store(true, Ordering::SeqCst);
}

/// Closes the gate to all threads but the calling one, and waits, with the GIL released, for those that passed before.
#[expect(clippy::disallowed_methods, reason = "the thread that ends the interpreter needs no pass")]
pub(super) fn close(py: Python<'_>) {
    let gate = GATE.here();
    let own = usize::from(PASSES.get() > 0);
    let until = Instant::now() + PATIENCE;
    gate.closed.store(true, Ordering::SeqCst);
    // Read with the GIL held, so that nobody enters between the last look and the end.
    let passed = || gate.inside.load(Ordering::Relaxed) == own && gate.returning.load(Ordering::SeqCst) == 0;
    while !passed() && Instant::now() < until {
        py.detach(|| {
            let mut ordered = gate.lock.lock();
            // `leave` is not ordered with this wait, so a notification can be missed: poll at a short interval.
            gate.passed.wait_for(&mut ordered, Duration::from_millis(1));
        });
    }
}
