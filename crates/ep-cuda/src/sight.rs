//! What the process's page shows of a buffer: what the host knows by itself. Nothing here waits for the GPU or asks it, so
//! there are no times of operations, and launches of captured graphs are not counted. Bytes by link are those of operations
//! that the buffer has counted (`traffic`); a trace has them, too.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_locks::Mutex;
use crossrail_sight::trace::{Event, EventKind, Trace};
use crossrail_sight::{Kind, Page, Row, Wait, fields, now_ns, ranks_text};
use crossrail_types::{Log, LogLevel, Settings};

use crate::outstanding::Operation;
use crate::proxy::Window;

/// Interval between two counts of bytes by link that no caller asks for.
const COUNTED_EVERY: Duration = Duration::from_secs(1);

/// Bytes that an operation moves at one rank, by link; rows that it forwards are included in both directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkBytes {
    /// Bytes sent to ranks whose memory this GPU writes.
    pub nvlink_out: u64,
    /// Bytes received from such ranks.
    pub nvlink_in: u64,
    /// Bytes sent over the network.
    pub network_out: u64,
    /// Bytes received from the network.
    pub network_in: u64,
}

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
    /// By [`Operation`]: how many were counted, and the row of their bytes by link.
    counted: [Option<(u64, Row)>; 2],
    counted_at: Option<Instant>,
    trace: Option<LinkTrace>,
}

/// Bytes by link as a trace, which is written when this is dropped.
struct LinkTrace {
    trace: Trace,
    folder: PathBuf,
    name: String,
    log: LogLevel,
    is_empty: bool,
}

impl LinkTrace {
    fn add(&mut self, operation: &'static str, links: &LinkBytes) {
        self.is_empty = false;
        let LinkBytes { nvlink_out, nvlink_in, network_out, network_in } = *links;
        let of_link = [
            ("NVLink out", nvlink_out),
            ("NVLink in", nvlink_in),
            ("network out", network_out),
            ("network in", network_in),
        ];
        let (now, kind) = (now_ns(), EventKind::Operation(operation));
        for (track, (name, amount)) in (0..).zip(of_link) {
            self.trace.name_track(track, || name.to_owned());
            self.trace.add(Event { kind, track, begin_ns: now, end_ns: now, amount, flow: 0 });
        }
    }
}

impl Drop for LinkTrace {
    fn drop(&mut self) {
        if self.is_empty {
            return;
        }
        if let Err(error) = self.trace.write(&self.folder, &self.name) {
            Log(self.log).warn(format_args!("CROSSRAIL_TRACE: {}: {error}", self.folder.display()));
        }
    }
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
        let trace = settings.trace.clone().map(|folder| {
            let name = format!("{name} of rank {}, bytes by link", place.0);
            LinkTrace { trace: Trace::default(), folder, name, log: settings.log, is_empty: true }
        });
        Sight(Mutex::new(Shown {
            row,
            page,
            owner,
            gpu,
            begun,
            operations: 0,
            members,
            waits,
            next_wait: 0,
            counted: [None, None],
            counted_at: None,
            trace,
        }))
    }

    /// True, at most once per interval, if bytes by link are shown: the caller counts them.
    pub(crate) fn is_count_due(&self) -> bool {
        let mut shown = self.0.lock();
        let is_shown = shown.row.is_there() || shown.trace.is_some();
        let due = is_shown && shown.counted_at.is_none_or(|at| at.elapsed() >= COUNTED_EVERY);
        if due {
            shown.counted_at = Some(Instant::now());
        }
        due
    }

    /// Bytes by link of a dispatch and its combine were counted. `name`: of the buffer.
    pub(crate) fn counted(&self, name: &str, links: [LinkBytes; 2]) {
        use fields::exchange as field;
        let mut shown = self.0.lock();
        for (kind, links) in [Operation::Dispatch, Operation::Combine].into_iter().zip(links) {
            let (page, owner) = (shown.page.clone(), shown.owner);
            let row = || (0, Row::new(page.as_ref(), Kind::Exchange, owner, name, kind.name()));
            let (count, row) = shown.counted[kind as usize].get_or_insert_with(row);
            *count += 1;
            row.write(|writer| {
                writer.set(field::counted, *count);
                writer.set(field::nvlink_out_bytes, links.nvlink_out);
                writer.set(field::nvlink_in_bytes, links.nvlink_in);
                writer.set(field::network_out_bytes, links.network_out);
                writer.set(field::network_in_bytes, links.network_in);
            });
            if let Some(trace) = &mut shown.trace {
                trace.add(kind.name(), &links);
            }
        }
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
        let traces = folder.join("traces");
        std::fs::create_dir_all(&traces).unwrap();
        let given = [("CROSSRAIL_PAGES", &folder), ("CROSSRAIL_TRACE", &traces)];
        let settings = Settings::from_pairs(given.map(|(name, folder)| (name, folder.to_str().unwrap()))).unwrap();
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

        assert!(sight.is_count_due());
        let links = |first: u64| LinkBytes {
            nvlink_out: first,
            nvlink_in: first + 1,
            network_out: first + 2,
            network_in: first + 3,
        };
        sight.counted(NAME, [links(50), links(60)]);
        sight.counted(NAME, [links(10), links(20)]);
        assert!(!sight.is_count_due(), "a moment ago");
        let exchanges: Vec<RowSnapshot> = parse(&summary()).unwrap().rows;
        let exchanges = exchanges.iter().filter(|row| row.kind == Kind::Exchange && row.name == NAME);
        let mut exchanges: Vec<(&str, Vec<u64>)> = exchanges
            .map(|row| (row.peer.as_str(), numbers(row).iter().map(|(_, number)| *number).collect()))
            .collect();
        // Other tests free rows of the page, which are taken in any order.
        exchanges.sort_unstable();
        assert_eq!(exchanges, [("combine", vec![2, 20, 21, 22, 23]), ("dispatch", vec![2, 10, 11, 12, 13])]);
        drop(sight);
        assert!(found().is_none());
        let texts =
            std::fs::read_dir(&traces).unwrap().map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap());
        let text: String = texts.collect();
        assert!(
            text.contains("experts that are seen of rank 1, bytes by link") && text.contains("network in"),
            "{text}"
        );
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
