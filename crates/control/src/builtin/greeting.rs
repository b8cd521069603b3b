//! How a client and the built-in store meet, as bytes. Everything here is a pure function of `&[u8]`, safe to call
//! with anything. Each message has one fixed size; nothing of another size is read before both ends are proven.
//!
//! ```text
//! Challenge   48   versions 8..12 | flags 12 | 0 0 0 | nonce 16..48                    store -> client
//! Reply       80   version 8..10 | flags 10 | 0 x5 | nonce 16..48 | mac 48..80         client -> store
//! Proof       40   mac 8..40                                                           store -> client
//! Reject     256   code 8 | 0 | length 10..12 | text 12..256                           both ways, instead of any
//! ```
//!
//! Each starts with eight bytes: the magic (6), its kind, a zero. Integers are little-endian.

use crossrail_types::ErrorKind;
use hmac::{Hmac, Mac};
use sha2::Sha256;

/// First bytes of every message; an engine's worker has others, so the two are told apart.
pub const MAGIC: [u8; 6] = *b"\xc5XSTOR";
/// The version of the greeting and of the frames behind it.
pub const VERSION: u16 = 1;
/// The challenge's and reply's flag: the shared secret is (to be) mixed into the proof.
pub const FLAG_SECRET: u8 = 1;

/// Length of the part that all messages share.
pub const PRELUDE_LEN: usize = 8;
/// Length of a [`Challenge`].
pub const CHALLENGE_LEN: usize = 48;
/// Length of a [`Reply`].
pub const REPLY_LEN: usize = 80;
/// Length of a proof.
pub const PROOF_LEN: usize = 40;
/// Length of a [`Reject`].
pub const REJECT_LEN: usize = 256;
/// Longest text in a [`Reject`].
pub const REJECT_TEXT_MAX: usize = REJECT_LEN - 12;

/// Where a reply's own mac starts, its last field.
const REPLY_MAC: usize = REPLY_LEN - 32;

/// Which message this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// The store's nonce and what it asks for.
    Challenge = 1,
    /// The client's nonce and proof.
    Reply = 2,
    /// The store's proof.
    Proof = 3,
    /// Why an end closes.
    Reject = 4,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Challenge => "a challenge",
            Kind::Reply => "a reply",
            Kind::Proof => "a proof",
            Kind::Reject => "a rejection",
        }
    }
}

/// Why bytes are no such message, for people.
pub type Malformed = String;

/// Which message starts with these bytes.
///
/// # Errors
/// Other bytes than a store's or a store's client's.
pub fn decode_prelude(bytes: &[u8]) -> Result<Kind, Malformed> {
    let Some((magic, rest)) = bytes.split_first_chunk::<6>() else {
        return Err(format!("{} bytes where {PRELUDE_LEN} belong", bytes.len()));
    };
    if *magic != MAGIC {
        return Err(format!("not a Crossrail store's protocol (it sent \"{}\")", magic.escape_ascii()));
    }
    match *rest {
        [1, 0, ..] => Ok(Kind::Challenge),
        [2, 0, ..] => Ok(Kind::Reply),
        [3, 0, ..] => Ok(Kind::Proof),
        [4, 0, ..] => Ok(Kind::Reject),
        [kind, ..] => Err(format!("a message of an unknown kind ({kind})")),
        [] => Err(format!("{} bytes where {PRELUDE_LEN} belong", bytes.len())),
    }
}

fn prelude<const N: usize>(kind: Kind) -> [u8; N] {
    let mut bytes = [0; N];
    bytes[..6].copy_from_slice(&MAGIC);
    bytes[6] = kind as u8;
    bytes
}

fn fixed<const N: usize>(bytes: &[u8], kind: Kind) -> Result<&[u8; N], Malformed> {
    let found = decode_prelude(bytes)?;
    if found != kind {
        return Err(format!("{} where {} belongs", found.name(), kind.name()));
    }
    bytes.try_into().map_err(|_| format!("{} bytes where {N} belong", bytes.len()))
}

fn zero(bytes: &[u8]) -> Result<(), Malformed> {
    if bytes.iter().all(|byte| *byte == 0) { Ok(()) } else { Err("a reserved field is not zero".to_owned()) }
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(bytes);
    array
}

/// What the store says first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Challenge {
    /// Oldest version that the store speaks.
    pub version_min: u16,
    /// Newest version that the store speaks.
    pub version_max: u16,
    /// What the proof must contain.
    pub flags: u8,
    /// Fresh for each connection.
    pub nonce: [u8; 32],
}

impl Challenge {
    /// As bytes.
    pub fn encode(&self) -> [u8; CHALLENGE_LEN] {
        let mut bytes = prelude::<CHALLENGE_LEN>(Kind::Challenge);
        bytes[8..10].copy_from_slice(&self.version_min.to_le_bytes());
        bytes[10..12].copy_from_slice(&self.version_max.to_le_bytes());
        bytes[12] = self.flags;
        bytes[16..].copy_from_slice(&self.nonce);
        bytes
    }

    /// From bytes.
    ///
    /// # Errors
    /// Not a challenge.
    pub fn decode(bytes: &[u8]) -> Result<Challenge, Malformed> {
        let bytes = fixed::<CHALLENGE_LEN>(bytes, Kind::Challenge)?;
        zero(&bytes[13..16])?;
        Ok(Challenge {
            version_min: u16::from_le_bytes(array(&bytes[8..10])),
            version_max: u16::from_le_bytes(array(&bytes[10..12])),
            flags: bytes[12],
            nonce: array(&bytes[16..]),
        })
    }
}

/// What the client answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The version that the frames will have.
    pub version: u16,
    /// What the proof contains.
    pub flags: u8,
    /// Fresh for each connection.
    pub nonce: [u8; 32],
    /// The client's proof.
    pub mac: [u8; 32],
}

impl Reply {
    /// As bytes.
    pub fn encode(&self) -> [u8; REPLY_LEN] {
        let mut bytes = prelude::<REPLY_LEN>(Kind::Reply);
        bytes[8..10].copy_from_slice(&self.version.to_le_bytes());
        bytes[10] = self.flags;
        bytes[16..REPLY_MAC].copy_from_slice(&self.nonce);
        bytes[REPLY_MAC..].copy_from_slice(&self.mac);
        bytes
    }

    /// From bytes.
    ///
    /// # Errors
    /// Not a reply.
    pub fn decode(bytes: &[u8]) -> Result<Reply, Malformed> {
        let bytes = fixed::<REPLY_LEN>(bytes, Kind::Reply)?;
        zero(&bytes[11..16])?;
        Ok(Reply {
            version: u16::from_le_bytes(array(&bytes[8..10])),
            flags: bytes[10],
            nonce: array(&bytes[16..REPLY_MAC]),
            mac: array(&bytes[REPLY_MAC..]),
        })
    }
}

/// A proof as bytes.
pub fn encode_proof(mac: &[u8; 32]) -> [u8; PROOF_LEN] {
    let mut bytes = prelude::<PROOF_LEN>(Kind::Proof);
    bytes[PRELUDE_LEN..].copy_from_slice(mac);
    bytes
}

/// A proof from bytes.
///
/// # Errors
/// Not a proof.
pub fn decode_proof(bytes: &[u8]) -> Result<[u8; 32], Malformed> {
    fixed::<PROOF_LEN>(bytes, Kind::Proof).map(|bytes| array(&bytes[PRELUDE_LEN..]))
}

/// Why an end closes, instead of any other message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reject {
    /// `Refused`, `Mismatch`, `Exhausted` or `Protocol`.
    pub kind: ErrorKind,
    /// For people; no control characters.
    pub text: String,
}

impl Reject {
    /// As bytes; a longer text is cut.
    pub fn encode(&self) -> [u8; REJECT_LEN] {
        let mut bytes = prelude::<REJECT_LEN>(Kind::Reject);
        bytes[8] = match self.kind {
            ErrorKind::Refused => 1,
            ErrorKind::Mismatch => 2,
            ErrorKind::Exhausted => 3,
            _ => 4,
        };
        let mut len = self.text.len().min(REJECT_TEXT_MAX);
        while !self.text.is_char_boundary(len) {
            len -= 1;
        }
        bytes[10..12].copy_from_slice(&(len as u16).to_le_bytes());
        bytes[12..12 + len].copy_from_slice(&self.text.as_bytes()[..len]);
        bytes
    }

    /// From bytes; control characters in the text are replaced.
    ///
    /// # Errors
    /// Not a rejection.
    pub fn decode(bytes: &[u8]) -> Result<Reject, Malformed> {
        let bytes = fixed::<REJECT_LEN>(bytes, Kind::Reject)?;
        let kind = match bytes[8] {
            1 => ErrorKind::Refused,
            2 => ErrorKind::Mismatch,
            3 => ErrorKind::Exhausted,
            4 => ErrorKind::Protocol,
            code => return Err(format!("a rejection of an unknown kind ({code})")),
        };
        let len = usize::from(u16::from_le_bytes(array(&bytes[10..12])));
        let Some(text) = bytes[12..].get(..len) else {
            return Err(format!("announces {len} bytes of text, more than the {REJECT_TEXT_MAX} accepted"));
        };
        let text = String::from_utf8_lossy(text).replace(char::is_control, " ");
        Ok(Reject { kind, text })
    }
}

fn hmac(key: &[u8], label: &str, parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut mac = match Hmac::<Sha256>::new_from_slice(key) {
        Ok(mac) => mac,
        Err(_) => unreachable!("HMAC takes keys of any length"),
    };
    mac.update(label.as_bytes());
    mac.update(&[0]);
    // Lengths keep two lists of parts from running together to the same bytes.
    for part in parts {
        mac.update(&(part.len() as u64).to_le_bytes());
        mac.update(part);
    }
    mac
}

const CLIENT: &str = "crossrail store client";
const STORE: &str = "crossrail store server";

/// The client's proof; `reply`'s own mac is not looked at.
pub fn client_proof(secret: &[u8], challenge: &[u8; CHALLENGE_LEN], reply: &[u8; REPLY_LEN]) -> [u8; 32] {
    hmac(secret, CLIENT, &[challenge, &reply[..REPLY_MAC]]).finalize().into_bytes().into()
}

/// Whether the client knew the secret; in constant time.
pub(super) fn client_holds(secret: &[u8], challenge: &[u8; CHALLENGE_LEN], reply: &[u8; REPLY_LEN]) -> bool {
    hmac(secret, CLIENT, &[challenge, &reply[..REPLY_MAC]]).verify_slice(&reply[REPLY_MAC..]).is_ok()
}

/// The store's proof.
pub(super) fn store_proof(secret: &[u8], challenge: &[u8; CHALLENGE_LEN], reply: &[u8; REPLY_LEN]) -> [u8; 32] {
    hmac(secret, STORE, &[challenge, reply]).finalize().into_bytes().into()
}

/// Whether the store knew the secret; in constant time.
pub(super) fn store_holds(
    secret: &[u8],
    challenge: &[u8; CHALLENGE_LEN],
    reply: &[u8; REPLY_LEN],
    claimed: &[u8; 32],
) -> bool {
    hmac(secret, STORE, &[challenge, reply]).verify_slice(claimed).is_ok()
}
