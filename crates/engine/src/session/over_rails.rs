//! The transport of a [`Carrier`]: endpoints with lanes for messages and for chunks between paired network devices.
//!
//! Dialling, loss and redialling of lanes are the same for all carriers.

use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Instant;

use crossrail_handshake::{self as handshake, Hello, LaneName, LanePurpose, Session, Ticket};
use crossrail_proto as proto;
use crossrail_topology::NetDevice;
use crossrail_transport::{Lane, LaneError};
use crossrail_types::{Channels, Checksum, EndpointId, Error, ErrorKind, Filter, Rails, Result, Settings};

use super::Sessions;
use super::carrier::{Carrier, Join, Obstacle};
use super::costs::Cost;
use super::dialling::{DIAL_MAX, at_once, binding, dial_until};
use super::explain::{self, Candidate};
use super::messages::{self, Messages};
use super::placing;
use super::rail_pairs::{self, Near, RailPair};
use super::rails::{CARRIERS, CHANNEL_MASK, MESSAGE_CHANNEL, carrier_of, channel_of, name_of};
use super::transport::{Announcement, Attempt, Availability, Local, Transport};
use crate::core::{Among, BulkLane, LaneRecord, LostRail, gone};

/// Mbit/s from which one connection can't be expected to fill a link.
const FAST_MBPS: u32 = 25_000;

/// The transport of a carrier.
pub(super) struct OverRails(pub(super) &'static dyn Carrier);

impl Transport for OverRails {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn availability(&self, local: &Local<'_>) -> Availability {
        self.0.availability(local)
    }

    fn is_offered(&self, settings: &Settings) -> bool {
        self.0.is_offered(settings)
    }

    fn obstacle(&self, sessions: &Sessions, _peer: &Hello) -> Option<String> {
        let Obstacle { why, fix } = self.0.obstacle(sessions.environment.settings())?;
        Some(fix.map_or(why.clone(), |fix| format!("{why} ({fix})")))
    }

    fn candidates(&self, sessions: &Sessions, peer: &Hello) -> Vec<Candidate> {
        candidates(self.0, sessions, peer)
    }

    fn connect(&self, sessions: &Arc<Sessions>, session: Session, attempt: &Attempt) -> Result<EndpointId> {
        connect_over(self.0, sessions, session, attempt)
    }

    fn listens_on_rails(&self) -> bool {
        true
    }

    fn announcement(&self) -> Option<u8> {
        Some(self.0.announcement())
    }

    /// The argument is the number of lanes, and [`TURNS`]. They may be up already, or not yet.
    fn announced(&self, sessions: &Arc<Sessions>, announcement: Announcement) -> Result<()> {
        let Announcement { endpoint, argument, .. } = announcement;
        let argument = u16::from_le_bytes(argument);
        if argument & TURNS != 0 {
            keep_messages_whole(sessions, endpoint);
        }
        sessions.control.expect_lanes(endpoint, usize::from(argument & !TURNS));
        accept_if_complete(sessions, endpoint, self.0);
        Ok(())
    }
}

/// Flag of an announcement: the caller's messages take turns between several endpoints to this peer.
const TURNS: u16 = 1 << 15;

/// Messages with that peer stay on the rail that has their connection, whole, at this end.
fn keep_messages_whole(sessions: &Sessions, endpoint: EndpointId) {
    sessions.control.set_turns(endpoint);
    sessions.progress.core().transfers().keep_messages_whole(endpoint);
}

/// The rows of a carrier: our rails, and what each would cost.
fn candidates(carrier: &dyn Carrier, sessions: &Sessions, peer: &Hello) -> Vec<Candidate> {
    match unusable(carrier, sessions) {
        Some(row) => vec![row],
        None => candidates_over(carrier, sessions, peer, &rails_to(sessions, peer)),
    }
}

/// The row of a carrier that this process does not use, with the reason.
fn unusable(carrier: &dyn Carrier, sessions: &Sessions) -> Option<Candidate> {
    let settings = sessions.environment.settings();
    let why = match settings.tls.allows(carrier.name()) {
        false => format!("CROSSRAIL_TLS={} leaves it out", settings.tls),
        true => carrier.obstacle(settings)?.why,
    };
    let row = explain::candidate(carrier.name(), carrier.name(), None, &Cost::rail(None, None, false));
    Some(row.out(&why))
}

/// [`candidates`] of a usable carrier, of which those of `pairs` are used.
fn candidates_over(carrier: &dyn Carrier, sessions: &Sessions, peer: &Hello, pairs: &[RailPair]) -> Vec<Candidate> {
    let asked = !matches!(
        sessions.environment.settings().net_devices,
        Rails::Named(Filter::All) | Rails::Named(Filter::Except(_))
    );
    let mine = sessions.environment.rails().unwrap_or_default();
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
                let reason = rail_pairs::without_counterpart(device, &peer.devices, pairs);
                // Loopback is not expected to help other devices, nor they loopback unless they were asked for.
                let beside = pairs.iter().any(|pair| pair.mine.loopback != device.loopback)
                    && (device.loopback || !asked || !only_loopback(peer));
                if beside { row.out(&reason) } else { row.missed(&reason) }
            }
        })
        .collect()
}

/// Makes an endpoint with a lane for messages and, for each rail, lanes for chunks.
///
/// # Errors
/// As [`Transport::connect`].
fn connect_over(
    carrier: &'static dyn Carrier,
    sessions: &Arc<Sessions>,
    session: Session,
    attempt: &Attempt,
) -> Result<EndpointId> {
    let mut rails = rails_to(sessions, &session.peer);
    let peer = session.peer.name.clone();
    if rails.is_empty() {
        return Err(no_rail(sessions, &session.peer)?);
    }
    let mut dialled = dial_rails(carrier, sessions, &session.ticket, &rails, attempt);
    if rails.iter().all(|rail| rail.mine.loopback) && !dialled.iter().any(|(_, result)| result.is_ok()) {
        let others = beyond_loopback(sessions, &session.peer);
        if !others.is_empty() {
            let log = sessions.log;
            log.warn(format_args!(
                "{peer}: loopback does not connect this machine with itself; other devices are used"
            ));
            dialled = dial_rails(carrier, sessions, &session.ticket, &others, attempt);
            rails = others;
        }
    }
    let messages = Messages::over(&rails, attempt.turn, carrier.sends_unasked());
    let message_lane = name_of(carrier, messages.rail, MESSAGE_CHANNEL);
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
    let own = Some(usize::from(messages.rail)).filter(|at| reasons[*at].is_none() && is_up(&message_lane));
    let small = own.or_else(|| reasons.iter().position(Option::is_none));
    let lost: Vec<LaneName> = dialled.iter().filter(|(_, r)| r.is_err()).map(|(name, _)| *name).collect();
    let count = (dialled.len() - lost.len()) as u16;
    let rows = candidates_over(carrier, sessions, &session.peer, &rails).into_iter().map(|row| {
        let at = rails.iter().position(|rail| row.device.as_ref() == Some(&rail.mine.name));
        match at.map(|at| &reasons[at]) {
            Some(None) => messages::used(row, at == small),
            Some(Some(reason)) => row.missed(reason),
            None if row.reason.is_some() => row,
            None => row.slower(),
        }
    });
    let checksum = carrier.checksum(session.ticket.checksum);
    let choice = messages::choice(rows.collect(), messages.eager_max, checksum);
    let paired = |row: &Candidate| rails.iter().any(|rail| row.device.as_ref() == Some(&rail.mine.name));
    warn_of_unused(sessions, &session.peer, choice.rows.iter().filter(|row| !paired(row)));
    let endpoint = sessions.add_endpoint(&OverRails(carrier), &peer, Some(&session.peer), choice, &attempt.refused)?;
    let announced = count | if messages.turns { TURNS } else { 0 };
    sessions.announce(endpoint, session, carrier.announcement(), announced.to_le_bytes())?;
    sessions.control.set_rails(endpoint, rails.clone(), messages.eager_max);
    if messages.turns {
        keep_messages_whole(sessions, endpoint);
    }
    for (name, result) in dialled {
        let rail = &rails[usize::from(name.rail)];
        if let Ok(lane) = result {
            add_lane(sessions, endpoint, (name, carrier), lane, &LocalRail::of(rail))?;
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

/// Dials the connection for messages and those for chunks of these rails.
fn dial_rails(
    carrier: &'static dyn Carrier,
    sessions: &Arc<Sessions>,
    ticket: &Ticket,
    rails: &[RailPair],
    attempt: &Attempt,
) -> Vec<(LaneName, Result<Box<dyn Lane>>)> {
    let settings = sessions.environment.settings();
    let (count, channels) = (rails.len() as u16, settings.channels.first() as u16);
    let messages = Messages::over(rails, attempt.turn, carrier.sends_unasked());
    let mut names = vec![name_of(carrier, messages.rail, MESSAGE_CHANNEL)];
    match carrier.devices(settings) as u16 {
        0 => {
            let of = |rail| (0..channels).map(move |channel| name_of(carrier, rail, channel));
            names.extend((0..count).flat_map(of));
        }
        // A channel of its own for each, by which both ends know the device.
        devices => {
            let lanes = devices.max(count * channels);
            names.extend((0..lanes).map(|lane| name_of(carrier, lane % count, lane)));
        }
    }
    // A late peer is left to the next carrier, if there is one.
    let last = CARRIERS.iter().rfind(|other| settings.tls.allows(other.name()));
    let is_last = last.is_none_or(|last| last.name() == carrier.name());
    let deadline = if is_last { attempt.deadline } else { Instant::now() };
    dial_until(deadline, &names, |names, limit| {
        let one = |name: LaneName| {
            dial(sessions, ticket, &rails[usize::from(name.rail)], (name, carrier), attempt.deadline.min(limit))
        };
        at_once(names, &one)
    })
}

fn near(sessions: &Sessions, peer: &Hello) -> Near {
    let here = &sessions.environment.machine().boot_id;
    // As the peer knows this end, and read once: several rows of each connection depend on it.
    let network = sessions.identity.lock().as_ref().map_or(0, |me| me.hello.network);
    Near::of((here, network), (&peer.boot_id, peer.network))
}

fn rails_to(sessions: &Sessions, peer: &Hello) -> Vec<RailPair> {
    let pair = |mine: Vec<NetDevice>| rail_pairs::pair(&mine, &peer.devices, near(sessions, peer));
    sessions.environment.rails().map(pair).unwrap_or_default()
}

/// The pairs of devices other than loopback.
fn beyond_loopback(sessions: &Sessions, peer: &Hello) -> Vec<RailPair> {
    let pair = |mine: Vec<NetDevice>| rail_pairs::beyond_loopback(&mine, &peer.devices, near(sessions, peer));
    sessions.environment.rails().map(pair).unwrap_or_default()
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
/// `Refused` when the session has ended; `Protocol` when no carrier is of the lane's class; `Io` when the system
/// refuses.
pub(super) fn lane_arrived(
    sessions: &Arc<Sessions>,
    session: &[u8; 16],
    lane: LaneName,
    stream: TcpStream,
    route: Route,
) -> Result<()> {
    let ended = || Error::new(ErrorKind::Refused, "lane", "its session has ended");
    let endpoint = sessions.control.endpoint(session).ok_or_else(ended)?;
    if lane.purpose == LanePurpose::Placing {
        return placing::arrived(sessions, endpoint, lane, stream, &route.device);
    }
    let carrier = carrier_of(lane.channel)?;
    let is_further = carrier.is_widened() && lane.purpose == LanePurpose::Bulk && lane.channel & CHANNEL_MASK > 0;
    if is_further && sessions.environment.settings().channels == Channels::Auto && !sessions.progress.has_room(1) {
        let from = route.remote.to_canonical();
        sessions
            .log
            .debug(format_args!("one more connection from {from} was closed: the I/O threads are at their maximum"));
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
    if !carrier.waits_to_join() {
        return complete(sessions, endpoint, (lane, carrier), stream, rail);
    }
    // Other peers' connections arrive on this thread.
    let joining = sessions.clone();
    let spawned = sessions.progress.spawn("crossrail-join", move || {
        if let Err(error) = complete(&joining, endpoint, (lane, carrier), stream, rail) {
            joining.log.warn(format_args!("a lane over {} was dropped: {error}", carrier.name()));
        }
    });
    spawned.map(drop)
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
fn among(sessions: &Sessions, name: LaneName, carrier: &dyn Carrier, fast: bool) -> Option<Among> {
    let tcp_limits = sessions.environment.tcp_limits();
    let measured = sessions.environment.settings().channels == Channels::Auto && tcp_limits.channels > 1;
    let begin_with = if fast { tcp_limits.begin_with } else { 1 };
    (measured && carrier.is_widened()).then_some(Among { place: (name.rail, name.channel), begin_with })
}

/// Has more connections dialled over every rail of an endpoint, as many as both ends serve.
pub(super) fn widen(sessions: &Sessions, endpoint: EndpointId) {
    let Some(me) = sessions.identity.lock().as_ref().map(|me| me.hello.clone()) else { return };
    let Some((channels, rails)) = sessions.control.room(endpoint, &me) else { return };
    let has_lanes = |carrier: &&&dyn Carrier| {
        let mut core = sessions.progress.core();
        let first = channel_of(**carrier, 0);
        rails.iter().any(|rail| !core.transfers().lanes_of(endpoint, |name| name == (*rail, first)).is_empty())
    };
    let Some(carrier) = CARRIERS.iter().filter(|carrier| carrier.is_widened()).find(has_lanes) else { return };
    // All rails have their second one before any has a third.
    for (at, channel) in (1..channels as u16).enumerate() {
        if !sessions.progress.has_room((at + 1) * rails.len()) {
            sessions.log.debug(format_args!("rails limited to {channel} connections each: I/O threads at maximum"));
            return;
        }
        for rail in &rails {
            let channel = channel_of(*carrier, channel);
            let more = LostRail { endpoint, rail: *rail, channel, reported: true, short_lived: 0 };
            sessions.redialer.more(sessions, more);
        }
    }
}

/// Adds a lane that a peer has dialled.
fn complete(
    sessions: &Arc<Sessions>,
    endpoint: EndpointId,
    (name, carrier): (LaneName, &'static dyn Carrier),
    stream: TcpStream,
    rail: LocalRail,
) -> Result<()> {
    let checksum = sessions.control.checksum(endpoint);
    let lane = make_lane(sessions, (name, carrier), (stream, checksum), &rail, Instant::now() + DIAL_MAX)?;
    add_lane(sessions, endpoint, (name, carrier), lane, &rail)?;
    sessions.control.count_lane(endpoint);
    accept_if_complete(sessions, endpoint, carrier);
    Ok(())
}

/// Reports the endpoint once all its lanes are up. What it uses is what the connecting end has chosen: the rails whose
/// lanes have arrived.
fn accept_if_complete(sessions: &Arc<Sessions>, endpoint: EndpointId, carrier: &'static dyn Carrier) {
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
    let checksum = carrier.checksum(sessions.control.checksum(endpoint));
    sessions.explain_accepted(
        &OverRails(carrier),
        endpoint,
        &peer,
        messages::choice(rows, sessions.control.eager_max(endpoint), checksum),
    );
    sessions.arrived(endpoint);
}

/// Adds a lane to its endpoint.
///
/// Both ends redial lost lanes, perhaps at once, and an end may still have a lane of that name whose loss it has not
/// noticed. Of several lanes with one name the connecting end, which sees all of them come up, closes all but the last.
fn add_lane(
    sessions: &Arc<Sessions>,
    endpoint: EndpointId,
    (name, carrier): (LaneName, &dyn Carrier),
    lane: Box<dyn Lane>,
    rail: &LocalRail,
) -> Result<()> {
    let record = LaneRecord::of(&*lane, carrier.name(), sessions.control.eager_max(endpoint));
    let record = record.on_rail((name.rail, name.channel), rail.interface.clone()).over_socket();
    let record = if carrier.rests() { record.resting() } else { record };
    let earlier = match (sessions.control.is_initiator(endpoint), name.purpose) {
        // Messages have one connection, on whatever rail.
        (true, LanePurpose::Message) => {
            sessions.progress.core().transfers().lanes_of(endpoint, |(_, channel)| channel == name.channel)
        }
        (true, LanePurpose::Bulk) => {
            sessions.progress.core().transfers().lanes_of(endpoint, |of| of == (name.rail, name.channel))
        }
        (false, _) | (_, LanePurpose::Placing) => Vec::new(),
    };
    add_lane_of(sessions, endpoint, (name, carrier, rail), lane, record)?;
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
    (name, carrier, rail): (LaneName, &dyn Carrier, &LocalRail),
    lane: Box<dyn Lane>,
    record: LaneRecord,
) -> Result<()> {
    let id = lane.id();
    if name.purpose == LanePurpose::Message {
        sessions.explain_moved(endpoint, &format!("{}/{}", carrier.name(), rail.device));
        return sessions.add_polled_lane(endpoint, lane, record, false);
    }
    let spec = proto::LaneSpec {
        whole_max: 0,
        counts: false,
        cost_ns: 1000 + u64::from(name.rail) * 100 + u64::from(name.channel & CHANNEL_MASK),
        ..record.spec(id, true)
    };
    let bulk = Arc::new(BulkLane::new(endpoint, lane, among(sessions, name, carrier, rail.fast)));
    let mut core = sessions.progress.core();
    if !core.transfers().add_bulk_lane(&bulk, record, spec) {
        return Err(gone("connect"));
    }
    sessions.progress.after(core);
    sessions.progress.carry(bulk, name.channel & CHANNEL_MASK == 0, rail.node)
}

/// Dials a lost lane again, or one `more`. `Ok(None)`: it is not lost any more, or cannot be dialled from here. The name
/// of its device, when it is up.
///
/// # Errors
/// The device's name, and what kept it from coming up.
pub(super) fn redial(
    sessions: &Arc<Sessions>,
    (lost, more): (&LostRail, bool),
    deadline: Instant,
) -> std::result::Result<Option<String>, (String, Error)> {
    let Some(redial) = sessions.redial(lost) else { return Ok(None) };
    if placing::is_of(lost) {
        return placing::redial(sessions, lost, (&redial.ticket, &redial.rail), deadline);
    }
    let is_up = {
        let mut core = sessions.progress.core();
        // Messages that have moved to another rail are not missing here.
        let moved = !more
            && lost.channel & CHANNEL_MASK == MESSAGE_CHANNEL
            && !core.transfers().lanes_of(lost.endpoint, |(_, channel)| channel == lost.channel).is_empty();
        moved || !core.transfers().lanes_of(lost.endpoint, |name| name == (lost.rail, lost.channel)).is_empty()
    };
    if is_up {
        return Ok(None);
    }
    let mine = &redial.rail.mine;
    let dialled = carrier_of(lost.channel).and_then(|carrier| {
        let name = name_of(carrier, lost.rail, lost.channel & CHANNEL_MASK);
        let lane = dial(sessions, &redial.ticket, &redial.rail, (name, carrier), deadline)?;
        add_lane(sessions, lost.endpoint, (name, carrier), lane, &LocalRail::of(&redial.rail))
    });
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
    (name, carrier): (LaneName, &dyn Carrier),
    deadline: Instant,
) -> Result<Box<dyn Lane>> {
    let from = binding(&rail.mine, rail.from);
    let to = SocketAddr::new(rail.theirs.address, rail.theirs.port);
    let stream = handshake::dial_lane(ticket, &from, to, name, deadline)?;
    make_lane(sessions, (name, carrier), (stream, ticket.checksum), &LocalRail::of(rail), deadline)
}

/// Makes an authenticated connection a lane, with that checksum where the carrier leaves integrity to it.
fn make_lane(
    sessions: &Sessions,
    (name, carrier): (LaneName, &dyn Carrier),
    (stream, agreed): (TcpStream, Checksum),
    rail: &LocalRail,
    deadline: Instant,
) -> Result<Box<dyn Lane>> {
    let settings = sessions.environment.settings();
    let suffix = match (name.purpose, settings.channels) {
        (LanePurpose::Message, _) => ":messages".to_owned(),
        (LanePurpose::Placing, _) => ":placing".to_owned(),
        (LanePurpose::Bulk, Channels::Count(1)) => String::new(),
        (LanePurpose::Bulk, Channels::Auto) if name.channel & CHANNEL_MASK == 0 => String::new(),
        (LanePurpose::Bulk, _) => format!("#{}", name.channel & CHANNEL_MASK),
    };
    let join = Join {
        settings,
        id: sessions.reserve_lane(),
        label: &format!("{}/{}{suffix}", carrier.name(), rail.device),
        checksum: carrier.checksum(agreed),
        number: usize::from(if name.purpose == LanePurpose::Bulk { name.channel & CHANNEL_MASK } else { name.rail }),
        interface: rail.interface.as_deref(),
        loopback: rail.loopback,
        deadline,
    };
    carrier.join(stream, join)
}
