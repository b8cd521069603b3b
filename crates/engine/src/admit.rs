//! Memory of GPUs as operations bring it in, and what the GPUs' stagers tell a worker.

use std::sync::Arc;
use std::sync::Weak;
use std::sync::atomic::{AtomicBool, Ordering};

use crossrail_types::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use crate::buffer::Buffer;
use crate::core::Core;
use crate::tickets::Gpu;
use crate::worker::Shared;
use crossrail_gpu::{Completion, StagingListener, StreamPoint};

/// What stagers have finished, until somebody with the worker's lock takes it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Inbox(Arc<Letters>);

#[derive(Debug, Default)]
struct Letters {
    /// There are some.
    up: AtomicBool,
    done: Mutex<Vec<Completion>>,
}

impl Inbox {
    fn put(&self, mut done: Vec<Completion>) {
        self.0.done.lock().append(&mut done);
        self.0.up.store(true, Ordering::Release);
    }

    /// Whether there is something. Costs one look at a flag.
    #[inline]
    pub(crate) fn is_up(&self) -> bool {
        self.0.up.load(Ordering::Relaxed)
    }

    fn take(&self) -> Option<Vec<Completion>> {
        self.0.up.swap(false, Ordering::AcqRel).then(|| std::mem::take(&mut *self.0.done.lock()))
    }
}

impl Core {
    /// Acts on what stagers have finished; whether there was anything.
    #[cold]
    pub(crate) fn read_inbox(&mut self) -> bool {
        let Some(done) = self.inbox.take() else { return false };
        self.staged(done);
        true
    }
}

/// Never waits for the worker's lock: somebody who holds it may be waiting for the stager.
impl StagingListener for Shared {
    fn completed(&self, done: Vec<Completion>) -> bool {
        self.inbox.put(done);
        self.process()
    }

    fn process(&self) -> bool {
        if !self.inbox.is_up() {
            return true;
        }
        // Who has the lock may look at the inbox before the stager comes again, or not.
        let Some(mut core) = self.core.try_lock() else { return false };
        core.read_inbox();
        self.after(core);
        true
    }
}

impl Shared {
    /// Makes sure that memory which is said to be a GPU's is, and that the GPU can be used. Nothing to do for host
    /// memory. Not under the worker's lock.
    ///
    /// # Errors
    /// `Usage`: it is not that GPU's, or not all of it; `Unsupported`, with the reason: there is no CUDA; `Exhausted`:
    /// no bounce memory; what the driver says.
    #[inline]
    pub(crate) fn admit(&self, buffer: &mut Buffer) -> Result<()> {
        if buffer.gpu.is_some() { self.admit_gpu(buffer) } else { Ok(()) }
    }

    #[cold]
    fn admit_gpu(&self, buffer: &mut Buffer) -> Result<()> {
        let Some(gpu) = &mut buffer.gpu else { return Ok(()) };
        let device = match &gpu.device {
            Some(device) => device.clone(),
            None => self.context.gpus().check(buffer.ptr as u64, buffer.len, gpu.ordinal)?,
        };
        if let Some(after) = &gpu.after
            && after.is_reached()?
        {
            gpu.after = None;
        }
        if self.core.lock().st.staging.gpu(gpu.ordinal).is_none() {
            let me: Weak<Shared> = self.me.clone();
            let client = device.stager()?.attach(me);
            let domain = self.context.domain();
            if let (Err(why), None) = (&domain, self.context.no_cuda_ipc()) {
                self.log.warn(format_args!("no direct copies of GPU memory ({why}); through host memory instead"));
            }
            let spare = {
                let mut core = self.core.lock();
                core.st.staging.set_domain(domain);
                if core.closed {
                    return Err(crate::ops::gone("GPU memory"));
                }
                core.st.staging.add(Gpu { device: device.clone(), client })
            };
            drop(spare);
        }
        gpu.device = Some(device);
        Ok(())
    }

    /// [`Shared::admit`] for memory that is only passed on to a peer: none of it goes through bounce memory, whose pages
    /// take some tenths of a second to pin.
    ///
    /// # Errors
    /// As there, but for bounce memory.
    pub(crate) fn admit_shared(&self, buffer: &mut Buffer) -> Result<()> {
        let Some(gpu) = &mut buffer.gpu else { return Ok(()) };
        if gpu.device.is_none() {
            gpu.device = Some(self.context.gpus().check(buffer.ptr as u64, buffer.len, gpu.ordinal)?);
        }
        self.admit_links();
        Ok(())
    }

    /// Makes sure that links to GPU memory of peers can be made, if there is CUDA. Not under the worker's lock.
    pub(crate) fn admit_links(&self) {
        let domain = self.context.domain();
        self.core.lock().st.staging.set_domain(domain);
    }

    /// Waits until `after` is complete, at most `CROSSRAIL_TIMEOUT`.
    pub(crate) fn wait_ready(&self, ordinal: u32, after: &StreamPoint, what: &str) -> Result<()> {
        let timeout = self.context.settings().timeout;
        let Some(ticket) = self.core.lock().st.staging.after(ordinal, after.clone()) else { return Ok(()) };
        if self.observe_until(timeout, |core| (!core.st.staging.is_pending(ticket)).then_some(())).is_some() {
            return after.is_reached().map(drop).map_err(|error| Error { operation: what.to_owned(), ..error });
        }
        self.core.lock().st.staging.take(ticket);
        let detail = format!("the stream's work was not complete in {:.3} s", timeout.as_secs_f64());
        Err(Error::new(ErrorKind::Timeout, what, detail))
    }
}
