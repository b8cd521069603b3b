use std::cell::Cell;
use std::collections::HashSet;
use std::fmt;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossrail_locks::{Condvar, Mutex};
use crossrail_tcp::Binding;
use crossrail_types::{Error, ErrorKind, Ports, Reason, Result};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{Shutdown, getsockopt, shutdown, sockopt};
use nix::unistd::Uid;

use super::address::Address;
use super::handoff::Handoff;
use super::hello::{Device, Identity};
use super::lane::{self, LaneName};
use super::limits::{EVICTED, HalfOpen, Slot, Source, Spare, descriptors_are_low, evicted_error};
use super::session::{self, Agreed, Session, Stream};
use super::sockets::{ListenConfig, ListeningSocket, Rail, listen_on, open};
use super::text::tcp_name;
use super::wire::WORKER;
use crate::exchange::{Exchange, poll_timeout, send_reject};
use crate::message::{Kind, Reject, RejectCode};
use crate::pending::source_of;
use crate::terms::no_descriptor;

/// Pause of accepting when file descriptors or memory are exhausted.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(100);

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
/// One thread accepts; handshakes run on other threads, one each at a time, at most [`super::Limits::half_open`] of them.
/// Such a thread ends when no peer has connected for a moment.
/// Dropping stops and joins all threads and closes every descriptor; inside `deliver` it cannot join them.
pub struct Listener {
    acceptor: Arc<Acceptor>,
    accept: Option<JoinHandle<()>>,
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener").field("hello", &self.acceptor.me().hello).finish_non_exhaustive()
    }
}

struct Acceptor {
    me: Mutex<Arc<Identity>>,
    sockets: Mutex<Vec<Arc<ListeningSocket>>>,
    ports: Option<Ports>,
    /// Readable when `sockets` has changed.
    resized: EventFd,
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
    handshakes: Handoff<Handshake>,
}

struct Handshake {
    incoming: Incoming,
    from: String,
    slot: Slot,
}

#[derive(Default)]
struct Sessions {
    /// Sessions not delivered yet whose peers may already dial lanes. Entered before this end's hello is sent.
    opening: HashSet<[u8; 16]>,
    stopping: bool,
    /// Why no further peer is admitted, if so.
    full: Option<String>,
    /// Reason to refuse peers at present.
    crowded: Option<String>,
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
        let event = || {
            EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
                .map_err(|e| Error::io("listen", "eventfd", &e.into()))
        };
        let acceptor = Arc::new(Acceptor {
            me: Mutex::new(Arc::new(me)),
            sockets: Mutex::new(sockets),
            ports: config.ports,
            resized: event()?,
            timeout: config.limits.timeout,
            half_open: Arc::new(HalfOpen::new(config.limits)),
            require_token: config.require_token,
            lane_keys,
            deliver,
            stop: event()?,
            state: Mutex::default(),
            changed: Condvar::new(),
            handshakes: Handoff::default(),
        });
        let own = Arc::clone(&acceptor);
        let spare = Spare::new(acceptor.stop.as_fd());
        let accept = thread::Builder::new()
            .name("crossrail-accept".to_owned())
            .spawn(move || accept_loop(&own, spare))
            .map_err(|e| Error::io("listen", "spawn a thread", &e))?;
        Ok(Listener { acceptor, accept: Some(accept) })
    }

    /// Refuses every session from now on, with this text. Lanes of the sessions that there are come in as before.
    pub fn refuse(&self, why: &str) {
        self.acceptor.state.lock().full = Some(why.to_owned());
    }

    /// Refuses sessions with this text until it is `None`.
    pub fn set_crowded(&self, why: Option<String>) {
        self.acceptor.state.lock().crowded = why;
    }

    /// The worker's address.
    pub fn address(&self) -> Address {
        self.acceptor.me().hello.address()
    }

    /// The rails it listens on.
    pub fn devices(&self) -> Vec<Device> {
        self.acceptor.me().hello.devices.clone()
    }

    /// Listens on these rails from now on and on no others, because addresses have changed. Sessions are accepted as
    /// before, and later ones receive the rails.
    ///
    /// # Errors
    /// As [`Listener::start`]; then nothing has changed.
    pub fn listen_on(&self, rails: &[Rail]) -> Result<()> {
        let mut sockets = self.acceptor.sockets.lock();
        let mut me = Identity::clone(&self.acceptor.me());
        listen_on(rails, self.acceptor.ports, &mut me, &mut sockets)?;
        *self.acceptor.me.lock() = Arc::new(me);
        drop(sockets);
        // The counter is reset whenever it is read, so it cannot be full.
        let _ = self.acceptor.resized.write(1);
        Ok(())
    }

    /// The worker's identity with its addresses, for [`super::connect`].
    pub fn identity(&self) -> Identity {
        Identity::clone(&self.acceptor.me())
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.acceptor.state.lock().stopping = true;
        self.acceptor.changed.notify_all();
        self.acceptor.handshakes.stop();
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

/// An accepted connection.
enum Incoming {
    Unix(UnixStream),
    Tcp(TcpStream, Allowed),
}

/// What an accepted connection may become.
struct Allowed {
    session: bool,
    /// The rail whose address it came to.
    rail: Option<Binding>,
}

impl AsFd for Incoming {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Incoming::Unix(stream) => stream.as_fd(),
            Incoming::Tcp(stream, _) => stream.as_fd(),
        }
    }
}

fn accept_loop(acceptor: &Arc<Acceptor>, mut spare: Spare) {
    OWN_THREAD.set(true);
    let mut threads: Vec<JoinHandle<()>> = Vec::new();
    let mut paused_until: Option<Instant> = None;
    loop {
        let sockets = acceptor.sockets.lock().clone();
        let own = [&acceptor.stop, &acceptor.resized];
        let mut fds: Vec<PollFd<'_>> = own.map(|event| PollFd::new(event.as_fd(), PollFlags::POLLIN)).into();
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
        if ready[1] {
            let _ = acceptor.resized.read();
            continue;
        }
        threads.retain(|thread| !thread.is_finished());
        for (socket, _) in sockets.iter().zip(&ready[2..]).filter(|(_, ready)| **ready) {
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
        ListeningSocket::Tcp(listener, purpose) => listener.accept().and_then(|(stream, from)| {
            let local = stream.local_addr()?.ip().to_canonical();
            let rails = purpose.rails.lock();
            let rail = rails.iter().find(|rail| rail.address.to_canonical() == local).cloned();
            drop(rails);
            let incoming = Incoming::Tcp(stream, Allowed { session: purpose.sessions, rail });
            Ok(Some((incoming, Source::Ip(source_of(from.ip())), tcp_name(from))))
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
    Some((Incoming::Unix(stream), Source::User(who.uid()), from))
}

/// Has a thread run the handshake, if a slot is free; the thread, if it is a new one.
fn receive(acceptor: &Arc<Acceptor>, incoming: Incoming, source: Source, from: String) -> Option<JoinHandle<()>> {
    let slot = match HalfOpen::take(&acceptor.half_open, source, incoming.as_fd()) {
        Ok((slot, evicted)) => {
            if let Some(connection) = evicted {
                send_reject(connection.as_fd(), &WORKER, &Reject::new(RejectCode::Busy, EVICTED));
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
    let name = from.clone();
    let handshake = acceptor.handshakes.offer(Handshake { incoming, from, slot })?;
    let own = Arc::clone(acceptor);
    let spawned = thread::Builder::new().name("crossrail-meet".to_owned()).spawn(move || {
        OWN_THREAD.set(true);
        let mut next = Some(handshake);
        while let Some(handshake) = next {
            own.run(handshake);
            next = own.handshakes.next();
        }
    });
    match spawned {
        Ok(thread) => Some(thread),
        Err(e) => {
            let error = Error::new(ErrorKind::Exhausted, "accept", format!("spawn a thread: {e}")).with_peer(&name);
            acceptor.rejected(&name, error);
            None
        }
    }
}

impl Acceptor {
    /// This end as it presents itself now.
    fn me(&self) -> Arc<Identity> {
        self.me.lock().clone()
    }

    fn rejected(&self, from: &str, error: Error) {
        (self.deliver)(Arrival::Rejected { from: from.to_owned(), error });
    }

    fn run(&self, Handshake { incoming, from, slot }: Handshake) {
        let evicted = slot.evicted();
        match self.handshake(incoming, &from, slot) {
            Err(error) if error.kind == ErrorKind::Closed => {}
            Err(_) if evicted.is_set() => {
                let error = Error::new(ErrorKind::Refused, "accept", EVICTED).with_reason(Reason::Busy);
                self.rejected(&from, error.with_peer(&from));
            }
            Err(error) => self.rejected(&from, error),
            Ok(()) => {}
        }
    }

    fn handshake(&self, incoming: Incoming, from: &str, slot: Slot) -> Result<()> {
        let deadline = Instant::now() + self.timeout;
        match incoming {
            Incoming::Unix(stream) => self.unix(stream, from, slot, deadline),
            Incoming::Tcp(stream, allowed) => self.tcp(stream, allowed, from, slot, deadline),
        }
    }

    fn exchange<'a>(&'a self, fd: BorrowedFd<'a>, from: &str, deadline: Instant) -> Exchange<'a> {
        Exchange::new(fd, &WORKER, "accept", from.to_owned(), deadline).stopped_by(self.stop.as_fd())
    }

    fn unix(&self, stream: UnixStream, from: &str, slot: Slot, deadline: Instant) -> Result<()> {
        let mut exchange = self.exchange(stream.as_fd(), from, deadline);
        match slot.source() {
            Source::User(user) if !self.me().secret.is_shared() && !trusted(user) => {
                exchange.stage("connect");
                let reject = Reject::new(RejectCode::Refused, "another user's process, and there is no secret");
                return Err(exchange.reject(&reject.because(Reason::UserDenied)));
            }
            _ => {}
        }
        self.check_room(&mut exchange)?;
        let me = self.me();
        let flags = session::flags(&me, self.require_token, true);
        let (_, challenge, reply) = session::begin(&mut exchange, &me, flags, (Kind::Reply, None))?;
        let admitted = session::admit(&mut exchange, &me, (&challenge, &reply), flags, true)?;
        let (agreed, opening) = self.open_session(&exchange, admitted, slot)?;
        self.deliver_session(Stream::Unix(stream), agreed, opening);
        Ok(())
    }

    /// A connection over TCP. Where it may become either, the connector's first message says which.
    fn tcp(&self, stream: TcpStream, allowed: Allowed, from: &str, slot: Slot, deadline: Instant) -> Result<()> {
        nodelay(&stream)?;
        let mut exchange = self.exchange(stream.as_fd(), from, deadline);
        let kinds = match &allowed {
            Allowed { session: true, rail: Some(_) } => (Kind::Reply, Some(Kind::LaneHello)),
            Allowed { session: true, rail: None } => (Kind::Reply, None),
            Allowed { session: false, .. } => (Kind::LaneHello, None),
        };
        if kinds == (Kind::Reply, None) {
            self.check_room(&mut exchange)?;
        }
        let me = self.me();
        let flags = session::flags(&me, self.require_token, false);
        let (kind, challenge, answer) = session::begin(&mut exchange, &me, flags, kinds)?;
        if kind == Kind::LaneHello {
            check_descriptors(&mut exchange)?;
            if let Some(rail) = &allowed.rail {
                rail.adopt(&stream)?;
            }
            let (session, lane) = self.lane(&mut exchange, (&challenge, &answer), slot, deadline)?;
            let address = |result: std::io::Result<SocketAddr>, call| {
                result.map_err(|e| Error::io("accept", call, &e).with_peer(from))
            };
            let local = address(stream.local_addr(), "getsockname")?;
            let remote = address(stream.peer_addr(), "getpeername")?;
            (self.deliver)(Arrival::Lane { session, lane, stream, local, remote });
            return Ok(());
        }
        self.check_room(&mut exchange)?;
        let admitted = session::admit(&mut exchange, &me, (&challenge, &answer), flags, false)?;
        let (agreed, opening) = self.open_session(&exchange, admitted, slot)?;
        self.deliver_session(Stream::Tcp(stream), agreed, opening);
        Ok(())
    }

    /// Rejects a peer that would open a session, if no further one is admitted.
    fn check_room(&self, exchange: &mut Exchange<'_>) -> Result<()> {
        check_descriptors(exchange)?;
        let state = self.state.lock();
        let Some(why) = state.full.clone().or_else(|| state.crowded.clone()) else { return Ok(()) };
        drop(state);
        exchange.stage("connect");
        Err(exchange.reject(&Reject::new(RejectCode::Full, why).because(Reason::Full)))
    }

    fn open_session(
        &self,
        exchange: &Exchange<'_>,
        admitted: session::Admitted,
        slot: Slot,
    ) -> Result<(Agreed, Opening<'_>)> {
        // From the hello on, the peer would take a reject for a frame.
        if !slot.settle() {
            return Err(evicted_error(exchange));
        }
        let opening = Opening::new(self, admitted.session());
        Ok((admitted.confirm(exchange)?, opening))
    }

    fn deliver_session(&self, stream: Stream, agreed: Agreed, opening: Opening<'_>) {
        let Agreed { peer, ticket } = agreed;
        (self.deliver)(Arrival::Session(Session { stream, peer, ticket, initiator: false }));
        drop(opening);
    }

    fn lane(
        &self,
        exchange: &mut Exchange<'_>,
        messages: (&[u8], &[u8]),
        slot: Slot,
        deadline: Instant,
    ) -> Result<([u8; 16], LaneName)> {
        let key = |exchange: &Exchange<'_>, session: &[u8; 16]| {
            self.wait_until_open(exchange, session, deadline)?;
            Ok((self.lane_keys)(session))
        };
        lane::admit(exchange, messages, &key, || slot.settle())
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

/// Rejects a connection where the process needs its last descriptors itself.
fn check_descriptors(exchange: &mut Exchange<'_>) -> Result<()> {
    if !descriptors_are_low() {
        return Ok(());
    }
    exchange.stage("connect");
    Err(exchange.reject(&no_descriptor("this process has few descriptors left, which it keeps for itself")))
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
