use std::collections::{HashSet, VecDeque};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossrail_locks::{Condvar, Mutex};
use crossrail_tcp::Binding;
use crossrail_types::{Error, ErrorKind, Log, Origin, Reason, Result, Settings, interrupt};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{Shutdown, shutdown};

use super::{DONE, METADATA, REFUSED, SERVICE, exchange, receive, send};
use crate::exchange::{Exchange, poll_timeout, send_reject};
use crate::message::Reject;
use crate::pending::source_of;
use crate::secret::Secret;
use crate::worker::{HalfOpen, Limits, Slot, Source};

/// Limits on clients that have not proved themselves.
const STRANGERS: Limits =
    Limits { half_open: 64, half_open_per_source: 16, timeout: Duration::from_secs(5), grace: crate::pending::GRACE };
/// Limits on clients that have: each has its place for a second, and those of one source may have all of them.
const CLIENTS: Limits = Limits { half_open_per_source: 64, grace: Duration::from_secs(1), ..STRANGERS };
/// Bytes of requests and answers of all clients together.
const BYTES_MAX: usize = 128 << 20;
/// Pause of accepting when file descriptors or memory are exhausted.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(100);
/// Free ports that are tried until one is free on loopback of both families.
const TRIES: usize = 16;

/// A request of a proven client, to be answered by the owner of the listener. Dropping it closes the connection.
#[derive(Debug)]
pub struct Inquiry {
    /// Which operation, in the terms of the owner.
    pub operation: u8,
    /// The bytes of the request.
    pub body: Vec<u8>,
    answer: mpsc::SyncSender<(u8, Vec<u8>)>,
}

impl Inquiry {
    /// Answers it: with bytes, or with the reason for which it is refused. If the client has left meanwhile,
    /// nothing happens.
    pub fn answer(self, result: std::result::Result<Vec<u8>, String>) {
        // Fails once the client's thread has given up.
        let _ = self.answer.try_send(match result {
            Ok(bytes) => (DONE, bytes),
            Err(why) => (REFUSED, why.into_bytes()),
        });
    }
}

/// Listens for clients that want metadata, until closed or dropped: at all addresses if there is a secret, otherwise on
/// loopback, of IPv4 and IPv6.
///
/// One thread accepts; each client has a short-lived thread of its own, within limits on clients that have proved
/// themselves and on those that have not.
pub struct MetadataListener {
    origin: Origin,
    desk: Arc<Desk>,
    addresses: Vec<SocketAddr>,
    accept: Mutex<Option<JoinHandle<()>>>,
}

impl fmt::Debug for MetadataListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MetadataListener({:?})", self.addresses)
    }
}

struct Desk {
    secret: Secret,
    log: Log,
    strangers: Arc<HalfOpen>,
    clients: Arc<HalfOpen>,
    /// Bytes of bodies in memory.
    bytes: AtomicUsize,
    /// Becomes readable when the listener is closed, and stays so.
    stop: EventFd,
    inbox: Mutex<Inbox>,
    /// Notified when there is an inquiry, and when the listener is closed.
    changed: Condvar,
}

#[derive(Default)]
struct Inbox {
    waiting: VecDeque<Inquiry>,
    closed: bool,
    /// Kinds of errors that were logged.
    logged: HashSet<ErrorKind>,
}

/// A share of [`BYTES_MAX`], released on drop.
struct Share<'a> {
    desk: &'a Desk,
    bytes: usize,
}

impl Share<'_> {
    fn add(&mut self, bytes: usize) -> Result<()> {
        let before = self.desk.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.bytes += bytes;
        if before + bytes <= BYTES_MAX {
            return Ok(());
        }
        let detail = format!("requests of all clients take more than {BYTES_MAX} bytes");
        Err(Error::new(ErrorKind::Exhausted, "metadata", detail).with_reason(Reason::Busy))
    }
}

impl Drop for Share<'_> {
    fn drop(&mut self) {
        self.desk.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl MetadataListener {
    /// Listens at `port`; 0 takes a free one, of `CROSSRAIL_PORTS` if that is set and there is a secret.
    ///
    /// # Errors
    /// `Config`: a secret that cannot be read. `Usage`: the port is in use. `Exhausted`, `Io`: no port, descriptor or
    /// thread.
    pub fn start(settings: &Settings, port: u16) -> Result<MetadataListener> {
        let log = Log(settings.log);
        let text = settings.secret.as_ref().map(|text| text.expose());
        let (secret, warnings) = Secret::load(text, settings.secret_file.as_deref())?;
        warnings.iter().for_each(|warning| log.warn(format_args!("{warning}")));
        let sockets = if secret.is_shared() { beyond(settings, port)? } else { on_loopback(port)? };
        let mut addresses = Vec::new();
        for socket in &sockets {
            socket.set_nonblocking(true).map_err(|e| Error::io("metadata", "fcntl", &e))?;
            addresses.push(socket.local_addr().map_err(|e| Error::io("metadata", "getsockname", &e))?);
        }
        let stop = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|e| Error::io("metadata", "eventfd", &e.into()))?;
        let desk = Arc::new(Desk {
            secret,
            log,
            strangers: Arc::new(HalfOpen::new(STRANGERS)),
            clients: Arc::new(HalfOpen::new(CLIENTS)),
            bytes: AtomicUsize::new(0),
            stop,
            inbox: Mutex::default(),
            changed: Condvar::new(),
        });
        let own = Arc::clone(&desk);
        let accept = thread::Builder::new()
            .name("crossrail-metadata".to_owned())
            .spawn(move || accept_loop(&own, &sockets))
            .map_err(|e| Error::io("metadata", "spawn a thread", &e))?;
        crossrail_locks::watch_forks();
        Ok(MetadataListener { origin: Origin::here(), desk, addresses, accept: Mutex::new(Some(accept)) })
    }

    /// The addresses of its sockets.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// The next request, which waits for [`Inquiry::answer`] until its client's deadline.
    ///
    /// # Errors
    /// `Timeout`: none within `timeout`, or the wait was interrupted. `Closed`.
    pub fn next(&self, timeout: Duration) -> Result<Inquiry> {
        let deadline = Instant::now() + timeout;
        let _sleeping = interrupt::sleeping(|| {
            let desk = Arc::clone(&self.desk);
            move || desk.changed.notify_all()
        });
        let mut inbox = self.desk.inbox.lock();
        loop {
            if inbox.closed {
                return Err(Error::new(ErrorKind::Closed, "metadata", "the listener is closed"));
            }
            if let Some(inquiry) = inbox.waiting.pop_front() {
                return Ok(inquiry);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || interrupt::raised() {
                return Err(Error::new(ErrorKind::Timeout, "metadata", "no request"));
            }
            self.desk.changed.wait_for(&mut inbox, left);
        }
    }

    /// Stops listening: connections are closed, and [`MetadataListener::next`] fails. Idempotent.
    pub fn close(&self) {
        if !self.origin.is_here() {
            return;
        }
        let mut inbox = self.desk.inbox.lock();
        inbox.closed = true;
        inbox.waiting.clear();
        drop(inbox);
        self.desk.changed.notify_all();
        let accept = self.accept.lock().take();
        if let Some(accept) = accept {
            // The counter is written once, so it cannot be full.
            let _ = self.desk.stop.write(1);
            // A panic there has been reported by the panic hook.
            let _ = accept.join();
        }
    }
}

impl Drop for MetadataListener {
    fn drop(&mut self) {
        self.close();
    }
}

/// A socket for all addresses; of IPv4 alone where the kernel has no IPv6.
fn beyond(settings: &Settings, port: u16) -> Result<Vec<TcpListener>> {
    let open = |ip: IpAddr| match settings.ports_at(ip) {
        Some(ports) if port == 0 => ports.listen(ip, None, |port| listen(ip, port)),
        _ => listen(ip, port),
    };
    let socket = open(IpAddr::V6(Ipv6Addr::UNSPECIFIED)).or_else(|error| match error.kind {
        ErrorKind::Io => open(IpAddr::V4(Ipv4Addr::UNSPECIFIED)),
        _ => Err(error),
    })?;
    Ok(vec![socket])
}

/// A socket for loopback of each family that this machine has, at one port.
fn on_loopback(port: u16) -> Result<Vec<TcpListener>> {
    let (v4, v6) = (IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST));
    let missing = |error: &Error| error.kind == ErrorKind::Io || error.reason == Some(Reason::AddressUnknown);
    let mut taken = None;
    for _ in 0..if port == 0 { TRIES } else { 1 } {
        let first = match listen(v4, port) {
            Err(error) if missing(&error) => return Ok(vec![listen(v6, port)?]),
            first => first?,
        };
        let chosen = first.local_addr().map_err(|e| Error::io("metadata", "getsockname", &e))?.port();
        match listen(v6, chosen) {
            Ok(second) => return Ok(vec![first, second]),
            Err(error) if missing(&error) => return Ok(vec![first]),
            Err(error) => taken = Some(error),
        }
    }
    Err(taken.unwrap_or_else(|| Error::new(ErrorKind::Usage, "metadata", "no port was tried")))
}

fn listen(address: IpAddr, port: u16) -> Result<TcpListener> {
    crossrail_tcp::listen(&Binding { device: None, address }, port)
}

fn accept_loop(desk: &Arc<Desk>, sockets: &[TcpListener]) {
    let mut threads: Vec<JoinHandle<()>> = Vec::new();
    let mut paused_until: Option<Instant> = None;
    loop {
        let mut fds = vec![PollFd::new(desk.stop.as_fd(), PollFlags::POLLIN)];
        let mut timeout = PollTimeout::NONE;
        match paused_until.filter(|until| *until > Instant::now()) {
            Some(until) => timeout = poll_timeout(until),
            None => fds.extend(sockets.iter().map(|socket| PollFd::new(socket.as_fd(), PollFlags::POLLIN))),
        }
        match poll(&mut fds, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            // The only remaining cause is a lack of kernel memory.
            Err(_) => {
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
            match socket.accept() {
                Ok((stream, from)) => threads.extend(take(desk, stream, from)),
                Err(e)
                    if matches!(
                        e.raw_os_error().map(Errno::from_raw),
                        Some(Errno::EMFILE | Errno::ENFILE | Errno::ENOBUFS | Errno::ENOMEM)
                    ) =>
                {
                    // The connection stays pending: without a pause the loop would spin.
                    desk.rejected(&Error::io("metadata", "accept", &e));
                    paused_until = Some(Instant::now() + EXHAUSTED_PAUSE);
                }
                // Every other error concerns this connection only.
                Err(_) => {}
            }
        }
    }
    for thread in threads {
        // As in `close`.
        let _ = thread.join();
    }
}

/// Starts a thread for a client, if a place is free or can be made free.
fn take(desk: &Arc<Desk>, stream: TcpStream, from: SocketAddr) -> Option<JoinHandle<()>> {
    // Accepted sockets inherit the mode of their listener on some systems, and of none on Linux.
    let source = Source::Ip(source_of(from.ip()));
    let slot = place(&desk.strangers, source, &stream).map_err(|reject| {
        send_reject(stream.as_fd(), &METADATA, &reject);
        let error = Error::new(reject.code.kind(), "metadata", &reject.text).with_peer(from.to_string());
        desk.rejected(&error);
    });
    let (slot, own) = (slot.ok()?, Arc::clone(desk));
    let spawned = thread::Builder::new().name("crossrail-client".to_owned()).spawn(move || {
        if let Err(error) = own.serve(&stream, source, &from.to_string(), slot)
            && error.kind != ErrorKind::Closed
        {
            own.rejected(&error);
        }
    });
    match spawned {
        Ok(thread) => Some(thread),
        Err(e) => {
            desk.rejected(&Error::io("metadata", "spawn a thread", &e));
            None
        }
    }
}

/// A place among others, for which one of them may have been evicted.
fn place(among: &Arc<HalfOpen>, source: Source, stream: &TcpStream) -> std::result::Result<Slot, Reject> {
    let (slot, evicted) = HalfOpen::take(among, source, stream.as_fd())?;
    if let Some(connection) = evicted {
        let _ = shutdown(connection.as_raw_fd(), Shutdown::Both);
    }
    Ok(slot)
}

impl Desk {
    /// Logs the first error of each kind: unauthenticated clients control their number.
    fn rejected(&self, error: &Error) {
        if self.inbox.lock().logged.insert(error.kind) {
            self.log.warn(format_args!("a client of the metadata listener: {error}"));
        }
    }

    fn serve(&self, stream: &TcpStream, source: Source, from: &str, slot: Slot) -> Result<()> {
        let deadline = Instant::now() + STRANGERS.timeout;
        let mut exchange = exchange(stream.as_fd(), "metadata", from, deadline).stopped_by(self.stop.as_fd());
        stream.set_nodelay(true).map_err(|e| Error::io("metadata", "setsockopt TCP_NODELAY", &e))?;
        SERVICE.admit(&mut exchange, &self.secret)?;
        // From here on the client would read a reject as an answer.
        exchange.stop_rejects();
        if !slot.settle() {
            return Err(exchange.error(ErrorKind::Refused, "it took long while others waited for their turn"));
        }
        let full = |reject: Reject| exchange.error(ErrorKind::Exhausted, &reject.text).with_reason(Reason::Busy);
        let _slot = place(&self.clients, source, stream).map_err(full)?;
        exchange.stage("request");
        let mut share = Share { desk: self, bytes: 0 };
        let (operation, body) = receive(&exchange, |bytes| share.add(bytes))?;
        let answer = self.inquire(&exchange, operation, body, deadline)?;
        exchange.stage("answer");
        share.add(answer.1.len())?;
        send(&exchange, answer.0, &answer.1)
    }

    /// Has the owner answer.
    fn inquire(
        &self,
        exchange: &Exchange<'_>,
        operation: u8,
        body: Vec<u8>,
        deadline: Instant,
    ) -> Result<(u8, Vec<u8>)> {
        let (answer, answered) = mpsc::sync_channel(1);
        let mut inbox = self.inbox.lock();
        if inbox.closed {
            return Err(exchange.error(ErrorKind::Closed, "the listener is closed"));
        }
        inbox.waiting.push_back(Inquiry { operation, body, answer });
        drop(inbox);
        self.changed.notify_all();
        answered.recv_timeout(deadline.saturating_duration_since(Instant::now())).map_err(|error| match error {
            mpsc::RecvTimeoutError::Timeout => exchange.error(ErrorKind::Timeout, "this process did not answer"),
            mpsc::RecvTimeoutError::Disconnected => exchange.error(ErrorKind::Closed, "it was not answered"),
        })
    }
}
