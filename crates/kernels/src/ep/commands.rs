//! Commands of kernels to the proxy, and what a far rank's proxy announces when a range has arrived: `ep_commands.cuh` has
//! the other end.

use std::fmt;

use super::{
    EP_COMMAND_BACK, EP_COMMAND_BACK_LESS, EP_COMMAND_ROWS_BF16, EP_COMMAND_ROWS_FP8, EP_COMMAND_ROWS_UE8M0,
    EP_COMMAND_TABLE, EP_COMMAND_TAKEN, EP_COMMAND_WEIGHTS, EP_COMMAND_WORD, EP_COMMANDS, EP_LAPS, EP_LINE,
    EP_WORD_COMBINE_TAKEN, EP_WORD_DISPATCH_TAKEN, EpHeap, Payload, Scale, Shape,
};

/// Set in the flags of returned rows that lack ranks, as in ep_common.cuh.
const LESS: u64 = 1 << 63;
const LENGTH_BITS: u32 = 19;
const NUMBER: u64 = (1 << 48) - 1;
/// Maximum length of a command's range in bytes.
pub const MOST_COMMAND_BYTES: u64 = ((1 << LENGTH_BITS) - 1) * 8;
/// Maximum length of an inbox in bytes, which a command's offset can name.
pub const MOST_INBOX: u64 = 1 << 32;

/// A command of a kernel: a range of an inbox is complete, or a control word has a new value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    /// The rank that it is for.
    pub rank: u32,
    kind: u32,
    epoch: u32,
    number: u64,
}

/// Which of two sequences of epochs a command belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sequence {
    /// The sequence of dispatches.
    Dispatch,
    /// The sequence of combines.
    Combine,
}

/// The change in an inbox that makes the range of a command visible to kernels, once it has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Announce {
    /// These 8-byte words become the number.
    Flags {
        /// Offset of the first.
        at: u64,
        /// Their number.
        count: u64,
        /// From one to the next in bytes.
        apart: u64,
        /// The number.
        value: u64,
    },
    /// These 8-byte words get the tag in their high halves.
    Tags {
        /// Offset of the first.
        at: u64,
        /// Their number.
        count: u64,
        /// The tag.
        tag: u32,
    },
    /// The writing rank has received all operations up to this epoch: the word becomes the epoch once no write of this rank
    /// up to it is in flight.
    Taken {
        /// Offset of the word.
        at: u64,
        /// Which operations.
        sequence: Sequence,
        /// The epoch.
        epoch: u64,
    },
}

/// Why a command of another rank is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Invalid(Command);

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Command { kind, number, .. } = self.0;
        write!(f, "command {kind} for {} bytes at {} does not fit this buffer", self.0.len(), self.0.at())?;
        write!(f, " (number {number:#x})")
    }
}

impl Command {
    /// Of a ring's entry; `place`: how many came before it. `None`: it is not complete yet. An error: it was overwritten
    /// before it was read.
    pub fn of_entry(words: [u64; 2], place: u64) -> Option<Result<Command, Overrun>> {
        let lap = |place: u64| place / u64::from(EP_COMMANDS) % EP_LAPS + 1;
        let laps = words.map(|word| word >> 48);
        if laps == [lap(place); 2] {
            return Some(Ok(Command::of(words)));
        }
        let next = lap(place + u64::from(EP_COMMANDS));
        laps.contains(&next).then_some(Err(Overrun))
    }

    /// Of a note ([`Command::note`]), which another rank may have made up.
    pub fn of_note(words: [u64; 2]) -> Command {
        Command::of(words)
    }

    fn of(words: [u64; 2]) -> Command {
        let [what, number] = words;
        Command {
            rank: (what >> 32 & 0xfff) as u32,
            kind: (what >> 44 & 15) as u32,
            epoch: what as u32,
            number: number & NUMBER,
        }
    }

    /// It, as it goes along with its range.
    pub fn note(&self) -> [u64; 2] {
        [u64::from(self.kind) << 44 | u64::from(self.rank) << 32 | u64::from(self.epoch), self.number]
    }

    fn has_data(&self) -> bool {
        (EP_COMMAND_ROWS_BF16..=EP_COMMAND_WEIGHTS).contains(&self.kind) || self.kind == EP_COMMAND_BACK_LESS
    }

    /// Offset of its range in the inbox; 0 without data.
    pub fn at(&self) -> u64 {
        if self.has_data() { (self.number >> LENGTH_BITS) * 8 } else { 0 }
    }

    /// Bytes of its range; 0 without data.
    pub fn len(&self) -> u64 {
        if self.has_data() { (self.number & ((1 << LENGTH_BITS) - 1)) * 8 } else { 0 }
    }

    /// True without data.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// True for a command that releases the slots of received operations.
    pub fn releases(&self) -> bool {
        self.kind == EP_COMMAND_TAKEN
    }

    /// The order of sending: rows last, as others wait for words before they need rows; neighbours next to each other.
    pub fn order(&self) -> u128 {
        let of_kind = u64::from(self.is_rows()) << 36 | u64::from(self.kind) << 32 | u64::from(self.epoch);
        u128::from(of_kind) << 64 | u128::from(self.number)
    }

    /// True if it names rows.
    pub fn is_rows(&self) -> bool {
        self.kind <= EP_COMMAND_BACK || self.kind == EP_COMMAND_BACK_LESS
    }

    /// The sequence of its epoch.
    pub fn sequence(&self) -> Sequence {
        let combine = match self.kind {
            EP_COMMAND_BACK | EP_COMMAND_BACK_LESS | EP_COMMAND_WEIGHTS => true,
            EP_COMMAND_TAKEN => self.number == u64::from(EP_WORD_COMBINE_TAKEN),
            _ => false,
        };
        if combine { Sequence::Combine } else { Sequence::Dispatch }
    }

    /// Its epoch, near `last`, one of the same sequence.
    pub fn epoch(&self, last: u64) -> u64 {
        let ahead = self.epoch.wrapping_sub(last as u32) as i32;
        last.wrapping_add_signed(i64::from(ahead))
    }

    /// Both as one command, if the range of `next` follows on that of this one.
    #[must_use]
    pub fn joined(&self, next: &Command, most: u64) -> Option<Command> {
        let alike = (self.rank, self.kind, self.epoch) == (next.rank, next.kind, next.epoch);
        let adjacent = self.has_data() && self.at() + self.len() == next.at();
        let len = self.len() + next.len();
        let fits = len <= most.min(MOST_COMMAND_BYTES);
        let number = (self.number >> LENGTH_BITS << LENGTH_BITS) | (len / 8);
        (alike && adjacent && fits).then_some(Command { number, ..*self })
    }
}

/// The proxy is late by a whole lap of the ring, and commands are lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overrun;

/// The layout of an inbox, for the ranges that commands name.
#[derive(Clone, Copy, Debug)]
pub struct Inbox {
    heap: EpHeap,
    tokens: u64,
    pieces: u64,
    /// By kind of row, from a piece of a row to the next.
    pieces_apart: [u64; 3],
    /// From a piece of a returned row to the next.
    back_apart: u64,
}

impl Inbox {
    /// Of heaps that are laid out for `room`, the largest shape of a buffer and its variants.
    pub fn of(room: &Shape) -> Inbox {
        let payloads = [Payload::Bf16, Payload::Fp8(Scale::F32), Payload::Fp8(Scale::Ue8m0)];
        Inbox {
            heap: room.heap(),
            tokens: u64::from(room.max_tokens),
            pieces: u64::from(room.pieces()),
            pieces_apart: payloads.map(|payload| Shape { payload, ..*room }.piece_stride()),
            back_apart: 2 * u64::from(room.tuning().piece),
        }
    }

    /// Bytes of an inbox.
    pub fn area_bytes(&self) -> u64 {
        self.heap.inbox_stride
    }

    /// Offset of a control word.
    pub fn word(&self, word: u32) -> u64 {
        self.heap.words + 8 * u64::from(word)
    }

    /// The announcement of a command of `epoch` that has arrived.
    ///
    /// # Errors
    /// When it names what no kernel does.
    pub fn announce(&self, command: &Command, epoch: u64) -> Result<Announce, Invalid> {
        let heap = &self.heap;
        let within = |from: u64, to: u64| {
            let (at, len) = (command.at(), command.len());
            (len > 0 && from <= at && at + len <= to).then(|| at - from).ok_or(Invalid(*command))
        };
        // Of rows in slots: from a slot to the next, from a row, from a piece; and the slots' flags.
        let lacking = if command.kind == EP_COMMAND_BACK_LESS { LESS } else { 0 };
        let flags = |from: u64, to: u64, apart: [u64; 3], flags: u64, flags_apart: u64| {
            let [slots, rows, pieces] = apart;
            let (first, last) = (within(from, to)?, within(from, to)? + command.len() - 1);
            let number = |byte: u64| {
                let within = byte % slots;
                within / rows * self.pieces + (within % rows / pieces).min(self.pieces - 1)
            };
            let (slot, begin, end) = (first / slots, number(first), number(last));
            if slot != last / slots || end >= flags_apart / heap.flag_stride {
                return Err(Invalid(*command));
            }
            Ok(Announce::Flags {
                at: flags + slot * flags_apart + begin * heap.flag_stride,
                count: end + 1 - begin,
                apart: heap.flag_stride,
                value: epoch | lacking,
            })
        };
        let tags = |from: u64, to: u64| {
            within(from, to)?;
            Ok(Announce::Tags { at: command.at(), count: command.len() / 8, tag: tag(epoch) })
        };
        match command.kind {
            EP_COMMAND_ROWS_BF16 | EP_COMMAND_ROWS_FP8 | EP_COMMAND_ROWS_UE8M0 => {
                let apart = self.pieces_apart[(command.kind - EP_COMMAND_ROWS_BF16) as usize];
                let slot = self.tokens * heap.row_stride;
                flags(
                    heap.rows,
                    heap.row_flags,
                    [slot, heap.row_stride, apart],
                    heap.row_flags,
                    self.tokens * self.pieces * heap.flag_stride,
                )
            }
            EP_COMMAND_BACK | EP_COMMAND_BACK_LESS => {
                let apart = [heap.back_slot, heap.back_stride, self.back_apart];
                flags(heap.back, heap.back_flags, apart, heap.back_flags, heap.back_flags_slot)
            }
            EP_COMMAND_TABLE => tags(heap.tables, heap.tables + 2 * heap.table_stride),
            EP_COMMAND_WEIGHTS => tags(heap.back_weights, heap.back_weights + 2 * heap.back_weights_stride),
            EP_COMMAND_WORD => {
                let (word, value) = (command.number >> 32, command.number & 0xffff_ffff);
                let taken = word == u64::from(EP_WORD_DISPATCH_TAKEN) || word == u64::from(EP_WORD_COMBINE_TAKEN);
                if taken || word >= EP_LINE / 8 {
                    return Err(Invalid(*command));
                }
                let value = u64::from(tag(epoch)) << 32 | value;
                Ok(Announce::Flags { at: heap.words + 8 * word, count: 1, apart: 8, value })
            }
            EP_COMMAND_TAKEN => {
                let word = command.number;
                if word != u64::from(EP_WORD_DISPATCH_TAKEN) && word != u64::from(EP_WORD_COMBINE_TAKEN) {
                    return Err(Invalid(*command));
                }
                Ok(Announce::Taken { at: heap.words + 8 * word, sequence: command.sequence(), epoch })
            }
            _ => Err(Invalid(*command)),
        }
    }
}

/// The tag of words of an epoch, as `tag_of` in ep_common.cuh: its low half, and never 0.
pub fn tag(epoch: u64) -> u32 {
    match epoch as u32 {
        0 => 0x8000_0000,
        low => low,
    }
}

#[cfg(test)]
mod tests {
    use super::super::Tuning;
    use super::*;

    const SHAPE: Shape = Shape {
        hidden: 7168,
        topk: 8,
        experts: 288,
        ranks: 4,
        max_tokens: 100,
        payload: Payload::Bf16,
        prereduce: true,
        expert_layout: true,
        rank_layout: false,
        regions: 0,
        tuning: Tuning::USUAL,
    };

    fn entry(place: u64, kind: u32, rank: u32, epoch: u32, number: u64) -> [u64; 2] {
        let lap = (place / u64::from(EP_COMMANDS) % EP_LAPS + 1) << 48;
        [lap | (u64::from(kind) << 44) | (u64::from(rank) << 32) | u64::from(epoch), lap | number]
    }

    fn range(kind: u32, at: u64, len: u64) -> Command {
        Command::of(entry(0, kind, 3, 5, ((at / 8) << LENGTH_BITS) | (len / 8)))
    }

    #[test]
    fn an_entry_is_there_once_both_of_its_words_are() {
        let ring = u64::from(EP_COMMANDS);
        for place in [0, 7, ring, 3 * ring - 1, EP_LAPS * ring, EP_LAPS * ring + 5] {
            let words = entry(place, EP_COMMAND_ROWS_FP8, 4, 9, 77 << LENGTH_BITS | 3);
            let command = Command::of_entry(words, place).unwrap().unwrap();
            assert_eq!((command.rank, command.at(), command.len()), (4, 77 * 8, 24));
            assert_eq!(Command::of_note(command.note()), command);
            // The lap before, or one word of it.
            let old = place.checked_sub(ring).map_or([0; 2], |old| entry(old, 1, 1, 1, 1));
            for words in [old, [words[0], old[1]], [old[0], words[1]]] {
                assert_eq!(Command::of_entry(words, place), None, "{place}");
            }
            // The lap after it.
            let next = entry(place + ring, 1, 1, 1, 1);
            for words in [next, [next[0], words[1]], [words[0], next[1]]] {
                assert_eq!(Command::of_entry(words, place), Some(Err(Overrun)), "{place}");
            }
        }
    }

    #[test]
    fn epochs_are_near_the_last_one() {
        let of = |low: u32, last: u64| Command::of(entry(0, EP_COMMAND_BACK, 0, low, 0)).epoch(last);
        assert_eq!(
            [of(7, 0), of(7, 9), of(3, 0xffff_fffe), of(0xffff_fffe, 0x1_0000_0003)],
            [7, 7, 0x1_0000_0003, 0xffff_fffe]
        );
    }

    #[test]
    fn neighbours_are_joined() {
        let heap = SHAPE.heap();
        let (first, second) = (range(EP_COMMAND_BACK, heap.back, 2048), range(EP_COMMAND_BACK, heap.back + 2048, 512));
        let both = first.joined(&second, 1 << 20).unwrap();
        assert_eq!((both.at(), both.len(), both.rank), (heap.back, 2560, 3));
        assert_eq!(second.joined(&first, 1 << 20), None);
        assert_eq!(first.joined(&second, 2559), None);
        assert_eq!(first.joined(&range(EP_COMMAND_WEIGHTS, heap.back + 2048, 512), 1 << 20), None);
        let mut order = [second, first];
        order.sort_unstable_by_key(Command::order);
        assert_eq!(order, [first, second]);
    }

    /// As the kernels compute where a piece and its flag are.
    #[test]
    fn rows_have_the_flags_that_kernels_look_at() {
        for payload in [Payload::Bf16, Payload::Fp8(Scale::F32), Payload::Fp8(Scale::Ue8m0)] {
            // Of a variant in a heap for bf16 rows.
            let (inbox, heap) = (Inbox::of(&SHAPE), SHAPE.heap());
            let (kind, apart) = match payload {
                Payload::Bf16 => (EP_COMMAND_ROWS_BF16, 2048),
                Payload::Fp8(Scale::Ue8m0) => (EP_COMMAND_ROWS_UE8M0, 1040),
                Payload::Fp8(_) => (EP_COMMAND_ROWS_FP8, 1056),
            };
            assert_eq!(Shape { payload, ..SHAPE }.piece_stride(), apart);
            for (slot, token, piece) in [(0, 0, 0), (0, 99, 6), (1, 0, 0), (1, 42, 3), (1, 99, 6)] {
                let row = slot * 100 + token;
                let at = heap.rows + row * heap.row_stride + piece * apart;
                let flag = heap.row_flags + (row * 7 + piece) * 8;
                let announced = inbox.announce(&range(kind, at, apart), 5).unwrap();
                assert_eq!(
                    announced,
                    Announce::Flags { at: flag, count: 1, apart: 8, value: 5 },
                    "{payload:?} {row} {piece}"
                );
            }
            let whole = range(kind, heap.rows + 3 * heap.row_stride, 7 * apart);
            let announced = inbox.announce(&whole, 5).unwrap();
            assert_eq!(announced, Announce::Flags { at: heap.row_flags + 21 * 8, count: 7, apart: 8, value: 5 });
        }
        let (inbox, heap) = (Inbox::of(&SHAPE), SHAPE.heap());
        for (slot, token, piece, len) in [(0, 0, 0, 2048), (1, 99, 6, 1296), (1, 5, 0, 14336)] {
            let at = heap.back + slot * heap.back_slot + token * heap.back_stride + piece * 2048;
            let flag = heap.back_flags + slot * heap.back_flags_slot + (token * 7 + piece) * 8;
            let count = u64::div_ceil(len, 2048);
            let announced = inbox.announce(&range(EP_COMMAND_BACK, at, len), 6).unwrap();
            assert_eq!(announced, Announce::Flags { at: flag, count, apart: 8, value: 6 });
            // The same, of a node that lacks ranks.
            let less = range(EP_COMMAND_BACK_LESS, at, len);
            assert_eq!((less.sequence(), less.is_rows(), less.len()), (Sequence::Combine, true, len));
            let announced = inbox.announce(&less, 6).unwrap();
            assert_eq!(announced, Announce::Flags { at: flag, count, apart: 8, value: 6 | 1 << 63 });
        }
    }

    /// Whatever another rank sends, what is announced lies in the inbox, and nothing panics.
    #[test]
    fn what_is_announced_lies_in_the_inbox() {
        let few = Shape { hidden: 8, topk: 1, prereduce: false, max_tokens: 3, ..SHAPE };
        let spread = Shape { tuning: Tuning { slots: true, ..SHAPE.tuning }, ..SHAPE };
        assert_eq!([few, spread].map(|shape| shape.heap().flag_stride), [8, EP_LINE]);
        let shapes = [SHAPE, few, spread];
        let mut random = 1u64;
        for shape in shapes {
            let inbox = Inbox::of(&shape);
            let mut seen = 0;
            for _ in 0..200_000 {
                let mut next = || {
                    random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
                    random >> 16
                };
                let (kind, at, len) = (next() % 16, next() % (inbox.area_bytes() * 2) / 8, next() % 4096);
                let number = if next() % 2 == 0 { at << LENGTH_BITS | len } else { next() & NUMBER };
                let command = Command::of_note([kind << 44 | next() & 0xfff_ffff_ffff, number]);
                let (at, bytes) = match inbox.announce(&command, next()) {
                    Ok(Announce::Flags { at, count, apart, .. }) => (at, apart * (count - 1) + 8),
                    Ok(Announce::Tags { at, count, .. }) => (at, 8 * count),
                    Ok(Announce::Taken { at, .. }) => (at, 8),
                    Err(wrong) => {
                        assert!(wrong.to_string().contains("does not fit this buffer"));
                        continue;
                    }
                };
                seen += 1;
                assert!(at.is_multiple_of(8) && at + bytes <= inbox.area_bytes(), "{command:?}: {bytes} at {at}");
            }
            assert!(seen > 1000, "{seen}");
        }
    }
}
