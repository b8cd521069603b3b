//! Counting what arrives.

use super::{COUNTERS_MAX, Counter, Imm, PIECES_MAX};

const WORDS: usize = PIECES_MAX as usize / 64;

/// The counters of one end, for checking the peer's immediates.
#[derive(Debug, Default)]
pub struct Counters(Vec<u16>);

impl Counters {
    /// A new one, with pieces below `pieces`; `None`: there is none left, or `pieces` is out of range.
    pub fn open(&mut self, pieces: u16) -> Option<Counter> {
        let number = u32::try_from(self.0.len()).ok().filter(|number| *number < COUNTERS_MAX)?;
        if !(1..=PIECES_MAX).contains(&pieces) {
            return None;
        }
        self.0.push(pieces);
        Some(Counter(number))
    }

    /// Checks an immediate that the peer has sent.
    ///
    /// # Errors
    /// What is wrong with it.
    #[inline]
    pub fn check(&self, imm: Imm) -> Result<(), String> {
        match self.0.get(imm.counter.0 as usize) {
            Some(pieces) if imm.piece < *pieces => Ok(()),
            Some(pieces) => Err(format!("{imm}, which has {pieces}")),
            None => Err(format!("{imm}, of which there are {}", self.0.len())),
        }
    }
}

/// One bit for each piece of each counter.
#[derive(Debug, Default)]
struct Bits(Vec<Option<Box<[u64; WORDS]>>>);

impl Bits {
    /// Inverts a bit; its value then. `None`: not a valid immediate.
    fn flip(&mut self, imm: Imm) -> Option<bool> {
        let (word, bit) = self.at(imm)?;
        *word ^= bit;
        Some(*word & bit != 0)
    }

    /// The word of a bit, and the bit. Allocates at the first use of a counter.
    fn at(&mut self, imm: Imm) -> Option<(&mut u64, u64)> {
        if !imm.is_valid() {
            return None;
        }
        let (counter, piece) = (imm.counter.0 as usize, usize::from(imm.piece));
        if self.0.len() <= counter {
            self.0.resize_with(counter + 1, || None);
        }
        let words = self.0[counter].get_or_insert_with(|| Box::new([0; WORDS]));
        Some((&mut words[piece / 64], 1 << (piece % 64)))
    }
}

/// The sender's half of dropping duplicates: the bit that goes with each use of a piece, and differs from that of the
/// use before it.
#[derive(Debug, Default)]
pub struct Toggles(Bits);

impl Toggles {
    /// The mark of the next write that counts as `imm`, which must be valid.
    pub fn next(&mut self, imm: Imm) -> u8 {
        u8::from(self.0.flip(imm).unwrap_or(false))
    }
}

/// The receiver's half of dropping duplicates: the last mark of each piece.
///
/// An immediate that a device delivers twice has the mark of the previous delivery. This holds as long as a duplicate never
/// arrives after the next use of its piece, which begins once the first has arrived.
#[derive(Debug, Default)]
pub struct Seen(Bits);

impl Seen {
    /// True if an immediate, which must be valid, is new.
    pub fn is_new(&mut self, imm: Imm, mark: u8) -> bool {
        let Some((word, bit)) = self.0.at(imm) else { return false };
        let is_new = (*word & bit != 0) != (mark & 1 != 0);
        if is_new {
            *word ^= bit;
        }
        is_new
    }
}

/// Counts the distinct pieces of one counter, for a receiver that knows how many to expect, in rounds.
#[derive(Debug)]
pub struct Expected {
    expected: u16,
    arrived: u16,
    pieces: Box<[u64; WORDS]>,
}

impl Expected {
    /// `expected` distinct pieces, at most [`PIECES_MAX`], are a round.
    pub fn new(expected: u16) -> Expected {
        Expected { expected: expected.min(PIECES_MAX), arrived: 0, pieces: Box::new([0; WORDS]) }
    }

    /// A piece has arrived. True: it was the last of its round, and the next round begins.
    pub fn arrived(&mut self, piece: u16) -> bool {
        let Some(word) = self.pieces.get_mut(usize::from(piece) / 64) else { return false };
        let bit = 1 << (piece % 64);
        if *word & bit != 0 {
            return false;
        }
        *word |= bit;
        self.arrived += 1;
        if self.arrived < self.expected {
            return false;
        }
        (self.arrived, *self.pieces) = (0, [0; WORDS]);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn imm(counter: u32, piece: u16) -> Imm {
        Imm { counter: Counter(counter), piece }
    }

    #[test]
    fn only_pieces_of_open_counters_may_arrive() {
        let mut counters = Counters::default();
        assert!(counters.check(imm(0, 0)).is_err());
        assert_eq!(counters.open(3), Some(Counter(0)));
        assert_eq!(counters.open(PIECES_MAX), Some(Counter(1)));
        assert!(counters.open(0).is_none() && counters.open(PIECES_MAX + 1).is_none());
        assert!(counters.check(imm(0, 2)).is_ok() && counters.check(imm(1, 4095)).is_ok());
        assert!(counters.check(imm(0, 3)).unwrap_err().contains("which has 3"));
        assert!(counters.check(imm(2, 0)).unwrap_err().contains("there are 2"));
    }

    #[test]
    fn a_duplicate_is_dropped_and_a_further_use_is_not() {
        let (mut toggles, mut seen) = (Toggles::default(), Seen::default());
        for _ in 0..5 {
            for piece in [0, 63, 64, 4095] {
                let one = imm(7, piece);
                let mark = toggles.next(one);
                assert!(seen.is_new(one, mark) && !seen.is_new(one, mark) && !seen.is_new(one, mark));
            }
        }
        assert!(!seen.is_new(imm(COUNTERS_MAX, 0), 1), "no such counter");
    }

    #[test]
    fn a_round_has_distinct_pieces() {
        let mut round = Expected::new(3);
        for _ in 0..4 {
            assert!(!round.arrived(9) && !round.arrived(9) && !round.arrived(4000));
            assert!(!round.arrived(4000) && round.arrived(0));
        }
        assert!(!round.arrived(u16::MAX), "no piece");
    }
}
