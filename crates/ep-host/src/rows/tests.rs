//! Each variant against slow definitions that share nothing with them, to the bit.

use crossrail_ep::Scale;

use super::{BLOCK, Kernels};

const KINDS: [Scale; 3] = [Scale::F32, Scale::PowerOfTwo, Scale::Ue8m0];

/// xorshift64*: the same numbers every time.
struct Random(u64);

impl Random {
    fn word(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    fn below(&mut self, end: usize) -> usize {
        (self.word() % end as u64) as usize
    }

    /// bf16 around 2^`middle`, some octaves either way.
    fn near(&mut self, middle: i32) -> u16 {
        let exponent = (127 + middle + self.below(20) as i32 - 12).clamp(0, 254) as u16;
        (self.word() as u16 & 0x807f) | exponent << 7
    }

    fn any(&mut self) -> u16 {
        self.word() as u16
    }
}

/// A row at `offset` bytes from an address that is a multiple of 64, with bytes around it that must stay.
struct Guarded {
    bytes: Vec<u8>,
    begin: usize,
    len: usize,
}

impl Guarded {
    fn new(offset: usize, len: usize) -> Guarded {
        let bytes = vec![0xa5; len + 256];
        let begin = bytes.as_ptr().align_offset(64) + 64 + offset;
        Guarded { bytes, begin, len }
    }

    fn holding(offset: usize, contents: &[u8]) -> Guarded {
        let mut row = Guarded::new(offset, contents.len());
        row.bytes[row.begin..row.begin + contents.len()].copy_from_slice(contents);
        row
    }

    fn ptr(&mut self) -> *mut u8 {
        self.bytes[self.begin..].as_mut_ptr()
    }

    fn contents(&self) -> &[u8] {
        let (before, rest) = self.bytes.split_at(self.begin);
        let (row, after) = rest.split_at(self.len);
        assert!(before.iter().chain(after).all(|byte| *byte == 0xa5), "written beyond the row");
        row
    }
}

fn bytes_of(row: &[u16]) -> Vec<u8> {
    row.iter().flat_map(|bits| bits.to_ne_bytes()).collect()
}

fn words_of(bytes: &[u8]) -> Vec<u16> {
    bytes.chunks_exact(2).map(|pair| u16::from_ne_bytes([pair[0], pair[1]])).collect()
}

fn value(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// By the format's definition.
fn e4m3_value(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f64::NAN,
        (0, _) => mantissa / 8.0 * 2f64.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// By looking at all of them.
fn slow_e4m3(value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    if value.is_nan() {
        return sign | 0x7f;
    }
    let wanted = f64::from(value.abs()).min(448.0);
    let off = |code: &u8| (e4m3_value(*code) - wanted).abs();
    let nearest = (0..0x7fu8).min_by(|a, b| off(a).total_cmp(&off(b)).then((a & 1).cmp(&(b & 1))));
    sign | nearest.expect("there are codes")
}

/// The nearest bf16, by comparing the two around.
fn slow_bf16(value: f32) -> u16 {
    if value.is_nan() {
        return 0x7fc0;
    }
    let down = (value.to_bits() >> 16) as u16;
    // Beyond the largest finite one the next is 2^128, which infinity stands for.
    let wide = |bits: u16| if bits & 0x7fff == 0x7f80 { 2f64.powi(128) } else { f64::from(value_abs(bits)) };
    if value.is_infinite() {
        return down;
    }
    let (below, above) = (f64::from(value.abs()) - wide(down), wide(down + 1) - f64::from(value.abs()));
    if above < below || (above == below && down & 1 == 1) { down + 1 } else { down }
}

fn value_abs(bits: u16) -> f32 {
    value(bits & 0x7fff)
}

/// Factor and scale of one block, by the module's formulas, n by trying.
fn slow_scale(block: &[u16], kind: Scale) -> (f32, f32) {
    let finite = |bits: &u16| value_abs(*bits).min(value(0x7f7f));
    let amax = block.iter().filter(|bits| !value(**bits).is_nan()).map(finite).fold(1e-4f32, f32::max);
    match kind {
        Scale::F32 => (448f32 / amax, amax * (1f32 / 448f32)),
        Scale::PowerOfTwo | Scale::Ue8m0 => {
            let least = amax * (1f32 / 448f32);
            let n = (-126..=127).find(|n| 2f32.powi(*n) >= least).expect("one is large enough");
            (2f32.powi(-n), 2f32.powi(n))
        }
    }
}

/// Codes and scale of one block.
fn slow_block(block: &[u16], kind: Scale) -> (Vec<u8>, f32) {
    let (factor, scale) = slow_scale(block, kind);
    (block.iter().map(|bits| slow_e4m3(value(*bits) * factor)).collect(), scale)
}

/// e4m3 from a table that [`slow_e4m3`] was asked for once: for many blocks.
struct Slow {
    /// The largest fp32 magnitude that each code takes.
    last: Vec<f32>,
}

impl Slow {
    fn new() -> Slow {
        let last = |code: u8| {
            let middle = ((e4m3_value(code) + e4m3_value(code + 1)) / 2.0) as f32;
            if slow_e4m3(middle) == code { middle } else { f32::from_bits(middle.to_bits() - 1) }
        };
        let mut last: Vec<f32> = (0..0x7e).map(last).collect();
        last.push(f32::INFINITY);
        Slow { last }
    }

    fn e4m3(&self, value: f32) -> u8 {
        let sign = if value.is_sign_negative() { 0x80 } else { 0 };
        sign | if value.is_nan() { 0x7f } else { self.last.partition_point(|last| *last < value.abs()) as u8 }
    }
}

fn cast(kernels: &Kernels, row: &[u16], kind: Scale, offsets: [usize; 3]) -> (Vec<u8>, Vec<u8>) {
    let mut src = Guarded::holding(offsets[0], &bytes_of(row));
    let mut dst = Guarded::new(offsets[1], row.len());
    let mut scales = Guarded::new(offsets[2], row.len() / BLOCK * super::stored(kind));
    // SAFETY: rows of these lengths.
    unsafe { kernels.cast_row(src.ptr().cast(), row.len(), dst.ptr(), scales.ptr(), kind) };
    (dst.contents().to_vec(), scales.contents().to_vec())
}

fn scale_of(scales: &[u8], index: usize, kind: Scale) -> f32 {
    match kind {
        Scale::Ue8m0 => 2f32.powi(i32::from(scales[index]) - 127),
        _ => f32::from_ne_bytes(scales[index * 4..][..4].try_into().expect("four bytes")),
    }
}

#[test]
fn codes_are_the_nearest_for_every_bf16_and_about_every_tie() {
    let slow = Slow::new();
    let mut asked: Vec<f32> = (0..=u16::MAX).map(value).collect();
    for code in 0..0x7e {
        let middle = ((e4m3_value(code) + e4m3_value(code + 1)) / 2.0) as f32;
        for near in [-2i32, -1, 0, 1, 2] {
            asked.push(f32::from_bits(middle.to_bits().wrapping_add_signed(near)));
            asked.push(-f32::from_bits(middle.to_bits().wrapping_add_signed(near)));
        }
    }
    for value in asked {
        assert_eq!(slow.e4m3(value), slow_e4m3(value), "{value:e}");
        assert_eq!(super::portable::encode(value), slow_e4m3(value), "{value:e}");
    }
}

#[test]
fn every_bf16_is_cast_as_defined() {
    let every: Vec<u16> = (0..=u16::MAX).collect();
    // Neighbours in a block differ little, so that few are cast to zero; 509 is odd: all octaves in a block.
    let mixed: Vec<u16> = (0..=u16::MAX).map(|i| i.wrapping_mul(509)).collect();
    for row in [every, mixed] {
        for kind in KINDS {
            let expected: Vec<_> = row.chunks(BLOCK).map(|block| slow_block(block, kind)).collect();
            for kernels in Kernels::available() {
                let (codes, scales) = cast(kernels, &row, kind, [0, 0, 0]);
                for (index, (wanted, scale)) in expected.iter().enumerate() {
                    let got = &codes[index * BLOCK..][..BLOCK];
                    assert_eq!(got, wanted, "{kernels:?} {kind:?}, block {index}");
                    assert_eq!(scale_of(&scales, index, kind), *scale, "{kernels:?} {kind:?}, block {index}");
                }
            }
        }
    }
}

#[test]
fn random_blocks_are_cast_alike_at_any_alignment() {
    let mut random = Random(1);
    let slow = Slow::new();
    for round in 0..400 {
        let middle = random.below(250) as i32 - 125;
        let mut row: Vec<u16> = (0..BLOCK * (1 + random.below(9))).map(|_| random.near(middle)).collect();
        if round % 4 == 0 {
            let at = random.below(row.len());
            row[at] = [0x7f80, 0xff80, 0x7fc0, 0xffff][random.below(4)];
        }
        let offsets = [random.below(64), random.below(64), random.below(64)];
        for kind in KINDS {
            let (codes, scales) = cast(Kernels::portable(), &row, kind, [0, 0, 0]);
            for (index, block) in row.chunks(BLOCK).enumerate() {
                let (factor, scale) = slow_scale(block, kind);
                let wanted: Vec<u8> = block.iter().map(|bits| slow.e4m3(value(*bits) * factor)).collect();
                assert_eq!(codes[index * BLOCK..][..BLOCK], wanted, "{kind:?}");
                assert_eq!(scale_of(&scales, index, kind), scale, "{kind:?}");
            }
            for kernels in Kernels::available() {
                assert_eq!(cast(kernels, &row, kind, offsets), (codes.clone(), scales.clone()), "{kernels:?} {kind:?}");
            }
        }
    }
}

#[test]
fn powers_of_two_are_the_least_that_do() {
    for amax in (0..0x7f80).filter(|bits| value(*bits) >= 1e-4) {
        let mut row = [0u16; BLOCK];
        row[amax as usize % BLOCK] = amax;
        let (_, scales) = cast(Kernels::detect(), &row, Scale::PowerOfTwo, [0, 0, 0]);
        let scale = f64::from(scale_of(&scales, 0, Scale::PowerOfTwo));
        // Exact in fp64.
        assert!(448.0 * scale >= f64::from(value(amax)) && 224.0 * scale < f64::from(value(amax)), "{amax:#x}");
    }
}

#[test]
fn not_a_number_and_infinity_leave_the_others_alone() {
    for kernels in Kernels::available() {
        let mut row = vec![0x3f80u16; BLOCK];
        (row[5], row[77]) = (0x7fc1, 0xff81);
        let (codes, scales) = cast(kernels, &row, Scale::F32, [0, 0, 0]);
        assert_eq!((codes[5], codes[77], codes[0]), (0x7f, 0xff, 0x7e), "{kernels:?}");
        assert_eq!(scale_of(&scales, 0, Scale::F32), 1.0 / 448.0);
        row[6] = 0xff80;
        let (codes, scales) = cast(kernels, &row, Scale::F32, [0, 0, 0]);
        assert_eq!((codes[5], codes[6], codes[0]), (0x7f, 0xfe, 0), "{kernels:?}");
        assert_eq!(scale_of(&scales, 0, Scale::F32), value(0x7f7f) * (1.0 / 448.0));
        let (codes, scales) = cast(kernels, &[0x8000; BLOCK], Scale::F32, [0, 0, 0]);
        assert_eq!((codes[0], scale_of(&scales, 0, Scale::F32)), (0x80, 1e-4 * (1.0 / 448.0)), "{kernels:?}");
    }
}

#[test]
fn every_code_is_cast_back_as_defined() {
    let codes: Vec<u8> = (0..=u8::MAX).collect();
    let mut random = Random(2);
    for _ in 0..100 {
        let scales: Vec<f32> = (0..2).map(|_| value(random.near(0) & 0x7fff) * 1.000_123).collect();
        let bytes: Vec<u8> = scales.iter().flat_map(|scale| scale.to_ne_bytes()).collect();
        let powers = [random.word() as u8, random.word() as u8];
        for kernels in Kernels::available() {
            for kind in [Scale::F32, Scale::Ue8m0] {
                let from = if kind == Scale::F32 { bytes.as_ptr() } else { powers.as_ptr() };
                let mut dst = Guarded::new(random.below(64), 512);
                // SAFETY: two blocks, with two scales.
                unsafe { kernels.uncast_row(codes.as_ptr(), from, 256, dst.ptr().cast(), kind) };
                for (code, got) in words_of(dst.contents()).into_iter().enumerate() {
                    let scale = match (kind, powers[code / BLOCK]) {
                        (Scale::F32, _) => scales[code / BLOCK],
                        (_, 255) => f32::NAN,
                        (_, byte) => 2f64.powi(i32::from(byte) - 127) as f32,
                    };
                    let wanted = slow_bf16(e4m3_value(code as u8) as f32 * scale);
                    assert_eq!(got, wanted, "{kernels:?} {kind:?}, code {code:#x} scale {scale:e}");
                }
            }
        }
    }
}

fn reduce(kernels: &Kernels, rows: &[Vec<u16>], weights: Option<&[f32]>, hidden: usize, offset: usize) -> Vec<u16> {
    let mut held: Vec<_> =
        rows.iter().enumerate().map(|(i, row)| Guarded::holding((offset + 2 * i) % 64, &bytes_of(row))).collect();
    let from: Vec<*const u16> = held.iter_mut().map(|row| row.ptr().cast_const().cast()).collect();
    let mut dst = Guarded::new(offset, 2 * hidden);
    // SAFETY: rows of `hidden` elements.
    unsafe { kernels.reduce_rows(dst.ptr().cast(), &from, weights, hidden) };
    words_of(dst.contents())
}

fn slow_sum(rows: &[Vec<u16>], weights: Option<&[f32]>, at: usize) -> u16 {
    let mut sum = 0f32;
    for (index, row) in rows.iter().enumerate() {
        let product = weights.map_or(value(row[at]), |weights| value(row[at]) * weights[index]);
        sum += product;
    }
    slow_bf16(sum)
}

#[test]
fn sums_are_as_defined_for_any_rows_lengths_and_alignments() {
    let mut random = Random(3);
    for round in 0..300 {
        let hidden = if round % 3 == 0 { 128 * (1 + random.below(9)) } else { random.below(1300) };
        let count = if round % 10 == 0 { random.below(65) } else { random.below(10) };
        // Of all kinds: NaN, infinities and overflow; close to each other, so that they cancel; subnormal.
        let kind = random.below(3);
        let element = |random: &mut Random| match kind {
            0 => random.any(),
            1 => random.near(0),
            _ => random.near(-126),
        };
        let rows: Vec<Vec<u16>> = (0..count).map(|_| (0..hidden).map(|_| element(&mut random)).collect()).collect();
        let weights: Vec<f32> = (0..count).map(|_| value(random.near(0)) * 1.000_321).collect();
        for weights in [None, Some(&weights[..])] {
            let expected: Vec<u16> = (0..hidden).map(|at| slow_sum(&rows, weights, at)).collect();
            for kernels in Kernels::available() {
                let got = reduce(kernels, &rows, weights, hidden, random.below(64));
                assert_eq!(got, expected, "{kernels:?}, {count} rows of {hidden}, weights {weights:?}");
            }
        }
    }
}

#[test]
fn sums_are_rounded_to_the_nearest_even() {
    // 1 and 2^-8 of it are half-way to the next bf16; a little more or less decides.
    let tie = |odd: u16, extra: f32| reduce_scalars(&[value(0x3f80 + odd), 2f32.powi(-8), extra]);
    assert_eq!(tie(0, 0.0), [0x3f80; 3]);
    assert_eq!(tie(1, 0.0), [0x3f82; 3]);
    assert_eq!(tie(0, 2f32.powi(-20)), [0x3f81; 3]);
    assert_eq!(tie(1, -2f32.powi(-20)), [0x3f81; 3]);
    // fp32 has no room for this one after the first sum.
    assert_eq!(tie(0, 2f32.powi(-30)), [0x3f80; 3]);
}

/// One sum of 64 equal elements by each variant; all of the three there may be, the best again where there are fewer.
fn reduce_scalars(values: &[f32]) -> [u16; 3] {
    let rows: Vec<Vec<u16>> = values.iter().map(|value| vec![(value.to_bits() >> 16) as u16; 128]).collect();
    let mut sums = [reduce(Kernels::detect(), &rows, None, 128, 0)[0]; 3];
    for (sum, kernels) in sums.iter_mut().zip(Kernels::available()) {
        *sum = reduce(kernels, &rows, None, 128, 0)[127];
    }
    sums
}

#[test]
#[should_panic(expected = "a weight per row")]
fn a_weight_per_row_or_none() {
    reduce(Kernels::detect(), &[vec![0; 8], vec![0; 8]], Some(&[1.0]), 8, 0);
}

#[test]
fn copies_are_whole_at_any_alignment() {
    let mut random = Random(4);
    for len in (0..300).chain([4096, 14336, 32768 + 17]) {
        let contents: Vec<u8> = (0..len).map(|_| random.word() as u8).collect();
        for kernels in Kernels::available() {
            let mut src = Guarded::holding(random.below(64), &contents);
            let mut plain = Guarded::new(random.below(64), len);
            // SAFETY: rows of `len` bytes.
            unsafe { kernels.copy_row(plain.ptr(), src.ptr(), len) };
            assert_eq!(plain.contents(), contents, "{kernels:?}, {len} bytes");
        }
    }
}
