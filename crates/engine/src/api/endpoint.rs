//! One peer.

use std::time::{Duration, Instant};

use crossrail_proto as proto;
use crossrail_types::{EndpointId, Error, ErrorKind, LaneId, Reason, Result};
use proto::Operation;

use super::{Request, Worker};
use crate::core::{Claim, Core, RETURN_MAX, Submission, still_used};
use crate::memory::{Buffer, RegionKey};
use crate::progress;
use crate::session::Explain;

/// One peer of a worker and the lanes to it. Any thread may use it.
#[derive(Clone)]
pub struct Endpoint {
    pub(crate) worker: Worker,
    pub(crate) id: EndpointId,
    _claim: Claim,
}

/// One operation of a batch.
pub enum Op {
    /// As [`Endpoint::send`].
    Send {
        /// What to send.
        buffer: Buffer,
        /// Its tag.
        tag: u64,
    },
    /// As [`Worker::recv`], from this endpoint's peer.
    Recv {
        /// Where to.
        buffer: Buffer,
        /// The tag wanted.
        tag: u64,
        /// The bits of it that count.
        mask: u64,
    },
    /// As [`Endpoint::write`].
    Write {
        /// What to write.
        local: Buffer,
        /// The peer's region.
        remote: RegionKey,
        /// Where in it, in bytes.
        offset: u64,
        /// Delivered to the region's owner once all bytes are in place.
        imm: Option<u32>,
    },
    /// As [`Endpoint::read`].
    Read {
        /// Where to.
        local: Buffer,
        /// The peer's region.
        remote: RegionKey,
        /// Where in it, in bytes.
        offset: u64,
    },
}

/// One lane as it is now.
#[derive(Clone, Debug, PartialEq)]
pub struct LaneReport {
    /// As `shm`, `tcp/eth1`.
    pub name: String,
    /// `self`, `shm` or `tcp`.
    pub transport: String,
    /// Whether it carries anything; a lost one is retried under the same name.
    pub alive: bool,
    /// Bytes sent on it, frame heads included.
    pub tx_bytes: u64,
    /// Bytes received on it, frame heads included.
    pub rx_bytes: u64,
    /// TCP segments that were sent again.
    pub retransmits: u64,
}

impl Op {
    pub(super) fn buffer(&mut self) -> &mut Buffer {
        match self {
            Op::Send { buffer, .. } | Op::Recv { buffer, .. } => buffer,
            Op::Write { local, .. } | Op::Read { local, .. } => local,
        }
    }

    pub(super) fn submission(self) -> (Submission, Buffer) {
        match self {
            Op::Send { buffer, tag } => (Submission::Operation(Operation::Send { tag }), buffer),
            Op::Recv { buffer, tag, mask } => (Submission::Receive { tag, mask }, buffer),
            Op::Write { local, remote, offset, imm } => {
                (Submission::Operation(Operation::Write { key: remote.key, offset, imm }), local)
            }
            Op::Read { local, remote, offset } => {
                (Submission::Operation(Operation::Read { key: remote.key, offset }), local)
            }
        }
    }
}

impl Endpoint {
    pub(crate) fn new(worker: &Worker, claim: Claim) -> Endpoint {
        Endpoint { worker: worker.clone(), id: claim.id, _claim: claim }
    }

    /// The peer's name.
    pub fn peer(&self) -> String {
        let core = self.worker.progress_handle().core_here();
        core.and_then(|mut core| Some(core.peers().get(self.id)?.name().to_owned())).unwrap_or_default()
    }

    /// A number that tells this worker's endpoints apart.
    pub fn id(&self) -> u32 {
        self.id.0
    }

    /// The number of the peer's worker, as [`Description::generation`](crate::Description::generation): two processes
    /// may have one name, but never one number. A peer states it, as its name, and proves neither.
    pub fn generation(&self) -> u64 {
        let core = self.worker.progress_handle().core_here();
        core.and_then(|mut core| Some(core.peers().get(self.id)?.generation())).unwrap_or_default()
    }

    /// Whether the peer is alive, as far as is known.
    pub fn is_alive(&self) -> bool {
        let core = self.worker.progress_handle().core_here();
        core.is_some_and(|mut core| core.peers().get(self.id).is_some_and(|peer| peer.is_alive()))
    }

    /// Why the peer is no longer alive; `None` while it is.
    pub fn end(&self) -> Option<String> {
        let mut core = self.worker.progress_handle().core_here()?;
        core.peers().get(self.id).filter(|peer| !peer.is_alive()).map(|peer| peer.why_ended().to_owned())
    }

    /// Sends a tagged message. Finished when its bytes are in the receiver's buffer, whatever its size.
    ///
    /// # Errors
    /// Here `PeerDead` and `Closed`; in the request `Truncated`, `Cancelled`, `PeerDead`.
    pub fn send(&self, buffer: impl Into<Buffer>, tag: u64) -> Result<Request> {
        self.start("send", Operation::Send { tag }, buffer.into())
    }

    /// [`Endpoint::send`] in the place of a request that is over: see [`Worker::recv_in`].
    ///
    /// # Errors
    /// As [`Endpoint::send`]; `Usage`: a request of another worker.
    #[inline]
    pub fn send_in(&self, place: &mut Request, buffer: Buffer, tag: u64) -> std::result::Result<(), Box<Error>> {
        self.worker.check_place("send", place)?;
        place.restart(Some(self.id), Submission::Operation(Operation::Send { tag }), buffer)
    }

    /// Writes into the peer's region, at `offset` of it. Finished when the bytes are there; the region's owner then
    /// counts `imm`, if there is one ([`Region::wait_imm`](crate::Region::wait_imm)).
    ///
    /// Eight bytes at an address of host memory that is a multiple of eight are written by one release store, in the
    /// order of such writes: another thread there may poll them as an atomic word. Longer writes may be overtaken, and
    /// are announced by `imm`.
    ///
    /// # Errors
    /// In the request `Region`: the owner knows no such region any more, or the range is not inside it.
    pub fn write(
        &self,
        local: impl Into<Buffer>,
        remote: &RegionKey,
        offset: u64,
        imm: Option<u32>,
    ) -> Result<Request> {
        self.start("write", Operation::Write { key: remote.key, offset, imm }, local.into())
    }

    /// Reads from the peer's region, at `offset` of it. Errors as for [`Endpoint::write`].
    pub fn read(&self, local: impl Into<Buffer>, remote: &RegionKey, offset: u64) -> Result<Request> {
        self.start("read", Operation::Read { key: remote.key, offset }, local.into())
    }

    /// Starts all of `ops` in one call. The request is finished when all of them are, and fails with the first that
    /// failed; cancelling it cancels them.
    pub fn batch(&self, ops: Vec<Op>) -> Result<Request> {
        let progress = self.worker.progress_handle();
        progress.check_origin("batch")?;
        let mut ops = ops;
        for op in &mut ops {
            progress::admit(progress, op.buffer())?;
        }
        let mut core = progress.core();
        let parent = core.start_batch(self.id)?;
        let mut failure = None;
        for op in ops {
            let (submission, buffer) = op.submission();
            let started = core.submit(Some(self.id), submission, buffer);
            match started {
                Ok(op) => core.operations().adopt(parent, op),
                Err(error) => {
                    failure = Some(Box::new(error));
                    break;
                }
            }
        }
        core.operations().release(parent, failure);
        progress.after(core);
        Ok(Request::new(progress, parent))
    }

    #[inline]
    fn start(&self, name: &str, operation: Operation, buffer: Buffer) -> Result<Request> {
        let progress = self.worker.progress_handle();
        progress.check_origin(name)?;
        Request::start(progress, Some(self.id), Submission::Operation(operation), buffer)
    }

    /// Every link that the endpoint could have used: its cost, and what it was chosen for or why it was not.
    pub fn explain(&self) -> Explain {
        let known = self.worker.sessions().explain(self.id);
        known.unwrap_or_else(|| Explain::new("", String::new(), String::new(), "all", Vec::new()))
    }

    /// Its lanes, with what they have carried.
    pub fn lanes(&self) -> Vec<LaneReport> {
        let Some(mut core) = self.worker.progress_handle().core_here() else { return Vec::new() };
        let Some(peer) = core.peers().get(self.id) else { return Vec::new() };
        let (ids, bulk) = (peer.lanes().to_vec(), peer.bulk().to_vec());
        let mut rows = Vec::new();
        let mut busy = Vec::new();
        for id in ids {
            match core.transfers().polled().stats(id) {
                Some(stats) => rows.extend(report(&mut core, id, stats)),
                None => busy.extend(bulk.iter().find(|lane| lane.id == id).cloned()),
            }
        }
        drop(core);
        // A connection's own lock is taken before the worker's, never after.
        for lane in busy {
            let Some(stats) = lane.lane.lock().as_ref().map(|lane| lane.stats()) else { continue };
            rows.extend(report(&mut self.worker.progress_handle().core(), lane.id, stats));
        }
        rows
    }

    /// Waits for operations in flight, at most `timeout` (`CROSSRAIL_TIMEOUT` if `None`), and says goodbye: the peer's
    /// later operations fail with `Closed`, as do ours.
    ///
    /// # Errors
    /// `Timeout` when something did not finish; the endpoint is closed all the same. If the error reports that the peer may
    /// still access memory, because it copies by itself and has not confirmed its end within 3 s more, the requests end
    /// once it has.
    pub fn close(&self, timeout: Option<Duration>) -> Result<()> {
        let progress = self.worker.progress_handle();
        progress.check_origin("close")?;
        let timeout = timeout.unwrap_or(progress.environment().settings().timeout);
        let deadline = Instant::now() + timeout.min(progress::WAIT_MAX);
        let mut core = progress.core();
        let now = core.read_clock();
        let Some(peer) = core.peers().get_mut(self.id) else { return Ok(()) };
        if !peer.is_alive() {
            progress.after(core);
            self.worker.sessions().end_session(self.id);
            return self.await_peer(timeout);
        }
        let name = peer.name().to_owned();
        peer.say_goodbye(now);
        core.transfers().settle(self.id);
        progress.after(core);
        let left = deadline.saturating_duration_since(Instant::now());
        let id = self.id;
        let idle = progress.observe_until(left, |core: &mut Core| {
            let peer = core.peers().get(id)?;
            (!peer.is_alive() || peer.is_idle()).then_some(())
        });
        let mut core = progress.core();
        if let Some(peer) = core.peers().get_mut(self.id) {
            peer.close();
        }
        core.transfers().kill(self.id, "closed", Some(Reason::Closed));
        progress.after(core);
        self.worker.sessions().end_session(self.id);
        self.await_peer(timeout)?;
        match idle {
            Some(()) => Ok(()),
            None => Err(Error::new(ErrorKind::Timeout, "close", "operations were still under way").with_peer(name)),
        }
    }

    /// Waits until the peer no longer accesses memory of this end, once the endpoint has ended.
    fn await_peer(&self, timeout: Duration) -> Result<()> {
        let (progress, limit, id) = (self.worker.progress_handle(), timeout.min(RETURN_MAX), self.id);
        let ended = progress.observe_until(limit, |core: &mut Core| (!core.lingers(id)).then_some(()));
        ended.ok_or_else(|| still_used(&mut vec![self.peer()], limit))
    }
}

fn report(core: &mut Core, id: LaneId, stats: crossrail_transport::LaneStats) -> Option<LaneReport> {
    let lane = core.transfers().lanes().get(id)?;
    Some(LaneReport {
        name: lane.name().to_string(),
        transport: lane.transport().to_owned(),
        alive: lane.is_alive(),
        tx_bytes: stats.tx_bytes,
        rx_bytes: stats.rx_bytes,
        retransmits: stats.retransmits,
    })
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Endpoint({} -> {})", self.id.0, self.peer())
    }
}
