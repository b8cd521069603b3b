//! A log of the GPU memory that this process has freed, so that links need not find out by polling the driver.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crossrail_locks::PerProcess;

use crate::lock::locked;

/// The number of entries kept. A link that falls further behind detects the older ones by polling.
const CAPACITY: usize = 256;

/// The number of entries ever logged. Written under the lock of `ENTRIES`, and read without it as a fast path.
static COUNT: AtomicU64 = AtomicU64::new(0);
static ENTRIES: PerProcess<Mutex<VecDeque<(u64, u64)>>> = PerProcess::new();

/// Announces that `len` bytes of GPU memory at `address` have been freed. Every link of this process tells its peer at
/// its next [`Link::tidy`](crate::Link::tidy). May be called from any thread.
pub fn announce_free(address: u64, len: u64) {
    let mut entries = locked(&ENTRIES);
    if entries.len() == CAPACITY {
        entries.pop_front();
    }
    entries.push_back((address, len));
    COUNT.fetch_add(1, Ordering::Release);
}

/// A link's position in the log.
#[derive(Debug)]
pub(crate) struct FreeLogCursor(u64);

impl FreeLogCursor {
    pub(crate) fn new() -> FreeLogCursor {
        FreeLogCursor(COUNT.load(Ordering::Acquire))
    }

    /// The entries since the last call: addresses and lengths.
    pub(crate) fn take_new(&mut self) -> Vec<(u64, u64)> {
        if COUNT.load(Ordering::Acquire) == self.0 {
            return Vec::new();
        }
        let entries = locked(&ENTRIES);
        let count = COUNT.load(Ordering::Acquire);
        let new = usize::try_from(count - self.0).unwrap_or(CAPACITY);
        self.0 = count;
        entries.iter().rev().take(new).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cursor_reads_new_entries_and_may_fall_behind() {
        let mut cursor = FreeLogCursor::new();
        let own = |entries: Vec<(u64, u64)>| entries.into_iter().filter(|(address, _)| *address < 1000).count();
        announce_free(1, 10);
        announce_free(2, 10);
        assert_eq!(own(cursor.take_new()), 2);
        assert_eq!(own(cursor.take_new()), 0);
        let mut other = FreeLogCursor::new();
        (0..1000).for_each(|at| announce_free(at, 1));
        assert_eq!((own(cursor.take_new()), own(other.take_new())), (CAPACITY, CAPACITY));
        assert_eq!(own(cursor.take_new()), 0);
    }
}
