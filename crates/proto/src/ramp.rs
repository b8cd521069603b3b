//! Chooses how many connections of each rail carry chunks, by measuring transfers in progress; searches again when the
//! rate has changed.
//!
//! A sample is the rate over a busy period: from the first chunk to the last acknowledgement, or a fixed number of
//! bytes of an endless stream. Each step doubles or halves the number of connections, because one more gains less than
//! the measurements vary.

use crate::Time;

/// Minimum number of bytes for a busy period to count as a sample: start and end dominate a shorter one.
const SAMPLE_MIN: u64 = 8 << 20;
/// Bytes after which a sample is taken although the busy period goes on.
const SAMPLE_MAX: u64 = 256 << 20;
/// Samples per measurement, which is their median.
const SAMPLES: usize = 3;
/// Reciprocal of the relative margin: more connections must gain more than 1/16; fewer may lose at most 1/16.
const MARGIN: u64 = 16;
/// Bytes of chunks after which an end that may open more connections asks for them.
const WANTED_AFTER: u64 = SAMPLE_MIN;
/// Consecutive outliers, by a factor of two, after which the search restarts.
const OFF: u32 = 2;

/// The search for the number of connections of a rail that carry chunks. See the module.
#[derive(Debug)]
pub(crate) struct Ramp {
    /// Connections of each rail that carry chunks.
    level: u16,
    /// Connections of the rail that has the most.
    most: u16,
    /// The level that the search began with.
    from: u16,
    /// The best level that was measured, and its rate in bytes per second.
    best: Option<(u16, u64)>,
    step: Step,
    /// When the present busy time began, and the bytes acknowledged in it.
    since: Option<Time>,
    bytes: u64,
    rates: Vec<u64>,
    growth: Growth,
}

/// Whether more connections are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Growth {
    /// No more connections are possible, or they are being opened.
    None,
    /// Not before so many more bytes.
    After(u64),
    Now,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The first level, or more than that.
    Up,
    /// Fewer than at first: the same rate with less work is better.
    Down,
    /// Converged. `off`: consecutive outliers.
    Found { off: u32 },
}

impl Ramp {
    pub(crate) fn new() -> Ramp {
        Ramp {
            level: 1,
            most: 1,
            from: 1,
            best: None,
            step: Step::Up,
            since: None,
            bytes: 0,
            rates: Vec::new(),
            growth: Growth::None,
        }
    }

    /// Allows more connections, which are asked for once many bytes have been acknowledged.
    pub(crate) fn may_grow(&mut self) {
        if self.growth == Growth::None {
            self.growth = Growth::After(WANTED_AFTER);
        }
    }

    /// Whether more connections are wanted; true once.
    pub(crate) fn outgrows(&mut self) -> bool {
        let wanted = self.growth == Growth::Now;
        if wanted {
            self.growth = Growth::None;
        }
        wanted
    }

    /// Connections of each rail that carry chunks.
    pub(crate) fn level(&self) -> u16 {
        self.level
    }

    /// Whether there is anything to search for.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.most > 1
    }

    /// Whether acknowledgements are to be counted.
    #[inline]
    pub(crate) fn counts(&self) -> bool {
        self.is_on() || self.growth != Growth::None
    }

    /// Begins with that many connections, before anything is measured.
    pub(crate) fn begin_with(&mut self, level: u16) {
        self.level = level.max(1);
        self.search();
    }

    /// The rail that has the most connections has that many now.
    pub(crate) fn has(&mut self, most: u16) {
        if most > self.most {
            self.search();
        }
        self.most = most;
    }

    /// A chunk goes out.
    #[inline]
    pub(crate) fn sends(&mut self, now: Time) {
        self.since.get_or_insert(now);
    }

    /// So many bytes of chunks were acknowledged. `idle`: nothing is in flight or left to send. Returns whether the
    /// level has changed.
    pub(crate) fn acknowledged(&mut self, now: Time, bytes: u64, idle: bool) -> bool {
        if let Growth::After(left) = self.growth {
            self.growth = if left > bytes { Growth::After(left - bytes) } else { Growth::Now };
        }
        let Some(since) = self.since.filter(|_| self.is_on()) else { return false };
        self.bytes += bytes;
        if !idle && self.bytes < SAMPLE_MAX {
            return false;
        }
        self.since = (!idle).then_some(now);
        let (bytes, elapsed) = (std::mem::take(&mut self.bytes), now.since(since));
        if bytes < SAMPLE_MIN || elapsed == 0 {
            return false;
        }
        self.rates.push((u128::from(bytes) * 1_000_000_000 / u128::from(elapsed)).clamp(1, 1 << 50) as u64);
        if self.rates.len() < SAMPLES {
            return false;
        }
        self.rates.sort_unstable();
        let (rate, before) = (self.rates[SAMPLES / 2], self.level);
        self.rates.clear();
        self.measured(rate);
        self.level != before
    }

    fn search(&mut self) {
        (self.from, self.best, self.step) = (self.level, None, Step::Up);
        self.rates.clear();
        // The current sample began under other conditions.
        (self.since, self.bytes) = (None, 0);
    }

    /// Handles the median `rate` of the current level.
    fn measured(&mut self, rate: u64) {
        let best = self.best.map_or(0, |(_, rate)| rate);
        match self.step {
            Step::Up if rate > best + best / MARGIN => {
                self.best = Some((self.level, rate));
                if !self.try_level((self.level * 2).min(self.most)) {
                    self.turn();
                }
            }
            Step::Up => self.turn(),
            Step::Down if rate >= best - best / MARGIN => {
                self.best = Some((self.level, rate.max(best)));
                if !self.try_level(self.level / 2) {
                    self.settle();
                }
            }
            Step::Down => self.settle(),
            Step::Found { off } => {
                let off = if rate < best / 2 || rate / 2 > best { off + 1 } else { 0 };
                self.step = Step::Found { off };
                if off == OFF {
                    self.search();
                }
            }
        }
    }

    fn try_level(&mut self, level: u16) -> bool {
        let possible = level != self.level && (1..=self.most).contains(&level);
        if possible {
            self.level = level;
        }
        possible
    }

    /// More connections gain nothing. If none of the larger levels did, try fewer.
    fn turn(&mut self) {
        self.step = Step::Down;
        if self.best.is_none_or(|(level, _)| level != self.from) || !self.try_level(self.from / 2) {
            self.settle();
        }
    }

    fn settle(&mut self) {
        self.level = self.best.map_or(self.from, |(level, _)| level);
        self.step = Step::Found { off: 0 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs transfers of 64 MiB, of which `rate` gives the rate at each level, and returns the level after each.
    fn after(ramp: &mut Ramp, transfers: usize, rate: impl Fn(u16) -> u64) -> u16 {
        let mut now = 0;
        for _ in 0..transfers {
            ramp.sends(Time(now));
            now += (64u64 << 20) * 1_000_000 / (rate(ramp.level()) / 1000);
            ramp.acknowledged(Time(now), 32 << 20, false);
            ramp.acknowledged(Time(now), 32 << 20, true);
            now += 1000;
        }
        ramp.level()
    }

    fn ramp(most: u16, begin_with: u16) -> Ramp {
        let mut ramp = Ramp::new();
        ramp.has(most);
        ramp.begin_with(begin_with);
        ramp
    }

    const GB: u64 = 1_000_000_000;

    #[test]
    fn connections_that_gain_are_kept() {
        let rate = |level: u16| 5 * GB * u64::from(level.min(4));
        assert_eq!(after(&mut ramp(8, 1), 60, rate), 4);
        assert_eq!(after(&mut ramp(8, 4), 60, rate), 4);
        assert_eq!(after(&mut ramp(2, 1), 60, rate), 2);
    }

    #[test]
    fn connections_that_gain_nothing_are_left() {
        assert_eq!(after(&mut ramp(8, 4), 60, |_| GB), 1);
        assert_eq!(after(&mut ramp(8, 1), 60, |_| GB), 1);
        // The more the slower.
        assert_eq!(after(&mut ramp(8, 4), 60, |level| 8 * GB / u64::from(level)), 1);
        assert_eq!(after(&mut ramp(8, 4), 60, |level| 8 * GB - u64::from(level.abs_diff(2)) * GB), 2);
    }

    #[test]
    fn short_transfers_and_pauses_measure_nothing() {
        let mut ramp = ramp(8, 4);
        for turn in 0..1000 {
            ramp.sends(Time(turn * 1000));
            ramp.acknowledged(Time(turn * 1000 + 999), SAMPLE_MIN - 1, true);
        }
        assert!(ramp.rates.is_empty() && ramp.level() == 4);
        ramp.acknowledged(Time(1 << 40), SAMPLE_MIN, true);
        assert!(ramp.rates.is_empty(), "nothing was sent");
    }

    #[test]
    fn a_stream_without_an_end_is_measured() {
        let (mut ramp, mut now) = (ramp(4, 1), 0);
        for _ in 0..100 {
            ramp.sends(Time(now));
            now += SAMPLE_MAX / u64::from(ramp.level());
            ramp.acknowledged(Time(now), SAMPLE_MAX, false);
        }
        assert_eq!(ramp.level(), 4);
    }

    #[test]
    fn a_rate_that_changed_begins_the_search_anew() {
        let mut ramp = ramp(8, 1);
        assert_eq!(after(&mut ramp, 60, |_| 8 * GB), 1);
        assert_eq!(after(&mut ramp, 60, |level| u64::from(level) * GB), 8);
    }

    #[test]
    fn a_connection_that_comes_later_is_tried() {
        let mut ramp = ramp(1, 1);
        assert!(!ramp.is_on());
        ramp.has(4);
        assert!(ramp.is_on());
        assert_eq!(after(&mut ramp, 60, |level| u64::from(level) * GB), 4);
        // Lost ones leave the level, which says how many may carry and not how many there are.
        ramp.has(2);
        assert_eq!(after(&mut ramp, 60, |level| u64::from(level.min(2)) * GB), 4);
    }
}
