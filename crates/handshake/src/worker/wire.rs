//! The handshake's messages as bytes. Everything here is a pure function of `&[u8]`, safe to call with anything.
//!
//! Every message starts with eight bytes: the magic (6), its kind, a zero. Until both ends have proved who they are,
//! every message has one fixed size:
//!
//! ```text
//! Challenge   64   versions 8..12 | flags 12 | 0 0 0 | worker 16..32 | nonce 32..64        acceptor -> connector
//! Reply       80   version 8..10 | flags 10 | 0 x5 | nonce 16..48 | mac 48..80             connector -> acceptor
//! LaneHello   96   version 8..10 | purpose 10 | 0 | rail 12..14 | channel 14..16
//!                  | session 16..32 | nonce 32..64 | mac 64..96                             connector -> acceptor
//! Proof       40   mac 8..40                                                               acceptor -> connector
//! Hello       48   length 8..12 | 0 x4 | mac 16..48, then `length` bytes                   both ways, after the proofs
//! Reject     256   code 8 | 0 | length 10..12 | text 12..256                               both ways, instead of any
//! ```
//!
//! Integers are little-endian.

use std::fmt;

use crossrail_types::ErrorKind;

pub use super::hello::decode_hello;

/// First bytes of every message. The first is no ASCII, so no text protocol starts this way.
pub const MAGIC: [u8; 6] = *b"\xc5XRAIL";
/// Oldest version of the handshake and the frames behind it that this release speaks.
pub const VERSION_MIN: u16 = 1;
/// Newest version that this release speaks.
pub const VERSION_MAX: u16 = 1;

/// Length of the part that all messages share.
pub const PRELUDE_LEN: usize = 8;
/// Length of a [`Challenge`].
pub const CHALLENGE_LEN: usize = 64;
/// Length of a [`Reply`].
pub const REPLY_LEN: usize = 80;
/// Length of a [`LaneHello`].
pub const LANE_HELLO_LEN: usize = 96;
/// Length of a proof.
pub const PROOF_LEN: usize = 40;
/// Length of the fixed part in front of a hello.
pub const HELLO_HEAD_LEN: usize = 48;
/// Largest hello that is accepted, without its head.
pub const HELLO_MAX: usize = 64 * 1024;
/// Length of a [`Reject`].
pub const REJECT_LEN: usize = 256;
/// Longest text in a [`Reject`].
pub const REJECT_TEXT_MAX: usize = REJECT_LEN - 12;

/// The challenge's and reply's flag: the shared secret is (to be) mixed into the proof.
pub const FLAG_SECRET: u8 = 1;
/// The challenge's and reply's flag: the address's token is (to be) mixed into the proof.
pub const FLAG_TOKEN: u8 = 2;

/// Which message this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// The acceptor's nonce and what it asks for.
    Challenge = 1,
    /// The connector's nonce and proof, on a control connection.
    Reply = 2,
    /// The connector's nonce and proof, on a data connection.
    LaneHello = 3,
    /// The acceptor's proof.
    Proof = 4,
    /// Who an end is and what it offers.
    Hello = 5,
    /// Why an end closes.
    Reject = 6,
}

/// Why bytes are no such message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WireError {
    /// The bytes do not start with [`MAGIC`]; what they start with.
    NotCrossrail([u8; 6]),
    /// Too few or too many bytes.
    Length {
        /// Bytes that the message has.
        expected: usize,
        /// Bytes that there are.
        found: usize,
    },
    /// Another message than the one expected, or one that does not exist.
    Kind {
        /// The kind byte expected.
        expected: u8,
        /// The kind byte found.
        found: u8,
    },
    /// More bytes announced than are ever accepted.
    TooLong {
        /// Bytes accepted.
        limit: usize,
        /// Bytes announced.
        announced: u64,
    },
    /// A field holds what it cannot.
    Field(&'static str),
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WireError::NotCrossrail(bytes) => {
                write!(f, "not a Crossrail peer (it sent \"{}\")", bytes.escape_ascii())
            }
            WireError::Length { expected, found } => write!(f, "{found} bytes where {expected} belong"),
            WireError::Kind { expected, found } => {
                write!(f, "{} where {} belongs", kind_name(*found), kind_name(*expected))
            }
            WireError::TooLong { limit, announced } => {
                write!(f, "announces {announced} bytes, more than the {limit} accepted")
            }
            WireError::Field(what) => write!(f, "malformed: {what}"),
        }
    }
}

impl std::error::Error for WireError {}

fn kind_name(kind: u8) -> &'static str {
    match kind {
        1 => "a challenge",
        2 => "a reply",
        3 => "a lane's hello",
        4 => "a proof",
        5 => "a hello",
        6 => "a reject",
        _ => "an unknown message",
    }
}

/// What the acceptor opens with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Challenge {
    /// Oldest version the acceptor speaks.
    pub version_min: u16,
    /// Newest version the acceptor speaks.
    pub version_max: u16,
    /// [`FLAG_SECRET`], [`FLAG_TOKEN`]: what the proof must contain.
    pub flags: u8,
    /// The acceptor's worker id.
    pub worker: [u8; 16],
    /// Fresh random bytes.
    pub nonce: [u8; 32],
}

/// The connector's answer on a control connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The version that both will speak.
    pub version: u16,
    /// [`FLAG_SECRET`], [`FLAG_TOKEN`]: what the proof contains.
    pub flags: u8,
    /// Fresh random bytes.
    pub nonce: [u8; 32],
    /// The connector's proof.
    pub mac: [u8; 32],
}

/// What a data connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum LanePurpose {
    /// Small messages and the protocol's own.
    Message = 0,
    /// Chunks of large transfers.
    Bulk = 1,
}

/// The connector's answer on a data connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneHello {
    /// The version that the session speaks.
    pub version: u16,
    /// What the connection is for.
    pub purpose: LanePurpose,
    /// Index of the rail.
    pub rail: u16,
    /// Index of the connection within its rail.
    pub channel: u16,
    /// The session that it belongs to.
    pub session: [u8; 16],
    /// Fresh random bytes.
    pub nonce: [u8; 32],
    /// Proof that the connector knows the session's lane key.
    pub mac: [u8; 32],
}

/// The fixed part in front of a hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HelloHead {
    /// Bytes that follow, at most [`HELLO_MAX`].
    pub length: u32,
    /// Over those bytes, with the session's hello key.
    pub mac: [u8; 32],
}

/// Why an end closes, as the other end is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RejectCode {
    /// Wrong secret, token or user.
    Refused = 1,
    /// Versions or parameters differ.
    Mismatch = 2,
    /// The other end broke the protocol.
    Protocol = 3,
    /// Too many handshakes under way; trying again later may help.
    Busy = 4,
    /// The handshake took too long.
    Timeout = 5,
}

impl RejectCode {
    /// What the rejected end reports.
    pub fn kind(self) -> ErrorKind {
        match self {
            RejectCode::Refused | RejectCode::Busy => ErrorKind::Refused,
            RejectCode::Mismatch => ErrorKind::Mismatch,
            RejectCode::Protocol => ErrorKind::Protocol,
            RejectCode::Timeout => ErrorKind::Timeout,
        }
    }
}

/// An end's last message: why it closes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reject {
    /// What the rejected end branches on.
    pub code: RejectCode,
    /// One line for people, at most [`REJECT_TEXT_MAX`] bytes; control characters are replaced when decoding.
    pub text: String,
}

/// Reads the part that all messages share.
pub fn decode_prelude(bytes: &[u8]) -> Result<Kind, WireError> {
    let found = bytes.len();
    let Some(prelude) = bytes.first_chunk::<PRELUDE_LEN>() else {
        return Err(WireError::Length { expected: PRELUDE_LEN, found });
    };
    if prelude[..6] != MAGIC {
        let mut start = [0; 6];
        start.copy_from_slice(&prelude[..6]);
        return Err(WireError::NotCrossrail(start));
    }
    if prelude[7] != 0 {
        return Err(WireError::Field("reserved byte"));
    }
    match prelude[6] {
        1 => Ok(Kind::Challenge),
        2 => Ok(Kind::Reply),
        3 => Ok(Kind::LaneHello),
        4 => Ok(Kind::Proof),
        5 => Ok(Kind::Hello),
        6 => Ok(Kind::Reject),
        found => Err(WireError::Kind { expected: 0, found }),
    }
}

fn prelude(kind: Kind) -> [u8; PRELUDE_LEN] {
    let mut bytes = [0; PRELUDE_LEN];
    bytes[..6].copy_from_slice(&MAGIC);
    bytes[6] = kind as u8;
    bytes
}

/// The whole of `bytes` as a message of `N` bytes and that kind.
fn fixed<const N: usize>(bytes: &[u8], kind: Kind) -> Result<&[u8; N], WireError> {
    let found = decode_prelude(bytes)?;
    if found != kind {
        return Err(WireError::Kind { expected: kind as u8, found: found as u8 });
    }
    bytes.try_into().map_err(|_| WireError::Length { expected: N, found: bytes.len() })
}

fn part<const AT: usize, const N: usize, const M: usize>(bytes: &[u8; M]) -> [u8; N] {
    const { assert!(AT + N <= M) };
    let mut out = [0; N];
    out.copy_from_slice(&bytes[AT..AT + N]);
    out
}

/// Reads a [`Challenge`] of exactly [`CHALLENGE_LEN`] bytes. Flags that this release does not know are kept: a peer
/// that asks for more than this end can give refuses it by itself.
pub fn decode_challenge(bytes: &[u8]) -> Result<Challenge, WireError> {
    let bytes: &[u8; CHALLENGE_LEN] = fixed(bytes, Kind::Challenge)?;
    let challenge = Challenge {
        version_min: u16::from_le_bytes(part::<8, 2, _>(bytes)),
        version_max: u16::from_le_bytes(part::<10, 2, _>(bytes)),
        flags: bytes[12],
        worker: part::<16, 16, _>(bytes),
        nonce: part::<32, 32, _>(bytes),
    };
    if challenge.version_min > challenge.version_max {
        return Err(WireError::Field("version range"));
    }
    Ok(challenge)
}

/// Reads a [`Reply`] of exactly [`REPLY_LEN`] bytes.
pub fn decode_reply(bytes: &[u8]) -> Result<Reply, WireError> {
    let bytes: &[u8; REPLY_LEN] = fixed(bytes, Kind::Reply)?;
    Ok(Reply {
        version: u16::from_le_bytes(part::<8, 2, _>(bytes)),
        flags: bytes[10],
        nonce: part::<16, 32, _>(bytes),
        mac: part::<48, 32, _>(bytes),
    })
}

/// Reads a [`LaneHello`] of exactly [`LANE_HELLO_LEN`] bytes.
pub fn decode_lane_hello(bytes: &[u8]) -> Result<LaneHello, WireError> {
    let bytes: &[u8; LANE_HELLO_LEN] = fixed(bytes, Kind::LaneHello)?;
    Ok(LaneHello {
        version: u16::from_le_bytes(part::<8, 2, _>(bytes)),
        purpose: match bytes[10] {
            0 => LanePurpose::Message,
            1 => LanePurpose::Bulk,
            _ => return Err(WireError::Field("lane purpose")),
        },
        rail: u16::from_le_bytes(part::<12, 2, _>(bytes)),
        channel: u16::from_le_bytes(part::<14, 2, _>(bytes)),
        session: part::<16, 16, _>(bytes),
        nonce: part::<32, 32, _>(bytes),
        mac: part::<64, 32, _>(bytes),
    })
}

/// Reads a proof of exactly [`PROOF_LEN`] bytes.
pub fn decode_proof(bytes: &[u8]) -> Result<[u8; 32], WireError> {
    let bytes: &[u8; PROOF_LEN] = fixed(bytes, Kind::Proof)?;
    Ok(part::<8, 32, _>(bytes))
}

/// Reads the [`HELLO_HEAD_LEN`] bytes in front of a hello; refuses more than [`HELLO_MAX`] bytes behind it.
pub fn decode_hello_head(bytes: &[u8]) -> Result<HelloHead, WireError> {
    let bytes: &[u8; HELLO_HEAD_LEN] = fixed(bytes, Kind::Hello)?;
    let length = u32::from_le_bytes(part::<8, 4, _>(bytes));
    if length as usize > HELLO_MAX {
        return Err(WireError::TooLong { limit: HELLO_MAX, announced: length.into() });
    }
    Ok(HelloHead { length, mac: part::<16, 32, _>(bytes) })
}

/// Reads a [`Reject`] of exactly [`REJECT_LEN`] bytes.
pub fn decode_reject(bytes: &[u8]) -> Result<Reject, WireError> {
    let bytes: &[u8; REJECT_LEN] = fixed(bytes, Kind::Reject)?;
    let code = match bytes[8] {
        1 => RejectCode::Refused,
        2 => RejectCode::Mismatch,
        3 => RejectCode::Protocol,
        4 => RejectCode::Busy,
        5 => RejectCode::Timeout,
        _ => return Err(WireError::Field("reject code")),
    };
    let length = usize::from(u16::from_le_bytes(part::<10, 2, _>(bytes)));
    let text = bytes.get(12..12 + length).ok_or(WireError::Field("length of the reject text"))?;
    Ok(Reject { code, text: printable(&String::from_utf8_lossy(text)) })
}

/// `text` with nothing in it that could steer a terminal or break a log's line.
pub(super) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

impl Challenge {
    /// The message's bytes.
    pub fn encode(&self) -> [u8; CHALLENGE_LEN] {
        let mut out = [0; CHALLENGE_LEN];
        out[..8].copy_from_slice(&prelude(Kind::Challenge));
        out[8..10].copy_from_slice(&self.version_min.to_le_bytes());
        out[10..12].copy_from_slice(&self.version_max.to_le_bytes());
        out[12] = self.flags;
        out[16..32].copy_from_slice(&self.worker);
        out[32..64].copy_from_slice(&self.nonce);
        out
    }
}

impl Reply {
    /// The message's bytes.
    pub fn encode(&self) -> [u8; REPLY_LEN] {
        let mut out = [0; REPLY_LEN];
        out[..8].copy_from_slice(&prelude(Kind::Reply));
        out[8..10].copy_from_slice(&self.version.to_le_bytes());
        out[10] = self.flags;
        out[16..48].copy_from_slice(&self.nonce);
        out[48..80].copy_from_slice(&self.mac);
        out
    }
}

impl LaneHello {
    /// The message's bytes.
    pub fn encode(&self) -> [u8; LANE_HELLO_LEN] {
        let mut out = [0; LANE_HELLO_LEN];
        out[..8].copy_from_slice(&prelude(Kind::LaneHello));
        out[8..10].copy_from_slice(&self.version.to_le_bytes());
        out[10] = self.purpose as u8;
        out[12..14].copy_from_slice(&self.rail.to_le_bytes());
        out[14..16].copy_from_slice(&self.channel.to_le_bytes());
        out[16..32].copy_from_slice(&self.session);
        out[32..64].copy_from_slice(&self.nonce);
        out[64..96].copy_from_slice(&self.mac);
        out
    }
}

impl HelloHead {
    /// The message's bytes, without what follows them.
    pub fn encode(&self) -> [u8; HELLO_HEAD_LEN] {
        let mut out = [0; HELLO_HEAD_LEN];
        out[..8].copy_from_slice(&prelude(Kind::Hello));
        out[8..12].copy_from_slice(&self.length.to_le_bytes());
        out[16..48].copy_from_slice(&self.mac);
        out
    }
}

impl Reject {
    /// The message's bytes; a longer text is cut.
    pub fn encode(&self) -> [u8; REJECT_LEN] {
        let mut out = [0; REJECT_LEN];
        let mut length = self.text.len().min(REJECT_TEXT_MAX);
        while !self.text.is_char_boundary(length) {
            length -= 1;
        }
        out[..8].copy_from_slice(&prelude(Kind::Reject));
        out[8] = self.code as u8;
        out[10..12].copy_from_slice(&(length as u16).to_le_bytes());
        out[12..12 + length].copy_from_slice(&self.text.as_bytes()[..length]);
        out
    }
}

/// The acceptor's proof as a message.
pub fn encode_proof(mac: &[u8; 32]) -> [u8; PROOF_LEN] {
    let mut out = [0; PROOF_LEN];
    out[..8].copy_from_slice(&prelude(Kind::Proof));
    out[8..40].copy_from_slice(mac);
    out
}
