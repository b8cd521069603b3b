//! The worker's rows of the process's page. The thread that makes progress writes them periodically, never per message.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossrail_locks::Mutex;
use crossrail_sight::{Kind, Page, Row, fields};
use crossrail_transport::LaneStats;
use crossrail_types::{EndpointId, LaneId, Log};

use super::Progress;
use crate::core::{Core, EndedLane, LaneSample, PeerSample, Sample, Since};

/// How often the rows are written at most.
const EVERY: Duration = Duration::from_millis(50);
/// Writing them may take 1/SHARE of the thread's time.
const SHARE: u32 = 100;

/// When the rows are due, and the rows.
pub(super) struct PageRows {
    /// Nanoseconds of the core's clock.
    next: AtomicU64,
    /// `None`: the process has no page, or the worker is closed.
    rows: Mutex<Option<Rows>>,
}

/// The rows of one worker.
struct Rows {
    page: Arc<Page>,
    owner: u32,
    worker: Row,
    rails: HashMap<String, Rail>,
    peers: HashMap<EndpointId, PeerRows>,
    /// What each lane has carried, as far as the rails' sums have it; until the lane's end was noted, which may be
    /// after its row is gone.
    counted: HashMap<LaneId, LaneStats>,
    since: Since,
    next_peer: u32,
}

struct PeerRows {
    row: Row,
    /// Frames so far: the protocol counts them modulo 2^32.
    frames: (u64, u64),
    resent: u64,
    links: HashMap<LaneId, Link>,
    gpus: HashMap<u32, Row>,
}

struct Link {
    row: Row,
    rail: String,
    stalls: u64,
    chunks: u64,
    bytes: u64,
}

/// The sum of the lanes over one rail, those that have ended too.
struct Rail {
    row: Row,
    sent: u64,
    received: u64,
    /// Lanes that are up, and what is in flight over them.
    lanes: u64,
    chunks: u64,
    bytes: u64,
    stalls: u64,
    retransmits: u64,
    resent: u64,
    lost: u64,
    corrupt: u64,
}

impl PageRows {
    pub(super) fn new(folder: Option<&Path>, log: Log) -> PageRows {
        let rows = folder.and_then(|folder| crossrail_sight::open(folder, log)).map(|page| {
            let owner = page.owner();
            Rows {
                worker: Row::new(Some(&page), Kind::Worker, owner, "", ""),
                page,
                owner,
                rails: HashMap::new(),
                peers: HashMap::new(),
                counted: HashMap::new(),
                since: Since::default(),
                next_peer: 0,
            }
        });
        let next = if rows.is_some() { 0 } else { u64::MAX };
        PageRows { next: AtomicU64::new(next), rows: Mutex::new(rows) }
    }

    /// Names the worker, as its peers know it.
    pub(super) fn name(&self, name: &str) {
        if let Some(rows) = &mut *self.rows.lock() {
            rows.worker = Row::new(Some(&rows.page), Kind::Worker, rows.owner, name, "");
        }
    }

    /// Whether there is a page.
    pub(super) fn is_open(&self) -> bool {
        self.rows.lock().is_some()
    }

    /// Whether the rows are to be written.
    #[inline]
    pub(super) fn is_due(&self, core: &Core) -> bool {
        core.now().0 >= self.next.load(Ordering::Relaxed)
    }

    /// Takes the worker's rows away.
    pub(super) fn close(&self) {
        self.next.store(u64::MAX, Ordering::Relaxed);
        *self.rows.lock() = None;
    }
}

impl Progress {
    /// Writes the worker's rows, unless another thread does.
    #[cold]
    pub(super) fn publish(&self) {
        let Some(mut guard) = self.page_rows.rows.try_lock() else { return };
        let Some(rows) = guard.as_mut() else { return };
        let began = Instant::now();
        let mut core = self.core();
        let now = core.read_clock();
        let mut sample = core.sample(rows.next_peer, &mut rows.since);
        // The entry of a peer may be freed before a sample has shown that it ended.
        let forgotten: Vec<EndpointId> =
            rows.peers.keys().copied().filter(|id| core.peers().get(*id).is_none()).collect();
        drop(core);
        rows.next_peer = sample.next;
        // A connection's own lock is taken before the worker's, never after. One that is being polled is left for the
        // next time.
        for lane in sample.peers.iter_mut().flat_map(|peer| &mut peer.lanes) {
            if let Some(bulk) = lane.bulk.take().filter(|_| lane.stats.is_none()) {
                lane.stats = bulk.lane.try_lock().and_then(|held| held.as_ref().map(|inner| inner.stats()));
            }
        }
        let ended_lane = |lane| self.core().ended_lane(lane);
        forgotten.into_iter().for_each(|peer| rows.remove(peer, ended_lane));
        rows.write(&sample, ended_lane);
        let pause = EVERY.max(began.elapsed() * SHARE).as_nanos() as u64;
        self.page_rows.next.store(now.0 + pause, Ordering::Relaxed);
    }
}

impl Rows {
    fn write(&mut self, sample: &Sample, ended_lane: impl Fn(LaneId) -> EndedLane) {
        let totals = &sample.totals;
        self.worker.write(|writer| {
            use fields::worker as field;
            writer.set(field::operations, sample.operations);
            writer.set(field::in_flight, sample.in_flight);
            writer.set(field::peers, sample.alive);
            writer.set(field::transfers, totals.transfers);
            writer.set(field::transfer_bytes, totals.bytes);
            writer.set(field::match_seconds, totals.match_ns);
            writer.set(field::window_seconds, totals.window_ns);
            writer.set(field::wire_seconds, totals.wire_ns);
            writer.set(field::copy_seconds, totals.copy_ns);
            writer.histogram(field::transfer_seconds, &totals.took);
            writer.wait(sample.wait.as_ref());
        });
        for end in &sample.ends {
            let counted = self.counted.remove(&end.id).unwrap_or_default();
            rail_row(&mut self.rails, &self.page, self.owner, rail_of(&end.name)).count(&end.stats, &counted);
        }
        for peer in &sample.peers {
            if !peer.alive {
                self.remove(peer.id, &ended_lane);
                continue;
            }
            let rows = self.peers.entry(peer.id).or_insert_with(|| PeerRows {
                row: Row::new(Some(&self.page), Kind::Peer, self.owner, &peer.name, ""),
                frames: (0, 0),
                resent: 0,
                links: HashMap::new(),
                gpus: HashMap::new(),
            });
            let known: HashSet<LaneId> = peer.lanes.iter().map(|lane| lane.id).collect();
            let gone: Vec<LaneId> = rows.links.keys().copied().filter(|lane| !known.contains(lane)).collect();
            let mut ended = Vec::new();
            for lane in gone {
                let end = ended_lane(lane);
                rows.resent += end.resent_chunks;
                ended.extend(rows.links.remove(&lane).map(|link| (link, end)));
            }
            for lane in &peer.lanes {
                let name = rail_of(&lane.name);
                let rail = rail_row(&mut self.rails, &self.page, self.owner, name);
                let link = rows.links.entry(lane.id).or_insert_with(|| {
                    rail.lanes += 1;
                    Link {
                        row: Row::new(Some(&self.page), Kind::Link, self.owner, &lane.name, &peer.name),
                        rail: name.to_owned(),
                        stalls: 0,
                        chunks: 0,
                        bytes: 0,
                    }
                });
                let carried = self.counted.entry(lane.id).or_default();
                if let Some(stats) = lane.stats {
                    rail.count(&stats, carried);
                    *carried = stats;
                }
                link.update(lane, carried, rail);
            }
            rows.update(peer);
            for (gpu, copied) in peer.copied.iter().filter_map(|(gpu, copied)| Some(((*gpu)?, copied))) {
                let row = rows.gpus.entry(gpu).or_insert_with(|| {
                    Row::new(Some(&self.page), Kind::Gpu, self.owner, &format!("cuda:{gpu}"), &peer.name)
                });
                row.write(|writer| {
                    writer.set(fields::gpu::copied_bytes, copied.bytes);
                    writer.set(fields::gpu::copies, copied.copies);
                    writer.set(fields::gpu::copy_seconds, copied.ns);
                });
            }
            ended.into_iter().for_each(|(link, end)| self.end(&link, end, true));
        }
        self.write_rails();
    }

    /// A peer has ended, and its lanes with it.
    fn remove(&mut self, peer: EndpointId, ended_lane: impl Fn(LaneId) -> EndedLane) {
        for (lane, link) in self.peers.remove(&peer).into_iter().flat_map(|rows| rows.links) {
            self.end(&link, ended_lane(lane), false);
        }
    }

    /// A lane has ended: alone (`lost`), or with its peer.
    fn end(&mut self, link: &Link, end: EndedLane, lost: bool) {
        if let Some(rail) = self.rails.get_mut(&link.rail) {
            rail.lanes -= 1;
            (rail.chunks, rail.bytes) = (rail.chunks - link.chunks, rail.bytes - link.bytes);
            rail.resent += end.resent_chunks;
            rail.lost += u64::from(lost);
            rail.corrupt += u64::from(end.is_corrupt);
        }
    }

    fn write_rails(&mut self) {
        use fields::rail as field;
        for rail in self.rails.values_mut() {
            let Rail { row, sent, received, lanes, chunks, bytes, stalls, retransmits, resent, lost, corrupt } = rail;
            row.write(|writer| {
                writer.set(field::sent_bytes, *sent);
                writer.set(field::received_bytes, *received);
                writer.set(field::lanes, *lanes);
                writer.set(field::in_flight_chunks, *chunks);
                writer.set(field::in_flight_bytes, *bytes);
                writer.set(field::stalls, *stalls);
                writer.set(field::retransmits, *retransmits);
                writer.set(field::resent_chunks, *resent);
                writer.set(field::lost_lanes, *lost);
                writer.set(field::corrupt_lanes, *corrupt);
            });
        }
    }
}

impl PeerRows {
    fn update(&mut self, peer: &PeerSample) {
        use fields::peer as field;
        let grown = |known: u64, now: u32| known + u64::from(now.wrapping_sub(known as u32));
        self.frames = (grown(self.frames.0, peer.frames.0), grown(self.frames.1, peer.frames.1));
        let (frames, resent) = (self.frames, self.resent);
        self.row.write(|writer| {
            writer.set(field::sent_frames, frames.0);
            writer.set(field::received_frames, frames.1);
            writer.set(field::in_flight, peer.in_flight);
            writer.set(field::copied_bytes, peer.copied.iter().map(|(_, copied)| copied.bytes).sum());
            writer.set(field::resent_chunks, resent);
            writer.set(field::lanes, peer.lanes.len() as u64);
            writer.wait(peer.wait.as_ref());
        });
    }
}

impl Rail {
    /// Adds what a lane has carried beyond what was counted of it.
    fn count(&mut self, stats: &LaneStats, counted: &LaneStats) {
        self.sent += stats.tx_bytes.saturating_sub(counted.tx_bytes);
        self.received += stats.rx_bytes.saturating_sub(counted.rx_bytes);
        self.retransmits += stats.retransmits.saturating_sub(counted.retransmits);
    }
}

impl Link {
    fn update(&mut self, lane: &LaneSample, carried: &LaneStats, rail: &mut Rail) {
        use fields::link as field;
        let (chunks, bytes) = (lane.load.chunks as u64, lane.load.bytes);
        rail.stalls += lane.stalls - self.stalls;
        rail.chunks = rail.chunks + chunks - self.chunks;
        rail.bytes = rail.bytes + bytes - self.bytes;
        (self.stalls, self.chunks, self.bytes) = (lane.stalls, chunks, bytes);
        self.row.write(|writer| {
            writer.set(field::sent_bytes, carried.tx_bytes);
            writer.set(field::received_bytes, carried.rx_bytes);
            writer.set(field::in_flight_chunks, chunks);
            writer.set(field::in_flight_bytes, bytes);
            writer.set(field::rate, lane.load.rate);
            writer.set(field::stalls, lane.stalls);
            writer.set(field::retransmits, carried.retransmits);
            writer.set(field::held_up, lane.held_up.into());
        });
    }
}

/// The rail of that name.
fn rail_row<'a>(rails: &'a mut HashMap<String, Rail>, page: &Arc<Page>, owner: u32, name: &str) -> &'a mut Rail {
    rails.entry(name.to_owned()).or_insert_with(|| Rail {
        row: Row::new(Some(page), Kind::Rail, owner, name, ""),
        sent: 0,
        received: 0,
        lanes: 0,
        chunks: 0,
        bytes: 0,
        stalls: 0,
        retransmits: 0,
        resent: 0,
        lost: 0,
        corrupt: 0,
    })
}

/// The rail of a lane, which is named after it: `tcp/eth1`, `tcp/eth1#2`, `tcp/eth1:messages`.
fn rail_of(lane: &str) -> &str {
    let lane = lane.strip_suffix(":messages").unwrap_or(lane);
    lane.rsplit_once('#').map_or(lane, |(rail, _)| rail)
}
