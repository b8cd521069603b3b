//! Lanes that are dropped at any stage of what they carry.

use crate::Lane;

use super::harness::{End, HELD, PLAIN};
use super::{LARGEST, MakePair, cap};

/// Most polls of either end before one of them is dropped, and between the two.
const POLLS: u32 = 24;

/// Numbers that follow from a seed (SplitMix64).
struct Dice(u64);

impl Dice {
    /// A number below `sides`.
    fn roll(&mut self, sides: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((word ^ (word >> 31)) >> 32) as u32 % sides
    }

    fn is(&mut self) -> bool {
        self.roll(2) == 1
    }
}

/// Drops both ends of fresh pairs of connected lanes, one pair for each of `seeds`, at stages that follow from the
/// seed: idle, with frames of any size in flight either way, with a head that waits for a place, awake or armed for
/// sleep. The process must survive.
pub fn run_endings(name: &str, seeds: std::ops::Range<u64>, make_pair: MakePair<'_>) {
    for seed in seeds {
        // If the process does not survive, this line says where.
        eprintln!("{name}: seed {seed}");
        let (a, b) = make_pair();
        let mut dice = Dice(seed);
        let (a, b) = if dice.is() { (a, b) } else { (b, a) };
        ending(&format!("{name}: seed {seed}"), a, b, &mut dice);
    }
}

/// The end that is dropped first is `a`.
fn ending(label: &str, a: Box<dyn Lane>, b: Box<dyn Lane>, dice: &mut Dice) {
    let mut a = End::new(a, format!("{label}: dropped first"));
    let mut b = End::new(b, format!("{label}: dropped second"));
    for end in [&mut a, &mut b] {
        let (count, len) =
            [(0, 0), (300, 64), (40, 8 << 10), (9, 100_000), (3, 1 << 20), (1, LARGEST)][dice.roll(6) as usize];
        let len = cap(end, len);
        end.sink.hold = dice.roll(4) == 0;
        for seq in 0..count {
            end.queue(if dice.roll(8) == 0 { HELD } else { PLAIN }, seq, len);
        }
    }
    let budget = [1, 16 << 10, 1 << 20][dice.roll(3) as usize];
    for _ in 0..dice.roll(POLLS) {
        let end = if dice.is() { &mut a } else { &mut b };
        end.try_step(budget, dice.is()).unwrap_or_else(|error| panic!("{}: {error}", end.label));
    }
    if dice.is() {
        a.lane.arm();
    }
    drop(a);
    for _ in 0..dice.roll(POLLS) {
        // The lane may end here.
        if b.try_step(budget, dice.is()).is_err() {
            break;
        }
    }
    if dice.is() {
        b.lane.arm();
    }
}
