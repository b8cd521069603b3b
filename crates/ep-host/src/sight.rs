//! What the process's page shows of a buffer: how many operations there were, how long they took, and for whom the
//! present one waits.

use std::time::{Duration, Instant};

use crossrail_sight::{Histogram, Kind, Row, Wait, fields};
use crossrail_types::{Log, Settings};

/// A wait shorter than this is not shown.
const SHOWN_FROM: Duration = Duration::from_millis(10);
/// How often the members are counted.
const MEMBERS_EVERY: Duration = Duration::from_millis(50);

/// The buffer's row of the page. Written by whoever holds the lock of the
/// [`GroupView`](crate::local_rank::GroupView).
pub(crate) struct Sight {
    row: Row,
    took: Histogram,
    members_at: Option<Instant>,
}

/// Counts of ranks by state.
pub(crate) struct Members {
    /// Connected, this one included.
    pub(crate) connected: u64,
    /// Connected, but masked.
    pub(crate) masked: u64,
    /// Lost so far.
    pub(crate) lost: u64,
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
        Sight { row, took: Histogram::default(), members_at: None }
    }

    /// Whether a wait of that length is shown.
    pub(crate) fn shows(waited: Duration) -> bool {
        waited >= SHOWN_FROM
    }

    /// An operation has ended that took so long.
    pub(crate) fn ended(&mut self, took: Duration) {
        self.took.add(took.as_nanos() as u64);
    }

    /// Members have changed: they are counted for the next write.
    pub(crate) fn count_members(&mut self) {
        self.members_at = None;
    }

    /// Writes the row: how many dispatches, combines and operations there were, the ranks as `members` counts them, if
    /// that is due, and the wait in progress.
    pub(crate) fn write(&mut self, counts: [u64; 3], members: impl FnOnce() -> Members, wait: Option<&Wait>) {
        use fields::buffer as field;
        let now = Instant::now();
        let due = self.members_at.is_none_or(|at| now - at >= MEMBERS_EVERY);
        let members = due.then(members);
        if due {
            self.members_at = Some(now);
        }
        let Sight { row, took, .. } = self;
        let [dispatches, combines, operations] = counts;
        row.write(|writer| {
            writer.set(field::dispatches, dispatches);
            writer.set(field::combines, combines);
            writer.set(field::operations, operations);
            writer.histogram(field::operation_seconds, took);
            if let Some(Members { connected, masked, lost }) = members {
                writer.set(field::connected, connected);
                writer.set(field::masked, masked);
                writer.set(field::lost, lost);
            }
            writer.wait(wait);
        });
    }
}
