//! The tables of NCCL's RMA plugins, versions 13 to 16, written from NCCL's public headers
//! (`src/include/plugin/rma/rma_v*.h`, `gin/gin_v13.h` of NVIDIA/nccl).
//!
//! An RMA plugin is the CPU's half of NCCL's device API: puts, gets and signals between registered memory. The tables
//! differ in few signatures, which are the parameters of [`Rma`].

use std::ffi::{c_char, c_int};

use crate::properties::PropertiesV12;
use crate::tables::{Close, Devices, GetProperties};
use crate::{DeviceHandle, Logger, Ptr, Status};

/// Versions whose tables this crate declares, the newest first.
pub const RMA_VERSIONS: [u32; 4] = [16, 15, 14, 13];

/// The name of the symbol that exports the RMA table of `version`.
pub fn rma_symbol(version: u32) -> String {
    format!("ncclRmaPlugin_v{version}")
}

/// A device that a proxy on the CPU serves: what `getProperties` of an RMA plugin reports as its kind.
pub const DEVICE_GIN_PROXY: c_int = 2;
/// Memory that is described by a DMA-BUF, in the supported kinds of a device.
pub const PTR_DMABUF: c_int = 4;
/// Flag of a registration: signals may be in it.
pub const MR_FORCE_SO: u64 = 1;
/// Flag of a registration: it holds signals, which only the plugin writes.
pub const MR_SIGNAL_NEVER_RESET: u64 = 2;
/// Operation of a signal: adds 1, whatever the value.
pub const SIGNAL_INC: u32 = 1;
/// Operation of a signal: adds the value.
pub const SIGNAL_ADD: u32 = 2;

/// Configuration of contexts, from version 14 on.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RmaConfig {
    /// Number of contexts.
    pub contexts: c_int,
    /// The traffic class, -1 if undefined.
    pub traffic_class: c_int,
    /// Only ranks at multiples of it are peers.
    pub rank_stride: c_int,
}

/// Configuration of contexts in version 13.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RmaConfigV13 {
    /// Signals of a context.
    pub signals: c_int,
    /// Counters of a context.
    pub counters: c_int,
    /// Number of contexts.
    pub contexts: c_int,
    /// Length of a queue.
    pub queue_depth: c_int,
    /// The traffic class, -1 if undefined.
    pub traffic_class: c_int,
}

/// Properties of a group, from version 16 on.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RmaProperties {
    /// Any signal makes all puts visible that were received before it, from any peer.
    pub flushes_all_puts_on_any_signal: bool,
}

/// `init`.
pub type RmaInit = unsafe extern "C" fn(*mut Ptr, u64, Option<Logger>) -> Status;
/// `getRmaProperties`.
pub type GetRmaProperties = unsafe extern "C" fn(Ptr, *mut RmaProperties) -> Status;
/// `listen`.
pub type RmaListen = unsafe extern "C" fn(Ptr, c_int, Ptr, *mut Ptr) -> Status;
/// `connect`: context, handles, ranks, own rank, listener, group.
pub type RmaConnect = unsafe extern "C" fn(Ptr, *mut Ptr, c_int, c_int, Ptr, *mut Ptr) -> Status;
/// `createContext`.
pub type CreateContext = unsafe extern "C" fn(Ptr, *mut RmaConfig, *mut Ptr) -> Status;
/// `createContext`, version 13.
pub type CreateContextV13 = unsafe extern "C" fn(Ptr, *mut RmaConfigV13, *mut Ptr, *mut *mut DeviceHandle) -> Status;
/// `regMrSym`: group, data, size, kind, flags, handle.
pub type RegMrSym = unsafe extern "C" fn(Ptr, Ptr, usize, c_int, u64, *mut Ptr) -> Status;
/// `regMrSym`, version 13.
pub type RegMrSymV13 = unsafe extern "C" fn(Ptr, Ptr, usize, c_int, u64, *mut Ptr, *mut Ptr) -> Status;
/// `regMrSymDmaBuf`: group, data, size, kind, offset, descriptor, flags, handle.
pub type RegMrSymDmaBuf = unsafe extern "C" fn(Ptr, Ptr, usize, c_int, u64, c_int, u64, *mut Ptr) -> Status;
/// `regMrSymDmaBuf`, version 13.
pub type RegMrSymDmaBufV13 =
    unsafe extern "C" fn(Ptr, Ptr, usize, c_int, u64, c_int, u64, *mut Ptr, *mut Ptr) -> Status;
/// `deregMrSym`: group, handle.
pub type DeregMrSym = unsafe extern "C" fn(Ptr, Ptr) -> Status;
/// `iput` and `iget`, to version 14: context, its index, source offset and handle, size, destination offset and handle,
/// rank, request.
pub type Iput = unsafe extern "C" fn(Ptr, c_int, u64, Ptr, usize, u64, Ptr, u32, *mut Ptr) -> Status;
/// `iput` and `iget` from version 15 on: [`Iput`] with flags before the request.
pub type IputV15 = unsafe extern "C" fn(Ptr, c_int, u64, Ptr, usize, u64, Ptr, u32, u32, *mut Ptr) -> Status;
/// `iputSignal`, version 13: as [`Iput`], with signal offset and handle, value and operation before the request.
pub type IputSignalV13 =
    unsafe extern "C" fn(Ptr, c_int, u64, Ptr, usize, u64, Ptr, u32, u64, Ptr, u64, u32, *mut Ptr) -> Status;
/// `iputSignal`, version 14: whether the signal is strong, too.
pub type IputSignalV14 =
    unsafe extern "C" fn(Ptr, c_int, u64, Ptr, usize, u64, Ptr, u32, u64, Ptr, u64, u32, bool, *mut Ptr) -> Status;
/// `iputSignal`, from version 15 on: flags, too.
pub type IputSignalV15 =
    unsafe extern "C" fn(Ptr, c_int, u64, Ptr, usize, u64, Ptr, u32, u64, Ptr, u64, u32, bool, u32, *mut Ptr) -> Status;
/// `iflush`: context, its index, handle, rank, request.
pub type RmaFlush = unsafe extern "C" fn(Ptr, c_int, Ptr, u32, *mut Ptr) -> Status;
/// `test`: group, request, whether it is done.
pub type RmaTest = unsafe extern "C" fn(Ptr, Ptr, *mut c_int) -> Status;
/// `queryLastError`: context, whether there was an error.
pub type QueryLastError = unsafe extern "C" fn(Ptr, *mut bool) -> Status;

/// Declares the tables, which differ in the fields after `devices` and in signatures.
macro_rules! tables {
    ($($(#[$doc:meta])* $name:ident { $($properties:ident: $query:ty,)? ; $create:ty, $register:ty, $dma_buf:ty, $put:ty, $signal:ty })*) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        pub struct $name {
            /// The name of the plugin.
            pub name: *const c_char,
            /// See the type.
            pub init: Option<RmaInit>,
            /// See the type.
            pub devices: Option<Devices>,
            $(
                /// See the type.
                pub $properties: Option<$query>,
            )?
            /// See the type.
            pub get_properties: Option<GetProperties<PropertiesV12>>,
            /// See the type.
            pub listen: Option<RmaListen>,
            /// See the type.
            pub connect: Option<RmaConnect>,
            /// See the type.
            pub create_context: Option<$create>,
            /// See the type.
            pub reg_mr_sym: Option<$register>,
            /// See the type.
            pub reg_mr_sym_dma_buf: Option<$dma_buf>,
            /// See the type.
            pub dereg_mr_sym: Option<DeregMrSym>,
            /// Of a context.
            pub destroy_context: Option<Close>,
            /// Of a group.
            pub close_coll: Option<Close>,
            /// Of a listener.
            pub close_listen: Option<Close>,
            /// See the type.
            pub iput: Option<$put>,
            /// See the type.
            pub iput_signal: Option<$signal>,
            /// As `iput`, with the remote end first.
            pub iget: Option<$put>,
            /// See the type.
            pub iflush: Option<RmaFlush>,
            /// See the type.
            pub test: Option<RmaTest>,
            /// Of a context.
            pub rma_progress: Option<Close>,
            /// See the type.
            pub query_last_error: Option<QueryLastError>,
            /// Of what `init` returned.
            pub finalize: Option<Close>,
        }
    )*};
}

tables! {
    /// Version 13, whose signals are all strong.
    RmaV13 { ; CreateContextV13, RegMrSymV13, RegMrSymDmaBufV13, Iput, IputSignalV13 }
    /// Version 14.
    RmaV14 { ; CreateContext, RegMrSym, RegMrSymDmaBuf, Iput, IputSignalV14 }
    /// Version 15.
    RmaV15 { ; CreateContext, RegMrSym, RegMrSymDmaBuf, IputV15, IputSignalV15 }
    /// Version 16.
    RmaV16 { get_rma_properties: GetRmaProperties, ; CreateContext, RegMrSym, RegMrSymDmaBuf, IputV15, IputSignalV15 }
}

#[cfg(test)]
mod tests {
    use std::mem::{offset_of, size_of};

    use super::*;

    // Sizes and offsets as a C compiler computes them from NCCL's headers, on every 64-bit platform alike.

    #[test]
    fn rma_tables_are_laid_out_as_in_the_headers() {
        let sizes = [size_of::<RmaV13>(), size_of::<RmaV14>(), size_of::<RmaV15>(), size_of::<RmaV16>()];
        assert_eq!(sizes, [168, 168, 168, 176]);
        assert_eq!((offset_of!(RmaV14, listen), offset_of!(RmaV14, create_context)), (32, 48));
        assert_eq!((offset_of!(RmaV14, reg_mr_sym), offset_of!(RmaV14, dereg_mr_sym)), (56, 72));
        assert_eq!((offset_of!(RmaV14, destroy_context), offset_of!(RmaV14, close_listen)), (80, 96));
        assert_eq!((offset_of!(RmaV14, iput), offset_of!(RmaV14, iget), offset_of!(RmaV14, test)), (104, 120, 136));
        assert_eq!((offset_of!(RmaV14, rma_progress), offset_of!(RmaV14, finalize)), (144, 160));
        assert_eq!((offset_of!(RmaV13, iput_signal), offset_of!(RmaV15, iput_signal)), (112, 112));
        assert_eq!((offset_of!(RmaV16, get_rma_properties), offset_of!(RmaV16, get_properties)), (24, 32));
        assert_eq!((offset_of!(RmaV16, iput), offset_of!(RmaV16, finalize)), (112, 168));
    }

    #[test]
    fn rma_structs_are_laid_out_as_in_the_headers() {
        assert_eq!((size_of::<RmaConfig>(), size_of::<RmaConfigV13>(), size_of::<RmaProperties>()), (12, 20, 1));
        assert_eq!((offset_of!(RmaConfig, rank_stride), offset_of!(RmaConfigV13, contexts)), (8, 8));
        assert_eq!(rma_symbol(14), "ncclRmaPlugin_v14");
    }
}
