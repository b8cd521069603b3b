//! A row as it is carried, and the numbers in it: bf16 as their bits, and e4m3 with its scales.

use std::sync::LazyLock;

use crossrail_kernels::ep::{Payload, Scale};

/// Elements that share one scale.
pub const BLOCK: usize = 128;

/// A row as dispatch carries it: its elements, and its scales (none for bf16).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wire {
    /// The row, as `Payload` has it.
    pub elements: Vec<u8>,
    /// Its scales, in the order of blocks.
    pub scales: Vec<u8>,
}

impl Wire {
    /// Of a bf16 row.
    pub fn of(payload: Payload, row: &[u16]) -> Wire {
        let Payload::Fp8(kind) = payload else {
            return Wire { elements: row.iter().flat_map(|bits| bits.to_le_bytes()).collect(), scales: Vec::new() };
        };
        let mut wire = Wire { elements: Vec::new(), scales: Vec::new() };
        for block in row.chunks_exact(BLOCK) {
            let sizes = block.iter().map(|bits| widen(bits & 0x7fff)).filter(|size| !size.is_nan());
            let amax = sizes.fold(0f32, f32::max).min(widen(0x7f7f)).max(1e-4);
            let exact = amax * (1.0 / 448.0);
            let exponent = (exact.to_bits() + 0x7f_ffff) >> 23;
            let (scale, factor) = match kind {
                Scale::F32 => (exact, 448.0 / amax),
                Scale::PowerOfTwo | Scale::Ue8m0 => {
                    (f32::from_bits(exponent << 23), f32::from_bits((254 - exponent) << 23))
                }
            };
            wire.elements.extend(block.iter().map(|bits| encode(widen(*bits) * factor)));
            match kind {
                Scale::Ue8m0 => wire.scales.push(exponent as u8),
                Scale::F32 | Scale::PowerOfTwo => wire.scales.extend(scale.to_le_bytes()),
            }
        }
        wire
    }
}

/// The fp32 of a bf16.
pub fn widen(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The bf16 nearest to a value, ties to even; every NaN is 0x7fc0.
pub fn narrow(value: f32) -> u16 {
    if value.is_nan() {
        return 0x7fc0;
    }
    let (kept, rest) = ((value.to_bits() >> 16) as u16, value.to_bits() & 0xffff);
    if rest > 0x8000 || rest == 0x8000 && kept & 1 == 1 { kept + 1 } else { kept }
}

/// The e4m3 nearest to a value, ties to the even code, at most 448 either way: found among all of them.
fn encode(value: f32) -> u8 {
    static VALUES: LazyLock<[f32; 127]> = LazyLock::new(|| std::array::from_fn(|code| decode(code as u8)));
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    if value.is_nan() {
        return sign | 0x7f;
    }
    let (values, size) = (&*VALUES, value.abs().min(448.0));
    let above = values.partition_point(|value| *value < size);
    // Differences of neighbours are exact in fp64.
    let off = |code: usize| (f64::from(values[code]) - f64::from(size)).abs();
    let below = above.saturating_sub(1);
    let nearer_below = off(below) < off(above) || off(below) == off(above) && below.is_multiple_of(2);
    sign | if nearer_below { below as u8 } else { above as u8 }
}

/// The value of an e4m3 without its sign, which is finite.
pub(crate) fn decode(code: u8) -> f32 {
    let (exponent, steps) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    if exponent == 0 { steps * 2f32.powi(-9) } else { (8.0 + steps) * 2f32.powi(exponent - 10) }
}
