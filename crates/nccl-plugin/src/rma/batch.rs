//! The form of a batch: what a slot of the peer's inbox holds.
//!
//! ```text
//! head (64) | records (64 each) | payload
//! head      magic 0..4 | records 4..8 | payload 8..12 | - | number 16..24
//! record    kind 0 | flags 1 | - | registration 4..8 | offset 8..16 | length 16..24 | payload 24..28
//!           | signal's registration 28..32 | signal's offset 32..40 | value 40..48 | tag 48..56 | -
//! ```
//!
//! Everything is checked before it is used: a peer may send anything.

const MAGIC: u32 = u32::from_le_bytes(*b"XRB1");
/// Bytes of a head, and of a record.
pub(crate) const LINE: usize = 64;
/// Most records of a batch.
pub(crate) const RECORDS: usize = 512;
/// Head and records of a full batch.
pub(crate) const RECORDS_LEN: usize = LINE * (RECORDS + 1);
/// Most bytes of a batch's payload.
pub(crate) const PAYLOAD: usize = 256 << 10;
/// Bytes of a slot: whole pages.
pub(crate) const SLOT: usize = (RECORDS_LEN + PAYLOAD).next_multiple_of(4096);
/// Alignment of pieces of payload: that of their destinations, modulo this, so that no copy tears a word.
pub(crate) const ALIGN: usize = 16;

const SIGNALS: u8 = 1;

/// Kind of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// Payload for the receiver's memory, possibly none, and possibly a signal.
    Put = 1,
    /// Asks for bytes of the receiver's memory.
    Get = 2,
    /// Some of those bytes: `offset` counts from the first one asked for.
    Reply = 3,
}

/// An increment of a word of the receiver's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Signal {
    pub(crate) registration: u32,
    pub(crate) offset: u64,
    pub(crate) value: u64,
}

/// One operation, or a piece of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) kind: Kind,
    pub(crate) registration: u32,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// Offset of its bytes in the payload.
    pub(crate) at: u32,
    pub(crate) signal: Option<Signal>,
    /// Of a get, and of the replies to it.
    pub(crate) tag: u64,
}

/// A batch's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) records: u32,
    pub(crate) payload: u32,
    /// Batches are numbered in order.
    pub(crate) number: u64,
}

fn word32(bytes: &[u8; LINE], at: usize) -> u32 {
    bytes[at..].first_chunk().map_or(0, |word| u32::from_le_bytes(*word))
}

fn word64(bytes: &[u8; LINE], at: usize) -> u64 {
    bytes[at..].first_chunk().map_or(0, |word| u64::from_le_bytes(*word))
}

impl Head {
    pub(crate) fn encode(self) -> [u8; LINE] {
        let mut out = [0; LINE];
        out[..4].copy_from_slice(&MAGIC.to_le_bytes());
        out[4..8].copy_from_slice(&self.records.to_le_bytes());
        out[8..12].copy_from_slice(&self.payload.to_le_bytes());
        out[16..24].copy_from_slice(&self.number.to_le_bytes());
        out
    }

    /// # Errors
    /// What no head of a batch has.
    pub(crate) fn decode(bytes: &[u8; LINE]) -> Result<Head, String> {
        let head = Head { records: word32(bytes, 4), payload: word32(bytes, 8), number: word64(bytes, 16) };
        if word32(bytes, 0) != MAGIC || head.records as usize > RECORDS || head.payload as usize > PAYLOAD {
            return Err(format!("a malformed batch of {} records and {} bytes", head.records, head.payload));
        }
        Ok(head)
    }
}

impl Record {
    pub(crate) fn encode(&self) -> [u8; LINE] {
        let mut out = [0; LINE];
        out[0] = self.kind as u8;
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(4, &self.registration.to_le_bytes());
        put(8, &self.offset.to_le_bytes());
        put(16, &self.len.to_le_bytes());
        put(24, &self.at.to_le_bytes());
        put(48, &self.tag.to_le_bytes());
        if let Some(signal) = self.signal {
            put(1, &[SIGNALS]);
            put(28, &signal.registration.to_le_bytes());
            put(32, &signal.offset.to_le_bytes());
            put(40, &signal.value.to_le_bytes());
        }
        out
    }

    /// # Errors
    /// What no record of a batch with that payload has.
    pub(crate) fn decode(bytes: &[u8; LINE], payload: u32) -> Result<Record, String> {
        let kind = match bytes[0] {
            1 => Kind::Put,
            2 => Kind::Get,
            3 => Kind::Reply,
            other => return Err(format!("a record of kind {other}")),
        };
        let signal = Signal { registration: word32(bytes, 28), offset: word64(bytes, 32), value: word64(bytes, 40) };
        let record = Record {
            kind,
            registration: word32(bytes, 4),
            offset: word64(bytes, 8),
            len: word64(bytes, 16),
            at: word32(bytes, 24),
            signal: (bytes[1] & SIGNALS != 0).then_some(signal),
            tag: word64(bytes, 48),
        };
        let inside = u64::from(record.at).checked_add(record.len).is_some_and(|end| end <= u64::from(payload));
        match kind {
            Kind::Put | Kind::Reply if !inside => {
                Err(format!("a record of {} bytes at {} of a payload of {payload}", record.len, record.at))
            }
            _ => Ok(record),
        }
    }
}

/// Why a record was refused, as its receiver answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Refusal {
    /// The memory is not registered there, or not any more.
    Unregistered = 1,
    /// It exceeds the memory.
    Outside = 2,
    /// The word of a signal exceeds the memory or is not aligned.
    Signal = 3,
    /// No get of that tag is in flight.
    Tag = 4,
}

impl Refusal {
    pub(crate) fn text(code: u8) -> &'static str {
        match code {
            1 => "the memory is not registered there",
            2 => "the range exceeds the memory that is registered there",
            3 => "the signal is not an aligned word of the memory that is registered there",
            4 => "it was not asked for",
            _ => "for an unknown reason",
        }
    }
}

/// The answer to a batch of which records were refused: a bit for each, and the first reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) refused: [u64; RECORDS / 64],
    pub(crate) why: u8,
}

/// Bytes of an encoded answer.
pub(crate) const ANSWER: usize = 2 * LINE;

impl Answer {
    pub(crate) fn refusing(record: usize, why: Refusal) -> Answer {
        let mut answer = Answer { refused: [0; RECORDS / 64], why: why as u8 };
        answer.refuse(record);
        answer
    }

    pub(crate) fn refuse(&mut self, record: usize) {
        if let Some(word) = self.refused.get_mut(record / 64) {
            *word |= 1 << (record % 64);
        }
    }

    pub(crate) fn refuses(&self, record: usize) -> bool {
        self.refused.get(record / 64).is_some_and(|word| word & 1 << (record % 64) != 0)
    }

    pub(crate) fn encode(&self) -> [u8; ANSWER] {
        let mut out = [0; ANSWER];
        for (bytes, word) in out.chunks_exact_mut(8).zip(self.refused) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        out[LINE] = self.why;
        out
    }

    pub(crate) fn decode(bytes: &[u8; ANSWER]) -> Answer {
        let words = bytes.as_chunks::<8>().0;
        Answer { refused: std::array::from_fn(|at| u64::from_le_bytes(words[at])), why: bytes[LINE] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_survive_their_encoding() {
        let head = Head { records: 3, payload: 77, number: u64::MAX };
        assert_eq!(Head::decode(&head.encode()), Ok(head));
        let signal = Signal { registration: 9, offset: 8, value: u64::MAX };
        for (kind, signal) in [(Kind::Put, Some(signal)), (Kind::Get, None), (Kind::Reply, None)] {
            let record = Record { kind, registration: 7, offset: u64::MAX, len: 33, at: 44, signal, tag: 5 };
            assert_eq!(Record::decode(&record.encode(), 77), Ok(record));
        }
        let mut answer = Answer::refusing(511, Refusal::Outside);
        answer.refuse(0);
        let read = Answer::decode(&answer.encode());
        assert!(read == answer && read.refuses(0) && read.refuses(511) && !read.refuses(1) && !read.refuses(512));
        assert!(SLOT >= RECORDS_LEN + PAYLOAD && RECORDS_LEN.is_multiple_of(ALIGN));
    }

    #[test]
    fn malformed_batches_are_refused() {
        let head = Head { records: 1, payload: 1, number: 0 };
        for head in [Head { records: 513, ..head }, Head { payload: PAYLOAD as u32 + 1, ..head }] {
            assert!(Head::decode(&head.encode()).is_err(), "{head:?}");
        }
        assert!(Head::decode(&[0; LINE]).is_err());
        let record = Record { kind: Kind::Put, registration: 0, offset: 0, len: 8, at: 0, signal: None, tag: 0 };
        assert!(Record::decode(&Record { at: 1, ..record }.encode(), 8).is_err());
        assert!(Record::decode(&Record { len: u64::MAX, at: 8, ..record }.encode(), 8).is_err());
        assert!(Record::decode(&[9; LINE], 8).is_err());
        let get = Record { kind: Kind::Get, len: 1 << 40, ..record };
        assert_eq!(Record::decode(&get.encode(), 0), Ok(get), "a get has no payload");
    }
}
