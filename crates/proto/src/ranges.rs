/// Which bytes of a transfer are there: disjoint ranges, sorted, merged.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ranges {
    parts: Vec<(u64, u64)>,
    bytes: u64,
}

impl Ranges {
    /// Bytes there.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// In how many pieces they are.
    pub(crate) fn parts(&self) -> usize {
        self.parts.len()
    }

    /// Whether all of `start..end` is there.
    pub(crate) fn covers(&self, start: u64, end: u64) -> bool {
        let after = self.parts.partition_point(|p| p.0 <= start);
        after > 0 && self.parts[after - 1].1 >= end
    }

    /// Adds `start..end` and says how many of its bytes were not there before.
    pub(crate) fn insert(&mut self, start: u64, end: u64) -> u64 {
        let first = self.parts.partition_point(|p| p.1 < start);
        let mut last = first;
        let (mut low, mut high, mut known) = (start, end, 0);
        while let Some(&(a, b)) = self.parts.get(last).filter(|p| p.0 <= end) {
            known += b.min(end).saturating_sub(a.max(start));
            low = low.min(a);
            high = high.max(b);
            last += 1;
        }
        self.parts.splice(first..last, [(low, high)]);
        let new = (end - start) - known;
        self.bytes += new;
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_order_and_overlap_counts_each_byte_once() {
        let mut state = 1u64;
        // Miri takes a hundred times as long.
        for _ in 0..if cfg!(miri) { 4 } else { 200 } {
            let mut ranges = Ranges::default();
            let mut model = [false; 97];
            for _ in 0..40 {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let start = (state >> 33) as usize % model.len();
                let end = (start + 1 + (state >> 50) as usize % 20).min(model.len());
                let covered = model[start..end].iter().all(|b| *b);
                assert_eq!(ranges.covers(start as u64, end as u64), covered);
                let new = model[start..end].iter().filter(|b| !**b).count() as u64;
                assert_eq!(ranges.insert(start as u64, end as u64), new);
                model[start..end].fill(true);
                assert_eq!(ranges.bytes(), model.iter().filter(|b| **b).count() as u64);
            }
            assert!(ranges.parts.windows(2).all(|w| w[0].1 < w[1].0), "merged and sorted: {:?}", ranges.parts);
        }
    }
}
