//! Tasks that callers defer to the thread that makes progress.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};

use crossrail_locks::Mutex;

use super::Progress;

/// Tasks run between two passes: a few, because one that sends a long message takes as long as the pass.
const AT_ONCE: usize = 4;

pub(crate) type Task = Box<dyn FnOnce() + Send>;

/// Tasks in the order in which they were left.
#[derive(Default)]
pub(crate) struct Tasks {
    list: Mutex<List>,
    /// The list is not empty. Changed under its lock.
    any: AtomicBool,
    /// Held by the thread that runs tasks: two would start them in another order.
    running: Mutex<()>,
}

#[derive(Default)]
struct List {
    tasks: VecDeque<Task>,
    /// Closed: no thread runs tasks any more.
    closed: bool,
}

impl Tasks {
    /// Adds a task; returns it if no thread would run it.
    fn push(&self, task: Task) -> Option<Task> {
        let mut list = self.list.lock();
        if list.closed {
            return Some(task);
        }
        list.tasks.push_back(task);
        self.any.store(true, Ordering::Release);
        None
    }

    fn pop(&self) -> Option<Task> {
        let mut list = self.list.lock();
        let task = list.tasks.pop_front();
        self.any.store(!list.tasks.is_empty(), Ordering::Release);
        task
    }

    /// Whether there is one. For a thread that has announced that it is about to sleep: a caller that adds a task
    /// releases this lock before it checks whether to wake that thread.
    pub(super) fn are_waiting(&self) -> bool {
        !self.list.lock().tasks.is_empty()
    }

    /// Takes what is left; from now on callers run their tasks themselves.
    pub(super) fn close(&self) -> VecDeque<Task> {
        let mut list = self.list.lock();
        list.closed = true;
        std::mem::take(&mut list.tasks)
    }
}

impl Progress {
    /// Leaves a task to the background thread; without one, to the next caller of [`Progress::step`].
    pub(crate) fn defer(&self, task: Task) {
        match self.tasks.push(task) {
            Some(task) => task(),
            None => {
                self.connections.driven().wake();
                self.hand_over();
            }
        }
    }

    /// Runs some of the tasks; whether there were any. Without the worker's lock: a task may start operations.
    #[inline]
    pub(super) fn run_tasks(&self) -> bool {
        self.tasks.any.load(Ordering::Acquire) && self.run_some()
    }

    fn run_some(&self) -> bool {
        // A task that makes progress runs no other one meanwhile.
        let Some(_running) = self.tasks.running.try_lock() else { return false };
        let mut ran = false;
        for _ in 0..AT_ONCE {
            let Some(task) = self.tasks.pop() else { break };
            task();
            ran = true;
        }
        ran
    }
}
