//! The workers' protocol: its table of messages, and the two that it does not share with the store's.
//!
//! ```text
//! LaneHello   96   version 8..10 | purpose 10 | 0 | rail 12..14 | channel 14..16
//!                  | session 16..32 | nonce 32..64 | mac 64..96                             connector -> acceptor
//! Hello       48   length 8..12 | 0 x4 | mac 16..48, then `length` bytes                   both ways, after the proofs
//! ```
//!
//! On a control connection: Challenge, Reply, Proof, the connector's Hello, the acceptor's Hello. On a data connection:
//! Challenge, LaneHello, Proof, Confirm.

use crate::message::{
    CONFIRM_LEN, Kind, Malformed, PROOF_LEN, Protocol, REJECT_LEN, REPLY_LEN, RejectCode, check_reserved, part,
};

pub use super::hello::{HELLO_MAX, decode_hello};

/// Length of a challenge.
const CHALLENGE_LEN: usize = 64;
/// Length of a [`LaneHello`].
pub const LANE_HELLO_LEN: usize = 96;
/// Length of the fixed part in front of a hello.
pub const HELLO_HEAD_LEN: usize = 48;

/// The workers' protocol.
pub static WORKER: Protocol = Protocol {
    name: "Crossrail peer",
    magic: *b"\xc5XRAIL",
    version: 1,
    messages: &[
        (Kind::Challenge, CHALLENGE_LEN),
        (Kind::Reply, REPLY_LEN),
        (Kind::LaneHello, LANE_HELLO_LEN),
        (Kind::Proof, PROOF_LEN),
        (Kind::Hello, HELLO_HEAD_LEN),
        (Kind::Reject, REJECT_LEN),
        (Kind::Confirm, CONFIRM_LEN),
    ],
    rejects: &[
        RejectCode::Refused,
        RejectCode::Mismatch,
        RejectCode::Protocol,
        RejectCode::Busy,
        RejectCode::Timeout,
        RejectCode::Full,
    ],
};

/// What a data connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum LanePurpose {
    /// Small messages and the protocol's own.
    Message = 0,
    /// Chunks of large transfers.
    Bulk = 1,
    /// One-sided writes between drivers of their own, without the engine's frames.
    Placing = 2,
}

/// The connector's answer on a data connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneHello {
    /// The version that the connector speaks.
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

impl LaneHello {
    /// The message's bytes.
    pub fn encode(&self) -> [u8; LANE_HELLO_LEN] {
        let mut out = WORKER.start::<LANE_HELLO_LEN>(Kind::LaneHello);
        out[8..10].copy_from_slice(&self.version.to_le_bytes());
        out[10] = self.purpose as u8;
        out[12..14].copy_from_slice(&self.rail.to_le_bytes());
        out[14..16].copy_from_slice(&self.channel.to_le_bytes());
        out[16..32].copy_from_slice(&self.session);
        out[32..64].copy_from_slice(&self.nonce);
        out[64..].copy_from_slice(&self.mac);
        out
    }

    /// The message out of its bytes.
    ///
    /// # Errors
    /// Not a lane hello.
    pub fn decode(bytes: &[u8]) -> Result<LaneHello, Malformed> {
        let bytes = WORKER.fixed::<LANE_HELLO_LEN>(bytes, Kind::LaneHello)?;
        check_reserved(&bytes[11..12])?;
        Ok(LaneHello {
            version: u16::from_le_bytes(part::<8, 2, _>(bytes)),
            purpose: match bytes[10] {
                0 => LanePurpose::Message,
                1 => LanePurpose::Bulk,
                2 => LanePurpose::Placing,
                _ => return Err(Malformed::Field("lane purpose")),
            },
            rail: u16::from_le_bytes(part::<12, 2, _>(bytes)),
            channel: u16::from_le_bytes(part::<14, 2, _>(bytes)),
            session: part::<16, 16, _>(bytes),
            nonce: part::<32, 32, _>(bytes),
            mac: part::<64, 32, _>(bytes),
        })
    }
}

/// The fixed part in front of a hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HelloHead {
    /// Bytes that follow, at most [`HELLO_MAX`].
    pub length: u32,
    /// Over those bytes, with the session's hello key.
    pub mac: [u8; 32],
}

impl HelloHead {
    /// The message's bytes, without what follows them.
    pub fn encode(&self) -> [u8; HELLO_HEAD_LEN] {
        let mut out = WORKER.start::<HELLO_HEAD_LEN>(Kind::Hello);
        out[8..12].copy_from_slice(&self.length.to_le_bytes());
        out[16..].copy_from_slice(&self.mac);
        out
    }

    /// The message out of its bytes.
    ///
    /// # Errors
    /// Not the head of a hello, or of one longer than [`HELLO_MAX`].
    pub fn decode(bytes: &[u8]) -> Result<HelloHead, Malformed> {
        let bytes = WORKER.fixed::<HELLO_HEAD_LEN>(bytes, Kind::Hello)?;
        check_reserved(&bytes[12..16])?;
        let length = u32::from_le_bytes(part::<8, 4, _>(bytes));
        if length as usize > HELLO_MAX {
            return Err(Malformed::TooLong { limit: HELLO_MAX, announced: length.into() });
        }
        Ok(HelloHead { length, mac: part::<16, 32, _>(bytes) })
    }
}
