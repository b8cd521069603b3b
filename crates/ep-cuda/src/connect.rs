//! Connecting and disconnecting ranks; only changes are mapped and unmapped.

use std::time::{Duration, Instant};

use std::sync::Arc;

use crossrail::{Endpoint, Mapped, Shared};
use crossrail_ep::hello::Hello;
use crossrail_ep::meeting::{self, CLOSE_TIMEOUT, Connection, Greeted};
use crossrail_kernels::ep::{Epochs, Inbox, MOST_INBOX, nodes_of};
use crossrail_types::{Error, ErrorKind, Result};

use crate::inner::Inner;
use crate::membership::State;
use crate::peer::{Path, Peer};
use crate::proxy::{self, Area, FarRank, Link, Offer, Proxy, Ring};
use crate::setup_timings::PhaseTimer;

/// A rank whose hello was received, and how kernels write to it.
struct Met {
    rank: u32,
    endpoint: Endpoint,
    path: MetPath,
}

enum MetPath {
    /// Its heap, and this rank's inbox there.
    Mapped(Mapped, u32),
    /// Its inbox here, and that as the rank is to map it.
    Host(Area, Box<Inbox>, Shared),
    /// A link for each lane.
    Far(Arc<FarRank>, Vec<Offer>),
    /// None: other ranks forward.
    Through,
}

impl Met {
    /// The places that the rank writes to, for the rank.
    fn targets(&self) -> Vec<u8> {
        match &self.path {
            MetPath::Mapped(..) | MetPath::Through => Vec::new(),
            MetPath::Host(_, _, shared) => shared.to_bytes(),
            MetPath::Far(_, offers) => offers.iter().flat_map(Offer::targets).collect(),
        }
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
            let told: Vec<_> = met.iter().map(|met| (met.rank, met.endpoint.clone(), met.targets())).collect();
            Ok((told, met))
        });
        let tell = |error: &Error| meeting.refuse(ends.iter().map(|(_, endpoint)| endpoint), error);
        let (told, met) = prepared.inspect_err(tell)?;
        timer.end("map");
        let theirs = meeting.all_ready(&told, deadline)?;
        timer.end("all ready");
        let peers: Result<Vec<(Peer, Vec<Link>)>> =
            met.into_iter().zip(theirs).map(|(met, theirs)| self.ready(met, &theirs, !activate, deadline)).collect();
        let peers = peers?;
        let mut state = membership.lock();
        let mut contacts = Vec::with_capacity(new.len());
        for (mut peer, links) in peers {
            peer.generation = state.next_generation();
            if !links.is_empty() {
                self.proxy()?.connect(links, peer.generation)?;
            }
            if let Some(endpoint) = peer.endpoint().cloned() {
                peer.life = Some(membership.watch(peer.rank, peer.generation, &endpoint)?);
                contacts.push((peer.rank, peer.generation, endpoint));
            }
            membership.publish(peer.rank, peer.generation, || {
                self.heap.set_path(&peer)?;
                self.heap.set_mask(peer.rank, peer.masked)
            })?;
            state.replace(peer.rank, Some(peer));
        }
        self.heap.set_far(&state.far_ranks())?;
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

    /// The peer, which is ready, and links to it. `theirs`: its targets.
    fn ready(&self, met: Met, theirs: &[u8], masked: bool, deadline: Instant) -> Result<(Peer, Vec<Link>)> {
        let Met { rank, endpoint, path } = met;
        let (path, links) = match path {
            MetPath::Mapped(heap, inbox) => (Path::Mapped { endpoint, heap, inbox }, Vec::new()),
            MetPath::Host(receive, inbox, _) => {
                let named = |error: Error| Error { peer: Some(format!("rank {rank}")), ..error };
                let shared = Shared::from_bytes(theirs).map_err(named)?;
                let left = deadline.saturating_duration_since(Instant::now());
                let mapped = endpoint.map(&shared, Some(left)).map_err(named)?;
                let room = (mapped.ptr(), mapped.len());
                let send = Area::registered(self.launches.cuda(), room, receive.len(), mapped).map_err(named)?;
                let far = Arc::new(FarRank::new(rank, send, receive, *inbox, 0));
                (Path::Host { endpoint, far }, Vec::new())
            }
            MetPath::Far(far, offers) => {
                if theirs.len() != offers.len() * Offer::TARGETS {
                    let text = "this rank's GPU cannot map the memory of its GPU, which can map this rank's";
                    let error = Error::new(ErrorKind::Unsupported, "connect", text);
                    return Err(error.with_peer(format!("rank {rank}")));
                }
                let theirs = theirs.chunks_exact(Offer::TARGETS);
                let links = offers.into_iter().zip(theirs).map(|(offer, theirs)| offer.accept(theirs));
                (Path::Far { endpoint, far }, links.collect::<Result<Vec<_>>>()?)
            }
            MetPath::Through => (Path::Through { endpoint }, Vec::new()),
        };
        Ok((Peer { rank, generation: 0, masked, lost: None, departure: None, path, life: None }, links))
    }

    /// Raises this rank's sequence numbers to the highest of all ranks, so that all agree on the number of the next
    /// operation.
    fn set_epochs(&self, state: &State, new: &[Met], mine: Epochs, epochs: Epochs) -> Result<()> {
        if epochs != mine {
            self.heap.set_epochs(epochs)?;
            // Ranks connected before this call, this rank itself included, were behind as well.
            for peer in state.peers() {
                self.heap.set_taken(peer.rank, peer.apart(), epochs)?;
            }
        }
        new.iter().try_for_each(|met| match &met.path {
            MetPath::Mapped(..) => self.heap.set_taken(met.rank, None, epochs),
            MetPath::Host(receive, inbox, _) => {
                proxy::set_taken(receive, inbox, [epochs.dispatch, epochs.combine]);
                Ok(())
            }
            MetPath::Far(far, _) => self.heap.set_taken(met.rank, Some(far), epochs),
            MetPath::Through => Ok(()),
        })
    }

    /// Clears what an earlier connection left in the heap, and builds the hello for a new one.
    fn hello(&self, connection: &Connection, epochs: Epochs) -> Result<Hello> {
        let stale = self.membership.lock().mark_stale(connection.rank);
        let near = connection.is_shared();
        let gateways = nodes_of(&self.shape).gateways(self.me, connection.rank);
        let near = near && gateways.is_none();
        let inbox = if near { self.heap.take_inbox(connection.rank, stale)? } else { None };
        if stale && gateways.is_some() {
            // Its gateway has written there.
            self.heap.clear(connection.rank)?;
        }
        let shared = match inbox {
            Some(_) => self.share(connection)?,
            None if near => {
                let text = "it has an inbox for each rank that was on this node, or absent, when the buffer was made";
                self.out_of_reach(connection.rank, &Error::new(ErrorKind::Exhausted, "connect", text));
                None
            }
            None => None,
        };
        let (operations, view) = self.membership.agreement().progress();
        Ok(Hello {
            rank: self.me,
            parameters: self.membership.meeting().parameters().clone(),
            counts: [operations, epochs.dispatch, epochs.combine],
            view,
            shared,
            inbox: inbox.unwrap_or(0),
            key: Vec::new(),
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
            "the GPUs of ranks {} and {rank} do not map each other's memory, so rows go through memory of their hosts: {why}",
            self.me
        );
        self.membership.meeting().warn(&text);
    }

    fn meet_all(&self, greeted: Vec<Greeted>, deadline: Instant) -> Result<Vec<Met>> {
        let meet = |greeted: Greeted| {
            let (rank, endpoint) = (greeted.connection.rank, greeted.connection.endpoint.clone());
            let met = self.meet(greeted, deadline);
            met.map_err(|error| self.membership.meeting().refusal_or(rank, &endpoint, error))
        };
        greeted.into_iter().map(meet).collect()
    }

    fn meet(&self, greeted: Greeted, deadline: Instant) -> Result<Met> {
        let Greeted { connection: Connection { rank, endpoint, .. }, received, sent } = greeted;
        if let Some([theirs, _]) = nodes_of(&self.shape).gateways(self.me, rank)
            && theirs != rank
        {
            return Ok(Met { rank, endpoint, path: MetPath::Through });
        }
        // Both ranks map the other's heap, or none does.
        let mapped = match received.shared.filter(|_| sent.shared.is_some()) {
            Some(shared) => self.map(rank, &endpoint, (&shared, received.inbox), deadline)?,
            None => None,
        };
        let path = match mapped {
            Some(heap) => MetPath::Mapped(heap, received.inbox),
            None => self.meet_far(rank, &endpoint, deadline)?,
        };
        Ok(Met { rank, endpoint, path })
    }

    /// Makes what connects this rank to one whose heap this GPU cannot map, together with it: memory that both map on one
    /// machine, else rails.
    fn meet_far(&self, rank: u32, endpoint: &Endpoint, deadline: Instant) -> Result<MetPath> {
        let named = |error: Error| Error { peer: Some(format!("rank {rank}")), ..error };
        let refuse = |text: String| named(Error::new(ErrorKind::Unsupported, "connect", text));
        let node = self.shape.tuning().node;
        if node > 0 && rank / node == self.me / node {
            let text =
                format!("this GPU cannot map its heap, as it must with rows that go once to each node of {node} ranks");
            return Err(refuse(text).with_hint("make the buffer with send=\"rank\" on all ranks"));
        }
        if self.shape.rank_layout && !self.shape.slotted() {
            let text = "this GPU cannot map its heap, and the buffer was made for ranks of one node".to_owned();
            return Err(refuse(text).with_hint("make it with between_nodes=True on all ranks"));
        }
        let (cuda, inbox) = (self.launches.cuda(), Inbox::of(self.heap.room()));
        if inbox.area_bytes() > MOST_INBOX {
            return Err(refuse(format!("an inbox of {} bytes is more than {MOST_INBOX}", inbox.area_bytes())));
        }
        let bytes = inbox.area_bytes() as usize;
        let shares = endpoint.lanes().iter().any(|lane| lane.transport == "shm");
        if shares && node > 0 {
            let text = "it is on this machine, and rows that go once to each node need rails between nodes".to_owned();
            return Err(refuse(text).with_hint("leave shm out of CROSSRAIL_TLS, or use send=\"rank\""));
        }
        if shares {
            let memory = self.context.alloc(Area::room_for(bytes))?;
            let shared = endpoint.share(&memory).map_err(named)?;
            let receive = Area::registered(cuda, (memory.ptr(), memory.len()), bytes, memory).map_err(named)?;
            return Ok(MetPath::Host(receive, Box::new(inbox), shared));
        }
        let area = || Area::pinned(cuda, bytes).map_err(named);
        let lanes = proxy::lanes(self.config.ranks);
        let far = Arc::new(FarRank::new(rank, area()?, area()?, inbox, lanes));
        let mut offers = Vec::with_capacity(lanes);
        for lane in 0..lanes {
            let left = deadline.saturating_duration_since(Instant::now());
            let placing =
                crossrail::placing::open_for(endpoint, lane as u16, Some(self.options.ordinal), left).map_err(named)?;
            offers.push(Offer::new(placing, &far, lane)?);
        }
        Ok(MetPath::Far(far, offers))
    }

    /// The proxy, started for the first rank that needs it.
    fn proxy(&self) -> Result<&Proxy> {
        if let Some(proxy) = self.proxy.get() {
            return Ok(proxy);
        }
        let lanes = proxy::lanes(self.config.ranks);
        let rings = Proxy::rings(self.launches.cuda(), lanes)?;
        self.heap.set_rings(&rings.iter().map(Ring::addresses).collect::<Vec<_>>())?;
        let window = self.sight.window(self.context.settings(), &self.name, self.me);
        let proxy =
            Proxy::start(&rings, proxy::threads(lanes), self.config.ranks, window, self.membership.rails_watch())?;
        // Changes of membership are made one after the other.
        Ok(self.proxy.get_or_init(|| proxy))
    }

    /// The proxy lets go of a rank, if it sends there.
    pub(crate) fn let_go(&self, peer: &Peer) {
        if let (Some(proxy), Some(_)) = (self.proxy.get(), peer.far())
            && let Err(error) = proxy.disconnect(peer.rank)
        {
            self.membership.meeting().warn(&error);
        }
    }

    /// Maps a rank's heap for this rank's GPU; `None` if the GPU cannot.
    fn map(
        &self,
        rank: u32,
        endpoint: &Endpoint,
        (shared, inbox): (&[u8], u32),
        deadline: Instant,
    ) -> Result<Option<Mapped>> {
        let left = deadline.saturating_duration_since(Instant::now());
        let named = |error: Error| Error { peer: Some(format!("rank {rank}")), ..error };
        let shared = Shared::from_bytes(shared).map_err(named)?;
        if self.heap.least_len(inbox).is_none_or(|least| shared.len() < least) {
            let text = format!("the heap of rank {rank} has {} bytes, too few for its inbox {inbox}", shared.len());
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
                self.heap.clear_path(*rank)?;
                self.variants().iter().for_each(|variant| variant.follow_base(*rank, None));
                gone.extend(state.replace(*rank, None));
            }
        }
        self.heap.set_far(&state.far_ranks())?;
        membership.agreement().disconnected(ranks, &state.active_ranks());
        self.show_members(&state);
        drop(state);
        for peer in gone {
            let rank = peer.rank;
            self.let_go(&peer);
            peer.close(CLOSE_TIMEOUT);
            self.results.regions().clear(rank);
        }
        Ok(())
    }
}
