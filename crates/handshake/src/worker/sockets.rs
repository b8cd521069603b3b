//! The listening sockets of a worker: which there are, on which ports, and who may connect to each.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{self as unix, UnixListener};
use std::sync::Arc;

use crossrail_locks::Mutex;
use crossrail_tcp::Binding;
use crossrail_types::{Error, ErrorKind, Ports, Reason, Result};

use super::hello::{Device, Identity};
use super::limits::Limits;
use crate::proof::random;

/// A rail to listen on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rail {
    /// The device's name.
    pub name: String,
    /// Device and address. The address must belong to this machine and must not be a wildcard.
    pub binding: Binding,
    /// The link's speed in Mbit/s, if known.
    pub speed_mbps: Option<u32>,
}

/// Where a worker listens.
#[derive(Clone, Debug, Default)]
pub struct ListenConfig {
    /// Whether to listen on an abstract Unix socket, for processes of this machine.
    pub unix: bool,
    /// Addresses for sessions over TCP. A wildcard stands for all of this machine's addresses.
    pub control: Vec<Binding>,
    /// The port for sessions; 0: any free one, of `ports` if these are given.
    pub port: u16,
    /// Rails for lanes. One whose address sessions come to as well shares their listener; the others listen on the same
    /// port where that is free, otherwise on any, of `ports` if these are given.
    pub rails: Vec<Rail>,
    /// The ports to choose from, except at loopback addresses.
    pub ports: Option<Ports>,
    /// Limits on half-open connections.
    pub limits: Limits,
    /// Whether to admit only holders of this worker's address, so that other users of this machine who know the port
    /// are refused. Not needed with a secret.
    pub require_token: bool,
}

/// A listening socket and its purpose.
pub(super) enum ListeningSocket {
    Unix(UnixListener),
    Tcp(TcpListener, Purpose),
}

/// Who may connect to a listening TCP socket: peers that open sessions, and lanes of the rails whose addresses they
/// come to. One port for both is one port to open in a firewall.
#[derive(Default)]
pub(super) struct Purpose {
    pub(super) sessions: bool,
    pub(super) rails: Mutex<Vec<Binding>>,
}

impl AsFd for ListeningSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            ListeningSocket::Unix(listener) => listener.as_fd(),
            ListeningSocket::Tcp(listener, _) => listener.as_fd(),
        }
    }
}

impl ListeningSocket {
    /// Its address, if it accepts sessions.
    fn for_sessions(&self) -> Option<(SocketAddr, &Purpose)> {
        match self {
            ListeningSocket::Tcp(listener, purpose) if purpose.sessions => Some((listener.local_addr().ok()?, purpose)),
            ListeningSocket::Tcp(..) | ListeningSocket::Unix(_) => None,
        }
    }

    /// The port, if it is that rail's alone.
    fn for_rail(&self, rail: &Binding) -> Option<u16> {
        match self {
            ListeningSocket::Tcp(listener, purpose) if !purpose.sessions && purpose.rails.lock().contains(rail) => {
                Some(listener.local_addr().ok()?.port())
            }
            ListeningSocket::Tcp(..) | ListeningSocket::Unix(_) => None,
        }
    }
}

/// Opens the sockets of `config`, and completes `me.hello` with their addresses.
///
/// # Errors
/// As [`super::Listener::start`].
pub(super) fn open(config: &ListenConfig, me: &mut Identity) -> Result<Vec<Arc<ListeningSocket>>> {
    for binding in &config.control {
        me.secret.allows_listening("listen", binding.address)?;
    }
    let mut sockets = Vec::new();
    me.hello.control.clear();
    me.hello.devices.clear();
    me.hello.unix = None;
    if config.unix {
        let name = format!("crossrail.{:032x}", u128::from_le_bytes(random()?));
        let fail = |call: &str, e: std::io::Error| Error::io("listen", call, &e).with_peer(format!("unix:@{name}"));
        let address = unix::SocketAddr::from_abstract_name(&name).map_err(|e| fail("socket name", e))?;
        let listener = UnixListener::bind_addr(&address).map_err(|e| fail("bind", e))?;
        listener.set_nonblocking(true).map_err(|e| fail("fcntl", e))?;
        sockets.push(Arc::new(ListeningSocket::Unix(listener)));
        me.hello.unix = Some(name);
    }
    // The IPv6 wildcard includes every other address.
    let everywhere = config.control.iter().find(|one| one.address.is_unspecified() && one.address.is_ipv6());
    let control = everywhere.map_or(&config.control[..], std::slice::from_ref);
    for binding in control {
        let (listener, local) = open_tcp(binding, config.port, None, config.ports)?;
        me.hello.control.extend(reachable_at(local)?);
        let purpose = Purpose { sessions: true, ..Purpose::default() };
        sockets.push(Arc::new(ListeningSocket::Tcp(listener, purpose)));
    }
    listen_on(&config.rails, config.ports, me, &mut sockets)?;
    Ok(sockets)
}

/// Listens on these rails and no others, and completes `me.hello` with them. Sockets that are there stay, unless they
/// are for other rails alone.
///
/// # Errors
/// As [`super::Listener::start`]; then `me` and `sockets` are as they were.
pub(super) fn listen_on(
    rails: &[Rail],
    ports: Option<Ports>,
    me: &mut Identity,
    sockets: &mut Vec<Arc<ListeningSocket>>,
) -> Result<()> {
    let sessions: Vec<(SocketAddr, &Purpose)> = sockets.iter().filter_map(|socket| socket.for_sessions()).collect();
    let shared =
        |address| sessions.iter().find(|(local, _)| includes(local.ip(), address)).map(|(local, _)| local.port());
    let (mut devices, mut further) = (Vec::new(), Vec::new());
    for rail in rails {
        let address = rail.binding.address;
        me.secret.allows_listening("listen", address)?;
        if address.is_unspecified() {
            let detail = format!("rail {}: {address} is not one device's address", rail.name);
            return Err(Error::new(ErrorKind::Config, "listen", detail));
        }
        let port = match (shared(address), sockets.iter().find_map(|socket| socket.for_rail(&rail.binding))) {
            (Some(port), _) => port,
            (None, Some(port)) => port,
            (None, None) => {
                let preferred = sessions.first().map(|(local, _)| local.port());
                let (listener, local) = open_tcp(&rail.binding, 0, preferred, ports)?;
                let purpose = Purpose { sessions: false, rails: Mutex::new(vec![rail.binding.clone()]) };
                further.push(Arc::new(ListeningSocket::Tcp(listener, purpose)));
                local.port()
            }
        };
        let loopback = address.to_canonical().is_loopback();
        devices.push(Device { name: rail.name.clone(), address, port, speed_mbps: rail.speed_mbps, loopback });
    }
    for (local, purpose) in sessions {
        let shares = |rail: &&Rail| includes(local.ip(), rail.binding.address);
        *purpose.rails.lock() = rails.iter().filter(shares).map(|rail| rail.binding.clone()).collect();
    }
    let is_wanted = |socket: &Arc<ListeningSocket>| match &**socket {
        ListeningSocket::Tcp(_, Purpose { sessions: false, rails: of }) => {
            let of = of.lock();
            rails.iter().any(|rail| of.contains(&rail.binding))
        }
        ListeningSocket::Tcp(..) | ListeningSocket::Unix(_) => true,
    };
    sockets.retain(is_wanted);
    sockets.extend(further);
    me.hello.devices = devices;
    Ok(())
}

/// Whether a socket bound to `listening` also gets connections to `address`.
fn includes(listening: IpAddr, address: IpAddr) -> bool {
    match listening {
        IpAddr::V4(any) if any.is_unspecified() => address.is_ipv4(),
        IpAddr::V6(any) if any.is_unspecified() => true,
        _ => listening == address,
    }
}

/// Listens on `port`; if that is 0, on `preferred` where it is free, otherwise on any, of `ports` beyond loopback.
fn open_tcp(
    binding: &Binding,
    port: u16,
    preferred: Option<u16>,
    ports: Option<Ports>,
) -> Result<(TcpListener, SocketAddr)> {
    let listen = |port| crossrail_tcp::listen(binding, port);
    let listener = match (ports.filter(|_| !binding.address.to_canonical().is_loopback()), preferred) {
        _ if port != 0 => listen(port)?,
        (Some(ports), _) => ports.listen(binding.address, preferred, listen)?,
        (None, Some(preferred)) => match listen(preferred) {
            Err(error) if error.reason == Some(Reason::PortInUse) => listen(0)?,
            result => result?,
        },
        (None, None) => listen(0)?,
    };
    let fail = |call: &str, e: std::io::Error| Error::io("listen", call, &e).with_peer(binding.address.to_string());
    listener.set_nonblocking(true).map_err(|e| fail("fcntl", e))?;
    let local = listener.local_addr().map_err(|e| fail("getsockname", e))?;
    Ok((listener, local))
}

/// The addresses at which others reach a socket bound to `local`; for a wildcard those of all devices, loopback last.
fn reachable_at(local: SocketAddr) -> Result<Vec<SocketAddr>> {
    if !local.ip().is_unspecified() {
        return Ok(vec![local]);
    }
    let devices = nix::ifaddrs::getifaddrs().map_err(|e| Error::io("listen", "getifaddrs", &e.into()))?;
    let mut found: Vec<SocketAddr> = devices
        .filter_map(|device| device.address)
        .filter_map(|address| {
            let v4 = address.as_sockaddr_in().map(|a| IpAddr::V4(a.ip()));
            // The IPv6 wildcard stands for both families.
            v4.or_else(|| address.as_sockaddr_in6().filter(|_| local.is_ipv6()).map(|a| IpAddr::V6(a.ip())))
        })
        .filter(|ip| !matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local()))
        .map(|ip| SocketAddr::new(ip, local.port()))
        .collect();
    found.sort_by_key(|address| address.ip().is_loopback());
    found.dedup();
    Ok(found)
}
