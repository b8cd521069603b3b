//! A worker: its lock, who makes progress when, and the waits.

use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use crossrail_transport::LaneError;
use crossrail_types::{EndpointId, Error, ErrorKind, IoThreads, LaneId, OpId, Result};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::buffer::Buffer;
use crate::context::Context;
use crate::core::Core;
use crate::endpoint::Endpoint;
use crate::io::{About, EventsFd, Group, Ready};
use crate::keeper::Keeper;
use crate::link::Links;
use crate::log::Log;
use crate::meet;
use crate::ops::{Callback, Outcome};
use crate::region::Region;
use crate::request::{LaneShare, Protocol, Receipt, Request, protocol};
use crate::state::{Once, State};

/// A waiting thread polls without pause for this long after anything last moved.
const SPIN: Duration = Duration::from_micros(30);
/// Then it offers its core to others between polls, for this long; then it sleeps.
const YIELD: Duration = Duration::from_micros(200);
/// Idle polls between two looks at the clock.
const LOOK_EVERY: u32 = 64;
/// Idle polls between two looks at the sockets of chunk connections.
const EPOLL_EVERY: u32 = 8;
/// While callers make progress themselves, the background thread looks this often whether they have stopped.
const TICK: Duration = Duration::from_millis(1);
/// The longest the background thread sleeps without looking at the protocol's timers.
const NAP_MAX: Duration = Duration::from_millis(100);

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
    /// Transports that may be used, as `tcp,shm`; the connection fails rather than use another.
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
    pub(crate) secret: meet::Secret,
    pub(crate) listener: Once<meet::Listener>,
    pub(crate) identity: Mutex<Option<meet::Identity>>,
    pub(crate) closing: AtomicBool,
    events: EventsFd,
    /// Something finished.
    done: Condvar,
    sleepers: AtomicUsize,
    spinning: AtomicUsize,
    /// Waits that have ended: tells the background thread that callers are at work.
    activity: AtomicU64,
    background: Mutex<Option<Thread>>,
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
            meet::Secret::load(settings.secret.as_ref().map(|s| s.expose()), settings.secret_file.as_deref())?;
        for warning in warnings {
            log.warn(format_args!("{warning}"));
        }
        let events = EventsFd::new()?;
        let threads = io_threads(context);
        let groups = (0..=if threads > 1 { threads } else { 0 }).map(|_| Group::new()).collect::<Result<Vec<_>>>()?;
        let shared = Arc::new_cyclic(|me| Shared {
            me: me.clone(),
            context: context.clone(),
            log,
            core: Mutex::new(Core::new(State::new(log, context.arena().clone()))),
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
            sleepers: AtomicUsize::new(0),
            spinning: AtomicUsize::new(0),
            activity: AtomicU64::new(0),
            background: Mutex::new(None),
            threads: Mutex::new(Vec::new()),
        });
        let worker = Worker(Arc::new(Handle(shared.clone())));
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
        let mut core = shared.core.lock();
        let op = core.receive(buffer.into(), tag, mask, from.map(|from| from.id));
        shared.after(core);
        Ok(Request { shared: shared.clone(), id: op? })
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

    /// Operations that are running, or finished with their request still held.
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

    // ---- after every change

    /// Releases the lock and does what must be done without it: callbacks, wake-ups, suspects, lost rails.
    #[inline]
    pub(crate) fn after(&self, mut core: MutexGuard<'_, Core>) {
        let finished = std::mem::take(&mut core.st.ops.finished);
        let rare =
            core.kicked || !core.st.ops.callbacks.is_empty() || !core.suspects.is_empty() || !core.lost.is_empty();
        if rare {
            self.after_rare(core);
        } else {
            drop(core);
        }
        if finished {
            self.events.tell();
            if self.sleepers.load(Ordering::SeqCst) > 0 {
                // A sleeper checks under the lock before it sleeps, so it is either not yet there or told now.
                drop(self.core.lock());
                self.done.notify_all();
            }
        }
    }

    #[cold]
    fn after_rare(&self, mut core: MutexGuard<'_, Core>) {
        let kicked = std::mem::take(&mut core.kicked);
        let callbacks = std::mem::take(&mut core.st.ops.callbacks);
        let suspects = std::mem::take(&mut core.suspects);
        let lost = std::mem::take(&mut core.lost);
        let callbacks: Vec<(Callback, Result<Receipt>)> =
            callbacks.into_iter().map(|(callback, outcome)| (callback, render(&mut core, outcome))).collect();
        drop(core);
        if kicked {
            for group in &self.groups {
                group.wake();
            }
        }
        for (endpoint, lane) in suspects {
            self.examine(endpoint, lane);
        }
        for lost in lost {
            self.keeper.lost(self, lost);
        }
        for (callback, result) in callbacks {
            callback(result);
        }
    }

    /// A lane owes something and is silent: does its link still move bytes?
    fn examine(&self, endpoint: EndpointId, id: LaneId) {
        let mut core = self.core.lock();
        let now = core.st.tick();
        let bulk = core.st.peer(endpoint).and_then(|peer| peer.bulk.iter().find(|lane| lane.id == id).cloned());
        let acked = match &bulk {
            Some(lane) => match lane.lane.try_lock() {
                Some(held) => held.as_ref().map(|lane| lane.stats().acked_bytes),
                // Somebody is moving bytes on it at this moment.
                None => Some(u64::MAX),
            },
            None => core.inside.iter().find(|lane| lane.id == id).map(|lane| lane.lane.stats().acked_bytes),
        };
        let (Some(acked), Some(state)) = (acked, core.st.lane(id)) else { return };
        if acked == u64::MAX || std::mem::replace(&mut state.seen_acked, acked) != acked {
            if let Some(peer) = core.st.peer(endpoint) {
                peer.peer.lane_alive(now, id);
            }
            self.after(core);
            return;
        }
        let error = LaneError::Down("silent: nothing was acknowledged in time".to_owned());
        self.take_for_dead(core, endpoint, id, error);
    }

    /// Drops a lane that has not failed by itself.
    pub(crate) fn take_for_dead(
        &self,
        mut core: MutexGuard<'_, Core>,
        endpoint: EndpointId,
        id: LaneId,
        error: LaneError,
    ) {
        let bulk = core.st.peer(endpoint).and_then(|peer| peer.bulk.iter().find(|lane| lane.id == id).cloned());
        if let Some(lane) = bulk {
            lane.verdict.lock().get_or_insert(error);
            lane.dead.raise();
            core.kicked = true;
        } else {
            core.drop_inside(endpoint, id, &error);
        }
        self.after(core);
    }

    // ---- progress

    /// One pass over everything; whether anything moved.
    pub(crate) fn step(&self) -> bool {
        let mut core = self.core.lock();
        let mut moved = core.pass(true);
        core.timers();
        self.after(core);
        moved |= self.poll_sockets(Some(Duration::ZERO));
        self.activity.fetch_add(1, Ordering::Relaxed);
        moved
    }

    /// Collects socket events and pumps the driver's connections.
    fn poll_sockets(&self, timeout: Option<Duration>) -> bool {
        let group = &self.groups[0];
        let mut others: Vec<Ready> = Vec::new();
        group.events(timeout, |ready| others.push(ready));
        for ready in &others {
            self.act(*ready);
        }
        group.pump(self) | !others.is_empty()
    }

    fn act(&self, ready: Ready) {
        match ready.about {
            About::Wake => {}
            About::Lane(id) => {
                let mut core = self.core.lock();
                if let Some(inside) = core.inside.iter_mut().find(|lane| lane.id == id) {
                    inside.lane.ready(ready.readable, ready.writable);
                }
            }
            About::Session(endpoint) if ready.readable => self.control_readable(endpoint),
            About::Session(_) => {}
            About::Links => self.links_changed(),
        }
    }

    /// Waits until `ready` answers, at most `timeout`.
    pub(crate) fn wait_until<T>(&self, timeout: Duration, mut ready: impl FnMut(&mut Core) -> Option<T>) -> Option<T> {
        let mut core = self.core.lock();
        if let Some(found) = ready(&mut core) {
            self.after(core);
            return Some(found);
        }
        self.spinning.fetch_add(1, Ordering::SeqCst);
        if core.disarm() {
            // The background thread sleeps on lanes that no longer ring: have it look after us instead.
            self.groups[0].wake();
        }
        let mut wait = Wait { shared: self, deadline: None, timeout, idle: 0, idle_since: None };
        let found = wait.run(core, &mut ready);
        self.spinning.fetch_sub(1, Ordering::SeqCst);
        self.activity.fetch_add(1, Ordering::Relaxed);
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            self.hand_over();
        }
        found
    }

    /// Gets the background thread to make progress now.
    fn hand_over(&self) {
        if let Some(thread) = &*self.background.lock() {
            thread.unpark();
        }
    }

    /// The background thread.
    fn progress_forever(self: &Arc<Self>) {
        let mut seen = 0;
        while !self.closing.load(Ordering::Acquire) {
            let activity = self.activity.load(Ordering::Relaxed);
            let spinning = self.spinning.load(Ordering::SeqCst) > 0;
            let sleepers = self.sleepers.load(Ordering::SeqCst) > 0;
            if spinning || (activity != seen && !sleepers) {
                // Callers make progress themselves: look again when they may have stopped.
                seen = activity;
                std::thread::park_timeout(TICK);
                continue;
            }
            self.drive();
        }
    }

    /// Makes progress until nothing moves, sleeps until something does. Returns when a caller takes over.
    fn drive(&self) {
        let mut quiet = 0;
        while !self.closing.load(Ordering::Acquire) {
            let mut core = self.core.lock();
            let mut moved = core.pass(true);
            let busy = core.busy();
            self.after(core);
            moved |= self.poll_sockets(Some(Duration::ZERO));
            if self.spinning.load(Ordering::SeqCst) > 0 {
                return;
            }
            if moved || busy {
                quiet = 0;
                if !moved {
                    std::thread::yield_now();
                }
                continue;
            }
            quiet += 1;
            if quiet < 3 {
                continue;
            }
            self.doze();
            quiet = 0;
        }
    }

    /// Sleeps until an event, unless there is work.
    fn doze(&self) {
        let group = &self.groups[0];
        group.drowsy();
        let mut core = self.core.lock();
        core.timers();
        let idle = !core.busy() && !core.kicked && !group.pending() && core.arm();
        let nap = core.next_timer().map_or(NAP_MAX, |at| at.saturating_duration_since(Instant::now()).min(NAP_MAX));
        self.after(core);
        if !idle {
            group.awake();
            return;
        }
        self.poll_sockets(Some(nap));
        let mut core = self.core.lock();
        core.disarm();
        self.after(core);
    }

    /// A thread of its own for one group of connections.
    fn pump_forever(self: &Arc<Self>, group: usize) {
        let group = &self.groups[group];
        while !self.closing.load(Ordering::Acquire) {
            group.events(Some(Duration::ZERO), |_| {});
            if group.pump(self) {
                continue;
            }
            group.drowsy();
            if group.pending() || self.closing.load(Ordering::Acquire) {
                group.awake();
                continue;
            }
            group.events(None, |_| {});
        }
    }

    // ---- requests

    pub(crate) fn wait(&self, id: OpId, timeout: Option<Duration>) -> Result<Receipt> {
        let timeout = timeout.unwrap_or(self.context.settings().timeout);
        let found =
            self.wait_until(timeout, |core| if core.st.ops.is_done(id) { Some(outcome(core, id)) } else { None });
        found.unwrap_or_else(|| Err(self.timed_out(id, timeout)))
    }

    pub(crate) fn test(&self, id: OpId) -> Option<Result<Receipt>> {
        let mut core = self.core.lock();
        if !core.st.ops.is_done(id) {
            core.pass(true);
            let sockets = self.groups[0].has_lanes();
            if sockets && !core.st.ops.is_done(id) {
                self.after(core);
                self.poll_sockets(Some(Duration::ZERO));
                core = self.core.lock();
            }
            self.activity.fetch_add(1, Ordering::Relaxed);
        }
        let found = core.st.ops.is_done(id).then(|| outcome(&mut core, id));
        self.after(core);
        found
    }

    pub(crate) fn cancel(&self, id: OpId) {
        let mut core = self.core.lock();
        core.cancel(id);
        self.after(core);
    }

    pub(crate) fn on_complete(&self, id: OpId, callback: Callback) {
        let mut core = self.core.lock();
        core.st.ops.on_complete(id, callback);
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
                error = error.with_peer(&*peer).with_progress(done, total);
            }
            Some((None, done, total)) => {
                error = error.with_progress(done, total);
                error.detail.push_str(": no message has matched it");
            }
            None => {}
        }
        error.with_hint("the request goes on: wait again or cancel it; CROSSRAIL_TIMEOUT sets the default")
    }

    /// Removes a region by `remove`, then waits until no peer touches its memory.
    pub(crate) fn deregister(
        &self,
        region: crossrail_proto::RegionRef,
        remove: impl FnOnce(&mut crate::region::Regions, crossrail_proto::RegionRef) -> bool,
    ) -> bool {
        let mut core = self.core.lock();
        if !core.region_alive(region) {
            return false;
        }
        let grants = core.region_gone(region);
        for grant in grants {
            grant.revoke();
        }
        self.after(core);
        // A copy by both ends stops at its next piece.
        self.wait_until(self.context.settings().timeout, |core| (!core.copies_in(region)).then_some(()));
        let mut core = self.core.lock();
        let removed = remove(&mut core.st.regions, region);
        self.after(core);
        removed
    }

    // ---- the end

    pub(crate) fn close(&self) {
        if self.closing.swap(true, Ordering::SeqCst) {
            return;
        }
        self.keeper.stop();
        drop(self.listener.lock().take());
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
        self.after(core);
        self.done.notify_all();
    }
}

/// One bounded wait.
struct Wait<'a> {
    shared: &'a Shared,
    timeout: Duration,
    deadline: Option<Instant>,
    idle: u32,
    idle_since: Option<Instant>,
}

impl<'a> Wait<'a> {
    #[inline]
    fn run<T>(&mut self, mut core: MutexGuard<'a, Core>, ready: &mut impl FnMut(&mut Core) -> Option<T>) -> Option<T> {
        let shared = self.shared;
        loop {
            let mut moved = core.pass(true);
            if let Some(found) = ready(&mut core) {
                shared.after(core);
                return Some(found);
            }
            let group = &shared.groups[0];
            if (moved || self.idle.is_multiple_of(EPOLL_EVERY)) && (group.has_lanes() || core.kicked) {
                shared.after(core);
                moved |= shared.poll_sockets(Some(Duration::ZERO));
                core = shared.core.lock();
            }
            if moved {
                self.idle = 0;
                self.idle_since = None;
                continue;
            }
            self.idle += 1;
            if self.idle.is_multiple_of(LOOK_EVERY) {
                match self.look(core, ready) {
                    Look::Again(lock) => core = lock,
                    Look::Found(found) => return Some(found),
                    Look::Expired => return None,
                }
            } else {
                std::hint::spin_loop();
            }
        }
    }

    /// Looks at the clock after a stretch of idle polls: spin on, let others run, or sleep.
    #[cold]
    fn look<T>(&mut self, core: MutexGuard<'a, Core>, ready: &mut impl FnMut(&mut Core) -> Option<T>) -> Look<'a, T> {
        let shared = self.shared;
        shared.after(core);
        let now = Instant::now();
        let deadline = *self.deadline.get_or_insert(now + self.timeout);
        if now >= deadline {
            return Look::Expired;
        }
        let idle = now - *self.idle_since.get_or_insert(now);
        if idle < SPIN {
            return Look::Again(shared.core.lock());
        }
        // Session and link events are not looked at while spinning.
        shared.poll_sockets(Some(Duration::ZERO));
        if idle < YIELD {
            std::thread::yield_now();
            return Look::Again(shared.core.lock());
        }
        self.idle_since = None;
        self.idle = 0;
        if shared.options.background {
            return self.sleep(deadline, ready);
        }
        shared.doze_until(deadline);
        Look::Again(shared.core.lock())
    }

    /// Leaves progress to the background thread until something finishes.
    fn sleep<T>(&mut self, deadline: Instant, ready: &mut impl FnMut(&mut Core) -> Option<T>) -> Look<'a, T> {
        let shared = self.shared;
        let mut core = shared.core.lock();
        shared.sleepers.fetch_add(1, Ordering::SeqCst);
        shared.spinning.fetch_sub(1, Ordering::SeqCst);
        shared.hand_over();
        let look = loop {
            if let Some(found) = ready(&mut core) {
                break Look::Found(found);
            }
            if core.closed || shared.done.wait_until(&mut core, deadline).timed_out() {
                break match ready(&mut core) {
                    Some(found) => Look::Found(found),
                    None => Look::Expired,
                };
            }
        };
        shared.spinning.fetch_add(1, Ordering::SeqCst);
        shared.sleepers.fetch_sub(1, Ordering::SeqCst);
        shared.after(core);
        look
    }
}

enum Look<'a, T> {
    Again(MutexGuard<'a, Core>),
    Found(T),
    Expired,
}

impl Shared {
    /// Sleeps on the sockets itself, where there is no background thread.
    fn doze_until(&self, deadline: Instant) {
        let group = &self.groups[0];
        group.drowsy();
        let mut core = self.core.lock();
        core.timers();
        let idle = !core.busy() && !group.pending() && core.arm();
        let left = deadline.saturating_duration_since(Instant::now()).min(NAP_MAX);
        let nap = core.next_timer().map_or(left, |at| at.saturating_duration_since(Instant::now()).min(left));
        self.after(core);
        if idle {
            self.poll_sockets(Some(nap));
        } else {
            group.awake();
        }
        let mut core = self.core.lock();
        core.disarm();
        self.after(core);
    }
}

fn outcome(core: &mut Core, id: OpId) -> Result<Receipt> {
    match core.st.ops.op(id).and_then(|op| op.outcome.clone()) {
        Some(outcome) => render(core, outcome),
        None => Err(crate::ops::gone("wait")),
    }
}

/// The protocol's receipt in people's words.
fn render(core: &mut Core, outcome: Outcome) -> Result<Receipt> {
    let finish = outcome?;
    let peer = finish.endpoint.and_then(|endpoint| core.st.peer(endpoint));
    let (peer, notes) = match peer {
        Some(peer) if finish.receipt.lanes.is_empty() => (peer.name.clone(), Vec::new()),
        Some(peer) => (peer.name.clone(), peer.notes.clone()),
        None => (Arc::from(""), Vec::new()),
    };
    let receipt = finish.receipt;
    let name = |core: &mut Core, id: LaneId| core.st.lane(id).map_or_else(|| Arc::from("?"), |lane| lane.name.clone());
    let only = receipt.lane.map(|lane| name(core, lane));
    let shares = receipt
        .lanes
        .iter()
        .map(|share| LaneShare {
            name: name(core, share.lane),
            bytes: share.bytes,
            chunks: share.chunks.into(),
            resent: share.resent,
        })
        .collect();
    let us = |ns: u64| ns as f64 / 1000.0;
    Ok(Receipt {
        bytes: receipt.bytes,
        tag: finish.tag,
        peer,
        protocol: if finish.batch { Protocol::Batch } else { protocol(&receipt, finish.direct) },
        match_us: us(receipt.match_ns),
        window_us: us(receipt.window_ns),
        wire_us: us(receipt.wire_ns),
        copy_us: us(receipt.copy_ns),
        shares,
        only,
        notes,
    })
}
