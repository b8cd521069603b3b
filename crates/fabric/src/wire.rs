//! What two ends send each other: immediates, frames in rings, the introduction.
//!
//! An immediate has 32 bits, which every NIC offers; its two highest are the kind.
//!
//! ```text
//! 0, 1  a whole write: counter 18, piece 12; the kind is the toggle of that piece
//! 2     a frame is in the ring: its sequence number, 30 bits
//! 3     bit 29 set: credit: frames taken from the ring, 29 bits
//!       bit 29 clear: a part of a write: slot 9, turn 8, part 12
//! ```
//!
//! Everything is checked before it is used: a peer may send anything.

use crossrail_transport::placing::Imm;

/// Longest name of an endpoint.
pub(crate) const NAME_MAX: usize = 512;
/// Writes of one end that have not ended, and most immediates of writes and parts that were posted and not acknowledged.
pub(crate) const PEER_WRITES: usize = 512;
/// Frames in a ring, and bytes of each.
pub(crate) const SLOTS: usize = 32;
/// See [`SLOTS`].
pub(crate) const SLOT: usize = 2048;
/// Bytes of a frame before its content.
pub(crate) const HEAD: usize = 8;
/// Most bytes of a frame's content.
pub(crate) const CONTENT: usize = SLOT - HEAD;
/// Most writes that one frame acknowledges.
pub(crate) const ACKS: usize = CONTENT / 4;
/// Most parts of a write.
pub(crate) const PARTS_MAX: u16 = 460;

const FRAME_BITS: u32 = 30;
const CREDIT: u32 = 1 << 29;

/// The means to write into a registration of the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Remote {
    pub(crate) key: u64,
    /// The address of its first byte.
    pub(crate) base: u64,
}

/// An immediate that has arrived, or is to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    Write {
        imm: Imm,
        mark: u8,
    },
    /// The low bits of a frame's sequence number.
    Frame(u32),
    /// The low bits of the number of frames taken.
    Credit(u32),
    Part {
        slot: u16,
        turn: u8,
        part: u16,
    },
}

impl Word {
    pub(crate) fn encode(self) -> u32 {
        match self {
            Word::Write { imm, mark } => imm.word(mark & 1),
            Word::Frame(seq) => 2 << 30 | seq & ((1 << FRAME_BITS) - 1),
            Word::Credit(taken) => 3 << 30 | CREDIT | taken & (CREDIT - 1),
            Word::Part { slot, turn, part } => {
                3 << 30 | u32::from(slot & 0x1ff) << 20 | u32::from(turn) << 12 | u32::from(part & 0xfff)
            }
        }
    }

    pub(crate) fn decode(word: u32) -> Word {
        match word >> 30 {
            0 | 1 => {
                let (imm, mark) = Imm::of(word);
                Word::Write { imm, mark }
            }
            2 => Word::Frame(word & ((1 << FRAME_BITS) - 1)),
            _ if word & CREDIT != 0 => Word::Credit(word & (CREDIT - 1)),
            _ => {
                Word::Part { slot: (word >> 20 & 0x1ff) as u16, turn: (word >> 12) as u8, part: (word & 0xfff) as u16 }
            }
        }
    }
}

/// The number nearest to `near` whose low bits these are.
pub(crate) fn widen(low: u32, bits: u32, near: u32) -> u32 {
    let span = 1u32 << bits;
    let ahead = low.wrapping_sub(near) & (span - 1);
    // As far behind as ahead, at most.
    if ahead < span / 2 { near.wrapping_add(ahead) } else { near.wrapping_sub(span - ahead) }
}

/// The number of a frame of this word, near the one that is awaited.
pub(crate) fn frame_number(low: u32, near: u32) -> u32 {
    widen(low, FRAME_BITS, near)
}

/// The number of frames taken of this word, near the last known.
pub(crate) fn credit_number(low: u32, near: u32) -> u32 {
    widen(low, 29, near)
}

/// Content of a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Frame {
    /// Words of writes that were counted: as received, or for a split one the word of its part 0.
    Acks(Vec<u32>),
    /// A write has `parts` parts under that slot and turn, and counts as `imm` then; `dropped`: as nothing, because
    /// its sender has stopped it.
    Split { slot: u16, turn: u8, parts: u16, dropped: bool, imm: u32 },
    /// The sender is about to write by that key for the first time.
    Check([u8; 32]),
    /// The key of that id may be written by, as a registration of this rail; `None`: not any more.
    Checked { id: u64, remote: Option<Remote> },
    /// No more writes by the key of that id.
    Stop(u64),
    /// All writes by it were acknowledged, and no others follow.
    Stopped(u64),
}

impl Frame {
    /// Writes it to the start of `out`; its length.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        let (kind, flags) = match self {
            Frame::Acks(_) => (1u8, 0u8),
            Frame::Split { dropped, .. } => (2, u8::from(*dropped)),
            Frame::Check(_) => (3, 0),
            Frame::Checked { remote, .. } => (4, u8::from(remote.is_some())),
            Frame::Stop(_) => (5, 0),
            Frame::Stopped(_) => (6, 0),
        };
        out.clear();
        out.extend([kind, flags, 0, 0]);
        out.extend([0; 4]);
        match self {
            Frame::Acks(words) => words.iter().for_each(|word| out.extend(word.to_le_bytes())),
            Frame::Split { slot, turn, parts, imm, .. } => {
                out.extend(slot.to_le_bytes());
                out.extend(parts.to_le_bytes());
                out.extend(imm.to_le_bytes());
                out.extend([*turn, 0, 0, 0]);
            }
            Frame::Check(key) => out.extend(key),
            Frame::Checked { id, remote } => {
                let remote = remote.unwrap_or(Remote { key: 0, base: 0 });
                [*id, remote.key, remote.base].iter().for_each(|word| out.extend(word.to_le_bytes()));
            }
            Frame::Stop(id) | Frame::Stopped(id) => out.extend(id.to_le_bytes()),
        }
        let len = (out.len() - HEAD) as u16;
        out[2..4].copy_from_slice(&len.to_le_bytes());
    }

    /// The frame of these bytes, a whole slot.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn decode(slot: &[u8]) -> Result<Frame, String> {
        let Some((head, rest)) = slot.split_first_chunk::<HEAD>() else {
            return Err("a frame without a head".to_owned());
        };
        let (kind, flags, len) = (head[0], head[1], usize::from(u16::from_le_bytes([head[2], head[3]])));
        let Some(content) = rest.get(..len) else { return Err(format!("a frame of {len} bytes")) };
        let wrong = || format!("a frame of kind {kind} with {len} bytes");
        let id = || content.try_into().map(u64::from_le_bytes).map_err(|_| wrong());
        match kind {
            1 if len > 0 && len % 4 == 0 => {
                Ok(Frame::Acks(content.chunks_exact(4).map(|word| u32_at(word, 0)).collect()))
            }
            2 if len == 12 => {
                let (slot, parts) = (u32_at(content, 0) as u16, (u32_at(content, 0) >> 16) as u16);
                let frame =
                    Frame::Split { slot, turn: content[8], parts, dropped: flags != 0, imm: u32_at(content, 4) };
                match usize::from(slot) < PEER_WRITES && parts <= PARTS_MAX && (parts > 0 || flags != 0) {
                    true => Ok(frame),
                    false => Err(format!("a write of {parts} parts in slot {slot}")),
                }
            }
            3 => content.try_into().map(Frame::Check).map_err(|_| wrong()),
            4 if len == 24 => {
                let remote = Remote { key: u64_at(content, 8), base: u64_at(content, 16) };
                Ok(Frame::Checked { id: u64_at(content, 0), remote: (flags != 0).then_some(remote) })
            }
            5 => Ok(Frame::Stop(id()?)),
            6 => Ok(Frame::Stopped(id()?)),
            _ => Err(wrong()),
        }
    }
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// Bytes of an introduction.
pub(crate) const INTRODUCTION: usize = 96 + NAME_MAX;
/// Bytes that what is built over the two ends adds to it: its kind, and where its memory is.
pub(crate) const GREETING: usize = 32;
const MAGIC: [u8; 4] = *b"XRF2";

/// An end's announcement over the authenticated connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Introduction {
    /// The provider's name, at most 32 bytes of it.
    pub(crate) provider: String,
    /// Its endpoint's name.
    pub(crate) name: Vec<u8>,
    /// Where this end's ring is.
    pub(crate) ring: Remote,
    /// Immediates of writes that this end's completion queue has room for.
    pub(crate) grant: u32,
    /// Drawn once per process.
    pub(crate) process: u32,
    pub(crate) greeting: [u8; GREETING],
}

impl Introduction {
    pub(crate) fn encode(&self) -> [u8; INTRODUCTION] {
        let mut out = [0; INTRODUCTION];
        out[..4].copy_from_slice(&MAGIC);
        out[4..6].copy_from_slice(&(self.name.len() as u16).to_le_bytes());
        out[8..12].copy_from_slice(&self.grant.to_le_bytes());
        out[12..16].copy_from_slice(&self.process.to_le_bytes());
        out[16..24].copy_from_slice(&self.ring.key.to_le_bytes());
        out[24..32].copy_from_slice(&self.ring.base.to_le_bytes());
        let provider = self.provider.as_bytes();
        let len = provider.len().min(32);
        out[32..32 + len].copy_from_slice(&provider[..len]);
        out[64..96].copy_from_slice(&self.greeting);
        let len = self.name.len().min(NAME_MAX);
        out[96..96 + len].copy_from_slice(&self.name[..len]);
        out
    }

    /// # Errors
    /// What is wrong with it.
    pub(crate) fn decode(bytes: &[u8; INTRODUCTION]) -> Result<Introduction, String> {
        if bytes[..4] != MAGIC {
            return Err("it does not introduce an endpoint of libfabric".to_owned());
        }
        let len = usize::from(u16::from_le_bytes([bytes[4], bytes[5]]));
        let Some(name) = bytes[96..].get(..len).filter(|name| !name.is_empty()) else {
            return Err(format!("its endpoint's name has {len} bytes"));
        };
        let grant = u32_at(bytes, 8);
        if (grant as usize) < usize::from(PARTS_MAX) + 4 || grant as usize > PEER_WRITES {
            return Err(format!("it has room for {grant} writes"));
        }
        let provider = bytes[32..64].split(|byte| *byte == 0).next().unwrap_or_default();
        Ok(Introduction {
            provider: String::from_utf8_lossy(provider).into_owned(),
            name: name.to_vec(),
            ring: Remote { key: u64_at(bytes, 16), base: u64_at(bytes, 24) },
            grant,
            process: u32_at(bytes, 12),
            greeting: bytes[64..96].try_into().unwrap_or_default(),
        })
    }
}

#[cfg(test)]
mod tests {
    use crossrail_transport::placing::Counter;

    use super::*;

    #[test]
    fn words_survive() {
        let imm = Imm { counter: Counter((1 << 18) - 1), piece: 4095 };
        for word in [
            Word::Write { imm, mark: 1 },
            Word::Write { imm: Imm { counter: Counter(0), piece: 0 }, mark: 0 },
            Word::Frame((1 << 30) - 1),
            Word::Frame(0),
            Word::Credit(0),
            Word::Credit(CREDIT - 1),
            Word::Part { slot: 511, turn: 255, part: 4095 },
            Word::Part { slot: 0, turn: 0, part: 0 },
        ] {
            assert_eq!(Word::decode(word.encode()), word);
        }
    }

    #[test]
    fn numbers_are_found_by_their_low_bits() {
        for near in [0u32, 5, (1 << 30) - 1, 1 << 30, u32::MAX - 3, u32::MAX] {
            for distance in [-40i32, -1, 0, 1, 31, 1000] {
                let number = near.wrapping_add_signed(distance);
                assert_eq!(frame_number(number & ((1 << 30) - 1), near), number, "{near} {distance}");
                assert_eq!(credit_number(number & (CREDIT - 1), near), number, "{near} {distance}");
            }
        }
    }

    fn slot(frame: &Frame) -> Vec<u8> {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        assert!(bytes.len() <= SLOT);
        bytes.resize(SLOT, 0xaa);
        bytes
    }

    #[test]
    fn frames_survive() {
        let key = std::array::from_fn(|at| at as u8);
        for frame in [
            Frame::Acks(vec![1, u32::MAX]),
            Frame::Acks(vec![7; ACKS]),
            Frame::Split { slot: 511, turn: 200, parts: PARTS_MAX, dropped: false, imm: 77 },
            Frame::Split { slot: 0, turn: 0, parts: 0, dropped: true, imm: 0 },
            Frame::Check(key),
            Frame::Checked { id: u64::MAX, remote: Some(Remote { key: 7, base: u64::MAX - 1 }) },
            Frame::Checked { id: 1, remote: None },
            Frame::Stop(1),
            Frame::Stopped(2),
        ] {
            assert_eq!(Frame::decode(&slot(&frame)), Ok(frame));
        }
    }

    #[test]
    fn what_no_peer_sends_is_refused() {
        let split = |slot, parts| Frame::Split { slot, turn: 0, parts, dropped: false, imm: 0 };
        for frame in [split(512, 1), split(0, PARTS_MAX + 1), split(0, 0)] {
            assert!(Frame::decode(&slot(&frame)).is_err(), "{frame:?}");
        }
        let mut bytes = slot(&Frame::Stop(1));
        bytes[2] = 7;
        assert!(Frame::decode(&bytes).unwrap_err().contains("7 bytes"));
        bytes[2..4].copy_from_slice(&(CONTENT as u16 + 1).to_le_bytes());
        assert!(Frame::decode(&bytes).is_err());
        for kind in [0, 7, 255] {
            let mut bytes = slot(&Frame::Stop(1));
            bytes[0] = kind;
            assert!(Frame::decode(&bytes).is_err());
        }
        assert!(Frame::decode(&[]).is_err());
    }

    #[test]
    fn an_introduction_survives_and_a_wrong_one_is_refused() {
        let good = Introduction {
            provider: "tcp;ofi_rxm".to_owned(),
            name: vec![3; NAME_MAX],
            ring: Remote { key: u64::MAX - 1, base: 1 << 40 },
            grant: PEER_WRITES as u32,
            process: 77,
            greeting: [9; GREETING],
        };
        assert_eq!(Introduction::decode(&good.encode()), Ok(good.clone()));
        let wrong = |change: &dyn Fn(&mut [u8; INTRODUCTION])| {
            let mut bytes = good.encode();
            change(&mut bytes);
            Introduction::decode(&bytes).expect_err("wrong")
        };
        assert!(wrong(&|bytes| bytes[0] = b'Y').contains("does not introduce"));
        assert!(wrong(&|bytes| bytes[4..6].fill(0)).contains("0 bytes"));
        assert!(wrong(&|bytes| bytes[4..6].copy_from_slice(&513u16.to_le_bytes())).contains("513 bytes"));
        assert!(wrong(&|bytes| bytes[8..12].fill(0)).contains("room for 0"));
        assert!(wrong(&|bytes| bytes[8..12].fill(0xff)).contains("room for"));
    }
}
