//! Dials lost rails again in the background, until they are up or their peer has ended.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_types::Log;
use parking_lot::{Condvar, Mutex};

use super::control::Redial;
use super::{Sessions, tcp};
use crate::core::LostRail;

/// The first pause before a rail is dialled again; each failure doubles it.
const PAUSE_MIN: Duration = Duration::from_millis(200);
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// Limit of one attempt.
const ATTEMPT_MAX: Duration = Duration::from_secs(2);

/// See the module.
#[derive(Default)]
pub(crate) struct Redialer {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    running: bool,
    stop: bool,
    attempts: Vec<Attempt>,
}

struct Attempt {
    lost: LostRail,
    at: Instant,
    pause: Duration,
}

impl Redialer {
    /// A rail was lost: dials it again, if this end had dialled it.
    pub(crate) fn lost(&self, sessions: &Sessions, lost: LostRail) {
        if sessions.redial(&lost).is_none() {
            return;
        }
        let mut state = self.state.lock();
        if state.stop {
            return;
        }
        state.attempts.push(Attempt { lost, at: Instant::now() + PAUSE_MIN, pause: PAUSE_MIN });
        if !state.running {
            let Some(running) = sessions.me.upgrade() else { return };
            let spawned = sessions.progress.spawn("crossrail-redial", move || running.redialer.run(&running));
            match spawned.map(drop) {
                Ok(()) => state.running = true,
                Err(error) => sessions.log.warn(format_args!("lost rails stay lost: {error}")),
            }
        }
        drop(state);
        self.changed.notify_all();
    }

    /// A network link came up: retry at once.
    pub(crate) fn nudge(&self) {
        let mut state = self.state.lock();
        for attempt in &mut state.attempts {
            attempt.at = Instant::now();
            attempt.pause = PAUSE_MIN;
        }
        drop(state);
        self.changed.notify_all();
    }

    pub(crate) fn stop(&self) {
        self.state.lock().stop = true;
        self.changed.notify_all();
    }

    /// The thread that dials.
    pub(crate) fn run(&self, sessions: &Arc<Sessions>) {
        while let Some(mut attempt) = self.next() {
            match tcp::redial(sessions, &attempt.lost, Instant::now() + ATTEMPT_MAX) {
                Ok(None) => {}
                Ok(Some(device)) => sessions.log.info(format_args!("rail {device} is back")),
                Err((device, error)) => {
                    let reported = std::mem::replace(&mut attempt.lost.reported, true);
                    let log = if reported { Log::debug } else { Log::warn };
                    log(sessions.log, format_args!("rail {device} is lost, and dialling it again failed: {error}"));
                    attempt.pause = (attempt.pause * 2).min(PAUSE_MAX);
                    attempt.at = Instant::now() + attempt.pause;
                    self.state.lock().attempts.push(attempt);
                }
            }
        }
    }

    /// The next attempt that is due; `None` when the worker closes.
    fn next(&self) -> Option<Attempt> {
        let mut state = self.state.lock();
        loop {
            if state.stop {
                return None;
            }
            let due = (0..state.attempts.len()).min_by_key(|at| state.attempts[*at].at);
            match due {
                Some(at) if state.attempts[at].at <= Instant::now() => return Some(state.attempts.swap_remove(at)),
                Some(at) => {
                    let until = state.attempts[at].at;
                    self.changed.wait_until(&mut state, until);
                }
                None => self.changed.wait(&mut state),
            }
        }
    }
}

impl Sessions {
    /// What it takes to dial a lost lane again; `None` if that is up to the peer, or the peer has ended.
    pub(super) fn redial(&self, lost: &LostRail) -> Option<Redial> {
        let alive = self.progress.core().peers().get(lost.endpoint).is_some_and(|peer| peer.is_alive());
        if alive { self.control.redial(lost) } else { None }
    }
}
