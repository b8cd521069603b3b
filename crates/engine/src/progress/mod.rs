//! Which thread makes progress: waiting callers first, the background thread while there are none; and the work done
//! after the lock is released.

mod background;
mod connections;
mod core_lock;
mod event_fd;
mod gpu_admission;
mod group;
mod lane_health;
mod page_rows;
mod requests;
mod tasks;
mod threads;
mod waits;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::Thread;
use std::time::{Duration, Instant};

use crossrail_locks::{Condvar, Mutex, MutexGuard};
use crossrail_types::{EndpointId, Log, Origin, Result};

pub(crate) use self::connections::Connections;
use self::core_lock::CoreLock;
pub use self::core_lock::{CallerLock, set_caller_lock};
pub(crate) use self::event_fd::EventsFd;
pub(crate) use self::gpu_admission::{admit, admit_device, admit_links, admit_shared, wait_ready};
pub(crate) use self::group::About;
use self::group::SocketEvent;
use self::page_rows::PageRows;
pub(crate) use self::requests::Polled;
use self::tasks::Tasks;
use self::threads::Threads;
pub(crate) use self::threads::callbacks_deadline;
pub(crate) use self::waits::{Awaited, WAIT_MAX};
use crate::core::gpu::Inbox;
use crate::core::{
    BulkLane, CALLBACKS, Callback, Core, Deferred, FINISHED, FOLLOW_UPS, Lingering, LostRail, Move, RETURN_MAX,
    Receipt, render,
};
use crate::environment::{Environment, TcpLimits};

/// How long the background thread sleeps at most without checking the protocol's timers.
pub(super) const NAP_MAX: Duration = Duration::from_millis(100);
/// Maximum further connections of rails per thread, whatever they would carry.
const PER_THREAD: usize = 8;

/// What progress reports to the sessions above it. Called without any lock of the worker's.
pub(crate) trait SessionEvents: Send + Sync {
    /// A rail was lost; whoever dialled it may dial it again.
    fn rail_lost(&self, lost: LostRail);
    /// An endpoint carries so much that more connections are worth dialling.
    fn outgrown(&self, endpoint: EndpointId);
    /// Messages would go faster over another rail.
    fn faster_rail(&self, to: Move);
    /// An endpoint has ended; its control connection is no longer needed.
    fn endpoint_ended(&self, endpoint: EndpointId);
    /// A control connection has become readable.
    fn control_readable(&self, endpoint: EndpointId);
    /// The kernel has reported changes of network links.
    fn links_changed(&self);
}

/// A callback to run, with its argument.
type Due = (Callback, Result<Receipt>);

/// How a worker makes progress.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProgressOptions {
    /// There is a background thread.
    pub(crate) has_background: bool,
    /// How long it polls after anything last moved.
    pub(crate) linger: Duration,
}

/// One worker's locked [`Core`], and everything that drives it.
///
/// Any thread may use it. The core is locked with [`Progress::core`] and released with [`Progress::after`], which does
/// what must be done without the lock: whoever changes the core must release it that way.
pub(crate) struct Progress {
    me: Weak<Progress>,
    /// The process whose threads drive it.
    origin: Origin,
    environment: Arc<Environment>,
    log: Log,
    core: CoreLock,
    connections: Connections,
    /// Callers pump the first connection to each peer, although others have threads.
    pumps_first: bool,
    /// For each group whose thread runs, the NUMA node that it was placed by. Locked while a connection gets its group.
    pumping: Mutex<Vec<Option<u32>>>,
    events: EventsFd,
    /// Notified when an operation has finished, for threads in [`Progress::wait_until`] that sleep.
    done: Condvar,
    inbox: Inbox,
    tasks: Tasks,
    page_rows: PageRows,
    pub(crate) options: ProgressOptions,
    background: Mutex<Option<Thread>>,
    threads: Threads,
    closing: AtomicBool,
    /// The text of the panic that ended the worker.
    failure: OnceLock<String>,
    sessions: OnceLock<Weak<dyn SessionEvents>>,
}

impl Progress {
    /// Creates the core and what drives it; no thread runs yet.
    ///
    /// # Errors
    /// `Io` and `Exhausted` when the system refuses descriptors.
    pub(crate) fn new(environment: &Arc<Environment>, options: ProgressOptions) -> Result<Arc<Progress>> {
        let log = Log(environment.settings().log);
        let events = EventsFd::new()?;
        let inbox = Inbox::default();
        let TcpLimits { threads, pumps_first, .. } = environment.tcp_limits();
        let connections = Connections::new(if threads > 1 { threads } else { 0 })?;
        let mut core = Core::new(log, environment.arena().clone(), inbox.clone());
        let page_rows = PageRows::new(environment.settings().pages.as_deref(), log);
        if page_rows.is_open() {
            core.transfers().polled().keep_ends();
        }
        Ok(Arc::new_cyclic(|me| Progress {
            me: me.clone(),
            origin: environment.origin(),
            environment: environment.clone(),
            log,
            core: CoreLock::new(core),
            connections,
            pumps_first,
            pumping: Mutex::default(),
            events,
            done: Condvar::new(),
            inbox,
            tasks: Tasks::default(),
            page_rows,
            options,
            background: Mutex::new(None),
            threads: Threads::default(),
            closing: AtomicBool::new(false),
            failure: OnceLock::new(),
            sessions: OnceLock::new(),
        }))
    }

    /// Starts the threads. `sessions` receives reports from now on.
    ///
    /// # Errors
    /// `Io` when the system refuses threads.
    pub(crate) fn start(self: &Arc<Self>, sessions: Weak<dyn SessionEvents>) -> Result<()> {
        let _ = self.sessions.set(sessions);
        if self.options.has_background {
            let progress = self.clone();
            let thread = self.spawn("crossrail-progress", move || progress.progress_forever())?;
            *self.background.lock() = Some(thread);
        }
        Ok(())
    }

    /// Starts polling a connection that carries chunks; the first of a group starts the group's thread. `first`: it is
    /// its rail's first connection, which callers pump themselves if the process has a single rail: a short transfer
    /// is over before another thread wakes up. Callers also pump connections for which the system refuses a thread.
    /// `node`: the NUMA node of its device; a thread is pinned to the node of its first connection.
    ///
    /// # Errors
    /// `Io` when the system refuses to watch the connection's descriptor.
    pub(crate) fn carry(self: &Arc<Self>, lane: Arc<BulkLane>, first: bool, node: Option<u32>) -> Result<()> {
        let mut pumping = self.pumping.lock();
        let placement = self.environment.placement();
        let node = node.filter(|_| placement.near(node).is_some());
        let mut at = if first && self.pumps_first { 0 } else { self.connections.emptiest(&pumping, node) };
        if at > pumping.len() {
            let progress = self.clone();
            let pump = move || {
                if let Err(why) = progress.environment.placement().stay_near(node) {
                    progress.log.warn(format_args!("an I/O thread is not pinned to its device's NUMA node: {why}"));
                }
                progress.pump_forever(at);
            };
            match self.spawn(&format!("crossrail-io{at}"), pump) {
                Ok(_) => {
                    pumping.push(node);
                    self.core.lock().use_threads();
                }
                Err(error) => {
                    self.log.warn(format_args!(
                        "cannot start an I/O thread ({error}); calling threads drive this connection"
                    ));
                    at = 0;
                }
            }
        }
        self.connections.groups()[at].add(lane)
    }

    /// Whether so many more connections beside the first of a rail are not too many for the threads, nor for the
    /// descriptors of the process.
    pub(crate) fn has_room(&self, more: usize) -> bool {
        self.connections.further() + more <= PER_THREAD * self.connections.groups().len()
    }

    /// Starts a thread that [`Progress::join_threads`] waits for.
    ///
    /// # Errors
    /// `Io` when the system refuses it.
    pub(crate) fn spawn(&self, name: &str, body: impl FnOnce() + Send + 'static) -> Result<Thread> {
        self.threads.spawn(self.me.clone(), name, body)
    }

    /// Fails in a forked child, which has none of the threads, and must leave the connections to its parent.
    ///
    /// # Errors
    /// `Usage`.
    #[inline]
    pub(crate) fn check_origin(&self, operation: &str) -> Result<()> {
        self.origin.check(operation)
    }

    /// Locks the core; `None` in a forked child, in which nobody may ever release the lock.
    pub(crate) fn core_here(&self) -> Option<MutexGuard<'_, Core>> {
        self.origin.is_here().then(|| self.core())
    }

    pub(crate) fn environment(&self) -> &Arc<Environment> {
        &self.environment
    }

    pub(crate) fn log(&self) -> Log {
        self.log
    }

    /// Locks the core. Release it with [`Progress::after`] if anything was changed.
    #[inline]
    pub(crate) fn core(&self) -> MutexGuard<'_, Core> {
        self.core.lock()
    }

    /// Names the worker in the process's page.
    pub(crate) fn named(&self, name: &str) {
        self.page_rows.name(name);
        if self.environment.settings().trace.is_some() {
            self.core().start_trace(name);
        }
    }

    /// The descriptor for event loops.
    pub(crate) fn events(&self) -> &EventsFd {
        &self.events
    }

    /// What the threads sleep on, and the connections polled outside the lock.
    pub(crate) fn connections(&self) -> &Connections {
        &self.connections
    }

    // ---- after every change

    /// Releases the lock and does what must be done without it: callbacks, wake-ups, suspects, lost rails.
    #[inline(always)]
    pub(crate) fn after(&self, core: MutexGuard<'_, Core>) {
        self.after_or_leave(core, None);
    }

    /// [`Progress::after`]; `left` receives the callbacks instead, for callers that hold a connection's lock and run
    /// them later ([`Threads::call_back`]): a callback may close the worker, which takes that lock, or may not return
    /// for long.
    #[inline(always)]
    fn after_or_leave(&self, mut core: MutexGuard<'_, Core>, left: Option<&mut Vec<Due>>) {
        let news = core.operations().take_news();
        if (news & (CALLBACKS | FOLLOW_UPS)) | u8::from(core.wake_ups().wants_connections()) != 0 {
            return self.after_rare(core, news, left);
        }
        let sleepers = core.wake_ups().is_anyone_sleeping();
        drop(core);
        if news & FINISHED != 0 {
            self.notify_finished(sleepers);
        }
    }

    /// An operation has finished. `sleepers`: callers sleep, as counted under the lock: one that is only about to sleep
    /// is notified too, because it waits for the condition with the lock, and cannot miss this.
    #[inline]
    fn notify_finished(&self, sleepers: bool) {
        self.events.signal();
        if sleepers {
            self.done.notify_all();
        }
        if !self.options.has_background {
            // A caller may sleep on the sockets.
            self.connections.driven().wake();
        }
    }

    #[cold]
    fn after_rare(&self, mut core: MutexGuard<'_, Core>, mut news: u8, left: Option<&mut Vec<Due>>) {
        while news & FOLLOW_UPS != 0 {
            core.follow_up();
            news = news & !FOLLOW_UPS | core.operations().take_news();
        }
        let sleepers = core.wake_ups().is_anyone_sleeping();
        let (connections, driver) = core.wake_ups().take();
        let callbacks = core.operations().take_callbacks();
        let Deferred { suspects, lost, ended, outgrown, moves } = core.take_deferred();
        let callbacks: Vec<Due> =
            callbacks.into_iter().map(|(callback, outcome)| (callback, render(&mut core, outcome))).collect();
        drop(core);
        if connections {
            for (at, group) in self.connections.groups().iter().enumerate() {
                // The first group's thread also polls the lanes under the lock.
                if (at == 0 && driver) || group.pending() {
                    group.wake();
                }
            }
        }
        for (endpoint, lane) in suspects {
            self.examine(endpoint, lane);
        }
        if !lost.is_empty() || !ended.is_empty() {
            self.with_sessions(|sessions| {
                lost.iter().for_each(|lost| sessions.rail_lost(lost.clone()));
                ended.iter().for_each(|endpoint| sessions.endpoint_ended(*endpoint));
            });
        }
        if !outgrown.is_empty() {
            self.with_sessions(|sessions| outgrown.iter().for_each(|endpoint| sessions.outgrown(*endpoint)));
        }
        if !moves.is_empty() {
            self.with_sessions(|sessions| moves.iter().for_each(|to| sessions.faster_rail(*to)));
        }
        match left {
            Some(left) => left.extend(callbacks),
            None => self.threads.call_back(callbacks),
        }
        if news & FINISHED != 0 {
            self.notify_finished(sleepers);
        }
    }

    /// One pass over everything; whether anything moved.
    pub(crate) fn step(&self) -> bool {
        let mut moved = self.run_tasks();
        let mut core = self.core.lock();
        moved |= core.pass(true, false);
        core.tick();
        core.wake_ups().count_pass();
        // Otherwise the background thread does it.
        let due = !self.options.has_background && self.page_rows.is_due(&core);
        self.after(core);
        if due {
            self.publish();
        }
        moved |= self.poll_sockets(Some(Duration::ZERO));
        moved
    }

    /// Collects socket events and pumps the driver's connections.
    pub(super) fn poll_sockets(&self, timeout: Option<Duration>) -> bool {
        let group = self.connections.driven();
        let mut others: Vec<SocketEvent> = Vec::new();
        group.events(timeout, |ready| others.push(ready));
        for ready in &others {
            self.act(*ready);
        }
        group.pump(self) | !others.is_empty()
    }

    fn act(&self, ready: SocketEvent) {
        match ready.about {
            About::Wake => {}
            About::Lane(id) => {
                let mut core = self.core.lock();
                if core.transfers().polled().ready(id, ready.readable, ready.writable) {
                    core.wake_ups().want_driver();
                }
                self.after(core);
            }
            About::Session(endpoint) if ready.readable => {
                self.with_sessions(|sessions| sessions.control_readable(endpoint))
            }
            About::Session(_) => {}
            About::Links => self.with_sessions(|sessions| sessions.links_changed()),
        }
    }

    fn with_sessions(&self, report: impl FnOnce(&dyn SessionEvents)) {
        if let Some(sessions) = self.sessions.get().and_then(Weak::upgrade) {
            report(&*sessions);
        }
    }

    // ---- the end

    /// Begins the end: says goodbye to all peers. False if it has begun before.
    pub(crate) fn begin_close(&self) -> bool {
        if self.closing.swap(true, Ordering::SeqCst) {
            return false;
        }
        let mut core = self.core.lock();
        core.say_goodbye();
        self.after(core);
        self.step();
        true
    }

    /// Ends everything after a panic, a bug of the library: operations in flight fail, later ones are refused, waits
    /// end. [`Progress::failure`] has the text. The worker is still to be closed, which joins its threads.
    pub(crate) fn fail(&self, panic: &str) {
        if self.failure.set(panic.to_owned()).is_err() {
            return;
        }
        self.log.error(format_args!("the worker is closed after a bug in Crossrail; please report it: {panic}"));
        // What it ends may be what was half changed.
        let ended = catch_unwind(AssertUnwindSafe(|| {
            let mut core = self.core.lock();
            core.close();
            self.after(core);
        }));
        if ended.is_err() {
            self.log.error(format_args!("a second bug while the worker was closed"));
        }
        self.events.signal();
        self.done.notify_all();
        self.connections.driven().wake_always();
    }

    /// The text of the panic that ended the worker.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Waits for the threads: not for the calling one, and not for ever for callbacks.
    pub(crate) fn join_threads(&self, until: Instant) {
        for group in self.connections.groups() {
            group.wake_always();
        }
        self.hand_over();
        self.threads.join(self.log, until);
    }

    /// Ends all endpoints. The closed lanes whose peers may still be accessing memory.
    pub(crate) fn close_endpoints(&self) -> Lingering {
        let mut core = self.core.lock();
        core.close();
        self.after(core);
        self.connections.pump(self);
        self.core.lock().take_lingering()
    }

    /// Ends all operations, after [`Progress::close_endpoints`].
    ///
    /// # Errors
    /// `Timeout`: a peer may still be accessing memory, which is then never freed.
    pub(crate) fn finish_close(&self, lingering: Lingering) -> Result<()> {
        let ended = lingering.end(self.environment.settings().timeout.min(RETURN_MAX));
        let mut core = self.core.lock();
        // No lane is left.
        core.operations().settle_returns();
        core.abandon();
        let gpus = core.transfers().gpu().take_gpus();
        self.after(core);
        // Operations that these tasks start fail, which the tasks' callbacks report.
        self.tasks.close().into_iter().for_each(|task| task());
        let trace = self.core().take_trace();
        drop(gpus);
        self.page_rows.close();
        if let Some((folder, (trace, name))) = self.environment.settings().trace.as_deref().zip(trace)
            && let Err(error) = trace.write(folder, &name)
        {
            self.log.warn(format_args!("CROSSRAIL_TRACE: {}: {error}; the trace of {name} is lost", folder.display()));
        }
        self.done.notify_all();
        ended
    }
}
