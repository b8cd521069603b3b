//! Large transfers through a network plugin of NCCL, with the work of [`p2p`](crate::p2p()).
//!
//! The plugin moves the data; everything that the ends tell each other goes over the session's endpoint: the plugin's
//! handles, which lane takes which chunk, and failures, which end the run at both ends at once.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crossrail::Request;
use crossrail_nccl_driver::{Assignment, Diverted, Lanes, Memory, Network, Plugin, Receiver, Sender, Transfer};
use crossrail_types::{Error, ErrorKind, Result};
use serde::Deserialize;

use crate::area::Area;
use crate::p2p::{P2pIteration, P2pPlan};
use crate::pattern;
use crate::report::{Share, TransferEnd, TransferReport};
use crate::session::{Flight, POLL_INTERVAL, Progress, Role, Session, TAGS, flight, stopped};

/// Assignments of chunks, and failures.
const NOTE: u64 = TAGS | 4;
const NOTE_LEN: usize = 16 << 10;
const ASSIGNMENT_LEN: usize = 8;
const ASSIGNED: u8 = 0;
const FAILED: u8 = 1;
/// Rounds of polling between two readings of the clock.
const ROUNDS: u32 = 256;

/// What [`net_plugin`] does.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetPluginPlan {
    /// The plugin's library at this end.
    pub path: PathBuf,
    /// The transfers.
    pub transfers: P2pPlan,
}

/// Transfers from the driver to the echo end through a plugin, over all of its devices, with the context's chunk,
/// window and channels. Verified, and stopped early, as by [`p2p`](crate::p2p()); both ends return the same rows.
///
/// # Errors
/// `Usage` for a library that is no plugin of versions 4 to 12; `Io`, `Timeout` and `Protocol`, naming the function,
/// for what a plugin returns that it may not; `Mismatch` when the ends' plans differ; and whatever the engine reports.
pub fn net_plugin(session: &mut Session<'_>, plan: &NetPluginPlan) -> Result<Vec<P2pIteration>> {
    let mut stdout = Diverted::begin()?;
    let opened = Plugin::open(&plan.path);
    session.judge(opened.as_ref().map(drop).map_err(Clone::clone))?;
    let plugin = opened?;
    let started = plugin.init().and_then(|network| Ok((network.devices()?, network)));
    session.judge(started.as_ref().map(drop).map_err(Clone::clone))?;
    let (devices, network) = started?;
    let P2pPlan { size, iters, warmup, verify } = plan.transfers;
    let counts = [("size", size), ("iters", iters), ("warmup", warmup), ("verify", verify as usize)];
    session.agree("net plugin", &[&counts[..], &[("devices", devices)]].concat())?;
    let settings = session.context.settings();
    let lanes = Lanes {
        devices: (0..devices).collect(),
        channels: settings.channels.first() as usize,
        window: settings.window as usize,
        chunk: settings.chunk,
    };
    let described = describe(&network, &lanes);
    let mut rows = match session.role {
        Role::Driver => drive(session, &network, lanes, plan.transfers),
        Role::Echo => echo(session, &network, lanes, plan.transfers),
    }?;
    let mut notes = described?;
    if let Some(line) = stdout.first_line() {
        notes.push(format!("{} prints to stdout, which belongs to its caller: {line:?}", plugin.name()));
    }
    if let Some(row) = rows.first_mut() {
        let mine = if session.role == Role::Driver { &mut row.sender } else { &mut row.receiver };
        mine.receipt.notes.splice(0..0, notes);
    }
    Ok(rows)
}

fn describe(network: &Network<'_>, lanes: &Lanes) -> Result<Vec<String>> {
    let plugin = network.plugin();
    let device = |device: &usize| {
        let known = network.properties(*device)?;
        let pci = known.pci_path.unwrap_or_else(|| "no PCI device".to_owned());
        Ok(format!("{} ({} Mbit/s, {} us, {pci})", known.name, known.speed_mbps, known.latency_us))
    };
    let devices: Result<Vec<String>> = lanes.devices.iter().map(device).collect();
    Ok(vec![format!("plugin {} of version {}: {}", plugin.name(), plugin.version(), devices?.join(", "))])
}

/// Control messages of the other end. One for the whole run: a cancelled receive may already have matched a note.
struct Notes {
    inbox: Area,
    expected: Option<Flight>,
    limit: Duration,
    rounds: u32,
    moved: Instant,
    ticked: Instant,
}

impl Notes {
    fn new(session: &Session<'_>) -> Result<Notes> {
        let inbox = Area::new(session.context, crate::MemoryKind::Ordinary, NOTE_LEN)?;
        let (limit, now) = (session.context.settings().timeout, Instant::now());
        Ok(Notes { inbox, expected: None, limit, rounds: 0, moved: now, ticked: now })
    }

    /// The assignments of the next note; empty if there is none.
    ///
    /// # Errors
    /// The other end's failure.
    fn take(&mut self, session: &Session<'_>) -> Result<Vec<Assignment>> {
        if self.expected.is_none() {
            let posted = session.worker.recv(self.inbox.buffer(), NOTE, u64::MAX, Some(session.endpoint));
            self.expected = Some(flight(posted)?);
        }
        let Some(outcome) = self.expected.as_ref().and_then(|flight| flight.request().test()) else {
            return Ok(Vec::new());
        };
        let bytes = outcome?.bytes as usize;
        if let Some(done) = self.expected.take() {
            done.finished();
        }
        let note = self.inbox.copy_out(bytes)?;
        let malformed = || Error::new(ErrorKind::Protocol, "bench", "the other end's note is malformed");
        match note.split_first() {
            Some((&ASSIGNED, words)) if words.len() % ASSIGNMENT_LEN == 0 => {
                let word = |bytes: &[u8]| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                let words = words.chunks_exact(ASSIGNMENT_LEN);
                Ok(words.map(|words| Assignment { lane: word(words), chunk: word(&words[4..]) }).collect())
            }
            Some((&FAILED, why)) => {
                let why: String = String::from_utf8_lossy(why).chars().filter(|c| !c.is_control()).collect();
                Err(Error::new(ErrorKind::Protocol, "bench", format!("the other end failed: {why}")))
            }
            _ => Err(malformed()),
        }
    }

    /// After one round of polling: reports progress, and fails if nothing has moved for the context's timeout.
    fn round(&mut self, session: &mut Session<'_>, moved: bool, stuck: impl FnOnce(Duration) -> Error) -> Result<()> {
        self.rounds = if moved { 0 } else { self.rounds + 1 };
        if moved {
            self.moved = Instant::now();
        } else {
            // As NCCL's proxy does: the plugin's own threads may need this processor.
            std::thread::yield_now();
        }
        if self.rounds % ROUNDS == ROUNDS - 1 {
            let now = Instant::now();
            if now.duration_since(self.ticked) > POLL_INTERVAL {
                self.ticked = now;
                session.observer.tick(0, 0)?;
            }
            if now.duration_since(self.moved) > self.limit {
                return Err(stuck(self.limit));
            }
        }
        Ok(())
    }

    /// Begins a wait.
    fn begin(&mut self) {
        (self.rounds, self.moved) = (0, Instant::now());
    }
}

/// Announces which chunks this end expects.
fn announce(session: &Session<'_>, assignments: &mut Vec<Assignment>) -> Result<()> {
    for part in assignments.chunks((NOTE_LEN - 1) / ASSIGNMENT_LEN) {
        let mut note = vec![ASSIGNED];
        for assignment in part {
            note.extend_from_slice(&assignment.lane.to_le_bytes());
            note.extend_from_slice(&assignment.chunk.to_le_bytes());
        }
        let _delivered_or_fails_later: Request = session.endpoint.send(note, NOTE)?;
    }
    assignments.clear();
    Ok(())
}

/// Reports a failure to the other end, so that it fails too.
fn settle<T>(session: &Session<'_>, outcome: Result<T>) -> Result<T> {
    if let Err(error) = &outcome
        && !stopped(error)
        && session.endpoint.is_alive()
    {
        let note = [&[FAILED], error.to_string().as_bytes()].concat();
        if let Ok(request) = session.endpoint.send(note, NOTE) {
            let _ = request.wait(Some(POLL_INTERVAL));
        }
    }
    outcome
}

fn drive(session: &mut Session<'_>, network: &Network<'_>, lanes: Lanes, plan: P2pPlan) -> Result<Vec<P2pIteration>> {
    let handles = session.exchange(&[])?;
    let memory = Memory::new(plan.size)?;
    let made = Sender::new(network, lanes, memory, &handles);
    session.judge(made.as_ref().map(drop).map_err(Clone::clone))?;
    let mut sender = made?;
    let (mine, _) = session.seeds(0);
    pattern::fill(mine, 0, sender.bytes()?);
    let mut notes = Notes::new(session)?;
    let connected = connect(session, &mut notes, &mut sender);
    settle(session, connected)?;
    let go = Area::new(session.context, crate::MemoryKind::Ordinary, 1)?;
    let rows = iterate(session, plan, |session, progress, _| {
        let ready = session.recv_reply(&go)?;
        session.finish(ready, progress)?;
        let began = Instant::now();
        let sent = send(session, &mut notes, &mut sender);
        settle(session, sent)?;
        Ok((began.elapsed(), sender.take_report(), Ok(())))
    })?;
    // An end that stops early leaves the other one in the middle.
    if rows.len() == plan.iters {
        session.judge(sender.close())?;
    }
    Ok(rows)
}

fn connect(session: &mut Session<'_>, notes: &mut Notes, sender: &mut Sender<'_>) -> Result<()> {
    notes.begin();
    while !sender.connect()? {
        // The other end may be connected already, and announce its first chunks.
        notes.take(session)?.into_iter().try_for_each(|assignment| sender.assign(assignment))?;
        notes.round(session, false, |waited| sender.not_connected(waited))?;
    }
    Ok(())
}

fn send(session: &mut Session<'_>, notes: &mut Notes, sender: &mut Sender<'_>) -> Result<()> {
    notes.begin();
    let mut left = sender.chunks();
    while left > 0 {
        let assigned = notes.take(session)?;
        let heard = !assigned.is_empty();
        assigned.into_iter().try_for_each(|assignment| sender.assign(assignment))?;
        let (completed, moved) = sender.step()?;
        left = left.saturating_sub(completed);
        notes.round(session, moved || heard, |waited| sender.stuck(waited))?;
    }
    Ok(())
}

fn echo(session: &mut Session<'_>, network: &Network<'_>, lanes: Lanes, plan: P2pPlan) -> Result<Vec<P2pIteration>> {
    let made = Memory::new(plan.size).and_then(|memory| Receiver::new(network, lanes, memory));
    session.exchange(&made.as_ref().map(Receiver::handles).unwrap_or_default())?;
    session.judge(made.as_ref().map(drop).map_err(Clone::clone))?;
    let mut receiver = made?;
    let (_, theirs) = session.seeds(0);
    let mut notes = Notes::new(session)?;
    let accepted = accept(session, &mut notes, &mut receiver);
    settle(session, accepted)?;
    let go = Area::new(session.context, crate::MemoryKind::Ordinary, 1)?;
    let rows = iterate(session, plan, |session, progress, verifies| {
        if verifies {
            receiver.bytes()?.fill(0);
        }
        let ready = session.send_reply(&go)?;
        let began = Instant::now();
        let received = receive(session, &mut notes, &mut receiver);
        settle(session, received)?;
        let spent = began.elapsed();
        session.finish(ready, progress)?;
        let verified = if verifies { pattern::verify(theirs, 0, receiver.bytes()?) } else { Ok(()) };
        Ok((spent, receiver.take_report(), verified))
    })?;
    // As in `drive`.
    if rows.len() == plan.iters {
        session.judge(receiver.close())?;
    }
    Ok(rows)
}

fn accept(session: &mut Session<'_>, notes: &mut Notes, receiver: &mut Receiver<'_>) -> Result<()> {
    notes.begin();
    while !receiver.accept()? {
        notes.take(session)?;
        notes.round(session, false, |waited| receiver.not_connected(waited))?;
    }
    Ok(())
}

fn receive(session: &mut Session<'_>, notes: &mut Notes, receiver: &mut Receiver<'_>) -> Result<()> {
    receiver.begin();
    notes.begin();
    let (mut left, mut assignments) = (receiver.chunks(), Vec::new());
    while left > 0 {
        let (completed, moved) = receiver.step(&mut assignments)?;
        announce(session, &mut assignments)?;
        left = left.saturating_sub(completed);
        // Only failures come this way.
        notes.take(session)?;
        notes.round(session, moved, |waited| receiver.stuck(waited))?;
    }
    Ok(())
}

/// Runs all transfers. `once` takes whether to verify and returns this end's time, the bytes it moved, and whether the
/// data was correct. If the observer stops the run, the rows measured so far are returned.
fn iterate(
    session: &mut Session<'_>,
    plan: P2pPlan,
    mut once: impl FnMut(&mut Session<'_>, &mut Progress, bool) -> Result<(Duration, Transfer, Result<()>)>,
) -> Result<Vec<P2pIteration>> {
    let total = plan.warmup + plan.iters;
    let progress = &mut Progress::new(total);
    let mut rows = Vec::with_capacity(plan.iters.min(1024));
    for iteration in 0..total {
        let verifies = plan.verify.covers(iteration, total);
        let outcome = once(session, progress, verifies).and_then(|done| report(session, done, verifies));
        let outcome = outcome.and_then(|row| session.advance(progress, 1, Instant::now()).map(|()| row));
        match outcome {
            Ok(row) if iteration >= plan.warmup => rows.push(row),
            Ok(_) => {}
            Err(error) if stopped(&error) && !rows.is_empty() => break,
            Err(error) => return Err(error),
        }
    }
    Ok(rows)
}

/// Exchanges the two ends' reports of a transfer.
fn report(
    session: &mut Session<'_>,
    (spent, transfer, verified): (Duration, Transfer, Result<()>),
    verifies: bool,
) -> Result<P2pIteration> {
    if verifies {
        session.judge(verified)?;
    }
    let us = spent.as_secs_f64() * 1e6;
    let receipt = report_of(session, us, transfer);
    P2pIteration::exchanged(session, TransferEnd { us, receipt })
}

fn report_of(session: &Session<'_>, us: f64, transfer: Transfer) -> TransferReport {
    let share = |lane: crossrail_nccl_driver::LaneUse| Share {
        name: lane.name,
        bytes: lane.bytes,
        chunks: lane.chunks,
        resent: 0,
    };
    let lanes: Vec<Share> = transfer.lanes.into_iter().map(share).collect();
    TransferReport {
        bytes: lanes.iter().map(|lane| lane.bytes).sum(),
        peer: session.endpoint.peer(),
        protocol: "chunks".to_owned(),
        lanes,
        wire_us: us,
        unpack_us: transfer.unpack.as_secs_f64() * 1e6,
        ..TransferReport::default()
    }
}
