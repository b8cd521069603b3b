//! Forwarding to ranks whose heaps this GPU cannot map: the ranges of a local mirror to be written to the heap itself.
//!
//! A launch with such ranks runs one phase. The table of heaps has local mirrors in their place, GPU memory with the
//! layout of a heap. After the launch, [`Shape::dispatched`] or [`Shape::combined`] return the ranges to write to the
//! same offsets of the rank's heap, and [`Shape::weights`] those to write before a combine. The order matters, since
//! the rank's kernels read rows as soon as they see a flag: first `rows`, then `told`, then `line`, each complete
//! before the next. A mirror keeps everything that was ever sent, so writing more than is new is harmless.

use std::mem::offset_of;

use crossrail_types::Result;

use super::{
    EP_ANNOUNCE, EP_DEPTH, EP_NOWHERE, EP_SEND, EP_WEIGHTED, EP_WORD_PLACE, EpCombineArgs, EpCommon, EpDispatchArgs,
    EpState, Layout, Shape,
};

/// A range of a heap, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// From the start of the heap.
    pub at: u64,
    /// How many.
    pub len: u64,
}

/// What is to be written from a mirror to its heap after a launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Load {
    /// Rows and their metadata.
    pub rows: Vec<Span>,
    /// Flags that announce the rows, tables and row positions.
    pub told: Vec<Span>,
    /// The control words of this rank.
    pub line: Span,
}

/// Reads memory of the GPU that kernels are done with.
pub trait Look {
    /// Copies from `address` into `bytes`.
    ///
    /// # Errors
    /// Errors of the copy.
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<()>;
}

/// A rank whose heap this GPU cannot map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct There {
    /// Its number.
    pub rank: u32,
    /// Where the mirror of its heap is, on this GPU.
    pub mirror: u64,
}

impl Shape {
    /// Ranges that a single-phase dispatch launch wrote for an unreachable rank. Call it after the launch has
    /// completed; `look` reads GPU memory.
    ///
    /// # Errors
    /// Those of `look`.
    pub fn dispatched(&self, layout: Layout, args: &EpDispatchArgs, to: There, look: &impl Look) -> Result<Load> {
        let seen = Seen::new(self, &args.common, look);
        let (rows, told) = match (layout, args.common.phases) {
            (Layout::Rank, EP_SEND) if self.slotted() => seen.slot_rows(to)?,
            (Layout::Rank, _) if self.slotted() => Default::default(),
            (Layout::Rank, EP_ANNOUNCE) => (Vec::new(), vec![seen.announcement()?]),
            (Layout::Rank, EP_SEND) => (seen.rank_rows(to)?, vec![seen.places()]),
            (Layout::Expert, EP_SEND) => seen.expert_rows(to)?,
            _ => Default::default(),
        };
        Ok(Load { rows, told, line: seen.line() })
    }

    /// Ranges that a single-phase combine launch wrote for an unreachable rank.
    ///
    /// # Errors
    /// Those of `look`.
    pub fn combined(&self, layout: Layout, args: &EpCombineArgs, to: There, look: &impl Look) -> Result<Load> {
        let seen = Seen::new(self, &args.common, look);
        let (rows, told) = match (layout, args.common.phases) {
            (Layout::Rank, EP_SEND) if self.slotted() => seen.slot_back(to)?,
            (Layout::Rank, EP_SEND) => seen.rank_back(to, args.y_weights != 0)?,
            (Layout::Expert, EP_SEND) => seen.expert_back(to, if self.prereduce { 1 } else { self.most_local() })?,
            _ => Default::default(),
        };
        Ok(Load { rows, told, line: seen.line() })
    }

    /// Weights of an expert-layout combine, and the range for them. Ranks wait for them before they return rows, so
    /// they must be written to the mirrors and heaps of all unreachable ranks before the launch that sends. `None`: no
    /// rank waits for weights.
    ///
    /// # Errors
    /// Those of `look`.
    pub fn weights(&self, args: &EpCombineArgs, look: &impl Look) -> Result<Option<(Span, Vec<u8>)>> {
        let (common, seen) = (&args.common, Seen::new(self, &args.common, look));
        // Number, tokens, flags.
        if !self.prereduce || seen.numbers(common.handle + common.parts.header, 4)?[3] & EP_WEIGHTED != 0 {
            return Ok(None);
        }
        let count = u64::from(common.tokens) * u64::from(self.topk);
        let weights = match args.topk_weights {
            0 => vec![1f32.to_bits(); count as usize],
            given => seen.numbers(given, count)?,
        };
        let epoch = seen.word(offset_of!(EpState, combine_sent))? + 1;
        let words: Vec<u8> =
            weights.iter().flat_map(|bits| (tag(epoch) << 32 | u64::from(*bits)).to_le_bytes()).collect();
        let at = seen.mine() + common.heap.back_weights + parity(epoch) * common.heap.back_weights_stride;
        Ok(Some((Span { at, len: words.len() as u64 }, words)))
    }
}

/// A completed launch, and access to its memory.
struct Seen<'a, L> {
    shape: &'a Shape,
    common: &'a EpCommon,
    look: &'a L,
}

impl<'a, L: Look> Seen<'a, L> {
    fn new(shape: &'a Shape, common: &'a EpCommon, look: &'a L) -> Self {
        Seen { shape, common, look }
    }

    fn numbers(&self, address: u64, count: u64) -> Result<Vec<u32>> {
        let mut bytes = vec![0; 4 * count as usize];
        self.look.read(address, &mut bytes)?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect())
    }

    /// A word of this rank's state.
    fn word(&self, offset: usize) -> Result<u64> {
        let mut bytes = [0; 8];
        self.look.read(self.common.base + self.common.heap.state + offset as u64, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// This rank's inbox in another's heap.
    fn mine(&self) -> u64 {
        self.common.heap.inbox(self.common.rank)
    }

    fn line(&self) -> Span {
        self.common.heap.line(self.common.rank)
    }

    /// Row positions of both parities. A rank reads them once the completion word of the same line is set.
    fn places(&self) -> Span {
        Span { at: self.line().at + 8 * u64::from(EP_WORD_PLACE), len: 8 * u64::from(EP_DEPTH) }
    }

    fn announcement(&self) -> Result<Span> {
        let slot = parity(self.word(offset_of!(EpState, dispatch_begun))?);
        let heap = &self.common.heap;
        Ok(Span { at: self.mine() + heap.announces + slot * heap.announce_stride, len: heap.announce_stride })
    }

    fn expert_rows(&self, to: There) -> Result<(Vec<Span>, Vec<Span>)> {
        let (heap, tokens) = (&self.common.heap, u64::from(self.common.tokens));
        let slot = parity(self.word(offset_of!(EpState, dispatch_sent))?);
        let table = self.mine() + heap.tables + slot * heap.table_stride;
        let topk = u64::from(self.shape.topk);
        // Each selection's expert there, and the number of the dispatch.
        let words = self.numbers(to.mirror + table, 2 * tokens * topk)?;
        let here =
            words.chunks_exact(2 * topk as usize).map(|words| words.iter().step_by(2).any(|expert| *expert != 0));
        Ok(self.slots(slot, runs(here)))
    }

    /// Rows sent to slots in the rank layout. The handle holds the experts of this rank's tokens, also for a reused
    /// routing.
    fn slot_rows(&self, to: There) -> Result<(Vec<Span>, Vec<Span>)> {
        let (common, topk, local) = (self.common, self.shape.topk, self.shape.local_experts());
        let slot = parity(self.word(offset_of!(EpState, dispatch_sent))?);
        let experts = self.numbers(common.handle + common.parts.sent, u64::from(common.tokens) * u64::from(topk))?;
        let here = experts.chunks_exact(topk as usize);
        Ok(self.slots(slot, runs(here.map(|experts| experts.iter().any(|expert| expert / local == to.rank)))))
    }

    /// These rows of a slot, with what belongs to all.
    fn slots(&self, slot: u64, wanted: Vec<Span>) -> (Vec<Span>, Vec<Span>) {
        let (heap, tokens) = (&self.common.heap, u64::from(self.common.tokens));
        let table = self.mine() + heap.tables + slot * heap.table_stride;
        let first = slot * u64::from(self.common.max_tokens);
        let flags = u64::from(self.shape.pieces()) * 8;
        let told = vec![
            Span { at: table, len: heap.table_stride },
            Span { at: self.mine() + heap.row_flags + first * flags, len: tokens * flags },
        ];
        (scaled(wanted, self.mine() + heap.rows + first * heap.row_stride, heap.row_stride), told)
    }

    fn rank_rows(&self, to: There) -> Result<Vec<Span>> {
        let (common, shape, ranks) = (self.common, self.shape, u64::from(self.shape.ranks));
        let heap = &common.heap;
        let placed = self.numbers(common.handle + common.parts.sent_rows, u64::from(common.tokens) * ranks)?;
        let theirs = placed.iter().skip(to.rank as usize).step_by(ranks as usize);
        let count = theirs.filter(|row| **row != EP_NOWHERE).count() as u64;
        // Rows are numbered from this rank's first there.
        let first = u64::from(self.numbers(common.handle + common.parts.places + 4 * u64::from(to.rank), 1)?[0]);
        let slot = parity(self.word(offset_of!(EpState, dispatch_sent))?);
        // An announcement begins with the number of the region.
        let region = self.numbers(common.base + heap.inbox(to.rank) + heap.announces + slot * heap.announce_stride, 1)?[0];
        if region >= shape.regions {
            // The rank timed out; nothing was sent to it.
            return Ok(Vec::new());
        }
        let start = heap.regions + u64::from(region) * heap.region_stride;
        let topk = u64::from(shape.topk);
        let parts = [
            (0, u64::from(shape.row_bytes())),
            (heap.region_scales, u64::from(shape.scale_bytes())),
            (heap.region_idx, 8 * topk),
            (heap.region_weights, 4 * topk),
            (heap.region_source, 4),
        ];
        Ok(parts.map(|(at, len)| Span { at: start + at + first * len, len: count * len }).to_vec())
    }

    /// With up to `each` rows of a token.
    fn expert_back(&self, to: There, each: u32) -> Result<(Vec<Span>, Vec<Span>)> {
        let common = self.common;
        let tokens = self.numbers(common.handle + common.parts.tokens + 4 * u64::from(to.rank), 1)?[0];
        let mut counts = vec![0; tokens.min(common.max_tokens) as usize];
        let present = common.parts.present + u64::from(to.rank) * u64::from(common.max_tokens);
        self.look.read(common.handle + present, &mut counts)?;
        let here = counts.iter().flat_map(|count| (0..each).map(move |which| which < u32::from(*count).min(each)));
        self.back(runs(here), self.shape.pieces())
    }

    /// What went back from slots in the rank layout: rows as in the expert layout with a sum for each token, and weights.
    fn slot_back(&self, to: There) -> Result<(Vec<Span>, Vec<Span>)> {
        let heap = &self.common.heap;
        let (rows, mut told) = self.expert_back(to, 1)?;
        let slot = parity(self.word(offset_of!(EpState, combine_sent))?);
        let stride = heap.back_weights_stride;
        told.insert(0, Span { at: self.mine() + heap.back_weights + slot * stride, len: stride });
        Ok((rows, told))
    }

    fn rank_back(&self, to: There, weighted: bool) -> Result<(Vec<Span>, Vec<Span>)> {
        let (common, heap) = (self.common, &self.common.heap);
        let offsets = self.numbers(common.handle + common.parts.offsets + 4 * u64::from(to.rank), 2)?;
        let count = u64::from(offsets[1].saturating_sub(offsets[0]));
        let source = common.handle + common.parts.source + 4 * u64::from(offsets[0]);
        let mut here = vec![false; common.max_tokens as usize];
        for token in self.numbers(source, count)? {
            if let Some(here) = here.get_mut(token as usize) {
                *here = true;
            }
        }
        let wanted = runs(here.into_iter());
        let (mut rows, told) = self.back(wanted.clone(), 1)?;
        if weighted {
            let row = u64::from(self.shape.topk) * 4;
            let slot = parity(self.word(offset_of!(EpState, combine_sent))?) * u64::from(common.max_tokens);
            rows.extend(scaled(wanted, self.mine() + heap.back_topk + slot * row, row));
        }
        Ok((rows, told))
    }

    /// These rows of a combine's slot, and their flags, of which each has so many.
    fn back(&self, wanted: Vec<Span>, flags: u32) -> Result<(Vec<Span>, Vec<Span>)> {
        let heap = &self.common.heap;
        let slot = parity(self.word(offset_of!(EpState, combine_sent))?);
        let told = scaled(wanted.clone(), self.mine() + heap.back_flags + slot * heap.back_flags_slot, u64::from(flags) * 8);
        Ok((scaled(wanted, self.mine() + heap.back + slot * heap.back_slot, heap.back_stride), told))
    }
}

/// Runs of rows as bytes: rows of `stride` bytes from `start` on.
fn scaled(runs: Vec<Span>, start: u64, stride: u64) -> Vec<Span> {
    runs.into_iter().map(|run| Span { at: start + run.at * stride, len: run.len * stride }).collect()
}

/// Runs of neighbours that are wanted.
fn runs(wanted: impl Iterator<Item = bool>) -> Vec<Span> {
    let mut runs: Vec<Span> = Vec::new();
    for (at, _) in wanted.enumerate().filter(|(_, wanted)| *wanted) {
        let at = at as u64;
        match runs.last_mut() {
            Some(run) if run.at + run.len == at => run.len += 1,
            _ => runs.push(Span { at, len: 1 }),
        }
    }
    runs
}

fn parity(epoch: u64) -> u64 {
    epoch % u64::from(EP_DEPTH)
}

/// The tag of words of an epoch, as `tag_of` in ep_common.cuh: its low half, and never 0.
fn tag(epoch: u64) -> u64 {
    match epoch & 0xffff_ffff {
        0 => 0x8000_0000,
        low => low,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_carried_together() {
        let of = |text: &str| runs(text.chars().map(|c| c == 'x'));
        let span = |at, len| Span { at, len };
        assert_eq!(of(""), []);
        assert_eq!(of("..."), []);
        assert_eq!(of("xx.x...xxx"), [span(0, 2), span(3, 1), span(7, 3)]);
        assert_eq!(scaled(of("xx.x"), 100, 8), [span(100, 16), span(124, 8)]);
    }
}
