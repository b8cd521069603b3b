//! A thread of the proxy: reads rings, drives rails, sleeps when there is nothing to do.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::proxy::link::Link;
use crate::proxy::ring::Ring;
use crate::proxy::sight::{LaneTrace, SHOWN_EVERY, State, ThreadRow};
use crate::proxy::{Change, Common, Window};

/// Time that a thread polls without a pause when nothing moves.
const SPIN: Duration = Duration::from_millis(2);
/// Length of its naps after that: replays of graphs ring no doorbell.
const NAP: Duration = Duration::from_micros(50);
/// Time during which it takes such naps.
const ALERT: Duration = Duration::from_secs(2);
/// Length of its naps after that, if no graph was captured.
const DOZE: Duration = Duration::from_millis(5);
/// Commands that are read before rails move: as many as make long ranges of short ones.
const READ_AT_ONCE: usize = 1024;

/// A ring, and the links over which its commands go.
pub(crate) struct Lane {
    ring: Ring,
    /// By rank.
    links: Vec<Option<Link>>,
    overrun: bool,
    trace: Option<LaneTrace>,
}

impl Lane {
    /// `number`: of this lane.
    pub(crate) fn new(ring: Ring, ranks: u32, number: usize, window: &Window) -> Lane {
        let links = (0..ranks).map(|_| None).collect();
        Lane { ring, links, overrun: false, trace: LaneTrace::new(window, number) }
    }

    /// Reports what its links do.
    pub(super) fn show(&mut self, window: &Window) {
        self.links.iter_mut().flatten().for_each(|link| link.show(window));
    }

    pub(super) fn change(&mut self, change: Change) {
        let done = match change {
            Change::Connect(link, done) => {
                let rank = link.far().rank as usize;
                self.links[rank] = Some(*link);
                done
            }
            Change::Disconnect(rank, done) => {
                self.links[rank as usize] = None;
                done
            }
        };
        // The caller may have given up.
        let _ = done.send(());
    }

    /// Reads commands, and moves rails. Returns whether anything moved.
    pub(super) fn advance(&mut self, common: &Common) -> bool {
        let mut moved = self.read(common);
        for link in &mut self.links {
            let Some(open) = link else { continue };
            match open.advance(self.trace.as_mut()) {
                Ok(any) => moved |= any,
                Err(error) => {
                    let (far, rails) = (open.far().clone(), open.lost_rails());
                    *link = None;
                    (common.lost)(far.rank, far.generation(), &reason(&error.to_string(), &rails));
                    moved = true;
                }
            }
        }
        moved
    }

    fn read(&mut self, common: &Common) -> bool {
        let mut any = false;
        for _ in 0..READ_AT_ONCE {
            match self.ring.next() {
                None => break,
                Some(Ok(command)) => {
                    any = true;
                    // Commands for lost ranks are dropped.
                    if let Some(Some(link)) = self.links.get_mut(command.rank as usize) {
                        link.push(command);
                    }
                }
                Some(Err(_)) if self.overrun => break,
                Some(Err(_)) => {
                    self.overrun = true;
                    self.abandon(
                        common,
                        "this rank's proxy was stopped for longer than the timeout, and has lost commands",
                    );
                    return true;
                }
            }
        }
        if any {
            self.ring.release();
        }
        any
    }

    /// Ends all links: their ranks are lost.
    fn abandon(&mut self, common: &Common, why: &str) {
        for link in &mut self.links {
            if let Some(open) = link.take() {
                (common.lost)(open.far().rank, open.far().generation(), why);
            }
        }
    }

    fn is_busy(&self) -> bool {
        self.links.iter().flatten().any(Link::is_busy)
    }
}

/// Name of a thread, of up to 15 bytes.
pub(super) fn thread_name(thread: usize) -> String {
    format!("crossrail-ep-{thread}")
}

fn reason(error: &str, rails: &[(String, String)]) -> String {
    let rails: Vec<String> = rails.iter().map(|(name, why)| format!("{name}: {why}")).collect();
    if rails.is_empty() { error.to_owned() } else { format!("{error}; {}", rails.join(", ")) }
}

/// Runs until the proxy ends. `lanes`: this thread's; `thread`: its number. If it panics, all ranks to which it sent are lost.
pub(super) fn run_guarded(common: &Arc<Common>, thread: usize, mut lanes: Vec<(usize, Lane)>) {
    let ended = catch_unwind(AssertUnwindSafe(|| run(common, thread, &mut lanes)));
    if let Err(panic) = ended {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason given");
        let why = format!("{} of this rank's proxy has failed: {text}", thread_name(thread));
        lanes.iter_mut().for_each(|(_, lane)| lane.abandon(common, &why));
    }
}

fn run(common: &Arc<Common>, thread: usize, lanes: &mut [(usize, Lane)]) {
    let (bell, window) = (&common.bells[thread], &common.window);
    let mut row = ThreadRow::new(window, &thread_name(thread));
    let (mut shown, mut unshown) = (Instant::now(), false);
    // Rings before this are seen below.
    let _ = bell.thread.set(std::thread::current());
    let mut active = Instant::now();
    let mut turns = 0u32;
    while !common.ending.load(Ordering::Acquire) {
        let changes = std::mem::take(&mut *bell.changes.lock());
        let mut moved = !changes.is_empty();
        for (lane, change) in changes {
            if let Some((_, lane)) = lanes.iter_mut().find(|(number, _)| *number == lane) {
                lane.change(change);
            }
        }
        for (_, lane) in lanes.iter_mut() {
            moved |= lane.advance(common);
        }
        turns = turns.wrapping_add(1);
        if moved || bell.rung.swap(false, Ordering::AcqRel) {
            active = Instant::now();
            row.enter(State::Polling);
            unshown |= moved;
            if moved && active - shown >= SHOWN_EVERY {
                (shown, unshown) = (active, false);
                lanes.iter_mut().for_each(|(_, lane)| lane.show(window));
                row.write();
            }
            continue;
        }
        if !turns.is_multiple_of(64) {
            std::hint::spin_loop();
            continue;
        }
        let idle = active.elapsed();
        if idle < SPIN {
            std::thread::yield_now();
            continue;
        }
        let awake =
            idle < ALERT || common.graphs.load(Ordering::Relaxed) || lanes.iter().any(|(_, lane)| lane.is_busy());
        if std::mem::take(&mut unshown) {
            lanes.iter_mut().for_each(|(_, lane)| lane.show(window));
        }
        row.enter(if awake { State::Napping } else { State::Asleep });
        // A ring since `rung` was read ends this at once.
        std::thread::park_timeout(if awake { NAP } else { DOZE });
    }
}
