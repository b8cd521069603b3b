//! Streams before which other libraries order their work.

use crossrail_cuda::{Capture, Context, Stream};
use crossrail_locks::Mutex;
use crossrail_types::{Error, ErrorKind, Result};

/// Streams kept for reuse, at most. While all of them wait for other work, more are created and freed after use.
const KEPT: usize = 32;

/// A pool of streams of one GPU that hold no work of ours, only waits for other libraries' work. Any thread.
///
/// A stream is reused only when the work that it waited for is complete, so an operation never waits for the work
/// that another one was ordered after.
#[derive(Default)]
pub(super) struct OrderingStreams(Mutex<Vec<Stream>>);

impl OrderingStreams {
    /// Calls `ask` with the handle of an idle stream, before which it orders other work, and then takes `point` of that
    /// stream. The GPU's context is current during the call: some exporters only export memory of the current device.
    pub(super) fn ordered<T, P, E: From<Error>>(
        &self,
        context: &Context,
        ask: impl FnOnce(u64) -> std::result::Result<T, E>,
        point: impl FnOnce(&Stream) -> Result<P>,
    ) -> std::result::Result<(T, P), E> {
        let _current = context.enter()?;
        let stream = self.take(context)?;
        let answer = ask(stream.handle())?;
        refuse_captured(&stream)?;
        let point = point(&stream)?;
        let mut kept = self.0.lock();
        if kept.len() < KEPT {
            kept.push(stream);
        }
        Ok((answer, point))
    }

    /// A stream without outstanding work.
    fn take(&self, context: &Context) -> Result<Stream> {
        let mut kept = self.0.lock();
        let mut at = 0;
        while let Some(stream) = kept.get(at) {
            match stream.is_done() {
                Ok(true) => return Ok(kept.swap_remove(at)),
                Ok(false) => at += 1,
                // Another library's work failed; the stream is unusable.
                Err(_) => drop(kept.swap_remove(at)),
            }
        }
        drop(kept);
        Stream::new(context)
    }
}

/// # Errors
/// `Usage` when the stream is being captured into a graph: work submitted now would never complete.
pub(super) fn refuse_captured(stream: &Stream) -> Result<()> {
    if stream.capture()? == Capture::None {
        return Ok(());
    }
    let ordinal = stream.context().device().ordinal();
    let detail = "the stream is being captured, and nothing in it is carried out before the graph is launched";
    Err(Error::new(ErrorKind::Usage, format!("stream on cuda:{ordinal}"), detail)
        .with_hint("capture Mapped::put instead, or start the operation outside the capture"))
}
