//! The kernels in plain Rust: what the others must agree with, and what they use for the rare cases and the tails.

use crossrail_ep::Scale;

use super::{BLOCK, Kernels, stored};

pub(super) static KERNELS: Kernels = Kernels { name: "portable", cast, uncast, reduce };

/// bf16 infinity; larger magnitudes are NaN.
pub(super) const INFINITE: u16 = 0x7f80;
/// The largest finite bf16.
const LARGEST: u16 = 0x7f7f;
/// The least amax of a block.
const LEAST: f32 = 1e-4;
/// The largest e4m3.
const MOST: f32 = 448.0;
/// Exponent bits of fp32.
const EXPONENT: u32 = 0x7f80_0000;
/// Elements that a sum keeps in fp32 at a time: they stay in the first cache.
const PIECE: usize = 512;

/// How one block is scaled.
pub(super) struct Scaled {
    /// What elements are multiplied with.
    pub(super) factor: f32,
    /// The scale; a power of two unless the kind is `F32`.
    scale: f32,
}

impl Scaled {
    /// For a block whose largest magnitude, NaN left out, has these bits.
    #[inline(always)]
    pub(super) fn new(amax: u16, kind: Scale) -> Scaled {
        let amax = widen(amax.min(LARGEST)).max(LEAST);
        let scale = amax * (1.0 / MOST);
        if kind == Scale::F32 {
            return Scaled { factor: MOST / amax, scale };
        }
        // Between 2^-22 and 2^120, so all of this is normal.
        let exponent = (scale.to_bits() + 0x7f_ffff) >> 23;
        Scaled { factor: f32::from_bits((254 - exponent) << 23), scale: f32::from_bits(exponent << 23) }
    }

    /// Stores the scale of block `index`.
    ///
    /// # Safety
    /// `scales` is valid for writes up to that scale.
    #[inline(always)]
    pub(super) unsafe fn store(&self, scales: *mut u8, index: usize, kind: Scale) {
        let at = scales.wrapping_add(index * stored(kind));
        // SAFETY: by the contract.
        unsafe {
            match kind {
                Scale::F32 | Scale::PowerOfTwo => at.cast::<f32>().write_unaligned(self.scale),
                Scale::Ue8m0 => at.write((self.scale.to_bits() >> 23) as u8),
            }
        }
    }
}

/// The fp32 of a bf16.
#[inline(always)]
fn widen(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The bf16 nearest to a value, ties to even; NaN is 0x7fc0.
#[inline(always)]
fn narrow(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    if value.is_nan() { 0x7fc0 } else { rounded as u16 }
}

/// The e4m3 nearest to a value, ties to even, at most 448 either way.
///
/// Added to a power of two 2^20 times as large as the value's own, the value is rounded to the three bits after its
/// first; below 2^-6, where steps stay 2^-9, the power is that of 2^-6. The sum's last bits count steps: eight to
/// sixteen, of which eight are the exponent's next, and none to eight below 2^-6.
#[inline(always)]
pub(super) fn encode(value: f32) -> u8 {
    let sign = (value.to_bits() >> 24 & 0x80) as u8;
    let magnitude = if value.abs() < MOST { value.abs() } else { MOST };
    let power = magnitude.to_bits().max(121 << 23) & EXPONENT;
    let steps = (magnitude + f32::from_bits(power + (20 << 23))).to_bits() as u8;
    let code = ((power >> 20) - (121 << 3)) as u8 + steps;
    sign | if value.is_nan() { 0x7f } else { code }
}

/// The value of an e4m3.
#[inline(always)]
fn decode(code: u8) -> f32 {
    // The exponent's bias is 7, fp32's is 127; below 2^-6 the leading one is taken off again.
    let magnitude = u32::from(code & 0x7f);
    let normal = f32::from_bits((magnitude << 20) + (120 << 23));
    let small = f32::from_bits((magnitude << 20) + (121 << 23)) - f32::from_bits(121 << 23);
    let value = if magnitude < 8 { small } else { normal };
    let value = if magnitude == 0x7f { f32::NAN } else { value };
    f32::from_bits(value.to_bits() | u32::from(code & 0x80) << 24)
}

/// # Safety
/// That of [`Kernels::cast_row`].
unsafe fn cast(src: *const u16, hidden: usize, dst: *mut u8, scales: *mut u8, kind: Scale) {
    for index in 0..hidden / BLOCK {
        // SAFETY: a whole block inside the row, by the contract.
        unsafe { cast_block(src.wrapping_add(index * BLOCK), dst.wrapping_add(index * BLOCK), scales, index, kind) };
    }
}

/// Casts block `index`, whose elements are at `src` and `dst`.
///
/// # Safety
/// `src` is valid for reads and `dst` for writes of a block, `scales` up to its scale.
pub(super) unsafe fn cast_block(src: *const u16, dst: *mut u8, scales: *mut u8, index: usize, kind: Scale) {
    // SAFETY: by the contract; the block is read once, so what is cast is what was looked at.
    let block = unsafe { src.cast::<[u16; BLOCK]>().read_unaligned() };
    let magnitudes = block.map(|bits| (bits & 0x7fff) as i16);
    let mut amax = magnitudes.iter().copied().fold(0, i16::max);
    if amax > INFINITE as i16 {
        amax = magnitudes.iter().copied().filter(|bits| *bits <= INFINITE as i16).fold(0, i16::max);
    }
    let scaled = Scaled::new(amax as u16, kind);
    let codes = block.map(|bits| encode(widen(bits) * scaled.factor));
    // SAFETY: by the contract.
    unsafe {
        dst.cast::<[u8; BLOCK]>().write_unaligned(codes);
        scaled.store(scales, index, kind);
    }
}

/// # Safety
/// That of [`Kernels::uncast_row`].
#[inline(always)]
pub(super) unsafe fn uncast(src: *const u8, scales: *const u8, hidden: usize, dst: *mut u16, kind: Scale) {
    for index in 0..hidden / BLOCK {
        let at = scales.wrapping_add(index * stored(kind));
        // SAFETY: a scale and a whole block inside the row, by the contract.
        unsafe {
            let scale = match kind {
                Scale::F32 | Scale::PowerOfTwo => at.cast::<f32>().read_unaligned(),
                Scale::Ue8m0 => power_of(at.read()),
            };
            let block = src.wrapping_add(index * BLOCK).cast::<[u8; BLOCK]>().read_unaligned();
            let values = block.map(|code| narrow(decode(code) * scale));
            dst.wrapping_add(index * BLOCK).cast::<[u16; BLOCK]>().write_unaligned(values);
        }
    }
}

/// 2^(byte - 127); 255 is NaN.
#[inline(always)]
fn power_of(byte: u8) -> f32 {
    match byte {
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        _ => f32::from_bits(u32::from(byte) << 23),
    }
}

/// # Safety
/// That of [`Kernels::reduce_rows`].
unsafe fn reduce(dst: *mut u16, rows: &[*const u16], weights: &[f32], hidden: usize) {
    // SAFETY: by the contract.
    unsafe { reduce_from(0, dst, rows, weights, hidden) };
}

/// The elements from `begin` on.
///
/// # Safety
/// That of [`Kernels::reduce_rows`].
pub(super) unsafe fn reduce_from(begin: usize, dst: *mut u16, rows: &[*const u16], weights: &[f32], hidden: usize) {
    let mut begin = begin;
    while begin < hidden {
        let count = PIECE.min(hidden - begin);
        let mut sums = [0f32; PIECE];
        for (index, row) in rows.iter().enumerate() {
            let from = row.wrapping_add(begin);
            // SAFETY: inside the row, by the contract.
            let value = |at| widen(unsafe { from.wrapping_add(at).read_unaligned() });
            match weights.get(index) {
                None => sums[..count].iter_mut().enumerate().for_each(|(at, sum)| *sum += value(at)),
                Some(weight) => sums[..count].iter_mut().enumerate().for_each(|(at, sum)| *sum += value(at) * weight),
            }
        }
        for (at, sum) in sums[..count].iter().enumerate() {
            // SAFETY: inside the row, by the contract.
            unsafe { dst.wrapping_add(begin + at).write_unaligned(narrow(*sum)) };
        }
        begin += count;
    }
}
