//! Streams that copy, and how the host detects completion: the stream writes a word behind each copy, and the host
//! polls the word.
#![allow(unsafe_code)]

use std::time::{Duration, Instant};

use crossrail_cuda::{Context, Stream};
use crossrail_types::Result;

use crate::completion_word::{CompletionWord, WordPool};

/// How long to wait for a copy before asking the driver whether it failed, and the interval of further queries. A query
/// is a driver call, far more expensive than a load; but a failed copy never writes its word.
const QUERY_INTERVAL: Duration = Duration::from_millis(20);

/// A marker that the word never reaches.
const NEVER: u64 = u64::MAX;

/// A stream and its completion word.
///
/// It has one user at a time, who enqueues copies followed by a marker, and polls the marker. The value of the word
/// only grows, also across users.
pub(crate) struct CopyStream {
    stream: Stream,
    word: CompletionWord,
    /// Whether the stream can write the word.
    writes_words: bool,
    /// The last marker, which the word reaches once everything enqueued has completed.
    issued: u64,
    /// Set when a copy has been given up: it may still be executing.
    stuck: bool,
}

impl CopyStream {
    pub(crate) fn new(context: &Context, words: &WordPool, writes_words: bool) -> Result<CopyStream> {
        let word = words.take(context)?;
        let issued = word.value();
        match Stream::urgent(context) {
            Ok(stream) => Ok(CopyStream { stream, word, writes_words, issued, stuck: false }),
            Err(error) => {
                words.put_back(word);
                Err(error)
            }
        }
    }

    /// The stream itself, for other work that a marker follows.
    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Enqueues a copy between GPU addresses, without a marker.
    ///
    /// # Safety
    /// As [`Stream::copy`].
    pub(crate) unsafe fn copy(&mut self, dst: u64, src: u64, len: usize) -> Result<()> {
        // SAFETY: the caller guarantees the ranges.
        unsafe { self.stream.copy_within(dst, src, len) }
    }

    /// Enqueues a marker and returns its value for [`CopyStream::has_reached`].
    ///
    /// If the stream cannot write words, the result is a value that is never reached, and completion is detected by
    /// [`CopyStream::query`] alone.
    pub(crate) fn enqueue_marker(&mut self) -> u64 {
        let (address, value) = (self.word.address(), self.issued + 1);
        // SAFETY: the word lives as long as `self`, and is leaked by `destroy` if a marker may be outstanding.
        if !self.writes_words || unsafe { self.stream.write_value64(address, value) }.is_err() {
            return NEVER;
        }
        self.issued = value;
        value
    }

    /// Whether a marker can ever be reached.
    pub(crate) fn is_reachable(marker: u64) -> bool {
        marker != NEVER
    }

    /// Whether everything before the marker has completed. A plain load.
    #[inline]
    pub(crate) fn has_reached(&self, marker: u64) -> bool {
        self.word.value() >= marker
    }

    /// Asks the driver whether everything enqueued has completed; `Err` if something failed.
    pub(crate) fn query(&self) -> Result<bool> {
        self.stream.is_done()
    }

    /// Marks the stream as stuck: nothing more may be enqueued, and its word is never reused.
    pub(crate) fn set_stuck(&mut self) {
        self.stuck = true;
    }

    pub(crate) fn is_stuck(&self) -> bool {
        self.stuck
    }

    /// The number of markers outstanding.
    pub(crate) fn depth(&self) -> u64 {
        self.issued - self.word.value().min(self.issued)
    }

    /// Whether everything enqueued has completed.
    pub(crate) fn is_idle(&self) -> bool {
        !self.stuck && self.has_reached(self.issued)
    }

    /// Destroys the stream and returns its word to the pool, unless a marker may still be written to it.
    pub(crate) fn destroy(self, words: &WordPool) {
        if self.is_idle() {
            words.put_back(self.word);
        } else {
            std::mem::forget(self.word);
        }
    }
}

/// The state of a copy.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum CopyOutcome {
    Done,
    Pending,
    /// It failed, with the driver's error. It no longer accesses memory.
    Failed(String),
    /// It was given up, and may still access memory.
    Stuck,
}

/// Polls a copy for completion: when it was enqueued, and when the driver was last asked about it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CompletionWatch {
    started: Instant,
    /// The waiting time at the last driver query.
    queried: Duration,
    query_interval: Duration,
}

impl CompletionWatch {
    pub(crate) fn new(now: Instant) -> CompletionWatch {
        CompletionWatch { started: now, queried: Duration::ZERO, query_interval: QUERY_INTERVAL }
    }

    /// Asks the driver at every poll, because the marker cannot be reached.
    pub(crate) fn query_always(&mut self) {
        self.query_interval = Duration::ZERO;
    }

    pub(crate) fn waited(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.started)
    }

    /// The state of the copy. `has_reached` polls its marker, `query` asks the driver.
    pub(crate) fn poll(
        &mut self,
        now: Instant,
        limit: Duration,
        has_reached: impl Fn() -> bool,
        query: impl FnOnce() -> Result<bool>,
    ) -> CopyOutcome {
        if has_reached() {
            return CopyOutcome::Done;
        }
        let waited = self.waited(now);
        if waited >= self.queried + self.query_interval {
            self.queried = waited;
            match query() {
                Err(error) => return CopyOutcome::Failed(error.to_string()),
                // The stream is empty, so the marker has been written, or is just becoming visible.
                Ok(true) => return CopyOutcome::Done,
                Ok(false) => {}
            }
        }
        if waited >= limit { CopyOutcome::Stuck } else { CopyOutcome::Pending }
    }
}

#[cfg(test)]
mod tests {
    use crossrail_types::{Error, ErrorKind};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(5);

    fn after(watch: &mut CompletionWatch, start: Instant, ms: u64, answer: Result<bool>) -> (CopyOutcome, bool) {
        let mut queried = false;
        let query = || {
            queried = true;
            answer
        };
        let outcome = watch.poll(start + Duration::from_millis(ms), LIMIT, || false, query);
        (outcome, queried)
    }

    #[test]
    fn a_copy_is_done_when_its_marker_is_reached() {
        let start = Instant::now();
        let mut watch = CompletionWatch::new(start);
        let never = || -> Result<bool> { panic!("the driver must not be queried") };
        assert_eq!(watch.poll(start + 9 * LIMIT, LIMIT, || true, never), CopyOutcome::Done);
        assert_eq!(watch.poll(start + QUERY_INTERVAL / 2, LIMIT, || false, never), CopyOutcome::Pending);
    }

    #[test]
    fn the_driver_is_queried_at_intervals() {
        let start = Instant::now();
        let mut watch = CompletionWatch::new(start);
        assert_eq!(after(&mut watch, start, 20, Ok(false)), (CopyOutcome::Pending, true));
        assert_eq!(after(&mut watch, start, 39, Ok(false)), (CopyOutcome::Pending, false));
        assert_eq!(after(&mut watch, start, 41, Ok(false)), (CopyOutcome::Pending, true));
        assert_eq!(after(&mut watch, start, 70, Ok(true)), (CopyOutcome::Done, true));
        let lost = Error::new(ErrorKind::Io, "stream on cuda:0", "cuStreamQuery: CUDA_ERROR_ILLEGAL_ADDRESS (700)");
        let (outcome, _) = after(&mut watch, start, 100, Err(lost));
        assert!(matches!(outcome, CopyOutcome::Failed(why) if why.contains("ILLEGAL_ADDRESS")));
    }

    #[test]
    fn a_copy_that_never_completes_is_given_up() {
        let start = Instant::now();
        let mut watch = CompletionWatch::new(start);
        assert_eq!(after(&mut watch, start, 4999, Ok(false)).0, CopyOutcome::Pending);
        assert_eq!(after(&mut watch, start, 5000, Ok(false)).0, CopyOutcome::Stuck);
    }
}
