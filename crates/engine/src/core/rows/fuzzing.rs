//! What an untrusted peer tells of lists, and what it does with them: the target of `fuzz/lists`, and its seeds.

use std::sync::Arc;

use crossrail_proto::{Access, Operation, RegionRef, Regions as _};
use crossrail_transport::{Descriptor, DirectKind, Domain, Index, Job, List, Step, Stride, Window};
use crossrail_types::EndpointId;

use super::hosted::{Hosted, Shown, Where};
use super::wire::{self, LISTS_MAX, NOTHING, NOTICES_MAX, Named, Reachable, Sort, TheirRows, ViewOf};
use crate::memory::{Buffer, RegionStride, Regions};

/// Bytes of this end's regions, of which there are two, and of the peer's memory.
const POOL: usize = 4096;
/// Two peers by turns.
const PEERS: usize = 2;
/// Accesses that are in progress at most.
const HELD_MAX: usize = 8;
/// Pieces of a list that are looked at, from each of some places on.
const PIECES: usize = 32;

/// Steps of the input: a mail, an access, the oldest access is over, a notice is taken, a peer is replaced, a region
/// goes.
const MAIL: u8 = 0;
const ACCESS: u8 = 1;
const OVER: u8 = 2;
const TAKE: u8 = 3;
const END: u8 = 4;
const GONE: u8 = 5;
/// A count of rows that is unique in its input.
const COUNTED: u64 = 0x1357;
/// Sorts of mails from here on are rows with a notice.
const ROWS: u8 = 128;

/// A lane that maps all of the peer's memory that it describes and that is no longer than [`POOL`].
struct FakeDomain(Arc<Vec<u8>>);

impl Domain for FakeDomain {
    fn describe(&mut self, _ptr: *const u8, _len: usize) -> Result<(Descriptor, DirectKind), String> {
        Err("it only reads what peers say".to_owned())
    }

    fn reach(&mut self, _remote: &Descriptor, _len: usize) -> Result<DirectKind, String> {
        Ok(DirectKind::Mapped)
    }

    fn open(&mut self, _len: usize) -> Option<u32> {
        None
    }

    unsafe fn step(&mut self, _job: &mut Job, _budget: usize) -> Step {
        Step::Done
    }

    fn stop(&mut self, _slot: u32) -> bool {
        true
    }

    fn close(&mut self, _slot: u32) {}

    fn share(&mut self, _ptr: *const u8, _len: usize) -> crossrail_types::Result<Option<Descriptor>> {
        Ok(None)
    }

    fn map(&mut self, _remote: &Descriptor, len: usize, _gpu: Option<u32>) -> crossrail_types::Result<Option<Window>> {
        let keep = self.0.clone();
        Ok((len <= POOL).then(|| Window { ptr: keep.as_ptr().cast_mut(), len, device: None, keep }))
    }
}

/// One worker's regions and lists, and the accesses to them that are in progress.
struct Fuzzed {
    regions: Regions,
    hosted: Hosted,
    /// With the addresses of the region's memory.
    known: Vec<(RegionRef, (u64, u64))>,
    held: Vec<RegionRef>,
    peers: [EndpointId; PEERS],
    domain: FakeDomain,
}

fn split<const N: usize>(input: &mut &[u8]) -> [u8; N] {
    let mut taken = [0; N];
    let len = N.min(input.len());
    taken[..len].copy_from_slice(&input[..len]);
    *input = &input[len..];
    taken
}

/// Feeds the input to a worker as what two peers do. Returns the number of accesses that were let in.
///
/// # Panics
/// If an invariant is violated: a list has a byte outside its memory, or what a peer takes here is not bounded, or
/// stays.
pub fn run(mut input: &[u8]) -> usize {
    read_anything(input);
    let mut worker = Fuzzed::new();
    let mut admitted = 0;
    while !input.is_empty() {
        let [what, who] = split(&mut input);
        let endpoint = worker.peers[usize::from(who) % PEERS];
        match what % 6 {
            MAIL => {
                let [sort, id, low, high] = split(&mut input);
                let len = usize::from(u16::from_le_bytes([low, high])).min(input.len());
                let (bytes, rest) = input.split_at(len);
                input = rest;
                worker.mail(endpoint, sort, u32::from(id), bytes);
            }
            ACCESS => {
                let (key, offset, len) = (split(&mut input), split(&mut input), split(&mut input));
                let access = if what < 128 { Access::Write } else { Access::Read };
                let span = (u64::from_le_bytes(offset), u64::from_le_bytes(len));
                admitted += usize::from(worker.access(endpoint, &key, span, access));
            }
            OVER => worker.over(who >= 128),
            TAKE => {
                worker.hosted.take_notice();
                worker.hosted.credit_due(endpoint);
            }
            END => worker.replace(usize::from(who) % PEERS),
            _ => worker.gone(usize::from(who)),
        }
        worker.check();
    }
    worker.end();
    admitted
}

/// Mails are read as they are written.
fn read_anything(bytes: &[u8]) {
    if let Some((keys, strides)) = wire::read_rows(bytes) {
        assert_eq!(wire::put_rows(&keys, &strides), bytes);
    }
    if let Some(theirs) = wire::read_theirs(bytes) {
        assert_eq!(wire::read_theirs(&wire::put_theirs(&theirs)), Some(theirs));
    }
    if let Some(view) = wire::read_view(bytes) {
        let again = wire::read_view(&wire::put_view(&view));
        assert_eq!(again.map(|again| format!("{again:?}")), Some(format!("{view:?}")));
    }
    if let Some(dropped) = wire::read_drop(bytes) {
        assert_eq!(wire::put_drop(&dropped), bytes);
    }
}

impl Fuzzed {
    fn new() -> Fuzzed {
        let mut regions = Regions::default();
        let mut known = Vec::new();
        for secret in [1, 2] {
            let memory = Buffer::from(vec![0; POOL]);
            let at = memory.ptr as u64;
            known.push((regions.insert(memory, [secret; 16]).0, (at, at + POOL as u64)));
        }
        let domain = FakeDomain(Arc::new(vec![0; POOL]));
        let peers = [EndpointId(0), EndpointId(1)];
        let mut hosted = Hosted::default();
        peers.iter().for_each(|endpoint| hosted.begin(*endpoint, "peer", 0));
        Fuzzed { regions, hosted, known, held: Vec::new(), peers, domain }
    }

    fn resolve(
        &mut self,
        endpoint: EndpointId,
        key: &[u8; 24],
        (offset, len): (u64, u64),
        access: Access,
    ) -> Option<RegionRef> {
        let mut shown = Shown { regions: &self.regions, hosted: &mut self.hosted, endpoint };
        shown.resolve(key, offset, len, access).ok()
    }

    /// A mail that comes in whole, or rows with a notice of the lower bits of `sort`.
    fn mail(&mut self, endpoint: EndpointId, sort: u8, id: u32, bytes: &[u8]) {
        let sorts = [Sort::Rows, Sort::Theirs, Sort::View, Sort::Notice, Sort::Behind, Sort::Credit, Sort::Drop];
        let named = match sort.checked_sub(ROWS) {
            Some(notice) => Named::Put { id, notice: u32::from(notice) },
            None => Named::Mail { sort: sorts[usize::from(sort) % sorts.len()], id },
        };
        let Operation::Put { name, .. } = named.put() else { panic!("the reader makes memory for a mail") };
        let mut shown = Shown { regions: &self.regions, hosted: &mut self.hosted, endpoint };
        let Ok(region) = shown.lend(name, bytes.len() as u64) else { return };
        let Some(Where::Flat(at, len)) = self.hosted.memory(region) else { panic!("a mail has memory") };
        assert_eq!(len, bytes.len() as u64);
        // SAFETY: the mail's memory, of that length.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
        self.hosted.arrived(&self.regions, region);
        self.hosted.released(region);
    }

    /// An access, which is in progress from now on if it is let in.
    fn access(&mut self, endpoint: EndpointId, key: &[u8; 24], span: (u64, u64), access: Access) -> bool {
        let Some(region) = self.resolve(endpoint, key, span, access) else { return false };
        if !Hosted::is_lent(region) {
            return true;
        }
        let (regions, view) = (&self.known, self.hosted.view(region).cloned());
        if let Some(view) = view {
            assert!(span.0 + span.1 <= view.list.bytes());
            let of: Vec<_> = regions.iter().filter(|(one, _)| self.hosted.over(*one).contains(&region)).collect();
            assert!(of.iter().all(|(one, _)| self.regions.is_live(*one)));
            expect_inside(&view.list, |at, end| of.iter().any(|(_, (low, high))| *low <= at && end <= *high));
            if let Ok(Some((theirs, _))) = view.theirs(&mut self.domain) {
                assert!(theirs.fits(&view.list));
                let low = self.domain.0.as_ptr() as u64;
                expect_inside(&theirs, |at, end| low <= at && end <= low + POOL as u64);
            }
        }
        self.held.push(region);
        if self.held.len() > HELD_MAX {
            self.over(false);
        }
        true
    }

    /// The oldest access is over. `whole`: its bytes have arrived.
    fn over(&mut self, whole: bool) {
        if self.held.is_empty() {
            return;
        }
        let region = self.held.remove(0);
        if whole {
            self.hosted.arrived(&self.regions, region);
        }
        self.hosted.released(region);
        assert!(self.hosted.memory(region).is_none(), "an access that is over has memory");
    }

    /// A region is deregistered: accesses over it are not alive any more.
    fn gone(&mut self, which: usize) {
        let (region, _) = self.known[which % self.known.len()];
        if self.regions.retire(region) {
            let over = self.hosted.over(region);
            let shown = Shown { regions: &self.regions, hosted: &mut self.hosted, endpoint: EndpointId(0) };
            assert!(over.iter().all(|access| !shown.alive(*access)));
            self.regions.remove(region);
        }
    }

    /// A peer ends, and another one comes.
    fn replace(&mut self, which: usize) {
        self.hosted.forget(self.peers[which]);
        self.peers[which].0 += PEERS as u32;
        self.hosted.begin(self.peers[which], "peer", 0);
    }

    fn check(&self) {
        for peer in self.hosted.descriptions() {
            assert!(peer.lists.bytes() <= LISTS_MAX);
            assert!(peer.notices <= NOTICES_MAX);
        }
    }

    fn end(mut self) {
        while !self.held.is_empty() {
            self.over(false);
        }
        while self.hosted.take_notice().is_some() {}
        for peer in self.hosted.descriptions() {
            let behind: u64 = peer.behind.values().map(|notice| notice.len() as u64 + wire::NOTICE_EXTRA).sum();
            assert_eq!((peer.mails, peer.notices), (0, behind), "what is on its way, and what nobody has taken");
        }
        let lists: Vec<_> = self.hosted.descriptions().map(|peer| peer.lists.clone()).collect();
        (0..PEERS).for_each(|which| self.replace(which));
        assert!(lists.iter().all(|bytes| bytes.bytes() == 0), "lists of peers that have ended stay");
    }
}

/// That pieces of the list are inside, as `is_inside` tells of the first byte's address and that behind the last.
fn expect_inside(list: &List, is_inside: impl Fn(u64, u64) -> bool) {
    for position in [0, list.bytes() / 2, list.bytes() - 1] {
        let mut cursor = list.cursor(position);
        for _ in 0..PIECES {
            let Some((at, len)) = cursor.piece(u64::MAX) else { break };
            let end = at.checked_add(len).unwrap_or_else(|| panic!("{len} bytes at {at:#x}"));
            assert!(is_inside(at, end), "{at:#x}..{end:#x} is outside its memory");
        }
    }
}

/// Conversations to start from: each with its name.
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let mut regions = Regions::default();
    let keys = [1, 2].map(|secret| regions.insert(Buffer::from(vec![0; 1]), [secret; 16]).1.key);
    let stride = |region, at, len, stride, count| RegionStride { region, stride: Stride { at, len, stride, count } };
    let rows = wire::put_rows(&keys, &[stride(0, 0, 64, 128, 8), stride(1, 32, 64, 64, 8)]);
    let uneven = wire::put_rows(&keys, &[stride(1, 9, 100, 200, 3), stride(0, 4095, 1, u64::MAX, 4)]);
    let memory = |len| vec![Reachable { descriptor: [5; 24], len }];
    let mapped = TheirRows { memory: memory(4096), strides: vec![stride(0, 0, 64, 256, 16)] };
    let too_long = TheirRows { memory: memory(1 << 30), strides: vec![stride(0, 5, 64, 64, 16)] };
    // Two lengths, with equal counts at both ends: comparing row by row would take as long as the count.
    let counted = [stride(0, 0, 64, 0, COUNTED), stride(0, 64, 8, 8, 3)];
    let counts = (wire::put_rows(&keys[..1], &counted), TheirRows { memory: memory(4096), strides: counted.to_vec() });
    let view = |index, theirs: Option<(u32, Index)>| wire::put_view(&ViewOf { rows: 1, index, theirs });
    let some = |rows: &[u32]| Index::Some(rows.into());
    let repeated = Index::Repeated { block: [3, 1].into(), step: 8, repeats: 2 };
    let access = |id, behind, len: u64| {
        let key = Named::View { id, behind, counts: behind.is_none() }.key();
        [&[ACCESS, 0][..], &key, &0u64.to_le_bytes(), &len.to_le_bytes()].concat()
    };
    let over = [OVER, 128].to_vec();
    vec![
        ("all", [mail(0, 1, &rows), mail(2, 3, &view(Index::All, None)), access(3, None, 1024), over.clone()].concat()),
        (
            "mapped",
            [
                mail(0, 1, &rows),
                mail(1, 2, &wire::put_theirs(&mapped)),
                mail(2, 3, &view(some(&[4, 0, 15]), Some((2, some(&[1, 2, 3]))))),
                access(3, None, 192),
                [GONE, 0].to_vec(),
                over.clone(),
            ]
            .concat(),
        ),
        (
            "repeated",
            [
                mail(0, 1, &rows),
                mail(1, 2, &wire::put_theirs(&too_long)),
                mail(2, 3, &view(repeated.clone(), Some((2, repeated)))),
                mail(4, 9, b"behind"),
                access(3, Some(9), 256),
                over.clone(),
                [TAKE, 0].to_vec(),
                mail(6, 0, &wire::put_drop(&[(Sort::View, 3), (Sort::Rows, 1), (Sort::Theirs, 2)])),
            ]
            .concat(),
        ),
        (
            "uneven",
            [mail(0, 1, &uneven), mail(2, 3, &view(some(&[2, 5, 0]), None)), access(3, None, 201), over.clone()]
                .concat(),
        ),
        (
            "counts",
            [
                mail(0, 1, &counts.0),
                mail(1, 2, &wire::put_theirs(&counts.1)),
                mail(2, 3, &view(Index::All, Some((2, Index::All)))),
                access(3, None, 64),
                over.clone(),
            ]
            .concat(),
        ),
        ("put", [mail(0, 1, &rows), mail(2, 3, &view(Index::All, None)), puts(&over)].concat()),
        (
            "notices",
            [
                mail(3, 0, b"a notice"),
                mail(4, 9, b"never raised"),
                mail(5, 0, &8u64.to_le_bytes()),
                [TAKE, 0].to_vec(),
                mail(6, 0, &wire::put_drop(&[(Sort::Behind, 9), (Sort::View, NOTHING)])),
                [END, 0].to_vec(),
            ]
            .concat(),
        ),
    ]
}

/// Rows with notices, whole and on their way.
fn puts(over: &[u8]) -> Vec<u8> {
    // A notice of so many bytes, and as many for a view as are left.
    let put = |notice, from, len: usize| {
        mail(ROWS + notice, 3, &[&wire::put_ahead(from, Some(5))[..], &vec![9; len]].concat())
    };
    // The same as a longer one, on its way.
    let long = |notice, len: u64| {
        let key = Named::Put { id: 3, notice }.key();
        [&[ACCESS, 0][..], &key, &0u64.to_le_bytes(), &len.to_le_bytes()].concat()
    };
    let whole = [put(8, 1000, 32), put(8, 1000, 33), put(0, 0, 1024), put(9, 0, 8), put(1, u64::MAX, 2)].concat();
    let under_way = [&long(8, 40)[..], over, &long(100, 90), &long(100, 200), over].concat();
    [&whole[..], &under_way, &[GONE, 0, TAKE, 0]].concat()
}

fn mail(sort: u8, id: u8, bytes: &[u8]) -> Vec<u8> {
    let [low, high] = (bytes.len() as u16).to_le_bytes();
    [&[MAIL, 0, sort, id, low, high][..], bytes].concat()
}
