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
    /// Number of ranks that take their memory from `free`.
    pub sharing: u32,
    /// Bytes available now on this machine, in its control group, or on the GPU; `None` if unknown.
    pub free: Option<u64>,
    /// Maximum number of tokens per rank with which all `sharing` ranks fit into `free`, with all other parameters
    /// unchanged; `None` if `free` is unknown.
    pub largest_tokens: Option<usize>,
    /// Bytes of pinned memory of the host in addition, for ranks that a GPU does not reach.
    pub pinned: u64,
    /// The place of `free`, and why the bytes are unknown.
    room: Room,
    layouts: usize,
}

/// Where the memory of a plan comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Room {
    /// Label of the free bytes in the table.
    pub place: String,
    /// Bytes available now, or why that is unknown.
    pub free: std::result::Result<u64, String>,
    /// Number of ranks that take their memory from there.
    pub sharing: u32,
}

impl Plan {
    /// A plan for `config`, where `kinds` lists the memory of a configuration.
    pub fn of(config: &Config, room: Room, kinds: impl Fn(&Config) -> Vec<(&'static str, u64)>) -> Plan {
        let total = |tokens: usize| {
            let kinds = kinds(&Config { max_tokens: tokens, ..config.clone() });
            kinds.iter().fold(0, |sum: u64, (_, bytes)| sum.saturating_add(*bytes))
        };
        let (free, sharing) = (room.free.as_ref().ok().copied(), room.sharing.max(1));
        let all = |tokens: usize| total(tokens).saturating_mul(u64::from(sharing));
        let largest_tokens = free.map(|free| largest(|tokens| all(tokens) <= free));
        let (kinds, layouts) = (kinds(config), config.layouts.len());
        Plan { kinds, sharing, free, largest_tokens, pinned: 0, room, layouts }
    }

    /// Adds `pinned` bytes of pinned memory of the host.
    pub fn with_pinned(self, pinned: u64) -> Plan {
        Plan { pinned, ..self }
    }

    /// Total number of bytes.
    pub fn total(&self) -> u64 {
        self.kinds.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Checks that the memory of all ranks that share it fits into what is free.
    ///
    /// # Errors
    /// [`ErrorKind::Exhausted`] with the whole plan as its text.
    pub fn check(&self) -> Result<()> {
        match self.free {
            Some(free) if self.total().saturating_mul(u64::from(self.sharing)) > free => {
                let error = Error::new(ErrorKind::Exhausted, "ExpertBuffer", format!("more than is free:\n{self}\n"));
                let other = if self.layouts > 1 { ", or name the one layout that is used" } else { "" };
                let fits = self.largest_tokens.unwrap_or(0);
                Err(error.with_hint(format!("at most {fits} tokens per rank fit{other}")))
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
        if self.pinned > 0 {
            write!(f, "\n  {:<34} {:>16} bytes", "pinned memory of the host", self.pinned)?;
        }
        if self.sharing > 1 {
            let all = self.total().saturating_mul(u64::from(self.sharing));
            write!(f, "\n  {:<34} {all:>16} bytes", format!("for {} ranks of this machine", self.sharing))?;
        }
        if let Some(free) = self.free {
            write!(f, "\n  {:<34} {free:>16} bytes", self.room.place)?;
        }
        match (self.largest_tokens, &self.room.free) {
            (Some(tokens), _) => write!(f, "\n  {:<34} {tokens:>16}", FITS),
            (None, Err(why)) => write!(f, "\n  {:<34} {:>16}: {why}", FITS, "unknown"),
            (None, Ok(_)) => Ok(()),
        }
    }
}

const FITS: &str = "largest tokens per rank that fit";

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
