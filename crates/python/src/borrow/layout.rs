//! Parses and validates array metadata (shape, strides, address). Untrusted input: every field is checked, and the
//! memory itself is never accessed.

use crossrail_types::format_size;

/// What is wrong with an array, and what to do about it.
pub(crate) type Refusal = (String, &'static str);

/// Maximum number of axes (NumPy and PyTorch allow 64).
const MOST_AXES: usize = 64;
/// Upper bound of a length in bytes, so that arithmetic on lengths cannot overflow.
const LONGEST: u64 = 1 << 60;

/// The device that owns memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    Host,
    /// A GPU's, by its CUDA ordinal.
    Gpu(u32),
}

/// A contiguous range of memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) ptr: u64,
    /// Bytes.
    pub(crate) len: usize,
}

/// The axes of an array: how many items along each, and how far apart they are (`None`: in C order without gaps).
pub(super) struct Axes {
    pub(super) shape: Vec<i64>,
    pub(super) strides: Option<Vec<i64>>,
    /// What strides count: 1 for items, the item's size for bytes.
    pub(super) unit: i64,
}

impl Axes {
    /// Validates a number of axes reported by an array.
    pub(super) fn count(said: i64) -> Result<usize, Refusal> {
        match usize::try_from(said) {
            Ok(count) if count <= MOST_AXES => Ok(count),
            _ => Err(malformed(&format!("{said} axes"))),
        }
    }

    /// The memory at `ptr` of an array with these axes and items of `bits` bits, if it is contiguous.
    pub(super) fn piece(&self, ptr: u64, bits: u64) -> Result<Piece, Refusal> {
        let Axes { shape, strides, unit } = self;
        if bits == 0 {
            return Err(malformed("items of no size"));
        }
        if strides.as_ref().is_some_and(|strides| strides.len() != shape.len()) {
            return Err(malformed(&format!(
                "shape {shape:?} with strides {:?}",
                strides.as_deref().unwrap_or_default()
            )));
        }
        if let Some(extent) = shape.iter().find(|extent| **extent < 0) {
            return Err(malformed(&format!("an extent of {extent}")));
        }
        if shape.contains(&0) {
            return Ok(Piece { ptr, len: 0 });
        }
        let (mut count, mut contiguous) = (1_i64, true);
        for (axis, extent) in shape.iter().enumerate().rev() {
            let stride = strides.as_ref().map(|strides| strides[axis]);
            let expected = count.checked_mul(*unit);
            contiguous &= *extent == 1 || stride.is_none() || stride == expected;
            count = count.checked_mul(*extent).ok_or_else(|| too_long(shape))?;
        }
        if !contiguous {
            let strides = strides.as_deref().unwrap_or_default();
            let counted = if *unit == 1 { "items" } else { "bytes" };
            let detail = format!("is not contiguous in C order: shape {shape:?} with strides {strides:?} ({counted})");
            return Err((detail, "make a contiguous copy"));
        }
        let len = count.unsigned_abs().checked_mul(bits).map(|bits| bits.div_ceil(8)).filter(|len| *len <= LONGEST);
        let len = len.ok_or_else(|| too_long(shape))?;
        if ptr == 0 {
            return Err(malformed(&format!("{} at address 0", format_size(len))));
        }
        if ptr.checked_add(len).is_none() {
            return Err(malformed(&format!("{len} bytes at {ptr:#x}")));
        }
        let len = usize::try_from(len).map_err(|_| too_long(shape))?;
        Ok(Piece { ptr, len })
    }
}

/// Refusal of inconsistent or malformed metadata.
pub(super) fn malformed(what: &str) -> Refusal {
    (format!("is malformed: {what}"), "")
}

fn too_long(shape: &[i64]) -> Refusal {
    malformed(&format!("shape {shape:?} exceeds the maximum size of an array"))
}
