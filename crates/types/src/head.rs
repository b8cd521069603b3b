/// Length of every frame's head, on every lane.
pub const HEAD_LEN: usize = 32;

/// The fixed head in front of every frame, little-endian.
///
/// Lanes read only [`Head::payload_len`]; what the other bytes mean is the protocol's business:
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
    /// Bytes that follow this head on the lane.
    #[inline]
    pub fn payload_len(&self) -> u32 {
        u32::from_le_bytes([self.0[4], self.0[5], self.0[6], self.0[7]])
    }

    /// A head of zeros but for its kind and payload length.
    #[inline]
    pub fn new(kind: u8, payload_len: u32) -> Head {
        let mut bytes = [0; HEAD_LEN];
        bytes[0] = kind;
        bytes[4..8].copy_from_slice(&payload_len.to_le_bytes());
        Head(bytes)
    }

    /// The kind byte.
    #[inline]
    pub fn kind(&self) -> u8 {
        self.0[0]
    }
}
