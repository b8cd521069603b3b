//! Ranks whose heaps this GPU does not reach: kernels write into mirrors of their heaps, and the host carries what they
//! wrote to the heaps themselves, rows before the words and flags that say that they are there.
//!
//! A mirror holds all that this rank has ever written to that heap, so more may be carried than was written now.
#![allow(unsafe_code)]

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossrail::{Memory, Op};
use crossrail_cuda::{Context, Event, PinnedMemory, Stream};
use crossrail_ep::Fault;
use crossrail_kernels::ep::{
    EP_ANNOUNCE, EP_DEPTH, EP_LINE, EP_NOWHERE, EP_RECEIVE, EP_SEND, EP_WEIGHTED, EP_WORD_PLACE, EpCombineArgs,
    EpDispatchArgs, EpHeap, Shape,
};
use crossrail_types::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use crate::buffer::{Inner, State};
use crate::calls::{Args, Launch};
use crate::heap::{Epochs, Span, set_taken};
use crate::order::Kind;
use crate::peer::Far;

/// Reads GPU memory that kernels are done with.
pub(crate) struct Reader {
    context: Context,
    parts: Mutex<Option<Parts>>,
}

struct Parts {
    stream: Stream,
    done: Event,
    area: PinnedMemory,
}

/// Bytes that are read at once.
const AREA: usize = 1 << 18;
const READ_LIMIT: Duration = Duration::from_secs(10);

impl Reader {
    /// Makes nothing before the first read.
    pub(crate) fn new(context: &Context) -> Reader {
        Reader { context: context.clone(), parts: Mutex::default() }
    }

    pub(crate) fn read(&self, address: u64, bytes: &mut [u8]) -> Result<()> {
        let mut kept = self.parts.lock();
        let parts = match kept.take() {
            Some(parts) => parts,
            None => Parts {
                stream: Stream::urgent(&self.context)?,
                done: Event::new(&self.context)?,
                area: PinnedMemory::new(&self.context, AREA)?,
            },
        };
        // A read that does not end in time leaves nothing behind that could be written later.
        for (part, at) in bytes.chunks_mut(AREA).zip((address..).step_by(AREA)) {
            // SAFETY: the area has that many bytes and no copy uses it; kernels are done with the source.
            unsafe { parts.stream.copy_out(parts.area.as_ptr(), at, part.len())? };
            parts.done.record(&parts.stream)?;
            parts.done.wait(READ_LIMIT)?;
            // SAFETY: as above; the copy is done.
            unsafe { std::ptr::copy_nonoverlapping(parts.area.as_ptr(), part.as_mut_ptr(), part.len()) };
        }
        *kept = Some(parts);
        Ok(())
    }

    fn numbers(&self, address: u64, count: usize) -> Result<Vec<u32>> {
        let mut bytes = vec![0; 4 * count];
        self.read(address, &mut bytes)?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect())
    }
}

/// What is carried to one rank after a phase: rows, what says that they are there, and last the line of words.
#[derive(Debug, Default)]
struct Load {
    rows: Vec<Span>,
    told: Vec<Span>,
}

impl Inner {
    /// Puts the phases in one after the other; each is carried before the next.
    pub(crate) fn run_far(&self, state: &mut State, stream: &Stream, launch: &Launch, phases: u32) -> Result<()> {
        // Kernels that unpack what comes from other nodes want some multiprocessors, while ours wait for it.
        let blocks = self.blocks.min(self.kernels.most_blocks() / 2).max(1);
        for phase in [EP_ANNOUNCE, EP_SEND, EP_RECEIVE] {
            if phases & phase == 0 {
                continue;
            }
            if phase == EP_SEND
                && let Args::CombineExpert(args) = &launch.args
            {
                self.carry_weights(state, stream, args)?;
            }
            self.launch(stream, &launch.args, phase, blocks)?;
            self.wait_for(stream)?;
            self.drain(state);
            for far in self.far(state) {
                let load = match (&launch.args, phase) {
                    (Args::DispatchRank(args), EP_ANNOUNCE) => self.announced(args)?,
                    (Args::DispatchExpert(args), EP_SEND) => self.expert_rows(&far, args)?,
                    (Args::DispatchRank(args), EP_SEND) => self.rank_rows(&far, args)?,
                    (Args::CombineExpert(args), EP_SEND) => self.expert_back(&far, args)?,
                    (Args::CombineRank(args), EP_SEND) => self.rank_back(&far, args)?,
                    _ => Load::default(),
                };
                self.carry(state, &far, &load, launch.args.kind());
            }
        }
        Ok(())
    }

    /// What was sent between `rank` and this one so far counts as taken: here, and there, if it is out of reach, with the
    /// next line of words that is carried from its mirror.
    pub(crate) fn set_taken(&self, rank: u32, mirror: Option<&Memory>, epochs: Epochs) -> Result<()> {
        set_taken(&self.heap.memory, &self.heap.parts, rank, epochs)?;
        match mirror {
            Some(mirror) => set_taken(mirror, &self.heap.parts, self.me, epochs),
            None => Ok(()),
        }
    }

    /// Ranks out of reach that are not masked.
    fn far(&self, state: &State) -> Vec<Far> {
        let open = state.peers.iter().flatten().filter(|peer| !peer.masked);
        open.filter_map(|peer| peer.far().cloned()).collect()
    }

    fn wait_for(&self, stream: &Stream) -> Result<()> {
        let limit = self.config.timeout.saturating_mul(2) + self.context.settings().timeout;
        self.events.record(stream, false)?.synchronize(limit)
    }

    /// Carries a load. A rank that it cannot be carried to is lost.
    fn carry(&self, state: &mut State, far: &Far, load: &Load, kind: Kind) {
        let line = [self.heap.line(self.me)];
        let parts = [&load.rows[..], &load.told, &line];
        let carried = parts.into_iter().try_for_each(|spans| self.write(far, spans));
        match carried {
            Ok(()) => {
                let rows: u64 = load.rows.iter().map(|span| span.len).sum();
                self.network.fetch_add(rows, Ordering::Relaxed);
            }
            Err(error) => self.lose(state, far.rank, kind, &error),
        }
    }

    /// Writes these parts of the mirror to the heap, all before it returns.
    fn write(&self, far: &Far, spans: &[Span]) -> Result<()> {
        let mut ops = Vec::with_capacity(spans.len());
        for span in spans.iter().filter(|span| span.len > 0) {
            let (at, end) = (span.at as usize, (span.at + span.len) as usize);
            let local = far.mirror.slice(at..end)?;
            ops.push(Op::Write { local, remote: far.key.clone(), offset: span.at, imm: None });
        }
        if ops.is_empty() {
            return Ok(());
        }
        let deadline = Instant::now() + self.config.timeout;
        let request = far.endpoint.batch(ops)?;
        match request.wait(Some(deadline.saturating_duration_since(Instant::now()))) {
            Ok(_) => Ok(()),
            Err(error) => {
                request.cancel();
                Err(error)
            }
        }
    }

    fn lose(&self, state: &mut State, rank: u32, kind: Kind, error: &Error) {
        self.tell_mask(rank);
        let Some(peer) = state.peers[rank as usize].as_mut().filter(|peer| !peer.masked) else { return };
        peer.masked = true;
        let dead = matches!(error.kind, ErrorKind::PeerDead | ErrorKind::Closed);
        let why = if dead { "its process is gone".to_owned() } else { error.to_string() };
        let number = self.heap.sent().map_or(0, |epochs| match kind {
            Kind::Dispatch => epochs.dispatch,
            Kind::Combine => epochs.combine,
        });
        let fault =
            Fault { rank, operation: kind.name(), number, stage: "it to take our rows", why, left: state.active() };
        self.meeting.warn(&fault);
        state.faults.push(fault);
    }

    /// This rank's slot of an operation in another's heap.
    fn slot(&self, epoch: u64) -> u64 {
        epoch % u64::from(EP_DEPTH) * u64::from(self.shape.ranks) + u64::from(self.me)
    }

    fn announced(&self, args: &EpDispatchArgs) -> Result<Load> {
        let heap = &args.common.heap;
        let slot = self.slot(self.heap.begun()?.dispatch);
        let told = vec![Span { at: heap.announces + slot * heap.announce_stride, len: heap.announce_stride }];
        Ok(Load { rows: Vec::new(), told })
    }

    fn expert_rows(&self, far: &Far, args: &EpDispatchArgs) -> Result<Load> {
        let (heap, tokens) = (&args.common.heap, u64::from(args.common.tokens));
        let slot = self.slot(self.heap.sent()?.dispatch);
        let table = heap.tables + slot * heap.table_stride;
        let topk = self.config.topk;
        let entries =
            self.reader.numbers(far.mirror.ptr() as u64 + table + heap.table_entries, tokens as usize * topk)?;
        let here = entries.chunks_exact(topk).map(|entries| entries.iter().any(|entry| *entry != 0));
        let first = slot * u64::from(self.shape.max_tokens);
        let rows = runs(here)
            .into_iter()
            .map(|run| Span { at: heap.rows + (first + run.at) * heap.row_stride, len: run.len * heap.row_stride })
            .collect();
        let flags = u64::from(self.shape.pieces()) * 8;
        let told = vec![
            Span { at: table, len: heap.table_stride },
            Span { at: heap.row_flags + first * flags, len: tokens * flags },
        ];
        Ok(Load { rows, told })
    }

    fn rank_rows(&self, far: &Far, args: &EpDispatchArgs) -> Result<Load> {
        let (common, ranks) = (&args.common, self.shape.ranks as usize);
        let heap = &common.heap;
        let placed = self.reader.numbers(common.handle + common.parts.sent_rows, common.tokens as usize * ranks)?;
        let count =
            placed.iter().skip(far.rank as usize).step_by(ranks).filter(|row| **row != EP_NOWHERE).count() as u64;
        // Rows are numbered from this rank's first there.
        let first = self.reader.numbers(common.handle + common.parts.places + 4 * u64::from(far.rank), 1)?[0];
        let parity = self.heap.sent()?.dispatch % u64::from(EP_DEPTH);
        let theirs = parity * ranks as u64 + u64::from(far.rank);
        // An announcement begins with the number of the region.
        let region = self.reader.numbers(self.heap.base() + heap.announces + theirs * heap.announce_stride, 1)?[0];
        let rows = match region < self.shape.regions {
            true => region_rows(heap, &self.shape, region, u64::from(first), count).to_vec(),
            // It did not come, and has got nothing.
            false => Vec::new(),
        };
        Ok(Load { rows, told: vec![place_words(heap, self.me)] })
    }

    fn expert_back(&self, far: &Far, args: &EpCombineArgs) -> Result<Load> {
        let common = &args.common;
        let tokens = self.tokens_of(far, args)?;
        let present = common.parts.present + u64::from(far.rank) * u64::from(common.max_tokens);
        let mut counts = vec![0; tokens as usize];
        self.reader.read(common.handle + present, &mut counts)?;
        let each = if self.shape.prereduce { 1 } else { self.shape.most_local() };
        let here = counts.iter().flat_map(|count| (0..each).map(move |which| which < u32::from(*count).min(each)));
        self.back(args, runs(here), tokens * u64::from(each))
    }

    fn rank_back(&self, far: &Far, args: &EpCombineArgs) -> Result<Load> {
        let common = &args.common;
        let offsets = self.reader.numbers(common.handle + common.parts.offsets + 4 * u64::from(far.rank), 2)?;
        let count = offsets[1].saturating_sub(offsets[0]) as usize;
        let source = common.handle + common.parts.source + 4 * u64::from(offsets[0]);
        let tokens = self.tokens_of(far, args)?;
        let mut here = vec![false; tokens as usize];
        for token in self.reader.numbers(source, count)? {
            if let Some(here) = here.get_mut(token as usize) {
                *here = true;
            }
        }
        let mut load = self.back(args, runs(here.into_iter()), tokens)?;
        if args.y_weights != 0 {
            let heap = &common.heap;
            let row = u64::from(self.shape.topk) * 4;
            let slot = self.slot(self.heap.sent()?.combine) * u64::from(common.max_tokens);
            load.rows.push(Span { at: heap.back_topk + slot * row, len: tokens * row });
        }
        Ok(load)
    }

    /// Tokens of that rank in the dispatch.
    fn tokens_of(&self, far: &Far, args: &EpCombineArgs) -> Result<u64> {
        let common = &args.common;
        let tokens = self.reader.numbers(common.handle + common.parts.tokens + 4 * u64::from(far.rank), 1)?[0];
        Ok(u64::from(tokens.min(common.max_tokens)))
    }

    /// These rows of a combine's slot, of which `all` have flags.
    fn back(&self, args: &EpCombineArgs, runs: Vec<Span>, all: u64) -> Result<Load> {
        let heap = &args.common.heap;
        let slot = self.slot(self.heap.sent()?.combine);
        let start = heap.back + slot * heap.back_slot;
        let rows = runs
            .into_iter()
            .map(|run| Span { at: start + run.at * heap.back_stride, len: run.len * heap.back_stride })
            .collect();
        let flags = u64::from(self.shape.pieces()) * 8;
        let told = vec![Span { at: heap.back_flags + slot * heap.back_flags_slot, len: all * flags }];
        Ok(Load { rows, told })
    }

    /// Weights that come with a combine are waited for before rows can be sent back, so they go before that.
    fn carry_weights(&self, state: &mut State, stream: &Stream, args: &EpCombineArgs) -> Result<()> {
        let common = &args.common;
        if !self.shape.prereduce || self.is_weighted(args)? {
            return Ok(());
        }
        let epoch = self.heap.begun()?.combine + 1;
        let heap = &common.heap;
        let count = common.tokens as usize * self.shape.topk as usize;
        // What is before it in the stream may write the weights.
        self.wait_for(stream)?;
        let weights = match args.topk_weights {
            0 => vec![1f32.to_bits(); count],
            given => self.reader.numbers(given, count)?,
        };
        let words = weight_words(epoch, &weights);
        let span =
            Span { at: heap.back_weights + self.slot(epoch) * heap.back_weights_stride, len: words.len() as u64 };
        for far in &self.far(state) {
            far.mirror.fill_from(span.at as usize, &words)?;
            let load = Load { rows: Vec::new(), told: vec![span] };
            self.carry(state, far, &load, Kind::Combine);
        }
        Ok(())
    }

    /// Whether weights went with the dispatch.
    fn is_weighted(&self, args: &EpCombineArgs) -> Result<bool> {
        let header = args.common.handle + args.common.parts.header;
        // Number, tokens, flags.
        Ok(self.reader.numbers(header, 4)?[3] & EP_WEIGHTED != 0)
    }
}

/// Weights as the kernels have them: the bits of an f32, and above them the number of the operation.
fn weight_words(epoch: u64, weights: &[u32]) -> Vec<u8> {
    weights.iter().flat_map(|bits| (epoch << 32 | u64::from(*bits)).to_le_bytes()).collect()
}

/// `count` rows from `first` on, in all parts of a region.
fn region_rows(heap: &EpHeap, shape: &Shape, region: u32, first: u64, count: u64) -> [Span; 5] {
    let start = heap.regions + u64::from(region) * heap.region_stride;
    let topk = u64::from(shape.topk);
    let parts = [
        (0, u64::from(shape.row_bytes())),
        (heap.region_scales, u64::from(shape.scale_bytes())),
        (heap.region_idx, 8 * topk),
        (heap.region_weights, 4 * topk),
        (heap.region_source, 4),
    ];
    parts.map(|(at, len)| Span { at: start + at + first * len, len: count * len })
}

/// Where a dispatch's rows begin, of both parities: the receiver looks once it has the word that all rows are there,
/// which comes with the line after this.
fn place_words(heap: &EpHeap, source: u32) -> Span {
    let at = heap.words + u64::from(source) * EP_LINE + 8 * u64::from(EP_WORD_PLACE);
    Span { at, len: 8 * u64::from(EP_DEPTH) }
}

/// Runs of neighbours that are wanted.
fn runs(wanted: impl Iterator<Item = bool>) -> Vec<Span> {
    let mut runs: Vec<Span> = Vec::new();
    for (at, _) in wanted.enumerate().filter(|(_, wanted)| *wanted) {
        let at = at as u64;
        match runs.last_mut() {
            Some(run) if run.at + run.len == at => run.len += 1,
            _ => runs.push(Span { at, len: 1 }),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use crossrail_ep::{Config, Layout, Payload, Scale};
    use crossrail_kernels::ep::EP_WORD_SENT;

    use super::*;
    use crate::options;

    #[test]
    fn neighbours_are_carried_together() {
        let of = |text: &str| runs(text.chars().map(|c| c == 'x'));
        let span = |at, len| Span { at, len };
        assert_eq!(of(""), []);
        assert_eq!(of("..."), []);
        assert_eq!(of("xx.x...xxx"), [span(0, 2), span(3, 1), span(7, 3)]);
    }

    fn shape() -> Shape {
        let config = Config {
            ranks: 4,
            max_tokens: 10,
            hidden: 256,
            experts: 8,
            topk: 3,
            payload: Payload::Fp8(Scale::F32),
            layouts: vec![Layout::Rank],
            prereduce: false,
            share_node: true,
            timeout: Duration::from_secs(1),
        };
        options::shape(&config, &options::DeviceOptions::default()).unwrap()
    }

    #[test]
    fn where_rows_begin_is_carried_before_the_word_that_they_are_there() {
        let heap = shape().heap();
        let place = place_words(&heap, 2);
        // Inside the line of words of that source, which is carried last, and behind the words of `sent`.
        let line = heap.words + 2 * EP_LINE;
        assert_eq!((place.at - line, place.len), (11 * 8, 16));
        assert!(place.at + place.len <= line + EP_LINE);
        const { assert!(EP_WORD_SENT + EP_DEPTH <= EP_WORD_PLACE) };
    }

    #[test]
    fn rows_are_carried_from_the_first_of_this_ranks() {
        let (shape, heap) = (shape(), shape().heap());
        let spans = region_rows(&heap, &shape, 1, 7, 5);
        let lens = [256, 2 * 4, 8 * 3, 4 * 3, 4];
        assert_eq!(spans.map(|span| span.len), lens.map(|len| 5 * len));
        let parts = [0, heap.region_scales, heap.region_idx, heap.region_weights, heap.region_source];
        for ((span, part), len) in spans.into_iter().zip(parts).zip(lens) {
            assert_eq!(span.at, heap.regions + heap.region_stride + part + 7 * len);
            assert!(span.at + span.len <= heap.bytes);
        }
    }

    #[test]
    fn weights_are_written_as_the_kernels_read_them() {
        let words = weight_words(0x0102, &[0x3f80_0000, 7]);
        assert_eq!(words, [0, 0, 0x80, 0x3f, 2, 1, 0, 0, 7, 0, 0, 0, 2, 1, 0, 0]);
    }
}
