//! The configuration of an expert buffer.

use std::fmt;
use std::time::Duration;

use crossrail_types::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

/// Number of elements that share one scale in fp8 rows.
pub const BLOCK: usize = 128;
/// Maximum number of ranks of a buffer.
pub const MOST_RANKS: usize = 1024;
/// Maximum number of experts that a token selects.
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

/// The format of dispatched rows. Combine carries bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Payload {
    /// bf16, unchanged.
    Bf16,
    /// fp8 e4m3 in blocks of [`BLOCK`] elements with one scale each.
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

/// How dispatch arranges the received rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Layout {
    /// `[local experts, ranks * max_tokens, hidden]`: a dense prefix of rows for each expert, ordered by source rank and
    /// then token.
    Expert,
    /// `[rows, hidden]`: each received token once, ordered by source rank and then token.
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

/// What an operation does when a rank is lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum OnLoss {
    /// It fails with an error that names the rank, on every rank, until the caller masks or disconnects the rank.
    #[default]
    Raise,
    /// It continues without the rank, which stays masked. The result lists the rank as missing.
    Mask,
}

impl fmt::Display for OnLoss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            OnLoss::Raise => "raise",
            OnLoss::Mask => "mask",
        })
    }
}

/// The parameters of an expert buffer. They must be equal on every rank, which is checked when two ranks connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Maximum number of ranks at once; rank numbers are below it.
    pub ranks: u32,
    /// Maximum number of tokens that a rank sends in one dispatch.
    pub max_tokens: usize,
    /// Elements of a row.
    pub hidden: usize,
    /// Total number of experts; each rank has `experts / ranks` of them, in order.
    pub experts: usize,
    /// Experts per token.
    pub topk: usize,
    /// The format of dispatched rows.
    pub payload: Payload,
    /// The layouts that dispatch may use; each costs memory.
    pub layouts: Vec<Layout>,
    /// Whether the outputs of a token's experts on one rank are weighted and summed there, so that one row per token and
    /// rank is returned; otherwise one row per selection is returned and the source sums them. Expert layout only.
    pub prereduce: bool,
    /// Whether ranks of one node write into each other's mapped memory; otherwise all writes go through the engine.
    pub share_node: bool,
    /// How long an operation waits for another rank before that rank counts as lost.
    pub timeout: Duration,
    /// What an operation does when a rank is lost.
    pub on_loss: OnLoss,
}

impl Config {
    /// Number of experts on each rank.
    pub fn local_experts(&self) -> usize {
        self.experts / self.ranks as usize
    }

    /// Maximum number of experts of one rank that a token may select.
    pub fn most_local(&self) -> usize {
        self.topk.min(self.local_experts())
    }

    /// The rank of an expert, and its local number there.
    pub fn home(&self, expert: usize) -> (usize, usize) {
        (expert / self.local_experts(), expert % self.local_experts())
    }

    /// Whether dispatch may use `layout`.
    pub fn has(&self, layout: Layout) -> bool {
        self.layouts.contains(&layout)
    }

    /// Checks that rank `me` is below [`Config::ranks`].
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

    /// Checks the parameters.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] naming the parameter and its limits.
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
            return wrong(format!("hidden {} is not a multiple of {unit} up to 2^20: {why}", self.hidden));
        }
        if self.layouts.is_empty() {
            return wrong("layouts is empty: name \"expert\", \"rank\" or both".into());
        }
        Ok(())
    }
}
