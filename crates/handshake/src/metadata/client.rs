use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::time::Instant;

use crossrail_types::{Error, ErrorKind, Reason, Result};

use super::{DONE, METADATA, SERVICE, exchange, receive, send};
use crate::pause::Pause;
use crate::resolve::resolve;
use crate::secret::Secret;

/// Sends one request to the metadata listener at `host:port`, and returns the answer. Tries the addresses of the host
/// in turn, and again until `deadline` while the listener is busy. This machine's own addresses are reached over
/// loopback first, where listeners without a secret are.
///
/// # Errors
/// `Unreachable`, `Timeout`; `Refused`: the secret, the user, or the request, with the listener's reason. `Mismatch`:
/// the version. `Protocol`: not a metadata listener.
pub fn request(
    host: &str,
    port: u16,
    secret: &Secret,
    operation: u8,
    body: &[u8],
    deadline: Instant,
) -> Result<Vec<u8>> {
    let named = resolve("metadata", host, port, deadline)?;
    let places = routes(&named);
    let count = places.len();
    let mut failure: Option<((u8, bool), Error)> = None;
    for (index, place) in places.into_iter().enumerate() {
        let share = Instant::now() + deadline.saturating_duration_since(Instant::now()) / (count - index) as u32;
        match attempts(place, secret, operation, body, share) {
            Ok(answer) => return Ok(answer),
            Err(error) => {
                let reached = match error.kind {
                    ErrorKind::Refused | ErrorKind::Mismatch => 2,
                    ErrorKind::Unreachable => 0,
                    _ => 1,
                };
                // Of those that got equally far: one that the caller named.
                let told = (reached, named.contains(&place));
                if failure.as_ref().is_none_or(|(before, _)| *before < told) {
                    failure = Some((told, error));
                }
            }
        }
    }
    let failure = failure.map(|(_, error)| error);
    Err(failure.unwrap_or_else(|| Error::new(ErrorKind::Unreachable, "metadata", format!("{host} has no address"))))
}

fn attempts(place: SocketAddr, secret: &Secret, operation: u8, body: &[u8], deadline: Instant) -> Result<Vec<u8>> {
    let mut pause = Pause::new(deadline);
    let mut busy = None;
    loop {
        match attempt(place, secret, operation, body, deadline) {
            Err(error) if error.reason == Some(Reason::Busy) && pause.before_retry() => busy = Some(error),
            // The listener has answered before: it is not silent.
            Err(error) if error.kind == ErrorKind::Timeout => return Err(busy.unwrap_or(error)),
            outcome => return outcome,
        }
    }
}

fn attempt(place: SocketAddr, secret: &Secret, operation: u8, body: &[u8], deadline: Instant) -> Result<Vec<u8>> {
    let peer = place.to_string();
    let stream = crossrail_tcp::dial(None, place, deadline).map_err(|error| error.with_peer(&peer))?;
    // A connection to a free local port can, rarely, connect to itself.
    if stream.local_addr().ok() == stream.peer_addr().ok() {
        let error = Error::new(ErrorKind::Unreachable, "metadata", "connect: connection refused");
        return Err(error.with_reason(Reason::NotListening).with_peer(peer));
    }
    let mut exchange = exchange(stream.as_fd(), "metadata", &peer, deadline);
    SERVICE.connect(&mut exchange, secret)?;
    exchange.stage("request");
    let answered = send(&exchange, operation, body).and_then(|()| receive(&exchange, |_| Ok(())));
    let (status, answer) = answered.map_err(|error| match error.reason {
        // Its place went to another client, or the listener has no room now.
        Some(Reason::ConnectionClosed) => error.with_reason(Reason::Busy),
        _ => error,
    })?;
    if status == DONE {
        return Ok(answer);
    }
    let why: String = String::from_utf8_lossy(&answer).chars().filter(|c| !c.is_control()).take(500).collect();
    Err(exchange.error(ErrorKind::Refused, format!("refused by the {}: {why}", METADATA.name)))
}

/// The addresses to try: for one of this machine's own, loopback of its family and of the other come first.
fn routes(found: &[SocketAddr]) -> Vec<SocketAddr> {
    let own: Vec<IpAddr> = nix::ifaddrs::getifaddrs()
        .into_iter()
        .flatten()
        .filter_map(|device| device.address)
        .filter_map(|address| {
            let v4 = address.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
            v4.or_else(|| address.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip())))
        })
        .collect();
    let (v4, v6) = (IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST));
    let mut routes = Vec::new();
    for place in found {
        let ip = place.ip().to_canonical();
        let local = ip.is_loopback() || ip.is_unspecified() || own.contains(&ip);
        let loopback = if ip.is_ipv4() { [v4, v6] } else { [v6, v4] };
        let near = loopback.iter().filter(|_| local).map(|ip| SocketAddr::new(*ip, place.port()));
        for route in near.chain([*place]) {
            if !routes.contains(&route) {
                routes.push(route);
            }
        }
    }
    routes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_addresses_are_reached_over_loopback_of_both_families() {
        let place = |text: &str| text.parse::<SocketAddr>().expect("an address");
        assert_eq!(routes(&[place("127.0.0.1:5")]), [place("127.0.0.1:5"), place("[::1]:5")]);
        assert_eq!(routes(&[place("[::1]:5")]), [place("[::1]:5"), place("127.0.0.1:5")]);
        assert_eq!(routes(&[place("192.0.2.7:5")]), [place("192.0.2.7:5")]);
        assert_eq!(routes(&[place("[2001:db8::7]:5"), place("192.0.2.7:5")]).len(), 2);
    }
}
