//! Objects for one-sided writes to a peer: over connections of their own on every rail of an endpoint ([`TcpPlacing`]),
//! or, where `CROSSRAIL_TLS` names it, over libfabric on those rails or on NICs near the GPU ([`FabricRails`]).
//!
//! The end that connected the endpoint dials, as for lanes: each connection proves the session's key, and its name
//! contains the object's. It is added at the object's [`Door`], which exists before the object if the peer is first.
//! The endpoint's end ends them.

mod over_fabric;

use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crossrail_handshake::{self as handshake, LaneName, LanePurpose, share_of_descriptors};
use crossrail_locks::Mutex;
use crossrail_tcp::placing::{Connection, Door, LINKS_MAX, TcpPlacing};
use crossrail_topology::NetDevice;
use crossrail_transport::LaneError;
use crossrail_transport::placing::Placing;
use crossrail_types::{Checksum, EndpointId, Error, ErrorKind, Result};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::dialling::{DIAL_MAX, at_once, binding};
use super::rail_pairs::{PeerRails, RailPair};
use super::{Sessions, fabric};
use crate::core::{LostRail, gone};

/// Most objects of an endpoint at a time.
const INDEX_MAX: u16 = 1 << INDEX_BITS;
const INDEX_BITS: u32 = 4;
/// A connection's channel: no carrier's class, the object's index, and the number of the connection.
const CLASS: u16 = 3;
const NUMBER_BITS: u32 = 10;
const NUMBERS: usize = 1 << NUMBER_BITS;
/// Numbers of the connections of rails over libfabric, which no other connection of an object has.
const COMPANIONS: std::ops::Range<u16> = NUMBERS as u16 - FABRIC_RAILS..NUMBERS as u16;
const FABRIC_RAILS: u16 = 16;
/// Least number of descriptors that may wait for objects which this end has not asked for.
const UNASKED_MIN: usize = 64;
/// Interval at which an end that waits for connections checks the deadline.
const WAIT: Duration = Duration::from_millis(100);

/// Identity of an object. Objects of one index follow each other and are numbered by their turn, modulo 256.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Of {
    endpoint: EndpointId,
    index: u16,
    turn: u8,
}

impl Of {
    /// The name of one of its connections. The turn goes with the rail's number, of which it leaves 8 bits.
    fn name(&self, rail: u16, number: u16) -> LaneName {
        LaneName {
            rail: u16::from(self.turn) << 8 | rail & 0xff,
            channel: CLASS << (NUMBER_BITS + INDEX_BITS) | self.index << NUMBER_BITS | number,
            purpose: LanePurpose::Placing,
        }
    }

    /// The object of a connection, and the connection's number; `None`: it is a lane's.
    fn parse(endpoint: EndpointId, rail: u16, channel: u16) -> Option<(Of, u16)> {
        let is_ours = channel >> (NUMBER_BITS + INDEX_BITS) == CLASS;
        let index = channel >> NUMBER_BITS & (INDEX_MAX - 1);
        let of = Of { endpoint, index, turn: (rail >> 8) as u8 };
        is_ours.then_some((of, channel & (NUMBERS as u16 - 1)))
    }
}

/// The objects of one worker. Any thread.
#[derive(Default)]
pub(super) struct Placings(Mutex<State>);

#[derive(Default)]
struct State {
    doors: HashMap<Of, Entry>,
    /// The turn of the next object of that endpoint and index.
    turns: HashMap<(EndpointId, u16), u8>,
}

struct Entry {
    way: Way,
    /// The connecting end: the rail of each connection, by number.
    rails: Vec<u16>,
    /// Over libfabric: the number of its first NIC.
    nic: Option<u16>,
}

/// The way to an object for threads that do not drive it.
enum Way {
    /// This end has not asked for it; the number of connections that the peer has made.
    Early(Arc<Door>, usize),
    /// Over TCP, or not known yet.
    Door(Weak<Door>),
    /// Over libfabric.
    Fabric(OfFabric),
}

/// An object over libfabric.
#[derive(Clone)]
struct OfFabric {
    door: Weak<crossrail_fabric::Door>,
    /// The GPU whose memory it is for, and the peer's name.
    gpu: Option<u32>,
    peer: String,
    /// The connecting end: the last [`attach_rail`](crossrail_fabric::attach_rail) number of each of its rails, which is
    /// the rail's own modulo [`FABRIC_RAILS`], and the endpoint's rail over which it is dialled.
    rails: Vec<(u16, u16)>,
}

impl Entry {
    fn new(way: Way) -> Entry {
        Entry { way, rails: Vec::new(), nic: None }
    }

    fn end(&self, why: &str) {
        match &self.way {
            Way::Fabric(object) => drop(object.door.upgrade().map(|door| door.end(why))),
            _ => drop(self.door().map(|door| door.end(why))),
        }
    }

    fn is_over(&self) -> bool {
        match &self.way {
            Way::Fabric(object) => object.door.strong_count() == 0,
            _ => self.door().is_none(),
        }
    }

    /// Its door, unless the object was dropped.
    fn door(&self) -> Option<Arc<Door>> {
        match &self.way {
            Way::Early(door, _) => Some(Arc::clone(door)),
            Way::Door(door) => door.upgrade().filter(|door| !door.is_closed()),
            Way::Fabric(_) => None,
        }
    }

    /// Descriptors that it holds without having been asked for.
    fn unasked(&self) -> usize {
        match &self.way {
            Way::Early(_, connections) => connections + 1,
            _ => 0,
        }
    }
}

fn dropped(of: Of) -> Error {
    let detail = format!("the object {} of one-sided writes that it is for was dropped", of.index);
    Error::new(ErrorKind::Refused, "lane", detail)
}

impl Placings {
    /// The next object of that index, and its door, where connections may have been added already.
    fn next(&self, endpoint: EndpointId, index: u16) -> Result<(Of, Arc<Door>)> {
        let mut state = self.0.lock();
        let turn = state.turns.get(&(endpoint, index)).copied().unwrap_or(0);
        let of = Of { endpoint, index, turn };
        let is_of = |old: &Of| (old.endpoint, old.index) == (endpoint, index);
        state.doors.retain(|old, entry| !is_of(old) || !entry.is_over());
        let early = state.doors.remove(&of).and_then(|entry| entry.door());
        let door = early.map_or_else(|| Door::new(LINKS_MAX).map(Arc::new), Ok)?;
        state.doors.insert(of, Entry::new(Way::Door(Arc::downgrade(&door))));
        state.turns.insert((endpoint, index), turn.wrapping_add(1));
        Ok((of, door))
    }

    /// The door for a connection that the peer made: of the last object of its index, or of the next, which this end has
    /// not asked for yet. `most`: descriptors that all objects of that kind may hold. A peer gets as many as are left
    /// then, so that none takes all of them.
    fn door(&self, of: Of, most: usize) -> Result<Arc<Door>> {
        let mut state = self.0.lock();
        let next = state.turns.get(&(of.endpoint, of.index)).copied().unwrap_or(0);
        match state.doors.get(&of) {
            Some(Entry { way: Way::Early(..), .. }) | None => {}
            Some(asked) => return asked.door().ok_or_else(|| dropped(of)),
        }
        if of.turn != next {
            return Err(dropped(of));
        }
        let (mut own, mut all) = (0, 0);
        for (one, entry) in &state.doors {
            all += entry.unasked();
            own += if one.endpoint == of.endpoint { entry.unasked() } else { 0 };
        }
        if own >= most.saturating_sub(all) {
            let detail = format!(
                "{own} descriptors wait for objects of one-sided writes that the peer opens and this end does not, and \
                 {all} of all peers, of {most}"
            );
            return Err(Error::new(ErrorKind::Exhausted, "lane", detail));
        }
        let entry = match state.doors.entry(of) {
            Slot::Occupied(known) => known.into_mut(),
            Slot::Vacant(free) => free.insert(Entry::new(Way::Early(Arc::new(Door::new(LINKS_MAX)?), 0))),
        };
        match &mut entry.way {
            Way::Early(door, connections) => {
                *connections += 1;
                Ok(Arc::clone(door))
            }
            _ => Err(dropped(of)),
        }
    }

    /// The number of one more connection over that rail, and the door. `None`: the object was dropped, or has had [`NUMBERS`].
    fn another(&self, of: Of, rail: u16) -> Option<(u16, Arc<Door>)> {
        let mut state = self.0.lock();
        let entry = state.doors.get_mut(&of).filter(|entry| entry.rails.len() < usize::from(COMPANIONS.start))?;
        let door = entry.door()?;
        entry.rails.push(rail);
        Some((entry.rails.len() as u16 - 1, door))
    }

    /// The rail of a connection that this end made.
    fn rail(&self, of: Of, number: u16) -> Option<u16> {
        self.0.lock().doors.get(&of)?.rails.get(usize::from(number)).copied()
    }

    /// A network interface is down.
    pub(super) fn interface_down(&self, interface: &str) {
        for entry in self.0.lock().doors.values() {
            match &entry.way {
                Way::Fabric(object) => drop(object.door.upgrade().map(|door| door.interface_down(interface))),
                _ => drop(entry.door().map(|door| door.interface_down(interface))),
            }
        }
    }

    /// Ends the objects of these endpoints.
    pub(super) fn end(&self, ends: impl Fn(EndpointId) -> bool, why: &str) {
        let mut state = self.0.lock();
        state.turns.retain(|(endpoint, _), _| !ends(*endpoint));
        state.doors.retain(|of, entry| {
            let keeps = !ends(of.endpoint);
            if !keeps {
                entry.end(why);
            }
            keeps
        });
    }
}

fn is_alive(sessions: &Sessions, endpoint: EndpointId) -> bool {
    sessions.progress.core().peers().get(endpoint).is_some_and(|peer| peer.is_alive())
}

/// See [`crate::placing::open`].
pub(crate) fn open(
    sessions: &Arc<Sessions>,
    endpoint: EndpointId,
    (index, gpu): (u16, Option<u32>),
    timeout: Duration,
) -> Result<Box<dyn Placing>> {
    let deadline = Instant::now() + timeout;
    if index >= INDEX_MAX {
        let detail = format!("object {index}: an endpoint has objects 0 to {}", INDEX_MAX - 1);
        return Err(Error::new(ErrorKind::Usage, "placing", detail));
    }
    if !is_alive(sessions, endpoint) {
        return Err(gone("placing"));
    }
    let Some(rails) = sessions.control.rails(endpoint) else {
        let detail = "only endpoints over network devices have rails for one-sided writes";
        return Err(Error::new(ErrorKind::Unsupported, "placing", detail).with_hint("connect with require=tcp"));
    };
    if rails.ticket.checksum != Checksum::Off {
        let detail = "one-sided writes over TCP have no checksums, which this session agreed on";
        return Err(Error::new(ErrorKind::Unsupported, "placing", detail)
            .with_peer(rails.peer)
            .with_hint("set CROSSRAIL_CHECKSUM=off at both ends"));
    }
    let (of, door) = sessions.placings.next(endpoint, index)?;
    if !is_alive(sessions, endpoint) {
        // It may have ended before it could end this.
        sessions.placings.end(|ended| ended == endpoint, "the endpoint has ended");
    }
    let own = Arc::clone(&door);
    let opened = match rails.initiator {
        true if fabric::is_named(sessions.environment.settings()) => {
            over_fabric::dial(sessions, (of, gpu), rails, deadline)
        }
        true => dial_all(sessions, of, rails, (door, deadline)),
        false => await_all(sessions, (of, gpu), &rails.peer, (door, deadline), timeout),
    };
    if opened.is_err() {
        // What the peer has added goes with it.
        own.close();
    }
    opened
}

/// The connecting end.
fn dial_all(
    sessions: &Arc<Sessions>,
    of: Of,
    rails: PeerRails,
    (door, deadline): (Arc<Door>, Instant),
) -> Result<Box<dyn Placing>> {
    let per_rail = sessions.environment.settings().channels.first();
    let mut names: Vec<LaneName> = Vec::new();
    for rail in rails.pairs.keys().filter(|rail| **rail < 256) {
        for _ in 0..per_rail {
            let (number, _) = sessions.placings.another(of, *rail).ok_or_else(|| gone("placing"))?;
            names.push(of.name(*rail, number));
        }
    }
    let limit = deadline.min(Instant::now() + DIAL_MAX);
    let pair_of = |name: &LaneName| rails.pairs.get(&(name.rail & 0xff));
    let dial = |name: LaneName| dial(&rails.ticket, pair_of(&name).ok_or_else(|| gone("placing"))?, name, limit);
    let dialled = at_once(&names, &dial);
    let (mut connections, mut failures) = (Vec::new(), Vec::new());
    for (name, dialled) in names.into_iter().zip(dialled) {
        let Some(pair) = pair_of(&name) else { continue };
        match dialled {
            Ok(stream) => connections.push(connection(name, &pair.mine.name, Some(&pair.mine), stream)),
            Err(error) => failures.push((name, &pair.mine.name, error)),
        }
    }
    if connections.is_empty() {
        let why = failures.into_iter().next().map_or_else(|| gone("placing"), |(_, _, error)| error);
        return Err(Error { operation: "placing".to_owned(), ..why }.with_peer(rails.peer));
    }
    for (name, device, error) in failures {
        sessions.log.warn(format_args!("{}: one-sided writes begin without rail {device}: {error}", rails.peer));
        sessions.redialer.lost(sessions, lost(of, name));
    }
    let mut placing = TcpPlacing::new(&rails.peer, true, connections, door)?;
    let me = Arc::downgrade(sessions);
    placing.on_lost(move |number| {
        let Some(sessions) = me.upgrade() else { return };
        // The thread that polls must not wait for the worker's locks.
        let worker = Arc::clone(&sessions);
        let _ = sessions.progress.spawn("crossrail-lost", move || {
            if let Some(rail) = worker.placings.rail(of, number) {
                worker.redialer.lost(&worker, lost(of, of.name(rail, number)));
            }
        });
    });
    // The first frame announces the number of connections. Nothing arrives: the peer has no key yet.
    placing.poll(&mut |_| {}).map_err(|error| ended(&rails.peer, &error))?;
    Ok(Box::new(placing))
}

fn ended(peer: &str, error: &LaneError) -> Error {
    Error::new(ErrorKind::PeerDead, "placing", error.to_string()).with_peer(peer)
}

fn lost(of: Of, LaneName { rail, channel, .. }: LaneName) -> LostRail {
    LostRail { endpoint: of.endpoint, rail, channel, reported: true, short_lived: 0 }
}

/// The other end: waits for the connections that the peer makes.
fn await_all(
    sessions: &Arc<Sessions>,
    (of, gpu): (Of, Option<u32>),
    peer: &str,
    (door, deadline): (Arc<Door>, Instant),
    timeout: Duration,
) -> Result<Box<dyn Placing>> {
    let index = of.index;
    if fabric::is_named(sessions.environment.settings()) {
        let late = || {
            let detail = format!("the peer has not made the connection of object {index} for libfabric");
            Error::new(ErrorKind::Timeout, "placing", detail)
                .with_peer(peer)
                .with_waited(timeout)
                .with_hint("both ends must ask for the object, and name fabric in CROSSRAIL_TLS")
        };
        let connections = door.added(deadline)?;
        if connections.is_empty() {
            return Err(late());
        }
        return over_fabric::accept(sessions, (of, gpu), peer, connections, (door, deadline));
    }
    let mut placing = TcpPlacing::new(peer, false, Vec::new(), door)?;
    while !placing.is_complete() {
        // Nothing can arrive yet: the peer has no key.
        let moved = placing.poll(&mut |_| {}).map_err(|error| ended(peer, &error))?;
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let have: Vec<String> = placing.rails().into_iter().map(|rail| rail.name).collect();
            let have = if have.is_empty() { "none".to_owned() } else { have.join(" ") };
            let detail = format!("the peer has not made all connections of object {index}; here are: {have}");
            return Err(Error::new(ErrorKind::Timeout, "placing", detail)
                .with_peer(peer)
                .with_waited(timeout)
                .with_hint("both ends must ask for the object"));
        }
        if !moved
            && placing.arm()
            && let Some(fd) = placing.fd()
        {
            wait(fd, left.min(WAIT));
        }
    }
    Ok(Box::new(placing))
}

#[allow(unsafe_code)]
fn wait(fd: std::os::fd::RawFd, limit: Duration) {
    // SAFETY: the object, which the caller holds, keeps its descriptor open.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let timeout = PollTimeout::try_from(limit).unwrap_or(PollTimeout::ZERO);
    // An error is as good as a wake-up: the caller looks at everything again.
    let _ = poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], timeout);
}

fn dial(ticket: &handshake::Ticket, rail: &RailPair, name: LaneName, deadline: Instant) -> Result<TcpStream> {
    let to = SocketAddr::new(rail.theirs.address, rail.theirs.port);
    handshake::dial_lane(ticket, &binding(&rail.mine, rail.from), to, name, deadline)
}

/// A connection over that local device. Short writes go over the fastest; among equals, the objects prefer different
/// ones.
fn connection(name: LaneName, device: &str, known: Option<&NetDevice>, stream: TcpStream) -> Connection {
    let (of, number) = Of::parse(EndpointId(0), name.rail, name.channel).map_or((None, 0), |(of, n)| (Some(of), n));
    let index = of.map_or(0, |of| of.index);
    let turn = u32::from((name.rail & 0xff).wrapping_sub(index) % 64);
    let speed = known.and_then(|device| device.speed_mbps).unwrap_or(1000);
    let slowness = 1_000_000 / speed.clamp(1, 1_000_000);
    let interface = known.filter(|device| !device.loopback).map(|device| device.interface.clone());
    let suffix = if index == 0 { String::new() } else { format!("#{index}") };
    Connection {
        id: number,
        name: format!("tcp/{device}:placing{suffix}"),
        cost: slowness * 64 + turn,
        interface,
        stream,
    }
}

/// A peer has dialled a connection of such an object.
///
/// # Errors
/// `Protocol`: its channel does not name an object; `Refused`: the object was dropped; `Exhausted`: no descriptor is left.
pub(super) fn arrived(
    sessions: &Arc<Sessions>,
    endpoint: EndpointId,
    name: LaneName,
    stream: TcpStream,
    device: &str,
) -> Result<()> {
    let Some((of, _)) = Of::parse(endpoint, name.rail, name.channel) else {
        let detail = format!("channel {:#x} is none of one-sided writes", name.channel);
        return Err(Error::new(ErrorKind::Protocol, "lane", detail));
    };
    let rails = sessions.environment.rails()?;
    let known = rails.iter().find(|rail| rail.name == device);
    let connection = connection(name, device, known, stream);
    match sessions.placings.of_fabric(of) {
        Some(object) => over_fabric::arrived(sessions, of, object, connection),
        None => sessions.placings.door(of, unasked_max())?.add(connection),
    }
    if !is_alive(sessions, endpoint) {
        // It may have ended before it could end this; its number may be given again.
        sessions.placings.end(|ended| ended == endpoint, "the endpoint has ended");
    }
    Ok(())
}

/// Descriptors that objects may hold which peers open and this end does not.
fn unasked_max() -> usize {
    share_of_descriptors(4).max(UNASKED_MIN)
}

/// True for a lost connection of such an object, which only [`redial`] can dial.
pub(super) fn is_of(lost: &LostRail) -> bool {
    Of::parse(lost.endpoint, lost.rail, lost.channel).is_some()
}

/// Dials a lost connection again. `Ok(None)`: it is not needed any more. The name of its device, when it is up again.
///
/// # Errors
/// The device's name, and what kept it from coming up.
pub(super) fn redial(
    sessions: &Sessions,
    lost: &LostRail,
    (ticket, rail): (&handshake::Ticket, &RailPair),
    deadline: Instant,
) -> std::result::Result<Option<String>, (String, Error)> {
    let Some((of, number)) = Of::parse(lost.endpoint, lost.rail, lost.channel) else { return Ok(None) };
    if COMPANIONS.contains(&number) {
        return over_fabric::redial(
            sessions,
            (of, number - COMPANIONS.start, lost.rail & 0xff),
            (ticket, rail),
            deadline,
        );
    }
    let Some((number, door)) = sessions.placings.another(of, lost.rail & 0xff) else { return Ok(None) };
    let (mine, name) = (&rail.mine, of.name(lost.rail, number));
    let stream = dial(ticket, rail, name, deadline).map_err(|error| (mine.name.clone(), error))?;
    door.add(connection(name, &mine.name, Some(mine), stream));
    Ok(Some(mine.name.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::rails::carrier_of;

    #[test]
    fn a_connection_names_its_object_and_no_carrier() {
        for (index, turn, rail, number) in [(0, 0, 0, 0), (15, 255, 255, 1023), (7, 1, 3, 512)] {
            let of = Of { endpoint: EndpointId(4), index, turn };
            let name = of.name(rail, number);
            assert_eq!(Of::parse(EndpointId(4), name.rail, name.channel), Some((of, number)));
            assert_eq!(name.rail & 0xff, rail);
            assert!(carrier_of(name.channel).is_err());
        }
        assert!(Of::parse(EndpointId(4), 0, 0x3fff).is_none());
    }

    #[test]
    fn connections_come_to_the_last_object_of_an_index_or_to_the_next() {
        let placings = Placings::default();
        let of = |turn| Of { endpoint: EndpointId(4), index: 2, turn };
        let early = placings.door(of(0), 64).expect("the next");
        assert_eq!(placings.door(of(1), 64).expect_err("two ahead").kind, ErrorKind::Refused);
        let (first, door) = placings.next(EndpointId(4), 2).expect("a descriptor");
        assert!(first == of(0) && Arc::ptr_eq(&door, &early));
        assert!(placings.door(of(0), 64).is_ok() && placings.door(of(1), 64).is_ok(), "the peer may be first");
        assert_eq!(placings.another(first, 9).expect("room").0, 0);
        assert_eq!((placings.another(first, 8).expect("room").0, placings.rail(first, 1)), (1, Some(8)));
        let (second, _) = placings.next(EndpointId(4), 2).expect("a descriptor");
        assert_eq!(second, of(1));
        placings.end(|endpoint| endpoint == EndpointId(4), "it has ended");
        assert!(placings.another(second, 0).is_none(), "it has ended");
    }
    #[test]
    fn no_peer_takes_all_descriptors_for_objects_that_were_not_asked_for() {
        let placings = Placings::default();
        let of = |endpoint, index| Of { endpoint: EndpointId(endpoint), index, turn: 0 };
        let taken = |endpoint| (0..1000).take_while(|at| placings.door(of(endpoint, at % 16), 160).is_ok()).count();
        let first = taken(1);
        assert!((60..=80).contains(&first), "{first} connections, and 16 doors");
        let (second, third) = (taken(2), taken(3));
        assert!(second >= first / 4 && third > 0 && third < second, "{first} {second} {third}");
        assert_eq!(placings.door(of(1, 0), 160).expect_err("full").kind, ErrorKind::Exhausted);
        // What is asked for does not count.
        let asked: Vec<_> = (0..16).map(|index| placings.next(EndpointId(1), index).expect("a descriptor")).collect();
        assert!((0..500).all(|_| placings.door(of(1, 0), 160).is_ok()));
        assert!(taken(2) > 0);
        drop(asked);
        assert_eq!(placings.door(of(1, 0), 160).expect_err("it was dropped").kind, ErrorKind::Refused);
        placings.end(|endpoint| endpoint == EndpointId(2), "it has ended");
        assert!(taken(4) > second, "those that have ended make room");
    }
}
