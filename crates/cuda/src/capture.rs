//! Graph captures: those of other threads are not disturbed, those of a stream are recognized.
#![allow(unsafe_code)]

use std::fmt;

use crossrail_types::{Error, ErrorKind, Result};
use cudarc::driver::sys::{CUgraph, CUgraphExec, CUstreamCaptureMode};

use crate::context::Context;
use crate::raw::{Code, Raw};
use crate::stream::Stream;

const CAPTURE_IMPLICIT: Code = 906;

/// Whether what is put into a stream is carried out, or recorded in a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capture {
    /// It is carried out.
    None,
    /// It is recorded.
    Active,
    /// It was to be recorded, but something that can't be broke the capture: every call fails until it is ended.
    Broken,
}

impl Stream {
    /// Whether what is put in now is recorded in a graph.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] for the default stream while another stream is captured, which must not be used then; a
    /// failed call.
    pub fn capture(&self) -> Result<Capture> {
        let context = self.context();
        let call = "cuStreamIsCapturing";
        let ask = context.cuda().optional("stream", call, context.cuda().raw().cuStreamIsCapturing)?;
        let mut status = 0_u32;
        // SAFETY: the stream is alive; `status` is a valid place for one number.
        let code = context.current("stream", |_| unsafe { ask(self.raw(), (&raw mut status).cast()) })?;
        if code == CAPTURE_IMPLICIT {
            let detail = "the default stream can't be used while another stream is captured";
            return Err(Error::new(ErrorKind::Usage, "stream", detail).with_hint("give the stream that is captured"));
        }
        context.check("stream", call, code)?;
        Ok(match status {
            0 => Capture::None,
            1 => Capture::Active,
            _ => Capture::Broken,
        })
    }

    /// Records what `work` puts into this stream, which is not carried out now, as a graph.
    ///
    /// # Errors
    /// What `work` says; a failed call, such as for work that can't be recorded.
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
        // SAFETY: the capture was begun above; `graph` is a valid place for one handle.
        let ended = context.run("graph", "cuStreamEndCapture", |_| unsafe { end(self.raw(), &mut graph) });
        let mut built: CUgraphExec = std::ptr::null_mut();
        let outcome = done.and(ended).and_then(|()| {
            // SAFETY: the graph is whole; `built` is a valid place for one handle.
            context.run("graph", "cuGraphInstantiate", |_| unsafe { build(&mut built, graph, 0) })
        });
        if !graph.is_null() {
            // SAFETY: made above, not used after this; what was built of it stands by itself.
            let _ = context.current("graph", |_| unsafe { destroy(graph) });
        }
        outcome.map(|()| Graph { context: context.clone(), raw: built })
    }
}

/// Work that was recorded, to be put into streams as a whole.
pub struct Graph {
    context: Context,
    raw: CUgraphExec,
}

// SAFETY: a graph handle is a name for an object of the driver; every call below takes it whole, and launches of it
// from several threads are ordered by the driver's own lock.
unsafe impl Send for Graph {}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Graph({:?} of {:?})", self.raw, self.context)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `record`, not used after this; a launch that is under way is still carried out.
        let destroy = |raw: &Raw| raw.cuGraphExecDestroy.map_or(0, |destroy| unsafe { destroy(self.raw) });
        let _ = self.context.current("graph", destroy);
    }
}

impl Graph {
    /// Puts all of it into `stream`. One launch of it runs at a time.
    ///
    /// # Safety
    /// What was recorded must be right once more: its addresses valid until this is done, and nobody else's where it
    /// writes.
    ///
    /// # Errors
    /// A failed call.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<()> {
        let call = "cuGraphLaunch";
        let launch = self.context.cuda().optional("graph", call, self.context.cuda().raw().cuGraphLaunch)?;
        // SAFETY: both are alive; the caller vouches for the work.
        self.context.run("graph", call, |_| unsafe { launch(self.raw, stream.raw()) })
    }
}
