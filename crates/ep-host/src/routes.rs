//! Which row goes where: made by a dispatch, used by its combine and by dispatches that repeat its routing.

use std::sync::Arc;

use crossrail_ep::{Config, Layout};
use crossrail_types::{Error, ErrorKind, Result};

use crate::heap::Areas;
use crate::local_rank::LocalRank;
use crate::tensor::{Input, Tensor};

/// Not an expert of this rank.
pub(crate) const NO_EXPERT: u16 = u16::MAX;
/// No rank.
const NO_RANK: u32 = u32::MAX;

/// The routing of one dispatch: what this rank sent and received. Cheap to clone; usable from any thread.
#[derive(Clone, Debug)]
pub struct Handle(pub(crate) Arc<Routes>);

impl Handle {
    /// The layout of the dispatch.
    pub fn layout(&self) -> Layout {
        self.0.layout
    }

    /// Tokens that this rank sent.
    pub fn tokens(&self) -> usize {
        self.0.sent.tokens
    }

    /// Rows received, this rank's own included.
    pub fn rows(&self) -> usize {
        self.0.received.iter().map(|list| list.tokens.len()).sum()
    }

    /// Whether any rank sent weights.
    pub fn has_weights(&self) -> bool {
        self.0.sent.weighted || self.0.received.iter().any(|received| !received.weights.is_empty())
    }

    /// The first row of each source rank, and the end.
    pub fn offsets(&self) -> Vec<i64> {
        self.0.offsets.iter().map(|row| i64::from(*row)).collect()
    }

    /// Expert layout, `[local experts, ranks]`: first row of the source rank << 32 | its number of rows.
    pub fn ranges(&self) -> &[i64] {
        &self.0.ranges
    }

    /// Rank layout, `[rows, topk]`: local experts, -1 elsewhere.
    pub fn topk_idx(&self) -> Vec<i64> {
        let experts = self.0.received.iter().flat_map(|received| &received.experts);
        experts.map(|expert| if *expert == NO_EXPERT { -1 } else { i64::from(*expert) }).collect()
    }

    /// Rank layout, `[rows, topk]`: weights of local experts, 0 elsewhere and for sources that sent none.
    pub fn topk_weights(&self) -> Vec<f32> {
        let mut all = Vec::with_capacity(self.0.received.iter().map(|received| received.experts.len()).sum());
        for received in &self.0.received {
            if received.weights.is_empty() {
                all.resize(all.len() + received.experts.len(), 0.0);
            } else {
                let pairs = received.weights.iter().zip(&received.experts);
                all.extend(pairs.map(|(weight, expert)| if *expert == NO_EXPERT { 0.0 } else { *weight }));
            }
        }
        all
    }

    /// Expert layout: writes each row's token number at its source into `out`, `[local experts, most]`. Entries without a
    /// row are not written.
    pub fn sources(&self, most: usize, out: &mut [i32]) {
        for received in &self.0.received {
            let topk = received.experts.len().checked_div(received.tokens.len()).unwrap_or(0);
            for (row, token) in received.tokens.iter().enumerate() {
                for (_, expert, place) in received.selections(row, topk) {
                    if let Some(entry) = out.get_mut(expert * most + place) {
                        *entry = *token as i32;
                    }
                }
            }
        }
    }
}

#[derive(Debug)]
pub(crate) struct Routes {
    /// Id of the buffer that made it.
    pub(crate) buffer: u64,
    pub(crate) layout: Layout,
    pub(crate) sent: Arc<Sent>,
    /// By source rank.
    pub(crate) received: Vec<Received>,
    /// Rank layout: the first row of each source, and the end.
    pub(crate) offsets: Vec<u32>,
    /// Expert layout, `[local experts, ranks]`: first row << 32 | rows.
    pub(crate) ranges: Vec<i64>,
    /// Ranks without a part in the dispatch.
    pub(crate) missing: Vec<u32>,
}

impl Routes {
    /// Without rows.
    pub(crate) fn nothing(local: &LocalRank) -> Routes {
        let ranks = local.config.ranks as usize;
        Routes {
            buffer: local.id,
            layout: Layout::Expert,
            sent: Arc::new(Sent::nothing(ranks)),
            received: vec![Received::default(); ranks],
            offsets: vec![0],
            ranges: Vec::new(),
            missing: Vec::new(),
        }
    }
}

/// What this rank sends.
#[derive(Debug, Default)]
pub(crate) struct Sent {
    pub(crate) tokens: usize,
    /// By destination rank.
    pub(crate) to: Vec<SendList>,
    /// Index in `destinations` of each token's first; and the end.
    pub(crate) first_destination: Vec<u32>,
    /// Where each token's row goes: by token, then by rank.
    pub(crate) destinations: Vec<Destination>,
    /// Whether the dispatch has weights.
    pub(crate) weighted: bool,
    /// The weights, `[tokens, topk]`.
    pub(crate) weights: Vec<f32>,
    /// The rank of each selection, `[tokens, topk]`; [`NO_RANK`] where there is none or it cannot be reached.
    pub(crate) expert_ranks: Vec<u32>,
    /// Selections of experts whose rank is connected and not masked.
    pub(crate) selections: u64,
}

/// The rows sent to one rank.
#[derive(Debug, Default)]
pub(crate) struct SendList {
    /// Their tokens, ascending.
    pub(crate) tokens: Vec<u32>,
    /// Index of each row's first selection among those of the list; and the end.
    pub(crate) first: Vec<u32>,
}

/// A rank that a token is sent to, and the row there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Destination {
    pub(crate) rank: u32,
    /// Index in the rank's [`SendList`].
    pub(crate) row: u32,
}

/// The rows received from one rank.
#[derive(Debug, Default, Clone)]
pub(crate) struct Received {
    /// The token of each row, at its source.
    pub(crate) tokens: Vec<u32>,
    /// `[rows, topk]`: local experts, or [`NO_EXPERT`].
    pub(crate) experts: Vec<u16>,
    /// `[rows, topk]`; empty without weights.
    pub(crate) weights: Vec<f32>,
    /// Expert layout, `[rows, topk]`: the row's index among those of its expert.
    pub(crate) places: Vec<u32>,
}

impl Received {
    /// Selections of a row: k, local expert, index among its rows.
    pub(crate) fn selections(&self, row: usize, topk: usize) -> impl Iterator<Item = (usize, usize, usize)> + '_ {
        let at = row * topk;
        (0..topk).filter_map(move |k| match self.experts[at + k] {
            NO_EXPERT => None,
            expert => Some((k, usize::from(expert), self.places[at + k] as usize)),
        })
    }
}

impl Sent {
    /// No tokens.
    pub(crate) fn nothing(ranks: usize) -> Sent {
        Sent { to: (0..ranks).map(|_| SendList::default()).collect(), first_destination: vec![0], ..Sent::default() }
    }

    /// Routes the tokens by `topk_idx`; ranks that are not `reachable` are sent nothing. Each selection counts, also of an
    /// expert that the token has selected before, as long as the `layout` has [`Room`].
    pub(crate) fn new(
        config: &Config,
        layout: Layout,
        input: &Input,
        reachable: &dyn Fn(usize) -> bool,
    ) -> Result<Sent> {
        let tokens = input.tokens(config.hidden, config.topk, config.max_tokens)?;
        let (ranks, topk, el) = (config.ranks as usize, config.topk, config.local_experts() as u32);
        let open: Vec<bool> = (0..ranks).map(reachable).collect();
        let mut sent = Sent {
            tokens,
            to: (0..ranks).map(|_| SendList::default()).collect(),
            first_destination: Vec::with_capacity(tokens + 1),
            weighted: input.topk_weights.is_some(),
            weights: input
                .topk_weights
                .iter()
                .flat_map(|weights| weights.words::<4>().map(f32::from_ne_bytes))
                .collect(),
            expert_ranks: vec![NO_RANK; tokens * topk],
            ..Sent::default()
        };
        let mut room = Room::new(config, layout, config.experts);
        let mut expert_ranks: Vec<u32> = Vec::with_capacity(topk);
        let mut ids = input.topk_idx.words::<8>().map(i64::from_ne_bytes);
        for token in 0..tokens {
            expert_ranks.clear();
            sent.first_destination.push(sent.destinations.len() as u32);
            for (k, id) in ids.by_ref().take(topk).enumerate() {
                if id == -1 {
                    continue;
                }
                let expert = usize::try_from(id).ok().filter(|expert| *expert < config.experts);
                let Some(expert) = expert else { return Err(out_of_range(token, k, id, config.experts)) };
                let home = expert as u32 / el;
                if open[home as usize] {
                    room.take(expert).map_err(|why| no_room(format!("topk_idx[{token}, {k}]: {why}")))?;
                    expert_ranks.push(home);
                    sent.expert_ranks[token * topk + k] = home;
                }
            }
            sent.selections += expert_ranks.len() as u64;
            expert_ranks.sort_unstable();
            let mut at = 0;
            while at < expert_ranks.len() {
                let rank = expert_ranks[at];
                let count = expert_ranks[at..].iter().take_while(|other| **other == rank).count();
                room.fits_back(count).map_err(|why| no_room(format!("topk_idx[{token}], rank {rank}: {why}")))?;
                let list = &mut sent.to[rank as usize];
                sent.destinations.push(Destination { rank, row: list.tokens.len() as u32 });
                let first = list.first.last().copied().unwrap_or(0);
                if list.first.is_empty() {
                    list.first.push(0);
                }
                list.tokens.push(token as u32);
                list.first.push(first + count as u32);
                at += count;
            }
        }
        sent.first_destination.push(sent.destinations.len() as u32);
        Ok(sent)
    }

    /// Where a token is sent.
    pub(crate) fn destinations_of(&self, token: usize) -> &[Destination] {
        &self.destinations[self.first_destination[token] as usize..self.first_destination[token + 1] as usize]
    }

    /// Encodes the metadata of one rank's rows: token, local experts, weights.
    pub(crate) fn metadata(&self, config: &Config, areas: &Areas, rank: usize, input: &Input, out: &mut Vec<u8>) {
        let (topk, first) = (config.topk, rank * config.local_experts());
        out.clear();
        out.resize(self.to[rank].tokens.len() * areas.meta_stride, 0);
        let idx = input.topk_idx.bytes();
        let weights = input.topk_weights.as_ref().map(Tensor::bytes);
        for (entry, token) in out.chunks_exact_mut(areas.meta_stride).zip(&self.to[rank].tokens) {
            let token_at = *token as usize * topk;
            entry[..4].copy_from_slice(&token.to_ne_bytes());
            let (experts, rest) = entry[8..].split_at_mut(2 * topk);
            let expert_ranks = &self.expert_ranks[token_at..token_at + topk];
            for (k, (place, home)) in experts.as_chunks_mut::<2>().0.iter_mut().zip(expert_ranks).enumerate() {
                let id = word::<8>(idx, token_at + k).filter(|_| *home as usize == rank).map(i64::from_ne_bytes);
                *place = id.map_or(NO_EXPERT, |id| (id as usize - first) as u16).to_ne_bytes();
            }
            if let Some(weights) = weights {
                let from = &weights[token_at * 4..(token_at + topk) * 4];
                rest[..4 * topk].copy_from_slice(from);
            }
        }
    }
}

impl Received {
    /// Decodes metadata. It is untrusted: another process wrote it. What is accepted fits into the `layout`'s memory.
    pub(crate) fn read(
        config: &Config,
        layout: Layout,
        areas: &Areas,
        bytes: &[u8],
        weighted: bool,
    ) -> std::result::Result<Received, String> {
        let (topk, el) = (config.topk, config.local_experts());
        let rows = bytes.len() / areas.meta_stride;
        let mut received = Received {
            tokens: Vec::with_capacity(rows),
            experts: Vec::with_capacity(rows * topk),
            weights: Vec::with_capacity(if weighted { rows * topk } else { 0 }),
            places: Vec::new(),
        };
        let mut room = Room::new(config, layout, el);
        for entry in bytes.chunks_exact(areas.meta_stride) {
            let token = word::<4>(entry, 0).map_or(0, u32::from_ne_bytes);
            if token as usize >= config.max_tokens {
                return Err(format!("a row of token {token} where a rank has at most {}", config.max_tokens));
            }
            received.tokens.push(token);
            let (experts, rest) = entry[8..].split_at(2 * topk);
            let mut selections = 0;
            for place in experts.as_chunks::<2>().0 {
                let expert = u16::from_ne_bytes(*place);
                if expert != NO_EXPERT && usize::from(expert) >= el {
                    return Err(format!("a row for local expert {expert} of {el}"));
                }
                if expert != NO_EXPERT {
                    room.take(usize::from(expert))?;
                    selections += 1;
                }
                received.experts.push(expert);
            }
            room.fits_back(selections)?;
            if weighted {
                received
                    .weights
                    .extend(rest[..4 * topk].as_chunks::<4>().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)));
            }
        }
        Ok(received)
    }
}

/// What the expert layout has memory for of one rank's tokens. Distinct experts always fit.
struct Room {
    /// Selections of each expert so far; empty in the rank layout, where a token has one row whatever it selects.
    taken: Vec<u32>,
    /// The most selections of an expert: an expert has so many rows for each rank.
    rows: u32,
    /// The most selections of a token at one rank: so many outputs can be returned.
    back: usize,
}

impl Room {
    fn new(config: &Config, layout: Layout, experts: usize) -> Room {
        let by_expert = layout == Layout::Expert;
        Room {
            taken: vec![0; if by_expert { experts } else { 0 }],
            rows: config.max_tokens as u32,
            back: if by_expert && !config.prereduce { config.most_local() } else { config.topk },
        }
    }

    /// One more selection of an expert.
    fn take(&mut self, expert: usize) -> std::result::Result<(), String> {
        let Some(taken) = self.taken.get_mut(expert) else { return Ok(()) };
        *taken += 1;
        if *taken <= self.rows {
            return Ok(());
        }
        Err(format!("expert {expert} is selected more than {} times, and has no more rows for one rank", self.rows))
    }

    /// So many selections of a token at one rank.
    fn fits_back(&self, selections: usize) -> std::result::Result<(), String> {
        if selections <= self.back {
            return Ok(());
        }
        Err(format!("{selections} selections of a token where a rank returns at most {} outputs", self.back))
    }
}

fn word<const N: usize>(bytes: &[u8], index: usize) -> Option<[u8; N]> {
    bytes.get(index * N..)?.first_chunk::<N>().copied()
}

fn out_of_range(token: usize, k: usize, id: i64, experts: usize) -> Error {
    Error::new(ErrorKind::Usage, "dispatch", format!("topk_idx[{token}, {k}] is {id}, which is no expert of {experts}"))
        .with_hint("ids are 0 to num_experts - 1, or -1 for none")
}

fn no_room(text: String) -> Error {
    Error::new(ErrorKind::Usage, "dispatch", text)
        .with_hint("distinct experts always fit; the rank layout has room for every selection")
}
