//! Test data that depends on its position, so that a byte that is missing, repeated or out of place is seen.

use crossrail_types::{Error, ErrorKind, Result};

const WORD: usize = 8;

/// Bytes `offset..offset + out.len()` of the endless pattern of `seed`.
pub fn fill(seed: u64, offset: usize, out: &mut [u8]) {
    let mut index = offset / WORD;
    let (head, rest) = out.split_at_mut(out.len().min((WORD - offset % WORD) % WORD));
    if !head.is_empty() {
        let from = offset % WORD;
        head.copy_from_slice(&word(seed, index)[from..from + head.len()]);
        index += 1;
    }
    for chunk in rest.chunks_mut(WORD) {
        chunk.copy_from_slice(&word(seed, index)[..chunk.len()]);
        index += 1;
    }
}

/// Checks bytes that should be `offset..offset + bytes.len()` of the pattern of `seed`.
///
/// # Errors
/// `Protocol` naming the first byte that differs, what it is and what was sent.
pub fn verify(seed: u64, offset: usize, bytes: &[u8]) -> Result<()> {
    let mut expected = [0; 4096];
    for (block, chunk) in bytes.chunks(expected.len()).enumerate() {
        let at = offset + block * expected.len();
        let expected = &mut expected[..chunk.len()];
        fill(seed, at, expected);
        if expected == chunk {
            continue;
        }
        let wrong = expected.iter().zip(chunk).position(|(a, b)| a != b).unwrap_or_default();
        return Err(Error::new(
            ErrorKind::Protocol,
            "verify",
            format!("byte {} arrived as {:#04x} but was sent as {:#04x}", at + wrong, chunk[wrong], expected[wrong]),
        ));
    }
    Ok(())
}

/// One step of SplitMix64: every bit of the position changes every bit of the word.
#[inline]
fn word(seed: u64, index: usize) -> [u8; WORD] {
    let mut x = seed.wrapping_add((index as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (x ^ (x >> 31)).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_part_is_the_same_as_that_part_of_the_whole() {
        let mut whole = [0; 200];
        fill(7, 0, &mut whole);
        for start in 0..40 {
            for len in [0, 1, 2, 7, 8, 9, 63, 100] {
                let mut part = vec![0; len];
                fill(7, start, &mut part);
                assert_eq!(part, whole[start..start + len], "start {start} len {len}");
            }
        }
    }

    #[test]
    fn every_single_wrong_byte_is_found_and_named() {
        let mut bytes = vec![0; 5000];
        fill(1, 3, &mut bytes);
        verify(1, 3, &bytes).unwrap();
        for at in [0, 1, 4095, 4096, 4999] {
            let mut bad = bytes.clone();
            bad[at] ^= 1;
            let error = verify(1, 3, &bad).unwrap_err();
            assert!(error.detail.starts_with(&format!("byte {} ", at + 3)), "{error}");
        }
        assert!(verify(2, 3, &bytes).is_err(), "another seed is another pattern");
        assert!(verify(1, 11, &bytes).is_err(), "a shift is seen");
    }
}
