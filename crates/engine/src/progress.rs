//! Who makes progress when: waiting callers first, the background thread while there are none; and what is done after
//! the lock is released.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossrail_types::Result;
use parking_lot::MutexGuard;

use crate::core::Core;
use crate::io::{About, Ready};
use crate::ops::Callback;
use crate::request::{Receipt, render};
use crate::worker::Shared;

/// A waiting thread polls without pause for this long after anything last moved.
const SPIN: Duration = Duration::from_micros(30);
/// Then it offers its core to others between polls, for this long; then it sleeps.
const YIELD: Duration = Duration::from_micros(200);
/// The same where there are cores to spare: being woken takes longer than most transfers that are still under way.
const YIELD_MANY: Duration = Duration::from_millis(5);
/// From so many processors on there are.
const MANY: usize = 8;
/// A thread that waits for the work of others' threads looks this often at first, and when it has waited for long, so
/// often; in between after a sixteenth of the time that it has waited.
const ASIDE: Duration = Duration::from_micros(2);
const ASIDE_MAX: Duration = Duration::from_micros(20);
/// Idle polls after which threads that wait for the lock get it.
const SHARE_EVERY: u32 = 8;
/// Idle polls between two looks at the clock.
const LOOK_EVERY: u32 = 64;
/// Idle polls between two looks at the sockets of chunk connections.
const EPOLL_EVERY: u32 = 32;
/// While callers make progress themselves, the background thread looks this often whether they have stopped.
const TICK: Duration = Duration::from_millis(1);
/// The threads of connections look for this long after anything last moved before they sleep, where cores are free.
const LINGER: Duration = Duration::from_micros(100);
/// The longest the background thread sleeps without looking at the protocol's timers.
const NAP_MAX: Duration = Duration::from_millis(100);

impl Shared {
    // ---- after every change

    /// Releases the lock and does what must be done without it: callbacks, wake-ups, suspects, lost rails.
    #[inline]
    pub(crate) fn after(&self, mut core: MutexGuard<'_, Core>) {
        let finished = std::mem::take(&mut core.st.ops.finished);
        let sleepers = core.sleepers > 0;
        let rare =
            core.kicked || !core.st.ops.callbacks.is_empty() || !core.suspects.is_empty() || !core.lost.is_empty();
        if rare {
            self.after_rare(core);
        } else {
            drop(core);
        }
        if finished {
            self.events.tell();
            // Who sleeps was counted under the lock, so it is told even if it is only about to sleep.
            if sleepers {
                self.done.notify_all();
            }
            if !self.options.background {
                // A caller may sleep on the sockets.
                self.groups[0].wake();
            }
        }
    }

    #[cold]
    fn after_rare(&self, mut core: MutexGuard<'_, Core>) {
        let kicked = std::mem::take(&mut core.kicked);
        let roused = std::mem::take(&mut core.roused);
        let callbacks = std::mem::take(&mut core.st.ops.callbacks);
        let suspects = std::mem::take(&mut core.suspects);
        let lost = std::mem::take(&mut core.lost);
        let ended = std::mem::take(&mut core.ended);
        let callbacks: Vec<(Callback, Result<Receipt>)> =
            callbacks.into_iter().map(|(callback, outcome)| (callback, render(&mut core, outcome))).collect();
        drop(core);
        if kicked {
            for (at, group) in self.groups.iter().enumerate() {
                // The first also looks after the lanes under the lock.
                if (at == 0 && roused) || group.pending() {
                    group.wake();
                }
            }
        }
        for (endpoint, lane) in suspects {
            self.examine(endpoint, lane);
        }
        for lost in lost {
            self.keeper.lost(self, lost);
        }
        for endpoint in ended {
            self.end_session(endpoint);
        }
        for (callback, result) in callbacks {
            callback(result);
        }
    }

    // ---- progress

    /// One pass over everything; whether anything moved.
    pub(crate) fn step(&self) -> bool {
        let mut core = self.core.lock();
        let mut moved = core.pass(true);
        core.timers();
        core.activity += 1;
        self.after(core);
        moved |= self.poll_sockets(Some(Duration::ZERO));
        moved
    }

    /// Collects socket events and pumps the driver's connections.
    pub(crate) fn poll_sockets(&self, timeout: Option<Duration>) -> bool {
        let group = &self.groups[0];
        let mut others: Vec<Ready> = Vec::new();
        group.events(timeout, |ready| others.push(ready));
        for ready in &others {
            self.act(*ready);
        }
        group.pump(self) | !others.is_empty()
    }

    fn act(&self, ready: Ready) {
        match ready.about {
            About::Wake => {}
            About::Lane(id) => {
                let mut core = self.core.lock();
                if let Some(inside) = core.inside.iter_mut().find(|lane| lane.id == id) {
                    inside.lane.ready(ready.readable, ready.writable);
                }
            }
            About::Session(endpoint) if ready.readable => self.control_readable(endpoint),
            About::Session(_) => {}
            About::Links => self.links_changed(),
        }
    }

    /// Waits until `ready` answers, at most `timeout`.
    pub(crate) fn wait_until<T>(&self, timeout: Duration, mut ready: impl FnMut(&mut Core) -> Option<T>) -> Option<T> {
        let mut core = self.core.lock();
        if let Some(found) = ready(&mut core) {
            self.after(core);
            return Some(found);
        }
        core.spinning += 1;
        if core.disarm() {
            // The background thread sleeps on lanes that no longer ring: have it look after us instead.
            self.groups[0].wake();
        }
        let mut wait = Wait { shared: self, deadline: None, timeout, idle: 0, idle_since: None, aside: false };
        wait.run(core, &mut ready)
    }

    /// [`Shared::wait_until`] for what is not the end of an operation: `ready` is asked whenever anything has happened.
    pub(crate) fn observe_until<T>(&self, timeout: Duration, ready: impl FnMut(&mut Core) -> Option<T>) -> Option<T> {
        self.core.lock().observers += 1;
        let found = self.wait_until(timeout, ready);
        self.core.lock().observers -= 1;
        found
    }

    /// A caller stops making progress.
    #[inline]
    fn leave(&self, mut core: MutexGuard<'_, Core>) {
        core.spinning -= 1;
        core.activity += 1;
        let needed = core.sleepers > 0 && core.spinning == 0;
        self.after(core);
        if needed {
            self.hand_over();
        }
    }

    /// Gets the background thread to make progress now.
    pub(crate) fn hand_over(&self) {
        if let Some(thread) = &*self.background.lock() {
            thread.unpark();
        }
    }

    /// The background thread.
    pub(crate) fn progress_forever(self: &Arc<Self>) {
        let mut seen = 0;
        while !self.closing.load(Ordering::Acquire) {
            let core = self.core.lock();
            let (activity, spinning, sleepers) = (core.activity, core.spinning > 0, core.sleepers > 0);
            drop(core);
            if spinning || (activity != seen && !sleepers) {
                // Callers make progress themselves: look again when they may have stopped.
                seen = activity;
                std::thread::park_timeout(TICK);
                continue;
            }
            self.drive();
        }
    }

    /// Makes progress until nothing moves, sleeps until something does. Returns when a caller takes over.
    fn drive(&self) {
        let mut quiet = 0;
        while !self.closing.load(Ordering::Acquire) {
            let mut core = self.core.lock();
            if core.spinning > 0 {
                self.after(core);
                return;
            }
            let mut moved = core.pass(true);
            let busy = core.busy();
            self.after(core);
            moved |= self.poll_sockets(Some(Duration::ZERO));
            if moved || busy {
                quiet = 0;
                if !moved {
                    std::thread::yield_now();
                }
                continue;
            }
            quiet += 1;
            if quiet < 3 {
                continue;
            }
            self.doze();
            quiet = 0;
        }
    }

    /// Sleeps until an event, unless there is work.
    fn doze(&self) {
        let group = &self.groups[0];
        group.drowsy();
        let mut core = self.core.lock();
        core.timers();
        let idle = !core.busy() && !core.kicked && !group.pending() && core.arm();
        let nap = core.next_timer().map_or(NAP_MAX, |at| at.saturating_duration_since(Instant::now()).min(NAP_MAX));
        self.after(core);
        if !idle {
            group.awake();
            return;
        }
        self.poll_sockets(Some(nap));
        let mut core = self.core.lock();
        core.disarm();
        self.after(core);
    }

    /// A thread of its own for one group of connections.
    pub(crate) fn pump_forever(self: &Arc<Self>, group: usize) {
        let group = &self.groups[group];
        // A thread that sleeps is woken in tens of microseconds, more on a virtual machine.
        let linger = if self.context.cores() > 2 * self.groups.len() { LINGER } else { Duration::ZERO };
        let mut moved_at = Instant::now();
        while !self.closing.load(Ordering::Acquire) {
            group.events(Some(Duration::ZERO), |_| {});
            if group.pump(self) {
                moved_at = Instant::now();
                continue;
            }
            if group.has_lanes() && moved_at.elapsed() < linger {
                std::hint::spin_loop();
                continue;
            }
            group.drowsy();
            if group.pending() || self.closing.load(Ordering::Acquire) {
                group.awake();
                continue;
            }
            group.events(None, |_| {});
        }
    }
}

/// One bounded wait.
struct Wait<'a> {
    shared: &'a Shared,
    timeout: Duration,
    deadline: Option<Instant>,
    idle: u32,
    idle_since: Option<Instant>,
    /// It looks once in a while, and leaves the lock to others meanwhile.
    aside: bool,
}

impl<'a> Wait<'a> {
    #[inline]
    fn run<T>(&mut self, mut core: MutexGuard<'a, Core>, ready: &mut impl FnMut(&mut Core) -> Option<T>) -> Option<T> {
        let shared = self.shared;
        loop {
            // Aside, it has just asked epoll, and others want the lock.
            let mut moved = core.pass(!self.aside);
            if let Some(found) = ready(&mut core) {
                shared.leave(core);
                return Some(found);
            }
            let group = &shared.groups[0];
            if (moved || core.kicked || self.idle % EPOLL_EVERY == EPOLL_EVERY - 1)
                && (group.has_lanes() || core.kicked)
            {
                shared.after(core);
                moved |= shared.poll_sockets(Some(Duration::ZERO));
                core = shared.core.lock();
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
            if self.idle.is_multiple_of(SHARE_EVERY) && core.threads {
                // Connections' threads have their turns; a lock that is taken again at once is never theirs.
                MutexGuard::bump(&mut core);
            }
            if self.aside || self.idle.is_multiple_of(LOOK_EVERY) {
                match self.look(core, ready) {
                    Look::Again(lock) => core = lock,
                    Look::Found(found) => return Some(found),
                    Look::Expired => return None,
                }
            }
        }
    }

    /// Looks at the clock after a stretch of idle polls: spin on, let others run, or sleep.
    #[cold]
    fn look<T>(&mut self, core: MutexGuard<'a, Core>, ready: &mut impl FnMut(&mut Core) -> Option<T>) -> Look<'a, T> {
        let shared = self.shared;
        // Others' threads do not see the end of a copy between GPUs.
        let aside = core.threads && !core.awaits_copy();
        shared.after(core);
        let now = Instant::now();
        let deadline = *self.deadline.get_or_insert(now + self.timeout);
        if now >= deadline {
            shared.leave(shared.core.lock());
            return Look::Expired;
        }
        let idle = now - *self.idle_since.get_or_insert(now);
        if idle < SPIN {
            return Look::Again(shared.core.lock());
        }
        // Session and link events are not looked at while spinning.
        shared.poll_sockets(Some(Duration::ZERO));
        if idle < self.patience() {
            self.aside = aside;
            if aside {
                self.stand_aside(idle);
            } else {
                std::thread::yield_now();
            }
            return Look::Again(shared.core.lock());
        }
        self.aside = false;
        self.idle_since = None;
        self.idle = 0;
        if shared.options.background {
            return self.sleep(deadline, ready);
        }
        self.doze(deadline, ready)
    }

    /// What is waited for is the work of the threads of connections: they need the lock more than this one does, which
    /// would only look whether they are done.
    fn stand_aside(&self, idle: Duration) {
        let (since, pause) = (Instant::now(), (idle / 16).clamp(ASIDE, ASIDE_MAX));
        std::thread::yield_now();
        while self.shared.context.cores() >= MANY && since.elapsed() < pause {
            std::hint::spin_loop();
        }
    }

    /// How long to yield before sleeping.
    fn patience(&self) -> Duration {
        if self.shared.context.cores() >= MANY { YIELD_MANY } else { YIELD }
    }

    /// Sleeps on the sockets itself, where there is no background thread.
    fn doze<T>(&mut self, deadline: Instant, ready: &mut impl FnMut(&mut Core) -> Option<T>) -> Look<'a, T> {
        let shared = self.shared;
        let group = &shared.groups[0];
        group.drowsy();
        let mut core = shared.core.lock();
        // Others' threads may have finished it meanwhile.
        if let Some(found) = ready(&mut core) {
            group.awake();
            shared.leave(core);
            return Look::Found(found);
        }
        core.timers();
        let idle = !core.busy() && !group.pending() && core.arm();
        let left = deadline.saturating_duration_since(Instant::now()).min(NAP_MAX);
        let nap = core.next_timer().map_or(left, |at| at.saturating_duration_since(Instant::now()).min(left));
        shared.after(core);
        if idle {
            shared.poll_sockets(Some(nap));
        } else {
            group.awake();
        }
        let mut core = shared.core.lock();
        core.disarm();
        Look::Again(core)
    }

    /// Leaves progress to the background thread until something finishes.
    fn sleep<T>(&mut self, deadline: Instant, ready: &mut impl FnMut(&mut Core) -> Option<T>) -> Look<'a, T> {
        let shared = self.shared;
        let mut core = shared.core.lock();
        core.sleepers += 1;
        core.spinning -= 1;
        shared.hand_over();
        let look = loop {
            if let Some(found) = ready(&mut core) {
                break Look::Found(found);
            }
            if core.closed || shared.done.wait_until(&mut core, deadline).timed_out() {
                break match ready(&mut core) {
                    Some(found) => Look::Found(found),
                    None => Look::Expired,
                };
            }
        };
        core.sleepers -= 1;
        core.activity += 1;
        shared.after(core);
        look
    }
}

enum Look<'a, T> {
    Again(MutexGuard<'a, Core>),
    Found(T),
    Expired,
}
