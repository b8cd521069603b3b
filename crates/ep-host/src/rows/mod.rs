//! Row kernels of the host: copies, casts between bf16 and fp8, sums.
//!
//! A row is `hidden` elements that lie next to each other. bf16 elements are their bits (`u16`), fp8 elements are e4m3
//! (finite, with NaN: 0x7f is NaN, 0x7e is 448, there is no infinity). Pointers need no alignment.
//!
//! Every result is defined to the bit, and every variant of a kernel gives the same bits, whatever the machine. All
//! arithmetic is fp32, each operation rounded once to nearest, ties to even; nothing is fused.
//!
//! **Cast**, per block of [`BLOCK`] elements (the formulas of DeepEP's kernels):
//!
//! ```text
//! amax    = the largest |x| of the block that is not NaN, infinities taken as the largest finite bf16; at least 1e-4
//! F32:        scale = amax * (1 / 448)    factor = 448 / amax          (1 / 448 rounded to fp32 first)
//! PowerOfTwo: scale = 2^n                 factor = 2^-n                n the least with 2^n >= amax * (1 / 448)
//! Ue8m0:      as PowerOfTwo, the scale stored as the byte n + 127
//! q       = x * factor, rounded to e4m3 to nearest, ties to even, at most 448 either way
//! ```
//!
//! The sign is kept, of zeros too. NaN becomes 0x7f with its sign, an infinity 448 with its sign; neither changes how
//! the finite elements of its block are cast otherwise than by amax.
//!
//! **Back**: the element times its scale, rounded to bf16.
//!
//! **Sum**: `0 + w0 * x0 + w1 * x1 + ...` in the order given, each product and each sum rounded to fp32, the last sum
//! rounded to bf16. Without weights there are no products. Beyond the largest bf16 it is infinite; every NaN is stored
//! as 0x7fc0.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;
#[cfg(test)]
mod tests;

use std::fmt;
#[cfg(target_arch = "x86_64")]
use std::ops::Range;
use std::sync::OnceLock;

use crossrail_ep::{BLOCK, Scale};
use crossrail_locks::PerProcess;

/// Blocks whose scales are computed before the first of them is cast, to hide the latency of each block's factor
/// (measured on an AMD EPYC of family 26 with AVX-512: 1.5 times the rate of one by one). 4 KiB, which fits the L1
/// cache.
#[cfg(target_arch = "x86_64")]
const GROUP: usize = 16;

/// Prefetch distance of a sum, in elements: 1 KiB of each row. Rows are scattered, and the hardware prefetcher starts
/// too late in each. Measured on the same machine from memory with rows of 14 KiB in scattered order, sums of 1, 2, 4
/// and 8 rows reached 1.5, 2.3, 2.0 and 1.7 times the rate without prefetching.
#[cfg(target_arch = "x86_64")]
const AHEAD: usize = 512;

/// bf16 elements in a line of the cache.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 32;

/// The row kernels for one kind of processor.
pub struct Kernels {
    name: &'static str,
    cast: unsafe fn(*const u16, usize, *mut u8, *mut u8, Scale),
    uncast: unsafe fn(*const u8, *const u8, usize, *mut u16, Scale),
    reduce: unsafe fn(*mut u16, &[*const u16], &[f32], usize),
}

impl fmt::Debug for Kernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Kernels").field(&self.name).finish()
    }
}

impl Kernels {
    /// The fastest that this processor runs; found out once.
    pub fn detect() -> &'static Kernels {
        static BEST: PerProcess<OnceLock<&'static Kernels>> = PerProcess::new();
        BEST.get_or_init(|| Kernels::available()[0])
    }

    /// Those that any processor runs.
    pub fn portable() -> &'static Kernels {
        &portable::KERNELS
    }

    /// All that this processor runs, the fastest first.
    pub fn available() -> Vec<&'static Kernels> {
        let mut all = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if avx512::runs_here() {
                all.push(&avx512::KERNELS);
            }
            if avx2::runs_here() {
                all.push(&avx2::KERNELS);
            }
        }
        all.push(&portable::KERNELS);
        all
    }

    /// "avx512", "avx2" or "portable".
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Copies `len` bytes.
    ///
    /// This is the C library's memcpy. Measured against it between two processors of an AMD EPYC (family 26, 32 MiB of
    /// third cache), rows of 4 and 14 KiB written by one and then read by the other: non-temporal AVX-512 stores took
    /// 1.3 to 1.8 times as long for 2 MiB in all, as long at 64 MiB, and 0.94 to 1 of it at 128 MiB.
    ///
    /// # Safety
    /// As `std::ptr::copy_nonoverlapping` for `len` bytes, but that another process may write to either side meanwhile:
    /// then the bytes copied are garbage.
    #[inline]
    pub unsafe fn copy_row(&self, dst: *mut u8, src: *const u8, len: usize) {
        // SAFETY: by the contract.
        unsafe { std::ptr::copy_nonoverlapping(src, dst, len) };
    }

    /// Casts a bf16 row to e4m3 with a scale per block: 4 bytes each (fp32), 1 byte for [`Scale::Ue8m0`].
    ///
    /// `hidden` is a multiple of [`BLOCK`]; what is beyond the last whole block is left alone.
    ///
    /// # Safety
    /// `src` is valid for reads of `hidden` elements, `dst` for writes of `hidden` bytes and `scales` of a scale per
    /// block. They do not overlap. Another process may write to them meanwhile: then the row written is garbage.
    #[inline]
    pub unsafe fn cast_row(&self, src: *const u16, hidden: usize, dst: *mut u8, scales: *mut u8, kind: Scale) {
        // SAFETY: by the contract; these kernels run here.
        unsafe { (self.cast)(src, hidden, dst, scales, kind) };
    }

    /// Casts back what [`cast_row`](Kernels::cast_row) made, to bf16.
    ///
    /// # Safety
    /// As there: `src` and `scales` are read, `dst` has room for `hidden` elements.
    #[inline]
    pub unsafe fn uncast_row(&self, src: *const u8, scales: *const u8, hidden: usize, dst: *mut u16, kind: Scale) {
        // SAFETY: by the contract; these kernels run here.
        unsafe { (self.uncast)(src, scales, hidden, dst, kind) };
    }

    /// Sums bf16 rows, weighted with a weight each or not at all, into a bf16 row; without rows, zeros.
    ///
    /// # Panics
    /// If there are weights, but not as many as rows.
    ///
    /// # Safety
    /// Each row is valid for reads of `hidden` elements and `dst` for writes of as many; `dst` overlaps no row, or is
    /// one. Another process may write to them meanwhile: then the sums are garbage.
    #[inline]
    pub unsafe fn reduce_rows(&self, dst: *mut u16, rows: &[*const u16], weights: Option<&[f32]>, hidden: usize) {
        assert!(weights.is_none_or(|weights| weights.len() == rows.len()), "a weight per row");
        // SAFETY: by the contract; these kernels run here.
        unsafe { (self.reduce)(dst, rows, weights.unwrap_or(&[]), hidden) };
    }
}

/// Stores the scale of block `index` and gives 2^7 times what its elements, at `from`, are multiplied with, for kernels
/// that count exponents from there; a block with NaN or infinities is cast at once, to `to`, and gives `None`.
///
/// # Safety
/// As for `portable::cast_block`.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn scale_block(
    amax: u16,
    from: *const u16,
    to: *mut u8,
    scales: *mut u8,
    index: usize,
    kind: Scale,
) -> Option<f32> {
    if amax >= portable::INFINITE {
        // SAFETY: by the contract.
        unsafe { portable::cast_block(from, to, scales, index, kind) };
        return None;
    }
    let scaled = portable::Scaled::new(amax, kind);
    // SAFETY: by the contract.
    unsafe { scaled.store(scales, index, kind) };
    Some(scaled.factor * 128.0)
}

/// Prefetches these elements of every row.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn prefetch(rows: &[*const u16], elements: Range<usize>) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    for at in elements.step_by(LINE) {
        for row in rows {
            // SAFETY: a hint, which reads nothing, wherever it points.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(row.wrapping_add(at).cast()) };
        }
    }
}

/// Bytes of one stored scale.
fn stored(kind: Scale) -> usize {
    match kind {
        Scale::F32 | Scale::PowerOfTwo => 4,
        Scale::Ue8m0 => 1,
    }
}
