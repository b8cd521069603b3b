//! What the process's page shows of a buffer: what the host knows by itself. Nothing here waits for the GPU or asks it, so
//! there are no times of operations, and launches of captured graphs are not counted.

use std::sync::Arc;
use std::time::Instant;

use crossrail_locks::Mutex;
use crossrail_sight::{Kind, Page, Row, Wait, fields, now_ns, ranks_text};
use crossrail_types::{Log, Settings};

use crate::outstanding::Operation;
use crate::proxy::Window;

/// The buffer's row of the page. Its lock is taken last, and held for moments only.
pub(crate) struct Sight(Mutex<Shown>);

struct Shown {
    row: Row,
    page: Option<Arc<Page>>,
    owner: u32,
    gpu: String,
    /// By [`Operation`].
    begun: [u64; 2],
    operations: u64,
    members: Members,
    /// Waits of the host in progress, each with a number of its own.
    waits: Vec<(u64, Wait)>,
    next_wait: u64,
}

/// Counts of ranks by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Members {
    /// Connected, this one included.
    pub(crate) connected: u64,
    /// Connected, but masked.
    pub(crate) masked: u64,
    /// Lost so far.
    pub(crate) lost: u64,
}

impl Sight {
    /// The row of the buffer `name` on GPU `ordinal`, which takes `memory` bytes there; `place`: this rank, and the
    /// ranks of the buffer.
    pub(crate) fn new(settings: &Settings, name: &str, place: (u32, u32), ordinal: u32, memory: u64) -> Sight {
        let page = settings.pages.as_deref().and_then(|folder| crossrail_sight::open(folder, Log(settings.log)));
        let owner = page.as_ref().map_or(0, |page| page.owner());
        let mut row = Row::new(page.as_ref(), Kind::Buffer, owner, name, "");
        row.write(|writer| {
            writer.set(fields::buffer::rank, place.0.into());
            writer.set(fields::buffer::ranks, place.1.into());
            writer.set(fields::buffer::memory_bytes, memory);
        });
        let (begun, members, waits) = ([0; 2], Members::default(), Vec::new());
        let gpu = format!("cuda:{ordinal}");
        Sight(Mutex::new(Shown { row, page, owner, gpu, begun, operations: 0, members, waits, next_wait: 0 }))
    }

    /// Page and folder in which the proxy of the buffer `name` is shown.
    pub(crate) fn window(&self, settings: &Settings, name: &str, rank: u32) -> Window {
        let shown = self.0.lock();
        let (page, owner) = (shown.page.clone(), shown.owner);
        Window { name: name.to_owned(), rank, page, owner, traces: settings.trace.clone(), log: settings.log }
    }

    /// An operation was enqueued.
    pub(crate) fn begun(&self, kind: Operation, members: Members) {
        let mut shown = self.0.lock();
        shown.begun[kind as usize] += 1;
        shown.operations += 1;
        shown.members = members;
        shown.write();
    }

    /// A synchronisation has begun.
    pub(crate) fn synchronising(&self) {
        let mut shown = self.0.lock();
        shown.operations += 1;
        shown.write();
    }

    /// The ranks have changed.
    pub(crate) fn members(&self, members: Members) {
        let mut shown = self.0.lock();
        shown.members = members;
        shown.write();
    }

    /// The calling thread has been waiting `since` then, until the answer is dropped: for these ranks, or, without any,
    /// for the GPU.
    pub(crate) fn waiting(&self, operation: &'static str, since: Instant, ranks: &[u32]) -> Waiting<'_> {
        let mut shown = self.0.lock();
        shown.next_wait += 1;
        let number = shown.next_wait;
        let wait = Wait {
            operation: operation.to_owned(),
            since_ns: now_ns().saturating_sub(since.elapsed().as_nanos() as u64),
            number: shown.operations,
            whom: if ranks.is_empty() { shown.gpu.clone() } else { ranks_text(ranks) },
            ranks: ranks.to_vec(),
        };
        shown.waits.push((number, wait));
        shown.write();
        Waiting { sight: self, number }
    }
}

impl Shown {
    fn write(&mut self) {
        use fields::buffer as field;
        let Shown { row, begun, operations, members, waits, .. } = self;
        let oldest = waits.iter().map(|(_, wait)| wait).min_by_key(|wait| wait.since_ns);
        row.write(|writer| {
            writer.set(field::dispatches, begun[Operation::Dispatch as usize]);
            writer.set(field::combines, begun[Operation::Combine as usize]);
            writer.set(field::operations, *operations);
            writer.set(field::connected, members.connected);
            writer.set(field::masked, members.masked);
            writer.set(field::lost, members.lost);
            writer.wait(oldest);
        });
    }
}

/// A wait that the page shows until this is dropped.
pub(crate) struct Waiting<'a> {
    sight: &'a Sight,
    number: u64,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut shown = self.sight.0.lock();
        shown.waits.retain(|(number, _)| *number != self.number);
        shown.write();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crossrail_sight::{RowSnapshot, Value, parse, summary};

    use super::*;

    /// The page is the process's, in which other tests run.
    const NAME: &str = "experts that are seen";

    fn found() -> Option<RowSnapshot> {
        let rows = parse(&summary()).ok()?.rows;
        rows.into_iter().find(|row| row.kind == Kind::Buffer && row.name == NAME)
    }

    fn row() -> RowSnapshot {
        found().expect("the buffer's row")
    }

    fn numbers(row: &RowSnapshot) -> Vec<(&'static str, u64)> {
        let named = row.kind.fields().iter().zip(&row.values);
        named
            .filter_map(|(field, value)| match value {
                Value::Number(number) => Some((field.name, *number)),
                Value::Numbers(_) => None,
            })
            .collect()
    }

    #[test]
    fn a_buffers_row_counts_operations_and_shows_the_oldest_wait() {
        let folder = std::env::temp_dir().join(format!("crossrail-ep-cuda-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let settings = Settings::from_pairs([("CROSSRAIL_PAGES", folder.to_str().unwrap())]).unwrap();
        let sight = Sight::new(&settings, NAME, (1, 4), 3, 4096);
        sight.begun(Operation::Dispatch, Members { connected: 4, masked: 1, lost: 0 });
        sight.begun(Operation::Combine, Members { connected: 4, masked: 1, lost: 0 });
        sight.begun(Operation::Dispatch, Members { connected: 4, masked: 2, lost: 1 });
        sight.synchronising();
        let seen = row();
        assert_eq!(seen.wait, None);
        let expected = [
            ("rank", 1),
            ("ranks", 4),
            ("connected", 4),
            ("masked", 2),
            ("lost", 1),
            ("memory_bytes", 4096),
            ("dispatches", 2),
            ("combines", 1),
            ("operations", 4),
        ];
        assert_eq!(numbers(&seen), expected);

        let now = Instant::now();
        let younger = sight.waiting("kernels", now, &[]);
        let older = sight.waiting("sync", now - Duration::from_millis(5), &[0, 2]);
        let wait = row().wait.unwrap();
        assert_eq!((wait.operation.as_str(), wait.whom.as_str(), wait.ranks), ("sync", "ranks 0, 2", vec![0, 2]));
        drop(older);
        let wait = row().wait.unwrap();
        assert_eq!((wait.operation.as_str(), wait.whom.as_str(), wait.ranks), ("kernels", "cuda:3", vec![]));
        drop(younger);
        assert_eq!(row().wait, None);
        drop(sight);
        assert!(found().is_none());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
