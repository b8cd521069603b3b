//! The memory that an expert buffer takes, before it is allocated.

use std::fmt;

use crossrail_types::{Error, ErrorKind, Result};

use crate::config::Config;

/// Upper bound on the memory of one rank's buffer, by purpose, in bytes. The system allocates pages of host memory when they
/// are first used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Each purpose and its bytes, in the order of addresses.
    pub kinds: Vec<(&'static str, u64)>,
    /// Bytes available now on this machine or the GPU; `None` if unknown.
    pub free: Option<u64>,
    /// Maximum number of tokens per rank that fits into `free`, with all other parameters unchanged.
    pub largest_tokens: usize,
    /// Label of `free` in the table.
    place: String,
    layouts: usize,
}

impl Plan {
    /// A plan for `config`, where `kinds` lists the memory of a configuration, and `place` labels the `free` bytes.
    pub fn of(
        config: &Config,
        place: &str,
        free: Option<u64>,
        kinds: impl Fn(&Config) -> Vec<(&'static str, u64)>,
    ) -> Plan {
        let total = |tokens: usize| {
            let kinds = kinds(&Config { max_tokens: tokens, ..config.clone() });
            kinds.iter().fold(0, |sum: u64, (_, bytes)| sum.saturating_add(*bytes))
        };
        let largest_tokens = free.map_or(config.max_tokens, |free| largest(|tokens| total(tokens) <= free));
        let (kinds, layouts) = (kinds(config), config.layouts.len());
        Plan { kinds, free, largest_tokens, place: place.to_owned(), layouts }
    }

    /// Total number of bytes.
    pub fn total(&self) -> u64 {
        self.kinds.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Checks that the plan fits into the free memory.
    ///
    /// # Errors
    /// [`ErrorKind::Exhausted`] with the whole plan as its text.
    pub fn check(&self) -> Result<()> {
        match self.free {
            Some(free) if self.total() > free => {
                let error = Error::new(ErrorKind::Exhausted, "ExpertBuffer", format!("more than is free:\n{self}\n"));
                let other = if self.layouts > 1 { ", or name the one layout that is used" } else { "" };
                Err(error.with_hint(format!("at most {} tokens per rank fit{other}", self.largest_tokens)))
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (kind, bytes) in &self.kinds {
            writeln!(f, "  {kind:<34} {bytes:>16} bytes")?;
        }
        write!(f, "  {:<34} {:>16} bytes", "in all", self.total())?;
        if let Some(free) = self.free {
            write!(f, "\n  {:<34} {free:>16} bytes", self.place)?;
        }
        write!(f, "\n  {:<34} {:>16}", "largest tokens per rank that fit", self.largest_tokens)
    }
}

/// The maximum number of tokens that fits.
fn largest(fits: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0usize, 1usize << 24);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if fits(middle) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    low
}
