//! How long the parts of a buffer's making and connecting took: for whoever must find out which of them is slow.

use std::time::{Duration, Instant};

/// The parts of what was done last, in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SetupTimings {
    /// Of the constructor. `kernels`, `engine's kernels` and `heap` ran beside each other.
    pub construct: Vec<(&'static str, Duration)>,
    /// Of the last connect that had ranks to connect.
    pub connect: Vec<(&'static str, Duration)>,
}

/// Takes the time of one part after the other.
pub(crate) struct PhaseTimer {
    began: Instant,
    parts: Vec<(&'static str, Duration)>,
}

impl PhaseTimer {
    pub(crate) fn begin() -> PhaseTimer {
        PhaseTimer { began: Instant::now(), parts: Vec::new() }
    }

    /// `part` ends here; the next one begins.
    pub(crate) fn end(&mut self, part: &'static str) {
        let now = Instant::now();
        self.parts.push((part, now.duration_since(self.began)));
        self.began = now;
    }

    /// Parts that were timed elsewhere.
    pub(crate) fn add(&mut self, parts: &[(&'static str, Duration)]) {
        self.parts.extend_from_slice(parts);
        self.began = Instant::now();
    }

    pub(crate) fn parts(self) -> Vec<(&'static str, Duration)> {
        self.parts
    }
}

/// What `body` gives, and how long it took.
pub(crate) fn timed<T>(body: impl FnOnce() -> T) -> (T, Duration) {
    let began = Instant::now();
    let result = body();
    (result, began.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_follow_each_other_and_are_the_whole() {
        let began = Instant::now();
        let mut timer = PhaseTimer::begin();
        let (seven, alone) = timed(|| 7);
        timer.end("first");
        timer.end("second");
        timer.add(&[("beside", alone)]);
        let parts = timer.parts();
        assert_eq!(seven, 7);
        assert_eq!(parts.iter().map(|(name, _)| *name).collect::<Vec<_>>(), ["first", "second", "beside"]);
        assert!(alone <= parts[0].1 && parts[0].1 + parts[1].1 <= began.elapsed());
    }
}
