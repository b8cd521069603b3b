//! What is unmapped or freed, is so on a thread of its own: the driver may wait for the whole GPU then, and a kernel there
//! may wait for something that the caller has yet to do.
#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossrail_cuda::Cuda;
use crossrail_types::{Error, Result};

use crate::domain::locked;

enum Order {
    Drop(Box<dyn Any + Send>),
    Stop,
}

/// How many things wait to be dropped, and who waits for there to be none.
type Left = Arc<(Mutex<usize>, Condvar)>;

/// The way to the thread.
#[derive(Clone)]
pub(crate) struct Close {
    sender: Sender<Order>,
    left: Left,
}

impl fmt::Debug for Close {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Close")
    }
}

/// The thread; dropping this waits until it has dropped all that it was given.
pub(crate) struct Closer {
    close: Close,
    thread: Option<JoinHandle<()>>,
}

impl Closer {
    pub(crate) fn new(cuda: &Cuda) -> Result<Closer> {
        let cuda = cuda.clone();
        Closer::start(move |run: &mut dyn FnMut()| {
            let _relaxed = cuda.relaxed();
            run();
        })
    }

    /// `around`: what the thread has round all that it does.
    fn start(around: impl FnOnce(&mut dyn FnMut()) + Send + 'static) -> Result<Closer> {
        let (sender, orders) = channel();
        let left = Left::default();
        let waiting = Arc::clone(&left);
        let mut run = move || {
            while let Ok(Order::Drop(value)) = orders.recv() {
                drop(value);
                *locked(&waiting.0) -= 1;
                waiting.1.notify_all();
            }
        };
        let thread = std::thread::Builder::new().name("crossrail-close".into()).spawn(move || around(&mut run));
        let thread = thread.map_err(|error| Error::io("threads", "clone", &error))?;
        Ok(Closer { close: Close { sender, left }, thread: Some(thread) })
    }

    pub(crate) fn close(&self) -> Close {
        self.close.clone()
    }

    /// Waits until nothing is left to be dropped; false after `limit`.
    pub(crate) fn settled(&self, limit: Duration) -> bool {
        let started = Instant::now();
        let mut left = locked(&self.close.left.0);
        while *left > 0 {
            let Some(rest) = limit.checked_sub(started.elapsed()) else { return false };
            left = self.close.left.1.wait_timeout(left, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

impl Drop for Closer {
    fn drop(&mut self) {
        let _ = self.close.sender.send(Order::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A value that is dropped later, on that thread.
#[derive(Debug)]
pub(crate) struct Later<T: Send + 'static> {
    value: ManuallyDrop<T>,
    close: Close,
}

impl<T: Send + 'static> Later<T> {
    pub(crate) fn new(value: T, close: Close) -> Later<T> {
        Later { value: ManuallyDrop::new(value), close }
    }
}

impl<T: Send + 'static> Deref for Later<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: Send + 'static> Drop for Later<T> {
    fn drop(&mut self) {
        // SAFETY: taken once, here, and not used after.
        let value = unsafe { ManuallyDrop::take(&mut self.value) };
        *locked(&self.close.left.0) += 1;
        // Once the thread is gone, the value comes back with the error and is dropped here.
        if let Err(back) = self.close.sender.send(Order::Drop(Box::new(value))) {
            drop(back);
            *locked(&self.close.left.0) -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::thread::ThreadId;

    use super::*;

    /// Says where it is dropped, once it may be.
    struct Tell(Sender<ThreadId>, Option<Receiver<()>>);

    impl Drop for Tell {
        fn drop(&mut self) {
            if let Some(gate) = &self.1 {
                let _ = gate.recv();
            }
            let _ = self.0.send(std::thread::current().id());
        }
    }

    fn closer() -> Closer {
        Closer::start(|run: &mut dyn FnMut()| run()).expect("a thread")
    }

    #[test]
    fn values_are_dropped_elsewhere_and_nobody_waits_unless_asked() {
        let (closer, (told, drops), (open, gate)) = (closer(), channel(), channel());
        drop(Later::new(Tell(told.clone(), Some(gate)), closer.close()));
        drop(Later::new(Tell(told, None), closer.close()));
        assert!(!closer.settled(Duration::from_millis(20)));
        open.send(()).expect("it waits");
        assert!(closer.settled(Duration::from_secs(20)));
        let threads: Vec<ThreadId> = drops.iter().collect();
        assert!(threads.len() == 2 && threads.iter().all(|thread| *thread != std::thread::current().id()));
    }

    #[test]
    fn what_outlives_the_thread_is_dropped_where_it_is() {
        let (closer, (told, drops)) = (closer(), channel());
        let (early, late) =
            (Later::new(Tell(told.clone(), None), closer.close()), Later::new(Tell(told, None), closer.close()));
        drop(early);
        drop(closer);
        assert_ne!(drops.try_recv().expect("dropped with the thread"), std::thread::current().id());
        drop(late);
        assert_eq!(drops.try_recv().expect("dropped here"), std::thread::current().id());
    }
}
