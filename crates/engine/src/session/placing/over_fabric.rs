//! Objects of one-sided writes over libfabric: with all rails of the endpoint, or with NICs near the GPU.
//!
//! Each rail begins with a connection that the connecting end dials, and both ends join their devices over it. The other
//! end's object begins with the first rail that joins; the others are added as they do, and lost ones when they are back.

use std::collections::VecDeque;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_fabric::{FabricRails, Joined, RAILS_MAX, attach_rail};
use crossrail_handshake as handshake;
use crossrail_handshake::LaneName;
use crossrail_tcp::placing::{Connection, Door};
use crossrail_topology::NetDevice;
use crossrail_transport::placing::Placing;
use crossrail_types::{Error, ErrorKind, Result};

use super::super::dialling::{DIAL_MAX, at_once};
use super::super::rail_pairs::{PeerRails, RailPair};
use super::super::{Sessions, fabric};
use super::{COMPANIONS, FABRIC_RAILS, Of, OfFabric, Placings, Way, dial as dial_connection, lost};
use crate::core::gone;
use crate::environment::gpus_seen;

/// Most NICs of one object, of those near its GPU: the objects of all peers are spread over them, and each continues over
/// another NIC when one is lost.
const NICS_OF_OBJECT: usize = 2;
/// Time within which a rail joins at the end that accepts, before it waits for another.
const JOINED_WITHIN: Duration = DIAL_MAX;

impl Placings {
    /// The connecting end: the number of the NIC for an object, that with the fewest objects of `nics`.
    fn nic_for(&self, of: Of, nics: usize) -> u16 {
        let mut state = self.0.lock();
        let nics = nics.clamp(1, FABRIC_RAILS.into());
        let mut objects = vec![0; nics];
        for entry in state.doors.values().filter(|entry| !entry.is_over()) {
            if let Some(nic) = entry.nic {
                objects[usize::from(nic) % nics] += 1;
            }
        }
        // The objects of an endpoint are served by threads of their own, so each begins with another one.
        let least = (0..nics).min_by_key(|nic| (objects[*nic], (nic + nics - usize::from(of.index) % nics) % nics));
        let nic = least.unwrap_or_default() as u16;
        if let Some(entry) = state.doors.get_mut(&of) {
            entry.nic = Some(nic);
        }
        nic
    }

    /// The other end: the number that the connecting end has chosen.
    fn set_nic(&self, of: Of, nic: u16) {
        if let Some(entry) = self.0.lock().doors.get_mut(&of) {
            entry.nic = Some(nic);
        }
    }

    /// That object is over libfabric from now on.
    fn set_fabric(&self, of: Of, object: OfFabric) {
        match self.0.lock().doors.get_mut(&of) {
            Some(entry) => entry.way = Way::Fabric(object),
            None => drop(object.door.upgrade().map(|door| door.end("the endpoint has ended"))),
        }
    }

    /// That object, if it is over libfabric.
    pub(super) fn of_fabric(&self, of: Of) -> Option<OfFabric> {
        match &self.0.lock().doors.get(&of)?.way {
            Way::Fabric(object) => Some(object.clone()),
            _ => None,
        }
    }

    /// The endpoint's rail over which that rail of an object is dialled.
    fn rail_of(&self, of: Of, number: u16) -> Option<u16> {
        let object = self.of_fabric(of)?;
        let same = |(known, _): &&(u16, u16)| known % FABRIC_RAILS == number % FABRIC_RAILS;
        object.rails.iter().find(same).map(|(_, rail)| *rail)
    }

    /// The next number of that rail, and the object. `None`: it was dropped, or its numbers have run out.
    fn next_life(&self, of: Of, number: u16) -> Option<(u16, OfFabric)> {
        let mut state = self.0.lock();
        let Way::Fabric(object) = &mut state.doors.get_mut(&of)?.way else { return None };
        let same = |(known, _): &&mut (u16, u16)| *known % FABRIC_RAILS == number % FABRIC_RAILS;
        let (last, _) = object.rails.iter_mut().find(same)?;
        *last = last.checked_add(FABRIC_RAILS)?;
        Some((*last, object.clone()))
    }
}

/// The connecting end.
pub(super) fn dial(
    sessions: &Arc<Sessions>,
    (of, gpu): (Of, Option<u32>),
    rails: PeerRails,
    deadline: Instant,
) -> Result<Box<dyn Placing>> {
    let named = |error: Error| Error { operation: "placing".to_owned(), ..error }.with_peer(&rails.peer);
    let numbers: Vec<u16> = rails.pairs.keys().copied().filter(|rail| *rail < 256).collect();
    let nics = fabric::nics_of(sessions.environment.settings(), gpu).min(FABRIC_RAILS.into());
    let own: Vec<usize> = match nics {
        0 => (0..numbers.len().min(RAILS_MAX)).collect(),
        _ => {
            let first = usize::from(sessions.placings.nic_for(of, nics));
            (0..nics.min(NICS_OF_OBJECT)).map(|further| (first + further) % nics).collect()
        }
    };
    let plan = |own: &usize| Some((*own as u16, *numbers.get(own % numbers.len().max(1))?));
    let plan: Vec<(u16, u16)> = own.iter().filter_map(plan).collect();
    let names: Vec<LaneName> = plan.iter().map(|(own, rail)| of.name(*rail, COMPANIONS.start + own)).collect();
    let one = |name: LaneName| {
        let pair = rails.pairs.get(&(name.rail & 0xff)).ok_or_else(|| gone("placing"))?;
        let stream = dial_connection(&rails.ticket, pair, name, deadline.min(Instant::now() + DIAL_MAX))?;
        let own = Of::parse(of.endpoint, name.rail, name.channel).map_or(0, |(_, number)| number - COMPANIONS.start);
        join(sessions, (of, gpu, &rails.peer), (stream, own, Some(own)), Some(&pair.mine), deadline)
    };
    let (joined, failures) = loop {
        let began = Instant::now();
        let (mut joined, mut failures) = (Vec::new(), Vec::new());
        for (name, result) in names.iter().zip(at_once(&names, &one)) {
            match result {
                Ok(rail) => joined.push(rail),
                Err(error) => failures.push((*name, error)),
            }
        }
        if !joined.is_empty() {
            break (joined, failures);
        }
        // On a busy machine the peer's time for joining may be over first: it waits for the next connection.
        let is_late = |error: &Error| matches!(error.kind, ErrorKind::Unreachable | ErrorKind::Timeout);
        let is_late = failures.iter().any(|(_, error)| is_late(error)) && began.elapsed() >= JOINED_WITHIN;
        if !is_late || Instant::now() >= deadline {
            return Err(named(failures.into_iter().next().map_or_else(|| gone("placing"), |(_, error)| error)));
        }
    };
    let mut object = FabricRails::new(&rails.peer, joined)?;
    let me = Arc::downgrade(sessions);
    object.on_lost(move |number| {
        let Some(sessions) = me.upgrade() else { return };
        // The thread that polls must not wait for the worker's locks.
        let worker = Arc::clone(&sessions);
        let _ = sessions.progress.spawn("crossrail-lost", move || {
            if let Some(rail) = worker.placings.rail_of(of, number) {
                let name = of.name(rail, COMPANIONS.start + number % FABRIC_RAILS);
                worker.redialer.lost(&worker, lost(of, name));
            }
        });
    });
    let door = Arc::downgrade(object.door());
    sessions.placings.set_fabric(of, OfFabric { door, gpu, peer: rails.peer.clone(), rails: plan });
    for (name, error) in failures {
        sessions.log.warn(format_args!("{}: one-sided writes begin without a rail: {error}", rails.peer));
        sessions.redialer.lost(sessions, lost(of, name));
    }
    Ok(Box::new(object))
}

/// The other end, to which the peer has made a connection.
pub(super) fn accept(
    sessions: &Arc<Sessions>,
    (of, gpu): (Of, Option<u32>),
    peer: &str,
    connections: Vec<Connection>,
    (door, deadline): (Arc<Door>, Instant),
) -> Result<Box<dyn Placing>> {
    let named = |error: Error| Error { operation: "placing".to_owned(), ..error }.with_peer(peer);
    let mut others = VecDeque::from(connections);
    // The object begins with the first rail that joins, whichever that is. One that was late is dialled again.
    let mut within = JOINED_WITHIN;
    let rail = loop {
        let Some(connection) = others.pop_front() else { return Err(gone("placing")) };
        let Some(own) = own_of(&connection) else {
            let detail =
                "the peer makes connections for one-sided writes over TCP, and CROSSRAIL_TLS names fabric here";
            return Err(Error::new(ErrorKind::Unsupported, "placing", detail).with_peer(peer));
        };
        let device = device_of(sessions, &connection)?;
        let limit = deadline.min(Instant::now() + within);
        match join(sessions, (of, gpu, peer), (connection.stream, own, None), device.as_ref(), limit) {
            Ok(rail) => {
                sessions.placings.set_nic(of, own);
                break rail;
            }
            Err(error) => {
                // The peer dials a late one again only once its other rails have joined, or failed.
                let waits = error.kind == ErrorKind::Timeout && others.is_empty();
                others.extend(door.added(if waits { deadline } else { Instant::now() })?);
                if others.is_empty() {
                    return Err(named(error));
                }
                within *= 2;
                sessions.log.info(format_args!("{peer}: a rail did not join: {error}"));
            }
        }
    };
    let object = FabricRails::new(peer, vec![rail])?;
    let of_fabric = OfFabric { door: Arc::downgrade(object.door()), gpu, peer: peer.to_owned(), rails: Vec::new() };
    sessions.placings.set_fabric(of, of_fabric.clone());
    // Later ones find the object, and one between is dialled again.
    for connection in others.into_iter().chain(door.added(Instant::now())?) {
        arrived(sessions, of, of_fabric.clone(), connection);
    }
    door.close();
    Ok(Box::new(object))
}

/// A further connection of an object has arrived, which becomes a rail of it on a thread of its own.
pub(super) fn arrived(sessions: &Arc<Sessions>, of: Of, object: OfFabric, connection: Connection) {
    let Some(own) = own_of(&connection) else {
        let number = connection.id;
        return sessions.log.warn(format_args!("{}: connection {number} is none of libfabric's: closed", object.peer));
    };
    let worker = Arc::clone(sessions);
    let spawned = sessions.progress.spawn("crossrail-join", move || {
        let joined = device_of(&worker, &connection).and_then(|device| {
            let until = Instant::now() + JOINED_WITHIN;
            join(&worker, (of, object.gpu, &object.peer), (connection.stream, own, None), device.as_ref(), until)
        });
        match (joined, object.door.upgrade()) {
            (Ok(rail), Some(door)) => door.add(rail),
            (Ok(_), None) => {}
            (Err(error), _) => worker.log.info(format_args!("{}: a rail did not join: {error}", object.peer)),
        }
    });
    if let Err(error) = spawned {
        sessions.log.warn(format_args!("no thread for a rail of one-sided writes: {error}"));
    }
}

/// Dials a lost rail again. `Ok(None)`: it is not needed any more.
///
/// # Errors
/// As [`super::redial`].
pub(super) fn redial(
    sessions: &Sessions,
    (of, own, rail): (Of, u16, u16),
    (ticket, pair): (&handshake::Ticket, &RailPair),
    deadline: Instant,
) -> std::result::Result<Option<String>, (String, Error)> {
    let Some((next, object)) = sessions.placings.next_life(of, own) else { return Ok(None) };
    let Some(door) = object.door.upgrade() else { return Ok(None) };
    let joined = dial_connection(ticket, pair, of.name(rail, COMPANIONS.start + own), deadline).and_then(|stream| {
        join(sessions, (of, object.gpu, &object.peer), (stream, own, Some(next)), Some(&pair.mine), deadline)
    });
    door.add(joined.map_err(|error| (pair.mine.name.clone(), error))?);
    Ok(Some(pair.mine.name.clone()))
}

/// The rail of a connection that a peer has numbered; `None`: it is for no rail over libfabric.
fn own_of(connection: &Connection) -> Option<u16> {
    connection.id.checked_sub(COMPANIONS.start)
}

/// The network device of a connection that has arrived, if it is known.
fn device_of(sessions: &Sessions, connection: &Connection) -> Result<Option<NetDevice>> {
    let rails = sessions.environment.rails()?;
    Ok(rails.into_iter().find(|rail| connection.interface.as_ref() == Some(&rail.interface)))
}

/// Makes a connection the object's rail `own`; the peer does the same. `number`: that of its life, from the end that dials.
fn join(
    sessions: &Sessions,
    (of, gpu, peer): (Of, Option<u32>, &str),
    (stream, own, number): (TcpStream, u16, Option<u16>),
    device: Option<&NetDevice>,
    deadline: Instant,
) -> Result<Joined> {
    let interface = device.filter(|device| !device.loopback).map(|device| device.interface.clone());
    let end = fabric::End { interface: interface.as_deref(), number: own.into(), gpu };
    let offer = fabric::offer(sessions.environment.settings(), &stream, &end, gpus_seen())?;
    let suffix = if of.index == 0 { String::new() } else { format!("#{}", of.index) };
    let over = device.map(|device| format!("@{}", device.name)).filter(|_| offer.attributes.nic.is_none());
    let name = format!("fabric/{offer}{}:placing{suffix}", over.unwrap_or_default());
    let rail = attach_rail(stream, &offer, (peer, &name), number, deadline)?;
    Ok(Joined { rail, interface })
}

#[cfg(test)]
mod tests {
    use crossrail_types::EndpointId;

    use super::*;

    #[test]
    fn objects_go_over_the_nics_that_have_the_fewest() {
        let placings = Placings::default();
        let mut doors = Vec::new();
        let mut open = |endpoint, index| {
            let (of, door) = placings.next(EndpointId(endpoint), index).expect("a descriptor");
            doors.push(door);
            of
        };
        let nics = |of| placings.nic_for(of, 3);
        let all: Vec<u16> = (0..6).map(|endpoint| nics(open(endpoint, 0))).collect();
        assert_eq!(all, [0, 1, 2, 0, 1, 2]);
        assert_eq!(nics(open(6, 1)), 1, "another thread's begins with another one");
        placings.end(|endpoint| endpoint == EndpointId(2), "it has ended");
        assert_eq!(nics(open(7, 0)), 2, "one of its objects has ended");
        placings.set_nic(open(8, 0), 2);
        assert_eq!([nics(open(9, 0)), nics(open(10, 0))], [0, 0], "the peer has chosen 2, and 1 had three");
    }

    #[test]
    fn a_rail_has_a_new_number_in_each_of_its_lives() {
        let placings = Placings::default();
        let (of, _door) = placings.next(EndpointId(4), 2).expect("a descriptor");
        assert!(placings.next_life(of, 0).is_none(), "it is not over libfabric");
        let rails = vec![(0, 5), (3, 7)];
        let object = OfFabric { door: std::sync::Weak::new(), gpu: None, peer: "beta".to_owned(), rails };
        placings.set_fabric(of, object);
        let mut last = 3;
        while let Some((next, _)) = placings.next_life(of, 3) {
            assert_eq!((next % FABRIC_RAILS, placings.rail_of(of, next)), (3, Some(7)));
            assert!(next > last);
            last = next;
        }
        assert!(last > 1000 * FABRIC_RAILS, "it was dialled often");
        assert_eq!(placings.next_life(of, 0).map(|(next, _)| next), Some(FABRIC_RAILS));
    }
}
