//! Flags that show which thread makes progress, and which threads to wake.
//!
//! Progress is made by waiting callers; while there are none, by the background thread; connections that carry chunks
//! may have threads of their own. Each sleeps on something, and whoever leaves work for it must wake it. Flags under
//! the worker's lock are set while the core changes, and consumed when the lock is released
//! ([`Progress::after`](crate::progress::Progress::after)), so that the woken thread finds the lock free.
//!
//! | flag | meaning | set by | cleared by | protected by |
//! |---|---|---|---|---|
//! | `Operations::finished` | waiting threads must check what they wait for | `finish`, `report` | `Progress::after`, which notifies sleeping callers and the event descriptor | worker's lock |
//! | `WakeUps::connections` | a connection outside the lock has frames to send or is to be dropped, or there is deferred work | `Transfers::notify_connections`, `kill`, completions of staging | `Progress::after`, which wakes the groups with pending connections | worker's lock |
//! | `WakeUps::driver` | lanes under the lock have work for the thread that sleeps on them | a direct copy begun while armed; a chunk that became ready | `Progress::after`, which wakes group 0 | worker's lock |
//! | `WakeUps::chunk_queued` | a flush left staged chunks, which are sent when the lane is polled | `Transfers::flush` | `Transfers::settle`, which turns it into `driver` and `connections` | worker's lock |
//! | `PolledLanes::armed` | peers send a wake-up with their next frame, because no thread polls | `arm`, before sleeping | `disarm`, by whoever polls again | worker's lock |
//! | `WakeUps::events` | epoll is to be asked for wake-ups of resting lanes, because nobody sleeps there | `Core::tick` | a caller that asks epoll, before it does | worker's lock |
//! | `PolledLanes::awake` | the lanes beyond it rest: their peers send a wake-up although threads poll | `rest_idle` | the wake-up's event, or the lane's use | worker's lock |
//! | `WakeUps::polling` | callers that make progress now | `enter` | `leave`, `sleep` | worker's lock |
//! | `WakeUps::sleeping` | callers that wait for `Progress::done` | `sleep` | `wake` | worker's lock |
//! | `WakeUps::observers` | callers that wait for something other than the end of an operation | `Progress::observe_until` | the same, at its end | worker's lock |
//! | `WakeUps::attended` | the background thread sleeps until callers stop making progress, and they wake it then | that thread, while callers make progress | the last caller that stops | worker's lock |
//! | `WakeUps::caller_passes` | counts passes by callers, so that the background thread knows that they wait or poll | `leave`, `wake`, `test`, `notices`, `step` | never | worker's lock |
//! | `WakeUps::crowded` | threads take turns on this processor: waits yield early, and direct copies leave no half to the peer | a waiting caller, from how long its yield took | the same | worker's lock |
//! | `BulkLane::wanted` | the protocol has something for this connection | `Transfers::notify_connections`, staging | the thread that polls it | atomic |
//! | `BulkLane::dead` | the connection is to be dropped | `kill`, `take_for_dead` | never; the connection is removed | atomic |
//! | `BulkLane::readiness` | epoll has reported its socket | whoever collects events | the thread that polls it | atomic |
//! | `Group::pending` | one of the three is up for a connection of the group | whoever raises that one, after it | the thread that polls the group, before it checks those | atomic |
//! | `Group::asleep` | the thread of the group sleeps, or is about to | `about_to_sleep`, before its last check for work | the same thread, awake again | atomic, sequentially consistent |
//! | `Inbox::up` | stagers have left completions | the stager's thread | the next pass, or the stager itself if it gets the lock | atomic |
//! | `Tasks::any` | callers have left work for whoever makes progress | `Progress::defer` | whoever runs the last task | the list's lock |
//! | `EventsFd::wanted` | the user has asked for the event descriptor | `fd` | never | atomic |
//!
//! A sleeper never misses a wake-up: it sets `Group::asleep` (or counts itself as sleeping) first and checks for work
//! afterwards, and whoever leaves work sets the work's flag first and reads `asleep` afterwards. Both are sequentially
//! consistent, so at least one of the two sees the other.

/// The wake-up flags under the worker's lock. See the module.
#[derive(Default)]
pub(crate) struct WakeUps {
    connections: bool,
    driver: bool,
    events: bool,
    chunk_queued: bool,
    polling: u32,
    sleeping: u32,
    observers: u32,
    attended: bool,
    caller_passes: u64,
    crowded: bool,
}

impl WakeUps {
    /// Connections outside the lock have work, or there is work to be done without the lock.
    #[inline]
    pub(crate) fn want_connections(&mut self) {
        self.connections = true;
    }

    #[inline]
    pub(crate) fn wants_connections(&self) -> bool {
        self.connections
    }

    /// The thread that sleeps on the lanes under the lock has work.
    pub(crate) fn want_driver(&mut self) {
        self.driver = true;
        self.connections = true;
    }

    /// Whether connections have work, and whether the driver has. Clears both.
    pub(crate) fn take(&mut self) -> (bool, bool) {
        (std::mem::take(&mut self.connections), std::mem::take(&mut self.driver))
    }

    /// Epoll is to be asked for wake-ups of resting lanes.
    pub(super) fn want_events(&mut self) {
        self.events = true;
    }

    /// Whether the caller is to ask epoll.
    #[inline]
    pub(crate) fn take_events(&mut self) -> bool {
        std::mem::take(&mut self.events)
    }

    /// A flush left staged chunks, to be sent when the lane is polled.
    pub(super) fn queue_chunk(&mut self) {
        self.chunk_queued = true;
    }

    /// After a flush: whoever sleeps on the lanes must poll one with staged chunks.
    #[inline]
    pub(super) fn after_flush(&mut self) {
        if std::mem::take(&mut self.chunk_queued) {
            self.want_driver();
        }
    }

    /// A caller starts to make progress.
    #[inline]
    pub(crate) fn enter(&mut self) {
        self.polling += 1;
    }

    /// A caller stops making progress; whether the background thread must take over at once, for those that sleep or
    /// because it relies on this.
    #[inline]
    pub(crate) fn leave(&mut self) -> bool {
        self.polling -= 1;
        self.caller_passes += 1;
        self.polling == 0 && (self.sleeping > 0 || std::mem::take(&mut self.attended))
    }

    /// Sets whether the background thread sleeps until the callers that make progress now stop.
    pub(crate) fn set_attended(&mut self, attended: bool) {
        self.attended = attended;
    }

    /// A caller that made progress goes to sleep. The background thread must take over.
    pub(crate) fn sleep(&mut self) {
        self.sleeping += 1;
        self.polling -= 1;
    }

    /// A caller that slept has what it waited for.
    pub(crate) fn wake(&mut self) {
        self.sleeping -= 1;
        self.caller_passes += 1;
    }

    /// A caller made one pass without waiting.
    pub(crate) fn count_pass(&mut self) {
        self.caller_passes += 1;
    }

    /// Whether callers make progress now.
    #[inline]
    pub(crate) fn is_polling(&self) -> bool {
        self.polling > 0
    }

    #[inline]
    pub(crate) fn is_anyone_sleeping(&self) -> bool {
        self.sleeping > 0
    }

    /// Passes by callers so far.
    pub(crate) fn caller_passes(&self) -> u64 {
        self.caller_passes
    }

    /// Others took turns on this processor when a waiting caller last offered it to them.
    #[inline]
    pub(crate) fn is_crowded(&self) -> bool {
        self.crowded
    }

    pub(crate) fn set_crowded(&mut self, crowded: bool) {
        self.crowded = crowded;
    }

    /// A caller waits for something other than the end of an operation.
    pub(crate) fn observe(&mut self) {
        self.observers += 1;
    }

    pub(crate) fn stop_observing(&mut self) {
        self.observers -= 1;
    }

    #[inline]
    pub(crate) fn is_observed(&self) -> bool {
        self.observers > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_caller_to_stop_wakes_the_thread_that_relies_on_it() {
        let mut wake_ups = WakeUps::default();
        wake_ups.enter();
        assert!(!wake_ups.leave(), "that thread checks by itself");
        wake_ups.enter();
        wake_ups.enter();
        wake_ups.set_attended(true);
        assert!(!wake_ups.leave(), "another caller continues");
        assert!(wake_ups.leave());
        wake_ups.enter();
        assert!(!wake_ups.leave(), "once");
    }
}
