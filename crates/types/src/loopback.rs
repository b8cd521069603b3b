//! The loopback address of this machine.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};

/// The address that reaches this machine only: `127.0.0.1`, or `::1` where loopback has only IPv6.
///
/// The default of listeners and clients on loopback. Not cached, because the addresses of a network namespace change.
pub fn loopback() -> IpAddr {
    let has = |address: IpAddr| UdpSocket::bind((address, 0)).is_ok();
    let (v4, v6) = (Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into());
    if !has(v4) && has(v6) { v6 } else { v4 }
}
