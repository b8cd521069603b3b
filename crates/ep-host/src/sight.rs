//! What the process's page shows of a buffer: how many operations there were, how long they took, and for whom the
//! present one waits.

use std::time::{Duration, Instant};

use crossrail_sight::{Histogram, Kind, Row, Wait, fields, now_ns};
use crossrail_types::{Log, Settings};

use crate::local_rank::GroupView;
use crate::operation::Common;

/// A wait shorter than this is not shown.
const SHOWN_FROM: Duration = Duration::from_millis(10);
/// How often the members are counted.
const MEMBERS_EVERY: Duration = Duration::from_millis(50);

/// The buffer's row of the page. Written by whoever holds the lock of the [`GroupView`].
pub(crate) struct Sight {
    row: Row,
    took: Histogram,
    /// A wait is shown.
    waits: bool,
    members_at: Option<Instant>,
}

impl Sight {
    /// The row of the buffer `name`, which takes `memory` bytes; `place`: this rank, and the ranks of the buffer.
    pub(crate) fn new(settings: &Settings, name: &str, place: (u32, u32), memory: u64) -> Sight {
        let page = settings.pages.as_deref().and_then(|folder| crossrail_sight::open(folder, Log(settings.log)));
        let owner = page.as_ref().map_or(0, |page| page.owner());
        let mut row = Row::new(page.as_ref(), Kind::Buffer, owner, name, "");
        row.write(|writer| {
            writer.set(fields::buffer::rank, place.0.into());
            writer.set(fields::buffer::ranks, place.1.into());
            writer.set(fields::buffer::memory_bytes, memory);
        });
        Sight { row, took: Histogram::default(), waits: false, members_at: None }
    }
}

impl GroupView {
    /// The operation still waits for the messages in `common.expected`. For calls that are milliseconds apart.
    pub(crate) fn show_wait(&mut self, common: &Common) {
        let waited = common.began.elapsed();
        if waited < SHOWN_FROM {
            return;
        }
        let mut ranks: Vec<u32> = common.expected.iter().map(|expected| expected.rank as u32).collect();
        ranks.sort_unstable();
        ranks.dedup();
        let since_ns = now_ns().saturating_sub(waited.as_nanos() as u64);
        let whom = crossrail_sight::ranks_text(&ranks);
        let wait = Wait { operation: common.name.to_owned(), since_ns, number: common.number, whom, ranks };
        self.sight.waits = true;
        self.show_numbers(Some(&wait));
    }

    /// The operation has ended.
    pub(crate) fn show_end(&mut self, common: &Common) {
        self.sight.took.add(common.began.elapsed().as_nanos() as u64);
        self.sight.waits = false;
        self.show_numbers(None);
    }

    fn show_numbers(&mut self, wait: Option<&Wait>) {
        use fields::buffer as field;
        let (dispatches, combines, operations) = (self.dispatches, self.combines, self.operations);
        let now = Instant::now();
        let due = self.sight.members_at.is_none_or(|at| now - at >= MEMBERS_EVERY);
        let members = due.then(|| {
            let peers = || self.peers.iter().flatten();
            (peers().count() as u64, peers().filter(|peer| peer.masked).count() as u64, self.faults.len() as u64)
        });
        if due {
            self.sight.members_at = Some(now);
        }
        let Sight { row, took, .. } = &mut self.sight;
        row.write(|writer| {
            writer.set(field::dispatches, dispatches);
            writer.set(field::combines, combines);
            writer.set(field::operations, operations);
            writer.histogram(field::operation_seconds, took);
            if let Some((connected, masked, lost)) = members {
                writer.set(field::connected, connected);
                writer.set(field::masked, masked);
                writer.set(field::lost, lost);
            }
            writer.wait(wait);
        });
    }
}
