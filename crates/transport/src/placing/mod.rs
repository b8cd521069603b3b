//! One-sided writes into memory that the peer has exposed once: no frame asks where its payload goes.
//!
//! ```text
//! receiver:  expose(memory) -> Key        count(pieces) -> Counter       (both sent to the peer by other means)
//! sender:    write(from, key, at, imm)
//! receiver:  poll() -> Event::Arrived(imm)      the whole write is in place, reported once, in no order
//! sender:    poll() -> Event::Ended { token }   placed and counted at the peer; `from` may be reused
//! ```
//!
//! Arrival is counted, never inferred from a last write: several rails, re-posted pieces and NICs keep no order. An
//! immediate has 32 bits, which every NIC offers: see [`Imm::word`].

#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
mod count;
mod door;
#[cfg(any(test, feature = "conformance"))]
pub mod dry;
mod exposed;

use std::os::fd::RawFd;
use std::sync::Arc;

pub use count::{Counters, Expected, Seen, Toggles};
pub use door::{Brought, Door};
pub use exposed::{Exposed, Target, Wrong};

use crate::{LaneError, Loan, Post};

/// Most distinct pieces of a counter.
pub const PIECES_MAX: u16 = 1 << 12;
/// Most counters of one end.
pub const COUNTERS_MAX: u32 = 1 << 18;

/// All rails to one peer, over which either end writes into memory that the other has exposed.
///
/// Driven by one thread at a time (`&mut self`), any thread; it takes no lock that callers of the engine hold, and
/// allocates nothing per write. [`Placing::write`] queues; everything moves in [`Placing::poll`].
///
/// An error of [`Placing::poll`] is final: the peer has ended, broke the protocol, or cannot be reached over any rail.
/// Dropping the object ends all access to the memory that was exposed through it, and all reads of what was written.
pub trait Placing: Send {
    /// The peer's name.
    fn peer(&self) -> &str;

    /// Limits of one write, and of all writes in flight.
    fn limits(&self) -> &Limits;

    /// Makes memory writable by the peer until it is [revoked](Placing::revoke), its loan is recalled, or this object is
    /// dropped. The key goes to the peer by other means.
    ///
    /// # Errors
    /// Why this memory cannot be exposed, or that no key is left; the object remains usable.
    ///
    /// # Safety
    /// `memory` must be writable until its loan is [returned](Loan::is_returned), or this object has been dropped.
    #[allow(unsafe_code)]
    unsafe fn expose(&mut self, memory: &Extent, loan: &Arc<Loan>) -> Result<Key, String>;

    /// Ends the peer's access by that key. What it wrote before may still be reported; later writes are
    /// discarded, and end at the peer with [`WriteError::Revoked`].
    fn revoke(&mut self, key: &Key) -> Revoked;

    /// Opens a counter that the peer's immediates may name, with pieces below `pieces` (1 to [`PIECES_MAX`]). It lasts
    /// as long as the object. `None`: there are [`COUNTERS_MAX`], or `pieces` is out of range.
    fn count(&mut self, pieces: u16) -> Option<Counter>;

    /// Queues one write of the bytes of `from`, one extent after the other, to byte `at` of the peer's memory `to`; no
    /// bytes at all: a bare immediate, which needs a valid key all the same. Makes no system call and never blocks.
    ///
    /// [`Post::Held`]: queued; `token` is reported in [`Event::Ended`] exactly once. [`Post::Full`]: nothing was taken,
    /// as [`Limits::in_flight`] writes have not ended; poll first.
    ///
    /// A piece of a counter is used again only once the last write that used it has arrived.
    ///
    /// # Errors
    /// [`LaneError::Protocol`]: the write exceeds [`Placing::limits`] or the memory of the key. Nothing was queued, and
    /// the object remains usable. Any other: as the last [`Placing::poll`].
    ///
    /// # Safety
    /// `from` must be readable, and should be unchanged, until its end is reported or the object is dropped.
    #[allow(unsafe_code)]
    unsafe fn write(&mut self, from: &[Extent], to: &Key, at: u64, imm: Imm, token: u64) -> Result<Post, LaneError>;

    /// Moves what can move without blocking, a few MiB at most, and reports what has arrived and ended. Returns whether
    /// anything moved; only after `false` may the driver sleep.
    ///
    /// # Errors
    /// Why the peer is lost; the same at each later call. Each write that had not ended was reported as ended, by
    /// [`WriteError::Lost`], before the first.
    fn poll(&mut self, events: &mut dyn FnMut(Event)) -> Result<bool, LaneError>;

    /// A descriptor that is readable (level-triggered) when a driver that sleeps must poll. Those of several objects may
    /// be in one epoll set. `None`: poll without sleeping.
    fn fd(&self) -> Option<RawFd> {
        None
    }

    /// The driver is about to sleep on [`Placing::fd`]. False: there is work, poll first.
    fn arm(&mut self) -> bool {
        true
    }

    /// Each rail as it is now, lost ones included.
    fn rails(&self) -> Vec<RailReport>;
}

/// Event that [`Placing::poll`] reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The peer's write is in place, all of its bytes. Reported once for each write, in no order.
    Arrived(Imm),
    /// Our write has ended.
    Ended {
        /// The token given to [`Placing::write`].
        token: u64,
        /// `Ok`: all bytes are in place at the peer, whose [`Event::Arrived`] was or is being reported there.
        result: Result<(), WriteError>,
    },
}

/// Why a write did not arrive. Part of its bytes may have been placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteError {
    /// The peer has ended the access to that memory.
    Revoked,
    /// The peer is lost, for the reason that [`Placing::poll`] returns. The write may have arrived.
    Lost,
}

/// A piece of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Its address.
    pub at: u64,
    /// Its length in bytes.
    pub len: usize,
    /// The GPU whose memory it is; `None`: host memory.
    pub gpu: Option<u32>,
}

impl Extent {
    /// Host memory.
    pub fn host(at: *const u8, len: usize) -> Extent {
        Extent { at: at as u64, len, gpu: None }
    }

    /// The memory from its byte `from` on, at most `len` bytes of it.
    pub fn part(&self, from: usize, len: usize) -> Extent {
        let from = from.min(self.len);
        Extent { at: self.at + from as u64, len: len.min(self.len - from), gpu: self.gpu }
    }
}

/// Right to write into exposed memory: opaque bytes, valid over the object that made them only.
///
/// ```text
/// id 0..8 | length 8..16 | the implementation's own 16..32
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key(pub [u8; 32]);

impl Key {
    /// A key of that id, for so much memory.
    pub fn new(id: u64, len: u64) -> Key {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&id.to_le_bytes());
        bytes[8..16].copy_from_slice(&len.to_le_bytes());
        Key(bytes)
    }

    /// By what its owner finds the memory.
    pub fn id(&self) -> u64 {
        word(&self.0[..8])
    }

    /// The length of the memory in bytes, as the key claims; its owner checks each write.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        word(&self.0[8..16])
    }
}

fn word(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// A counter, numbered by the end whose writes arrive: 18 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Counter(pub u32);

/// Immediate of a write: what it counts as where it arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Imm {
    /// The receiver's counter.
    pub counter: Counter,
    /// The piece of it: 12 bits.
    pub piece: u16,
}

impl Imm {
    /// As it travels: `mark` (2 bits, the implementation's own), counter (18), piece (12).
    pub fn word(self, mark: u8) -> u32 {
        u32::from(mark & 3) << 30
            | (self.counter.0 & (COUNTERS_MAX - 1)) << 12
            | u32::from(self.piece & (PIECES_MAX - 1))
    }

    /// The immediate and the mark of a word that has arrived. The counter may be unknown, and the piece out of range.
    pub fn of(word: u32) -> (Imm, u8) {
        let piece = (word & u32::from(PIECES_MAX - 1)) as u16;
        (Imm { counter: Counter(word >> 12 & (COUNTERS_MAX - 1)), piece }, (word >> 30) as u8)
    }

    /// True if it fits into a word.
    pub fn is_valid(self) -> bool {
        self.counter.0 < COUNTERS_MAX && self.piece < PIECES_MAX
    }
}

impl std::fmt::Display for Imm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "piece {} of counter {}", self.piece, self.counter.0)
    }
}

/// Limits of writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most writes that have not ended.
    pub in_flight: usize,
    /// Most bytes of one write.
    pub write: usize,
    /// Most extents of one write.
    pub gather: usize,
    /// Memory of GPUs can be exposed and written from.
    pub gpu: bool,
}

impl Limits {
    /// The length of a write that keeps them and stays inside the memory of its key.
    ///
    /// # Errors
    /// [`LaneError::Protocol`]: what it exceeds.
    pub fn check(&self, from: &[Extent], to: &Key, at: u64, imm: Imm) -> Result<usize, LaneError> {
        let refuse = |why: String| Err(LaneError::Protocol(why));
        if from.len() > self.gather {
            return refuse(format!("a write of {} extents, {} at most", from.len(), self.gather));
        }
        if let Some(gpu) = from.iter().find_map(|extent| extent.gpu).filter(|_| !self.gpu) {
            return refuse(format!("a write from the memory of GPU {gpu}, which these rails cannot read"));
        }
        if !imm.is_valid() {
            return refuse(format!("a write that counts as {imm}: counters have 18 bits, pieces 12"));
        }
        let sum = from.iter().try_fold(0usize, |sum, extent| sum.checked_add(extent.len));
        let Some(len) = sum.filter(|len| *len <= self.write) else {
            return refuse(format!("a write of more than {} bytes", self.write));
        };
        match at.checked_add(len as u64) {
            Some(end) if end <= to.len() => Ok(len),
            _ => refuse(format!("a write of {len} bytes to byte {at} of {} exposed", to.len())),
        }
    }
}

/// When memory whose access was revoked is written no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Revoked {
    /// At once.
    Now,
    /// Once its loan is returned: the peer has to confirm that it has stopped.
    OnceReturned,
    /// Once the object is dropped.
    OnlyWithTheLane,
}

/// One rail of a [`Placing`] as it is now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RailReport {
    /// As `tcp/eth1`.
    pub name: String,
    /// Why it was lost; `None`: it carries writes.
    pub lost: Option<String>,
    /// Bytes sent, heads included.
    pub tx_bytes: u64,
    /// Bytes received, heads included.
    pub rx_bytes: u64,
    /// Writes, and parts of writes, that it has carried.
    pub tx_pieces: u64,
    /// Of those that it was to carry: how many were given to other rails when it was lost.
    pub reposted: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_immediate_survives_its_word() {
        for (counter, piece, mark) in [(0, 0, 0), (COUNTERS_MAX - 1, PIECES_MAX - 1, 3), (77, 4095, 1), (131_072, 1, 2)]
        {
            let imm = Imm { counter: Counter(counter), piece };
            assert!(imm.is_valid());
            assert_eq!(Imm::of(imm.word(mark)), (imm, mark));
        }
        assert!(!Imm { counter: Counter(COUNTERS_MAX), piece: 0 }.is_valid());
        assert!(!Imm { counter: Counter(0), piece: PIECES_MAX }.is_valid());
    }

    #[test]
    fn a_write_is_checked_without_overflow() {
        let limits = Limits { in_flight: 1, write: 1 << 20, gather: 2, gpu: false };
        let imm = Imm { counter: Counter(0), piece: 0 };
        let of = |len| Extent { at: 4096, len, gpu: None };
        let key = Key::new(9, 100);
        assert_eq!((key.id(), key.len()), (9, 100));
        assert_eq!(limits.check(&[of(60), of(40)], &key, 0, imm), Ok(100));
        assert_eq!(limits.check(&[], &key, 100, imm), Ok(0));
        let wrong = [
            limits.check(&[of(60), of(41)], &key, 0, imm),
            limits.check(&[of(1)], &key, u64::MAX, imm),
            limits.check(&[], &key, 101, imm),
            limits.check(&[of(usize::MAX), of(2)], &key, 0, imm),
            limits.check(&[of(1), of(1), of(1)], &key, 0, imm),
            limits.check(&[Extent { gpu: Some(1), ..of(1) }], &key, 0, imm),
            limits.check(&[of(1)], &key, 0, Imm { counter: Counter(COUNTERS_MAX), piece: 0 }),
        ];
        for (at, one) in wrong.iter().enumerate() {
            assert!(matches!(one, Err(LaneError::Protocol(_))), "{at}: {one:?}");
        }
    }
}
