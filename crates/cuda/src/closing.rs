//! What is given back to the driver, is so on a thread of its own, for which nobody waits.
//!
//! **Rule.** While a stream waits for a word ([`Stream::wait_value32`](crate::Stream::wait_value32)), or a kernel runs,
//! some of the driver's calls do not return: `cuMemFree`, `cuMemFreeHost`, `cuMemHostUnregister`, `cuIpcCloseMemHandle`,
//! `cuModuleUnload`, and `cuModuleLoadData` (`tests/gpu/waiting.rs` prints which). What the stream waits for may need the
//! thread that makes the call. So nothing that an operation under way depends on makes one of them: what they give back
//! goes to this thread, which puts that off while a stream is known to wait ([`Context::hold_back`]), and kernels are
//! loaded before a stream waits.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::{Context, Cuda};

/// How often it is looked whether streams still wait: from the first to the second, twice as long each time.
const LOOKS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));

type Job = Box<dyn FnOnce() + Send>;
/// Whether a stream waits; `None`: nobody of them ever will again.
type Question = Arc<dyn Fn() -> Option<bool> + Send + Sync>;

/// When something is given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    /// As soon as the thread comes to it.
    Soon,
    /// Once no stream is known to wait.
    Quiet,
}

/// The process's thread that gives things back. It is there from the first thing on until the last context is gone.
pub(crate) struct Closer(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Round all that the thread does.
    cuda: Option<Cuda>,
}

#[derive(Default)]
struct State {
    soon: VecDeque<Job>,
    quiet: VecDeque<Job>,
    questions: Vec<Question>,
    /// Those who put in now what may wait ([`KeptBack`]), and how many there have been.
    kept_back: u32,
    entered: u64,
    /// The thread is at a call that waits for streams.
    freeing: bool,
    /// The thread is there; it is at a job; what is left waits for streams; nobody has contexts any more.
    started: bool,
    busy: bool,
    held: bool,
    stop: bool,
}

impl State {
    fn is_empty(&self) -> bool {
        self.soon.is_empty() && self.quiet.is_empty() && !self.busy
    }
}

impl Shared {
    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

static CURRENT: Mutex<Weak<Closer>> = Mutex::new(Weak::new());

impl Closer {
    /// The one of this process.
    pub(crate) fn current(cuda: &Cuda) -> Arc<Closer> {
        let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
        current.upgrade().unwrap_or_else(|| {
            let closer = Arc::new(Closer::new(Some(cuda.clone())));
            *current = Arc::downgrade(&closer);
            closer
        })
    }

    fn new(cuda: Option<Cuda>) -> Closer {
        Closer(Arc::new(Shared { state: Mutex::default(), changed: Condvar::new(), cuda }))
    }

    /// A blocking call that gives something back.
    pub(crate) fn when_quiet(&self, job: impl FnOnce() + Send + 'static) {
        self.put(When::Quiet, Box::new(job));
    }

    fn put(&self, when: When, job: Job) {
        let mut state = self.0.locked();
        if !state.started {
            let shared = Arc::clone(&self.0);
            let thread = std::thread::Builder::new().name("crossrail-close".into()).spawn(move || shared.run());
            if thread.is_err() {
                // No thread can be made any more: better late than never.
                drop(state);
                return job();
            }
            state.started = true;
        }
        match when {
            When::Soon => state.soon.push_back(job),
            When::Quiet => state.quiet.push_back(job),
        }
        drop(state);
        self.0.changed.notify_all();
    }

    fn hold_back(&self, question: Question) {
        self.0.locked().questions.push(question);
    }

    fn a_stream_waits(&self) -> bool {
        let questions = self.0.locked().questions.clone();
        ask(&questions).0
    }

    fn keep_back(self: &Arc<Self>, limit: Duration) -> KeptBack {
        let mut state = self.0.locked();
        state.kept_back += 1;
        state.entered += 1;
        if state.freeing {
            let freeing = |state: &mut State| state.freeing;
            // Past the limit, whatever holds that call up may need what is put in now.
            let waited = self.0.changed.wait_timeout_while(state, limit, freeing);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
        }
        KeptBack(Arc::clone(self))
    }

    fn settled(&self, limit: Duration) -> bool {
        let started = Instant::now();
        let mut state = self.0.locked();
        // Streams may have gone on since the thread last looked.
        state.held = false;
        self.0.changed.notify_all();
        while !state.is_empty() {
            let put_off = state.held && state.soon.is_empty() && !state.busy;
            let rest = limit.checked_sub(started.elapsed()).filter(|_| !put_off);
            let Some(rest) = rest else { return false };
            state = self.0.changed.wait_timeout(state, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

impl Drop for Closer {
    fn drop(&mut self) {
        // Nobody has anything left to give back: what is, has a context, and this is only dropped with the last. It may
        // be on that very thread.
        self.0.locked().stop = true;
        self.0.changed.notify_all();
    }
}

impl Shared {
    /// The thread.
    fn run(&self) {
        // Ends with the thread, and not before: a call of the driver's must not be made while the process ends.
        let _relaxed = ManuallyDrop::new(self.cuda.as_ref().map(Cuda::relaxed));
        let mut pause = LOOKS.0;
        let mut state = self.locked();
        loop {
            let mut job = state.soon.pop_front();
            if job.is_none() && !state.quiet.is_empty() {
                let stop = state.stop;
                let quiet = stop || {
                    let (questions, entered) = (state.questions.clone(), state.entered);
                    drop(state);
                    let (waits, gone) = ask(&questions);
                    state = self.locked();
                    state.questions.retain(|known| !gone.iter().any(|gone| Arc::ptr_eq(gone, known)));
                    // Who has come since was not asked.
                    !waits && state.kept_back == 0 && state.entered == entered
                };
                state.held = !quiet;
                state.freeing = quiet;
                job = if quiet { state.quiet.pop_front() } else { state.soon.pop_front() };
            }
            if let Some(job) = job {
                state.busy = true;
                drop(state);
                job();
                state = self.locked();
                state.busy = false;
                state.freeing = false;
                pause = LOOKS.0;
                self.changed.notify_all();
            } else if !state.quiet.is_empty() {
                self.changed.notify_all();
                state = self.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0;
                pause = LOOKS.1.min(2 * pause);
            } else if state.stop {
                return;
            } else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

/// Whether a stream waits, and who need not be asked again. Without the lock: whoever is asked may be dropped by that, and
/// give something back.
fn ask(questions: &[Question]) -> (bool, Vec<Question>) {
    let mut waits = false;
    let over = questions.iter().filter(|question| {
        let answer = question();
        waits |= answer == Some(true);
        answer.is_none()
    });
    let over = over.cloned().collect();
    (waits, over)
}

/// Waits until everything is given back to the driver that was dropped before; false after `limit`, or as soon as what is
/// left is put off because streams wait. For tests, and for whoever is short of memory; no operation may depend on it.
pub fn settled(limit: Duration) -> bool {
    let current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner).upgrade();
    current.is_none_or(|closer| closer.settled(limit))
}

impl Context {
    /// Has calls put off that do not return while a stream waits, as long as `waits` says `Some(true)`; after `None` it is
    /// not asked again. It is asked now and then while there is something to put off, on a thread of its own.
    pub fn hold_back(&self, waits: impl Fn() -> Option<bool> + Send + Sync + 'static) {
        self.closer().hold_back(Arc::new(waits));
    }

    /// For whoever puts in what may wait for others, and is asked of it only from then on ([`Context::hold_back`]): until
    /// the result is dropped, no call is begun that would not return while a stream waits. One that is under way is waited
    /// for, but for no longer than `limit`. Launches may be held up by such a call, which waits for what was launched
    /// before, which waits for them.
    pub fn keep_back(&self, limit: Duration) -> KeptBack {
        self.closer().keep_back(limit)
    }

    /// Whether a stream of this process is known to wait ([`Context::hold_back`]): no time for loading kernels.
    pub fn a_stream_waits(&self) -> bool {
        self.closer().a_stream_waits()
    }
}

/// As long as this lives, nothing is given back whose call waits for streams. See [`Context::keep_back`].
#[must_use = "calls are put off only as long as this lives"]
pub struct KeptBack(Arc<Closer>);

impl Drop for KeptBack {
    fn drop(&mut self) {
        self.0.0.locked().kept_back -= 1;
    }
}

impl fmt::Debug for KeptBack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeptBack")
    }
}

/// A value that is dropped later, on the thread that gives things back: for mappings, and what must outlive them.
pub struct Later<T: Send + 'static> {
    value: ManuallyDrop<T>,
    when: When,
    closer: Arc<Closer>,
}

impl<T: Send + 'static> Later<T> {
    /// Dropped as soon as the thread comes to it.
    pub fn new(value: T, context: &Context) -> Later<T> {
        Later::of(value, When::Soon, Arc::clone(context.closer()))
    }

    /// Dropped when no stream is known to wait ([`Context::hold_back`]): the drop makes a call that would wait for it.
    pub fn when_quiet(value: T, context: &Context) -> Later<T> {
        Later::of(value, When::Quiet, Arc::clone(context.closer()))
    }

    fn of(value: T, when: When, closer: Arc<Closer>) -> Later<T> {
        Later { value: ManuallyDrop::new(value), when, closer }
    }
}

impl<T: Send + 'static> Deref for Later<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: Send + fmt::Debug + 'static> fmt::Debug for Later<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.value.fmt(f)
    }
}

impl<T: Send + 'static> Drop for Later<T> {
    fn drop(&mut self) {
        // SAFETY: taken once, here, and not used after.
        let value = unsafe { ManuallyDrop::take(&mut self.value) };
        self.closer.put(self.when, Box::new(move || drop(value)));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::thread::ThreadId;

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    /// Says where it is dropped, once it may be.
    struct Tell(Sender<ThreadId>, Option<Receiver<()>>);

    impl Drop for Tell {
        fn drop(&mut self) {
            if let Some(gate) = &self.1 {
                let _ = gate.recv();
            }
            let _ = self.0.send(std::thread::current().id());
        }
    }

    fn later(tell: Tell, when: When, closer: &Arc<Closer>) -> Later<Tell> {
        Later::of(tell, when, Arc::clone(closer))
    }

    #[test]
    fn values_are_dropped_elsewhere_and_nobody_waits_unless_asked() {
        let (closer, (told, drops), (open, gate)) = (Arc::new(Closer::new(None)), channel(), channel());
        drop(later(Tell(told.clone(), Some(gate)), When::Quiet, &closer));
        drop(later(Tell(told, None), When::Soon, &closer));
        assert!(!closer.settled(Duration::from_millis(20)));
        open.send(()).expect("it waits");
        assert!(closer.settled(LONG));
        let threads: Vec<ThreadId> = drops.iter().collect();
        assert!(threads.len() == 2 && threads.iter().all(|thread| *thread != std::thread::current().id()));
    }

    #[test]
    fn calls_that_would_wait_are_put_off_while_a_stream_waits_and_others_are_not() {
        let (closer, (told, drops), (soon, others)) = (Arc::new(Closer::new(None)), channel(), channel());
        let waits = Arc::new(AtomicBool::new(true));
        let (asked, gone) = (Arc::clone(&waits), Arc::new(()));
        closer.hold_back(Arc::new(move || Some(asked.load(Ordering::Relaxed))));
        let weak = Arc::downgrade(&gone);
        closer.hold_back(Arc::new(move || weak.upgrade().map(|_| true)));
        drop(later(Tell(told, None), When::Quiet, &closer));
        drop(later(Tell(soon, None), When::Soon, &closer));
        others.recv_timeout(LONG).expect("nothing holds it back");
        assert!(!closer.settled(LONG), "it says so at once");
        assert!(closer.a_stream_waits());
        waits.store(false, Ordering::Relaxed);
        assert!(drops.recv_timeout(Duration::from_millis(200)).is_err(), "the other still waits");
        drop(gone);
        drops.recv_timeout(LONG).expect("nobody waits any more");
        assert!(closer.settled(LONG));
        assert!(!closer.a_stream_waits());
        assert_eq!(closer.0.locked().questions.len(), 1, "whoever is gone is not asked again");
    }

    #[test]
    fn nothing_is_freed_while_something_is_put_in_that_may_wait() {
        let (closer, (told, drops)) = (Arc::new(Closer::new(None)), channel());
        let waits = Arc::new(AtomicBool::new(false));
        let asked = Arc::clone(&waits);
        closer.hold_back(Arc::new(move || Some(asked.load(Ordering::Relaxed))));
        let kept = closer.keep_back(LONG);
        drop(later(Tell(told.clone(), None), When::Quiet, &closer));
        assert!(drops.recv_timeout(Duration::from_millis(50)).is_err(), "it is kept back");
        // What was put in waits from now on.
        waits.store(true, Ordering::Relaxed);
        drop(kept);
        assert!(drops.recv_timeout(Duration::from_millis(120)).is_err(), "a stream waits");
        waits.store(false, Ordering::Relaxed);
        drops.recv_timeout(LONG).expect("nobody waits any more");

        // A call that is under way is waited for, until the limit.
        let ((open, gate), short) = (channel(), Duration::from_millis(20));
        drop(later(Tell(told, Some(gate)), When::Quiet, &closer));
        let started = Instant::now();
        while !closer.0.locked().freeing {
            assert!(started.elapsed() < LONG);
            std::thread::yield_now();
        }
        let started = Instant::now();
        drop(closer.keep_back(short));
        assert!(started.elapsed() >= short);
        let opener = std::thread::spawn(move || open.send(()).expect("it waits"));
        drop(closer.keep_back(LONG));
        assert!(!closer.0.locked().freeing, "it was waited for");
        opener.join().expect("the gate");
        drops.recv_timeout(LONG).expect("dropped");
    }

    #[test]
    fn the_thread_goes_with_the_last_user_and_leaves_nothing() {
        let (told, drops) = channel();
        let closer = Arc::new(Closer::new(None));
        let shared = Arc::downgrade(&closer.0);
        closer.hold_back(Arc::new(|| Some(true)));
        // The value is the last that has the closer, as memory is of its context.
        let (own, value) = (Arc::clone(&closer), Tell(told, None));
        drop(Later::of((value, own), When::Soon, closer));
        drops.recv_timeout(LONG).expect("dropped");
        let started = Instant::now();
        while shared.upgrade().is_some() {
            assert!(started.elapsed() < LONG, "the thread is still there");
            std::thread::yield_now();
        }
    }
}
