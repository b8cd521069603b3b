//! Regions: parts of the heap for results in the rank layout. Other ranks write a result directly into one, so each is
//! leased to one result at a time.

use crossrail::Endpoint;
use crossrail_locks::Mutex;
use crossrail_types::{Error, ErrorKind, Result};

use crate::completion::Completion;

/// GPU addresses of the parts of a region. Rows are ordered by source rank, then by token.
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
    /// Captured: graphs write it at every replay, so only other graphs may use it.
    graphs: bool,
    /// Completions of streams that may still read it.
    until: Vec<Completion>,
    /// Ranks that were lost while the region was leased, and may still write into it if they are alive.
    suspects: Vec<(u32, Endpoint)>,
}

impl Regions {
    pub(crate) fn new(count: u32) -> Regions {
        Regions(Mutex::new((0..count).map(|_| Region::default()).collect()))
    }

    /// A free region: for a capture preferably one of the graphs', then one whose readers are done, then any; and the
    /// completions of readers that may not be done.
    pub(crate) fn take(&self, captured: bool) -> Result<(u32, Vec<Completion>)> {
        let mut regions = self.0.lock();
        for region in regions.iter_mut() {
            region.suspects.retain(|(_, endpoint)| endpoint.is_alive());
        }
        let free = |region: &Region| !region.taken && region.suspects.is_empty() && (captured || !region.graphs);
        let over = |region: &Region| free(region) && region.until.iter().all(|done| done.is_done().unwrap_or(false));
        let idle = regions.iter().position(|region| captured && region.graphs && over(region));
        let idle = idle.or_else(|| regions.iter().position(over));
        let Some(at) = idle.or_else(|| regions.iter().position(free)) else { return Err(none_left(&regions)) };
        regions[at].taken = true;
        let mut until = std::mem::take(&mut regions[at].until);
        if idle.is_some() {
            until.clear(); // known to be done: no further queries
        }
        Ok((at as u32, until))
    }

    /// Number of free regions for results that no graph captures.
    pub(crate) fn spare(&self) -> u32 {
        let free = |region: &&Region| !region.taken && !region.graphs && region.suspects.is_empty();
        self.0.lock().iter().filter(free).count() as u32
    }

    /// Keeps leased regions from reuse while this lost rank may still write into them.
    pub(crate) fn suspect(&self, rank: u32, endpoint: &Endpoint) {
        for region in self.0.lock().iter_mut().filter(|region| region.taken) {
            region.suspects.push((rank, endpoint.clone()));
        }
    }

    /// The connection to that rank is closed, so that it can no longer write.
    pub(crate) fn clear(&self, rank: u32) {
        for region in self.0.lock().iter_mut() {
            region.suspects.retain(|(suspect, _)| *suspect != rank);
        }
    }

    pub(crate) fn give_back(&self, index: u32, until: Vec<Completion>, captured: bool) {
        if let Some(region) = self.0.lock().get_mut(index as usize) {
            region.taken = false;
            region.graphs |= captured;
            region.until = until;
        }
    }
}

/// The error if no region is free.
fn none_left(regions: &[Region]) -> Error {
    let suspect = regions.iter().filter(|region| !region.taken).find_map(|region| region.suspects.first());
    let graphs = regions.iter().filter(|region| region.graphs && !region.taken).count();
    let also = if graphs == 0 { String::new() } else { format!(", or kept for graphs ({graphs})") };
    let text = format!("all {} regions are in use by results in the rank layout{also}", regions.len());
    let error = Error::new(ErrorKind::Exhausted, "dispatch", text);
    match suspect {
        Some((rank, _)) => error.with_hint(format!(
            "rank {rank} timed out and may still write into one of them: disconnect it to free the region"
        )),
        None => error.with_hint("release a result, or make the buffer with more regions"),
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
