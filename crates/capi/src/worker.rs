//! Workers: addresses, progress, events.

use std::ffi::{c_char, c_int, c_void};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossrail::ConnectOptions;
use crossrail_locks::Apart;
use crossrail_types::{Error, ErrorKind, Result};

use crate::abi::{self, ADMIT, NO_BACKGROUND, NO_UNIX, Notice, OK, PENDING, read};
use crate::context::Context;
use crate::endpoint::Endpoint;
use crate::failure::{Failure, Outcome, c_text, usage};
use crate::guard::{self, Object, handle, optional_text, place, slice, text, timeout};
use crate::output;
use crate::shared::{Pool, Shared};
use crate::waits::Waits;

/// A handle.
pub(crate) struct Worker(pub(crate) Arc<Shared>);

fn socket_address(listen: &str) -> Result<SocketAddr> {
    listen.parse().map_err(|_| {
        let detail = format!("{listen:?} is no address to listen at");
        Error::new(ErrorKind::Usage, "worker_create", detail).with_hint("as 10.0.0.1:0 or [::1]:4711")
    })
}

/// Listens.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_worker_create(
    context: *mut Context,
    options: *const abi::WorkerOptions,
    out: *mut *mut Worker,
) -> i32 {
    const OPERATION: &str = "worker_create";
    guard::call(OPERATION, None, || {
        // SAFETY: by the contract.
        let (context, out) = unsafe { (handle(OPERATION, context)?, place(OPERATION, out)?) };
        // SAFETY: by the contract.
        let options = unsafe { read(OPERATION, options, NO_UNIX | NO_BACKGROUND | ADMIT) }?;
        // SAFETY: by the contract.
        let name = unsafe { optional_text(OPERATION, options.name) }?.map(str::to_owned);
        // SAFETY: by the contract.
        let addresses = unsafe { slice(OPERATION, options.listen, options.listen_count) }?;
        // SAFETY: by the contract.
        let parse = |at: &*const c_char| Ok::<_, Box<Failure>>(socket_address(unsafe { text(OPERATION, *at) }?)?);
        let listen = addresses.iter().map(parse).collect::<std::result::Result<Vec<_>, _>>()?;
        let linger = u64::try_from(options.linger_us)
            .map_err(|_| usage(OPERATION, format!("a linger_us of {}", options.linger_us)))?;
        let background = options.flags & NO_BACKGROUND == 0;
        let native = crossrail::WorkerOptions {
            name,
            listen: (!listen.is_empty()).then_some(listen),
            unix: options.flags & NO_UNIX == 0,
            background,
            admit: options.flags & ADMIT != 0,
            linger: Duration::from_micros(linger),
            warns_of_ends: true,
        };
        let shared = Shared {
            native: crossrail::Worker::new(&context.0, native)?,
            context: context.0.clone(),
            has_background: background,
            waits: Waits::default(),
            seen: AtomicU64::new(0),
            finished: Arc::default(),
            pool: Pool::default(),
        };
        out.set(Box::into_raw(Box::new(Worker(Arc::new(shared)))));
        Ok(OK)
    })
}

/// Ends requests, connections and threads.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_worker_close(worker: *mut Worker) -> i32 {
    const OPERATION: &str = "worker_close";
    // SAFETY: by the contract.
    unsafe {
        with(OPERATION, worker, |worker| {
            worker.check_origin(OPERATION)?;
            worker.native.close()?;
            Ok(OK)
        })
    }
}

/// Closes, and gives the handle back.
///
/// # Safety
/// `worker` is null or a worker, which is not used after this.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_worker_free(worker: *mut Worker) {
    if worker.is_null() {
        return;
    }
    guard::quietly("worker_free", None, || {
        // SAFETY: from `into_raw`, once.
        let worker = unsafe { Box::from_raw(worker) };
        // The engine's log reports what it leaves in use.
        drop(worker.0.native.close());
        worker.0.finished.end();
        worker.0.pool.close();
    });
}

impl Object for Worker {
    type Owner = crossrail::Worker;

    #[inline(always)]
    fn owner(&self) -> &crossrail::Worker {
        &self.0.native
    }
}

/// [`guard::with`] for a worker's handle.
///
/// # Safety
/// As the header states for `worker`.
#[inline(always)]
unsafe fn with(operation: &'static str, worker: *mut Worker, body: impl FnOnce(&Shared) -> Outcome) -> i32 {
    // SAFETY: by the contract.
    unsafe { guard::with(operation, worker, |worker| body(&worker.0)) }
}

/// Bytes for peers to connect to.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_worker_address(
    worker: *mut Worker,
    bytes: *mut *mut c_void,
    size: *mut usize,
) -> i32 {
    const OPERATION: &str = "worker_address";
    // SAFETY: by the contract.
    unsafe {
        with(OPERATION, worker, |worker| {
            let (bytes, size) = (place(OPERATION, bytes)?, place(OPERATION, size)?);
            worker.native.check(OPERATION)?;
            let address = worker.native.address();
            bytes.set(output::bytes(OPERATION, &address)?);
            size.set(address.len());
            Ok(OK)
        })
    }
}

/// Where it listens.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_worker_listens(worker: *mut Worker, index: usize, text: *mut *mut c_char) -> i32 {
    const OPERATION: &str = "worker_listens";
    // SAFETY: by the contract.
    unsafe {
        with(OPERATION, worker, |worker| {
            let out = place(OPERATION, text)?;
            worker.native.check(OPERATION)?;
            let all = worker.native.control_addresses();
            let Some(address) = all.get(index) else { return Ok(PENDING) };
            out.set(output::text(OPERATION, &address.to_string())?);
            Ok(OK)
        })
    }
}

/// A connected endpoint whose caller may have been interrupted.
struct Unclaimed(Option<crossrail::Endpoint>);

impl Drop for Unclaimed {
    fn drop(&mut self) {
        if let Some(endpoint) = self.0.take() {
            // Nothing was sent over it.
            let _ = endpoint.close(Some(Duration::ZERO));
        }
    }
}

/// Connects.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_connect(
    worker: *mut Worker,
    to: *const c_void,
    size: usize,
    timeout_us: i64,
    options: *const abi::ConnectOptions,
    out: *mut *mut Endpoint,
) -> i32 {
    const OPERATION: &str = "connect";
    // SAFETY: by the contract.
    let Some(owner) = (unsafe { worker.as_ref() }) else {
        return guard::call(OPERATION, None, || Err(usage(OPERATION, "a handle is NULL")));
    };
    guard::call(OPERATION, Some(&owner.0.native), || {
        // SAFETY: by the contract.
        let (out, options) = unsafe { (place(OPERATION, out)?, read(OPERATION, options, 0)?) };
        // SAFETY: by the contract.
        let to = unsafe { slice::<u8>(OPERATION, to.cast(), size) }?;
        // SAFETY: by the contract.
        let require = unsafe { optional_text(OPERATION, options.require) }?.map(str::to_owned);
        let timeout = timeout(OPERATION, timeout_us)?;
        let options = ConnectOptions { require, timeout, ..ConnectOptions::default() };
        // No thread in a forked child: it could wait forever for a lock that the parent held.
        owner.0.native.check(OPERATION)?;
        let (to, native) = (to.to_vec(), owner.0.native.clone());
        let apart = Apart::start(OPERATION, move || native.connect(&to, &options).map(|made| Unclaimed(Some(made))))?;
        let made = owner.0.waits.wait(|| apart.wait(None))??.0.take();
        out.set(Endpoint::handle(made.expect("nothing else takes it"), &owner.0));
        Ok(OK)
    })
}

/// The next endpoint that a peer has made.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_accept(worker: *mut Worker, timeout_us: i64, out: *mut *mut Endpoint) -> i32 {
    const OPERATION: &str = "accept";
    // SAFETY: by the contract.
    let Some(owner) = (unsafe { worker.as_ref() }) else {
        return guard::call(OPERATION, None, || Err(usage(OPERATION, "a handle is NULL")));
    };
    guard::call(OPERATION, Some(&owner.0.native), || {
        // SAFETY: by the contract.
        let out = unsafe { place(OPERATION, out) }?;
        let timeout = timeout(OPERATION, timeout_us)?;
        owner.0.native.check(OPERATION)?;
        let native = owner.0.waits.wait(|| owner.0.native.accept(timeout))?;
        out.set(Endpoint::handle(native, &owner.0));
        Ok(OK)
    })
}

/// Makes progress once.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_worker_progress(worker: *mut Worker) -> i32 {
    const OPERATION: &str = "worker_progress";
    // SAFETY: by the contract.
    unsafe {
        with(OPERATION, worker, |worker| {
            if worker.native.progress() {
                return Ok(OK);
            }
            worker.native.check(OPERATION)?;
            Ok(PENDING)
        })
    }
}

/// Makes progress until something has happened.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_worker_wait(worker: *mut Worker, timeout_us: i64) -> i32 {
    const OPERATION: &str = "worker_wait";
    // SAFETY: by the contract.
    unsafe {
        with(OPERATION, worker, |worker| {
            let limit = timeout(OPERATION, timeout_us)?;
            let seen = worker.seen.load(Ordering::Acquire);
            let now = worker.waits.wait(|| worker.native.wait_event(seen, limit))?;
            worker.seen.fetch_max(now, Ordering::AcqRel);
            Ok(OK)
        })
    }
}

/// A descriptor for event loops.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_worker_event_fd(worker: *mut Worker, fd: *mut c_int) -> i32 {
    const OPERATION: &str = "worker_event_fd";
    // SAFETY: by the contract.
    unsafe {
        with(OPERATION, worker, |worker| {
            let out = place(OPERATION, fd)?;
            worker.native.check(OPERATION)?;
            if !worker.has_background {
                return Err(usage(OPERATION, "no thread would signal it: the worker has XRAIL_NO_BACKGROUND"));
            }
            out.set(worker.native.event_fd());
            Ok(OK)
        })
    }
}

/// Makes the descriptor unreadable.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_worker_drain(worker: *mut Worker) {
    // SAFETY: by the contract.
    if let Some(worker) = unsafe { worker.as_ref() } {
        guard::quietly("worker_drain", Some(&worker.0.native), || worker.0.native.drain_events());
    }
}

/// Ends the waits in progress.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_worker_interrupt(worker: *mut Worker) {
    // SAFETY: by the contract.
    if let Some(worker) = unsafe { worker.as_ref() } {
        guard::quietly("worker_interrupt", None, || worker.0.waits.interrupt());
    }
}

/// At most `max` notices, in one block.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_take_notices(
    worker: *mut Worker,
    max: usize,
    out: *mut *mut Notice,
    count: *mut usize,
) -> i32 {
    const OPERATION: &str = "take_notices";
    // SAFETY: by the contract.
    unsafe {
        with(OPERATION, worker, |worker| {
            let (out, count) = (place(OPERATION, out)?, place(OPERATION, count)?);
            worker.native.check(OPERATION)?;
            let notices = worker.native.notices(max);
            if notices.is_empty() {
                return Ok(PENDING);
            }
            count.set(notices.len());
            out.set(block_of(OPERATION, &notices)?);
            Ok(OK)
        })
    }
}

/// The notices as an array of C's.
fn block_of(operation: &str, notices: &[crossrail::Notice]) -> std::result::Result<*mut Notice, Box<Failure>> {
    let names: Vec<_> = notices.iter().map(|notice| c_text(&notice.peer)).collect();
    let parts: Vec<_> = notices.iter().zip(&names).map(|(one, name)| [name.as_bytes(), &*one.bytes]).collect();
    output::array(operation, &parts, |at, [peer, data]| Notice {
        peer: peer.cast(),
        data: data.cast(),
        size: notices[at].bytes.len(),
        endpoint: notices[at].endpoint.into(),
    })
}
