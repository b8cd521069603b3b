//! Random numbers that a seed decides.

/// Pseudo-random numbers that a test can repeat.
pub struct Numbers(pub u64);

impl Numbers {
    /// Any number.
    pub fn any(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// Less than `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.any()) * u128::from(limit)) >> 64) as u64
    }

    /// Bytes with any values.
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..count.div_ceil(8)).flat_map(|_| self.any().to_le_bytes()).collect();
        bytes.truncate(count);
        bytes
    }

    /// True once in `of`.
    pub fn once_in(&mut self, of: u64) -> bool {
        self.below(of) == 0
    }
}
