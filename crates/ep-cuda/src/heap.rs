//! The host's accesses to heaps between operations: masks, sequence numbers, the table of peers' heaps.

use std::mem::offset_of;
use std::sync::Arc;

use crossrail::{Endpoint, Memory, Shared};
use crossrail_kernels::ep::{EP_LINE, EpHeap, EpRing, Epochs, Shape};
use crossrail_locks::Mutex;
use crossrail_types::{Error, ErrorKind, Result};

use crate::peer::{Path, Peer};
use crate::proxy::{self, FarRank};
use crate::regions::RegionView;

/// This rank's heap, followed by what this rank's kernels read: tables of all ranks' heaps, of this rank's inboxes at all
/// ranks, and of all ranks' inboxes here; the rings of commands; and the words of the far ranks, if one is not enough.
pub(crate) struct Heap {
    memory: Memory,
    /// What it is laid out for.
    room: Shape,
    parts: EpHeap,
    me: u32,
    table: usize,
    inboxes: Arc<Inboxes>,
}

/// Which inbox of the heap each rank writes. An inbox keeps its rank: one that was disconnected may still write.
struct Inboxes {
    count: usize,
    /// By number.
    ranks: Mutex<Vec<u32>>,
}

impl Inboxes {
    /// Each rank has that of its number where there are enough; else they are taken in the order of connections.
    fn new(shape: &Shape, me: u32) -> Inboxes {
        let ranks = if shape.tuning().inboxes == shape.ranks { (0..shape.ranks).collect() } else { vec![me] };
        Inboxes { count: shape.tuning().inboxes as usize, ranks: Mutex::new(ranks) }
    }

    fn of(&self, rank: u32) -> Option<u32> {
        self.ranks.lock().iter().position(|known| *known == rank).map(|number| number as u32)
    }

    fn take(&self, rank: u32) -> Option<u32> {
        let mut ranks = self.ranks.lock();
        if let Some(number) = ranks.iter().position(|known| *known == rank) {
            return Some(number as u32);
        }
        (ranks.len() < self.count).then(|| {
            ranks.push(rank);
            ranks.len() as u32 - 1
        })
    }

    fn sources(&self) -> Vec<Option<u32>> {
        let mut sources: Vec<Option<u32>> = self.ranks.lock().iter().copied().map(Some).collect();
        sources.resize(self.count, None);
        sources
    }
}

/// Bytes of a heap, its tables and its rings.
pub(crate) fn bytes(room: &Shape) -> u64 {
    let rings = proxy::lanes(room.ranks) * size_of::<EpRing>();
    let tables = 3 * 8 * u64::from(room.ranks) + (rings + far_words(room) * 8) as u64;
    room.heap_bytes().next_multiple_of(EP_LINE) + tables
}

/// Words of the far ranks outside of the rings, which have room for one.
fn far_words(room: &Shape) -> usize {
    if room.ranks > 64 { room.ranks.div_ceil(64) as usize } else { 0 }
}

/// Where kernels of `shape` find things in a heap that is laid out for `room`, which differs from it in payload and
/// experts per token only.
///
/// Slots lie where those of `room` do, so that slots of different shapes never overlap: an operation of one may be in
/// flight while another is sent.
fn parts(shape: &Shape, room: &Shape) -> Result<EpHeap> {
    let alike = Shape { payload: room.payload, topk: room.topk, ..*shape };
    let (own, heap) = (shape.heap(), room.heap());
    if alike != *room || shape.topk > room.topk || own.row_stride > heap.row_stride {
        let text = "a variant has another payload or fewer experts per token than the heap is laid out for, \
                    and is like its buffer in all else";
        return Err(Error::new(ErrorKind::Usage, "ExpertBuffer", text));
    }
    Ok(EpHeap { table_weights: own.table_weights, piece_stride: own.piece_stride, ..heap })
}

impl Heap {
    /// A heap laid out for `room`, for kernels of `shape`.
    ///
    /// # Errors
    /// `Usage` when these find no room there.
    pub(crate) fn new(memory: Memory, shape: &Shape, room: &Shape, me: u32) -> Result<Heap> {
        let parts = parts(shape, room)?;
        let table = parts.bytes.next_multiple_of(EP_LINE) as usize;
        Ok(Heap { memory, room: *room, parts, me, table, inboxes: Arc::new(Inboxes::new(room, me)) })
    }

    /// The same heap, for kernels of another shape.
    ///
    /// # Errors
    /// As [`Heap::new`].
    pub(crate) fn for_variant(&self, shape: &Shape) -> Result<Heap> {
        let parts = parts(shape, &self.room)?;
        Ok(Heap { memory: self.memory.clone(), room: self.room, parts, inboxes: self.inboxes.clone(), ..*self })
    }

    /// Where its kernels find things.
    pub(crate) fn layout(&self) -> EpHeap {
        self.parts
    }

    /// The shape that its layout has room for.
    pub(crate) fn room(&self) -> &Shape {
        &self.room
    }

    /// Bytes that are allocated.
    pub(crate) fn len(&self) -> u64 {
        self.memory.len() as u64
    }

    /// Bytes that another rank's heap has at least, if this rank has inbox `number` there; `None` for a number that it cannot
    /// have.
    pub(crate) fn least_len(&self, number: u32) -> Option<u64> {
        let granted = self.room.rank_layout && !self.room.slotted();
        let end = self.parts.inbox(number) + self.parts.inbox_stride;
        (number < self.room.ranks).then_some(if granted { self.room.heap_bytes() } else { end })
    }

    /// The inbox that `rank` is to write; `None` if the heap has none for it. `stale`: clears what an earlier process of that
    /// rank wrote there.
    pub(crate) fn take_inbox(&self, rank: u32, stale: bool) -> Result<Option<u32>> {
        let number = self.inboxes.take(rank);
        if stale {
            self.clear(rank)?;
        }
        Ok(number)
    }

    /// Its memory, for those that need it longer than the buffer.
    pub(crate) fn memory(&self) -> Memory {
        self.memory.clone()
    }

    /// It, exported for the other end to map.
    pub(crate) fn share(&self, endpoint: &Endpoint) -> Result<Shared> {
        endpoint.share(&self.memory)
    }

    /// GPU addresses of a region of the rank layout.
    pub(crate) fn region_view(&self, index: u32) -> RegionView {
        let parts = &self.parts;
        let start = self.base() + parts.regions + u64::from(index) * parts.region_stride;
        RegionView {
            rows: start,
            scales: start + parts.region_scales,
            topk_idx: start + parts.region_idx,
            topk_weights: start + parts.region_weights,
            source: start + parts.region_source,
            most_rows: u64::from(self.room.ranks) * u64::from(self.room.max_tokens),
        }
    }

    /// A few lines on the operations in flight. Reads everything that precedes the regions.
    pub(crate) fn report(&self) -> Result<String> {
        let parts = self.room.heap();
        let len = if self.room.rank_layout { parts.regions } else { parts.bytes };
        let mut bytes = vec![0; usize::try_from(len).unwrap_or(usize::MAX)];
        self.memory.copy_to(0, &mut bytes)?;
        Ok(self.room.report(&bytes, &self.inboxes.sources()))
    }

    /// Its GPU address.
    pub(crate) fn base(&self) -> u64 {
        self.memory.ptr() as u64
    }

    /// GPU address of the table of heaps.
    pub(crate) fn peers(&self) -> u64 {
        self.base() + self.table as u64
    }

    /// GPU address of the table of this rank's inboxes at all ranks.
    pub(crate) fn to(&self) -> u64 {
        self.peers() + 8 * u64::from(self.room.ranks)
    }

    /// GPU address of the table of all ranks' inboxes here.
    pub(crate) fn from(&self) -> u64 {
        self.peers() + 16 * u64::from(self.room.ranks)
    }

    /// GPU address of the rings.
    pub(crate) fn rings(&self) -> u64 {
        self.peers() + 24 * u64::from(self.room.ranks)
    }

    /// Sets the places at which kernels write for a rank, and read from it.
    pub(crate) fn set_path(&self, peer: &Peer) -> Result<()> {
        let places = match &peer.path {
            Path::Own => return self.set_near(self.me, self.base(), self.inboxes.of(self.me).unwrap_or(0)),
            Path::Mapped { heap, inbox, .. } => return self.set_near(peer.rank, heap.ptr() as u64, *inbox),
            // Once per node: what it sends arrives in `receive`, and is forwarded to its inboxes in all heaps of this node.
            Path::Far { far, .. } if self.room.tuning().node > 0 => {
                [far.receive.address(), far.send.address(), self.base() + self.inbox(peer.rank)]
            }
            Path::Host { far, .. } | Path::Far { far, .. } => [self.base(), far.send.address(), far.receive.address()],
            Path::Through { .. } => return self.clear_path(peer.rank),
        };
        self.set_places(peer.rank, places)
    }

    /// Sets them for a rank whose heap is at `base` for this GPU, and has inbox `number` for this rank.
    pub(crate) fn set_near(&self, rank: u32, base: u64, number: u32) -> Result<()> {
        self.set_places(rank, [base, base + self.parts.inbox(number), self.base() + self.inbox(rank)])
    }

    /// Kernels find a rank that is not connected in this heap.
    pub(crate) fn clear_path(&self, rank: u32) -> Result<()> {
        let base = self.base();
        self.set_places(rank, [base, base + self.inbox(self.me), base + self.inbox(rank)])
    }

    /// Offset of the inbox of `rank` here; of this rank's own if it has none.
    fn inbox(&self, rank: u32) -> u64 {
        let number = self.inboxes.of(rank).or_else(|| self.inboxes.of(self.me));
        self.parts.inbox(number.unwrap_or(0))
    }

    fn set_places(&self, rank: u32, places: [u64; 3]) -> Result<()> {
        for (table, place) in places.iter().enumerate() {
            let at = self.table + 8 * (table * self.room.ranks as usize + rank as usize);
            self.memory.fill_from(at, &place.to_le_bytes())?;
        }
        Ok(())
    }

    fn ring(&self, number: usize) -> usize {
        self.table + 24 * self.room.ranks as usize + number * size_of::<EpRing>()
    }

    /// Gives kernels the rings: for each, the addresses of its commands and of the number that were read.
    pub(crate) fn set_rings(&self, rings: &[[u64; 2]]) -> Result<()> {
        for (number, [commands, read]) in rings.iter().enumerate() {
            let last = rings.len() as u64 - 1;
            let words: Vec<u8> =
                [0, last, 0, 0, *commands, *read].iter().flat_map(|word: &u64| word.to_le_bytes()).collect();
            self.memory.fill_from(self.ring(number), &words)?;
        }
        Ok(())
    }

    /// The ranks to which the proxy sends, as bits.
    pub(crate) fn set_far(&self, ranks: &[u64]) -> Result<()> {
        let rings = proxy::lanes(self.room.ranks);
        let words = self.ring(rings);
        let far = if far_words(&self.room) > 0 { self.base() + words as u64 } else { ranks[0] };
        for (number, bits) in ranks.iter().enumerate().take(far_words(&self.room)) {
            self.memory.fill_from(words + 8 * number, &bits.to_le_bytes())?;
        }
        for number in 0..rings {
            self.memory.fill_from(self.ring(number) + offset_of!(EpRing, far), &far.to_le_bytes())?;
        }
        Ok(())
    }

    /// Masks or unmasks `rank` for kernels.
    pub(crate) fn set_mask(&self, rank: u32, masked: bool) -> Result<()> {
        self.memory.fill_from(self.parts.masks as usize + 4 * rank as usize, &u32::from(masked).to_le_bytes())
    }

    /// Sequence numbers of the last operations, while none is in flight.
    pub(crate) fn epochs(&self) -> Result<Epochs> {
        Ok(self.numbers()?[0])
    }

    fn numbers(&self) -> Result<[Epochs; 2]> {
        let mut bytes = [0; Epochs::BYTES];
        self.memory.copy_to(self.parts.state as usize, &mut bytes)?;
        Ok(Epochs::of(&bytes))
    }

    pub(crate) fn set_epochs(&self, epochs: Epochs) -> Result<()> {
        self.memory.fill_from(self.parts.state as usize, &epochs.bytes())
    }

    /// Clears what an earlier process of that rank wrote that could be taken for new data.
    pub(crate) fn clear(&self, rank: u32) -> Result<()> {
        let number = self.inboxes.of(rank);
        for span in number.iter().flat_map(|number| self.room.stale_ranges(*number)) {
            self.memory.fill_from(span.at as usize, &vec![0; span.len as usize])?;
        }
        Ok(())
    }

    /// Marks all slots between `rank` and this one as released.
    pub(crate) fn set_taken(&self, rank: u32, far: Option<&FarRank>, epochs: Epochs) -> Result<()> {
        match far {
            Some(far) => {
                far.set_taken([epochs.dispatch, epochs.combine]);
                Ok(())
            }
            None => match self.inboxes.of(rank) {
                Some(number) => self.memory.fill_from(self.parts.taken(number) as usize, &epochs.words()),
                None => Ok(()),
            },
        }
    }

    /// Never frees the memory, which kernels may still access.
    pub(crate) fn leak(&self) {
        std::mem::forget(self.memory.clone());
    }

    /// The masks as kernels read them.
    #[cfg(test)]
    pub(crate) fn masks(&self) -> Vec<bool> {
        let mut words = vec![0; 4 * self.room.ranks as usize];
        self.memory.copy_to(self.parts.masks as usize, &mut words).unwrap();
        words.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word) != 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossrail_kernels::ep::{EP_WORD_COMBINE_TAKEN, EP_WORD_DISPATCH_TAKEN, Payload, Scale, Span, Tuning};

    use crate::options::{DeviceOptions, shape};
    use crossrail::{Context, Settings};
    use crossrail_ep::{Config, Layout};
    use std::time::Duration;

    fn small() -> Shape {
        let config = Config {
            ranks: 3,
            max_tokens: 5,
            hidden: 256,
            experts: 6,
            topk: 3,
            payload: crossrail_ep::Payload::Bf16,
            layouts: vec![Layout::Expert, Layout::Rank],
            prereduce: false,
            share_node: true,
            timeout: Duration::from_secs(1),
            on_loss: crossrail_ep::OnLoss::Raise,
        };
        shape(&config, &DeviceOptions::default()).unwrap()
    }

    /// A heap in host memory, which is read and written in the same way.
    fn heap_of(shape: &Shape) -> Heap {
        let context = Context::new(Settings::default()).unwrap();
        let memory = context.alloc(usize::try_from(bytes(shape)).unwrap()).unwrap();
        Heap::new(memory, shape, shape, 0).unwrap()
    }

    fn word(heap: &Heap, source: u32, word: u32) -> u64 {
        let mut bytes = [0; 8];
        heap.memory.copy_to(heap.parts.line(source).at as usize + 8 * word as usize, &mut bytes).unwrap();
        u64::from_le_bytes(bytes)
    }

    #[test]
    fn a_rank_that_comes_late_is_brought_to_the_numbers_of_the_others() {
        let shape = small();
        let heap = heap_of(&shape);
        assert_eq!(heap.epochs().unwrap(), Epochs::default());
        let epochs = Epochs { dispatch: 7, combine: 5 }.max(Epochs { dispatch: 3, combine: 6 });
        heap.set_epochs(epochs).unwrap();
        assert_eq!(heap.epochs().unwrap(), epochs);
        heap.set_taken(1, None, epochs).unwrap();
        assert_eq!([0, 1, 2].map(|rank| word(&heap, rank, EP_WORD_DISPATCH_TAKEN)), [0, 7, 0]);
        assert_eq!([0, 1, 2].map(|rank| word(&heap, rank, EP_WORD_COMBINE_TAKEN)), [0, 6, 0]);
        let report = shape.report(&all(&heap), &heap.inboxes.sources());
        assert!(report.starts_with("state dispatch begun 7 sent 7 ended 7 combine begun 6 sent 6 ended 6"), "{report}");
    }

    fn all(heap: &Heap) -> Vec<u8> {
        let mut bytes = vec![0; heap.parts.bytes as usize];
        heap.memory.copy_to(0, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn what_an_earlier_process_said_is_forgotten_and_nothing_else() {
        let shape = small();
        let heap = heap_of(&shape);
        heap.memory.fill_from(0, &vec![0xff; heap.parts.bytes as usize]).unwrap();
        heap.clear(1).unwrap();
        let spans = shape.stale_ranges(1);
        let cleared = |at: u64| spans.iter().any(|span| (span.at..span.at + span.len).contains(&at));
        let wrong = (0..).zip(all(&heap)).find(|(at, byte)| (*byte == 0) != cleared(*at));
        assert_eq!(wrong, None);
    }

    #[test]
    fn masks_and_places_are_written_where_kernels_look() {
        let shape = small();
        let heap = heap_of(&shape);
        heap.set_mask(2, true).unwrap();
        heap.set_places(1, [0x1234_5678_9abc, 2, 3]).unwrap();
        let rings = crate::proxy::lanes(shape.ranks) as u64;
        heap.set_rings(&(0..rings).map(|ring| [4 + 2 * ring, 5 + 2 * ring]).collect::<Vec<_>>()).unwrap();
        heap.set_far(&[6]).unwrap();
        assert_eq!(heap.masks(), [false, false, true]);
        let word = |at: u64| {
            let mut word = [0; 8];
            heap.memory.copy_to((at - heap.base()) as usize, &mut word).unwrap();
            u64::from_le_bytes(word)
        };
        assert_eq!([heap.peers(), heap.to(), heap.from()].map(|table| word(table + 8)), [0x1234_5678_9abc, 2, 3]);
        let ring = |number: u64, part: usize| word(heap.rings() + number * size_of::<EpRing>() as u64 + part as u64);
        assert_eq!([1, 3].map(|number| ring(number, offset_of!(EpRing, far))), [6, 6]);
        assert_eq!([1, 3].map(|number| ring(number, offset_of!(EpRing, last))), [rings - 1; 2]);
        assert_eq!([1, 3].map(|number| ring(number, offset_of!(EpRing, commands))), [6, 10]);
        assert_eq!(heap.rings() + rings * size_of::<EpRing>() as u64, heap.base() + heap.memory.len() as u64);
    }

    /// Of more ranks than a word has bits, rings have the address of their words.
    #[test]
    fn many_far_ranks_are_words_behind_the_rings() {
        let shape = Shape { ranks: 130, experts: 260, max_tokens: 1, rank_layout: false, regions: 0, ..small() };
        let heap = heap_of(&shape);
        heap.set_rings(&[[4, 5]]).unwrap();
        heap.set_far(&[1 << 63, 5, 3]).unwrap();
        let ring = heap.rings() - heap.base();
        let mut words = [0; size_of::<EpRing>() + 24];
        heap.memory.copy_to(ring as usize, &mut words).unwrap();
        let words: Vec<u64> = words.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let set = size_of::<EpRing>() / 8;
        assert_eq!(words[offset_of!(EpRing, far) / 8], heap.rings() + size_of::<EpRing>() as u64);
        assert_eq!(words[set..], [1 << 63, 5, 3]);
        assert_eq!(ring as usize + 8 * words.len(), heap.memory.len());
    }

    #[test]
    fn inboxes_are_for_the_ranks_that_connect_and_stay_theirs() {
        let small = small();
        let shape = Shape { tuning: Tuning { inboxes: 2, ..small.tuning }, ..small };
        let heap = heap_of(&shape);
        assert_eq!(heap.len() + small.heap().inbox_stride, heap_of(&small).len());
        assert_eq!(heap.take_inbox(2, false).unwrap(), Some(1));
        assert_eq!(heap.take_inbox(1, true).unwrap(), None, "there are two, and this rank has one");
        let epochs = Epochs { dispatch: 7, combine: 5 };
        heap.set_taken(2, None, epochs).unwrap();
        heap.set_taken(1, None, epochs).unwrap();
        assert_eq!([0, 1].map(|number| word(&heap, number, EP_WORD_DISPATCH_TAKEN)), [0, 7]);
        assert_eq!([0, 1, 2].map(|rank| heap.inbox(rank)), [0, 0, 1].map(|number| heap.parts.inbox(number)));
        assert_eq!([0, 1, 3].map(|number| heap.least_len(number).is_some()), [true, true, false]);
        assert_eq!(heap.least_len(1), Some(heap.parts.inbox(2)));
        assert_eq!(heap.for_variant(&shape).unwrap().take_inbox(2, true).unwrap(), Some(1));
        assert_eq!(word(&heap, 1, EP_WORD_DISPATCH_TAKEN), 0, "of an earlier process");
        assert!(heap.report().unwrap().contains("of rank 2:"));
    }

    #[test]
    fn slots_of_variants_lie_apart() {
        let room = Shape { topk: 6, rank_layout: false, regions: 0, ..small() };
        let heap = parts(&room, &room).unwrap();
        assert_eq!(heap, room.heap());
        for (topk, scale) in [(1, Scale::F32), (3, Scale::PowerOfTwo), (6, Scale::Ue8m0)] {
            let shape = Shape { topk, payload: Payload::Fp8(scale), ..room };
            let (own, variant) = (shape.heap(), parts(&shape, &room).unwrap());
            assert_eq!(
                (variant.rows, variant.row_stride, variant.back_slot),
                (heap.rows, heap.row_stride, heap.back_slot)
            );
            assert_eq!(variant.table_stride, heap.table_stride);
            // What is in a slot is laid out as its kernels expect.
            assert_eq!((variant.table_weights, variant.piece_stride), (own.table_weights, own.piece_stride));
            assert!(2 * variant.table_weights <= variant.table_stride);
            assert!(own.row_stride <= variant.row_stride);
        }
        for shape in [Shape { max_tokens: 4, ..room }, Shape { hidden: 128, ..room }, Shape { topk: 7, ..room }] {
            let error = parts(&shape, &room).unwrap_err();
            assert!(error.kind == ErrorKind::Usage && error.detail.contains("experts per token"), "{error}");
        }
    }

    #[test]
    fn what_a_source_left_lies_inside_the_heap_and_nowhere_twice() {
        let shape = small();
        let heap = shape.heap();
        let mut spans: Vec<Span> = (0..3).flat_map(|source| shape.stale_ranges(source)).collect();
        assert_eq!(spans.len(), 3 * 9);
        spans.sort_by_key(|span| span.at);
        assert!(spans.windows(2).all(|pair| pair[0].at + pair[0].len <= pair[1].at), "{spans:?}");
        let end = spans.last().map(|span| span.at + span.len).unwrap();
        assert!(end <= heap.bytes);
        let flags = |start: u64, len: u64| spans.iter().filter(|span| (start..start + len).contains(&span.at)).count();
        let inboxes = (0..3).map(|source| heap.inbox(source) + heap.row_flags);
        assert_eq!(inboxes.map(|start| flags(start, 2 * 5 * u64::from(shape.pieces()) * 8)).sum::<usize>(), 6);
    }
}
