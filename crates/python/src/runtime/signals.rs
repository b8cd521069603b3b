//! Interrupts the main thread's waits when a signal with a Python handler arrives.
//!
//! Python handles signals on the main thread only, between two of its instructions; a thread that waits in here
//! executes none. While the main thread waits, Python's wake-up descriptor (`signal.set_wakeup_fd`) is therefore one
//! end of a socket pair. The interpreter's C handler writes a byte to it, a thread of ours that sleeps on the other end
//! raises an [`Interrupt`], and the wait ends. Nothing wakes up unless a signal arrives.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, Read, Write};
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use crossrail_locks::{Mutex, PerProcess};
use crossrail_types::{Error, Interrupt, Result};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::errors::OrRaise;

/// No descriptor, as `signal.set_wakeup_fd` has it.
const NONE: RawFd = -1;

/// The thread that turns signals into interrupts. One per process: a fork leaves it behind.
struct Watcher {
    interrupt: Arc<Interrupt>,
    /// The end that the interpreter writes to.
    write: UnixStream,
    /// The wake-up descriptor that was set before ours (asyncio sets one): it gets every byte too. Set and reset by the
    /// main thread, while it holds a [`Watch`].
    previous: AtomicI32,
}

static WATCHER: PerProcess<Mutex<Option<Arc<Watcher>>>> = PerProcess::new();

impl Watcher {
    /// The watcher of this process; started on the first call.
    fn of_process() -> Result<Arc<Watcher>> {
        let mut watcher = WATCHER.lock();
        if let Some(known) = watcher.as_ref() {
            return Ok(Arc::clone(known));
        }
        let started = Watcher::start().map_err(|error| Error::io("wait", "watch signals", &error))?;
        Ok(Arc::clone(watcher.insert(started)))
    }

    fn start() -> io::Result<Arc<Watcher>> {
        let (read, write) = UnixStream::pair()?;
        // Required by Python: a handler must not block.
        write.set_nonblocking(true)?;
        let (interrupt, previous) = (Interrupt::new(), AtomicI32::new(NONE));
        let watcher = Arc::new(Watcher { interrupt, write, previous });
        let own = Arc::clone(&watcher);
        std::thread::Builder::new().name("crossrail-signals".to_owned()).spawn(move || own.run(read))?;
        Ok(watcher)
    }

    fn run(&self, mut read: UnixStream) {
        let mut signals = [0; 64];
        loop {
            match read.read(&mut signals) {
                Ok(0) => return,
                Ok(count) => {
                    self.forward(&signals[..count]);
                    self.interrupt.raise();
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    }

    fn forward(&self, signals: &[u8]) {
        let previous = self.previous.load(Ordering::SeqCst);
        if previous != NONE {
            // SAFETY: whoever set this descriptor keeps it open while Python may write to it. It is not closed here.
            let mut file = ManuallyDrop::new(unsafe { File::from_raw_fd(previous) });
            // It does not block. When it is full its owner is about to wake up anyway.
            let _ = file.write(signals);
        }
    }
}

/// Signals interrupt the waits of the main thread while this lives.
pub(super) struct Watch<'py> {
    py: Python<'py>,
    watcher: Arc<Watcher>,
    previous: RawFd,
}

impl<'py> Watch<'py> {
    /// `None` on any thread but the main one: signals interrupt only the main thread.
    pub(super) fn start(py: Python<'py>) -> PyResult<Option<Watch<'py>>> {
        let watcher = Watcher::of_process().or_raise(py)?;
        let own = watcher.write.as_raw_fd();
        let previous = match set_wakeup_fd(py, own) {
            Ok(previous) => previous,
            Err(error) if error.is_instance_of::<PyValueError>(py) => return Ok(None),
            Err(error) => return Err(error),
        };
        // Equal if nested, in a signal handler that interrupted a wait of the main thread and waits itself: the
        // program's descriptor is stored already.
        if previous != own {
            watcher.previous.store(previous, Ordering::SeqCst);
        }
        Ok(Some(Watch { py, watcher, previous }))
    }

    /// Interrupts the waits in [`Interrupt::run`] when a signal arrives.
    pub(super) fn interrupt(&self) -> &Arc<Interrupt> {
        &self.watcher.interrupt
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        let own = self.watcher.write.as_raw_fd();
        if self.previous == own {
            return;
        }
        match set_wakeup_fd(self.py, self.previous) {
            Ok(current) if current == own => {}
            // A signal handler has set another one meanwhile: it stays.
            Ok(current) => drop(set_wakeup_fd(self.py, current)),
            // The previous one was closed meanwhile.
            Err(_) => drop(set_wakeup_fd(self.py, NONE)),
        }
        self.watcher.previous.store(NONE, Ordering::SeqCst);
    }
}

fn set_wakeup_fd(py: Python<'_>, fd: RawFd) -> PyResult<RawFd> {
    let options = PyDict::new(py);
    options.set_item("warn_on_full_buffer", false)?;
    py.import("signal")?.call_method("set_wakeup_fd", (fd,), Some(&options))?.extract()
}
