//! Carriers: transports of frames between the network devices of two ends.

use std::net::TcpStream;
use std::time::Instant;

use crossrail_transport::Lane;
use crossrail_types::{Checksum, Error, LaneId, Result, Settings};

use super::transport::{Availability, Local};

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

    /// Number of its devices to which no rail leads: its lanes are spread over them by their numbers, and go over any rail
    /// only to find each other. 0: a rail's lanes use the rail.
    fn devices(&self, _settings: &Settings) -> usize {
        0
    }

    /// Why the settings that allow it do not lead to its use; `None`: they do.
    fn obstacle(&self, settings: &Settings) -> Option<Obstacle>;

    /// Makes an authenticated connection a lane, which may keep it. The peer does the same at the same time.
    ///
    /// # Errors
    /// Why it did not come up: the rail is redialled later.
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

    /// Whether long messages can be sent eagerly, without asking the receiver first.
    fn sends_unasked(&self) -> bool {
        false
    }

    /// Whether its lanes need no polls while nothing goes over them ([`LaneRecord::resting`]).
    fn rests(&self) -> bool {
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
    /// Its number among the endpoint's lanes, the same at both ends.
    pub(super) number: usize,
    /// The network interface here, if it is known.
    pub(super) interface: Option<&'a str>,
    pub(super) loopback: bool,
    pub(super) deadline: Instant,
}
