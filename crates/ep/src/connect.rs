//! Connecting and disconnecting ranks.
#![allow(unsafe_code)]

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossrail::{ConnectOptions, Endpoint, Mapped, RegionKey, Shared};
use crossrail_types::{Error, ErrorKind, Result};

use crate::buffer::{Inner, State};
use crate::config::Plan;
use crate::heap::Heap;
use crate::hello::{Hello, LONGEST, Parameters, Place, READY, TAG};
use crate::peer::{NetworkParts, Peer};

/// One end of a connection that is being made.
struct End {
    rank: usize,
    /// The other rank is on this node, and heaps are to be shared.
    near: bool,
    endpoint: Endpoint,
    /// The address, if this rank dialled.
    dialled: Option<Vec<u8>>,
}

impl End {
    /// The address, if `error` may mean that it was of a buffer that is no more: the store is told of the end of one
    /// before its connections go, but may have been read before that.
    fn was_old(&self, error: &Error) -> Option<Vec<u8>> {
        let gone = matches!(error.kind, ErrorKind::PeerDead | ErrorKind::Closed) && !self.endpoint.is_alive();
        self.dialled.clone().filter(|_| gone)
    }

    /// Whether both ranks map each other's heaps.
    fn maps(&self) -> bool {
        self.near && self.endpoint.lanes().iter().any(|lane| lane.transport == "shm")
    }
}

/// An address that nobody answers at is looked up again after so long.
const AGAIN: Duration = Duration::from_millis(100);
/// Waits look this often whether they are still wanted.
const SLICE: Duration = Duration::from_millis(100);
/// A goodbye may take so long.
const GOODBYE: Duration = Duration::from_millis(500);

impl State {
    /// Connected ranks that are not masked, without `me`.
    pub(crate) fn others(&self, me: usize) -> Vec<usize> {
        let peers = self.peers.iter().flatten();
        peers.filter(|peer| !peer.masked && peer.rank != me).map(|peer| peer.rank).collect()
    }

    /// The same with `me`.
    pub(crate) fn active(&self) -> Vec<usize> {
        self.peers.iter().flatten().filter(|peer| !peer.masked).map(|peer| peer.rank).collect()
    }
}

impl Inner {
    fn key(&self) -> String {
        format!("ep/{}", self.name)
    }

    /// Says in the store where this rank's buffer is and how it is reached.
    pub(crate) fn announce(&self) -> Result<()> {
        self.group.publish(&self.key(), &self.place().encode()?)
    }

    fn place(&self) -> Place {
        Place { node: self.group.node().to_owned(), address: self.worker.address() }
    }

    /// Where `ranks` are; waits for those that have not come, or are coming back.
    fn places(&self, ranks: &[u32], deadline: Instant) -> Result<Vec<Place>> {
        self.patiently(deadline, |slice| self.group.wait_members(ranks, Some(slice)))?;
        let all = self.patiently(deadline, |slice| self.group.collect(&self.key(), ranks, Some(slice)))?;
        all.iter().map(|bytes| Place::decode(bytes)).collect()
    }

    pub(crate) fn connect(&self, ranks: &[u32], activate: bool, timeout: Option<Duration>) -> Result<()> {
        let timeout = timeout.unwrap_or(self.context.settings().timeout);
        let deadline = Instant::now() + timeout;
        let mut state = self.state.lock();
        if state.closed {
            return Err(Error::new(ErrorKind::Closed, "connect", "the buffer was destroyed"));
        }
        let new = self.missing(&state, ranks)?;
        if new.is_empty() {
            return Ok(());
        }
        let mut ends = Vec::with_capacity(new.len());
        // The greater rank dials. All of this rank's are dialled before it waits for others to dial it; `new` is in
        // order.
        for (rank, place) in new.iter().zip(self.places(&new, deadline)?) {
            ends.push(match *rank < self.here.me as u32 {
                true => self.dial(*rank, place, deadline)?,
                false => {
                    let endpoint = self.accept(&mut state, *rank as usize, deadline)?;
                    End { rank: *rank as usize, near: self.is_near(&place), endpoint, dialled: None }
                }
            });
        }
        let network = ends.iter().filter(|end| !end.maps()).count() as u32;
        Plan::new(&self.config, network)?.check()?;
        let greeted: Vec<Result<u32>> = ends.iter().map(|end| self.greet(&mut state, end)).collect();
        let mut peers = Vec::with_capacity(ends.len());
        let mut counts = [state.operations, state.dispatches, state.combines];
        for (mut end, greeted) in ends.into_iter().zip(greeted) {
            let mut heard = greeted.and_then(|generation| Ok((generation, self.hear(&end, deadline)?)));
            while let Some(gone) = heard.as_ref().err().and_then(|error| end.was_old(error)) {
                end = self.dial_anew(end.rank as u32, &gone, deadline)?;
                heard =
                    self.greet(&mut state, &end).and_then(|generation| Ok((generation, self.hear(&end, deadline)?)));
            }
            let (generation, hello) = heard?;
            for (mine, theirs) in counts.iter_mut().zip(hello.counts) {
                *mine = (*mine).max(theirs);
            }
            peers.push(self.meet(end.rank, end.endpoint, generation, hello, deadline)?);
        }
        self.all_ready(&peers, deadline)?;
        let floor = [counts[1], counts[2]];
        if floor != [state.dispatches, state.combines] {
            // Those connected so far, this rank itself among them, came later than the others too.
            state.peers.iter_mut().flatten().for_each(|peer| peer.floor = floor);
        }
        [state.operations, state.dispatches, state.combines] = counts;
        for mut peer in peers {
            peer.floor = floor;
            peer.masked = !activate;
            let rank = peer.rank;
            state.peers[rank] = Some(peer);
        }
        state.spin = spin_for(&state);
        Ok(())
    }

    /// Waits in slices, so that `destroy` on another thread ends it.
    fn patiently<T>(&self, deadline: Instant, mut wait: impl FnMut(Duration) -> Result<T>) -> Result<T> {
        let began = Instant::now();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match wait(left.min(SLICE)) {
                Err(_) if self.closing.load(Ordering::Acquire) => {
                    return Err(Error::new(ErrorKind::Closed, "connect", "the buffer was destroyed"));
                }
                Err(error) if error.kind == ErrorKind::Timeout && left > SLICE => {}
                Err(mut error) if error.kind == ErrorKind::Timeout => {
                    // It says how long the last slice was.
                    if let Some((what, _)) = error.detail.rsplit_once(" in ") {
                        error.detail = format!("{what} in {:.3} s", began.elapsed().as_secs_f64());
                    }
                    return Err(error);
                }
                result => return result,
            }
        }
    }

    /// Those of `ranks` that are not connected yet.
    fn missing(&self, state: &State, ranks: &[u32]) -> Result<Vec<u32>> {
        let mut new = Vec::new();
        for rank in ranks {
            match state.peers.get(*rank as usize) {
                None => {
                    let text = format!("rank {rank} is none of {}", self.config.ranks);
                    return Err(Error::new(ErrorKind::Usage, "connect", text));
                }
                Some(None) if !new.contains(rank) => new.push(*rank),
                Some(_) => {}
            }
        }
        new.sort_unstable();
        Ok(new)
    }

    fn is_near(&self, place: &Place) -> bool {
        self.config.share_node && place.node == self.group.node()
    }

    fn dial(&self, rank: u32, mut place: Place, deadline: Instant) -> Result<End> {
        loop {
            let near = self.is_near(&place);
            let changes = self.group.changes();
            let left = deadline.saturating_duration_since(Instant::now());
            let require = if near { None } else { Some("tcp".to_owned()) };
            match self.worker.connect(&place.address, &ConnectOptions { require, timeout: Some(left) }) {
                Ok(endpoint) => return Ok(End { rank: rank as usize, near, endpoint, dialled: Some(place.address) }),
                // What the store says may be of a process that has ended, until its lease does.
                Err(error) if error.kind == ErrorKind::Unreachable && Instant::now() < deadline => {
                    self.group.wait_change(changes, deadline.min(Instant::now() + AGAIN));
                    place = self.places(&[rank], deadline)?.pop().unwrap_or(place);
                }
                Err(error) => return Err(Error { peer: Some(format!("rank {rank}")), ..error }),
            }
        }
    }

    /// Dials a rank whose buffer at the address `gone` was destroyed, once the store has that of the next one.
    fn dial_anew(&self, rank: u32, gone: &[u8], deadline: Instant) -> Result<End> {
        loop {
            let changes = self.group.changes();
            let place = self.places(&[rank], deadline)?.pop().filter(|place| place.address != gone);
            match place {
                Some(place) => return self.dial(rank, place, deadline),
                None if Instant::now() >= deadline => {
                    let error = Error::new(ErrorKind::PeerDead, "connect", "its buffer was destroyed");
                    return Err(error.with_peer(format!("rank {rank}")));
                }
                None => self.group.wait_change(changes, deadline.min(Instant::now() + AGAIN)),
            };
        }
    }

    fn accept(&self, state: &mut State, rank: usize, deadline: Instant) -> Result<Endpoint> {
        loop {
            if let Some(endpoint) = state.early.remove(&rank)
                && endpoint.is_alive()
            {
                return Ok(endpoint);
            }
            let accepted = self.patiently(deadline, |slice| self.worker.accept(Some(slice)));
            let endpoint = accepted.map_err(|error| match error.kind {
                ErrorKind::Timeout => {
                    let text = format!("rank {rank} did not connect in time: {}", self.about(rank as u32));
                    Error::new(ErrorKind::Timeout, "connect", text)
                        .with_hint("every rank calls connect for the same ranks")
                }
                _ => error,
            })?;
            match rank_of(&endpoint.peer()) {
                Some(from) if from < state.peers.len() => {
                    state.early.insert(from, endpoint);
                }
                _ => self.warn(&format!(
                    "a connection from {:?}, which is no rank of this buffer, was closed",
                    endpoint.peer()
                )),
            }
        }
    }

    fn about(&self, rank: u32) -> String {
        let members = self.group.members();
        match members.iter().find(|member| member.rank == rank) {
            Some(member) => format!("its process is {}", member.process),
            None => "it is not in the group any more".to_owned(),
        }
    }

    /// Clears what an earlier connection left, and says hello; gives the number of the connection.
    fn greet(&self, state: &mut State, end: &End) -> Result<u32> {
        for word in self.here.heap.words(&self.here.areas, end.rank).0.iter().flatten() {
            word.store(0, Ordering::Release);
        }
        state.generation += 1;
        let shared = if end.maps() { Some(end.endpoint.share(&self.memory)?.to_bytes()) } else { None };
        let hello = Hello {
            rank: self.here.me as u32,
            parameters: Parameters::of(&self.config),
            counts: [state.operations, state.dispatches, state.combines],
            shared,
            key: self.region.key().to_bytes(),
            generation: state.generation,
        };
        end.endpoint.send(hello.encode()?, TAG)?;
        Ok(state.generation)
    }

    fn hear(&self, end: &End, deadline: Instant) -> Result<Hello> {
        let rank = end.rank;
        let request = self.worker.recv(vec![0; LONGEST], TAG, u64::MAX, Some(&end.endpoint))?;
        let receipt = self
            .patiently(deadline, |slice| request.wait(Some(slice)))
            .map_err(|error| Error { peer: Some(format!("rank {rank}")), ..error })?;
        let bytes = request.into_vec().unwrap_or_default();
        let hello = Hello::decode(bytes.get(..receipt.bytes as usize).unwrap_or_default())?;
        if hello.rank as usize != rank {
            let text = format!("rank {rank} says that it is rank {}", hello.rank);
            return Err(Error::new(ErrorKind::Protocol, "connect", text));
        }
        Parameters::of(&self.config).check(self.here.me as u32, &hello.parameters, hello.rank)?;
        Ok(hello)
    }

    /// Waits until the others have mapped this rank's heap too: until then it must not go.
    fn all_ready(&self, peers: &[Peer], deadline: Instant) -> Result<()> {
        let named = |rank: usize| move |error| Error { peer: Some(format!("rank {rank}")), ..error };
        for peer in peers {
            if let Some(endpoint) = peer.endpoint() {
                endpoint.send(Vec::new(), READY).map_err(named(peer.rank))?;
            }
        }
        for peer in peers {
            let Some(endpoint) = peer.endpoint() else { continue };
            let request = self.worker.recv(Vec::new(), READY, u64::MAX, Some(endpoint))?;
            self.patiently(deadline, |slice| request.wait(Some(slice))).map_err(named(peer.rank))?;
        }
        Ok(())
    }

    fn meet(&self, rank: usize, endpoint: Endpoint, generation: u32, hello: Hello, deadline: Instant) -> Result<Peer> {
        if let Some(shared) = &hello.shared {
            let left = deadline.saturating_duration_since(Instant::now());
            let mapped = endpoint.map(&Shared::from_bytes(shared)?, Some(left))?;
            let heap = self.check_heap(rank, &mapped)?;
            return Ok(Peer::mapped(rank, heap, mapped, endpoint));
        }
        let staging = usize::try_from(self.here.areas.staging_bytes()).unwrap_or(usize::MAX);
        let parts = NetworkParts {
            endpoint,
            key: RegionKey::from_bytes(&hello.key)?,
            region: self.region.clone(),
            writes_as: hello.generation,
            reads_as: generation,
            staging: self.context.alloc(staging)?,
        };
        Ok(Peer::network(rank, parts))
    }

    fn check_heap(&self, rank: usize, mapped: &Mapped) -> Result<Heap> {
        if mapped.len() < self.here.areas.heap {
            let text =
                format!("the heap of rank {rank} has {} bytes where {} are needed", mapped.len(), self.here.areas.heap);
            return Err(Error::new(ErrorKind::Protocol, "connect", text));
        }
        // SAFETY: mapped page-aligned, of that size (just checked), and kept mapped by `mapped` beside it in the
        // peer.
        unsafe { Heap::new(mapped.ptr()) }
            .ok_or_else(|| Error::new(ErrorKind::Io, "connect", "the peer's heap has no address"))
    }

    pub(crate) fn disconnect(&self, ranks: &[u32]) -> Result<()> {
        let mut state = self.state.lock();
        if let Some(rank) = ranks.iter().find(|rank| **rank as usize == self.here.me || **rank >= self.config.ranks) {
            return Err(Error::new(
                ErrorKind::Usage,
                "disconnect",
                format!("rank {rank} is not another rank of this buffer"),
            ));
        }
        for rank in ranks {
            if let Some(peer) = state.peers[*rank as usize].take() {
                peer.close(GOODBYE);
            }
        }
        state.spin = spin_for(&state);
        Ok(())
    }

    pub(crate) fn destroy(&self) -> Result<()> {
        // Whoever waits holds the state, and lets go of it when it sees this.
        self.closing.store(true, Ordering::Release);
        let mut state = self.state.lock();
        if std::mem::replace(&mut state.closed, true) {
            return Ok(());
        }
        // The store may be gone; this rank's keys then vanish with its lease.
        let _ = self.place().encode().and_then(|place| self.group.withdraw_if(&self.key(), &place));
        for peer in state.peers.iter_mut().filter_map(Option::take) {
            peer.close(GOODBYE);
        }
        state.early.clear();
        drop(state);
        self.worker.close();
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let _ = self.destroy();
    }
}

/// How long to spin before sleeping: long while each rank of the node has a processor to itself, else it would only
/// keep the one from running that is waited for.
fn spin_for(state: &State) -> Duration {
    let near = state.peers.iter().flatten().filter(|peer| !peer.is_network()).count();
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    Duration::from_micros(if near <= processors { 200 } else { 1 })
}

/// The rank in a worker's name, as `ExpertBuffer::new` gives it.
fn rank_of(name: &str) -> Option<usize> {
    let rest = name.strip_prefix("rank ")?;
    rest.split_once(' ')?.0.parse().ok()
}
