//! A GPU made of host memory: mapped without access rights where NCCL and the plugin see it, so that any access by the
//! processor faults, and a second time for copies, which run only when their queue is asked how far it is.
#![allow(unsafe_code)]

use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crossrail_types::{Error, ErrorKind, Result};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

use super::super::gpu::{Gpu, Queue, Work};
use super::super::memory::Area;

static ALL: Mutex<Vec<Arc<Pages>>> = Mutex::new(Vec::new());

fn all() -> std::sync::MutexGuard<'static, Vec<Arc<Pages>>> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Behaviour of a GPU's copies.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// No copy runs.
    pub(crate) held: AtomicBool,
    /// The next piece of work fails.
    pub(crate) fails: AtomicBool,
    /// Number of polls before the next piece of work runs.
    pub(crate) polls: AtomicU64,
}

struct Pages {
    seen: NonNull<u8>,
    shadow: NonNull<u8>,
    len: usize,
    ordinal: u32,
    plan: Arc<Plan>,
}

// SAFETY: plain memory of the process; tests answer for races, as with a GPU's.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Drop for Pages {
    fn drop(&mut self) {
        for start in [self.seen, self.shadow] {
            // SAFETY: exactly what `new` mapped, once.
            let _ = unsafe { munmap(start.cast(), self.len) };
        }
    }
}

/// Memory of such a GPU, zeroed; freed when dropped.
pub(crate) struct Double(Arc<Pages>);

impl Double {
    pub(crate) fn new(len: usize, ordinal: u32, plan: &Arc<Plan>) -> Double {
        let fd = memfd_create("double", MFdFlags::MFD_CLOEXEC).expect("a memfd");
        let len = len.next_multiple_of(4096);
        nix::unistd::ftruncate(&fd, len as i64).expect("room");
        let size = NonZeroUsize::new(len).expect("not empty");
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let map = |access| unsafe { mmap(None, size, access, MapFlags::MAP_SHARED, fd.as_fd(), 0) };
        let seen = map(ProtFlags::PROT_NONE).expect("a mapping").cast();
        let shadow = map(ProtFlags::PROT_READ | ProtFlags::PROT_WRITE).expect("a mapping").cast();
        let pages = Arc::new(Pages { seen, shadow, len, ordinal, plan: Arc::clone(plan) });
        all().push(Arc::clone(&pages));
        Double(pages)
    }

    /// Its address, as NCCL knows it.
    pub(crate) fn at(&self) -> *mut u8 {
        self.0.seen.as_ptr()
    }

    /// Its contents, as kernels see them.
    #[expect(clippy::mut_from_ref, reason = "memory that the plugin writes, too")]
    pub(crate) fn bytes(&self) -> &mut [u8] {
        // SAFETY: inside the mapping; a test that writes does not write elsewhere meanwhile.
        unsafe { std::slice::from_raw_parts_mut(self.0.shadow.as_ptr(), self.0.len) }
    }

    /// A word, as kernels poll it.
    pub(crate) fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at < self.0.len);
        // SAFETY: inside the mapping, and aligned.
        unsafe { &*self.0.shadow.as_ptr().add(at).cast::<AtomicU64>() }
    }
}

impl Drop for Double {
    fn drop(&mut self) {
        all().retain(|pages| !Arc::ptr_eq(pages, &self.0));
    }
}

struct DoubleGpu {
    ordinal: u32,
    plan: Arc<Plan>,
}

/// The GPU whose memory that is.
pub(crate) fn find(address: u64) -> Option<Arc<dyn Gpu>> {
    let all = all();
    let pages = all.iter().find(|pages| pages.holds(address, 1).is_some())?;
    Some(Arc::new(DoubleGpu { ordinal: pages.ordinal, plan: Arc::clone(&pages.plan) }))
}

impl Pages {
    fn holds(&self, address: u64, len: usize) -> Option<*mut u8> {
        let offset = address.checked_sub(self.seen.as_ptr() as u64)? as usize;
        // SAFETY: inside the mapping.
        (offset.checked_add(len)? <= self.len).then(|| unsafe { self.shadow.as_ptr().add(offset) })
    }
}

impl Gpu for DoubleGpu {
    fn ordinal(&self) -> u32 {
        self.ordinal
    }

    fn queue(&self) -> Result<Box<dyn Queue>> {
        let plan = Arc::clone(&self.plan);
        Ok(Box::new(DoubleQueue { plan, work: Vec::new(), submitted: 0, reached: 0, polls: 0 }))
    }

    fn pin(&self, area: &Arc<Area>) -> Result<Box<dyn Send + Sync>> {
        Ok(Box::new(Arc::clone(area)))
    }
}

struct DoubleQueue {
    plan: Arc<Plan>,
    work: Vec<Work>,
    submitted: u64,
    reached: u64,
    polls: u64,
}

/// An address that copies may use: of a GPU's memory, where it is mapped for that; of anything else, itself.
fn resolve(address: u64, len: usize) -> *mut u8 {
    let all = all();
    let found = all.iter().find_map(|pages| pages.holds(address, len));
    found.unwrap_or(address as usize as *mut u8)
}

impl Queue for DoubleQueue {
    fn submit(&mut self, work: &mut Work) -> Result<u64> {
        if self.plan.fails.swap(false, Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Io, "copy", "the double fails"));
        }
        self.work.push(std::mem::take(work));
        self.submitted += 1;
        Ok(self.submitted)
    }

    fn reached(&mut self) -> Result<u64> {
        self.polls += 1;
        if self.plan.held.load(Ordering::Acquire) || self.polls <= self.plan.polls.load(Ordering::Relaxed) {
            return Ok(self.reached);
        }
        self.polls = 0;
        if self.reached < self.submitted {
            let work = self.work.remove(0);
            for (to, from, len) in work.copies {
                // SAFETY: the plugin's addresses: a fault is a failed test.
                unsafe { std::ptr::copy_nonoverlapping(resolve(from, len), resolve(to, len), len) };
            }
            for (to, value) in work.stores {
                // SAFETY: as above; words are aligned.
                unsafe { (*resolve(to, 8).cast::<AtomicU64>()).store(value, Ordering::Release) };
            }
            self.reached += 1;
        }
        Ok(self.reached)
    }
}
