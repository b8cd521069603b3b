use std::net::SocketAddr;

use crate::message::Malformed;

/// Longest name, release or device name, in bytes.
const NAME_MAX: usize = 256;

/// Checks text of the peer's that this end will show: not too long, no control characters.
pub(super) fn check_text(what: &'static str, text: &str) -> Result<(), Malformed> {
    if text.len() > NAME_MAX || text.chars().any(char::is_control) { Err(Malformed::Field(what)) } else { Ok(()) }
}

/// `ip:port` for people: an IPv4 peer of an IPv6 socket under its IPv4 address.
pub(super) fn tcp_name(address: SocketAddr) -> String {
    SocketAddr::new(address.ip().to_canonical(), address.port()).to_string()
}
