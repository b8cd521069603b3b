//! Memory of batches, and memory that NCCL has registered.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crossrail_nccl_abi::rma::MR_SIGNAL_NEVER_RESET;
use crossrail_types::{Error, ErrorKind, Result};

use super::batch::Refusal;

const PAGE: usize = 4096;

/// Zeroed pages that rails write and read, and that GPUs copy from and to once they are pinned. The
/// caller of an access ensures that no other thread writes the range.
#[derive(Debug)]
pub(crate) struct Area {
    start: *mut u8,
    layout: Layout,
}

// SAFETY: plain memory; accesses are through raw pointers, under the rule above.
unsafe impl Send for Area {}
// SAFETY: as above.
unsafe impl Sync for Area {}

impl Drop for Area {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout in `new`, freed once.
        unsafe { dealloc(self.start, self.layout) };
    }
}

impl Area {
    /// # Errors
    /// `Exhausted`.
    pub(crate) fn new(len: usize) -> Result<Area> {
        let exhausted = || Error::new(ErrorKind::Exhausted, "connect", format!("no memory for {len} bytes"));
        let layout = Layout::from_size_align(len.max(1), PAGE).map_err(|_| exhausted())?;
        // SAFETY: the layout's size is not 0.
        let start = unsafe { alloc_zeroed(layout) };
        if start.is_null() { Err(exhausted()) } else { Ok(Area { start, layout }) }
    }

    pub(crate) fn len(&self) -> usize {
        self.layout.size()
    }

    /// The address of byte `at`, of which `len` follow.
    pub(crate) fn at(&self, at: usize, len: usize) -> *mut u8 {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len()), "{len} bytes at {at} of {}", self.len());
        // SAFETY: inside the allocation.
        unsafe { self.start.add(at) }
    }

    pub(crate) fn read<const LEN: usize>(&self, at: usize) -> [u8; LEN] {
        // SAFETY: inside, and no other thread writes there, by the type's rule.
        unsafe { self.at(at, LEN).cast::<[u8; LEN]>().read_unaligned() }
    }

    pub(crate) fn write(&self, at: usize, bytes: &[u8]) {
        // SAFETY: inside, and no other thread accesses it, by the type's rule.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at(at, bytes.len()), bytes.len()) };
    }
}

/// Memory that NCCL has registered with a group. Offsets count from its start.
#[derive(Debug)]
pub(crate) struct Region {
    /// Equal on all ranks: registrations are counted.
    pub(crate) number: u32,
    /// Of the group.
    pub(crate) group: u64,
    start: u64,
    len: usize,
    /// The GPU whose memory it is.
    pub(crate) gpu: Option<u32>,
    flags: u64,
    alive: AtomicBool,
}

impl Region {
    pub(crate) fn new(group: u64, number: u32, (start, len): (u64, usize), gpu: Option<u32>, flags: u64) -> Region {
        Region { number, group, start, len, gpu, flags, alive: AtomicBool::new(true) }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Its words are written by signals only.
    pub(crate) fn is_never_reset(&self) -> bool {
        self.flags & MR_SIGNAL_NEVER_RESET != 0
    }

    /// From now on it is not accessed; accesses that have begun end with the next answer to a fence.
    pub(crate) fn retire(&self) {
        self.alive.store(false, Ordering::Release);
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }

    /// The address of a range, if it may be accessed.
    pub(crate) fn range(&self, offset: u64, len: u64) -> std::result::Result<u64, Refusal> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len as u64 && self.is_alive() => Ok(self.start + offset),
            Some(end) if end <= self.len as u64 => Err(Refusal::Unregistered),
            _ => Err(Refusal::Outside),
        }
    }

    /// The address of the word of a signal.
    pub(crate) fn word(&self, offset: u64) -> std::result::Result<u64, Refusal> {
        let address =
            self.range(offset, 8).map_err(|why| if why == Refusal::Outside { Refusal::Signal } else { why })?;
        if address.is_multiple_of(8) { Ok(address) } else { Err(Refusal::Signal) }
    }
}

/// Copies to memory whose words others may read at the same time: each aligned word of 8 bytes is stored at once.
///
/// # Safety
/// Both ranges must be valid, and not overlap; no other thread writes them.
pub(crate) unsafe fn copy_words(to: *mut u8, from: *const u8, len: usize) {
    let head = to.align_offset(8).min(len);
    let words = (len - head) / 8;
    // SAFETY: all within the ranges, and the words are aligned.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, head);
        let (to, from) = (to.add(head), from.add(head));
        for at in 0..words {
            let word = from.add(8 * at).cast::<u64>().read_unaligned();
            (*to.add(8 * at).cast::<AtomicU64>()).store(word, Ordering::Relaxed);
        }
        std::ptr::copy_nonoverlapping(from.add(8 * words), to.add(8 * words), len - head - 8 * words);
    }
}

/// Adds to a word of host memory that others read: they see what was written before.
///
/// # Safety
/// The word must be valid and aligned.
pub(crate) unsafe fn add_word(at: u64, value: u64) {
    // SAFETY: promised by the caller.
    unsafe { (*(at as usize as *const AtomicU64)).fetch_add(value, Ordering::Release) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_and_words_are_checked_without_overflow() {
        let region = Region::new(1, 0, (4096, 100), None, 0);
        assert_eq!((region.range(90, 10), region.range(100, 0), region.word(88)), (Ok(4186), Ok(4196), Ok(4184)));
        for (offset, len) in [(91, 10), (101, 0), (u64::MAX, 1), (1, u64::MAX)] {
            assert_eq!(region.range(offset, len), Err(Refusal::Outside), "{offset} {len}");
        }
        for offset in [4, 96, u64::MAX] {
            assert_eq!(region.word(offset), Err(Refusal::Signal), "{offset}");
        }
        region.retire();
        assert_eq!((region.range(0, 1), region.word(0)), (Err(Refusal::Unregistered), Err(Refusal::Unregistered)));
    }

    #[test]
    fn words_are_copied_whatever_the_alignment() {
        let from: Vec<u8> = (0..200).collect();
        for (to_at, from_at, len) in [(0, 0, 64), (3, 5, 100), (1, 0, 3), (8, 1, 17), (7, 7, 0)] {
            let mut to = vec![0xee_u8; 200];
            // SAFETY: both ranges are inside.
            unsafe { copy_words(to.as_mut_ptr().add(to_at), from.as_ptr().add(from_at), len) };
            assert!(to[to_at..to_at + len] == from[from_at..from_at + len]);
            assert!(to[..to_at].iter().chain(&to[to_at + len..]).all(|byte| *byte == 0xee));
        }
    }

    #[test]
    fn a_reader_sees_whole_words() {
        let words: Vec<AtomicU64> = (0..16).map(|_| AtomicU64::new(0)).collect();
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let seen = scope.spawn(|| {
                while !ended.load(Ordering::Acquire) {
                    for word in &words {
                        let word = word.load(Ordering::Relaxed);
                        assert!(word == word.rotate_left(8), "{word:#x}");
                    }
                }
            });
            for round in 0..2_000_000_u32 {
                let from = [round as u8; 129];
                // SAFETY: both are of that length; the source is not aligned.
                unsafe { copy_words(words.as_ptr().cast_mut().cast(), from.as_ptr().add(1), 128) };
            }
            ended.store(true, Ordering::Release);
            seen.join().expect("whole words");
        });
    }
}
