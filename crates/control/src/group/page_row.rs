//! The page's row for a membership: the ranks that this rank waits for.

use std::path::Path;
use std::time::Instant;

use crossrail_locks::Mutex;
use crossrail_sight::{Kind, Row, Wait, fields, now_ns, ranks_text};
use crossrail_types::Log;

/// The membership's row of the page. Any thread may write it; of several waits it shows the one that began first.
pub(super) struct PageRow(Mutex<Shown>);

struct Shown {
    row: Row,
    /// A wait is shown, and the thread that showed it must remove it.
    taken: bool,
    barriers: u64,
}

/// One thread's wait, shown while this lives.
pub(super) struct Waiting<'a> {
    page_row: &'a PageRow,
    operation: &'a str,
    began: Instant,
    shown: bool,
}

impl PageRow {
    /// The row of the group `name`; `place`: this rank, and the ranks of the group.
    pub(super) fn new(folder: Option<&Path>, log: Log, name: &str, place: (u32, u32)) -> PageRow {
        let page = folder.and_then(|folder| crossrail_sight::open(folder, log));
        let owner = page.as_ref().map_or(0, |page| page.owner());
        let mut row = Row::new(page.as_ref(), Kind::Group, owner, name, "");
        row.write(|writer| {
            writer.set(fields::group::rank, place.0.into());
            writer.set(fields::group::ranks, place.1.into());
        });
        PageRow(Mutex::new(Shown { row, taken: false, barriers: 0 }))
    }

    /// A wait that began at `began`, not shown yet.
    pub(super) fn waiting<'a>(&'a self, operation: &'a str, began: Instant) -> Waiting<'a> {
        Waiting { page_row: self, operation, began, shown: false }
    }

    /// A barrier is complete.
    pub(super) fn count_barrier(&self) {
        let mut shown = self.0.lock();
        shown.barriers += 1;
        let barriers = shown.barriers;
        shown.row.write(|writer| writer.set(fields::group::barriers, barriers));
    }
}

impl Waiting<'_> {
    /// Shows that these ranks are missing.
    pub(super) fn show(&mut self, missing: &[u32]) {
        let mut shown = self.page_row.0.lock();
        if shown.taken && !self.shown {
            return;
        }
        shown.taken = true;
        self.shown = true;
        let wait = Wait {
            operation: self.operation.to_owned(),
            since_ns: now_ns().saturating_sub(self.began.elapsed().as_nanos() as u64),
            number: shown.barriers,
            whom: ranks_text(missing),
            ranks: missing.to_vec(),
        };
        shown.row.write(|writer| writer.wait(Some(&wait)));
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.shown {
            let mut shown = self.page_row.0.lock();
            shown.taken = false;
            shown.row.write(|writer| writer.wait(None));
        }
    }
}
