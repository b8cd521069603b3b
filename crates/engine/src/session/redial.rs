//! Redials lost rails in the background, until they are up or their peer has ended.
//!
//! Both ends do so, because only one end, the sender, may notice a rail's loss. The end that connected goes first, the
//! other one only if that fails. A rail that keeps being lost right after it comes up is dialled with growing pauses,
//! as if dialling had failed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_locks::{Condvar, Mutex, MutexGuard};
use crossrail_types::{EndpointId, Error, Log, Reason};

use super::control::Redial;
use super::rails::{CHANNEL_MASK, MESSAGE_CHANNEL};
use super::{Sessions, over_rails};
use crate::core::LostRail;

/// The first pause before a rail is dialled again; each failure doubles it.
const PAUSE_MIN: Duration = Duration::from_millis(200);
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// The first pause at the end that did not connect.
const PAUSE_ACCEPTOR: Duration = Duration::from_millis(600);
/// Pause, independent of earlier failures, while no lane to the peer is up: a rail may work only briefly.
const PAUSE_STRANDED: Duration = Duration::from_millis(100);
/// Limit of one attempt.
const ATTEMPT_MAX: Duration = Duration::from_secs(2);
/// Limit of most attempts while no lane leads to the peer: a lost packet is sent again after a second at the soonest,
/// and dialling anew is sooner. One in [`STRANDED_LONG`] has the whole time, for links that are slow and not broken.
const ATTEMPT_STRANDED: Duration = Duration::from_millis(400);
const STRANDED_LONG: u32 = 4;
/// Failed attempts after which a rail that works does without one more connection.
const MORE_FAILURES: u32 = 4;
/// Threads that dial: the rails that are dialled at a time, of all peers.
const THREADS_MAX: usize = 16;

/// See the module.
#[derive(Default)]
pub(crate) struct Redialer {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    threads: usize,
    /// Threads that wait for an attempt to be due.
    idle: usize,
    stop: bool,
    attempts: Vec<Attempt>,
}

struct Attempt {
    lost: LostRail,
    /// An additional connection, not a replacement for a lost one; abandoned after a few attempts.
    more: bool,
    at: Instant,
    pause: Duration,
    failures: u32,
}

impl State {
    /// When the next attempt is due.
    fn due(&self) -> Option<(usize, Instant)> {
        let times = self.attempts.iter().map(|attempt| attempt.at).enumerate();
        times.min_by_key(|(_, at)| *at)
    }

    /// Has a connection dialled, unless it is to be already: then at the earlier of both times, or at the later one if
    /// it is lost again and again soon after it has come up, whichever end dialled it.
    fn add(&mut self, attempt: Attempt, again: bool) {
        let lane = |lost: &LostRail| (lost.endpoint, lost.rail, lost.channel);
        match self.attempts.iter_mut().find(|known| lane(&known.lost) == lane(&attempt.lost)) {
            Some(known) => known.at = if again { known.at.max(attempt.at) } else { known.at.min(attempt.at) },
            None => self.attempts.push(attempt),
        }
    }

    /// Has a peer's lanes dialled at `soon`, unless they are to be earlier.
    fn hasten(&mut self, endpoint: EndpointId, soon: Instant) {
        for attempt in self.attempts.iter_mut().filter(|attempt| attempt.lost.endpoint == endpoint) {
            attempt.at = attempt.at.min(soon);
        }
    }
}

/// The pause before a rail is dialled that was lost so many times in a row soon after it had come up. `first`: that of
/// a rail that has worked.
fn pause_of(first: Duration, short_lived: u32) -> Duration {
    let doublings = short_lived.saturating_sub(1).min(PAUSE_MAX.as_millis().ilog2());
    first.saturating_mul(1 << doublings).min(PAUSE_MAX)
}

impl Redialer {
    /// A rail was lost: dials it again, if the peer can be reached over it from here.
    pub(crate) fn lost(&self, sessions: &Sessions, lost: LostRail) {
        if sessions.redial(&lost).is_none() {
            return;
        }
        let endpoint = lost.endpoint;
        let first = if sessions.control.is_initiator(endpoint) { PAUSE_MIN } else { PAUSE_ACCEPTOR };
        let stranded = sessions.is_stranded(endpoint);
        let pause = match stranded {
            // Dialling it shows whether the peer's process has ended.
            true if sessions.control.is_lost(endpoint) => Duration::ZERO,
            // Without another lane a rail that works for a moment is better than none.
            true => first,
            false => pause_of(first, lost.short_lived),
        };
        let mut state = self.state.lock();
        if state.stop {
            return;
        }
        let soon = Instant::now() + pause;
        if stranded {
            state.hasten(endpoint, soon);
        }
        let again = !stranded && lost.short_lived > 1;
        state.add(Attempt { lost, more: false, at: soon, pause, failures: 0 }, again);
        self.begin(state, sessions);
    }

    /// The control connection of a peer has ended, without a goodbye: if its lanes have as well, dialling them shows
    /// whether its process has.
    pub(crate) fn control_lost(&self, sessions: &Sessions, endpoint: EndpointId) {
        if sessions.is_stranded(endpoint) {
            self.state.lock().hasten(endpoint, Instant::now());
            self.changed.notify_all();
        }
    }

    /// Dials one more connection of a rail that works. The end that connected goes first here, too.
    pub(crate) fn more(&self, sessions: &Sessions, more: LostRail) {
        if sessions.redial(&more).is_none() {
            return;
        }
        let pause = if sessions.control.is_initiator(more.endpoint) { Duration::ZERO } else { PAUSE_ACCEPTOR };
        let mut state = self.state.lock();
        if !state.stop {
            state.add(Attempt { lost: more, more: true, at: Instant::now() + pause, pause, failures: 0 }, false);
            self.begin(state, sessions);
        }
    }

    /// Wakes the threads after a change of the attempts.
    fn begin(&self, mut state: MutexGuard<'_, State>, sessions: &Sessions) {
        if state.threads == 0 {
            self.add_thread(&mut state, sessions);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Starts one more thread that dials.
    fn add_thread(&self, state: &mut State, sessions: &Sessions) {
        let Some(running) = sessions.me.upgrade() else { return };
        let spawned = sessions.progress.spawn("crossrail-redial", move || running.redialer.run(&running));
        match spawned.map(drop) {
            Ok(()) => state.threads += 1,
            Err(error) if state.threads == 0 => {
                sessions.log.warn(format_args!("cannot start a thread to redial lost rails ({error}); they stay down"))
            }
            // The running threads take longer.
            Err(error) => sessions.log.debug(format_args!("no further thread to dial lost rails: {error}")),
        }
    }

    /// A network link came up: retry at once.
    pub(crate) fn nudge(&self) {
        let mut state = self.state.lock();
        for attempt in &mut state.attempts {
            (attempt.at, attempt.pause) = (Instant::now(), PAUSE_MIN);
        }
        drop(state);
        self.changed.notify_all();
    }

    pub(crate) fn stop(&self) {
        self.state.lock().stop = true;
        self.changed.notify_all();
    }

    /// A thread that dials.
    fn run(&self, sessions: &Arc<Sessions>) {
        while let Some(mut attempt) = self.next(sessions) {
            let endpoint = attempt.lost.endpoint;
            let hasty = sessions.is_stranded(endpoint) && (attempt.failures + 1) % STRANDED_LONG != 0;
            let limit = if hasty { ATTEMPT_STRANDED } else { ATTEMPT_MAX };
            match over_rails::redial(sessions, (&attempt.lost, attempt.more), Instant::now() + limit) {
                Ok(None) => {}
                Ok(Some(device)) if attempt.lost.channel & CHANNEL_MASK == MESSAGE_CHANNEL && attempt.more => {
                    sessions.log.debug(format_args!("messages go over rail {device}, which is faster"));
                }
                Ok(Some(device)) if attempt.more => {
                    sessions.log.debug(format_args!("rail {device} has connection {}", attempt.lost.channel + 1));
                }
                Err((device, error)) if attempt.more && attempt.failures == MORE_FAILURES => {
                    let number = attempt.lost.channel + 1;
                    sessions.log.debug(format_args!("rail {device} continues without connection {number}: {error}"));
                }
                Ok(Some(device)) => {
                    let log = if attempt.lost.short_lived > 2 { Log::debug } else { Log::info };
                    log(sessions.log, format_args!("rail {device} is back"));
                }
                Err((device, error)) => {
                    if sessions.has_left(endpoint, &error) {
                        let why =
                            format!("its process has ended: it closed its connections and no longer listens ({error})");
                        sessions.peer_ended(endpoint, &why);
                        continue;
                    }
                    // It was lost meanwhile.
                    if sessions.progress.core().peers().get(endpoint).is_none_or(|peer| !peer.is_alive()) {
                        continue;
                    }
                    // The peer's process may be ending, which is reported by its name: without a lane, where the end of
                    // its last chance is reported otherwise, or with its listener gone, until it is looked for again.
                    let may_end = sessions.is_stranded(endpoint) || (attempt.failures == 0 && has_no_listener(&error));
                    let log = match (attempt.lost.reported, may_end) {
                        (true, _) => Log::debug,
                        (false, true) => Log::info,
                        (false, false) => Log::warn,
                    };
                    attempt.lost.reported |= !may_end;
                    let state = if attempt.more { "has a connection less" } else { "is lost" };
                    log(sessions.log, format_args!("rail {device} {state}, and dialling it again failed: {error}"));
                    attempt.failures += 1;
                    attempt.pause = (attempt.pause.max(PAUSE_MIN) * 2).min(PAUSE_MAX);
                    let pause = if may_end { PAUSE_STRANDED } else { attempt.pause };
                    attempt.at = Instant::now() + pause;
                    self.state.lock().attempts.push(attempt);
                    self.changed.notify_one();
                }
            }
        }
    }

    /// The next attempt that is due; `None` when the worker closes. Where another one is due already, and every thread
    /// dials, one more thread sees to that: a rail that does not answer must not hold up one that would.
    fn next(&self, sessions: &Sessions) -> Option<Attempt> {
        let mut state = self.state.lock();
        loop {
            if state.stop {
                return None;
            }
            let Some((at, when)) = state.due() else {
                state.idle += 1;
                self.changed.wait(&mut state);
                state.idle -= 1;
                continue;
            };
            if when > Instant::now() {
                state.idle += 1;
                self.changed.wait_until(&mut state, when);
                state.idle -= 1;
                continue;
            }
            let attempt = state.attempts.swap_remove(at);
            // One that is dialled beside those that work may wait.
            if state.attempts.iter().any(|other| !other.more) && state.idle == 0 && state.threads < THREADS_MAX {
                self.add_thread(&mut state, sessions);
            }
            return Some(attempt);
        }
    }
}

impl Sessions {
    /// What it takes to dial a lost lane again; `None` if it cannot be dialled from here, or the peer has ended.
    pub(super) fn redial(&self, lost: &LostRail) -> Option<Redial> {
        let alive = self.progress.core().peers().get(lost.endpoint).is_some_and(|peer| peer.is_alive());
        if alive { self.control.redial(lost) } else { None }
    }

    /// Whether no lane leads to the peer at present.
    fn is_stranded(&self, endpoint: EndpointId) -> bool {
        self.progress.core().peers().get(endpoint).is_some_and(|peer| peer.stranded().is_some())
    }

    /// Whether dialling a rail, which failed with `error`, has shown that the peer is no more: no lane leads to it, its
    /// control connection could not show its end, and its machine or its worker knows of nothing there.
    fn has_left(&self, endpoint: EndpointId, error: &Error) -> bool {
        let unknown = matches!(error.reason, Some(Reason::NotListening | Reason::SessionUnknown));
        unknown && self.control.is_lost(endpoint) && self.is_stranded(endpoint)
    }
}

/// True if dialling failed as it also does where the listening process is ending.
fn has_no_listener(error: &Error) -> bool {
    matches!(error.reason, Some(Reason::NotListening | Reason::SessionUnknown | Reason::ConnectionClosed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rail_that_is_lost_as_soon_as_it_is_up_is_dialled_less_and_less_often() {
        let millis = |first, times: &[u32]| -> Vec<u128> {
            times.iter().map(|times| pause_of(first, *times).as_millis()).collect()
        };
        assert_eq!(
            millis(PAUSE_MIN, &[0, 1, 2, 3, 4, 6, 7, u32::MAX]),
            [200, 200, 400, 800, 1600, 6400, 10_000, 10_000]
        );
        assert_eq!(millis(PAUSE_ACCEPTOR, &[0, 1, 2, 5, u32::MAX]), [600, 600, 1200, 9600, 10_000]);
    }

    #[test]
    fn of_two_times_a_rail_that_does_not_stay_up_is_dialled_at_the_later_one() {
        let (now, mut state) = (Instant::now(), State::default());
        let attempt = |millis, short_lived| Attempt {
            lost: LostRail { endpoint: EndpointId(1), rail: 0, channel: 0, reported: false, short_lived },
            more: false,
            at: now + Duration::from_millis(millis),
            pause: PAUSE_MIN,
            failures: 0,
        };
        for (millis, again, due) in [(800, false, 800), (400, true, 800), (1600, true, 1600), (200, false, 200)] {
            state.add(attempt(millis, 1 + u32::from(again)), again);
            assert_eq!(state.due(), Some((0, now + Duration::from_millis(due))), "{millis} {again}");
        }
    }
}
