//! libfabric's C interface as this crate uses it: functions that are resolved by name, and tables of functions.
//!
//! Written by hand from the headers of 1.17 to 2.6, for 64-bit targets. Most of libfabric's interface is not exported:
//! objects point to tables of functions, each of which begins with its size. A table here ends with the last function
//! that this crate calls, and [`table`] refuses a shorter one, so members that an older library lacks are never read.
//! Attributes grow at the end: the library allocates every [`Info`], and what the caller allocates is followed by zeros.
#![allow(unsafe_code, missing_docs)]

use std::ffi::{c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use libloading::Library;

/// `fi_addr_t`
pub type Address = u64;

/// The oldest interface that this crate was written for, and the newest that it asks for.
pub const OLDEST: u32 = version(1, 9);
/// See [`OLDEST`].
pub const NEWEST: u32 = version(1, 20);

/// `FI_VERSION`
pub const fn version(major: u32, minor: u32) -> u32 {
    major << 16 | minor
}

// Capabilities, and flags of operations.
pub const FI_MSG: u64 = 1 << 1;
pub const FI_RMA: u64 = 1 << 2;
pub const FI_WRITE: u64 = 1 << 9;
pub const FI_RECV: u64 = 1 << 10;
pub const FI_TRANSMIT: u64 = 1 << 11;
pub const FI_REMOTE_WRITE: u64 = 1 << 13;
pub const FI_REMOTE_CQ_DATA: u64 = 1 << 17;
pub const FI_COMPLETION: u64 = 1 << 24;
pub const FI_HMEM: u64 = 1 << 47;
/// Flag of `getinfo`: the node is the local address.
pub const FI_SOURCE: u64 = 1 << 57;
/// Flag of `getinfo`: the node is a numeric address.
pub const FI_NUMERICHOST: u64 = 1 << 55;

// Modes.
pub const FI_CONTEXT: u64 = 1 << 59;
pub const FI_CONTEXT2: u64 = 1 << 52;
pub const FI_RX_CQ_DATA: u64 = 1 << 56;

// `mr_mode`
pub const FI_MR_LOCAL: c_int = 1 << 2;
pub const FI_MR_VIRT_ADDR: c_int = 1 << 4;
pub const FI_MR_ALLOCATED: c_int = 1 << 5;
pub const FI_MR_PROV_KEY: c_int = 1 << 6;
pub const FI_MR_ENDPOINT: c_int = 1 << 9;
pub const FI_MR_HMEM: c_int = 1 << 10;

// `fi_hmem_iface`
pub const FI_HMEM_SYSTEM: c_int = 0;
pub const FI_HMEM_CUDA: c_int = 1;

// `enum`s.
pub const FI_EP_RDM: c_int = 3;
pub const FI_THREAD_DOMAIN: c_int = 3;
pub const FI_CQ_FORMAT_DATA: c_int = 3;
pub const FI_WAIT_NONE: c_int = 0;
pub const FI_WAIT_FD: c_int = 3;
pub const FI_AV_UNSPEC: c_int = 0;

// `fi_control`
pub const FI_GETWAIT: c_int = 5;
pub const FI_ENABLE: c_int = 6;

// Codes beyond errno.
pub const FI_EAGAIN: isize = libc::EAGAIN as isize;
pub const FI_EAVAIL: isize = 259;
pub const FI_ENODATA: c_int = libc::ENODATA;
pub const FI_ENOKEY: c_int = 266;

/// `fid`: the head of every object.
#[repr(C)]
pub struct Fid {
    pub class: usize,
    pub context: *mut c_void,
    pub ops: *const Ops,
}

/// `fi_ops`
#[repr(C)]
pub struct Ops {
    pub size: usize,
    pub close: Option<unsafe extern "C" fn(*mut Fid) -> c_int>,
    pub bind: Option<unsafe extern "C" fn(*mut Fid, *mut Fid, u64) -> c_int>,
    pub control: Option<unsafe extern "C" fn(*mut Fid, c_int, *mut c_void) -> c_int>,
}

/// `fi_info`: allocated by the library only.
#[repr(C)]
pub struct Info {
    pub next: *mut Info,
    pub caps: u64,
    pub mode: u64,
    pub addr_format: u32,
    pub src_addrlen: usize,
    pub dest_addrlen: usize,
    pub src_addr: *mut c_void,
    pub dest_addr: *mut c_void,
    pub handle: *mut Fid,
    pub tx_attr: *mut TxAttr,
    pub rx_attr: *mut RxAttr,
    pub ep_attr: *mut EpAttr,
    pub domain_attr: *mut DomainAttr,
    pub fabric_attr: *mut FabricAttr,
    pub nic: *mut Nic,
}

/// `fi_tx_attr`
#[repr(C)]
pub struct TxAttr {
    pub caps: u64,
    pub mode: u64,
    pub op_flags: u64,
    pub msg_order: u64,
    pub comp_order: u64,
    pub inject_size: usize,
    pub size: usize,
    pub iov_limit: usize,
    pub rma_iov_limit: usize,
}

/// `fi_rx_attr`
#[repr(C)]
pub struct RxAttr {
    pub caps: u64,
    pub mode: u64,
    pub op_flags: u64,
    pub msg_order: u64,
    pub comp_order: u64,
    pub total_buffered_recv: usize,
    pub size: usize,
    pub iov_limit: usize,
}

/// The start of `fi_ep_attr`.
#[repr(C)]
pub struct EpAttr {
    pub kind: c_int,
    pub protocol: u32,
    pub protocol_version: u32,
    pub max_msg_size: usize,
    pub msg_prefix_size: usize,
}

/// The start of `fi_domain_attr`.
#[repr(C)]
pub struct DomainAttr {
    pub domain: *mut Domain,
    pub name: *mut c_char,
    pub threading: c_int,
    pub control_progress: c_int,
    pub data_progress: c_int,
    pub resource_mgmt: c_int,
    pub av_type: c_int,
    pub mr_mode: c_int,
    pub mr_key_size: usize,
    pub cq_data_size: usize,
    pub cq_cnt: usize,
}

/// The start of `fi_fabric_attr`.
#[repr(C)]
pub struct FabricAttr {
    pub fabric: *mut Fabric,
    pub name: *mut c_char,
    pub prov_name: *mut c_char,
    pub prov_version: u32,
    pub api_version: u32,
}

/// `fid_nic`
#[repr(C)]
pub struct Nic {
    pub fid: Fid,
    pub device_attr: *mut DeviceAttr,
    pub bus_attr: *mut BusAttr,
    pub link_attr: *mut LinkAttr,
}

/// The start of `fi_device_attr`.
#[repr(C)]
pub struct DeviceAttr {
    pub name: *mut c_char,
}

/// `fi_bus_attr` of PCI.
#[repr(C)]
pub struct BusAttr {
    /// 0: not known; 1: PCI.
    pub bus_type: c_int,
    pub domain_id: u16,
    pub bus_id: u8,
    pub device_id: u8,
    pub function_id: u8,
}

/// `fi_link_attr`
#[repr(C)]
pub struct LinkAttr {
    pub address: *mut c_char,
    pub mtu: usize,
    /// Bits per second.
    pub speed: usize,
    /// 0: not known; 1: down; 2: up.
    pub state: c_int,
    pub network_type: *mut c_char,
}

macro_rules! object {
    ($(#[$doc:meta])* $name:ident { $($field:ident: $ty:ty,)* }) => {
        $(#[$doc])*
        #[repr(C)]
        pub struct $name {
            pub fid: Fid,
            $(pub $field: $ty,)*
        }
    };
}

object! {
    /// `fid_fabric`
    Fabric { ops: *const FabricOps, api_version: u32, }
}
object! {
    /// `fid_domain`
    Domain { ops: *const DomainOps, mr: *const MrOps, }
}
object! {
    /// `fid_mr`
    Mr { mem_desc: *mut c_void, key: u64, }
}
object! {
    /// `fid_ep`
    Ep {
        ops: *const EpOps,
        cm: *const CmOps,
        msg: *const MsgOps,
        rma: *const RmaOps,
        tagged: *const c_void,
        atomic: *const c_void,
        collective: *const c_void,
    }
}
object! {
    /// `fid_av`
    Av { ops: *const AvOps, }
}
object! {
    /// `fid_cq`
    Cq { ops: *const CqOps, }
}
object! {
    /// `fid_eq`
    Eq { ops: *const EqOps, }
}

/// A member of a table that this crate does not call.
pub type Unused = Option<unsafe extern "C" fn()>;

/// The start of `fi_ops_fabric`.
#[repr(C)]
pub struct FabricOps {
    pub size: usize,
    pub domain: Option<unsafe extern "C" fn(*mut Fabric, *mut Info, *mut *mut Domain, *mut c_void) -> c_int>,
    pub passive_ep: Unused,
    pub eq_open: Option<unsafe extern "C" fn(*mut Fabric, *mut EqAttr, *mut *mut Eq, *mut c_void) -> c_int>,
    pub wait_open: Unused,
    pub trywait: Option<unsafe extern "C" fn(*mut Fabric, *mut *mut Fid, c_int) -> c_int>,
}

/// The start of `fi_ops_domain`.
#[repr(C)]
pub struct DomainOps {
    pub size: usize,
    pub av_open: Option<unsafe extern "C" fn(*mut Domain, *mut AvAttr, *mut *mut Av, *mut c_void) -> c_int>,
    pub cq_open: Option<unsafe extern "C" fn(*mut Domain, *mut CqAttr, *mut *mut Cq, *mut c_void) -> c_int>,
    pub endpoint: Option<unsafe extern "C" fn(*mut Domain, *mut Info, *mut *mut Ep, *mut c_void) -> c_int>,
}

/// `fi_ops_mr`
#[repr(C)]
pub struct MrOps {
    pub size: usize,
    pub reg: Option<
        unsafe extern "C" fn(*mut Fid, *const c_void, usize, u64, u64, u64, u64, *mut *mut Mr, *mut c_void) -> c_int,
    >,
    pub regv: Unused,
    pub regattr: Option<unsafe extern "C" fn(*mut Fid, *const MrAttr, u64, *mut *mut Mr) -> c_int>,
}

/// The start of `fi_ops_ep`.
#[repr(C)]
pub struct EpOps {
    pub size: usize,
    pub cancel: Unused,
    pub getopt: Unused,
    pub setopt: Option<unsafe extern "C" fn(*mut Fid, c_int, c_int, *const c_void, usize) -> c_int>,
}

/// The start of `fi_ops_cm`.
#[repr(C)]
pub struct CmOps {
    pub size: usize,
    pub setname: Unused,
    pub getname: Option<unsafe extern "C" fn(*mut Fid, *mut c_void, *mut usize) -> c_int>,
}

/// The start of `fi_ops_msg`.
#[repr(C)]
pub struct MsgOps {
    pub size: usize,
    pub recv: Option<unsafe extern "C" fn(*mut Ep, *mut c_void, usize, *mut c_void, Address, *mut c_void) -> isize>,
}

/// The start of `fi_ops_rma`.
#[repr(C)]
pub struct RmaOps {
    pub size: usize,
    pub read: Unused,
    pub readv: Unused,
    pub readmsg: Unused,
    pub write: Unused,
    pub writev: Unused,
    pub writemsg: Option<unsafe extern "C" fn(*mut Ep, *const MsgRma, u64) -> isize>,
    pub inject: Unused,
    pub writedata: Option<
        unsafe extern "C" fn(*mut Ep, *const c_void, usize, *mut c_void, u64, Address, u64, u64, *mut c_void) -> isize,
    >,
    pub injectdata: Option<unsafe extern "C" fn(*mut Ep, *const c_void, usize, u64, Address, u64, u64) -> isize>,
}

/// The start of `fi_ops_av`.
#[repr(C)]
pub struct AvOps {
    pub size: usize,
    pub insert: Option<unsafe extern "C" fn(*mut Av, *const c_void, usize, *mut Address, u64, *mut c_void) -> c_int>,
    pub insertsvc: Unused,
    pub insertsym: Unused,
    pub remove: Option<unsafe extern "C" fn(*mut Av, *mut Address, usize, u64) -> c_int>,
}

/// `fi_ops_cq`
#[repr(C)]
pub struct CqOps {
    pub size: usize,
    pub read: Option<unsafe extern "C" fn(*mut Cq, *mut c_void, usize) -> isize>,
    pub readfrom: Unused,
    pub readerr: Option<unsafe extern "C" fn(*mut Cq, *mut CqErrEntry, u64) -> isize>,
    pub sread: Unused,
    pub sreadfrom: Unused,
    pub signal: Unused,
    pub strerror: Option<unsafe extern "C" fn(*mut Cq, c_int, *const c_void, *mut c_char, usize) -> *const c_char>,
}

/// The start of `fi_ops_eq`.
#[repr(C)]
pub struct EqOps {
    pub size: usize,
    pub read: Option<unsafe extern "C" fn(*mut Eq, *mut u32, *mut c_void, usize, u64) -> isize>,
    pub readerr: Option<unsafe extern "C" fn(*mut Eq, *mut EqErrEntry, u64) -> isize>,
}

/// `fi_eq_attr`
#[repr(C)]
pub struct EqAttr {
    pub size: usize,
    pub flags: u64,
    pub wait_obj: c_int,
    pub signaling_vector: c_int,
    pub wait_set: *mut c_void,
}

/// `fi_av_attr`
#[repr(C)]
pub struct AvAttr {
    pub kind: c_int,
    pub rx_ctx_bits: c_int,
    pub count: usize,
    pub ep_per_node: usize,
    pub name: *const c_char,
    pub map_addr: *mut c_void,
    pub flags: u64,
}

/// `fi_cq_attr`, and room for what follows in later versions.
#[repr(C)]
pub struct CqAttr {
    pub size: usize,
    pub flags: u64,
    pub format: c_int,
    pub wait_obj: c_int,
    pub signaling_vector: c_int,
    pub wait_cond: c_int,
    pub wait_set: *mut c_void,
    pub later: [u64; 4],
}

/// `fi_mr_attr`, and room for what follows in later versions.
#[repr(C)]
pub struct MrAttr {
    pub mr_iov: *const libc::iovec,
    pub iov_count: usize,
    pub access: u64,
    pub offset: u64,
    pub requested_key: u64,
    pub context: *mut c_void,
    pub auth_key_size: usize,
    pub auth_key: *mut u8,
    pub iface: c_int,
    /// The CUDA device.
    pub device: u64,
    pub later: [u64; 8],
}

/// `fi_rma_iov`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RmaIov {
    pub addr: u64,
    pub len: usize,
    pub key: u64,
}

/// `fi_msg_rma`
#[repr(C)]
pub struct MsgRma {
    pub msg_iov: *const libc::iovec,
    pub desc: *mut *mut c_void,
    pub iov_count: usize,
    pub addr: Address,
    pub rma_iov: *const RmaIov,
    pub rma_iov_count: usize,
    pub context: *mut c_void,
    pub data: u64,
}

/// `fi_cq_data_entry`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CqDataEntry {
    pub op_context: *mut c_void,
    pub flags: u64,
    pub len: usize,
    pub buf: *mut c_void,
    pub data: u64,
}

impl CqDataEntry {
    pub const EMPTY: CqDataEntry =
        CqDataEntry { op_context: std::ptr::null_mut(), flags: 0, len: 0, buf: std::ptr::null_mut(), data: 0 };
}

/// `fi_cq_err_entry`, and room for what follows in later versions.
#[repr(C)]
pub struct CqErrEntry {
    pub op_context: *mut c_void,
    pub flags: u64,
    pub len: usize,
    pub buf: *mut c_void,
    pub data: u64,
    pub tag: u64,
    pub olen: usize,
    pub err: c_int,
    pub prov_errno: c_int,
    pub err_data: *mut c_void,
    /// On entry the room at `err_data`; 0: the provider's own memory is returned, valid until the next read.
    pub err_data_size: usize,
    pub later: [u64; 4],
}

/// `fi_eq_err_entry`, and room for what follows in later versions.
#[repr(C)]
pub struct EqErrEntry {
    pub fid: *mut Fid,
    pub context: *mut c_void,
    pub data: u64,
    pub err: c_int,
    pub prov_errno: c_int,
    pub err_data: *mut c_void,
    pub err_data_size: usize,
    pub later: [u64; 4],
}

/// `fi_context2`: memory of the provider's, at the head of each operation's context.
#[repr(C, align(64))]
#[derive(Clone, Copy, Default)]
pub struct Context([u64; 8]);

/// A table of functions, which begins with its size in bytes.
///
/// # Safety
/// The type must be `repr(C)`, begin with that size as a `usize`, and contain nothing but optional functions after it.
pub unsafe trait Table: Sized {
    /// Its name in C.
    const NAME: &'static str;
}

macro_rules! tables {
    ($($ty:ident = $name:literal;)*) => {
        $(
            // SAFETY: as defined above.
            unsafe impl Table for $ty {
                const NAME: &'static str = $name;
            }
        )*
    };
}

tables! {
    Ops = "fi_ops";
    FabricOps = "fi_ops_fabric";
    DomainOps = "fi_ops_domain";
    MrOps = "fi_ops_mr";
    EpOps = "fi_ops_ep";
    CmOps = "fi_ops_cm";
    MsgOps = "fi_ops_msg";
    RmaOps = "fi_ops_rma";
    AvOps = "fi_ops_av";
    CqOps = "fi_ops_cq";
    EqOps = "fi_ops_eq";
}

/// A table, once its size was found to hold all members that are declared here.
///
/// # Errors
/// What is wrong with it.
///
/// # Safety
/// `table` must be null, or a table of that kind, of the size that it begins with, which lives as long as `'a`.
pub unsafe fn table<'a, T: Table>(table: *const T) -> Result<&'a T, String> {
    let Some(known) = NonNull::new(table.cast_mut()) else { return Err(format!("it has no {}", T::NAME)) };
    // SAFETY: a table begins with its size, whatever follows.
    let size = unsafe { known.cast::<usize>().read() };
    if size < size_of::<T>() {
        return Err(format!("its {} has {size} bytes, of {}", T::NAME, size_of::<T>()));
    }
    // SAFETY: all members are there; functions that are not are null, which `Option` allows.
    Ok(unsafe { known.as_ref() })
}

macro_rules! functions {
    ($( $name:ident: fn($($arg:ty),* $(,)?) $(-> $out:ty)?; )+) => {
        /// The functions that libfabric exports.
        pub struct Raw {
            $( pub $name: unsafe extern "C" fn($($arg),*) $(-> $out)?, )+
            /// Never unloaded: providers have threads and exit handlers.
            _library: ManuallyDrop<Library>,
        }

        impl Raw {
            /// Resolves all functions.
            ///
            /// # Errors
            /// The name of the first one that the library lacks.
            pub fn new(library: Library) -> Result<Raw, &'static str> {
                Ok(Raw {
                    $(
                        // SAFETY: the function of that name has this type in every version from 1.0 on.
                        $name: *unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }
                            .map_err(|_| stringify!($name))?,
                    )+
                    _library: ManuallyDrop::new(library),
                })
            }
        }
    };
}

functions! {
    fi_getinfo: fn(u32, *const c_char, *const c_char, u64, *const Info, *mut *mut Info) -> c_int;
    fi_freeinfo: fn(*mut Info);
    fi_dupinfo: fn(*const Info) -> *mut Info;
    fi_fabric: fn(*mut FabricAttr, *mut *mut Fabric, *mut c_void) -> c_int;
    fi_strerror: fn(c_int) -> *const c_char;
    fi_version: fn() -> u32;
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    /// As the C compiler lays them out, x86-64 and aarch64.
    #[test]
    fn members_are_where_c_has_them() {
        assert_eq!((size_of::<Info>(), offset_of!(Info, tx_attr), offset_of!(Info, nic)), (120, 72, 112));
        assert_eq!((offset_of!(TxAttr, inject_size), offset_of!(TxAttr, rma_iov_limit)), (40, 64));
        assert_eq!((offset_of!(RxAttr, size), offset_of!(RxAttr, iov_limit)), (48, 56));
        assert_eq!((offset_of!(EpAttr, max_msg_size), offset_of!(EpAttr, msg_prefix_size)), (16, 24));
        let domain = (offset_of!(DomainAttr, threading), offset_of!(DomainAttr, mr_mode));
        assert_eq!((domain, offset_of!(DomainAttr, cq_data_size)), ((16, 36), 48));
        assert_eq!((offset_of!(FabricAttr, prov_name), offset_of!(FabricAttr, api_version)), (16, 28));
        assert_eq!((offset_of!(Nic, link_attr), offset_of!(LinkAttr, state)), (40, 24));
        assert_eq!((offset_of!(BusAttr, domain_id), size_of::<BusAttr>()), (4, 12));
        assert_eq!((size_of::<Fid>(), offset_of!(Ops, control)), (24, 24));
        assert_eq!((offset_of!(Fabric, api_version), size_of::<Fabric>()), (32, 40));
        assert_eq!((offset_of!(Domain, mr), size_of::<Domain>()), (32, 40));
        assert_eq!((offset_of!(Mr, key), size_of::<Mr>()), (32, 40));
        assert_eq!((offset_of!(Ep, rma), size_of::<Ep>()), (48, 80));
        assert_eq!((offset_of!(FabricOps, eq_open), offset_of!(FabricOps, trywait)), (24, 40));
        assert_eq!((offset_of!(DomainOps, cq_open), offset_of!(DomainOps, endpoint)), (16, 24));
        assert_eq!((offset_of!(MrOps, regattr), size_of::<MrOps>()), (24, 32));
        assert_eq!((offset_of!(EpOps, setopt), offset_of!(CmOps, getname)), (24, 16));
        assert_eq!((offset_of!(RmaOps, writemsg), offset_of!(RmaOps, injectdata)), (48, 72));
        assert_eq!((offset_of!(AvOps, insert), offset_of!(AvOps, remove)), (8, 32));
        let cq = (offset_of!(CqOps, readerr), offset_of!(CqOps, strerror), size_of::<CqOps>());
        assert_eq!(cq, (24, 56, 64));
        assert_eq!((offset_of!(EqAttr, wait_obj), size_of::<EqAttr>()), (16, 32));
        assert_eq!((offset_of!(AvAttr, count), offset_of!(AvAttr, flags), size_of::<AvAttr>()), (8, 40, 48));
        assert_eq!((offset_of!(CqAttr, format), offset_of!(CqAttr, wait_set), offset_of!(CqAttr, later)), (16, 32, 40));
        assert_eq!((offset_of!(MrAttr, requested_key), offset_of!(MrAttr, device)), (32, 72));
        assert_eq!((size_of::<RmaIov>(), size_of::<MsgRma>(), offset_of!(MsgRma, data)), (24, 64, 56));
        assert_eq!((size_of::<CqDataEntry>(), offset_of!(CqDataEntry, data)), (40, 32));
        assert_eq!((offset_of!(CqErrEntry, err), offset_of!(CqErrEntry, later)), (56, 80));
        assert_eq!((offset_of!(EqErrEntry, err), offset_of!(EqErrEntry, later)), (24, 48));
        assert_eq!(size_of::<Context>(), 64);
    }

    #[test]
    fn a_table_that_lacks_members_is_refused_before_they_are_read() {
        let short = CmOps { size: 16, setname: None, getname: None };
        // SAFETY: it is as long as its type.
        let error = unsafe { table(&raw const short) }.err().expect("too short");
        assert!(error.contains("fi_ops_cm has 16 bytes, of 24"), "{error}");
        // SAFETY: null.
        let error = unsafe { table::<CqOps>(std::ptr::null()) }.err().expect("none");
        assert!(error.contains("no fi_ops_cq"), "{error}");
        let whole = CmOps { size: 80, setname: None, getname: None };
        // SAFETY: all that is declared is there.
        assert!(unsafe { table(&raw const whole) }.is_ok());
    }
}
