//! Connecting and disconnecting ranks; only changes are mapped and unmapped.

use std::time::{Duration, Instant};

use crossrail::{Endpoint, Mapped, Memory, Place, RegionKey, Shared};
use crossrail_ep::hello::Hello;
use crossrail_ep::meeting::{self, CLOSE_TIMEOUT, Connection, Greeted};
use crossrail_kernels::ep::Epochs;
use crossrail_types::{Error, ErrorKind, Result};

use crate::inner::Inner;
use crate::membership::State;
use crate::options;
use crate::peer::{Forwarded, Path, Peer};
use crate::setup_timings::PhaseTimer;

/// A rank whose hello was received, and how kernels write to its heap.
struct Met {
    rank: u32,
    endpoint: Endpoint,
    /// Key of its heap as a region; empty if it sent none.
    key: Vec<u8>,
    path: MetPath,
}

enum MetPath {
    Mapped(Mapped),
    /// The mirror.
    Forwarded(Memory),
}

impl Met {
    fn mirror(&self) -> Option<&Memory> {
        match &self.path {
            MetPath::Mapped(_) => None,
            MetPath::Forwarded(mirror) => Some(mirror),
        }
    }

    /// The peer, which is ready. `late`: the key it sent with that, if its hello had none.
    fn into_peer(self, late: &[u8], masked: bool) -> Result<Peer> {
        let Met { rank, endpoint, key, path } = self;
        let path = match path {
            MetPath::Mapped(heap) => Path::Mapped { endpoint, heap },
            MetPath::Forwarded(mirror) => {
                let key = if key.is_empty() { late } else { &key };
                if key.is_empty() {
                    let text = "this rank's GPU cannot map the memory of its GPU, which can map this rank's";
                    let error = Error::new(ErrorKind::Unsupported, "connect", text);
                    return Err(error.with_peer(format!("rank {rank}")));
                }
                Path::Forwarded(Box::new(Forwarded { rank, endpoint, key: RegionKey::from_bytes(key)?, mirror }))
            }
        };
        Ok(Peer { rank, generation: 0, masked, lost: None, departure: None, path, life: None })
    }
}

impl Inner {
    pub(crate) fn connect(&self, ranks: &[u32], activate: bool, timeout: Option<Duration>) -> Result<()> {
        let deadline = Instant::now() + timeout.unwrap_or(self.context.settings().timeout);
        let (membership, meeting) = (&self.membership, self.membership.meeting());
        let _changing = membership.begin_change();
        membership.refuse_closed("connect")?;
        self.refuse_variant("connect")?;
        let mut timer = PhaseTimer::begin();
        let (new, mine) = {
            let state = self.current();
            let new = meeting::unconnected(ranks, self.config.ranks, |rank| state.peer(rank).is_some())?;
            if new.is_empty() {
                return Ok(());
            }
            if state.peers().count() > 1 {
                membership.agreement().refuse_evicted("connect")?;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let mine = self.wait_until_idle(&state, "connect", Some(left))?;
            (new, mine)
        };
        timer.end("kernels done");
        let (connections, deadline) = meeting.connect(&new, deadline)?;
        timer.end("endpoints");
        let greeted = meeting.greet(connections, deadline, |connection| self.hello(connection, mine))?;
        timer.end("hello");
        let epochs = greeted.iter().fold(mine, |most, greeted| {
            most.max(Epochs { dispatch: greeted.received.counts[1], combine: greeted.received.counts[2] })
        });
        let progress = greeted.iter().map(|greeted| (greeted.received.counts[0], greeted.received.view));
        let progress = progress.fold((0, 0), |most, one| (most.0.max(one.0), most.1.max(one.1)));
        let ends: Vec<(u32, Endpoint)> =
            greeted.iter().map(|one| (one.connection.rank, one.connection.endpoint.clone())).collect();
        let prepared = self.meet_all(greeted, deadline).and_then(|met| {
            // Once the others are told that this rank is ready, they may write into its heap.
            self.set_epochs(&membership.lock(), &met, mine, epochs)?;
            let told = met.iter().map(|met| Ok((met.rank, met.endpoint.clone(), self.late_key(met)?)));
            Ok((told.collect::<Result<Vec<_>>>()?, met))
        });
        let tell = |error: &Error| meeting.refuse(ends.iter().map(|(_, endpoint)| endpoint), error);
        let (told, met) = prepared.inspect_err(tell)?;
        timer.end("map");
        let keys = meeting.all_ready(&told, deadline)?;
        timer.end("all ready");
        let peers: Result<Vec<Peer>> =
            met.into_iter().zip(keys).map(|(met, key)| met.into_peer(&key, !activate)).collect();
        let mut state = membership.lock();
        let mut contacts = Vec::with_capacity(new.len());
        for mut peer in peers? {
            peer.generation = state.next_generation();
            if let Some(endpoint) = peer.endpoint().cloned() {
                peer.life = Some(membership.watch(peer.rank, peer.generation, &endpoint)?);
                contacts.push((peer.rank, peer.generation, endpoint));
            }
            membership.publish(peer.rank, peer.generation, || {
                self.heap.set_peer(peer.rank, peer.base(self.heap.base()))?;
                self.heap.set_mask(peer.rank, peer.masked)
            })?;
            state.replace(peer.rank, Some(peer));
        }
        membership.agreement().connected(contacts, &state.active_ranks(), progress)?;
        for variant in self.variants() {
            new.iter().for_each(|rank| variant.follow_base(*rank, state.peer(*rank)));
        }
        self.show_members(&state);
        drop(state);
        timer.end("tell kernels");
        self.setup_timings.lock().connect = timer.parts();
        Ok(())
    }

    /// Raises this rank's sequence numbers to the highest of all ranks, so that all agree on the number of the next
    /// operation.
    fn set_epochs(&self, state: &State, new: &[Met], mine: Epochs, epochs: Epochs) -> Result<()> {
        if epochs != mine {
            self.heap.set_epochs(epochs)?;
            // Ranks connected before this call, this rank itself included, were behind as well.
            for peer in state.peers() {
                self.heap.set_taken(self.me, peer.rank, peer.mirror(), epochs)?;
            }
        }
        new.iter().try_for_each(|met| self.heap.set_taken(self.me, met.rank, met.mirror(), epochs))
    }

    /// Clears what an earlier connection left in the heap, and builds the hello for a new one.
    fn hello(&self, connection: &Connection, epochs: Epochs) -> Result<Hello> {
        if self.membership.lock().mark_stale(connection.rank) {
            self.heap.clear(connection.rank)?;
        }
        let shared = if connection.is_shared() { self.share(connection)? } else { None };
        // A rank that can map the heap needs no key, unless mapping fails there (`late_key`).
        let key = if shared.is_none() { self.key()? } else { Vec::new() };
        let (operations, view) = self.membership.agreement().progress();
        Ok(Hello {
            rank: self.me,
            parameters: self.membership.meeting().parameters().clone(),
            counts: [operations, epochs.dispatch, epochs.combine],
            view,
            shared,
            key,
            generation: 0,
        })
    }

    /// The heap, exported for the other rank to map; `None` where GPU memory cannot be exported.
    fn share(&self, connection: &Connection) -> Result<Option<Vec<u8>>> {
        match self.heap.share(&connection.endpoint) {
            Ok(shared) => Ok(Some(shared.to_bytes())),
            Err(error) if error.kind == ErrorKind::Unsupported => {
                self.out_of_reach(connection.rank, &error);
                Ok(None)
            }
            Err(error) => Err(Error { peer: Some(format!("rank {}", connection.rank)), ..error }),
        }
    }

    fn out_of_reach(&self, rank: u32, why: &Error) {
        let text = format!(
            "the GPUs of ranks {} and {rank} cannot map each other's memory, so the host forwards rows: {why}",
            self.me
        );
        self.membership.meeting().warn(&text);
    }

    /// The heap's key, for ranks that cannot map it.
    fn key(&self) -> Result<Vec<u8>> {
        self.heap.key(&self.membership.meeting().worker)
    }

    /// The key for a rank that got none in the hello, because it was expected to map the heap: if this rank cannot map
    /// that rank's heap, that rank cannot map this one's either.
    fn late_key(&self, met: &Met) -> Result<Vec<u8>> {
        match met.path {
            MetPath::Forwarded(_) => self.key(),
            MetPath::Mapped(_) => Ok(Vec::new()),
        }
    }

    fn meet_all(&self, greeted: Vec<Greeted>, deadline: Instant) -> Result<Vec<Met>> {
        // Ranks already known not to map the heap.
        let unreachable = greeted.iter().filter(|greeted| greeted.received.shared.is_none()).count() as u32;
        self.check_memory(unreachable)?;
        let meet = |greeted: Greeted| {
            let (rank, endpoint) = (greeted.connection.rank, greeted.connection.endpoint.clone());
            let met = self.meet(greeted, unreachable, deadline);
            met.map_err(|error| self.membership.meeting().refusal_or(rank, &endpoint, error))
        };
        greeted.into_iter().map(meet).collect()
    }

    fn check_memory(&self, unreachable: u32) -> Result<()> {
        if unreachable == 0 {
            return Ok(());
        }
        // The plan includes the heap, which is already allocated.
        let free = options::free(self.launches.cuda())?.saturating_add(self.heap.len());
        options::plan(&self.config, &self.options, unreachable, Ok(free))?.check()
    }

    fn meet(&self, greeted: Greeted, unreachable: u32, deadline: Instant) -> Result<Met> {
        let Greeted { connection: Connection { rank, endpoint, .. }, received, .. } = greeted;
        let mapped = match &received.shared {
            Some(shared) => self.map(rank, &endpoint, shared, deadline)?,
            None => None,
        };
        let path = match mapped {
            Some(heap) => MetPath::Mapped(heap),
            None => {
                if received.shared.is_some() {
                    self.check_memory(unreachable + 1)?;
                }
                let bytes = usize::try_from(self.heap.shared_len()).unwrap_or(usize::MAX);
                MetPath::Forwarded(self.context.alloc_on(bytes, Place::Gpu(self.options.ordinal))?)
            }
        };
        Ok(Met { rank, endpoint, key: received.key, path })
    }

    /// Maps a rank's heap for this rank's GPU; `None` if the GPU cannot.
    fn map(&self, rank: u32, endpoint: &Endpoint, shared: &[u8], deadline: Instant) -> Result<Option<Mapped>> {
        let left = deadline.saturating_duration_since(Instant::now());
        let named = |error: Error| Error { peer: Some(format!("rank {rank}")), ..error };
        let shared = Shared::from_bytes(shared).map_err(named)?;
        if shared.len() < self.heap.shared_len() {
            let text = format!("the heap of rank {rank} has {} bytes, not {}", shared.len(), self.heap.shared_len());
            return Err(Error::new(ErrorKind::Protocol, "connect", text));
        }
        match endpoint.map_on(&shared, Some(self.options.ordinal), Some(left)) {
            Ok(heap) => Ok(Some(heap)),
            Err(error) if matches!(error.kind, ErrorKind::Unsupported | ErrorKind::Region) => {
                self.out_of_reach(rank, &error);
                Ok(None)
            }
            Err(error) => Err(named(error)),
        }
    }

    pub(crate) fn disconnect(&self, ranks: &[u32]) -> Result<()> {
        let membership = &self.membership;
        let _changing = membership.begin_change();
        self.refuse_variant("disconnect")?;
        meeting::check_others(ranks, self.me, self.config.ranks, "disconnect")?;
        let mut state = self.current();
        // Kernels must not access their heaps after this; operations they sent may stay unreceived.
        self.wait_for_kernels(None)?;
        let mut gone = Vec::new();
        for rank in ranks {
            if state.peer(*rank).is_some() {
                membership.set_generation(*rank, 0);
                self.heap.set_mask(*rank, true)?;
                self.heap.set_peer(*rank, self.heap.base())?;
                self.variants().iter().for_each(|variant| variant.follow_base(*rank, None));
                gone.extend(state.replace(*rank, None));
            }
        }
        membership.agreement().disconnected(ranks, &state.active_ranks());
        self.show_members(&state);
        drop(state);
        for peer in gone {
            let rank = peer.rank;
            peer.close(CLOSE_TIMEOUT);
            self.results.regions().clear(rank);
        }
        Ok(())
    }
}
