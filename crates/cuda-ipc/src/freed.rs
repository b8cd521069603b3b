//! Memory that this process says it has freed: links need not find out by looking for it.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::domain::locked;

/// What a link that falls further behind has to find by itself.
const KEPT: usize = 256;

static COUNT: AtomicU64 = AtomicU64::new(0);
static LAST: Mutex<VecDeque<(u64, u64)>> = Mutex::new(VecDeque::new());

/// `len` bytes of GPU memory at `address` are freed: every link of this process tells its peer so the next time that
/// [`Link::tidy`](crate::Link::tidy) is called. Any thread may say so.
pub fn freed(address: u64, len: u64) {
    let mut last = locked(&LAST);
    if last.len() == KEPT {
        last.pop_front();
    }
    last.push_back((address, len));
    COUNT.fetch_add(1, Ordering::Release);
}

/// How much one link has heard of that.
#[derive(Debug)]
pub(crate) struct Heard(u64);

impl Heard {
    pub(crate) fn new() -> Heard {
        Heard(COUNT.load(Ordering::Acquire))
    }

    /// What has been freed since the last call: addresses and lengths.
    pub(crate) fn news(&mut self) -> Vec<(u64, u64)> {
        if COUNT.load(Ordering::Acquire) == self.0 {
            return Vec::new();
        }
        let last = locked(&LAST);
        let count = COUNT.load(Ordering::Acquire);
        let new = usize::try_from(count - self.0).unwrap_or(KEPT);
        self.0 = count;
        last.iter().rev().take(new).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_hears_what_was_freed_since_and_falls_behind_without_harm() {
        let mut heard = Heard::new();
        let own = |news: Vec<(u64, u64)>| news.into_iter().filter(|(address, _)| *address < 1000).count();
        freed(1, 10);
        freed(2, 10);
        assert_eq!(own(heard.news()), 2);
        assert_eq!(own(heard.news()), 0);
        let mut other = Heard::new();
        (0..1000).for_each(|at| freed(at, 1));
        assert_eq!((own(heard.news()), own(other.news())), (KEPT, KEPT));
        assert_eq!(own(heard.news()), 0);
    }
}
