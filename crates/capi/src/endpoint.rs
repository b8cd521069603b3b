//! Endpoints.

use std::ffi::c_char;
use std::sync::Arc;

use crossrail_types::{Error, ErrorKind};

use crate::abi::OK;
use crate::guard::{self, Object, place, timeout};
use crate::output;
use crate::shared::Shared;
use crate::texts::{explain_json, formatted};

/// A handle.
pub(crate) struct Endpoint {
    pub(crate) native: crossrail::Endpoint,
    pub(crate) worker: Arc<Shared>,
}

impl Endpoint {
    pub(crate) fn handle(native: crossrail::Endpoint, worker: &Arc<Shared>) -> *mut Endpoint {
        Box::into_raw(Box::new(Endpoint { native, worker: Arc::clone(worker) }))
    }
}

impl Object for Endpoint {
    type Owner = crossrail::Worker;

    #[inline(always)]
    fn owner(&self) -> &crossrail::Worker {
        &self.worker.native
    }
}

/// The peer's name.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_endpoint_peer(endpoint: *mut Endpoint, text: *mut *mut c_char) -> i32 {
    const OPERATION: &str = "endpoint_peer";
    // SAFETY: by the contract.
    unsafe {
        guard::with(OPERATION, endpoint, |endpoint| {
            let out = place(OPERATION, text)?;
            endpoint.worker.native.check(OPERATION)?;
            out.set(output::text(OPERATION, &endpoint.native.peer())?);
            Ok(OK)
        })
    }
}

/// Whether the peer lives, and why not.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_endpoint_state(endpoint: *mut Endpoint) -> i32 {
    const OPERATION: &str = "endpoint_state";
    // SAFETY: by the contract.
    unsafe {
        guard::with(OPERATION, endpoint, |endpoint| {
            endpoint.worker.native.check(OPERATION)?;
            match endpoint.native.end() {
                None => Ok(OK),
                Some(why) => {
                    Err(Error::new(ErrorKind::PeerDead, OPERATION, why).with_peer(endpoint.native.peer()).into())
                }
            }
        })
    }
}

/// Which lanes it uses, and why.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_endpoint_explain(
    endpoint: *mut Endpoint,
    format: i32,
    text: *mut *mut c_char,
) -> i32 {
    const OPERATION: &str = "endpoint_explain";
    // SAFETY: by the contract.
    unsafe {
        guard::with(OPERATION, endpoint, |endpoint| {
            let out = place(OPERATION, text)?;
            endpoint.worker.native.check(OPERATION)?;
            let explain = endpoint.native.explain();
            let explained = formatted(OPERATION, format, || explain.to_string(), || explain_json(&explain))?;
            out.set(output::text(OPERATION, &explained)?);
            Ok(OK)
        })
    }
}

/// Says goodbye.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_endpoint_close(endpoint: *mut Endpoint, timeout_us: i64) -> i32 {
    const OPERATION: &str = "endpoint_close";
    // SAFETY: by the contract.
    unsafe {
        guard::with(OPERATION, endpoint, |endpoint| {
            endpoint.native.close(timeout(OPERATION, timeout_us)?)?;
            Ok(OK)
        })
    }
}

/// Gives the handle back.
///
/// # Safety
/// `endpoint` is null or an endpoint, which is not used after this.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_endpoint_free(endpoint: *mut Endpoint) {
    if !endpoint.is_null() {
        // SAFETY: from `into_raw`, once.
        guard::quietly("endpoint_free", None, || drop(unsafe { Box::from_raw(endpoint) }));
    }
}
