//! What rows of a combine become on their way to another rank, in the plainest code.

use crossrail_kernels::ep::{EP_WIRE_BF16, EP_WIRE_FP8, EP_WIRE_LOGFMT10, Payload, Scale};

use crate::wire::{BLOCK, Wire, decode, widen};

/// Most octaves between the smallest and the largest magnitude of a block in LogFMT-10.
const OCTAVES: f32 = 32.0;
/// Steps between them.
const STEPS: f32 = 510.0;

/// What a combine carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coding {
    /// bf16 as it is.
    Bf16,
    /// Ten bits for each element.
    LogFmt10,
    /// e4m3 with a power of two for each block.
    Fp8,
}

impl Coding {
    /// As the kernels' arguments have it.
    pub fn wire(self) -> u32 {
        match self {
            Coding::Bf16 => EP_WIRE_BF16,
            Coding::LogFmt10 => EP_WIRE_LOGFMT10,
            Coding::Fp8 => EP_WIRE_FP8,
        }
    }

    /// The values that arrive of a bf16 row; a rank's own stay what they are.
    pub fn carried(self, row: &[u16], own: bool) -> Vec<f32> {
        match self {
            Coding::Fp8 if !own => fp8(row),
            Coding::LogFmt10 if !own => row.chunks_exact(BLOCK).flat_map(logfmt10).collect(),
            _ => row.iter().map(|bits| widen(*bits)).collect(),
        }
    }
}

fn fp8(row: &[u16]) -> Vec<f32> {
    let wire = Wire::of(Payload::Fp8(Scale::PowerOfTwo), row);
    let scales = wire.scales.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
    let blocks = wire.elements.chunks_exact(BLOCK).zip(scales);
    let value = |code: u8| if code & 0x7f == 0x7f { f32::NAN } else { decode(code & 0x7f) };
    let signed = move |code: u8| if code & 0x80 == 0 { value(code) } else { -value(code) };
    blocks.flat_map(|(codes, scale)| codes.iter().map(move |code| signed(*code) * scale)).collect()
}

/// One block.
fn logfmt10(block: &[u16]) -> Vec<f32> {
    let magnitudes: Vec<f32> = block.iter().map(|bits| widen(bits & 0x7fff)).collect();
    if magnitudes.iter().any(|size| !size.is_finite()) {
        return vec![f32::NAN; block.len()];
    }
    let top = magnitudes.iter().fold(0f32, |most, size| most.max(*size)).log2();
    let smallest = magnitudes.iter().filter(|size| **size > 0.0).fold(f32::INFINITY, |least, size| least.min(*size));
    let low = smallest.log2().max(top - OCTAVES);
    let step = (top - low) * (1.0 / STEPS);
    let coded = |size: f32| -> f32 {
        if size == 0.0 {
            return 0.0;
        }
        if step <= 0.0 {
            return low.exp2();
        }
        let inverse = 1.0 / step;
        let rounding = 2.0 - ((1.0 + step.exp2()) * 0.5).log2() * inverse;
        let code = ((size.log2() - low) * inverse + rounding).min(511.0).floor();
        if code < 1.0 { 0.0 } else { (low + step * (code - 1.0)).exp2() }
    };
    let signed = |(bits, size): (&u16, &f32)| if bits & 0x8000 == 0 { coded(*size) } else { -coded(*size) };
    block.iter().zip(&magnitudes).map(signed).collect()
}

/// The largest error of LogFMT-10 relative to a value, in a block with these magnitudes at its ends: half of what lies
/// between two codes. Values below the range that 32 octaves leave become zero or the smallest code.
pub fn logfmt10_bound(smallest: f32, largest: f32) -> f32 {
    let step = ((largest.log2() - smallest.log2()).min(OCTAVES) / STEPS).exp2();
    (step - 1.0) / (step + 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Numbers;
    use crate::wire::narrow;

    /// What docs/performance-experts.md and the docstrings promise.
    #[test]
    fn errors_stay_below_what_is_documented() {
        let mut numbers = Numbers(11);
        for round in 0..200 {
            let spread = [1e-3f32, 0.1, 1.0, 1e4][round % 4];
            let mut one = || narrow((numbers.below(20001) as f32 - 10000.0) / 10000.0 * spread);
            let row: Vec<u16> = (0..BLOCK).map(|_| one()).collect();
            let sizes: Vec<f32> = row.iter().map(|bits| widen(bits & 0x7fff)).collect();
            let largest = sizes.iter().fold(0f32, |most, size| most.max(*size));
            let smallest = sizes.iter().filter(|size| **size > 0.0).fold(f32::MAX, |least, size| least.min(*size));
            let bound = logfmt10_bound(smallest, largest) * 1.001 + 1e-5;
            assert!(bound < 0.022, "32 octaves: 2.2 %");
            let [log, fp8] = [Coding::LogFmt10, Coding::Fp8].map(|coding| coding.carried(&row, false));
            for (at, bits) in row.iter().enumerate() {
                let exact = widen(*bits);
                assert!((log[at] - exact).abs() <= bound * exact.abs(), "{exact} became {}", log[at]);
                // Half of the last of three bits; or of the smallest step, 2^-9, of a scale up to largest / 224.
                let most = (exact.abs() / 16.0).max(largest / 224.0 / 1024.0);
                assert!((fp8[at] - exact).abs() <= most, "{exact} became {}", fp8[at]);
            }
        }
    }

    #[test]
    fn zeros_and_constant_blocks_stay_what_they_are() {
        let mut row = vec![narrow(-3.5); BLOCK];
        row[5] = 0;
        let values = Coding::LogFmt10.carried(&row, false);
        assert!(values[5] == 0.0 && values.iter().enumerate().all(|(at, value)| at == 5 || (value + 3.5).abs() < 1e-5));
        row[7] = 0x7f80;
        assert!(Coding::LogFmt10.carried(&row, false).iter().all(|value| value.is_nan()));
    }
}
