//! The two halves of a ring of slots: the sender's, with its credit, and the receiver's.

use crate::wire::widen;

/// One ring of slots in the peer's inbox, and the staging memory of its frames.
pub(super) struct Ring {
    pub(super) base: usize,
    pub(super) size: usize,
    pub(super) posted: u32,
    /// Taken by the peer, as its credits state.
    pub(super) taken: u32,
    pub(super) busy: Vec<bool>,
}

/// One ring of slots in our inbox.
pub(super) struct Slots {
    pub(super) base: usize,
    pub(super) size: usize,
    pub(super) next: u32,
    pub(super) arrived: Vec<bool>,
    /// Credits returned: one for each half ring.
    pub(super) returned: u32,
}

impl Ring {
    pub(super) fn new(base: usize, count: usize, size: usize) -> Ring {
        Ring { base, size, posted: 0, taken: 0, busy: vec![false; count] }
    }

    /// A slot that may be written, if there is one.
    pub(super) fn free(&self) -> Option<usize> {
        let slot = self.posted as usize % self.busy.len();
        let has_credit = self.posted.wrapping_sub(self.taken) < self.busy.len() as u32;
        (has_credit && !self.busy[slot]).then_some(slot)
    }

    pub(super) fn at(&self, slot: usize) -> usize {
        self.base + slot * self.size
    }

    /// Number of credit `step`, of which the low 12 bits are known, has arrived.
    pub(super) fn credit(&mut self, step: u16) -> std::result::Result<(), String> {
        let half = self.busy.len() as u32 / 2;
        let taken = widen(u32::from(step), 12, self.taken / half).wrapping_mul(half);
        let advance = taken.wrapping_sub(self.taken);
        if advance > u32::MAX / 2 {
            return Ok(());
        }
        if advance > self.posted.wrapping_sub(self.taken) {
            return Err("it took more frames than there were".to_owned());
        }
        self.taken = taken;
        Ok(())
    }
}

impl Slots {
    pub(super) fn new(base: usize, count: usize, size: usize) -> Slots {
        Slots { base, size, next: 0, arrived: vec![false; count], returned: 0 }
    }

    pub(super) fn front(&self) -> Option<usize> {
        let slot = self.next as usize % self.arrived.len();
        self.arrived[slot].then(|| self.base + slot * self.size)
    }

    pub(super) fn take(&mut self) {
        let slot = self.next as usize % self.arrived.len();
        self.arrived[slot] = false;
        self.next = self.next.wrapping_add(1);
    }

    /// The number of the credit that is due.
    pub(super) fn due(&self) -> Option<u32> {
        let half = self.arrived.len() as u32 / 2;
        let is_due = self.next.wrapping_sub(self.returned.wrapping_mul(half)) >= half;
        is_due.then(|| self.returned.wrapping_add(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credits_return_half_a_ring_at_a_time_for_ever() {
        let (mut ring, mut slots) = (Ring::new(64, 8, 16), Slots::new(64, 8, 16));
        // Near the end of the numbers, which begin anew.
        (ring.posted, ring.taken, slots.next, slots.returned) =
            (u32::MAX - 7, u32::MAX - 7, u32::MAX - 7, (u32::MAX - 7) / 4);
        for turn in 0..100 {
            let slot = ring.free().expect("credit");
            assert_eq!(ring.at(slot), 64 + 16 * slot);
            ring.posted = ring.posted.wrapping_add(1);
            slots.arrived[slot] = true;
            assert_eq!(slots.front(), Some(ring.at(slot)), "turn {turn}");
            slots.take();
            if let Some(step) = slots.due() {
                slots.returned = step;
                ring.credit((step & 0xfff) as u16).expect("true");
                ring.credit((step.wrapping_sub(1) & 0xfff) as u16).expect("an old one");
            }
        }
        assert!(ring.posted.wrapping_sub(ring.taken) < 4);
        while ring.free().is_some() {
            ring.posted = ring.posted.wrapping_add(1);
        }
        assert_eq!(ring.posted.wrapping_sub(ring.taken), 8);
        let far = (ring.taken / 4 + 3) & 0xfff;
        assert!(ring.credit(far as u16).is_err(), "more than there were");
    }
}
