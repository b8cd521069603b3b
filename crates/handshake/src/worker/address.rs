use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6, ToSocketAddrs};
use std::sync::mpsc;
use std::time::Instant;

use crossrail_types::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::hello::check_text;
use super::wire::WireError;

/// An address starts with this; so it is told from text.
const MAGIC: [u8; 4] = *b"\xc5XRA";
const VERSION: u8 = 1;
const CHECKSUM_LEN: usize = 8;
/// Largest encoded address, in bytes.
pub const ADDRESS_MAX: usize = 8 * 1024;
/// Most TCP addresses in one.
const CONTROL_MAX: usize = 128;

/// How a worker is reached. Opaque bytes to the user, who carries it to the other end by whatever means there is.
///
/// Whoever holds the address may connect where no secret is set, so hand it to the peers only. `Debug` hides the token.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    /// The worker's id.
    pub worker: [u8; 16],
    /// Its name for people.
    pub name: String,
    /// Its machine's boot id.
    pub boot_id: String,
    /// Proves that the connector holds this address.
    pub token: [u8; 16],
    /// The abstract name of its Unix socket.
    pub unix: Option<String>,
    /// Where it accepts sessions over TCP, best first.
    pub control: Vec<SocketAddr>,
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Address")
            .field("name", &self.name)
            .field("boot_id", &self.boot_id)
            .field("unix", &self.unix)
            .field("control", &self.control)
            .finish_non_exhaustive()
    }
}

impl Address {
    /// The address as bytes: versioned, with a checksum.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.push(VERSION);
        match postcard::to_extend(self, out) {
            Ok(mut out) => {
                let sum = checksum(&out);
                out.extend_from_slice(&sum);
                out
            }
            Err(_) => unreachable!("these fields always serialize into a Vec"),
        }
    }

    /// The address that these bytes are.
    ///
    /// # Errors
    /// `Usage`: no address at all, one of another version, or a damaged one.
    pub fn decode(bytes: &[u8]) -> Result<Address> {
        let fail = |detail: String| Error::new(ErrorKind::Usage, "worker address", detail);
        let length = bytes.len();
        if length > ADDRESS_MAX {
            return Err(fail(format!("{length} bytes are too many for one: at most {ADDRESS_MAX}")));
        }
        let Some(rest) = bytes.strip_prefix(&MAGIC) else {
            return Err(fail(format!("these {length} bytes are none")).with_hint("pass Worker.address unchanged"));
        };
        // The version first: another one may keep its checksum elsewhere.
        match rest.first() {
            Some(&VERSION) => {}
            Some(other) => {
                return Err(fail(format!("is of version {other}, this release reads version {VERSION}"))
                    .with_hint("run the same Crossrail release at both ends"));
            }
            None => return Err(fail("damaged: it ends after its first bytes".to_owned())),
        }
        let damaged = |what: &str| fail(format!("damaged: {what}")).with_hint("copy all of its bytes, unchanged");
        let Some((body, sum)) = bytes.split_last_chunk::<CHECKSUM_LEN>() else {
            return Err(damaged("too short"));
        };
        if checksum(body) != *sum {
            return Err(damaged("the checksum differs"));
        }
        let body = body.get(MAGIC.len() + 1..).ok_or_else(|| damaged("too short"))?;
        let address: Address = postcard::from_bytes(body).map_err(|_| damaged("its fields do not parse"))?;
        address.validate().map_err(|e| damaged(&e.to_string()))?;
        Ok(address)
    }

    fn validate(&self) -> std::result::Result<(), WireError> {
        check_text("name", &self.name)?;
        check_text("boot id", &self.boot_id)?;
        if let Some(unix) = &self.unix {
            check_text("socket name", unix)?;
        }
        if self.control.len() > CONTROL_MAX {
            return Err(WireError::Field("list of control addresses"));
        }
        Ok(())
    }
}

fn checksum(bytes: &[u8]) -> [u8; CHECKSUM_LEN] {
    let mut out = [0; CHECKSUM_LEN];
    out.copy_from_slice(&Sha256::digest(bytes)[..CHECKSUM_LEN]);
    out
}

/// Whom to connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// A worker whose address is known.
    Worker(Address),
    /// Whoever listens there; tried in this order.
    Control(Vec<SocketAddr>),
}

impl Target {
    /// A worker's address, or the text `host:port`, `[v6]:port`, `host`, `v6` (the last two with `default_port`). A
    /// host name is looked up, until `deadline`.
    ///
    /// # Errors
    /// `Usage`: neither of these; `Unreachable`: the name is not known; `Timeout`: the look-up takes too long.
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
            None => resolve(host, port, deadline).map(Target::Control),
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
            // Two colons: an IPv6 address without brackets, and so without a port.
            Some((_, rest)) if rest.contains(':') => (text, default_port),
            Some((host, digits)) => (host, port(digits)?),
            None => (text, default_port),
        }
    };
    if host.is_empty() {
        return Err(usage(format!("{text}: no host")));
    }
    // The system's lookup would take 7471 for 0.0.29.47.
    if host.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(usage(format!("{text}: {host} is a number alone, no host")));
    }
    Ok((host, port))
}

/// An IP address with its scope (0: none), or `None` for a name.
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

/// Looks a name up in a thread of its own, since the resolver knows no deadline. The thread ends with the look-up.
fn resolve(host: &str, port: u16, deadline: Instant) -> Result<Vec<SocketAddr>> {
    let (send, receive) = mpsc::sync_channel(1);
    let name = host.to_owned();
    std::thread::Builder::new()
        .name("crossrail-resolve".to_owned())
        .spawn(move || {
            let found = (name.as_str(), port).to_socket_addrs().map(Iterator::collect::<Vec<_>>);
            // Nobody waits any longer when this fails.
            let _ = send.send(found);
        })
        .map_err(|e| Error::io("connect", "spawn a thread", &e))?;
    let started = Instant::now();
    match receive.recv_timeout(deadline.saturating_duration_since(started)) {
        Ok(Ok(found)) if !found.is_empty() => Ok(found),
        Ok(Ok(_)) => Err(Error::new(ErrorKind::Unreachable, "connect", format!("{host} has no address"))),
        Ok(Err(e)) => Err(Error::new(ErrorKind::Unreachable, "connect", format!("look up {host}: {e}"))),
        Err(_) => Err(Error::new(
            ErrorKind::Timeout,
            "connect",
            format!("look up {host}: no answer in {:.1} s", started.elapsed().as_secs_f64()),
        )),
    }
}
