//! The name of an incoming transfer on the wire.

/// Where chunks go at the other end: an index and the serial that tells its reuses apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Index in the receiver's table of incoming transfers.
    pub index: u32,
    /// Its serial.
    pub serial: u32,
}

impl Target {
    pub(crate) fn pack(self) -> u64 {
        u64::from(self.serial) << 32 | u64::from(self.index)
    }

    pub(crate) fn unpack(tag: u64) -> Target {
        Target { index: tag as u32, serial: (tag >> 32) as u32 }
    }
}
