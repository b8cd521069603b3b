//! Durations of the phases of constructing and connecting a buffer, to find the slow ones.

use std::time::{Duration, Instant};

/// Durations of phases, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SetupTimings {
    /// Phases of the constructor. `kernels`, `engine's kernels` and `heap` ran concurrently.
    pub construct: Vec<(&'static str, Duration)>,
    /// Phases of the last connect that had ranks to connect.
    pub connect: Vec<(&'static str, Duration)>,
}

/// Times one phase after the other.
pub(crate) struct PhaseTimer {
    began: Instant,
    parts: Vec<(&'static str, Duration)>,
}

impl PhaseTimer {
    pub(crate) fn begin() -> PhaseTimer {
        PhaseTimer { began: Instant::now(), parts: Vec::new() }
    }

    /// Ends the phase `part` and begins the next one.
    pub(crate) fn end(&mut self, part: &'static str) {
        let now = Instant::now();
        self.parts.push((part, now.duration_since(self.began)));
        self.began = now;
    }

    /// Adds phases that were timed elsewhere.
    pub(crate) fn add(&mut self, parts: &[(&'static str, Duration)]) {
        self.parts.extend_from_slice(parts);
        self.began = Instant::now();
    }

    pub(crate) fn parts(self) -> Vec<(&'static str, Duration)> {
        self.parts
    }
}

/// Result and duration of `body`.
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
