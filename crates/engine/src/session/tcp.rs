//! TCP over several devices: one connection for messages, and chunks over connections of every rail.

use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Instant;

use crossrail_handshake::{self as handshake, Hello, LaneName, LanePurpose, Session, Ticket};
use crossrail_proto as proto;
use crossrail_tcp::{CheckedLane, TcpLane};
use crossrail_transport::{Lane, LaneError};
use crossrail_types::{Channels, Checksum, EndpointId, Error, ErrorKind, Filter, Rails, Result};

use super::Sessions;
use super::costs::Cost;
use super::dialling::{DIAL_MAX, binding, dial_until};
use super::explain::{self, Candidate};
use super::messages::{self, Messages};
use super::rail_pairs::{self, RailPair};
use super::transport::{Announcement, Attempt, Availability, Local, Transport};
use crate::core::{Among, BulkLane, LaneRecord, LostRail, gone};
use crate::environment::Breadth;

/// The channel number of a rail's message connection, beside the bits of its carrier.
const MESSAGE_CHANNEL: u16 = 0x3fff;

/// Mbit/s from which one connection can't be expected to fill a link.
const FAST_MBPS: u32 = 25_000;

/// What carries frames between two rails. Both authenticate over a TCP connection and are dialled and lost alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Carrier {
    /// The TCP connection itself.
    Sockets,
    /// UCX, with the connection beside it.
    Ucx,
}

impl Carrier {
    /// The bits of a channel's number that tell it.
    fn bits(self) -> u16 {
        match self {
            Carrier::Sockets => 0,
            Carrier::Ucx => 0x4000,
        }
    }

    fn of(channel: u16) -> Carrier {
        if channel & 0xc000 == Carrier::Ucx.bits() { Carrier::Ucx } else { Carrier::Sockets }
    }

    fn name(self) -> &'static str {
        match self {
            Carrier::Sockets => "tcp",
            Carrier::Ucx => "ucx",
        }
    }

    fn name_of(self, rail: u16, channel: u16) -> LaneName {
        let purpose = if channel == MESSAGE_CHANNEL { LanePurpose::Message } else { LanePurpose::Bulk };
        // TCP's message channel has always been the highest number.
        let bits = if self == Carrier::Sockets && channel == MESSAGE_CHANNEL { 0xc000 } else { self.bits() };
        LaneName { rail, channel: channel | bits, purpose }
    }
}

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
        let (rails, Breadth { channels, threads, .. }) = (local.rails.len(), local.breadth);
        let connections = match local.settings.channels {
            Channels::Auto if channels > 1 => format!("1 to {channels} connections"),
            _ if channels == 1 => "1 connection".to_owned(),
            _ => format!("{channels} connections"),
        };
        let on = if threads > 1 { format!("on up to {threads} threads") } else { "without threads".to_owned() };
        Availability::Usable(format!("{rails} rails: {}; {connections} each, {on}", names.join(" ")))
    }

    fn candidates(&self, sessions: &Sessions, peer: &Hello) -> Vec<Candidate> {
        candidates(Carrier::Sockets, sessions, peer)
    }

    fn connect(&self, sessions: &Arc<Sessions>, session: Session, attempt: &Attempt) -> Result<EndpointId> {
        connect(self, Carrier::Sockets, sessions, session, attempt)
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
        accept_if_complete(sessions, endpoint, Carrier::Sockets);
        Ok(())
    }
}

/// The rows of a carrier: our rails, and what each would cost.
pub(super) fn candidates(carrier: Carrier, sessions: &Sessions, peer: &Hello) -> Vec<Candidate> {
    let tls = &sessions.environment.settings().tls;
    if !tls.allows(carrier.name()) {
        let row = explain::candidate(carrier.name(), carrier.name(), None, &Cost::rail(None, None, false));
        return vec![row.out(&format!("CROSSRAIL_TLS={tls} leaves it out"))];
    }
    let mine = sessions.environment.rails().unwrap_or_default();
    let pairs = rails_to(sessions, peer);
    mine.iter()
        .map(|device| {
            let name = format!("{}/{}", carrier.name(), device.name);
            let pair = pairs.iter().find(|pair| pair.mine.name == device.name);
            let theirs = pair.and_then(|pair| pair.theirs.speed_mbps);
            let cost = Cost::rail(device.speed_mbps, theirs, device.loopback);
            let row = explain::candidate(&name, carrier.name(), Some(&device.name), &cost);
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

/// Makes an endpoint with a lane for messages and, for each rail, lanes for chunks.
///
/// # Errors
/// As [`Transport::connect`].
pub(super) fn connect(
    transport: &dyn Transport,
    carrier: Carrier,
    sessions: &Arc<Sessions>,
    session: Session,
    attempt: &Attempt,
) -> Result<EndpointId> {
    let rails = rails_to(sessions, &session.peer);
    let peer = session.peer.name.clone();
    if rails.is_empty() {
        return Err(no_rail(sessions, &session.peer)?);
    }
    let channels = sessions.environment.settings().channels.first() as u16;
    let messages = Messages::over(&rails, attempt.turn, carrier == Carrier::Sockets);
    let mut names = vec![carrier.name_of(messages.rail, MESSAGE_CHANNEL)];
    for rail in 0..rails.len() as u16 {
        names.extend((0..channels).map(|channel| carrier.name_of(rail, channel)));
    }
    let ticket = session.ticket;
    // Over UCX a peer that is late is another carrier's.
    let deadline = if carrier == Carrier::Sockets { attempt.deadline } else { Instant::now() };
    let dialled = dial_until(deadline, &names, |names, limit| {
        let limit = attempt.deadline.min(limit);
        std::thread::scope(|scope| {
            let dials: Vec<_> = names
                .iter()
                .map(|name| {
                    let rail = &rails[usize::from(name.rail)];
                    scope.spawn(move || dial(sessions, &ticket, rail, *name, limit))
                })
                .collect();
            let failed = || Err(Error::new(ErrorKind::Io, "connect", "the dialling thread failed"));
            dials.into_iter().map(|dial| dial.join().unwrap_or_else(|_| failed())).collect()
        })
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
        return Err(Error::new(ErrorKind::Unreachable, "connect", format!("no rail came up: {reason}")).with_peer(peer));
    }
    // The first rail stands in for one whose connection for messages did not come up.
    let is_up = |name: &LaneName| dialled.iter().any(|(dialled, result)| dialled == name && result.is_ok());
    let own = Some(usize::from(messages.rail)).filter(|at| reasons[*at].is_none() && is_up(&names[0]));
    let small = own.or_else(|| reasons.iter().position(Option::is_none));
    let lost: Vec<LaneName> = dialled.iter().filter(|(_, r)| r.is_err()).map(|(name, _)| *name).collect();
    let count = (dialled.len() - lost.len()) as u16;
    let rows = candidates(carrier, sessions, &session.peer).into_iter().map(|row| {
        let at = rails.iter().position(|rail| row.device.as_ref() == Some(&rail.mine.name));
        match at.map(|at| &reasons[at]) {
            Some(None) => messages::used(row, at == small),
            Some(Some(reason)) => row.missed(reason),
            None if row.reason.is_some() => row,
            None => row.slower(),
        }
    });
    let checksum = checksum_of(carrier, session.ticket.checksum);
    let choice = messages::choice(rows.collect(), messages.eager_max, checksum);
    let paired = |row: &Candidate| rails.iter().any(|rail| row.device.as_ref() == Some(&rail.mine.name));
    warn_of_unused(sessions, &session.peer, choice.rows.iter().filter(|row| !paired(row)));
    let endpoint = sessions.add_endpoint(transport, &peer, Some(&session.peer), choice, &attempt.refused)?;
    sessions.announce(endpoint, session, transport.announcement().unwrap_or(ANNOUNCEMENT), count.to_le_bytes())?;
    sessions.control.set_rails(endpoint, rails.clone(), messages.eager_max);
    for (name, result) in dialled {
        let rail = &rails[usize::from(name.rail)];
        if let Ok(lane) = result {
            add_lane(sessions, endpoint, name, lane, &LocalRail::of(rail))?;
        }
    }
    for name in lost {
        sessions.redialer.lost(
            sessions,
            LostRail { endpoint, rail: name.rail, channel: name.channel, reported: true, short_lived: 0 },
        );
    }
    Ok(endpoint)
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

/// The checksum that frames over this carrier have.
fn checksum_of(carrier: Carrier, checksum: Checksum) -> Checksum {
    if carrier == Carrier::Sockets { checksum } else { Checksum::Off }
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
    let is_further = lane.purpose == LanePurpose::Bulk && lane.channel & MESSAGE_CHANNEL > 0;
    if is_further && sessions.environment.settings().channels == Channels::Auto && !sessions.progress.has_room(1) {
        let from = route.remote.to_canonical();
        sessions
            .log
            .debug(format_args!("one more connection from {from} was closed: the threads have enough of others"));
        return Ok(());
    }
    let rails = sessions.environment.rails()?;
    let device = rails.into_iter().find(|rail| rail.name == route.device);
    if let Some(device) = &device {
        let from = route.remote.to_canonical();
        sessions.control.add_rail(endpoint, lane.rail, device, route.local.to_canonical(), from);
    }
    let loopback = device.as_ref().map_or_else(|| route.local.is_loopback(), |device| device.loopback);
    let rail = LocalRail {
        device: route.device,
        loopback,
        fast: is_fast(loopback, [device.as_ref().and_then(|device| device.speed_mbps)]),
        node: device.as_ref().and_then(|device| device.numa_node),
        interface: device.map(|device| device.interface),
    };
    match Carrier::of(lane.channel) {
        Carrier::Sockets => complete(sessions, endpoint, lane, stream, rail),
        // Joining takes UCX a while, and other peers' connections arrive on this thread.
        Carrier::Ucx => {
            let joining = sessions.clone();
            let spawned = sessions.progress.spawn("crossrail-ucx", move || {
                let log = joining.log;
                if let Err(error) = complete(&joining, endpoint, lane, stream, rail) {
                    log.warn(format_args!("a lane over UCX was dropped: {error}"));
                }
            });
            spawned.map(drop)
        }
    }
}

/// Where a lane leaves this machine.
struct LocalRail {
    /// The name of the device.
    device: String,
    interface: Option<String>,
    /// The NUMA node of the device.
    node: Option<u32>,
    loopback: bool,
    /// One connection can't fill it, as far as is known.
    fast: bool,
}

impl LocalRail {
    fn of(rail: &RailPair) -> LocalRail {
        LocalRail {
            device: rail.mine.name.clone(),
            interface: Some(rail.mine.interface.clone()),
            node: rail.mine.numa_node,
            loopback: rail.mine.loopback,
            fast: is_fast(rail.mine.loopback, [rail.mine.speed_mbps, rail.theirs.speed_mbps]),
        }
    }
}

/// Whether a link, whose ends have those rates if they are known, carries more than one connection.
fn is_fast<const ENDS: usize>(loopback: bool, mbps: [Option<u32>; ENDS]) -> bool {
    loopback || mbps.into_iter().flatten().min().is_some_and(|slower| slower >= FAST_MBPS)
}

/// How many of a rail's connections carry chunks, and which of them this one is, where that is found by measuring.
fn among(sessions: &Sessions, name: LaneName, fast: bool) -> Option<Among> {
    let breadth = sessions.environment.breadth();
    let measured = sessions.environment.settings().channels == Channels::Auto && breadth.channels > 1;
    let begin_with = if fast { breadth.begin_with } else { 1 };
    let sockets = Carrier::of(name.channel) == Carrier::Sockets;
    (measured && sockets).then_some(Among { place: (name.rail, name.channel), begin_with })
}

/// Has more connections dialled over every rail of an endpoint, as many as both ends serve.
pub(super) fn widen(sessions: &Sessions, endpoint: EndpointId) {
    let Some(me) = sessions.identity.lock().as_ref().map(|me| me.hello.clone()) else { return };
    let Some((channels, rails)) = sessions.control.room(endpoint, &me) else { return };
    // All rails have their second one before any has a third.
    for (at, channel) in (1..channels as u16).enumerate() {
        if !sessions.progress.has_room((at + 1) * rails.len()) {
            sessions.log.debug(format_args!("rails get {channel} connections each: the threads have enough of others"));
            return;
        }
        for rail in &rails {
            let more = LostRail { endpoint, rail: *rail, channel, reported: true, short_lived: 0 };
            sessions.redialer.more(sessions, more);
        }
    }
}

/// Adds a lane that a peer has dialled.
fn complete(
    sessions: &Arc<Sessions>,
    endpoint: EndpointId,
    name: LaneName,
    stream: TcpStream,
    rail: LocalRail,
) -> Result<()> {
    let checksum = sessions.control.checksum(endpoint);
    let lane = make_lane(sessions, name, (stream, checksum), &rail, Instant::now() + DIAL_MAX)?;
    add_lane(sessions, endpoint, name, lane, &rail)?;
    sessions.control.count_lane(endpoint);
    accept_if_complete(sessions, endpoint, Carrier::of(name.channel));
    Ok(())
}

/// Reports the endpoint once all its lanes are up. What it uses is what the connecting end has chosen: the rails whose
/// lanes have arrived.
pub(super) fn accept_if_complete(sessions: &Arc<Sessions>, endpoint: EndpointId, carrier: Carrier) {
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
    let mut rows = candidates(carrier, sessions, &peer);
    let carries_messages = |row: &Candidate| arrived.contains(&format!("{}:messages", row.lane));
    let small = rows.iter().position(carries_messages).or_else(|| rows.iter().position(uses));
    for (at, row) in rows.iter_mut().enumerate() {
        match (uses(row), &row.reason) {
            (true, _) => *row = messages::used(Candidate { reason: None, ..row.clone() }, small == Some(at)),
            (false, Some(_)) => {}
            (false, None) => *row = row.clone().missed("the peer could not reach it"),
        }
    }
    warn_of_unused(sessions, &peer, rows.iter());
    let transport: &dyn Transport = if carrier == Carrier::Ucx { &super::ucx::Ucx } else { &Tcp };
    let checksum = checksum_of(carrier, sessions.control.checksum(endpoint));
    sessions.explain_accepted(
        transport,
        endpoint,
        &peer,
        messages::choice(rows, sessions.control.eager_max(endpoint), checksum),
    );
    sessions.arrived(endpoint);
}

/// Adds a lane to its endpoint.
///
/// Both ends dial lost lanes, perhaps at once, and an end may have a lane of that name whose loss it has not noticed. Of
/// several lanes with one name the connecting end, which has seen all of them come up, closes all but the last.
fn add_lane(
    sessions: &Arc<Sessions>,
    endpoint: EndpointId,
    name: LaneName,
    lane: Box<dyn Lane>,
    rail: &LocalRail,
) -> Result<()> {
    let carrier = Carrier::of(name.channel);
    let record = LaneRecord::of(&*lane, carrier.name(), sessions.control.eager_max(endpoint));
    let record = record.on_rail((name.rail, name.channel), rail.interface.clone()).over_socket();
    // UCX makes progress only while it is polled.
    let record = if carrier == Carrier::Sockets { record.resting() } else { record };
    let earlier = match sessions.control.is_initiator(endpoint) {
        true => sessions.progress.core().transfers().lanes_of_rail(endpoint, (name.rail, name.channel)),
        false => Vec::new(),
    };
    add_lane_of(sessions, endpoint, (name, rail), lane, record)?;
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
    (name, rail): (LaneName, &LocalRail),
    lane: Box<dyn Lane>,
    record: LaneRecord,
) -> Result<()> {
    let id = lane.id();
    if name.purpose == LanePurpose::Message {
        return sessions.add_polled_lane(endpoint, lane, record, false);
    }
    let spec = proto::LaneSpec {
        whole_max: 0,
        counts: false,
        cost_ns: 1000 + u64::from(name.rail) * 100 + u64::from(name.channel & !Carrier::Ucx.bits()),
        ..record.spec(id, true)
    };
    let bulk = Arc::new(BulkLane::new(endpoint, lane, among(sessions, name, rail.fast)));
    let mut core = sessions.progress.core();
    if !core.transfers().add_bulk_lane(&bulk, record, spec) {
        return Err(gone("connect"));
    }
    sessions.progress.after(core);
    sessions.progress.carry(bulk, name.channel & MESSAGE_CHANNEL == 0, rail.node)
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
    let name = Carrier::of(lost.channel).name_of(lost.rail, lost.channel & 0x3fff);
    let mine = &redial.rail.mine;
    let dialled = dial(sessions, &redial.ticket, &redial.rail, name, deadline)
        .and_then(|lane| add_lane(sessions, lost.endpoint, name, lane, &LocalRail::of(&redial.rail)));
    match dialled {
        Ok(()) => Ok(Some(mine.name.clone())),
        Err(error) => Err((mine.name.clone(), error)),
    }
}

/// Dials one lane from its own device.
fn dial(
    sessions: &Sessions,
    ticket: &Ticket,
    rail: &RailPair,
    name: LaneName,
    deadline: Instant,
) -> Result<Box<dyn Lane>> {
    let from = binding(&rail.mine, rail.from);
    let to = SocketAddr::new(rail.theirs.address, rail.theirs.port);
    let stream = handshake::dial_lane(ticket, &from, to, name, deadline)?;
    make_lane(sessions, name, (stream, ticket.checksum), &LocalRail::of(rail), deadline)
}

/// Makes an authenticated connection a lane, with that checksum where frames travel over the connection itself.
fn make_lane(
    sessions: &Sessions,
    name: LaneName,
    (stream, checksum): (TcpStream, Checksum),
    rail: &LocalRail,
    deadline: Instant,
) -> Result<Box<dyn Lane>> {
    let id = sessions.reserve_lane();
    let carrier = Carrier::of(name.channel);
    let suffix = match (name.purpose, sessions.environment.settings().channels) {
        (LanePurpose::Message, _) => ":messages".to_owned(),
        (LanePurpose::Bulk, Channels::Count(1)) => String::new(),
        (LanePurpose::Bulk, Channels::Auto) if name.channel & MESSAGE_CHANNEL == 0 => String::new(),
        (LanePurpose::Bulk, _) => format!("#{}", name.channel & MESSAGE_CHANNEL),
    };
    let label = format!("{}/{}{suffix}", carrier.name(), rail.device);
    match carrier {
        Carrier::Sockets => {
            let options = crossrail_tcp::Options::default();
            Ok(match checksum {
                Checksum::Off => Box::new(TcpLane::new(stream, id, label, &options)?),
                Checksum::Crc => Box::new(CheckedLane::checked(stream, id, label, &options)?),
            })
        }
        Carrier::Ucx => {
            let settings = sessions.environment.settings();
            let fabric = super::ucx::fabric(settings, rail.interface.as_deref(), rail.loopback)?;
            Ok(Box::new(crossrail_ucx::attach(stream, &fabric, id, &label, deadline)?))
        }
    }
}
