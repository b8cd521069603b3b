//! The tables of functions, by version. A function that a plugin leaves out is `None`.

#![allow(clippy::type_complexity)] // the signatures are NCCL's

use std::ffi::{c_char, c_int, c_void};

use crate::properties::{
    PropertiesV4, PropertiesV6, PropertiesV7, PropertiesV8, PropertiesV9, PropertiesV11, PropertiesV12,
};
use crate::{Config, DeviceHandle, Logger, Profiler, Status, VirtualDevice};

/// `init`, versions 4 to 9.
pub type InitV4 = unsafe extern "C" fn(Option<Logger>) -> Status;
/// `init`, version 10.
pub type InitV10 = unsafe extern "C" fn(Option<Logger>, Option<Profiler>) -> Status;
/// `init`, versions 11 and 12.
pub type InitV11 = unsafe extern "C" fn(*mut *mut c_void, u64, *mut Config, Option<Logger>, Option<Profiler>) -> Status;
/// `devices`.
pub type Devices = unsafe extern "C" fn(*mut c_int) -> Status;
/// `listen`, versions 4 to 10.
pub type ListenV4 = unsafe extern "C" fn(c_int, *mut c_void, *mut *mut c_void) -> Status;
/// `listen`, versions 11 and 12.
pub type ListenV11 = unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, *mut *mut c_void) -> Status;
/// `connect`, versions 4 to 6.
pub type ConnectV4 = unsafe extern "C" fn(c_int, *mut c_void, *mut *mut c_void) -> Status;
/// `connect`, versions 7 to 9.
pub type ConnectV7 = unsafe extern "C" fn(c_int, *mut c_void, *mut *mut c_void, *mut *mut DeviceHandle) -> Status;
/// `connect`, version 10.
pub type ConnectV10 =
    unsafe extern "C" fn(c_int, *mut Config, *mut c_void, *mut *mut c_void, *mut *mut DeviceHandle) -> Status;
/// `connect`, versions 11 and 12.
pub type ConnectV11 =
    unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, *mut *mut c_void, *mut *mut DeviceHandle) -> Status;
/// `accept`, versions 4 to 6.
pub type AcceptV4 = unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> Status;
/// `accept`, versions 7 to 12.
pub type AcceptV7 = unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *mut *mut DeviceHandle) -> Status;
/// `regMr`, versions 4 to 7.
pub type RegMrV4 = unsafe extern "C" fn(*mut c_void, *mut c_void, c_int, c_int, *mut *mut c_void) -> Status;
/// `regMr`, versions 8 to 12.
pub type RegMrV8 = unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, *mut *mut c_void) -> Status;
/// `regMrDmaBuf`.
pub type RegMrDmaBuf =
    unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, u64, c_int, *mut *mut c_void) -> Status;
/// `deregMr`.
pub type DeregMr = unsafe extern "C" fn(*mut c_void, *mut c_void) -> Status;
/// `isend`, version 4.
pub type IsendV4 = unsafe extern "C" fn(*mut c_void, *mut c_void, c_int, *mut c_void, *mut *mut c_void) -> Status;
/// `isend`, versions 5 to 8.
pub type IsendV5 =
    unsafe extern "C" fn(*mut c_void, *mut c_void, c_int, c_int, *mut c_void, *mut *mut c_void) -> Status;
/// `isend`, version 9.
pub type IsendV9 =
    unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, *mut c_void, *mut *mut c_void) -> Status;
/// `isend`, versions 10 to 12.
pub type IsendV10 =
    unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, *mut c_void, *mut c_void, *mut *mut c_void) -> Status;
/// `irecv`, version 4.
pub type IrecvV4 = unsafe extern "C" fn(*mut c_void, *mut c_void, c_int, *mut c_void, *mut *mut c_void) -> Status;
/// `irecv`, versions 5 to 8.
pub type IrecvV5 = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    *mut *mut c_void,
    *mut c_int,
    *mut c_int,
    *mut *mut c_void,
    *mut *mut c_void,
) -> Status;
/// `irecv`, version 9.
pub type IrecvV9 = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    *mut *mut c_void,
    *mut usize,
    *mut c_int,
    *mut *mut c_void,
    *mut *mut c_void,
) -> Status;
/// `irecv`, versions 10 to 12.
pub type IrecvV10 = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    *mut *mut c_void,
    *mut usize,
    *mut c_int,
    *mut *mut c_void,
    *mut *mut c_void,
    *mut *mut c_void,
) -> Status;
/// `iflush`, version 4.
pub type IflushV4 = unsafe extern "C" fn(*mut c_void, *mut c_void, c_int, *mut c_void, *mut *mut c_void) -> Status;
/// `iflush`, versions 5 to 12.
pub type IflushV5 = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    *mut *mut c_void,
    *mut c_int,
    *mut *mut c_void,
    *mut *mut c_void,
) -> Status;
/// `test`.
pub type Test = unsafe extern "C" fn(*mut c_void, *mut c_int, *mut c_int) -> Status;
/// `closeSend`, `closeRecv`, `closeListen` and `finalize`.
pub type Close = unsafe extern "C" fn(*mut c_void) -> Status;
/// `getDeviceMr`.
pub type GetDeviceMr = unsafe extern "C" fn(*mut c_void, *mut c_void, *mut *mut c_void) -> Status;
/// `irecvConsumed`.
pub type IrecvConsumed = unsafe extern "C" fn(*mut c_void, c_int, *mut c_void) -> Status;
/// `getProperties` of a version.
pub type GetProperties<P> = unsafe extern "C" fn(c_int, *mut P) -> Status;
/// `makeVDevice` of a version.
pub type MakeVDevice<const MAX: usize> = unsafe extern "C" fn(*mut c_int, *mut VirtualDevice<MAX>) -> Status;
/// `setNetAttr`, whose struct this crate does not read.
pub type SetNetAttr = unsafe extern "C" fn(*mut c_void, *mut c_void) -> Status;

/// The table of version 4.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NetV4 {
    /// The plugin's name, which `NCCL_NET` must equal.
    pub name: *const c_char,
    /// Initializes the plugin.
    pub init: Option<InitV4>,
    /// Number of devices.
    pub devices: Option<Devices>,
    /// Properties of a device.
    pub get_properties: Option<GetProperties<PropertiesV4>>,
    /// Creates a listener and its handle.
    pub listen: Option<ListenV4>,
    /// Connects to a handle; called again while it returns no communicator.
    pub connect: Option<ConnectV4>,
    /// Accepts a connection; called again while it returns no communicator.
    pub accept: Option<AcceptV4>,
    /// Registers memory.
    pub reg_mr: Option<RegMrV4>,
    /// Ends a registration.
    pub dereg_mr: Option<DeregMr>,
    /// Starts a send; no request: the plugin is busy.
    pub isend: Option<IsendV4>,
    /// Starts receives; no request: the plugin is busy.
    pub irecv: Option<IrecvV4>,
    /// Makes received data visible to the GPU.
    pub iflush: Option<IflushV4>,
    /// Whether a request has completed, and the bytes of each of its transfers.
    pub test: Option<Test>,
    /// Closes a sending communicator.
    pub close_send: Option<Close>,
    /// Closes a receiving communicator.
    pub close_recv: Option<Close>,
    /// Closes a listener.
    pub close_listen: Option<Close>,
}

/// The table of version 5.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NetV5 {
    /// The plugin's name, which `NCCL_NET` must equal.
    pub name: *const c_char,
    /// Initializes the plugin.
    pub init: Option<InitV4>,
    /// Number of devices.
    pub devices: Option<Devices>,
    /// Properties of a device.
    pub get_properties: Option<GetProperties<PropertiesV6>>,
    /// Creates a listener and its handle.
    pub listen: Option<ListenV4>,
    /// Connects to a handle; called again while it returns no communicator.
    pub connect: Option<ConnectV4>,
    /// Accepts a connection; called again while it returns no communicator.
    pub accept: Option<AcceptV4>,
    /// Registers memory.
    pub reg_mr: Option<RegMrV4>,
    /// Ends a registration.
    pub dereg_mr: Option<DeregMr>,
    /// Starts a send; no request: the plugin is busy.
    pub isend: Option<IsendV5>,
    /// Starts receives; no request: the plugin is busy.
    pub irecv: Option<IrecvV5>,
    /// Makes received data visible to the GPU.
    pub iflush: Option<IflushV5>,
    /// Whether a request has completed, and the bytes of each of its transfers.
    pub test: Option<Test>,
    /// Closes a sending communicator.
    pub close_send: Option<Close>,
    /// Closes a receiving communicator.
    pub close_recv: Option<Close>,
    /// Closes a listener.
    pub close_listen: Option<Close>,
}

/// The table of version 6.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NetV6 {
    /// The plugin's name, which `NCCL_NET` must equal.
    pub name: *const c_char,
    /// Initializes the plugin.
    pub init: Option<InitV4>,
    /// Number of devices.
    pub devices: Option<Devices>,
    /// Properties of a device.
    pub get_properties: Option<GetProperties<PropertiesV6>>,
    /// Creates a listener and its handle.
    pub listen: Option<ListenV4>,
    /// Connects to a handle; called again while it returns no communicator.
    pub connect: Option<ConnectV4>,
    /// Accepts a connection; called again while it returns no communicator.
    pub accept: Option<AcceptV4>,
    /// Registers memory.
    pub reg_mr: Option<RegMrV4>,
    /// Registers memory by a DMA-BUF descriptor.
    pub reg_mr_dma_buf: Option<RegMrDmaBuf>,
    /// Ends a registration.
    pub dereg_mr: Option<DeregMr>,
    /// Starts a send; no request: the plugin is busy.
    pub isend: Option<IsendV5>,
    /// Starts receives; no request: the plugin is busy.
    pub irecv: Option<IrecvV5>,
    /// Makes received data visible to the GPU.
    pub iflush: Option<IflushV5>,
    /// Whether a request has completed, and the bytes of each of its transfers.
    pub test: Option<Test>,
    /// Closes a sending communicator.
    pub close_send: Option<Close>,
    /// Closes a receiving communicator.
    pub close_recv: Option<Close>,
    /// Closes a listener.
    pub close_listen: Option<Close>,
}

/// The table of version 7.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NetV7 {
    /// The plugin's name, which `NCCL_NET` must equal.
    pub name: *const c_char,
    /// Initializes the plugin.
    pub init: Option<InitV4>,
    /// Number of devices.
    pub devices: Option<Devices>,
    /// Properties of a device.
    pub get_properties: Option<GetProperties<PropertiesV7>>,
    /// Creates a listener and its handle.
    pub listen: Option<ListenV4>,
    /// Connects to a handle; called again while it returns no communicator.
    pub connect: Option<ConnectV7>,
    /// Accepts a connection; called again while it returns no communicator.
    pub accept: Option<AcceptV7>,
    /// Registers memory.
    pub reg_mr: Option<RegMrV4>,
    /// Registers memory by a DMA-BUF descriptor.
    pub reg_mr_dma_buf: Option<RegMrDmaBuf>,
    /// Ends a registration.
    pub dereg_mr: Option<DeregMr>,
    /// Starts a send; no request: the plugin is busy.
    pub isend: Option<IsendV5>,
    /// Starts receives; no request: the plugin is busy.
    pub irecv: Option<IrecvV5>,
    /// Makes received data visible to the GPU.
    pub iflush: Option<IflushV5>,
    /// Whether a request has completed, and the bytes of each of its transfers.
    pub test: Option<Test>,
    /// Closes a sending communicator.
    pub close_send: Option<Close>,
    /// Closes a receiving communicator.
    pub close_recv: Option<Close>,
    /// Closes a listener.
    pub close_listen: Option<Close>,
    /// The registration as the GPU sees it.
    pub get_device_mr: Option<GetDeviceMr>,
    /// The GPU has consumed a receive.
    pub irecv_consumed: Option<IrecvConsumed>,
}

/// The table of version 8.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NetV8 {
    /// The plugin's name, which `NCCL_NET` must equal.
    pub name: *const c_char,
    /// Initializes the plugin.
    pub init: Option<InitV4>,
    /// Number of devices.
    pub devices: Option<Devices>,
    /// Properties of a device.
    pub get_properties: Option<GetProperties<PropertiesV8>>,
    /// Creates a listener and its handle.
    pub listen: Option<ListenV4>,
    /// Connects to a handle; called again while it returns no communicator.
    pub connect: Option<ConnectV7>,
    /// Accepts a connection; called again while it returns no communicator.
    pub accept: Option<AcceptV7>,
    /// Registers memory.
    pub reg_mr: Option<RegMrV8>,
    /// Registers memory by a DMA-BUF descriptor.
    pub reg_mr_dma_buf: Option<RegMrDmaBuf>,
    /// Ends a registration.
    pub dereg_mr: Option<DeregMr>,
    /// Starts a send; no request: the plugin is busy.
    pub isend: Option<IsendV5>,
    /// Starts receives; no request: the plugin is busy.
    pub irecv: Option<IrecvV5>,
    /// Makes received data visible to the GPU.
    pub iflush: Option<IflushV5>,
    /// Whether a request has completed, and the bytes of each of its transfers.
    pub test: Option<Test>,
    /// Closes a sending communicator.
    pub close_send: Option<Close>,
    /// Closes a receiving communicator.
    pub close_recv: Option<Close>,
    /// Closes a listener.
    pub close_listen: Option<Close>,
    /// The registration as the GPU sees it.
    pub get_device_mr: Option<GetDeviceMr>,
    /// The GPU has consumed a receive.
    pub irecv_consumed: Option<IrecvConsumed>,
}

/// The table of version 9.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NetV9 {
    /// The plugin's name, which `NCCL_NET` must equal.
    pub name: *const c_char,
    /// Initializes the plugin.
    pub init: Option<InitV4>,
    /// Number of devices.
    pub devices: Option<Devices>,
    /// Properties of a device.
    pub get_properties: Option<GetProperties<PropertiesV9>>,
    /// Creates a listener and its handle.
    pub listen: Option<ListenV4>,
    /// Connects to a handle; called again while it returns no communicator.
    pub connect: Option<ConnectV7>,
    /// Accepts a connection; called again while it returns no communicator.
    pub accept: Option<AcceptV7>,
    /// Registers memory.
    pub reg_mr: Option<RegMrV8>,
    /// Registers memory by a DMA-BUF descriptor.
    pub reg_mr_dma_buf: Option<RegMrDmaBuf>,
    /// Ends a registration.
    pub dereg_mr: Option<DeregMr>,
    /// Starts a send; no request: the plugin is busy.
    pub isend: Option<IsendV9>,
    /// Starts receives; no request: the plugin is busy.
    pub irecv: Option<IrecvV9>,
    /// Makes received data visible to the GPU.
    pub iflush: Option<IflushV5>,
    /// Whether a request has completed, and the bytes of each of its transfers.
    pub test: Option<Test>,
    /// Closes a sending communicator.
    pub close_send: Option<Close>,
    /// Closes a receiving communicator.
    pub close_recv: Option<Close>,
    /// Closes a listener.
    pub close_listen: Option<Close>,
    /// The registration as the GPU sees it.
    pub get_device_mr: Option<GetDeviceMr>,
    /// The GPU has consumed a receive.
    pub irecv_consumed: Option<IrecvConsumed>,
    /// Creates a virtual device.
    pub make_v_device: Option<MakeVDevice<4>>,
}

/// The table of version 10.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NetV10 {
    /// The plugin's name, which `NCCL_NET` must equal.
    pub name: *const c_char,
    /// Initializes the plugin.
    pub init: Option<InitV10>,
    /// Number of devices.
    pub devices: Option<Devices>,
    /// Properties of a device.
    pub get_properties: Option<GetProperties<PropertiesV9>>,
    /// Creates a listener and its handle.
    pub listen: Option<ListenV4>,
    /// Connects to a handle; called again while it returns no communicator.
    pub connect: Option<ConnectV10>,
    /// Accepts a connection; called again while it returns no communicator.
    pub accept: Option<AcceptV7>,
    /// Registers memory.
    pub reg_mr: Option<RegMrV8>,
    /// Registers memory by a DMA-BUF descriptor.
    pub reg_mr_dma_buf: Option<RegMrDmaBuf>,
    /// Ends a registration.
    pub dereg_mr: Option<DeregMr>,
    /// Starts a send; no request: the plugin is busy.
    pub isend: Option<IsendV10>,
    /// Starts receives; no request: the plugin is busy.
    pub irecv: Option<IrecvV10>,
    /// Makes received data visible to the GPU.
    pub iflush: Option<IflushV5>,
    /// Whether a request has completed, and the bytes of each of its transfers.
    pub test: Option<Test>,
    /// Closes a sending communicator.
    pub close_send: Option<Close>,
    /// Closes a receiving communicator.
    pub close_recv: Option<Close>,
    /// Closes a listener.
    pub close_listen: Option<Close>,
    /// The registration as the GPU sees it.
    pub get_device_mr: Option<GetDeviceMr>,
    /// The GPU has consumed a receive.
    pub irecv_consumed: Option<IrecvConsumed>,
    /// Creates a virtual device.
    pub make_v_device: Option<MakeVDevice<4>>,
}

/// The table of version 11.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NetV11 {
    /// The plugin's name, which `NCCL_NET` must equal.
    pub name: *const c_char,
    /// Initializes the plugin for a communicator.
    pub init: Option<InitV11>,
    /// Number of devices.
    pub devices: Option<Devices>,
    /// Properties of a device.
    pub get_properties: Option<GetProperties<PropertiesV11>>,
    /// Creates a listener and its handle.
    pub listen: Option<ListenV11>,
    /// Connects to a handle; called again while it returns no communicator.
    pub connect: Option<ConnectV11>,
    /// Accepts a connection; called again while it returns no communicator.
    pub accept: Option<AcceptV7>,
    /// Registers memory.
    pub reg_mr: Option<RegMrV8>,
    /// Registers memory by a DMA-BUF descriptor.
    pub reg_mr_dma_buf: Option<RegMrDmaBuf>,
    /// Ends a registration.
    pub dereg_mr: Option<DeregMr>,
    /// Starts a send; no request: the plugin is busy.
    pub isend: Option<IsendV10>,
    /// Starts receives; no request: the plugin is busy.
    pub irecv: Option<IrecvV10>,
    /// Makes received data visible to the GPU.
    pub iflush: Option<IflushV5>,
    /// Whether a request has completed, and the bytes of each of its transfers.
    pub test: Option<Test>,
    /// Closes a sending communicator.
    pub close_send: Option<Close>,
    /// Closes a receiving communicator.
    pub close_recv: Option<Close>,
    /// Closes a listener.
    pub close_listen: Option<Close>,
    /// The registration as the GPU sees it.
    pub get_device_mr: Option<GetDeviceMr>,
    /// The GPU has consumed a receive.
    pub irecv_consumed: Option<IrecvConsumed>,
    /// Creates a virtual device.
    pub make_v_device: Option<MakeVDevice<4>>,
    /// Ends what `init` began.
    pub finalize: Option<Close>,
    /// Announces the traffic to expect.
    pub set_net_attr: Option<SetNetAttr>,
}

/// The table of version 12.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NetV12 {
    /// The plugin's name, which `NCCL_NET` must equal.
    pub name: *const c_char,
    /// Initializes the plugin for a communicator.
    pub init: Option<InitV11>,
    /// Number of devices.
    pub devices: Option<Devices>,
    /// Properties of a device.
    pub get_properties: Option<GetProperties<PropertiesV12>>,
    /// Creates a listener and its handle.
    pub listen: Option<ListenV11>,
    /// Connects to a handle; called again while it returns no communicator.
    pub connect: Option<ConnectV11>,
    /// Accepts a connection; called again while it returns no communicator.
    pub accept: Option<AcceptV7>,
    /// Registers memory.
    pub reg_mr: Option<RegMrV8>,
    /// Registers memory by a DMA-BUF descriptor.
    pub reg_mr_dma_buf: Option<RegMrDmaBuf>,
    /// Ends a registration.
    pub dereg_mr: Option<DeregMr>,
    /// Starts a send; no request: the plugin is busy.
    pub isend: Option<IsendV10>,
    /// Starts receives; no request: the plugin is busy.
    pub irecv: Option<IrecvV10>,
    /// Makes received data visible to the GPU.
    pub iflush: Option<IflushV5>,
    /// Whether a request has completed, and the bytes of each of its transfers.
    pub test: Option<Test>,
    /// Closes a sending communicator.
    pub close_send: Option<Close>,
    /// Closes a receiving communicator.
    pub close_recv: Option<Close>,
    /// Closes a listener.
    pub close_listen: Option<Close>,
    /// The registration as the GPU sees it.
    pub get_device_mr: Option<GetDeviceMr>,
    /// The GPU has consumed a receive.
    pub irecv_consumed: Option<IrecvConsumed>,
    /// Creates a virtual device.
    pub make_v_device: Option<MakeVDevice<8>>,
    /// Ends what `init` began.
    pub finalize: Option<Close>,
    /// Announces the traffic to expect.
    pub set_net_attr: Option<SetNetAttr>,
}
