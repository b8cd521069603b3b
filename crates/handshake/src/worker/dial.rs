use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use crossrail_tcp::Binding;
use crossrail_types::{Error, ErrorKind, Reason, Result};
use nix::errno::Errno;
use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, UnixAddr};

use super::address::Address;
use super::hello::Identity;
use super::keys::Ticket;
use super::lane::{self, LaneName};
use super::session::{self, Agreed, Session, Stream};
use super::target::Target;
use super::text::tcp_name;
use super::wire::WORKER;
use crate::exchange::Exchange;
use crate::pause::Pause;

/// Opens a session with the worker that `target` names.
///
/// A worker's address is tried over its Unix socket first (if `prefer_unix`, and both are on one machine), then over
/// its TCP addresses in turn, each with its share of the time. Retries until `deadline` where the peer is busy, or its
/// own limit for a handshake ended the attempt. Blocks the calling thread until `deadline` at most.
///
/// # Errors
/// `Unreachable`, `Timeout`; `Refused` (secret, token); `Mismatch` (version, parameters); `Protocol` (not a Crossrail
/// peer). The text names the address, the stage, and how long it took.
pub fn connect(
    target: &Target,
    me: &Identity,
    control: Option<&Binding>,
    prefer_unix: bool,
    deadline: Instant,
) -> Result<Session> {
    let mut routes: Vec<Route<'_>> = Vec::new();
    let worker = match target {
        Target::Worker(address) => {
            let same_machine = prefer_unix && address.boot_id == me.hello.boot_id;
            routes.extend(address.unix.as_deref().filter(|_| same_machine).map(Route::Unix));
            routes.extend(tcp_routes(&address.control, control));
            Some(address)
        }
        Target::Control(addresses) => {
            routes.extend(tcp_routes(addresses, control));
            None
        }
    };
    let mut failures: Vec<Error> = Vec::new();
    let count = routes.len();
    for (index, route) in routes.into_iter().enumerate() {
        let left = deadline.saturating_duration_since(Instant::now());
        let share = Instant::now() + left / (count - index) as u32;
        match attempt(&route, me, worker, None, share) {
            Ok(session) => return Ok(session),
            // The peer itself refused; it would refuse on any other route.
            Err(error) if matches!(error.kind, ErrorKind::Refused | ErrorKind::Mismatch) => return Err(error),
            Err(error) => failures.push(error),
        }
    }
    Err(all_failed(failures, worker))
}

/// Moves a session from TCP to the peer's Unix socket, if both ends are on one machine.
///
/// `Ok(None)`: there is no such route (another machine or network namespace, or no socket); keep using `session`.
/// Otherwise the new session replaces it: the peer finds the old session's id in [`crate::Hello::replaces`]. Drop the
/// old session.
///
/// # Errors
/// As [`connect`], except `Unreachable`.
pub fn upgrade(session: &Session, me: &Identity, deadline: Instant) -> Result<Option<Session>> {
    let address = session.peer.address();
    let Some(name) = address.unix.as_deref() else { return Ok(None) };
    if session.stream.is_unix() || address.boot_id != me.hello.boot_id {
        return Ok(None);
    }
    match attempt(&Route::Unix(name), me, Some(&address), Some(session.ticket.session), deadline) {
        Ok(session) => Ok(Some(session)),
        Err(error) if error.kind == ErrorKind::Unreachable => Ok(None),
        Err(error) => Err(error),
    }
}

/// Dials one lane of a session from `binding` to a rail of the peer, and authenticates it.
///
/// The returned stream is in blocking mode with TCP_NODELAY set. Retries a busy peer until `deadline`.
///
/// # Errors
/// As [`connect`]; also `Refused` if the peer has closed the session.
pub fn dial_lane(
    ticket: &Ticket,
    binding: &Binding,
    remote: SocketAddr,
    lane: LaneName,
    deadline: Instant,
) -> Result<TcpStream> {
    let started = Instant::now();
    let mut pause = Pause::new(deadline);
    loop {
        let peer = tcp_name(remote);
        let stream = dial_tcp(Some(lane), remote, Some(binding), deadline)?;
        let mut exchange = Exchange::new(stream.as_fd(), &WORKER, "connect", peer, deadline).since(started);
        match lane::initiate(&mut exchange, ticket, lane) {
            Ok(()) => return Ok(stream),
            Err(error) if error.reason == Some(Reason::Busy) && pause.before_retry() => {}
            Err(error) => return Err(error),
        }
    }
}

/// One route to a peer.
enum Route<'a> {
    /// The abstract Unix socket of this name.
    Unix(&'a str),
    /// This TCP address, from this device.
    Tcp(SocketAddr, Option<&'a Binding>),
}

/// The addresses of `binding`'s family; all of them if none matches, so that connecting reports why.
fn tcp_routes<'a>(addresses: &[SocketAddr], binding: Option<&'a Binding>) -> Vec<Route<'a>> {
    let fits = |to: &SocketAddr| binding.is_none_or(|binding| binding.address.is_ipv4() == to.is_ipv4());
    let any = addresses.iter().any(fits);
    addresses.iter().filter(|to| !any || fits(to)).map(|to| Route::Tcp(*to, binding)).collect()
}

fn attempt(
    route: &Route<'_>,
    me: &Identity,
    worker: Option<&Address>,
    replaces: Option<[u8; 16]>,
    deadline: Instant,
) -> Result<Session> {
    let started = Instant::now();
    let mut pause = Pause::new(deadline);
    loop {
        let (stream, peer) = match route {
            Route::Unix(name) => (Stream::Unix(dial_unix(name, &mut pause)?), format!("unix:@{name}")),
            Route::Tcp(to, binding) => (Stream::Tcp(dial_tcp(None, *to, *binding, deadline)?), tcp_name(*to)),
        };
        let mut exchange = Exchange::new(stream.as_fd(), &WORKER, "connect", peer, deadline).since(started);
        match session::initiate(&mut exchange, me, worker, replaces, stream.is_unix()) {
            Ok(agreed) => {
                let Agreed { peer, ticket } = agreed;
                return Ok(Session { stream, peer, ticket, initiator: true });
            }
            // A timeout before ours is the peer's: on a busy machine one end waits longer for the other than that
            // allows.
            Err(error)
                if (error.reason == Some(Reason::Busy) || error.kind == ErrorKind::Timeout) && pause.before_retry() => {
            }
            Err(error) => return Err(error),
        }
    }
}

fn dial_tcp(lane: Option<LaneName>, to: SocketAddr, binding: Option<&Binding>, deadline: Instant) -> Result<TcpStream> {
    let started = Instant::now();
    let stream = crossrail_tcp::dial(binding, to, deadline).map_err(|e| {
        let kind = match e.kind {
            ErrorKind::Io => ErrorKind::Unreachable,
            kind => kind,
        };
        let lane = lane.map_or_else(String::new, |lane| format!("{lane}: "));
        let detail = format!("{lane}{}", e.detail);
        let hint = "check that a worker listens there and that no firewall drops the port".to_owned();
        let error = Error { kind, detail, hint: e.hint.clone().or(Some(hint)), ..e };
        error.with_peer(tcp_name(to)).with_waited(started.elapsed())
    })?;
    stream.set_nodelay(true).map_err(|e| Error::io("connect", "setsockopt TCP_NODELAY", &e).with_peer(tcp_name(to)))?;
    Ok(stream)
}

/// Connects to an abstract Unix socket. Linux fails with EAGAIN, instead of queueing, while the backlog is full.
fn dial_unix(name: &str, pause: &mut Pause) -> Result<UnixStream> {
    let started = Instant::now();
    let fail = |call: &str, e: Errno| {
        let (kind, reason) = match e {
            Errno::ECONNREFUSED | Errno::ENOENT => (ErrorKind::Unreachable, Some(Reason::NotListening)),
            Errno::EAGAIN => (ErrorKind::Timeout, Some(Reason::Busy)),
            _ => (ErrorKind::Io, None),
        };
        let source = std::io::Error::from(e);
        let error = Error::new(kind, "connect", format!("connect: {call}: {source}")).with_io(&source);
        Error { reason: reason.or(error.reason), ..error }
            .with_peer(format!("unix:@{name}"))
            .with_waited(started.elapsed())
    };
    let address = UnixAddr::new_abstract(name.as_bytes()).map_err(|e| fail("socket name", e))?;
    loop {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket =
            socket::socket(AddressFamily::Unix, SockType::Stream, flags, None).map_err(|e| fail("socket", e))?;
        match socket::connect(socket.as_raw_fd(), &address) {
            Ok(()) => {
                let stream = UnixStream::from(socket);
                stream.set_nonblocking(false).map_err(|e| Error::io("connect", "fcntl", &e))?;
                return Ok(stream);
            }
            Err(Errno::EAGAIN) if pause.before_retry() => {}
            Err(e) => return Err(fail("connect", e)),
        }
    }
}

/// Combines the errors of all routes into one.
fn all_failed(mut failures: Vec<Error>, worker: Option<&Address>) -> Error {
    let name = worker.map_or_else(|| "the peer".to_owned(), |address| address.name.clone());
    if failures.len() == 1 {
        return failures.remove(0);
    }
    if failures.is_empty() {
        let detail = "its address names no route from here: it listens on its own machine only";
        return Error::new(ErrorKind::Unreachable, "connect", detail)
            .with_peer(name)
            .with_hint("let it listen beyond loopback, with CROSSRAIL_SECRET set at both ends");
    }
    // The attempt that got furthest determines the kind and what to try; the text has all of them.
    let furthest = failures.iter().find(|e| e.kind != ErrorKind::Unreachable);
    let (kind, reason) = furthest.map_or((ErrorKind::Unreachable, None), |e| (e.kind, e.reason));
    let hint = furthest.and_then(|e| e.hint.clone());
    let all: Vec<String> =
        failures.iter().map(|e| format!("{}: {}", e.peer.as_deref().unwrap_or("?"), e.detail)).collect();
    let error = Error::new(kind, "connect", all.join("; ")).with_peer(name);
    Error { reason, hint: hint.or_else(|| failures.pop().and_then(|e| e.hint)), ..error }
}
