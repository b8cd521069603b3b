//! The kernels with AVX2 and FMA, as avx512.rs has them at twice the width.

use std::arch::x86_64::*;

use crossrail_ep::Scale;

use super::{AHEAD, BLOCK, GROUP, Kernels, portable, prefetch, scale_block};

pub(super) static KERNELS: Kernels = Kernels { name: "avx2", cast, uncast, reduce };

/// bf16 elements in a register.
const LANES: usize = 16;

/// Whether this processor, and its system, have what these kernels use.
pub(super) fn runs_here() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}

/// # Safety
/// That of [`Kernels::cast_row`]; `runs_here`.
#[target_feature(enable = "avx2,fma")]
unsafe fn cast(src: *const u16, hidden: usize, dst: *mut u8, scales: *mut u8, kind: Scale) {
    let blocks = hidden / BLOCK;
    for begin in (0..blocks).step_by(GROUP) {
        let group = begin..blocks.min(begin + GROUP);
        // SAFETY: blocks inside the row, by the contract.
        let load = |index: usize, i| unsafe { _mm256_loadu_si256(src.wrapping_add(index * BLOCK + i * LANES).cast()) };
        let mut factors = [None; GROUP];
        for (index, factor) in group.clone().zip(&mut factors) {
            let amax = largest((0..BLOCK / LANES).map(|i| load(index, i)));
            let (from, to) = (src.wrapping_add(index * BLOCK), dst.wrapping_add(index * BLOCK));
            // SAFETY: as above; a scale per block.
            unsafe { *factor = scale_block(amax, from, to, scales, index, kind) };
        }
        for (index, factor) in group.zip(factors) {
            let Some(factor) = factor else { continue };
            let (to, factor) = (dst.wrapping_add(index * BLOCK), _mm256_set1_ps(factor));
            for i in (0..BLOCK / LANES).step_by(2) {
                // Two registers are packed half by half: first halves, then second ones.
                let codes = _mm256_packus_epi16(encode(load(index, i), factor), encode(load(index, i + 1), factor));
                let codes = _mm256_permute4x64_epi64(codes, 0b11_01_10_00);
                // SAFETY: as above; 32 bytes of the block.
                unsafe { _mm256_storeu_si256(to.wrapping_add(i * LANES).cast(), codes) };
            }
        }
    }
}

/// The largest magnitude, as bits.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn largest(block: impl Iterator<Item = __m256i>) -> u16 {
    let mut most = _mm256_setzero_si256();
    for x in block {
        most = _mm256_max_epu16(most, magnitude(x));
    }
    let most = _mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    // SSE4.1 has a horizontal minimum of eight u16 but no maximum, hence the complements.
    !(_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(most, _mm_set1_epi16(-1)))) as u16)
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn magnitude(x: __m256i) -> __m256i {
    _mm256_and_si256(x, _mm256_set1_epi16(0x7fff))
}

/// Casts 16 finite elements whose product with the factor (2^7 times the true one) is at most 448 * 2^7; each code
/// has 16 bits.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn encode(x: __m256i, factor: __m256) -> __m256i {
    let even = _mm256_castsi256_ps(_mm256_slli_epi32(magnitude(x), 16));
    let odd = _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(0x7fff_0000)));
    let even = steps(_mm256_mul_ps(even, factor));
    let odd = _mm256_slli_epi32(steps(_mm256_mul_ps(odd, factor)), 16);
    let codes = _mm256_and_si256(_mm256_blend_epi16(even, odd, 0b1010_1010), _mm256_set1_epi16(0x7f));
    _mm256_or_si256(codes, _mm256_and_si256(_mm256_srli_epi16(x, 8), _mm256_set1_epi16(0x80)))
}

/// Codes in the lowest bytes; see avx512.rs.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn steps(value: __m256) -> __m256i {
    let least = _mm256_set1_epi32((121 + 7) << 23);
    let power = _mm256_and_si256(_mm256_max_epu32(_mm256_castps_si256(value), least), _mm256_set1_epi32(0x7f80_0000));
    // The product is exact, so that nothing is rounded but the sum.
    let sum = _mm256_fmadd_ps(_mm256_castsi256_ps(power), _mm256_set1_ps((1 << 20) as f32), value);
    _mm256_add_epi32(_mm256_castps_si256(sum), _mm256_srli_epi32(power, 20))
}

/// # Safety
/// That of [`Kernels::uncast_row`]; `runs_here`.
#[target_feature(enable = "avx2,fma")]
unsafe fn uncast(src: *const u8, scales: *const u8, hidden: usize, dst: *mut u16, kind: Scale) {
    // SAFETY: by the contract. Compiled for AVX2, the plain loop is fast.
    unsafe { portable::uncast(src, scales, hidden, dst, kind) };
}

/// # Safety
/// That of [`Kernels::reduce_rows`]; `runs_here`.
#[target_feature(enable = "avx2,fma")]
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
#[target_feature(enable = "avx2,fma")]
unsafe fn reduce_as<const WEIGHTED: bool>(dst: *mut u16, rows: &[*const u16], weights: &[f32], hidden: usize) {
    let upper = _mm256_set1_epi32(0xffff_0000u32 as i32);
    prefetch(rows, 0..AHEAD.min(hidden));
    let mut begin = 0;
    while begin + WIDE * LANES <= hidden {
        let mut even = [_mm256_setzero_ps(); WIDE];
        let mut odd = [_mm256_setzero_ps(); WIDE];
        prefetch(rows, begin + AHEAD..(begin + AHEAD + WIDE * LANES).min(hidden));
        for (index, row) in rows.iter().enumerate() {
            let weight = if WEIGHTED { _mm256_set1_ps(weights[index]) } else { _mm256_setzero_ps() };
            for i in 0..WIDE {
                // SAFETY: inside the row, by the contract.
                let x = unsafe { _mm256_loadu_si256(row.wrapping_add(begin + i * LANES).cast()) };
                let mut low = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
                let mut high = _mm256_castsi256_ps(_mm256_and_si256(x, upper));
                if WEIGHTED {
                    (low, high) = (_mm256_mul_ps(low, weight), _mm256_mul_ps(high, weight));
                }
                even[i] = _mm256_add_ps(even[i], low);
                odd[i] = _mm256_add_ps(odd[i], high);
            }
        }
        for i in 0..WIDE {
            let low = _mm256_srli_epi32(rounded(even[i]), 16);
            let both = _mm256_blend_epi16(low, rounded(odd[i]), 0b1010_1010);
            // SAFETY: inside the row, by the contract.
            unsafe { _mm256_storeu_si256(dst.wrapping_add(begin + i * LANES).cast(), both) };
        }
        begin += WIDE * LANES;
    }
    // SAFETY: by the contract.
    unsafe { portable::reduce_from(begin, dst, rows, weights, hidden) };
}

/// The nearest bf16 in the upper halves, ties to even; 0x7fc0 for NaN.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn rounded(sum: __m256) -> __m256i {
    let bits = _mm256_castps_si256(sum);
    let last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    let up = _mm256_add_epi32(bits, _mm256_add_epi32(last, _mm256_set1_epi32(0x7fff)));
    let nan = _mm256_castps_si256(_mm256_cmp_ps(sum, sum, _CMP_UNORD_Q));
    _mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc0_0000), nan)
}
