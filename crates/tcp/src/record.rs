//! Records: the framing of a checked lane.
//!
//! ```text
//! length u32 | sum of the bytes u32 | sum of the record's number and the two before u32 | length bytes
//! ```
//!
//! Integers are little-endian, sums are CRC-32C: its polynomial differs from Ethernet's, so an error that the NIC's
//! check misses is not missed here for the same reason. The length has its own checksum, because a corrupt one would
//! make the receiver wait for bytes that are never sent. The sequence number counts the records of one direction from 0
//! and is not transmitted: records that are lost, duplicated or reordered are detected as well. Every error burst of up
//! to 32 bits is detected, any other but for one in 2^32.

use crc_fast::CrcAlgorithm::Crc32Iscsi;
use crossrail_transport::LaneError;

/// Length of a record's head in bytes.
pub(crate) const RECORD_HEAD: usize = 12;
/// Maximum bytes in a record: few enough to be in the cache still when they are copied into place.
pub(crate) const RECORD_MAX: usize = 32 * 1024;

fn sum(bytes: &[u8]) -> [u8; 4] {
    // The upper half of a 32-bit sum is zero.
    (crc_fast::checksum(Crc32Iscsi, bytes) as u32).to_le_bytes()
}

/// Sum over a record's number, length and the sum of its bytes.
fn head_sum(number: u64, head: &[u8; 8]) -> [u8; 4] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes[8..].copy_from_slice(head);
    sum(&bytes)
}

/// Writes the head of record `number` into the first [`RECORD_HEAD`] bytes of `record`; the others are its bytes, and
/// at most [`RECORD_MAX`].
pub(crate) fn seal(number: u64, record: &mut [u8]) {
    let Some((head, bytes)) = record.split_first_chunk_mut::<RECORD_HEAD>() else { return };
    let mut start = [0; 8];
    start[..4].copy_from_slice(&(bytes.len() as u32).to_le_bytes());
    start[4..].copy_from_slice(&sum(bytes));
    head[..8].copy_from_slice(&start);
    head[8..].copy_from_slice(&head_sum(number, &start));
}

/// Checks record `number` at the start of `input`; returns the number of its bytes, which follow its head. `None`: it
/// is incomplete.
///
/// # Errors
/// `Corrupt`: a sum differs. `Protocol`: a length that no honest peer sends.
pub(crate) fn open(number: u64, input: &[u8]) -> Result<Option<usize>, LaneError> {
    let Some((head, rest)) = input.split_first_chunk::<RECORD_HEAD>() else { return Ok(None) };
    let [a, b, c, d, e, f, g, h, check @ ..] = *head;
    if check != head_sum(number, &[a, b, c, d, e, f, g, h]) {
        return Err(LaneError::Corrupt(format!("the checksum of the head of record {number} differs")));
    }
    let length = u32::from_le_bytes([a, b, c, d]) as usize;
    if length == 0 || length > RECORD_MAX {
        return Err(LaneError::Protocol(format!("a record of {length} bytes; they have 1 to {RECORD_MAX}")));
    }
    let Some(bytes) = rest.get(..length) else { return Ok(None) };
    if sum(bytes) != [e, f, g, h] {
        return Err(LaneError::Corrupt(format!("the checksum of record {number}, {length} bytes, differs")));
    }
    Ok(Some(length))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(number: u64, bytes: &[u8]) -> Vec<u8> {
        let mut record = vec![0; RECORD_HEAD];
        record.extend_from_slice(bytes);
        seal(number, &mut record);
        record
    }

    #[test]
    fn every_changed_byte_is_noticed() {
        let whole = record(7, b"forty bytes of a frame, and some beyond.");
        assert_eq!(open(7, &whole), Ok(Some(whole.len() - RECORD_HEAD)));
        for at in 0..whole.len() {
            for change in 1..=255 {
                let mut changed = whole.clone();
                changed[at] ^= change;
                assert!(matches!(open(7, &changed), Err(LaneError::Corrupt(_))), "byte {at} xor {change}");
            }
            assert_eq!(open(7, &whole[..at]), Ok(None), "{at} bytes");
        }
    }

    #[test]
    fn a_record_in_anothers_place_is_noticed() {
        for number in [0, 6, 8, u64::MAX] {
            assert!(matches!(open(number, &record(7, b"bytes")), Err(LaneError::Corrupt(_))), "{number}");
        }
    }

    #[test]
    fn lengths_are_bounded() {
        for length in [0, RECORD_MAX + 1] {
            assert!(matches!(open(0, &record(0, &vec![1; length])), Err(LaneError::Protocol(_))), "{length}");
        }
    }
}
