//! Streams that copy, and how the host learns that a copy is done: by a word that the stream writes behind it.
#![allow(unsafe_code)]

use std::time::{Duration, Instant};

use crossrail_cuda::Stream;
use crossrail_types::Result;

use crate::domain::{Gpu, Word};

/// How long a copy is waited for before the driver is asked whether something went wrong, and how often from then on.
const ASK_AFTER: Duration = Duration::from_millis(20);

/// No word ever says that.
const NEVER: u64 = u64::MAX;

/// A stream, and the word that it writes.
pub(crate) struct Queue {
    stream: Stream,
    word: Word,
    /// What the word becomes when all that was put in is done.
    issued: u64,
    /// A copy in it never came to its end.
    stuck: bool,
}

impl Queue {
    pub(crate) fn new(gpu: &Gpu) -> Result<Queue> {
        let word = gpu.word()?;
        let issued = word.value();
        let stream = match Stream::urgent(&gpu.context) {
            Ok(stream) => stream,
            Err(error) => {
                gpu.take_word_back(word);
                return Err(error);
            }
        };
        Ok(Queue { stream, word, issued, stuck: false })
    }

    /// Puts a copy in, without a word behind it.
    ///
    /// # Safety
    /// As [`Stream::copy`].
    pub(crate) unsafe fn copy(&mut self, dst: u64, src: u64, len: usize) -> Result<()> {
        // SAFETY: the caller vouches for the areas.
        unsafe { self.stream.copy_within(dst, src, len) }
    }

    /// Puts the word behind what is in; returns what it will say. Where streams write no words, it is a value that the word
    /// never says: the driver is asked each time then.
    pub(crate) fn mark(&mut self, gpu: &Gpu) -> u64 {
        let (address, value) = (self.word.address(), self.issued + 1);
        // SAFETY: the word lives as long as the queue, and longer if something is left in it.
        if !gpu.writes_words || unsafe { self.stream.write_value64(address, value) }.is_err() {
            return NEVER;
        }
        self.issued = value;
        value
    }

    /// Whether the word ever says that.
    pub(crate) fn is_said(value: u64) -> bool {
        value != NEVER
    }

    /// Whether the word has reached that value.
    #[inline]
    pub(crate) fn reached(&self, value: u64) -> bool {
        self.word.value() >= value
    }

    /// Whether what was put in, and failed since, has been noticed; `Ok(true)`: nothing is left in it.
    pub(crate) fn ask(&self) -> Result<bool> {
        self.stream.is_done()
    }

    /// Nothing more may be put in, and nobody may take its word.
    pub(crate) fn set_stuck(&mut self) {
        self.stuck = true;
    }

    pub(crate) fn is_stuck(&self) -> bool {
        self.stuck
    }

    /// How much is in it.
    pub(crate) fn depth(&self) -> u64 {
        self.issued - self.word.value().min(self.issued)
    }

    /// Gives the word back, if nothing is left in it that would still write them; else they are never used
    /// again.
    pub(crate) fn dissolve(self, gpu: &Gpu) {
        if !self.stuck && self.reached(self.issued) {
            gpu.take_word_back(self.word);
        } else {
            std::mem::forget(self.word);
        }
    }

    /// As `dissolve`, but keeps the stream for the next user where it can.
    pub(crate) fn retire(self, gpu: &Gpu) {
        if !self.stuck && self.reached(self.issued) {
            gpu.take_back(self);
        } else {
            self.dissolve(gpu);
        }
    }
}

/// What becomes of a copy that is waited for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Done,
    Pending,
    /// It failed: the driver's words. It no longer touches memory.
    Failed(String),
    /// It was given up, and may still touch memory.
    Stuck,
}

/// How long one copy has been waited for, and when the driver was last asked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Watch {
    began: Instant,
    asked: Duration,
    patience: Duration,
}

impl Watch {
    pub(crate) fn new(now: Instant) -> Watch {
        Watch { began: now, asked: Duration::ZERO, patience: ASK_AFTER }
    }

    /// No word tells: the driver is asked each time.
    pub(crate) fn ask_always(&mut self) {
        self.patience = Duration::ZERO;
    }

    pub(crate) fn waited(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.began)
    }

    /// `reached`: what the word says. The word is all that is looked at, but a copy that failed never writes it: so now
    /// and then the driver is asked.
    pub(crate) fn look(
        &mut self,
        now: Instant,
        limit: Duration,
        reached: impl Fn() -> bool,
        ask: impl FnOnce() -> Result<bool>,
    ) -> Outcome {
        if reached() {
            return Outcome::Done;
        }
        let waited = self.waited(now);
        if waited >= self.asked + self.patience {
            self.asked = waited;
            match ask() {
                Err(error) => return Outcome::Failed(error.to_string()),
                // All is done: the word was written, or is this instant.
                Ok(true) => return Outcome::Done,
                Ok(false) => {}
            }
        }
        if waited >= limit { Outcome::Stuck } else { Outcome::Pending }
    }
}

#[cfg(test)]
mod tests {
    use crossrail_types::{Error, ErrorKind};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(5);

    fn after(watch: &mut Watch, start: Instant, ms: u64, answer: Result<bool>) -> (Outcome, bool) {
        let mut asked = false;
        let ask = || {
            asked = true;
            answer
        };
        let outcome = watch.look(start + Duration::from_millis(ms), LIMIT, || false, ask);
        (outcome, asked)
    }

    #[test]
    fn a_copy_is_done_when_its_word_says_so() {
        let start = Instant::now();
        let mut watch = Watch::new(start);
        let never = || -> Result<bool> { panic!("the driver is not asked") };
        assert_eq!(watch.look(start + 9 * LIMIT, LIMIT, || true, never), Outcome::Done);
        assert_eq!(watch.look(start + ASK_AFTER / 2, LIMIT, || false, never), Outcome::Pending);
    }

    #[test]
    fn the_driver_is_asked_now_and_then_whether_it_failed() {
        let start = Instant::now();
        let mut watch = Watch::new(start);
        assert_eq!(after(&mut watch, start, 20, Ok(false)), (Outcome::Pending, true));
        assert_eq!(after(&mut watch, start, 39, Ok(false)), (Outcome::Pending, false));
        assert_eq!(after(&mut watch, start, 41, Ok(false)), (Outcome::Pending, true));
        assert_eq!(after(&mut watch, start, 70, Ok(true)), (Outcome::Done, true));
        let lost = Error::new(ErrorKind::Io, "stream on cuda:0", "cuStreamQuery: CUDA_ERROR_ILLEGAL_ADDRESS (700)");
        let (outcome, _) = after(&mut watch, start, 100, Err(lost));
        assert!(matches!(outcome, Outcome::Failed(why) if why.contains("ILLEGAL_ADDRESS")));
    }

    #[test]
    fn a_copy_that_never_ends_is_given_up() {
        let start = Instant::now();
        let mut watch = Watch::new(start);
        assert_eq!(after(&mut watch, start, 4999, Ok(false)).0, Outcome::Pending);
        assert_eq!(after(&mut watch, start, 5000, Ok(false)).0, Outcome::Stuck);
    }
}
