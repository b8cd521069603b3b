//! UCX's C interface as this crate uses it: types and functions, resolved by name when the library is loaded.
//!
//! Written by hand from `ucp.h` and `status.h` of 1.12 to 1.22. UCX's parameter structs begin with a mask of the fields
//! that are set, and UCX reads no others, so a struct here ends with the last field that we set. `ucs_status_t` is a
//! packed enum: one byte.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::ManuallyDrop;

use libloading::Library;

/// `ucs_status_t`; 0 is success, 1 in progress, less an error.
pub(crate) type Status = i8;

pub(crate) const OK: Status = 0;
pub(crate) const IN_PROGRESS: Status = 1;
pub(crate) const ERR_UNREACHABLE: Status = -6;
pub(crate) const ERR_CONNECTION_RESET: Status = -25;

/// `ucs_status_ptr_t`: null (done), a request, or a status as a pointer (see [`pointer_status`]).
pub(crate) type StatusPtr = *mut c_void;

/// The error in a status pointer, if it is one: UCX encodes errors in the highest 100 addresses.
pub(crate) fn pointer_status(ptr: StatusPtr) -> Option<Status> {
    let value = ptr.addr().cast_signed();
    if (-100..0).contains(&value) { Status::try_from(value).ok() } else { None }
}

pub(crate) type Context = *mut c_void;
pub(crate) type Config = *mut c_void;
pub(crate) type Worker = *mut c_void;
pub(crate) type Ep = *mut c_void;

pub(crate) const PARAM_FEATURES: u64 = 1 << 0;
pub(crate) const PARAM_SHARED_BY_THREADS: u64 = 1 << 5;
pub(crate) const FEATURE_WAKEUP: u64 = 1 << 4;
pub(crate) const FEATURE_AM: u64 = 1 << 6;

/// The start of `ucp_params_t`.
#[repr(C)]
pub(crate) struct Params {
    pub(crate) field_mask: u64,
    pub(crate) features: u64,
    pub(crate) request_size: usize,
    pub(crate) request_init: *const c_void,
    pub(crate) request_cleanup: *const c_void,
    pub(crate) tag_sender_mask: u64,
    pub(crate) mt_workers_shared: c_int,
}

pub(crate) const WORKER_THREAD_MODE: u64 = 1 << 0;
pub(crate) const THREAD_SERIALIZED: c_uint = 1;

/// The start of `ucp_worker_params_t`.
#[repr(C)]
pub(crate) struct WorkerParams {
    pub(crate) field_mask: u64,
    pub(crate) thread_mode: c_uint,
}

pub(crate) const EP_REMOTE_ADDRESS: u64 = 1 << 0;
pub(crate) const EP_ERR_MODE: u64 = 1 << 1;
pub(crate) const EP_ERR_HANDLER: u64 = 1 << 2;
pub(crate) const ERR_MODE_NONE: c_uint = 0;
pub(crate) const ERR_MODE_PEER: c_uint = 1;

pub(crate) type ErrorHandler = unsafe extern "C" fn(arg: *mut c_void, ep: Ep, status: Status);

/// The start of `ucp_ep_params_t`.
#[repr(C)]
pub(crate) struct EpParams {
    pub(crate) field_mask: u64,
    pub(crate) address: *const c_void,
    pub(crate) err_mode: c_uint,
    pub(crate) err_handler: Option<ErrorHandler>,
    pub(crate) err_arg: *mut c_void,
}

pub(crate) const OP_FLAGS: u32 = 1 << 4;
pub(crate) const AM_EAGER: u32 = 1 << 1;
pub(crate) const AM_RNDV: u32 = 1 << 2;
pub(crate) const EP_CLOSE_FORCE: u32 = 1 << 0;

/// The start of `ucp_request_param_t`.
#[repr(C)]
#[derive(Default)]
pub(crate) struct RequestParam {
    pub(crate) op_attr_mask: u32,
    pub(crate) flags: u32,
}

pub(crate) const AM_HANDLER_FIELDS: u64 = 0b1111;
pub(crate) const AM_FLAG_WHOLE: u32 = 1 << 0;

pub(crate) type AmHandler = unsafe extern "C" fn(
    arg: *mut c_void,
    header: *const c_void,
    header_len: usize,
    data: *mut c_void,
    len: usize,
    param: *const AmRecvParam,
) -> Status;

/// `ucp_am_handler_param_t`.
#[repr(C)]
pub(crate) struct AmHandlerParam {
    pub(crate) field_mask: u64,
    pub(crate) id: c_uint,
    pub(crate) flags: u32,
    pub(crate) cb: AmHandler,
    pub(crate) arg: *mut c_void,
}

pub(crate) const RECV_RNDV: u64 = 1 << 17;

/// The start of `ucp_am_recv_param_t`.
#[repr(C)]
pub(crate) struct AmRecvParam {
    pub(crate) recv_attr: u64,
}

/// A log handler of UCX. `args` is a `va_list`, which both supported architectures pass as a pointer.
pub(crate) type LogHandler = unsafe extern "C" fn(
    file: *const c_char,
    line: c_uint,
    function: *const c_char,
    level: c_int,
    component: *const c_void,
    format: *const c_char,
    args: *mut c_void,
) -> c_int;

/// UCX need not handle the line any more.
pub(crate) const LOG_STOP: c_int = 0;
pub(crate) const LOG_WARN: c_int = 2;

macro_rules! table {
    ($( $name:ident: fn($($arg:ty),* $(,)?) $(-> $out:ty)?; )+) => {
        /// UCX's functions.
        pub(crate) struct Raw {
            $( pub(crate) $name: unsafe extern "C" fn($($arg),*) $(-> $out)?, )+
            /// Never unloaded: UCX has threads and exit handlers.
            _library: ManuallyDrop<Library>,
        }

        impl Raw {
            /// Resolves all functions; `Err` is the name of the first one that `library`, with what it depends on,
            /// lacks.
            pub(crate) fn new(library: Library) -> Result<Raw, &'static str> {
                Ok(Raw {
                    $( $name: {
                        // SAFETY: the type is that of the C declaration of this name.
                        let found = unsafe { library.get::<unsafe extern "C" fn($($arg),*) $(-> $out)?>(stringify!($name).as_bytes()) };
                        *found.map_err(|_| stringify!($name))?
                    }, )+
                    _library: ManuallyDrop::new(library),
                })
            }
        }
    };
}

table! {
    ucp_get_version: fn(*mut c_uint, *mut c_uint, *mut c_uint);
    ucp_get_version_string: fn() -> *const c_char;
    ucp_config_read: fn(*const c_char, *const c_char, *mut Config) -> Status;
    ucp_config_modify: fn(Config, *const c_char, *const c_char) -> Status;
    ucp_config_release: fn(Config);
    ucp_init_version: fn(c_uint, c_uint, *const Params, Config, *mut Context) -> Status;
    ucp_cleanup: fn(Context);
    ucp_context_print_info: fn(Context, *mut libc::FILE);
    ucp_worker_create: fn(Context, *const WorkerParams, *mut Worker) -> Status;
    ucp_worker_destroy: fn(Worker);
    ucp_worker_progress: fn(Worker) -> c_uint;
    ucp_worker_get_efd: fn(Worker, *mut c_int) -> Status;
    ucp_worker_arm: fn(Worker) -> Status;
    ucp_worker_get_address: fn(Worker, *mut *mut c_void, *mut usize) -> Status;
    ucp_worker_release_address: fn(Worker, *mut c_void);
    ucp_worker_set_am_recv_handler: fn(Worker, *const AmHandlerParam) -> Status;
    ucp_ep_create: fn(Worker, *const EpParams, *mut Ep) -> Status;
    ucp_ep_close_nbx: fn(Ep, *const RequestParam) -> StatusPtr;
    ucp_ep_flush_nbx: fn(Ep, *const RequestParam) -> StatusPtr;
    ucp_ep_print_info: fn(Ep, *mut libc::FILE);
    ucp_am_send_nbx: fn(Ep, c_uint, *const c_void, usize, *const c_void, usize, *const RequestParam) -> StatusPtr;
    ucp_am_recv_data_nbx: fn(Worker, *mut c_void, *mut c_void, usize, *const RequestParam) -> StatusPtr;
    ucp_am_data_release: fn(Worker, *mut c_void);
    ucp_request_check_status: fn(*mut c_void) -> Status;
    ucp_request_free: fn(*mut c_void);
    ucs_status_string: fn(Status) -> *const c_char;
    ucs_log_push_handler: fn(LogHandler);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_told_from_requests() {
        assert_eq!(pointer_status(std::ptr::null_mut()), None);
        assert_eq!(pointer_status(std::ptr::without_provenance_mut((-25_isize).cast_unsigned())), Some(-25));
        assert_eq!(pointer_status(std::ptr::without_provenance_mut(0x7fff_0000_1000)), None);
        assert_eq!(std::mem::size_of::<Status>(), 1);
        assert_eq!(std::mem::offset_of!(EpParams, err_handler), 24);
    }
}
