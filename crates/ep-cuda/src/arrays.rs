//! Arrays in GPU memory that callers pass to operations: what kernels take of them, and errors that name the argument.

use std::borrow::Cow;

use crossrail_types::{Error, ErrorKind, Result};

/// Alignment of rows, in bytes.
const ROW_UNIT: u64 = 16;
/// Blocks of a row whose ue8m0 scales are adjacent bytes.
const PACKED: u64 = 4;
/// In expected shapes: any number of tokens.
pub const TOKENS: u64 = u64::MAX;

/// What an array's items are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "their names say it")]
pub enum Item {
    Bf16,
    E4m3,
    F32,
    I32,
    I64,
    U8,
    U16,
}

/// Accepted items of bf16 arrays: such numbers, or their bits.
pub const BF16: &[Item] = &[Item::Bf16, Item::U16];
/// The same of fp8.
pub const FP8: &[Item] = &[Item::E4m3, Item::U8];
/// Accepted items of ids of experts.
pub const IDS: &[Item] = &[Item::I64, Item::I32];

impl Item {
    /// All of them.
    pub const ALL: [Item; 7] = [Item::Bf16, Item::E4m3, Item::F32, Item::I32, Item::I64, Item::U8, Item::U16];
    const NAMES: [&str; 7] = ["bfloat16", "float8_e4m3fn", "float32", "int32", "int64", "uint8", "uint16"];
    const BYTES: [u64; 7] = [2, 1, 4, 4, 8, 1, 2];

    /// As NumPy and ml_dtypes have it.
    pub fn name(self) -> &'static str {
        Item::NAMES[self as usize]
    }

    /// Size in bytes.
    pub fn bytes(self) -> u64 {
        Item::BYTES[self as usize]
    }

    /// The one of this name, or the name of other items.
    pub fn named(name: String) -> std::result::Result<Item, String> {
        Item::ALL.into_iter().find(|item| item.name() == name).ok_or(name)
    }
}

/// An array that is an argument of an operation.
#[derive(Clone, Debug)]
pub struct Array<'a> {
    /// The operation and the argument, as errors call them.
    pub name: (&'static str, &'static str),
    /// Of the first item.
    pub address: u64,
    /// What its items are; of others than kernels take, the name.
    pub dtype: std::result::Result<Item, String>,
    /// Its extents.
    pub shape: Cow<'a, [i64]>,
    /// In items; `None`: contiguous in C order.
    pub strides: Option<Cow<'a, [i64]>>,
}

/// The error of a call whose argument is not taken.
#[cold]
pub fn unfit((operation, name): (&str, &str), what: &str) -> Error {
    Error::new(ErrorKind::Usage, operation, format!("{name} {what}"))
}

/// The error of an argument with other properties than expected.
#[cold]
fn expected((operation, name): (&str, &str), want: &str, got: &str) -> Error {
    Error::new(ErrorKind::Usage, operation, format!("{name}: expected {want}, got {got}"))
}

/// Whether an array has the expected shape.
pub fn has_shape(have: &[i64], wanted: &[u64]) -> bool {
    let fits = |(have, wanted): (&i64, &u64)| *wanted == TOKENS || u64::try_from(*have) == Ok(*wanted);
    have.len() == wanted.len() && have.iter().zip(wanted).all(fits)
}

impl Array<'_> {
    /// Its items, if they are of `items`, and it has this shape. Else, as for all methods, the error is UsageError.
    pub fn of(&self, items: &[Item], shape: &[u64]) -> Result<Item> {
        match self.dtype {
            Ok(item) if items.contains(&item) && has_shape(&self.shape, shape) => Ok(item),
            _ => Err(self.is_another(items, shape)),
        }
    }

    /// The address of a contiguous array, and its items.
    pub fn whole(&self, items: &[Item], shape: &[u64]) -> Result<(u64, Item)> {
        let item = self.of(items, shape)?;
        let error = || unfit(self.name, "is not contiguous in C order").with_hint("make a contiguous copy");
        if self.is_whole() { Ok((self.address, item)) } else { Err(error()) }
    }

    /// The address of contiguous rows, aligned, and their constant stride in bytes.
    pub fn rows(&self, items: &[Item], shape: &[u64]) -> Result<(u64, u64)> {
        let item = self.of(items, shape)?;
        let stride = self.row_stride().map(|stride| stride.saturating_mul(item.bytes()));
        let stride = stride.filter(|stride| stride.is_multiple_of(ROW_UNIT) && self.is_aligned());
        Ok((self.address, stride.ok_or_else(|| self.has_other_rows())?))
    }

    /// The address of scales of `blocks` for each row, any distance apart, and their strides in bytes: along `outer`, and
    /// from one block to the next (of ue8m0, from four blocks to the next four).
    pub fn scales<const N: usize>(&self, outer: &[u64], blocks: u64, ue8m0: bool) -> Result<(u64, [u64; N])> {
        let is_packed = self.dtype == Ok(Item::I32) && blocks.is_multiple_of(PACKED);
        let (item, width) = match ue8m0 {
            false => (Item::F32, blocks),
            true if is_packed => (Item::I32, blocks / PACKED),
            true => (Item::U8, blocks),
        };
        self.of(&[item], &[outer, &[width]].concat())?;
        let mut strides = [0; N];
        for (axis, stride) in strides.iter_mut().enumerate() {
            let items = u64::try_from(self.stride(axis)).map_err(|_| self.has_other_rows())?;
            *stride = items.saturating_mul(item.bytes());
        }
        if item == Item::U8 {
            let step = std::mem::replace(&mut strides[N - 1], PACKED);
            if step != 1 && blocks > 1 {
                return Err(expected(self.name, "blocks 1 byte apart", &step.to_string()));
            }
        }
        Ok((self.address, strides))
    }

    /// The address of a bias: contiguous rows in one piece, aligned.
    pub fn bias(&self, items: &[Item], shape: &[u64]) -> Result<u64> {
        let (address, _) = self.whole(items, shape)?;
        let error = || unfit(self.name, &format!("begins at address {address:#x}, not a multiple of {ROW_UNIT}"));
        if self.is_aligned() { Ok(address) } else { Err(error()) }
    }

    /// Whether the items lie in C order without gaps.
    pub fn is_whole(&self) -> bool {
        let Some(strides) = &self.strides else { return true };
        let mut next = 1_i64;
        self.shape.contains(&0)
            || self.shape.iter().zip(strides.iter()).rev().all(|(&extent, &stride)| {
                let follows = extent == 1 || stride == next;
                next = next.saturating_mul(extent);
                follows
            })
    }

    fn is_aligned(&self) -> bool {
        self.address.is_multiple_of(ROW_UNIT) || self.shape.contains(&0)
    }

    /// The stride along an axis, in items.
    pub fn stride(&self, axis: usize) -> i64 {
        let contiguous = || self.shape[axis + 1..].iter().fold(1_i64, |items, extent| items.saturating_mul(*extent));
        self.strides.as_ref().map_or_else(contiguous, |strides| strides[axis])
    }

    /// The stride of rows, in items; `None` if it is not constant, or rows are not contiguous.
    fn row_stride(&self) -> Option<u64> {
        let (&width, outer) = self.shape.split_last()?;
        let mut stride = None;
        if !self.is_whole() {
            if width > 1 && self.stride(outer.len()) != 1 {
                return None;
            }
            let mut rows = 1_i64;
            for (axis, &extent) in outer.iter().enumerate().rev().filter(|(_, extent)| **extent != 1) {
                let step = self.stride(axis);
                if step != stride.get_or_insert(step).saturating_mul(rows) {
                    return None;
                }
                rows = rows.saturating_mul(extent);
            }
        }
        let stride = stride.unwrap_or(width);
        u64::try_from(stride).ok().filter(|_| stride >= width)
    }

    #[cold]
    fn is_another(&self, items: &[Item], shape: &[u64]) -> Error {
        let kinds = match items {
            [Item::Bf16, ..] => "bf16".to_owned(), // or their bits
            [Item::E4m3, ..] => "e4m3".to_owned(),
            _ => items.iter().map(|item| item.name()).collect::<Vec<_>>().join(" or "),
        };
        let dtype = self.dtype.as_ref().map_or_else(|other| other.as_str(), |item| item.name());
        let extent = |extent: &u64| if *extent == TOKENS { "T".to_owned() } else { extent.to_string() };
        let wanted = shape.iter().map(extent).collect::<Vec<_>>().join(", ");
        expected(self.name, &format!("{kinds} [{wanted}]"), &format!("{dtype} {:?}", self.shape))
    }

    #[cold]
    fn has_other_rows(&self) -> Error {
        let strides: Vec<i64> = (0..self.shape.len()).map(|axis| self.stride(axis)).collect();
        unfit(self.name, &format!("has strides {strides:?} at address {:#x}", self.address)).with_hint(format!(
            "rows must be contiguous, have a constant stride, and begin at multiples of {ROW_UNIT} bytes"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn array(shape: &'static [i64], strides: Option<&'static [i64]>) -> Array<'static> {
        let (name, shape) = (("dispatch", "x"), Cow::Borrowed(shape));
        Array { name, address: 64, dtype: Ok(Item::Bf16), shape, strides: strides.map(Cow::Borrowed) }
    }

    #[test]
    fn rows_have_a_constant_stride() {
        let cases: [(&[i64], &[i64], Option<u64>); 13] = [
            (&[4, 8], &[8, 1], Some(8)),
            (&[4, 8], &[16, 1], Some(16)),
            (&[4, 8], &[8, 2], None),
            (&[4, 8], &[0, 1], None),
            (&[4, 8], &[4, 1], None),
            (&[1, 8], &[3, 1], Some(8)),
            (&[1, 8], &[8, 2], None),
            (&[0, 8], &[0, 5], Some(8)),
            (&[2, 3, 8], &[24, 8, 1], Some(8)),
            (&[2, 3, 8], &[48, 16, 1], Some(16)),
            (&[2, 3, 8], &[32, 8, 1], None),
            (&[2, 1, 8], &[32, 8, 1], Some(32)),
            (&[1, 3, 8], &[99, 8, 1], Some(8)),
        ];
        for (shape, strides, expected) in cases {
            assert_eq!(array(shape, Some(strides)).row_stride(), expected, "{shape:?} {strides:?}");
        }
    }

    #[test]
    fn items_in_c_order_are_whole() {
        assert!(array(&[2, 1, 4], Some(&[4, 77, 1])).is_whole());
        assert!(!array(&[2, 2, 4], Some(&[4, 77, 1])).is_whole());
        assert!(array(&[2, 0], Some(&[9, 9])).is_whole());
        let whole = array(&[2, 3, 4], None);
        assert!(whole.is_whole() && array(&[], None).is_whole());
        assert_eq!([0, 1, 2].map(|axis| whole.stride(axis)), [12, 4, 1]);
    }

    #[test]
    fn errors_name_the_expected_and_the_actual_value() {
        let rows = [TOKENS, 8];
        let says = |error: Error| error.to_string();
        assert_eq!(array(&[4, 8], None).rows(BF16, &rows).unwrap(), (64, 16));
        let other = array(&[4, 7], None).rows(BF16, &rows).unwrap_err();
        assert_eq!(says(other), "dispatch: x: expected bf16 [T, 8], got bfloat16 [4, 7]");
        let ids = array(&[4, 8], None).whole(IDS, &rows).unwrap_err();
        assert_eq!(says(ids), "dispatch: x: expected int64 or int32 [T, 8], got bfloat16 [4, 8]");
        let spread = array(&[4, 8], Some(&[16, 2])).rows(BF16, &rows).unwrap_err();
        assert!(says(spread).starts_with("dispatch: x has strides [16, 2] at address 0x40; rows must be contiguous"));
        let odd = Array { address: 8, ..array(&[4, 8], None) };
        assert!(odd.rows(BF16, &rows).is_err());
        assert_eq!(odd.bias(BF16, &rows).unwrap_err().detail, "x begins at address 0x8, not a multiple of 16");
        assert_eq!(
            array(&[4, 8], Some(&[16, 1])).whole(BF16, &rows).unwrap_err().hint.unwrap(),
            "make a contiguous copy"
        );
    }

    #[test]
    fn scales_may_lie_any_distance_apart() {
        let of = |item, shape, strides| Array { dtype: Ok(item), ..array(shape, strides) };
        assert_eq!(of(Item::F32, &[3, 8], Some(&[1, 3])).scales(&[3], 8, false).unwrap(), (64, [4, 12]));
        assert_eq!(of(Item::I32, &[3, 2], Some(&[1, 3])).scales(&[3], 8, true).unwrap(), (64, [4, 12]));
        assert_eq!(of(Item::U8, &[2, 3, 8], None).scales(&[2, 3], 8, true).unwrap(), (64, [24, 8, 4]));
        assert_eq!(of(Item::U8, &[3, 5], None).scales(&[3], 5, true).unwrap(), (64, [5, 4]));
        let spread = of(Item::U8, &[3, 8], Some(&[16, 2])).scales::<2>(&[3], 8, true).unwrap_err();
        assert_eq!(spread.detail, "x: expected blocks 1 byte apart, got 2");
        let packs = of(Item::I32, &[3, 5], None).scales::<2>(&[3], 5, true).unwrap_err();
        assert_eq!(packs.detail, "x: expected uint8 [3, 5], got int32 [3, 5]");
        assert!(of(Item::F32, &[3, 8], Some(&[-8, 1])).scales::<2>(&[3], 8, false).is_err());
    }
}
