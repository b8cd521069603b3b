//! TCP as a carrier of rails: frames travel over the authenticated connection itself.

use std::net::TcpStream;

use crossrail_tcp::{CheckedLane, Options, TcpLane};
use crossrail_transport::Lane;
use crossrail_types::{Channels, Checksum, Result, Settings};

use super::carrier::{Carrier, Join, Obstacle};
use super::transport::{Availability, Local};
use crate::environment::TcpLimits;

/// See the module.
pub(super) struct Tcp;

impl Carrier for Tcp {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn class(&self) -> u16 {
        0
    }

    fn announcement(&self) -> u8 {
        b'R'
    }

    fn availability(&self, local: &Local<'_>) -> Availability {
        if local.rails.is_empty() {
            let fix = "bring one up: ip link set lo up for this machine; `crossrail info` lists the devices";
            return Availability::Unusable("no network device is up".to_owned(), Some(fix.to_owned()));
        }
        let names: Vec<_> = local.rails.iter().map(|rail| rail.name.as_str()).collect();
        let (rails, TcpLimits { channels, threads, .. }) = (local.rails.len(), local.tcp_limits);
        let connections = match local.settings.channels {
            Channels::Auto if channels > 1 => format!("1 to {channels} connections"),
            _ if channels == 1 => "1 connection".to_owned(),
            _ => format!("{channels} connections"),
        };
        let on = if threads > 1 { format!("on up to {threads} threads") } else { "without threads".to_owned() };
        Availability::Usable(format!("{rails} rails: {}; {connections} each, {on}", names.join(" ")))
    }

    fn is_offered(&self, _settings: &Settings) -> bool {
        true
    }

    fn obstacle(&self, _settings: &Settings) -> Option<Obstacle> {
        None
    }

    fn join(&self, stream: TcpStream, join: Join<'_>) -> Result<Box<dyn Lane>> {
        let options = Options::default();
        let label = join.label.to_owned();
        Ok(match join.checksum {
            Checksum::Off => Box::new(TcpLane::new(stream, join.id, label, &options)?),
            Checksum::Crc => Box::new(CheckedLane::checked(stream, join.id, label, &options)?),
        })
    }

    fn waits_to_join(&self) -> bool {
        false
    }

    fn checksum(&self, agreed: Checksum) -> Checksum {
        agreed
    }

    fn is_widened(&self) -> bool {
        true
    }

    fn sends_unasked(&self) -> bool {
        true
    }

    fn rests(&self) -> bool {
        true
    }
}
