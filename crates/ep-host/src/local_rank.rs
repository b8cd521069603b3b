//! This rank's side of a buffer: its memory, and what it knows of the other ranks.
#![allow(unsafe_code)]

use std::time::{Duration, Instant};

use crossrail::{Context, Endpoint, Memory, Region, Worker};
use crossrail_control::Group;
use crossrail_ep::hello::Parameters;
use crossrail_ep::meeting::{Meeting, random_id};
use crossrail_ep::view::View;
use crossrail_ep::{Config, Fault, Layout};
use crossrail_locks::Mutex;
use crossrail_sight::Wait;
use crossrail_types::{Error, ErrorKind, Origin, Result};

use crate::heap::{Areas, Heap, expert_area};
use crate::peer::{OwnHeap, Peer};
use crate::plan::check_memory;
use crate::rows::Kernels;
use crate::sight::{Members, Sight};

/// This rank's side of a buffer. Everything but `view` is fixed when the buffer is created.
pub(crate) struct LocalRank {
    /// Identifies the buffer: a handle is valid for the buffer that made it.
    pub(crate) id: u64,
    /// The process that made it.
    pub(crate) origin: Origin,
    pub(crate) name: String,
    pub(crate) context: Context,
    pub(crate) config: Config,
    pub(crate) own: OwnHeap,
    pub(crate) kernels: &'static Kernels,
    /// The heap's memory.
    pub(crate) memory: Memory,
    /// Expert layout: rows and scales, double-buffered by the parity of the dispatch.
    pub(crate) experts: Option<[Memory; 2]>,
    pub(crate) worker: Worker,
    /// The heap as ranks of other nodes write it.
    pub(crate) region: Region,
    /// One thread at a time holds the lock, for as long as it drives an operation or connects.
    pub(crate) view: Mutex<GroupView>,
    /// Connects the ranks. When it ends, a thread that waits while it holds `view` gives up.
    pub(crate) meeting: Meeting,
}

/// What this rank knows of the group, guarded by [`LocalRank::view`].
pub(crate) struct GroupView {
    /// By rank; `None` where it is not connected.
    pub(crate) peers: Vec<Option<Peer>>,
    /// Sequence numbers of the last operation, dispatch and combine that began: equal on every rank.
    pub(crate) operations: u64,
    pub(crate) dispatches: u64,
    pub(crate) combines: u64,
    pub(crate) faults: Vec<Fault>,
    /// Ranks that were lost after they were granted a place among our rows: if they live, they may still write there.
    pub(crate) suspects: Vec<Suspect>,
    /// Number of the last connection made.
    pub(crate) generation: u32,
    /// Writes from other nodes that were noticed.
    pub(crate) arrivals: u64,
    /// How long a wait spins before it sleeps.
    pub(crate) spin: Duration,
    pub(crate) closed: bool,
    /// The ranks called different operations, so their sequence numbers differ: every operation fails with this.
    pub(crate) broken: Option<Error>,
    /// What the process's page shows of this buffer.
    pub(crate) sight: Sight,
    /// Who takes part, as agreed with the others.
    pub(crate) agreed: View,
    /// When this rank last looked for notices of the others.
    pub(crate) notices_polled: Instant,
}

/// A rank that was lost after it was granted a place among our rows.
pub(crate) struct Suspect {
    pub(crate) rank: usize,
    pub(crate) endpoint: Endpoint,
    /// Number and parity of the dispatch.
    pub(crate) number: u64,
    pub(crate) parity: usize,
}

impl GroupView {
    /// Fails if the ranks' sequence numbers differ.
    pub(crate) fn refuse_broken(&self, operation: &'static str) -> Result<()> {
        match &self.broken {
            None => Ok(()),
            Some(error) => Err(Error { operation: operation.to_owned(), ..error.clone() }),
        }
    }

    /// A rank that may still write its rows of an earlier dispatch where rows of the rank layout go.
    pub(crate) fn suspect(&mut self, own: &OwnHeap) -> Option<usize> {
        let peers = &self.peers;
        self.suspects.retain(|suspect| {
            let peer = peers[suspect.rank].as_ref();
            suspect.endpoint.is_alive()
                && !peer.is_some_and(|peer| peer.rows_were_written(own, suspect.parity, suspect.number))
        });
        self.suspects.first().map(|suspect| suspect.rank)
    }

    /// Writes the page's row, with the wait in progress.
    pub(crate) fn show(&mut self, wait: Option<&Wait>) {
        let (peers, lost) = (&self.peers, self.faults.len() as u64);
        let members = || {
            let peers = || peers.iter().flatten();
            let masked = peers().filter(|peer| peer.masked).count() as u64;
            Members { connected: peers().count() as u64, masked, lost }
        };
        self.sight.write([self.dispatches, self.combines, self.operations], members, wait);
    }

    /// Writes the page's row after ranks were connected or disconnected: it may be long until an operation does.
    pub(crate) fn show_members(&mut self) {
        self.sight.count_members();
        self.show(None);
    }

    /// Connected ranks that are not masked, except `me`.
    pub(crate) fn others(&self, me: usize) -> Vec<usize> {
        let peers = self.peers.iter().flatten();
        peers.filter(|peer| !peer.masked && peer.rank != me).map(|peer| peer.rank).collect()
    }

    /// Connected ranks that are not masked, this one included.
    pub(crate) fn active(&self) -> Vec<usize> {
        self.peers.iter().flatten().filter(|peer| !peer.masked).map(|peer| peer.rank).collect()
    }
}

impl LocalRank {
    /// As [`crate::ExpertBuffer::new`].
    pub(crate) fn new(group: &Group, context: &Context, name: &str, config: Config) -> Result<LocalRank> {
        config.check()?;
        let me = group.rank();
        config.check_rank(me)?;
        let here = group.members().iter().filter(|member| member.node == group.node()).count() as u32;
        check_memory(&config, here)?;
        let areas = Areas::new(&config);
        let memory = context.alloc(areas.heap)?;
        let experts = if config.has(Layout::Expert) {
            let bytes = usize::try_from(expert_area(&config, areas.row, areas.scale)).unwrap_or(usize::MAX);
            Some([context.alloc(bytes)?, context.alloc(bytes)?])
        } else {
            None
        };
        // SAFETY: freshly mapped, page-aligned, of this size, and kept by `memory` as long as the LocalRank lives.
        let heap = unsafe { Heap::new(memory.ptr()) };
        let heap = heap.ok_or_else(|| Error::new(ErrorKind::Io, "ExpertBuffer", "the heap has no address"))?;
        let id = random_id()?;
        let (node, parameters) = (group.node().to_owned(), Parameters::of(&config));
        let meeting = Meeting::new(group, context, name, id, node, config.share_node, parameters)?;
        let worker = meeting.worker.clone();
        let region = worker.register(&memory)?;
        let mut peers: Vec<Option<Peer>> = (0..config.ranks).map(|_| None).collect();
        peers[me as usize] = Some(Peer::this_rank(me as usize));
        let memory_bytes = areas.heap as u64 + experts.iter().flatten().map(|memory| memory.len() as u64).sum::<u64>();
        let sight = Sight::new(context.settings(), name, (me, config.ranks), memory_bytes);
        let local = LocalRank {
            id,
            origin: Origin::here(),
            meeting,
            name: name.to_owned(),
            context: context.clone(),
            own: OwnHeap { heap, areas, me: me as usize },
            kernels: Kernels::detect(),
            memory,
            experts,
            worker,
            region,
            config,
            view: Mutex::new(GroupView {
                peers,
                operations: 0,
                dispatches: 0,
                combines: 0,
                faults: Vec::new(),
                suspects: Vec::new(),
                generation: 0,
                arrivals: 0,
                spin: Duration::ZERO,
                closed: false,
                broken: None,
                sight,
                agreed: View::new(me),
                notices_polled: Instant::now(),
            }),
        };
        local.meeting.announce()?;
        Ok(local)
    }

    /// Logs what went wrong without stopping anything.
    pub(crate) fn warn(&self, what: &dyn std::fmt::Display) {
        self.meeting.warn(what);
    }

    pub(crate) fn set_mask(&self, ranks: &[u32], masked: bool) -> Result<()> {
        let what = if masked { "mask" } else { "unmask" };
        let mut view = self.view.lock();
        for rank in ranks {
            let peer = view.peers.get(*rank as usize).and_then(Option::as_ref);
            let Some(peer) = peer.filter(|peer| peer.rank != self.own.me) else {
                return Err(Error::new(ErrorKind::Usage, what, format!("rank {rank} is not a connected other rank")));
            };
            if !masked && !peer.is_alive() {
                let error = Error::new(ErrorKind::PeerDead, what, format!("the process of rank {rank} has ended"));
                return Err(error.with_hint("disconnect it; a new process can then connect as this rank"));
            }
        }
        // All of them or none: a view that differs from the peers' masks would never agree with the others'.
        let floor = [view.dispatches, view.combines];
        for rank in ranks {
            let Some(peer) = &mut view.peers[*rank as usize] else { continue };
            if peer.masked && !masked {
                peer.floor = floor;
            }
            (peer.masked, peer.lost) = (masked, false);
        }
        view.restart(0);
        Ok(())
    }
}
