//! Memory of the host that kernels and proxies share.
#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use crossrail_cuda::{Context, Deferred, PinnedMemory, RegisteredMemory};
use crossrail_locks::Mutex;
use crossrail_types::{Error, ErrorKind, Result};

/// Memory is registered by pages.
const PAGE: usize = 4096;

/// Zeroed memory of the host, accessed in words that are atomic here and on the GPU. Clones are the same memory.
#[derive(Clone)]
pub(crate) struct Area {
    start: *mut u8,
    len: usize,
    /// Its address on the GPU.
    address: u64,
    _keep: Arc<dyn Any + Send + Sync>,
}

// SAFETY: it is kept by `_keep`, and is accessed by atomics, or as transports copy into memory of others.
unsafe impl Send for Area {}
// SAFETY: as above.
unsafe impl Sync for Area {}

impl fmt::Debug for Area {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Area({} bytes)", self.len)
    }
}

impl Area {
    /// Pinned memory that every GPU of this process accesses.
    pub(crate) fn pinned(context: &Context, len: usize) -> Result<Area> {
        let memory = PinnedMemory::new(context, len.next_multiple_of(8))?;
        let (start, address) = (memory.as_ptr(), memory.address());
        // SAFETY: new, not shared yet, of that length.
        unsafe { start.write_bytes(0, memory.len()) };
        Ok(Area { start, len: memory.len(), address, _keep: Arc::new(memory) })
    }

    /// Part of memory that another process maps too, or has mapped: `len` bytes from its first page on. `keep` keeps it
    /// mapped. Both ends find the same bytes, since pages are mapped as a whole.
    ///
    /// # Errors
    /// `Region` for memory that is too short; what the driver reports.
    pub(crate) fn registered<T: Send + Sync + 'static>(
        context: &Context,
        (start, room): (*mut u8, usize),
        len: usize,
        keep: T,
    ) -> Result<Area> {
        let skipped = start.align_offset(PAGE);
        let place = NonNull::new(start.wrapping_add(skipped)).filter(|_| skipped + len <= room);
        let Some(place) = place else {
            let text = format!("{room} bytes are too few for an inbox of {len}");
            return Err(Error::new(ErrorKind::Region, "connect", text));
        };
        // SAFETY: inside memory that `keep` keeps mapped, and that is dropped after it.
        let registered = unsafe { RegisteredMemory::new(context, place, len) }?;
        let address = registered.address();
        let keep = Deferred::when_idle((registered, keep), context);
        Ok(Area { start: place.as_ptr(), len, address, _keep: Arc::new(Mutex::new(keep)) })
    }

    /// Bytes to allocate for [`Area::registered`].
    pub(crate) fn room_for(len: usize) -> usize {
        len.next_multiple_of(PAGE) + PAGE
    }

    /// Memory that no GPU accesses.
    pub(crate) fn plain(len: usize) -> Area {
        let words = Arc::new(Words((0..len.div_ceil(8)).map(|_| AtomicU64::new(0)).collect()));
        let start = words.0.as_ptr().cast_mut().cast::<u8>();
        Area { start, len: words.0.len() * 8, address: start as u64, _keep: words }
    }

    /// Its length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Its address on the GPU.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Its address here.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.start
    }

    /// The word at byte `at`, a multiple of 8.
    ///
    /// # Panics
    /// When it lies beyond the end: callers check what comes from others.
    pub(crate) fn word(&self, at: u64) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at + 8 <= self.len as u64, "word {at} of {} bytes", self.len);
        // SAFETY: inside, aligned, and kept as long as this is borrowed.
        unsafe { AtomicU64::from_ptr(self.start.add(at as usize).cast()) }
    }
}

/// Words that `AtomicU64`s own.
struct Words(Box<[AtomicU64]>);
