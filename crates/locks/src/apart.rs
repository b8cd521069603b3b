use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_types::{Error, ErrorKind, Result, interrupt};

use crate::{Condvar, Mutex, signals_blocked};

/// A call that cannot be interrupted, on a thread of its own: waits for it can be. If this is dropped before the call
/// returns, its result is dropped on that thread.
pub struct Apart<T>(Arc<Slot<T>>);

struct Slot<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

enum State<T> {
    Runs,
    Ended(std::result::Result<Result<T>, Box<dyn Any + Send>>),
    Abandoned,
}

impl<T: Send + 'static> Apart<T> {
    /// Starts `call`, named for errors and in the thread's name.
    ///
    /// # Errors
    /// The system starts no thread.
    pub fn start(operation: &str, call: impl FnOnce() -> Result<T> + Send + 'static) -> Result<Apart<T>> {
        let slot = Arc::new(Slot { state: Mutex::new(State::Runs), changed: Condvar::new() });
        let theirs = Arc::clone(&slot);
        let thread = move || {
            let result = catch_unwind(AssertUnwindSafe(call));
            let mut state = theirs.state.lock();
            if matches!(*state, State::Abandoned) {
                drop(state);
                drop(result);
            } else {
                *state = State::Ended(result);
                theirs.changed.notify_all();
            }
        };
        let builder = std::thread::Builder::new().name(format!("crossrail-{operation}"));
        let spawned = signals_blocked(|| builder.spawn(thread));
        spawned.map_err(|error| Error::io(operation, "pthread_create", &error))?;
        Ok(Apart(slot))
    }

    /// Waits for the call to return: its result, once. A panic of the call continues here.
    ///
    /// # Errors
    /// `Timeout` when the wait was [interrupted](crossrail_types::interrupt), or `limit` has passed; wait again, or drop
    /// this.
    pub fn wait(&self, limit: Option<Duration>) -> Result<Result<T>> {
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        let _sleeping = interrupt::sleeping(|| {
            let slot = Arc::clone(&self.0);
            move || slot.changed.notify_all()
        });
        let mut state = self.0.state.lock();
        loop {
            match std::mem::replace(&mut *state, State::Runs) {
                State::Ended(Ok(result)) => return Ok(result),
                State::Ended(Err(panic)) => {
                    drop(state);
                    resume_unwind(panic)
                }
                State::Runs | State::Abandoned => {}
            }
            if interrupt::raised() || deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return Err(Error::new(ErrorKind::Timeout, "thread", "the call has not returned"));
            }
            match deadline {
                Some(deadline) => {
                    self.0.changed.wait_until(&mut state, deadline);
                }
                None => self.0.changed.wait(&mut state),
            }
        }
    }
}

impl<T> Drop for Apart<T> {
    fn drop(&mut self) {
        let before = std::mem::replace(&mut *self.0.state.lock(), State::Abandoned);
        drop(before);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use crossrail_types::Interrupt;

    use super::*;

    struct Reports(mpsc::Sender<()>);

    impl Drop for Reports {
        fn drop(&mut self) {
            let _ = self.0.send(());
        }
    }

    #[test]
    fn a_result_is_returned_and_a_panic_continues() {
        assert_eq!(Apart::start("test", || Ok(7)).unwrap().wait(None).unwrap(), Ok(7));
        let failing = Apart::start("test", || Err::<(), _>(Error::new(ErrorKind::Usage, "test", "no"))).unwrap();
        assert_eq!(failing.wait(None).unwrap().unwrap_err().kind, ErrorKind::Usage);
        let panics = Apart::<()>::start("test", || panic!("on purpose")).unwrap();
        let panic = catch_unwind(AssertUnwindSafe(|| panics.wait(None))).unwrap_err();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"on purpose"));
    }

    #[test]
    fn an_interrupted_wait_ends_and_the_result_is_dropped_by_its_thread() {
        let (go, wait) = mpsc::channel::<()>();
        let (gone, dropped) = mpsc::channel();
        let call = move || {
            let _ = wait.recv();
            Ok(Reports(gone))
        };
        let apart = Apart::start("test", call).unwrap();
        assert_eq!(apart.wait(Some(Duration::from_millis(1))).err().unwrap().kind, ErrorKind::Timeout);
        let interrupt = Interrupt::new();
        let raiser = Arc::clone(&interrupt);
        let error = std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(20));
                raiser.raise();
            });
            interrupt.run(|| apart.wait(None)).err().unwrap()
        });
        assert_eq!(error.kind, ErrorKind::Timeout);
        drop(apart);
        assert_eq!(dropped.try_recv(), Err(mpsc::TryRecvError::Empty), "the call still runs");
        go.send(()).unwrap();
        dropped.recv_timeout(Duration::from_secs(10)).expect("its result is dropped");
    }
}
