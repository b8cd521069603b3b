//! The table of registered memory: keys, access checks, arrived immediates.

use std::collections::HashMap;
use std::sync::Arc;

use crossrail_gpu::Device;
use crossrail_proto as proto;
use crossrail_types::{Error, ErrorKind, Result};
use subtle::ConstantTimeEq;

use super::buffer::{Buffer, Keep, Place};

const KEY_LEN: usize = 24;
const KEY_MAGIC: [u8; 4] = *b"XRK2";
/// In place of a GPU's number: host memory.
const HOST: u32 = u32::MAX;
/// Different immediates that are counted for one region. A peer can write any.
pub(crate) const IMMEDIATES_MAX: usize = 1 << 16;

/// What a peer needs to write to or read from a region: opaque bytes, to be handed over by any means.
///
/// It holds a 128-bit random secret; whoever has it may access the region until it is deregistered.
#[derive(Clone, PartialEq, Eq)]
pub struct RegionKey {
    pub(crate) key: [u8; KEY_LEN],
    pub(crate) len: u64,
    pub(crate) place: Place,
}

impl RegionKey {
    /// Bytes of a key as bytes.
    pub const BYTES: usize = KEY_MAGIC.len() + 4 + 8 + KEY_LEN;

    /// The key as bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let gpu = match self.place {
            Place::Host => HOST,
            Place::Gpu(ordinal) => ordinal,
        };
        [&KEY_MAGIC[..], &gpu.to_le_bytes(), &self.len.to_le_bytes(), &self.key].concat()
    }

    /// Where the region is, in its owner's numbering of GPUs.
    pub fn place(&self) -> Place {
        self.place
    }

    /// A key from [`RegionKey::to_bytes`]; `Usage` if it is not one.
    pub fn from_bytes(bytes: &[u8]) -> Result<RegionKey> {
        let bad = || Error::new(ErrorKind::Usage, "region key", format!("{} bytes that are not one", bytes.len()));
        let rest = bytes.strip_prefix(&KEY_MAGIC[..]).ok_or_else(bad)?;
        let (gpu, rest) = rest.split_first_chunk::<4>().ok_or_else(bad)?;
        let (len, key) = rest.split_first_chunk::<8>().ok_or_else(bad)?;
        let place = match u32::from_le_bytes(*gpu) {
            HOST => Place::Host,
            ordinal => Place::Gpu(ordinal),
        };
        Ok(RegionKey { key: key.try_into().map_err(|_| bad())?, len: u64::from_le_bytes(*len), place })
    }

    /// Bytes of the region it opens.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether that region has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl std::fmt::Debug for RegionKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RegionKey({} bytes)", self.len)
    }
}

/// A region opened by a key.
pub(crate) struct Known {
    pub(crate) region: proto::RegionRef,
    pub(crate) ptr: *mut u8,
    pub(crate) len: u64,
    pub(crate) gpu: Option<Arc<Device>>,
}

struct Entry {
    generation: u32,
    live: bool,
    /// Access has ended; a peer's lane may still be accessing it.
    retired: bool,
    secret: [u8; 16],
    ptr: *mut u8,
    len: u64,
    /// The GPU whose memory it is; `None`: host memory.
    gpu: Option<u32>,
    /// That GPU, once the driver has confirmed it.
    device: Option<Arc<Device>>,
    keep: Keep,
    imms: HashMap<u32, u64>,
    /// Writes with an immediate so far, whatever its value.
    arrivals: u64,
}

/// What is known of an immediate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Counted {
    Writes(u64),
    /// It is not counted: [`IMMEDIATES_MAX`] others have arrived before it.
    OneTooMany,
}

/// The regions of one worker.
#[derive(Default)]
pub(crate) struct Regions {
    entries: Vec<Entry>,
    free: Vec<u32>,
}

// SAFETY: as for `Operations`: the pointers are descriptions.
#[allow(unsafe_code)]
unsafe impl Send for Regions {}

impl Regions {
    pub(crate) fn insert(&mut self, buffer: Buffer, secret: [u8; 16]) -> (proto::RegionRef, RegionKey) {
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                self.entries.push(Entry {
                    generation: 0,
                    live: false,
                    retired: false,
                    secret: [0; 16],
                    ptr: std::ptr::null_mut(),
                    len: 0,
                    gpu: None,
                    device: None,
                    keep: Keep::Nothing,
                    imms: HashMap::new(),
                    arrivals: 0,
                });
                (self.entries.len() - 1) as u32
            }
        };
        let entry = &mut self.entries[index as usize];
        entry.live = true;
        entry.retired = false;
        entry.secret = secret;
        entry.ptr = buffer.ptr;
        entry.len = buffer.len as u64;
        let place = buffer.place();
        entry.gpu = buffer.gpu.as_ref().map(|gpu| gpu.ordinal);
        entry.device = buffer.gpu.and_then(|gpu| gpu.device);
        entry.keep = buffer.keep;
        let mut key = [0; KEY_LEN];
        key[..4].copy_from_slice(&index.to_le_bytes());
        key[4..8].copy_from_slice(&entry.generation.to_le_bytes());
        key[8..].copy_from_slice(&secret);
        (proto::RegionRef { index, generation: entry.generation }, RegionKey { key, len: entry.len, place })
    }

    fn entry(&self, region: proto::RegionRef) -> Option<&Entry> {
        self.entries.get(region.index as usize).filter(|e| e.live && e.generation == region.generation)
    }

    /// Its first byte, its length, and the ordinal of its GPU (`None`: host memory).
    pub(crate) fn memory(&self, region: proto::RegionRef) -> Option<(*mut u8, u64, Option<u32>)> {
        self.entry(region).map(|entry| (entry.ptr, entry.len, entry.gpu))
    }

    pub(crate) fn count(&mut self, region: proto::RegionRef, imm: u32) {
        if let Some(entry) = self.entries.get_mut(region.index as usize)
            && entry.live
            && entry.generation == region.generation
        {
            entry.arrivals += 1;
            if let Some(count) = entry.imms.get_mut(&imm) {
                *count += 1;
            } else if entry.imms.len() < IMMEDIATES_MAX {
                entry.imms.insert(imm, 1);
            }
        }
    }

    /// Writes with that immediate so far. `None`: the region was deregistered.
    pub(crate) fn counted(&self, region: proto::RegionRef, imm: u32) -> Option<Counted> {
        self.entry(region).filter(|entry| !entry.retired).map(|entry| match entry.imms.get(&imm) {
            Some(count) => Counted::Writes(*count),
            None if entry.imms.len() < IMMEDIATES_MAX => Counted::Writes(0),
            None => Counted::OneTooMany,
        })
    }

    pub(crate) fn arrivals(&self, region: proto::RegionRef) -> Option<u64> {
        self.entry(region).filter(|entry| !entry.retired).map(|entry| entry.arrivals)
    }

    /// True until [`Regions::remove`].
    pub(crate) fn is_known(&self, region: proto::RegionRef) -> bool {
        self.entry(region).is_some()
    }

    /// Refuses access from now on; false if it is refused already.
    pub(crate) fn retire(&mut self, region: proto::RegionRef) -> bool {
        let entry = self.entries.get_mut(region.index as usize);
        let entry = entry.filter(|entry| entry.live && entry.generation == region.generation);
        entry.is_some_and(|entry| !std::mem::replace(&mut entry.retired, true))
    }

    /// Never frees its memory.
    pub(crate) fn leak(&mut self, region: proto::RegionRef) {
        let entry = self.entries.get_mut(region.index as usize);
        if let Some(entry) = entry.filter(|entry| entry.live && entry.generation == region.generation) {
            std::mem::forget(std::mem::replace(&mut entry.keep, Keep::Nothing));
        }
    }

    /// Forgets a retired region.
    pub(crate) fn remove(&mut self, region: proto::RegionRef) {
        if self.entry(region).is_none() {
            return;
        }
        let entry = &mut self.entries[region.index as usize];
        entry.live = false;
        entry.generation = entry.generation.wrapping_add(1);
        entry.keep = Keep::Nothing;
        entry.imms = HashMap::new();
        entry.arrivals = 0;
        entry.secret = [0; 16];
        self.free.push(region.index);
    }
}

// What peers ask for; the lists that they make of it are added by `Shown`.
impl Regions {
    /// Finds the region of that key, and checks that `offset..offset + len` is inside it.
    pub(crate) fn resolve(
        &self,
        key: &proto::RegionKey,
        offset: u64,
        len: u64,
    ) -> std::result::Result<proto::RegionRef, proto::RegionFault> {
        let (region, entry) = self.opened(key).ok_or(proto::RegionFault::Gone)?;
        match offset.checked_add(len) {
            Some(end) if end <= entry.len => Ok(region),
            _ => Err(proto::RegionFault::Bounds),
        }
    }

    /// The region that the key opens.
    fn opened(&self, key: &proto::RegionKey) -> Option<(proto::RegionRef, &Entry)> {
        let word = |at: usize| u32::from_le_bytes([key[at], key[at + 1], key[at + 2], key[at + 3]]);
        let region = proto::RegionRef { index: word(0), generation: word(4) };
        let entry = self.entry(region).filter(|entry| !entry.retired)?;
        bool::from(entry.secret.ct_eq(&key[8..])).then_some((region, entry))
    }

    /// The region that the key opens: its first byte, its length, and its GPU; `None`: it is host memory.
    pub(crate) fn known(&self, key: &proto::RegionKey) -> Option<Known> {
        let (region, entry) = self.opened(key)?;
        let usable = entry.gpu.is_some() == entry.device.is_some();
        usable.then(|| Known { region, ptr: entry.ptr, len: entry.len, gpu: entry.device.clone() })
    }

    /// The GPU whose memory it is.
    pub(crate) fn device(&self, region: proto::RegionRef) -> Option<Arc<Device>> {
        self.entry(region)?.device.clone()
    }

    /// Whether it may be accessed.
    pub(crate) fn is_live(&self, region: proto::RegionRef) -> bool {
        self.entry(region).is_some_and(|entry| !entry.retired)
    }

    /// Whether its bytes may go with a first frame.
    pub(crate) fn is_eager(&self, region: proto::RegionRef) -> bool {
        self.entry(region).is_none_or(|entry| entry.gpu.is_none())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn immediates_of_a_region_are_bounded() {
        let mut regions = Regions::default();
        let (region, _) = regions.insert(Buffer::from(Vec::new()), [0; 16]);
        regions.count(region, 7);
        (0..3 * IMMEDIATES_MAX as u32).for_each(|imm| regions.count(region, imm));
        regions.count(region, 7);
        assert_eq!(regions.entries[0].imms.len(), IMMEDIATES_MAX);
        assert_eq!(regions.counted(region, 7), Some(Counted::Writes(3)));
        assert_eq!(regions.counted(region, u32::MAX), Some(Counted::OneTooMany));
        assert_eq!(regions.arrivals(region), Some(3 * IMMEDIATES_MAX as u64 + 2));
    }
}
