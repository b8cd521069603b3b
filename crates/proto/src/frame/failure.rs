//! Why something failed, as a code in a head's flags and control bytes.

use super::{Bytes, CONTROL_MAX};
use crate::{Failure, RegionFault};

const TRUNCATED: u8 = 1;
const CANCELLED: u8 = 2;
const GONE: u8 = 3;
const BOUNDS: u8 = 4;
const ACCESS: u8 = 5;
const CLOSED: u8 = 6;
const DEVICE: u8 = 7;
const FULL: u8 = 8;

/// Whether a failure of that code goes with so long a payload.
pub(super) fn fits(code: u8, payload: u32) -> bool {
    match code {
        TRUNCATED => payload == 16,
        DEVICE => payload <= CONTROL_MAX,
        _ => payload == 0,
    }
}

/// The same where nothing can be truncated.
pub(super) fn fits_without_lengths(code: u8, payload: u32) -> bool {
    code != TRUNCATED && fits(code, payload)
}

/// A failure as code and control bytes.
pub(crate) fn encode_failure(failure: &Failure) -> (u8, Bytes) {
    let code = match failure {
        Failure::Truncated { message, buffer } => {
            return (TRUNCATED, Bytes::EMPTY.push(&message.to_le_bytes()).push(&buffer.to_le_bytes()));
        }
        Failure::Cancelled | Failure::Withdrawn | Failure::PeerDead(_) => CANCELLED,
        Failure::Region(RegionFault::Gone) => GONE,
        Failure::Region(RegionFault::Bounds) => BOUNDS,
        Failure::Region(RegionFault::Access) => ACCESS,
        Failure::Region(RegionFault::Full) => FULL,
        Failure::Device(why) => return (DEVICE, Bytes::EMPTY.push(beginning(why, CONTROL_MAX as usize).as_bytes())),
        Failure::Closed => CLOSED,
    };
    (code, Bytes::EMPTY)
}

/// As much of `text` as fits into `max` bytes.
fn beginning(text: &str, max: usize) -> &str {
    let mut end = text.len().min(max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// The failure that code and control bytes say.
pub fn decode_failure(code: u8, bytes: &[u8]) -> Result<Failure, String> {
    Ok(match code {
        TRUNCATED => {
            super::expect(bytes, 16)?;
            Failure::Truncated { message: super::long(bytes, 0), buffer: super::long(bytes, 8) }
        }
        CANCELLED => Failure::Cancelled,
        GONE => Failure::Region(RegionFault::Gone),
        BOUNDS => Failure::Region(RegionFault::Bounds),
        ACCESS => Failure::Region(RegionFault::Access),
        FULL => Failure::Region(RegionFault::Full),
        DEVICE => {
            let shown = |c: char| if c.is_control() { '?' } else { c };
            let text: String = String::from_utf8_lossy(bytes).chars().map(shown).collect();
            Failure::Device(format!("at the peer: {text}"))
        }
        CLOSED => Failure::Closed,
        other => return Err(format!("failure of unknown code {other}")),
    })
}

/// Why the peer wants an operation of its own to end, by code and control bytes.
pub fn decode_abort(code: u8, bytes: &[u8]) -> Result<Failure, String> {
    match code {
        0 | CANCELLED => Ok(Failure::Cancelled),
        DEVICE => decode_failure(code, bytes),
        other => Err(format!("abort of unknown code {other}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_a_failure_is_cut_between_characters() {
        let why = format!("{}\u{e9} and more", "x".repeat(63));
        let (code, bytes) = encode_failure(&Failure::Device(why));
        assert_eq!(bytes.len, 63);
        let told = decode_failure(code, &bytes.bytes[..63]);
        assert_eq!(told, Ok(Failure::Device(format!("at the peer: {}", "x".repeat(63)))));
        let hostile = decode_failure(DEVICE, b"a\x1b[2J\xff");
        assert_eq!(hostile, Ok(Failure::Device("at the peer: a?[2J\u{fffd}".to_owned())));
    }
}
