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

/// Declares the properties of some versions: by what each of them has beyond the fields of all.
macro_rules! properties {
    ($name:ident, $versions:literal, $($global:ident $($force_flush:ident)?)?,
     $($latency:ident $max_recvs:ident $(, $kind:ident $version:ident $(, $most:literal $(, $multi:ident $(, $rail:ident $plane:ident)?)?)?)?)?) => {
        #[doc = concat!("Of ", $versions, ".")]
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
            $(
                /// Whether a registration is independent of the communicator.
                pub $global: c_int,
                $(
                    /// Whether receives need a flush in any case.
                    pub $force_flush: c_int,
                )?
            )?
            /// Mbit/s.
            pub speed: c_int,
            /// The port.
            pub port: c_int,
            $(
                /// Microseconds.
                pub $latency: f32,
            )?
            /// Maximum number of communicators.
            pub max_comms: c_int,
            $(
                /// Maximum number of receives in one request.
                pub $max_recvs: c_int,
                $(
                    /// The kind of device.
                    pub $kind: c_int,
                    /// Its version.
                    pub $version: c_int,
                    $(
                        /// The devices it consists of.
                        pub virtual_device: VirtualDevice<$most>,
                        /// Maximum bytes of a point-to-point transfer.
                        pub max_p2p_bytes: usize,
                        /// Maximum bytes of a transfer of a collective.
                        pub max_coll_bytes: usize,
                        $(
                            /// Maximum number of requests in one multi-request.
                            pub $multi: c_int,
                            $(
                                /// The rail, -1 if undefined.
                                pub $rail: i16,
                                /// The plane, -1 if undefined.
                                pub $plane: i16,
                            )?
                        )?
                    )?
                )?
            )?
        }
    };
}

properties!(PropertiesV4, "version 4",,);
properties!(PropertiesV6, "versions 5 and 6",, latency max_recvs);
properties!(PropertiesV7, "version 7",, latency max_recvs, device_kind device_version);
properties!(PropertiesV8, "version 8", reg_is_global, latency max_recvs, device_kind device_version);
properties!(PropertiesV9, "versions 9 and 10", reg_is_global force_flush, latency max_recvs, device_kind device_version, 4);
properties!(PropertiesV11, "version 11", reg_is_global force_flush, latency max_recvs, device_kind device_version, 4,
    max_multi_request);
properties!(PropertiesV12, "version 12", reg_is_global force_flush, latency max_recvs, device_kind device_version, 8,
    max_multi_request, rail_id plane_id);
