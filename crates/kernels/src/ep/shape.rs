//! What the kernels are compiled for, and how much memory that takes.

use crossrail_types::{Error, ErrorKind, Result};

use super::{
    EP_DEPTH, EP_FAULTS, EP_LINE, EP_RANK_BLOCKS, EP_SENT_BITS, EpAnnounceHeader, EpHandle, EpHandleHeader, EpHeap,
    EpScan, EpState, Nodes,
};

/// Elements that share one scale in fp8 rows.
const BLOCK: u32 = 128;
/// Maximum number of ranks, of which each lane of a warp has one in 32.
pub const MOST_RANKS: u32 = 1024;
/// Maximum number of ranks whose rows are granted places in the rank layout.
pub const MOST_GRANTED_RANKS: u32 = 64;
/// The most experts of one rank.
pub const MOST_LOCAL_EXPERTS: u32 = 1024;
/// The most elements of a row.
pub const MOST_HIDDEN: u32 = 16384;
/// The most experts of a token.
pub const MOST_TOPK: u32 = 32;
/// The most tokens of a rank.
pub const MOST_TOKENS: u32 = 65535;
/// A row's number in a handle, and beside it a position among a token's experts, are one word.
const _: () =
    assert!((MOST_RANKS as u64 * MOST_TOKENS as u64) < 1 << EP_SENT_BITS && MOST_TOPK <= 1 << (32 - EP_SENT_BITS));
/// Elements that a warp takes at a time.
const PIECE: u32 = 1024;
/// Bytes of shared memory that the counts of a dispatch may take: what the most experts need, with 2 bytes for each.
const PLAN_SHARED: u32 = 128 << 10;

/// Maximum number of pieces of a slot whose flags have a line each.
const MOST_SPREAD: u64 = 2048;
/// Bytes of shared memory that a block can have.
const MOST_SHARED: u32 = 227 << 10;
/// Bytes of shared memory that two stages of all warps may take: every GPU has that much.
const TWO_STAGES: u32 = 96 << 10;
/// The most tokens of a rank, and of all ranks, whose rows go to slots in the rank layout: up to there the copy from a slot
/// takes less than the trip that it saves, and slots stay small (119 MB of bf16 rows of 7168).
const SLOTTED_TOKENS: u32 = 512;
const SLOTTED_ROWS: u32 = 4096;
/// The most threads of a block that combines: more would have too few registers each.
const BACK_THREADS: u32 = 512;
/// Flags of a warp that may wait to be set, in a combine.
const RING: u32 = 8;

/// How the scales of fp8 rows are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scale {
    /// fp32, the block's largest magnitude / 448.
    F32,
    /// fp32, rounded up to a power of two.
    PowerOfTwo,
    /// The exponent of that power of two in one byte.
    Ue8m0,
}

/// What dispatch carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Payload {
    /// bf16 as it is.
    Bf16,
    /// e4m3 in blocks of 128 with a scale each.
    Fp8(Scale),
}

/// Which kernels and which part of the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Rows by expert.
    Expert,
    /// Rows by source rank.
    Rank,
}

/// Parameters that affect only speed. 0 picks a value that suits the shape.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tuning {
    /// Elements that a warp sends at a time, a multiple of 1024; the same on every rank.
    pub piece: u32,
    /// Threads of a block, a multiple of 32 up to 1024.
    pub threads: u32,
    /// Warps of a block that send, the first ones.
    pub senders: u32,
    /// The first warp of a block that receives; those below `senders` do so when they have sent.
    pub receive_from: u32,
    /// Threads of a block in a combine of the expert layout, a multiple of 32 from 64 to 1024.
    pub back_threads: u32,
    /// Stages of a warp that sends in a combine of the expert layout: pieces of its own that are on their way at once.
    pub back_stages: u32,
    /// Rank layout: threads of a block, a multiple of 128 up to 512.
    pub rank_threads: u32,
    /// Rank layout: warps of a block that carry rows as they are, up to 4.
    pub rank_movers: u32,
    /// Rank layout: rows are always granted places at their ranks, which otherwise only many tokens are. The same on
    /// every rank.
    pub granted: bool,
    /// Rank layout: rows always go to slots, as they must between nodes. The same on every rank.
    pub slots: bool,
    /// Inboxes of this rank's heap: for the ranks that write into it, itself included; 0: for all. Ranks may differ, unless
    /// rows of the rank layout are granted places.
    pub inboxes: u32,
    /// Ranks of a node, which are adjacent, if rows go once to each node; 0: once to each rank. The same on every rank. Expert
    /// layout with prereduction, rank layout with slots, or both.
    pub node: u32,
    /// Launch kernels before the one before them in the stream has ended; they wait for it themselves. From architecture
    /// 9.0 on.
    pub early: bool,
    /// Compile in the code that notes the times of a launch (`EpDispatchArgs::marks`), for measurements. Without it,
    /// `marks` is not read.
    pub marks: bool,
}

impl Tuning {
    /// Defaults for the shape.
    pub const USUAL: Tuning = Tuning {
        piece: 0,
        threads: 0,
        senders: 0,
        receive_from: 0,
        back_threads: 0,
        back_stages: 0,
        rank_threads: 0,
        rank_movers: 0,
        granted: false,
        slots: false,
        inboxes: 0,
        node: 0,
        early: false,
        marks: false,
    };
}

/// What kernels are compiled for; all numbers are those of one buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Elements of a row.
    pub hidden: u32,
    /// Experts of a token.
    pub topk: u32,
    /// Experts of all ranks.
    pub experts: u32,
    /// Ranks.
    pub ranks: u32,
    /// Maximum number of tokens that a rank sends.
    pub max_tokens: u32,
    /// What dispatch carries.
    pub payload: Payload,
    /// Whether a token's outputs are summed where they are, so that one row comes back from each rank. Expert layout.
    pub prereduce: bool,
    /// Whether there are kernels and memory for the expert layout.
    pub expert_layout: bool,
    /// Whether there are kernels and memory for the rank layout.
    pub rank_layout: bool,
    /// Rank layout: how many results there can be at once.
    pub regions: u32,
    /// Parameters that affect only speed.
    pub tuning: Tuning,
}

impl Shape {
    /// Checks that the numbers are ones that kernels can take.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] naming the parameter and its limit.
    pub fn check(&self) -> Result<()> {
        let wrong = |text: String| Err(Error::new(ErrorKind::Usage, "ExpertBuffer", text));
        let limits = [
            ("ranks", self.ranks, MOST_RANKS),
            ("topk", self.topk, MOST_TOPK.min(self.experts)),
            ("hidden", self.hidden, MOST_HIDDEN),
            ("max_tokens_per_rank", self.max_tokens, MOST_TOKENS),
        ];
        for (name, value, most) in limits {
            if !(1..=most).contains(&value) {
                return wrong(format!("{name} {value} is not from 1 to {most}, which GPU kernels take"));
            }
        }
        if self.experts == 0 || !self.experts.is_multiple_of(self.ranks) {
            return wrong(format!("num_experts {} cannot be spread evenly over {} ranks", self.experts, self.ranks));
        }
        if self.local_experts() > MOST_LOCAL_EXPERTS {
            let (local, most) = (self.local_experts(), MOST_LOCAL_EXPERTS);
            return wrong(format!("{local} experts per rank are more than the {most} that GPU kernels take"));
        }
        let unit = if self.payload == Payload::Bf16 { 8 } else { BLOCK };
        if !self.hidden.is_multiple_of(unit) {
            return wrong(format!("hidden {} is not a multiple of {unit}", self.hidden));
        }
        if !(self.expert_layout || self.rank_layout) {
            return wrong("layouts is empty: name \"expert\", \"rank\" or both".into());
        }
        let granted = self.rank_layout && !self.slotted();
        if granted && self.ranks > MOST_GRANTED_RANKS {
            let text = format!("ranks {} is more than the {MOST_GRANTED_RANKS} of a node", self.ranks);
            return wrong(format!("{text} that the rank layout takes; between nodes it takes more"));
        }
        // Kernels number the pieces of all rows.
        let pieces = u64::from(self.ranks) * u64::from(self.max_tokens) * self.back_rows() * u64::from(self.pieces());
        if pieces > u64::from(u32::MAX) {
            return wrong(format!("max_tokens_per_rank {} is too many for {} ranks", self.max_tokens, self.ranks));
        }
        if self.expert_layout && (2 * self.experts > PLAN_SHARED || self.expert_shared()[0] > MOST_SHARED) {
            return wrong(format!("{} experts on {} ranks are more than kernels count", self.experts, self.ranks));
        }
        if self.slotted() && self.slot_shared()[0] > MOST_SHARED {
            let (ranks, tokens) = (self.ranks, self.max_tokens);
            return wrong(format!("max_tokens_per_rank {tokens} is too many for {ranks} ranks between nodes"));
        }
        if self.rank_layout && !(1..=64).contains(&self.regions) {
            return wrong(format!("regions {} is not from 1 to 64", self.regions));
        }
        let inboxes = self.tuning().inboxes;
        if inboxes > self.ranks || (granted && inboxes < self.ranks) {
            return wrong(format!("{inboxes} inboxes are not those of {} ranks", self.ranks));
        }
        nodes_of(self).check(self.prereduce || !self.expert_layout, self.tuning().inboxes)?;
        self.check_tuning()
    }

    fn check_tuning(&self) -> Result<()> {
        let Tuning {
            piece, threads, senders, receive_from, back_threads, back_stages, rank_threads, rank_movers, ..
        } = self.tuning();
        let warps = threads / 32;
        // One warp of a combine sends nothing.
        let fits = piece.is_multiple_of(PIECE) && threads.is_multiple_of(32) && (1..=32).contains(&warps);
        let fits = fits && back_threads.is_multiple_of(32) && (64..=1024).contains(&back_threads);
        let fits = fits && (1..=4).contains(&back_stages);
        let fits = fits && rank_threads.is_multiple_of(128) && (128..=512).contains(&rank_threads);
        // A warp is left for what belongs to rows.
        let fits = fits && rank_movers <= 4 && rank_movers < rank_threads / 32;
        if fits && (1..=warps).contains(&senders) && receive_from <= senders && receive_from < warps {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Usage, "ExpertBuffer", format!("{:?} is not a valid tuning", self.tuning)))
    }

    /// The tuning with all defaults resolved.
    pub fn tuning(&self) -> Tuning {
        let or = |given: u32, usual: u32| if given == 0 { usual } else { given };
        let threads = or(self.tuning.threads, 768);
        let senders = or(self.tuning.senders, threads / 32);
        let rank_threads = or(self.tuning.rank_threads, 512);
        let piece = or(self.tuning.piece, PIECE);
        let back_threads = or(self.tuning.back_threads, threads.clamp(64, BACK_THREADS));
        Tuning {
            piece,
            threads,
            senders,
            receive_from: self.tuning.receive_from,
            back_threads,
            back_stages: or(
                self.tuning.back_stages,
                if 2 * back_stage(piece, back_threads) <= TWO_STAGES { 2 } else { 1 },
            ),
            rank_threads,
            rank_movers: or(self.tuning.rank_movers, (rank_threads / 32).saturating_sub(1).min(4)),
            granted: self.tuning.granted,
            slots: self.tuning.slots,
            inboxes: or(self.tuning.inboxes, self.ranks),
            node: self.tuning.node,
            early: self.tuning.early,
            marks: self.tuning.marks,
        }
    }

    /// Whether there are kernels that combine with coded rows, whose blocks of 128 elements have a scale each.
    pub fn has_coded(&self) -> bool {
        self.expert_layout && self.hidden.is_multiple_of(BLOCK) && self.tuning.node == 0
    }

    /// Whether rows of the rank layout go to slots that each source has at every rank, and are copied to their places
    /// there. That takes one trip less than places that are granted, which pay where there are many rows.
    pub fn slotted(&self) -> bool {
        let few = self.max_tokens <= SLOTTED_TOKENS && self.ranks * self.max_tokens <= SLOTTED_ROWS;
        let between_nodes = self.tuning.slots || self.tuning.node > 0;
        self.rank_layout && (between_nodes || (few && !self.tuning.granted))
    }

    /// Whether there are slots for dispatched rows.
    pub(super) fn has_slots(&self) -> bool {
        self.expert_layout || self.slotted()
    }

    /// Experts of each rank.
    pub fn local_experts(&self) -> u32 {
        self.experts / self.ranks
    }

    /// The most experts of one rank that a token selects.
    pub fn most_local(&self) -> u32 {
        self.topk.min(self.local_experts())
    }

    /// Bytes of a row's elements as dispatch carries them.
    pub fn row_bytes(&self) -> u32 {
        if self.payload == Payload::Bf16 { 2 * self.hidden } else { self.hidden }
    }

    /// Bytes of a row's scales.
    pub fn scale_bytes(&self) -> u32 {
        self.hidden / BLOCK * self.scale_size()
    }

    fn scale_size(&self) -> u32 {
        match self.payload {
            Payload::Bf16 => 0,
            Payload::Fp8(Scale::F32 | Scale::PowerOfTwo) => 4,
            Payload::Fp8(Scale::Ue8m0) => 1,
        }
    }

    /// Parts of a source's selections, each of which is one warp's to number: it counts the experts here in shared memory.
    fn plan_parts(&self) -> u32 {
        (PLAN_SHARED / (self.plan_count() * self.experts)).min(self.tuning().threads / 32 / self.ranks).max(1)
    }

    /// Bytes of such a count.
    fn plan_count(&self) -> u32 {
        if 4 * self.experts <= PLAN_SHARED { 4 } else { 2 }
    }

    /// Bytes of shared memory of a block that dispatches in the expert layout, and of one that combines.
    pub fn expert_shared(&self) -> [u32; 2] {
        let Tuning { piece, back_threads, back_stages, .. } = self.tuning();
        let plan = self.plan_parts() * self.plan_count() * self.experts;
        let (dispatch, combine) = (self.stages() * self.stages_shared(), back_stages * back_stage(piece, back_threads));
        let start = self.start_shared();
        [start + plan.max(dispatch), start + self.flags_shared() + combine]
    }

    /// Threads of a block that dispatches in the expert layout, and of one that combines.
    pub fn expert_threads(&self) -> [u32; 2] {
        [self.tuning().threads, self.tuning().back_threads]
    }

    /// Bytes of shared memory in which warps of a combine note flags for the one that sets them.
    fn flags_shared(&self) -> u32 {
        (self.tuning().back_threads / 32 * 8 * (RING + 1)).next_multiple_of(128)
    }

    /// Bytes of shared memory in which a block of the expert layout has what all of its warps go by: the first ones.
    fn start_shared(&self) -> u32 {
        let warps = self.tuning().threads / 32;
        let via = if self.tuning.node > 0 { 8 * self.ranks } else { 0 };
        let sets = 5 * 8 * (self.ranks.div_ceil(64) - 1);
        (88 + sets + 24 * self.ranks + via + 4 * warps + 8 * warps * self.topk).next_multiple_of(128)
    }

    /// Bytes of one stage of all warps that send in a dispatch.
    fn stages_shared(&self) -> u32 {
        let Tuning { piece, threads, .. } = self.tuning();
        let scales = piece / BLOCK * self.scale_size();
        let element = if self.payload == Payload::Bf16 { 2 } else { 1 };
        threads / 32 * (piece * element + scales).next_multiple_of(16)
    }

    /// Stages of a warp in a dispatch: with two, the next piece is read while one is on its way.
    fn stages(&self) -> u32 {
        if 2 * self.stages_shared() <= TWO_STAGES { 2 } else { 1 }
    }

    /// Pieces of a row in the expert layout, each with a flag.
    pub fn pieces(&self) -> u32 {
        self.hidden.div_ceil(self.tuning().piece)
    }

    /// Rows of a combine's slot for each token.
    fn back_rows(&self) -> u64 {
        if self.expert_layout && !self.prereduce { u64::from(self.most_local()) } else { 1 }
    }

    /// Where everything is in a heap.
    pub fn heap(&self) -> EpHeap {
        self.lay().0
    }

    /// Bytes of a heap.
    pub fn heap_bytes(&self) -> u64 {
        self.heap().bytes
    }

    /// Memory use of a heap by purpose, in order of address.
    pub fn kinds(&self) -> Vec<(&'static str, u64)> {
        self.lay().1
    }

    fn lay(&self) -> (EpHeap, Vec<(&'static str, u64)>) {
        let (ranks, most, topk) = (u64::from(self.ranks), u64::from(self.max_tokens), u64::from(self.topk));
        let inboxes = u64::from(self.tuning().inboxes);
        let (local, depth) = (u64::from(self.local_experts()), u64::from(EP_DEPTH));
        let (wide, pieces) = (2 * u64::from(self.hidden), u64::from(self.pieces()));
        let only = |yes: bool, bytes: u64| if yes { bytes } else { 0 };
        let mut lay = Lay::default();
        let mut heap = EpHeap {
            state: lay.take(size_of::<EpState>() as u64),
            masks: lay.take(ranks * 4),
            waited: lay.take(ranks * 8),
            taken_seen: lay.take(2 * ranks * 8),
            plan_tokens: lay.take(ranks * 8),
            plan_rows: lay.take(match (self.expert_layout, self.slotted()) {
                (true, _) => ranks * most * topk * 8,
                (false, true) => ranks * most * 8,
                (false, false) => 0,
            }),
            scan: lay.take(only(self.rank_layout, size_of::<EpScan>() as u64)),
            scan_regions: lay.take(only(self.rank_layout, ranks * 4)),
            scan_counts: lay.take(only(self.rank_layout, u64::from(EP_RANK_BLOCKS) * ranks * 4)),
            scan_experts: lay.take(only(self.rank_layout, ranks * local * 4)),
            ..EpHeap::ZERO
        };
        lay.end("words and plans", 1);
        heap.inboxes = lay.begin_inbox();
        heap.words = lay.take(EP_LINE);
        lay.end("words and plans", inboxes);
        let slots = self.has_slots();
        let granted = self.rank_layout && !self.slotted();
        heap.table_weights = line(most * topk * 8);
        heap.table_stride = 2 * heap.table_weights;
        heap.tables = lay.take(only(slots, depth * heap.table_stride));
        // After the weights, a word for each piece that lacks ranks.
        let lacking = only(self.tuning.node > 0, most * pieces * 8);
        heap.back_weights_stride = line(most * topk * 8 + lacking);
        heap.back_weights = lay.take(only(slots, depth * heap.back_weights_stride));
        heap.announce_rows = size_of::<EpAnnounceHeader>() as u64;
        heap.announce_counts = heap.announce_rows + (ranks * 4).next_multiple_of(16);
        heap.announce_stride = line(heap.announce_counts + local * 4);
        heap.announces = lay.take(only(granted, depth * heap.announce_stride));
        lay.end("routing", inboxes);
        heap.piece_stride = self.piece_stride();
        heap.row_stride = if pieces == 1 { self.whole_row() } else { pieces * heap.piece_stride };
        // Where flags may be in the host's memory, each of few has a line: loads of one line of that memory are serialized.
        let spread = self.tuning.slots && self.tuning.node == 0 && most * pieces <= MOST_SPREAD;
        let stride = if spread { EP_LINE } else { 8 };
        heap.flag_stride = stride;
        heap.rows = lay.take(only(slots, depth * most * heap.row_stride));
        heap.row_flags = lay.take(only(slots, depth * most * pieces * stride));
        lay.end("dispatched rows", inboxes);
        heap.back_stride = wide;
        heap.back_slot = line(most * self.back_rows() * wide);
        heap.back = lay.take(depth * heap.back_slot);
        heap.back_flags_slot = line(most * self.back_rows() * pieces * stride);
        // Of a token that selects experts more than once, a combine looks at as many flags as there are selections.
        let beyond = only(self.expert_layout && !self.prereduce, (topk - self.back_rows()) * pieces * stride);
        heap.back_flags = lay.take(depth * heap.back_flags_slot + beyond);
        heap.back_topk = lay.take(only(granted, depth * most * topk * 4));
        lay.end("returned rows", inboxes);
        heap.inbox_stride = lay.end_inboxes(heap.inboxes, inboxes);
        heap.guess_stride = only(inboxes == ranks, heap.inbox_stride);
        if self.tuning.node > 0 {
            lay.take(nodes_of(self).area(&heap, self.slotted()));
            lay.end("sums for other nodes", 1);
        }
        let rows = ranks * most;
        heap.region_scales = line(rows * u64::from(self.row_bytes()));
        heap.region_idx = heap.region_scales + line(rows * u64::from(self.scale_bytes()));
        heap.region_weights = heap.region_idx + line(rows * topk * 8);
        heap.region_source = heap.region_weights + line(rows * topk * 4);
        heap.region_stride = (heap.region_source + rows * 4).next_multiple_of(4096);
        heap.regions = lay.take(only(self.rank_layout, u64::from(self.regions) * heap.region_stride));
        lay.end("results in the rank layout", 1);
        heap.bytes = lay.at;
        (heap, lay.kinds)
    }

    /// From one piece of a dispatched row to the next.
    pub(super) fn piece_stride(&self) -> u64 {
        let piece = u64::from(self.tuning().piece);
        let scales = piece / u64::from(BLOCK) * u64::from(self.scale_size());
        let element = if self.payload == Payload::Bf16 { 2 } else { 1 };
        (piece * element + scales).next_multiple_of(16)
    }

    /// Bytes of a row that is one piece: no longer than it must be.
    fn whole_row(&self) -> u64 {
        u64::from(self.row_bytes() + self.scale_bytes()).next_multiple_of(16)
    }

    /// Where everything is in a handle of that layout.
    pub fn handle(&self, layout: Layout) -> EpHandle {
        let (ranks, most, topk) = (u64::from(self.ranks), u64::from(self.max_tokens), u64::from(self.topk));
        let expert = |bytes: u64| if layout == Layout::Expert { bytes } else { 0 };
        let rank = |bytes: u64| if layout == Layout::Rank { bytes } else { 0 };
        let slots = |bytes: u64| if self.slotted() { rank(bytes) } else { 0 };
        let mut lay = Lay::default();
        let mut handle = EpHandle {
            header: lay.take(size_of::<EpHandleHeader>() as u64),
            tokens: lay.take(ranks * 4),
            flags: lay.take(ranks * 4),
            sent: lay.take(most * topk * 4),
            sent_weights: lay.take(most * topk * 4),
            routes: lay.take(expert(ranks * most * topk * 4) + slots(ranks * most * 4)),
            present: lay.take(expert(ranks * most) + slots(ranks * most)),
            weights: lay.take(expert(ranks * most * topk * 4)),
            sent_rows: lay.take(rank(most * ranks * 4) + u64::from(nodes_of(self).column()) * most * 8),
            places: lay.take(rank(ranks * 4)),
            offsets: lay.take(rank((ranks + 1) * 4)),
            source: lay.take(rank(ranks * most * 4)),
            bytes: 0,
        };
        handle.bytes = lay.at;
        handle
    }

    /// Bytes of a handle of that layout.
    pub fn handle_bytes(&self, layout: Layout) -> u64 {
        self.handle(layout).bytes
    }

    /// The options that make the compiler compile for this shape, with bulk copies or without.
    pub fn defines(&self, bulk: bool) -> Vec<String> {
        let (fp8, scale) = match self.payload {
            Payload::Bf16 => (0, 0),
            Payload::Fp8(Scale::F32) => (1, 0),
            Payload::Fp8(Scale::PowerOfTwo) => (1, 1),
            Payload::Fp8(Scale::Ue8m0) => (1, 2),
        };
        let Tuning { piece, threads, senders, receive_from, back_threads, back_stages, .. } = self.tuning();
        let numbers = [
            ("H", self.hidden),
            ("K", self.topk),
            ("E", self.experts),
            ("R", self.ranks),
            ("FP8", fp8),
            ("SCALE", scale),
            ("PREREDUCE", self.prereduce.into()),
            ("MARKED", self.tuning.marks.into()),
            ("BULK", bulk.into()),
            ("PIECE", piece),
            ("STAGES", self.stages()),
            ("BACK_THREADS", back_threads),
            ("BACK_STAGES", back_stages),
            ("RING", RING),
            ("START", self.start_shared()),
            ("FLAGS", self.flags_shared()),
            ("THREADS", threads),
            ("SENDERS", senders),
            ("RECEIVE_FROM", receive_from),
            ("PLAN_PARTS", self.plan_parts()),
            ("PLAN_COUNT", self.plan_count()),
            ("SLOTS", 0),
            ("EARLY", self.tuning.early.into()),
            ("NODE", self.tuning.node),
        ];
        numbers.iter().map(|(name, value)| format!("-DEP_{name}={value}")).collect()
    }

    /// The options that make the compiler compile the rank layout's kernels for few tokens: those of the expert layout,
    /// whose combine sends a row for each token.
    pub fn slot_defines(&self, bulk: bool) -> Vec<String> {
        let mut defines = Shape { prereduce: true, ..*self }.defines(bulk);
        for define in defines.iter_mut().filter(|define| *define == "-DEP_SLOTS=0") {
            *define = "-DEP_SLOTS=1".to_owned();
        }
        defines
    }

    /// Bytes of shared memory of a block that dispatches in the rank layout for few tokens, and of one that combines.
    pub fn slot_shared(&self) -> [u32; 2] {
        let units = self.ranks * self.max_tokens.div_ceil(32);
        let plan = 4 * (2 * units + 1 + self.local_experts());
        let dispatch = self.start_shared() + plan.max(self.stages() * self.stages_shared());
        [dispatch, self.expert_shared()[1]]
    }
}

/// Entries of the ring of faults.
pub fn faults_of(shape: &Shape) -> u32 {
    if shape.ranks > 64 { 16 * EP_FAULTS } else { EP_FAULTS }
}

/// Nodes of the ranks that kernels of a shape are compiled for.
pub fn nodes_of(shape: &Shape) -> Nodes {
    Nodes::new(shape.ranks, shape.tuning.node)
}

/// Bytes of one stage of all warps of a block that combines.
fn back_stage(piece: u32, threads: u32) -> u32 {
    threads / 32 * 2 * piece
}

/// Lays out areas one after another.
#[derive(Default)]
struct Lay {
    at: u64,
    begun: u64,
    kinds: Vec<(&'static str, u64)>,
}

impl Lay {
    fn take(&mut self, bytes: u64) -> u64 {
        let at = self.at;
        self.at = line(at + bytes);
        at
    }

    /// Attributes everything laid out since the last call to `kind`, which there is `times` times.
    fn end(&mut self, kind: &'static str, times: u64) {
        let bytes = times * (self.at - self.begun);
        self.begun = self.at;
        match self.kinds.iter_mut().find(|(other, _)| *other == kind) {
            Some((_, sum)) => *sum += bytes,
            None => self.kinds.push((kind, bytes)),
        }
    }

    /// Offsets count from the start of an inbox until [`Lay::end_inboxes`]. Returns the first inbox's offset.
    fn begin_inbox(&mut self) -> u64 {
        self.begun = 0;
        std::mem::take(&mut self.at)
    }

    /// `count` inboxes of the layout since `begin_inbox`, from `first` on. Returns the bytes of each.
    fn end_inboxes(&mut self, first: u64, count: u64) -> u64 {
        let bytes = self.at;
        self.at = first + count * bytes;
        self.begun = self.at;
        bytes
    }
}

fn line(bytes: u64) -> u64 {
    bytes.next_multiple_of(EP_LINE)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DECODE: Shape = Shape {
        hidden: 7168,
        topk: 8,
        experts: 288,
        ranks: 4,
        max_tokens: 128,
        payload: Payload::Fp8(Scale::F32),
        prereduce: true,
        expert_layout: true,
        rank_layout: false,
        regions: 0,
        tuning: Tuning::USUAL,
    };

    #[test]
    fn kinds_are_all_of_the_heap() {
        for (expert_layout, rank_layout) in [(true, false), (false, true), (true, true)] {
            let shape = Shape { expert_layout, rank_layout, regions: 2, ..DECODE };
            shape.check().unwrap();
            let sum: u64 = shape.kinds().iter().map(|(_, bytes)| bytes).sum();
            assert_eq!(sum, shape.heap_bytes());
        }
        // DeepEP's low-latency buffer takes 2.1 GB for this.
        assert!(DECODE.heap_bytes() < 25 << 20, "{}", DECODE.heap_bytes());
    }

    #[test]
    fn areas_are_aligned_and_do_not_overlap() {
        let heap = DECODE.heap();
        assert_eq!(heap.piece_stride, 1024 + 8 * 4);
        assert_eq!(heap.row_stride, 7 * heap.piece_stride);
        let starts = [heap.words, heap.tables, heap.rows, heap.row_flags, heap.back, heap.inbox_stride];
        assert!(starts.is_sorted() && starts.iter().all(|start| start.is_multiple_of(EP_LINE)));
        assert!(heap.rows + 2 * 128 * heap.row_stride <= heap.row_flags);
        let starts = [heap.state, heap.masks, heap.inboxes];
        assert!(starts.is_sorted() && starts.iter().all(|start| start.is_multiple_of(EP_LINE)));
        assert_eq!(heap.inboxes + 4 * heap.inbox_stride, heap.bytes);
        let handle = DECODE.handle(Layout::Expert);
        assert!(
            handle.routes + 4 * 128 * 8 * 4 <= handle.present && handle.bytes == DECODE.handle_bytes(Layout::Expert)
        );
    }

    /// With an expert for each rank a token has one row there, and more flags than that if it selects it more than once.
    #[test]
    fn flags_of_repeated_selections_lie_in_the_heap() {
        let heap = Shape { experts: 4, topk: 4, max_tokens: 32, prereduce: false, ..DECODE }.heap();
        let (last_slot, last_token) = (2 - 1, 32 - 1);
        let flags = heap.back_flags + last_slot * heap.back_flags_slot + (last_token + 4) * 7 * 8;
        assert!(flags <= heap.inbox_stride, "{flags} of {}", heap.inbox_stride);
    }

    #[test]
    fn limits_are_named() {
        let refused = |shape: Shape, text: &str| {
            let error = shape.check().unwrap_err();
            assert!(error.kind == ErrorKind::Usage && error.detail.contains(text), "{error}");
        };
        refused(Shape { ranks: 1025, experts: 1025, ..DECODE }, "ranks 1025 is not from 1 to 1024");
        let granted = Tuning { granted: true, ..Tuning::USUAL };
        let rank = Shape { ranks: 65, experts: 65, expert_layout: false, rank_layout: true, regions: 2, ..DECODE };
        refused(Shape { tuning: granted, ..rank }, "ranks 65 is more than the 64 of a node");
        Shape { tuning: Tuning { slots: true, ..Tuning::USUAL }, ..rank }.check().unwrap();
        let most = Shape { ranks: 1024, experts: 8192, max_tokens: 65535, hidden: 16384, prereduce: false, ..DECODE };
        refused(most, "max_tokens_per_rank 65535 is too many for 1024 ranks");
        refused(Shape { hidden: 16512, ..DECODE }, "hidden 16512 is not from 1 to 16384");
        refused(Shape { hidden: 7176, ..DECODE }, "hidden 7176 is not a multiple of 128");
        refused(Shape { topk: 33, ..DECODE }, "topk 33 is not from 1 to 32");
        refused(Shape { topk: 5, experts: 4, ..DECODE }, "topk 5 is not from 1 to 4");
        refused(Shape { experts: 290, ..DECODE }, "num_experts 290 cannot be spread evenly over 4 ranks");
        refused(Shape { experts: 4100, ..DECODE }, "1025 experts per rank");
        refused(Shape { max_tokens: 0, ..DECODE }, "max_tokens_per_rank 0");
        refused(Shape { rank_layout: true, ..DECODE }, "regions 0");
        refused(Shape { tuning: Tuning { threads: 48, ..Tuning::default() }, ..DECODE }, "not a valid tuning");
        Shape { hidden: 8, payload: Payload::Bf16, ..DECODE }.check().unwrap();
    }
}
