//! The tables of functions, by version. A function that a plugin leaves out is `None`.

#![allow(clippy::type_complexity)] // the signatures are NCCL's

use std::ffi::{c_char, c_int};

use crate::properties::{
    PropertiesV4, PropertiesV6, PropertiesV7, PropertiesV8, PropertiesV9, PropertiesV11, PropertiesV12,
};
use crate::{Config, DeviceHandle, Logger, Profiler, Ptr, Status, VirtualDevice};

/// `init`, versions 4 to 9.
pub type InitV4 = unsafe extern "C" fn(Option<Logger>) -> Status;
/// `init`, version 10.
pub type InitV10 = unsafe extern "C" fn(Option<Logger>, Option<Profiler>) -> Status;
/// `init`, versions 11 and 12.
pub type InitV11 = unsafe extern "C" fn(*mut Ptr, u64, *mut Config, Option<Logger>, Option<Profiler>) -> Status;
/// `devices`.
pub type Devices = unsafe extern "C" fn(*mut c_int) -> Status;
/// `listen`, versions 4 to 10.
pub type ListenV4 = unsafe extern "C" fn(c_int, Ptr, *mut Ptr) -> Status;
/// `listen`, versions 11 and 12.
pub type ListenV11 = unsafe extern "C" fn(Ptr, c_int, Ptr, *mut Ptr) -> Status;
/// `connect`, versions 4 to 6.
pub type ConnectV4 = unsafe extern "C" fn(c_int, Ptr, *mut Ptr) -> Status;
/// `connect`, versions 7 to 9.
pub type ConnectV7 = unsafe extern "C" fn(c_int, Ptr, *mut Ptr, *mut *mut DeviceHandle) -> Status;
/// `connect`, version 10.
pub type ConnectV10 = unsafe extern "C" fn(c_int, *mut Config, Ptr, *mut Ptr, *mut *mut DeviceHandle) -> Status;
/// `connect`, versions 11 and 12.
pub type ConnectV11 = unsafe extern "C" fn(Ptr, c_int, Ptr, *mut Ptr, *mut *mut DeviceHandle) -> Status;
/// `accept`, versions 4 to 6.
pub type AcceptV4 = unsafe extern "C" fn(Ptr, *mut Ptr) -> Status;
/// `accept`, versions 7 to 12.
pub type AcceptV7 = unsafe extern "C" fn(Ptr, *mut Ptr, *mut *mut DeviceHandle) -> Status;
/// `regMr`, versions 4 to 7.
pub type RegMrV4 = unsafe extern "C" fn(Ptr, Ptr, c_int, c_int, *mut Ptr) -> Status;
/// `regMr`, versions 8 to 12.
pub type RegMrV8 = unsafe extern "C" fn(Ptr, Ptr, usize, c_int, *mut Ptr) -> Status;
/// `regMrDmaBuf`.
pub type RegMrDmaBuf = unsafe extern "C" fn(Ptr, Ptr, usize, c_int, u64, c_int, *mut Ptr) -> Status;
/// `deregMr`.
pub type DeregMr = unsafe extern "C" fn(Ptr, Ptr) -> Status;
/// `isend`, version 4.
pub type IsendV4 = unsafe extern "C" fn(Ptr, Ptr, c_int, Ptr, *mut Ptr) -> Status;
/// `isend`, versions 5 to 8.
pub type IsendV5 = unsafe extern "C" fn(Ptr, Ptr, c_int, c_int, Ptr, *mut Ptr) -> Status;
/// `isend`, version 9.
pub type IsendV9 = unsafe extern "C" fn(Ptr, Ptr, usize, c_int, Ptr, *mut Ptr) -> Status;
/// `isend`, versions 10 to 12.
pub type IsendV10 = unsafe extern "C" fn(Ptr, Ptr, usize, c_int, Ptr, Ptr, *mut Ptr) -> Status;
/// `irecv`, version 4.
pub type IrecvV4 = unsafe extern "C" fn(Ptr, Ptr, c_int, Ptr, *mut Ptr) -> Status;
/// `irecv`, versions 5 to 8.
pub type IrecvV5 = unsafe extern "C" fn(Ptr, c_int, *mut Ptr, *mut c_int, *mut c_int, *mut Ptr, *mut Ptr) -> Status;
/// `irecv`, version 9.
pub type IrecvV9 = unsafe extern "C" fn(Ptr, c_int, *mut Ptr, *mut usize, *mut c_int, *mut Ptr, *mut Ptr) -> Status;
/// `irecv`, versions 10 to 12.
pub type IrecvV10 =
    unsafe extern "C" fn(Ptr, c_int, *mut Ptr, *mut usize, *mut c_int, *mut Ptr, *mut Ptr, *mut Ptr) -> Status;
/// `iflush`, version 4.
pub type IflushV4 = unsafe extern "C" fn(Ptr, Ptr, c_int, Ptr, *mut Ptr) -> Status;
/// `iflush`, versions 5 to 12.
pub type IflushV5 = unsafe extern "C" fn(Ptr, c_int, *mut Ptr, *mut c_int, *mut Ptr, *mut Ptr) -> Status;
/// `test`.
pub type Test = unsafe extern "C" fn(Ptr, *mut c_int, *mut c_int) -> Status;
/// `closeSend`, `closeRecv`, `closeListen` and `finalize`.
pub type Close = unsafe extern "C" fn(Ptr) -> Status;
/// `getDeviceMr`.
pub type GetDeviceMr = unsafe extern "C" fn(Ptr, Ptr, *mut Ptr) -> Status;
/// `irecvConsumed`.
pub type IrecvConsumed = unsafe extern "C" fn(Ptr, c_int, Ptr) -> Status;
/// `getProperties` of a version.
pub type GetProperties<P> = unsafe extern "C" fn(c_int, *mut P) -> Status;
/// `makeVDevice` of a version.
pub type MakeVDevice<const MAX: usize> = unsafe extern "C" fn(*mut c_int, *mut VirtualDevice<MAX>) -> Status;
/// `setNetAttr`, whose struct this crate does not read.
pub type SetNetAttr = unsafe extern "C" fn(Ptr, Ptr) -> Status;

/// Declares the table of a version: the types of what all versions have, and after a semicolon what later ones added.
macro_rules! table {
    ($name:ident = $version:literal:
     $init:ident $properties:ident $listen:ident $connect:ident $accept:ident $reg_mr:ident $($dma_buf:ident)?,
     $isend:ident $irecv:ident $iflush:ident
     $(; $device_mr:ident $consumed:ident $(, $most:literal $(, $finalize:ident $set_attr:ident)?)?)?) => {
        #[doc = concat!("The table of version ", $version, ".")]
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        pub struct $name {
            /// The plugin's name, which `NCCL_NET` must equal.
            pub name: *const c_char,
            /// Initializes the plugin; from version 11 on for a communicator.
            pub init: Option<$init>,
            /// Number of devices.
            pub devices: Option<Devices>,
            /// Properties of a device.
            pub get_properties: Option<GetProperties<$properties>>,
            /// Creates a listener and its handle.
            pub listen: Option<$listen>,
            /// Connects to a handle; called again while it returns no communicator.
            pub connect: Option<$connect>,
            /// Accepts a connection; called again while it returns no communicator.
            pub accept: Option<$accept>,
            /// Registers memory.
            pub reg_mr: Option<$reg_mr>,
            $(
                /// Registers memory by a DMA-BUF descriptor.
                pub reg_mr_dma_buf: Option<$dma_buf>,
            )?
            /// Ends a registration.
            pub dereg_mr: Option<DeregMr>,
            /// Starts a send; no request: the plugin is busy.
            pub isend: Option<$isend>,
            /// Starts receives; no request: the plugin is busy.
            pub irecv: Option<$irecv>,
            /// Makes received data visible to the GPU.
            pub iflush: Option<$iflush>,
            /// Whether a request has completed, and the bytes of each of its transfers.
            pub test: Option<Test>,
            /// Closes a sending communicator.
            pub close_send: Option<Close>,
            /// Closes a receiving communicator.
            pub close_recv: Option<Close>,
            /// Closes a listener.
            pub close_listen: Option<Close>,
            $(
                /// The registration as the GPU sees it.
                pub get_device_mr: Option<$device_mr>,
                /// The GPU has consumed a receive.
                pub irecv_consumed: Option<$consumed>,
                $(
                    /// Creates a virtual device.
                    pub make_v_device: Option<MakeVDevice<$most>>,
                    $(
                        /// Ends what `init` began.
                        pub finalize: Option<$finalize>,
                        /// Announces the traffic to expect.
                        pub set_net_attr: Option<$set_attr>,
                    )?
                )?
            )?
        }
    };
}

table!(NetV4 = 4: InitV4 PropertiesV4 ListenV4 ConnectV4 AcceptV4 RegMrV4, IsendV4 IrecvV4 IflushV4);
table!(NetV5 = 5: InitV4 PropertiesV6 ListenV4 ConnectV4 AcceptV4 RegMrV4, IsendV5 IrecvV5 IflushV5);
table!(NetV6 = 6: InitV4 PropertiesV6 ListenV4 ConnectV4 AcceptV4 RegMrV4 RegMrDmaBuf, IsendV5 IrecvV5 IflushV5);
table!(NetV7 = 7: InitV4 PropertiesV7 ListenV4 ConnectV7 AcceptV7 RegMrV4 RegMrDmaBuf, IsendV5 IrecvV5 IflushV5;
    GetDeviceMr IrecvConsumed);
table!(NetV8 = 8: InitV4 PropertiesV8 ListenV4 ConnectV7 AcceptV7 RegMrV8 RegMrDmaBuf, IsendV5 IrecvV5 IflushV5;
    GetDeviceMr IrecvConsumed);
table!(NetV9 = 9: InitV4 PropertiesV9 ListenV4 ConnectV7 AcceptV7 RegMrV8 RegMrDmaBuf, IsendV9 IrecvV9 IflushV5;
    GetDeviceMr IrecvConsumed, 4);
table!(NetV10 = 10: InitV10 PropertiesV9 ListenV4 ConnectV10 AcceptV7 RegMrV8 RegMrDmaBuf, IsendV10 IrecvV10 IflushV5;
    GetDeviceMr IrecvConsumed, 4);
table!(NetV11 = 11: InitV11 PropertiesV11 ListenV11 ConnectV11 AcceptV7 RegMrV8 RegMrDmaBuf, IsendV10 IrecvV10 IflushV5;
    GetDeviceMr IrecvConsumed, 4, Close SetNetAttr);
table!(NetV12 = 12: InitV11 PropertiesV12 ListenV11 ConnectV11 AcceptV7 RegMrV8 RegMrDmaBuf, IsendV10 IrecvV10 IflushV5;
    GetDeviceMr IrecvConsumed, 8, Close SetNetAttr);
