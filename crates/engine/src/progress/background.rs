//! Threads that make progress while no caller does.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{NAP_MAX, Progress};

/// While callers make progress, the background thread checks this often whether they have stopped.
const TICK: Duration = Duration::from_millis(1);
/// How long the connections' threads poll after anything last moved before they sleep, where cores are free.
const LINGER: Duration = Duration::from_micros(100);

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
            let due = self.sight.is_due(&core);
            let wake_ups = core.wake_ups();
            let (passes, polling) = (wake_ups.caller_passes(), wake_ups.is_polling());
            let sleeping = wake_ups.is_anyone_sleeping();
            drop(core);
            if due {
                self.publish();
            }
            if polling || (passes != seen && !sleeping) {
                while self.run_tasks() {}
                // Callers make progress themselves: check again when they may have stopped.
                seen = passes;
                std::thread::park_timeout(TICK);
                continue;
            }
            self.drive();
        }
    }

    /// Makes progress until nothing moves, sleeps until something does. Returns when a caller takes over.
    fn drive(&self) {
        let mut quiet = 0;
        let (mut linger, mut still_since) = (Duration::ZERO, None);
        while !self.closing.load(Ordering::Acquire) {
            let mut moved = self.run_tasks();
            let mut core = self.core.lock();
            if core.wake_ups().is_polling() {
                self.after(core);
                return;
            }
            moved |= core.pass(true, true);
            let busy = core.is_busy();
            let due = self.sight.is_due(&core);
            self.after(core);
            if due {
                self.publish();
            }
            moved |= self.poll_sockets(Some(Duration::ZERO));
            if moved || busy {
                quiet = 0;
                (linger, still_since) = (self.manner.linger, None);
                if !moved {
                    std::thread::yield_now();
                }
                continue;
            }
            quiet += 1;
            if quiet < 3 {
                continue;
            }
            if !linger.is_zero() && still_since.get_or_insert_with(Instant::now).elapsed() < linger {
                // The lock is free meanwhile, for callers that submit operations, and so is the processor.
                std::thread::yield_now();
                continue;
            }
            // A sleep that ends without work, for the sake of timers, is no reason to poll.
            linger = if self.doze() { self.manner.linger } else { Duration::ZERO };
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
                continue;
            }
            group.events(None, |_| {});
            linger = self.linger();
        }
    }

    /// How long threads of connections poll in vain: waking one takes tens of microseconds, more on a virtual machine.
    fn linger(&self) -> Duration {
        let threads = self.connections.groups().iter().filter(|group| group.has_lanes()).count();
        if self.environment.cores() > 2 * (threads + 1) { LINGER } else { Duration::ZERO }
    }
}
