//! Requests: operations in flight.

use std::sync::Arc;
use std::time::Duration;

use crossrail_locks::MutexGuard;
use crossrail_types::{EndpointId, Error, OpId, Result};

use crate::core::{Collected, Core, Receipt, Submission};
use crate::memory::Buffer;
use crate::progress::{self, Polled, Progress};

/// The id of no operation: no table is that long.
const NO_OPERATION: OpId = OpId { index: u32::MAX, generation: 0 };

/// An operation in flight.
///
/// Any thread may use it. Dropping it does not cancel the operation: its buffer stays in use until it is
/// finished.
pub struct Request {
    pub(crate) progress: Arc<Progress>,
    pub(crate) id: OpId,
    pub(crate) collected: Collected,
}

impl Request {
    /// Starts an operation. `endpoint` may be `None` for a receive from any peer.
    #[inline(always)]
    pub(crate) fn start(
        progress: &Arc<Progress>,
        endpoint: Option<EndpointId>,
        submission: Submission,
        mut buffer: Buffer,
    ) -> Result<Request> {
        let mut core = progress.core();
        let started = core.submit_now(endpoint, submission, &mut buffer);
        // Usually nothing has changed that another thread must be told about.
        match started {
            Some((op, true)) => {
                drop(core);
                // It holds nothing any more, and is host memory.
                std::mem::forget(buffer);
                Ok(Request::new(progress, op))
            }
            Some((op, false)) => {
                progress.after(core);
                Ok(Request::new(progress, op))
            }
            None => Request::start_at_length(progress, core, (endpoint, submission), buffer),
        }
    }

    /// [`Request::start`] of anything that could not start at once.
    #[inline(never)]
    fn start_at_length<'a>(
        progress: &'a Arc<Progress>,
        mut core: MutexGuard<'a, Core>,
        (endpoint, submission): (Option<EndpointId>, Submission),
        mut buffer: Buffer,
    ) -> Result<Request> {
        if buffer.gpu.is_some() {
            drop(core);
            progress::admit(progress, &mut buffer)?;
            core = progress.core();
        }
        let op = core.submit_at_length(endpoint, submission, buffer);
        progress.after(core);
        Ok(Request::new(progress, op?))
    }

    /// [`Request::start`] in the place of an operation that is over. The request stays as it is if that fails.
    #[inline(always)]
    pub(super) fn restart(
        &mut self,
        endpoint: Option<EndpointId>,
        submission: Submission,
        mut buffer: Buffer,
    ) -> std::result::Result<(), Box<Error>> {
        let mut core = self.progress.core();
        let Some((op, at_rest)) = core.submit_now(endpoint, submission, &mut buffer) else {
            let progress = Arc::clone(&self.progress);
            *self = Request::start_at_length(&progress, core, (endpoint, submission), buffer).map_err(Box::new)?;
            return Ok(());
        };
        // As in `start`.
        if at_rest {
            drop(core);
            std::mem::forget(buffer);
        } else {
            self.progress.after(core);
        }
        self.collected.clear();
        self.id = op;
        Ok(())
    }

    /// A request of no operation: for [`Endpoint::send_in`](super::Endpoint::send_in) and
    /// [`Worker::recv_in`](super::Worker::recv_in).
    pub(super) fn idle(progress: &Arc<Progress>) -> Request {
        Request::new(progress, NO_OPERATION)
    }

    /// Gives a finished operation up, and keeps the request for another.
    #[inline]
    pub fn clear(&mut self) {
        if !self.collected.is_collected() {
            self.detach();
            self.id = NO_OPERATION;
        }
    }

    /// True once a good end was [polled](Request::poll): the worker keeps nothing of it.
    #[inline]
    pub fn is_collected(&mut self) -> bool {
        self.collected.is_collected()
    }

    /// [`Request::test`] for callers that need no receipt.
    #[inline]
    pub fn poll(&self) -> Option<std::result::Result<(), Box<Error>>> {
        match self.progress.check_origin("test") {
            Ok(()) => match self.progress.poll(self.id, &self.collected) {
                Polled::Collected => Some(Ok(())),
                Polled::Other(outcome) => outcome.map(|outcome| outcome.map(drop).map_err(Box::new)),
            },
            Err(error) => Some(Err(Box::new(error))),
        }
    }

    /// Called when the request is dropped while its operation is in the worker's table.
    #[inline(never)]
    fn detach(&self) {
        // In a forked child the operation is the parent's.
        if let Some(mut core) = self.progress.core_here() {
            core.operations().detach(self.id);
        }
    }

    #[inline]
    pub(crate) fn new(progress: &Arc<Progress>, id: OpId) -> Request {
        Request { progress: progress.clone(), id, collected: Collected::nothing() }
    }

    /// Makes progress once and returns the outcome if the request is finished. Never blocks.
    pub fn test(&self) -> Option<Result<Receipt>> {
        match self.progress.check_origin("test") {
            Ok(()) => self.progress.test(self.id, &self.collected),
            Err(error) => Some(Err(error)),
        }
    }

    /// Whether it is finished, without making progress.
    pub fn is_done(&self) -> bool {
        self.progress.core_here().is_some_and(|mut core| core.operations().is_done(self.id))
    }

    /// True once it is finished, so that nothing touches its buffer; without the worker's lock where its outcome
    /// was collected. For owners whose buffer must outlive the operation, before they drop the request.
    #[inline]
    pub fn is_over(&mut self) -> bool {
        self.collected.is_collected() || self.progress.check_origin("free").is_err() || self.is_done()
    }

    /// True for an operation of that worker.
    pub(super) fn is_of(&self, progress: &Arc<Progress>) -> bool {
        Arc::ptr_eq(&self.progress, progress)
    }

    /// Waits until it is finished, at most `timeout` (`CROSSRAIL_TIMEOUT` if `None`).
    ///
    /// A wait that runs out fails with `Timeout` and says how far the operation got; the operation goes on, so
    /// wait again or [`Request::cancel`] it.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Receipt> {
        self.progress.check_origin("wait")?;
        self.progress.wait(self.id, &self.collected, timeout)
    }

    /// Asks both ends to stop. The request then finishes with `Cancelled`, unless it was already finished; its buffer
    /// stays in use until then (a cancelled receive or send releases it at once unless a lane is copying).
    pub fn cancel(&self) {
        if self.progress.check_origin("cancel").is_ok() {
            self.progress.cancel(self.id);
        }
    }

    /// Calls `callback` once the request is finished (at once if it is), on the thread that saw it finish, without
    /// any lock held. It may start new operations; it must not block.
    pub fn on_complete(&self, callback: impl FnOnce(Result<Receipt>) + Send + 'static) {
        match self.progress.check_origin("on_complete") {
            Ok(()) => self.progress.on_complete(self.id, &self.collected, Box::new(callback)),
            Err(error) => callback(Err(error)),
        }
    }

    /// The bytes of a finished operation whose buffer was a `Vec<u8>`.
    pub fn into_vec(self) -> Option<Vec<u8>> {
        self.progress.core_here()?.operations().take_vec(self.id)
    }
}

impl Drop for Request {
    #[inline]
    fn drop(&mut self) {
        if !self.collected.is_collected() {
            self.detach();
        }
    }
}

impl std::fmt::Debug for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Request({})", self.id)
    }
}
