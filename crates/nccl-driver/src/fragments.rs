//! Lists of fragments: a device of the kind `unpack` leaves received data scattered over a bounce area, with a list of
//! where each piece belongs, and the receiver gathers them.
//!
//! The layout is NCCL's (`src/device/network/unpack/unpack_defs.h` of NVIDIA/nccl): a ring of 16 lists, one for each
//! receive in flight, in the order in which the receives were posted.
#![allow(unsafe_code)]

use std::io::IoSliceMut;

use crossrail_nccl_abi::{DEVICE_UNPACK, DEVICE_UNPACK_VERSION, DeviceHandle};
use crossrail_types::{Error, ErrorKind, Result};
use nix::sys::uio::{RemoteIoVec, process_vm_readv};

/// Receives that may be in flight, and so lists in the ring.
pub(crate) const DEPTH: usize = 16;
/// Fragments of one receive.
const MAX_FRAGMENTS: usize = 2048;
const FRAGMENT_LEN: usize = 16;
/// The lists' lengths follow the lists.
const COUNTS_AT: usize = DEPTH * MAX_FRAGMENTS * FRAGMENT_LEN;

/// The bounce area of one communicator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fragments {
    /// Address of the lists.
    lists: usize,
    /// Address of the bounce area.
    bounce: usize,
    /// The next list.
    head: usize,
}

impl Fragments {
    /// The bounce area that a communicator's handle describes. It must be host memory.
    ///
    /// # Errors
    /// `Unsupported`: another kind or version of device, or memory of a GPU.
    pub(crate) fn of(handle: &DeviceHandle) -> Result<Fragments> {
        if handle.kind != DEVICE_UNPACK || handle.version != DEVICE_UNPACK_VERSION {
            let detail = format!(
                "its device is of kind {} and version {}; only kind {DEVICE_UNPACK} of version \
                 {DEVICE_UNPACK_VERSION} (lists of fragments) is supported",
                handle.kind, handle.version
            );
            return Err(Error::new(ErrorKind::Unsupported, "net plugin", detail));
        }
        let mut words = [0; 24];
        read(handle.handle as usize, &mut words)?;
        let word = |index: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&words[8 * index..8 * index + 8]);
            u64::from_le_bytes(word) as usize
        };
        Ok(Fragments { lists: word(0), bounce: word(1), head: word(2) })
    }

    /// Gathers the fragments of the next receive into `out`.
    ///
    /// # Errors
    /// `Protocol`: the list is too long, or leaves gaps, or a fragment lies outside.
    pub(crate) fn gather(&mut self, out: &mut [u8]) -> Result<()> {
        let malformed = |detail: String| Error::new(ErrorKind::Protocol, "net plugin", detail);
        // The plugin's addresses and numbers may be any: sums wrap, and the kernel refuses what is not there.
        let slot = self.head % DEPTH;
        self.head = self.head.wrapping_add(1);
        let mut count = [0; 8];
        read(self.lists.wrapping_add(COUNTS_AT + 8 * slot), &mut count)?;
        let count = u64::from_le_bytes(count);
        if count > MAX_FRAGMENTS as u64 {
            return Err(malformed(format!("irecv left a list of {count} fragments; at most {MAX_FRAGMENTS} fit")));
        }
        let mut list = vec![0; count as usize * FRAGMENT_LEN];
        read(self.lists.wrapping_add(slot * MAX_FRAGMENTS * FRAGMENT_LEN), &mut list)?;
        let mut gathered = 0;
        for entry in list.chunks_exact(FRAGMENT_LEN) {
            let word = |at: usize| u32::from_le_bytes([entry[at], entry[at + 1], entry[at + 2], entry[at + 3]]);
            let (from, len) = (word(0) as usize, word(4) as usize);
            let to = (u64::from(word(8)) | u64::from(word(12)) << 32) as usize;
            let target = to.checked_add(len).and_then(|end| out.get_mut(to..end));
            let target = target.ok_or_else(|| {
                malformed(format!("irecv left a fragment of {len} bytes at {to} of a buffer of another size"))
            })?;
            read(self.bounce.wrapping_add(from), target)?;
            gathered += len;
        }
        if gathered == out.len() {
            return Ok(());
        }
        Err(malformed(format!("irecv left fragments of {gathered} bytes for a message of {}", out.len())))
    }
}

/// Copies from an address that a plugin has named. The kernel checks it, so that memory of a GPU is an error.
fn read(from: usize, out: &mut [u8]) -> Result<()> {
    let (len, pid) = (out.len(), nix::unistd::getpid());
    if len == 0 {
        return Ok(());
    }
    match process_vm_readv(pid, &mut [IoSliceMut::new(out)], &[RemoteIoVec { base: from, len }]) {
        Ok(copied) if copied == len => Ok(()),
        _ => {
            let detail = "the plugin's lists of fragments are not in host memory";
            Err(Error::new(ErrorKind::Unsupported, "net plugin", detail)
                .with_hint("plugins that receive into GPU memory only cannot be tested by this command"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Area {
        lists: Vec<u8>,
        bounce: Vec<u8>,
        words: [usize; 3],
    }

    impl Area {
        fn new(slot: usize, list: &[(u32, u32, u64)]) -> Box<Area> {
            let mut lists = vec![0; COUNTS_AT + 8 * DEPTH];
            for (index, (from, len, to)) in list.iter().enumerate() {
                let at = (slot * MAX_FRAGMENTS + index) * FRAGMENT_LEN;
                lists[at..at + 4].copy_from_slice(&from.to_le_bytes());
                lists[at + 4..at + 8].copy_from_slice(&len.to_le_bytes());
                lists[at + 8..at + 16].copy_from_slice(&to.to_le_bytes());
            }
            let count = COUNTS_AT + 8 * slot;
            lists[count..count + 8].copy_from_slice(&(list.len() as u64).to_le_bytes());
            let mut area = Box::new(Area { lists, bounce: (0..=255).collect(), words: [0; 3] });
            area.words = [area.lists.as_ptr() as usize, area.bounce.as_ptr() as usize, slot];
            area
        }

        fn fragments(&self, version: i32) -> Result<Fragments> {
            let handle = self.words.as_ptr().cast_mut().cast();
            Fragments::of(&DeviceHandle { kind: DEVICE_UNPACK, version, handle, size: 24, needs_proxy_progress: 0 })
        }
    }

    #[test]
    fn fragments_are_gathered_to_where_the_list_says() {
        let area = Area::new(3, &[(200, 2, 4), (10, 4, 0)]);
        let mut fragments = area.fragments(DEVICE_UNPACK_VERSION).expect("fragments");
        let mut out = [0; 6];
        fragments.gather(&mut out).expect("all of them");
        assert_eq!(out, [10, 11, 12, 13, 200, 201]);
        // The next receive has the next list, which is empty.
        fragments.gather(&mut []).expect("nothing");
        assert!(fragments.gather(&mut out).is_err());
    }

    #[test]
    fn lists_that_leave_gaps_or_reach_outside_are_refused() {
        for list in [&[(0, 4, 0)][..], &[(0, 6, 1)], &[(0, 6, u64::MAX)]] {
            let mut fragments = Area::new(0, list).fragments(DEVICE_UNPACK_VERSION).map(|_| ());
            assert!(fragments.is_ok());
            let area = Area::new(0, list);
            fragments = area.fragments(DEVICE_UNPACK_VERSION).and_then(|mut it| it.gather(&mut [0; 6]));
            assert_eq!(fragments.expect_err("an error").kind, ErrorKind::Protocol, "{list:?}");
        }
        let area = Area::new(0, &[]);
        assert_eq!(area.fragments(6).expect_err("an error").kind, ErrorKind::Unsupported);
    }

    #[test]
    fn an_address_that_is_not_host_memory_is_an_error() {
        let handle = DeviceHandle {
            kind: DEVICE_UNPACK,
            version: DEVICE_UNPACK_VERSION,
            handle: 16 as *mut _,
            size: 24,
            needs_proxy_progress: 0,
        };
        assert_eq!(Fragments::of(&handle).expect_err("an error").kind, ErrorKind::Unsupported);
    }
}
