//! Encoded descriptions of a worker and its regions, for its peers.

use crossrail_handshake::Address;
use crossrail_types::{Error, ErrorKind, Result};

use super::buffer::Place;
use super::regions::RegionKey;

const MAGIC: [u8; 4] = *b"XRD1";
const REGION_LEN: usize = 8 + RegionKey::BYTES;

/// The number of a worker with this id; see [`Description::generation`].
pub(crate) fn generation(worker: &[u8; 16]) -> u64 {
    worker.first_chunk().map_or(0, |first| u64::from_le_bytes(*first))
}

/// One region of a [`Description`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Described {
    /// Its address in its owner's process.
    pub base: u64,
    /// The key that opens it, which also holds its length and place.
    pub key: RegionKey,
}

impl Described {
    /// Bytes.
    pub fn len(&self) -> u64 {
        self.key.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where it is.
    pub fn place(&self) -> Place {
        self.key.place()
    }
}

/// A worker's address, its name, and some of its regions: what [`Worker::describe`](crate::Worker::describe) makes, for
/// peers that address its memory absolutely.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    address: Vec<u8>,
    name: String,
    generation: u64,
    regions: Vec<Described>,
}

impl Description {
    pub(crate) fn new(address: Vec<u8>, regions: Vec<Described>) -> Result<Description> {
        let worker = Address::decode(&address)?;
        let generation = generation(&worker.worker);
        Ok(Description { address, name: worker.name, generation, regions })
    }

    /// The bytes, for [`Description::parse`].
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend((self.address.len() as u32).to_le_bytes());
        out.extend(&self.address);
        for Described { base, key } in &self.regions {
            out.extend(base.to_le_bytes());
            out.extend(key.to_bytes());
        }
        out
    }

    /// Reads the bytes of a description.
    ///
    /// # Errors
    /// `Usage`: they are none.
    pub fn parse(bytes: &[u8]) -> Result<Description> {
        let bad = || Error::new(ErrorKind::Usage, "description", format!("{} bytes, not a description", bytes.len()));
        let rest = bytes.strip_prefix(&MAGIC[..]).ok_or_else(bad)?;
        let (len, rest) = rest.split_first_chunk::<4>().ok_or_else(bad)?;
        let (address, rest) = rest.split_at_checked(u32::from_le_bytes(*len) as usize).ok_or_else(bad)?;
        if !rest.len().is_multiple_of(REGION_LEN) {
            return Err(bad());
        }
        let region = |bytes: &[u8]| {
            let (base, key) = bytes.split_first_chunk::<8>().ok_or_else(bad)?;
            let (base, key) = (u64::from_le_bytes(*base), RegionKey::from_bytes(key)?);
            base.checked_add(key.len()).ok_or_else(bad)?;
            Ok(Described { base, key })
        };
        let regions = rest.chunks_exact(REGION_LEN).map(region).collect::<Result<Vec<_>>>()?;
        Description::new(address.to_vec(), regions)
    }

    /// The worker's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The worker's address, for [`Worker::connect`](crate::Worker::connect).
    pub fn address(&self) -> &[u8] {
        &self.address
    }

    /// A number that is unique per worker, across processes and time.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Its regions.
    pub fn regions(&self) -> &[Described] {
        &self.regions
    }

    /// Adds the regions of another description of the same worker.
    ///
    /// # Errors
    /// `Mismatch`: it is of another worker.
    pub fn merge(&mut self, other: &Description) -> Result<()> {
        if other.generation != self.generation {
            let detail = format!("{} and {} are two workers", self.name, other.name);
            return Err(Error::new(ErrorKind::Mismatch, "description", detail));
        }
        for region in &other.regions {
            if !self.regions.contains(region) {
                self.regions.push(region.clone());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptions_are_read_as_they_are_written_and_others_refused() {
        let address = Address {
            worker: [7; 16],
            name: "one".to_owned(),
            boot_id: "boot".to_owned(),
            token: [1; 16],
            unix: None,
            control: vec!["127.0.0.1:9".parse().unwrap()],
        };
        let region = |base, place| Described { base, key: RegionKey { key: [3; 24], len: 64, place } };
        let regions = vec![region(4096, Place::Host), region(1 << 40, Place::Gpu(2))];
        let described = Description::new(address.encode(), regions).unwrap();
        let bytes = described.to_bytes();
        assert_eq!(Description::parse(&bytes).unwrap(), described);
        assert_eq!((described.name(), described.regions()[1].place()), ("one", Place::Gpu(2)));
        for len in 0..bytes.len() {
            let parsed = Description::parse(&bytes[..len]);
            assert!(parsed.is_err() || (bytes.len() - len).is_multiple_of(REGION_LEN), "{len} bytes");
        }
        let beyond = Description { regions: vec![region(u64::MAX, Place::Host)], ..described.clone() };
        assert_eq!(Description::parse(&beyond.to_bytes()).unwrap_err().kind, ErrorKind::Usage);
        let mut merged = Description { regions: vec![region(4096, Place::Host)], ..described.clone() };
        merged.merge(&described).unwrap();
        assert_eq!(merged.regions().len(), 2);
        let other = Description { generation: 1, ..described };
        assert_eq!(merged.merge(&other).unwrap_err().kind, ErrorKind::Mismatch);
    }
}
