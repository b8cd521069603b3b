//! The frames of a [`TcpPlacing`](super::TcpPlacing): a head of 40 bytes, and for a part its payload.
//!
//! ```text
//! kind 0 | - 1 | link 2..4 | length 4..8 | key 8..16 | at 16..24 | immediate 24..28 | slot 28..32 | whole 32..36 | ack 36..40
//! ```
//!
//! `ack` counts the frames that the sender of the head has received over the same connection, except for [`Kind::Ack`]
//! and [`Kind::AckOf`], since the connection was made, modulo 2^32. Everything is checked before it is used: a peer may send anything.

/// Length of a head.
pub(crate) const HEAD: usize = 40;
/// Most bytes of a write.
pub(crate) const WRITE_MAX: usize = 1 << 30;
/// Writes of one end that have not ended: the slots, by which the receiver puts parts together.
pub(crate) const SLOTS: usize = 1024;

/// Kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Part of a write, or all of it: the payload follows.
    Part = 1,
    /// Nothing but the acknowledgement. Not counted.
    Ack = 2,
    /// A part of the write of this slot and turn was discarded, as access to its memory has ended. Goes over the
    /// connection of that part, before the acknowledgement of it; if that is lost, over another one before
    /// [`Kind::Dropped`].
    Discarded = 3,
    /// The sender has closed the connection of this link, over which it has received `whole` frames.
    Dropped = 4,
    /// The connecting end has made `link` connections.
    Ready = 5,
    /// The sender has received `whole` frames over the connection of this link, which is another than this one. Not
    /// counted.
    AckOf = 6,
}

/// A frame's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Its kind.
    pub kind: Kind,
    /// Of a part and [`Kind::Discarded`]: the turn of the write, of those in its slot, modulo 2^16. Of [`Kind::Dropped`]
    /// and [`Kind::AckOf`]: the number of the connection. Of [`Kind::Ready`]: how many there are.
    pub link: u16,
    /// Bytes of the payload.
    pub len: u32,
    /// The id of the key.
    pub key: u64,
    /// Offset of the payload in the memory of the key.
    pub at: u64,
    /// The immediate of the write.
    pub imm: u32,
    /// Of a part: the slot of its write at the sender. Of [`Kind::Discarded`]: that of the receiver's write.
    pub slot: u32,
    /// Of a part: bytes of the whole write. Of [`Kind::Dropped`] and [`Kind::AckOf`]: frames received.
    pub whole: u32,
    /// Frames received over this connection.
    pub ack: u32,
}

impl Kind {
    /// True if acknowledgements count frames of this kind.
    pub(crate) fn is_counted(self) -> bool {
        !matches!(self, Kind::Ack | Kind::AckOf)
    }
}

impl Head {
    /// A head of that kind; all else is 0.
    pub fn new(kind: Kind) -> Head {
        Head { kind, link: 0, len: 0, key: 0, at: 0, imm: 0, slot: 0, whole: 0, ack: 0 }
    }

    /// Its bytes.
    pub fn encode(&self) -> [u8; HEAD] {
        let words = [
            u64::from(self.kind as u8) | u64::from(self.link) << 16 | u64::from(self.len) << 32,
            self.key,
            self.at,
            u64::from(self.imm) | u64::from(self.slot) << 32,
            u64::from(self.whole) | u64::from(self.ack) << 32,
        ];
        let mut out = [0; HEAD];
        for (bytes, word) in out.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        out
    }

    /// The head of these bytes. What depends on state (keys, counters, links, acknowledgements) is left to its reader.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &[u8; HEAD]) -> Result<Head, String> {
        let mut words = [0u64; HEAD / 8];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        }
        let [first, key, at, immediate, last] = words;
        let kind = match bytes[0] {
            1 => Kind::Part,
            2 => Kind::Ack,
            3 => Kind::Discarded,
            4 => Kind::Dropped,
            5 => Kind::Ready,
            6 => Kind::AckOf,
            other => return Err(format!("a frame of kind {other}")),
        };
        let head = Head {
            kind,
            link: (first >> 16) as u16,
            len: (first >> 32) as u32,
            key,
            at,
            imm: immediate as u32,
            slot: (immediate >> 32) as u32,
            whole: last as u32,
            ack: (last >> 32) as u32,
        };
        if kind != Kind::Part && head.len != 0 {
            return Err(format!("a frame of kind {} with {} bytes", bytes[0], head.len));
        }
        if head.slot as usize >= SLOTS {
            return Err(format!("a write in slot {} of {SLOTS}", head.slot));
        }
        if kind == Kind::Part && (head.len > head.whole || head.whole as usize > WRITE_MAX) {
            return Err(format!("{} bytes of a write of {}", head.len, head.whole));
        }
        if kind == Kind::Part && head.len == 0 && head.whole > 0 {
            return Err(format!("an empty part of a write of {} bytes", head.whole));
        }
        Ok(head)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_survives_its_bytes() {
        let part =
            Head { len: 7, key: u64::MAX, at: 1 << 40, imm: 5, slot: 1023, whole: 9, ack: 77, ..Head::new(Kind::Part) };
        let dropped = Head { link: 513, whole: u32::MAX, ..Head::new(Kind::Dropped) };
        for head in [part, dropped, Head::new(Kind::Ack), Head::new(Kind::Ready), Head::new(Kind::Discarded)] {
            assert_eq!(Head::decode(&head.encode()), Ok(head));
        }
    }

    #[test]
    fn what_no_peer_sends_is_refused() {
        let part = Head { len: 7, whole: 9, ..Head::new(Kind::Part) };
        let wrong = [
            Head { len: 10, ..part },
            Head { len: 0, ..part },
            Head { whole: WRITE_MAX as u32 + 1, ..part },
            Head { slot: SLOTS as u32, ..part },
            Head { len: 1, ..Head::new(Kind::Ack) },
            Head { slot: u32::MAX, ..Head::new(Kind::Discarded) },
        ];
        for head in wrong {
            assert!(Head::decode(&head.encode()).is_err(), "{head:?}");
        }
        for kind in [0, 7, 255] {
            let mut bytes = part.encode();
            bytes[0] = kind;
            assert!(Head::decode(&bytes).unwrap_err().contains("kind"));
        }
    }
}
