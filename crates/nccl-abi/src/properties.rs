//! What `getProperties` reports of a device, by version.

use std::ffi::{c_char, c_int};

/// The devices that a virtual device consists of.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct VirtualDevice<const MAX: usize> {
    /// Their number.
    pub count: c_int,
    /// Their indices.
    pub devices: [c_int; MAX],
}

macro_rules! properties {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        pub struct $name {
            /// The device's name, for logs.
            pub name: *mut c_char,
            /// The path of its PCI device in sysfs, or null.
            pub pci_path: *mut c_char,
            /// Identifies the hardware.
            pub guid: u64,
            /// The kinds of memory it supports.
            pub ptr_support: c_int,
            $($(#[$field_doc])* pub $field: $type,)*
        }
    };
}

properties! {
    /// Version 4.
    PropertiesV4 {
        /// Mbit/s.
        speed: c_int,
        /// The port.
        port: c_int,
        /// Maximum number of communicators.
        max_comms: c_int,
    }
}

properties! {
    /// Versions 5 and 6.
    PropertiesV6 {
        /// Mbit/s.
        speed: c_int,
        /// The port.
        port: c_int,
        /// Microseconds.
        latency: f32,
        /// Maximum number of communicators.
        max_comms: c_int,
        /// Maximum number of receives in one request.
        max_recvs: c_int,
    }
}

properties! {
    /// Version 7.
    PropertiesV7 {
        /// Mbit/s.
        speed: c_int,
        /// The port.
        port: c_int,
        /// Microseconds.
        latency: f32,
        /// Maximum number of communicators.
        max_comms: c_int,
        /// Maximum number of receives in one request.
        max_recvs: c_int,
        /// The kind of device.
        device_kind: c_int,
        /// Its version.
        device_version: c_int,
    }
}

properties! {
    /// Version 8.
    PropertiesV8 {
        /// Whether a registration is independent of the communicator.
        reg_is_global: c_int,
        /// Mbit/s.
        speed: c_int,
        /// The port.
        port: c_int,
        /// Microseconds.
        latency: f32,
        /// Maximum number of communicators.
        max_comms: c_int,
        /// Maximum number of receives in one request.
        max_recvs: c_int,
        /// The kind of device.
        device_kind: c_int,
        /// Its version.
        device_version: c_int,
    }
}

properties! {
    /// Versions 9 and 10.
    PropertiesV9 {
        /// Whether a registration is independent of the communicator.
        reg_is_global: c_int,
        /// Whether receives need a flush in any case.
        force_flush: c_int,
        /// Mbit/s.
        speed: c_int,
        /// The port.
        port: c_int,
        /// Microseconds.
        latency: f32,
        /// Maximum number of communicators.
        max_comms: c_int,
        /// Maximum number of receives in one request.
        max_recvs: c_int,
        /// The kind of device.
        device_kind: c_int,
        /// Its version.
        device_version: c_int,
        /// The devices it consists of.
        virtual_device: VirtualDevice<4>,
        /// Maximum bytes of a point-to-point transfer.
        max_p2p_bytes: usize,
        /// Maximum bytes of a transfer of a collective.
        max_coll_bytes: usize,
    }
}

properties! {
    /// Version 11.
    PropertiesV11 {
        /// Whether a registration is independent of the communicator.
        reg_is_global: c_int,
        /// Whether receives need a flush in any case.
        force_flush: c_int,
        /// Mbit/s.
        speed: c_int,
        /// The port.
        port: c_int,
        /// Microseconds.
        latency: f32,
        /// Maximum number of communicators.
        max_comms: c_int,
        /// Maximum number of receives in one request.
        max_recvs: c_int,
        /// The kind of device.
        device_kind: c_int,
        /// Its version.
        device_version: c_int,
        /// The devices it consists of.
        virtual_device: VirtualDevice<4>,
        /// Maximum bytes of a point-to-point transfer.
        max_p2p_bytes: usize,
        /// Maximum bytes of a transfer of a collective.
        max_coll_bytes: usize,
        /// Maximum number of requests in one multi-request.
        max_multi_request: c_int,
    }
}

properties! {
    /// Version 12.
    PropertiesV12 {
        /// Whether a registration is independent of the communicator.
        reg_is_global: c_int,
        /// Whether receives need a flush in any case.
        force_flush: c_int,
        /// Mbit/s.
        speed: c_int,
        /// The port.
        port: c_int,
        /// Microseconds.
        latency: f32,
        /// Maximum number of communicators.
        max_comms: c_int,
        /// Maximum number of receives in one request.
        max_recvs: c_int,
        /// The kind of device.
        device_kind: c_int,
        /// Its version.
        device_version: c_int,
        /// The devices it consists of.
        virtual_device: VirtualDevice<8>,
        /// Maximum bytes of a point-to-point transfer.
        max_p2p_bytes: usize,
        /// Maximum bytes of a transfer of a collective.
        max_coll_bytes: usize,
        /// Maximum number of requests in one multi-request.
        max_multi_request: c_int,
        /// The rail, -1 if undefined.
        rail_id: i16,
        /// The plane, -1 if undefined.
        plane_id: i16,
    }
}
