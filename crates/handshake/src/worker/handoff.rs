//! Work that is handed to threads that have ended theirs.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crossrail_locks::{Condvar, Mutex};

/// Time for which a thread waits for more work before it ends: the ranks of a job connect one after the other.
const LINGER: Duration = Duration::from_millis(250);

/// Work for threads that wait for more. Any thread.
pub(super) struct Handoff<T> {
    state: Mutex<State<T>>,
    /// Notified for each of `State::waiting`, and when `State::stopping` is set.
    changed: Condvar,
}

struct State<T> {
    waiting: VecDeque<T>,
    /// Threads in [`Handoff::next`]: never fewer than `waiting`.
    idle: usize,
    stopping: bool,
}

impl<T> Default for Handoff<T> {
    fn default() -> Handoff<T> {
        let state = State { waiting: VecDeque::new(), idle: 0, stopping: false };
        Handoff { state: Mutex::new(state), changed: Condvar::new() }
    }
}

impl<T> Handoff<T> {
    /// Hands `work` to a thread that waits for some; returns it if none does, for a new thread.
    pub(super) fn offer(&self, work: T) -> Option<T> {
        let mut state = self.state.lock();
        if state.waiting.len() >= state.idle {
            return Some(work);
        }
        state.waiting.push_back(work);
        drop(state);
        self.changed.notify_one();
        None
    }

    /// Waits for more work. `None`: the calling thread is to end.
    pub(super) fn next(&self) -> Option<T> {
        let deadline = Instant::now() + LINGER;
        let mut state = self.state.lock();
        state.idle += 1;
        let mut over = false;
        let next = loop {
            match state.waiting.pop_front() {
                None if !over && !state.stopping => over = self.changed.wait_until(&mut state, deadline).timed_out(),
                next => break next,
            }
        };
        state.idle -= 1;
        next
    }

    /// Ends the threads that wait.
    pub(super) fn stop(&self) {
        self.state.lock().stopping = true;
        self.changed.notify_all();
    }
}
