//! Text report of a heap's operations in flight, for debugging a hang.

use std::fmt::Write as _;

use super::{
    EP_DEPTH, EP_STAGE_ANNOUNCE, EP_STAGE_BACK_ROW, EP_STAGE_COMBINE_TAKEN, EP_STAGE_DISPATCH_TAKEN, EP_STAGE_PLACE,
    EP_STAGE_ROOM, EP_STAGE_ROW, EP_STAGE_SENT, EP_STAGE_TABLE, EP_STAGE_WEIGHTS, EpState, Shape,
};

/// The words of a line, by their number.
const WORDS: [&str; 15] = [
    "table0",
    "table1",
    "declined0",
    "declined1",
    "announce0",
    "announce1",
    "sent0",
    "sent1",
    "dispatch_taken",
    "combine_taken",
    "hello",
    "place0",
    "place1",
    "lost in dispatch",
    "lost in combine",
];

/// Name of the stage at which a rank timed out, from the number in a fault.
pub fn stage_name(stage: u32) -> &'static str {
    match stage {
        EP_STAGE_TABLE => "table",
        EP_STAGE_ROW => "row",
        EP_STAGE_WEIGHTS => "weights",
        EP_STAGE_BACK_ROW => "returned row",
        EP_STAGE_ANNOUNCE => "announcement",
        EP_STAGE_SENT => "completion word",
        EP_STAGE_DISPATCH_TAKEN => "release of the dispatch before the last",
        EP_STAGE_COMBINE_TAKEN => "release of the combine before the last",
        EP_STAGE_PLACE => "place of rows",
        EP_STAGE_ROOM => "room for rows",
        _ => "unknown stage",
    }
}

impl Shape {
    /// Summarizes a heap in a few lines: this rank's operations and blocks in flight, masks, and per source the control
    /// words and the number of flags of the newest operation. `bytes` may be a copy made while kernels run. `sources`: the
    /// rank of each inbox that has one.
    pub fn report(&self, bytes: &[u8], sources: &[Option<u32>]) -> String {
        let heap = self.heap();
        let numbers = |at: u64, count: u64| -> Vec<u64> {
            let at = at as usize..(at + 8 * count) as usize;
            let words = bytes.get(at).unwrap_or_default().as_chunks::<8>().0;
            words.iter().map(|word| u64::from_le_bytes(*word)).collect()
        };
        let mut text = String::from("state");
        let state = numbers(heap.state, size_of::<EpState>() as u64 / 8);
        let names = ["dispatch begun", "sent", "ended", "combine begun", "sent", "ended", "faults"];
        for (name, number) in names.iter().zip(&state) {
            let _ = write!(text, " {name} {number}");
        }
        for (number, count) in state.iter().enumerate().skip(names.len()).filter(|(_, count)| **count != 0) {
            let at = number - names.len();
            let kernel = if at < 8 { "dispatch" } else { "combine" };
            let _ = write!(text, "; {count} blocks of a {kernel} of phases {} are done", at % 8);
        }
        let masks = numbers(heap.masks, u64::from(self.ranks).div_ceil(2));
        let mask = |rank: u32| masks.get(rank as usize / 2).map_or(0, |pair| (pair >> (rank % 2 * 32)) as u32);
        let masked: Vec<u32> = (0..self.ranks).filter(|rank| mask(*rank) != 0).collect();
        let _ = write!(text, "; masked {masked:?}");
        let sources = (0..).zip(sources).filter_map(|(number, source)| Some((number, (*source)?)));
        for (number, source) in sources {
            let _ = write!(text, "\n    of rank {source}:");
            let line = numbers(heap.line(number).at, WORDS.len() as u64);
            for (name, number) in WORDS.iter().zip(&line).filter(|(_, number)| **number != 0) {
                let _ = write!(text, " {name} {number}");
            }
            for parity in 0..EP_DEPTH {
                let (inbox, slot) = (heap.inbox(number), u64::from(parity));
                let most = u64::from(self.max_tokens * self.pieces());
                let mut flags = |what: &str, flags: Vec<u64>| {
                    let newest = flags.iter().copied().max().unwrap_or(0);
                    let count = flags.iter().filter(|flag| **flag == newest && newest != 0).count();
                    let _ = write!(text, "; {what}{parity}: {count} of {} at {newest}", flags.len());
                };
                if self.has_slots() {
                    let at = inbox + heap.row_flags + slot * most * heap.flag_stride;
                    flags("rows", every(heap.flag_stride, numbers(at, most * heap.flag_stride / 8)));
                }
                let at = inbox + heap.back_flags + slot * heap.back_flags_slot;
                flags("back", every(heap.flag_stride, numbers(at, heap.back_flags_slot / 8)));
            }
        }
        text
    }
}

/// Of words, those that lie `stride` bytes apart.
fn every(stride: u64, words: Vec<u64>) -> Vec<u64> {
    words.into_iter().step_by(stride as usize / 8).collect()
}

#[cfg(test)]
mod tests {
    use super::super::{Payload, Tuning};
    use super::*;

    #[test]
    fn a_report_says_who_is_masked_and_what_came() {
        let shape = Shape {
            hidden: 1024,
            topk: 2,
            experts: 6,
            ranks: 3,
            max_tokens: 4,
            payload: Payload::Bf16,
            prereduce: true,
            expert_layout: true,
            rank_layout: false,
            regions: 0,
            tuning: Tuning::default(),
        };
        let heap = shape.heap();
        let mut bytes = vec![0; shape.heap_bytes() as usize];
        let mut put = |at: u64, value: u64| bytes[at as usize..][..8].copy_from_slice(&value.to_le_bytes());
        put(heap.state, 7);
        put(heap.masks, 1 << 32);
        put(heap.line(1).at, 7);
        put(heap.inbox(2) + heap.row_flags + 4 * 8, 7);
        let text = shape.report(&bytes, &[Some(0), Some(1), Some(2)]);
        assert!(text.starts_with("state dispatch begun 7 sent 0"), "{text}");
        assert!(text.contains("masked [1]") && text.contains("of rank 1: table0 7"), "{text}");
        assert!(text.lines().last().is_some_and(|line| line.contains("rows1: 1 of 4 at 7")), "{text}");
        assert!(shape.report(&[], &[]).contains("masked []"));
        let text = shape.report(&bytes, &[Some(0), Some(7), None]);
        assert!(text.contains("of rank 7: table0 7") && text.lines().count() == 3, "{text}");
    }
}
