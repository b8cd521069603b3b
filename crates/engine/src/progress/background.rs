//! Threads that make progress while no caller does.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::waits::polls_many;
use super::{NAP_MAX, Progress};

/// While callers make progress, the background thread checks this often whether they have stopped.
const TICK: Duration = Duration::from_millis(1);
/// Interval of such checks while callers have been in one wait for a tick: they wake the thread at its end. Only the
/// page's rows are due meanwhile.
const TICK_OF_WAIT: Duration = Duration::from_millis(50);
/// Callers that make a pass at least this often on average count as polling: they find arrivals sooner than the
/// background thread, which would only compete for the lock and a processor, and make peers send wake-ups.
const POLLS_EVERY: Duration = Duration::from_micros(20);
/// Minimum number of passes to judge that by.
const POLLS_MIN: u64 = 32;
/// Idle passes before the background thread sleeps; over many lanes, one.
const QUIET: u32 = 3;
/// How long the connections' threads poll after anything last moved before they sleep, where cores are free.
const LINGER: Duration = Duration::from_micros(100);

/// How often callers make passes without waiting.
struct Pace {
    passes: u64,
    since: Instant,
}

impl Pace {
    /// Whether callers are polling, given the number of passes they have made by now.
    fn is_polling(&mut self, passes: u64, now: Instant) -> bool {
        let more = passes - self.passes;
        if more < POLLS_MIN {
            return false;
        }
        let took = now - self.since;
        *self = Pace { passes, since: now };
        took.as_nanos() < POLLS_EVERY.as_nanos() * u128::from(more)
    }
}

impl Progress {
    /// Has the background thread make progress now.
    pub(crate) fn hand_over(&self) {
        if let Some(thread) = &*self.background.lock() {
            thread.unpark();
        }
    }

    /// The background thread.
    pub(crate) fn progress_forever(self: &Arc<Self>) {
        let mut seen = 0;
        while !self.closing.load(Ordering::Acquire) {
            let mut core = self.core.lock();
            core.read_clock();
            let due = self.page_rows.is_due(&core);
            let wake_ups = core.wake_ups();
            let (passes, polling) = (wake_ups.caller_passes(), wake_ups.is_polling());
            let sleeping = wake_ups.is_anyone_sleeping();
            let in_one_wait = polling && passes == seen;
            wake_ups.set_attended(in_one_wait);
            drop(core);
            if due {
                self.publish();
            }
            if polling || (passes != seen && !sleeping) {
                while self.run_tasks() {}
                // Callers make progress themselves: check again when they may have stopped.
                seen = passes;
                std::thread::park_timeout(if in_one_wait { TICK_OF_WAIT } else { TICK });
                continue;
            }
            self.drive();
        }
    }

    /// Makes progress until nothing moves, sleeps until something does. Returns when callers take over, who wait or
    /// poll.
    fn drive(&self) {
        let mut pace: Option<Pace> = None;
        let mut quiet = 0;
        let (mut linger, mut still_since) = (Duration::ZERO, None);
        while !self.closing.load(Ordering::Acquire) {
            let mut moved = self.run_tasks();
            let mut core = self.core.lock();
            let (passes, now) = (core.wake_ups().caller_passes(), Instant::now());
            let polls = pace.get_or_insert(Pace { passes, since: now }).is_polling(passes, now);
            if core.wake_ups().is_polling() || polls && !core.wake_ups().is_anyone_sleeping() {
                self.after(core);
                return;
            }
            moved |= core.pass(true, true);
            let busy = core.is_busy();
            let enough = if polls_many(&mut core) { 1 } else { QUIET };
            let due = self.page_rows.is_due(&core);
            self.after(core);
            if due {
                self.publish();
            }
            moved |= self.poll_sockets(Some(Duration::ZERO));
            if moved || busy {
                quiet = 0;
                (linger, still_since) = (self.options.linger, None);
                if !moved {
                    std::thread::yield_now();
                }
                continue;
            }
            quiet += 1;
            if quiet < enough {
                continue;
            }
            if !linger.is_zero() && still_since.get_or_insert_with(Instant::now).elapsed() < linger {
                // The lock is free meanwhile, for callers that submit operations, and so is the processor.
                std::thread::yield_now();
                continue;
            }
            // A sleep that ends without work, for the sake of timers, is no reason to poll.
            linger = if self.doze() { self.options.linger } else { Duration::ZERO };
            (quiet, still_since) = (0, None);
        }
    }

    /// Sleeps until an event, unless there is work. Whether there was either.
    fn doze(&self) -> bool {
        let group = self.connections.driven();
        group.about_to_sleep();
        let waiting = self.tasks.are_waiting();
        let mut core = self.core.lock();
        core.timers();
        let idle = !waiting
            && !core.is_busy()
            && !core.wake_ups().wants_connections()
            && !group.pending()
            && core.transfers().arm();
        let nap = core.next_timer().map_or(NAP_MAX, |at| at.saturating_duration_since(Instant::now()).min(NAP_MAX));
        self.after(core);
        if !idle {
            group.awake();
            return true;
        }
        let moved = self.poll_sockets(Some(nap));
        let mut core = self.core.lock();
        core.transfers().polled().disarm();
        self.after(core);
        moved
    }

    /// A thread of its own for one group of connections.
    pub(crate) fn pump_forever(self: &Arc<Self>, group: usize) {
        let group = &self.connections.groups()[group];
        let mut linger = self.linger();
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
            group.about_to_sleep();
            if group.pending() || self.closing.load(Ordering::Acquire) {
                group.awake();
                std::thread::yield_now();
                continue;
            }
            group.events(None, |_| {});
            linger = self.linger();
        }
    }

    /// How long connection threads busy-poll while idle: waking one takes tens of microseconds, more in a virtual
    /// machine.
    fn linger(&self) -> Duration {
        let threads = self.connections.groups().iter().filter(|group| group.has_lanes()).count();
        if self.environment.cores() > 2 * (threads + 1) { LINGER } else { Duration::ZERO }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callers_poll_who_make_passes_without_a_pause() {
        let start = Instant::now();
        let at = |passes: u64, each: Duration| start + each * passes as u32;
        let told = |passes: u64, each: Duration| Pace { passes: 0, since: start }.is_polling(passes, at(passes, each));
        assert!(told(POLLS_MIN, POLLS_EVERY / 2));
        assert!(!told(POLLS_MIN - 1, POLLS_EVERY / 2), "a few passes tell nothing");
        assert!(!told(1000, POLLS_EVERY * 2), "passes between which callers do something else");
        let mut pace = Pace { passes: 0, since: start };
        let paused = start + Duration::from_secs(1);
        assert!(!pace.is_polling(POLLS_MIN, paused));
        assert!(pace.is_polling(2 * POLLS_MIN, paused + POLLS_EVERY), "what was before is forgotten");
    }
}
