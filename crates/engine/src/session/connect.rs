//! Endpoints: connecting to peers, and what all transports do when they make one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_handshake::{self as handshake, Hello, Identity, Session, Target};
use crossrail_proto as proto;
use crossrail_transport::Lane;
use crossrail_types::{EndpointId, Error, ErrorKind, Filter, LaneId, LogLevel, Rails, Result, Settings};

use super::dialling::was_late;
use super::explain::{Candidate, Explain};
use super::transport::{Attempt, Choice, Control, Refused, Transport, Transports, Turn};
use super::{Sessions, cuda_ipc, generation_of, self_transport};
use crate::core::gpu::Reach;
use crate::core::{LaneRecord, gone};
use crate::progress::{About, WAIT_MAX};

/// The port of `host` without one.
const DEFAULT_PORT: u16 = 7471;
/// Silence after which a lane that owes something is examined.
const LANE_DEADLINE: Duration = Duration::from_millis(300);

/// Grounds on which an endpoint uses what it uses. Its [`Explain`] is made from them when a caller asks for it: most never
/// do, and the rows of the other transports take a look at the system's devices.
#[derive(Clone)]
pub(super) struct Grounds {
    used: &'static str,
    name: String,
    /// `None`: the peer is this worker.
    peer: Option<Hello>,
    pub(super) choice: Choice,
    refused: Refused,
}

impl Grounds {
    pub(super) fn explain(&self, sessions: &Sessions) -> Explain {
        let Choice { small, large, rows } = self.choice.clone();
        let rows = sessions.all_rows(self.used, self.peer.as_ref(), rows, &self.refused);
        Explain::new(&self.name, small, large, &sessions.environment.settings().tls.to_string(), rows)
    }

    fn log(&self, sessions: &Sessions) {
        let (log, environment, explain) = (sessions.log, &sessions.environment, self.explain(sessions));
        if let rails @ Rails::Near(_) = &environment.settings().net_devices {
            let names: Vec<_> = environment.rails().into_iter().flatten().map(|device| device.name).collect();
            log.info(format_args!("rails      {}   (CROSSRAIL_NET_DEVICES={rails})", names.join(" ")));
        }
        log.info(format_args!("{}", explain.available));
        log.info(format_args!("{}", explain.selected));
        log.debug(format_args!("every candidate and its cost:\n{explain}"));
    }
}

impl Sessions {
    /// Makes an endpoint to the worker that listens at `to`: by the first transport in the table that both ends allow
    /// and that comes up.
    ///
    /// # Errors
    /// As [`Worker::connect`](crate::Worker::connect).
    pub(crate) fn connect(
        self: &Arc<Self>,
        to: &[u8],
        require: Option<&str>,
        timeout: Option<Duration>,
        turn: Turn,
    ) -> Result<EndpointId> {
        let deadline = Instant::now() + timeout.unwrap_or(self.environment.settings().timeout).min(WAIT_MAX);
        let mut required = self.transports.required(require, self.environment.settings())?;
        let insists = self.require_carriers(required.as_mut())?;
        if self.progress.is_closing() {
            return Err(gone("connect"));
        }
        let me = self.identity.lock().clone().ok_or_else(|| gone("connect"))?;
        let required = required.as_deref();
        let permitted = Permitted { settings: self.environment.settings(), transports: &self.transports, required };
        let target = Target::parse(to, DEFAULT_PORT, deadline)?;
        let may_be_own = permitted.may_be_own();
        if may_be_own && matches!(&target, Target::Worker(address) if address.worker == me.hello.worker) {
            return self_transport::connect(self);
        }
        let control = self.control_device()?;
        let over_unix = self.transports.over_unix();
        let unix = over_unix.is_some_and(|transport| permitted.left_out(transport.name()).is_none());
        let mut began = Instant::now();
        let session = handshake::connect(&target, &me, control.as_ref(), unix, deadline)?;
        if may_be_own && session.peer.worker == me.hello.worker {
            return self_transport::connect(self);
        }
        let peer = session.peer.clone();
        if insists && let Some(why) = cuda_ipc::reason(self, &peer, &Refused::default()) {
            return Err(no_gpus(&why).with_peer(peer.name));
        }
        let mut attempt = Attempt { deadline, refused: Refused::default(), turn };
        if let Some(list) = require
            && required.is_some_and(|names| !names.iter().any(|name| name == "cuda_ipc"))
        {
            attempt.refused.add("cuda_ipc", format!("require={list} leaves it out"));
        }
        let mut session = Some(session);
        for transport in self.transports.iter().filter(|transport| transport.carrier().is_none()) {
            let name = transport.name();
            // Report this end's own obstacle before the peer's: whether the peer offers the transport does not matter
            // then.
            let missing = || if permitted.offers(transport) { None } else { transport.obstacle(self, &peer) };
            let left_out = || permitted.left_out(name).or_else(missing);
            let obstacle = || left_out().or_else(|| permitted.left_out_by(&peer, name));
            if let Some(why) = obstacle().or_else(|| transport.obstacle(self, &peer)) {
                attempt.refused.add(name, why);
                continue;
            }
            let ready = match (transport.control(), session.take()) {
                (Control::Unix, Some(over_tcp)) if !over_tcp.stream.is_unix() => {
                    match upgrade(&over_tcp, &me, deadline) {
                        Ok(better) => better,
                        Err(why) => {
                            attempt.refused.add(name, why);
                            session = Some(over_tcp);
                            continue;
                        }
                    }
                }
                (Control::Tcp, Some(over_unix)) if over_unix.stream.is_unix() => {
                    self.reconnect(&peer, &me, deadline)?
                }
                (_, Some(session)) => session,
                (_, None) => self.reconnect(&peer, &me, deadline)?,
            };
            let mut connected = transport.connect(self, ready, &attempt);
            while transport.control() == Control::Unix
                && connected.as_ref().is_err_and(|error| was_late(error, began, deadline))
            {
                began = Instant::now();
                let again = handshake::connect(&target, &me, control.as_ref(), true, deadline);
                connected = again.and_then(|session| transport.connect(self, session, &attempt));
            }
            match connected {
                Ok(endpoint) => {
                    self.warn_of_slower(&peer, name, &attempt.refused, &permitted);
                    return Ok(endpoint);
                }
                Err(error) if self.progress.is_closing() || !permitted.is_any_left(transport, &peer) => {
                    return Err(error);
                }
                Err(error) => attempt.refused.add(name, error.to_string()),
            }
        }
        Err(no_transport(&attempt.refused).with_peer(peer.name))
    }

    /// Whether `require` names only transports that belong to another one's endpoints, as cuda_ipc does to shm's. The
    /// carrier is then used too: for its socket, and for host memory.
    ///
    /// # Errors
    /// `Unsupported`, with the reason, when they cannot be had on this machine.
    fn require_carriers(&self, required: Option<&mut Vec<String>>) -> Result<bool> {
        let Some(names) = required.filter(|names| names.as_slice() == ["cuda_ipc"]) else { return Ok(false) };
        if let Some(why) = self.environment.no_cuda_ipc().or_else(|| self.environment.ipc_gpus().err()) {
            return Err(no_gpus(&why));
        }
        names.push("shm".to_owned());
        Ok(true)
    }

    /// A new session with that peer over TCP.
    fn reconnect(&self, peer: &Hello, me: &Identity, deadline: Instant) -> Result<Session> {
        let target = Target::Control(peer.control.clone());
        handshake::connect(&target, me, self.control_device()?.as_ref(), false, deadline)
    }

    /// Why this process shares no memory with the peer, if it is on another machine or of another node.
    pub(super) fn apart(&self, peer: &Hello) -> Option<String> {
        if peer.boot_id != self.environment.machine().boot_id {
            return Some("the peer is on another machine".to_owned());
        }
        let (mine, theirs) = (&self.environment.settings().node, &peer.node);
        let name = |node: &Option<String>| node.clone().unwrap_or_else(|| "none".to_owned());
        (mine != theirs)
            .then(|| format!("the peer's CROSSRAIL_NODE is {}, and here it is {}", name(theirs), name(mine)))
    }

    /// Logs that a faster transport was expected with a peer on this machine. One that the settings or the caller
    /// leave out was not.
    fn warn_of_slower(&self, peer: &Hello, chosen: &str, refused: &Refused, permitted: &Permitted<'_>) {
        if self.apart(peer).is_some() {
            return;
        }
        let is_offered = |name: &str| permitted.transports.iter().any(|of| of.name() == name && permitted.offers(of));
        let is_named = matches!(permitted.settings.tls, Filter::Only(_));
        let is_expected = |name: &str| {
            let counts = !["self", "cuda_ipc"].contains(&name) && permitted.left_out(name).is_none();
            counts && (is_named || is_offered(name))
        };
        let expected = refused.iter().filter(|(name, _)| is_expected(name));
        for (name, why) in expected {
            self.log.warn(format_args!("{}: {chosen} instead of {name}: {why}", peer.name));
        }
    }

    // ---- services for transports

    /// Adds an endpoint over that transport. `peer`: what is known of another worker. `refused`: why the transports
    /// that were tried before are not used.
    ///
    /// # Errors
    /// `Closed` when the worker is closed.
    pub(super) fn add_endpoint(
        &self,
        transport: &dyn Transport,
        name: &str,
        peer: Option<&Hello>,
        choice: Choice,
        refused: &Refused,
    ) -> Result<EndpointId> {
        let carries_gpu = peer.filter(|_| transport.control() == Control::Unix);
        let reach = match carries_gpu.map(|peer| cuda_ipc::reason(self, peer, refused)) {
            Some(None) => Reach::Possible,
            Some(Some(why)) => Reach::Staged(why),
            None => Reach::Staged("only endpoints over shm can".to_owned()),
        };
        // Without a hello the peer is this worker.
        let own = || self.identity.lock().as_ref().map_or(0, |me| generation_of(&me.hello));
        let id = self.add_peer(name, peer.map_or_else(own, generation_of), reach)?;
        self.set_explain(transport, id, (name, peer), choice, refused);
        Ok(id)
    }

    /// Adds a peer without lanes. `reach`: how its GPU memory can be reached.
    ///
    /// # Errors
    /// `Closed` when the worker is closed.
    pub(super) fn add_peer(&self, name: &str, generation: u64, reach: Reach) -> Result<EndpointId> {
        let settings = self.environment.settings();
        let config = proto::Config {
            chunk: settings.chunk as u64,
            window: settings.window,
            lane_deadline: LANE_DEADLINE.as_nanos() as u64,
            // The engine itself asks for acknowledgements only when a pass found nothing else to do.
            lazy_passes: 0,
            ..proto::Config::default()
        };
        let mut core = self.progress.core();
        if core.is_closed() {
            return Err(gone("connect"));
        }
        Ok(core.transfers().add_peer(config, name, generation, reach))
    }

    /// Records what an accepted endpoint uses, once that is known: what the connecting end has chosen.
    pub(super) fn explain_accepted(
        &self,
        transport: &dyn Transport,
        endpoint: EndpointId,
        peer: &Hello,
        choice: Choice,
    ) {
        let apart = self.apart(peer);
        let mut refused = Refused::default();
        for other in self.transports.iter().filter(|other| other.carrier().is_none()) {
            let why = match &apart {
                None => format!("the peer chose {}", transport.name()),
                Some(why) if other.control() == Control::Unix => why.clone(),
                Some(_) => continue,
            };
            if other.name() != transport.name() {
                refused.add(other.name(), why);
            }
        }
        self.set_explain(transport, endpoint, (&peer.name, Some(peer)), choice, &refused);
    }

    fn set_explain(
        &self,
        transport: &dyn Transport,
        endpoint: EndpointId,
        (name, peer): (&str, Option<&Hello>),
        choice: Choice,
        refused: &Refused,
    ) {
        if choice.rows.is_empty() {
            // An accepted endpoint whose lanes are not known yet.
            return;
        }
        let (name, peer, refused) = (name.to_owned(), peer.cloned(), refused.clone());
        let grounds = Arc::new(Grounds { used: transport.name(), name, peer, choice, refused });
        if self.log.0 >= LogLevel::Info {
            grounds.log(self);
        }
        let mut all = self.grounds.lock();
        all.insert(endpoint, grounds);
        let mut core = self.progress.core();
        if all.len() > 2 * core.peers().len() {
            all.retain(|endpoint, _| core.peers().get(*endpoint).is_some());
        }
    }

    /// The rows of all transports: those of the one that is used, and why each other one is not.
    fn all_rows(
        &self,
        used: &str,
        peer: Option<&Hello>,
        mut rows: Vec<Candidate>,
        refused: &Refused,
    ) -> Vec<Candidate> {
        let Some(peer) = peer else { return rows };
        let mut all = Vec::new();
        for transport in self.transports.iter() {
            if transport.name() == used {
                all.append(&mut rows);
                continue;
            }
            for row in transport.candidates(self, peer) {
                let row = Candidate { missed: false, ..row };
                all.push(match (refused.reason(transport.name()), transport.carrier()) {
                    _ if row.reason.is_some() => row,
                    (Some(why), _) => row.out(why),
                    (None, Some(carrier)) if carrier == used => row,
                    (None, Some(carrier)) => row.out(&format!("it needs {carrier}'s Unix socket")),
                    (None, None) => row.slower(),
                });
            }
        }
        all
    }

    /// An id for a lane that is about to be created.
    pub(super) fn reserve_lane(&self) -> LaneId {
        self.progress.core().transfers().lanes().reserve()
    }

    /// Adds a lane that is polled under the worker's lock: it carries messages, and chunks too (`bulk`).
    ///
    /// # Errors
    /// `Closed` when the endpoint has ended; `Io` when the system refuses to watch its descriptor.
    pub(super) fn add_polled_lane(
        &self,
        endpoint: EndpointId,
        lane: Box<dyn Lane>,
        record: LaneRecord,
        bulk: bool,
    ) -> Result<()> {
        let (id, fd) = (lane.id(), lane.fd());
        let spec = record.spec(id, bulk);
        let socket = record.polls_socket();
        let (mut lane, watcher) = (lane, Arc::downgrade(&self.progress));
        let seldom = lane.on_full(Box::new(move || {
            if let (Some(progress), Some(fd)) = (watcher.upgrade(), fd) {
                progress.connections().watch_room(fd, About::Lane(id));
            }
        }));
        let mut core = self.progress.core();
        if !core.transfers().add_polled_lane(endpoint, lane, record, spec, socket) {
            return Err(gone("connect"));
        }
        // With the lock, which a thread takes to act on an event: the lane is in the table then.
        let watched = fd.map_or(Ok(()), |fd| self.progress.connections().watch(fd, About::Lane(id), !seldom));
        self.progress.after(core);
        watched
    }

    /// The names of an endpoint's lanes.
    pub(super) fn lane_names(&self, endpoint: EndpointId) -> Vec<String> {
        let mut core = self.progress.core();
        let ids = core.peers().get(endpoint).map(|peer| peer.lanes().to_vec()).unwrap_or_default();
        ids.into_iter().map(|id| core.transfers().lanes().name(id).to_string()).collect()
    }
}

/// Which transports a connection may use.
struct Permitted<'a> {
    settings: &'a Settings,
    transports: &'a Transports,
    /// Those that `require` names; `None`: all that the settings allow.
    required: Option<&'a [String]>,
}

impl Permitted<'_> {
    /// Whether this end offers the transport to peers.
    fn offers(&self, transport: &Arc<dyn Transport>) -> bool {
        transport.is_offered(self.settings)
    }

    /// Why the settings or `require` leave a transport out, if so.
    fn left_out(&self, name: &str) -> Option<String> {
        let tls = &self.settings.tls;
        if !tls.allows(name) {
            return Some(format!("CROSSRAIL_TLS={tls} leaves it out"));
        }
        let names = self.required.filter(|names| !names.iter().any(|known| known == name))?;
        let carried = |transport: &&Arc<dyn Transport>| {
            transport.carrier() == Some(name) && names.iter().any(|known| known == transport.name())
        };
        let rider = self.transports.iter().find(carried).map(|transport| transport.name());
        let needed = rider.map_or_else(String::new, |rider| format!(", and {rider} needs its Unix socket"));
        Some(format!("require={} leaves it out{needed}", names.join(",")))
    }

    /// True if a worker may connect to itself over its loopback lane. No other transport can, so settings that name others
    /// do not exclude it; `^self` and `require` do.
    fn may_be_own(&self) -> bool {
        let is_excluded =
            matches!(&self.settings.tls, Filter::Except(names) if names.iter().any(|name| name == "self"));
        !is_excluded && self.required.is_none_or(|names| names.iter().any(|name| name == "self"))
    }

    /// Why the peer's settings leave a transport out, if so.
    fn left_out_by(&self, peer: &Hello, name: &str) -> Option<String> {
        let known = peer.transports.iter().any(|known| known == name);
        (!known).then(|| "the peer's CROSSRAIL_TLS leaves it out".to_owned())
    }

    /// Whether a transport after this one can be tried.
    fn is_any_left(&self, tried: &Arc<dyn Transport>, peer: &Hello) -> bool {
        let rest = self.transports.iter().skip_while(|transport| transport.name() != tried.name()).skip(1);
        rest.filter(|transport| transport.carrier().is_none()).any(|transport| {
            self.left_out(transport.name()).is_none() && self.left_out_by(peer, transport.name()).is_none()
        })
    }
}

/// Moves a session to the peer's Unix socket; `Err`: why that cannot be.
fn upgrade(session: &Session, me: &Identity, deadline: Instant) -> std::result::Result<Session, String> {
    match handshake::upgrade(session, me, deadline) {
        Ok(Some(better)) => Ok(better),
        Ok(None) => Err("its Unix socket cannot be reached (another network namespace?)".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// Why no transport is left that could connect to the peer.
fn no_transport(refused: &Refused) -> Error {
    let rows = refused.iter().filter(|(name, _)| *name != "self" && *name != "cuda_ipc");
    let reasons: Vec<_> = rows.map(|(name, why)| format!("{name}: {why}")).collect();
    Error::new(ErrorKind::Unsupported, "connect", reasons.join("; "))
        .with_hint("allow another transport by CROSSRAIL_TLS or require")
}

fn no_gpus(why: &str) -> Error {
    Error::new(ErrorKind::Unsupported, "connect", format!("require=cuda_ipc: {why}"))
        .with_hint("`crossrail info` says what is missing; without require, GPU memory goes through host memory")
}
