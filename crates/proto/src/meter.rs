use crate::Time;

/// Rate of something that is at times idle, over its busy time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Meter {
    /// Nanoseconds of busy time that are averaged; those that have been so far, at most as many.
    averaged: u64,
    seen: u64,
    /// Bytes per second, 0 while unknown.
    rate: u64,
    /// When bytes were last counted.
    measured: Time,
    /// When the busy time began that is not yet part of `rate`, and the bytes since.
    since: Time,
    bytes: u64,
}

impl Meter {
    /// An average over `averaged` nanoseconds of busy time.
    pub(crate) fn over(averaged: u64) -> Meter {
        Meter { averaged, seen: 0, rate: 0, measured: Time(0), since: Time(0), bytes: 0 }
    }

    /// Bytes per second, 0 while unknown.
    pub(crate) fn rate(&self) -> u64 {
        self.rate
    }

    /// When bytes were last counted; the start of time if never.
    pub(crate) fn measured(&self) -> Time {
        self.measured
    }

    /// Lets the next measurements outweigh the earlier ones.
    pub(crate) fn doubt(&mut self) {
        self.seen /= 4;
    }

    /// Excludes the time until now: it was idle.
    pub(crate) fn begin(&mut self, now: Time) {
        self.since = now;
    }

    /// Counts `bytes` moved in the busy time since the last call of this or [`Meter::begin`].
    pub(crate) fn count(&mut self, now: Time, bytes: u64) {
        self.measured = now;
        self.bytes += bytes;
        let elapsed = now.since(self.since);
        if elapsed == 0 || self.bytes == 0 {
            return;
        }
        // By time, not by counts: acknowledgements arrive in bunches, and shapers let bursts pass.
        let sum = u128::from(self.rate) * u128::from(self.seen) + u128::from(self.bytes) * 1_000_000_000;
        self.rate = (sum / u128::from(self.seen + elapsed)).clamp(1, 1 << 50) as u64;
        self.seen = self.averaged.min(self.seen + elapsed);
        (self.since, self.bytes) = (now, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: u64 = 1000;

    #[test]
    fn bunches_of_acknowledgements_average_out() {
        let mut meter = Meter::over(2000 * US);
        meter.begin(Time(0));
        // 64 KiB every 100 us, as three at a time, 1 us apart.
        for bunch in 1..200 {
            for part in 0..3 {
                meter.count(Time(bunch * 300 * US + part * US), 64 << 10);
            }
        }
        let rate = meter.rate() as f64 / ((64 << 10) as f64 * 1e4);
        assert!((0.9..1.2).contains(&rate), "{rate:.3} of the true rate");
    }

    /// Half of the bytes pass at once, the other half at 6.4 MB/s: the busy time makes that 13 MB/s.
    #[test]
    fn bursts_that_a_shaper_lets_pass_count_for_their_time() {
        let mut meter = Meter::over(10_000 * US);
        let mut now = 0;
        for _ in 0..50 {
            for took in [100 * US, 10_000 * US] {
                meter.begin(Time(now));
                now += took;
                meter.count(Time(now), 64 << 10);
            }
        }
        assert!((6_400_000..26_000_000).contains(&meter.rate()), "{} bytes per second", meter.rate());
    }

    #[test]
    fn idle_time_does_not_count() {
        let mut meter = Meter::over(2000 * US);
        for burst in 0..100 {
            let began = burst * 1_000_000 * US;
            meter.begin(Time(began));
            meter.count(Time(began + 100 * US), 100_000);
        }
        assert_eq!(meter.rate(), 1_000_000_000);
        assert_eq!(meter.measured(), Time(99 * 1_000_000 * US + 100 * US));
    }

    #[test]
    fn a_change_is_followed_within_milliseconds() {
        let mut meter = Meter::over(2000 * US);
        meter.count(Time(1000 * US), 1_000_000);
        for at in 1..=50 {
            meter.count(Time((1000 + at * 100) * US), 10_000);
        }
        assert!((100_000_000..200_000_000).contains(&meter.rate()), "{}", meter.rate());
    }
}
