//! The control messages of a receive into device memory: which bytes of the stream lie where.

use libc::{SOL_SOCKET, c_int};

/// Control message: bytes that were copied into the caller's buffer, because their packet was not split.
const LINEAR: c_int = 78;
/// Control message: bytes that lie in the dmabuf.
const DMABUF: c_int = 79;
/// Bytes of struct cmsghdr, and of struct dmabuf_cmsg: offset u64, length, token, dmabuf, flags u32.
const HEAD: usize = 16;
const BODY: usize = 24;
/// Bytes of control messages for `fragments`.
pub(super) const fn room(fragments: usize) -> usize {
    fragments * (HEAD + BODY)
}

/// Where consecutive bytes of the stream lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fragment {
    /// In the bound memory, from `offset` on. `token` is returned once they are copied.
    Device {
        /// Offset into the dmabuf in bytes.
        offset: u64,
        /// Length in bytes.
        len: u32,
        /// What the kernel lends the pages under.
        token: u32,
    },
    /// In the caller's buffer, behind what earlier fragments of this receive have put there.
    Host {
        /// Length in bytes.
        len: u32,
    },
}

impl Fragment {
    /// Length in bytes.
    pub fn len(&self) -> u32 {
        match self {
            Fragment::Device { len, .. } | Fragment::Host { len } => *len,
        }
    }

    /// Whether it has no bytes; none that is received has.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What a receive must agree with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Expected {
    /// The number of the bound dmabuf, and its bytes.
    pub(super) dmabuf: u32,
    pub(super) size: u64,
    /// What recvmsg returned.
    pub(super) received: usize,
    /// Bytes of the caller's buffer.
    pub(super) buffer: usize,
}

/// The fragments in the control messages `bytes`, in the stream's order. Messages of other kinds are skipped.
///
/// # Errors
/// What is wrong: a message that is cut off, a fragment outside the bound memory or of another, lengths that do not add
/// up to the bytes received. The place of none of the bytes is known then.
pub(super) fn fragments(mut bytes: &[u8], expected: Expected) -> Result<Vec<Fragment>, String> {
    let mut found = Vec::new();
    let (mut total, mut host) = (0u64, 0u64);
    while bytes.len() >= HEAD {
        let number = |at: usize| bytes[at..].first_chunk().map_or(0, |four| i32::from_ne_bytes(*four));
        let len = bytes.first_chunk().map_or(0, |eight| usize::from_ne_bytes(*eight));
        let (level, kind) = (number(8), number(12));
        let Some(body) = bytes.get(HEAD..len) else {
            return Err(format!("a control message of {len} bytes, of which {} are there", bytes.len()));
        };
        if level == SOL_SOCKET && (kind == LINEAR || kind == DMABUF) {
            let fragment = fragment(kind, body, expected)?;
            total += u64::from(fragment.len());
            if let Fragment::Host { len } = fragment {
                host += u64::from(len);
            }
            found.push(fragment);
        }
        bytes = bytes.get(len.next_multiple_of(align_of::<usize>())..).unwrap_or(&[]);
    }
    if !bytes.is_empty() && bytes.iter().any(|byte| *byte != 0) {
        return Err(format!("a control message of {} bytes", bytes.len()));
    }
    // Packets of another queue: the kernel copies them as ever, never together with others, and says nothing.
    if found.is_empty() && (1..=expected.buffer).contains(&expected.received) {
        return Ok(vec![Fragment::Host { len: expected.received as u32 }]);
    }
    if total != expected.received as u64 {
        return Err(format!("{} bytes were received and control messages place {total}", expected.received));
    }
    if host > expected.buffer as u64 {
        return Err(format!("{host} bytes were placed in a buffer of {}", expected.buffer));
    }
    Ok(found)
}

fn fragment(kind: c_int, body: &[u8], expected: Expected) -> Result<Fragment, String> {
    let Some(body) = body.get(..BODY) else {
        return Err(format!("a fragment's control message has {} bytes instead of {BODY}", body.len()));
    };
    let u32_at = |at: usize| body[at..].first_chunk().map_or(0, |four| u32::from_ne_bytes(*four));
    let offset = body.first_chunk().map_or(0, |eight| u64::from_ne_bytes(*eight));
    let (len, token, dmabuf) = (u32_at(8), u32_at(12), u32_at(16));
    if len == 0 {
        return Err("a fragment without bytes".to_owned());
    }
    if kind == LINEAR {
        return Ok(Fragment::Host { len });
    }
    if dmabuf != expected.dmabuf {
        return Err(format!("a fragment of dmabuf {dmabuf}; dmabuf {} is bound", expected.dmabuf));
    }
    if offset.checked_add(u64::from(len)).is_none_or(|end| end > expected.size) {
        return Err(format!("a fragment of {len} bytes at {offset} of {} bytes of memory", expected.size));
    }
    Ok(Fragment::Device { offset, len, token })
}

/// Ranges of `tokens` as the kernel takes them back: the first of each and how many follow each other.
pub(super) fn ranges(mut tokens: Vec<u32>) -> Vec<(u32, u32)> {
    tokens.sort_unstable();
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for token in tokens {
        match ranges.last_mut() {
            Some((first, count)) if first.checked_add(*count) == Some(token) => *count += 1,
            _ => ranges.push((token, 1)),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXPECTED: Expected = Expected { dmabuf: 3, size: 1 << 20, received: 0, buffer: 256 };

    /// As the kernel's put_cmsg writes it.
    fn message(kind: c_int, offset: u64, len: u32, token: u32, dmabuf: u32) -> Vec<u8> {
        let mut bytes = (HEAD + BODY).to_ne_bytes().to_vec();
        bytes.extend(SOL_SOCKET.to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(offset.to_ne_bytes());
        for word in [len, token, dmabuf, 0] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes
    }

    fn timestamp() -> Vec<u8> {
        let mut bytes = (HEAD + 4).to_ne_bytes().to_vec();
        bytes.extend(SOL_SOCKET.to_ne_bytes());
        bytes.extend(29i32.to_ne_bytes());
        bytes.extend([1; 8]); // four bytes and padding
        bytes
    }

    fn of(bytes: &[u8], received: usize) -> Result<Vec<Fragment>, String> {
        fragments(bytes, Expected { received, ..EXPECTED })
    }

    #[test]
    fn fragments_are_in_the_order_of_the_stream() {
        let bytes = [
            message(DMABUF, 4096, 1448, 9, 3),
            timestamp(),
            message(LINEAR, 0, 100, 0, 0),
            message(DMABUF, 0, 52, 4, 3),
        ]
        .concat();
        let device = |offset, len, token| Fragment::Device { offset, len, token };
        assert_eq!(of(&bytes, 1600), Ok(vec![device(4096, 1448, 9), Fragment::Host { len: 100 }, device(0, 52, 4)]));
        assert_eq!(of(&[], 0), Ok(vec![]));
        assert_eq!(of(&timestamp(), 200), Ok(vec![Fragment::Host { len: 200 }]));
        assert!(of(&[], 257).is_err(), "more than the buffer holds");
    }

    #[test]
    fn malformed_messages_are_refused() {
        let good = message(DMABUF, 4096, 1448, 9, 3);
        for cut in 1..good.len() {
            assert!(of(&good[..cut], 1448).is_err(), "{cut} of its bytes");
        }
        for len in [0, 1, 15, 41, usize::MAX] {
            let mut bytes = good.clone();
            bytes[..8].copy_from_slice(&len.to_ne_bytes());
            assert!(of(&bytes, 1448).is_err(), "length {len}");
        }
        let wrong = [
            (message(DMABUF, (1 << 20) - 1000, 1448, 9, 3), 1448, "outside the memory"),
            (message(DMABUF, u64::MAX, 1448, 9, 3), 1448, "offset that overflows"),
            (message(DMABUF, 0, 1448, 9, 2), 1448, "memory of another binding"),
            (message(DMABUF, 0, 0, 9, 3), 0, "no bytes"),
            (message(DMABUF, 0, 1448, 9, 3), 1449, "fewer bytes than were received"),
            (message(LINEAR, 0, 257, 0, 0), 257, "more than the buffer holds"),
            ([good.clone(), message(LINEAR, 0, u32::MAX, 0, 0)].concat(), 1448, "more bytes than were received"),
        ];
        for (bytes, received, what) in wrong {
            assert!(of(&bytes, received).is_err(), "{what}");
        }
    }

    #[test]
    fn no_bytes_make_it_panic() {
        let mut state = 1u64;
        for _ in 0..20_000 {
            let mut bytes = [message(DMABUF, 4096, 1448, 9, 3), message(LINEAR, 0, 9, 0, 0)].concat();
            for _ in 0..4 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let at = (state >> 33) as usize % bytes.len();
                bytes[at] = (state >> 56) as u8;
            }
            for fragment in of(&bytes, 1457).unwrap_or_default() {
                assert!(!matches!(fragment, Fragment::Device { offset, len, .. } if offset + u64::from(len) > 1 << 20));
            }
        }
    }

    #[test]
    fn tokens_are_returned_in_ranges() {
        assert_eq!(ranges(vec![7, 5, 6, 9, u32::MAX, 1]), [(1, 1), (5, 3), (9, 1), (u32::MAX, 1)]);
        assert_eq!(ranges(vec![]), []);
    }
}
