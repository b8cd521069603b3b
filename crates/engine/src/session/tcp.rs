//! TCP over several devices: one connection for messages, and chunks over connections of every rail.

use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Instant;

use crossrail_handshake::{self as handshake, Hello, LaneName, LanePurpose, Session, Ticket};
use crossrail_proto as proto;
use crossrail_tcp::TcpLane;
use crossrail_transport::{Lane, LaneError};
use crossrail_types::{EndpointId, Error, ErrorKind, Filter, Rails, Result};

use super::Sessions;
use super::control::{DIAL_MAX, binding};
use super::costs::{Cost, EAGER_LIMIT};
use super::explain::{self, Candidate};
use super::rail_pairs::{self, RailPair};
use super::transport::{Announcement, Attempt, Availability, Choice, Local, Transport};
use crate::core::{BulkLane, LaneRecord, LostRail, gone};

/// The channel number of a rail's message connection.
const MESSAGE_CHANNEL: u16 = u16::MAX;

/// See the module.
pub(super) struct Tcp;

impl Transport for Tcp {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn availability(&self, local: &Local<'_>) -> Availability {
        if local.rails.is_empty() {
            let fix = "bring one up: ip link set lo up for this machine; `crossrail info` lists the devices";
            return Availability::Unusable("no network device is up".to_owned(), Some(fix.to_owned()));
        }
        let names: Vec<_> = local.rails.iter().map(|rail| rail.name.as_str()).collect();
        Availability::Usable(format!("{} rails: {}", local.rails.len(), names.join(" ")))
    }

    fn candidates(&self, sessions: &Sessions, peer: &Hello) -> Vec<Candidate> {
        let tls = &sessions.environment.settings().tls;
        if !tls.allows("tcp") {
            let row = explain::candidate("tcp", "tcp", None, &Cost::rail(None, None, false));
            return vec![row.out(&format!("CROSSRAIL_TLS={tls} leaves it out"))];
        }
        let mine = sessions.environment.rails().unwrap_or_default();
        let pairs = rails_to(sessions, peer);
        mine.iter()
            .map(|device| {
                let name = format!("tcp/{}", device.name);
                let pair = pairs.iter().find(|pair| pair.mine.name == device.name);
                let theirs = pair.and_then(|pair| pair.theirs.speed_mbps);
                let cost = Cost::rail(device.speed_mbps, theirs, device.loopback);
                let row = explain::candidate(&name, "tcp", Some(&device.name), &cost);
                if pair.is_some() {
                    row
                } else {
                    let reason = rail_pairs::without_counterpart(device, &peer.devices, &pairs);
                    // Loopback is not expected to help other devices, nor they loopback.
                    let beside = pairs.iter().any(|pair| pair.mine.loopback != device.loopback)
                        && (device.loopback || !only_loopback(peer));
                    if beside { row.out(&reason) } else { row.missed(&reason) }
                }
            })
            .collect()
    }

    fn connect(&self, sessions: &Arc<Sessions>, session: Session, attempt: &Attempt) -> Result<EndpointId> {
        let rails = rails_to(sessions, &session.peer);
        let peer = session.peer.name.clone();
        if rails.is_empty() {
            return Err(no_rail(sessions, &session.peer)?);
        }
        let channels = sessions.environment.settings().channels as u16;
        let mut names = vec![LaneName { rail: 0, channel: MESSAGE_CHANNEL, purpose: LanePurpose::Message }];
        for rail in 0..rails.len() as u16 {
            names.extend((0..channels).map(|channel| LaneName { rail, channel, purpose: LanePurpose::Bulk }));
        }
        let ticket = session.ticket;
        let limit = attempt.deadline.min(Instant::now() + DIAL_MAX);
        let dialled: Vec<(LaneName, Result<TcpStream>)> = std::thread::scope(|scope| {
            let dials: Vec<_> = names
                .iter()
                .map(|name| {
                    let rail = &rails[usize::from(name.rail)];
                    (*name, scope.spawn(move || dial(&ticket, rail, *name, limit)))
                })
                .collect();
            dials
                .into_iter()
                .map(|(name, dial)| {
                    let failed = || Err(Error::new(ErrorKind::Io, "connect", "the dialling thread failed"));
                    (name, dial.join().unwrap_or_else(|_| failed()))
                })
                .collect()
        });
        let reasons: Vec<Option<String>> = (0..rails.len() as u16)
            .map(|rail| {
                let of = |(name, _): &&(LaneName, _)| name.rail == rail && name.purpose == LanePurpose::Bulk;
                let mut bulk = dialled.iter().filter(of);
                match bulk.clone().any(|(_, result)| result.is_ok()) {
                    true => None,
                    false => bulk.find_map(|(_, result)| result.as_ref().err()).map(Error::to_string),
                }
            })
            .collect();
        for (rail, reason) in rails.iter().zip(&reasons) {
            if let Some(reason) = reason {
                sessions.log.warn(format_args!("{peer}: rail {} is left out: {reason}", rail.mine.name));
            }
        }
        if reasons.iter().all(Option::is_some) {
            let reason = reasons.into_iter().flatten().next().unwrap_or_default();
            return Err(
                Error::new(ErrorKind::Unreachable, "connect", format!("no rail came up: {reason}")).with_peer(peer)
            );
        }
        let lost: Vec<LaneName> = dialled.iter().filter(|(_, r)| r.is_err()).map(|(name, _)| *name).collect();
        let count = (dialled.len() - lost.len()) as u16;
        let rows = self.candidates(sessions, &session.peer).into_iter().map(|row| {
            let at = rails.iter().position(|rail| row.device.as_ref() == Some(&rail.mine.name));
            match at.map(|at| &reasons[at]) {
                Some(None) => row.chosen(if at == Some(0) { &["small", "large"] } else { &["large"] }),
                Some(Some(reason)) => row.missed(reason),
                None if row.reason.is_some() => row,
                None => row.slower(),
            }
        });
        let choice = choice(rows.collect());
        let paired = |row: &Candidate| rails.iter().any(|rail| row.device.as_ref() == Some(&rail.mine.name));
        warn_of_unused(sessions, &session.peer, choice.rows.iter().filter(|row| !paired(row)));
        let endpoint = sessions.add_endpoint(self, &peer, Some(&session.peer), choice, &attempt.refused)?;
        sessions.announce(endpoint, session, ANNOUNCEMENT, count.to_le_bytes())?;
        sessions.control.set_rails(endpoint, rails.clone());
        for (name, result) in dialled {
            let rail = &rails[usize::from(name.rail)];
            if let Ok(stream) = result {
                add_lane(sessions, endpoint, name, stream, &rail.mine.name, Some(rail.mine.interface.clone()))?;
            }
        }
        for name in lost {
            sessions
                .redialer
                .lost(sessions, LostRail { endpoint, rail: name.rail, channel: name.channel, reported: true });
        }
        Ok(endpoint)
    }

    fn listens_on_rails(&self) -> bool {
        true
    }

    fn announcement(&self) -> Option<u8> {
        Some(ANNOUNCEMENT)
    }

    /// The argument is the number of lanes. They may be up already, or not yet.
    fn announced(&self, sessions: &Arc<Sessions>, announcement: Announcement) -> Result<()> {
        let Announcement { endpoint, argument, .. } = announcement;
        sessions.control.expect_lanes(endpoint, usize::from(u16::from_le_bytes(argument)));
        accept_if_complete(sessions, endpoint);
        Ok(())
    }
}

/// What the connecting end announces once all its lanes are up, followed by their number.
const ANNOUNCEMENT: u8 = b'R';

fn rails_to(sessions: &Sessions, peer: &Hello) -> Vec<RailPair> {
    let same_machine = peer.boot_id == sessions.environment.machine().boot_id;
    sessions.environment.rails().map(|mine| rail_pairs::pair(&mine, &peer.devices, same_machine)).unwrap_or_default()
}

/// Whether a peer that has devices has none beyond loopback.
fn only_loopback(peer: &Hello) -> bool {
    !peer.devices.is_empty() && peer.devices.iter().all(|device| device.loopback)
}

/// The error of a connection for which no device of ours reaches one of the peer's.
fn no_rail(sessions: &Sessions, peer: &Hello) -> Result<Error> {
    let list = |names: Vec<&str>| if names.is_empty() { "none".to_owned() } else { names.join(" ") };
    let mine = sessions.environment.rails()?;
    let detail = format!(
        "no rail: our devices are {}, the peer offers {}",
        list(mine.iter().map(|device| device.name.as_str()).collect()),
        list(peer.devices.iter().map(|device| device.name.as_str()).collect()),
    );
    let hint = if only_loopback(peer) {
        "the peer listens on loopback only: have it listen beyond (--listen 0.0.0.0, or Worker(listen=...)) with \
         CROSSRAIL_SECRET at both ends, or, on one machine, allow lo here (CROSSRAIL_NET_DEVICES=all)"
    } else {
        "give both ends a device on the same network (CROSSRAIL_NET_DEVICES); `crossrail info` lists them"
    };
    Ok(Error::new(ErrorKind::Unsupported, "connect", detail).with_peer(&peer.name).with_hint(hint))
}

/// Logs which rails carry nothing, of those that `CROSSRAIL_NET_DEVICES` names here, and of those that the peer has and
/// for which it names no counterpart. A rail that could not be dialled has been logged by the end that dialled.
fn warn_of_unused<'a>(sessions: &Sessions, peer: &Hello, rows: impl Iterator<Item = &'a Candidate>) {
    let Rails::Named(Filter::Only(named)) = &sessions.environment.settings().net_devices else { return };
    let mut mine: Vec<(&str, Vec<&str>)> = Vec::new();
    for row in rows.filter(|row| row.missed) {
        let (Some(reason), Some(device)) = (row.reason.as_deref(), row.device.as_deref()) else { continue };
        match mine.iter_mut().find(|(known, _)| *known == reason) {
            Some((_, devices)) => devices.push(device),
            None => mine.push((reason, vec![device])),
        }
    }
    for (reason, devices) in mine {
        let are = if devices.len() == 1 { "is" } else { "are" };
        sessions.log.warn(format_args!("{}: {} {are} not used: {reason}", peer.name, devices.join(", ")));
    }
    let left = rail_pairs::unreached(&peer.devices, &rails_to(sessions, peer));
    if !left.is_empty() {
        let are = if left.len() == 1 { "is" } else { "are" };
        sessions.log.warn(format_args!(
            "{}: its {} {are} not used: no device of CROSSRAIL_NET_DEVICES={} here is left for it",
            peer.name,
            left.join(", "),
            named.join(",")
        ));
    }
}

fn choice(rows: Vec<Candidate>) -> Choice {
    let chosen: Vec<_> = rows.iter().filter(|row| !row.chosen_for.is_empty()).map(|row| row.lane.clone()).collect();
    let small = chosen.first().cloned().unwrap_or_default();
    Choice { small, large: explain::from_size(EAGER_LIMIT, &chosen.join(" ")), rows }
}

/// Where a lane arrived.
pub(super) struct Route {
    /// The name of our device.
    pub(super) device: String,
    pub(super) local: IpAddr,
    pub(super) remote: IpAddr,
}

/// A peer has dialled a lane of a session.
///
/// # Errors
/// `Refused` when the session has ended; `Io` when the system refuses.
pub(super) fn lane_arrived(
    sessions: &Arc<Sessions>,
    session: &[u8; 16],
    lane: LaneName,
    stream: TcpStream,
    route: Route,
) -> Result<()> {
    let ended = || Error::new(ErrorKind::Refused, "lane", "its session has ended");
    let endpoint = sessions.control.endpoint(session).ok_or_else(ended)?;
    let rails = sessions.environment.rails()?;
    let device = rails.into_iter().find(|rail| rail.name == route.device);
    if let Some(device) = &device {
        let from = route.remote.to_canonical();
        sessions.control.add_rail(endpoint, lane.rail, device, route.local.to_canonical(), from);
    }
    add_lane(sessions, endpoint, lane, stream, &route.device, device.map(|device| device.interface))?;
    sessions.control.count_lane(endpoint);
    accept_if_complete(sessions, endpoint);
    Ok(())
}

/// Reports the endpoint once all its lanes are up. What it uses is what the connecting end has chosen: the rails whose
/// lanes have arrived.
fn accept_if_complete(sessions: &Arc<Sessions>, endpoint: EndpointId) {
    let Some(peer) = sessions.control.take_complete(endpoint) else { return };
    let arrived = sessions.lane_names(endpoint);
    // A lane is named after its rail: `tcp/eth1`, `tcp/eth1#2`, `tcp/eth1:messages`.
    let uses = |row: &Candidate| {
        let of = |name: &String| {
            name.strip_prefix(&row.lane)
                .is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '.'))
        };
        arrived.iter().any(of)
    };
    let mut rows: Vec<Candidate> = Vec::new();
    for row in Tcp.candidates(sessions, &peer) {
        let first = rows.iter().all(|known| known.chosen_for.is_empty());
        rows.push(match (uses(&row), &row.reason) {
            (true, _) => Candidate { reason: None, ..row }.chosen(if first { &["small", "large"] } else { &["large"] }),
            (false, Some(_)) => row,
            (false, None) => row.missed("the peer could not reach it"),
        });
    }
    warn_of_unused(sessions, &peer, rows.iter());
    sessions.explain_accepted(&Tcp, endpoint, &peer, choice(rows));
    sessions.arrived(endpoint);
}

/// Makes a connected stream a lane of its endpoint.
///
/// Both ends dial lost lanes, perhaps at once, and an end may have a lane of that name whose loss it has not noticed. Of
/// several lanes with one name the connecting end, which has seen all of them come up, closes all but the last.
fn add_lane(
    sessions: &Arc<Sessions>,
    endpoint: EndpointId,
    name: LaneName,
    stream: TcpStream,
    device: &str,
    interface: Option<String>,
) -> Result<()> {
    let id = sessions.reserve_lane();
    let label = match (name.purpose, sessions.environment.settings().channels) {
        (LanePurpose::Message, _) => format!("tcp/{device}:messages"),
        (LanePurpose::Bulk, 1) => format!("tcp/{device}"),
        (LanePurpose::Bulk, _) => format!("tcp/{device}#{}", name.channel),
    };
    let lane = TcpLane::new(stream, id, label, &crossrail_tcp::Options::default())?;
    let record = LaneRecord::of(&lane, "tcp", EAGER_LIMIT).on_rail((name.rail, name.channel), interface);
    let record = record.over_socket();
    let earlier = match sessions.control.is_initiator(endpoint) {
        true => sessions.progress.core().transfers().lanes_of_rail(endpoint, (name.rail, name.channel)),
        false => Vec::new(),
    };
    add_lane_of(sessions, endpoint, name, lane, record)?;
    if !earlier.is_empty() {
        let mut core = sessions.progress.core();
        for id in earlier {
            let error = LaneError::Closed("another connection has taken its place".to_owned());
            core.transfers().take_for_dead(endpoint, id, error);
        }
        sessions.progress.after(core);
    }
    Ok(())
}

fn add_lane_of(
    sessions: &Arc<Sessions>,
    endpoint: EndpointId,
    name: LaneName,
    lane: TcpLane,
    record: LaneRecord,
) -> Result<()> {
    let id = lane.id();
    if name.purpose == LanePurpose::Message {
        return sessions.add_polled_lane(endpoint, Box::new(lane), record, false);
    }
    let spec = proto::LaneSpec {
        whole_max: 0,
        counts: false,
        cost_ns: 1000 + u64::from(name.rail) * 100 + u64::from(name.channel),
        ..record.spec(id, true)
    };
    let bulk = Arc::new(BulkLane::new(endpoint, Box::new(lane)));
    let mut core = sessions.progress.core();
    if !core.transfers().add_bulk_lane(&bulk, record, spec) {
        return Err(gone("connect"));
    }
    sessions.progress.after(core);
    sessions.progress.connections().add(bulk)
}

/// Dials a lost lane again. `Ok(None)`: it is not lost any more, or cannot be dialled from here. The name of its device,
/// when it is up again.
///
/// # Errors
/// The device's name, and what kept it from coming up.
pub(super) fn redial(
    sessions: &Arc<Sessions>,
    lost: &LostRail,
    deadline: Instant,
) -> std::result::Result<Option<String>, (String, Error)> {
    let Some(redial) = sessions.redial(lost) else { return Ok(None) };
    if !sessions.progress.core().transfers().lanes_of_rail(lost.endpoint, (lost.rail, lost.channel)).is_empty() {
        return Ok(None);
    }
    let purpose = if lost.channel == MESSAGE_CHANNEL { LanePurpose::Message } else { LanePurpose::Bulk };
    let name = LaneName { rail: lost.rail, channel: lost.channel, purpose };
    let mine = &redial.rail.mine;
    let dialled = dial(&redial.ticket, &redial.rail, name, deadline)
        .and_then(|stream| add_lane(sessions, lost.endpoint, name, stream, &mine.name, Some(mine.interface.clone())));
    match dialled {
        Ok(()) => Ok(Some(mine.name.clone())),
        Err(error) => Err((mine.name.clone(), error)),
    }
}

/// Dials one lane from its own device.
fn dial(ticket: &Ticket, rail: &RailPair, name: LaneName, deadline: Instant) -> Result<TcpStream> {
    let from = binding(&rail.mine, rail.from);
    let to = SocketAddr::new(rail.theirs.address, rail.theirs.port);
    handshake::dial_lane(ticket, &from, to, name, deadline)
}
