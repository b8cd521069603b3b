use std::thread;
use std::time::{Duration, Instant};

use crate::proof::random;

/// First and longest pause between attempts to connect to a busy peer.
const PAUSE_MIN: Duration = Duration::from_millis(5);
const PAUSE_MAX: Duration = Duration::from_millis(200);

/// Exponential backoff between attempts to connect to a busy peer. There is no event to wait for: the slots that become
/// free are the peer's.
pub(crate) struct Pause {
    next: Duration,
    deadline: Instant,
}

impl Pause {
    pub(crate) fn new(deadline: Instant) -> Pause {
        Pause { next: PAUSE_MIN, deadline }
    }

    /// Waits; false if the remaining time does not allow another attempt.
    pub(crate) fn before_retry(&mut self) -> bool {
        // Jitter, so that peers that were rejected together do not retry together.
        let jitter = random::<1>().map_or(128, |[byte]| u32::from(byte));
        let pause = self.next / 2 + self.next * jitter / 512;
        self.next = (self.next * 2).min(PAUSE_MAX);
        if Instant::now() + pause >= self.deadline {
            return false;
        }
        thread::sleep(pause);
        true
    }
}
