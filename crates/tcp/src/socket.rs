use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use crossrail_types::{Error, ErrorKind, Result};
use nix::net::if_::if_nametoindex;
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

use crate::sys;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 128;

/// The local end of a rail.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Binding {
    /// Interface to bind to, where the system permits: then each packet really leaves through it, even when
    /// another interface has a route to the same network. See [`Binding::warning`].
    pub device: Option<String>,
    /// Source address.
    pub address: IpAddr,
}

impl Binding {
    /// What to tell the user when connections of this rail cannot be bound to their device, so that the
    /// routing table decides where packets leave; `None` when they can, or when no device is named.
    pub fn warning(&self) -> Option<String> {
        let device = self.device.as_deref()?;
        let socket = Socket::new(Domain::for_address(SocketAddr::new(self.address, 0)), Type::STREAM, None).ok()?;
        let error = socket.bind_device(Some(device.as_bytes())).err()?;
        Some(format!(
            "{device}: SO_BINDTODEVICE: {error}; only the source address {} is bound, routing picks the device",
            self.address
        ))
    }

    fn name(&self) -> String {
        match &self.device {
            Some(device) => format!("{device} ({})", self.address),
            None => self.address.to_string(),
        }
    }

    /// The source address with `port`, and with the scope that a link-local IPv6 address needs.
    fn socket_address(&self, port: u16, remote_scope: u32) -> SocketAddr {
        match self.address {
            IpAddr::V6(ip) if ip.is_unicast_link_local() => {
                let scope = self.device.as_deref().and_then(|name| if_nametoindex(name).ok());
                SocketAddr::V6(SocketAddrV6::new(ip, port, 0, scope.unwrap_or(remote_scope)))
            }
            ip => SocketAddr::new(ip, port),
        }
    }

    /// Binds to the device unless the other end is this machine (its packets go through `lo` whatever their
    /// addresses) or the system says no ([`Binding::warning`] tells).
    fn bind_device(&self, socket: &SockRef<'_>, remote: IpAddr) {
        if let Some(device) = &self.device
            && !is_local(remote)
        {
            let _ = socket.bind_device(Some(device.as_bytes()));
        }
    }

    /// Ties an accepted connection to this rail's device, as [`dial`] does for the end that dials.
    ///
    /// # Errors
    /// `Io` when the connection is gone already.
    pub fn adopt(&self, stream: &TcpStream) -> Result<()> {
        let remote = stream.peer_addr().map_err(|source| Error::io("accept", "getpeername", &source))?;
        self.bind_device(&SockRef::from(stream), remote.ip());
        Ok(())
    }
}

/// Whether `ip` is an address of this machine.
fn is_local(ip: IpAddr) -> bool {
    ip.is_loopback() || UdpSocket::bind((ip, 0)).is_ok()
}

/// Listens on one rail's address; `port` 0 takes any free one. The listener blocks.
///
/// # Errors
/// `Usage` when the port is taken or the address is not one of this machine's; otherwise `Io`.
pub fn listen(binding: &Binding, port: u16) -> Result<TcpListener> {
    let address = binding.socket_address(port, 0);
    let open = || -> io::Result<(Socket, &'static str)> {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        if address.is_ipv6() {
            socket.set_only_v6(true)?;
        }
        socket.set_reuse_address(true)?;
        Ok((socket, "bind"))
    };
    let (socket, _) = open().map_err(|source| Error::io("listen", "socket", &source))?;
    socket
        .bind(&address.into())
        .and_then(|()| socket.listen(BACKLOG))
        .map_err(|source| listen_error(binding, address, &source))?;
    Ok(socket.into())
}

fn listen_error(binding: &Binding, address: SocketAddr, source: &io::Error) -> Error {
    match source.kind() {
        io::ErrorKind::AddrInUse => {
            Error::new(ErrorKind::Usage, "listen", format!("{address}: the port is taken by another socket"))
                .with_hint("choose another port, or port 0 for any free one")
        }
        io::ErrorKind::AddrNotAvailable => {
            Error::new(ErrorKind::Usage, "listen", format!("{}: not an address of this machine", binding.name()))
                .with_hint("`ip address` lists those it has")
        }
        io::ErrorKind::PermissionDenied => {
            Error::new(ErrorKind::Usage, "listen", format!("{address}: no permission for this port"))
                .with_hint("choose a port from 1024 on, or port 0 for any free one")
        }
        _ => Error::io("listen", "bind", source).with_lane(binding.name()),
    }
}

/// Connects to `remote`, from `binding` if given, by `deadline`. The stream blocks.
///
/// # Errors
/// `Timeout` when the deadline passes, `Unreachable` when the network or the peer says no, `Usage` when the
/// binding is not of this machine or not of the peer's address family. The text names both ends.
pub fn dial(binding: Option<&Binding>, remote: SocketAddr, deadline: Instant) -> Result<TcpStream> {
    let from = binding.map_or_else(String::new, |binding| format!("{} to ", binding.name()));
    let fail = |kind, detail: String| Error::new(kind, "connect", format!("{from}{remote}: {detail}"));
    let socket = Socket::new(Domain::for_address(remote), Type::STREAM, Some(Protocol::TCP))
        .map_err(|source| Error::io("connect", "socket", &source))?;
    if let Some(binding) = binding {
        let scope = if let SocketAddr::V6(v6) = remote { v6.scope_id() } else { 0 };
        let local = binding.socket_address(0, scope);
        if local.is_ipv4() != remote.is_ipv4() {
            return Err(fail(ErrorKind::Usage, "one is IPv4, the other IPv6".into())
                .with_hint("give the rail an address of the peer's family"));
        }
        binding.bind_device(&SockRef::from(&socket), remote.ip());
        // The port is chosen at connect, when the remote end is known: many more are free then.
        let _ = sys::set_int(socket.as_raw_fd(), libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, 1);
        socket.bind(&local.into()).map_err(|source| {
            fail(ErrorKind::Usage, format!("bind: {source}")).with_hint("`ip address` lists this machine's addresses")
        })?;
    }
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(fail(ErrorKind::Timeout, "no time left to connect".into()));
    }
    socket.connect_timeout(&remote.into(), left).map_err(|source| match source.kind() {
        io::ErrorKind::TimedOut => fail(ErrorKind::Timeout, format!("no answer within {left:.1?}"))
            .with_hint("is the peer up, and does a firewall drop the port?"),
        io::ErrorKind::ConnectionRefused => {
            fail(ErrorKind::Unreachable, "connection refused".into()).with_hint("nobody listens on that port there")
        }
        _ => fail(ErrorKind::Unreachable, source.to_string()),
    })?;
    Ok(socket.into())
}

/// How a lane uses its connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Unsent bytes that the kernel may hold (TCP_NOTSENT_LOWAT). Small, so that a slow rail does not take
    /// frames that a faster one could carry; large enough to cover the time until the lane is polled again.
    pub notsent_lowat: u32,
    /// SO_SNDBUF in bytes; `None` leaves the kernel's autotuning on, which is nearly always better.
    pub send_buffer: Option<usize>,
    /// SO_RCVBUF in bytes; `None` leaves the kernel's autotuning on.
    pub receive_buffer: Option<usize>,
    /// Send large payloads by reference to their pages where that is possible.
    pub zero_copy: bool,
    /// How long sent data may stay unacknowledged before the connection fails (TCP_USER_TIMEOUT), and about how
    /// long an idle connection may be dead before keepalive sees it. A peer that takes nothing for so long, with its
    /// buffers full, counts as dead.
    pub user_timeout: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            notsent_lowat: 256 * 1024,
            send_buffer: None,
            receive_buffer: None,
            zero_copy: true,
            user_timeout: Duration::from_secs(10),
        }
    }
}

impl Options {
    /// Makes `stream` a lane's: non-blocking, without Nagle's delay, with these limits.
    pub(crate) fn apply(&self, stream: &TcpStream) -> Result<()> {
        let socket = SockRef::from(stream);
        let fail = |call: &'static str| move |source: io::Error| Error::io("connect", call, &source);
        if stream.peer_addr().is_ok_and(|peer| is_local(peer.ip())) {
            // Inside one machine nothing is to be probed or paced: BBR's pacing costs a fifth to a third. On a network
            // the system's choice stands. Where neither is to be had, that choice is kept.
            let _ = socket.set_tcp_congestion(b"cubic").or_else(|_| socket.set_tcp_congestion(b"reno"));
        }
        stream.set_nonblocking(true).map_err(fail("O_NONBLOCK"))?;
        socket.set_tcp_nodelay(true).map_err(fail("TCP_NODELAY"))?;
        socket.set_tcp_user_timeout(Some(self.user_timeout)).map_err(fail("TCP_USER_TIMEOUT"))?;
        let probe = (self.user_timeout / 3).max(Duration::from_secs(1));
        let keepalive = TcpKeepalive::new().with_time(probe).with_interval(probe).with_retries(3);
        socket.set_tcp_keepalive(&keepalive).map_err(fail("SO_KEEPALIVE"))?;
        let lowat = i32::try_from(self.notsent_lowat).unwrap_or(i32::MAX);
        sys::set_int(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, lowat)
            .map_err(fail("TCP_NOTSENT_LOWAT"))?;
        if let Some(bytes) = self.send_buffer {
            socket.set_send_buffer_size(bytes).map_err(fail("SO_SNDBUF"))?;
        }
        if let Some(bytes) = self.receive_buffer {
            socket.set_recv_buffer_size(bytes).map_err(fail("SO_RCVBUF"))?;
        }
        Ok(())
    }
}
