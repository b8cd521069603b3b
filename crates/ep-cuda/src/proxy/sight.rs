//! The proxy's rows of the process's page: one for each far rank, one for each of its rails, one for each thread; and
//! the trace of a lane.
//!
//! The first lane's thread writes the rows of a far rank, from what all lanes have reported to it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_sight::trace::{Event, EventKind, Trace};
use crossrail_sight::{Kind, Page, Row, fields, now_ns};
use crossrail_types::{Log, LogLevel};

use crate::proxy::shared::FarRank;

/// Interval between two writes of the same rows.
pub(super) const SHOWN_EVERY: Duration = Duration::from_millis(100);

/// Page and folder in which the proxy of a buffer is shown.
#[derive(Clone, Debug, Default)]
pub(crate) struct Window {
    /// Name of the buffer.
    pub(crate) name: String,
    /// This rank.
    pub(crate) rank: u32,
    pub(crate) page: Option<Arc<Page>>,
    /// Owner of the buffer's rows.
    pub(crate) owner: u32,
    /// Folder of traces.
    pub(crate) traces: Option<PathBuf>,
    pub(crate) log: LogLevel,
}

/// The rows of a far rank.
pub(super) struct FarRows {
    row: Row,
    rails: Vec<(String, Row)>,
}

impl FarRows {
    pub(super) fn new(window: &Window, rank: u32) -> FarRows {
        let peer = format!("rank {rank}");
        let mut row = Row::new(window.page.as_ref(), Kind::Proxy, window.owner, &window.name, &peer);
        row.write(|writer| writer.set(fields::proxy::rank, rank.into()));
        FarRows { row, rails: Vec::new() }
    }

    pub(super) fn write(&mut self, window: &Window, far: &FarRank) {
        if !self.row.is_there() {
            return;
        }
        let (report, bursts) = far.reported();
        let lost = report.rails.iter().filter(|rail| rail.lost.is_some()).count() as u64;
        self.row.write(|writer| {
            writer.set(fields::proxy::commands, report.commands);
            writer.set(fields::proxy::sent_bytes, report.sent_bytes);
            writer.set(fields::proxy::pending, report.pending);
            writer.set(fields::proxy::in_flight, report.in_flight);
            writer.set(fields::proxy::rails, report.rails.len() as u64 - lost);
            writer.set(fields::proxy::lost_rails, lost);
            writer.histogram(fields::proxy::burst_seconds, &bursts);
        });
        for rail in report.rails {
            let known = self.rails.iter().position(|(name, _)| *name == rail.name);
            let at = known.unwrap_or_else(|| {
                let peer = format!("{}, rank {}", window.name, far.rank);
                let row = Row::new(window.page.as_ref(), Kind::Link, window.owner, &rail.name, &peer);
                self.rails.push((rail.name.clone(), row));
                self.rails.len() - 1
            });
            self.rails[at].1.write(|writer| {
                writer.set(fields::link::sent_bytes, rail.sent_bytes);
                writer.set(fields::link::received_bytes, rail.received_bytes);
            });
        }
    }
}

/// State of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Asleep = 0,
    Napping = 1,
    Polling = 2,
}

/// The row of a thread.
pub(super) struct ThreadRow {
    row: Row,
    state: State,
    /// Since when it polls.
    since: Instant,
    polled: Duration,
    wake_ups: u64,
}

impl ThreadRow {
    pub(super) fn new(window: &Window, thread: &str) -> ThreadRow {
        let peer = format!("{}, rank {}", window.name, window.rank);
        let row = Row::new(window.page.as_ref(), Kind::ProxyThread, window.owner, thread, &peer);
        let mut thread =
            ThreadRow { row, state: State::Polling, since: Instant::now(), polled: Duration::ZERO, wake_ups: 1 };
        thread.write();
        thread
    }

    pub(super) fn enter(&mut self, state: State) {
        if state == self.state {
            return;
        }
        if self.state == State::Polling {
            self.polled += self.since.elapsed();
        }
        if state == State::Polling {
            self.since = Instant::now();
            self.wake_ups += 1;
        }
        self.state = state;
        self.write();
    }

    /// Shows how long it has polled by now.
    pub(super) fn write(&mut self) {
        let running = if self.state == State::Polling { self.since.elapsed() } else { Duration::ZERO };
        let polled = (self.polled + running).as_nanos() as u64;
        let ThreadRow { row, state, wake_ups, .. } = self;
        row.write(|writer| {
            writer.set(fields::proxy_thread::state, *state as u64);
            writer.set(fields::proxy_thread::polling_seconds, polled);
            writer.set(fields::proxy_thread::wake_ups, *wake_ups);
        });
    }
}

/// The bursts of a lane as a trace, which is written when this is dropped.
pub(super) struct LaneTrace {
    trace: Trace,
    folder: PathBuf,
    name: String,
    log: LogLevel,
    is_empty: bool,
}

impl LaneTrace {
    /// `None` without a folder.
    pub(super) fn new(window: &Window, lane: usize) -> Option<LaneTrace> {
        let folder = window.traces.clone()?;
        let name = format!("{} of rank {}, proxy lane {lane}", window.name, window.rank);
        Some(LaneTrace { trace: Trace::default(), folder, name, log: window.log, is_empty: true })
    }

    /// A burst for `rank` is in place, of which the first command was read at `begin_ns`.
    pub(super) fn burst(&mut self, rank: u32, begin_ns: u64, amount: u64) {
        self.is_empty = false;
        self.trace.name_track(rank.into(), || format!("to rank {rank}"));
        let kind = EventKind::Operation("burst");
        self.trace.add(Event { kind, track: rank.into(), begin_ns, end_ns: now_ns(), amount, flow: 0 });
    }
}

impl Drop for LaneTrace {
    fn drop(&mut self) {
        if self.is_empty {
            return;
        }
        if let Err(error) = self.trace.write(&self.folder, &self.name) {
            Log(self.log).warn(format_args!("CROSSRAIL_TRACE: {}: {error}", self.folder.display()));
        }
    }
}
