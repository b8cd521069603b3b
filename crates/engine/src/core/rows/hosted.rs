//! State that peers have described to this end: rows of its regions and of their own memory, views of both, notices.
//!
//! An access of a peer to a view, and a mail of its on the way, is a [`Lent`] entry; the protocol knows it as a region
//! whose index has the bit [`LENT`], and engine code as [`Where`] its bytes are. Everything that a peer can make this
//! end hold is counted per peer and has a maximum, all of which are in [`wire`](super::wire).

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use crossrail_gpu::Device;
use crossrail_proto as proto;
use crossrail_transport::{List, Rows, Stride};
use crossrail_types::EndpointId;
use proto::{Access, RegionFault, RegionRef};

use super::totals::{LeftNotices, Total, Totals};
use super::view::{Charge, Installed, Theirs, View};
use super::wire::{
    self, ALL_LISTS_MAX, ENTRIES_MAX, LISTS_MAX, MAIL_MAX, MAILS_MAX, NOTICE_EXTRA, NOTICE_MAX, NOTICES_MAX,
    NOTICES_PEERS, Named, PUT_AHEAD, Sort,
};
use crate::memory::{RegionStride, Regions};

/// Set in the index of what is lent here, and in no region's.
pub(super) const LENT: u32 = 1 << 31;

/// What an entry is for.
enum Purpose {
    Mail {
        sort: Sort,
        id: u32,
        bytes: Box<[u8]>,
        read: bool,
    },
    View {
        view: Arc<View>,
        notice: Option<Vec<u8>>,
        counts: bool,
    },
    /// A notice of so many bytes, and rows that go to the view.
    Put {
        view: Arc<View>,
        notice: usize,
        bytes: Box<[u8]>,
        read: bool,
    },
}

struct Lent {
    generation: u32,
    endpoint: EndpointId,
    /// `None`: the entry is free.
    purpose: Option<Purpose>,
}

/// Where the memory of an access is.
pub(in crate::core) enum Where<'a> {
    Flat(*mut u8, u64),
    /// With the GPU whose memory they are.
    Rows(&'a Arc<List>, Option<&'a Arc<Device>>),
}

/// Sender of the notices of an endpoint. Kept with every notice: the peer's entry may be freed before it is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sender {
    pub(crate) endpoint: EndpointId,
    pub(crate) name: Arc<str>,
    /// See [`Endpoint::generation`](crate::Endpoint::generation).
    pub(crate) generation: u64,
}

/// A notice that has been raised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Raised {
    pub(crate) from: Arc<Sender>,
    pub(crate) bytes: Vec<u8>,
}

/// Everything that one peer has described.
pub(super) struct PeerDescriptions {
    sender: Arc<Sender>,
    /// Totals of all peers.
    all: Arc<Totals>,
    rows: HashMap<u32, Arc<Installed>>,
    theirs: HashMap<u32, Arc<Theirs>>,
    views: HashMap<u32, Arc<View>>,
    pub(super) behind: HashMap<u32, Vec<u8>>,
    /// Bytes of lists.
    pub(super) lists: Arc<Total>,
    /// Bytes of mails on their way, and of notices that nobody has taken.
    pub(super) mails: u64,
    pub(super) notices: u64,
    /// Credit bytes of notices that were taken, or will never be raised: total, and the part reported to the peer.
    taken: u64,
    credited: u64,
}

/// See the module. Protected by the worker's lock.
pub(crate) struct Hosted {
    peers: HashMap<EndpointId, PeerDescriptions>,
    lent: Vec<Lent>,
    free: Vec<u32>,
    raised: VecDeque<Raised>,
    totals: Arc<Totals>,
    /// Peers whose notices were refused, and to whom credit may be due.
    refused: Vec<EndpointId>,
    /// Notices of ended peers in `raised`.
    left: LeftNotices,
    /// Bytes of each peer's notices that nobody has taken, at most.
    pub(in crate::core) notices_max: u64,
}

impl Default for Hosted {
    fn default() -> Hosted {
        Hosted {
            peers: HashMap::new(),
            lent: Vec::new(),
            free: Vec::new(),
            raised: VecDeque::new(),
            totals: Arc::default(),
            refused: Vec::new(),
            left: LeftNotices::default(),
            notices_max: NOTICES_MAX,
        }
    }
}

/// What a completed access leaves to the caller.
pub(in crate::core) enum Arrived {
    Nothing,
    /// The caller's immediate counts in that region: this one, or that of the access.
    Counts(RegionRef, Option<u32>),
    /// The peer has taken notices of ours: so many bytes of them in all.
    Credit(u64),
}

impl Hosted {
    /// Whether that is lent here, and no region.
    #[inline]
    pub(in crate::core) fn is_lent(region: RegionRef) -> bool {
        region.index & LENT != 0
    }

    fn entry(&self, region: RegionRef) -> Option<&Lent> {
        let entry = self.lent.get((region.index & !LENT) as usize)?;
        (entry.generation == region.generation && Hosted::is_lent(region)).then_some(entry)
    }

    /// Where its bytes are; `None`: it is over.
    pub(in crate::core) fn memory(&self, region: RegionRef) -> Option<Where<'_>> {
        match self.entry(region)?.purpose.as_ref()? {
            Purpose::Mail { bytes, .. } | Purpose::Put { bytes, .. } => {
                Some(Where::Flat(bytes.as_ptr().cast_mut(), bytes.len() as u64))
            }
            Purpose::View { view, .. } => Some(Where::Rows(&view.list, view.gpu())),
        }
    }

    /// The view that an access is to.
    pub(in crate::core) fn view(&self, region: RegionRef) -> Option<&Arc<View>> {
        match self.entry(region)?.purpose.as_ref()? {
            Purpose::Mail { .. } | Purpose::Put { .. } => None,
            Purpose::View { view, .. } => Some(view),
        }
    }

    /// The accesses in progress whose rows are partly in that region.
    pub(in crate::core) fn over(&self, region: RegionRef) -> Vec<RegionRef> {
        let over = |(at, entry): (usize, &Lent)| match &entry.purpose {
            Some(Purpose::View { view, .. } | Purpose::Put { view, .. }) if view.of.regions.contains(&region) => {
                Some(RegionRef { index: at as u32 | LENT, generation: entry.generation })
            }
            _ => None,
        };
        self.lent.iter().enumerate().filter_map(over).collect()
    }

    fn lend(&mut self, endpoint: EndpointId, purpose: Purpose) -> RegionRef {
        let at = self.free.pop().unwrap_or_else(|| {
            self.lent.push(Lent { generation: 0, endpoint, purpose: None });
            self.lent.len() as u32 - 1
        });
        let entry = &mut self.lent[at as usize];
        (entry.endpoint, entry.purpose) = (endpoint, Some(purpose));
        RegionRef { index: at | LENT, generation: entry.generation }
    }

    /// Finds what a key of [`Named`] names, and lends it for one access. A notice that is refused with it has cost its
    /// writer credit, which returns as if it had been taken.
    fn resolve(
        &mut self,
        regions: &Regions,
        endpoint: EndpointId,
        named: Named,
        (offset, len): (u64, u64),
        access: Access,
    ) -> Result<RegionRef, RegionFault> {
        let found = self.find(regions, endpoint, named, (offset, len), access);
        let notice = match named {
            Named::Mail { sort: Sort::Notice | Sort::Behind, .. } => len,
            Named::Put { notice, .. } => u64::from(notice),
            _ => return found,
        };
        if found.is_err()
            && notice <= len.min(NOTICE_MAX as u64)
            && let Some(peer) = self.peers.get_mut(&endpoint)
        {
            peer.taken += notice + NOTICE_EXTRA;
            self.refused.push(endpoint);
        }
        found
    }

    fn find(
        &mut self,
        regions: &Regions,
        endpoint: EndpointId,
        named: Named,
        (offset, len): (u64, u64),
        access: Access,
    ) -> Result<RegionRef, RegionFault> {
        let Some(peer) = self.peers.get_mut(&endpoint) else { return Err(RegionFault::Gone) };
        let room = self.notices_max.saturating_sub(peer.notices);
        let left = self.left.of(&peer.sender.name);
        let notice_fits = |len: u64| {
            let all = self.totals.notices.bytes() + len.saturating_add(NOTICE_EXTRA);
            let fits = len <= NOTICE_MAX as u64 && len + NOTICE_EXTRA <= room;
            fits && left < self.notices_max && all <= NOTICES_PEERS * self.notices_max
        };
        match named {
            Named::Mail { sort, id } => {
                let notice = matches!(sort, Sort::Notice | Sort::Behind);
                let fits = if notice { notice_fits(len) } else { peer.has_room_for_mail(len) };
                if offset != 0 || access != Access::Write {
                    return Err(RegionFault::Access);
                }
                if !fits {
                    return Err(RegionFault::Full);
                }
                if notice {
                    peer.add_notice(len)
                } else {
                    peer.add_mail(len)
                };
                let bytes = vec![0; len as usize].into();
                Ok(self.lend(endpoint, Purpose::Mail { sort, id, bytes, read: false }))
            }
            Named::View { id, behind, counts } => {
                let view = peer.live_view(regions, id)?;
                if offset.checked_add(len).is_none_or(|end| end > view.list.bytes()) {
                    return Err(RegionFault::Bounds);
                }
                let notice = match behind {
                    Some(behind) => Some(peer.behind.remove(&behind).ok_or(RegionFault::Gone)?),
                    None => None,
                };
                Ok(self.lend(endpoint, Purpose::View { view, notice, counts }))
            }
            Named::Put { id, notice } => {
                let view = peer.live_view(regions, id)?;
                if len < PUT_AHEAD as u64 + u64::from(notice) {
                    return Err(RegionFault::Bounds);
                }
                let fits = notice_fits(u64::from(notice)) && peer.has_room_for_mail(len);
                if offset != 0 || access != Access::Write || view.gpu().is_some() {
                    return Err(RegionFault::Access);
                }
                if !fits {
                    return Err(RegionFault::Full);
                }
                peer.add_notice(u64::from(notice));
                peer.add_mail(len);
                let (notice, bytes) = (notice as usize, vec![0; len as usize].into());
                Ok(self.lend(endpoint, Purpose::Put { view, notice, bytes, read: false }))
            }
        }
    }

    /// All bytes of an access are in place.
    pub(in crate::core) fn arrived(&mut self, regions: &Regions, region: RegionRef) -> Arrived {
        let Some(at) = self.entry(region).map(|_| (region.index & !LENT) as usize) else { return Arrived::Nothing };
        let endpoint = self.lent[at].endpoint;
        match &mut self.lent[at].purpose {
            Some(Purpose::Mail { sort, id, bytes, read }) => {
                // The memory stays until the access is over: a lane may bring the same bytes once more.
                let Some(peer) = self.peers.get_mut(&endpoint).filter(|_| !*read) else { return Arrived::Nothing };
                *read = true;
                match sort {
                    Sort::Notice => self.raised.push_back(Raised { from: peer.sender.clone(), bytes: bytes.to_vec() }),
                    _ => return peer.read(regions, (*sort, *id), bytes),
                }
                Arrived::Nothing
            }
            Some(Purpose::View { view, notice, counts }) => {
                let counted = counts.then_some(view.of.first);
                if let Some(peer) = self.peers.get(&endpoint)
                    && let Some(bytes) = notice.take()
                {
                    self.raised.push_back(Raised { from: peer.sender.clone(), bytes });
                }
                counted.map_or(Arrived::Nothing, |region| Arrived::Counts(region, None))
            }
            Some(Purpose::Put { view, notice, bytes, read }) => {
                let peer = self.peers.get(&endpoint).filter(|_| !*read && view.is_live(regions));
                let Some(peer) = peer else { return Arrived::Nothing };
                let found = wire::read_ahead(bytes).and_then(|(from, imm, rest)| {
                    let (notice, rows) = rest.split_at_checked(*notice)?;
                    let end = from.checked_add(rows.len() as u64)?;
                    (end <= view.list.bytes()).then_some((from, imm, notice, rows))
                });
                // Malformed parts are ignored, together with their notice.
                let Some((from, imm, notice, rows)) = found else { return Arrived::Nothing };
                *read = true;
                // SAFETY: host memory of regions that are registered, inside the list by the check above.
                unsafe { view.list.copy_in(from, rows.as_ptr(), rows.len() as u64) };
                self.raised.push_back(Raised { from: peer.sender.clone(), bytes: notice.to_vec() });
                imm.map_or(Arrived::Nothing, |imm| Arrived::Counts(view.of.first, Some(imm)))
            }
            None => Arrived::Nothing,
        }
    }

    /// An access is over, whether or not its bytes arrived. The memory of a mail, which is not needed any more.
    pub(in crate::core) fn released(&mut self, region: RegionRef) -> Option<Box<[u8]>> {
        let entry = self.entry(region)?;
        let (at, endpoint) = ((region.index & !LENT) as usize, entry.endpoint);
        let peer = self.peers.get_mut(&endpoint);
        let memory = match (&mut self.lent[at].purpose, peer) {
            (Some(Purpose::Mail { sort, bytes, read, .. }), peer) => {
                let (len, notice) = (bytes.len() as u64, matches!(sort, Sort::Notice | Sort::Behind));
                match peer {
                    Some(peer) if !notice => peer.end_mail(len),
                    Some(peer) if !*read => peer.take_notice(len),
                    _ => {}
                }
                Some(std::mem::take(bytes))
            }
            (Some(Purpose::Put { notice, bytes, read, .. }), peer) => {
                if let Some(peer) = peer {
                    peer.end_mail(bytes.len() as u64);
                    if !*read {
                        peer.take_notice(*notice as u64);
                    }
                }
                Some(std::mem::take(bytes))
            }
            (Some(Purpose::View { notice: Some(notice), .. }), Some(peer)) => {
                peer.take_notice(notice.len() as u64);
                None
            }
            _ => None,
        };
        self.free(at);
        memory
    }

    fn free(&mut self, at: usize) {
        let entry = &mut self.lent[at];
        if entry.purpose.take().is_some() {
            entry.generation = entry.generation.wrapping_add(1);
            self.free.push(at as u32);
        }
    }

    /// What each peer has told.
    #[cfg(feature = "fuzzing")]
    pub(super) fn descriptions(&self) -> impl Iterator<Item = &PeerDescriptions> {
        self.peers.values()
    }

    /// Whether there are notices.
    pub(in crate::core) fn has_notices(&self) -> bool {
        !self.raised.is_empty()
    }

    /// Takes the oldest notice.
    pub(in crate::core) fn take_notice(&mut self) -> Option<Raised> {
        let raised = self.raised.pop_front()?;
        let len = raised.bytes.len() as u64;
        match self.peers.get_mut(&raised.from.endpoint) {
            Some(peer) => peer.take_notice(len),
            None => {
                self.left.take(raised.from.endpoint, len + NOTICE_EXTRA);
                self.totals.notices.subtract(len + NOTICE_EXTRA);
            }
        }
        Some(raised)
    }

    /// The credit to return to the peer for notices that were taken, if it is due.
    pub(in crate::core) fn credit_due(&mut self, endpoint: EndpointId) -> Option<u64> {
        let peer = self.peers.get_mut(&endpoint)?;
        (peer.taken - peer.credited >= self.notices_max / 8).then(|| {
            peer.credited = peer.taken;
            peer.taken
        })
    }

    /// The peers whose notices were refused since the last call.
    #[inline]
    pub(in crate::core) fn take_refused(&mut self) -> Vec<EndpointId> {
        std::mem::take(&mut self.refused)
    }

    /// A peer of that name and generation may describe lists from now on.
    pub(in crate::core) fn begin(&mut self, endpoint: EndpointId, name: &str, generation: u64) {
        let sender = Sender { endpoint, name: name.into(), generation };
        self.peers.insert(endpoint, PeerDescriptions::new(sender, &self.totals));
    }

    /// The peer has ended: its descriptions are dropped. Notices that were raised stay, and count for its name.
    pub(in crate::core) fn forget(&mut self, endpoint: EndpointId) {
        let Some(peer) = self.peers.remove(&endpoint) else { return };
        let of_peer = self.raised.iter().filter(|raised| raised.from.endpoint == endpoint);
        let raised: u64 = of_peer.map(|raised| raised.bytes.len() as u64 + NOTICE_EXTRA).sum();
        self.left.add(endpoint, &peer.sender.name, raised);
        self.totals.notices.subtract(peer.notices.saturating_sub(raised));
        self.totals.mails.subtract(peer.mails);
    }
}

impl PeerDescriptions {
    fn new(sender: Sender, all: &Arc<Totals>) -> PeerDescriptions {
        PeerDescriptions {
            sender: Arc::new(sender),
            all: all.clone(),
            rows: HashMap::new(),
            theirs: HashMap::new(),
            views: HashMap::new(),
            behind: HashMap::new(),
            lists: Arc::default(),
            mails: 0,
            notices: 0,
            taken: 0,
            credited: 0,
        }
    }

    /// Processes a complete mail. Malformed ones are ignored: operations that refer to them fail.
    fn read(&mut self, regions: &Regions, (sort, id): (Sort, u32), bytes: &[u8]) -> Arrived {
        match sort {
            Sort::Rows => self.add_rows(regions, id, bytes),
            Sort::Theirs => self.add_theirs(id, bytes),
            Sort::View => self.add_view(id, bytes),
            Sort::Behind => self.add_behind(id, bytes),
            Sort::Credit => {
                let taken = <[u8; 8]>::try_from(bytes).map(u64::from_le_bytes);
                return taken.map_or(Arrived::Nothing, Arrived::Credit);
            }
            Sort::Drop => {
                wire::read_drop(bytes).into_iter().flatten().for_each(|(sort, id)| self.drop_one(sort, id));
            }
            Sort::Notice => {}
        }
        Arrived::Nothing
    }

    fn has_room_for_mail(&self, len: u64) -> bool {
        len <= MAIL_MAX && self.mails + len <= MAILS_MAX && self.all.have_room_for_mail(len)
    }

    fn add_mail(&mut self, len: u64) {
        self.mails += len;
        self.all.mails.add(len);
    }

    fn end_mail(&mut self, len: u64) {
        self.mails -= len;
        self.all.mails.subtract(len);
    }

    fn add_notice(&mut self, len: u64) {
        self.notices += len + NOTICE_EXTRA;
        self.all.notices.add(len + NOTICE_EXTRA);
    }

    fn live_view(&self, regions: &Regions, id: u32) -> Result<Arc<View>, RegionFault> {
        self.views.get(&id).filter(|view| view.is_live(regions)).cloned().ok_or(RegionFault::Gone)
    }

    fn add_behind(&mut self, id: u32, bytes: &[u8]) {
        let out =
            if self.behind.len() < ENTRIES_MAX { self.behind.insert(id, bytes.to_vec()) } else { Some(bytes.to_vec()) };
        if let Some(notice) = out {
            self.take_notice(notice.len() as u64);
        }
    }

    fn take_notice(&mut self, len: u64) {
        self.notices -= len + NOTICE_EXTRA;
        self.all.notices.subtract(len + NOTICE_EXTRA);
        self.taken += len + NOTICE_EXTRA;
    }

    /// Makes room for one more list of so many bytes; `None`: that is too much.
    fn admit(&mut self, bytes: u64) -> Option<Charge> {
        let entries = self.rows.len() + self.theirs.len() + self.views.len();
        let fits = |total: &Total, most: u64| total.bytes().saturating_add(bytes) <= most;
        if entries >= ENTRIES_MAX || !fits(&self.lists, LISTS_MAX) || !fits(&self.all.lists, ALL_LISTS_MAX) {
            return None;
        }
        Some(Charge::new([&self.lists, &self.all.lists], bytes))
    }

    fn add_rows(&mut self, regions: &Regions, id: u32, bytes: &[u8]) {
        self.drop_one(Sort::Rows, id);
        let Some((keys, strides)) = wire::read_rows(bytes) else { return };
        let found: Option<Vec<_>> = keys.iter().map(|key| regions.known(key)).collect();
        let Some(found) = found else { return };
        let absolute = |s: &RegionStride| {
            let of = &found[s.region as usize];
            let at = (of.ptr as u64).wrapping_add(s.stride.at);
            wire::is_inside(&s.stride, of.len).then_some(Stride { at, ..s.stride })
        };
        let placed: Option<Vec<_>> = strides.iter().map(absolute).collect();
        let Some(rows) = placed.and_then(Rows::new) else { return };
        let gpu = found.first().and_then(|of| of.gpu.clone());
        let ordinal = |gpu: &Option<Arc<Device>>| gpu.as_ref().map(|gpu| gpu.ordinal());
        if found.iter().any(|of| ordinal(&of.gpu) != ordinal(&gpu)) {
            return;
        }
        let first = strides.first().map(|stride| found[stride.region as usize].region);
        if let Some((first, _charge)) = first.zip(self.admit(wire::rows_weight(bytes))) {
            // Each once: every access looks at all of them.
            let regions: HashSet<_> = strides.iter().map(|stride| found[stride.region as usize].region).collect();
            let regions = regions.into_iter().collect();
            self.rows.insert(id, Arc::new(Installed { rows: Arc::new(rows), regions, first, gpu, _charge }));
        }
    }

    fn add_theirs(&mut self, id: u32, bytes: &[u8]) {
        self.drop_one(Sort::Theirs, id);
        let Some(rows) = wire::read_theirs(bytes) else { return };
        // Twice: as they were told, and as they were found.
        if let Some(charge) = self.admit(2 * wire::rows_weight(bytes)) {
            self.theirs.insert(id, Arc::new(Theirs::new(rows, charge)));
        }
    }

    fn add_view(&mut self, id: u32, bytes: &[u8]) {
        self.drop_one(Sort::View, id);
        let Some(view) = wire::read_view(bytes) else { return };
        let Some(of) = self.rows.get(&view.rows).cloned() else { return };
        let theirs = view.theirs.and_then(|(id, index)| Some((self.theirs.get(&id)?.clone(), index)));
        let mut weight = wire::weight(of.rows.even(), &view.index);
        if let Some((theirs, index)) = &theirs {
            weight = weight.saturating_add(wire::weight(theirs.even, index));
        }
        let Some(charge) = self.admit(weight) else { return };
        if let Some(view) = View::new(of, view.index, theirs, charge) {
            self.views.insert(id, Arc::new(view));
        }
    }

    fn drop_one(&mut self, sort: Sort, id: u32) {
        match sort {
            Sort::Rows => drop(self.rows.remove(&id)),
            Sort::Theirs => drop(self.theirs.remove(&id)),
            Sort::View => drop(self.views.remove(&id)),
            Sort::Behind => {
                if let Some(notice) = self.behind.remove(&id) {
                    self.take_notice(notice.len() as u64);
                }
            }
            _ => {}
        }
    }
}

/// The regions and lists of this end, as one peer's protocol sees them.
pub(in crate::core) struct Shown<'a> {
    pub(in crate::core) regions: &'a Regions,
    pub(in crate::core) hosted: &'a mut Hosted,
    pub(in crate::core) endpoint: EndpointId,
}

impl proto::Regions for Shown<'_> {
    fn resolve(
        &mut self,
        key: &proto::RegionKey,
        offset: u64,
        len: u64,
        access: Access,
    ) -> Result<RegionRef, RegionFault> {
        match Named::of(key) {
            None => self.regions.resolve(key, offset, len),
            Some(named) => self.hosted.resolve(self.regions, self.endpoint, named, (offset, len), access),
        }
    }

    fn lend(&mut self, name: u64, len: u64) -> Result<RegionRef, RegionFault> {
        let named = Named::of_name(name).ok_or(RegionFault::Gone)?;
        self.hosted.resolve(self.regions, self.endpoint, named, (0, len), Access::Write)
    }

    fn alive(&self, region: RegionRef) -> bool {
        if !Hosted::is_lent(region) {
            return self.regions.is_live(region);
        }
        match self.hosted.entry(region).and_then(|entry| entry.purpose.as_ref()) {
            Some(Purpose::Mail { .. }) => true,
            Some(Purpose::View { view, .. } | Purpose::Put { view, .. }) => view.is_live(self.regions),
            None => false,
        }
    }

    fn eager(&self, region: RegionRef) -> bool {
        match self.hosted.memory(region) {
            Some(Where::Rows(_, gpu)) => gpu.is_none(),
            Some(Where::Flat(..)) => true,
            None => self.regions.is_eager(region),
        }
    }
}

#[cfg(test)]
mod tests;
