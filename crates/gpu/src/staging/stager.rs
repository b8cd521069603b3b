//! One GPU's staging thread.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak, mpsc};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use crossrail_locks::{Condvar, Mutex, signals_blocked};
use crossrail_shm::Arena;
use crossrail_types::{Error, ErrorKind, Result, Settings, format_duration};

use super::bounce::{Bounce, SlotLayout};
use super::idle_policy::{IdlePolicy, Pause};
use super::pipeline::{Owner, PassResult, Pipeline, Submitted};
use super::wake_up::WakeUp;
use super::{Completion, CopyEngine, StageStats, StagingListener, StagingQueue};

/// Staging of one GPU: its thread and its bounce memory. The thread ends when the stager and all its queues are
/// dropped.
pub struct Stager(Arc<StagerThread>);

/// The thread; dropping the last owner ends it.
pub(super) struct StagerThread {
    shared: Arc<StagerShared>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread and its queues share. Lock order: pipeline, submitted, listeners; those of the slots and of the
/// wake-up last.
pub(super) struct StagerShared {
    name: String,
    pipeline: Mutex<Pipeline>,
    /// Notified, under the pipeline's lock, when work was completed.
    progressed: Condvar,
    pub(super) submitted: Mutex<Submitted>,
    /// By queue.
    listeners: Mutex<BTreeMap<u32, Weak<dyn StagingListener>>>,
    next_queue: AtomicU32,
    pub(super) bounce: Arc<Bounce>,
    pub(super) wake_up: Arc<WakeUp>,
    stop: AtomicBool,
    thread: ThreadId,
    /// How long to wait for the GPU at most.
    limit: Duration,
    traced: bool,
    idle_policy: IdlePolicy,
}

/// What a stager's thread starts with.
pub(super) struct StagerSetup {
    name: String,
    limit: Duration,
    /// Whether completions say when they happened.
    traced: bool,
    pub(super) arena: Arc<Arena>,
    pub(super) layout: SlotLayout,
    pub(super) wake_up: Arc<WakeUp>,
    started: mpsc::SyncSender<Result<Arc<StagerShared>>>,
}

impl StagerSetup {
    /// Reports the outcome of the setup to [`Stager::start`], and then runs the thread until it is no longer needed.
    pub(super) fn run(self, made: Result<(Box<dyn CopyEngine>, Arc<Bounce>)>) {
        let StagerSetup { name, limit, traced, wake_up, started, .. } = self;
        let shared = made.map(|(engine, bounce)| {
            Arc::new(StagerShared {
                name,
                pipeline: Mutex::new(Pipeline::new(engine, traced)),
                progressed: Condvar::new(),
                submitted: Mutex::default(),
                listeners: Mutex::default(),
                next_queue: AtomicU32::new(0),
                bounce,
                wake_up,
                stop: AtomicBool::new(false),
                thread: std::thread::current().id(),
                limit,
                traced,
                idle_policy: IdlePolicy::here(),
            })
        });
        let own = shared.as_ref().ok().cloned();
        if started.send(shared).is_ok()
            && let Some(shared) = own
        {
            shared.run();
        }
    }
}

impl Stager {
    /// Starts the thread, on which `body` creates the copy engine and calls [`StagerSetup::run`].
    pub(super) fn start(
        name: &str,
        settings: &Settings,
        arena: &Arc<Arena>,
        body: impl FnOnce(StagerSetup) + Send + 'static,
    ) -> Result<Stager> {
        let (started, outcome) = mpsc::sync_channel(1);
        let (layout, wake_up) = (SlotLayout::of(settings)?, Arc::default());
        let (name_, limit, arena) = (name.to_owned(), settings.timeout, arena.clone());
        let setup =
            StagerSetup { name: name_, limit, traced: settings.trace.is_some(), arena, layout, wake_up, started };
        let builder = std::thread::Builder::new().name(format!("stage {name}"));
        let thread = signals_blocked(|| builder.spawn(move || body(setup)))
            .map_err(|error| Error::io(name, "pthread_create", &error))?;
        let gone = |_| Error::new(ErrorKind::Io, name, "the staging thread did not start");
        match outcome.recv().map_err(gone).flatten() {
            Ok(shared) => Ok(Stager(Arc::new(StagerThread { shared, thread: Some(thread) }))),
            Err(error) => {
                // The thread ends by itself after a failed setup.
                let _ = thread.join();
                Err(error)
            }
        }
    }

    /// A queue that reports its completions to `listener`.
    pub fn attach(&self, listener: Weak<dyn StagingListener>) -> StagingQueue {
        let shared = &self.0.shared;
        let id = shared.next_queue.fetch_add(1, Ordering::Relaxed);
        shared.listeners.lock().insert(id, listener);
        StagingQueue::new(id, self.0.clone())
    }

    /// The pinned bounce memory in bytes.
    pub fn bounce_bytes(&self) -> u64 {
        self.0.shared.bounce.bytes()
    }

    /// Totals since the stager started.
    pub fn stats(&self) -> StageStats {
        let counters = self.0.shared.pipeline.lock().counters();
        let ([packed, unpacked], [pack_ns, unpack_ns]) = (counters.bytes, counters.busy_ns);
        let [out_slot_ns, in_slot_ns] = self.0.shared.bounce.exhausted_ns();
        StageStats { packed, unpacked, pack_ns, unpack_ns, out_slot_ns, in_slot_ns, batches: counters.batches }
    }
}

impl StagerThread {
    pub(super) fn shared(&self) -> &StagerShared {
        &self.shared
    }
}

impl Drop for StagerThread {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake_up.signal();
        // If a listener drops the last owner on the thread itself, the thread ends without being joined.
        if !self.shared.on_thread()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

impl StagerShared {
    /// The thread: polls, reports completions, sleeps.
    fn run(&self) {
        sharp_timers();
        // Queues whose listener could not process its completions yet.
        let mut unprocessed = Vec::new();
        let mut moved_at = Instant::now();
        loop {
            let result = self.pass();
            self.report(&mut unprocessed);
            if result.moved {
                moved_at = Instant::now();
                continue;
            }
            let still = moved_at.elapsed();
            if self.stop.load(Ordering::Acquire) && (!result.copies || still > self.limit) {
                return;
            }
            let idle = !result.copies && !result.waits && unprocessed.is_empty();
            match self.idle_policy.pause(still, idle) {
                Pause::Spin => std::hint::spin_loop(),
                Pause::Yield => std::thread::yield_now(),
                Pause::Sleep(time) => self.wake_up.wait(Some(time)),
                Pause::Park => {
                    self.wake_up.wait(None);
                    moved_at = Instant::now();
                }
            }
        }
    }

    fn pass(&self) -> PassResult {
        let mut pipeline = self.pipeline.lock();
        let result = pipeline.pass(&self.submitted);
        if result.moved {
            self.progressed.notify_all();
        }
        result
    }

    /// Reports completions and free slots, with no lock held.
    fn report(&self, unprocessed: &mut Vec<u32>) {
        unprocessed.retain(|queue| self.listener(*queue).is_some_and(|listener| !listener.process()));
        let completions = self.pipeline.lock().take_completions();
        let mut by_queue: BTreeMap<u32, Vec<Completion>> = BTreeMap::new();
        for (queue, completion) in completions {
            by_queue.entry(queue).or_default().push(completion);
        }
        let slots_free = self.bounce.take_notify();
        for (queue, completions) in by_queue {
            self.report_to(queue, completions, unprocessed);
        }
        for queue in slots_free {
            self.report_to(queue, Vec::new(), unprocessed);
        }
    }

    fn report_to(&self, queue: u32, completions: Vec<Completion>, unprocessed: &mut Vec<u32>) {
        let stored = self.listener(queue).is_some_and(|listener| !listener.completed(completions));
        if stored && !unprocessed.contains(&queue) {
            unprocessed.push(queue);
        }
    }

    fn listener(&self, queue: u32) -> Option<Arc<dyn StagingListener>> {
        self.listeners.lock().get(&queue)?.upgrade()
    }

    /// Whether completions say when they happened.
    pub(super) fn traced(&self) -> bool {
        self.traced
    }

    fn on_thread(&self) -> bool {
        self.thread == std::thread::current().id()
    }

    /// See [`StagingQueue::quiesce`].
    pub(super) fn quiesce(&self, is: &mut dyn FnMut(Owner) -> bool) -> Result<()> {
        let dropped: Vec<_> = {
            let mut submitted = self.submitted.lock();
            submitted.waits.retain(|wait| !is(wait.owner));
            let mut take = |direction: usize| {
                let transfers = std::mem::take(&mut submitted.transfers[direction]);
                let (gone, kept) = transfers.into_iter().partition(|transfer| is(transfer.owner));
                submitted.transfers[direction] = kept;
                gone
            };
            let gone: [std::collections::VecDeque<_>; 2] = [take(0), take(1)];
            gone.into_iter().flatten().collect()
        };
        // Slots return to their pool, which takes its own lock, without the lock of the submitted work.
        drop(dropped);
        let deadline = Instant::now() + self.limit;
        let mut pipeline = self.pipeline.lock();
        while pipeline.cancel(is) {
            let timed_out = if self.on_thread() {
                // No other thread polls.
                if pipeline.pass(&self.submitted).moved {
                    self.progressed.notify_all();
                }
                std::thread::yield_now();
                Instant::now() > deadline
            } else {
                self.wake_up.signal();
                self.progressed.wait_until(&mut pipeline, deadline).timed_out()
            };
            if timed_out && pipeline.cancel(is) {
                let detail = format!("a copy on the GPU has not finished after {}", format_duration(self.limit));
                return Err(Error::new(ErrorKind::Timeout, format!("staging on {}", self.name), detail)
                    .with_hint("do not free its memory yet; transfers that use no GPU memory go on"));
            }
        }
        Ok(())
    }

    pub(super) fn forget(&self, queue: u32) {
        self.listeners.lock().remove(&queue);
        self.bounce.forget(queue);
    }
}

/// Sets this thread's timer slack to 1 us; the default of 50 us would lengthen its short sleeps.
fn sharp_timers() {
    const NANOSECONDS: libc::c_ulong = 1000;
    // SAFETY: takes numbers only, and changes nothing but when this thread is woken.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, NANOSECONDS) };
}
