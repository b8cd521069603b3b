//! Waiting callers: each makes progress itself while it waits.

use std::ops::Range;
use std::time::{Duration, Instant};

use crossrail_locks::MutexGuard;
use crossrail_types::{EndpointId, OpId, interrupt};

use super::{NAP_MAX, Progress};
use crate::core::{Collected, Core, Received, Wanted};

/// Longest wait; keeps deadlines from overflowing.
pub(crate) const WAIT_MAX: Duration = Duration::from_secs(1_000_000_000);
/// A waiting thread polls without pause for this long after anything last moved, unless others [take turns](TURN) on
/// its core.
const SPIN: Duration = Duration::from_micros(30);
/// Then it offers its core to others between polls, for this long; then it sleeps.
const YIELD: Duration = Duration::from_micros(200);
/// The same where there are cores to spare: a wake-up takes longer than most transfers that are still in flight.
const YIELD_MANY: Duration = Duration::from_millis(5);
/// How long a yield takes if threads take turns on this core, such as ends of other pairs that wait for their peers:
/// busy-polling would only delay those. A thread that runs for longer is computing, and uses a full time
/// slice whenever this one yields.
const TURN: Range<Duration> = Duration::from_micros(10)..Duration::from_millis(1);
/// From this many processors on, cores count as spare.
const MANY: usize = 8;
/// Shortest and longest pause of a thread that waits for the work of the connections' threads; in between, a sixteenth
/// of the time that it has waited.
const ASIDE: Duration = Duration::from_micros(2);
const ASIDE_MAX: Duration = Duration::from_micros(20);
/// Checks for the next frame between two passes of a wait for a message: a pass takes longer than such a message is in
/// flight.
const SPINS: u32 = 8;
/// Idle polls after which the lock is handed to threads that wait for it.
const SHARE_EVERY: u32 = 8;
/// Idle polls between two reads of the clock.
const LOOK_EVERY: u32 = 64;
/// Idle polls of many lanes, each of which takes longer, between two reads of the clock.
const LOOK_EVERY_MANY: u32 = 4;
/// Number of lanes from which on they are many.
const MANY_LANES: usize = 16;
/// Idle polls between two polls of the sockets of connections that carry chunks.
const EPOLL_EVERY: u32 = 32;

/// True if a pass polls many lanes in turn.
#[inline]
pub(super) fn polls_many(core: &mut Core) -> bool {
    core.transfers().polled().len() >= MANY_LANES
}

impl Progress {
    /// Waits until `ready` returns something, at most `timeout`. `ready` is called with the core locked, and only after
    /// an operation has finished or [`Operations::report`](crate::core::Operations::report) was called.
    pub(crate) fn wait_until<T>(&self, timeout: Duration, ready: impl FnMut(&mut Core) -> Option<T>) -> Option<T> {
        self.wait_for(timeout, |_| Awaited::default(), ready)
    }

    /// [`Progress::wait_until`]. `awaited`: what the peer has to do for it.
    #[inline]
    pub(crate) fn wait_for<'a, T>(
        &'a self,
        timeout: Duration,
        awaited: impl FnOnce(&mut Core) -> Awaited<'a>,
        mut ready: impl FnMut(&mut Core) -> Option<T>,
    ) -> Option<T> {
        let mut core = self.core.lock();
        if let Some(found) = ready(&mut core) {
            self.after(core);
            return Some(found);
        }
        core.wake_ups().enter();
        let awaited = awaited(&mut core);
        if awaited.reported && self.options.has_background {
            drop(core);
            let deadline = Instant::now() + timeout.min(WAIT_MAX);
            return match Wait::new(self, timeout, awaited).sleep(deadline, &mut ready) {
                Look::Found(found) => Some(found),
                Look::Again(_) | Look::Expired => None,
            };
        }
        if core.transfers().polled().disarm() {
            // The background thread sleeps on lanes that send it no wake-ups any more: wake it, so that it checks on
            // us.
            self.connections.driven().wake();
        }
        Wait::new(self, timeout, awaited).run(core, &mut ready)
    }

    /// [`Progress::wait_until`] for what is not the end of an operation: `ready` is asked whenever anything has
    /// happened.
    pub(crate) fn observe_until<T>(&self, timeout: Duration, ready: impl FnMut(&mut Core) -> Option<T>) -> Option<T> {
        self.core.lock().wake_ups().observe();
        let found = self.wait_until(timeout, ready);
        self.core.lock().wake_ups().stop_observing();
        found
    }

    /// Wakes every waiting caller, so that an interrupted one ends its wait.
    fn waker(&self) -> impl Fn() + Send + Sync + 'static {
        let me = self.me.clone();
        move || {
            if let Some(progress) = me.upgrade() {
                progress.done.notify_all();
                progress.connections.driven().wake_always();
            }
        }
    }

    /// A caller stops making progress.
    #[inline]
    fn leave(&self, mut core: MutexGuard<'_, Core>) {
        let needed = core.wake_ups().leave();
        let asked = core.wake_ups().take_events();
        self.after(core);
        if asked {
            self.poll_sockets(Some(Duration::ZERO));
        }
        if needed {
            self.hand_over();
        }
    }
}

/// One bounded wait.
struct Wait<'a> {
    progress: &'a Progress,
    timeout: Duration,
    deadline: Option<Instant>,
    idle: u32,
    idle_since: Option<Instant>,
    /// It polls rarely and leaves the lock to other threads in between.
    aside: bool,
    awaited: Awaited<'a>,
}

/// The peer's part in a wait.
#[derive(Clone, Copy, Default)]
pub(crate) struct Awaited<'a> {
    /// Another thread reports it: the caller sleeps at once and leaves progress to the background thread. Its passes until
    /// it slept would not bring it about.
    reported: bool,
    /// A confirmation, which the peer publishes in shared memory instead of sending it.
    confirmation: bool,
    /// The peer. `None`: any, or it is not known.
    endpoint: Option<EndpointId>,
    /// Looks at the next frame between two passes.
    spins: u32,
    /// The receive that is waited for.
    wanted: Option<Wanted<'a>>,
}

impl<'a> Awaited<'a> {
    /// Something that another thread reports.
    pub(crate) fn reported() -> Awaited<'a> {
        Awaited { reported: true, ..Awaited::default() }
    }

    /// What the end of that operation takes.
    #[inline]
    pub(crate) fn of(core: &mut Core, id: OpId, collected: &'a Collected) -> Awaited<'a> {
        let Some(op) = core.operations().op(id) else { return Awaited::default() };
        let (confirmation, endpoint) = (op.kind().awaits_peer(), op.endpoint());
        match confirmation {
            true => Awaited { confirmation, endpoint, ..Awaited::default() },
            false => {
                let wanted = Some(Wanted { id, collected });
                Awaited { endpoint, spins: SPINS, wanted, ..Awaited::default() }
            }
        }
    }
}

impl<'a> Wait<'a> {
    #[inline]
    fn new(progress: &'a Progress, timeout: Duration, awaited: Awaited<'a>) -> Wait<'a> {
        Wait { progress, deadline: None, timeout, idle: 0, idle_since: None, aside: false, awaited }
    }

    #[inline]
    fn run<T>(&mut self, mut core: MutexGuard<'a, Core>, ready: &mut impl FnMut(&mut Core) -> Option<T>) -> Option<T> {
        let progress = self.progress;
        loop {
            // When it polls rarely it has just asked epoll, and other threads wait for the lock.
            let Awaited { confirmation, endpoint, spins, wanted, .. } = self.awaited;
            let mut moved = !self.aside && core.receive_short(endpoint, spins, wanted) != Received::Nothing;
            moved = moved || core.pass(!self.aside, confirmation);
            if let Some(found) = ready(&mut core) {
                progress.leave(core);
                return Some(found);
            }
            let group = progress.connections.driven();
            let asked = core.wake_ups().take_events();
            let turn = moved || core.wake_ups().wants_connections() || self.idle % EPOLL_EVERY == EPOLL_EVERY - 1;
            if asked || turn && (group.has_lanes() || core.wake_ups().wants_connections()) {
                progress.after(core);
                moved |= progress.poll_sockets(Some(Duration::ZERO));
                core = progress.core.lock();
            }
            if moved {
                self.aside = false;
                self.idle = 0;
                self.idle_since = None;
                // Costs nothing while nobody waits for the lock.
                MutexGuard::bump(&mut core);
                continue;
            }
            self.idle += 1;
            if self.idle.is_multiple_of(SHARE_EVERY) && core.has_threads() {
                // Without this, connection threads would never get the lock, which this thread retakes at once.
                MutexGuard::bump(&mut core);
            }
            let every = if polls_many(&mut core) { LOOK_EVERY_MANY } else { LOOK_EVERY };
            if self.aside || self.idle.is_multiple_of(every) {
                match self.look(core, ready) {
                    Look::Again(lock) => core = lock,
                    Look::Found(found) => return Some(found),
                    Look::Expired => return None,
                }
            }
        }
    }

    /// Reads the clock after a run of idle polls, and decides: spin on, yield, or sleep.
    #[cold]
    fn look<T>(
        &mut self,
        mut core: MutexGuard<'a, Core>,
        ready: &mut impl FnMut(&mut Core) -> Option<T>,
    ) -> Look<'a, T> {
        let progress = self.progress;
        // The connections' threads do not see the end of a copy between GPUs.
        let aside = core.has_threads() && !core.awaits_copy();
        // More lanes than processors: peers must run before anything arrives.
        let crowded = core.wake_ups().is_crowded()
            || polls_many(&mut core) && core.transfers().polled().len() > progress.environment.cores();
        let due = !progress.options.has_background && progress.page_rows.is_due(&core);
        progress.after(core);
        if due {
            progress.publish();
        }
        let now = Instant::now();
        let deadline = *self.deadline.get_or_insert_with(|| now + self.timeout.min(WAIT_MAX));
        if now >= deadline || interrupt::raised() {
            progress.leave(progress.core.lock());
            return Look::Expired;
        }
        let idle = now - *self.idle_since.get_or_insert(now);
        if idle < SPIN && (aside || !crowded) {
            return Look::Again(progress.core.lock());
        }
        // Control connections and link events are not polled while spinning.
        let pumps = aside && progress.connections.driven().has_lanes();
        if progress.poll_sockets(Some(Duration::ZERO)) && pumps {
            // Its own connection carries chunks beside those of the threads: it has no time to stand aside.
            (self.aside, self.idle, self.idle_since) = (false, 0, None);
            return Look::Again(progress.core.lock());
        }
        if idle < self.patience() {
            self.aside = aside;
            if aside {
                self.stand_aside(idle);
            } else {
                let offered = Instant::now();
                std::thread::yield_now();
                let took = offered.elapsed();
                let mut core = progress.core.lock();
                core.wake_ups().set_crowded(TURN.contains(&took));
                return Look::Again(core);
            }
            return Look::Again(progress.core.lock());
        }
        self.aside = false;
        self.idle_since = None;
        self.idle = 0;
        if progress.options.has_background {
            return self.sleep(deadline, ready);
        }
        self.doze(deadline, ready)
    }

    /// Pauses, because connection threads do the work waited for: they need the lock more than this one, which would
    /// only check for completion.
    fn stand_aside(&self, idle: Duration) {
        let (since, pause) = (Instant::now(), (idle / 16).clamp(ASIDE, ASIDE_MAX));
        std::thread::yield_now();
        while self.progress.environment.cores() >= MANY && since.elapsed() < pause {
            std::hint::spin_loop();
        }
    }

    /// How long to yield before sleeping.
    fn patience(&self) -> Duration {
        if self.progress.environment.cores() >= MANY { YIELD_MANY } else { YIELD }
    }

    /// Sleeps on the sockets itself, where there is no background thread.
    fn doze<T>(&mut self, deadline: Instant, ready: &mut impl FnMut(&mut Core) -> Option<T>) -> Look<'a, T> {
        let progress = self.progress;
        let group = progress.connections.driven();
        group.about_to_sleep();
        let mut core = progress.core.lock();
        // Another thread may have finished it since the last check.
        if let Some(found) = ready(&mut core) {
            group.awake();
            progress.leave(core);
            return Look::Found(found);
        }
        core.timers();
        let idle = !core.is_busy() && !group.pending() && core.transfers().arm();
        let left = deadline.saturating_duration_since(Instant::now()).min(NAP_MAX);
        let nap = core.next_timer().map_or(left, |at| at.saturating_duration_since(Instant::now()).min(left));
        progress.after(core);
        let _sleeping = interrupt::sleeping(|| progress.waker());
        if idle && !interrupt::raised() {
            progress.poll_sockets(Some(nap));
        } else {
            group.awake();
        }
        let mut core = progress.core.lock();
        core.transfers().polled().disarm();
        Look::Again(core)
    }

    /// Leaves progress to the background thread until something finishes.
    fn sleep<T>(&mut self, deadline: Instant, ready: &mut impl FnMut(&mut Core) -> Option<T>) -> Look<'a, T> {
        let progress = self.progress;
        let _sleeping = interrupt::sleeping(|| progress.waker());
        let mut core = progress.core.lock();
        core.wake_ups().sleep();
        progress.hand_over();
        let look = loop {
            if let Some(found) = ready(&mut core) {
                break Look::Found(found);
            }
            let over = core.is_closed() || interrupt::raised();
            if over || progress.done.wait_until(&mut core, deadline).timed_out() {
                break match ready(&mut core) {
                    Some(found) => Look::Found(found),
                    None => Look::Expired,
                };
            }
        };
        core.wake_ups().wake();
        progress.after(core);
        look
    }
}

enum Look<'a, T> {
    Again(MutexGuard<'a, Core>),
    Found(T),
    Expired,
}
