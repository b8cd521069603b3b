//! The result of a short message, stored in its request: the table of operations writes it there, independent of how it
//! is rendered.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::Receipt;
use crate::core::names::Names;
use crate::core::outcome::ShortEnd;

/// The successful result of a short message, once it has been taken out of the worker's table. Accessed under the
/// worker's lock, except by [`Drop`], which has exclusive access.
pub(crate) struct Collected {
    /// The [peer's names](Names::word); 0: nothing is there yet.
    names: AtomicU64,
    tag: AtomicU64,
    bytes: AtomicU64,
    wire_ns: AtomicU64,
}

impl Collected {
    pub(crate) const fn nothing() -> Collected {
        Collected {
            names: AtomicU64::new(0),
            tag: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            wire_ns: AtomicU64::new(0),
        }
    }

    /// Stores a result given as words: the [names](Names::word), the tag, bytes, and the time on the wire.
    #[inline(always)]
    pub(in crate::core) fn store(&self, names: u64, tag: u64, bytes: u64, wire_ns: u64) {
        self.names.store(names, Relaxed);
        self.tag.store(tag, Relaxed);
        self.bytes.store(bytes, Relaxed);
        self.wire_ns.store(wire_ns, Relaxed);
    }

    /// Forgets the end, for the next operation of the request.
    #[inline]
    pub(crate) fn clear(&mut self) {
        *self.names.get_mut() = 0;
    }

    /// The receipt, if the end is there.
    #[inline]
    pub(crate) fn receipt(&self) -> Option<Receipt> {
        self.load().map(|end| Receipt::of_short(&end))
    }

    /// Whether the operation has left the table. For [`Drop`] of its owner.
    #[inline]
    pub(crate) fn is_collected(&mut self) -> bool {
        *self.names.get_mut() != 0
    }

    #[inline]
    pub(crate) fn load(&self) -> Option<ShortEnd> {
        Names::of_word(self.names.load(Relaxed)).map(|names| ShortEnd {
            names,
            tag: self.tag.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
            wire_ns: self.wire_ns.load(Relaxed),
        })
    }
}
