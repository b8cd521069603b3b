//! Bytes that an operation moves, computed from its routing.

use crossrail_ep::{Bytes, Layout};
use crossrail_kernels::ep::{RankRows, Rows, Way};
use crossrail_types::Result;

use crate::handles::{DeviceHandle, layout_of};
use crate::inner::Inner;
use crate::sight::LinkBytes;

/// Bytes of rows and their scales that a dispatch and its combine move for one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Its dispatch.
    pub dispatch: Moved,
    /// A combine with its handle.
    pub combine: Moved,
}

/// Bytes that an operation moves at one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Bytes for the rank's own tokens, and for those that it forwards: of a dispatch those that it sends, of a combine those
    /// that it receives.
    pub bytes: Bytes,
    /// Bytes by link.
    pub links: LinkBytes,
}

/// Counts the bytes by link of the last dispatch for the page and the trace, if its handle still exists, and these were
/// counted a while ago. Called while no kernel runs.
pub(crate) fn show(inner: &Inner) {
    // A graph may be replayed at any time.
    let last = inner.results.last_dispatch().filter(|handle| !handle.is_captured());
    let Some(handle) = last.filter(|_| inner.sight.is_count_due()) else { return };
    if let Err(error) = count(inner, &handle) {
        inner.membership.meeting().warn(&error);
    }
}

/// Bytes of the dispatch of `handle`, and of a combine with it.
///
/// # Errors
/// As `DeviceBuffer::traffic`.
pub(crate) fn count(inner: &Inner, handle: &DeviceHandle) -> Result<Traffic> {
    inner.check_handle(handle, handle.layout(), "traffic")?;
    if let Some(last) = handle.last() {
        last.synchronize(inner.config.timeout + inner.context.settings().timeout)?;
    }
    let ways: Vec<Way> = {
        let state = inner.membership.lock();
        let way = |rank: u32| match state.peer(rank) {
            Some(peer) if rank != inner.me && !peer.masked && peer.far().is_some() => Way::Network,
            Some(peer) if rank != inner.me && !peer.masked => Way::Near,
            _ => Way::None,
        };
        (0..inner.config.ranks).map(way).collect()
    };
    let read = |part: u64, len: usize| {
        let mut bytes = vec![0; len];
        inner.launches.reader().read(handle.0.address + part, &mut bytes).map(|()| bytes)
    };
    let rows = RankRows::of(&inner.shape, layout_of(handle.layout()), inner.me, &read, |rank| ways[rank as usize])?;
    let config = &inner.config;
    let row = (config.payload.row_bytes(config.hidden) + config.payload.scale_bytes(config.hidden)) as u64;
    let summed = config.prereduce || handle.layout() == Layout::Rank;
    let (dispatch, combine) = (sent(&rows, row), returned(&rows, 2 * config.hidden as u64, summed));
    inner.sight.counted(&inner.name, [dispatch.links, combine.links]);
    Ok(Traffic { dispatch, combine })
}

/// Of a dispatch with rows of `row` bytes.
fn sent(rows: &RankRows, row: u64) -> Moved {
    let RankRows { selections, own, forwarded, received, .. } = *rows;
    Moved::of(row, selections, [Rows { near: own.near + forwarded, ..own }, received], 0)
}

/// Of its combine; `summed`: one row returns for each token and rank, not for each selection.
fn returned(rows: &RankRows, row: u64, summed: bool) -> Moved {
    let RankRows { selections, own, forwarded, received, own_each, received_each } = *rows;
    let (own, received) = if summed { (own, received) } else { (own_each, received_each) };
    Moved::of(row, selections, [received, Rows { near: own.near + forwarded, ..own }], 1)
}

impl Moved {
    /// Of rows out and in, those of `tokens` for the rank's own tokens.
    fn of(row: u64, selections: u64, ways: [Rows; 2], tokens: usize) -> Moved {
        let [out, into] = ways;
        let Rows { near, network } = ways[tokens];
        Moved {
            bytes: Bytes { logical: row * selections, wire: row * (near + network), network: row * network },
            links: LinkBytes {
                nvlink_out: row * out.near,
                nvlink_in: row * into.near,
                network_out: row * out.network,
                network_in: row * into.network,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_combine_moves_the_rows_of_its_dispatch_in_the_opposite_direction() {
        let rows = RankRows {
            selections: 9,
            own: Rows { near: 3, network: 2 },
            forwarded: 1,
            received: Rows { near: 5, network: 4 },
            own_each: Rows { near: 4, network: 3 },
            received_each: Rows { near: 7, network: 6 },
        };
        let links = |nvlink_out, nvlink_in, network_out, network_in| LinkBytes {
            nvlink_out,
            nvlink_in,
            network_out,
            network_in,
        };
        let dispatch = sent(&rows, 10);
        assert_eq!(dispatch.links, links(40, 50, 20, 40));
        assert_eq!(dispatch.bytes, Bytes { logical: 90, wire: 60, network: 20 });
        let combine = returned(&rows, 2, true);
        assert_eq!(combine.links, links(10, 8, 8, 4));
        assert_eq!(combine.bytes, Bytes { logical: 18, wire: 12, network: 4 });
        assert_eq!(returned(&rows, 2, false).links, links(14, 10, 12, 6));
    }
}
