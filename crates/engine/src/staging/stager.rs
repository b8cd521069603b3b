//! One GPU's staging thread.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak, mpsc};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use crossrail_shm::Arena;
use crossrail_types::{Error, ErrorKind, Result, Settings, format_duration};
use parking_lot::{Condvar, Mutex};

use super::bell::Bell;
use super::bounce::{Bounce, Cut};
use super::core::{Core, Left, Owner, Queue};
use super::pace::{Pace, Pause};
use super::{Client, Done, Gpu, StageStats, Staged};

/// A GPU's staging: its thread and its bounce memory. When it and all its clients are gone, the thread is too.
pub(crate) struct Stager(Arc<Running>);

/// The thread, as long as anybody needs it.
pub(super) struct Running {
    pub(super) shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// What thread and clients share. Locks are taken in this order: core, queue, clients; the pool's and the bell's last.
pub(super) struct Shared {
    name: String,
    core: Mutex<Core>,
    /// Told, with `core`'s lock, when work was finished.
    finished: Condvar,
    pub(super) queue: Mutex<Queue>,
    clients: Mutex<BTreeMap<u32, Weak<dyn Staged>>>,
    next_client: AtomicU32,
    pub(super) bounce: Arc<Bounce>,
    pub(super) bell: Arc<Bell>,
    stop: AtomicBool,
    thread: ThreadId,
    /// The longest that work of the GPU's is waited for.
    limit: Duration,
    pace: Pace,
}

/// What a stager's thread begins with.
pub(super) struct Start {
    name: String,
    limit: Duration,
    pub(super) arena: Arc<Arena>,
    pub(super) cut: Cut,
    pub(super) bell: Arc<Bell>,
    tell: mpsc::SyncSender<Result<Arc<Shared>>>,
}

impl Start {
    /// Is the thread, until nobody needs it any more: with what the GPU is asked through and the memory that it
    /// reaches, or not at all.
    pub(super) fn run(self, made: Result<(Box<dyn Gpu>, Arc<Bounce>)>) {
        let Start { name, limit, bell, tell, .. } = self;
        let shared = made.map(|(gpu, bounce)| {
            Arc::new(Shared {
                name,
                core: Mutex::new(Core::new(gpu)),
                finished: Condvar::new(),
                queue: Mutex::default(),
                clients: Mutex::default(),
                next_client: AtomicU32::new(0),
                bounce,
                bell,
                stop: AtomicBool::new(false),
                thread: std::thread::current().id(),
                limit,
                pace: Pace::here(),
            })
        });
        let own = shared.as_ref().ok().cloned();
        if tell.send(shared).is_ok()
            && let Some(shared) = own
        {
            shared.run();
        }
    }
}

impl Stager {
    /// Starts the thread, on which `body` makes what the GPU is asked through, and calls [`Start::run`].
    pub(super) fn start(
        name: &str,
        settings: &Settings,
        arena: &Arc<Arena>,
        body: impl FnOnce(Start) + Send + 'static,
    ) -> Result<Stager> {
        let (tell, told) = mpsc::sync_channel(1);
        let (cut, bell) = (Cut::of(settings)?, Arc::default());
        let start = Start { name: name.to_owned(), limit: settings.timeout, arena: arena.clone(), cut, bell, tell };
        let thread = std::thread::Builder::new()
            .name(format!("stage {name}"))
            .spawn(move || body(start))
            .map_err(|error| Error::io(name, "pthread_create", &error))?;
        let gone = |_| Error::new(ErrorKind::Io, name, "the staging thread did not start");
        match told.recv().map_err(gone).flatten() {
            Ok(shared) => Ok(Stager(Arc::new(Running { shared, thread: Some(thread) }))),
            Err(error) => {
                // It has nothing left to do.
                let _ = thread.join();
                Err(error)
            }
        }
    }

    /// A client that tells `sink` of its finished work.
    pub(crate) fn attach(&self, sink: Weak<dyn Staged>) -> Client {
        let shared = &self.0.shared;
        let id = shared.next_client.fetch_add(1, Ordering::Relaxed);
        shared.clients.lock().insert(id, sink);
        Client::new(id, self.0.clone())
    }

    /// The pinned memory, in bytes.
    pub(crate) fn bounce_bytes(&self) -> u64 {
        self.0.shared.bounce.bytes()
    }

    /// What was done.
    pub(crate) fn stats(&self) -> StageStats {
        let figures = self.0.shared.core.lock().figures;
        let ([packed, unpacked], [pack_ns, unpack_ns]) = (figures.bytes, figures.busy_ns);
        let [out_slot_ns, in_slot_ns] = self.0.shared.bounce.without_ns();
        StageStats { packed, unpacked, pack_ns, unpack_ns, out_slot_ns, in_slot_ns, batches: figures.batches }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.bell.ring();
        // From its own thread (a sink that was the last to hold it) it ends by itself.
        if !self.shared.on_thread()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// The thread: begins, looks, tells, sleeps.
    fn run(&self) {
        sharp_timers();
        let mut behind = Vec::new();
        let mut moved_at = Instant::now();
        loop {
            let left = self.pass();
            self.tell(&mut behind);
            if left.moved {
                moved_at = Instant::now();
                continue;
            }
            let still = moved_at.elapsed();
            if self.stop.load(Ordering::Acquire) && (!left.work || still > self.limit) {
                return;
            }
            let idle = !left.work && !left.events && behind.is_empty();
            match self.pace.pause(still, idle) {
                Pause::Spin => std::hint::spin_loop(),
                Pause::Yield => std::thread::yield_now(),
                Pause::Sleep(time) => self.bell.wait(Some(time)),
                Pause::UntilRung => {
                    self.bell.wait(None);
                    moved_at = Instant::now();
                }
            }
        }
    }

    fn pass(&self) -> Left {
        let mut core = self.core.lock();
        let left = core.pass(&self.queue);
        if left.moved {
            self.finished.notify_all();
        }
        left
    }

    /// Hands over what is finished, with no lock held.
    fn tell(&self, behind: &mut Vec<u32>) {
        behind.retain(|client| self.sink(*client).is_some_and(|sink| !sink.catch_up()));
        let outbox = std::mem::take(&mut self.core.lock().outbox);
        let mut by_client: BTreeMap<u32, Vec<Done>> = BTreeMap::new();
        for (client, done) in outbox {
            by_client.entry(client).or_default().push(done);
        }
        let woken = self.bounce.take_woken();
        for (client, done) in by_client {
            self.tell_one(client, done, behind);
        }
        for client in woken {
            self.tell_one(client, Vec::new(), behind);
        }
    }

    fn tell_one(&self, client: u32, done: Vec<Done>, behind: &mut Vec<u32>) {
        if self.sink(client).is_some_and(|sink| !sink.staged(done)) && !behind.contains(&client) {
            behind.push(client);
        }
    }

    fn sink(&self, client: u32) -> Option<Arc<dyn Staged>> {
        self.clients.lock().get(&client)?.upgrade()
    }

    fn on_thread(&self) -> bool {
        self.thread == std::thread::current().id()
    }

    /// See [`Client::quiesce`].
    pub(super) fn quiesce(&self, is: &mut dyn FnMut(Owner) -> bool) -> Result<()> {
        let dropped: Vec<_> = {
            let mut queue = self.queue.lock();
            queue.afters.retain(|after| !is(after.owner));
            let mut take = |way: usize| {
                let (gone, kept) = std::mem::take(&mut queue.tasks[way]).into_iter().partition(|task| is(task.owner));
                queue.tasks[way] = kept;
                gone
            };
            let gone: [std::collections::VecDeque<_>; 2] = [take(0), take(1)];
            gone.into_iter().flatten().collect()
        };
        // Slots go back without the queue's lock.
        drop(dropped);
        let deadline = Instant::now() + self.limit;
        let mut core = self.core.lock();
        while core.give_up(is) {
            let timed_out = if self.on_thread() {
                // Nobody else would look.
                if core.pass(&self.queue).moved {
                    self.finished.notify_all();
                }
                std::thread::yield_now();
                Instant::now() > deadline
            } else {
                self.bell.ring();
                self.finished.wait_until(&mut core, deadline).timed_out()
            };
            if timed_out && core.give_up(is) {
                let detail = format!("the GPU is still at a copy after {}", format_duration(self.limit));
                return Err(Error::new(ErrorKind::Timeout, format!("staging on {}", self.name), detail)
                    .with_hint("its memory must not be freed yet; transfers that use no GPU memory go on"));
            }
        }
        Ok(())
    }

    pub(super) fn forget(&self, client: u32) {
        self.clients.lock().remove(&client);
        self.bounce.forget(client);
    }
}

/// Lets short waits of this thread be short: by default the system rounds them up by 50 microseconds.
fn sharp_timers() {
    const NANOSECONDS: libc::c_ulong = 1000;
    // SAFETY: takes numbers only, and changes nothing but when this thread is woken.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, NANOSECONDS) };
}
