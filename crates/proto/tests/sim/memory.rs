//! Real bytes, and who may touch them.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use crossrail_proto::{Access, RegionFault, RegionKey, RegionRef, Regions};

/// A permission: lanes must not touch what is revoked; nothing must touch what is over.
#[derive(Debug, Default)]
pub(crate) struct Pass {
    pub(crate) revoked: Cell<bool>,
    pub(crate) over: Cell<bool>,
}

/// Bytes that somebody may still hold a pass for.
#[derive(Clone, Debug)]
pub(crate) struct Span {
    pub(crate) bytes: Rc<RefCell<Vec<u8>>>,
    /// Where the span begins in `bytes`.
    pub(crate) base: usize,
    pub(crate) pass: Rc<Pass>,
    /// Lanes cannot touch it.
    pub(crate) device: bool,
    /// Of whom, for messages.
    pub(crate) name: String,
}

impl Span {
    /// A lane reads: garbage once revoked.
    pub(crate) fn lane_read(&self, offset: u64, len: usize) -> Vec<u8> {
        assert!(!self.device || len == 0, "a lane reads {}, which is a device's", self.name);
        if self.pass.revoked.get() {
            return vec![0xee; len];
        }
        assert!(!self.pass.over.get(), "a lane reads {} after its end", self.name);
        let at = self.base + offset as usize;
        self.bytes.borrow()[at..at + len].to_vec()
    }

    /// A lane writes: nothing once revoked.
    pub(crate) fn lane_write(&self, offset: u64, from: &[u8]) {
        assert!(!self.device || from.is_empty(), "a lane writes {}, which is a device's", self.name);
        if self.pass.revoked.get() {
            return;
        }
        assert!(!self.pass.over.get(), "a lane writes {} after its end", self.name);
        let at = self.base + offset as usize;
        self.bytes.borrow_mut()[at..at + from.len()].copy_from_slice(from);
    }

    /// A copy from the device, which no revocation stops.
    pub(crate) fn device_read(&self, offset: u64, len: usize) -> Vec<u8> {
        assert!(!self.pass.over.get(), "{} is packed after its end", self.name);
        let at = self.base + offset as usize;
        self.bytes.borrow()[at..at + len].to_vec()
    }

    /// A copy to the device, which no revocation stops.
    pub(crate) fn device_write(&self, offset: u64, from: &[u8]) {
        assert!(!self.pass.over.get(), "{} is unpacked into after its end", self.name);
        let at = self.base + offset as usize;
        self.bytes.borrow_mut()[at..at + from.len()].copy_from_slice(from);
    }

    /// A direct copy, which no revocation stops.
    pub(crate) fn copy_to(&self, to: &Span, offset: usize, len: usize) {
        assert!(!self.pass.over.get(), "a direct copy reads {} after its end", self.name);
        assert!(!to.pass.over.get(), "a direct copy writes {} after its end", to.name);
        let piece = self.bytes.borrow()[self.base + offset..self.base + offset + len].to_vec();
        to.bytes.borrow_mut()[to.base + offset..to.base + offset + len].copy_from_slice(&piece);
    }
}

/// Byte `at` of the data with that number.
pub(crate) fn pattern(number: u64, at: usize) -> u8 {
    let x = (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (at as u64).wrapping_mul(0xff51_afd7_ed55_8ccd);
    ((x ^ (x >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 56) as u8
}

pub(crate) fn filled(number: u64, len: usize) -> Vec<u8> {
    (0..len).map(|at| pattern(number, at)).collect()
}

/// One registered region.
#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) bytes: Rc<RefCell<Vec<u8>>>,
    pub(crate) alive: bool,
    pub(crate) device: bool,
    pub(crate) access: Access,
}

#[derive(Debug, Default)]
pub(crate) struct Table(pub(crate) Vec<Region>);

pub(crate) fn key(node: usize, region: usize) -> RegionKey {
    let mut key = [7; 24];
    key[0] = node as u8;
    key[1] = region as u8;
    key
}

impl Regions for Table {
    fn resolve(&mut self, k: &RegionKey, offset: u64, len: u64, access: Access) -> Result<RegionRef, RegionFault> {
        let index = usize::from(k[1]);
        let region = self.0.get(index).filter(|r| r.alive && k[2] == 7).ok_or(RegionFault::Gone)?;
        if region.access != access {
            return Err(RegionFault::Access);
        }
        let end = offset.checked_add(len).ok_or(RegionFault::Bounds)?;
        if end > region.bytes.borrow().len() as u64 {
            return Err(RegionFault::Bounds);
        }
        Ok(RegionRef { index: index as u32, generation: 3 })
    }

    fn alive(&self, region: RegionRef) -> bool {
        self.0[region.index as usize].alive
    }

    fn eager(&self, region: RegionRef) -> bool {
        !self.0[region.index as usize].device
    }
}
