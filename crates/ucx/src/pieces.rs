//! Pieces that arrive as messages: from UCX's buffer to the payload's place.
#![allow(unsafe_code)]

use std::sync::Arc;

use crossrail_transport::{Loan, Place};

use crate::memory::Memory;
use crate::wire::{MESSAGE_PIECE_MAX, PIECES, slot};

/// Where a payload of `len` bytes goes, and how many of them have gone there.
#[derive(Debug)]
pub(crate) struct Target {
    dst: *mut u8,
    room: usize,
    grant: Option<Arc<Loan>>,
    len: usize,
    done: usize,
}

impl Target {
    /// The target of a payload of `len` bytes that the sink wants at `place`. Its memory may be written until `placed` is
    /// called for it, or until `recall` of its loan has returned.
    pub(crate) fn new(place: &Place, len: usize) -> Target {
        let (dst, room, grant) = match place {
            Place::Into { dst, len, grant, .. } => (*dst, *len, grant.clone()),
            _ => (std::ptr::null_mut(), 0, None),
        };
        Target { dst, room, grant, len, done: 0 }
    }

    /// Copies the next piece to its place, as far as that has room and may be written to.
    fn take(&mut self, piece: &[u8]) -> Result<(), String> {
        let left = self.len - self.done;
        if piece.len() != left.min(MESSAGE_PIECE_MAX) {
            return Err(format!("a piece of {} bytes came where {left} bytes of a payload are left", piece.len()));
        }
        let len = piece.len().min(self.room.saturating_sub(self.done));
        let usage = self.grant.as_deref().map(Loan::enter);
        if len > 0 && !matches!(usage, Some(None)) {
            // SAFETY: done + len <= room, which may be written (see `new`): `recall` waits for `usage`.
            unsafe { std::ptr::copy_nonoverlapping(piece.as_ptr(), self.dst.add(self.done), len) }
        }
        self.done += piece.len();
        Ok(())
    }
}

/// See the module. Pieces that arrive before their payload has a place wait in memory of this end.
#[derive(Default)]
pub(crate) struct Arrivals {
    /// One slot for each piece that may be outstanding. Allocated with the first that waits.
    staged: Option<Memory>,
    /// Lengths of the pieces that wait, by number modulo [`PIECES`]; 0 where there is none.
    lens: [u32; PIECES as usize],
    /// Number of the next piece to go to its place.
    next: u32,
    target: Option<Target>,
    /// Pieces and bytes that have gone to their place and were not reported.
    placed: (u32, usize),
}

// SAFETY: the memory that a target names is described by its place, which may be sent; `Arrivals` alone writes there.
unsafe impl Send for Arrivals {}

impl Arrivals {
    /// Pieces that have gone to their place.
    pub(crate) fn taken(&self) -> u32 {
        self.next
    }

    pub(crate) fn has_target(&self) -> bool {
        self.target.is_some()
    }

    pub(crate) fn aim(&mut self, target: Option<Target>) {
        self.target = target;
    }

    pub(crate) fn has_staged(&self) -> bool {
        self.lens[slot(self.next, PIECES)] > 0
    }

    /// Whether [`Arrivals::placed`] has something to report.
    pub(crate) fn has_work(&self) -> bool {
        self.placed.0 > 0 || (self.has_target() && self.has_staged())
    }

    /// A piece has arrived; its bytes are UCX's, and valid during the call only.
    ///
    /// # Errors
    /// What the peer did wrong.
    pub(crate) fn arrived(&mut self, number: u32, piece: &[u8]) -> Result<(), String> {
        let at = slot(number, PIECES);
        if number.wrapping_sub(self.next) >= PIECES || self.lens[at] > 0 {
            return Err(format!("piece {number} came when {} was next", self.next));
        }
        if number == self.next && self.has_target() {
            return self.place(piece);
        }
        let staged = self.staged.get_or_insert_with(|| Memory::new(PIECES as usize * MESSAGE_PIECE_MAX));
        staged.write(at * MESSAGE_PIECE_MAX, piece);
        self.lens[at] = piece.len() as u32;
        Ok(())
    }

    /// Moves the pieces that have waited to the payload's place, and takes the count of pieces and bytes that have gone
    /// there since the last call.
    ///
    /// # Errors
    /// What the peer did wrong.
    pub(crate) fn placed(&mut self) -> Result<(u32, usize), String> {
        while self.has_target() && self.has_staged() {
            let at = slot(self.next, PIECES);
            let len = std::mem::take(&mut self.lens[at]) as usize;
            let Some(staged) = self.staged.take() else { break };
            // SAFETY: the slot's bytes, which were written when the piece arrived, and which nothing writes meanwhile.
            let placed = self.place(unsafe { std::slice::from_raw_parts(staged.at(at * MESSAGE_PIECE_MAX, len), len) });
            self.staged = Some(staged);
            placed?;
        }
        Ok(std::mem::take(&mut self.placed))
    }

    fn place(&mut self, piece: &[u8]) -> Result<(), String> {
        let Some(target) = &mut self.target else { return Ok(()) };
        target.take(piece)?;
        if target.done == target.len {
            self.target = None;
        }
        self.next = self.next.wrapping_add(1);
        self.placed.0 += 1;
        self.placed.1 += piece.len();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn into(memory: &mut [u8], grant: Option<Arc<Loan>>) -> Place {
        Place::Into { dst: memory.as_mut_ptr(), len: memory.len(), grant, token: 0 }
    }

    #[test]
    fn pieces_go_to_their_place_whether_they_precede_it_or_not() {
        let mut arrivals = Arrivals::default();
        let mut memory = vec![0; MESSAGE_PIECE_MAX + 4];
        arrivals.arrived(1, &[2; 6]).expect("the second, which waits");
        arrivals.arrived(0, &[1; MESSAGE_PIECE_MAX]).expect("the first, which waits");
        assert_eq!((arrivals.placed(), arrivals.taken(), arrivals.has_work()), (Ok((0, 0)), 0, false));
        // Of the last 6 bytes, 4 have a place.
        arrivals.aim(Some(Target::new(&into(&mut memory, None), MESSAGE_PIECE_MAX + 6)));
        assert!(arrivals.has_work());
        assert_eq!((arrivals.placed(), arrivals.taken()), (Ok((2, MESSAGE_PIECE_MAX + 6)), 2));
        assert!(memory[..MESSAGE_PIECE_MAX].iter().all(|&byte| byte == 1) && memory[MESSAGE_PIECE_MAX..] == [2; 4]);
        assert!(!arrivals.has_target(), "the payload is complete");
        let mut other = vec![0; 9000];
        arrivals.aim(Some(Target::new(&into(&mut other, None), 9000)));
        arrivals.arrived(2, &[3; 9000]).expect("the third, at once");
        assert!(other.iter().all(|&byte| byte == 3));
        assert_eq!(arrivals.placed(), Ok((1, 9000)));
    }

    #[test]
    fn memory_that_was_taken_back_is_not_written() {
        let grant = Arc::new(Loan::default());
        let mut memory = vec![0; 10_000];
        let mut arrivals = Arrivals::default();
        arrivals.aim(Some(Target::new(&into(&mut memory, Some(grant.clone())), 10_000)));
        grant.recall();
        arrivals.arrived(0, &[1; 10_000]).expect("the only one");
        assert_eq!(arrivals.placed(), Ok((1, 10_000)));
        assert!(memory.iter().all(|&byte| byte == 0));
    }

    #[test]
    fn pieces_that_may_not_come_are_named() {
        let mut arrivals = Arrivals::default();
        for number in [PIECES, u32::MAX] {
            assert!(arrivals.arrived(number, &[1]).expect_err("not in the window").contains("when 0 was next"));
        }
        arrivals.arrived(1, &[1]).expect("in the window");
        assert!(arrivals.arrived(1, &[1]).expect_err("twice").contains("piece 1 came"));
        arrivals.aim(Some(Target::new(&Place::Discard, 9000)));
        assert!(arrivals.arrived(0, &[1; 8999]).expect_err("too short").contains("9000 bytes of a payload"));
    }
}
