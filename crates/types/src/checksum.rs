//! Checksums of what lanes carry.

use std::fmt;

/// What notices bytes that are changed on their way over TCP, beside TCP's own sum of 16 bits. Two ends use the
/// stricter of what they ask for, the greater in this order.
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
