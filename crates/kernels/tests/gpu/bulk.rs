//! Copies by bulk copies, within a GPU and between two.

use crossrail_kernels::{BULK_STAGE, BULK_STAGES, CopyArgs, sources};

use crate::{Gpu, LIMIT, Numbers, assert_same};

/// Lengths round the stages, and odd ones.
const LENGTHS: [usize; 10] = [
    0,
    1,
    15,
    16,
    BULK_STAGE as usize - 1,
    BULK_STAGE as usize,
    (BULK_STAGE * BULK_STAGES) as usize,
    (BULK_STAGE * (BULK_STAGES + 1)) as usize + 17,
    1_000_003,
    3_333_333,
];

/// Copies from `source` on one GPU to `target` on another (or the same), by `by`'s kernel.
fn check(by: &Gpu, from: &Gpu, to: &Gpu) {
    // Server GPUs from 9.0 on have all that it takes.
    let arch = by.context.device().arch().unwrap();
    assert!(by.kernels.has_bulk() == sources::has_bulk(arch) || arch.major >= 12);
    let bytes = Numbers(0xb0b).bytes(4 << 20);
    let source = from.device(&bytes);
    for (case, len) in LENGTHS.into_iter().enumerate() {
        // Aligned alike, in whole vectors and not; and not alike, where it is an ordinary copy.
        for (start, end) in [(0, 0), (16, 48), (5, 5), (21, 37), (3, 14)] {
            let target = to.device(&vec![1; bytes.len()]);
            let args =
                CopyArgs { dst: target.address() + end as u64, src: source.address() + start as u64, len: len as u64 };
            let blocks = [None, Some(1), Some(5)][(case + start) % 3];
            // SAFETY: both areas are valid and don't overlap; they live until the wait is over.
            unsafe { by.kernels.copy_bulk(&by.stream, &args, blocks).unwrap() };
            by.stream.wait(LIMIT).unwrap();
            let mut expected = vec![1; bytes.len()];
            expected[end..end + len].copy_from_slice(&bytes[start..start + len]);
            assert_same(&to.bytes(&target), &expected, &format!("{len} bytes, {start} to {end}, {blocks:?} blocks"));
        }
    }
}

#[test]
fn a_bulk_copy_takes_any_length_alignment_and_number_of_blocks() {
    let Some(gpu) = Gpu::new() else { return };
    check(&gpu, &gpu, &gpu);
}

#[test]
fn bulk_copies_write_to_and_read_from_another_gpu() {
    let Some((first, second)) = Gpu::pair() else { return };
    check(&first, &first, &second);
    check(&first, &second, &first);
}

/// Each end is an allocation of its own, so that compute-sanitizer (memcheck) sees a byte beside it.
#[test]
fn a_bulk_copy_touches_nothing_beside_its_ends() {
    let Some(gpu) = Gpu::new() else { return };
    for len in [1, 16, 4097, BULK_STAGE as usize + 1] {
        let bytes = Numbers(0xed6e).bytes(len);
        let (source, target) = (gpu.device(&bytes), gpu.device(&vec![0; len]));
        let args = CopyArgs { dst: target.address(), src: source.address(), len: len as u64 };
        // SAFETY: as above.
        unsafe { gpu.kernels.copy_bulk(&gpu.stream, &args, None).unwrap() };
        gpu.stream.wait(LIMIT).unwrap();
        assert_same(&gpu.bytes(&target), &bytes, "ends of their own");
    }
}
