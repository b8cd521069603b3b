//! What the blocks of a launch noted on their way.

use crossrail_kernels::ep::{
    EP_MARK_ANNOUNCED, EP_MARK_BEGUN, EP_MARK_CAME, EP_MARK_COUNTED, EP_MARK_DETAILS, EP_MARK_DONE, EP_MARK_FIRST,
    EP_MARK_HEARD, EP_MARK_OVER, EP_MARK_PLANNED, EP_MARK_SENT, EP_MARK_SUM, EP_MARK_SUMS, EP_MARKS,
};

/// In the order in which they come, mostly.
const NAMES: [(u32, &str); 13] = [
    (EP_MARK_BEGUN, "begun"),
    (EP_MARK_COUNTED, "counted"),
    (EP_MARK_ANNOUNCED, "announced"),
    (EP_MARK_HEARD, "heard"),
    (EP_MARK_PLANNED, "planned"),
    (EP_MARK_FIRST, "first row"),
    (EP_MARK_SUM, "first sum"),
    (EP_MARK_DETAILS, "details"),
    (EP_MARK_SENT, "rows"),
    (EP_MARK_SUMS, "sums"),
    (EP_MARK_DONE, "done"),
    (EP_MARK_CAME, "came"),
    (EP_MARK_OVER, "over"),
];

/// Microseconds since a rank's first block began, of all ranks' blocks.
pub(crate) struct Marks {
    name: &'static str,
    times: Vec<Vec<f64>>,
}

impl Marks {
    pub(crate) fn new(name: &'static str) -> Marks {
        Marks { name, times: vec![Vec::new(); EP_MARKS as usize] }
    }

    /// Those of a rank: u64[blocks][EP_MARKS].
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        let times: Vec<u64> = bytes.as_chunks::<8>().0.iter().map(|time| u64::from_le_bytes(*time)).collect();
        let begun = times.iter().step_by(EP_MARKS as usize).filter(|time| **time != 0).min().copied().unwrap_or(0);
        for block in times.chunks_exact(EP_MARKS as usize) {
            for (times, time) in self.times.iter_mut().zip(block).filter(|(_, time)| **time != 0) {
                times.push(time.saturating_sub(begun) as f64 / 1e3);
            }
        }
    }

    /// The first, the middle, and the last block that noted each.
    pub(crate) fn print(&self) {
        let one = |(mark, name): &(u32, &str)| {
            let mut times = self.times[*mark as usize].clone();
            times.sort_by(f64::total_cmp);
            let (first, last) = (times.first()?, times.last()?);
            let middle = times[times.len() / 2];
            Some(format!("{name} {first:.0}/{middle:.0}/{last:.0}"))
        };
        let noted: Vec<String> = NAMES.iter().filter_map(one).collect();
        println!("    us from the first block's begin, first/middle/last block, {}: {}", self.name, noted.join("  "));
    }
}
