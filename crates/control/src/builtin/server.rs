//! The server of the built-in store: one thread, which sleeps until a client sends or a lease or wait expires.

use std::collections::HashMap;
use std::fmt;
use std::io::ErrorKind as IoKind;
use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use crossrail_handshake::store::Greeting;
use crossrail_handshake::{GRACE, Pending, Reject, RejectCode, Secret, draw, share_of_descriptors, source_of};
use crossrail_locks::Mutex;
use crossrail_types::{Error, ErrorKind, Log, Origin, Reason, Result, Settings};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use socket2::{SockRef, TcpKeepalive};

use super::contents::{Contents, Outbox};
use super::frames::Answer;
use super::server_connection::{ClientConnection, Disconnected, next_request};

/// Most clients at a time, and most of them that have not completed the handshake, where descriptors suffice: see
/// [`clients_max`] and [`greeting_max`].
const CLIENTS_MAX: usize = 16_384;
const GREETING_MAX: usize = 512;
/// Unsent answers of all clients together, in bytes, beyond which the client with the most is closed, if it is one that
/// the store has stopped reading from. A client that requests lists and never reads the answers must not exhaust the
/// memory of rank 0.
const OUTPUT_MAX: usize = 256 << 20;
/// Timeout of a client's handshake.
const GREETING_TIME: Duration = Duration::from_secs(10);
/// Backlog of connections in the kernel. On overflow the kernel drops some, which are retried a second later.
const BACKLOG: i32 = 4096;
/// Pause of accepting when file descriptors are exhausted; clients wait in the kernel's queue.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Events per pass; leases expire only after a pass that has drained all events.
const EVENTS: usize = 256;
/// Connections accepted per pass.
const ACCEPTS: usize = 32;
/// A wake-up that is late by more than this shows that the thread was starved.
const STALL: Duration = Duration::from_millis(100);

const LISTENER: u64 = u64::MAX;
const STOP: u64 = u64::MAX - 1;

/// Clients take up to three quarters of the permitted descriptors, those without a proof an eighth.
fn clients_max() -> usize {
    (share_of_descriptors(4) * 3).min(CLIENTS_MAX)
}

fn greeting_max() -> usize {
    share_of_descriptors(8).min(GREETING_MAX)
}

/// The built-in store, which serves from a thread of its own until [`StoreServer::stop`] or drop. Its contents are lost
/// with it.
pub struct StoreServer {
    /// The process whose thread serves.
    origin: Origin,
    address: String,
    stop: Arc<EventFd>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl fmt::Debug for StoreServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StoreServer({})", self.address)
    }
}

impl StoreServer {
    /// Serves at `listen`: `host:port`, with or without `tcp://`; port 0 takes a free one, of `CROSSRAIL_PORTS` if that
    /// is set and `host` is beyond loopback.
    ///
    /// # Errors
    /// `Config`: beyond loopback without a secret, a secret that cannot be read. `Usage`: `listen` is no address, or
    /// somebody listens there. `Exhausted`, `Io`: no port of `CROSSRAIL_PORTS`, no descriptor, no thread.
    pub fn start(listen: &str, settings: &Settings) -> Result<StoreServer> {
        let secret = load_secret(settings)?;
        let place = resolve(listen)?;
        secret.allows_listening("store", place.ip())?;
        let fail = |call: &str, e: std::io::Error| Error::io("store", call, &e).with_peer(format!("tcp://{place}"));
        let listener = match settings.ports_at(place.ip()) {
            Some(ports) if place.port() == 0 => {
                ports.listen(place.ip(), None, |port| bind(SocketAddr::new(place.ip(), port)))?
            }
            _ => bind(place)?,
        };
        listener.set_nonblocking(true).map_err(|e| fail("fcntl", e))?;
        SockRef::from(&listener).listen(BACKLOG).map_err(|e| fail("listen", e))?;
        let local = listener.local_addr().map_err(|e| fail("getsockname", e))?;
        let os = |call: &str, e: nix::Error| fail(call, e.into());
        let stop = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        let stop = Arc::new(stop.map_err(|e| os("eventfd", e))?);
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(|e| os("epoll_create1", e))?;
        let readable = |token| EpollEvent::new(EpollFlags::EPOLLIN, token);
        epoll.add(&listener, readable(LISTENER)).map_err(|e| os("epoll_ctl", e))?;
        epoll.add(stop.as_fd(), readable(STOP)).map_err(|e| os("epoll_ctl", e))?;
        let server = ServerLoop {
            epoll,
            listener,
            secret,
            log: Log(settings.log),
            contents: Contents::new(first_revision()),
            clients: Clients::default(),
            next: 0,
            greeting: Pending::new(GRACE),
            accept_again: None,
        };
        let thread = std::thread::Builder::new().name("crossrail-store".to_owned());
        let thread = crossrail_locks::signals_blocked(|| thread.spawn(move || server.run())).map_err(|e| {
            Error::new(ErrorKind::Exhausted, "store", format!("spawn a thread: {e}"))
                .with_hint("raise the limit of processes (ulimit -u)")
        })?;
        let address = format!("tcp://{}", reachable(local));
        crossrail_locks::watch_forks();
        Ok(StoreServer { origin: Origin::here(), address, stop, thread: Mutex::new(Some(thread)) })
    }

    /// Its address for clients, `tcp://host:port`; for a wildcard address, one of the machine's.
    pub fn address(&self) -> String {
        self.address.clone()
    }

    /// Stops it: its clients find it unreachable. Idempotent.
    pub fn stop(&self) {
        if !self.origin.is_here() {
            return;
        }
        let thread = self.thread.lock().take();
        if let Some(thread) = thread {
            // The count is far from full: one write is all there is.
            let _ = self.stop.write(1);
            let _ = thread.join();
        }
    }
}

impl Drop for StoreServer {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The secret of the settings; warnings about it go to stderr.
fn load_secret(settings: &Settings) -> Result<Secret> {
    let (secret, warnings) =
        Secret::load(settings.secret.as_ref().map(|text| text.expose()), settings.secret_file.as_deref())?;
    warnings.iter().for_each(|warning| Log(settings.log).warn(format_args!("{warning}")));
    Ok(secret)
}

fn bind(place: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(place).map_err(|e| match e.kind() {
        IoKind::AddrInUse => Error::new(ErrorKind::Usage, "store", format!("another process listens at {place}"))
            .with_reason(Reason::PortInUse)
            .with_io(&e)
            .with_hint("use that store, or another port"),
        IoKind::AddrNotAvailable => {
            Error::new(ErrorKind::Usage, "store", format!("{} is not an address of this machine", place.ip()))
                .with_reason(Reason::AddressUnknown)
                .with_io(&e)
        }
        _ => Error::io("store", "bind", &e).with_peer(format!("tcp://{place}")),
    })
}

fn resolve(listen: &str) -> Result<SocketAddr> {
    let text = listen.strip_prefix("tcp://").unwrap_or(listen);
    let fail = |detail: String| {
        Error::new(ErrorKind::Usage, "store", detail).with_hint("accepted: host:port, such as 127.0.0.1:7400")
    };
    if !text.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok()) {
        return Err(fail(format!("{listen:?} is not an address to listen at")));
    }
    let mut found = text.to_socket_addrs().map_err(|e| fail(format!("{listen:?} does not resolve: {e}")))?;
    found.next().ok_or_else(|| fail(format!("{listen:?} does not resolve")))
}

/// An address at which others reach a socket bound to `local`.
fn reachable(local: SocketAddr) -> SocketAddr {
    if !local.ip().is_unspecified() {
        return local;
    }
    let found = nix::ifaddrs::getifaddrs().into_iter().flatten().filter_map(|device| {
        let address = device.address?;
        let v4 = address.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
        v4.or_else(|| address.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip())))
    });
    let fits = found.filter(|ip| {
        let link_local = matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
        !ip.is_loopback() && !link_local && (ip.is_ipv4() || local.is_ipv6())
    });
    let loopback =
        if local.is_ipv4() { IpAddr::from([127, 0, 0, 1]) } else { IpAddr::V6(std::net::Ipv6Addr::LOCALHOST) };
    SocketAddr::new(fits.min_by_key(|ip| ip.is_ipv6() != local.is_ipv6()).unwrap_or(loopback), local.port())
}

/// Greater than every revision of an earlier store on this machine, as long as its clock does not go backwards: counts
/// microseconds, with room for a thousand changes in each.
fn first_revision() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    ((since.as_micros() as u64) << 10) & (i64::MAX as u64)
}

/// The clients, and those of them with unsent bytes.
#[derive(Default)]
struct Clients {
    connections: HashMap<u64, ClientConnection>,
    unsent: Vec<u64>,
    /// Unsent bytes of all.
    output: usize,
}

impl Outbox for Clients {
    fn send(&mut self, client: u64, call: u64, answer: &Answer<'_>) {
        let Some(connection) = self.connections.get_mut(&client) else { return };
        let before = connection.backlog();
        connection.push(call, answer);
        self.output += connection.backlog() - before;
        if !std::mem::replace(&mut connection.unsent, true) {
            self.unsent.push(client);
        }
    }

    fn backlog(&self, client: u64) -> usize {
        self.connections.get(&client).map_or(0, ClientConnection::backlog)
    }
}

impl Clients {
    /// Sends what the client's socket takes.
    fn write(&mut self, client: u64) -> std::result::Result<(), Disconnected> {
        let Some(connection) = self.connections.get_mut(&client) else { return Ok(()) };
        let before = connection.backlog();
        let written = connection.write();
        let bytes = before - connection.backlog();
        self.uncount(bytes);
        written
    }

    fn uncount(&mut self, bytes: usize) {
        debug_assert!(bytes <= self.output, "{bytes} bytes leave, of {} that were counted", self.output);
        self.output = self.output.saturating_sub(bytes);
    }

    fn remove(&mut self, client: u64) -> Option<ClientConnection> {
        let connection = self.connections.remove(&client)?;
        self.uncount(connection.backlog());
        Some(connection)
    }

    /// The client to close because too many unsent answers are queued.
    fn most_backlogged(&self) -> Option<u64> {
        if self.output <= OUTPUT_MAX {
            return None;
        }
        let paused = self.connections.iter().filter(|(_, connection)| connection.is_paused());
        paused.max_by_key(|(_, connection)| connection.backlog()).map(|(client, _)| *client)
    }

    fn mark_unsent(&mut self, client: u64) {
        if let Some(connection) = self.connections.get_mut(&client)
            && !std::mem::replace(&mut connection.unsent, true)
        {
            self.unsent.push(client);
        }
    }
}

struct ServerLoop {
    epoll: Epoll,
    listener: TcpListener,
    secret: Secret,
    log: Log,
    contents: Contents,
    clients: Clients,
    next: u64,
    /// Clients that have not completed the handshake.
    greeting: Pending<IpAddr, ()>,
    accept_again: Option<Instant>,
}

impl ServerLoop {
    fn run(mut self) {
        let mut events = [EpollEvent::empty(); EVENTS];
        loop {
            let due = self.contents.next_expiry();
            let seen = match self.epoll.wait(&mut events, self.timeout()) {
                Ok(seen) => seen,
                Err(nix::Error::EINTR) => 0,
                Err(_) => return,
            };
            for event in &events[..seen] {
                match event.data() {
                    STOP => return,
                    LISTENER => self.accept(),
                    client => self.receive(client, event.events()),
                }
            }
            let now = Instant::now();
            // The machine was suspended, or this process was starved: no client could renew in that time.
            if let Some(stalled) = due.map(|due| now.saturating_duration_since(due)).filter(|stalled| *stalled > STALL)
            {
                self.contents.postpone(stalled);
            }
            // Renewals that have arrived count, however late this thread reads them.
            if seen < EVENTS {
                self.contents.expire(now, &mut self.clients);
            }
            self.expire_greetings(now);
            self.flush();
        }
    }

    /// Rounded up, so that a wait never ends early and spins.
    fn timeout(&self) -> EpollTimeout {
        let greeting = self.greeting.oldest().map(|(_, began)| began + GREETING_TIME);
        let next = [self.contents.next_expiry(), greeting, self.accept_again].into_iter().flatten().min();
        let Some(next) = next else { return EpollTimeout::NONE };
        let millis = next.saturating_duration_since(Instant::now()).as_micros().div_ceil(1000);
        EpollTimeout::try_from(millis.min(i32::MAX as u128) as i32).unwrap_or(EpollTimeout::MAX)
    }

    fn accept(&mut self) {
        // Those that are left are reported again. Others have their turn between them, however fast connections come.
        for _ in 0..ACCEPTS {
            match self.listener.accept() {
                Ok((stream, peer)) => self.admit(stream, peer.ip()),
                Err(e) if matches!(e.kind(), IoKind::Interrupted | IoKind::ConnectionAborted) => {}
                Err(e) if e.kind() == IoKind::WouldBlock => return,
                Err(_) => {
                    // File descriptors are exhausted: the listener would stay readable.
                    if self.epoll.delete(&self.listener).is_ok() {
                        self.accept_again = Some(Instant::now() + ACCEPT_PAUSE);
                    }
                    return;
                }
            }
        }
    }

    fn admit(&mut self, stream: std::net::TcpStream, source: IpAddr) {
        let socket = SockRef::from(&stream);
        let alive = TcpKeepalive::new().with_time(Duration::from_secs(5)).with_interval(Duration::from_secs(2));
        let ready = stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true));
        if ready.and_then(|()| socket.set_tcp_keepalive(&alive.with_retries(3))).is_err() {
            return;
        }
        let Ok(greeting) = Greeting::new(&self.secret) else { return };
        let client = self.next;
        self.next += 1;
        let now = Instant::now();
        let source = source_of(source);
        let full = if self.clients.connections.len() >= clients_max() {
            Some(Reject::new(RejectCode::Full, format!("the store already has {} clients, its maximum", clients_max())))
        } else if self.greeting.len() >= greeting_max() && !self.evict_greeting(source, now) {
            let text = format!("{} clients have not proved themselves yet; try again", greeting_max());
            Some(Reject::new(RejectCode::Busy, text))
        } else {
            None
        };
        let mut connection = match &full {
            Some(reject) => ClientConnection::rejected(stream, reject),
            None => ClientConnection::new(stream, greeting),
        };
        if connection.write().is_err() || full.is_some() {
            return;
        }
        connection.unsent = false;
        if self.epoll.add(&connection.stream, EpollEvent::new(EpollFlags::EPOLLIN, client)).is_ok() {
            self.greeting.insert(client, source, now, ());
            self.clients.output += connection.backlog();
            self.clients.connections.insert(client, connection);
        }
    }

    /// Closes the client that makes room for one from `source`, and tells it to try again.
    fn evict_greeting(&mut self, source: IpAddr, now: Instant) -> bool {
        let Some((client, ())) = self.greeting.evict(&source, false, now, draw()) else { return false };
        if let Some(connection) = self.clients.connections.get_mut(&client) {
            let text =
                format!("it made room for another client: {} had not proved themselves; try again", greeting_max());
            let before = connection.backlog();
            connection.turn_away(&Reject::new(RejectCode::Busy, &text));
            self.clients.output += connection.backlog() - before;
            // The socket takes the few bytes at once, or the client goes without.
            let _ = self.clients.write(client);
        }
        self.close(client);
        true
    }

    fn receive(&mut self, client: u64, flags: EpollFlags) {
        if flags.contains(EpollFlags::EPOLLOUT) {
            self.clients.mark_unsent(client);
        }
        if flags.intersects(EpollFlags::EPOLLIN | EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR) {
            let ended = match self.clients.connections.get_mut(&client).map(ClientConnection::read) {
                Some(Ok(ended)) => ended,
                Some(Err(Disconnected)) => return self.close(client),
                None => return,
            };
            self.process(client);
            // Its last requests have been executed; it no longer reads answers.
            if ended {
                self.close(client);
            }
        }
    }

    /// Executes the client's requests so far, unless its backlog is too long.
    fn process(&mut self, client: u64) {
        let Some(connection) = self.clients.connections.get_mut(&client) else { return };
        let (proven, before) = (connection.is_proven(), connection.backlog());
        let greeted = connection.greet(&self.secret);
        self.clients.output += connection.backlog() - before;
        if !greeted {
            return self.clients.mark_unsent(client);
        }
        if !proven {
            self.greeting.remove(client);
            self.clients.mark_unsent(client);
        }
        let Some(connection) = self.clients.connections.get_mut(&client) else { return };
        let input = connection.take_input();
        let mut used = 0;
        let now = Instant::now();
        while !self.clients.connections.get(&client).is_none_or(ClientConnection::is_paused) {
            match next_request(&input[used..]) {
                Ok(Some((frame, len))) => {
                    self.contents.apply(now, client, frame.call, &frame.body, &mut self.clients);
                    used += len;
                    self.close_most_backlogged();
                }
                Ok(None) => break,
                Err(Disconnected) => return self.close(client),
            }
        }
        if let Some(connection) = self.clients.connections.get_mut(&client) {
            connection.put_input(input, used);
        }
    }

    fn expire_greetings(&mut self, now: Instant) {
        while let Some((client, began)) = self.greeting.oldest()
            && began + GREETING_TIME <= now
        {
            self.close(client);
        }
        if self.accept_again.is_some_and(|again| again <= now) {
            self.accept_again = None;
            let readable = EpollEvent::new(EpollFlags::EPOLLIN, LISTENER);
            if self.epoll.add(&self.listener, readable).is_err() {
                self.accept_again = Some(now + ACCEPT_PAUSE);
            }
        }
    }

    /// Sends pending bytes, and updates each client's epoll interest.
    fn flush(&mut self) {
        while let Some(client) = self.clients.unsent.pop() {
            let Some(connection) = self.clients.connections.get_mut(&client) else { continue };
            connection.unsent = false;
            let paused = connection.is_paused();
            if self.clients.write(client).is_err() {
                self.close(client);
                continue;
            }
            let Some(connection) = self.clients.connections.get_mut(&client) else { continue };
            // Requests were deferred while the client was paused; their answers are sent in this loop too.
            if paused && !connection.is_paused() {
                self.process(client);
            }
            let Some(connection) = self.clients.connections.get_mut(&client) else { continue };
            let (readable, writable) = connection.interests();
            if connection.interest != (readable, writable) {
                let mut flags = EpollFlags::empty();
                flags.set(EpollFlags::EPOLLIN, readable);
                flags.set(EpollFlags::EPOLLOUT, writable);
                connection.interest = (readable, writable);
                if self.epoll.modify(&connection.stream, &mut EpollEvent::new(flags, client)).is_err() {
                    self.close(client);
                }
            }
        }
    }

    /// Closes clients that take no answers, as long as all answers together are too much.
    fn close_most_backlogged(&mut self) {
        while let Some(client) = self.clients.most_backlogged() {
            if let Some(connection) = self.clients.connections.get(&client) {
                let (unread, all) = (connection.backlog() >> 20, self.clients.output >> 20);
                let who = connection.stream.peer_addr().map_or_else(|_| "?".to_owned(), |peer| peer.to_string());
                self.log.warn(format_args!(
                    "store: closed the client at {who}, which left {unread} MiB of answers unread; \
                     {all} MiB were waiting for all clients, and {} MiB are the limit",
                    OUTPUT_MAX >> 20
                ));
            }
            self.close(client);
        }
    }

    fn close(&mut self, client: u64) {
        if let Some(connection) = self.clients.remove(client) {
            // Closing the last descriptor also removes it from the epoll set.
            drop(connection);
            self.greeting.remove(client);
            self.contents.forget(client);
        }
    }
}
