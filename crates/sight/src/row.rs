//! One row of this process's page.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::layout::{self, HISTOGRAM_LIMITS_NS, HISTOGRAM_WORDS, Kind, RANKS_MAX, TEXT_WORDS, encode};
use crate::now_ns;
use crate::page::Page;

/// The longest wait of a row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wait {
    /// Which operation waits; up to 16 bytes are kept.
    pub operation: String,
    /// Since when, by [`now_ns`].
    pub since_ns: u64,
    /// The operation's sequence number, or its tag.
    pub number: u64,
    /// Whom it waits for, for people.
    pub whom: String,
    /// The first ranks that it waits for.
    pub ranks: Vec<u32>,
}

/// Ranks for people: `rank 3`, `ranks 3, 5`, `ranks 0, 1, 2, 3, 4, 5 and 26 more`.
pub fn ranks_text(ranks: &[u32]) -> String {
    const NAMED: usize = 6;
    let named: Vec<String> = ranks.iter().take(NAMED).map(u32::to_string).collect();
    let word = if ranks.len() == 1 { "rank" } else { "ranks" };
    let more = ranks.len().saturating_sub(NAMED);
    if more == 0 {
        format!("{word} {}", named.join(", "))
    } else {
        format!("{word} {} and {more} more", named.join(", "))
    }
}

/// Durations, as counters of a row.
#[derive(Clone, Debug, Default)]
pub struct Histogram {
    words: [u64; HISTOGRAM_WORDS],
}

impl Histogram {
    /// Counts one duration.
    pub fn add(&mut self, ns: u64) {
        let bucket = HISTOGRAM_LIMITS_NS.iter().position(|limit| ns <= *limit).unwrap_or(HISTOGRAM_LIMITS_NS.len());
        self.words[bucket] += 1;
        self.words[HISTOGRAM_WORDS - 1] += ns;
    }

    /// Adds those that another one has counted.
    pub fn merge(&mut self, other: &Histogram) {
        self.words.iter_mut().zip(other.words).for_each(|(word, more)| *word += more);
    }

    /// Count of the durations, and their sum in nanoseconds.
    pub fn total(&self) -> (u64, u64) {
        (self.words[..HISTOGRAM_WORDS - 1].iter().sum(), self.words[HISTOGRAM_WORDS - 1])
    }
}

/// One row of this process's page, free again when this is dropped.
///
/// It has one writer at a time, whoever holds `&mut`. Where the process has no page or the page no room, writing does
/// nothing.
#[derive(Debug)]
pub struct Row {
    place: Option<(Arc<Page>, usize)>,
}

impl Row {
    /// A row of `kind` about `name` and, where one is concerned, `peer`. `owner`: [`Page::owner`] of what it belongs
    /// to.
    pub fn new(page: Option<&Arc<Page>>, kind: Kind, owner: u32, name: &str, peer: &str) -> Row {
        let place = page.and_then(|page| Some((Arc::clone(page), page.take_row()?)));
        let mut row = Row { place };
        row.write(|writer| {
            writer.set(layout::row::KIND, kind as u64 | u64::from(owner) << 32);
            writer.text(layout::row::NAME, name, TEXT_WORDS);
            writer.text(layout::row::PEER, peer, TEXT_WORDS);
            writer.set(layout::row::BORN, now_ns());
        });
        row
    }

    /// Whether anybody can read it.
    pub fn is_there(&self) -> bool {
        self.place.is_some()
    }

    /// Writes the row; a reader sees either all of the write or the state before it.
    pub fn write(&mut self, with: impl FnOnce(&mut Writer<'_>)) {
        let Some((page, at)) = self.place.as_ref().filter(|(page, _)| page.is_here()) else { return };
        let words = page.row(*at);
        let sequence = &words[layout::row::SEQUENCE];
        let before = sequence.load(Ordering::Relaxed);
        sequence.store(before | 1, Ordering::Relaxed);
        // A reader that sees a word written below sees the odd number, too.
        fence(Ordering::Release);
        with(&mut Writer { words });
        sequence.store((before | 1) + 1, Ordering::Release);
        page.written();
    }
}

impl Drop for Row {
    fn drop(&mut self) {
        self.write(|writer| writer.set(layout::row::KIND, 0));
        if let Some((page, at)) = self.place.take().filter(|(page, _)| page.is_here()) {
            page.return_row(at);
        }
    }
}

/// The words of a row that is being written.
#[derive(Debug)]
pub struct Writer<'a> {
    words: &'a [AtomicU64],
}

impl Writer<'_> {
    /// Sets the value at one of the indices in [`fields`](crate::fields).
    pub fn set(&mut self, field: usize, value: u64) {
        if let Some(word) = self.words.get(field) {
            word.store(value, Ordering::Relaxed);
        }
    }

    /// Sets the histogram at one of the indices in [`fields`](crate::fields).
    pub fn histogram(&mut self, field: usize, histogram: &Histogram) {
        for (at, value) in histogram.words.iter().enumerate() {
            self.set(field + at, *value);
        }
    }

    /// Sets the oldest wait; `None`: nothing waits.
    pub fn wait(&mut self, wait: Option<&Wait>) {
        let Some(wait) = wait else { return self.set(layout::row::SINCE, 0) };
        self.text(layout::row::WAIT, &wait.operation, 2);
        self.set(layout::row::SINCE, wait.since_ns.max(1));
        self.set(layout::row::NUMBER, wait.number);
        self.text(layout::row::WHOM, &wait.whom, TEXT_WORDS);
        let rank = |at: usize| wait.ranks.get(at).map_or(0, |rank| u64::from(*rank) + 1);
        for pair in 0..RANKS_MAX / 2 {
            self.set(layout::row::RANKS + pair, rank(2 * pair) | rank(2 * pair + 1) << 32);
        }
    }

    /// Writes as much of `text` as fits in `words` words.
    fn text(&mut self, at: usize, text: &str, words: usize) {
        for (word, bytes) in encode(text, words).into_iter().enumerate() {
            self.set(at + word, bytes);
        }
    }
}
