//! What two ends exchange: bytes before the lane is up, and the headers of active messages.

use crossrail_types::{HEAD_LEN, Head};

/// Longest worker address that is accepted. UCX's are some hundred bytes for each of its devices.
pub(crate) const ADDRESS_MAX: usize = 16 << 10;
/// The first bytes of an introduction; the last is the version of this crate's protocol.
const MAGIC: [u8; 4] = *b"CXU\x04";
/// Bytes of an introduction without the address.
pub(crate) const INTRODUCTION_LEN: usize = 8;

/// The bytes that introduce a worker address of `len` bytes.
pub(crate) fn introduction(len: usize) -> [u8; INTRODUCTION_LEN] {
    let mut bytes = [0; INTRODUCTION_LEN];
    bytes[..4].copy_from_slice(&MAGIC);
    bytes[4..].copy_from_slice(&(len as u32).to_le_bytes());
    bytes
}

/// The length of the address that follows.
///
/// # Errors
/// What is wrong with the introduction.
pub(crate) fn introduced(bytes: &[u8; INTRODUCTION_LEN]) -> Result<usize, String> {
    let [a, b, c, version, len @ ..] = *bytes;
    if [a, b, c] != MAGIC[..3] {
        return Err("it introduces itself by other bytes than a UCX lane does".to_owned());
    }
    if version != MAGIC[3] {
        return Err(format!("it speaks version {version} of the UCX lane's protocol, this end version {}", MAGIC[3]));
    }
    let len = u32::from_le_bytes(len) as usize;
    if len == 0 || len > ADDRESS_MAX {
        return Err(format!("it announces a worker address of {len} bytes; 1 to {ADDRESS_MAX} are accepted"));
    }
    Ok(len)
}

/// Largest payload that a frame's message carries itself: with its headers, it fits the 8 KiB segments of UCX's
/// transports. Longer payloads follow in pieces.
pub(crate) const INLINE_MAX: usize = 8064;
/// Bytes of a message before a frame's head.
pub(crate) const PREFIX_LEN: usize = 16;
/// Largest message: prefix, head and inline payload.
pub(crate) const MESSAGE_MAX: usize = PREFIX_LEN + HEAD_LEN + INLINE_MAX;
/// Bytes after the prefix of the first message, so that it goes the way of longer messages: UCX connects each way when
/// it is first used.
pub(crate) const HELLO_PADDING: usize = 4096;
/// Bytes of a piece's header: its number.
pub(crate) const PIECE_HEADER: usize = 4;
/// Largest piece of a payload that its sender stages: eight of them fit a cache.
pub(crate) const STAGED_PIECE_MAX: usize = 256 << 10;
/// Largest piece of a payload that goes from its memory to its place without a copy: each costs a message each way.
pub(crate) const PIECE_MAX: usize = 1 << 20;
/// Frames that may be sent before the receiver has said that it consumed them.
pub(crate) const FRAMES: u32 = 128;
/// Pieces that may be sent before the receiver has fetched them, and that it may have fetched before it consumes them.
pub(crate) const PIECES: u32 = 8;

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The first message in either direction: the connection works.
    Hello,
    /// Only `consumed` matters.
    Credit,
    /// A frame with this number.
    Frame(u32),
}

/// The prefix of a message: what it is, and how many frames its sender has consumed in all.
pub(crate) fn prefix(kind: Kind, consumed: u32) -> [u8; PREFIX_LEN] {
    let (code, number) = match kind {
        Kind::Hello => (0, 0),
        Kind::Credit => (1, 0),
        Kind::Frame(number) => (2, number),
    };
    let mut bytes = [0; PREFIX_LEN];
    bytes[0] = code;
    bytes[4..8].copy_from_slice(&number.to_le_bytes());
    bytes[8..12].copy_from_slice(&consumed.to_le_bytes());
    bytes
}

/// A message's kind, how many frames the peer has consumed, and for a frame its head and inline payload.
pub(crate) type Message<'a> = (Kind, u32, Option<(Head, &'a [u8])>);

/// Reads a message: its kind, how many frames the peer has consumed, and for a frame its head and inline payload.
///
/// # Errors
/// What the peer got wrong.
pub(crate) fn message(bytes: &[u8]) -> Result<Message<'_>, String> {
    let Some((prefix, rest)) = bytes.split_first_chunk::<PREFIX_LEN>() else {
        return Err(format!("a message of {} bytes, shorter than its prefix", bytes.len()));
    };
    let word = |at: usize| prefix[at..].first_chunk().map_or(0, |four| u32::from_le_bytes(*four));
    let consumed = word(8);
    match (prefix[0], rest.split_first_chunk::<HEAD_LEN>()) {
        (0, _) if rest.len() == HELLO_PADDING => Ok((Kind::Hello, consumed, None)),
        (1, None) if rest.is_empty() => Ok((Kind::Credit, consumed, None)),
        (2, Some((head, inline))) => {
            let head = Head(*head);
            let payload = head.payload_len() as usize;
            let expected = if payload <= INLINE_MAX { payload } else { 0 };
            if inline.len() != expected {
                let have = inline.len();
                return Err(format!(
                    "a frame with a payload of {payload} bytes came with {have} of them, not {expected}"
                ));
            }
            Ok((Kind::Frame(word(4)), consumed, Some((head, inline))))
        }
        (code, _) => Err(format!("a message of kind {code} and {} bytes", bytes.len())),
    }
}

/// The number in a piece's header; `None`: it is no such header.
pub(crate) fn piece(header: &[u8]) -> Option<u32> {
    header.try_into().ok().map(u32::from_le_bytes)
}

/// The entry of a number in a table of `len`, a power of two.
pub(crate) fn slot(number: u32, len: u32) -> usize {
    (number % len) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn introductions_are_bounded() {
        assert_eq!(introduced(&introduction(300)), Ok(300));
        for (bytes, expected) in [
            (introduction(0), "0 bytes"),
            (introduction(ADDRESS_MAX + 1), "are accepted"),
            (introduction(u32::MAX as usize), "are accepted"),
            (*b"GET / HT", "other bytes"),
            (*b"CXU\x01\x10\0\0\0", "version 1"),
        ] {
            let error = introduced(&bytes).expect_err("refused");
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn messages_are_read_as_they_were_written_and_others_are_refused() {
        let consumed = 77;
        let written = |kind, head: Option<Head>, inline: &[u8]| {
            let mut bytes = prefix(kind, consumed).to_vec();
            bytes.extend(head.iter().flat_map(|head| head.0));
            bytes.extend_from_slice(inline);
            bytes
        };
        assert_eq!(message(&written(Kind::Hello, None, &[0; HELLO_PADDING])), Ok((Kind::Hello, consumed, None)));
        assert_eq!(message(&written(Kind::Credit, None, &[])), Ok((Kind::Credit, consumed, None)));
        let head = Head::new(3, 5);
        let frame = written(Kind::Frame(9), Some(head), b"hello");
        assert_eq!(message(&frame), Ok((Kind::Frame(9), consumed, Some((head, &b"hello"[..])))));
        let large = Head::new(3, 1 << 20);
        let frame = written(Kind::Frame(9), Some(large), &[]);
        assert_eq!(message(&frame), Ok((Kind::Frame(9), consumed, Some((large, &[][..])))));
        for bad in [
            written(Kind::Hello, None, &[]),
            written(Kind::Hello, None, &[])[..PREFIX_LEN - 1].to_vec(),
            written(Kind::Frame(0), None, &[0; HEAD_LEN - 1]),
            written(Kind::Frame(0), Some(head), b"hell"),
            written(Kind::Frame(0), Some(head), b"hello!"),
            written(Kind::Frame(0), Some(large), b"x"),
            written(Kind::Credit, None, &[1]),
            vec![9; PREFIX_LEN],
        ] {
            assert!(message(&bad).is_err(), "{bad:?}");
        }
        assert_eq!(piece(&7_u32.to_le_bytes()), Some(7));
        assert_eq!((piece(&[]), piece(&[0; 5])), (None, None));
    }
}
