//! This process's GPUs, and what is made once for each.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crossrail_cuda::{Context, Cuda, Device, PinnedMemory, wait_for_releases};
use crossrail_types::{Error, ErrorKind, Result, Settings};

use crate::crowd::Crowd;
use crate::note::Uuid;
use crate::queue::Queue;

/// Words of a page, each in a cache line of its own.
const PAGE: usize = 4096;
const LINE: usize = 64;
/// The least that the limit of a copy may be.
const LEAST_LIMIT: Duration = Duration::from_secs(5);
/// How long the end of a domain waits for its memory to be given back, which may take longer when a GPU is busy.
const CLOSING: Duration = Duration::from_secs(1);
/// Streams that wait for their next user.
const MOST_IDLE: usize = 32;

/// This process's GPUs as copies between processes need them: contexts, streams, words in pinned memory.
///
/// One for each context of the library. Making it touches no GPU; each is set up when memory of it is first used. Any
/// thread may use it.
pub struct Domain {
    copy_limit: Duration,
    devices: Vec<(Device, Uuid)>,
    gpus: Mutex<Vec<Option<Arc<Gpu>>>>,
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Domain({} GPUs)", self.devices.len())
    }
}

impl Domain {
    /// The GPUs that this process sees. `settings`: how long a copy may take.
    ///
    /// # Errors
    /// A failed call.
    pub fn new(cuda: &Cuda, settings: &Settings) -> Result<Arc<Domain>> {
        let devices = cuda.devices()?;
        let named: Result<Vec<(Device, Uuid)>> =
            devices.into_iter().map(|device| device.uuid().map(|uuid| (device, uuid))).collect();
        let devices = named?;
        let gpus = Mutex::new(devices.iter().map(|_| None).collect());
        Ok(Arc::new(Domain { copy_limit: settings.timeout.max(LEAST_LIMIT), devices, gpus }))
    }

    /// The GPU `cuda:ordinal`, set up now if it was not.
    pub(crate) fn gpu(&self, ordinal: u32) -> Result<Arc<Gpu>> {
        let mut gpus = locked(&self.gpus);
        let missing = || Error::new(ErrorKind::Usage, format!("cuda:{ordinal}"), "there is no such GPU");
        let index = usize::try_from(ordinal).map_err(|_| missing())?;
        let (device, uuid) = self.devices.get(index).ok_or_else(missing)?;
        let place = gpus.get_mut(index).ok_or_else(missing)?;
        if let Some(gpu) = place {
            return Ok(Arc::clone(gpu));
        }
        let gpu = Arc::new(Gpu::new(device, *uuid)?);
        *place = Some(Arc::clone(&gpu));
        Ok(gpu)
    }

    /// The GPU of that name, if this process sees it.
    pub(crate) fn device(&self, uuid: &Uuid) -> Option<&Device> {
        self.devices.iter().find(|(_, known)| known == uuid).map(|(device, _)| device)
    }

    /// GPUs that are set up here already, or else that somebody in the process uses.
    pub(crate) fn in_use(&self) -> Vec<u32> {
        let known: Vec<u32> = locked(&self.gpus).iter().flatten().map(|gpu| gpu.ordinal()).collect();
        let others = self.devices.iter().filter(|(device, _)| device.in_use().unwrap_or(false));
        let others: Vec<u32> = others.map(|(device, _)| device.ordinal()).filter(|at| !known.contains(at)).collect();
        [known, others].concat()
    }

    /// A GPU whose context may be asked about any address: one that is in use anyway.
    pub(crate) fn asked(&self) -> Result<Arc<Gpu>> {
        if let Some(gpu) = locked(&self.gpus).iter().flatten().next() {
            return Ok(Arc::clone(gpu));
        }
        let used = self.devices.iter().find(|(device, _)| device.in_use().unwrap_or(false));
        match used {
            Some((device, _)) => self.gpu(device.ordinal()),
            None => Err(Error::new(ErrorKind::Usage, "memory", "nobody in this process uses a GPU yet")),
        }
    }

    /// Number of copies between that GPU and memory of peers that were started so far; `None` where it is not in use.
    pub fn copied(&self, ordinal: u32) -> Option<u64> {
        let gpus = locked(&self.gpus);
        let gpu = gpus.get(usize::try_from(ordinal).ok()?)?.as_ref()?;
        Some(gpu.copies.load(Ordering::Relaxed))
    }

    /// The longest that a copy may take before it is given up.
    pub(crate) fn copy_limit(&self) -> Duration {
        self.copy_limit
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // Whoever has closed everything finds the memory free.
        locked(&self.gpus).clear();
        wait_for_releases(CLOSING);
    }
}

/// One GPU of this process.
pub(crate) struct Gpu {
    pub(crate) context: Context,
    pub(crate) uuid: Uuid,
    /// Whether streams write 64-bit words.
    pub(crate) writes_words: bool,
    words: Mutex<Vec<Word>>,
    idle: Mutex<Vec<Queue>>,
    /// Whom long copies go to.
    pub(crate) crowd: Arc<Crowd>,
    /// Copies that were started.
    copies: AtomicU64,
}

impl Gpu {
    fn new(device: &Device, uuid: Uuid) -> Result<Gpu> {
        let context = Context::primary(device)?;
        let writes_words = device.has_64bit_stream_ops()?;
        let (words, idle) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
        let (crowd, copies) = (Arc::new(Crowd::new(uuid)), Default::default());
        Ok(Gpu { context, uuid, writes_words, words, idle, crowd, copies })
    }

    /// A copy begins.
    pub(crate) fn count_copy(&self) {
        self.copies.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn ordinal(&self) -> u32 {
        self.context.device().ordinal()
    }

    /// A word in pinned memory that is nobody's, and what it says at present.
    pub(crate) fn word(&self) -> Result<Word> {
        let mut words = locked(&self.words);
        if words.is_empty() {
            let page = Arc::new(PinnedMemory::new(&self.context, PAGE)?);
            // SAFETY: the memory is new, and as long as that.
            unsafe { std::ptr::write_bytes(page.as_ptr(), 0, PAGE) };
            words.extend((0..PAGE / LINE).map(|index| Word { page: Arc::clone(&page), offset: index * LINE }));
        }
        words.pop().ok_or_else(|| Error::new(ErrorKind::Exhausted, "words", "a page without words"))
    }

    pub(crate) fn take_word_back(&self, word: Word) {
        locked(&self.words).push(word);
    }

    /// A stream that nobody uses.
    pub(crate) fn queue(&self) -> Result<Queue> {
        let idle = locked(&self.idle).pop();
        idle.map_or_else(|| Queue::new(self), Ok)
    }

    /// Takes a stream back in which nothing is left.
    pub(crate) fn take_back(&self, queue: Queue) {
        let mut idle = locked(&self.idle);
        if idle.len() < MOST_IDLE {
            idle.push(queue);
            return;
        }
        drop(idle);
        queue.dissolve(self);
    }
}

/// A 64-bit number in pinned memory that only grows: a stream writes it, the host reads it.
#[derive(Clone)]
pub(crate) struct Word {
    page: Arc<PinnedMemory>,
    offset: usize,
}

impl Word {
    /// Its address on the GPU.
    pub(crate) fn address(&self) -> u64 {
        self.page.address() + self.offset as u64
    }

    /// What it says; what was done before it was written is seen after this.
    #[inline]
    pub(crate) fn value(&self) -> u64 {
        // SAFETY: the page lives as long as `self`, is aligned and long enough, and this word of it is written only
        // by the GPU, in one piece, after `Gpu::word` has.
        let word = unsafe { &*self.page.as_ptr().add(self.offset).cast::<AtomicU64>() };
        word.load(Ordering::Acquire)
    }
}

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
