//! GPUs made of host memory, so that everything above the driver is tested on machines without one.
//!
//! Device memory is a memfd that is mapped twice: at the address that the user sees, without any access rights, so that
//! every access by the CPU faults; and a second time for copies. Staging copies run on a thread of their own, and a
//! test can delay them, hold them or make them fail.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crossrail_locks::{Condvar, Mutex, MutexGuard};
use crossrail_types::{Error, ErrorKind, Result, format_gib};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

use crate::direction::Direction;
use crate::scratch::{BLOCKS_LEN, Blocks};
use crate::stream_point::{Reached, StreamPoint};

const PAGE: usize = 4096;
const TOTAL: u64 = 4 << 30;

/// One simulated GPU, controlled by a test. Clones are the same GPU.
#[derive(Clone)]
pub struct Simulated(Arc<Inner>);

struct Inner {
    ordinal: u32,
    memory: Mutex<BTreeMap<u64, Arc<Pages>>>,
    streams: Mutex<BTreeMap<u64, Arc<Counts>>>,
    plan: Mutex<Plan>,
    changed: Condvar,
}

/// How copies behave.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// By direction: how long each copy takes before its bytes move.
    pub(crate) delay: [Duration; 2],
    /// By direction: no copy runs.
    pub(crate) held: [bool; 2],
    /// By direction: how many batches fail, and the error text.
    pub(crate) failing: [(u32, String); 2],
    total: u64,
}

/// Memory of a simulated GPU; freed when dropped. Copies in flight keep its pages mapped, new ones fail.
pub(crate) struct Memory {
    gpu: Simulated,
    pages: Arc<Pages>,
}

/// The two mappings.
struct Pages {
    seen: NonNull<u8>,
    shadow: NonNull<u8>,
    len: usize,
}

// SAFETY: plain memory of the process; whoever copies through `shadow` answers for races, as with a GPU's.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Drop for Pages {
    fn drop(&mut self) {
        for start in [self.seen, self.shadow] {
            // SAFETY: exactly what `map` mapped, once.
            let _ = unsafe { munmap(start.cast(), self.len) };
        }
    }
}

/// How much work a simulated stream has had, and how much of it is complete.
#[derive(Debug, Default)]
struct Counts {
    submitted: AtomicU64,
    complete: AtomicU64,
    failed: AtomicBool,
}

/// A stream of a simulated GPU: a test submits work, and completes it.
#[derive(Clone)]
pub struct SimulatedStream {
    counts: Arc<Counts>,
}

/// A point in a simulated stream.
struct Point {
    counts: Arc<Counts>,
    at: u64,
}

impl Reached for Point {
    fn is_reached(&self) -> Result<bool> {
        if self.counts.failed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Io, "stream", "the simulated work failed"));
        }
        Ok(self.counts.complete.load(Ordering::Acquire) >= self.at)
    }
}

impl SimulatedStream {
    /// The handle, as programs pass a stream's.
    pub fn handle(&self) -> u64 {
        Arc::as_ptr(&self.counts) as usize as u64
    }

    /// Submits work that runs until [`SimulatedStream::finish`].
    pub fn put_in(&self) {
        self.counts.submitted.fetch_add(1, Ordering::AcqRel);
    }

    /// Completes all submitted work.
    pub fn finish(&self) {
        self.counts.complete.store(self.counts.submitted.load(Ordering::Acquire), Ordering::Release);
    }

    /// Fails all submitted work, and what is submitted later.
    pub fn fail(&self) {
        self.counts.failed.store(true, Ordering::Release);
    }
}

impl Simulated {
    pub(crate) fn new(ordinal: u32) -> Simulated {
        let failing = [(0, String::new()), (0, String::new())];
        let plan = Plan { delay: [Duration::ZERO; 2], held: [false; 2], failing, total: TOTAL };
        Simulated(Arc::new(Inner {
            ordinal,
            memory: Mutex::default(),
            streams: Mutex::default(),
            plan: Mutex::new(plan),
            changed: Condvar::new(),
        }))
    }

    /// Its ordinal.
    pub fn ordinal(&self) -> u32 {
        self.0.ordinal
    }

    /// Every copy takes this long.
    pub fn set_delay(&self, delay: Duration) {
        self.change(|plan| plan.delay = [delay; 2]);
    }

    /// Every copy out of its memory takes this long.
    pub fn set_pack_delay(&self, delay: Duration) {
        self.change(|plan| plan.delay[Direction::Out as usize] = delay);
    }

    /// Every copy into its memory takes this long.
    pub fn set_unpack_delay(&self, delay: Duration) {
        self.change(|plan| plan.delay[Direction::In as usize] = delay);
    }

    /// While `true`, nothing is copied out of its memory.
    pub fn hold_packs(&self, held: bool) {
        self.change(|plan| plan.held[Direction::Out as usize] = held);
    }

    /// While `true`, nothing is copied into its memory.
    pub fn hold_unpacks(&self, held: bool) {
        self.change(|plan| plan.held[Direction::In as usize] = held);
    }

    /// The next `count` packs fail with `why`.
    pub fn fail_packs(&self, count: u32, why: &str) {
        self.change(|plan| plan.failing[Direction::Out as usize] = (count, why.to_owned()));
    }

    /// The next `count` batches of unpacks fail with `why`.
    pub fn fail_unpacks(&self, count: u32, why: &str) {
        self.change(|plan| plan.failing[Direction::In as usize] = (count, why.to_owned()));
    }

    /// Its memory in bytes.
    pub(crate) fn memory(&self) -> u64 {
        self.0.plan.lock().total
    }

    /// Sets how much memory it has, in bytes.
    pub fn set_memory(&self, total: u64) {
        self.change(|plan| plan.total = total);
    }

    /// How much of its memory is allocated, in bytes.
    pub fn allocated(&self) -> u64 {
        self.0.memory.lock().values().map(|pages| pages.len as u64).sum()
    }

    /// A new stream of it.
    pub fn stream(&self) -> SimulatedStream {
        let stream = SimulatedStream { counts: Arc::default() };
        self.0.streams.lock().insert(stream.handle(), stream.counts.clone());
        stream
    }

    fn change(&self, body: impl FnOnce(&mut Plan)) {
        body(&mut self.0.plan.lock());
        self.0.changed.notify_all();
    }

    /// The plan in force, and the condition that is notified when it changes.
    pub(crate) fn plan(&self) -> (MutexGuard<'_, Plan>, &Condvar) {
        (self.0.plan.lock(), &self.0.changed)
    }

    pub(crate) fn alloc(&self, len: usize) -> Result<Memory> {
        let total = self.0.plan.lock().total;
        let mut memory = self.0.memory.lock();
        let used: u64 = memory.values().map(|pages| pages.len as u64).sum();
        let free = total.saturating_sub(used);
        let size = len.checked_next_multiple_of(PAGE).unwrap_or(usize::MAX);
        if size as u64 > free {
            let (asked, free) = (format_gib(len as u64), format_gib(free));
            let detail = format!("{asked} requested, {free} of {} are free", format_gib(total));
            return Err(Error::new(ErrorKind::Exhausted, format!("memory on cuda:{}", self.0.ordinal), detail));
        }
        let pages = Arc::new(map(size).map_err(|error| Error::io("simulated GPU memory", "mmap", &error))?);
        memory.insert(pages.seen.as_ptr() as usize as u64, pages.clone());
        Ok(Memory { gpu: self.clone(), pages })
    }

    /// Whether it has the memory.
    pub(crate) fn check(&self, ptr: u64, len: usize) -> Result<()> {
        self.find(ptr, len).map(|_| ())
    }

    fn find(&self, ptr: u64, len: usize) -> Result<(Arc<Pages>, usize)> {
        let memory = self.0.memory.lock();
        let found = memory.range(..=ptr).next_back().and_then(|(start, pages)| {
            let offset = usize::try_from(ptr - start).ok()?;
            (offset.checked_add(len)? <= pages.len).then(|| (pages.clone(), offset))
        });
        found.ok_or_else(|| {
            let detail = format!("{len} bytes at {ptr:#x} are not all its own");
            Error::new(ErrorKind::Usage, format!("memory of cuda:{}", self.0.ordinal), detail)
                .with_hint("name the memory's own device, and a range inside one allocation")
        })
    }

    pub(crate) fn blocks(&self) -> Arc<Blocks> {
        let memory: Arc<Box<[u8]>> = Arc::new(vec![0; BLOCKS_LEN].into());
        Blocks::new(memory.as_ptr().cast_mut(), memory)
    }

    pub(crate) fn copy_in(&self, ptr: u64, bytes: &[u8]) -> Result<()> {
        // SAFETY: the bytes are there, as a slice's.
        unsafe { self.copy_from(ptr, bytes.as_ptr(), bytes.len()) }
    }

    pub(crate) fn copy_out(&self, ptr: u64, bytes: &mut [u8]) -> Result<()> {
        // SAFETY: the bytes are there, as a slice's.
        unsafe { self.copy_to(ptr, bytes.as_mut_ptr(), bytes.len()) }
    }

    /// Host to device.
    ///
    /// # Safety
    /// `host` must be valid for `len` bytes.
    pub(crate) unsafe fn copy_from(&self, ptr: u64, host: *const u8, len: usize) -> Result<()> {
        let (pages, offset) = self.find(ptr, len)?;
        // SAFETY: inside the pages, which `pages` keeps mapped; the caller vouches for the host's side.
        unsafe { std::ptr::copy_nonoverlapping(host, pages.shadow.as_ptr().add(offset), len) };
        Ok(())
    }

    /// Device to host.
    ///
    /// # Safety
    /// `host` must be valid for writing `len` bytes.
    pub(crate) unsafe fn copy_to(&self, ptr: u64, host: *mut u8, len: usize) -> Result<()> {
        let (pages, offset) = self.find(ptr, len)?;
        // SAFETY: inside the pages, which `pages` keeps mapped; the caller vouches for the host's side.
        unsafe { std::ptr::copy_nonoverlapping(pages.shadow.as_ptr().add(offset), host, len) };
        Ok(())
    }

    pub(crate) fn stream_point(&self, stream: u64) -> Result<StreamPoint> {
        let counts = match (stream, self.0.streams.lock().get(&stream)) {
            (_, Some(counts)) => counts.clone(),
            (0, None) => Arc::default(),
            _ => {
                let detail = format!("the stream {stream:#x} does not belong to cuda:{}", self.0.ordinal);
                return Err(Error::new(ErrorKind::Usage, "stream", detail));
            }
        };
        let at = counts.submitted.load(Ordering::Acquire);
        Ok(StreamPoint::new(stream, Point { counts, at }))
    }
}

fn map(len: usize) -> std::io::Result<Pages> {
    let fd = memfd_create("crossrail-simulated-gpu", MFdFlags::MFD_CLOEXEC)?;
    nix::unistd::ftruncate(&fd, i64::try_from(len).map_err(std::io::Error::other)?)?;
    let size = NonZeroUsize::new(len).ok_or(std::io::ErrorKind::InvalidInput)?;
    // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
    let new = |access| unsafe { mmap(None, size, access, MapFlags::MAP_SHARED, fd.as_fd(), 0) };
    let seen = new(ProtFlags::PROT_NONE)?.cast::<u8>();
    match new(ProtFlags::PROT_READ | ProtFlags::PROT_WRITE) {
        Ok(shadow) => Ok(Pages { seen, shadow: shadow.cast(), len }),
        Err(error) => {
            // SAFETY: mapped just now, unmapped once.
            let _ = unsafe { munmap(seen.cast(), len) };
            Err(error.into())
        }
    }
}

impl Memory {
    pub(crate) fn address(&self) -> u64 {
        self.pages.seen.as_ptr() as usize as u64
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.gpu.0.memory.lock().remove(&self.address());
    }
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Memory({:#x} of {:?})", self.address(), self.gpu)
    }
}

impl std::fmt::Debug for Simulated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Simulated(cuda:{})", self.0.ordinal)
    }
}

impl std::fmt::Debug for SimulatedStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SimulatedStream({:#x})", self.handle())
    }
}
