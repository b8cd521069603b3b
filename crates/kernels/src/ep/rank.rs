//! How a block's shared memory is divided in the rank layout.

use std::mem::size_of;

use super::Shape;

/// Bytes of shared memory that a block can have where there are bulk copies; and what it makes use of elsewhere.
const SHARED: u32 = 227 << 10;
const SHARED_PLAIN: u32 = 96 << 10;
/// The most stages of a block.
const MOST_STAGES: u32 = 24;
/// Stages that keep one warp's copies under way.
const STAGES_PER_MOVER: u32 = 6;
/// Of a warp that sends in a combine: the most batches of rows reported whose flags are not set yet, and rows of a batch.
const BATCHES: u32 = 4;
const BATCH_ROWS: u32 = 16;
/// The most warps that send in a combine.
const MOST_SENDERS: u32 = 2;
/// The most experts whose selections a block counts in shared memory.
const HISTOGRAM: u32 = 4096;

/// What a block of a kernel has of shared memory: stages, and what its threads know in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Division {
    stages: u32,
    movers: u32,
    common: u32,
    bytes: u32,
}

impl Division {
    fn of(stage: u32, common: u32, most: u32, movers: u32) -> Division {
        let stages = ((most - common) / stage).min(MOST_STAGES);
        let movers = (stages / STAGES_PER_MOVER).clamp(1, movers);
        Division { stages, movers, common, bytes: stages * stage + common }
    }
}

impl Shape {
    /// Threads of a block in the rank layout.
    pub fn rank_threads(&self) -> u32 {
        self.tuning().rank_threads
    }

    fn dispatch_division(&self, bulk: bool) -> Division {
        let (ranks, warps) = (self.ranks, self.rank_threads() / 32);
        let words = MOST_STAGES * 2 + ranks * 3 + warps * 32;
        let scan = ranks * 3 + warps * ranks + if self.experts <= HISTOGRAM { self.experts } else { 1 } + 1;
        let stage = (self.row_bytes() + self.scale_bytes()).next_multiple_of(128);
        let common = ((words + scan) * size_of::<u32>() as u32 + 16).next_multiple_of(128);
        Division::of(stage, common, if bulk { SHARED } else { SHARED_PLAIN }, self.tuning().rank_movers)
    }

    fn combine_division(&self, bulk: bool) -> Division {
        let words = MOST_STAGES * 2 + MOST_SENDERS * BATCHES * (BATCH_ROWS * 2 + 5) + self.ranks * 3 + 2;
        let common = (words * size_of::<u32>() as u32 + 16).next_multiple_of(128);
        if !bulk {
            return Division { stages: 0, movers: 0, common, bytes: common };
        }
        Division::of(
            (2 * self.hidden).next_multiple_of(128),
            common,
            SHARED,
            self.tuning().rank_movers.min(MOST_SENDERS),
        )
    }

    /// Bytes of shared memory of a block that dispatches in the rank layout, and of one that combines.
    pub fn rank_shared(&self, bulk: bool) -> [u32; 2] {
        [self.dispatch_division(bulk).bytes, self.combine_division(bulk).bytes]
    }

    /// The options that make the compiler compile the rank layout's kernels for this shape.
    pub fn rank_defines(&self, bulk: bool) -> Vec<String> {
        let (dispatch, combine) = (self.dispatch_division(bulk), self.combine_division(bulk));
        let numbers = [
            ("THREADS", self.rank_threads()),
            ("HISTOGRAM", if self.experts <= HISTOGRAM { self.experts } else { 0 }),
            ("DISPATCH_STAGES", dispatch.stages),
            ("DISPATCH_MOVERS", dispatch.movers),
            ("DISPATCH_COMMON", dispatch.common),
            ("COMBINE_STAGES", combine.stages),
            ("COMBINE_MOVERS", combine.movers),
            ("COMBINE_COMMON", combine.common),
            ("BATCHES", BATCHES),
            ("BATCH_ROWS", BATCH_ROWS),
        ];
        let mut defines = self.defines(bulk);
        defines.retain(|define| !define.starts_with("-DEP_THREADS="));
        defines.extend(numbers.iter().map(|(name, value)| format!("-DEP_{name}={value}")));
        defines
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ep::{Payload, Scale, Tuning};

    const PREFILL: Shape = Shape {
        hidden: 7168,
        topk: 8,
        experts: 256,
        ranks: 4,
        max_tokens: 4096,
        payload: Payload::Fp8(Scale::F32),
        prereduce: false,
        expert_layout: false,
        rank_layout: true,
        regions: 2,
        tuning: Tuning::USUAL,
    };

    #[test]
    fn blocks_fit_and_keep_copies_under_way() {
        for hidden in [128, 2048, 7168, 16384] {
            for payload in [Payload::Bf16, Payload::Fp8(Scale::Ue8m0), Payload::Fp8(Scale::F32)] {
                for (ranks, experts) in [(4, 256), (64, 65_536)] {
                    let shape = Shape { hidden, payload, ranks, experts, ..PREFILL };
                    for bulk in [true, false] {
                        let [dispatch, combine] = shape.rank_shared(bulk);
                        let most = if bulk { SHARED } else { SHARED_PLAIN };
                        assert!(dispatch <= most && combine <= most, "{shape:?}");
                        let Division { stages, movers, .. } = shape.dispatch_division(bulk);
                        assert!(stages >= 2 && movers >= 1 && stages / movers >= 2, "{shape:?}");
                    }
                    let Division { stages, movers, .. } = shape.combine_division(true);
                    assert!(stages / movers >= 3, "{shape:?}");
                }
            }
        }
        assert_eq!(PREFILL.dispatch_division(true).stages, 24);
        assert_eq!(PREFILL.combine_division(true).stages, 16);
    }
}
