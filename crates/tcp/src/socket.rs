//! Connections of a rail: binding, listening, dialling, socket options.

use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use crossrail_types::{Error, ErrorKind, Reason, Result};
use nix::net::if_::if_nametoindex;
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

use crate::sys;

/// Maximum number of connections waiting to be accepted.
const BACKLOG: i32 = 4096;

/// The local end of a rail.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Binding {
    /// Interface to bind to, if the system permits it. Every packet then leaves through this interface, even if another
    /// one has a route to the same network. See [`Binding::warning`].
    pub device: Option<String>,
    /// The source address.
    pub address: IpAddr,
}

impl Binding {
    /// A warning for the log if connections of this rail cannot be bound to their device, so that the routing table
    /// selects the interface. `None` if they can be, or if no device is named.
    pub fn warning(&self) -> Option<String> {
        let device = self.device.as_deref()?;
        let socket = Socket::new(Domain::for_address(SocketAddr::new(self.address, 0)), Type::STREAM, None).ok()?;
        let error = socket.bind_device(Some(device.as_bytes())).err()?;
        Some(format!(
            "{device}: SO_BINDTODEVICE: {error}; only the source address {} is bound and routing selects the device",
            self.address
        ))
    }

    fn name(&self) -> String {
        self.device.as_ref().map_or_else(|| self.address.to_string(), |device| format!("{device} ({})", self.address))
    }

    /// The source address with `port`, and with the scope id that a link-local IPv6 address requires.
    fn socket_address(&self, port: u16, remote_scope: u32) -> SocketAddr {
        match self.address {
            IpAddr::V6(ip) if ip.is_unicast_link_local() => {
                let scope = self.device.as_deref().and_then(|name| if_nametoindex(name).ok());
                SocketAddr::V6(SocketAddrV6::new(ip, port, 0, scope.unwrap_or(remote_scope)))
            }
            ip => SocketAddr::new(ip, port),
        }
    }

    /// Binds to the device, unless the peer is on this machine: packets to it use `lo` whatever their addresses. A
    /// refusal by the system is ignored here and reported by [`Binding::warning`].
    fn bind_device(&self, socket: &SockRef<'_>, remote: IpAddr) {
        if let Some(device) = &self.device
            && !is_local(remote)
        {
            let _ = socket.bind_device(Some(device.as_bytes()));
        }
    }

    /// Binds an accepted connection to this rail's device, as [`dial`] does for the connecting end.
    ///
    /// # Errors
    /// `Io` if the connection is already closed.
    pub fn adopt(&self, stream: &TcpStream) -> Result<()> {
        let remote = stream.peer_addr().map_err(|source| Error::io("accept", "getpeername", &source))?;
        self.bind_device(&SockRef::from(stream), remote.ip());
        Ok(())
    }
}

/// Whether `ip` is an address of this machine.
fn is_local(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback() || UdpSocket::bind((ip, 0)).is_ok()
}

/// Selects cubic, or else reno, for connections within one machine, where there is nothing to probe or to pace and
/// BBR's pacing costs up to half the rate. Call it before the socket is connected: one that started under BBR stays
/// paced under any other algorithm. Accepted connections inherit from their listener. If neither is available, the
/// system's default stays.
fn choose_congestion(socket: &SockRef<'_>, within: bool) {
    let _ = within.then(|| socket.set_tcp_congestion(b"cubic").or_else(|_| socket.set_tcp_congestion(b"reno")));
}

/// Listens on a rail's address; `port` 0 selects any free port. The listener is in blocking mode. The wildcard `::`
/// stands for IPv4 too.
///
/// # Errors
/// `Usage` if the port is in use or not permitted, or the address does not belong to this machine; otherwise `Io`.
pub fn listen(binding: &Binding, port: u16) -> Result<TcpListener> {
    let address = binding.socket_address(port, 0);
    let open = || -> io::Result<Socket> {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        if address.is_ipv6() {
            socket.set_only_v6(!address.ip().is_unspecified())?;
        }
        socket.set_reuse_address(true)?;
        choose_congestion(&SockRef::from(&socket), binding.address.to_canonical().is_loopback());
        Ok(socket)
    };
    let socket = open().map_err(|source| Error::io("listen", "socket", &source))?;
    socket
        .bind(&address.into())
        .and_then(|()| socket.listen(BACKLOG))
        .map_err(|source| listen_error(binding, address, &source))?;
    Ok(socket.into())
}

fn listen_error(binding: &Binding, address: SocketAddr, source: &io::Error) -> Error {
    let error = match source.kind() {
        io::ErrorKind::AddrInUse => {
            Error::new(ErrorKind::Usage, "listen", format!("{address}: the port is in use by another socket"))
                .with_reason(Reason::PortInUse)
                .with_hint("choose another port, or port 0 for any free one")
        }
        io::ErrorKind::AddrNotAvailable => {
            Error::new(ErrorKind::Usage, "listen", format!("{} is not an address of this machine", binding.name()))
                .with_reason(Reason::AddressUnknown)
                .with_hint("`ip address` lists the addresses of this machine")
        }
        io::ErrorKind::PermissionDenied => {
            Error::new(ErrorKind::Usage, "listen", format!("{address}: no permission to use this port"))
                .with_reason(Reason::NotPermitted)
                .with_hint("choose a port above 1023, or port 0 for any free one")
        }
        _ => Error::io("listen", "bind", source).with_lane(binding.name()),
    };
    error.with_io(source)
}

/// Connects to `remote` before `deadline`, from `binding` if given. The stream is in blocking mode.
///
/// # Errors
/// `Timeout` if the deadline passes, `Unreachable` if the network or the peer refuses, `Usage` if the binding does not
/// belong to this machine or to the peer's address family. The text names both ends.
pub fn dial(binding: Option<&Binding>, remote: SocketAddr, deadline: Instant) -> Result<TcpStream> {
    let from = binding.map_or_else(String::new, |binding| format!("{} to ", binding.name()));
    let fail = |kind, detail: String| Error::new(kind, "connect", format!("{from}{remote}: {detail}"));
    let socket = Socket::new(Domain::for_address(remote), Type::STREAM, Some(Protocol::TCP))
        .map_err(|source| Error::io("connect", "socket", &source))?;
    if let Some(binding) = binding {
        let scope = if let SocketAddr::V6(v6) = remote { v6.scope_id() } else { 0 };
        let local = binding.socket_address(0, scope);
        if local.is_ipv4() != remote.is_ipv4() {
            return Err(fail(ErrorKind::Usage, "one address is IPv4, the other IPv6".into())
                .with_hint("use an address of the peer's address family for the rail"));
        }
        binding.bind_device(&SockRef::from(&socket), remote.ip());
        // Defers the choice of the local port to connect(2): ports are then unique per remote address, not
        // machine-wide.
        let _ = sys::set_int(socket.as_raw_fd(), libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, 1);
        socket.bind(&local.into()).map_err(|source| {
            fail(ErrorKind::Usage, format!("bind: {source}"))
                .with_reason(Reason::AddressUnknown)
                .with_io(&source)
                .with_hint("`ip address` lists this machine's addresses")
        })?;
    }
    choose_congestion(&SockRef::from(&socket), is_local(remote.ip()));
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(fail(ErrorKind::Timeout, "the deadline has passed".into()));
    }
    socket.connect_timeout(&remote.into(), left).map_err(|source| {
        let error = match source.kind() {
            io::ErrorKind::TimedOut => fail(ErrorKind::Timeout, format!("no response within {left:.1?}"))
                .with_reason(Reason::NoResponse)
                .with_hint("check that the peer is running and that no firewall drops the port"),
            io::ErrorKind::ConnectionRefused => fail(ErrorKind::Unreachable, "connection refused".into())
                .with_reason(Reason::NotListening)
                .with_hint("no process listens on that port at the peer"),
            io::ErrorKind::NetworkUnreachable if remote.ip().to_canonical().is_loopback() => {
                fail(ErrorKind::Unreachable, source.to_string())
                    .with_hint("the loopback device is down: ip link set lo up")
            }
            io::ErrorKind::NetworkUnreachable | io::ErrorKind::HostUnreachable => {
                fail(ErrorKind::Unreachable, source.to_string())
                    .with_hint(format!("this machine has no way there: ip route get {}", remote.ip()))
            }
            _ => fail(ErrorKind::Unreachable, source.to_string()),
        };
        error.with_io(&source)
    })?;
    Ok(socket.into())
}

/// Socket options of a lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Maximum unsent bytes in the kernel (TCP_NOTSENT_LOWAT). Small, so that a slow rail does not accept frames that a
    /// faster one could carry; large enough to keep the link busy until the lane is polled again.
    pub notsent_lowat: u32,
    /// SO_SNDBUF in bytes; `None` keeps the kernel's autotuning, which is nearly always better.
    pub send_buffer: Option<usize>,
    /// SO_RCVBUF in bytes; `None` keeps the kernel's autotuning.
    pub receive_buffer: Option<usize>,
    /// Whether to send large payloads by reference to their pages, if the system supports it.
    pub zero_copy: bool,
    /// How long sent data may remain unacknowledged before the connection fails (TCP_USER_TIMEOUT), and roughly how
    /// long keepalive takes to detect a dead idle connection. A peer that accepts nothing for this long while its
    /// buffers are full counts as dead.
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
    /// Configures `stream` for a lane: non-blocking, without Nagle's algorithm, with these options.
    pub(crate) fn apply(&self, stream: &TcpStream) -> Result<()> {
        let socket = SockRef::from(stream);
        let fail = |call: &'static str| move |source: io::Error| Error::io("connect", call, &source);
        choose_congestion(&socket, stream.peer_addr().is_ok_and(|peer| is_local(peer.ip())));
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
