//! Bytes that an operation moves, computed from its routing.

use crossrail_ep::{Bytes, Layout};
use crossrail_kernels::ep::{EP_NOWHERE, EpHandleHeader, nodes_of};
use crossrail_types::{Error, Result};

use crate::buffer::DeviceBuffer;
use crate::handles::DeviceHandle;
use crate::inner::Inner;

/// Bytes of rows and their scales that a dispatch and its combine move for one rank's tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes that the rank sends.
    pub dispatch: Bytes,
    /// Bytes that it receives back.
    pub combine: Bytes,
}

/// How a rank is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reach {
    Own,
    Mapped,
    Far,
    /// Not connected, or masked.
    Excluded,
}

impl DeviceBuffer {
    /// Bytes that the dispatch of `handle`, and a combine with it, move for this rank's tokens. Waits for the dispatch
    /// and reads its routing from the GPU: meant for reports, not for every step.
    ///
    /// # Errors
    /// `Usage` for another buffer's handle; `Timeout`; what the driver reports.
    pub fn traffic(&self, handle: &DeviceHandle) -> Result<Traffic> {
        let inner = &self.0;
        inner.check_handle(handle, handle.layout(), "traffic")?;
        if let Some(last) = handle.last() {
            last.synchronize(inner.config.timeout + inner.context.settings().timeout)?;
        }
        let reach: Vec<Reach> = {
            let state = inner.membership.lock();
            let reach = |rank: u32| match state.peer(rank) {
                _ if rank == inner.me => Reach::Own,
                Some(peer) if !peer.masked && peer.far().is_some() => Reach::Far,
                Some(peer) if !peer.masked => Reach::Mapped,
                _ => Reach::Excluded,
            };
            (0..inner.config.ranks).map(reach).collect()
        };
        let mut routing = self.routing(handle)?;
        if inner.shape.tuning().node > 0 {
            routing.forwarded = forwarded_of(inner, handle)?;
        }
        let config = &inner.config;
        let row = (config.payload.row_bytes(config.hidden) + config.payload.scale_bytes(config.hidden)) as u64;
        let to = routing.bytes(&reach, row, true);
        let back = routing.bytes(&reach, 2 * config.hidden as u64, config.prereduce || handle.layout() == Layout::Rank);
        Ok(Traffic { dispatch: to, combine: back })
    }

    /// The routing of a dispatch that is done, from its handle.
    fn routing(&self, handle: &DeviceHandle) -> Result<Routing> {
        let inner = &self.0;
        let (tokens, ranks) = (handle.tokens() as usize, inner.shape.ranks as usize);
        let parts = inner.shape.handle(crate::handles::layout_of(handle.layout()));
        let read = |part: u64, len: usize| {
            let mut bytes = vec![0; len];
            inner.launches.reader().read(handle.0.address + part, &mut bytes).map(|()| bytes)
        };
        let numbers = |part: u64, each: usize| {
            let bytes = read(part, tokens * each * 4)?;
            Ok::<Vec<u32>, Error>(bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect())
        };
        match handle.layout() {
            Layout::Rank if !inner.shape.slotted() => {
                let at = parts.header + std::mem::offset_of!(EpHandleHeader, selections) as u64;
                let bytes = read(at, 8)?;
                let selections = bytes.as_chunks::<8>().0.first().map_or(0, |bytes| u64::from_le_bytes(*bytes));
                Ok(Routing::of_rows(&numbers(parts.sent_rows, ranks)?, ranks, selections))
            }
            Layout::Expert | Layout::Rank => {
                let (topk, local) = (inner.config.topk, inner.config.local_experts());
                let sent_to = |rank: usize| {
                    let passed = nodes_of(&inner.shape).gateways(inner.me, rank as u32);
                    passed.map_or(rank, |[theirs, _]| theirs as usize)
                };
                Ok(Routing::of_experts(&numbers(parts.sent, topk)?, topk, local, ranks, sent_to))
            }
        }
    }
}

/// Rows that this rank has forwarded to others of its node in a dispatch that is done.
fn forwarded_of(inner: &Inner, handle: &DeviceHandle) -> Result<u64> {
    let (shape, parts) = (&inner.shape, inner.shape.handle(crate::handles::layout_of(handle.layout())));
    let read = |part: u64, len: usize| {
        let mut bytes = vec![0; len];
        inner.launches.reader().read(handle.0.address + part, &mut bytes).map(|()| bytes)
    };
    let nodes = nodes_of(shape);
    let tokens = read(parts.tokens, 4 * shape.ranks as usize)?;
    let tokens: Vec<u32> = tokens.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
    let most = shape.max_tokens as usize;
    let masks = read(parts.sent_rows, 8 * nodes.column() as usize * most)?;
    let masks: Vec<u64> = masks.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
    let node = shape.tuning().node;
    let sources = (1..=nodes.column()).map(|number| (inner.me + number * node) % shape.ranks);
    Ok(forwarded(sources.map(|source| tokens[source as usize] as usize), &masks, most, inner.me % node))
}

/// Selections of a rank's tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Routing {
    /// Selections of all ranks.
    selections: u64,
    /// Selections by rank; empty in the rank layout, which sends a token to a rank once.
    each: Vec<u64>,
    /// Tokens sent to each rank; once per node, to ranks of other nodes by the rank of equal number.
    once: Vec<u64>,
    /// Rows of others that this rank forwards.
    forwarded: u64,
}

/// Rows that rank `me` of its node has forwarded to others: of each source its tokens, and for each of `most` the ranks that
/// have it, as bits in the low half.
fn forwarded(tokens: impl Iterator<Item = usize>, masks: &[u64], most: usize, me: u32) -> u64 {
    let of_source = |(tokens, masks): (usize, &[u64])| -> u64 {
        masks.iter().take(tokens).map(|mask| u64::from((*mask as u32 & !(1 << me)).count_ones())).sum()
    };
    tokens.zip(masks.chunks(most.max(1))).map(of_source).sum()
}

impl Routing {
    /// From each token's experts, `local` of them per rank; -1 as u32 for none.
    /// `sent_to`: the rank to which rows for a rank are sent.
    fn of_experts(
        experts: &[u32],
        topk: usize,
        local: usize,
        ranks: usize,
        sent_to: impl Fn(usize) -> usize,
    ) -> Routing {
        let mut routing = Routing { selections: 0, each: vec![0; ranks], once: vec![0; ranks], forwarded: 0 };
        for token in experts.chunks_exact(topk) {
            let mut met = vec![false; ranks];
            for rank in token.iter().map(|expert| *expert as usize / local).filter(|rank| *rank < ranks) {
                routing.selections += 1;
                routing.each[rank] += 1;
                let rank = sent_to(rank);
                routing.once[rank] += u64::from(!std::mem::replace(&mut met[rank], true));
            }
        }
        routing
    }

    /// From each token's row at each rank, or EP_NOWHERE.
    fn of_rows(rows: &[u32], ranks: usize, selections: u64) -> Routing {
        let mut once = vec![0; ranks];
        for token in rows.chunks_exact(ranks) {
            for (count, row) in once.iter_mut().zip(token) {
                *count += u64::from(*row != EP_NOWHERE);
            }
        }
        Routing { selections, each: Vec::new(), once, forwarded: 0 }
    }

    /// Bytes for rows of `row` bytes: one per selection, or (`once`) one per rank of a token.
    fn bytes(&self, reach: &[Reach], row: u64, once: bool) -> Bytes {
        let mut bytes = Bytes { logical: row * self.selections, ..Bytes::default() };
        for (rows, reach) in if once { &self.once } else { &self.each }.iter().zip(reach) {
            bytes.wire += if matches!(reach, Reach::Mapped | Reach::Far) { row * rows } else { 0 };
            bytes.network += if *reach == Reach::Far { row * rows } else { 0 };
        }
        bytes.wire += row * self.forwarded;
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REACH: [Reach; 4] = [Reach::Own, Reach::Mapped, Reach::Far, Reach::Excluded];

    #[test]
    fn rows_are_counted_once_for_each_rank_and_by_how_it_is_reached() {
        let experts = [0, 1, 2, 4, 5, -1, 6, 7, -1, -1, -1, -1].map(|expert: i32| expert as u32);
        let routing = Routing::of_experts(&experts, 6, 2, 4, |rank| rank);
        assert_eq!(routing.bytes(&REACH, 10, true), Bytes { logical: 70, wire: 20, network: 10 });
        assert_eq!(routing.bytes(&REACH, 10, false), Bytes { logical: 70, wire: 30, network: 20 });
    }

    #[test]
    fn rows_go_once_to_each_node_and_are_forwarded_there() {
        let reach = [Reach::Own, Reach::Mapped, Reach::Far, Reach::Far];
        let experts = [0, 2, 4, 5, 6, 7].map(|expert: i32| expert as u32);
        let mut routing = Routing::of_experts(&experts, 6, 2, 4, |rank| if rank < 2 { rank } else { 2 });
        assert_eq!(routing.bytes(&reach, 10, true), Bytes { logical: 60, wire: 20, network: 10 });
        // Of two sources; the second has one token, and its second mask is of an earlier dispatch.
        let masks = [0b11, 0b10 | 3 << 32, 0b01, 0b11];
        routing.forwarded = forwarded([2, 1].into_iter(), &masks, 2, 0);
        assert_eq!(routing.forwarded, 2);
        assert_eq!(routing.bytes(&reach, 10, true), Bytes { logical: 60, wire: 40, network: 10 });
    }

    #[test]
    fn the_rank_layout_counts_what_its_rows_say() {
        let rows = [[0, 0, 0, EP_NOWHERE], [EP_NOWHERE, 1, EP_NOWHERE, 0], [1, EP_NOWHERE, 1, EP_NOWHERE]].concat();
        let routing = Routing::of_rows(&rows, 4, 9);
        assert_eq!(routing.bytes(&REACH, 10, true), Bytes { logical: 90, wire: 40, network: 20 });
    }
}
