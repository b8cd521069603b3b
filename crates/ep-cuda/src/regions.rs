//! Regions: the heap's memory for results in the rank layout. Other ranks write a result straight into one, so it is
//! lent to one result at a time.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use crossrail::Endpoint;
use crossrail_cuda::Stream;
use crossrail_types::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use crate::buffer::Inner;
use crate::done::Done;

/// Where the parts of a region are: addresses on the GPU. Rows are by source rank, and then by token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionView {
    /// `[ranks * max_tokens, hidden]`, bf16 or e4m3, contiguous.
    pub rows: u64,
    /// Their scales, `[ranks * max_tokens, hidden / 128]`, contiguous: f32 or u8; nothing in bf16.
    pub scales: u64,
    /// `i64[ranks * max_tokens, topk]`: local experts, -1 elsewhere.
    pub topk_idx: u64,
    /// `f32[ranks * max_tokens, topk]`.
    pub topk_weights: u64,
    /// `i32[ranks * max_tokens]`: each row's token at its source.
    pub source: u64,
    /// The most rows.
    pub most_rows: u64,
}

/// All regions of a heap.
#[derive(Default)]
pub(crate) struct Regions(Mutex<Vec<Region>>);

#[derive(Default)]
struct Region {
    taken: bool,
    /// Graphs write it whenever they are replayed: only other graphs may share it.
    graphs: bool,
    /// Streams that may still read it.
    until: Vec<Done>,
    /// Ranks that were lost while they had a place in it, and may still write there if they live.
    suspects: Vec<(u32, Endpoint)>,
}

impl Regions {
    pub(crate) fn new(count: u32) -> Regions {
        Regions(Mutex::new((0..count).map(|_| Region::default()).collect()))
    }

    /// A region that nobody has, the one that was given back first if it can be told; for graphs one of theirs, if any.
    fn take(&self, captured: bool) -> Result<(u32, Vec<Done>)> {
        let mut regions = self.0.lock();
        for region in regions.iter_mut() {
            region.suspects.retain(|(_, endpoint)| endpoint.is_alive());
        }
        let free = |region: &Region| !region.taken && region.suspects.is_empty() && (captured || !region.graphs);
        let over = |region: &Region| free(region) && region.until.iter().all(|done| done.is_done().unwrap_or(false));
        let at = regions.iter().position(|region| captured && region.graphs && over(region));
        let at = at.or_else(|| regions.iter().position(over)).or_else(|| regions.iter().position(free));
        let Some(at) = at else { return Err(none_left(&regions)) };
        regions[at].taken = true;
        Ok((at as u32, std::mem::take(&mut regions[at].until)))
    }

    /// How many more there are for results that no graph captures.
    pub(crate) fn spare(&self) -> u32 {
        let free = |region: &&Region| !region.taken && !region.graphs && region.suspects.is_empty();
        self.0.lock().iter().filter(free).count() as u32
    }

    /// A rank was lost that may still write into regions that are lent.
    pub(crate) fn suspect(&self, rank: u32, endpoint: &Endpoint) {
        for region in self.0.lock().iter_mut().filter(|region| region.taken) {
            region.suspects.push((rank, endpoint.clone()));
        }
    }

    /// The connection to that rank is gone, and so are its ways to write.
    pub(crate) fn clear(&self, rank: u32) {
        for region in self.0.lock().iter_mut() {
            region.suspects.retain(|(suspect, _)| *suspect != rank);
        }
    }

    fn give_back(&self, index: u32, until: Vec<Done>, captured: bool) {
        if let Some(region) = self.0.lock().get_mut(index as usize) {
            region.taken = false;
            region.graphs |= captured;
            region.until = until;
        }
    }
}

/// Why there is no region.
fn none_left(regions: &[Region]) -> Error {
    let suspect = regions.iter().filter(|region| !region.taken).find_map(|region| region.suspects.first());
    let graphs = regions.iter().filter(|region| region.graphs && !region.taken).count();
    let also = if graphs == 0 { String::new() } else { format!(", or kept for graphs ({graphs})") };
    let text = format!("all {} regions are in use by results in the rank layout{also}", regions.len());
    let error = Error::new(ErrorKind::Exhausted, "dispatch", text);
    match suspect {
        Some((rank, _)) => error.with_hint(format!(
            "one is kept as rank {rank}, which did not come in time, may still write there: disconnect it"
        )),
        None => error.with_hint("let go of a result, or make the buffer with more regions"),
    }
}

/// A region, lent until this is dropped. Any thread.
pub struct RegionLease {
    inner: Weak<Inner>,
    /// The heap stays as long as the lease.
    _heap: crossrail::Memory,
    pub(crate) buffer: u64,
    pub(crate) index: u32,
    view: RegionView,
    /// Streams that used it before: waited for by the first that writes it.
    before: Mutex<Vec<Done>>,
    until: Mutex<Vec<Done>>,
    /// It was taken for a stream that is being captured.
    for_graph: bool,
    /// A dispatch into it was captured in a graph.
    captured: AtomicBool,
}

impl RegionLease {
    pub(crate) fn take(inner: &Arc<Inner>, captured: bool) -> Result<RegionLease> {
        if inner.shape.regions == 0 {
            let text = "the buffer was not made for the rank layout";
            return Err(Error::new(ErrorKind::Usage, "dispatch", text));
        }
        inner.refuse_closed("dispatch")?;
        let (index, before) = inner.regions.take(captured)?;
        Ok(RegionLease {
            inner: Arc::downgrade(inner),
            _heap: inner.memory.clone(),
            buffer: inner.id,
            index,
            view: inner.region_view(index),
            before: Mutex::new(before),
            until: Mutex::default(),
            for_graph: captured,
            captured: AtomicBool::new(false),
        })
    }

    /// Which of the buffer's regions it is.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Whether it was taken for a stream that is being captured in a graph.
    pub fn is_for_graph(&self) -> bool {
        self.for_graph
    }

    /// Where its parts are. The memory stays as long as the lease, also when the buffer is destroyed.
    pub fn view(&self) -> RegionView {
        self.view
    }

    /// What is in `stream` now still uses the region: the next result comes into it only after that. Without any such call
    /// the region must be done with when the lease is dropped.
    ///
    /// # Safety
    /// `stream` must be a live stream's handle, or 0 for the default stream.
    ///
    /// # Errors
    /// What the driver says; `Usage` for another GPU's stream.
    pub unsafe fn free_after(&self, stream: u64) -> Result<()> {
        let Some(inner) = self.inner.upgrade() else { return Ok(()) };
        // SAFETY: the caller vouches for the stream.
        let stream = unsafe { Stream::borrow(&inner.cuda, stream)? };
        if stream.capture()? == crossrail_cuda::Capture::None {
            let done = inner.events.record(&stream, false)?;
            self.is_used_until(&done);
        }
        Ok(())
    }

    pub(crate) fn is_used_until(&self, done: &Done) {
        if !done.is_captured() {
            let mut until = self.until.lock();
            until.retain(|done| !done.is_done().unwrap_or(false));
            until.push(done.clone());
        }
    }

    /// Lets `stream` write it.
    pub(crate) fn before(&self, stream: &Stream, captured: bool) -> Result<()> {
        let mut before = self.before.lock();
        before.retain(|done| !done.is_done().unwrap_or(false));
        if captured && !before.is_empty() {
            let text = "the region is still in use by what was put into streams before the capture";
            let error = Error::new(ErrorKind::Usage, "dispatch", text);
            return Err(error.with_hint("synchronize before the capture, or take the region earlier"));
        }
        for done in before.drain(..) {
            done.before(stream)?;
        }
        if captured {
            self.captured.store(true, Ordering::Relaxed);
        }
        Ok(())
    }
}

impl Drop for RegionLease {
    fn drop(&mut self) {
        if let Some(inner) = self.inner.upgrade() {
            let mut until = std::mem::take(self.until.get_mut());
            // If nobody wrote it, those before are still to be waited for.
            until.append(self.before.get_mut());
            inner.regions.give_back(self.index, until, *self.captured.get_mut());
        }
    }
}

impl std::fmt::Debug for RegionLease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RegionLease({} of buffer {:016x})", self.index, self.buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_of_graphs_are_only_lent_to_graphs() {
        let regions = Regions::new(2);
        let take = |captured| regions.take(captured).map(|(index, _)| index);
        assert_eq!(take(true).unwrap(), 0);
        assert_eq!(regions.spare(), 1);
        regions.give_back(0, Vec::new(), true);
        assert_eq!(regions.spare(), 1);
        assert_eq!(take(false).unwrap(), 1);
        assert_eq!(regions.spare(), 0);
        let error = take(false).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Exhausted);
        assert!(error.detail.contains("all 2 regions") && error.detail.contains("graphs (1)"), "{}", error.detail);
        // Another graph takes what graphs have, although another region would be free.
        regions.give_back(1, Vec::new(), false);
        assert_eq!(take(true).unwrap(), 0);
        assert_eq!(take(true).unwrap(), 1);
        assert!(take(true).unwrap_err().hint.is_some_and(|hint| hint.contains("regions")));
    }
}
