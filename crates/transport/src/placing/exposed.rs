//! The memory that one end has exposed, and the check of each write into it.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;

use super::{Extent, Key};
use crate::Loan;

/// Most exposures of one object: an id has 16 bits for the index of its entry, and 48 that cannot be guessed.
const EXPOSED_MAX: usize = 1 << 16;

/// Memory by the ids of its keys. Ids are never used again: an entry stays when its access has ended.
#[derive(Debug, Default)]
pub struct Exposed {
    entries: Vec<Entry>,
    random: RandomState,
}

#[derive(Debug)]
struct Entry {
    id: u64,
    memory: Extent,
    loan: Arc<Loan>,
    revoked: bool,
}

/// Destination of a write that was checked.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    /// The memory, with the length of the write.
    pub memory: Extent,
    /// To enter, or to keep, before it is touched.
    pub loan: &'a Arc<Loan>,
    /// The access has ended: discard it.
    pub revoked: bool,
}

/// Defect of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// No memory was exposed by that key.
    Key,
    /// It exceeds memory of this length.
    Bounds(u64),
}

impl std::fmt::Display for Wrong {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Wrong::Key => write!(f, "by a key that was not issued"),
            Wrong::Bounds(len) => write!(f, "beyond the {len} bytes exposed"),
        }
    }
}

impl Exposed {
    /// Adds memory.
    ///
    /// # Errors
    /// No key is left.
    pub fn add(&mut self, memory: Extent, loan: Arc<Loan>) -> Result<Key, String> {
        let index = self.entries.len();
        if index >= EXPOSED_MAX {
            return Err(format!("memory was exposed {EXPOSED_MAX} times already; connect anew"));
        }
        let mut hasher = self.random.build_hasher();
        hasher.write_usize(index);
        let id = hasher.finish() << 16 | index as u64;
        self.entries.push(Entry { id, memory, loan, revoked: false });
        Ok(Key::new(id, memory.len as u64))
    }

    /// Ends the access by that key. Its loan, if there was access.
    pub fn revoke(&mut self, id: u64) -> Option<Arc<Loan>> {
        let entry = self.entries.get_mut(id as usize % EXPOSED_MAX)?;
        let ends = entry.id == id && !std::mem::replace(&mut entry.revoked, true);
        ends.then(|| Arc::clone(&entry.loan))
    }

    /// Destination of the peer's write.
    ///
    /// # Errors
    /// What is wrong with it: the peer broke the protocol.
    #[inline]
    pub fn find(&self, id: u64, at: u64, len: u64) -> Result<Target<'_>, Wrong> {
        let entry = self.entries.get(id as usize % EXPOSED_MAX).filter(|entry| entry.id == id).ok_or(Wrong::Key)?;
        let have = entry.memory.len as u64;
        match at.checked_add(len) {
            Some(end) if end <= have => {}
            _ => return Err(Wrong::Bounds(have)),
        }
        let memory = entry.memory.part(at as usize, len as usize);
        Ok(Target { memory, loan: &entry.loan, revoked: entry.revoked })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_are_found_by_key_and_inside_their_memory() {
        let mut exposed = Exposed::default();
        let of = |at, len| Extent { at, len, gpu: None };
        let (first, second) = (exposed.add(of(4096, 100), Arc::default()), exposed.add(of(8192, 10), Arc::default()));
        let (first, second) = (first.expect("a key"), second.expect("a key"));
        assert_ne!(first.id() >> 16, second.id() >> 16, "ids are drawn");
        let found = exposed.find(first.id(), 90, 10).expect("inside");
        assert_eq!((found.memory, found.revoked), (of(4186, 10), false));
        assert!(exposed.find(first.id(), 100, 0).is_ok());
        for (at, len) in [(91, 10), (101, 0), (u64::MAX, 1), (1, u64::MAX), (u64::MAX, u64::MAX)] {
            assert_eq!(exposed.find(first.id(), at, len).err(), Some(Wrong::Bounds(100)), "{at} {len}");
        }
        for id in [first.id() ^ 1, first.id() ^ 1 << 16, second.id() ^ 1 << 63, 2, u64::MAX] {
            assert_eq!(exposed.find(id, 0, 1).err(), Some(Wrong::Key), "{id:#x}");
        }
        assert!(exposed.revoke(first.id() ^ 1 << 40).is_none(), "another key");
        assert!(exposed.revoke(first.id()).is_some() && exposed.revoke(first.id()).is_none());
        assert!(exposed.find(first.id(), 0, 1).expect("still known").revoked);
        assert!(!exposed.find(second.id(), 0, 1).expect("known").revoked);
    }
}
