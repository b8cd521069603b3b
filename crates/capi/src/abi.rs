//! Structs and numbers as C has them. The headers in `include` declare the same; `abi.txt` has the layouts, with which
//! tests of both languages compare.

use std::ffi::{c_char, c_void};
use std::mem::{MaybeUninit, size_of};

use crossrail_types::{Error, ErrorKind, Result};

pub(crate) const OK: i32 = 0;
pub(crate) const PENDING: i32 = 1;
/// Numbers of errors beyond those of [`ErrorKind`].
pub(crate) const INTERNAL: i32 = -16;
pub(crate) const BUSY: i32 = -17;
pub(crate) const INTERRUPTED: i32 = -18;

pub(crate) const DEFAULT: i64 = -1;
pub(crate) const TEXT: i32 = 0;
pub(crate) const JSON: i32 = 1;
pub(crate) const READ: i32 = 0;
pub(crate) const WRITE: i32 = 1;

pub(crate) const NO_ENVIRONMENT: u32 = 1;
pub(crate) const NO_UNIX: u32 = 2;
pub(crate) const NO_BACKGROUND: u32 = 4;
pub(crate) const ADMIT: u32 = 8;
pub(crate) const ON_STREAM: u32 = 16;
pub(crate) const IMM: u32 = 32;
pub(crate) const QUEUE: u32 = 64;
pub(crate) const NOTICE: u32 = 128;
pub(crate) const GIVEN_RANK: u32 = 256;
pub(crate) const GIVEN_LOCAL_RANK: u32 = 512;
pub(crate) const MASK_LOST: u32 = 1024;
pub(crate) const NO_PREREDUCE: u32 = 2048;
pub(crate) const NO_SHARING: u32 = 4096;
pub(crate) const MASKED: u32 = 8192;
pub(crate) const ONCE_PER_NODE: u32 = 16384;
pub(crate) const BETWEEN_NODES: u32 = 32768;
pub(crate) const SEND_ONLY: u32 = 65536;
pub(crate) const COUNTS: u32 = 131_072;
pub(crate) const IDS_32: u32 = 262_144;

pub(crate) const BF16: u32 = 0;
pub(crate) const FP8: u32 = 1;
pub(crate) const FP8_POWER2: u32 = 2;
pub(crate) const FP8_UE8M0: u32 = 3;
pub(crate) const WIRE_BF16: u32 = 0;
pub(crate) const WIRE_FP8: u32 = 2;
/// Layouts: a bit of the layouts that a buffer has.
pub(crate) const BY_EXPERT: u32 = 1;
pub(crate) const BY_RANK: u32 = 2;

/// Bytes of a key in C; the rest is zero.
pub(crate) const KEY_LEN: usize = 64;
/// No struct is larger: a size beyond it was never set.
const SIZE_MAX: usize = 4096;

/// A struct of C's that begins with its size, `struct_size`.
///
/// # Safety
/// `repr(C)`, beginning with that as a `u32`; all zeros is a valid value, and so is any pattern of bits.
pub(crate) unsafe trait Sized32: Copy {}

macro_rules! structs {
    ($($(#[$doc:meta])* $name:ident / $c:literal { $($field:ident: $type:ty,)+ })+) => {
        $(
            $(#[$doc])*
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub(crate) struct $name { $(pub(crate) $field: $type,)+ }
        )+

        /// Each struct's name in C, its size, and its fields with their offsets, as `abi.txt` has them.
        #[cfg(test)]
        fn layouts() -> Vec<String> {
            vec![$({
                let fields = [$(format!(" {}@{}", stringify!($field), std::mem::offset_of!($name, $field)),)+];
                format!("struct {} {}{}", $c, size_of::<$name>(), fields.concat())
            },)+]
        }
    };
}

structs! {
    XrailError / "xrail_error" {
        struct_size: u32, result: i32, os_error: i32, reserved: i32, done: u64, total: u64, waited_us: i64,
        reason: *const c_char, operation: *const c_char, detail: *const c_char, peer: *const c_char,
        lane: *const c_char, hint: *const c_char, text: *const c_char,
    }
    XrailSetting / "xrail_setting" { name: *const c_char, value: *const c_char, }
    ContextOptions / "xrail_context_options" {
        struct_size: u32, flags: u32, settings: *const XrailSetting, setting_count: usize,
    }
    WorkerOptions / "xrail_worker_options" {
        struct_size: u32, flags: u32, name: *const c_char, listen: *const *const c_char, listen_count: usize,
        linger_us: i64,
    }
    ConnectOptions / "xrail_connect_options" { struct_size: u32, flags: u32, require: *const c_char, }
    OpOptions / "xrail_op_options" {
        struct_size: u32, flags: u32, device: u32, imm: u32, stream: *mut c_void, user: *mut c_void,
    }
    MoveOptions / "xrail_move_options" {
        struct_size: u32, flags: u32, local_index: *const u32, remote_index: *const u32, local_count: usize,
        remote_count: usize, notice: *const c_void, notice_size: usize, imm: u32, reserved: u32,
    }
    StartOptions / "xrail_start_options" {
        struct_size: u32, flags: u32, first: u64, last: u64, notice: *const c_void, notice_size: usize,
        stream: *mut c_void, user: *mut c_void,
    }
    Key / "xrail_key" { bytes: [u8; KEY_LEN], }
    Row / "xrail_row" { address: u64, size: u64, stride: u64, count: u64, }
    Receipt / "xrail_receipt" {
        struct_size: u32, reserved: u32, bytes: u64, tag: u64, match_us: f64, window_us: f64, wire_us: f64,
        copy_us: f64,
    }
    Notice / "xrail_notice" { peer: *const c_char, data: *const c_void, size: usize, endpoint: u64, }
    Finished / "xrail_finished" { request: *mut c_void, user: *mut c_void, }
    GroupOptions / "xrail_group_options" {
        struct_size: u32, flags: u32, name: *const c_char, store: *const c_char, node: *const c_char, rank: u32,
        size: u32, local_rank: u32, reserved: u32, lease_us: i64, timeout_us: i64,
    }
    Bytes / "xrail_bytes" { data: *const c_void, size: usize, }
    ExpertsOptions / "xrail_experts_options" {
        struct_size: u32, flags: u32, name: *const c_char, max_tokens: u64, hidden: u64, experts: u64, topk: u32,
        ranks: u32, dtype: u32, layouts: u32, timeout_us: i64, device: u32, num_sms: u32, regions: u32,
        node_ranks: u32,
    }
    DispatchOptions / "xrail_dispatch_options" {
        struct_size: u32, flags: u32, layout: u32, alignment: u32, repeated: *const c_void,
    }
    CombineOptions / "xrail_combine_options" {
        struct_size: u32, flags: u32, topk_weights: *const f32, bias: *const c_void, bias2: *const c_void,
    }
    ExchangeReceipt / "xrail_exchange_receipt" {
        struct_size: u32, missing: u32, logical_bytes: u64, wire_bytes: u64, network_bytes: u64, cast_us: f64,
        copy_us: f64, sum_us: f64, wait_us: f64, total_us: f64,
    }
    Delivered / "xrail_delivered" {
        struct_size: u32, layout: u32, dtype: u32, experts: u32, places: usize, rows: *mut c_void, rows_size: usize,
        scales: *mut c_void, scales_size: usize, counts: *const i32, ranges: *const i64, offsets: *const i64,
        topk_idx: *const i64, topk_weights: *const f32,
    }
    GpuDispatchOptions / "xrail_gpu_dispatch_options" {
        struct_size: u32, flags: u32, layout: u32, alignment: u32, stream: *mut c_void, repeated: *const c_void,
        x_scales: *const c_void, rows: *mut c_void, scales: *mut c_void, counts: *mut i32, ranges: *mut i64,
        sources: *mut i32, offsets: *mut i64, stats: *mut i32, waits: *mut i64, max_rows: u64,
    }
    GpuCombineOptions / "xrail_gpu_combine_options" {
        struct_size: u32, flags: u32, stream: *mut c_void, topk_weights: *const f32, bias: *const c_void,
        bias2: *const c_void, weight_sums: *mut f32, waits: *mut i64, wire: u32, reserved: u32,
    }
}

// SAFETY: they begin with their size, and hold numbers and raw pointers.
unsafe impl Sized32 for ContextOptions {}
// SAFETY: as above.
unsafe impl Sized32 for WorkerOptions {}
// SAFETY: as above.
unsafe impl Sized32 for ConnectOptions {}
// SAFETY: as above.
unsafe impl Sized32 for OpOptions {}
// SAFETY: as above.
unsafe impl Sized32 for MoveOptions {}
// SAFETY: as above.
unsafe impl Sized32 for StartOptions {}
// SAFETY: as above.
unsafe impl Sized32 for Receipt {}
// SAFETY: as above.
unsafe impl Sized32 for GroupOptions {}
// SAFETY: as above.
unsafe impl Sized32 for ExpertsOptions {}
// SAFETY: as above.
unsafe impl Sized32 for DispatchOptions {}
// SAFETY: as above.
unsafe impl Sized32 for CombineOptions {}
// SAFETY: as above.
unsafe impl Sized32 for ExchangeReceipt {}
// SAFETY: as above.
unsafe impl Sized32 for Delivered {}
// SAFETY: as above.
unsafe impl Sized32 for GpuDispatchOptions {}
// SAFETY: as above.
unsafe impl Sized32 for GpuCombineOptions {}

fn usage(operation: &str, detail: String) -> Error {
    Error::new(ErrorKind::Usage, operation, detail)
}

/// All zeros.
pub(crate) fn zeroed<T: Sized32>() -> T {
    // SAFETY: a valid value by the trait's contract.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

/// The size that the caller has set.
///
/// # Safety
/// `at` points to a readable `u32`.
unsafe fn size_at(operation: &str, at: *const u32) -> Result<usize> {
    // SAFETY: by the contract; it may be in the middle of packed memory.
    let size = unsafe { at.read_unaligned() } as usize;
    if (size_of::<u64>()..=SIZE_MAX).contains(&size) {
        return Ok(size);
    }
    Err(usage(operation, format!("a struct_size of {size}")).with_hint("set it to the struct's sizeof: XRAIL_INIT"))
}

/// Checks the size of a struct that [`write`] is to fill in.
///
/// # Errors
/// `Usage`: no size.
///
/// # Safety
/// As [`write`].
pub(crate) unsafe fn check_size<T: Sized32>(operation: &str, at: *const T) -> Result<()> {
    // SAFETY: by the contract.
    if at.is_null() { Ok(()) } else { unsafe { size_at(operation, at.cast()) }.map(drop) }
}

/// Options of this or another version of the header; null: all zeros. `flags`: those that have a meaning here.
///
/// # Errors
/// `Usage`: no size, a flag or a field that this version does not know.
///
/// # Safety
/// `at` is null, or points to as many bytes as its first word says.
#[inline]
pub(crate) unsafe fn read<T: Sized32>(operation: &str, at: *const T, flags: u32) -> Result<T> {
    if at.is_null() {
        return Ok(zeroed());
    }
    // SAFETY: not null, so by the contract.
    unsafe { read_at_length(operation, at, flags) }
}

/// [`read`] of what is there.
///
/// # Safety
/// As [`read`].
unsafe fn read_at_length<T: Sized32>(operation: &str, at: *const T, flags: u32) -> Result<T> {
    // SAFETY: the first word is there.
    let size = unsafe { size_at(operation, at.cast()) }?;
    let mut value: T = zeroed();
    let known = size.min(size_of::<T>());
    // SAFETY: the caller's struct has `size` bytes, ours at least `known`; any bits are a value of ours.
    unsafe { std::ptr::copy_nonoverlapping(at.cast::<u8>(), (&raw mut value).cast::<u8>(), known) };
    // SAFETY: as above.
    let beyond = unsafe { std::slice::from_raw_parts(at.cast::<u8>().add(known), size - known) };
    if beyond.iter().any(|byte| *byte != 0) {
        let detail = format!("a struct of {size} bytes sets a field that this library, {known} bytes, does not know");
        return Err(usage(operation, detail).with_hint("leave it zero, or use a newer libcrossrail.so"));
    }
    // SAFETY: options begin with two words, the second their flags, by `read`'s use.
    let set = unsafe { (&raw const value).cast::<u32>().add(1).read() };
    match set & !flags {
        0 => Ok(value),
        unknown => Err(usage(operation, format!("flag {unknown:#x} has no meaning here"))),
    }
}

/// Writes a struct that the caller has allotted, with its size set; null: not wanted. The size stays.
///
/// # Errors
/// `Usage`: no size.
///
/// # Safety
/// As [`read`], writable.
pub(crate) unsafe fn write<T: Sized32>(operation: &str, at: *mut T, value: &T) -> Result<()> {
    if at.is_null() {
        return Ok(());
    }
    // SAFETY: the first word is there.
    let size = unsafe { size_at(operation, at.cast()) }?;
    let (head, known) = (size_of::<u32>(), size.min(size_of::<T>()));
    let from = std::ptr::from_ref(value).cast::<u8>();
    // SAFETY: both have `known` bytes, of which the first word is left alone.
    unsafe { std::ptr::copy_nonoverlapping(from.add(head), at.cast::<u8>().add(head), known - head) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_those_of_the_committed_list() {
        let listed = include_str!("../abi.txt").lines().filter(|line| line.starts_with("struct "));
        assert_eq!(layouts(), listed.collect::<Vec<_>>());
    }

    #[test]
    fn numbers_of_results_are_those_of_the_kinds() {
        let last = ErrorKind::ALL.iter().map(|kind| -kind.number()).min();
        assert_eq!(last, Some(INTERNAL + 1), "a new kind takes a number behind INTERRUPTED");
        assert_eq!([BUSY, INTERRUPTED], [INTERNAL - 1, INTERNAL - 2]);
    }

    #[test]
    fn structs_of_other_versions_are_read_as_far_as_they_are_known() {
        #[repr(C)]
        struct Newer(ConnectOptions, u64);
        let mut newer = Newer(zeroed(), 0);
        let require = c"tcp".as_ptr();
        newer.0 = ConnectOptions { struct_size: size_of::<Newer>() as u32, flags: 0, require };
        // SAFETY: as long as it says.
        let read_it = |newer: &Newer| unsafe { read("connect", &raw const newer.0, 0) };
        assert_eq!(read_it(&newer).expect("a zero tail").require, require);
        newer.1 = 1;
        assert!(read_it(&newer).is_err(), "an option without effect");
        newer.0.struct_size = 8;
        assert!(read_it(&newer).expect("an older version").require.is_null());
        for (size, flags) in [(0, 0), (7, 0), (5000, 0), (16, 1)] {
            (newer.0.struct_size, newer.0.flags) = (size, flags);
            assert_eq!(read_it(&newer).map(drop).unwrap_err().kind, ErrorKind::Usage, "{size} {flags}");
        }
    }
}
