//! The rank layout: tensors of a dispatch, and checks of its results.

use std::cell::RefCell;
use std::rc::Rc;

use crossrail_cuda::nvrtc::Compiler;
use crossrail_cuda::{Context, Device, DeviceMemory, PinnedMemory, Stream};
use crossrail_kernels::ep::{
    EP_ANNOUNCE, EP_MARKS, EP_RANK_BLOCKS, EP_RECEIVE, EP_SEND, EpCombineArgs, EpDispatchArgs, EpHeap, Layout, Payload,
    Shape,
};

use crate::marks::Marks;
use crate::place::{LIMIT, Place, finish, places, settle, take};
use crate::routing::{Routing, rows};
use crate::timing::{Gate, Work, back_to_back, cold};
use crate::{Outcome, Step, Trial};

/// Output of all experts: this byte twice, as bf16.
const OUTPUT: u8 = 0x3f;
const ALL: u32 = EP_ANNOUNCE | EP_SEND | EP_RECEIVE;
/// One in this many received rows is compared byte by byte.
const COMPARED: usize = 61;
/// And of the sums.
const SUMMED: usize = 7;

/// How the tensors are, and what else is done.
#[derive(Clone, Copy)]
pub(crate) struct Options {
    /// Rows are given as fp8 with scales, not cast on the way.
    pub(crate) fp8_input: bool,
    /// Report row counts to the host.
    pub(crate) counted: bool,
    /// Blocks that send in a combine; 0: all send and add.
    pub(crate) split: u32,
    /// KiB of rows in flight; 0 for the default.
    pub(crate) queue: u32,
    /// Phases are launches of their own.
    pub(crate) apart: bool,
    /// Print the marks that the blocks of one extra iteration record.
    pub(crate) marks: bool,
}

struct Rank {
    place: Place,
    counts: DeviceMemory,
    offsets: DeviceMemory,
    word: PinnedMemory,
    y: DeviceMemory,
    marks: DeviceMemory,
}

pub(crate) struct Rig {
    shape: Shape,
    options: Options,
    ranks: Rc<Vec<Rank>>,
    gate: Rc<Gate>,
    /// The last that was made.
    batch: Rc<RefCell<Option<Rc<Batch>>>>,
}

/// One rank's tokens on its GPU.
struct Tokens {
    routing: Routing,
    /// The rows as they are given.
    bytes: Vec<u8>,
    x: DeviceMemory,
    scales: DeviceMemory,
    idx: DeviceMemory,
    weights: DeviceMemory,
    out: DeviceMemory,
}

/// All ranks' tokens.
struct Batch {
    tokens: u32,
    ranks: Vec<Tokens>,
}

impl Rig {
    pub(crate) fn new(devices: &[Device], compiler: &Compiler, shape: Shape, options: Options) -> Outcome<Rig> {
        let places = places(devices, compiler, &shape, Layout::Rank)?;
        let gate = Gate::new(places.first().ok_or("there is no GPU")?.stream.context())?;
        let ranks = places.into_iter().map(|place| rank(place, &shape)).collect::<Outcome<Vec<_>>>()?;
        Ok(Rig { shape, options, ranks: Rc::new(ranks), gate: Rc::new(gate), batch: Rc::default() })
    }

    /// The same ranks, otherwise.
    pub(crate) fn with(&self, options: Options) -> Rig {
        Rig {
            shape: self.shape,
            options,
            ranks: Rc::clone(&self.ranks),
            gate: Rc::clone(&self.gate),
            batch: Rc::clone(&self.batch),
        }
    }

    fn input_is_fp8(&self) -> bool {
        self.options.fp8_input && self.shape.payload != Payload::Bf16
    }

    /// Random tokens for each rank.
    fn batch(&self, tokens: u32) -> Outcome<Rc<Batch>> {
        let known = self.batch.borrow().clone().filter(|batch| batch.tokens == tokens);
        if let Some(batch) = known {
            return Ok(batch);
        }
        let batch = Rc::new(self.new_batch(tokens)?);
        *self.batch.borrow_mut() = Some(Rc::clone(&batch));
        Ok(batch)
    }

    fn new_batch(&self, tokens: u32) -> Outcome<Batch> {
        let hidden = self.shape.hidden;
        let ranks = self.ranks.iter().zip(0..).map(|(rank, number)| {
            let routing = Routing::random(number, tokens, self.shape.topk, self.shape.experts);
            let wide = rows(number, tokens, hidden);
            // Any bytes are fp8; here without the highest exponents, and so without NaN.
            let narrow = || wide.chunks_exact(2).map(|pair| pair[0] & 0xb7).collect();
            let bytes: Vec<u8> = if self.input_is_fp8() { narrow() } else { wide.clone() };
            Ok(Tokens {
                x: rank.place.there(&bytes)?,
                scales: rank.place.there(&wide[..(tokens * hidden / 128 * 4) as usize])?,
                idx: rank.place.there(&routing.idx_bytes())?,
                weights: rank.place.there(&routing.weight_bytes())?,
                out: DeviceMemory::new(rank.place.stream.context(), wide.len().max(16))?,
                bytes,
                routing,
            })
        });
        Ok(Batch { tokens, ranks: ranks.collect::<Outcome<_>>()? })
    }

    fn dispatch(&self, batch: &Batch, number: usize, launch: Launch) -> Outcome<()> {
        let (rank, own, fp8) = (&self.ranks[number], &batch.ranks[number], self.input_is_fp8());
        let row = if fp8 { self.shape.hidden } else { 2 * self.shape.hidden };
        let fresh = |address: u64| if launch.cached { 0 } else { address };
        let args = EpDispatchArgs {
            common: rank.place.common(Layout::Rank, launch.tokens, launch.phases),
            x: own.x.address(),
            x_stride: u64::from(row),
            x_scales: own.scales.address(),
            x_scale_strides: [u64::from(self.shape.hidden / 128 * 4), 4],
            topk_idx: fresh(own.idx.address()),
            topk_weights: fresh(own.weights.address()),
            out_counts: rank.counts.address(),
            out_offsets: rank.offsets.address(),
            count_word: if self.options.counted { rank.word.address() } else { 0 },
            marks: if launch.marked { rank.marks.address() } else { 0 },
            queue: self.options.queue,
            expert_alignment: 1,
            cached: launch.cached.into(),
            x_fp8: fp8.into(),
            idx_bytes: 8,
            ..EpDispatchArgs::ZERO
        };
        // SAFETY: all memory lives as long as the rig and the batch, which are synchronized before they are dropped.
        unsafe { rank.place.kernels.dispatch_rank(&rank.place.stream, &args, launch.blocks, true)? };
        Ok(())
    }

    fn combine(&self, batch: &Batch, number: usize, launch: Launch) -> Outcome<()> {
        let (rank, own) = (&self.ranks[number], &batch.ranks[number]);
        let row = u64::from(self.shape.hidden) * 2;
        let args = EpCombineArgs {
            common: rank.place.common(Layout::Rank, launch.tokens, launch.phases),
            y: rank.y.address(),
            y_stride: row,
            out: own.out.address(),
            out_stride: row,
            marks: if launch.marked { rank.marks.address() } else { 0 },
            senders: self.options.split,
            queue: self.options.queue,
            ..EpCombineArgs::ZERO
        };
        // SAFETY: as above.
        unsafe { rank.place.kernels.combine_rank(&rank.place.stream, &args, launch.blocks, true)? };
        Ok(())
    }

    fn step(&self, batch: &Batch, number: usize, step: &One, launch: Launch) -> Outcome<()> {
        if step.combines { self.combine(batch, number, launch) } else { self.dispatch(batch, number, launch) }
    }

    /// Runs each step once more and returns the marks that its blocks recorded, by step and rank.
    fn noted(&self, run: &Run) -> Outcome<Vec<Marks>> {
        let mut noted = Vec::new();
        for step in run.all {
            settle()?;
            for (number, rank) in self.ranks.iter().enumerate() {
                // SAFETY: the area is the rank's, for this alone.
                unsafe { rank.place.stream.fill(rank.marks.address(), 0, rank.marks.len())? };
                if step.begins() {
                    run.meet(number)?;
                }
                let launch = Launch { marked: true, ..Launch::of(step, run.batch.tokens, run.blocks) };
                self.step(run.batch, number, step, launch)?;
            }
            run.finish()?;
            let mut marks = Marks::new(step.name);
            for rank in self.ranks.iter() {
                let bytes = take(&rank.place.stream, rank.marks.address(), rank.marks.len())?;
                marks.add(&bytes[..run.blocks as usize * EP_MARKS as usize * 8]);
            }
            noted.push(marks);
        }
        Ok(noted)
    }

    /// Runs each step once and checks its results: offsets, experts, rows (those that are not cast), sums.
    fn verify(&self, batch: &Batch, blocks: u32) -> Outcome<()> {
        settle()?;
        for number in 0..self.ranks.len() {
            for step in &WHOLE {
                self.step(batch, number, step, Launch::of(step, batch.tokens, blocks))?;
            }
        }
        finish(self.ranks.iter().map(|rank| &rank.place))?;
        for number in 0..self.ranks.len() {
            self.verify_rows(batch, number)?;
            self.verify_sums(batch, number)?;
        }
        Ok(())
    }

    /// Whether a token of a rank goes to `rank`.
    fn goes_to(&self, ids: &[i64], rank: usize) -> bool {
        ids.iter().any(|id| *id as usize / self.shape.local_experts() as usize == rank)
    }

    /// The rows that came to a rank, in their order.
    fn verify_rows(&self, batch: &Batch, number: usize) -> Outcome<()> {
        let (rank, heap, topk): (_, EpHeap, _) = (&self.ranks[number], self.shape.heap(), self.shape.topk as usize);
        let local = i64::from(self.shape.local_experts());
        let part =
            |part: u64, bytes: usize| take(&rank.place.stream, rank.place.heap.address() + heap.regions + part, bytes);
        let mut expected = Vec::new();
        for (from, tokens) in batch.ranks.iter().enumerate() {
            let all = tokens.routing.idx.chunks(topk).enumerate();
            expected.extend(all.filter(|(_, ids)| self.goes_to(ids, number)).map(|(token, ids)| (from, token, ids)));
        }
        let offsets = take(&rank.place.stream, rank.offsets.address(), rank.offsets.len())?;
        let last = i64::from_le_bytes(offsets.as_chunks::<8>().0[self.ranks.len()]);
        if last as usize != expected.len() {
            return Err(format!("rank {number}: {last} rows, not {}", expected.len()).into());
        }
        let idx = part(heap.region_idx, expected.len() * topk * 8)?;
        let mut ids = idx.as_chunks::<8>().0.iter().map(|id| i64::from_le_bytes(*id));
        for (row, (from, token, chosen)) in expected.iter().enumerate() {
            let here = chosen.iter().map(|id| if id / local == number as i64 { id % local } else { -1 });
            if !here.eq(ids.by_ref().take(topk)) {
                return Err(format!("rank {number}, row {row} (token {token} of rank {from}): wrong experts").into());
            }
            let bytes = self.shape.row_bytes() as usize;
            let as_is = self.input_is_fp8() || self.shape.payload == Payload::Bf16;
            if !as_is || row % COMPARED != 0 {
                continue;
            }
            let sent = &batch.ranks[*from].bytes[token * bytes..][..bytes];
            if part((row * bytes) as u64, bytes)? != sent {
                return Err(format!("rank {number}, row {row} (token {token} of rank {from}): wrong bytes").into());
            }
        }
        Ok(())
    }

    /// All experts give the same, so a token's sum is that times its ranks.
    fn verify_sums(&self, batch: &Batch, number: usize) -> Outcome<()> {
        let (own, hidden) = (&batch.ranks[number], self.shape.hidden as usize);
        let out = take(&self.ranks[number].place.stream, own.out.address(), batch.tokens as usize * hidden * 2)?;
        let value = f32::from_bits(u32::from_le_bytes([0, 0, OUTPUT, OUTPUT]));
        let ids = own.routing.idx.chunks(self.shape.topk as usize);
        for (token, (row, ids)) in out.chunks_exact(2 * hidden).zip(ids).enumerate().step_by(SUMMED) {
            let ranks = (0..self.ranks.len()).filter(|rank| self.goes_to(ids, *rank)).count();
            let expected = ranks as f32 * value;
            let wrong = row.chunks_exact(2).position(|bits| {
                let got = f32::from_bits(u32::from_le_bytes([0, 0, bits[0], bits[1]]));
                (got - expected).abs().partial_cmp(&(expected / 128.0)) != Some(std::cmp::Ordering::Less)
            });
            if let Some(at) = wrong {
                return Err(format!("rank {number}, token {token}: element {at} is not near {expected}").into());
            }
        }
        Ok(())
    }

    /// Rows that leave a rank, on average.
    fn rows_sent(&self, batch: &Batch) -> u64 {
        let topk = self.shape.topk as usize;
        let mut rows = 0;
        for (from, tokens) in batch.ranks.iter().enumerate() {
            let others = (0..self.ranks.len()).filter(|rank| *rank != from);
            rows += others
                .map(|to| tokens.routing.idx.chunks(topk).filter(|ids| self.goes_to(ids, to)).count())
                .sum::<usize>();
        }
        (rows / self.ranks.len()) as u64
    }
}

/// One launch.
#[derive(Clone, Copy)]
struct Launch {
    tokens: u32,
    blocks: u32,
    cached: bool,
    phases: u32,
    marked: bool,
}

impl Launch {
    fn of(step: &One, tokens: u32, blocks: u32) -> Launch {
        Launch { tokens, blocks, cached: step.cached, phases: step.phases, marked: false }
    }
}

/// What is timed by itself.
struct One {
    name: &'static str,
    combines: bool,
    cached: bool,
    phases: u32,
}

impl One {
    /// Whether it is the first phase of an operation.
    fn begins(&self) -> bool {
        self.phases & if self.combines { EP_SEND } else { EP_ANNOUNCE } != 0
    }
}

const WHOLE: [One; 3] = [
    One { name: "dispatch", combines: false, cached: false, phases: ALL },
    One { name: "dispatch cached", combines: false, cached: true, phases: ALL },
    One { name: "combine", combines: true, cached: false, phases: EP_SEND | EP_RECEIVE },
];
const APART: [One; 5] = [
    One { name: "announce", combines: false, cached: false, phases: EP_ANNOUNCE },
    One { name: "dispatch send", combines: false, cached: false, phases: EP_SEND },
    One { name: "dispatch receive", combines: false, cached: false, phases: EP_RECEIVE },
    One { name: "combine send", combines: true, cached: false, phases: EP_SEND },
    One { name: "combine receive", combines: true, cached: false, phases: EP_RECEIVE },
];

impl Trial for Rig {
    fn context(&self) -> &Context {
        self.ranks[0].place.stream.context()
    }

    fn most_blocks(&self) -> u32 {
        self.ranks[0].place.kernels.most_blocks()
    }

    fn measure(&self, tokens: u32, blocks: u32, iters: usize) -> Outcome<Vec<Step>> {
        let batch = self.batch(tokens)?;
        let rows = self.rows_sent(&batch);
        let wide = u64::from(2 * self.shape.hidden);
        let sent = u64::from(self.shape.row_bytes() + self.shape.scale_bytes());
        let details = u64::from(self.shape.topk) * 12 + 4;
        self.verify(&batch, blocks)?;
        let all: &[One] = if self.options.apart { &APART } else { &WHOLE };
        let run = Run { rig: self, batch: &batch, blocks, all };
        let mut steps = cold(&run, &self.gate, iters)?;
        for (step, one) in steps.iter_mut().zip(all).filter(|(_, one)| one.phases & EP_SEND != 0) {
            let row = if one.combines { wide } else { sent };
            let fresh = if one.combines || one.cached { 0 } else { details };
            step.wire_bytes = Some(rows * (row + fresh));
        }
        steps.push(Step::new("all, back to back", vec![back_to_back(&run, &self.gate, iters)?]));
        if self.options.marks {
            self.noted(&run)?.iter().for_each(Marks::print);
        }
        Ok(steps)
    }

    fn recover(&self) -> Outcome<()> {
        self.ranks.iter().try_for_each(|rank| rank.place.clear())
    }
}

/// What is timed.
struct Run<'a> {
    rig: &'a Rig,
    batch: &'a Batch,
    blocks: u32,
    all: &'a [One],
}

impl Work for Run<'_> {
    fn streams(&self) -> Vec<&Stream> {
        self.rig.ranks.iter().map(|rank| &rank.place.stream).collect()
    }

    fn finish(&self) -> Outcome<()> {
        finish(self.rig.ranks.iter().map(|rank| &rank.place))
    }

    fn steps(&self) -> Vec<&'static str> {
        self.all.iter().map(|one| one.name).collect()
    }

    fn make_cold(&self, rank: usize) -> Outcome<()> {
        self.rig.ranks[rank].place.make_cold()
    }

    fn meet(&self, rank: usize) -> Outcome<()> {
        self.rig.dispatch(self.batch, rank, Launch::of(&WHOLE[0], 0, self.blocks))
    }

    fn step(&self, rank: usize, step: usize) -> Outcome<()> {
        let one = &self.all[step];
        self.rig.step(self.batch, rank, one, Launch::of(one, self.batch.tokens, self.blocks))
    }
}

fn rank(place: Place, shape: &Shape) -> Outcome<Rank> {
    let rows = (shape.ranks * shape.max_tokens) as usize;
    let context = place.stream.context();
    let rank = Rank {
        counts: DeviceMemory::new(context, 4 * shape.local_experts() as usize)?,
        offsets: DeviceMemory::new(context, 8 * (shape.ranks as usize + 1))?,
        word: PinnedMemory::new(context, 8)?,
        y: DeviceMemory::new(context, rows * shape.hidden as usize * 2)?,
        marks: DeviceMemory::new(context, EP_RANK_BLOCKS as usize * EP_MARKS as usize * 8)?,
        place,
    };
    // SAFETY: the memory is new and nobody uses it yet.
    unsafe { rank.place.stream.fill(rank.y.address(), OUTPUT, rank.y.len())? };
    rank.place.stream.wait(LIMIT)?;
    Ok(rank)
}
