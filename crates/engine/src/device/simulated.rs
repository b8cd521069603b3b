//! GPUs made of host memory, so that everything above the driver is tested on machines without one.
//!
//! "Device memory" is a memfd that is mapped twice: at the address that the user sees, where every touch by the CPU is a
//! fault, and a second time for the copies. Copies run on a thread of their own ([`crate::staging`]), late if a test
//! says so, and fail if it says so.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossrail_types::{Error, ErrorKind, Result, format_gib};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::ready::{Point as ReadyPoint, Ready};
use super::state::GpuState;
use crate::staging::{StageStats, Way};

const PAGE: usize = 4096;
const TOTAL: u64 = 4 << 30;

/// One simulated GPU, in the hands of a test. Clones are the same GPU.
#[derive(Clone)]
pub struct Simulated(Arc<Inner>);

struct Inner {
    ordinal: u32,
    memory: Mutex<BTreeMap<u64, Arc<Pages>>>,
    streams: Mutex<BTreeMap<u64, Arc<Gate>>>,
    plan: Mutex<Plan>,
    changed: Condvar,
}

/// How copies go.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// How long each copy takes before its bytes move.
    pub(crate) delay: Duration,
    /// By way: nothing moves.
    pub(crate) held: [bool; 2],
    /// By way: so many batches fail, with this reason.
    pub(crate) failing: [(u32, String); 2],
    total: u64,
}

/// Memory of a simulated GPU; freed when dropped. Copies under way keep its pages, and new ones fail.
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

/// How far a simulated stream is.
#[derive(Debug, Default)]
struct Gate {
    put_in: AtomicU64,
    done: AtomicU64,
}

/// A stream of a simulated GPU: work that a test puts in is done when the test says so.
#[derive(Clone)]
pub struct SimulatedStream {
    gate: Arc<Gate>,
}

/// A moment of a simulated stream.
#[derive(Clone)]
pub(super) struct Point {
    gate: Arc<Gate>,
    at: u64,
}

impl Point {
    pub(super) fn is_done(&self) -> bool {
        self.gate.done.load(Ordering::Acquire) >= self.at
    }
}

impl SimulatedStream {
    /// The handle, as programs pass a stream's.
    pub fn handle(&self) -> u64 {
        Arc::as_ptr(&self.gate) as usize as u64
    }

    /// Puts work in that goes on until [`SimulatedStream::finish`].
    pub fn put_in(&self) {
        self.gate.put_in.fetch_add(1, Ordering::AcqRel);
    }

    /// Everything put in is done.
    pub fn finish(&self) {
        self.gate.done.store(self.gate.put_in.load(Ordering::Acquire), Ordering::Release);
    }
}

impl Simulated {
    pub(super) fn new(ordinal: u32) -> Simulated {
        let failing = [(0, String::new()), (0, String::new())];
        let plan = Plan { delay: Duration::ZERO, held: [false; 2], failing, total: TOTAL };
        Simulated(Arc::new(Inner {
            ordinal,
            memory: Mutex::default(),
            streams: Mutex::default(),
            plan: Mutex::new(plan),
            changed: Condvar::new(),
        }))
    }

    /// Its number.
    pub fn ordinal(&self) -> u32 {
        self.0.ordinal
    }

    /// Every copy takes this long.
    pub fn set_delay(&self, delay: Duration) {
        self.change(|plan| plan.delay = delay);
    }

    /// While `true`, nothing is copied out of its memory.
    pub fn hold_packs(&self, held: bool) {
        self.change(|plan| plan.held[Way::Out as usize] = held);
    }

    /// While `true`, nothing is copied into its memory.
    pub fn hold_unpacks(&self, held: bool) {
        self.change(|plan| plan.held[Way::In as usize] = held);
    }

    /// The next `count` packs fail with `why`.
    pub fn fail_packs(&self, count: u32, why: &str) {
        self.change(|plan| plan.failing[Way::Out as usize] = (count, why.to_owned()));
    }

    /// The next `count` batches of unpacks fail with `why`.
    pub fn fail_unpacks(&self, count: u32, why: &str) {
        self.change(|plan| plan.failing[Way::In as usize] = (count, why.to_owned()));
    }

    /// How much memory it has, in bytes.
    pub fn set_memory(&self, total: u64) {
        self.change(|plan| plan.total = total);
    }

    /// How much of its memory is allocated, in bytes.
    pub fn allocated(&self) -> u64 {
        self.0.memory.lock().values().map(|pages| pages.len as u64).sum()
    }

    /// A new stream of it.
    pub fn stream(&self) -> SimulatedStream {
        let stream = SimulatedStream { gate: Arc::default() };
        self.0.streams.lock().insert(stream.handle(), stream.gate.clone());
        stream
    }

    fn change(&self, body: impl FnOnce(&mut Plan)) {
        body(&mut self.0.plan.lock());
        self.0.changed.notify_all();
    }

    /// How copies go now, and where changes of it are told.
    pub(crate) fn plan(&self) -> (MutexGuard<'_, Plan>, &Condvar) {
        (self.0.plan.lock(), &self.0.changed)
    }

    pub(super) fn alloc(&self, len: usize) -> Result<Memory> {
        let total = self.0.plan.lock().total;
        let mut memory = self.0.memory.lock();
        let used: u64 = memory.values().map(|pages| pages.len as u64).sum();
        let free = total.saturating_sub(used);
        let size = len.checked_next_multiple_of(PAGE).unwrap_or(usize::MAX);
        if size as u64 > free {
            let (asked, free) = (format_gib(len as u64), format_gib(free));
            let detail = format!("{asked} asked for, {free} of {} are free", format_gib(total));
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

    pub(crate) fn copy_in(&self, ptr: u64, bytes: &[u8]) -> Result<()> {
        // SAFETY: the bytes are there, as a slice's.
        unsafe { self.copy_from(ptr, bytes.as_ptr(), bytes.len()) }
    }

    pub(super) fn copy_out(&self, ptr: u64, bytes: &mut [u8]) -> Result<()> {
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

    pub(super) fn ready(&self, stream: u64) -> Result<Ready> {
        let gate = match (stream, self.0.streams.lock().get(&stream)) {
            (_, Some(gate)) => gate.clone(),
            (0, None) => Arc::default(),
            _ => {
                let detail = format!("the stream {stream:#x} does not belong to cuda:{}", self.0.ordinal);
                return Err(Error::new(ErrorKind::Usage, "stream", detail));
            }
        };
        let at = gate.put_in.load(Ordering::Acquire);
        Ok(Ready(ReadyPoint::Simulated(Point { gate, at })))
    }

    pub(super) fn state(&self, (bounce_bytes, staged): (u64, StageStats)) -> GpuState {
        let total = self.0.plan.lock().total;
        GpuState {
            ordinal: self.0.ordinal,
            name: "simulated".to_owned(),
            arch: "none".to_owned(),
            memory: total,
            free: Some(total.saturating_sub(self.allocated())),
            pci: String::new(),
            numa_node: None,
            bounce_bytes,
            staged,
            copied: crossrail_cuda_ipc::Copied::default(),
        }
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
    pub(super) fn address(&self) -> u64 {
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
