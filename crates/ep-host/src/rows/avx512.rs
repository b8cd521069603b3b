//! The kernels with AVX-512 (F, BW, VL).
//!
//! A register of 32 bf16 is taken as 16 pairs: shifted up, the even elements are fp32; masked, the odd ones. So nothing
//! moves across a register on the way to fp32 and back.

use std::arch::x86_64::*;

use crossrail_ep::Scale;

use super::{AHEAD, BLOCK, GROUP, Kernels, portable, prefetch, scale_block};

pub(super) static KERNELS: Kernels = Kernels { name: "avx512", cast, uncast, reduce };

/// bf16 elements in a register.
const LANES: usize = 32;

/// Whether this processor, and its system, have what these kernels use.
pub(super) fn runs_here() -> bool {
    is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl")
}

/// # Safety
/// That of [`Kernels::cast_row`]; `runs_here`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn cast(src: *const u16, hidden: usize, dst: *mut u8, scales: *mut u8, kind: Scale) {
    let blocks = hidden / BLOCK;
    for begin in (0..blocks).step_by(GROUP) {
        let group = begin..blocks.min(begin + GROUP);
        // SAFETY: blocks inside the row, by the contract.
        let load = |index: usize, i| unsafe { _mm512_loadu_si512(src.wrapping_add(index * BLOCK + i * LANES).cast()) };
        let mut factors = [None; GROUP];
        for (index, factor) in group.clone().zip(&mut factors) {
            let amax = largest(std::array::from_fn(|i| load(index, i)));
            let (from, to) = (src.wrapping_add(index * BLOCK), dst.wrapping_add(index * BLOCK));
            // SAFETY: as above; a scale per block.
            unsafe { *factor = scale_block(amax, from, to, scales, index, kind) };
        }
        for (index, factor) in group.zip(factors) {
            let Some(factor) = factor else { continue };
            let (to, factor) = (dst.wrapping_add(index * BLOCK), _mm512_set1_ps(factor));
            for i in 0..BLOCK / LANES {
                // SAFETY: as above; 32 bytes of the block.
                unsafe { _mm256_storeu_si256(to.wrapping_add(i * LANES).cast(), encode(load(index, i), factor)) };
            }
        }
    }
}

/// The largest magnitude, as bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn largest(x: [__m512i; 4]) -> u16 {
    let most = _mm512_max_epu16(
        _mm512_max_epu16(magnitude(x[0]), magnitude(x[1])),
        _mm512_max_epu16(magnitude(x[2]), magnitude(x[3])),
    );
    let most = _mm256_max_epu16(_mm512_castsi512_si256(most), _mm512_extracti64x4_epi64(most, 1));
    let most = _mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    // SSE4.1 has a horizontal minimum of eight u16 but no maximum, hence the complements.
    !(_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(most, _mm_set1_epi16(-1)))) as u16)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn magnitude(x: __m512i) -> __m512i {
    _mm512_and_si512(x, _mm512_set1_epi16(0x7fff))
}

/// Casts 32 finite elements whose product with the factor (2^7 times the true one) is at most 448 * 2^7.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn encode(x: __m512i, factor: __m512) -> __m256i {
    let magnitudes = magnitude(x);
    let even = _mm512_castsi512_ps(_mm512_slli_epi32(magnitudes, 16));
    let odd = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(0x7fff_0000)));
    let even = steps(_mm512_mul_ps(even, factor));
    let odd = _mm512_slli_epi32(steps(_mm512_mul_ps(odd, factor)), 16);
    let codes = _mm512_mask_blend_epi16(0xaaaa_aaaa, even, odd);
    // The lower byte of each 16 bits is the code; with it goes the sign: codes | x >> 8 & 0x80.
    let signs = _mm512_srli_epi16(x, 8);
    _mm512_cvtepi16_epi8(_mm512_ternarylogic_epi32(codes, signs, _mm512_set1_epi16(0x80), 0xf8))
}

/// Codes in the lowest bytes, as `encode` of portable.rs explains; what is above them is left. There 121 * 8 is taken off
/// in the end, but here values are 2^7 times as large: it would be 128 * 8, which is nothing in the lowest byte.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn steps(value: __m512) -> __m512i {
    let least = _mm512_set1_epi32((121 + 7) << 23);
    let power = _mm512_and_si512(_mm512_max_epu32(_mm512_castps_si512(value), least), _mm512_set1_epi32(0x7f80_0000));
    // The product is exact, so that nothing is rounded but the sum.
    let sum = _mm512_fmadd_ps(_mm512_castsi512_ps(power), _mm512_set1_ps((1 << 20) as f32), value);
    _mm512_add_epi32(_mm512_castps_si512(sum), _mm512_srli_epi32(power, 20))
}

/// # Safety
/// That of [`Kernels::uncast_row`]; `runs_here`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn uncast(src: *const u8, scales: *const u8, hidden: usize, dst: *mut u16, kind: Scale) {
    // SAFETY: by the contract. Compiled for these features, the plain loop is fast.
    unsafe { portable::uncast(src, scales, hidden, dst, kind) };
}

/// # Safety
/// That of [`Kernels::reduce_rows`]; `runs_here`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn reduce(dst: *mut u16, rows: &[*const u16], weights: &[f32], hidden: usize) {
    // SAFETY: by the contract.
    unsafe {
        if weights.is_empty() {
            reduce_as::<false>(dst, rows, weights, hidden);
        } else {
            reduce_as::<true>(dst, rows, weights, hidden);
        }
    }
}

/// Registers of each row that are summed at a time.
const WIDE: usize = 4;

/// # Safety
/// That of [`Kernels::reduce_rows`]; `runs_here`; a weight per row if `WEIGHTED`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn reduce_as<const WEIGHTED: bool>(dst: *mut u16, rows: &[*const u16], weights: &[f32], hidden: usize) {
    let upper = _mm512_set1_epi32(0xffff_0000u32 as i32);
    prefetch(rows, 0..AHEAD.min(hidden));
    let mut begin = 0;
    while begin + WIDE * LANES <= hidden {
        let mut even = [_mm512_setzero_ps(); WIDE];
        let mut odd = [_mm512_setzero_ps(); WIDE];
        prefetch(rows, begin + AHEAD..(begin + AHEAD + WIDE * LANES).min(hidden));
        for (index, row) in rows.iter().enumerate() {
            let weight = if WEIGHTED { _mm512_set1_ps(weights[index]) } else { _mm512_setzero_ps() };
            for i in 0..WIDE {
                // SAFETY: inside the row, by the contract.
                let x = unsafe { _mm512_loadu_si512(row.wrapping_add(begin + i * LANES).cast()) };
                let mut low = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
                let mut high = _mm512_castsi512_ps(_mm512_and_si512(x, upper));
                if WEIGHTED {
                    (low, high) = (_mm512_mul_ps(low, weight), _mm512_mul_ps(high, weight));
                }
                even[i] = _mm512_add_ps(even[i], low);
                odd[i] = _mm512_add_ps(odd[i], high);
            }
        }
        for i in 0..WIDE {
            let low = _mm512_srli_epi32(rounded(even[i]), 16);
            let both = _mm512_mask_blend_epi16(0xaaaa_aaaa, low, rounded(odd[i]));
            // SAFETY: inside the row, by the contract.
            unsafe { _mm512_storeu_si512(dst.wrapping_add(begin + i * LANES).cast(), both) };
        }
        begin += WIDE * LANES;
    }
    // SAFETY: by the contract.
    unsafe { portable::reduce_from(begin, dst, rows, weights, hidden) };
}

/// The nearest bf16 in the upper halves, ties to even; 0x7fc0 for NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn rounded(sum: __m512) -> __m512i {
    let bits = _mm512_castps_si512(sum);
    let last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    let up = _mm512_add_epi32(bits, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff)));
    _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0_0000))
}
