//! Requests and answers after the handshake: a length of four bytes, then postcard. A frame carries the number of its
//! call; long lists are split into several frames.

use std::time::Duration;

use crossrail_types::{Error, ErrorKind};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Longest body of a frame, checked before anything is allocated.
pub const FRAME_MAX: usize = 4 << 20;
/// Bytes of entries beyond which answers are split.
pub(super) const PART: usize = 1 << 20;
/// Bytes in front of a frame's body.
pub const HEAD: usize = 4;

/// A value, written and read in one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Value<'a>(pub &'a [u8]);

impl Serialize for Value<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(self.0)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Value<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Value<'a>, D::Error> {
        <&'a [u8]>::deserialize(deserializer).map(Value)
    }
}

/// A client's request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request<'a> {
    /// Write a key; under the lease, if not 0.
    Put {
        /// The key.
        key: &'a str,
        /// Its value.
        #[serde(borrow)]
        value: Value<'a>,
        /// The lease, or 0.
        lease: i64,
    },
    /// Read a key.
    Get(&'a str),
    /// All keys below a prefix.
    List(&'a str),
    /// Delete a key.
    Delete(&'a str),
    /// Delete all keys below a prefix.
    DeletePrefix(&'a str),
    /// Write a key if it was last written by `expected` (0: if it is absent).
    CompareAndSet {
        /// The key.
        key: &'a str,
        /// The revision, or 0.
        expected: u64,
        /// Its value.
        #[serde(borrow)]
        value: Value<'a>,
        /// The lease, or 0.
        lease: i64,
    },
    /// Answer when all keys are there, or after the time.
    Wait {
        /// The keys.
        #[serde(borrow)]
        keys: Vec<&'a str>,
        /// In microseconds.
        timeout_us: u64,
    },
    /// Grant a lease of this many microseconds.
    Grant(u64),
    /// Renew a lease.
    Renew(i64),
    /// Revoke a lease.
    Revoke(i64),
    /// Watch the changes below a prefix after a revision, until [`Request::Unwatch`].
    Watch {
        /// The prefix.
        prefix: &'a str,
        /// The revision.
        after: u64,
    },
    /// End the watch with this call number.
    Unwatch(u64),
}

/// One key with its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Item<'a> {
    /// The key.
    pub key: &'a str,
    /// Its value.
    #[serde(borrow)]
    pub value: Value<'a>,
    /// The change that wrote it.
    pub revision: u64,
}

/// One change, for a watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Change<'a> {
    /// Written.
    Put(#[serde(borrow)] Item<'a>),
    /// Deleted, or its lease ended.
    Gone {
        /// The key.
        key: &'a str,
        /// The change.
        revision: u64,
    },
}

/// The store's answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer<'a> {
    /// Written by this change.
    Written(u64),
    /// The key is not as expected, or not there.
    Not,
    /// Some of the entries asked for.
    Entries {
        /// The entries.
        #[serde(borrow)]
        items: Vec<Item<'a>>,
        /// The store's revision.
        revision: u64,
        /// Whether another frame of them follows.
        more: bool,
    },
    /// Number of keys deleted.
    Deleted(u64),
    /// A lease and its time in microseconds.
    Granted(i64, u64),
    /// Done: renewed, revoked, watching.
    Done,
    /// The wait timed out; the first missing keys, and the number of all missing keys.
    Missing(#[serde(borrow)] Vec<&'a str>, u64),
    /// Changes for a watch.
    Changes(#[serde(borrow)] Vec<Change<'a>>),
    /// The call failed; a watch has ended.
    Failed(#[serde(borrow)] Failure<'a>),
}

/// Why a call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure<'a> {
    /// What a caller branches on.
    pub kind: FailureKind,
    /// What happened, for people.
    pub detail: &'a str,
    /// What to do about it; empty: nothing.
    pub hint: &'a str,
}

/// The kinds of [`Failure`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FailureKind {
    /// `ErrorKind::Usage`
    Usage,
    /// `ErrorKind::Exhausted`
    Exhausted,
    /// `ErrorKind::Closed`
    Closed,
}

impl Failure<'_> {
    /// As an error of `operation`.
    pub(super) fn error(&self, operation: &str) -> Error {
        let kind = match self.kind {
            FailureKind::Usage => ErrorKind::Usage,
            FailureKind::Exhausted => ErrorKind::Exhausted,
            FailureKind::Closed => ErrorKind::Closed,
        };
        let error = Error::new(kind, operation, self.detail);
        if self.hint.is_empty() { error } else { error.with_hint(self.hint) }
    }
}

/// A call's number and what it carries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frame<T> {
    /// The call.
    pub call: u64,
    /// A request or an answer.
    pub body: T,
}

/// Appends a frame to `out`; `out` is unchanged when the frame would be longer than [`FRAME_MAX`] (`None`).
pub fn encode<T: Serialize>(out: &mut Vec<u8>, call: u64, body: T) -> Option<()> {
    let start = out.len();
    out.extend_from_slice(&[0; HEAD]);
    let limit = start + HEAD + FRAME_MAX;
    if postcard::serialize_with_flavor(&Frame { call, body }, Tail { out, limit }).is_err() {
        out.truncate(start);
        return None;
    }
    let len = (out.len() - start - HEAD) as u32;
    out[start..start + HEAD].copy_from_slice(&len.to_le_bytes());
    Some(())
}

/// Lets postcard append to a buffer, up to a length.
struct Tail<'a> {
    out: &'a mut Vec<u8>,
    limit: usize,
}

impl postcard::ser_flavors::Flavor for Tail<'_> {
    type Output = ();

    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.try_extend(&[byte])
    }

    fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
        if self.out.len() + bytes.len() > self.limit {
            return Err(postcard::Error::SerializeBufferFull);
        }
        self.out.extend_from_slice(bytes);
        Ok(())
    }

    fn finalize(self) -> postcard::Result<()> {
        Ok(())
    }
}

/// The body that `bytes` begin with, and what it takes in all. `None`: not all of it is there yet.
///
/// # Errors
/// A length beyond [`FRAME_MAX`], for people.
pub fn split(bytes: &[u8]) -> Result<Option<(&[u8], usize)>, String> {
    let Some((head, rest)) = bytes.split_first_chunk::<HEAD>() else { return Ok(None) };
    let len = u32::from_le_bytes(*head) as usize;
    if len > FRAME_MAX {
        return Err(format!("a frame announces {len} bytes, more than the {FRAME_MAX} accepted"));
    }
    Ok(rest.get(..len).map(|body| (body, HEAD + len)))
}

/// A request out of a frame's body.
///
/// # Errors
/// Why it is none.
pub fn decode_request(body: &[u8]) -> Result<Frame<Request<'_>>, String> {
    decode(body)
}

/// An answer out of a frame's body.
///
/// # Errors
/// Why it is none.
pub fn decode_answer(body: &[u8]) -> Result<Frame<Answer<'_>>, String> {
    decode(body)
}

/// The call that a frame's body belongs to.
///
/// # Errors
/// There is no number in front.
pub(super) fn call_of(body: &[u8]) -> Result<u64, String> {
    postcard::take_from_bytes::<u64>(body).map(|(call, _)| call).map_err(|error| format!("a malformed frame: {error}"))
}

fn decode<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<Frame<T>, String> {
    match postcard::take_from_bytes(body) {
        Ok((frame, [])) => Ok(frame),
        Ok((_, rest)) => Err(format!("a frame with {} bytes too many", rest.len())),
        Err(error) => Err(format!("a malformed frame: {error}")),
    }
}

/// A time in microseconds, as frames carry it.
pub(super) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
