//! Listening, and connecting a group: blocking, called by all ranks of it.
//!
//! A listener has a worker of its own, so that a group's rails end with it. Of two ranks the higher one connects. Each
//! pair has two objects for one-sided writes, one for the data of either rank, with the answers to it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossrail::placing::{self, Counter, Key, Placing};
use crossrail::{ConnectOptions, Endpoint, Worker, WorkerOptions};
use crossrail_types::{Error, ErrorKind, Result};

use super::batch::SLOT;
use super::group::Group;
use super::incoming::{Applier, IncomingOffer, SCRATCH};
use super::memory::Area;
use super::mirror;
use super::outgoing::{Answers, Inbox, OutgoingOffer};
use super::progress::{self, Receiving, Sending};
use super::shared::Shared;
use crate::handle::{Bytes, Handle};
use crate::log;
use crate::net::{Process, random};

/// Listener number in a handle, which the network never assigns.
const LISTENER: u32 = u32::from_le_bytes(*b"RMA1");
/// Memory of all slots of one direction, and limits of their number for a peer.
const SLOTS_MEMORY: usize = 64 << 20;
const SLOTS_MIN: usize = 4;
const SLOTS_MAX: usize = 32;
/// The tag of offers.
const OFFER: u64 = u64::from_le_bytes(*b"RMAoffer");
const VERSION: u64 = u64::from_le_bytes(*b"XRRMA001");
const OFFER_LEN: usize = 8 + 16 + 2 * 32 + 16;

/// A listener: one `listen`.
pub(crate) struct Listener {
    process: &'static Process,
    worker: Worker,
    id: u64,
}

/// One rank's half of a pair of links.
#[derive(Debug, PartialEq, Eq)]
struct Offer {
    rank: u32,
    ranks: u32,
    slots: u32,
    inbox: Inbox,
    answers: Answers,
}

/// A peer, before its offer has arrived.
struct Half {
    rank: u32,
    outgoing: OutgoingOffer,
    incoming: IncomingOffer,
    inbox: Arc<Area>,
}

/// Starts to listen; the handle by which others connect.
///
/// # Errors
/// As [`Worker::new`].
pub(crate) fn listen(process: &'static Process) -> Result<(Listener, Bytes)> {
    let id = random()?;
    let device = &process.device;
    let name = format!("{}:{}#{id:016x}", device.host, std::process::id());
    let options =
        WorkerOptions { name: Some(name), listen: process.listens(), unix: false, ..WorkerOptions::default() };
    let worker = Worker::new(process.context(), options)?;
    let addresses = worker.control_addresses();
    let ips = addresses.iter().map(SocketAddr::ip).collect();
    let ports = vec![addresses.first().map_or(0, SocketAddr::port)];
    let bytes = Handle { machine: device.machine, network: id, listener: LISTENER, ips, ports }.encode();
    Ok((Listener { process, worker, id }, bytes))
}

/// Number of slots for each peer.
fn slots(ranks: usize) -> usize {
    (SLOTS_MEMORY / SLOT / ranks.max(1)).clamp(SLOTS_MIN, SLOTS_MAX)
}

/// Connects all ranks, of which this is `rank`.
///
/// # Errors
/// `Usage`: the handles are not those of this group; what the engine reports; `Timeout`: a rank has not connected.
pub(crate) fn connect(listener: &Listener, handles: &[Bytes], rank: u32) -> Result<Arc<Group>> {
    static IDS: AtomicU64 = AtomicU64::new(1);
    let handles: Vec<Handle> = handles.iter().map(Handle::decode).collect::<Result<_>>()?;
    let usage = |detail: &str| Err(Error::new(ErrorKind::Usage, "connect", detail.to_owned()));
    if handles.iter().any(|handle| handle.listener != LISTENER) {
        return usage("a handle is not one of an RMA plugin");
    }
    if handles.get(rank as usize).is_none_or(|own| own.network != listener.id) {
        return usage("the handle of this rank is not that of the listener");
    }
    let (ranks, timeout) = (handles.len() as u32, listener.process.context().settings().timeout);
    let deadline = Instant::now() + timeout;
    let shared = Shared::new(IDS.fetch_add(1, Ordering::Relaxed), rank, ranks, timeout)?;
    let slots = slots(ranks as usize);
    let mut endpoints: Vec<Endpoint> = Vec::new();
    let mut halves: Vec<Half> = Vec::new();
    // Dialling first avoids a circle of waiting ranks.
    for (other, handle) in (0..rank).zip(&handles) {
        let endpoint = dial(listener, handle, deadline)?;
        halves.push(open(&endpoint, (rank, other), slots, deadline)?);
        endpoints.push(endpoint);
    }
    let later = accept(listener, &handles, rank, deadline)?;
    for (other, endpoint) in (rank + 1..).zip(later) {
        halves.push(open(&endpoint, (rank, other), slots, deadline)?);
        endpoints.push(endpoint);
    }
    for (half, endpoint) in halves.iter().zip(&endpoints) {
        endpoint.send(half.offer((rank, ranks), slots).encode(), OFFER)?;
    }
    let mut offers: Vec<Offer> = Vec::new();
    for (half, endpoint) in halves.iter().zip(&endpoints) {
        let expected = (half.rank, ranks);
        offers.push(receive(listener, endpoint, expected, slots, deadline)?);
    }
    let (to_self, from_self) = mirror::pair()?;
    let own = half(rank, Box::new(to_self), Box::new(from_self), slots)?;
    offers.insert(rank as usize, own.offer((rank, ranks), slots));
    halves.insert(rank as usize, own);
    let peers: Vec<String> = endpoints.iter().map(Endpoint::peer).collect();
    log::info(format_args!("RMA: rank {rank} of {ranks} is connected to {}", peers.join(", ")));
    let rails = (listener.worker.clone(), endpoints);
    assemble(&shared, halves, offers, Some(rails), progress::is_split())
}

/// A group of the halves of all ranks, by rank, and what their peers offer.
fn assemble(
    shared: &Arc<Shared>,
    halves: Vec<Half>,
    offers: Vec<Offer>,
    rails: Option<(Worker, Vec<Endpoint>)>,
    is_split: bool,
) -> Result<Arc<Group>> {
    let (mut sending, mut receiving, mut areas) = (Vec::new(), Vec::new(), Vec::new());
    for (half, offer) in halves.into_iter().zip(offers) {
        let outbox = Arc::new(Area::new(half.inbox.len())?);
        areas.extend([Arc::clone(&outbox), Arc::clone(&half.inbox)]);
        sending.push(half.outgoing.accept(shared, half.rank, offer.inbox, outbox));
        receiving.push(half.incoming.accept(shared, half.rank, offer.answers)?);
    }
    let scratch = Arc::new(Area::new(SCRATCH)?);
    areas.push(Arc::clone(&scratch));
    let sending = Sending::new(shared, sending);
    let receiving = Receiving::new(shared, receiving, Applier::new(scratch));
    Group::start(shared, (Box::new(sending), Box::new(receiving)), areas, rails, is_split)
}

fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

fn dial(listener: &Listener, handle: &Handle, deadline: Instant) -> Result<Endpoint> {
    let mut failure = Error::new(ErrorKind::Unreachable, "connect", "the handle has no address");
    for address in handle.worker(0) {
        let options = ConnectOptions {
            require: Some("tcp".to_owned()),
            timeout: Some(left(deadline)),
            ..ConnectOptions::default()
        };
        match listener.worker.connect(address.to_string().as_bytes(), &options) {
            Ok(endpoint) => return Ok(endpoint),
            Err(error) if matches!(error.kind, ErrorKind::Unreachable | ErrorKind::Timeout) => failure = error,
            Err(error) => return Err(error),
        }
    }
    Err(failure)
}

/// The endpoints of all higher ranks, in order.
fn accept(listener: &Listener, handles: &[Handle], rank: u32, deadline: Instant) -> Result<Vec<Endpoint>> {
    let higher = &handles[rank as usize + 1..];
    let mut found: Vec<Option<Endpoint>> = higher.iter().map(|_| None).collect();
    while let Some(missing) = found.iter().position(Option::is_none) {
        let accepted = listener.worker.accept(Some(left(deadline)));
        let endpoint = accepted.map_err(|error| match error.kind {
            ErrorKind::Timeout => {
                let detail = format!("rank {} has not connected", rank as usize + 1 + missing);
                Error::new(ErrorKind::Timeout, "connect", detail).with_hint("see that rank's log")
            }
            _ => error,
        })?;
        let peer = endpoint.peer();
        // Connections of other workers are dropped.
        let from = higher.iter().position(|handle| peer.ends_with(&format!("#{:016x}", handle.network)));
        if let Some(place) = from.and_then(|from| found.get_mut(from)) {
            *place = Some(endpoint);
        }
    }
    Ok(found.into_iter().flatten().collect())
}

/// The two objects of a pair: the first for the data of the lower rank.
fn open(endpoint: &Endpoint, (rank, other): (u32, u32), slots: usize, deadline: Instant) -> Result<Half> {
    let of_lower = placing::open(endpoint, 0, left(deadline))?;
    let of_higher = placing::open(endpoint, 1, left(deadline))?;
    let (out, into) = if rank < other { (of_lower, of_higher) } else { (of_higher, of_lower) };
    half(other, out, into, slots)
}

fn half(rank: u32, out: Box<dyn Placing>, into: Box<dyn Placing>, slots: usize) -> Result<Half> {
    let inbox = Arc::new(Area::new(slots * SLOT)?);
    let incoming = IncomingOffer::new(into, Arc::clone(&inbox))?;
    Ok(Half { rank, outgoing: OutgoingOffer::new(out, slots)?, incoming, inbox })
}

impl Half {
    fn offer(&self, (rank, ranks): (u32, u32), slots: usize) -> Offer {
        let (inbox, answers) = (self.incoming.mine.clone(), self.outgoing.mine.clone());
        Offer { rank, ranks, slots: slots as u32, inbox, answers }
    }
}

/// The offer of a peer, which must be of that rank.
fn receive(
    listener: &Listener,
    endpoint: &Endpoint,
    expected: (u32, u32),
    slots: usize,
    deadline: Instant,
) -> Result<Offer> {
    let request = listener.worker.recv(vec![0; OFFER_LEN], OFFER, u64::MAX, Some(endpoint))?;
    request.wait(Some(left(deadline)))?;
    let wrong = |why: &str| Error::new(ErrorKind::Mismatch, "connect", why).with_peer(endpoint.peer());
    let bytes = request.into_vec().unwrap_or_default();
    let offer = Offer::decode(&bytes).ok_or_else(|| wrong("it has another release of this plugin"))?;
    if (offer.rank, offer.ranks, offer.slots as usize) != (expected.0, expected.1, slots) {
        return Err(wrong(&format!(
            "it connects as rank {} of {} with {} slots; rank {} of {} with {slots} was expected",
            offer.rank, offer.ranks, offer.slots, expected.0, expected.1
        )));
    }
    Ok(offer)
}

impl Offer {
    fn encode(&self) -> Vec<u8> {
        let numbers = [self.rank, self.ranks, self.slots, 0];
        let counters = [self.inbox.data, self.answers.accepted, self.answers.refused, Counter(0)];
        let mut out = VERSION.to_le_bytes().to_vec();
        out.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        out.extend([self.inbox.key.0, self.answers.key.0].concat());
        out.extend(counters.iter().flat_map(|counter| counter.0.to_le_bytes()));
        out
    }

    fn decode(bytes: &[u8]) -> Option<Offer> {
        let (version, rest) = bytes.split_first_chunk::<8>()?;
        let (numbers, rest) = rest.split_first_chunk::<16>()?;
        let (inbox, rest) = rest.split_first_chunk::<32>()?;
        let (answers, counters) = rest.split_first_chunk::<32>()?;
        let number =
            |bytes: &[u8], at: usize| bytes[4 * at..].first_chunk().map_or(0, |word| u32::from_le_bytes(*word));
        if bytes.len() != OFFER_LEN || u64::from_le_bytes(*version) != VERSION {
            return None;
        }
        let counter = |at| Counter(number(counters, at));
        Some(Offer {
            rank: number(numbers, 0),
            ranks: number(numbers, 1),
            slots: number(numbers, 2),
            inbox: Inbox { key: Key(*inbox), data: counter(0) },
            answers: Answers { key: Key(*answers), accepted: counter(1), refused: counter(2) },
        })
    }
}

/// Two groups of two ranks in this process, over these wires: of the data of either rank, the ends of each.
#[cfg(test)]
pub(crate) fn pair(wires: [[Box<dyn Placing>; 2]; 2]) -> Result<[Arc<Group>; 2]> {
    static IDS: AtomicU64 = AtomicU64::new(1 << 32);
    const SLOTS: usize = 8;
    let [[out0, into1], [out1, into0]] = wires;
    let mut ends = vec![vec![half(1, out0, into0, SLOTS)?], vec![half(0, out1, into1, SLOTS)?]];
    let mut offers = vec![vec![ends[1][0].offer((1, 2), SLOTS)], vec![ends[0][0].offer((0, 2), SLOTS)]];
    for rank in 0..2 {
        let (to_self, from_self) = mirror::pair()?;
        let own = half(rank as u32, Box::new(to_self), Box::new(from_self), SLOTS)?;
        offers[rank].insert(rank, own.offer((rank as u32, 2), SLOTS));
        ends[rank].insert(rank, own);
    }
    let mut groups = Vec::new();
    for (rank, (halves, offers)) in ends.into_iter().zip(offers).enumerate() {
        let id = IDS.fetch_add(1, Ordering::Relaxed);
        groups.push(assemble(&Shared::new(id, rank as u32, 2, Duration::from_secs(5))?, halves, offers, None, true)?);
    }
    let mut groups = groups.into_iter();
    Ok(std::array::from_fn(|_| groups.next().expect("two groups")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offers_survive_their_encoding() {
        let inbox = Inbox { key: Key([7; 32]), data: Counter(3) };
        let answers = Answers { key: Key([9; 32]), accepted: Counter(4), refused: Counter(5) };
        let offer = Offer { rank: 1, ranks: 2, slots: 3, inbox, answers };
        let bytes = offer.encode();
        assert_eq!(Offer::decode(&bytes), Some(offer));
        for wrong in [&bytes[1..], &bytes[..8], &[], &[0; OFFER_LEN]] {
            assert_eq!(Offer::decode(wrong), None);
        }
    }

    #[test]
    fn many_peers_have_fewer_slots() {
        assert_eq!([1, 2, 8, 64, 4096].map(slots), [32, 32, 28, 4, 4]);
    }
}
