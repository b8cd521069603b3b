//! How soon a stager's thread looks again.

use std::time::Duration;

/// What the thread does before it looks again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pause {
    Spin,
    Yield,
    /// Until the bell rings, at most so long.
    Sleep(Duration),
    UntilRung,
}

/// What this machine allows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// There are cores that nobody else of ours needs.
    spare: bool,
}

impl Pace {
    /// Of the processors that this process may use.
    pub(super) fn here() -> Pace {
        const FEW: usize = 4;
        Pace { spare: std::thread::available_parallelism().is_ok_and(|cores| cores.get() > FEW) }
    }

    /// After nothing has moved for `still`. A copy of one chunk takes tens of microseconds, and so does waking a thread
    /// that sleeps (more on a virtual machine): with cores to spare it looks without pause as long as a copy should
    /// take, and a little longer than chunks follow each other. An event of a caller's stream may take seconds, for
    /// which it pauses longer and longer. `idle`: nothing is under way at all.
    pub(super) fn pause(self, still: Duration, idle: bool) -> Pause {
        const SPIN: Duration = Duration::from_micros(200);
        const YIELD: Duration = Duration::from_micros(30);
        const LONGEST: Duration = Duration::from_micros(50);
        const SHORTEST: Duration = Duration::from_micros(5);
        match (self.spare, idle) {
            (true, _) if still < SPIN => Pause::Spin,
            (_, true) => Pause::UntilRung,
            (_, false) if still < YIELD => Pause::Yield,
            (_, false) => Pause::Sleep((still / 4).clamp(SHORTEST, LONGEST)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_sleeps_when_nothing_is_under_way_and_spins_only_on_spare_cores() {
        let us = Duration::from_micros;
        let (many, few) = (Pace { spare: true }, Pace { spare: false });
        assert_eq!(many.pause(us(100), false), Pause::Spin);
        assert_eq!(many.pause(us(100), true), Pause::Spin);
        assert_eq!(many.pause(us(300), true), Pause::UntilRung);
        assert_eq!(many.pause(us(300), false), Pause::Sleep(us(50)));
        assert_eq!(few.pause(us(0), true), Pause::UntilRung);
        assert_eq!(few.pause(us(10), false), Pause::Yield);
        assert_eq!(few.pause(us(40), false), Pause::Sleep(us(10)));
    }
}
