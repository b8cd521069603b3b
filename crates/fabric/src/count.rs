//! Counting the parts of writes that arrive in several.

use crate::wire::{PARTS_MAX, PEER_WRITES};

const WORDS: usize = PARTS_MAX as usize / 64 + 1;

/// A write whose parts are all in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Whole {
    /// What it counts as; `None`: its sender has stopped it.
    pub(crate) imm: Option<u32>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    /// The turn whose parts arrive, or arrived last.
    turn: u8,
    begun: bool,
    count: u16,
    bits: [u64; WORDS],
    /// Number of parts, and what they count as.
    expected: Option<(u16, Option<u32>)>,
}

/// The peer's slots. A part counts once, however often its immediate is delivered.
#[derive(Debug)]
pub(crate) struct Parts(Box<[Slot]>);

impl Default for Parts {
    fn default() -> Parts {
        Parts(vec![Slot::default(); PEER_WRITES].into())
    }
}

impl Parts {
    /// A part has arrived.
    ///
    /// # Errors
    /// What no peer does.
    pub(crate) fn arrived(&mut self, slot: u16, turn: u8, part: u16) -> Result<Option<Whole>, String> {
        if part >= PARTS_MAX {
            return Err(format!("part {part} of a write"));
        }
        let Some(entry) = self.entry(slot, turn)? else { return Ok(None) };
        let (word, bit) = (usize::from(part) / 64, 1 << (part % 64));
        if entry.bits[word] & bit == 0 {
            entry.bits[word] |= bit;
            entry.count += 1;
        }
        entry.finish()
    }

    /// The peer has posted `parts` parts under that turn, and no others follow.
    ///
    /// # Errors
    /// What no peer does.
    pub(crate) fn expect(
        &mut self,
        (slot, turn): (u16, u8),
        parts: u16,
        imm: Option<u32>,
    ) -> Result<Option<Whole>, String> {
        let Some(entry) = self.entry(slot, turn)?.filter(|entry| entry.expected.is_none()) else {
            return Err(format!("it announced write {turn} of slot {slot} again"));
        };
        entry.expected = Some((parts, imm));
        entry.finish()
    }

    /// The slot in that turn; `None`: that turn is over.
    fn entry(&mut self, slot: u16, turn: u8) -> Result<Option<&mut Slot>, String> {
        let Some(entry) = self.0.get_mut(usize::from(slot)) else { return Err(format!("slot {slot} of its writes")) };
        match turn.wrapping_sub(entry.turn) {
            0 => Ok(entry.begun.then_some(entry)),
            1 if !entry.begun => {
                *entry = Slot { turn, begun: true, ..Slot::default() };
                Ok(Some(entry))
            }
            128.. => Ok(None),
            _ => Err(format!("turn {turn} of slot {slot} during turn {}", entry.turn)),
        }
    }
}

impl Slot {
    fn finish(&mut self) -> Result<Option<Whole>, String> {
        let Some((parts, imm)) = self.expected else { return Ok(None) };
        // The highest bit that is set must be below.
        let beyond = (usize::from(parts)..WORDS * 64).any(|part| self.bits[part / 64] & 1 << (part % 64) != 0);
        if beyond {
            return Err(format!("more than {parts} parts of a write"));
        }
        if self.count < parts {
            return Ok(None);
        }
        self.begun = false;
        Ok(Some(Whole { imm }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_count_once_in_any_order() {
        let mut parts = Parts::default();
        for (turn, imm) in [(1, 5), (2, 6)] {
            for part in [2, 0, 2, 0] {
                assert_eq!(parts.arrived(3, turn, part), Ok(None));
            }
            assert_eq!(parts.expect((3, turn), 3, Some(imm)), Ok(None));
            assert_eq!(parts.arrived(3, turn, 1), Ok(Some(Whole { imm: Some(imm) })));
            assert_eq!(parts.arrived(3, turn, 1), Ok(None), "a duplicate");
        }
        assert_eq!(parts.arrived(3, 1, 1), Ok(None), "a late duplicate");
    }

    #[test]
    fn turns_follow_each_other_for_ever() {
        let mut parts = Parts::default();
        for turn in 1..1000u32 {
            let turn = turn as u8;
            assert_eq!(parts.expect((0, turn), 1, None), Ok(None));
            assert_eq!(parts.arrived(0, turn, 0), Ok(Some(Whole { imm: None })));
        }
        assert_eq!(parts.expect((1, 1), 0, None), Ok(Some(Whole { imm: None })), "stopped before its first part");
    }

    #[test]
    fn what_no_peer_does_is_refused() {
        let mut parts = Parts::default();
        assert!(parts.arrived(0, 2, 0).is_err(), "turn 1 is first");
        assert!(parts.arrived(512, 1, 0).is_err() && parts.arrived(0, 1, PARTS_MAX).is_err());
        assert_eq!(parts.arrived(0, 1, 5), Ok(None));
        assert!(parts.arrived(0, 2, 0).is_err(), "turn 1 is not over");
        assert!(parts.expect((0, 1), 5, None).unwrap_err().contains("more than 5"));
        assert!(parts.expect((0, 1), 6, None).unwrap_err().contains("again"));
    }
}
