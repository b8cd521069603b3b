//! Streams of ours that others put their work before.

use crossrail_cuda::{Capture, Context, Stream};
use crossrail_types::{Error, ErrorKind, Result};
use parking_lot::Mutex;

/// Streams kept at most; more are made, and freed after use, while all of these have work before them.
const KEPT: usize = 32;

/// Streams of one GPU with nothing in them but what others' work comes before. Any thread.
///
/// Each is used by one operation at a time, and again once that one's work is complete: an operation never waits for
/// work that comes before another.
#[derive(Default)]
pub(super) struct Streams(Mutex<Vec<Stream>>);

impl Streams {
    /// Lets `ask` put work of somebody else's before a stream of this pool, given by its handle, and makes `point` of
    /// the stream then. The GPU's context is current meanwhile: some exporters lend memory of the current GPU only.
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

    /// One of which everything is complete.
    fn take(&self, context: &Context) -> Result<Stream> {
        let mut kept = self.0.lock();
        let mut at = 0;
        while let Some(stream) = kept.get(at) {
            match stream.is_done() {
                Ok(true) => return Ok(kept.swap_remove(at)),
                Ok(false) => at += 1,
                // What failed was somebody else's work; the stream is of no more use.
                Err(_) => drop(kept.swap_remove(at)),
            }
        }
        drop(kept);
        Stream::new(context)
    }
}

/// # Errors
/// `Usage` when what is put into the stream now is recorded in a graph: it would never be complete.
pub(super) fn refuse_captured(stream: &Stream) -> Result<()> {
    if stream.capture()? == Capture::None {
        return Ok(());
    }
    let ordinal = stream.context().device().ordinal();
    let detail = "the stream is being captured, and nothing in it is carried out before the graph is launched";
    Err(Error::new(ErrorKind::Usage, format!("stream on cuda:{ordinal}"), detail)
        .with_hint("capture Mapped::put instead, or start the operation outside the capture"))
}
