//! A worker: one address, its progress, and the endpoints made from it.

use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crossrail_types::{Error, ErrorKind, Result};

use super::{Context, Endpoint, Region, Request};
use crate::core::{Lingering, Submission};
use crate::memory::{Buffer, Described, Description, Place};
use crate::progress::{Progress, ProgressOptions, SessionEvents, callbacks_deadline};
use crate::session::registry;
use crate::session::transport::Transports;
use crate::session::{ListenOptions, Sessions, Turn};

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
    /// Whether peers that connect stay without being [accepted](Worker::accept), which then finds none: they are
    /// reached by [`Worker::peer`] and [`Worker::endpoints`].
    pub admit: bool,
    /// How long that thread polls after anything last moved, before it sleeps. Waking it takes tens of microseconds;
    /// polling takes a processor. Nothing by default.
    pub linger: Duration,
    /// The log warns of peers that end while operations with them are in flight. An owner of the worker that reports such
    /// ends in its own terms turns this off: then they are information.
    pub warns_of_ends: bool,
}

impl Default for WorkerOptions {
    fn default() -> WorkerOptions {
        WorkerOptions {
            name: None,
            listen: None,
            unix: true,
            background: true,
            admit: false,
            linger: Duration::ZERO,
            warns_of_ends: true,
        }
    }
}

/// How an endpoint is made.
#[derive(Clone, Debug, Default)]
pub struct ConnectOptions {
    /// Transports that may be used, as `tcp,shm`; the connection fails rather than use another. `cuda_ipc`: it fails
    /// where GPU memory cannot go straight; shared memory carries what is not a GPU's.
    pub require: Option<String>,
    /// How long it may take; `CROSSRAIL_TIMEOUT` by default.
    pub timeout: Option<Duration>,
    /// For callers whose messages take turns between several endpoints to one peer.
    pub turn: Turn,
}

/// Progress, one address, and the endpoints made from it.
///
/// Any thread may use it. A thread that waits makes progress for all; while none does, a background thread takes
/// over (within a millisecond, or at once when a waiting thread goes to sleep).
#[derive(Clone)]
pub struct Worker(pub(crate) Arc<Handle>);

/// What the clones of a worker share; dropping it closes the worker.
pub(crate) struct Handle {
    progress: Arc<Progress>,
    sessions: Arc<Sessions>,
}

impl Handle {
    fn close(&self) -> Result<()> {
        if !self.begin_close() {
            return Ok(());
        }
        let lingering = self.close_endpoints(callbacks_deadline());
        self.progress.finish_close(lingering)
    }

    /// Says goodbye to all peers; false where that was done before, or is another process's business.
    fn begin_close(&self) -> bool {
        self.progress.check_origin("close").is_ok() && self.progress.begin_close()
    }

    fn close_endpoints(&self, until: Instant) -> Lingering {
        self.sessions.stop();
        self.progress.join_threads(until);
        self.sessions.clear();
        self.progress.close_endpoints()
    }

    /// Logs the error of a close whose caller takes no result.
    fn report(&self, ended: Result<()>) {
        if let Err(error) = ended {
            self.progress.log().error(format_args!("{error}"));
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.report(self.close());
        if self.progress.check_origin("close").is_err() {
            // Dropped in a forked child, they would close the parent's connections: they stay until it ends.
            std::mem::forget((self.progress.clone(), self.sessions.clone()));
        }
    }
}

impl Worker {
    /// A worker that listens for peers.
    ///
    /// # Errors
    /// `Config`: a device that is not there, listening beyond loopback without a secret; `Io` and `Exhausted` when
    /// the system refuses descriptors, threads or the port.
    pub fn new(context: &Context, options: WorkerOptions) -> Result<Worker> {
        Worker::with_transports(context, options, registry::registered())
    }

    /// [`Worker::new`] with these transports.
    pub(crate) fn with_transports(context: &Context, options: WorkerOptions, transports: Transports) -> Result<Worker> {
        context.environment().origin().check("worker")?;
        let WorkerOptions { name, listen: addresses, unix, background, admit, linger, warns_of_ends } = options;
        let options = ProgressOptions { has_background: background, linger };
        let progress = Progress::new(context.environment(), options)?;
        progress.core().transfers().warns_of_ends = warns_of_ends;
        let sessions = match Sessions::start(&progress, ListenOptions { name, addresses, unix, admit }, transports) {
            Ok(sessions) => sessions,
            Err(error) => {
                progress.begin_close();
                progress.join_threads(callbacks_deadline());
                return Err(error);
            }
        };
        let worker = Worker(Arc::new(Handle { progress, sessions }));
        let sessions: Weak<dyn SessionEvents> = Arc::downgrade(worker.sessions()) as Weak<dyn SessionEvents>;
        worker.progress_handle().start(sessions)?;
        Ok(worker)
    }

    /// The worker's address: opaque bytes, to be passed to peers by any means. Whoever has them may connect.
    pub fn address(&self) -> Vec<u8> {
        self.sessions().address()
    }

    /// The worker's name in messages.
    pub fn name(&self) -> String {
        self.sessions().name()
    }

    /// Where it accepts connections over TCP.
    pub fn control_addresses(&self) -> Vec<SocketAddr> {
        self.sessions().control_addresses()
    }

    /// Connects to the worker at `to`: the bytes of its [`Worker::address`], or text as `host:port`.
    ///
    /// # Errors
    /// `Unreachable`, `Timeout`, `Refused` (secret), `Mismatch` (version, chunk, window, channels), `Usage` (neither
    /// an address nor `host:port`), `Unsupported` (nothing that `require` permits is possible; the text says why).
    pub fn connect(&self, to: &[u8], options: &ConnectOptions) -> Result<Endpoint> {
        self.progress_handle().check_origin("connect")?;
        let id = self.sessions().connect(to, options.require.as_deref(), options.timeout, options.turn)?;
        let claim = self.progress_handle().core().peers().claim(id);
        Ok(Endpoint::new(self, claim))
    }

    /// The next endpoint that a peer has made, waiting for it at most `timeout` (`CROSSRAIL_TIMEOUT` if `None`).
    pub fn accept(&self, timeout: Option<Duration>) -> Result<Endpoint> {
        let progress = self.progress_handle();
        progress.check_origin("accept")?;
        let timeout = timeout.unwrap_or(progress.environment().settings().timeout);
        Ok(Endpoint::new(self, self.sessions().accept(timeout)?))
    }

    /// Admits no further peer. New connections fail with `Exhausted` and this text; existing peers and
    /// [`Worker::connect`] are unaffected.
    pub fn refuse_peers(&self, why: &str) {
        if self.progress_handle().check_origin("refuse_peers").is_ok() {
            self.sessions().refuse(why);
        }
    }

    /// Lets peers with the region's key write to and read from `buffer`.
    pub fn register(&self, buffer: impl Into<Buffer>) -> Result<Region> {
        self.progress_handle().check_origin("register")?;
        Region::register(self.progress_handle(), buffer.into())
    }

    /// Receives the next message whose tag agrees with `tag` in the bits of `mask`, from `from` or from any peer.
    ///
    /// Messages match in the order in which they were sent and receives in the order in which they were posted. A
    /// message longer than the buffer fails with `Truncated`, at the sender too.
    pub fn recv(&self, buffer: impl Into<Buffer>, tag: u64, mask: u64, from: Option<&Endpoint>) -> Result<Request> {
        let progress = self.progress_handle();
        progress.check_origin("recv")?;
        if from.is_some_and(|from| !Arc::ptr_eq(&from.worker.0, &self.0)) {
            return Err(foreign(self, from));
        }
        Request::start(progress, from.map(|from| from.id), Submission::Receive { tag, mask }, buffer.into())
    }

    /// A request of no operation, for [`Worker::recv_in`] and [`Endpoint::send_in`].
    pub fn idle_request(&self) -> Request {
        Request::idle(self.progress_handle())
    }

    /// [`Worker::recv`] in the place of a request of this worker that is over: for callers that keep many, and have no
    /// allocation or reference count for each operation.
    ///
    /// # Errors
    /// As [`Worker::recv`]; `Usage`: a request of another worker.
    #[inline]
    pub fn recv_in(
        &self,
        place: &mut Request,
        buffer: Buffer,
        (tag, mask): (u64, u64),
        from: Option<&Endpoint>,
    ) -> std::result::Result<(), Box<Error>> {
        self.check_place("recv", place)?;
        if from.is_some_and(|from| !Arc::ptr_eq(&from.worker.0, &self.0)) {
            return Err(Box::new(foreign(self, from)));
        }
        place.restart(from.map(|from| from.id), Submission::Receive { tag, mask }, buffer)
    }

    /// Fails in a forked child, and for a place of another worker.
    #[inline(always)]
    pub(super) fn check_place(&self, operation: &str, place: &Request) -> std::result::Result<(), Box<Error>> {
        self.progress_handle().check_origin(operation).map_err(Box::new)?;
        if place.is_of(self.progress_handle()) { Ok(()) } else { Err(foreign_place(operation)) }
    }

    /// Queues `task` for the background thread; without one, for the next caller of [`Worker::progress`]. Tasks run in
    /// the order of these calls.
    ///
    /// For threads that may block on neither the worker's lock nor a system call, and start operations this way. A task
    /// may call anything of this worker, but must not block. Tasks that are still queued when the worker closes run
    /// then.
    ///
    /// # Errors
    /// `Usage` in a forked child.
    pub fn defer(&self, task: impl FnOnce() + Send + 'static) -> Result<()> {
        self.progress_handle().check_origin("defer")?;
        self.progress_handle().defer(Box::new(task));
        Ok(())
    }

    /// Makes progress once; whether anything moved.
    pub fn progress(&self) -> bool {
        let progress = self.progress_handle();
        progress.check_origin("progress").is_ok() && progress.step()
    }

    /// Fails where nothing of this worker can be used any more.
    ///
    /// # Errors
    /// `Usage` in a forked child; `Closed`.
    pub fn check(&self, operation: &str) -> Result<()> {
        let progress = self.progress_handle();
        progress.check_origin(operation)?;
        if progress.is_closing() || progress.core().is_closed() {
            return Err(crate::core::gone(operation));
        }
        Ok(())
    }

    /// Number of events so far: requests that finished, peers that connected or ended, notices that arrived.
    pub fn events(&self) -> u64 {
        self.progress_handle().core_here().map_or(0, |mut core| core.operations().reports())
    }

    /// Makes progress until there were more than `seen` [events](Worker::events), or something waits to be
    /// [taken](Worker::notices) or [accepted](Worker::accept); the number of events then.
    ///
    /// # Errors
    /// `Timeout` (after `CROSSRAIL_TIMEOUT` if `None`); `Closed`; `Usage` in a forked child.
    pub fn wait_event(&self, seen: u64, timeout: Option<Duration>) -> Result<u64> {
        self.check("wait_event")?;
        let progress = self.progress_handle();
        let timeout = timeout.unwrap_or(progress.environment().settings().timeout);
        let found = progress.wait_until(timeout, |core| {
            let events = core.operations().reports();
            let waits = core.has_notices() || self.sessions().has_arrivals();
            (events != seen || waits || core.is_closed()).then_some(events)
        });
        self.check("wait_event")?;
        found.ok_or_else(|| Error::new(ErrorKind::Timeout, "wait_event", "nothing has happened").with_waited(timeout))
    }

    /// Waits until one of `requests`, all of this worker, is finished: the place of the first that is.
    ///
    /// # Errors
    /// `Usage`: one of another worker, or none at all; `Timeout` (after `CROSSRAIL_TIMEOUT` if `None`): all continue.
    pub fn wait_any(&self, requests: &[&Request], timeout: Option<Duration>) -> Result<usize> {
        let progress = self.progress_handle();
        progress.check_origin("wait_any")?;
        let usage = |detail| Err(Error::new(ErrorKind::Usage, "wait_any", detail));
        if requests.is_empty() {
            return usage("no requests");
        }
        if !requests.iter().all(|request| request.is_of(progress)) {
            return usage("a request belongs to another worker");
        }
        let timeout = timeout.unwrap_or(progress.environment().settings().timeout);
        let found = progress.wait_until(timeout, |core| {
            let operations = core.operations();
            requests.iter().position(|request| operations.is_done(request.id))
        });
        found.ok_or_else(|| {
            let detail = format!("none of {} requests is finished", requests.len());
            Error::new(ErrorKind::Timeout, "wait_any", detail).with_waited(timeout)
        })
    }

    /// Ends the worker after a panic in a call of it, which may have left its state half changed: as [`Worker::close`],
    /// but joins no thread. [`Worker::failure`] returns `panic` then.
    pub fn fail(&self, panic: &str) {
        if self.progress_handle().check_origin("fail").is_ok() {
            self.progress_handle().fail(panic);
        }
    }

    /// The text of the panic, a bug of the library, that ended the worker: in one of its threads, or in a call
    /// ([`Worker::fail`]).
    pub fn failure(&self) -> Option<&str> {
        self.progress_handle().failure()
    }

    /// A descriptor that becomes readable whenever requests have finished; for event loops. Drain it with
    /// [`Worker::drain_events`] and then look at the requests.
    pub fn event_fd(&self) -> RawFd {
        self.progress_handle().events().fd()
    }

    /// Makes [`Worker::event_fd`] unreadable until something else finishes.
    pub fn drain_events(&self) {
        if self.progress_handle().check_origin("drain_events").is_ok() {
            self.progress_handle().events().drain();
        }
    }

    /// Every endpoint with a living peer.
    pub fn endpoints(&self) -> Vec<Endpoint> {
        let Some(mut core) = self.progress_handle().core_here() else { return Vec::new() };
        let ids: Vec<_> = core.peers().alive().collect();
        let claims: Vec<_> = ids.into_iter().map(|id| core.peers().claim(id)).collect();
        drop(core);
        claims.into_iter().map(|claim| Endpoint::new(self, claim)).collect()
    }

    /// An endpoint with the living peer of that name, whichever end has connected; of several, the one that was made
    /// first.
    pub fn peer(&self, name: &str) -> Option<Endpoint> {
        let mut core = self.progress_handle().core_here()?;
        let named = core.peers().iter().find(|peer| peer.is_alive() && peer.name() == name)?.id();
        let claim = core.peers().claim(named);
        drop(core);
        Some(Endpoint::new(self, claim))
    }

    /// The endpoint of this number ([`Endpoint::id`]), if its peer is alive.
    pub fn endpoint(&self, id: u32) -> Option<Endpoint> {
        let mut core = self.progress_handle().core_here()?;
        let id = core.peers().iter().find(|peer| peer.is_alive() && peer.id().0 == id)?.id();
        let claim = core.peers().claim(id);
        drop(core);
        Some(Endpoint::new(self, claim))
    }

    /// What peers need to move rows of these regions by their addresses: for [`Description::parse`].
    ///
    /// # Errors
    /// `Usage`: a region of another worker; `Region`: one that was deregistered; `Closed`.
    pub fn describe(&self, regions: &[Region]) -> Result<Vec<u8>> {
        let progress = self.progress_handle();
        progress.check_origin("describe")?;
        if progress.is_closing() {
            return Err(crate::core::gone("describe"));
        }
        if regions.iter().any(|region| !region.is_of(progress)) {
            return Err(Error::new(ErrorKind::Usage, "describe", "a region belongs to another worker"));
        }
        let mut core = progress.core();
        if regions.iter().any(|region| !core.transfers().regions().is_live(region.entry())) {
            return Err(Error::new(ErrorKind::Region, "describe", "a region was deregistered"));
        }
        drop(core);
        let regions = regions.iter().map(|region| Described { base: region.base(), key: region.key() }).collect();
        Ok(Description::new(self.address(), regions)?.to_bytes())
    }

    /// [`Worker::register`] of a range of addresses, which nothing keeps.
    ///
    /// # Errors
    /// As [`Worker::register`]; `Usage`: it is not memory of that GPU.
    ///
    /// # Safety
    /// The range must be readable and writable until the region is deregistered and operations on it are over. Peers
    /// may write to it at any time until then.
    #[allow(unsafe_code)]
    pub unsafe fn register_range(&self, address: u64, len: u64, place: Place) -> Result<Region> {
        let len = usize::try_from(len).map_err(|_| Error::new(ErrorKind::Usage, "register", "a range beyond 2^64"))?;
        // SAFETY: by the contract.
        let buffer = unsafe {
            match place {
                Place::Host => Buffer::raw(address as *mut u8, len, None),
                Place::Gpu(ordinal) => Buffer::device(address, len, ordinal, None, None),
            }
        };
        self.register(buffer)
    }

    /// Operations that are running, or finished and neither waited for nor dropped.
    pub fn operations(&self) -> usize {
        self.progress_handle().core_here().map_or(0, |mut core| core.operations().live())
    }

    /// Ends the worker: its connections close, its threads end, its running requests fail with `Closed`. Called by
    /// itself when the last handle is dropped. From inside a callback it does not wait for the thread that runs it, and
    /// for callbacks on other threads 10 s at most: one that has not returned then outlasts the worker. Any
    /// other call than the first has no effect.
    ///
    /// # Errors
    /// `Timeout`: a peer that was copying from or to memory of an operation, for example a stopped one, has not confirmed
    /// within 3 s (`CROSSRAIL_TIMEOUT`, if shorter) that it has ended. The worker is closed all the same, and memory that
    /// operations and regions have kept alive is never freed.
    pub fn close(&self) -> Result<()> {
        self.0.close()
    }

    #[inline]
    pub(crate) fn progress_handle(&self) -> &Arc<Progress> {
        &self.0.progress
    }

    pub(crate) fn sessions(&self) -> &Arc<Sessions> {
        &self.0.sessions
    }
}

/// [`Worker::close`] of all of them, which wait for callbacks together: each knows that it ends before it loses a peer among them, whose end it would
/// report otherwise.
pub fn close_all<'a>(workers: impl Iterator<Item = &'a Worker>) {
    let begun: Vec<_> = workers.filter(|worker| worker.0.begin_close()).collect();
    let until = callbacks_deadline();
    // They may be each other's peers, which end their sides first.
    let lingering: Vec<_> = begun.iter().map(|worker| worker.0.close_endpoints(until)).collect();
    begun.iter().zip(lingering).for_each(|(worker, left)| worker.0.report(worker.0.progress.finish_close(left)));
}

/// Holds a worker's lock for this duration, for tests of threads that wait for it.
#[doc(hidden)]
pub fn hold_lock(worker: &Worker, time: Duration) {
    let _core = worker.0.progress.core();
    std::thread::sleep(time);
}

#[cold]
fn foreign_place(operation: &str) -> Box<Error> {
    Box::new(Error::new(ErrorKind::Usage, operation, "the place is a request of another worker"))
}

#[cold]
fn foreign(worker: &Worker, from: Option<&Endpoint>) -> Error {
    let (own, other) = (worker.name(), from.map_or_else(String::new, |from| from.worker.name()));
    let detail = format!("the endpoint belongs to another worker ({other}), whose messages do not come to {own}");
    Error::new(ErrorKind::Usage, "recv", detail).with_hint("receive with the endpoint's own worker")
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Worker({})", self.name())
    }
}
