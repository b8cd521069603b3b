//! Graph capture: querying a stream's capture state, and capturing graphs.
#![allow(unsafe_code)]

use std::fmt;

use crossrail_types::{Error, ErrorKind, Result};
use cudarc::driver::sys::{CUgraph, CUgraphExec, CUstreamCaptureMode};

use crate::context::Context;
use crate::raw::{Code, Raw};
use crate::stream::{Stream, is_default};

const CAPTURE_IMPLICIT: Code = 906;

/// The capture state of a stream: whether enqueued work executes or is captured in a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capture {
    /// Work executes.
    None,
    /// Work is captured.
    Active,
    /// The capture was invalidated by work that cannot be captured; every call fails until the capture is ended.
    Broken,
}

impl Stream {
    /// The capture state of this stream.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] for the default stream while another stream is being captured, when it must not be used; a
    /// failed call.
    pub fn capture(&self) -> Result<Capture> {
        let context = self.context();
        let call = "cuStreamIsCapturing";
        let ask = context.cuda().optional("stream", call, context.cuda().raw().cuStreamIsCapturing)?;
        let mut status = 0_u32;
        // SAFETY: the stream is alive; `status` is a valid out pointer.
        let mut query = || unsafe { ask(self.raw(), (&raw mut status).cast()) };
        // Captures allow this call in every mode, and a stream that is no default stream knows its context.
        let code = match is_default(self.handle()) {
            false if query() == 0 => 0,
            _ => context.current("stream", |_| query())?,
        };
        if code == CAPTURE_IMPLICIT {
            let detail = "the default stream cannot be used while another stream is being captured";
            return Err(
                Error::new(ErrorKind::Usage, "stream", detail).with_hint("use the stream that is being captured")
            );
        }
        context.check("stream", call, code)?;
        Ok(match status {
            0 => Capture::None,
            1 => Capture::Active,
            _ => Capture::Broken,
        })
    }

    /// Captures the work that `work` enqueues in this stream as a graph, without executing it.
    ///
    /// # Errors
    /// The error of `work`; a failed call, as for work that cannot be captured.
    pub fn record(&self, work: impl FnOnce(&Stream) -> Result<()>) -> Result<Graph> {
        let context = self.context();
        let raw = context.cuda().raw();
        let begin = context.cuda().optional("graph", "cuStreamBeginCapture", raw.cuStreamBeginCapture_v2)?;
        let end = context.cuda().optional("graph", "cuStreamEndCapture", raw.cuStreamEndCapture)?;
        let build = context.cuda().optional("graph", "cuGraphInstantiateWithFlags", raw.cuGraphInstantiateWithFlags)?;
        let destroy = context.cuda().optional("graph", "cuGraphDestroy", raw.cuGraphDestroy)?;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is alive.
        context.run("graph", "cuStreamBeginCapture", |_| unsafe { begin(self.raw(), mode) })?;
        let done = work(self);
        let mut graph: CUgraph = std::ptr::null_mut();
        // SAFETY: the capture was begun above; `graph` is a valid out pointer.
        let ended = context.run("graph", "cuStreamEndCapture", |_| unsafe { end(self.raw(), &mut graph) });
        let mut built: CUgraphExec = std::ptr::null_mut();
        let outcome = done.and(ended).and_then(|()| {
            // SAFETY: the graph is complete; `built` is a valid out pointer.
            context.run("graph", "cuGraphInstantiate", |_| unsafe { build(&mut built, graph, 0) })
        });
        if !graph.is_null() {
            // SAFETY: created above, not used afterwards; the instantiated graph does not depend on it.
            let _ = context.current("graph", |_| unsafe { destroy(graph) });
        }
        outcome.map(|()| Graph { context: context.clone(), raw: built })
    }
}

/// An instantiated graph: captured work that is launched as a whole.
pub struct Graph {
    context: Context,
    raw: CUgraphExec,
}

// SAFETY: a graph handle names a driver object that is not bound to a thread.
unsafe impl Send for Graph {}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Graph({:?} of {:?})", self.raw, self.context)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: created by `record`, not used afterwards; a launch in progress still completes.
        let destroy = |raw: &Raw| raw.cuGraphExecDestroy.map_or(0, |destroy| unsafe { destroy(self.raw) });
        let _ = self.context.current("graph", destroy);
    }
}

impl Graph {
    /// Launches the graph in `stream`. Launches of the same graph execute one at a time.
    ///
    /// # Safety
    /// The guarantees given for the captured work must hold for this launch too: its addresses stay valid until it has
    /// completed, and nothing else accesses what it writes.
    ///
    /// # Errors
    /// A failed call.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<()> {
        let call = "cuGraphLaunch";
        let launch = self.context.cuda().optional("graph", call, self.context.cuda().raw().cuGraphLaunch)?;
        // SAFETY: both are alive; the caller guarantees the work.
        self.context.run("graph", call, |_| unsafe { launch(self.raw, stream.raw()) })
    }
}
