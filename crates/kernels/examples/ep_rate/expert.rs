//! The expert layout: tensors of a dispatch, and checks of its results.

use crossrail_cuda::nvrtc::Compiler;
use crossrail_cuda::{Context, Device, DeviceMemory, Stream};
use crossrail_kernels::ep::{
    EP_MARKS, EP_RECEIVE, EP_SEND, EP_WIRE_FP8, EP_WIRE_LOGFMT10, EpCombineArgs, EpDispatchArgs, Layout, Payload, Shape,
};

use crate::marks::Marks;
use crate::place::{LIMIT, Place, finish, places, settle, take, words};
use crate::routing::{Routing, rows};
use crate::timing::{Gate, Work, back_to_back, cold};
use crate::{Outcome, Step, Trial};

/// Output of all experts: this byte twice, as bf16.
const OUTPUT: u8 = 0x3f;
const BOTH: u32 = EP_SEND | EP_RECEIVE;

/// How the tensors are.
#[derive(Clone, Copy)]
pub(crate) struct Options {
    /// Weights are given to combine, not to dispatch.
    pub(crate) late_weights: bool,
    /// Scales lie by block and then row, as DeepEP has them.
    pub(crate) column_scales: bool,
    /// Sending and receiving are launches of their own.
    pub(crate) apart: bool,
    /// Print the marks that the blocks of one iteration record.
    pub(crate) marks: bool,
    /// Also time events and an empty launch.
    pub(crate) floor: bool,
    /// What a combine carries: EP_WIRE_.
    pub(crate) wire: u32,
}

/// One launch. With 0 tokens it is a barrier of all ranks.
#[derive(Clone, Copy)]
struct Launch {
    tokens: u32,
    blocks: u32,
    phases: u32,
    marked: bool,
}

/// One rank's GPU.
struct Rank {
    place: Place,
    out_x: DeviceMemory,
    out_scales: DeviceMemory,
    counts: DeviceMemory,
    ranges: DeviceMemory,
    source: DeviceMemory,
    y: DeviceMemory,
    marks: DeviceMemory,
}

pub(crate) struct Rig {
    shape: Shape,
    options: Options,
    ranks: Vec<Rank>,
    gate: Gate,
}

/// One rank's tokens on its GPU.
struct Tokens {
    routing: Routing,
    x: DeviceMemory,
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
        let places = places(devices, compiler, &shape, Layout::Expert)?;
        let gate = Gate::new(places.first().ok_or("there is no GPU")?.stream.context())?;
        let ranks = places.into_iter().map(|place| rank(place, &shape)).collect::<Outcome<_>>()?;
        Ok(Rig { shape, options, ranks, gate })
    }

    /// Random tokens for each rank.
    fn batch(&self, tokens: u32) -> Outcome<Batch> {
        let ranks = self.ranks.iter().zip(0..).map(|(rank, number)| {
            let routing = Routing::random(number, tokens, self.shape.topk, self.shape.experts);
            let x = rows(number, tokens, self.shape.hidden);
            Ok(Tokens {
                out: DeviceMemory::new(rank.place.stream.context(), x.len())?,
                x: rank.place.there(&x)?,
                idx: rank.place.there(&routing.idx_bytes())?,
                weights: rank.place.there(&routing.weight_bytes())?,
                routing,
            })
        });
        Ok(Batch { tokens, ranks: ranks.collect::<Outcome<_>>()? })
    }

    fn dispatch(&self, batch: &Batch, number: usize, launch: Launch) -> Outcome<()> {
        let (rank, own) = (&self.ranks[number], &batch.ranks[number]);
        let (most, blocks_of_row) = (u64::from(self.shape.ranks * self.shape.max_tokens), self.shape.hidden / 128);
        let expert = most * u64::from(blocks_of_row) * 4;
        let column = self.options.column_scales;
        let (row, block) = if column { (4, most * 4) } else { (u64::from(blocks_of_row) * 4, 4) };
        let args = EpDispatchArgs {
            common: rank.place.common(Layout::Expert, launch.tokens, launch.phases),
            x: own.x.address(),
            x_stride: u64::from(self.shape.hidden) * 2,
            topk_idx: own.idx.address(),
            topk_weights: if self.options.late_weights { 0 } else { own.weights.address() },
            out_x: rank.out_x.address(),
            out_scales: rank.out_scales.address(),
            out_scale_strides: [expert, row, block],
            out_counts: rank.counts.address(),
            out_ranges: rank.ranges.address(),
            out_source: rank.source.address(),
            marks: if launch.marked { rank.marks.address() } else { 0 },
            idx_bytes: 8,
            ..EpDispatchArgs::ZERO
        };
        // SAFETY: all memory lives as long as the rig and the batch, which are synchronized before they are dropped.
        unsafe { rank.place.kernels.dispatch_expert(&rank.place.stream, &args, launch.blocks, true)? };
        Ok(())
    }

    fn combine(&self, batch: &Batch, number: usize, launch: Launch) -> Outcome<()> {
        let (rank, own) = (&self.ranks[number], &batch.ranks[number]);
        let row = u64::from(self.shape.hidden) * 2;
        let args = EpCombineArgs {
            common: rank.place.common(Layout::Expert, launch.tokens, launch.phases),
            y: rank.y.address(),
            y_stride: row,
            topk_weights: if self.options.late_weights { own.weights.address() } else { 0 },
            out: own.out.address(),
            out_stride: row,
            marks: if launch.marked { rank.marks.address() } else { 0 },
            wire: self.options.wire,
            ..EpCombineArgs::ZERO
        };
        // SAFETY: as above.
        unsafe { rank.place.kernels.combine_expert(&rank.place.stream, &args, launch.blocks, true)? };
        Ok(())
    }

    /// Runs one dispatch and combine and checks the results: counts, sources, rows (bf16), sums.
    fn verify(&self, batch: &Batch, blocks: u32) -> Outcome<()> {
        let launch = Launch { tokens: batch.tokens, blocks, phases: BOTH, marked: false };
        settle()?;
        for number in 0..self.ranks.len() {
            self.dispatch(batch, number, launch)?;
            self.combine(batch, number, launch)?;
        }
        finish(self.ranks.iter().map(|rank| &rank.place))?;
        for number in 0..self.ranks.len() {
            self.verify_rows(batch, number)?;
            self.verify_sums(batch, number)?;
        }
        Ok(())
    }

    /// Rows that leave a rank, on average: one for each other rank that a token has experts of.
    fn rows_sent(&self, batch: &Batch) -> u64 {
        let (topk, local) = (self.shape.topk as usize, i64::from(self.shape.local_experts()));
        let of = |(own, tokens): (usize, &Tokens)| {
            let other = |ids: &[i64]| {
                let mut ranks: Vec<i64> = ids.iter().map(|id| id / local).filter(|rank| *rank != own as i64).collect();
                ranks.sort_unstable();
                ranks.dedup();
                ranks.len() as u64
            };
            tokens.routing.idx.chunks(topk).map(other).sum::<u64>()
        };
        batch.ranks.iter().enumerate().map(of).sum::<u64>() / batch.ranks.len().max(1) as u64
    }

    /// The rows that came to a rank, in their order.
    fn verify_rows(&self, batch: &Batch, number: usize) -> Outcome<()> {
        let rank = &self.ranks[number];
        let (local, most) = (self.shape.local_experts() as usize, (self.shape.ranks * self.shape.max_tokens) as usize);
        let (counts, source) = (words(&rank.place.stream, &rank.counts)?, words(&rank.place.stream, &rank.source)?);
        for expert in 0..local {
            let id = (number * local + expert) as i64;
            let mut expected = Vec::new();
            for (from, tokens) in batch.ranks.iter().enumerate() {
                let rows = tokens.routing.idx.chunks(self.shape.topk as usize).enumerate();
                expected.extend(rows.filter(|(_, ids)| ids.contains(&id)).map(|(token, _)| (from, token)));
            }
            let came = &source[expert * most..][..expected.len()];
            let same = came.iter().zip(&expected).all(|(token, (_, expected))| *token as usize == *expected);
            if counts[expert] as usize != expected.len() || !same {
                return Err(format!("rank {number}, expert {expert}: {} rows, {came:?}", counts[expert]).into());
            }
            if self.shape.payload != Payload::Bf16 {
                continue;
            }
            let bytes = self.shape.row_bytes() as usize;
            for (row, (from, token)) in expected.iter().enumerate() {
                let at = (expert * most + row) * bytes;
                let sent = &batch.ranks[*from].x;
                let sent = take(&self.ranks[*from].place.stream, sent.address() + (token * bytes) as u64, bytes)?;
                if take(&rank.place.stream, rank.out_x.address() + at as u64, bytes)? != sent {
                    return Err(format!("rank {number}, expert {expert}, row {row}: wrong bytes").into());
                }
            }
        }
        Ok(())
    }

    /// All experts give the same, so a token's sum is that times its weights.
    fn verify_sums(&self, batch: &Batch, number: usize) -> Outcome<()> {
        let (own, hidden) = (&batch.ranks[number], self.shape.hidden as usize);
        let out = take(&self.ranks[number].place.stream, own.out.address(), own.out.len())?;
        let value = f32::from_bits(u32::from_le_bytes([0, 0, OUTPUT, OUTPUT]));
        // Half of the last of three bits is 1/16.
        let part = if self.options.wire == EP_WIRE_FP8 { 12.0 } else { 50.0 };
        let weights = own.routing.weights.chunks(self.shape.topk as usize);
        for (token, (row, weights)) in out.chunks_exact(2 * hidden).zip(weights).enumerate() {
            let expected = weights.iter().sum::<f32>() * value;
            let wrong = row.chunks_exact(2).position(|bits| {
                let got = f32::from_bits(u32::from_le_bytes([0, 0, bits[0], bits[1]]));
                (got - expected).abs().partial_cmp(&(expected / part)) != Some(std::cmp::Ordering::Less)
            });
            if let Some(at) = wrong {
                return Err(format!("rank {number}, token {token}: element {at} is not near {expected}").into());
            }
        }
        Ok(())
    }
}

impl Trial for Rig {
    fn context(&self) -> &Context {
        self.ranks[0].place.stream.context()
    }

    fn most_blocks(&self) -> u32 {
        self.ranks[0].place.kernels.most_blocks()
    }

    fn measure(&self, tokens: u32, blocks: u32, iters: usize) -> Outcome<Vec<Step>> {
        let batch = self.batch(tokens)?;
        self.verify(&batch, blocks)?;
        let run = Run { rig: self, batch: &batch, blocks };
        let mut steps = cold(&run, &self.gate, iters)?;
        if self.options.floor {
            steps.extend(cold(&Floor(&run), &self.gate, iters)?);
        }
        let rows = self.rows_sent(&batch);
        let hidden = u64::from(self.shape.hidden);
        let wide = match self.options.wire {
            EP_WIRE_LOGFMT10 => hidden * 5 / 4 + hidden / 32,
            EP_WIRE_FP8 => hidden + hidden / 128,
            _ => 2 * hidden,
        };
        let narrow = u64::from(self.shape.row_bytes() + self.shape.scale_bytes());
        for step in &mut steps {
            step.wire_bytes = match step.name {
                "dispatch" | "dispatch send" => Some(rows * narrow),
                "combine" | "combine send" if self.shape.prereduce => Some(rows * wide),
                _ => None,
            };
        }
        steps.push(Step::new("pair", vec![back_to_back(&run, &self.gate, iters)?]));
        if self.options.marks {
            run.noted()?.iter().for_each(Marks::print);
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
}

impl Work for Run<'_> {
    fn streams(&self) -> Vec<&Stream> {
        self.rig.ranks.iter().map(|rank| &rank.place.stream).collect()
    }

    fn finish(&self) -> Outcome<()> {
        finish(self.rig.ranks.iter().map(|rank| &rank.place))
    }

    fn steps(&self) -> Vec<&'static str> {
        if self.rig.options.apart {
            return vec!["dispatch send", "dispatch receive", "combine send", "combine receive"];
        }
        vec!["dispatch", "combine"]
    }

    fn make_cold(&self, rank: usize) -> Outcome<()> {
        self.rig.ranks[rank].place.make_cold()
    }

    fn meet(&self, rank: usize) -> Outcome<()> {
        self.rig.dispatch(self.batch, rank, Launch { tokens: 0, blocks: self.blocks, phases: BOTH, marked: false })
    }

    fn step(&self, rank: usize, step: usize) -> Outcome<()> {
        self.launch(rank, step, false)
    }
}

/// Share of the measurement itself: two adjacent events, an empty launch, and a dispatch of no tokens (a barrier of all
/// ranks).
struct Floor<'a>(&'a Run<'a>);

impl Work for Floor<'_> {
    fn streams(&self) -> Vec<&Stream> {
        self.0.streams()
    }

    fn finish(&self) -> Outcome<()> {
        self.0.finish()
    }

    fn steps(&self) -> Vec<&'static str> {
        vec!["nothing", "fill of 16 bytes", "meeting"]
    }

    fn make_cold(&self, rank: usize) -> Outcome<()> {
        self.0.make_cold(rank)
    }

    fn meet(&self, rank: usize) -> Outcome<()> {
        self.0.meet(rank)
    }

    fn step(&self, rank: usize, step: usize) -> Outcome<()> {
        let place = &self.0.rig.ranks[rank];
        match step {
            0 => {}
            // SAFETY: the area is the rank's, and nothing else writes it now.
            1 => unsafe { place.place.stream.fill(place.marks.address(), 0, 16)? },
            _ => self.meet(rank)?,
        }
        Ok(())
    }
}

impl Run<'_> {
    fn launch(&self, rank: usize, step: usize, marked: bool) -> Outcome<()> {
        let (dispatches, phases) = match self.rig.options.apart {
            false => (step == 0, BOTH),
            true => (step < 2, [EP_SEND, EP_RECEIVE][step % 2]),
        };
        let launch = Launch { tokens: self.batch.tokens, blocks: self.blocks, phases, marked };
        match dispatches {
            true => self.rig.dispatch(self.batch, rank, launch),
            false => self.rig.combine(self.batch, rank, launch),
        }
    }

    /// Runs each step once more with a cold cache and returns the marks that its blocks recorded.
    fn noted(&self) -> Outcome<Vec<Marks>> {
        let mut noted = Vec::new();
        for (step, name) in self.steps().into_iter().enumerate() {
            settle()?;
            for (number, rank) in self.rig.ranks.iter().enumerate() {
                // SAFETY: the area is the rank's, for this alone.
                unsafe { rank.place.stream.fill(rank.marks.address(), 0, rank.marks.len())? };
                self.make_cold(number)?;
                // Only a dispatch can start with a barrier: one between the send and receive of another is not allowed.
                if !(self.rig.options.apart && step % 2 == 1) {
                    self.meet(number)?;
                }
                self.launch(number, step, true)?;
            }
            self.finish()?;
            let mut marks = Marks::new(name);
            for rank in &self.rig.ranks {
                let bytes = take(&rank.place.stream, rank.marks.address(), rank.marks.len())?;
                marks.add(&bytes[..self.blocks as usize * EP_MARKS as usize * 8]);
            }
            noted.push(marks);
        }
        Ok(noted)
    }
}

fn rank(place: Place, shape: &Shape) -> Outcome<Rank> {
    let rows = shape.local_experts() as usize * (shape.ranks * shape.max_tokens) as usize;
    let new = |bytes: usize| DeviceMemory::new(place.stream.context(), bytes.max(16));
    let rank = Rank {
        out_x: new(rows * shape.row_bytes() as usize)?,
        out_scales: new(rows * shape.hidden as usize / 128 * 4)?,
        counts: new(4 * shape.local_experts() as usize)?,
        ranges: new(8 * shape.experts as usize)?,
        source: new(4 * rows)?,
        y: new(rows * shape.hidden as usize * 2)?,
        marks: new(place.kernels.most_blocks() as usize * EP_MARKS as usize * 8)?,
        place,
    };
    // SAFETY: the memory is new and nobody uses it yet.
    unsafe { rank.place.stream.fill(rank.y.address(), OUTPUT, rank.y.len())? };
    rank.place.stream.wait(LIMIT)?;
    Ok(rank)
}
