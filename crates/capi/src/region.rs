//! Memory that peers reach, and what they need to reach it.

use std::ffi::c_void;
use std::sync::Arc;

use crossrail::{Buffer, Description, Place, RegionKey};

use crate::abi::{KEY_LEN, Key, OK, PENDING};
use crate::context::place_of;
use crate::failure::{Failure, usage};
use crate::guard::{self, Object, handle, place, slice, timeout};
use crate::output;
use crate::shared::Shared;
use crate::worker::Worker;

/// A handle.
pub(crate) struct Region {
    pub(crate) native: crossrail::Region,
    pub(crate) worker: Arc<Shared>,
}

/// A handle: what [`xrail_unpack`] has read.
pub(crate) struct Unpacked(pub(crate) Description);

/// Memory of the caller's as the engine has it.
///
/// # Safety
/// The memory stays valid for the operation's use until it is over.
#[inline]
pub(crate) unsafe fn buffer(operation: &str, at: *mut c_void, size: usize) -> Result<Buffer, Box<Failure>> {
    if (at.is_null() && size != 0) || isize::try_from(size).is_err() {
        return Err(bad_buffer(operation, at, size));
    }
    // SAFETY: by the contract.
    Ok(unsafe { Buffer::raw(at.cast(), size, None) })
}

#[cold]
fn bad_buffer(operation: &str, at: *mut c_void, size: usize) -> Box<Failure> {
    usage(operation, format!("a buffer of {size} bytes at {at:?}"))
}

/// A key as C has it.
pub(crate) fn key_to_c(key: &RegionKey) -> Key {
    let mut bytes = [0; KEY_LEN];
    let key = key.to_bytes();
    bytes[..key.len()].copy_from_slice(&key);
    Key { bytes }
}

/// A key from C.
///
/// # Safety
/// `key` is null or valid.
pub(crate) unsafe fn key_from_c(operation: &str, key: *const Key) -> Result<RegionKey, Box<Failure>> {
    // SAFETY: by the contract.
    let Key { bytes } = unsafe { handle(operation, key) }?;
    let (key, rest) = bytes.split_at(RegionKey::BYTES);
    if rest.iter().any(|byte| *byte != 0) {
        return Err(usage(operation, "the key is none"));
    }
    Ok(RegionKey::from_bytes(key)?)
}

/// Lets peers with the key read and write the memory.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_register(
    worker: *mut Worker,
    memory: *mut c_void,
    size: usize,
    device: u32,
    out: *mut *mut Region,
) -> i32 {
    const OPERATION: &str = "register";
    // SAFETY: by the contract.
    let Some(owner) = (unsafe { worker.as_ref() }) else {
        return guard::call(OPERATION, None, || Err(usage(OPERATION, "a handle is NULL")));
    };
    guard::call(OPERATION, Some(&owner.0.native), || {
        // SAFETY: by the contract.
        let (out, host) = unsafe { (place(OPERATION, out)?, buffer(OPERATION, memory, size)?) };
        let memory = match place_of(device) {
            Place::Host => host,
            // SAFETY: by the contract.
            Place::Gpu(ordinal) => unsafe { Buffer::device(memory as u64, size, ordinal, None, None) },
        };
        let native = owner.0.native.register(memory)?;
        out.set(Box::into_raw(Box::new(Region { native, worker: Arc::clone(&owner.0) })));
        Ok(OK)
    })
}

impl Object for Region {
    type Owner = crossrail::Worker;

    #[inline(always)]
    fn owner(&self) -> &crossrail::Worker {
        &self.worker.native
    }
}

/// Ends all access.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_deregister(region: *mut Region) -> i32 {
    const OPERATION: &str = "deregister";
    // SAFETY: by the contract.
    unsafe {
        guard::with(OPERATION, region, |region| {
            region.native.deregister()?;
            Ok(OK)
        })
    }
}

/// Gives the handle back; the region ends with it.
///
/// # Safety
/// `region` is null or a region, which is not used after this.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_region_free(region: *mut Region) {
    if !region.is_null() {
        // SAFETY: from `into_raw`, once.
        guard::quietly("region_free", None, || drop(unsafe { Box::from_raw(region) }));
    }
}

/// Its key.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_region_key(region: *mut Region, key: *mut Key) -> i32 {
    const OPERATION: &str = "region_key";
    // SAFETY: by the contract.
    unsafe {
        guard::with(OPERATION, region, |region| {
            place(OPERATION, key)?.set(key_to_c(&region.native.key()));
            Ok(OK)
        })
    }
}

/// Waits for writes with an immediate.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_imm_wait(region: *mut Region, imm: u32, count: u64, timeout_us: i64) -> i32 {
    const OPERATION: &str = "imm_wait";
    // SAFETY: by the contract.
    unsafe {
        guard::with(OPERATION, region, |region| {
            let limit = timeout(OPERATION, timeout_us)?;
            region.worker.native.check(OPERATION)?;
            region.worker.waits.wait(|| region.native.wait_imm(imm, count, limit))?;
            Ok(OK)
        })
    }
}

/// Native regions of an array of handles.
///
/// # Safety
/// `at` is null or points to `count` handles.
pub(crate) unsafe fn regions(
    operation: &str,
    at: *const *mut Region,
    count: usize,
) -> Result<Vec<crossrail::Region>, Box<Failure>> {
    // SAFETY: by the contract.
    let handles = unsafe { slice(operation, at, count) }?;
    // SAFETY: by the contract.
    handles.iter().map(|region| Ok(unsafe { handle(operation, *region) }?.native.clone())).collect()
}

/// A worker's address and regions, as bytes.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_describe(
    worker: *mut Worker,
    regions: *const *mut Region,
    count: usize,
    bytes: *mut *mut c_void,
    size: *mut usize,
) -> i32 {
    const OPERATION: &str = "describe";
    // SAFETY: by the contract.
    let Some(owner) = (unsafe { worker.as_ref() }) else {
        return guard::call(OPERATION, None, || Err(usage(OPERATION, "a handle is NULL")));
    };
    guard::call(OPERATION, Some(&owner.0.native), || {
        // SAFETY: by the contract.
        let (bytes, size) = unsafe { (place(OPERATION, bytes)?, place(OPERATION, size)?) };
        // SAFETY: by the contract.
        let described = owner.0.native.describe(&unsafe { self::regions(OPERATION, regions, count) }?)?;
        bytes.set(output::bytes(OPERATION, &described)?);
        size.set(described.len());
        Ok(OK)
    })
}

/// Reads the bytes of a description.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_unpack(bytes: *const c_void, size: usize, out: *mut *mut Unpacked) -> i32 {
    const OPERATION: &str = "unpack";
    guard::call(OPERATION, None, || {
        // SAFETY: by the contract.
        let (out, bytes) = unsafe { (place(OPERATION, out)?, slice::<u8>(OPERATION, bytes.cast(), size)?) };
        out.set(Box::into_raw(Box::new(Unpacked(Description::parse(bytes)?))));
        Ok(OK)
    })
}

/// The worker's address in it; borrowed.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_description_address(
    description: *const Unpacked,
    size: *mut usize,
) -> *const c_void {
    // SAFETY: by the contract.
    let (Some(description), false) = (unsafe { description.as_ref() }, size.is_null()) else {
        return std::ptr::null();
    };
    let address = description.0.address();
    // SAFETY: not null, so valid for a write.
    unsafe { size.write(address.len()) };
    address.as_ptr().cast()
}

/// One of its regions. Any of the places may be null.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_description_region(
    description: *const Unpacked,
    index: usize,
    address: *mut u64,
    size: *mut u64,
    key: *mut Key,
) -> i32 {
    const OPERATION: &str = "description_region";
    guard::call(OPERATION, None, || {
        // SAFETY: by the contract.
        let description = unsafe { handle(OPERATION, description) }?;
        let Some(region) = description.0.regions().get(index) else { return Ok(PENDING) };
        // SAFETY: null, or valid for a write.
        unsafe {
            if let Some(at) = address.as_mut() {
                *at = region.base;
            }
            if let Some(at) = size.as_mut() {
                *at = region.len();
            }
            if let Some(at) = key.as_mut() {
                *at = key_to_c(&region.key);
            }
        }
        Ok(OK)
    })
}

/// Gives the handle back.
///
/// # Safety
/// `description` is null or a description, which is not used after this.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_description_free(description: *mut Unpacked) {
    if !description.is_null() {
        // SAFETY: from `into_raw`, once.
        guard::quietly("description_free", None, || drop(unsafe { Box::from_raw(description) }));
    }
}
