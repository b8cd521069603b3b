//! The table of what carries frames between network devices, and how lanes name its entries to the peer.

use crossrail_handshake::{LaneName, LanePurpose};
use crossrail_types::{Error, ErrorKind, Result};

use super::carrier::Carrier;
use super::fabric::Fabric;
use super::tcp::Tcp;
use super::ucx::Ucx;

/// The carriers, in the order in which they are tried.
pub(super) const CARRIERS: &[&dyn Carrier] = &[&Fabric, &Ucx, &Tcp];

/// The bits of a channel's number that count a rail's connections; the others tell their carrier.
const CHANNEL_BITS: u32 = 14;
pub(super) const CHANNEL_MASK: u16 = (1 << CHANNEL_BITS) - 1;
/// The channel number of a rail's message connection.
pub(super) const MESSAGE_CHANNEL: u16 = CHANNEL_MASK;

/// The channel of a carrier's connection with that number.
pub(super) fn channel_of(carrier: &dyn Carrier, number: u16) -> u16 {
    (carrier.class() << CHANNEL_BITS) | number
}

/// The carrier of a channel.
///
/// # Errors
/// `Protocol` when there is none of that class.
pub(super) fn carrier_of(channel: u16) -> Result<&'static dyn Carrier> {
    let class = channel >> CHANNEL_BITS;
    let unknown = || Error::new(ErrorKind::Protocol, "lane", format!("no carrier of rails has class {class}"));
    CARRIERS.iter().copied().find(|carrier| carrier.class() == class).ok_or_else(unknown)
}

/// The name of a carrier's connection with that number.
pub(super) fn name_of(carrier: &dyn Carrier, rail: u16, number: u16) -> LaneName {
    let purpose = if number == MESSAGE_CHANNEL { LanePurpose::Message } else { LanePurpose::Bulk };
    LaneName { rail, channel: channel_of(carrier, number), purpose }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_channel_tells_its_carrier_and_its_number() {
        let mut classes: Vec<u16> = CARRIERS.iter().map(|carrier| carrier.class()).collect();
        classes.sort_unstable();
        classes.dedup();
        assert_eq!(classes.len(), CARRIERS.len(), "two carriers of one class");
        assert!(classes.iter().all(|class| *class < 1 << (16 - CHANNEL_BITS)), "{classes:?}");
        for carrier in CARRIERS {
            for number in [0, 7, MESSAGE_CHANNEL] {
                let name = name_of(*carrier, 3, number);
                assert_eq!(carrier_of(name.channel).expect("known").name(), carrier.name());
                assert_eq!(name.channel & CHANNEL_MASK, number);
                assert_eq!(name.purpose == LanePurpose::Message, number == MESSAGE_CHANNEL);
            }
        }
        let error = carrier_of(3 << CHANNEL_BITS).err().expect("no carrier of that class");
        assert_eq!(error.kind, ErrorKind::Protocol);
    }

    #[test]
    fn carriers_announce_themselves_by_bytes_of_their_own() {
        let mut bytes: Vec<u8> = CARRIERS.iter().map(|carrier| carrier.announcement()).collect();
        bytes.sort_unstable();
        bytes.dedup();
        assert_eq!(bytes.len(), CARRIERS.len());
    }
}
