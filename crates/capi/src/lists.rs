//! Lists: layouts of rows, moves between them.

use std::ffi::c_char;
use std::sync::Arc;

use crossrail::{Addresses, MoveKind, Place};

use crate::abi::{self, IMM, NOTICE, OK, ON_STREAM, QUEUE, READ, Row, WRITE, read};
use crate::endpoint::Endpoint;
use crate::failure::{Failure, usage};
use crate::guard::{self, handle, place, slice};
use crate::operations::ready;
use crate::output;
use crate::region::{Region, Unpacked, regions};
use crate::requests::Given;
use crate::shared::Request;
use crate::shared::Shared;
use crate::texts::{formatted, move_json, move_text};
use crate::worker::Worker;

/// A handle.
pub(crate) struct Layout {
    native: crossrail::Layout,
    /// Whose memory the first region of it is, of an own layout.
    place: Place,
}

/// A handle.
pub(crate) struct Move {
    native: crossrail::Move,
    worker: Arc<Shared>,
    place: Place,
}

/// Rows as the engine reads them, where they are.
fn addresses(rows: &[Row]) -> Addresses<'_> {
    const { assert!(size_of::<Row>() == size_of::<[u64; 4]>() && align_of::<Row>() == align_of::<[u64; 4]>()) };
    // SAFETY: a row is its four words, without padding.
    Addresses::of_c(unsafe { std::slice::from_raw_parts(rows.as_ptr().cast(), rows.len()) })
}

/// Rows of own regions.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_layout_own(
    worker: *mut Worker,
    rows: *const Row,
    count: usize,
    regions: *const *mut Region,
    region_count: usize,
    out: *mut *mut Layout,
) -> i32 {
    const OPERATION: &str = "layout_own";
    // SAFETY: by the contract.
    let Some(owner) = (unsafe { worker.as_ref() }) else {
        return guard::call(OPERATION, None, || Err(usage(OPERATION, "a handle is NULL")));
    };
    guard::call(OPERATION, Some(&owner.0.native), || {
        // SAFETY: by the contract.
        let (rows, out) = unsafe { (slice(OPERATION, rows, count)?, place(OPERATION, out)?) };
        // SAFETY: by the contract.
        let regions = unsafe { self::regions(OPERATION, regions, region_count) }?;
        owner.0.native.check(OPERATION)?;
        let place = regions.first().map_or(Place::Host, crossrail::Region::place);
        let native = owner.0.native.layout_at(&regions, addresses(rows))?;
        out.set(Box::into_raw(Box::new(Layout { native, place })));
        Ok(OK)
    })
}

/// Rows of the peer's regions.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_layout_peer(
    endpoint: *mut Endpoint,
    rows: *const Row,
    count: usize,
    description: *const Unpacked,
    out: *mut *mut Layout,
) -> i32 {
    const OPERATION: &str = "layout_peer";
    // SAFETY: by the contract.
    unsafe {
        guard::with(OPERATION, endpoint, |endpoint| {
            let (rows, out) = (slice(OPERATION, rows, count)?, place(OPERATION, out)?);
            let description = handle(OPERATION, description)?;
            endpoint.worker.native.check(OPERATION)?;
            let native = endpoint.native.layout_at(&description.0, addresses(rows))?;
            out.set(Box::into_raw(Box::new(Layout { native, place: Place::Host })));
            Ok(OK)
        })
    }
}

/// Gives the handle back.
///
/// # Safety
/// `layout` is null or a layout, which is not used after this.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_layout_free(layout: *mut Layout) {
    if !layout.is_null() {
        // SAFETY: from `into_raw`, once.
        guard::quietly("layout_free", None, || drop(unsafe { Box::from_raw(layout) }));
    }
}

/// An index, `None` for all rows.
///
/// # Safety
/// As [`slice`].
unsafe fn index<'a>(at: *const u32, count: usize) -> Result<Option<&'a [u32]>, Box<Failure>> {
    if at.is_null() && count == 0 {
        return Ok(None);
    }
    // SAFETY: by the contract.
    unsafe { slice("prepare", at, count) }.map(Some)
}

/// Pairs rows.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_prepare(
    endpoint: *mut Endpoint,
    kind: i32,
    local: *mut Layout,
    remote: *mut Layout,
    options: *const abi::MoveOptions,
    out: *mut *mut Move,
) -> i32 {
    const OPERATION: &str = "prepare";
    // SAFETY: by the contract.
    unsafe {
        guard::with(OPERATION, endpoint, |endpoint| {
            let out = place(OPERATION, out)?;
            let (local, remote) = (handle(OPERATION, local)?, handle(OPERATION, remote)?);
            let options = read(OPERATION, options, IMM)?;
            let kind = match kind {
                READ => MoveKind::Read,
                WRITE => MoveKind::Write,
                _ => return Err(usage(OPERATION, format!("kind {kind}: XRAIL_READ or XRAIL_WRITE"))),
            };
            if options.imm != 0 && options.flags & IMM == 0 {
                return Err(usage(OPERATION, "an immediate without XRAIL_IMM"));
            }
            let native = crossrail::MoveOptions {
                local_index: index(options.local_index, options.local_count)?,
                remote_index: index(options.remote_index, options.remote_count)?,
                notice: slice(OPERATION, options.notice.cast(), options.notice_size)?,
                imm: (options.flags & IMM != 0).then_some(options.imm),
            };
            let native = endpoint.native.prepare(kind, &local.native, &remote.native, native)?;
            out.set(Box::into_raw(Box::new(Move { native, worker: Arc::clone(&endpoint.worker), place: local.place })));
            Ok(OK)
        })
    }
}

/// Starts it.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_start(
    handle: *mut Move,
    options: *const abi::StartOptions,
    out: *mut *mut Request,
) -> i32 {
    const OPERATION: &str = "start";
    // SAFETY: by the contract.
    let Some(one) = (unsafe { handle.as_ref() }) else {
        return guard::call(OPERATION, None, || Err(usage(OPERATION, "a handle is NULL")));
    };
    // SAFETY: by the contract.
    guard::call(OPERATION, Some(&one.worker.native), || unsafe {
        let options = read(OPERATION, options, ON_STREAM | QUEUE | NOTICE)?;
        let given = Given::new(OPERATION, options.flags & QUEUE != 0, options.user, out)?;
        let notice = slice(OPERATION, options.notice.cast(), options.notice_size)?;
        if options.flags & NOTICE == 0 && !notice.is_empty() {
            return Err(usage(OPERATION, "a notice without XRAIL_NOTICE"));
        }
        let on_stream = options.flags & ON_STREAM != 0;
        let after = on_stream.then(|| ready(OPERATION, &one.worker, one.place, options.stream)).transpose()?;
        let native = crossrail::StartOptions {
            notice: (options.flags & NOTICE != 0).then_some(notice),
            rows: ((options.first, options.last) != (0, 0)).then_some(options.first..options.last),
            after,
        };
        given.start(&one.worker, one.native.start(native))
    })
}

/// How it goes, and why.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_move_explain(handle: *mut Move, format: i32, text: *mut *mut c_char) -> i32 {
    const OPERATION: &str = "move_explain";
    // SAFETY: by the contract.
    let Some(one) = (unsafe { handle.as_ref() }) else {
        return guard::call(OPERATION, None, || Err(usage(OPERATION, "a handle is NULL")));
    };
    guard::call(OPERATION, Some(&one.worker.native), || {
        // SAFETY: by the contract.
        let out = unsafe { place(OPERATION, text) }?;
        one.worker.native.check(OPERATION)?;
        let explain = one.native.explain();
        let explained = formatted(OPERATION, format, || move_text(&explain), || move_json(&explain))?;
        out.set(output::text(OPERATION, &explained)?);
        Ok(OK)
    })
}

/// Gives the handle back; what was started goes on.
///
/// # Safety
/// `handle` is null or a move, which is not used after this.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_move_free(handle: *mut Move) {
    if !handle.is_null() {
        // SAFETY: from `into_raw`, once.
        guard::quietly("move_free", None, || drop(unsafe { Box::from_raw(handle) }));
    }
}
