use std::cell::Cell;
use std::collections::HashSet;
use std::fmt;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{self as unix, UnixListener, UnixStream};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossrail_locks::{Condvar, Mutex};
use crossrail_tcp::Binding;
use crossrail_types::{Error, ErrorKind, Reason, Result};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{Shutdown, getsockopt, shutdown, sockopt};
use nix::unistd::Uid;

use super::address::Address;
use super::hello::{Device, Identity};
use super::lane::{self, LaneName};
use super::limits::{HalfOpen, Limits, MADE_ROOM, Slot, Source, Spare, made_room};
use super::session::{self, Agreed, Session, Stream};
use super::text::tcp_name;
use super::wire::WORKER;
use crate::exchange::{Exchange, poll_timeout, send_reject};
use crate::message::{Reject, RejectCode};
use crate::proof::random;

/// Pause of accepting when file descriptors or memory are exhausted.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(100);

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
    /// The port for sessions; 0: any free port.
    pub port: u16,
    /// Rails for lanes, each on its own port.
    pub rails: Vec<Rail>,
    /// Limits on half-open connections.
    pub limits: Limits,
    /// Whether to admit only holders of this worker's address, so that other users of this machine who know the port
    /// are refused. Not needed with a secret.
    pub require_token: bool,
}

/// An incoming session or lane.
#[derive(Debug)]
pub enum Arrival {
    /// A peer has connected.
    Session(Session),
    /// A peer has added a lane to a session.
    Lane {
        /// The session.
        session: [u8; 16],
        /// Which of the session's lanes.
        lane: LaneName,
        /// The connection, in blocking mode with TCP_NODELAY set; nothing has been read beyond the handshake.
        stream: TcpStream,
        /// The local address.
        local: SocketAddr,
        /// The peer's address.
        remote: SocketAddr,
    },
    /// A peer was rejected, gave up or broke the protocol; for the log. Strangers control how often this happens, so
    /// log each kind once.
    Rejected {
        /// Where it came from.
        from: String,
        /// Why.
        error: Error,
    },
}

/// Finds a session's lane key.
pub type LaneKeys = Box<dyn Fn(&[u8; 16]) -> Option<[u8; 32]> + Send + Sync>;
/// Receives sessions and lanes.
pub type Deliver = Box<dyn Fn(Arrival) + Send + Sync>;

/// Listens for sessions and lanes until dropped.
///
/// One thread accepts; each handshake runs on a short-lived thread of its own, at most [`Limits::half_open`] of them.
/// Dropping stops and joins all threads and closes every descriptor; inside `deliver` it cannot join them.
pub struct Listener {
    acceptor: Arc<Acceptor>,
    accept: Option<JoinHandle<()>>,
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener").field("hello", &self.acceptor.me.hello).finish_non_exhaustive()
    }
}

struct Acceptor {
    me: Identity,
    timeout: Duration,
    half_open: Arc<HalfOpen>,
    require_token: bool,
    lane_keys: LaneKeys,
    deliver: Deliver,
    /// Becomes readable when the listener is dropped, and stays so.
    stop: EventFd,
    state: Mutex<Sessions>,
    /// Notified when a session leaves `Sessions::opening`, and when `Sessions::stopping` is set.
    changed: Condvar,
}

#[derive(Default)]
struct Sessions {
    /// Sessions not delivered yet whose peers may already dial lanes. Entered before this end's hello is sent.
    opening: HashSet<[u8; 16]>,
    stopping: bool,
    /// Why no further peer is admitted, if so.
    full: Option<String>,
}

thread_local! {
    /// Set in the listener's own threads, which cannot join themselves.
    static OWN_THREAD: Cell<bool> = const { Cell::new(false) };
}

impl Listener {
    /// Starts to listen. Completes `me.hello` with the addresses of this worker; see [`Listener::identity`].
    ///
    /// `deliver` is called from the listener's threads, concurrently. Once it returns from an [`Arrival::Session`],
    /// `lane_keys` must find that session. Its lanes are held back until then, so they always arrive after it.
    ///
    /// # Errors
    /// `Config`: an address beyond loopback without a secret, a wildcard rail; whatever `crossrail_tcp::listen`
    /// returns, a port in use for one.
    pub fn start(config: ListenConfig, me: Identity, lane_keys: LaneKeys, deliver: Deliver) -> Result<Listener> {
        let mut me = me;
        let sockets = open(&config, &mut me)?;
        me.hello.encode()?;
        let stop = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|e| Error::io("listen", "eventfd", &e.into()))?;
        let acceptor = Arc::new(Acceptor {
            me,
            timeout: config.limits.timeout,
            half_open: Arc::new(HalfOpen::new(config.limits)),
            require_token: config.require_token,
            lane_keys,
            deliver,
            stop,
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let own = Arc::clone(&acceptor);
        let spare = Spare::new(acceptor.stop.as_fd());
        let accept = thread::Builder::new()
            .name("crossrail-accept".to_owned())
            .spawn(move || accept_loop(&own, &sockets, spare))
            .map_err(|e| Error::io("listen", "spawn a thread", &e))?;
        Ok(Listener { acceptor, accept: Some(accept) })
    }

    /// Refuses every session from now on, with this text. Lanes of the sessions that there are come in as before.
    pub fn refuse(&self, why: &str) {
        self.acceptor.state.lock().full = Some(why.to_owned());
    }

    /// The worker's address.
    pub fn address(&self) -> Address {
        self.acceptor.me.hello.address()
    }

    /// The rails it listens on.
    pub fn devices(&self) -> &[Device] {
        &self.acceptor.me.hello.devices
    }

    /// The worker's identity with its addresses, for [`super::connect`].
    pub fn identity(&self) -> &Identity {
        &self.acceptor.me
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.acceptor.state.lock().stopping = true;
        self.acceptor.changed.notify_all();
        // The counter is written once, so it cannot be full.
        let _ = self.acceptor.stop.write(1);
        if let Some(accept) = self.accept.take()
            && !OWN_THREAD.get()
        {
            // A panic there was a panic of `deliver`; the panic hook has reported it.
            let _ = accept.join();
        }
    }
}

/// A listening socket and its purpose.
enum ListeningSocket {
    Unix(UnixListener),
    Control(TcpListener),
    Rail(TcpListener, Binding),
}

impl AsFd for ListeningSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            ListeningSocket::Unix(listener) => listener.as_fd(),
            ListeningSocket::Control(listener) | ListeningSocket::Rail(listener, _) => listener.as_fd(),
        }
    }
}

fn open(config: &ListenConfig, me: &mut Identity) -> Result<Vec<ListeningSocket>> {
    let bindings = config.control.iter().chain(config.rails.iter().map(|rail| &rail.binding));
    for binding in bindings {
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
        sockets.push(ListeningSocket::Unix(listener));
        me.hello.unix = Some(name);
    }
    // The IPv6 wildcard includes every other address.
    let everywhere = config.control.iter().find(|one| one.address.is_unspecified() && one.address.is_ipv6());
    let control = everywhere.map_or(&config.control[..], std::slice::from_ref);
    for binding in control {
        let (listener, local) = open_tcp(binding, config.port)?;
        me.hello.control.extend(reachable_at(local)?);
        sockets.push(ListeningSocket::Control(listener));
    }
    for rail in &config.rails {
        if rail.binding.address.is_unspecified() {
            let detail = format!("rail {}: {} is not one device's address", rail.name, rail.binding.address);
            return Err(Error::new(ErrorKind::Config, "listen", detail));
        }
        let (listener, local) = open_tcp(&rail.binding, 0)?;
        me.hello.devices.push(Device {
            name: rail.name.clone(),
            address: local.ip(),
            port: local.port(),
            speed_mbps: rail.speed_mbps,
            loopback: local.ip().to_canonical().is_loopback(),
        });
        sockets.push(ListeningSocket::Rail(listener, rail.binding.clone()));
    }
    Ok(sockets)
}

fn open_tcp(binding: &Binding, port: u16) -> Result<(TcpListener, SocketAddr)> {
    let listener = crossrail_tcp::listen(binding, port)?;
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

/// An accepted connection.
enum Incoming {
    Control(Stream),
    Rail(TcpStream, Binding),
}

impl AsFd for Incoming {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Incoming::Control(stream) => stream.as_fd(),
            Incoming::Rail(stream, _) => stream.as_fd(),
        }
    }
}

fn accept_loop(acceptor: &Arc<Acceptor>, sockets: &[ListeningSocket], mut spare: Spare) {
    OWN_THREAD.set(true);
    let mut threads: Vec<JoinHandle<()>> = Vec::new();
    let mut paused_until: Option<Instant> = None;
    loop {
        let mut fds = vec![PollFd::new(acceptor.stop.as_fd(), PollFlags::POLLIN)];
        let mut timeout = PollTimeout::NONE;
        match paused_until.filter(|until| *until > Instant::now()) {
            Some(until) => timeout = poll_timeout(until),
            None => fds.extend(sockets.iter().map(|socket| PollFd::new(socket.as_fd(), PollFlags::POLLIN))),
        }
        match poll(&mut fds, timeout) {
            Ok(_) => {}
            Err(Errno::EINTR) => continue,
            Err(e) => {
                // The only remaining cause is a lack of kernel memory.
                acceptor.rejected("listener", Error::io("accept", "poll", &e.into()));
                paused_until = Some(Instant::now() + EXHAUSTED_PAUSE);
                continue;
            }
        }
        let ready: Vec<bool> = fds.iter().map(|fd| fd.any().unwrap_or(false)).collect();
        if ready[0] {
            break;
        }
        threads.retain(|thread| !thread.is_finished());
        for (socket, _) in sockets.iter().zip(&ready[1..]).filter(|(_, ready)| **ready) {
            match accept(socket) {
                Ok(Some((incoming, source, from))) => {
                    spare.rest();
                    threads.extend(receive(acceptor, incoming, source, from));
                }
                Ok(None) => {}
                Err(error) => {
                    let another = || accept(socket).ok().flatten().map(|(incoming, ..)| incoming);
                    if !spare.turn_away(&error, acceptor.stop.as_fd(), another) {
                        paused_until = Some(Instant::now() + EXHAUSTED_PAUSE);
                    }
                    acceptor.rejected("listener", error);
                }
            }
        }
    }
    for thread in threads {
        // As in `Drop`.
        let _ = thread.join();
    }
}

/// Accepts the next connection; `None` if it has ended meanwhile.
fn accept(socket: &ListeningSocket) -> Result<Option<(Incoming, Source, String)>> {
    let accepted = match socket {
        ListeningSocket::Unix(listener) => listener.accept().map(|(stream, _)| unix_incoming(stream)),
        ListeningSocket::Control(listener) => listener.accept().map(|(stream, from)| {
            Some((Incoming::Control(Stream::Tcp(stream)), Source::Ip(from.ip().to_canonical()), tcp_name(from)))
        }),
        ListeningSocket::Rail(listener, rail) => listener.accept().map(|(stream, from)| {
            Some((Incoming::Rail(stream, rail.clone()), Source::Ip(from.ip().to_canonical()), tcp_name(from)))
        }),
    };
    match accepted {
        Ok(incoming) => Ok(incoming),
        // The connection stays pending: without a pause the loop would spin.
        Err(e) if matches!(e.raw_os_error().map(Errno::from_raw), Some(Errno::EMFILE | Errno::ENFILE)) => {
            let error = Error::new(ErrorKind::Exhausted, "accept", format!("accept: {e}")).with_io(&e);
            Err(error.with_reason(Reason::Descriptors).with_hint("raise the limit of open files (ulimit -n)"))
        }
        Err(e) if matches!(e.raw_os_error().map(Errno::from_raw), Some(Errno::ENOBUFS | Errno::ENOMEM)) => {
            let error = Error::new(ErrorKind::Exhausted, "accept", format!("accept: {e}")).with_io(&e);
            Err(error.with_reason(Reason::Memory))
        }
        // Every other error concerns this connection only.
        Err(_) => Ok(None),
    }
}

fn unix_incoming(stream: UnixStream) -> Option<(Incoming, Source, String)> {
    let who = getsockopt(&stream, sockopt::PeerCredentials).ok()?;
    let from = format!("unix (pid {}, uid {})", who.pid(), who.uid());
    Some((Incoming::Control(Stream::Unix(stream)), Source::User(who.uid()), from))
}

/// Starts a thread for the handshake, if a slot is free.
fn receive(acceptor: &Arc<Acceptor>, incoming: Incoming, source: Source, from: String) -> Option<JoinHandle<()>> {
    let slot = match HalfOpen::take(&acceptor.half_open, source, incoming.as_fd()) {
        Ok((slot, evicted)) => {
            if let Some(connection) = evicted {
                send_reject(connection.as_fd(), &WORKER, &Reject::new(RejectCode::Busy, MADE_ROOM));
                let _ = shutdown(connection.as_raw_fd(), Shutdown::Both);
            }
            slot
        }
        Err(reject) => {
            send_reject(incoming.as_fd(), &WORKER, &reject);
            let error = Error::new(reject.code.kind(), "accept", &reject.text).with_peer(&from);
            acceptor.rejected(&from, Error { reason: reject.reason, ..error });
            return None;
        }
    };
    let own = Arc::clone(acceptor);
    let (name, ended) = (from.clone(), slot.ended());
    let spawned = thread::Builder::new().name("crossrail-meet".to_owned()).spawn(move || {
        OWN_THREAD.set(true);
        match own.handshake(incoming, &name, slot) {
            Err(error) if error.kind == ErrorKind::Closed => {}
            Err(_) if ended.is_set() => {
                let error = Error::new(ErrorKind::Refused, "accept", MADE_ROOM).with_reason(Reason::Busy);
                own.rejected(&name, error.with_peer(&name));
            }
            Err(error) => own.rejected(&name, error),
            Ok(()) => {}
        }
    });
    match spawned {
        Ok(thread) => Some(thread),
        Err(e) => {
            let error = Error::new(ErrorKind::Exhausted, "accept", format!("spawn a thread: {e}")).with_peer(&from);
            acceptor.rejected(&from, error);
            None
        }
    }
}

impl Acceptor {
    fn rejected(&self, from: &str, error: Error) {
        (self.deliver)(Arrival::Rejected { from: from.to_owned(), error });
    }

    fn handshake(&self, incoming: Incoming, from: &str, slot: Slot) -> Result<()> {
        let deadline = Instant::now() + self.timeout;
        match incoming {
            Incoming::Control(stream) => self.session(stream, from, slot, deadline),
            Incoming::Rail(stream, rail) => {
                rail.adopt(&stream)?;
                self.lane(stream, from, slot, deadline)
            }
        }
    }

    fn session(&self, stream: Stream, from: &str, slot: Slot, deadline: Instant) -> Result<()> {
        let mut exchange =
            Exchange::new(stream.as_fd(), &WORKER, "accept", from.to_owned(), deadline).stopped_by(self.stop.as_fd());
        match (&stream, slot.source()) {
            (Stream::Tcp(tcp), _) => nodelay(tcp)?,
            (Stream::Unix(_), Source::User(user)) if !self.me.secret.is_shared() && !trusted(user) => {
                exchange.stage("connect");
                let reject = Reject::new(RejectCode::Refused, "another user's process, and there is no secret");
                return Err(exchange.reject(&reject.because(Reason::UserDenied)));
            }
            (Stream::Unix(_), _) => {}
        }
        let full = self.state.lock().full.clone();
        if let Some(why) = full {
            exchange.stage("connect");
            return Err(exchange.reject(&Reject::new(RejectCode::Full, why).because(Reason::Full)));
        }
        let admitted = session::admit(&mut exchange, &self.me, self.require_token, stream.is_unix())?;
        // From the hello on, the peer would take a reject for a frame.
        if !slot.settle() {
            return Err(made_room(&exchange));
        }
        let opening = Opening::new(self, admitted.session());
        let Agreed { peer, ticket } = admitted.confirm(&exchange)?;
        (self.deliver)(Arrival::Session(Session { stream, peer, ticket, initiator: false }));
        drop(opening);
        Ok(())
    }

    fn lane(&self, stream: TcpStream, from: &str, slot: Slot, deadline: Instant) -> Result<()> {
        nodelay(&stream)?;
        let address = |result: std::io::Result<SocketAddr>, call| {
            result.map_err(|e| Error::io("accept", call, &e).with_peer(from))
        };
        let local = address(stream.local_addr(), "getsockname")?;
        let remote = address(stream.peer_addr(), "getpeername")?;
        let mut exchange =
            Exchange::new(stream.as_fd(), &WORKER, "accept", from.to_owned(), deadline).stopped_by(self.stop.as_fd());
        let key = |exchange: &Exchange<'_>, session: &[u8; 16]| {
            self.wait_until_open(exchange, session, deadline)?;
            Ok((self.lane_keys)(session))
        };
        let (session, lane) = lane::admit(&mut exchange, &self.me, &key, || slot.settle())?;
        (self.deliver)(Arrival::Lane { session, lane, stream, local, remote });
        Ok(())
    }

    /// Waits while the lane's session is being delivered.
    fn wait_until_open(&self, exchange: &Exchange<'_>, session: &[u8; 16], deadline: Instant) -> Result<()> {
        let mut state = self.state.lock();
        while state.opening.contains(session) {
            if state.stopping {
                return Err(exchange.error(ErrorKind::Closed, "this worker is closing"));
            }
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                return Err(exchange.reject(&Reject::new(RejectCode::Timeout, "the session is not up yet")));
            }
        }
        Ok(())
    }
}

/// Whether this user may connect without a secret: the process's own user, and root.
fn trusted(user: u32) -> bool {
    user == Uid::effective().as_raw() || Uid::from_raw(user).is_root()
}

fn nodelay(stream: &TcpStream) -> Result<()> {
    stream.set_nodelay(true).map_err(|e| Error::io("accept", "setsockopt TCP_NODELAY", &e))
}

/// A session in `Sessions::opening`, removed on drop.
struct Opening<'a> {
    acceptor: &'a Acceptor,
    session: [u8; 16],
}

impl<'a> Opening<'a> {
    fn new(acceptor: &'a Acceptor, session: [u8; 16]) -> Opening<'a> {
        acceptor.state.lock().opening.insert(session);
        Opening { acceptor, session }
    }
}

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        self.acceptor.state.lock().opening.remove(&self.session);
        self.acceptor.changed.notify_all();
    }
}
