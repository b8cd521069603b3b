//! How long a stager's thread spins, yields and sleeps between polls.

use std::time::Duration;

/// What the thread does before its next poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pause {
    Spin,
    Yield,
    /// Sleeps until it is signalled, at most this long.
    Sleep(Duration),
    /// Sleeps until it is signalled.
    Park,
}

/// The policy for this machine.
#[derive(Clone, Copy, Debug)]
pub(super) struct IdlePolicy {
    /// There are cores that no other thread of ours needs.
    spare: bool,
}

impl IdlePolicy {
    /// The policy for the processors that this process may use.
    pub(super) fn here() -> IdlePolicy {
        const FEW: usize = 4;
        IdlePolicy { spare: std::thread::available_parallelism().is_ok_and(|cores| cores.get() > FEW) }
    }

    /// What to do after nothing has moved for `still`. `idle`: nothing is in flight.
    ///
    /// A copy of one chunk takes tens of microseconds, and so does waking a thread (more on a virtual machine): with
    /// cores to spare the thread spins for as long as a copy should take, and somewhat longer than the gap between
    /// chunks. An event of a caller's stream may take seconds, so the pauses get longer.
    pub(super) fn pause(self, still: Duration, idle: bool) -> Pause {
        const SPIN: Duration = Duration::from_micros(200);
        const YIELD: Duration = Duration::from_micros(30);
        const LONGEST: Duration = Duration::from_micros(50);
        const SHORTEST: Duration = Duration::from_micros(5);
        match (self.spare, idle) {
            (true, _) if still < SPIN => Pause::Spin,
            (_, true) => Pause::Park,
            (_, false) if still < YIELD => Pause::Yield,
            (_, false) => Pause::Sleep((still / 4).clamp(SHORTEST, LONGEST)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_sleeps_when_nothing_is_in_flight_and_spins_only_on_spare_cores() {
        let us = Duration::from_micros;
        let (many, few) = (IdlePolicy { spare: true }, IdlePolicy { spare: false });
        assert_eq!(many.pause(us(100), false), Pause::Spin);
        assert_eq!(many.pause(us(100), true), Pause::Spin);
        assert_eq!(many.pause(us(300), true), Pause::Park);
        assert_eq!(many.pause(us(300), false), Pause::Sleep(us(50)));
        assert_eq!(few.pause(us(0), true), Pause::Park);
        assert_eq!(few.pause(us(10), false), Pause::Yield);
        assert_eq!(few.pause(us(40), false), Pause::Sleep(us(10)));
    }
}
