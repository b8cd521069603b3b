/// SplitMix64: the same numbers for the same seed, everywhere and always.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// From a seed.
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`, which must not be 0.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.bits() % bound as u64) as usize
    }

    /// `bytes` changed in one to four places: bits flipped, bytes replaced, numbers made extreme or moved a little,
    /// pieces removed, doubled, or taken from `other`.
    pub fn mutate(&mut self, bytes: &[u8], other: &[u8]) -> Vec<u8> {
        let mut bytes = bytes.to_vec();
        for _ in 0..=self.below(4) {
            self.mutate_once(&mut bytes, other);
        }
        bytes.truncate(64 * 1024);
        bytes
    }

    fn mutate_once(&mut self, bytes: &mut Vec<u8>, other: &[u8]) {
        if bytes.is_empty() {
            bytes.push(self.bits() as u8);
            return;
        }
        let at = self.below(bytes.len());
        let len = self.below(32.min(bytes.len() - at)) + 1;
        match self.below(16) {
            0 | 1 => bytes[at] ^= 1 << self.below(8),
            2 => bytes[at] = self.bits() as u8,
            3 | 4 => {
                let number = [0, 1, 0x7f, 0x80, 0xff, u64::MAX, u64::MAX >> 1, 1 << 63, 1 << 31, 0xffff_ffff, 0xffff];
                let number = number[self.below(number.len())].to_le_bytes();
                let width = [1, 2, 4, 8][self.below(4)].min(bytes.len() - at);
                bytes[at..at + width].copy_from_slice(&number[..width]);
            }
            5..=8 => {
                let width = [1, 2, 4, 8][self.below(4)].min(bytes.len() - at);
                let mut number = [0; 8];
                number[..width].copy_from_slice(&bytes[at..at + width]);
                let step = self.below(9) as u64;
                let moved = u64::from_le_bytes(number).wrapping_add(step).wrapping_sub(4).to_le_bytes();
                bytes[at..at + width].copy_from_slice(&moved[..width]);
            }
            9 | 10 => drop(bytes.drain(at..at + len)),
            11 | 12 => {
                let piece = bytes[at..at + len].to_vec();
                let to = self.below(bytes.len() + 1);
                bytes.splice(to..to, piece);
            }
            13 => bytes.truncate(at),
            14 if !other.is_empty() => {
                let from = self.below(other.len());
                let piece = &other[from..(from + 1 + self.below(96)).min(other.len())];
                bytes.splice(at..at, piece.iter().copied());
            }
            _ => {
                let random: Vec<u8> = (0..len).map(|_| self.bits() as u8).collect();
                bytes.splice(at..at, random);
            }
        }
    }
}
