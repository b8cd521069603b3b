use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::time::Instant;

use crossrail_types::{Error, ErrorKind, Result};

use super::address::{Address, MAGIC};
use crate::resolve::resolve;

/// The destination of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// A worker whose address is known.
    Worker(Address),
    /// Any worker that listens at one of these addresses, tried in this order.
    Control(Vec<SocketAddr>),
}

impl Target {
    /// Parses a worker's address, or the text `host:port`, `[v6]:port`, `host` or `v6` (the last two with
    /// `default_port`). Resolves a host name until `deadline`.
    ///
    /// # Errors
    /// `Usage`: neither of these. `Unreachable`: unknown host name. `Timeout`: the look-up takes too long.
    pub fn parse(input: &[u8], default_port: u16, deadline: Instant) -> Result<Target> {
        if input.starts_with(&MAGIC) {
            return Address::decode(input).map(Target::Worker);
        }
        let text = std::str::from_utf8(input).ok().map(str::trim).filter(|text| !text.is_empty());
        let Some(text) = text.filter(|text| text.len() <= 512 && !text.chars().any(char::is_control)) else {
            return Err(Error::new(ErrorKind::Usage, "connect", "neither a worker's address nor host:port"));
        };
        let (host, port) = split(text, default_port)?;
        match literal(host)? {
            Some(address) => Ok(Target::Control(vec![match address {
                (IpAddr::V4(ip), _) => SocketAddr::new(IpAddr::V4(ip), port),
                (IpAddr::V6(ip), scope) => SocketAddr::V6(SocketAddrV6::new(ip, port, 0, scope)),
            }])),
            None => resolve("connect", host, port, deadline).map(Target::Control),
        }
    }
}

fn split(text: &str, default_port: u16) -> Result<(&str, u16)> {
    let usage = |detail: String| {
        Error::new(ErrorKind::Usage, "connect", detail).with_hint("write host:port, for IPv6 [address]:port")
    };
    let port = |digits: &str| match digits.parse::<u16>() {
        Ok(port) if port != 0 => Ok(port),
        _ => Err(usage(format!("{text}: \"{digits}\" is not a port"))),
    };
    let (host, port) = if let Some(rest) = text.strip_prefix('[') {
        match rest.split_once(']') {
            Some((host, "")) => (host, default_port),
            Some((host, rest)) => match rest.strip_prefix(':') {
                Some(digits) => (host, port(digits)?),
                None => return Err(usage(format!("{text}: \"{rest}\" behind the bracket"))),
            },
            None => return Err(usage(format!("{text}: the bracket is not closed"))),
        }
    } else {
        match text.split_once(':') {
            // Two colons: an IPv6 address without brackets, and therefore without a port.
            Some((_, rest)) if rest.contains(':') => (text, default_port),
            Some((host, digits)) => (host, port(digits)?),
            None => (text, default_port),
        }
    };
    if host.is_empty() {
        return Err(usage(format!("{text}: no host")));
    }
    // The system's resolver would read 7471 as 0.0.29.47.
    if host.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(usage(format!("{text}: {host} is a number alone, no host")));
    }
    Ok((host, port))
}

/// Parses an IP address with its scope id (0: none); `None` for a host name.
fn literal(host: &str) -> Result<Option<(IpAddr, u32)>> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(Some((ip, 0)));
    }
    let Some((ip, zone)) = host.split_once('%') else {
        return if host.contains(':') {
            Err(Error::new(ErrorKind::Usage, "connect", format!("{host} is not an IPv6 address")))
        } else {
            Ok(None)
        };
    };
    let bad = |what: String| Error::new(ErrorKind::Usage, "connect", format!("{host}: {what}"));
    let ip: Ipv6Addr = ip.parse().map_err(|_| bad(format!("{ip} is not an IPv6 address")))?;
    let scope = match zone.parse::<u32>() {
        Ok(index) => index,
        Err(_) => nix::net::if_::if_nametoindex(zone).map_err(|e| bad(format!("device {zone}: {e}")))?,
    };
    Ok(Some((IpAddr::V6(ip), scope)))
}
