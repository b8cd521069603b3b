//! Tables with generation-checked ids: an id of a freed entry never refers to a later value.
#![allow(unsafe_code)]

use std::collections::VecDeque;

/// Bits of an id that are its index; those above are its generation.
const INDEX_BITS: u32 = 20;
const INDEX: u32 = (1 << INDEX_BITS) - 1;
/// Free entries before the first is used again, so that a generation comes back only after many others.
const RESTING: usize = 64;

/// Values by 32-bit id. An id refers to one value: whoever keeps it after the value was removed finds nothing.
pub(super) struct IdTable<T> {
    /// A power of two of them, two at least. They never become fewer.
    entries: Vec<Entry<T>>,
    /// Their number - 1.
    mask: u32,
    /// Entries that were ever used: the first ones.
    used: u32,
    /// Indices of free entries, the one freed first in front.
    free: VecDeque<u32>,
}

struct Entry<T> {
    /// Of the value that is there; [`vacant`] if none is, which is no id of this entry: finding a value takes one test.
    id: u32,
    /// Of the next value, or of the one that is there.
    next: u32,
    /// Apart, so that finding an entry takes a shift and no multiplication.
    value: Option<Box<T>>,
}

/// A marker that is no valid id of entry `index`: ids that map to the entry have its lowest bit, this one has not.
fn vacant(index: u32) -> u32 {
    !index
}

impl<T> Default for IdTable<T> {
    fn default() -> IdTable<T> {
        let mut table = IdTable { entries: Vec::new(), mask: 0, used: 0, free: VecDeque::new() };
        table.grow(2);
        table
    }
}

impl<T> IdTable<T> {
    fn grow(&mut self, entries: u32) {
        let new = (self.entries.len() as u32)..entries;
        self.entries.extend(new.map(|index| Entry { id: vacant(index), next: index, value: None }));
        self.mask = entries - 1;
    }

    /// An id for a value to be inserted.
    pub(super) fn reserve(&mut self) -> u32 {
        let full = self.used > INDEX;
        let rested = full || self.free.len() > RESTING;
        let index = if rested { self.free.pop_front() } else { None }.unwrap_or_else(|| {
            // A worker runs out of descriptors long before: each peer and each lane has one.
            assert!(!full, "more than {INDEX} peers or lanes at a time");
            if self.used > self.mask {
                self.grow(2 * self.used);
            }
            self.used += 1;
            self.used - 1
        });
        self.entries[index as usize].next
    }

    /// Inserts the value of a reserved id.
    pub(super) fn insert(&mut self, id: u32, value: T) {
        if let Some(entry) = self.entries.get_mut((id & INDEX) as usize).filter(|entry| entry.next == id) {
            entry.value = Some(Box::new(value));
            entry.id = id;
        }
    }

    // Short messages look things up dozens of times: these two must not become calls, and every test counts.
    #[inline(always)]
    pub(super) fn get(&self, id: u32) -> Option<&T> {
        // SAFETY: `mask` is below the number of entries, always.
        let entry = unsafe { self.entries.get_unchecked((id & self.mask) as usize) };
        // SAFETY: an entry has the id of its value from the insertion to the removal, and else none that leads to it.
        (entry.id == id).then(|| unsafe { entry.value.as_deref().unwrap_unchecked() })
    }

    #[inline(always)]
    pub(super) fn get_mut(&mut self, id: u32) -> Option<&mut T> {
        // SAFETY: as for `get`.
        let entry = unsafe { self.entries.get_unchecked_mut((id & self.mask) as usize) };
        // SAFETY: as for `get`.
        (entry.id == id).then(|| unsafe { entry.value.as_deref_mut().unwrap_unchecked() })
    }

    /// Frees an id; its value, if there was one.
    pub(super) fn remove(&mut self, id: u32) -> Option<T> {
        let index = id & INDEX;
        let entry = self.entries.get_mut(index as usize).filter(|entry| entry.next == id)?;
        entry.id = vacant(index);
        entry.next = id.wrapping_add(1 << INDEX_BITS);
        self.free.push_back(index);
        entry.value.take().map(|value| *value)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.entries.iter().filter_map(|entry| Some((entry.id, entry.value.as_deref()?)))
    }

    /// Values in it, and ids that are reserved.
    pub(super) fn len(&self) -> usize {
        self.used as usize - self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_never_meets_a_later_value() {
        let mut table = IdTable::default();
        let mut old = Vec::new();
        for value in 0..10_000 {
            let id = table.reserve();
            table.insert(id, value);
            assert_eq!((table.get(id), table.len()), (Some(&value), 1));
            assert_eq!((table.remove(id), table.remove(id)), (Some(value), None));
            old.push(id);
        }
        let id = table.reserve();
        table.insert(id, 0);
        assert!(old.iter().all(|old| table.get(*old).is_none() && table.get_mut(*old).is_none()));
        assert!(table.used as usize <= RESTING + 2, "{} entries for one value", table.used);
    }

    #[test]
    fn nothing_else_is_an_id() {
        let mut table = IdTable::default();
        for reserved in 0..100 {
            let table: &mut IdTable<u32> = &mut table;
            let others = [u32::MAX, INDEX, !0 << INDEX_BITS, reserved ^ 1 << 31];
            let vacancies = (0..2 * reserved + 2).flat_map(|index| [index, vacant(index)]);
            assert!(
                others.into_iter().chain(vacancies).all(|id| table.get(id).is_none() && table.get_mut(id).is_none())
            );
            table.reserve();
        }
    }

    #[test]
    fn values_that_stay_keep_their_ids() {
        let mut table = IdTable::default();
        let kept: Vec<_> = (0..100).map(|_| table.reserve()).collect();
        for (value, id) in kept.iter().enumerate() {
            table.insert(*id, value);
        }
        for value in 1000..2000 {
            let id = table.reserve();
            table.insert(id, value);
            table.remove(id);
        }
        assert!(kept.iter().enumerate().all(|(value, id)| table.get(*id) == Some(&value)));
        assert_eq!(table.iter().count(), 100);
    }
}
