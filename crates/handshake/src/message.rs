//! The messages that both protocols share, as bytes. Everything here is a pure function of `&[u8]`, safe to call with
//! anything.
//!
//! Every message starts with eight bytes: the protocol's magic (6), the message's kind, a zero. Integers are
//! little-endian, reserved bytes are zero. Every message has one fixed size, so that a stranger cannot make the reader
//! wait for more bytes, or allocate more, than the exchange needs:
//!
//! ```text
//! Challenge   48   version 8..10 | flags 10 | 0 x5 | nonce 16..48                          acceptor -> connector
//!          or 64   version 8..10 | flags 10 | 0 x5 | id 16..32 | nonce 32..64              (the workers' protocol)
//! Reply       80   version 8..10 | flags 10 | 0 x5 | nonce 16..48 | mac 48..80             connector -> acceptor
//! Proof       40   mac 8..40                                                               acceptor -> connector
//! Confirm      8   (the workers' protocol)                                                 connector -> acceptor
//! Reject     256   code 8 | 0 | length 10..12 | text 12..256                               both ways, instead of any
//! ```

use std::fmt;

use crossrail_types::{ErrorKind, Reason};

/// Length of the part that all messages share.
pub const PRELUDE_LEN: usize = 8;
/// Length of a [`Reply`].
pub const REPLY_LEN: usize = 80;
/// Length of a [`Proof`].
pub const PROOF_LEN: usize = 40;
/// Length of a [`Confirm`].
pub const CONFIRM_LEN: usize = PRELUDE_LEN;
/// Length of a [`Reject`].
pub const REJECT_LEN: usize = 256;
/// Longest text in a [`Reject`], in bytes.
pub const REJECT_TEXT_MAX: usize = REJECT_LEN - 12;

/// Flag of challenge and reply: the shared secret is (to be) mixed into the proof.
pub const FLAG_SECRET: u8 = 1;
/// Flag of challenge and reply: the token of the acceptor's address is (to be) mixed into the proof.
pub const FLAG_TOKEN: u8 = 2;
/// Flag of challenge and reply: the token of the acceptor's user is (to be) mixed into the proof, in the secret's
/// place.
pub const FLAG_USER: u8 = 4;

/// Which message this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The acceptor's nonce and demands.
    Challenge,
    /// The connector's nonce and proof, on a control connection.
    Reply,
    /// The connector's nonce and proof, on a data connection.
    LaneHello,
    /// The acceptor's proof.
    Proof,
    /// The connector takes a data connection for a lane: frames follow.
    Confirm,
    /// Who an end is and what it offers.
    Hello,
    /// Why an end closes.
    Reject,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Challenge => "challenge",
            Kind::Reply => "reply",
            Kind::LaneHello => "lane hello",
            Kind::Proof => "proof",
            Kind::Confirm => "confirmation",
            Kind::Hello => "hello",
            Kind::Reject => "reject",
        }
    }
}

/// A protocol that opens with this handshake.
#[derive(Debug)]
pub struct Protocol {
    /// What errors call it: `Crossrail store`.
    pub name: &'static str,
    /// First bytes of every message. The first is not ASCII, so no text protocol starts this way.
    pub magic: [u8; 6],
    /// The version of the handshake and of the frames behind it.
    pub version: u16,
    /// Its messages and their fixed lengths. A message's kind byte is its position in this list, counted from 1.
    pub messages: &'static [(Kind, usize)],
    /// Its reasons to reject. A reason's code is its position in this list, counted from 1.
    pub rejects: &'static [RejectCode],
}

impl Protocol {
    /// Bytes of a message; of a hello, those in front of its body. 0: this protocol has no such message.
    pub fn length(&self, kind: Kind) -> usize {
        self.messages.iter().find(|(known, _)| *known == kind).map_or(0, |(_, length)| *length)
    }

    /// Which message starts with these bytes.
    ///
    /// # Errors
    /// Too few bytes, another protocol, or a message that this protocol does not have.
    pub fn decode_prelude(&self, bytes: &[u8]) -> Result<Kind, Malformed> {
        let Some(&[a, b, c, d, e, f, kind, reserved]) = bytes.first_chunk::<PRELUDE_LEN>() else {
            return Err(Malformed::Length { expected: PRELUDE_LEN, found: bytes.len() });
        };
        let start = [a, b, c, d, e, f];
        if start != self.magic {
            return Err(Malformed::Foreign { protocol: self.name, start });
        }
        if reserved != 0 {
            return Err(Malformed::Field("reserved byte"));
        }
        let place = usize::from(kind).checked_sub(1);
        let known = place.and_then(|place| self.messages.get(place));
        known.map(|(kind, _)| *kind).ok_or(Malformed::UnknownKind(kind))
    }

    /// The whole of `bytes` as a message of that kind: its length is right.
    fn expect<'a>(&self, bytes: &'a [u8], expected: Kind) -> Result<&'a [u8], Malformed> {
        let found = self.decode_prelude(bytes)?;
        if found != expected {
            return Err(Malformed::Kind { expected, found });
        }
        let length = self.length(expected);
        if bytes.len() == length { Ok(bytes) } else { Err(Malformed::Length { expected: length, found: bytes.len() }) }
    }

    /// As `expect`, for messages whose length is the same in every protocol that has them.
    pub(crate) fn fixed<'a, const N: usize>(&self, bytes: &'a [u8], kind: Kind) -> Result<&'a [u8; N], Malformed> {
        let bytes = self.expect(bytes, kind)?;
        bytes.try_into().map_err(|_| Malformed::Length { expected: N, found: bytes.len() })
    }

    /// The prelude of a message of `N` bytes, and zeros for the rest.
    pub(crate) fn start<const N: usize>(&self, kind: Kind) -> [u8; N] {
        let mut bytes = [0; N];
        self.write_prelude(&mut bytes, kind);
        bytes
    }

    fn write_prelude(&self, bytes: &mut [u8], kind: Kind) {
        let place = self.messages.iter().position(|(known, _)| *known == kind);
        bytes[..6].copy_from_slice(&self.magic);
        bytes[6] = place.map_or(0, |place| place as u8 + 1);
    }
}

/// Why bytes are not the message expected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// Another protocol's bytes.
    Foreign {
        /// The protocol expected.
        protocol: &'static str,
        /// What the bytes start with.
        start: [u8; 6],
    },
    /// Too few or too many bytes.
    Length {
        /// Bytes that the message has.
        expected: usize,
        /// Bytes received.
        found: usize,
    },
    /// A message out of order.
    Kind {
        /// The message expected.
        expected: Kind,
        /// The message received.
        found: Kind,
    },
    /// A kind byte that the protocol does not define.
    UnknownKind(u8),
    /// More bytes announced than are ever accepted.
    TooLong {
        /// Bytes accepted.
        limit: usize,
        /// Bytes announced.
        announced: u64,
    },
    /// A field's value is out of range.
    Field(&'static str),
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Malformed::Foreign { protocol, start } => {
                write!(f, "not a {protocol} (it sent \"{}\")", start.escape_ascii())
            }
            Malformed::Length { expected, found } => write!(f, "received {found} bytes instead of {expected}"),
            Malformed::Kind { expected, found } => {
                write!(f, "received a {} message instead of a {}", found.name(), expected.name())
            }
            Malformed::UnknownKind(kind) => write!(f, "received a message of unknown kind {kind}"),
            Malformed::TooLong { limit, announced } => {
                write!(f, "the message announces {announced} bytes; at most {limit} are accepted")
            }
            Malformed::Field(what) => write!(f, "malformed field: {what}"),
        }
    }
}

impl std::error::Error for Malformed {}

/// `N` bytes of a message of fixed size, from `AT` on.
pub(crate) fn part<const AT: usize, const N: usize, const M: usize>(bytes: &[u8; M]) -> [u8; N] {
    const { assert!(AT + N <= M) };
    let mut out = [0; N];
    out.copy_from_slice(&bytes[AT..AT + N]);
    out
}

/// Checks bytes that no version has given a meaning yet.
pub(crate) fn check_reserved(bytes: &[u8]) -> Result<(), Malformed> {
    if bytes.iter().all(|byte| *byte == 0) { Ok(()) } else { Err(Malformed::Field("reserved bytes")) }
}

/// The acceptor's opening message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Challenge {
    /// The version that the acceptor speaks.
    pub version: u16,
    /// [`FLAG_SECRET`], [`FLAG_TOKEN`], [`FLAG_USER`]: what the proof must contain.
    pub flags: u8,
    /// The acceptor's worker id, in the workers' protocol.
    pub id: Option<[u8; 16]>,
    /// Fresh random bytes.
    pub nonce: [u8; 32],
}

impl Challenge {
    /// The message's bytes.
    pub fn encode(&self, protocol: &Protocol) -> Vec<u8> {
        let mut out = vec![0; protocol.length(Kind::Challenge)];
        protocol.write_prelude(&mut out, Kind::Challenge);
        out[8..10].copy_from_slice(&self.version.to_le_bytes());
        out[10] = self.flags;
        let nonce = out.len() - self.nonce.len();
        out[nonce..].copy_from_slice(&self.nonce);
        out[16..nonce].iter_mut().zip(self.id.unwrap_or_default()).for_each(|(to, byte)| *to = byte);
        out
    }

    /// The message out of its bytes. Unknown flags are kept: the connector refuses demands that it cannot meet.
    ///
    /// # Errors
    /// Not a challenge of this protocol.
    pub fn decode(protocol: &Protocol, bytes: &[u8]) -> Result<Challenge, Malformed> {
        let bytes = protocol.expect(bytes, Kind::Challenge)?;
        let short = Malformed::Length { expected: protocol.length(Kind::Challenge), found: bytes.len() };
        let (head, nonce) = bytes.split_last_chunk::<32>().ok_or_else(|| short.clone())?;
        let (head, id) = head.split_first_chunk::<16>().ok_or(short)?;
        check_reserved(&head[11..])?;
        Ok(Challenge {
            version: u16::from_le_bytes(part::<8, 2, _>(head)),
            flags: head[10],
            id: id.try_into().ok(),
            nonce: *nonce,
        })
    }
}

/// The connector's answer on a control connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The version that the connector speaks.
    pub version: u16,
    /// [`FLAG_SECRET`], [`FLAG_TOKEN`], [`FLAG_USER`]: what the proof contains.
    pub flags: u8,
    /// Fresh random bytes.
    pub nonce: [u8; 32],
    /// The connector's proof.
    pub mac: [u8; 32],
}

impl Reply {
    /// The message's bytes.
    pub fn encode(&self, protocol: &Protocol) -> [u8; REPLY_LEN] {
        let mut out = protocol.start::<REPLY_LEN>(Kind::Reply);
        out[8..10].copy_from_slice(&self.version.to_le_bytes());
        out[10] = self.flags;
        out[16..48].copy_from_slice(&self.nonce);
        out[48..].copy_from_slice(&self.mac);
        out
    }

    /// The message out of its bytes.
    ///
    /// # Errors
    /// Not a reply of this protocol.
    pub fn decode(protocol: &Protocol, bytes: &[u8]) -> Result<Reply, Malformed> {
        let bytes = protocol.fixed::<REPLY_LEN>(bytes, Kind::Reply)?;
        check_reserved(&bytes[11..16])?;
        Ok(Reply {
            version: u16::from_le_bytes(part::<8, 2, _>(bytes)),
            flags: bytes[10],
            nonce: part::<16, 32, _>(bytes),
            mac: part::<48, 32, _>(bytes),
        })
    }
}

/// The acceptor's proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Proof {
    /// Over the whole exchange.
    pub mac: [u8; 32],
}

impl Proof {
    /// The message's bytes.
    pub fn encode(&self, protocol: &Protocol) -> [u8; PROOF_LEN] {
        let mut out = protocol.start::<PROOF_LEN>(Kind::Proof);
        out[8..].copy_from_slice(&self.mac);
        out
    }

    /// The message out of its bytes.
    ///
    /// # Errors
    /// Not a proof of this protocol.
    pub fn decode(protocol: &Protocol, bytes: &[u8]) -> Result<Proof, Malformed> {
        let bytes = protocol.fixed::<PROOF_LEN>(bytes, Kind::Proof)?;
        Ok(Proof { mac: part::<8, 32, _>(bytes) })
    }
}

/// The connector's last message on a data connection. It has nothing to prove: [`Kind::LaneHello`] has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Confirm;

impl Confirm {
    /// The message's bytes.
    pub fn encode(&self, protocol: &Protocol) -> [u8; CONFIRM_LEN] {
        protocol.start::<CONFIRM_LEN>(Kind::Confirm)
    }

    /// The message out of its bytes.
    ///
    /// # Errors
    /// Not a confirmation of this protocol.
    pub fn decode(protocol: &Protocol, bytes: &[u8]) -> Result<Confirm, Malformed> {
        protocol.fixed::<CONFIRM_LEN>(bytes, Kind::Confirm).map(|_| Confirm)
    }
}

/// Why an end closes, as the other end receives it. No protocol has all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejectCode {
    /// Wrong secret, token or user.
    Refused,
    /// Versions or parameters differ.
    Mismatch,
    /// The other end broke the protocol.
    Protocol,
    /// Too many handshakes are in progress; retrying may help.
    Busy,
    /// The acceptor has as many clients as it admits.
    Full,
    /// The handshake took too long.
    Timeout,
}

impl RejectCode {
    /// The kind of error that the rejected end reports.
    pub fn kind(self) -> ErrorKind {
        match self {
            RejectCode::Refused | RejectCode::Busy => ErrorKind::Refused,
            RejectCode::Mismatch => ErrorKind::Mismatch,
            RejectCode::Protocol => ErrorKind::Protocol,
            RejectCode::Full => ErrorKind::Exhausted,
            RejectCode::Timeout => ErrorKind::Timeout,
        }
    }
}

/// An end's last message: why it closes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reject {
    /// What the rejected end branches on.
    pub code: RejectCode,
    /// One line for people; control characters are replaced when decoding.
    pub text: String,
    /// Why, more precisely than the code, at the end that rejects. It does not travel.
    pub reason: Option<Reason>,
}

impl Reject {
    /// A reject with this reason.
    pub fn new(code: RejectCode, text: impl Into<String>) -> Reject {
        let reason = match code {
            RejectCode::Busy => Some(Reason::Busy),
            RejectCode::Full => Some(Reason::Full),
            _ => None,
        };
        Reject { code, text: text.into(), reason }
    }

    /// Gives the reason that this end's own error has.
    #[must_use]
    pub fn because(self, reason: Reason) -> Reject {
        Reject { reason: Some(reason), ..self }
    }

    /// The message's bytes. Text beyond [`REJECT_TEXT_MAX`] is cut; a code that the protocol does not have travels as
    /// [`RejectCode::Protocol`].
    pub fn encode(&self, protocol: &Protocol) -> [u8; REJECT_LEN] {
        let place = |code| protocol.rejects.iter().position(|known| *known == code);
        let place = place(self.code).or_else(|| place(RejectCode::Protocol));
        let mut length = self.text.len().min(REJECT_TEXT_MAX);
        while !self.text.is_char_boundary(length) {
            length -= 1;
        }
        let mut out = protocol.start::<REJECT_LEN>(Kind::Reject);
        out[8] = place.map_or(0, |place| place as u8 + 1);
        out[10..12].copy_from_slice(&(length as u16).to_le_bytes());
        out[12..12 + length].copy_from_slice(&self.text.as_bytes()[..length]);
        out
    }

    /// The message out of its bytes.
    ///
    /// # Errors
    /// Not a reject of this protocol.
    pub fn decode(protocol: &Protocol, bytes: &[u8]) -> Result<Reject, Malformed> {
        let bytes = protocol.fixed::<REJECT_LEN>(bytes, Kind::Reject)?;
        let place = usize::from(bytes[8]).checked_sub(1);
        let code = place.and_then(|place| protocol.rejects.get(place)).ok_or(Malformed::Field("reject code"))?;
        let length = usize::from(u16::from_le_bytes(part::<10, 2, _>(bytes)));
        let text = bytes.get(12..12 + length).ok_or(Malformed::Field("length of the reject text"))?;
        Ok(Reject::new(*code, printable(&String::from_utf8_lossy(text))))
    }
}

/// `text` with nothing in it that could steer a terminal or break a line of a log.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}
