//! Bytes that an operation moves, computed from its routing.

use crossrail_ep::{Bytes, Layout};
use crossrail_kernels::ep::{EP_NOWHERE, EpHandleHeader};
use crossrail_types::{Error, Result};

use crate::buffer::DeviceBuffer;
use crate::handles::DeviceHandle;

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
        let routing = self.routing(handle)?;
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
                Ok(Routing::of_experts(&numbers(parts.sent, topk)?, topk, local, ranks))
            }
        }
    }
}

/// Selections of a rank's tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Routing {
    /// Selections of all ranks.
    selections: u64,
    /// Selections by rank; empty in the rank layout, which sends a token to a rank once.
    each: Vec<u64>,
    /// Tokens sent to each rank.
    once: Vec<u64>,
}

impl Routing {
    /// From each token's experts, `local` of them per rank; -1 as u32 for none.
    fn of_experts(experts: &[u32], topk: usize, local: usize, ranks: usize) -> Routing {
        let mut routing = Routing { selections: 0, each: vec![0; ranks], once: vec![0; ranks] };
        for token in experts.chunks_exact(topk) {
            let mut met = vec![false; ranks];
            for rank in token.iter().map(|expert| *expert as usize / local).filter(|rank| *rank < ranks) {
                routing.selections += 1;
                routing.each[rank] += 1;
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
        Routing { selections, each: Vec::new(), once }
    }

    /// Bytes for rows of `row` bytes: one per selection, or (`once`) one per rank of a token.
    fn bytes(&self, reach: &[Reach], row: u64, once: bool) -> Bytes {
        let mut bytes = Bytes { logical: row * self.selections, ..Bytes::default() };
        for (rows, reach) in if once { &self.once } else { &self.each }.iter().zip(reach) {
            bytes.wire += if matches!(reach, Reach::Mapped | Reach::Far) { row * rows } else { 0 };
            bytes.network += if *reach == Reach::Far { row * rows } else { 0 };
        }
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
        let routing = Routing::of_experts(&experts, 6, 2, 4);
        assert_eq!(routing.bytes(&REACH, 10, true), Bytes { logical: 70, wire: 20, network: 10 });
        assert_eq!(routing.bytes(&REACH, 10, false), Bytes { logical: 70, wire: 30, network: 20 });
    }

    #[test]
    fn the_rank_layout_counts_what_its_rows_say() {
        let rows = [[0, 0, 0, EP_NOWHERE], [EP_NOWHERE, 1, EP_NOWHERE, 0], [1, EP_NOWHERE, 1, EP_NOWHERE]].concat();
        let routing = Routing::of_rows(&rows, 4, 9);
        assert_eq!(routing.bytes(&REACH, 10, true), Bytes { logical: 90, wire: 40, network: 20 });
    }
}
