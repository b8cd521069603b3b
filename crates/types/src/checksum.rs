//! Checksums of lane payloads.

use std::fmt;

/// Checksum that detects corruption on TCP, in addition to TCP's own 16-bit checksum. The two ends use the stricter of
/// their settings: the greater in this order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Checksum {
    /// Nothing.
    #[default]
    Off,
    /// CRC-32C over every frame.
    Crc,
}

impl Checksum {
    const NAMES: [(&'static str, Checksum); 2] = [("off", Checksum::Off), ("crc", Checksum::Crc)];

    /// The checksum of that name.
    pub fn parse(name: &str) -> Option<Checksum> {
        Checksum::NAMES.iter().find(|(known, _)| *known == name).map(|(_, checksum)| *checksum)
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Checksum::NAMES.iter().find(|(_, checksum)| checksum == self).map_or("", |(name, _)| name))
    }
}
