//! Calls that are answered once all their keys exist.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use super::frames::{Answer, FailureKind, PART};
use super::outbox::{Failed, Outbox};

/// Most bytes of all waits: two thousand ranks may wait for each other.
const BYTES_MAX: usize = 256 << 20;
/// Cost of a key in one wait, in bytes. Its text is kept once for all waits.
const KEY_COST: usize = 48;

/// One pending wait.
#[derive(Debug)]
pub(super) struct Wait {
    pub(super) client: u64,
    pub(super) call: u64,
    /// In the order asked for.
    pub(super) keys: Vec<Arc<str>>,
    /// Number of distinct missing keys.
    missing: usize,
    deadline: Instant,
}

/// All waits of a store.
#[derive(Debug, Default)]
pub(super) struct Waits {
    waits: BTreeMap<(u64, u64), Wait>,
    /// The waits for each key, existing or not.
    by_key: HashMap<Arc<str>, HashSet<(u64, u64)>>,
    deadlines: BTreeSet<(Instant, (u64, u64))>,
    ready: Vec<(u64, u64)>,
    bytes: usize,
}

impl Waits {
    /// Adds a call that waits for `keys`; it is ready if all of them exist.
    pub(super) fn add(
        &mut self,
        id: (u64, u64),
        keys: &[&str],
        deadline: Instant,
        absent: impl Fn(&str) -> bool,
    ) -> Result<(), Failed> {
        let text = |key: &&str| if self.by_key.contains_key(*key) { 0 } else { key.len() };
        let bytes = keys.iter().map(|key| text(key) + KEY_COST).sum::<usize>();
        if self.bytes + bytes > BYTES_MAX {
            let detail = format!("the keys that are waited for take {} bytes, of at most {BYTES_MAX}", self.bytes);
            return Err(Failed::new(FailureKind::Exhausted, detail));
        }
        if self.waits.contains_key(&id) {
            return Err(Failed::new(FailureKind::Usage, "a call of this number waits already"));
        }
        let mut seen = HashSet::new();
        let mut missing = 0;
        let mut own = Vec::with_capacity(keys.len());
        for key in keys {
            let key: Arc<str> = match self.by_key.get_key_value(*key) {
                Some((key, _)) => Arc::clone(key),
                None => {
                    self.bytes += key.len();
                    Arc::from(*key)
                }
            };
            if seen.insert(Arc::clone(&key)) {
                missing += usize::from(absent(&key));
                self.by_key.entry(Arc::clone(&key)).or_default().insert(id);
            }
            own.push(key);
        }
        self.bytes += own.len() * KEY_COST;
        if missing == 0 {
            self.ready.push(id);
        }
        self.deadlines.insert((deadline, id));
        self.waits.insert(id, Wait { client: id.0, call: id.1, keys: own, missing, deadline });
        Ok(())
    }

    /// A key was created.
    pub(super) fn appeared(&mut self, key: &str) {
        for id in self.by_key.get(key).into_iter().flatten() {
            let Some(wait) = self.waits.get_mut(id) else { continue };
            wait.missing -= 1;
            if wait.missing == 0 {
                self.ready.push(*id);
            }
        }
    }

    /// A key was deleted.
    pub(super) fn vanished(&mut self, key: &str) {
        for id in self.by_key.get(key).into_iter().flatten() {
            if let Some(wait) = self.waits.get_mut(id) {
                wait.missing += 1;
            }
        }
    }

    /// Removes and returns the waits whose keys all exist.
    pub(super) fn take_ready(&mut self) -> Vec<Wait> {
        let ready = std::mem::take(&mut self.ready);
        let still = ready.into_iter().filter(|id| self.waits.get(id).is_some_and(|wait| wait.missing == 0));
        let still: Vec<_> = still.collect();
        still.into_iter().filter_map(|id| self.end(id)).collect()
    }

    /// Ends the waits that are due, and answers them with the missing keys.
    pub(super) fn expire(&mut self, now: Instant, out: &mut dyn Outbox, there: impl Fn(&str) -> bool) {
        while let Some(&(deadline, id)) = self.deadlines.first() {
            if deadline > now {
                break;
            }
            let Some(wait) = self.end(id) else {
                self.deadlines.remove(&(deadline, id));
                continue;
            };
            let mut bytes = 0;
            let missing = wait.keys.iter().map(|key| &**key).filter(|key| !there(key)).take_while(|key| {
                bytes += key.len();
                bytes <= PART
            });
            out.send(id.0, id.1, &Answer::Missing(missing.collect(), wait.missing as u64));
        }
    }

    pub(super) fn next_expiry(&self) -> Option<Instant> {
        self.deadlines.first().map(|&(deadline, _)| deadline)
    }

    pub(super) fn forget(&mut self, client: u64) {
        let ids: Vec<_> = self.waits.range((client, 0)..=(client, u64::MAX)).map(|(id, _)| *id).collect();
        for id in ids {
            self.end(id);
        }
    }

    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn is_idle(&self) -> bool {
        self.waits.is_empty() && self.by_key.is_empty() && self.deadlines.is_empty() && self.bytes == 0
    }

    fn end(&mut self, id: (u64, u64)) -> Option<Wait> {
        let wait = self.waits.remove(&id)?;
        self.deadlines.remove(&(wait.deadline, id));
        for key in &wait.keys {
            self.bytes -= KEY_COST;
            if let Some(ids) = self.by_key.get_mut(key) {
                ids.remove(&id);
                if ids.is_empty() {
                    self.by_key.remove(key);
                    self.bytes -= key.len();
                }
            }
        }
        Some(wait)
    }
}
