//! Rows that a peer has told of, its own and ours, and views that pair them. Each holds what it is counted for.

use std::any::Any;
use std::sync::{Arc, OnceLock};

use crossrail_gpu::Device;
use crossrail_proto::RegionRef;
use crossrail_transport::{Domain, Index, List, Rows, Stride, Window};

use super::totals::Total;
use super::wire::TheirRows;
use crate::memory::{RegionStride, Regions};

/// Bytes of a peer's lists, counted for it and for all peers as long as anything holds what takes them.
#[derive(Debug)]
pub(super) struct Charge {
    totals: [Arc<Total>; 2],
    bytes: u64,
}

impl Charge {
    /// Counts so many bytes more.
    pub(super) fn new(totals: [&Arc<Total>; 2], bytes: u64) -> Charge {
        totals.iter().for_each(|total| total.add(bytes));
        Charge { totals: totals.map(Arc::clone), bytes }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.totals.iter().for_each(|total| total.subtract(self.bytes));
    }
}

/// Rows of our regions.
#[derive(Debug)]
pub(super) struct Installed {
    pub(super) rows: Arc<Rows>,
    pub(super) regions: Vec<RegionRef>,
    /// That of the first row.
    pub(super) first: RegionRef,
    /// The GPU whose memory all of them are; `None`: host memory.
    pub(super) gpu: Option<Arc<Device>>,
    pub(super) _charge: Charge,
}

/// Rows of a peer's memory.
#[derive(Debug)]
pub(super) struct Theirs {
    described: TheirRows,
    /// The length of every row, if they are equally long.
    pub(super) even: Option<u64>,
    /// Found when it is first needed.
    found: OnceLock<FoundRows>,
    _charge: Charge,
}

impl Theirs {
    pub(super) fn new(described: TheirRows, charge: Charge) -> Theirs {
        Theirs { even: described.even(), described, found: OnceLock::new(), _charge: charge }
    }
}

#[derive(Debug)]
struct FoundRows {
    rows: Arc<Rows>,
    /// What keeps them mapped.
    _windows: Vec<Arc<dyn Any + Send + Sync>>,
}

/// A list over our regions, and what the peer pairs it with.
#[derive(Debug)]
pub(in crate::core) struct View {
    pub(in crate::core) list: Arc<List>,
    pub(super) of: Arc<Installed>,
    theirs: Option<(Arc<Theirs>, Index)>,
    /// The same bytes in the peer's memory, found when first needed.
    found: OnceLock<Option<Arc<List>>>,
    _charge: Charge,
}

impl View {
    /// The rows `of` that `index` names; `None`: they are not that many.
    pub(super) fn new(
        of: Arc<Installed>,
        index: Index,
        theirs: Option<(Arc<Theirs>, Index)>,
        charge: Charge,
    ) -> Option<View> {
        let list = Arc::new(List::new(of.rows.clone(), index)?);
        Some(View { list, of, theirs, found: OnceLock::new(), _charge: charge })
    }

    /// Our regions that it is over.
    pub(in crate::core) fn regions(&self) -> &[RegionRef] {
        &self.of.regions
    }

    /// Whether all our regions that it is over are registered.
    pub(super) fn is_live(&self, regions: &Regions) -> bool {
        self.of.regions.iter().all(|region| regions.is_live(*region))
    }

    /// The GPU whose memory our rows are; `None`: host memory.
    pub(in crate::core) fn gpu(&self) -> Option<&Arc<Device>> {
        self.of.gpu.as_ref()
    }

    /// The same bytes in the peer's memory, by addresses at which this process maps them, and what keeps them mapped.
    /// `None`: the peer's memory has not arrived yet.
    ///
    /// # Errors
    /// Why they cannot be reached.
    pub(in crate::core) fn theirs(&self, domain: &mut dyn Domain) -> Result<Option<(Arc<List>, Mapped)>, String> {
        let (theirs, index) = self.theirs.as_ref().ok_or("the peer has not described its rows")?;
        if theirs.found.get().is_none() {
            match find_rows(&theirs.described, domain, self.gpu().map(|gpu| gpu.ordinal()))? {
                Some(found) => drop(theirs.found.set(found)),
                None => return Ok(None),
            }
        }
        let list = self.found.get_or_init(|| {
            let list = List::new(theirs.found.get()?.rows.clone(), index.clone())?;
            list.fits(&self.list).then(|| Arc::new(list))
        });
        let list = list.clone().ok_or("the peer's rows do not pair with ours")?;
        Ok(Some((list, theirs.clone())))
    }
}

/// What keeps rows of a peer mapped.
pub(in crate::core) type Mapped = Arc<dyn Any + Send + Sync>;

/// Maps rows of the peer's memory, for one of our GPUs if they are of GPUs; `None`: it has not arrived yet.
fn find_rows(described: &TheirRows, domain: &mut dyn Domain, gpu: Option<u32>) -> Result<Option<FoundRows>, String> {
    let mut windows: Vec<Window> = Vec::new();
    for of in &described.memory {
        let len = usize::try_from(of.len).map_err(|error| error.to_string())?;
        match domain.map(&of.descriptor, len, gpu).map_err(|error| error.to_string())? {
            Some(window) => windows.push(window),
            None => return Ok(None),
        }
    }
    placed(described, windows).ok_or_else(|| "no rows".to_owned()).map(Some)
}

/// Rows in memory of the peer that is mapped.
fn placed(described: &TheirRows, windows: Vec<Window>) -> Option<FoundRows> {
    let place =
        |s: &RegionStride| Stride { at: (windows[s.region as usize].ptr as u64).wrapping_add(s.stride.at), ..s.stride };
    let rows = Arc::new(Rows::new(described.strides.iter().map(place).collect())?);
    Some(FoundRows { rows, _windows: windows.into_iter().map(|window| window.keep).collect() })
}
