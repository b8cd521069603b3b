//! The frame header.

/// Length of a frame header in bytes, on every lane.
pub const HEAD_LEN: usize = 32;

/// The header of a frame, little-endian.
///
/// A lane reads only [`Head::payload_len`]; the other fields belong to the protocol:
///
/// | bytes | field |
/// |---|---|
/// | 0 | kind |
/// | 1 | flags |
/// | 2..4 | small |
/// | 4..8 | payload length |
/// | 8..12 | seq |
/// | 12..16 | ack |
/// | 16..20 | done |
/// | 20..24 | op |
/// | 24..32 | tag |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Head(pub [u8; HEAD_LEN]);

impl Head {
    /// Length of the payload that follows this header on the lane, in bytes.
    #[inline]
    pub fn payload_len(&self) -> u32 {
        u32::from_le_bytes([self.0[4], self.0[5], self.0[6], self.0[7]])
    }

    /// A header with the given kind and payload length; all other fields are zero.
    #[inline]
    pub fn new(kind: u8, payload_len: u32) -> Head {
        let mut bytes = [0; HEAD_LEN];
        bytes[0] = kind;
        bytes[4..8].copy_from_slice(&payload_len.to_le_bytes());
        Head(bytes)
    }

    /// The frame kind (byte 0).
    #[inline]
    pub fn kind(&self) -> u8 {
        self.0[0]
    }
}
