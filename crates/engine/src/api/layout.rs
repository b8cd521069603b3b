//! Layouts: rows of registered memory, of this worker or of a peer.

use std::sync::Arc;

use crossrail_gpu::Device;
use crossrail_locks::Mutex;
use crossrail_transport::{Index, List};
use crossrail_types::{EndpointId, Error, ErrorKind, Result};

use super::{Endpoint, Region, Worker};
use crate::core::lists::{RowsOf, SentDescription};
use crate::core::{Claim, Core};
use crate::memory::{Addresses, Description, Extent, Place, Placed, RegionKey, Row, Space};
use crate::progress::Progress;

/// Rows of registered memory: this worker's ([`Worker::layout`]), or a peer's ([`Endpoint::layout`]). Made and checked
/// once, and described to each peer once, however often it is used; clones share it. Any thread may use it.
#[derive(Clone)]
pub struct Layout(pub(super) Arc<Inner>);

/// What the clones of a layout share.
pub(super) struct Inner {
    progress: Arc<Progress>,
    placed: Placed,
    extents: Vec<Extent>,
    pub(super) of: Of,
    /// Descriptions of it that were sent to peers.
    sent: Mutex<Vec<(Claim, Option<SentDescription>)>>,
}

/// Whose memory it is.
pub(super) enum Of {
    Own(Vec<Region>),
    Peer(EndpointId, Vec<RegionKey>),
}

impl Drop for Inner {
    fn drop(&mut self) {
        // May run under the worker's lock, which withdrawing the descriptions takes.
        let sent = std::mem::take(&mut *self.sent.lock());
        let sent: Vec<_> = sent.into_iter().filter_map(|(claim, sent)| Some((claim, sent?))).collect();
        if sent.is_empty() || self.progress.check_origin("drop").is_err() {
            return;
        }
        let progress = self.progress.clone();
        self.progress.defer(Box::new(move || {
            let mut core = progress.core();
            sent.iter().for_each(|(claim, sent)| core.withdraw(claim.id, &[*sent]));
            progress.after(core);
        }));
    }
}

impl Layout {
    fn new(progress: &Arc<Progress>, placed: Placed, extents: Vec<Extent>, of: Of) -> Layout {
        Layout(Arc::new(Inner { progress: progress.clone(), placed, extents, of, sent: Mutex::default() }))
    }

    /// How many rows.
    pub fn rows(&self) -> u64 {
        self.0.placed.rows.count()
    }

    /// How many strides they are: what a peer is told takes that much.
    pub fn strides(&self) -> usize {
        self.0.placed.rows.strides().len()
    }

    /// Bytes of all rows.
    pub fn nbytes(&self) -> u64 {
        self.0.placed.rows.bytes()
    }

    /// Part `index` of each row, cut into `parts` of equal length.
    ///
    /// # Errors
    /// `Usage`: a row's length is not a multiple of that, or there is no such part.
    pub fn split(&self, parts: u64, index: u64) -> Result<Layout> {
        Ok(self.with(self.0.placed.split(parts, index)?))
    }

    /// Rows `first` up to but without `last`.
    ///
    /// # Errors
    /// `Usage`: there are no such rows.
    pub fn slice(&self, first: u64, last: u64) -> Result<Layout> {
        Ok(self.with(self.0.placed.slice(first, last)?))
    }

    fn with(&self, placed: Placed) -> Layout {
        let of = match &self.0.of {
            Of::Own(regions) => Of::Own(regions.clone()),
            Of::Peer(endpoint, keys) => Of::Peer(*endpoint, keys.clone()),
        };
        Layout::new(&self.0.progress, placed, self.0.extents.clone(), of)
    }

    /// The rows that `index` names, in its order.
    pub(super) fn list(&self, index: Option<&[u32]>) -> Result<List> {
        let rows = &self.0.placed.rows;
        let count = rows.count();
        let compressed = index.map_or(Index::All, |index| Index::compress(index, rows));
        List::new(rows.clone(), compressed).ok_or_else(|| {
            let beyond = index.and_then(|index| index.iter().find(|row| u64::from(**row) >= count));
            let detail = match beyond {
                Some(row) => format!("row {row} of a layout of {count} rows"),
                None => "no rows".to_owned(),
            };
            Error::new(ErrorKind::Usage, "prepare", detail)
        })
    }

    /// Whether all of it is host memory.
    pub(super) fn is_host(&self) -> bool {
        self.space() == Space::Host
    }

    /// A GPU's, if any of it is.
    fn space(&self) -> Space {
        let mut places = self.0.placed.regions.iter().map(|region| self.0.extents[*region as usize].place);
        Space::of(places.find(|place| *place != Place::Host))
    }

    /// Whether all of it is memory of one GPU.
    pub(super) fn is_of_one_gpu(&self) -> bool {
        let places = self.0.placed.regions.iter().map(|region| self.0.extents[*region as usize].place);
        let mut others = places.clone().map(|place| Some(place) != places.clone().next());
        places.clone().all(|place| place != Place::Host) && !others.any(|other| other)
    }

    /// The GPU whose memory it is, if it is this worker's and not host memory.
    pub(super) fn device(&self, core: &mut Core) -> Option<Arc<Device>> {
        let Of::Own(regions) = &self.0.of else { return None };
        let first = *self.0.placed.regions.first()?;
        core.transfers().regions().device(regions.get(first as usize)?.entry())
    }

    /// The key of the region of the first row, of a peer's layout.
    pub(super) fn first_key(&self) -> Option<&RegionKey> {
        let Of::Peer(_, keys) = &self.0.of else { return None };
        keys.get(*self.0.placed.regions.first()? as usize)
    }

    /// Where a piece of a list of these rows is: its region's number, and the offset there.
    pub(super) fn locate(&self, at: u64) -> Option<(usize, u64)> {
        let inside = |extent: &Extent| at >= extent.base && at - extent.base < extent.len;
        let region = self.0.extents.iter().position(inside)?;
        Some((region, at - self.0.extents[region].base))
    }

    /// Bytes from an address in it to the end of a region.
    pub(super) fn left(&self, region: usize, at: u64) -> u64 {
        let Extent { base, len, .. } = self.0.extents[region];
        base + len - at
    }

    /// Where a region is.
    pub(super) fn place(&self, region: usize) -> Place {
        self.0.extents[region].place
    }

    /// Fails if one of its regions was deregistered.
    pub(super) fn check_live(&self, core: &mut Core) -> Result<()> {
        let Of::Own(regions) = &self.0.of else { return Ok(()) };
        let gone = regions.iter().any(|region| !core.transfers().regions().is_live(region.entry()));
        if gone {
            return Err(Error::new(ErrorKind::Region, "start", "a region of the local layout was deregistered"));
        }
        Ok(())
    }

    /// Describes it to the peer, once. `None`: the peer could not copy these rows directly anyway.
    pub(super) fn describe(&self, core: &mut Core, endpoint: EndpointId) -> Result<Option<SentDescription>> {
        let mut all = self.0.sent.lock();
        if let Some((_, sent)) = all.iter().find(|(claim, _)| claim.id == endpoint) {
            return Ok(*sent);
        }
        let strides = self.0.placed.relative(&self.0.extents);
        let sent = match &self.0.of {
            Of::Own(_) => {
                let memory: Vec<_> = self.0.extents.iter().map(|extent| (extent.base, extent.len)).collect();
                core.describe_rows(endpoint, RowsOf::Own(&memory, &strides, self.space()))?
            }
            Of::Peer(_, keys) => {
                let keys: Vec<_> = keys.iter().map(|key| key.key).collect();
                core.describe_rows(endpoint, RowsOf::Peer(&keys, &strides))?
            }
        };
        all.push((core.peers().claim(endpoint), sent));
        Ok(sent)
    }
}

impl std::fmt::Debug for Layout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Layout({} rows, {} bytes)", self.rows(), self.nbytes())
    }
}

/// Regions without the repetitions, and where each is found.
fn distinct<'a, R: 'a>(rows: &[Row<'a, R>], same: impl Fn(&R, &R) -> bool) -> Vec<&'a R> {
    let mut found: Vec<&R> = Vec::new();
    for row in rows {
        if !found.iter().any(|known| same(known, row.region)) {
            found.push(row.region);
        }
    }
    found
}

impl Worker {
    /// Rows of this worker's regions, which the layout keeps registered unless they are deregistered by name.
    ///
    /// # Errors
    /// `Usage`: no rows, rows outside their region, or a region of another worker.
    pub fn layout(&self, rows: &[Row<'_, Region>]) -> Result<Layout> {
        let regions = distinct(rows, Region::is);
        let regions: Vec<Region> = regions.into_iter().cloned().collect();
        let extents = self.extents(&regions)?;
        let number = |region: &Region| regions.iter().position(|known| known.is(region)).unwrap_or(0) as u32;
        let placed = Placed::of(rows, &extents, number)?;
        Ok(Layout::new(self.progress_handle(), placed, extents, Of::Own(regions)))
    }

    /// Rows by their addresses, each in one of `regions`, or of no bytes.
    ///
    /// # Errors
    /// `Region`: a row that is not in one of them; otherwise as [`Worker::layout`].
    pub fn layout_at(&self, regions: &[Region], rows: Addresses<'_>) -> Result<Layout> {
        let extents = self.extents(regions)?;
        let placed = rows.placed(&extents)?;
        Ok(Layout::new(self.progress_handle(), placed, extents, Of::Own(regions.to_vec())))
    }

    fn extents(&self, regions: &[Region]) -> Result<Vec<Extent>> {
        self.progress_handle().check_origin("layout")?;
        if regions.iter().any(|region| !region.is_of(self.progress_handle())) {
            return Err(Error::new(ErrorKind::Usage, "layout", "a region belongs to another worker"));
        }
        let of = |region: &Region| Extent { base: region.base(), len: region.len(), place: region.place() };
        Ok(regions.iter().map(of).collect())
    }
}

impl Endpoint {
    /// Rows of the peer's regions, by their keys.
    ///
    /// # Errors
    /// `Usage`: no rows, or rows outside their region.
    pub fn layout(&self, rows: &[Row<'_, RegionKey>]) -> Result<Layout> {
        let keys: Vec<RegionKey> = distinct(rows, RegionKey::eq).into_iter().cloned().collect();
        // Their addresses are unknown: place the regions one after the other in a synthetic address space, with gaps,
        // so that rows of different regions never adjoin.
        let mut base = 0u64;
        let extents = keys.iter().map(|key| {
            let extent = Extent { base, len: key.len(), place: key.place() };
            base = base.saturating_add(key.len()).saturating_add(1);
            extent
        });
        let extents: Vec<_> = extents.collect();
        let number = |key: &RegionKey| keys.iter().position(|known| known == key).unwrap_or(0) as u32;
        let placed = Placed::of(rows, &extents, number)?;
        self.peers_layout(placed, extents, keys)
    }

    /// Rows of the peer's memory by their addresses there, each in one of the regions of `description`, or of no bytes.
    ///
    /// # Errors
    /// `Region`: a row that is not in one of them; otherwise as [`Endpoint::layout`].
    pub fn layout_at(&self, description: &Description, rows: Addresses<'_>) -> Result<Layout> {
        let regions = description.regions();
        let of = |region: &crate::Described| Extent { base: region.base, len: region.len(), place: region.place() };
        let extents: Vec<_> = regions.iter().map(of).collect();
        let placed = rows.placed(&extents)?;
        self.peers_layout(placed, extents, regions.iter().map(|region| region.key.clone()).collect())
    }

    /// A layout with the regions that its rows are in, and no others.
    fn peers_layout(&self, mut placed: Placed, extents: Vec<Extent>, keys: Vec<RegionKey>) -> Result<Layout> {
        let progress = self.worker.progress_handle();
        progress.check_origin("layout")?;
        let mut used = vec![None; extents.len()];
        let (mut few, mut opened) = (Vec::new(), Vec::new());
        for region in &mut placed.regions {
            let at = *region as usize;
            *region = *used[at].get_or_insert_with(|| {
                few.push(extents[at]);
                opened.push(keys[at].clone());
                few.len() as u32 - 1
            });
        }
        Ok(Layout::new(progress, placed, few, Of::Peer(self.id, opened)))
    }
}
