//! Messages, writes, reads and notices: each makes a request.

use std::ffi::c_void;

use crossrail::{Buffer, Place, Ready};

use crate::abi::{IMM, Key, ON_STREAM, OpOptions, QUEUE, read};
use crate::context::place_of;
use crate::endpoint::Endpoint;
use crate::failure::{Failure, Outcome, usage};
use crate::guard::{self, slice};
use crate::region::{buffer, key_from_c};
use crate::requests::{Given, start_plain};
use crate::shared::{Request, Shared};
use crate::worker::Worker;

/// The point in the caller's stream behind which memory of that device may be touched.
///
/// # Safety
/// `stream` is a live stream of that GPU, or null for the default one.
pub(crate) unsafe fn ready(
    operation: &str,
    worker: &Shared,
    place: Place,
    stream: *mut c_void,
) -> Result<Ready, Box<Failure>> {
    let Place::Gpu(ordinal) = place else {
        return Err(usage(operation, "XRAIL_ON_STREAM for memory of the host"));
    };
    // SAFETY: by the contract.
    Ok(unsafe { Ready::on_stream(&worker.context, ordinal, stream as u64) }?)
}

/// The local buffer of an operation.
///
/// # Safety
/// As the header says of operations.
#[inline]
unsafe fn local(
    operation: &str,
    worker: &Shared,
    (at, size): (*mut c_void, usize),
    options: &OpOptions,
) -> Result<Buffer, Box<Failure>> {
    // SAFETY: by the contract.
    let host = unsafe { buffer(operation, at, size) }?;
    if (options.device | (options.flags & ON_STREAM)) == 0 {
        return Ok(host);
    }
    let place = place_of(options.device);
    let on_stream = options.flags & ON_STREAM != 0;
    // SAFETY: by the contract.
    let after = on_stream.then(|| unsafe { ready(operation, worker, place, options.stream) }).transpose()?;
    match place {
        Place::Host => Ok(host),
        // SAFETY: by the contract.
        Place::Gpu(ordinal) => Ok(unsafe { Buffer::device(at as u64, size, ordinal, None, after) }),
    }
}

/// Options and the place of the request.
///
/// # Safety
/// As the header states.
#[inline]
unsafe fn given(
    operation: &str,
    options: *const OpOptions,
    flags: u32,
    out: *mut *mut Request,
) -> Result<(OpOptions, Given), Box<Failure>> {
    // SAFETY: by the contract.
    let options = unsafe { read(operation, options, flags | ON_STREAM | QUEUE) }?;
    if options.imm != 0 && options.flags & IMM == 0 {
        return Err(usage(operation, "an immediate without XRAIL_IMM"));
    }
    // SAFETY: by the contract.
    let given = unsafe { Given::new(operation, options.flags & QUEUE != 0, options.user, out) }?;
    Ok((options, given))
}

/// Whether buffer and place need no further look.
#[inline(always)]
fn is_plain(data: *const c_void, size: usize, out: *mut *mut Request) -> bool {
    !data.is_null() && !out.is_null() && size.cast_signed() >= 0
}

/// Sends a tagged message.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_send(
    endpoint: *mut Endpoint,
    data: *const c_void,
    size: usize,
    tag: u64,
    options: *const OpOptions,
    out: *mut *mut Request,
) -> i32 {
    const OPERATION: &str = "send";
    // SAFETY: by the contract.
    unsafe {
        guard::with(OPERATION, endpoint, move |endpoint| {
            if options.is_null() && is_plain(data, size, out) {
                return start_plain(&endpoint.worker, out, move |place| {
                    endpoint.native.send_in(place, Buffer::raw(data.cast_mut().cast(), size, None), tag)
                });
            }
            send_at_length(endpoint, (data.cast_mut(), size), tag, options, out)
        })
    }
}

/// Receives the next message that matches.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_recv(
    worker: *mut Worker,
    data: *mut c_void,
    size: usize,
    tag: u64,
    mask: u64,
    from: *mut Endpoint,
    options: *const OpOptions,
    out: *mut *mut Request,
) -> i32 {
    const OPERATION: &str = "recv";
    // SAFETY: by the contract.
    let Some(owner) = (unsafe { worker.as_ref() }) else {
        return guard::call(OPERATION, None, || Err(usage(OPERATION, "a handle is NULL")));
    };
    // SAFETY: by the contract.
    guard::call(OPERATION, Some(&owner.0.native), move || unsafe {
        let from = from.as_ref().map(|from| &from.native);
        if options.is_null() && is_plain(data, size, out) {
            return start_plain(&owner.0, out, move |place| {
                owner.0.native.recv_in(place, Buffer::raw(data.cast(), size, None), (tag, mask), from)
            });
        }
        recv_at_length(owner, (data, size), (tag, mask), from, options, out)
    })
}

/// [`xrail_send`] with options, or of no bytes.
///
/// # Safety
/// As there.
#[cold]
#[inline(never)]
unsafe fn send_at_length(
    endpoint: &Endpoint,
    data: (*mut c_void, usize),
    tag: u64,
    options: *const OpOptions,
    out: *mut *mut Request,
) -> Outcome {
    // SAFETY: by the contract.
    unsafe {
        let (options, given) = given("send", options, 0, out)?;
        let buffer = local("send", &endpoint.worker, data, &options)?;
        given.start(&endpoint.worker, endpoint.native.send(buffer, tag))
    }
}

/// [`xrail_recv`] with options, or of no bytes.
///
/// # Safety
/// As there.
#[cold]
#[inline(never)]
unsafe fn recv_at_length(
    owner: &Worker,
    data: (*mut c_void, usize),
    (tag, mask): (u64, u64),
    from: Option<&crossrail::Endpoint>,
    options: *const OpOptions,
    out: *mut *mut Request,
) -> Outcome {
    // SAFETY: by the contract.
    unsafe {
        let (options, given) = given("recv", options, 0, out)?;
        let buffer = local("recv", &owner.0, data, &options)?;
        given.start(&owner.0, owner.0.native.recv(buffer, tag, mask, from))
    }
}

/// Writes at an offset of a peer's region.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_write(
    endpoint: *mut Endpoint,
    data: *const c_void,
    size: usize,
    key: *const Key,
    offset: u64,
    options: *const OpOptions,
    out: *mut *mut Request,
) -> i32 {
    const OPERATION: &str = "write";
    // SAFETY: by the contract.
    unsafe {
        guard::with(OPERATION, endpoint, |endpoint| {
            let (options, given) = given(OPERATION, options, IMM, out)?;
            let key = key_from_c(OPERATION, key)?;
            let buffer = local(OPERATION, &endpoint.worker, (data.cast_mut(), size), &options)?;
            let imm = (options.flags & IMM != 0).then_some(options.imm);
            given.start(&endpoint.worker, endpoint.native.write(buffer, &key, offset, imm))
        })
    }
}

/// Reads from an offset of a peer's region.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_read(
    endpoint: *mut Endpoint,
    data: *mut c_void,
    size: usize,
    key: *const Key,
    offset: u64,
    options: *const OpOptions,
    out: *mut *mut Request,
) -> i32 {
    const OPERATION: &str = "read";
    // SAFETY: by the contract.
    unsafe {
        guard::with(OPERATION, endpoint, |endpoint| {
            let (options, given) = given(OPERATION, options, 0, out)?;
            let key = key_from_c(OPERATION, key)?;
            let buffer = local(OPERATION, &endpoint.worker, (data, size), &options)?;
            given.start(&endpoint.worker, endpoint.native.read(buffer, &key, offset))
        })
    }
}

/// Puts a notice into the peer's queue.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_notify(
    endpoint: *mut Endpoint,
    data: *const c_void,
    size: usize,
    out: *mut *mut Request,
) -> i32 {
    const OPERATION: &str = "notify";
    // SAFETY: by the contract.
    unsafe {
        guard::with(OPERATION, endpoint, |endpoint| -> Outcome {
            let given = Given::new(OPERATION, false, std::ptr::null_mut(), out)?;
            let bytes = slice::<u8>(OPERATION, data.cast(), size)?;
            given.start(&endpoint.worker, endpoint.native.notify(bytes))
        })
    }
}
