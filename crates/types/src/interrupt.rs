//! Waits that another thread can end early.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How often a wake-up is repeated until the waiting thread has noticed it; see [`Interrupt::raise`].
const REPEAT: Duration = Duration::from_millis(1);

type Wake = Arc<dyn Fn() + Send + Sync>;

thread_local! {
    static CURRENT: RefCell<Option<Arc<Interrupt>>> = const { RefCell::new(None) };
}

/// Ends the waits of one thread from another thread, as for a signal that the waiting program must handle.
///
/// A thread waits inside [`Interrupt::run`]. Once the interrupt is raised, the wait in progress ends as if its deadline
/// had passed, and so does every later one, until [`Interrupt::clear`]. Code that sleeps takes part by holding
/// [`sleeping`] while it does, and by checking [`raised`] whenever it wakes up; nothing polls.
#[derive(Default)]
pub struct Interrupt {
    /// Set by `raise`, cleared by `clear`.
    raised: AtomicBool,
    /// Wakes the thread; set while it may be asleep.
    sleeper: Mutex<Option<Wake>>,
    /// `sleeper` was emptied.
    awake: Condvar,
}

impl Interrupt {
    /// An interrupt that is not raised.
    pub fn new() -> Arc<Interrupt> {
        Arc::default()
    }

    /// Runs `wait` on this thread so that [`Interrupt::raise`] ends it early. The innermost interrupt counts.
    pub fn run<T>(self: &Arc<Self>, wait: impl FnOnce() -> T) -> T {
        // A thread that is ending has lost its variables: what it waits for then cannot be interrupted.
        let outer = CURRENT.try_with(|current| current.replace(Some(Arc::clone(self))));
        let _outer = Outer(outer.unwrap_or_default());
        wait()
    }

    /// Ends the wait in progress, and later ones until [`Interrupt::clear`]. Returns once the thread is awake. Not for
    /// signal handlers: it takes a lock.
    pub fn raise(&self) {
        self.raised.store(true, Ordering::SeqCst);
        let mut sleeper = self.sleeper();
        // A thread that has checked `raised` but is not asleep yet misses a wake-up, so the wake-up is repeated.
        while let Some(wake) = sleeper.clone()
            && self.is_raised()
        {
            drop(sleeper);
            wake();
            let timed = self.awake.wait_timeout(self.sleeper(), REPEAT);
            sleeper = timed.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Lets waits begin again.
    pub fn clear(&self) {
        self.raised.store(false, Ordering::SeqCst);
    }

    /// Whether it was raised since it was last cleared.
    pub fn is_raised(&self) -> bool {
        self.raised.load(Ordering::SeqCst)
    }

    fn sleeper(&self) -> MutexGuard<'_, Option<Wake>> {
        self.sleeper.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Restores the interrupt of the enclosing `run` on drop, so also after a panic.
struct Outer(Option<Arc<Interrupt>>);

impl Drop for Outer {
    fn drop(&mut self) {
        let _ = CURRENT.try_with(|current| current.replace(self.0.take()));
    }
}

/// Whether this thread's wait must end. False outside of [`Interrupt::run`].
pub fn raised() -> bool {
    let is_raised = |current: &Option<Arc<Interrupt>>| current.as_ref().is_some_and(|interrupt| interrupt.is_raised());
    CURRENT.try_with(|current| is_raised(&current.borrow())).unwrap_or_default()
}

/// Registers how to wake this thread while it sleeps, until the guard is dropped. `wake` returns the closure that
/// another thread calls for this; it is not called where nothing can interrupt the wait. Check [`raised`] after this
/// and before each sleep. The closure must not take a lock that this thread holds whenever it is awake.
pub fn sleeping<W: Fn() + Send + Sync + 'static>(wake: impl FnOnce() -> W) -> Sleeping {
    let current = CURRENT.try_with(|current| current.borrow().clone()).unwrap_or_default();
    if let Some(interrupt) = &current {
        *interrupt.sleeper() = Some(Arc::new(wake()));
    }
    Sleeping(current)
}

/// A thread that may be asleep; see [`sleeping`].
#[must_use]
pub struct Sleeping(Option<Arc<Interrupt>>);

impl Drop for Sleeping {
    fn drop(&mut self) {
        if let Some(interrupt) = &self.0 {
            *interrupt.sleeper() = None;
            interrupt.awake.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    /// What sleeps in these tests.
    #[derive(Default)]
    struct Bed {
        rung: Mutex<bool>,
        bell: Condvar,
    }

    /// Sleeps until `deadline` or the interrupt.
    fn sleep(bed: &Arc<Bed>, deadline: Instant) {
        let _sleeping = sleeping(|| {
            let bed = Arc::clone(bed);
            move || bed.bell.notify_all()
        });
        let mut rung = bed.rung.lock().unwrap();
        while !*rung && !raised() && Instant::now() < deadline {
            rung = bed.bell.wait_timeout(rung, deadline.saturating_duration_since(Instant::now())).unwrap().0;
        }
    }

    #[test]
    fn a_sleeping_thread_is_interrupted_and_later_waits_end_at_once() {
        let (bed, interrupt) = (Arc::new(Bed::default()), Interrupt::new());
        let long = Duration::from_secs(60);
        for _ in 0..200 {
            interrupt.clear();
            let (own, raiser) = (Arc::clone(&bed), Arc::clone(&interrupt));
            let began = Instant::now();
            let waiter = std::thread::spawn(move || {
                raiser.run(|| {
                    sleep(&own, Instant::now() + long);
                    assert!(raised());
                    sleep(&own, Instant::now() + long);
                });
                assert!(!raised(), "outside of `run` nothing is interrupted");
            });
            // At any point of the wait: before it sleeps, on its way, asleep.
            interrupt.raise();
            waiter.join().unwrap();
            assert!(began.elapsed() < long / 2, "{:?}", began.elapsed());
        }
    }

    #[test]
    fn the_innermost_interrupt_counts() {
        let (outer, inner) = (Interrupt::new(), Interrupt::new());
        outer.raise();
        outer.run(|| {
            assert!(raised());
            inner.run(|| assert!(!raised()));
            assert!(raised());
            let panicked = std::panic::catch_unwind(|| inner.run(|| panic!("in a wait")));
            assert!(panicked.is_err() && raised());
        });
        outer.clear();
        outer.run(|| assert!(!raised()));
    }

    #[test]
    fn a_wait_that_nothing_can_interrupt_registers_nothing() {
        let _sleeping = sleeping(|| -> fn() { panic!("asked for a way to wake it") });
    }
}
