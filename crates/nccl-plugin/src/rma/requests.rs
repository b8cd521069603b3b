//! Requests: what NCCL tests until it is done. A request's handle is a number, never an address, so that none can be
//! invalid memory.

use std::collections::HashMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use crossrail_locks::Mutex;
use crossrail_types::{Error, ErrorKind, Result};

const CHUNK: usize = 4096;
const CHUNKS: usize = 256;
/// Marks handles of requests.
const MARK: u64 = 1 << 60;
const INDEX_BITS: u32 = 20;

/// A word: its generation, and one of these states.
const STATE: u32 = 3;
const FREE: u32 = 0;
const PENDING: u32 = 1;
const DONE: u32 = 2;
const FAILED: u32 = 3;

/// The requests of a group. Any thread.
pub(crate) struct Requests {
    chunks: [OnceLock<Box<[AtomicU32]>>; CHUNKS],
    free: Mutex<Free>,
    failures: Mutex<HashMap<u32, Error>>,
}

#[derive(Default)]
struct Free {
    indices: Vec<u32>,
    /// The first that was never used.
    next: u32,
}

impl Requests {
    pub(crate) fn new() -> Requests {
        Requests { chunks: [const { OnceLock::new() }; CHUNKS], free: Mutex::default(), failures: Mutex::default() }
    }

    /// A new request: its index, and its handle.
    ///
    /// # Errors
    /// `Exhausted`: a million are in flight.
    pub(crate) fn start(&self) -> Result<(u32, u64)> {
        let mut free = self.free.lock();
        let index = match free.indices.pop() {
            Some(index) => index,
            None if (free.next as usize) < CHUNK * CHUNKS => {
                free.next += 1;
                free.next - 1
            }
            None => {
                let detail = format!("{} requests are in flight", CHUNK * CHUNKS);
                return Err(Error::new(ErrorKind::Exhausted, "request", detail));
            }
        };
        drop(free);
        let chunk = &self.chunks[index as usize / CHUNK];
        let words = chunk.get_or_init(|| (0..CHUNK).map(|_| AtomicU32::new(0)).collect());
        let word = &words[index as usize % CHUNK];
        let generation = (word.load(Ordering::Relaxed) >> 2).wrapping_add(1) & (u32::MAX >> 2);
        word.store(generation << 2 | PENDING, Ordering::Relaxed);
        Ok((index, MARK | u64::from(generation) << INDEX_BITS | u64::from(index)))
    }

    fn word(&self, index: u32) -> Option<&AtomicU32> {
        self.chunks.get(index as usize / CHUNK)?.get()?.get(index as usize % CHUNK)
    }

    /// Ends a request.
    pub(crate) fn finish(&self, index: u32, outcome: Result<()>) {
        let Some(word) = self.word(index) else { return };
        let state = match outcome {
            Ok(()) => DONE,
            Err(error) => {
                self.failures.lock().insert(index, error);
                FAILED
            }
        };
        let generation = word.load(Ordering::Relaxed) & !STATE;
        word.store(generation | state, Ordering::Release);
    }

    /// The request will not be tested.
    pub(crate) fn forget(&self, index: u32) {
        if let Some(word) = self.word(index) {
            self.release(index, word);
        }
    }

    fn release(&self, index: u32, word: &AtomicU32) {
        word.store(word.load(Ordering::Relaxed) & !STATE | FREE, Ordering::Relaxed);
        self.free.lock().indices.push(index);
    }

    /// Returns true once the request is done. Then, as with an error, the handle is used up.
    ///
    /// # Errors
    /// `Usage`: no such request; else why it failed.
    pub(crate) fn test(&self, handle: u64) -> Result<bool> {
        let (index, generation) = ((handle & ((1 << INDEX_BITS) - 1)) as u32, (handle & !MARK) >> INDEX_BITS);
        let word = self.word(index).filter(|_| handle & MARK != 0 && handle >> 61 == 0);
        let state = word.map(|word| word.load(Ordering::Acquire));
        match (word, state) {
            (Some(word), Some(state)) if u64::from(state >> 2) == generation && state & STATE != FREE => {
                match state & STATE {
                    PENDING => return Ok(false),
                    DONE => self.release(index, word),
                    _ => {
                        let error = self.failures.lock().remove(&index);
                        self.release(index, word);
                        return Err(error.unwrap_or_else(|| Error::new(ErrorKind::Io, "test", "the request failed")));
                    }
                }
                Ok(true)
            }
            _ => Err(Error::new(ErrorKind::Usage, "test", format!("{handle:#x} is not a request in flight"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_valid_until_its_request_is_done() {
        let requests = Requests::new();
        let (one, first) = requests.start().expect("a request");
        let (other, second) = requests.start().expect("a request");
        assert_eq!(requests.test(first), Ok(false));
        requests.finish(one, Ok(()));
        assert_eq!((requests.test(first), requests.test(second)), (Ok(true), Ok(false)));
        assert_eq!(requests.test(first).expect_err("used up").kind, ErrorKind::Usage);
        let (again, third) = requests.start().expect("a request");
        assert_eq!((again, third == first), (one, false));
        assert!(requests.test(first).is_err() && requests.test(third) == Ok(false));
        requests.finish(other, Err(Error::new(ErrorKind::PeerDead, "iput", "gone")));
        assert_eq!(requests.test(second).expect_err("failed").kind, ErrorKind::PeerDead);
        assert_eq!(requests.test(second).expect_err("used up").kind, ErrorKind::Usage);
    }

    #[test]
    fn anything_else_is_no_request() {
        let requests = Requests::new();
        let (_, handle) = requests.start().expect("a request");
        for wrong in [0, 1, handle ^ 1, handle ^ MARK, handle | 1 << 61, handle | 1 << 63, u64::MAX, MARK] {
            assert_eq!(requests.test(wrong).expect_err("no request").kind, ErrorKind::Usage, "{wrong:#x}");
        }
    }

    #[test]
    fn requests_are_limited_and_used_again() {
        let requests = Requests::new();
        let all: Vec<(u32, u64)> = (0..CHUNK * CHUNKS).map(|_| requests.start().expect("room")).collect();
        assert_eq!(requests.start().expect_err("too many").kind, ErrorKind::Exhausted);
        requests.forget(all[77].0);
        assert_eq!(requests.start().expect("room").0, all[77].0);
    }
}
