//! Frames as bytes: pure functions between [`Head`]s (with their control bytes) and [`Frame`]s.
//!
//! Sequenced kinds (all but the last three) form the message stream: `seq` is the sequence number, `small` the epoch
//! (how often the stream has moved to another lane), `done` acknowledges completion of one operation of the reader's.
//! Every kind but the last two carries `ack`: on a lane that may lose frames, the number of sequenced frames consumed
//! so far; on a reliable one, the number of the reader's counted messages that have been delivered (`flags` of eager:
//! counted).
//!
//! | kind | op | tag | payload |
//! |---|---|---|---|
//! | eager | writer's | message tag | the message |
//! | announce | writer's | message tag | length, and an offer, or its number among those that arrive unasked |
//! | consent | reader's | target | |
//! | done | | | further ids |
//! | fail (`flags`: code) | reader's | | message and buffer length, when truncated; a text, when device |
//! | read failed (`flags`: code) | writer's serve, or 0 | target | a text, when device |
//! | abort (`flags`: 0, or the code device) | writer's | | a text, when device |
//! | write | writer's | length | key, offset, immediate, offer? |
//! | write data | writer's | | the bytes |
//! | put | writer's | name | the bytes |
//! | read | writer's | target | key, offset, length, descriptor? |
//! | read data | writer's serve | target | the bytes |
//! | invite | reader's | | descriptor |
//! | help ended | writer's | | |
//! | pushed | writer's serve | target | |
//! | bye, nothing | | | |
//! | ack | | | |
//! | chunk | target's index; `seq`: its serial; `done`: writer's | offset | the bytes; anything or nothing, when void |
//! | chunk, unasked | `seq`: the number of its announcement; `done`: writer's | 0 | all bytes of a message |
//! | chunk ack (`seq`: how many so far) | reader's lane, or 0 | | |
//!
//! In place of `ack`, chunks carry their writer's number of the lane that they travel on.

mod failure;
#[cfg(test)]
mod tests;

use crossrail_types::Head;

pub use crate::target::Target;
use crate::{Body, Offer, RegionKey};

pub(crate) use failure::encode_failure;
pub use failure::{decode_abort, decode_failure};

/// Most bytes of a payload that is not user data.
pub const CONTROL_MAX: u32 = 64;

const EAGER: u8 = 1;
const ANNOUNCE: u8 = 2;
const CONSENT: u8 = 3;
const DONE: u8 = 4;
const FAIL: u8 = 5;
const READ_FAILED: u8 = 6;
const ABORT: u8 = 7;
const WRITE: u8 = 8;
const WRITE_DATA: u8 = 9;
const READ: u8 = 10;
const READ_DATA: u8 = 11;
const INVITE: u8 = 12;
const HELP_ENDED: u8 = 13;
const PUSHED: u8 = 14;
const BYE: u8 = 15;
const NOTHING: u8 = 16;
const PUT: u8 = 17;
const ACK: u8 = 32;
const CHUNK: u8 = 33;
const CHUNK_ACK: u8 = 34;

const OFFER: u8 = 1;
const IMM: u8 = 2;
const UNASKED: u8 = 2;
const DATA: u8 = 4;
const FAILED: u8 = 8;
const AGAIN: u8 = 16;
const VOID: u8 = 32;
const CHUNKS: u8 = 64;
const COUNTED: u8 = 128;
const NO_SLOT: u32 = u32::MAX;

/// A decoded head, apart from its `seq`, `ack` and `done` fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// A whole message.
    Eager {
        /// The sender's id of it.
        op: u32,
        /// Its tag.
        tag: u64,
        /// Whether its delivery is acknowledged by the cumulative count: it is sent on a reliable lane, and for the
        /// first time.
        counted: bool,
    },
    /// A message to come; the payload is an [`Announce`].
    Announce {
        /// The sender's id of it.
        op: u32,
        /// Its tag.
        tag: u64,
        /// Whether an offer is there.
        offer: bool,
        /// Its bytes arrive without consent, in one chunk on any lane: perhaps before this frame.
        unasked: bool,
    },
    /// Consent: send the chunks.
    Consent {
        /// The reader's operation.
        op: u32,
        /// Where they go.
        target: Target,
    },
    /// More finished operations; the payload is a list of ids.
    Done,
    /// The reader's operation has failed; the payload is two lengths when `code` says truncated, a text when it says
    /// device.
    Fail {
        /// Which.
        op: u32,
        /// Why.
        code: u8,
    },
    /// The reader's read has failed.
    ReadFailed {
        /// The owner's id of it, to be answered with done; 0 where there is none.
        serve: u32,
        /// Which read.
        target: Target,
        /// Why.
        code: u8,
    },
    /// The writer asks to cancel its operation.
    Abort {
        /// Which.
        op: u32,
        /// 0 where it was cancelled, otherwise why it cannot go on; the payload is a text then.
        code: u8,
    },
    /// Access to a region; the payload is a [`Write`].
    Write {
        /// The writer's id of it.
        op: u32,
        /// Bytes.
        len: u64,
        /// Whether an immediate counts.
        imm: bool,
        /// Whether the bytes follow in a `WriteData`.
        data: bool,
        /// Whether an offer is there.
        offer: bool,
    },
    /// The bytes of a small write.
    WriteData {
        /// As in its `Write`.
        op: u32,
    },
    /// The bytes of a small write to memory that the reader makes.
    Put {
        /// The writer's id of it.
        op: u32,
        /// What they are for.
        name: u64,
    },
    /// Access to a region; the payload is a [`Read`].
    Read {
        /// The writer's id of it.
        op: u32,
        /// Where the bytes go.
        target: Target,
        /// Whether a descriptor is there.
        offer: bool,
        /// Whether its bytes must come in chunks, however few there are.
        chunks: bool,
    },
    /// The bytes of a small read.
    ReadData {
        /// The owner's id of it.
        serve: u32,
        /// Which read.
        target: Target,
    },
    /// Invitation to push bytes of that operation into the memory that the payload, a descriptor, names: all of them,
    /// or those that the reader does not pull meanwhile.
    Invite {
        /// The reader's operation.
        op: u32,
    },
    /// The writer has stopped helping with its operation's direct copy.
    HelpEnded {
        /// Which.
        op: u32,
        /// Whether pieces that it claimed are not copied.
        failed: bool,
    },
    /// All bytes of a read were copied directly.
    Pushed {
        /// The owner's id of it.
        serve: u32,
        /// Which read.
        target: Target,
    },
    /// End of the connection: no further message follows.
    Bye,
    /// Placeholder for a retransmitted frame whose operation is over.
    Nothing,
    /// Only the `ack` field counts.
    Ack,
    /// A piece of a transfer.
    Chunk {
        /// Which transfer.
        target: Target,
        /// Where in it.
        offset: u64,
        /// The writer's id of it.
        from: u32,
        /// Whether another lane lost it before.
        again: bool,
        /// The sender could not fetch its bytes: the receiver only counts the chunk, whatever its payload.
        void: bool,
        /// All bytes of a message that arrives unasked: the target is only a serial, the number of its announcement.
        unasked: bool,
        /// The writer's number of the lane that carries it, by which the reader may acknowledge it on another lane.
        lane: u32,
    },
    /// Chunks consumed on a lane.
    ChunkAck {
        /// So many since it came up, modulo 2^32.
        count: u32,
        /// The reader's number of that lane; 0: the lane that carries this frame.
        lane: u32,
    },
}

/// Payload of an announcement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Announce {
    /// Bytes of the message.
    pub len: u64,
    /// How to reach them.
    pub offer: Option<Offer>,
    /// Its number among the messages that arrive unasked, if it does.
    pub number: Option<u32>,
}

/// Payload of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Write {
    /// Which region.
    pub key: RegionKey,
    /// Where in it.
    pub offset: u64,
    /// Told to its owner in the end, if the head says so.
    pub imm: u32,
    /// How to reach the bytes.
    pub offer: Option<Offer>,
}

/// Payload of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Read {
    /// Which region.
    pub key: RegionKey,
    /// Where in it.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// How to reach the place they go to.
    pub descriptor: Option<[u8; 24]>,
}

#[inline]
fn word(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes)
}

#[inline]
fn long(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes)
}

/// The `seq` field.
#[inline]
pub fn seq(head: &Head) -> u32 {
    word(&head.0, 8)
}

/// The `ack` field.
#[inline]
pub fn ack(head: &Head) -> u32 {
    word(&head.0, 12)
}

/// The `done` field.
#[inline]
pub fn done(head: &Head) -> u32 {
    word(&head.0, 16)
}

/// The `small` field of sequenced kinds: the epoch of their stream.
#[inline]
pub fn epoch(head: &Head) -> u16 {
    u16::from_le_bytes([head.0[2], head.0[3]])
}

/// Writes the `small` field.
#[inline]
pub fn set_epoch(head: &mut Head, epoch: u16) {
    head.0[2..4].copy_from_slice(&epoch.to_le_bytes());
}

/// A frame's place in the message stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Its number.
    pub seq: u32,
    /// Numbers before this one have been consumed in the other direction.
    pub ack: u32,
    /// How often the stream has moved to another lane.
    pub epoch: u16,
}

impl Stamp {
    /// Reads it.
    #[inline]
    pub fn of(head: &Head) -> Stamp {
        let both = long(&head.0, 8);
        Stamp { seq: both as u32, ack: (both >> 32) as u32, epoch: epoch(head) }
    }

    /// Writes it, and the `done` field.
    #[inline]
    pub fn put(self, head: &mut Head, done: u32) {
        seal(head, self.seq, self.ack, done);
        set_epoch(head, self.epoch);
    }
}

/// The head of an eager message, made in one go.
#[inline]
pub fn eager(op: u32, tag: u64, payload: u32, stamp: Stamp, done: u32, counted: bool) -> Head {
    let words = [
        u64::from(EAGER)
            | u64::from(flag(counted, COUNTED)) << 8
            | u64::from(stamp.epoch) << 16
            | u64::from(payload) << 32,
        u64::from(stamp.seq) | u64::from(stamp.ack) << 32,
        u64::from(done) | u64::from(op) << 32,
        tag,
    ];
    let mut head = Head([0; 32]);
    for (bytes, word) in head.0.chunks_exact_mut(8).zip(words) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    head
}

/// Whether two heads with the same sequence number are equal but for acknowledgement and epoch, which may have
/// advanced.
pub(crate) fn same(a: &Head, b: &Head) -> bool {
    a.0[..2] == b.0[..2] && a.0[4..12] == b.0[4..12] && a.0[16..] == b.0[16..]
}

/// The head of an eager message, read in one go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EagerHead {
    pub(crate) op: u32,
    pub(crate) tag: u64,
    pub(crate) done: u32,
    pub(crate) counted: bool,
}

/// Reads the head of an eager message. `None`: it is another kind.
#[inline]
pub(crate) fn as_eager(head: &Head) -> Option<EagerHead> {
    let both = long(&head.0, 16);
    let (op, done) = ((both >> 32) as u32, both as u32);
    (head.0[0] == EAGER).then(|| EagerHead { op, tag: long(&head.0, 24), done, counted: head.0[1] & COUNTED != 0 })
}

/// The count in the head of an [`Frame::Ack`]. `None`: it is another kind.
#[inline]
pub(crate) fn as_ack(head: &Head) -> Option<u32> {
    (head.0[0] == ACK && head.payload_len() == 0).then(|| ack(head))
}

/// Writes the three fields that belong to the stream.
#[inline]
pub fn seal(head: &mut Head, seq: u32, ack: u32, done: u32) {
    head.0[8..12].copy_from_slice(&seq.to_le_bytes());
    head.0[12..16].copy_from_slice(&ack.to_le_bytes());
    head.0[16..20].copy_from_slice(&done.to_le_bytes());
}

/// Writes the `ack` field anew.
#[inline]
pub fn set_ack(head: &mut Head, ack: u32) {
    head.0[12..16].copy_from_slice(&ack.to_le_bytes());
}

/// Reads a head. `Err` says what is wrong with it: an unknown kind, flag or payload length.
#[inline]
pub fn decode_head(head: &Head) -> Result<Frame, String> {
    let b = &head.0;
    let (flags, payload, op, tag) = (b[1], head.payload_len(), word(b, 20), long(b, 24));
    let offer = flags & OFFER != 0;
    let (frame, length_ok) = match b[0] {
        EAGER => (Frame::Eager { op, tag, counted: flags & COUNTED != 0 }, true),
        ANNOUNCE => {
            let unasked = flags & UNASKED != 0;
            (Frame::Announce { op, tag, offer, unasked }, announce_len(offer, unasked) == Some(payload as usize))
        }
        CONSENT => (Frame::Consent { op, target: Target::unpack(tag) }, payload == 0),
        DONE => (Frame::Done, payload <= CONTROL_MAX && payload % 4 == 0),
        FAIL => (Frame::Fail { op, code: flags }, failure::fits(flags, payload)),
        READ_FAILED => {
            let frame = Frame::ReadFailed { serve: op, target: Target::unpack(tag), code: flags };
            (frame, failure::fits_without_lengths(flags, payload))
        }
        ABORT => (Frame::Abort { op, code: flags }, failure::fits_without_lengths(flags, payload)),
        WRITE => {
            let frame = Frame::Write { op, len: tag, imm: flags & IMM != 0, data: flags & DATA != 0, offer };
            (frame, payload == if offer { 64 } else { 36 })
        }
        WRITE_DATA => (Frame::WriteData { op }, true),
        PUT => (Frame::Put { op, name: tag }, true),
        READ => {
            let frame = Frame::Read { op, target: Target::unpack(tag), offer, chunks: flags & CHUNKS != 0 };
            (frame, payload == if offer { 64 } else { 40 })
        }
        READ_DATA => (Frame::ReadData { serve: op, target: Target::unpack(tag) }, true),
        INVITE => (Frame::Invite { op }, payload == 24),
        HELP_ENDED => (Frame::HelpEnded { op, failed: flags & FAILED != 0 }, payload == 0),
        PUSHED => (Frame::Pushed { serve: op, target: Target::unpack(tag) }, payload == 0),
        BYE => (Frame::Bye, payload == 0),
        NOTHING => (Frame::Nothing, payload == 0),
        ACK => (Frame::Ack, payload == 0),
        CHUNK => {
            let target = Target { index: op, serial: seq(head) };
            let (again, void, unasked) = (flags & AGAIN != 0, flags & VOID != 0, flags & UNASKED != 0);
            let fits = (payload > 0 || void) && (!unasked || (tag, op) == (0, 0));
            (Frame::Chunk { target, offset: tag, from: done(head), again, void, unasked, lane: ack(head) }, fits)
        }
        CHUNK_ACK => (Frame::ChunkAck { count: seq(head), lane: op }, payload == 0),
        kind => return Err(format!("frame of unknown kind {kind}")),
    };
    if !length_ok {
        return Err(format!("frame of kind {} with a payload of {payload} bytes", b[0]));
    }
    Ok(frame)
}

/// The head of `frame` with that payload length; `seq`, `ack` and `done` of sequenced kinds are zero.
#[inline]
pub fn encode_head(frame: &Frame, payload: u32) -> Head {
    let (kind, flags, op, tag) = match *frame {
        Frame::Eager { op, tag, counted } => (EAGER, flag(counted, COUNTED), op, tag),
        Frame::Announce { op, tag, offer, unasked } => (ANNOUNCE, flag(offer, OFFER) | flag(unasked, UNASKED), op, tag),
        Frame::Consent { op, target } => (CONSENT, 0, op, target.pack()),
        Frame::Done => (DONE, 0, 0, 0),
        Frame::Fail { op, code } => (FAIL, code, op, 0),
        Frame::ReadFailed { serve, target, code } => (READ_FAILED, code, serve, target.pack()),
        Frame::Abort { op, code } => (ABORT, code, op, 0),
        Frame::Write { op, len, imm, data, offer } => {
            (WRITE, flag(offer, OFFER) | flag(imm, IMM) | flag(data, DATA), op, len)
        }
        Frame::WriteData { op } => (WRITE_DATA, 0, op, 0),
        Frame::Put { op, name } => (PUT, 0, op, name),
        Frame::Read { op, target, offer, chunks } => {
            (READ, flag(offer, OFFER) | flag(chunks, CHUNKS), op, target.pack())
        }
        Frame::ReadData { serve, target } => (READ_DATA, 0, serve, target.pack()),
        Frame::Invite { op } => (INVITE, 0, op, 0),
        Frame::HelpEnded { op, failed } => (HELP_ENDED, flag(failed, FAILED), op, 0),
        Frame::Pushed { serve, target } => (PUSHED, 0, serve, target.pack()),
        Frame::Bye => (BYE, 0, 0, 0),
        Frame::Nothing => (NOTHING, 0, 0, 0),
        Frame::Ack => (ACK, 0, 0, 0),
        Frame::Chunk { target, offset, again, void, unasked, .. } => {
            (CHUNK, flag(again, AGAIN) | flag(void, VOID) | flag(unasked, UNASKED), target.index, offset)
        }
        Frame::ChunkAck { lane, .. } => (CHUNK_ACK, 0, lane, 0),
    };
    let mut head = Head::new(kind, payload);
    head.0[1] = flags;
    head.0[20..24].copy_from_slice(&u32::to_le_bytes(op));
    head.0[24..32].copy_from_slice(&u64::to_le_bytes(tag));
    match *frame {
        Frame::Chunk { target, from, lane, .. } => seal(&mut head, target.serial, lane, from),
        Frame::ChunkAck { count, .. } => seal(&mut head, count, 0, 0),
        _ => {}
    }
    head
}

/// Replaces the head of a chunk whose bytes could not be fetched by one without payload, which the peer only counts.
/// Its operation must fail ([`crate::Peer::fail`]), or be over.
pub fn void(head: &Head) -> Head {
    let mut head = *head;
    head.0[1] |= VOID;
    head.0[4..8].fill(0);
    head
}

#[inline]
fn flag(on: bool, bit: u8) -> u8 {
    if on { bit } else { 0 }
}

/// Control bytes under construction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bytes {
    pub(crate) bytes: [u8; CONTROL_MAX as usize],
    pub(crate) len: u8,
}

impl From<Bytes> for Body {
    fn from(bytes: Bytes) -> Body {
        if bytes.len == 0 { Body::None } else { Body::Inline { bytes: bytes.bytes, len: bytes.len } }
    }
}

impl Bytes {
    pub(crate) const EMPTY: Bytes = Bytes { bytes: [0; CONTROL_MAX as usize], len: 0 };

    /// Appends; the layouts above make sure that it fits.
    pub(crate) fn push(mut self, more: &[u8]) -> Bytes {
        let at = usize::from(self.len);
        self.bytes[at..at + more.len()].copy_from_slice(more);
        self.len += more.len() as u8;
        self
    }

    fn push_offer(self, offer: Option<Offer>) -> Bytes {
        match offer {
            Some(Offer { descriptor, slot }) => self.push(&descriptor).push(&slot.unwrap_or(NO_SLOT).to_le_bytes()),
            None => self,
        }
    }
}

fn descriptor(bytes: &[u8], at: usize) -> Option<[u8; 24]> {
    bytes.get(at..at + 24)?.try_into().ok()
}

fn offer(bytes: &[u8], at: usize, there: bool) -> Result<Option<Offer>, String> {
    if !there {
        return Ok(None);
    }
    let descriptor = descriptor(bytes, at).ok_or_else(short)?;
    let slot = word(bytes, at + 24);
    Ok(Some(Offer { descriptor, slot: (slot != NO_SLOT).then_some(slot) }))
}

fn short() -> String {
    "control frame cut short".to_owned()
}

fn expect(bytes: &[u8], len: usize) -> Result<(), String> {
    if bytes.len() == len { Ok(()) } else { Err(short()) }
}

/// Bytes of an announcement's payload; `None`: nothing announces so.
fn announce_len(has_offer: bool, unasked: bool) -> Option<usize> {
    match (has_offer, unasked) {
        (false, false) => Some(8),
        (false, true) => Some(12),
        (true, false) => Some(36),
        (true, true) => None,
    }
}

pub(crate) fn encode_announce(a: &Announce) -> Bytes {
    let bytes = Bytes::EMPTY.push(&a.len.to_le_bytes());
    match a.number {
        Some(number) => bytes.push(&number.to_le_bytes()),
        None => bytes.push_offer(a.offer),
    }
}

/// Reads an announcement's payload.
pub fn decode_announce(bytes: &[u8], has_offer: bool, unasked: bool) -> Result<Announce, String> {
    expect(bytes, announce_len(has_offer, unasked).ok_or_else(short)?)?;
    let number = unasked.then(|| word(bytes, 8));
    Ok(Announce { len: long(bytes, 0), offer: offer(bytes, 8, has_offer)?, number })
}

pub(crate) fn encode_write(w: &Write) -> Bytes {
    Bytes::EMPTY.push(&w.key).push(&w.offset.to_le_bytes()).push(&w.imm.to_le_bytes()).push_offer(w.offer)
}

/// Reads a write's payload.
pub fn decode_write(bytes: &[u8], has_offer: bool) -> Result<Write, String> {
    expect(bytes, if has_offer { 64 } else { 36 })?;
    Ok(Write {
        key: descriptor(bytes, 0).ok_or_else(short)?,
        offset: long(bytes, 24),
        imm: word(bytes, 32),
        offer: offer(bytes, 36, has_offer)?,
    })
}

pub(crate) fn encode_read(r: &Read) -> Bytes {
    let bytes = Bytes::EMPTY.push(&r.key).push(&r.offset.to_le_bytes()).push(&r.len.to_le_bytes());
    match r.descriptor {
        Some(d) => bytes.push(&d),
        None => bytes,
    }
}

/// Reads a read's payload.
pub fn decode_read(bytes: &[u8], has_offer: bool) -> Result<Read, String> {
    expect(bytes, if has_offer { 64 } else { 40 })?;
    Ok(Read {
        key: descriptor(bytes, 0).ok_or_else(short)?,
        offset: long(bytes, 24),
        len: long(bytes, 32),
        descriptor: if has_offer { descriptor(bytes, 40) } else { None },
    })
}

/// Reads an invitation's payload.
pub fn decode_invite(bytes: &[u8]) -> Result<[u8; 24], String> {
    expect(bytes, 24)?;
    descriptor(bytes, 0).ok_or_else(short)
}

/// The ids in a done frame's payload.
pub fn decode_done(bytes: &[u8]) -> impl Iterator<Item = u32> + '_ {
    bytes.chunks_exact(4).map(|b| word(b, 0))
}
