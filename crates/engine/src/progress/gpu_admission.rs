//! Memory of GPUs as operations bring it in, and what the GPUs' stagers tell a worker.

use std::sync::{Arc, Weak};

use crossrail_types::{Error, ErrorKind, Result};

use super::Progress;
use crate::core::gone;
use crate::core::gpu::UsedGpu;
use crate::memory::Buffer;
use crossrail_gpu::{Completion, Device, StagingListener, StreamPoint};

/// Never waits for the worker's lock: a thread that holds it may be waiting for the stager.
impl StagingListener for Progress {
    fn completed(&self, done: Vec<Completion>) -> bool {
        self.inbox.put(done);
        self.process()
    }

    fn process(&self) -> bool {
        if !self.inbox.is_up() {
            return true;
        }
        // Whoever has the lock may or may not process the inbox before the stager calls again.
        let Some(mut core) = self.core.try_lock() else { return false };
        core.complete_staging();
        self.after(core);
        true
    }
}

/// Checks that a buffer's memory belongs to the GPU that it names, and makes that GPU usable by operations. Does
/// nothing for host memory. Must be called without the worker's lock.
///
/// # Errors
/// `Usage`: it is not that GPU's, or not all of it; `Unsupported`, with the reason: there is no CUDA; `Exhausted`:
/// no bounce memory; what the driver says.
#[inline]
pub(crate) fn admit(progress: &Progress, buffer: &mut Buffer) -> Result<()> {
    if buffer.gpu.is_some() { admit_gpu(progress, buffer) } else { Ok(()) }
}

#[cold]
fn admit_gpu(progress: &Progress, buffer: &mut Buffer) -> Result<()> {
    let Some(gpu) = &mut buffer.gpu else { return Ok(()) };
    let device = match &gpu.device {
        Some(device) => device.clone(),
        None => progress.environment.gpus().check(buffer.ptr as u64, buffer.len, gpu.ordinal)?,
    };
    if let Some(after) = &gpu.after
        && after.is_reached()?
    {
        gpu.after = None;
    }
    admit_device(progress, &device)?;
    gpu.device = Some(device);
    Ok(())
}

/// Lets operations name memory of that GPU, and wait for its streams. Must be called without the worker's lock.
///
/// # Errors
/// `Closed`; as [`admit`] for bounce memory.
pub(crate) fn admit_device(progress: &Progress, device: &Arc<Device>) -> Result<()> {
    if !progress.core.lock().transfers().gpu().uses(device.ordinal()) {
        let me: Weak<Progress> = progress.me.clone();
        let queue = device.stager()?.attach(me);
        let gpus = progress.environment.ipc_gpus();
        if let (Err(why), None) = (&gpus, progress.environment.no_cuda_ipc()) {
            progress.log.warn(format_args!("no direct copies of GPU memory ({why}); through host memory instead"));
        }
        if let Ok(gpus) = &gpus
            && let Some(why) = gpus.load_kernels(device.ordinal(), progress.environment.settings())
        {
            progress.log.info(format_args!("copy engines move rows of cuda:{}, one by one: {why}", device.ordinal()));
        }
        let spare = {
            let mut core = progress.core.lock();
            core.transfers().gpu().set_gpus(gpus);
            if core.is_closed() {
                return Err(gone("GPU memory"));
            }
            core.transfers().gpu().add(UsedGpu { device: device.clone(), queue })
        };
        drop(spare);
    }
    Ok(())
}

/// [`admit`] for memory that is only shared with a peer: it is never staged, so no bounce memory is pinned, which takes
/// tenths of a second.
///
/// # Errors
/// As there, but for bounce memory.
pub(crate) fn admit_shared(progress: &Progress, buffer: &mut Buffer) -> Result<()> {
    let Some(gpu) = &mut buffer.gpu else { return Ok(()) };
    if gpu.device.is_none() {
        gpu.device = Some(progress.environment.gpus().check(buffer.ptr as u64, buffer.len, gpu.ordinal)?);
    }
    admit_links(progress);
    Ok(())
}

/// Makes links to GPU memory of peers possible, if there is CUDA. Must be called without the worker's lock.
pub(crate) fn admit_links(progress: &Progress) {
    let gpus = progress.environment.ipc_gpus();
    progress.core.lock().transfers().gpu().set_gpus(gpus);
}

/// Waits until `after` is reached, at most `CROSSRAIL_TIMEOUT`.
pub(crate) fn wait_ready(progress: &Progress, ordinal: u32, after: &StreamPoint, what: &str) -> Result<()> {
    let timeout = progress.environment.settings().timeout;
    let Some(ticket) = progress.core.lock().transfers().gpu().wait_for(ordinal, after.clone()) else { return Ok(()) };
    if progress.observe_until(timeout, |core| (!core.transfers().gpu().is_waiting(ticket)).then_some(())).is_some() {
        return after.is_reached().map(drop).map_err(|error| Error { operation: what.to_owned(), ..error });
    }
    progress.core.lock().transfers().gpu().forget(ticket);
    Err(Error::new(ErrorKind::Timeout, what, "the stream's work was not complete").with_waited(timeout))
}
