//! What an operation moves, worked out from its routing.

use crossrail_ep::{Bytes, Layout};
use crossrail_types::Result;

use crate::buffer::DeviceBuffer;
use crate::handles::DeviceHandle;

/// Bytes of rows and their scales that a dispatch and its combine move for one rank's tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// What the rank sends.
    pub dispatch: Bytes,
    /// What comes back to it.
    pub combine: Bytes,
}

/// How a rank is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reach {
    Here,
    Near,
    Far,
    /// Not connected, or masked.
    Not,
}

impl DeviceBuffer {
    /// What the dispatch of `handle`, and a combine with it, move for this rank's tokens. It reads the routing back from
    /// the GPU, so it waits for the dispatch: for reports, not for every step.
    ///
    /// # Errors
    /// `Usage` for another buffer's handle; `Timeout`; what the driver says.
    pub fn traffic(&self, handle: &DeviceHandle) -> Result<Traffic> {
        let inner = &self.0;
        inner.check_handle(handle, handle.layout(), "traffic")?;
        if let Some(last) = handle.last() {
            last.synchronize(inner.config.timeout + inner.context.settings().timeout)?;
        }
        let topk = inner.config.topk;
        let mut bytes = vec![0; handle.tokens() as usize * topk * 4];
        let sent = inner.shape.handle(crate::handles::layout_of(handle.layout())).sent;
        inner.reader.read(handle.0.address + sent, &mut bytes)?;
        let experts: Vec<i32> = bytes.as_chunks::<4>().0.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect();
        let reach: Vec<Reach> = {
            let state = inner.state.lock();
            let reach = |(rank, peer): (usize, &Option<crate::peer::Peer>)| match peer {
                _ if rank == inner.me as usize => Reach::Here,
                Some(peer) if !peer.masked && peer.far().is_some() => Reach::Far,
                Some(peer) if !peer.masked => Reach::Near,
                _ => Reach::Not,
            };
            state.peers.iter().enumerate().map(reach).collect()
        };
        let config = &inner.config;
        let row = (config.payload.row_bytes(config.hidden) + config.payload.scale_bytes(config.hidden)) as u64;
        let local = config.local_experts();
        let once = config.prereduce || handle.layout() == Layout::Rank;
        let [to, back] = [(row, true), (2 * config.hidden as u64, once)]
            .map(|(row, once)| count(experts.chunks_exact(topk), local, &reach, row, once));
        Ok(Traffic { dispatch: to, combine: back })
    }
}

/// Adds up rows of `row` bytes: one for each selection, or `once` for each rank of a token.
fn count<'a>(tokens: impl Iterator<Item = &'a [i32]>, local: usize, reach: &[Reach], row: u64, once: bool) -> Bytes {
    let mut bytes = Bytes::default();
    for experts in tokens {
        let mut ranks: Vec<usize> = experts.iter().filter_map(|id| Some(usize::try_from(*id).ok()? / local)).collect();
        bytes.logical += row * ranks.len() as u64;
        if once {
            ranks.sort_unstable();
            ranks.dedup();
        }
        for rank in ranks {
            let reach = reach.get(rank).copied().unwrap_or(Reach::Not);
            bytes.wire += if matches!(reach, Reach::Near | Reach::Far) { row } else { 0 };
            bytes.network += if reach == Reach::Far { row } else { 0 };
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_counted_once_for_each_rank_and_by_how_it_is_reached() {
        let reach = [Reach::Here, Reach::Near, Reach::Far, Reach::Not];
        let experts = [0, 1, 2, 4, 5, -1, 6, 7, -1, -1, -1, -1];
        let tokens = || experts.chunks_exact(6);
        let bytes = count(tokens(), 2, &reach, 10, true);
        assert_eq!(bytes, Bytes { logical: 70, wire: 20, network: 10 });
        let bytes = count(tokens(), 2, &reach, 10, false);
        assert_eq!(bytes, Bytes { logical: 70, wire: 30, network: 20 });
    }
}
