use std::time::{Duration, Instant};

use crossrail_proto::Time;

/// The protocol's clock: nanoseconds since the worker was created, read at most once per pass.
pub(crate) struct Clock {
    epoch: Instant,
    now: Time,
    /// It shows what a simulation sets.
    #[cfg(test)]
    simulated: bool,
}

impl Clock {
    pub(super) fn new() -> Clock {
        Clock {
            epoch: Instant::now(),
            now: Time(1),
            #[cfg(test)]
            simulated: false,
        }
    }

    /// The time when the clock was last read.
    #[inline]
    pub(crate) fn now(&self) -> Time {
        self.now
    }

    /// Reads the clock.
    pub(crate) fn read(&mut self) -> Time {
        #[cfg(test)]
        if self.simulated {
            return self.now;
        }
        self.now = Time(1 + self.epoch.elapsed().as_nanos() as u64);
        self.now
    }

    /// Sets it; it stands until it is set again.
    #[cfg(test)]
    pub(super) fn simulate(&mut self, now: Time) {
        (self.now, self.simulated) = (now, true);
    }

    /// That instant as the clock shows it.
    pub(super) fn time(&self, at: Instant) -> Time {
        Time(1 + at.saturating_duration_since(self.epoch).as_nanos() as u64)
    }

    /// `at` as an instant, for waiting.
    pub(crate) fn instant(&self, at: Time) -> Instant {
        self.epoch + Duration::from_nanos(at.0.saturating_sub(1))
    }
}
