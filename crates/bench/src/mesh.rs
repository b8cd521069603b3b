//! All ranks of a group: each ordered pair alone, then all to all at once. Every rank makes the same calls.

use std::time::{Duration, Instant};

use crossrail::{Context, Endpoint, Worker};
use crossrail_types::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize, Serializer};

use crate::area::Area;
use crate::session::{Flight, Observer, Progress, Role, Session, flight, whole};
use crate::{
    BandwidthPlan, LatencyPlan, MemoryKind, P2pPlan, Samples, TransferReport, Verify, bandwidth, latency, p2p,
};

const BARRIER: u64 = crate::session::TAGS | 4;
const ALL: u64 = crate::session::TAGS | 5;

/// Parameters of a mesh; equal on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeshPlan {
    /// Bytes of one message.
    pub size: usize,
    /// Timed windows of each ordered pair, and timed exchanges of all.
    pub iters: usize,
    /// Untimed windows and exchanges before those.
    pub warmup: usize,
    /// Messages in flight to one rank.
    pub window: usize,
    /// Bytes of the messages whose latency is measured.
    pub small: usize,
    /// Round trips of these.
    pub trips: usize,
    /// How long a rank waits for others that are measuring.
    #[serde(deserialize_with = "crate::form::seconds")]
    pub patience: Duration,
}

/// One rank of a mesh.
pub struct MeshRank<'a> {
    /// Allocates memory; its timeout bounds every wait for a transfer.
    pub context: &'a Context,
    /// Receives.
    pub worker: &'a Worker,
    /// This rank's number.
    pub rank: usize,
    /// The endpoint to each rank; `None` for this rank.
    pub peers: &'a [Option<Endpoint>],
    /// What memory this rank moves.
    pub memory: MemoryKind,
    /// Called during long waits.
    pub observer: &'a mut dyn Observer,
}

/// What one rank measured as the sender to another while all other ranks were idle.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PairSamples {
    /// The rank that received.
    pub target: usize,
    /// The receipt of one message of this size.
    #[serde(rename = "receipt")]
    pub transfer: TransferReport,
    /// Windows, as [`bandwidth`] measures them.
    pub rate: Samples,
    /// Half round trips of small messages, as [`latency`] measures them.
    pub latency: Samples,
}

/// What one rank of a mesh measured while all ranks sent to all others.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct AllSamples {
    /// Microseconds from the barrier until everything that this rank sent has arrived.
    pub all_us: Vec<f64>,
    /// Bytes that this rank sent in each exchange.
    pub all_bytes: u64,
    /// When each message of the slowest exchange was posted, matched and finished, in the order of posting.
    pub slowest: Vec<MessageTimes>,
    /// Number of copies from and to this rank's GPU in the timed exchanges.
    #[serde(serialize_with = "by_engine")]
    pub copied: u64,
}

fn by_engine<S: Serializer>(copied: &u64, output: S) -> std::result::Result<S::Ok, S::Error> {
    output.collect_map([("by_engine", copied)])
}

/// The times of one message, in microseconds from the barrier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct MessageTimes {
    /// The rank that received.
    pub target: usize,
    /// The send was posted.
    #[serde(rename = "posted_us")]
    pub posted: f64,
    /// The receiver had matched it.
    #[serde(rename = "matched_us")]
    pub matched: f64,
    /// The copy was complete, if this rank made a single copy. It is requested when the message is matched, and queues
    /// behind other copies of this GPU. 0 if the receiver copied, or if the message was sent in chunks.
    #[serde(rename = "copied_us")]
    pub copied: f64,
    /// This rank noticed its completion, after that of all messages posted before it.
    #[serde(rename = "finished_us")]
    pub finished: f64,
}

/// Measures one ordered pair, `(source, target)`; every rank calls it with the same pairs and plan in the same order.
/// After a barrier the two move data while the others wait at the next one. Returns the samples at `source`.
///
/// Every byte is verified before the timing and after it, as in [`bandwidth`] and [`latency`].
///
/// # Errors
/// `Usage` for a rank or a window out of range; `Mismatch` when plans differ; `Protocol` when data did not verify at
/// either rank; errors of the engine and of the observer.
pub fn mesh_pair(
    mine: &mut MeshRank<'_>,
    (source, target): (usize, usize),
    plan: MeshPlan,
) -> Result<Option<PairSamples>> {
    check(mine, plan)?;
    if source == target || source.max(target) >= mine.peers.len() {
        return Err(Error::new(ErrorKind::Usage, "mesh", format!("no pair of rank {source} and rank {target}")));
    }
    barrier(mine, plan.patience)?;
    if mine.rank == source {
        return pair(mine, target, Role::Driver, plan).map(Some);
    }
    if mine.rank == target {
        pair(mine, source, Role::Echo, plan)?;
    }
    Ok(None)
}

/// Measures all to all: after a barrier, every rank sends `window` messages to each other rank at once. Every rank calls
/// it with the same plan.
///
/// Every byte is verified in an exchange before the timed ones and in one after them.
///
/// # Errors
/// As [`mesh_pair`].
pub fn mesh_all(mine: &mut MeshRank<'_>, plan: MeshPlan) -> Result<AllSamples> {
    check(mine, plan)?;
    let mut samples = AllSamples::default();
    barrier(mine, plan.patience)?;
    if mine.peers.len() > 1 {
        exchange_all(mine, plan, &mut samples)?;
    }
    barrier(mine, plan.patience)?;
    Ok(samples)
}

fn check(mine: &MeshRank<'_>, plan: MeshPlan) -> Result<()> {
    let others = mine.peers.iter().flatten().count();
    let missing = mine.peers.get(mine.rank).is_none_or(Option::is_some) || others + 1 != mine.peers.len();
    if missing || plan.window == 0 {
        let text = format!("rank {} with {others} endpoints, a window of {}", mine.rank, plan.window);
        return Err(Error::new(ErrorKind::Usage, "mesh", text).with_hint("an endpoint for each rank but its own"));
    }
    Ok(())
}

fn pair(mine: &mut MeshRank<'_>, other: usize, role: Role, plan: MeshPlan) -> Result<PairSamples> {
    let session = &mut mine.session(other, role)?;
    let MeshPlan { size, iters, warmup, window, .. } = plan;
    let mut transfers = p2p(session, P2pPlan { size, iters: 1, warmup: 0, verify: Verify::Full })?;
    let rate = bandwidth(session, BandwidthPlan { size, iters, warmup, window })?;
    let latency = latency(session, LatencyPlan { size: plan.small, iters: plan.trips, warmup: plan.trips.min(10) })?;
    let transfer = transfers.pop().map(|one| one.sender.receipt).unwrap_or_default();
    Ok(PairSamples { target: other, transfer, rate, latency })
}

/// All to all. The pattern differs for each ordered pair, so that a message received by the wrong rank is detected.
fn exchange_all(mine: &mut MeshRank<'_>, plan: MeshPlan, samples: &mut AllSamples) -> Result<()> {
    let ranks = mine.peers.len();
    let mut out = Vec::new();
    let mut into = Vec::new();
    // Start with the next rank, so that not all ranks start with the same one.
    for other in (1..ranks).map(|step| (mine.rank + step) % ranks) {
        let area = |mine: &MeshRank<'_>| Area::new(mine.context, mine.memory, plan.size);
        let (mut sent, received) = (area(mine)?, area(mine)?);
        sent.fill(seed(mine.rank, other))?;
        out.push((other, sent));
        into.push((other, received));
    }
    verified(mine, plan, &out, &mut into)?;
    for _ in 0..plan.warmup {
        exchange(mine, plan, &out, &into)?;
    }
    let before = mine.copied();
    for _ in 0..plan.iters {
        let (us, messages) = exchange(mine, plan, &out, &into)?;
        if samples.all_us.iter().all(|other| *other < us) {
            samples.slowest = messages;
        }
        samples.all_us.push(us);
    }
    samples.copied = mine.copied() - before;
    verified(mine, plan, &out, &mut into)?;
    samples.all_bytes = (plan.size * plan.window * (ranks - 1)) as u64;
    Ok(())
}

/// An exchange of one message per pair, every byte of which is verified.
fn verified(mine: &mut MeshRank<'_>, plan: MeshPlan, out: &[(usize, Area)], into: &mut [(usize, Area)]) -> Result<()> {
    for (_, area) in into.iter_mut() {
        area.clear()?;
    }
    exchange(mine, MeshPlan { window: 1, ..plan }, out, into)?;
    for (source, area) in into {
        area.verify(seed(*source, mine.rank)).map_err(|error| {
            error.with_hint(format!("rank {} got this from rank {source}, all ranks sending at once", mine.rank))
        })?;
    }
    Ok(())
}

/// Posts all receives, waits at a barrier, then sends everything. Returns the microseconds until all sends were complete,
/// and the times of each message.
fn exchange(
    mine: &mut MeshRank<'_>,
    plan: MeshPlan,
    out: &[(usize, Area)],
    into: &[(usize, Area)],
) -> Result<(f64, Vec<MessageTimes>)> {
    let mut receives = Vec::with_capacity(plan.window * into.len());
    for _ in 0..plan.window {
        for (source, area) in into {
            receives.push(mine.recv(*source, area)?);
        }
    }
    let mut sends = Vec::with_capacity(plan.window * out.len());
    let mut times = Vec::with_capacity(sends.capacity());
    barrier(mine, plan.patience)?;
    let progress = &mut Progress::new(0);
    let began = Instant::now();
    let since = || began.elapsed().as_secs_f64() * 1e6;
    for _ in 0..plan.window {
        for (target, area) in out {
            times.push(MessageTimes { target: *target, posted: since(), ..MessageTimes::default() });
            sends.push(mine.send(*target, area)?);
        }
    }
    let session = &mut mine.session(out[0].0, Role::Driver)?;
    for (send, times) in sends.into_iter().zip(&mut times) {
        let receipt = session.finish(send, progress)?;
        times.matched = times.posted + receipt.match_us;
        times.copied = if receipt.pushed { times.matched + receipt.copy_us } else { 0.0 };
        times.finished = since();
    }
    let us = since();
    for receive in receives {
        let receipt = session.finish(receive, progress)?;
        whole(&receipt, plan.size)?;
    }
    Ok((us, times))
}

/// The pattern of what `source` sends to `target`.
fn seed(source: usize, target: usize) -> u64 {
    ALL ^ ((source as u64) << 24 | target as u64)
}

/// Dissemination barrier: in round k each rank signals the rank 2^k after it and waits for the one 2^k before it.
fn barrier(mine: &mut MeshRank<'_>, patience: Duration) -> Result<()> {
    let progress = &mut Progress::new(0);
    let ranks = mine.peers.len();
    let mut step = 1;
    while step < ranks {
        let (next, before) = ((mine.rank + step) % ranks, (mine.rank + ranks - step) % ranks);
        let from_previous =
            flight(mine.worker.recv(Vec::new(), BARRIER | (step as u64) << 8, u64::MAX, Some(mine.peer(before)?)))?;
        let to_next = flight(mine.peer(next)?.send(Vec::new(), BARRIER | (step as u64) << 8))?;
        let session = &mut mine.session(before, Role::Driver)?;
        session.finish_within(from_previous, patience, progress)?;
        session.finish_within(to_next, patience, progress)?;
        step *= 2;
    }
    Ok(())
}

impl MeshRank<'_> {
    fn copied(&self) -> u64 {
        match self.memory {
            MemoryKind::Gpu(ordinal) => self.context.copied(ordinal),
            MemoryKind::Shared | MemoryKind::Ordinary => 0,
        }
    }

    fn peer(&self, rank: usize) -> Result<&Endpoint> {
        self.peers
            .get(rank)
            .and_then(Option::as_ref)
            .ok_or_else(|| Error::new(ErrorKind::Usage, "mesh", format!("no endpoint to rank {rank}")))
    }

    fn session(&mut self, other: usize, role: Role) -> Result<Session<'_>> {
        let missing = || Error::new(ErrorKind::Usage, "mesh", format!("no endpoint to rank {other}"));
        let endpoint = self.peers.get(other).and_then(Option::as_ref).ok_or_else(missing)?;
        let MeshRank { context, worker, memory, .. } = *self;
        Ok(Session { context, worker, endpoint, role, memory, observer: self.observer })
    }

    fn send(&self, to: usize, area: &Area) -> Result<Flight> {
        flight(self.peer(to)?.send(area.buffer(), ALL))
    }

    fn recv(&self, from: usize, area: &Area) -> Result<Flight> {
        flight(self.worker.recv(area.buffer(), ALL, u64::MAX, Some(self.peer(from)?)))
    }
}
