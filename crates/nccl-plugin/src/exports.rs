//! The exported tables. Every function converts C arguments, catches panics, and logs an error before it returns one.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::{Arc, OnceLock};

use crossrail_locks::PerProcess;
use crossrail_nccl_abi::{
    Config, DEVICE_HOST, DeviceHandle, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, Logger, MAX_SIZE, NetV8, NetV9,
    NetV10, NetV11, NetV12, PTR_HOST, Profiler, PropertiesV8, PropertiesV9, PropertiesV11, PropertiesV12, Ptr,
    REMOTE_ERROR, SUCCESS, SYSTEM_ERROR, Status, VirtualDevice,
};
use crossrail_types::{Error, ErrorKind, Result};

use crate::comm::{self, Comm, Flight, MAX_RECVS, Receive};
use crate::connecting::{self, Listener};
use crate::handle::Bytes;
use crate::log;
use crate::net::{Net, Process};

/// NCCL's name of the network, which `NCCL_NET` must equal.
const NAME: *const c_char = c"Crossrail".as_ptr();
/// As many communicators as listeners can be told apart.
const MAX_COMMS: c_int = 1 << comm::LISTENER_BITS;

/// Tables whose `init` has no context share one network.
static SHARED: PerProcess<OnceLock<Arc<Net>>> = PerProcess::new();

pub(crate) fn guard(what: &str, body: impl FnOnce() -> Result<()>) -> Status {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => SUCCESS,
        Ok(Err(error)) => {
            log::warn(format_args!("{what} failed: {error}"));
            status_of(error.kind)
        }
        Err(_) => {
            log::warn(format_args!("{what} failed: a bug in Crossrail; please report it"));
            INTERNAL_ERROR
        }
    }
}

fn status_of(kind: ErrorKind) -> Status {
    match kind {
        ErrorKind::PeerDead | ErrorKind::Closed | ErrorKind::Unreachable | ErrorKind::Refused | ErrorKind::Timeout => {
            REMOTE_ERROR
        }
        ErrorKind::Usage => INVALID_ARGUMENT,
        ErrorKind::Config | ErrorKind::Mismatch | ErrorKind::Unsupported | ErrorKind::Truncated => INVALID_USAGE,
        ErrorKind::Io | ErrorKind::Exhausted => SYSTEM_ERROR,
        _ => INTERNAL_ERROR,
    }
}

pub(crate) fn usage(operation: &str, detail: impl Into<String>) -> Error {
    Error::new(ErrorKind::Usage, operation, detail)
}

/// What NCCL's pointer refers to.
///
/// # Safety
/// `pointer` is null, or was returned by this plugin as a `T` that has not been closed.
unsafe fn object<'a, T>(operation: &str, pointer: Ptr) -> Result<&'a T> {
    // SAFETY: as promised by the caller.
    unsafe { pointer.cast_const().cast::<T>().as_ref() }.ok_or_else(|| usage(operation, "a null pointer"))
}

/// Stores a result where NCCL wants it.
///
/// # Safety
/// `out` is null or valid for a write.
pub(crate) unsafe fn put<T>(operation: &str, out: *mut T, value: T) -> Result<()> {
    if out.is_null() {
        return Err(usage(operation, "a null pointer for the result"));
    }
    // SAFETY: not null, so valid for a write.
    unsafe { out.write(value) };
    Ok(())
}

pub(crate) fn check_device(operation: &str, device: c_int) -> Result<()> {
    if device == 0 { Ok(()) } else { Err(usage(operation, format!("device {device}; there is only device 0"))) }
}

// ---- init, devices, finalize

unsafe extern "C" fn init_v8(logger: Option<Logger>) -> Status {
    log::install(logger);
    guard("init", || {
        if SHARED.get().is_none() {
            let _ = SHARED.set(Net::new()?);
        }
        Ok(())
    })
}

unsafe extern "C" fn init_v10(logger: Option<Logger>, _profiler: Option<Profiler>) -> Status {
    // SAFETY: no requirements.
    unsafe { init_v8(logger) }
}

unsafe extern "C" fn init_v11(
    context: *mut Ptr,
    _comm_id: u64,
    _config: *mut Config,
    logger: Option<Logger>,
    _profiler: Option<Profiler>,
) -> Status {
    log::install(logger);
    guard("init", || {
        let net = Net::new()?;
        // SAFETY: NCCL passes a place for the context.
        unsafe { put("init", context, Arc::into_raw(net).cast_mut().cast()) }
    })
}

/// Also called with a null context, after a failed `init`.
unsafe extern "C" fn finalize(context: Ptr) -> Status {
    guard("finalize", || {
        if context.is_null() {
            return Ok(());
        }
        // SAFETY: made by `init_v11`, and finalized once.
        unsafe { Arc::from_raw(context.cast_const().cast::<Net>()) }.close()
    })
}

unsafe extern "C" fn devices(count: *mut c_int) -> Status {
    guard("devices", || {
        Process::get()?;
        // SAFETY: NCCL passes a place for the number.
        unsafe { put("devices", count, 1) }
    })
}

macro_rules! get_properties {
    ($name:ident, $properties:ident { $($extra:tt)* }) => {
        unsafe extern "C" fn $name(device: c_int, properties: *mut $properties) -> Status {
            guard("getProperties", || {
                check_device("getProperties", device)?;
                let known = &Process::get()?.device;
                let pci_path = known.pci_path.as_ref().map_or(ptr::null_mut(), |path| path.as_ptr().cast_mut());
                let values = $properties {
                    name: known.name.as_ptr().cast_mut(),
                    pci_path,
                    guid: known.guid,
                    ptr_support: PTR_HOST,
                    reg_is_global: 0,
                    speed: c_int::try_from(known.speed_mbps).unwrap_or(c_int::MAX),
                    port: 0,
                    latency: known.latency_us,
                    max_comms: MAX_COMMS,
                    max_recvs: MAX_RECVS as c_int,
                    device_kind: DEVICE_HOST,
                    device_version: 0,
                    $($extra)*
                };
                // SAFETY: NCCL passes a place for the properties of this version.
                unsafe { put("getProperties", properties, values) }
            })
        }
    };
}

pub(crate) const fn alone<const MAX: usize>() -> VirtualDevice<MAX> {
    VirtualDevice { count: 1, devices: [0; MAX] }
}

get_properties!(properties_v8, PropertiesV8 {});
get_properties!(
    properties_v9,
    PropertiesV9 { force_flush: 0, virtual_device: alone(), max_p2p_bytes: MAX_SIZE, max_coll_bytes: MAX_SIZE }
);
get_properties!(
    properties_v11,
    PropertiesV11 {
        force_flush: 0,
        virtual_device: alone(),
        max_p2p_bytes: MAX_SIZE,
        max_coll_bytes: MAX_SIZE,
        max_multi_request: 1,
    }
);
get_properties!(
    properties_v12,
    PropertiesV12 {
        force_flush: 0,
        virtual_device: alone(),
        max_p2p_bytes: MAX_SIZE,
        max_coll_bytes: MAX_SIZE,
        max_multi_request: 1,
        rail_id: -1,
        plane_id: -1,
    }
);

// ---- connections

fn listen_on(net: &Arc<Net>, device: c_int, handle: Ptr, listener: *mut Ptr) -> Result<()> {
    check_device("listen", device)?;
    if handle.is_null() {
        return Err(usage("listen", "a null pointer for the handle"));
    }
    let (made, bytes) = connecting::listen(net)?;
    // SAFETY: NCCL passes 128 bytes for the handle, and a place for the listener.
    unsafe {
        handle.cast::<Bytes>().write(bytes);
        put("listen", listener, Box::into_raw(Box::new(made)).cast())
    }
}

fn connect_to(net: &Arc<Net>, device: c_int, handle: Ptr, comm: *mut Ptr) -> Result<()> {
    check_device("connect", device)?;
    // SAFETY: NCCL passes the 128 bytes of a handle, the same in every call for a connection.
    let bytes = unsafe { handle.cast::<Bytes>().as_mut() }.ok_or_else(|| usage("connect", "a null handle"))?;
    let made = connecting::connect(net, bytes)?;
    // SAFETY: NCCL passes a place for the communicator.
    unsafe { put("connect", comm, into_raw(made)) }
}

fn into_raw(comm: Option<Arc<Comm>>) -> Ptr {
    comm.map_or(ptr::null_mut(), |comm| Arc::into_raw(comm).cast_mut().cast())
}

fn shared(operation: &str) -> Result<&'static Arc<Net>> {
    SHARED.get().ok_or_else(|| usage(operation, "init was not called"))
}

unsafe extern "C" fn listen_v8(device: c_int, handle: Ptr, listener: *mut Ptr) -> Status {
    guard("listen", || listen_on(shared("listen")?, device, handle, listener))
}

unsafe extern "C" fn listen_v11(context: Ptr, device: c_int, handle: Ptr, listener: *mut Ptr) -> Status {
    // SAFETY: `context` is what `init_v11` returned.
    guard("listen", || listen_on(&unsafe { network("listen", context) }?, device, handle, listener))
}

/// The network of a context, which keeps its own reference.
///
/// # Safety
/// `context` is null, or was returned by [`init_v11`] and not yet finalized.
unsafe fn network(operation: &str, context: Ptr) -> Result<Arc<Net>> {
    let net = context.cast_const().cast::<Net>();
    if net.is_null() {
        return Err(usage(operation, "a null context"));
    }
    // SAFETY: a live reference from `Arc::into_raw`, counted once more.
    unsafe {
        Arc::increment_strong_count(net);
        Ok(Arc::from_raw(net))
    }
}

unsafe extern "C" fn connect_v8(
    device: c_int,
    handle: Ptr,
    comm: *mut Ptr,
    _offload: *mut *mut DeviceHandle,
) -> Status {
    guard("connect", || connect_to(shared("connect")?, device, handle, comm))
}

unsafe extern "C" fn connect_v10(
    device: c_int,
    _config: *mut Config,
    handle: Ptr,
    comm: *mut Ptr,
    _offload: *mut *mut DeviceHandle,
) -> Status {
    guard("connect", || connect_to(shared("connect")?, device, handle, comm))
}

unsafe extern "C" fn connect_v11(
    context: Ptr,
    device: c_int,
    handle: Ptr,
    comm: *mut Ptr,
    _offload: *mut *mut DeviceHandle,
) -> Status {
    // SAFETY: `context` is what `init_v11` returned.
    guard("connect", || connect_to(&unsafe { network("connect", context) }?, device, handle, comm))
}

unsafe extern "C" fn accept(listener: Ptr, comm: *mut Ptr, _offload: *mut *mut DeviceHandle) -> Status {
    guard("accept", || {
        // SAFETY: NCCL passes what `listen` returned.
        let listener: &Listener = unsafe { object("accept", listener) }?;
        let made = listener.accept()?;
        // SAFETY: NCCL passes a place for the communicator.
        unsafe { put("accept", comm, into_raw(made)) }
    })
}

unsafe extern "C" fn close_comm(comm: Ptr) -> Status {
    guard("close", || {
        if comm.is_null() {
            return Ok(());
        }
        // SAFETY: made by `into_raw`, and closed once.
        unsafe { Arc::from_raw(comm.cast_const().cast::<Comm>()) }.close()
    })
}

unsafe extern "C" fn close_listen(listener: Ptr) -> Status {
    guard("closeListen", || {
        if !listener.is_null() {
            // SAFETY: made by `listen_on`, and closed once.
            drop(unsafe { Box::from_raw(listener.cast::<Listener>()) });
        }
        Ok(())
    })
}

// ---- memory

/// Host memory needs no registration; the handle is only not null.
unsafe extern "C" fn reg_mr(_comm: Ptr, data: Ptr, _len: usize, kind: c_int, handle: *mut Ptr) -> Status {
    guard("regMr", || {
        if kind != PTR_HOST {
            return Err(usage("regMr", format!("memory of kind {kind}; this plugin supports host memory only")));
        }
        // SAFETY: NCCL passes a place for the handle.
        unsafe { put("regMr", handle, if data.is_null() { ptr::dangling_mut() } else { data }) }
    })
}

unsafe extern "C" fn dereg_mr(_comm: Ptr, _mr: Ptr) -> Status {
    SUCCESS
}

// ---- transfers

/// Memory of no bytes may be anywhere.
fn check_data(operation: &str, data: Ptr, len: usize) -> Result<()> {
    if data.is_null() && len > 0 {
        return Err(usage(operation, format!("a null pointer for {len} bytes")));
    }
    Ok(())
}

fn send(comm: Ptr, data: Ptr, len: usize, tag: c_int, request: *mut Ptr) -> Result<()> {
    // SAFETY: NCCL passes what `connect` returned.
    let comm: &Comm = unsafe { object("isend", comm) }?;
    check_data("isend", data, len)?;
    // SAFETY: NCCL keeps the buffer until the request has completed or the communicator is closed.
    let flight = unsafe { comm.send(data, len, tag) }.map_err(|error| named(error, comm))?;
    // SAFETY: NCCL passes a place for the request.
    unsafe { put("isend", request, flight.cast()) }
}

/// Receives into `count` buffers.
///
/// # Safety
/// The arrays have `count` elements each.
unsafe fn receive<T: Copy + TryInto<usize>>(
    comm: Ptr,
    count: c_int,
    (data, sizes, tags): (*mut Ptr, *mut T, *mut c_int),
    request: *mut Ptr,
) -> Result<()> {
    // SAFETY: NCCL passes what `accept` returned.
    let comm: &Comm = unsafe { object("irecv", comm) }?;
    let count = usize::try_from(count).ok().filter(|count| (1..=MAX_RECVS).contains(count));
    let count = count.ok_or_else(|| usage("irecv", format!("not 1 to {MAX_RECVS} receives in one request")))?;
    if data.is_null() || sizes.is_null() || tags.is_null() {
        return Err(usage("irecv", "a null pointer"));
    }
    let mut receives = [Receive { data: ptr::null_mut(), len: 0, tag: 0 }; MAX_RECVS];
    for (index, receive) in receives.iter_mut().take(count).enumerate() {
        // SAFETY: within the arrays, as promised by the caller.
        let (data, len, tag) = unsafe { (*data.add(index), *sizes.add(index), *tags.add(index)) };
        let len = len.try_into().map_err(|_| usage("irecv", "a negative size"))?;
        check_data("irecv", data, len)?;
        *receive = Receive { data, len, tag };
    }
    // SAFETY: NCCL keeps the buffers until the request has completed or the communicator is closed.
    let flight = unsafe { comm.receive(&receives[..count]) }.map_err(|error| named(error, comm))?;
    // SAFETY: NCCL passes a place for the request.
    unsafe { put("irecv", request, flight.cast()) }
}

fn named(error: Error, comm: &Comm) -> Error {
    if error.peer.is_some() { error } else { error.with_peer(comm.peer()) }
}

unsafe extern "C" fn isend_v8(comm: Ptr, data: Ptr, len: c_int, tag: c_int, _mr: Ptr, request: *mut Ptr) -> Status {
    guard("isend", || {
        let len = usize::try_from(len).map_err(|_| usage("isend", "a negative size"))?;
        send(comm, data, len, tag, request)
    })
}

unsafe extern "C" fn isend_v9(comm: Ptr, data: Ptr, len: usize, tag: c_int, _mr: Ptr, request: *mut Ptr) -> Status {
    guard("isend", || send(comm, data, len, tag, request))
}

unsafe extern "C" fn isend_v10(
    comm: Ptr,
    data: Ptr,
    len: usize,
    tag: c_int,
    _mr: Ptr,
    _profile: Ptr,
    request: *mut Ptr,
) -> Status {
    guard("isend", || send(comm, data, len, tag, request))
}

unsafe extern "C" fn irecv_v8(
    comm: Ptr,
    count: c_int,
    data: *mut Ptr,
    sizes: *mut c_int,
    tags: *mut c_int,
    _mrs: *mut Ptr,
    request: *mut Ptr,
) -> Status {
    // SAFETY: NCCL passes arrays of `count` elements.
    guard("irecv", || unsafe { receive(comm, count, (data, sizes, tags), request) })
}

unsafe extern "C" fn irecv_v9(
    comm: Ptr,
    count: c_int,
    data: *mut Ptr,
    sizes: *mut usize,
    tags: *mut c_int,
    _mrs: *mut Ptr,
    request: *mut Ptr,
) -> Status {
    // SAFETY: NCCL passes arrays of `count` elements.
    guard("irecv", || unsafe { receive(comm, count, (data, sizes, tags), request) })
}

unsafe extern "C" fn irecv_v10(
    comm: Ptr,
    count: c_int,
    data: *mut Ptr,
    sizes: *mut usize,
    tags: *mut c_int,
    _mrs: *mut Ptr,
    _profiles: *mut Ptr,
    request: *mut Ptr,
) -> Status {
    // SAFETY: NCCL passes arrays of `count` elements.
    guard("irecv", || unsafe { receive(comm, count, (data, sizes, tags), request) })
}

/// Host memory needs no flush: there is no request to wait for.
unsafe extern "C" fn iflush(
    _comm: Ptr,
    _count: c_int,
    _data: *mut Ptr,
    _sizes: *mut c_int,
    _mrs: *mut Ptr,
    request: *mut Ptr,
) -> Status {
    // SAFETY: NCCL passes a place for the request.
    guard("iflush", || unsafe { put("iflush", request, ptr::null_mut()) })
}

unsafe extern "C" fn test(request: Ptr, done: *mut c_int, sizes: *mut c_int) -> Status {
    guard("test", || {
        let flight = request.cast::<Flight>();
        if flight.is_null() {
            return Err(usage("test", "a null request"));
        }
        let report = |index: usize, bytes: u64| {
            if !sizes.is_null() {
                // SAFETY: NCCL passes room for as many sizes as the request has transfers.
                unsafe { sizes.add(index).write(c_int::try_from(bytes).unwrap_or(c_int::MAX)) };
            }
        };
        // SAFETY: NCCL passes a request of an open communicator, and none again that has completed.
        let finished = unsafe { comm::test(flight, report) }?;
        // SAFETY: NCCL passes a place for the answer.
        unsafe { put("test", done, c_int::from(finished)) }
    })
}

// ---- tables

macro_rules! table {
    ($(#[$doc:meta])* $name:ident $symbol:literal $table:ident { $($field:ident: $value:expr,)* }) => {
        $(#[$doc])*
        #[unsafe(export_name = $symbol)]
        pub static $name: Exported<$table> = Exported($table {
            name: NAME,
            devices: Some(devices),
            accept: Some(accept),
            reg_mr: Some(reg_mr),
            reg_mr_dma_buf: None,
            dereg_mr: Some(dereg_mr),
            iflush: Some(iflush),
            test: Some(test),
            close_send: Some(close_comm),
            close_recv: Some(close_comm),
            close_listen: Some(close_listen),
            get_device_mr: None,
            irecv_consumed: None,
            $($field: $value,)*
        });
    };
}

/// A table as NCCL finds it: constant, though it contains pointers.
#[repr(transparent)]
#[derive(Debug)]
pub struct Exported<T>(pub T);

// SAFETY: the tables' pointers are to functions and to a constant name.
unsafe impl<T> Sync for Exported<T> {}

table! {
    /// Version 8.
    TABLE_V8 "ncclNetPlugin_v8" NetV8 {
        init: Some(init_v8),
        get_properties: Some(properties_v8),
        listen: Some(listen_v8),
        connect: Some(connect_v8),
        isend: Some(isend_v8),
        irecv: Some(irecv_v8),
    }
}

table! {
    /// Version 9.
    TABLE_V9 "ncclNetPlugin_v9" NetV9 {
        init: Some(init_v8),
        get_properties: Some(properties_v9),
        listen: Some(listen_v8),
        connect: Some(connect_v8),
        isend: Some(isend_v9),
        irecv: Some(irecv_v9),
        make_v_device: None,
    }
}

table! {
    /// Version 10.
    TABLE_V10 "ncclNetPlugin_v10" NetV10 {
        init: Some(init_v10),
        get_properties: Some(properties_v9),
        listen: Some(listen_v8),
        connect: Some(connect_v10),
        isend: Some(isend_v10),
        irecv: Some(irecv_v10),
        make_v_device: None,
    }
}

table! {
    /// Version 11.
    TABLE_V11 "ncclNetPlugin_v11" NetV11 {
        init: Some(init_v11),
        get_properties: Some(properties_v11),
        listen: Some(listen_v11),
        connect: Some(connect_v11),
        isend: Some(isend_v10),
        irecv: Some(irecv_v10),
        make_v_device: None,
        finalize: Some(finalize),
        set_net_attr: None,
    }
}

table! {
    /// Version 12.
    TABLE_V12 "ncclNetPlugin_v12" NetV12 {
        init: Some(init_v11),
        get_properties: Some(properties_v12),
        listen: Some(listen_v11),
        connect: Some(connect_v11),
        isend: Some(isend_v10),
        irecv: Some(irecv_v10),
        make_v_device: None,
        finalize: Some(finalize),
        set_net_attr: None,
    }
}
