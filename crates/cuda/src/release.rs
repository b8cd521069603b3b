//! Deferred release of driver resources, on a thread of its own.
//!
//! **Rule.** While a stream waits for a word ([`Stream::wait_value32`](crate::Stream::wait_value32)), or a kernel runs,
//! some driver calls do not return: `cuMemFree`, `cuMemFreeHost`, `cuMemHostUnregister`, `cuIpcCloseMemHandle`,
//! `cuModuleUnload`, and `cuModuleLoadData` (`tests/gpu/waiting.rs` prints which). What the stream waits for may need
//! the thread that makes the call, which would deadlock. Nothing that an operation in flight depends on may therefore
//! make one of these calls: the resource goes to this thread, which defers such a release while a stream is known to
//! wait ([`Context::defer_releases_while`](crate::Context::defer_releases_while)). Kernels are loaded before a stream
//! waits.

use std::collections::VecDeque;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crossrail_locks::{PerProcess, signals_blocked};

use crate::driver::Cuda;

/// The interval at which waiting streams are polled: the initial one, doubled up to the final one.
const POLL_INTERVALS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));

/// A release, run once on the thread.
type Release = Box<dyn FnOnce() + Send>;
/// Reports whether a stream waits; `None`: none of its streams will ever wait again, so it need not be asked any more.
pub(crate) type WaitProbe = Arc<dyn Fn() -> Option<bool> + Send + Sync>;

/// When a resource is released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Timing {
    /// As soon as the thread gets to it: the call never waits for streams.
    Immediate,
    /// Once no stream is known to wait: the call would block until it continues.
    WhenIdle,
}

/// The process's release thread. It is started by the first release and ends with the last context.
pub(crate) struct ReleaseThread(Arc<Queue>);

/// What the thread and those who use it share.
struct Queue {
    pending: Mutex<Pending>,
    /// Signalled at every change of `pending`.
    changed: Condvar,
    /// The driver, to put the thread into relaxed capture mode.
    cuda: Option<Cuda>,
}

#[derive(Default)]
struct Pending {
    immediate: VecDeque<Release>,
    when_idle: VecDeque<Release>,
    probes: Vec<WaitProbe>,
    /// Live [`ReleasePause`]s, and the number created so far.
    pauses: u32,
    pauses_created: u64,
    /// Set by the thread while it is in a call that waits for streams.
    in_blocking_call: bool,
    /// The thread has been started.
    started: bool,
    /// Set by the thread while it runs a release.
    busy: bool,
    /// Set by the thread when what is left waits for streams.
    deferred: bool,
    /// Set when the last context is gone.
    stop: bool,
}

impl Pending {
    fn is_empty(&self) -> bool {
        self.immediate.is_empty() && self.when_idle.is_empty() && !self.busy
    }
}

impl Queue {
    fn locked(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

static CURRENT: PerProcess<Mutex<Weak<ReleaseThread>>> = PerProcess::new();

impl ReleaseThread {
    /// The release thread of this process.
    pub(crate) fn current(cuda: &Cuda) -> Arc<ReleaseThread> {
        let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
        current.upgrade().unwrap_or_else(|| {
            let thread = Arc::new(ReleaseThread::new(Some(cuda.clone())));
            *current = Arc::downgrade(&thread);
            thread
        })
    }

    pub(crate) fn new(cuda: Option<Cuda>) -> ReleaseThread {
        ReleaseThread(Arc::new(Queue { pending: Mutex::default(), changed: Condvar::new(), cuda }))
    }

    /// Submits a release that blocks while a stream waits.
    pub(crate) fn when_idle(&self, release: impl FnOnce() + Send + 'static) {
        self.submit(Timing::WhenIdle, Box::new(release));
    }

    pub(crate) fn submit(&self, timing: Timing, release: Release) {
        let mut pending = self.0.locked();
        if !pending.started {
            let queue = Arc::clone(&self.0);
            let builder = std::thread::Builder::new().name("crossrail-close".into());
            let thread = signals_blocked(|| builder.spawn(move || queue.run()));
            if thread.is_err() {
                // The system has no more threads: blocking here is better than leaking.
                drop(pending);
                return release();
            }
            pending.started = true;
        }
        match timing {
            Timing::Immediate => pending.immediate.push_back(release),
            Timing::WhenIdle => pending.when_idle.push_back(release),
        }
        drop(pending);
        self.0.changed.notify_all();
    }

    pub(crate) fn add_probe(&self, probe: WaitProbe) {
        self.0.locked().probes.push(probe);
    }

    pub(crate) fn has_waiting_stream(&self) -> bool {
        let probes = self.0.locked().probes.clone();
        ask(&probes).0
    }

    pub(crate) fn pause(self: &Arc<Self>, limit: Duration) -> ReleasePause {
        let mut pending = self.0.locked();
        pending.pauses += 1;
        pending.pauses_created += 1;
        if pending.in_blocking_call {
            let in_call = |pending: &mut Pending| pending.in_blocking_call;
            // After the limit, proceed: whatever blocks that call may depend on the work about to be enqueued.
            let waited = self.0.changed.wait_timeout_while(pending, limit, in_call);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
        }
        ReleasePause(Arc::clone(self))
    }

    fn wait_until_empty(&self, limit: Duration) -> bool {
        let started = Instant::now();
        let mut pending = self.0.locked();
        // Streams may have continued since the thread last asked.
        pending.deferred = false;
        self.0.changed.notify_all();
        while !pending.is_empty() {
            let only_deferred = pending.deferred && pending.immediate.is_empty() && !pending.busy;
            let rest = limit.checked_sub(started.elapsed()).filter(|_| !only_deferred);
            let Some(rest) = rest else { return false };
            pending = self.0.changed.wait_timeout(pending, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

impl Drop for ReleaseThread {
    fn drop(&mut self) {
        // Everything to be released holds a context, and contexts hold this: nothing more can be submitted. The drop
        // may run on the release thread itself, so it must not join it.
        self.0.locked().stop = true;
        self.0.changed.notify_all();
    }
}

impl Queue {
    /// The body of the thread.
    fn run(&self) {
        // Never dropped, because leaving the mode is a driver call, which must not be made while the process exits.
        let _relaxed = ManuallyDrop::new(self.cuda.as_ref().map(Cuda::relaxed));
        let mut interval = POLL_INTERVALS.0;
        let mut pending = self.locked();
        loop {
            let mut release = pending.immediate.pop_front();
            if release.is_none() && !pending.when_idle.is_empty() {
                let stop = pending.stop;
                let idle = stop || {
                    let (probes, pauses_created) = (pending.probes.clone(), pending.pauses_created);
                    drop(pending);
                    let (waits, finished) = ask(&probes);
                    pending = self.locked();
                    pending.probes.retain(|known| !finished.iter().any(|probe| Arc::ptr_eq(probe, known)));
                    // A pause that began while the lock was released belongs to streams that were not asked.
                    !waits && pending.pauses == 0 && pending.pauses_created == pauses_created
                };
                pending.deferred = !idle;
                pending.in_blocking_call = idle;
                release = if idle { pending.when_idle.pop_front() } else { pending.immediate.pop_front() };
            }
            if let Some(release) = release {
                pending.busy = true;
                drop(pending);
                release();
                pending = self.locked();
                pending.busy = false;
                pending.in_blocking_call = false;
                interval = POLL_INTERVALS.0;
                self.changed.notify_all();
            } else if !pending.when_idle.is_empty() {
                self.changed.notify_all();
                pending = self.changed.wait_timeout(pending, interval).unwrap_or_else(PoisonError::into_inner).0;
                interval = POLL_INTERVALS.1.min(2 * interval);
            } else if pending.stop {
                return;
            } else {
                pending = self.changed.wait(pending).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

/// Whether a stream waits, and the probes that need not be asked again. Must be called without the lock: a probe may
/// drop the last reference to something that submits a release.
fn ask(probes: &[WaitProbe]) -> (bool, Vec<WaitProbe>) {
    let mut waits = false;
    let finished = probes.iter().filter(|probe| {
        let answer = probe();
        waits |= answer == Some(true);
        answer.is_none()
    });
    let finished = finished.cloned().collect();
    (waits, finished)
}

/// Waits until everything dropped so far has been released to the driver. Returns false after `limit`, or as soon as
/// all that is left is deferred because streams wait.
///
/// For tests, and for an allocation that found no memory. No operation may depend on it.
pub fn wait_for_releases(limit: Duration) -> bool {
    let current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner).upgrade();
    current.is_none_or(|thread| thread.wait_until_empty(limit))
}

/// A guard during which no release starts whose call would wait for streams. See
/// [`Context::pause_releases`](crate::Context::pause_releases).
#[must_use = "releases are paused only while this guard lives"]
pub struct ReleasePause(Arc<ReleaseThread>);

impl Drop for ReleasePause {
    fn drop(&mut self) {
        self.0.0.locked().pauses -= 1;
    }
}

impl fmt::Debug for ReleasePause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReleasePause")
    }
}

#[cfg(test)]
#[path = "release_tests.rs"]
mod tests;
