//! What callers' streams need of one GPU: kernels, and words in pinned memory.
#![allow(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use crossrail_cuda::{Context, PinnedMemory, most_waiting};
use crossrail_kernels::Kernels;
use crossrail_types::{Error, ErrorKind, Result, Settings};
use parking_lot::Mutex;

/// Pinned memory is taken by so many bytes.
const PAGE: usize = 4096;
/// Words lie so far apart: each in a cache line of its own.
const LINE: usize = 64;

/// Primary contexts are the process's, so this is too: as long as a `Device` of that GPU, or one of its words, is there.
///
/// While a stream waits for one of the words, the process makes no call that would wait for the stream
/// ([`Context::hold_back`]).
pub(crate) struct Calls {
    context: Context,
    kernels: Mutex<Option<Arc<Kernels>>>,
    tried: AtomicBool,
    /// Words that end waits of streams, and words that tell how waits went: a stream may look at one of the former some
    /// time after it was written, so that it must only ever grow.
    pages: [Mutex<Pages>; 2],
    waits: Mutex<Vec<Wait>>,
}

#[derive(Default)]
struct Pages {
    all: Vec<Arc<PinnedMemory>>,
    free: Vec<(usize, usize)>,
}

/// A stream that waits: until a word has reached a value.
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

/// What a word is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// The host ends a stream's wait with it.
    Ends,
    /// The GPU says with it how a wait went.
    Tells,
    /// As `Tells`; a graph may write it for ever.
    TellsAGraph,
}

/// A word in pinned memory, nobody else's as long as this lives.
pub(crate) struct Word {
    owner: Arc<Calls>,
    page: Arc<PinnedMemory>,
    at: (usize, usize),
    used: Use,
}

impl std::fmt::Debug for Word {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Word({})", self.cell().load(Ordering::Relaxed))
    }
}

impl Word {
    pub(crate) fn cell(&self) -> &AtomicU64 {
        cell(&self.page, self.at.1)
    }

    /// Its address on the GPU.
    pub(crate) fn address(&self) -> u64 {
        self.page.address() + self.at.1 as u64
    }

    /// That stream is about to wait until the word has reached `value`. Somebody writes it then, whatever happens.
    ///
    /// # Errors
    /// `Exhausted`: as many other streams wait as may: what they wait for would not go on with one more.
    pub(crate) fn is_waited_for(&self, stream: u64, value: u64, what: &str) -> Result<()> {
        let mut waits = self.owner.waits.lock();
        waits.retain(|wait| !wait.is_over());
        let waiting = waits.iter().map(|wait| wait.stream).collect();
        admit(&waiting, stream, most_waiting(), (what, self.owner.context.device().ordinal()))?;
        waits.push(Wait { stream, page: self.page.clone(), offset: self.at.1, value });
        Ok(())
    }
}

/// Whether one more stream may wait.
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
            Use::Ends => false,
            // The stream may still write it: it is not given to anybody else until that has happened.
            Use::Tells => self.cell().load(Ordering::Acquire) == 0,
            Use::TellsAGraph => true,
        };
        if !busy {
            self.owner.pages[usize::from(self.used != Use::Ends)].lock().free.push(self.at);
        }
    }
}

fn cell(page: &PinnedMemory, offset: usize) -> &AtomicU64 {
    // SAFETY: the page has a word there, aligned; every access to it is atomic, here and on the GPU.
    unsafe { AtomicU64::from_ptr(page.as_ptr().add(offset).cast()) }
}

impl Calls {
    /// What there is for the GPU of `context`.
    pub(crate) fn of(context: &Context) -> Arc<Calls> {
        static ALL: Mutex<BTreeMap<u32, Weak<Calls>>> = Mutex::new(BTreeMap::new());
        let mut all = ALL.lock();
        let place = all.entry(context.device().ordinal()).or_default();
        if let Some(calls) = place.upgrade() {
            return calls;
        }
        let calls = Arc::new(Calls {
            context: context.clone(),
            kernels: Mutex::default(),
            tried: AtomicBool::new(false),
            pages: Default::default(),
            waits: Mutex::default(),
        });
        *place = Arc::downgrade(&calls);
        let asked = Arc::downgrade(&calls);
        context.hold_back(move || asked.upgrade().map(|calls| calls.is_waited_for()));
        calls
    }

    fn is_waited_for(&self) -> bool {
        self.unless_waited_for(|| ()).is_none()
    }

    /// Does something, such as a launch, unless a stream is known to wait; none begins to wait meanwhile.
    pub(crate) fn unless_waited_for<T>(&self, body: impl FnOnce() -> T) -> Option<T> {
        let mut waits = self.waits.lock();
        waits.retain(|wait| !wait.is_over());
        waits.is_empty().then(body)
    }

    /// A word of that use; what it says is the next user's starting point.
    pub(crate) fn word(self: &Arc<Self>, used: Use) -> Result<Word> {
        let mut pages = self.pages[usize::from(used != Use::Ends)].lock();
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

    /// The kernels, loaded by the first call and kept.
    ///
    /// # Errors
    /// As [`crossrail_kernels::shared`].
    pub(crate) fn kernels(&self, settings: &Settings) -> Result<Arc<Kernels>> {
        let mut kept = self.kernels.lock();
        if let Some(kernels) = &*kept {
            return Ok(kernels.clone());
        }
        self.tried.store(true, Ordering::Relaxed);
        let kernels = crossrail_kernels::shared(&self.context, settings, settings.timeout)?;
        *kept = Some(kernels.clone());
        Ok(kernels)
    }

    /// Has all kernels loaded: neither a capture nor a stream that waits is a time for it. What fails here fails again, with
    /// its reason, where it is needed; it is tried once.
    pub(crate) fn prepare(&self, settings: &Settings) {
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
