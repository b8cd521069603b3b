//! What carries frames between the network devices of two ends, and the table of that.

use std::net::TcpStream;
use std::time::Instant;

use crossrail_handshake::{LaneName, LanePurpose};
use crossrail_transport::Lane;
use crossrail_types::{Checksum, Error, ErrorKind, LaneId, Result, Settings};

use super::tcp::Tcp;
use super::transport::{Availability, Local};
use super::ucx::Ucx;

/// The carriers, in the order in which they are tried.
pub(super) const CARRIERS: &[&dyn Carrier] = &[&Ucx, &Tcp];

/// The bits of a channel's number that count a rail's connections; the others tell their carrier.
const CHANNEL_BITS: u32 = 14;
pub(super) const CHANNEL_MASK: u16 = (1 << CHANNEL_BITS) - 1;
/// The channel number of a rail's message connection.
pub(super) const MESSAGE_CHANNEL: u16 = CHANNEL_MASK;

/// What carries frames between two rails.
///
/// Both ends of a lane hold an authenticated TCP connection ([`handshake::dial_lane`]) and turn it into a lane by
/// [`Carrier::join`]. Methods are called on any thread, without any lock of the worker's.
pub(super) trait Carrier: Send + Sync {
    /// The name of its transport, with which the names of its lanes begin.
    fn name(&self) -> &'static str;

    /// The number by which lanes name it to the peer: below 4, different from the others'.
    fn class(&self) -> u16;

    /// What its connecting end announces, followed by the number of lanes: see [`Transport::announcement`].
    fn announcement(&self) -> u8;

    /// As [`Transport::availability`].
    fn availability(&self, local: &Local<'_>) -> Availability;

    /// As [`Transport::is_offered`].
    fn is_offered(&self, settings: &Settings) -> bool;

    /// Why the settings that allow it do not lead to its use; `None`: they do.
    fn obstacle(&self, settings: &Settings) -> Option<Obstacle>;

    /// Makes an authenticated connection a lane, which may keep it. The peer does the same at the same time.
    ///
    /// # Errors
    /// What kept it from coming up: the rail is dialled again later.
    fn join(&self, stream: TcpStream, join: Join<'_>) -> Result<Box<dyn Lane>>;

    /// Whether joining waits for the peer, so that an accepting end does so on a thread of its own.
    fn waits_to_join(&self) -> bool {
        true
    }

    /// The checksum that its frames have, of that which both ends agreed on: off if the link sees to integrity itself.
    fn checksum(&self, _agreed: Checksum) -> Checksum {
        Checksum::Off
    }

    /// Whether the number of a rail's connections that carry chunks is found by measuring.
    fn is_widened(&self) -> bool {
        false
    }

    /// Whether long messages can go without asking the receiver first.
    fn sends_unasked(&self) -> bool {
        false
    }

    /// Whether its lanes need no polls while nothing goes over them ([`LaneRecord::resting`]).
    fn rests(&self) -> bool {
        false
    }

    /// Whether a peer that is late with its part of the handshake is waited for: no other carrier follows.
    fn is_last(&self) -> bool {
        false
    }
}

/// Why a carrier is not used.
pub(super) struct Obstacle {
    pub(super) why: String,
    pub(super) fix: Option<String>,
}

impl From<Error> for Obstacle {
    fn from(error: Error) -> Obstacle {
        Obstacle { why: error.detail, fix: error.hint }
    }
}

/// What a carrier makes a lane of, beside the connection.
pub(super) struct Join<'a> {
    pub(super) settings: &'a Settings,
    pub(super) id: LaneId,
    /// The lane's name, to which the carrier may add.
    pub(super) label: &'a str,
    /// What [`Carrier::checksum`] answered.
    pub(super) checksum: Checksum,
    /// The network interface here, if it is known.
    pub(super) interface: Option<&'a str>,
    pub(super) loopback: bool,
    pub(super) deadline: Instant,
}

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
        assert_eq!(CARRIERS.iter().filter(|carrier| carrier.is_last()).count(), 1);
        assert!(CARRIERS.last().is_some_and(|carrier| carrier.is_last()), "what follows it would never be tried");
    }
}
