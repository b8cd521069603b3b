//! Support for work in callers' streams on one GPU: kernels, and words in pinned memory.
#![allow(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use crossrail_cuda::{Context, PinnedMemory, max_waiting_streams};
use crossrail_kernels::Kernels;
use crossrail_locks::{Mutex, PerProcess};
use crossrail_types::{Error, ErrorKind, Result, Settings};

/// Pinned memory is allocated in pages of this many bytes.
const PAGE: usize = 4096;
/// Distance between words: each has a cache line of its own.
const LINE: usize = 64;

/// Kernels and pinned words for callers' streams on one GPU.
///
/// One per process and GPU, as the primary context is. It lives as long as a [`Device`](crate::Device) of that GPU, or
/// one of its words. While a stream waits for one of the words, the process makes no driver call that would wait for
/// the stream ([`Context::defer_releases_while`]). Any thread may use it.
pub struct StreamSupport {
    context: Context,
    kernels: Mutex<Option<Arc<Kernels>>>,
    /// Loading the kernels was tried by [`StreamSupport::prepare`].
    tried: AtomicBool,
    /// Words that end waits of streams, and words that report how waits ended. They are never mixed: a stream may read
    /// a word of the former kind long after it was written, so such a word only ever grows.
    pages: [Mutex<Pages>; 2],
    waits: Mutex<Vec<Wait>>,
}

#[derive(Default)]
struct Pages {
    all: Vec<Arc<PinnedMemory>>,
    free: Vec<(usize, usize)>,
}

/// A stream that waits until a word has reached a value.
struct Wait {
    stream: u64,
    page: Arc<PinnedMemory>,
    offset: usize,
    value: u64,
}

impl Wait {
    fn is_over(&self) -> bool {
        cell(&self.page, self.offset).load(Ordering::Acquire) >= self.value
    }
}

/// What a [`Word`] is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WordUse {
    /// The host writes it to end a stream's wait.
    EndsWait,
    /// The GPU writes it to report how a wait ended.
    ReportsWait,
    /// As `ReportsWait`, by a captured graph, which may write it at any later replay.
    ReportsToGraph,
}

/// A 64-bit word in pinned memory, with one owner. Any thread.
pub struct Word {
    owner: Arc<StreamSupport>,
    page: Arc<PinnedMemory>,
    at: (usize, usize),
    used: WordUse,
}

impl std::fmt::Debug for Word {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Word({})", self.cell().load(Ordering::Relaxed))
    }
}

impl Word {
    /// The word itself. The GPU accesses it atomically too.
    pub fn cell(&self) -> &AtomicU64 {
        cell(&self.page, self.at.1)
    }

    /// Its device address.
    pub fn address(&self) -> u64 {
        self.page.address() + self.at.1 as u64
    }

    /// Registers that `stream` is about to wait until the word has reached `value`. The caller must make sure that the
    /// value is written in any case.
    ///
    /// # Errors
    /// `Exhausted`: the wait would block the last hardware queue, which the work waited for needs.
    pub fn register_wait(&self, stream: u64, value: u64, what: &str) -> Result<()> {
        let mut waits = self.owner.waits.lock();
        waits.retain(|wait| !wait.is_over());
        let waiting = waits.iter().map(|wait| wait.stream).collect();
        admit(&waiting, stream, max_waiting_streams(), (what, self.owner.context.device().ordinal()))?;
        waits.push(Wait { stream, page: self.page.clone(), offset: self.at.1, value });
        Ok(())
    }
}

/// Whether one more stream may wait: one hardware queue must stay free.
fn admit(waiting: &BTreeSet<u64>, stream: u64, most: usize, (what, ordinal): (&str, u32)) -> Result<()> {
    if waiting.contains(&stream) || waiting.len() < most {
        return Ok(());
    }
    let named: Vec<String> = waiting.iter().map(|stream| format!("{stream:#x}")).collect();
    let named = if named.is_empty() { String::new() } else { format!(" ({})", named.join(", ")) };
    let detail = format!(
        "{} streams of cuda:{ordinal} wait already{named}, of {most} that may: of the GPU's {} queues, one must be left for \
         what they wait for",
        waiting.len(),
        most + 1,
    );
    Err(Error::new(ErrorKind::Exhausted, what, detail).with_hint(
        "wait on the host, or in a stream that waits already; CUDA_DEVICE_MAX_CONNECTIONS=32, set before the process uses \
         CUDA, lets 31 wait",
    ))
}

impl Drop for Word {
    fn drop(&mut self) {
        let busy = match self.used {
            WordUse::EndsWait => false,
            // The stream may still write the word: it is reused only if it already has.
            WordUse::ReportsWait => self.cell().load(Ordering::Acquire) == 0,
            WordUse::ReportsToGraph => true,
        };
        if !busy {
            self.owner.pages[usize::from(self.used != WordUse::EndsWait)].lock().free.push(self.at);
        }
    }
}

fn cell(page: &PinnedMemory, offset: usize) -> &AtomicU64 {
    // SAFETY: the page has a word there, aligned; every access to it is atomic, here and on the GPU.
    unsafe { AtomicU64::from_ptr(page.as_ptr().add(offset).cast()) }
}

impl StreamSupport {
    /// The support for the GPU of `context`.
    pub fn of(context: &Context) -> Arc<StreamSupport> {
        static ALL: PerProcess<Mutex<BTreeMap<u32, Weak<StreamSupport>>>> = PerProcess::new();
        let mut all = ALL.lock();
        let slot = all.entry(context.device().ordinal()).or_default();
        if let Some(support) = slot.upgrade() {
            return support;
        }
        let support = Arc::new(StreamSupport {
            context: context.clone(),
            kernels: Mutex::default(),
            tried: AtomicBool::new(false),
            pages: Default::default(),
            waits: Mutex::default(),
        });
        *slot = Arc::downgrade(&support);
        let asked = Arc::downgrade(&support);
        context.defer_releases_while(move || asked.upgrade().map(|support| support.is_any_waiting()));
        support
    }

    fn is_any_waiting(&self) -> bool {
        self.unless_waited_for(|| ()).is_none()
    }

    /// Runs `body`, such as a kernel launch, unless a stream is known to wait; no stream can start to wait during the
    /// call.
    pub fn unless_waited_for<T>(&self, body: impl FnOnce() -> T) -> Option<T> {
        let mut waits = self.waits.lock();
        waits.retain(|wait| !wait.is_over());
        waits.is_empty().then(body)
    }

    /// A word for that use. It keeps the value that its last user left: waits must be for larger ones.
    ///
    /// # Errors
    /// What the driver says when there is no pinned memory for it.
    pub fn word(self: &Arc<Self>, used: WordUse) -> Result<Word> {
        let mut pages = self.pages[usize::from(used != WordUse::EndsWait)].lock();
        if pages.free.is_empty() {
            let page = PinnedMemory::new(&self.context, PAGE)?;
            // SAFETY: the page is new, nobody else's, and of that length.
            unsafe { page.as_ptr().write_bytes(0, PAGE) };
            let at = pages.all.len();
            pages.all.push(Arc::new(page));
            pages.free.extend((0..PAGE / LINE).map(|index| (at, index * LINE)));
        }
        let at = pages.free.pop().unwrap_or_default();
        let page = pages.all[at.0].clone();
        drop(pages);
        Ok(Word { owner: self.clone(), page, at, used })
    }

    /// The kernels, loaded on first use.
    ///
    /// # Errors
    /// As [`crossrail_kernels::shared`].
    pub fn kernels(&self, settings: &Settings) -> Result<Arc<Kernels>> {
        let mut kept = self.kernels.lock();
        if let Some(kernels) = &*kept {
            return Ok(kernels.clone());
        }
        self.tried.store(true, Ordering::Relaxed);
        let kernels = crossrail_kernels::shared(&self.context, settings, settings.timeout)?;
        *kept = Some(kernels.clone());
        Ok(kernels)
    }

    /// Loads the kernels ahead of their first use, because they can be loaded neither during a capture nor while a
    /// stream waits. Tried once; an error is reported where a kernel is needed.
    pub fn prepare(&self, settings: &Settings) {
        if !self.tried.load(Ordering::Relaxed) {
            let _ = self.kernels(settings);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_streams_wait_as_leave_a_queue_and_the_next_is_told_which_do() {
        let waiting = BTreeSet::from([0x10, 0x20, 0x30]);
        admit(&waiting, 0x40, 4, ("wait_on", 2)).unwrap();
        admit(&waiting, 0x20, 3, ("wait_on", 2)).expect("it waits already");
        let error = admit(&waiting, 0x40, 3, ("wait_on", 2)).unwrap_err();
        assert_eq!((error.kind, error.operation.as_str()), (ErrorKind::Exhausted, "wait_on"));
        let text = error.to_string();
        for part in ["3 streams of cuda:2", "0x10, 0x20, 0x30", "4 queues", "CUDA_DEVICE_MAX_CONNECTIONS"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let none = admit(&BTreeSet::new(), 0x40, 0, ("wait_on", 0)).unwrap_err().to_string();
        assert!(none.contains("0 streams of cuda:0 wait already, of 0 that may"), "{none}");
    }
}
