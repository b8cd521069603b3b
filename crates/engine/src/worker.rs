//! A worker: its lock, who makes progress when, and the waits.

use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{JoinHandle, Thread};
use std::time::Duration;

use crossrail_handshake as handshake;
use crossrail_types::{EndpointId, Error, ErrorKind, IoThreads, OpId, Result};
use parking_lot::{Condvar, Mutex};

use crate::admit::Inbox;
use crate::buffer::Buffer;
use crate::context::Context;
use crate::core::Core;
use crate::endpoint::Endpoint;
use crate::io::{EventsFd, Group};
use crate::keeper::Keeper;
use crate::link::Links;
use crate::ops::Callback;
use crate::region::Region;
use crate::request::{Receipt, Request, outcome};
use crate::state::{Once, State};
use crossrail_types::Log;

/// How a worker is made.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
    /// Its name in messages; `host:pid` by default.
    pub name: Option<String>,
    /// Where it accepts connections; loopback with a free port by default. Anything beyond loopback needs a secret.
    pub listen: Option<Vec<SocketAddr>>,
    /// Whether it accepts connections over a Unix socket, which shared memory needs.
    pub unix: bool,
    /// Whether a thread of its own makes progress while no caller does.
    pub background: bool,
}

impl Default for WorkerOptions {
    fn default() -> WorkerOptions {
        WorkerOptions { name: None, listen: None, unix: true, background: true }
    }
}

/// How an endpoint is made.
#[derive(Clone, Debug, Default)]
pub struct ConnectOptions {
    /// Transports that may be used, as `tcp,shm`; the connection fails rather than use another. `cuda_ipc`: it fails where
    /// GPU memory cannot go straight; shared memory carries what is not a GPU's.
    pub require: Option<String>,
    /// How long it may take; `CROSSRAIL_TIMEOUT` by default.
    pub timeout: Option<Duration>,
}

/// What the handles of one worker share.
pub(crate) struct Shared {
    /// Itself, for what it hands to threads.
    pub(crate) me: Weak<Shared>,
    pub(crate) context: Context,
    pub(crate) log: Log,
    pub(crate) core: Mutex<Core>,
    pub(crate) groups: Vec<Group>,
    pub(crate) links: Links,
    pub(crate) keeper: Keeper,
    pub(crate) options: WorkerOptions,
    pub(crate) secret: handshake::Secret,
    pub(crate) listener: Once<handshake::Listener>,
    pub(crate) identity: Mutex<Option<handshake::Identity>>,
    pub(crate) closing: AtomicBool,
    pub(crate) events: EventsFd,
    /// Something finished.
    pub(crate) done: Condvar,
    /// What GPUs' stagers have finished.
    pub(crate) inbox: Inbox,
    pub(crate) background: Mutex<Option<Thread>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// Progress, one address, and the endpoints made from it.
///
/// Any thread may use it. A thread that waits makes progress for all; while none does, a background thread takes
/// over (within a millisecond, or at once when a waiting thread goes to sleep).
#[derive(Clone)]
pub struct Worker(pub(crate) Arc<Handle>);

pub(crate) struct Handle(pub(crate) Arc<Shared>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl Worker {
    /// A worker that listens for peers.
    ///
    /// # Errors
    /// `Config`: a device that is not there, listening beyond loopback without a secret; `Io` and `Exhausted` when
    /// the system refuses descriptors, threads or the port.
    pub fn new(context: &Context, options: WorkerOptions) -> Result<Worker> {
        let settings = context.settings();
        let log = Log(settings.log);
        let (secret, warnings) =
            handshake::Secret::load(settings.secret.as_ref().map(|s| s.expose()), settings.secret_file.as_deref())?;
        for warning in warnings {
            log.warn(format_args!("{warning}"));
        }
        let events = EventsFd::new()?;
        let inbox = Inbox::default();
        let threads = io_threads(context);
        let groups = (0..=if threads > 1 { threads } else { 0 }).map(|_| Group::new()).collect::<Result<Vec<_>>>()?;
        let shared = Arc::new_cyclic(|me| Shared {
            me: me.clone(),
            context: context.clone(),
            log,
            core: Mutex::new(Core::new(State::new(log, context.arena().clone()), inbox.clone(), groups.len() > 1)),
            groups,
            links: Links::default(),
            keeper: Keeper::default(),
            options,
            secret,
            listener: Mutex::new(None),
            identity: Mutex::new(None),
            closing: AtomicBool::new(false),
            events,
            done: Condvar::new(),
            inbox,
            background: Mutex::new(None),
            threads: Mutex::new(Vec::new()),
        });
        let worker = Worker(Arc::new(Handle(shared.clone())));
        // Before there are threads it is for nothing; after that, nobody should wait for it.
        if settings.tls.allows("shm") && !crossrail_shm::prepare_if_quick() {
            shared.spawn("crossrail-prepare", |_| crossrail_shm::prepare())?;
        }
        shared.listen()?;
        for group in 1..shared.groups.len() {
            shared.spawn(&format!("crossrail-io{group}"), move |shared| shared.pump_forever(group))?;
        }
        if shared.options.background {
            let thread = shared.spawn("crossrail-progress", Shared::progress_forever)?;
            *shared.background.lock() = Some(thread);
        }
        Ok(worker)
    }

    /// How others reach this worker: opaque bytes, to be handed over by any means. They admit whoever has them.
    pub fn address(&self) -> Vec<u8> {
        self.shared().listener.lock().as_ref().map_or_else(Vec::new, |listener| listener.address().encode())
    }

    /// The worker's name in messages.
    pub fn name(&self) -> String {
        self.shared().identity.lock().as_ref().map_or_else(String::new, |me| me.hello.name.clone())
    }

    /// Where it accepts connections over TCP.
    pub fn control_addresses(&self) -> Vec<SocketAddr> {
        self.shared().listener.lock().as_ref().map_or_else(Vec::new, |listener| listener.address().control)
    }

    /// Connects to the worker at `to`: the bytes of its [`Worker::address`], or text as `host:port`.
    ///
    /// # Errors
    /// `Unreachable`, `Timeout`, `Refused` (secret), `Mismatch` (version, chunk, window, channels), `Usage` (neither
    /// an address nor `host:port`), `Unsupported` (nothing that `require` permits is possible; the text says why).
    pub fn connect(&self, to: &[u8], options: &ConnectOptions) -> Result<Endpoint> {
        let id = self.shared().connect(to, options)?;
        Ok(Endpoint { worker: self.clone(), id })
    }

    /// The next endpoint that a peer has made, waiting for it at most `timeout` (`CROSSRAIL_TIMEOUT` if `None`).
    pub fn accept(&self, timeout: Option<Duration>) -> Result<Endpoint> {
        let shared = self.shared();
        let timeout = timeout.unwrap_or(shared.context.settings().timeout);
        let found = shared
            .wait_until(timeout, |core| if core.closed { Some(None) } else { core.arrived.pop_front().map(Some) });
        match found {
            Some(Some(id)) => Ok(Endpoint { worker: self.clone(), id }),
            Some(None) => Err(crate::ops::gone("accept")),
            None => Err(Error::new(
                ErrorKind::Timeout,
                "accept",
                format!("no peer has connected to {} in {:.3} s", self.name(), timeout.as_secs_f64()),
            )),
        }
    }

    /// Lets peers with the region's key write to and read from `buffer`.
    pub fn register(&self, buffer: impl Into<Buffer>) -> Result<Region> {
        Region::register(self.shared(), buffer.into())
    }

    /// Receives the next message whose tag agrees with `tag` in the bits of `mask`, from `from` or from anybody.
    ///
    /// Messages match in the order in which they were sent and receives in the order in which they were posted. A
    /// message longer than the buffer fails with `Truncated`, at the sender too.
    pub fn recv(&self, buffer: impl Into<Buffer>, tag: u64, mask: u64, from: Option<&Endpoint>) -> Result<Request> {
        let shared = self.shared();
        let mut buffer = buffer.into();
        shared.admit(&mut buffer)?;
        let mut core = shared.core.lock();
        let op = core.receive(buffer, tag, mask, from.map(|from| from.id));
        shared.after(core);
        Ok(Request::new(shared, op?))
    }

    /// Makes progress once; whether anything moved.
    pub fn progress(&self) -> bool {
        self.shared().step()
    }

    /// A descriptor that becomes readable whenever requests have finished; for event loops. Drain it with
    /// [`Worker::drain_events`] and then look at the requests.
    pub fn event_fd(&self) -> RawFd {
        self.shared().events.fd()
    }

    /// Makes [`Worker::event_fd`] unreadable until something else finishes.
    pub fn drain_events(&self) {
        self.shared().events.drain();
    }

    /// Every endpoint with a living peer.
    pub fn endpoints(&self) -> Vec<Endpoint> {
        let core = self.shared().core.lock();
        let alive = |(index, peer): (usize, &Option<Box<crate::state::PeerState>>)| {
            peer.as_ref().filter(|peer| peer.alive).map(|_| EndpointId(index as u32))
        };
        let ids: Vec<_> = core.st.peers.iter().enumerate().filter_map(alive).collect();
        drop(core);
        ids.into_iter().map(|id| Endpoint { worker: self.clone(), id }).collect()
    }

    /// Operations that are running, or finished and neither waited for nor dropped.
    pub fn operations(&self) -> usize {
        self.shared().core.lock().st.ops.live()
    }

    /// Ends the worker: its connections close, its threads end, its running requests fail with `Closed`. Called by
    /// itself when the last handle is dropped. From inside a callback it does not wait for the threads.
    pub fn close(&self) {
        self.shared().close();
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.0.0
    }
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Worker({})", self.name())
    }
}

/// Connections are spread over threads of their own only where there are cores for them.
fn io_threads(context: &Context) -> usize {
    match context.settings().io_threads {
        IoThreads::Count(count) => count as usize,
        IoThreads::Auto => {
            let rails = context.devices().map_or(1, |devices| devices.len().max(1));
            let connections = rails * context.settings().channels as usize;
            connections.min(context.cores() / 2).clamp(1, 8)
        }
    }
}

impl Shared {
    fn spawn(self: &Arc<Self>, name: &str, body: impl FnOnce(&Arc<Shared>) + Send + 'static) -> Result<Thread> {
        let shared = self.clone();
        let handle = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || body(&shared))
            .map_err(|error| Error::io("worker", "pthread_create", &error))?;
        let thread = handle.thread().clone();
        self.threads.lock().push(handle);
        Ok(thread)
    }

    pub(crate) fn spawn_keeper(self: &Arc<Self>) -> Result<()> {
        self.spawn("crossrail-keeper", |shared| shared.keeper.run(shared)).map(drop)
    }

    // ---- requests

    pub(crate) fn wait(&self, request: &Request, timeout: Option<Duration>) -> Result<Receipt> {
        let timeout = timeout.unwrap_or(self.context.settings().timeout);
        let found = self.wait_until(timeout, |core| outcome(core, request));
        found.unwrap_or_else(|| Err(self.timed_out(request.id, timeout)))
    }

    pub(crate) fn test(&self, request: &Request) -> Option<Result<Receipt>> {
        let id = request.id;
        let mut core = self.core.lock();
        if !core.st.ops.is_done(id) {
            core.pass(true);
            let sockets = self.groups[0].has_lanes();
            if sockets && !core.st.ops.is_done(id) {
                self.after(core);
                self.poll_sockets(Some(Duration::ZERO));
                core = self.core.lock();
            }
            core.activity += 1;
        }
        let found = outcome(&mut core, request);
        self.after(core);
        found
    }

    pub(crate) fn cancel(&self, id: OpId) {
        let mut core = self.core.lock();
        core.cancel(id);
        self.after(core);
    }

    pub(crate) fn on_complete(&self, request: &Request, callback: Callback) {
        let mut core = self.core.lock();
        match request.collected.load() {
            Some(finish) => core.st.ops.callbacks.push((callback, Ok(finish))),
            None => core.st.ops.on_complete(request.id, callback),
        }
        self.after(core);
    }

    fn timed_out(&self, id: OpId, timeout: Duration) -> Error {
        let mut core = self.core.lock();
        let what = core.st.ops.op(id).map_or("wait", |op| op.what);
        let progress = core.progress(id);
        let lane = match &progress {
            Some((Some(_), ..)) => core.lanes_of(id),
            _ => None,
        };
        drop(core);
        let mut error = Error::new(ErrorKind::Timeout, what, format!("not finished in {:.3} s", timeout.as_secs_f64()));
        error.lane = lane;
        match progress {
            Some((Some(peer), done, total)) => {
                error = error.with_peer(peer).with_progress(done, total);
            }
            Some((None, done, total)) => {
                error = error.with_progress(done, total);
                error.detail.push_str(": no message has matched it");
            }
            None => {}
        }
        error.with_hint("the request goes on: wait again or cancel it; CROSSRAIL_TIMEOUT sets the default")
    }

    /// Ends all access to a region and waits until no peer touches its memory; false if it had ended already.
    pub(crate) fn deregister(&self, region: crossrail_proto::RegionRef) -> bool {
        let mut core = self.core.lock();
        let ended = core.region_gone(region);
        core.st.ops.finished = true;
        self.after(core);
        if !ended {
            return false;
        }
        // A peer that reads is told first: what a lane sends instead of revoked memory would pass for the region's.
        let timeout = self.context.settings().timeout;
        if self.observe_until(timeout, |core| (!core.region_in_use(region)).then_some(())).is_none() {
            self.log.warn(format_args!("deregister: a peer had not let go in {:.3} s", timeout.as_secs_f64()));
        }
        let mut core = self.core.lock();
        for peer in core.st.peers.iter().flatten() {
            peer.passives_of(region).for_each(|grant| grant.revoke());
        }
        core.st.let_go_of_region(region);
        core.st.regions.remove(region);
        self.after(core);
        true
    }

    // ---- the end

    pub(crate) fn close(&self) {
        if self.closing.swap(true, Ordering::SeqCst) {
            return;
        }
        self.keeper.stop();
        drop(self.listener.lock().take());
        let mut core = self.core.lock();
        core.farewell();
        self.after(core);
        self.step();
        for group in &self.groups {
            group.wake_always();
        }
        self.hand_over();
        let me = std::thread::current().id();
        for thread in std::mem::take(&mut *self.threads.lock()) {
            if thread.thread().id() != me {
                let _ = thread.join();
            }
        }
        self.links.clear();
        let mut core = self.core.lock();
        core.closed = true;
        core.close();
        self.after(core);
        for group in &self.groups {
            group.pump(self);
        }
        let mut core = self.core.lock();
        core.abandon();
        let gpus = core.st.staging.take_gpus();
        self.after(core);
        drop(gpus);
        self.done.notify_all();
    }
}
