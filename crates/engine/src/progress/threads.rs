//! The threads of a worker: which are running, and which are inside a callback.

use std::any::Any;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Weak;
use std::thread::{JoinHandle, Thread, ThreadId};
use std::time::{Duration, Instant};

use crossrail_locks::{Condvar, Mutex, MutexGuard, signals_blocked};
use crossrail_types::{Error, Log, Result};

use super::{Due, Progress};

/// How long a worker that closes waits for callbacks.
const CALLBACK_MAX: Duration = Duration::from_secs(10);

/// Deadline for the callbacks of workers that close now, all of them together.
pub(crate) fn callbacks_deadline() -> Instant {
    Instant::now() + CALLBACK_MAX
}

/// See the module.
#[derive(Default)]
pub(super) struct Threads {
    running: Mutex<HashMap<ThreadId, Running>>,
    /// A thread has ended, or has begun a callback.
    changed: Condvar,
}

struct Running {
    handle: JoinHandle<()>,
    /// Only its last statement is left to run.
    has_ended: bool,
    /// Callbacks that it is in, one within another.
    callbacks: usize,
}

/// While one exists its thread is in a callback.
struct InCallback<'a>(&'a Threads);

impl Drop for InCallback<'_> {
    fn drop(&mut self) {
        self.0.change(|thread| thread.callbacks -= 1);
    }
}

impl Threads {
    /// Runs callbacks on the calling thread, one of the worker's or a caller's, which holds no lock of the worker's.
    pub(super) fn call_back(&self, callbacks: Vec<Due>) {
        if callbacks.is_empty() {
            return;
        }
        self.change(|thread| thread.callbacks += 1);
        let _in_callback = InCallback(self);
        callbacks.into_iter().for_each(|(callback, result)| callback(result));
    }

    /// Starts a thread of the worker `me`, which [`Threads::join`] waits for. It takes no signals. A panic there ends
    /// the worker ([`Progress::fail`]), because what the thread was changing may be half done.
    ///
    /// # Errors
    /// `Io` when the system refuses it.
    pub(super) fn spawn(&self, me: Weak<Progress>, name: &str, body: impl FnOnce() + Send + 'static) -> Result<Thread> {
        // Its end finds its entry: the lock is held until there is one.
        let mut running = self.running.lock();
        let thread = move || {
            let _ending = Ending(me.clone());
            if let Err(panic) = catch_unwind(AssertUnwindSafe(body))
                && let Some(progress) = me.upgrade()
            {
                let name = std::thread::current().name().unwrap_or("crossrail").to_owned();
                progress.fail(&format!("thread {name}: {}", panic_text(&*panic)));
            }
        };
        let builder = std::thread::Builder::new().name(name.to_owned());
        let handle =
            signals_blocked(|| builder.spawn(thread)).map_err(|error| Error::io("worker", "pthread_create", &error))?;
        let thread = handle.thread().clone();
        running.retain(|_, thread| !thread.has_ended);
        running.insert(thread.id(), Running { handle, has_ended: false, callbacks: 0 });
        Ok(thread)
    }

    fn change(&self, change: impl FnOnce(&mut Running)) {
        if let Some(thread) = self.running.lock().get_mut(&std::thread::current().id()) {
            change(thread);
            self.changed.notify_all();
        }
    }

    /// Waits for all threads but the calling one to end, and joins them. Those that are in a callback at `until` end
    /// later: they hold no lock there.
    pub(super) fn join(&self, log: Log, until: Instant) {
        let mut running = self.running.lock();
        running.remove(&std::thread::current().id());
        while !running.is_empty() {
            let ended: Vec<_> = running.extract_if(|_, thread| thread.has_ended).collect();
            if !ended.is_empty() {
                MutexGuard::unlocked(&mut running, || {
                    ended.into_iter().for_each(|(_, thread)| drop(thread.handle.join()));
                });
                continue;
            }
            if Instant::now() < until {
                self.changed.wait_until(&mut running, until);
                continue;
            }
            let left = running.extract_if(|_, thread| thread.callbacks > 0).count();
            if left == 0 {
                self.changed.wait(&mut running);
                continue;
            }
            log.warn(format_args!(
                "close: {left} callbacks have not returned for {} s; the worker is closed without them",
                CALLBACK_MAX.as_secs()
            ));
        }
    }
}

/// The text of a panic, if it has one.
pub(super) fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic without text")
}

/// Dropped as the last thing of a thread, also of one that panics.
struct Ending(Weak<Progress>);

impl Drop for Ending {
    fn drop(&mut self) {
        if let Some(progress) = self.0.upgrade() {
            progress.threads.change(|thread| thread.has_ended = true);
        }
    }
}
