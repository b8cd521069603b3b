//! Lists of pieces, as the unpack kernel takes them.

use crate::Piece;

/// The longest piece that one warp should take: short enough that a single long run of bytes is spread over the whole
/// GPU, long enough that its list is small beside it.
pub const LONGEST: u64 = 8192;

/// A list of pieces to unpack. Long ones are cut, so that all warps have about as much to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScatterList {
    pieces: Vec<Piece>,
    bytes: u64,
}

impl ScatterList {
    /// Adds `len` bytes from `src` to `dst`. Destinations must not overlap each other or any source.
    pub fn push(&mut self, src: u64, dst: u64, len: u64) {
        self.bytes += len;
        let mut done = 0;
        while done < len {
            let part = LONGEST.min(len - done);
            self.pieces.push(Piece { src: src.wrapping_add(done), dst: dst.wrapping_add(done), len: part });
            done += part;
        }
    }

    /// Empties the list and keeps its memory.
    pub fn clear(&mut self) {
        self.pieces.clear();
        self.bytes = 0;
    }

    /// The pieces, none of them empty.
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// How many bytes they are together.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_pieces_are_cut_and_nothing_is_lost() {
        let mut list = ScatterList::default();
        list.push(100, 9000, 2 * LONGEST + 1);
        list.push(7, 5, 0);
        list.push(1, 2, 3);
        let piece = |src, dst, len| Piece { src, dst, len };
        assert_eq!(
            list.pieces(),
            [
                piece(100, 9000, LONGEST),
                piece(100 + LONGEST, 9000 + LONGEST, LONGEST),
                piece(100 + 2 * LONGEST, 9000 + 2 * LONGEST, 1),
                piece(1, 2, 3),
            ]
        );
        assert_eq!(list.bytes(), 2 * LONGEST + 4);
        list.clear();
        assert_eq!(list, ScatterList::default());
    }
}
