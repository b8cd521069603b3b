//! Memory that peers can map.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak};

use crossrail_types::{Error, ErrorKind, Origin, Result};
use nix::sys::resource::{Resource, getrlimit};

use crate::memory::{Mapping, PAGE, identity, sealed_memfd};
use crate::wire::Wire;

/// All memfd segments of one context. Any thread.
#[derive(Debug)]
pub struct Arena {
    next: AtomicU32,
    /// The process that made it.
    origin: Origin,
    /// By first address.
    live: RwLock<BTreeMap<usize, Weak<Inner>>>,
    /// Why this process cannot share memory with peers; set by the first allocation that failed to create a memfd.
    unshared: OnceLock<String>,
    /// The lanes that may have passed a segment on.
    wires: Mutex<Vec<Weak<Wire>>>,
}

/// Memory of an [`Arena`], zeroed when new. Clones share it; it is unmapped here when the last one goes, and the
/// peers that mapped it are told to unmap it too. Where the system denies memfds it is private to the process: no
/// [`Arena::find`] finds it, and it moves like any other memory.
#[derive(Clone, Debug)]
pub struct Segment(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    id: u32,
    len: usize,
    map: Mapping,
    shared: Option<Memfd>,
    arena: Arc<Arena>,
}

/// The shareable part of a segment: its memfd.
#[derive(Debug)]
struct Memfd {
    fd: OwnedFd,
    identity: u64,
}

/// A range of memory as a range of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentRef {
    /// The segment's id, unique within its arena.
    pub id: u32,
    /// Its memfd; open as long as the segment lives.
    pub fd: RawFd,
    /// Bytes from the segment's start.
    pub offset: u64,
}

impl Arena {
    /// An arena with no segment yet.
    pub fn new() -> Arc<Arena> {
        Arc::new(Arena {
            next: AtomicU32::default(),
            origin: Origin::here(),
            live: RwLock::default(),
            unshared: OnceLock::new(),
            wires: Mutex::default(),
        })
    }

    /// `len` bytes of zeroed, page-aligned memory; huge pages are asked for from 2 MiB up. Peers can map it unless the
    /// system denies memfds to this process ([`Arena::unshared`]).
    ///
    /// # Errors
    /// [`ErrorKind::Exhausted`] when the machine, or the control group, has less free memory than `len`, or a limit of
    /// the process (address space, file size, open descriptors) is in the way; the text names the bytes asked for.
    pub fn alloc(self: &Arc<Self>, len: usize) -> Result<Segment> {
        let exhausted = |why: String| {
            Error::new(ErrorKind::Exhausted, "alloc", format!("{len} bytes of shared memory: {why}"))
                .with_hint("ask for less, free segments, or raise the limit that is named")
        };
        let size = len.max(1).checked_next_multiple_of(PAGE).ok_or_else(|| exhausted("more than can be".into()))?;
        refuse_hopeless(size).map_err(exhausted)?;
        let (map, shared) = match sealed_memfd("crossrail-segment", size) {
            Ok(fd) => {
                let map = Mapping::new(fd.as_fd(), size).map_err(|e| failed(&e, "mmap", exhausted))?;
                let identity = identity(fd.as_fd()).map_err(|e| failed(&e, "fstat", exhausted))?;
                (map, Some(Memfd { fd, identity }))
            }
            // Denied by a seccomp filter or an old kernel: everything that needs no peer mapping still works.
            Err(e) if matches!(e.raw_os_error(), Some(libc::EPERM | libc::EACCES | libc::ENOSYS)) => {
                let map = Mapping::private(size).map_err(|e| failed(&e, "mmap", exhausted))?;
                self.unshared.get_or_init(|| format!("memfd_create: {e}; a seccomp filter or the kernel denies it"));
                (map, None)
            }
            Err(e) => return Err(failed(&e, "memfd_create", exhausted)),
        };
        let id = self
            .next
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |id| id.checked_add(1))
            .map_err(|_| exhausted("all 2^32 segment ids are used up".into()))?;
        let start = map.ptr() as usize;
        let inner = Arc::new(Inner { id, len, map, shared, arena: Arc::clone(self) });
        if inner.shared.is_some() {
            self.live.write().unwrap_or_else(PoisonError::into_inner).insert(start, Arc::downgrade(&inner));
        }
        Ok(Segment(inner))
    }

    /// Why the memory of this arena is private to the process, if it is.
    pub fn unshared(&self) -> Option<&str> {
        self.unshared.get().map(String::as_str)
    }

    /// The segment that holds all of `len` bytes at `ptr`, if there is one.
    pub fn find(&self, ptr: *const u8, len: usize) -> Option<SegmentRef> {
        let (segment, offset) = self.lookup(ptr, len)?;
        Some(SegmentRef { id: segment.id(), fd: segment.fd()?, offset })
    }

    /// As `find`, with a hold on the segment.
    pub(crate) fn lookup(&self, ptr: *const u8, len: usize) -> Option<(Segment, u64)> {
        let live = self.live.read().unwrap_or_else(PoisonError::into_inner);
        let (start, inner) = live.range(..=ptr as usize).next_back()?;
        let inner = inner.upgrade()?;
        let offset = ptr as usize - start;
        (offset.checked_add(len)? <= inner.len).then(|| (Segment(inner), offset as u64))
    }

    /// Registers `wire`: it is notified of segments that are dropped from now on.
    pub(crate) fn enlist(&self, wire: &Arc<Wire>) {
        let mut wires = self.wires();
        // Whenever it would grow: otherwise each lane would look at all those before it.
        if wires.len() == wires.capacity() {
            wires.retain(|known| known.strong_count() > 0);
        }
        wires.push(Arc::downgrade(wire));
    }

    fn wires(&self) -> MutexGuard<'_, Vec<Weak<Wire>>> {
        self.wires.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Refuses allocations that are bound to fail. A memfd allocates its pages on first access, so otherwise the process
/// would be killed in the middle of a copy.
fn refuse_hopeless(size: usize) -> std::result::Result<(), String> {
    // Beyond this limit ftruncate raises SIGXFSZ, which kills.
    if let Ok((limit, _)) = getrlimit(Resource::RLIMIT_FSIZE)
        && size as u64 > limit
    {
        return Err(format!("RLIMIT_FSIZE is {limit} bytes"));
    }
    if LEFT.take(size as u64) {
        return Ok(());
    }
    match crossrail_topology::host_memory() {
        Some(memory) if size as u64 > memory.available => Err(memory.to_string()),
        Some(memory) => {
            LEFT.set(memory.available - size as u64);
            Ok(())
        }
        None => Ok(()),
    }
}

/// Time for which small allocations share a lookup of free memory: every lane has one, and a lookup reads a dozen files.
const FRESH_MS: u64 = 1000;
/// Of what is free, an allocation without another lookup takes this part at most.
const SMALL: u64 = 64;

static LEFT: Left = Left { until_ms: AtomicU64::new(0), bytes: AtomicU64::new(0) };

/// Memory that was free a moment ago, less what was allocated since. Without a lock, which a forked child would inherit.
struct Left {
    until_ms: AtomicU64,
    bytes: AtomicU64,
}

impl Left {
    fn set(&self, bytes: u64) {
        self.bytes.store(bytes, Ordering::Relaxed);
        self.until_ms.store(now_ms() + FRESH_MS, Ordering::Release);
    }

    /// False: free memory has to be looked up.
    fn take(&self, size: u64) -> bool {
        let less = |left: u64| left.checked_sub(size).filter(|_| size <= left / SMALL);
        now_ms() < self.until_ms.load(Ordering::Acquire)
            && self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }
}

fn now_ms() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes to `now` alone.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut now) };
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

fn failed(source: &io::Error, call: &str, exhausted: impl FnOnce(String) -> Error) -> Error {
    match source.raw_os_error() {
        Some(libc::ENOMEM | libc::ENOSPC | libc::EMFILE | libc::ENFILE | libc::EFBIG | libc::EINVAL) => {
            exhausted(format!("{call}: {source}"))
        }
        _ => Error::io("alloc", call, source),
    }
}

impl Segment {
    /// First byte.
    pub fn ptr(&self) -> *mut u8 {
        self.0.map.ptr()
    }

    /// Bytes, as asked for.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Unique within the arena, never used again.
    pub fn id(&self) -> u32 {
        self.0.id
    }

    /// The memfd, unless the memory is private; open as long as a clone lives.
    pub fn fd(&self) -> Option<RawFd> {
        self.borrow_fd().map(|fd| fd.as_raw_fd())
    }

    /// What tells it from the segments of other arenas, which have the same ids.
    pub(crate) fn identity(&self) -> u64 {
        self.0.shared.as_ref().map_or(0, |memfd| memfd.identity)
    }

    pub(crate) fn borrow_fd(&self) -> Option<BorrowedFd<'_>> {
        self.0.shared.as_ref().map(|memfd| memfd.fd.as_fd())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if !self.arena.origin.is_here() {
            // A forked child unmaps its copy; what peers have mapped is its parent's.
            return;
        }
        // Out of the table first: once unmapped, the address may belong to something else.
        let start = self.map.ptr() as usize;
        self.arena.live.write().unwrap_or_else(PoisonError::into_inner).remove(&start);
        let wires: Vec<Arc<Wire>> = self.arena.wires().iter().filter_map(Weak::upgrade).collect();
        for wire in wires {
            wire.segment_gone(self.id);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn small_allocations_share_a_lookup_and_large_ones_have_their_own() {
        let left = Left { until_ms: AtomicU64::new(0), bytes: AtomicU64::new(0) };
        assert!(!left.take(1), "nothing is known yet");
        left.set(1000 * SMALL);
        assert!(!left.take(1001), "too much of what is free");
        assert!(left.take(1000) && !left.take(1000), "what was taken is not free any more");
        assert!(left.take(900));
        left.until_ms.store(0, Ordering::Relaxed);
        assert!(!left.take(1), "long ago");
    }
}
