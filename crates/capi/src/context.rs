//! The library, contexts and their memory.

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};

use crossrail::{Memory, Place, Settings};
use crossrail_locks::{Mutex, PerProcess};
use crossrail_types::Origin;

use crate::abi::{ContextOptions, NO_ENVIRONMENT, OK, XrailSetting, read};
use crate::failure::{Failure, name_of, usage};
use crate::guard::{self, handle, place, slice, text};
use crate::log;

/// A handle, and the process that has made it.
pub(crate) struct Context(pub(crate) crossrail::Context, pub(crate) Origin);

/// What `xrail_alloc` has handed out, by its address.
static BLOCKS: PerProcess<Mutex<HashMap<usize, Memory>>> = PerProcess::new();

/// Features beyond those of the first version, and those that a build may lack.
const FEATURES: [&str; 5] = ["lists", "cuda", "ucx", "groups", "experts"];

/// The version of the library: major << 16 | minor.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn xrail_version() -> u32 {
    let number = |text: &str| text.bytes().fold(0, |sum, digit| sum * 10 + u32::from(digit - b'0'));
    number(env!("CARGO_PKG_VERSION_MAJOR")) << 16 | number(env!("CARGO_PKG_VERSION_MINOR"))
}

/// Whether the library has a feature, or a setting of that name.
///
/// # Safety
/// `feature` is null or a text.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_has(feature: *const c_char) -> c_int {
    // SAFETY: by the contract.
    let Ok(feature) = (unsafe { text("has", feature) }) else { return 0 };
    c_int::from(
        FEATURES.contains(&feature) || Settings::NAMES.contains(&feature) || Settings::FIELDS.contains(&feature),
    )
}

/// A result's name; static.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn xrail_result_name(result: i32) -> *const c_char {
    // Each as a constant of C's, because a Rust text has no zero byte at its end.
    macro_rules! names {
        ($($name:literal)+) => {
            match name_of(result) {
                $($name => concat!($name, "\0").as_ptr().cast(),)+
                _ => c"unknown".as_ptr(),
            }
        };
    }
    names!(
        "ok" "pending" "usage" "config" "unreachable" "refused" "mismatch" "timeout" "peer_dead" "truncated"
        "cancelled" "region" "exhausted" "unsupported" "io" "protocol" "closed" "internal" "busy" "interrupted"
    )
}

/// `XRAIL_CPU`, or `XRAIL_GPU(n)`.
#[inline]
pub(crate) fn place_of(device: u32) -> Place {
    device.checked_sub(1).map_or(Place::Host, Place::Gpu)
}

/// Reads settings and devices.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_context_create(options: *const ContextOptions, out: *mut *mut Context) -> i32 {
    const OPERATION: &str = "context_create";
    guard::call(OPERATION, None, || {
        // SAFETY: by the contract.
        let (out, options) = unsafe { (place(OPERATION, out)?, read(OPERATION, options, NO_ENVIRONMENT)?) };
        log::install();
        let from_environment = options.flags & NO_ENVIRONMENT == 0;
        let mut settings = if from_environment { Settings::from_env()? } else { Settings::default() };
        // SAFETY: by the contract.
        for XrailSetting { name, value } in unsafe { slice(OPERATION, options.settings, options.setting_count)? } {
            // SAFETY: by the contract.
            let (name, value) = unsafe { (text(OPERATION, *name)?, text(OPERATION, *value)?) };
            settings.set(name, value)?;
        }
        settings.check()?;
        out.set(Box::into_raw(Box::new(Context(crossrail::Context::new(settings)?, Origin::here()))));
        Ok(OK)
    })
}

/// Gives the handle back.
///
/// # Safety
/// `context` is null or a context, which is not used after this.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_context_free(context: *mut Context) {
    if !context.is_null() {
        // SAFETY: from `into_raw`, once.
        guard::quietly("context_free", None, || drop(unsafe { Box::from_raw(context) }));
    }
}

/// Zeroed memory that peers on this machine can map.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_alloc(
    context: *mut Context,
    size: usize,
    device: u32,
    out: *mut *mut c_void,
) -> i32 {
    const OPERATION: &str = "alloc";
    guard::call(OPERATION, None, || {
        // SAFETY: by the contract.
        let (context, out) = unsafe { (handle(OPERATION, context)?, place(OPERATION, out)?) };
        if size == 0 || isize::try_from(size).is_err() {
            return Err(usage(OPERATION, format!("memory of {size} bytes")));
        }
        let memory = context.0.alloc_on(size, place_of(device))?;
        let at = memory.ptr();
        BLOCKS.lock().insert(at as usize, memory);
        out.set(at.cast());
        Ok(OK)
    })
}

/// Gives memory of [`xrail_alloc`] back.
///
/// # Safety
/// Nothing uses it any more.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_dealloc(memory: *mut c_void) -> i32 {
    const OPERATION: &str = "dealloc";
    guard::call(OPERATION, None, || {
        if memory.is_null() {
            return Ok(OK);
        }
        let block = BLOCKS.lock().remove(&(memory as usize));
        let unknown = || -> Box<Failure> { usage(OPERATION, format!("{memory:?} is not memory of xrail_alloc")) };
        drop(block.ok_or_else(unknown)?);
        Ok(OK)
    })
}

/// Whose memory an address is.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_device_of(
    context: *mut Context,
    address: *const c_void,
    device: *mut u32,
) -> i32 {
    const OPERATION: &str = "device_of";
    guard::call(OPERATION, None, || {
        // SAFETY: by the contract.
        let (context, out) = unsafe { (handle(OPERATION, context)?, place(OPERATION, device)?) };
        out.set(context.0.gpu_of(address as u64)? + 1);
        Ok(OK)
    })
}
