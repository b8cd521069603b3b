//! The C layouts of NCCL's network plugins, versions 4 to 12, and of its RMA plugins, versions 13 to 16, written from
//! NCCL's public headers (`plugins/net/example/nccl/net_v*.h` of NVIDIA/nccl; [`rma`]).
//!
//! A plugin is a shared library that exports one table of functions for each version it supports, as
//! `ncclNetPlugin_v11`. This crate declares the tables and the structs that they take, and nothing else: the plugin
//! that Crossrail exports fills them, the driver of foreign plugins calls them.

#![forbid(unsafe_code)]

mod properties;
pub mod rma;
mod tables;

use std::ffi::{c_char, c_int, c_ulong, c_void};

pub use properties::{
    PropertiesV4, PropertiesV6, PropertiesV7, PropertiesV8, PropertiesV9, PropertiesV11, PropertiesV12, VirtualDevice,
};
pub use tables::*;

/// Memory, or an object of the plugin's: `void *`.
pub type Ptr = *mut c_void;
/// A function's result: [`SUCCESS`] or one of the error codes.
pub type Status = c_int;
/// The call succeeded.
pub const SUCCESS: Status = 0;
/// A call of the operating system failed.
pub const SYSTEM_ERROR: Status = 2;
/// The plugin failed.
pub const INTERNAL_ERROR: Status = 3;
/// The caller passed an invalid argument.
pub const INVALID_ARGUMENT: Status = 4;
/// The caller used the plugin in a way that it does not support.
pub const INVALID_USAGE: Status = 5;
/// The peer failed.
pub const REMOTE_ERROR: Status = 6;

/// The name of a result, as in NCCL's header.
pub fn status_name(status: Status) -> &'static str {
    match status {
        SUCCESS => "ncclSuccess",
        1 => "ncclUnhandledCudaError",
        SYSTEM_ERROR => "ncclSystemError",
        INTERNAL_ERROR => "ncclInternalError",
        INVALID_ARGUMENT => "ncclInvalidArgument",
        INVALID_USAGE => "ncclInvalidUsage",
        REMOTE_ERROR => "ncclRemoteError",
        _ => "an unknown result",
    }
}

/// Size of the handle that `listen` writes and `connect` reads, in bytes.
pub const HANDLE_LEN: usize = 128;
/// The same before version 5.
pub const HANDLE_LEN_V4: usize = 64;
/// Requests that NCCL may have in flight on one communicator.
pub const MAX_REQUESTS: usize = 32;
/// Largest transfer that a plugin may declare, in bytes (1 TiB).
pub const MAX_SIZE: usize = 1 << 40;

/// Memory of the host, in `regMr` and in the supported kinds of a device.
pub const PTR_HOST: c_int = 1;
/// Memory of a GPU.
pub const PTR_CUDA: c_int = 2;

/// A device whose data arrives where it belongs.
pub const DEVICE_HOST: c_int = 0;
/// A device that returns lists of fragments, which the receiver gathers.
pub const DEVICE_UNPACK: c_int = 1;
/// The version of [`DEVICE_UNPACK`] that this crate describes.
pub const DEVICE_UNPACK_VERSION: c_int = 7;

/// Log levels.
pub const LOG_WARN: c_int = 2;
/// As above.
pub const LOG_INFO: c_int = 3;
/// As above.
pub const LOG_TRACE: c_int = 5;
/// The log's subsystem of initialization.
pub const SUBSYSTEM_INIT: c_ulong = 1;
/// The log's subsystem of networks.
pub const SUBSYSTEM_NET: c_ulong = 16;

/// NCCL's logger: level, subsystems, file, line, and a format string with its arguments.
pub type Logger = unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...);
/// NCCL's profiler callback. Crossrail neither calls nor provides it.
pub type Profiler = unsafe extern "C" fn(*mut *mut c_void, c_int, *mut c_void, i64, *mut c_void) -> Status;

/// Configuration of a communicator, versions 10 to 12.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The traffic class, -1 if undefined.
    pub traffic_class: c_int,
}

/// What `connect` and `accept` fill for a device that takes part in the kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceHandle {
    /// The kind of device, as [`DEVICE_UNPACK`].
    pub kind: c_int,
    /// Its version.
    pub version: c_int,
    /// Memory of the GPU that the device shares with the kernel.
    pub handle: *mut c_void,
    /// Bytes of it.
    pub size: usize,
    /// Whether the proxy must still make progress.
    pub needs_proxy_progress: c_int,
}

/// The name of the symbol that exports the table of `version`.
pub fn symbol(version: u32) -> String {
    format!("ncclNetPlugin_v{version}")
}

/// Versions whose tables this crate declares, the newest first.
pub const VERSIONS: [u32; 9] = [12, 11, 10, 9, 8, 7, 6, 5, 4];

#[cfg(test)]
mod tests {
    use std::mem::{offset_of, size_of};

    use super::*;

    // Sizes and offsets as a C compiler computes them from NCCL's headers, on every 64-bit platform alike.

    #[test]
    fn tables_are_laid_out_as_in_the_headers() {
        let sizes = [
            size_of::<NetV4>(),
            size_of::<NetV5>(),
            size_of::<NetV6>(),
            size_of::<NetV7>(),
            size_of::<NetV8>(),
            size_of::<NetV9>(),
            size_of::<NetV10>(),
            size_of::<NetV11>(),
            size_of::<NetV12>(),
        ];
        assert_eq!(sizes, [128, 128, 136, 152, 152, 160, 160, 176, 176]);
        assert_eq!(
            (offset_of!(NetV4, reg_mr), offset_of!(NetV4, test), offset_of!(NetV4, close_listen)),
            (56, 96, 120)
        );
        assert_eq!((offset_of!(NetV5, test), offset_of!(NetV6, reg_mr_dma_buf)), (96, 64));
        assert_eq!((offset_of!(NetV7, irecv_consumed), offset_of!(NetV8, irecv_consumed)), (144, 144));
        assert_eq!((offset_of!(NetV9, make_v_device), offset_of!(NetV10, make_v_device)), (152, 152));
        assert_eq!((offset_of!(NetV11, finalize), offset_of!(NetV11, set_net_attr)), (160, 168));
        assert_eq!((offset_of!(NetV12, test), offset_of!(NetV12, set_net_attr)), (104, 168));
    }

    #[test]
    fn properties_are_laid_out_as_in_the_headers() {
        let sizes = [
            size_of::<PropertiesV4>(),
            size_of::<PropertiesV6>(),
            size_of::<PropertiesV7>(),
            size_of::<PropertiesV8>(),
            size_of::<PropertiesV9>(),
            size_of::<PropertiesV11>(),
            size_of::<PropertiesV12>(),
        ];
        assert_eq!(sizes, [40, 48, 56, 64, 104, 112, 128]);
        assert_eq!((offset_of!(PropertiesV4, max_comms), offset_of!(PropertiesV6, max_recvs)), (36, 44));
        assert_eq!((offset_of!(PropertiesV7, device_version), offset_of!(PropertiesV8, device_version)), (52, 56));
        assert_eq!((offset_of!(PropertiesV8, reg_is_global), offset_of!(PropertiesV8, speed)), (28, 32));
        assert_eq!((offset_of!(PropertiesV9, force_flush), offset_of!(PropertiesV9, speed)), (32, 36));
        assert_eq!((offset_of!(PropertiesV9, virtual_device), offset_of!(PropertiesV9, max_p2p_bytes)), (64, 88));
        assert_eq!((offset_of!(PropertiesV11, max_p2p_bytes), offset_of!(PropertiesV11, max_multi_request)), (88, 104));
        assert_eq!((offset_of!(PropertiesV12, virtual_device), offset_of!(PropertiesV12, max_p2p_bytes)), (64, 104));
        assert_eq!((offset_of!(PropertiesV12, latency), offset_of!(PropertiesV12, max_recvs)), (44, 52));
        assert_eq!((offset_of!(PropertiesV12, rail_id), offset_of!(PropertiesV12, plane_id)), (124, 126));
    }

    #[test]
    fn small_structs_are_laid_out_as_in_the_headers() {
        assert_eq!((size_of::<DeviceHandle>(), size_of::<Config>()), (32, 4));
        assert_eq!((size_of::<VirtualDevice<4>>(), size_of::<VirtualDevice<8>>()), (20, 36));
        assert_eq!(symbol(11), "ncclNetPlugin_v11");
    }
}
