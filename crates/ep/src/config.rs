//! The configuration of an expert buffer.

use std::fmt;
use std::time::Duration;

use crossrail_types::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

/// Elements that share one scale in fp8 rows.
pub const BLOCK: usize = 128;
/// The most ranks of a buffer.
pub const MOST_RANKS: usize = 1024;
/// The most experts that one token may be sent to.
pub const MOST_TOPK: usize = 32;

/// How the scales of fp8 rows are stored; there is one per block of [`BLOCK`] elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Scale {
    /// fp32, the block's largest magnitude / 448.
    F32,
    /// fp32, rounded up to a power of two.
    PowerOfTwo,
    /// The exponent of that power of two in one byte: 2^(byte - 127).
    Ue8m0,
}

/// What dispatch carries. Combine carries bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Payload {
    /// bf16 as it is.
    Bf16,
    /// e4m3 in blocks of [`BLOCK`] with a scale each.
    Fp8(Scale),
}

impl Payload {
    /// Bytes of one row's elements.
    pub fn row_bytes(self, hidden: usize) -> usize {
        match self {
            Payload::Bf16 => 2 * hidden,
            Payload::Fp8(_) => hidden,
        }
    }

    /// Bytes of one row's scales.
    pub fn scale_bytes(self, hidden: usize) -> usize {
        match self {
            Payload::Bf16 => 0,
            Payload::Fp8(Scale::F32 | Scale::PowerOfTwo) => hidden / BLOCK * 4,
            Payload::Fp8(Scale::Ue8m0) => hidden / BLOCK,
        }
    }
}

/// What dispatch delivers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Layout {
    /// `[local experts, ranks * max_tokens, hidden]`: per expert a dense prefix of rows, by source rank and then
    /// token.
    Expert,
    /// `[rows, hidden]`: each token that came once, by source rank and then token.
    Rank,
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Layout::Expert => "expert",
            Layout::Rank => "rank",
        })
    }
}

/// The parameters of an expert buffer; the same on every rank, which is checked when two
/// ranks connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The most ranks there will ever be at once; rank numbers are below it.
    pub ranks: u32,
    /// The most tokens a rank may send in one dispatch.
    pub max_tokens: usize,
    /// Elements of a row.
    pub hidden: usize,
    /// Experts in all; each rank has `experts / ranks` of them, in order.
    pub experts: usize,
    /// Experts per token.
    pub topk: usize,
    /// What dispatch carries.
    pub payload: Payload,
    /// The layouts that dispatch will be asked for: each costs memory.
    pub layouts: Vec<Layout>,
    /// Whether outputs of a token's experts on one rank are weighted and summed there, so that one row per token and
    /// rank comes back; otherwise one row per selection comes back and the source sums. Expert layout only.
    pub prereduce: bool,
    /// Whether ranks of one node write into each other's mapped memory; otherwise everything goes through the engine.
    pub share_node: bool,
    /// How long an operation waits for another rank before it is masked.
    pub timeout: Duration,
}

impl Config {
    /// Experts of each rank.
    pub fn local_experts(&self) -> usize {
        self.experts / self.ranks as usize
    }

    /// The most experts of one rank that one token may select.
    pub fn most_local(&self) -> usize {
        self.topk.min(self.local_experts())
    }

    /// The rank that has an expert, and its number there.
    pub fn home(&self, expert: usize) -> (usize, usize) {
        (expert / self.local_experts(), expert % self.local_experts())
    }

    /// Whether dispatch may be asked for `layout`.
    pub fn has(&self, layout: Layout) -> bool {
        self.layouts.contains(&layout)
    }

    /// Checks that rank `me` of a group has a place in such a buffer.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`].
    pub fn check_rank(&self, me: u32) -> Result<()> {
        if me < self.ranks {
            return Ok(());
        }
        let text = format!("rank {me} of the group in a buffer for {} ranks", self.ranks);
        let error = Error::new(ErrorKind::Usage, "ExpertBuffer", text);
        Err(error.with_hint("make it for as many ranks as the group may have"))
    }

    /// Checks that the numbers make sense together.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] naming the parameter and what it may be.
    pub fn check(&self) -> Result<()> {
        let ranks = self.ranks as usize;
        let wrong = |text: String| Err(Error::new(ErrorKind::Usage, "ExpertBuffer", text));
        if !(1..=MOST_RANKS).contains(&ranks) {
            return wrong(format!("ranks {ranks} is not from 1 to {MOST_RANKS}"));
        }
        if self.max_tokens == 0 || self.max_tokens > 1 << 24 {
            return wrong(format!("max_tokens_per_rank {} is not from 1 to 2^24", self.max_tokens));
        }
        if self.experts == 0 || !self.experts.is_multiple_of(ranks) {
            return wrong(format!("num_experts {} cannot be spread evenly over {ranks} ranks", self.experts));
        }
        if self.local_experts() >= usize::from(u16::MAX) || self.experts > u32::MAX as usize {
            return wrong(format!("{} experts per rank are more than 65534", self.local_experts()));
        }
        if !(1..=MOST_TOPK).contains(&self.topk) {
            return wrong(format!("topk {} is not from 1 to {MOST_TOPK}", self.topk));
        }
        if self.topk > self.experts {
            return wrong(format!("topk {} is more than num_experts {}", self.topk, self.experts));
        }
        let unit = match self.payload {
            Payload::Bf16 => 8,
            Payload::Fp8(_) => BLOCK,
        };
        if self.hidden == 0 || !self.hidden.is_multiple_of(unit) || self.hidden > 1 << 20 {
            let why =
                if unit == BLOCK { "fp8 has one scale per 128 elements" } else { "rows are moved in whole 16 bytes" };
            return wrong(format!("hidden {} is no multiple of {unit} up to 2^20: {why}", self.hidden));
        }
        if self.layouts.is_empty() {
            return wrong("layouts is empty: name \"expert\", \"rank\" or both".into());
        }
        Ok(())
    }
}
