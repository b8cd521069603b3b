//! The way between native code and the interpreter, which closes when the interpreter ends.
//!
//! Once the interpreter is finalizing, a thread that asks for the GIL is ended there and then by `pthread_exit`
//! (CPython before 3.14). That unwinds the thread's stack through frames of Rust, which aborts the process. A thread
//! asks for the GIL when it returns from native code, but also in the midst of it: whatever runs Python code, such as
//! making an exception or a destructor, may give the GIL away and ask for it again.
//!
//! So a thread has a [`Pass`] wherever frames of Rust are below such a place. The interpreter waits for those that were
//! let through before the gate closed ([`close`]); threads that arrive later stay in native code until the process ends.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use crossrail_locks::{Condvar, Mutex, PerProcess};
use pyo3::ffi;
use pyo3::prelude::*;

/// How long the closing interpreter and a thread at the gate wait for each other. Other handlers of `atexit` run after
/// [`close`], and one may join a thread that is held here: it is let through after this long.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long the workers may take to close while threads are held: a callback of theirs may wait for such a thread.
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
    /// Under it the closing thread waits for both to be 0.
    lock: Mutex<()>,
    passed: Condvar,
}

thread_local! {
    /// How many passes this thread has.
    static PASSES: Cell<u32> = const { Cell::new(0) };
    /// Whether it runs a callback: the workers' end waits for that, so nothing holds it.
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

impl Gate {
    /// Whether this thread is to be held rather than let through.
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

/// Permission for a thread that has the GIL to give it away and to ask for it again. The interpreter does not end while
/// one exists, for [`PATIENCE`] at most. Dropped with the GIL held.
pub(crate) struct Pass {
    /// A forked child has another one.
    gate: &'static Gate,
    _of_this_thread: PhantomData<*const ()>,
}

impl Pass {
    /// For a call from Python. It does not return once the interpreter ends, but on the thread that ends it.
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

/// As [`Pass`], for a callback: neither the GIL is needed to have it, nor is a thread held that has it.
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

/// Holds a thread that has the GIL, without it.
#[cold]
#[expect(clippy::disallowed_methods, reason = "the thread has a pass when it asks for the GIL")]
fn hold_detached(py: Python<'_>, gate: &'static Gate) {
    py.detach(|| {
        hold(gate);
        gate.returning.fetch_add(1, Ordering::SeqCst);
    });
    gate.end_return();
}

/// Holds a thread until the process ends. It returns only if the interpreter does not end for [`PATIENCE`] after
/// [`close`], or does not get that far.
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

/// Suspends the passes of this thread while it does without the GIL.
struct Away {
    gate: &'static Gate,
    passes: u32,
}

impl Away {
    #[inline]
    fn leave(gate: &'static Gate) -> Away {
        let passes = PASSES.replace(0);
        if passes > 0 {
            gate.leave();
        }
        Away { gate, passes }
    }
}

impl Drop for Away {
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
    let away = Away::leave(gate);
    let result = py.detach(|| {
        let result = work();
        gate.begin_return();
        result
    });
    drop(away);
    let pass = Pass::new(gate);
    gate.end_return();
    (result, pass)
}

/// Runs `work` with the GIL, in the midst of what [`detached`] runs.
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

/// Lets nobody through any more but the calling thread, and waits for those that were let through, without the GIL.
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
            // Whoever leaves inside the GIL may do so before this thread waits, hence the short limit.
            gate.passed.wait_for(&mut ordered, Duration::from_millis(1));
        });
    }
}
