//! Endpoints made from here, and the lanes that either side gives them.

use std::io::Write;
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_handshake::{self as handshake, Hello, LaneName, LanePurpose, Session, Stream, Target};
use crossrail_proto as proto;
use crossrail_shm::{Options as ShmOptions, Side};
use crossrail_tcp::TcpLane;
use crossrail_transport::Lane;
use crossrail_types::{EndpointId, Error, ErrorKind, LaneId, Rails, Result};

use super::Sessions;
use super::control::{DIAL_MAX, Link, MESSAGE_CHANNEL, READY, dial};
use super::costs::{self, Cost};
use super::explain::{self, Candidate, Explain};
use super::rail_pairs::{self, RailPair};
use crate::core::gpu::Reach;
use crate::core::{BulkLane, LaneRecord, LostRail, gone};
use crate::progress::About;

/// The port of `host` without one.
const DEFAULT_PORT: u16 = 7471;
/// Why GPU memory of an endpoint without shared memory is staged.
const NO_SHM: &str = "only endpoints over shm can";
/// Largest message that goes with its first frame, whatever the cost model says.
const EAGER_LIMIT: usize = 64 << 10;
/// Silence after which a lane that owes something is examined.
const LANE_DEADLINE: Duration = Duration::from_millis(300);

impl Sessions {
    // ---- connecting

    /// Makes an endpoint to whoever listens at `to`.
    pub(crate) fn connect(
        self: &Arc<Self>,
        to: &[u8],
        require: Option<&str>,
        timeout: Option<Duration>,
    ) -> Result<EndpointId> {
        let timeout = timeout.unwrap_or(self.environment.settings().timeout);
        let deadline = Instant::now() + timeout;
        let mut required = costs::required(require)?;
        let insists = self.insists_on_gpus(required.as_mut())?;
        let allowed = |name: &str| {
            self.environment.settings().tls.allows(name)
                && required.as_ref().is_none_or(|names| names.iter().any(|known| known == name))
        };
        if self.progress.is_closing() {
            return Err(gone("connect"));
        }
        let me = self.identity.lock().clone().ok_or_else(|| gone("connect"))?;
        let target = Target::parse(to, DEFAULT_PORT, deadline)?;
        let myself = matches!(&target, Target::Worker(address) if address.worker == me.hello.worker);
        if myself && allowed("self") {
            return self.connect_self();
        }
        let control = self.control_device()?;
        let mut session = handshake::connect(&target, &me, control.as_ref(), allowed("shm"), deadline)?;
        if session.peer.worker == me.hello.worker && allowed("self") {
            return self.connect_self();
        }
        let mut why = self.shm_reason(&session, required.as_deref());
        if why.is_none() && !session.stream.is_unix() {
            match handshake::upgrade(&session, &me, deadline) {
                Ok(Some(better)) => session = better,
                Ok(None) => why = Some("its Unix socket cannot be reached (another network namespace?)".to_owned()),
                Err(error) => why = Some(error.to_string()),
            }
        }
        if session.stream.is_unix() {
            let Session { stream: Stream::Unix(stream), peer, .. } = session else { unreachable!("is_unix") };
            let left_out = require.filter(|_| !allowed("cuda_ipc"));
            let no_gpu = left_out.map(|list| format!("require={list} leaves it out"));
            if insists && let Some(why) = self.cuda_ipc_candidate(&peer, None).reason {
                return Err(no_gpus(&why).with_peer(peer.name));
            }
            match self.attach_shm(stream, Side::Connector, &peer, no_gpu, deadline) {
                Ok(endpoint) => return Ok(endpoint),
                Err(error) if !allowed("tcp") || self.progress.is_closing() => return Err(error),
                Err(error) => {
                    let target = Target::Control(peer.control.clone());
                    why = Some(error.to_string());
                    session = handshake::connect(&target, &me, control.as_ref(), false, deadline)?;
                }
            }
        }
        let why = why.unwrap_or_else(|| "not available".to_owned());
        if !allowed("tcp") || !session.peer.transports.iter().any(|name| name == "tcp") {
            let who = if allowed("tcp") { "the peer does not allow tcp" } else { "tcp is not allowed" };
            return Err(Error::new(ErrorKind::Unsupported, "connect", format!("shm: {why}; tcp: {who}"))
                .with_peer(session.peer.name)
                .with_hint("allow another transport by CROSSRAIL_TLS or require"));
        }
        if session.peer.boot_id == me.hello.boot_id && allowed("shm") {
            self.log.warn(format_args!("{}: tcp instead of shm: {why}", session.peer.name));
        }
        self.connect_tcp(session, &why, deadline)
    }

    /// Whether `require` names cuda_ipc and nothing that could stand in for it. Then shm is used as well: for its socket,
    /// and for memory of the host.
    ///
    /// # Errors
    /// `Unsupported`, with the reason, when it cannot be had on this machine.
    fn insists_on_gpus(&self, required: Option<&mut Vec<String>>) -> Result<bool> {
        let Some(names) = required.filter(|names| names.as_slice() == ["cuda_ipc"]) else { return Ok(false) };
        if let Some(why) = self.environment.no_cuda_ipc().or_else(|| self.environment.ipc_domain().err()) {
            return Err(no_gpus(&why));
        }
        names.push("shm".to_owned());
        Ok(true)
    }

    /// Why shared memory is out of the question, if it is.
    fn shm_reason(&self, session: &Session, required: Option<&[String]>) -> Option<String> {
        let tls = &self.environment.settings().tls;
        if !tls.allows("shm") {
            return Some(format!("CROSSRAIL_TLS={tls} leaves it out"));
        }
        if let Some(names) = required
            && !names.iter().any(|name| name == "shm")
        {
            let needed = names.iter().any(|name| name == "cuda_ipc");
            let needed = if needed { ", and cuda_ipc needs its Unix socket" } else { "" };
            return Some(format!("require={} leaves it out{needed}", names.join(",")));
        }
        if session.peer.boot_id != self.environment.machine().boot_id {
            return Some("the peer is on another machine".to_owned());
        }
        if !session.peer.transports.iter().any(|name| name == "shm") {
            return Some("the peer's CROSSRAIL_TLS leaves it out".to_owned());
        }
        None
    }

    /// The two lines at an endpoint's creation.
    fn announce(&self, explain: &Explain) {
        if !explain.candidates.is_empty() {
            if let rails @ Rails::Near(_) = &self.environment.settings().net_devices {
                let names: Vec<_> = self.environment.rails().into_iter().flatten().map(|device| device.name).collect();
                self.log.info(format_args!("rails      {}   (CROSSRAIL_NET_DEVICES={rails})", names.join(" ")));
            }
            self.log.info(format_args!("{}", explain.available));
            self.log.info(format_args!("{}", explain.selected));
        }
    }

    fn new_peer(&self, name: &str, explain: Explain, reach: Reach) -> Result<EndpointId> {
        self.announce(&explain);
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
        let id = core.transfers().add_peer(config, name, reach);
        drop(core);
        self.set_explain(id, explain);
        Ok(id)
    }

    fn new_lane_id(&self) -> LaneId {
        self.progress.core().transfers().lanes().reserve()
    }

    // ---- self

    fn connect_self(self: &Arc<Self>) -> Result<EndpointId> {
        let name = self.identity.lock().as_ref().map_or_else(String::new, |me| me.hello.name.clone());
        let chosen = explain::candidate("self", "self", None, &Cost::SELF).chosen(&["small", "large"]);
        let tls = self.environment.settings().tls.to_string();
        let explain = Explain::new(&name, "self".to_owned(), "self".to_owned(), &tls, vec![chosen]);
        let reach = || Reach::Staged(NO_SHM.to_owned());
        let (here, there) = (self.new_peer(&name, explain.clone(), reach())?, self.new_peer(&name, explain, reach())?);
        let (a, b) = (self.new_lane_id(), self.new_lane_id());
        let (one, other) = crossrail_transport::loopback::pair(a, b)?;
        for (endpoint, lane) in [(here, one), (there, other)] {
            let record = LaneRecord::new(lane.name(), "self", lane.caps().clone(), EAGER_LIMIT);
            self.add_polled_lane(endpoint, Box::new(lane), record, true)?;
        }
        Ok(here)
    }

    // ---- shared memory

    /// `no_gpu`: why GPU memory must not be reached directly, if so.
    pub(crate) fn attach_shm(
        self: &Arc<Self>,
        stream: UnixStream,
        side: Side,
        peer: &Hello,
        no_gpu: Option<String>,
        deadline: Instant,
    ) -> Result<EndpointId> {
        let id = self.new_lane_id();
        let arena = self.environment.arena().clone();
        let lane = crossrail_shm::attach(stream, side, id, arena, ShmOptions::default(), deadline)
            .map_err(|error| error.with_peer(&peer.name))?;
        let cma = lane.report().cma_pull.clone();
        let bulk = if cma.is_ok() { Cost::SHM_CMA } else { Cost::SHM_RING };
        let eager = costs::eager_max(&Cost::SHM_RING, &bulk, EAGER_LIMIT);
        let mapped = costs::eager_max(&Cost::SHM_RING, &Cost::SHM_MAPPED, EAGER_LIMIT);
        let (large, mut candidates) = match &cma {
            Ok(()) => (
                "shm(cma)",
                vec![
                    explain::candidate("shm(mapped)", "shm", None, &Cost::SHM_MAPPED).chosen(&["large, Context.alloc"]),
                    explain::candidate("shm(cma)", "shm", None, &Cost::SHM_CMA).chosen(&["large"]),
                    explain::candidate("shm(ring)", "shm", None, &Cost::SHM_RING).chosen(&["small"]),
                ],
            ),
            Err(why) => (
                "shm(ring)",
                vec![
                    explain::candidate("shm(mapped)", "shm", None, &Cost::SHM_MAPPED).chosen(&["large, Context.alloc"]),
                    explain::candidate("shm(ring)", "shm", None, &Cost::SHM_RING).chosen(&["small", "large"]),
                    explain::candidate("shm(cma)", "shm", None, &Cost::SHM_CMA).out(why),
                ],
            ),
        };
        let gpu = self.cuda_ipc_candidate(peer, no_gpu);
        let reach = match &gpu.reason {
            Some(why) => Reach::Staged(why.clone()),
            None => Reach::Possible,
        };
        candidates.push(gpu);
        candidates.extend(
            self.tcp_candidates(peer).into_iter().map(|way| if way.reason.is_none() { way.slower() } else { way }),
        );
        let tls = self.environment.settings().tls.to_string();
        let mut large = format!(
            "{}, {}",
            explain::from_size(mapped, "shm(mapped) for Context.alloc memory"),
            explain::from_size(eager, large)
        );
        if matches!(reach, Reach::Possible) {
            large.push_str(", cuda_ipc for GPU memory (above 1M the sender's GPU copies)");
        }
        let explain = Explain::new(&peer.name, "shm".to_owned(), large, &tls, candidates);
        let endpoint = self.new_peer(&peer.name, explain, reach)?;
        let record = LaneRecord::new(lane.name(), "shm", lane.caps().clone(), eager).mapped_from(mapped);
        self.add_polled_lane(endpoint, Box::new(lane), record, true)?;
        Ok(endpoint)
    }

    /// Direct copies of GPU memory: `out` where they are ruled out from the start.
    fn cuda_ipc_candidate(&self, peer: &Hello, no_gpu: Option<String>) -> Candidate {
        let way = explain::candidate("cuda_ipc", "cuda_ipc", None, &Cost::CUDA_IPC);
        let theirs = || {
            let known = peer.transports.iter().any(|name| name == "cuda_ipc");
            (!known).then(|| "the peer's CROSSRAIL_TLS leaves it out".to_owned())
        };
        match self.environment.no_cuda_ipc().or(no_gpu).or_else(theirs) {
            Some(why) => way.out(&why),
            None => way.chosen(&["GPU memory"]),
        }
    }

    /// Adds a lane that is polled under the lock. `bulk`: it carries chunks too.
    fn add_polled_lane(&self, endpoint: EndpointId, lane: Box<dyn Lane>, record: LaneRecord, bulk: bool) -> Result<()> {
        let (id, fd) = (lane.id(), lane.fd());
        let caps = lane.caps();
        let spec = proto::LaneSpec {
            id,
            reliable: caps.reliable,
            messages: true,
            bulk,
            max_payload: u32::try_from(caps.max_payload).unwrap_or(u32::MAX),
            eager_max: record.eager_max().min(caps.max_payload) as u32,
            whole_max: if caps.reliable { caps.whole_max as u32 } else { 0 },
            counts: caps.reliable && caps.counts,
            cost_ns: 1,
        };
        let socket = record.transport() == "tcp";
        let mut core = self.progress.core();
        if !core.transfers().add_polled_lane(endpoint, lane, record, spec, socket) {
            return Err(gone("connect"));
        }
        self.progress.after(core);
        if let Some(fd) = fd {
            self.progress.watch(fd, About::Lane(id))?;
        }
        self.progress.wake_driver();
        Ok(())
    }

    // ---- tcp

    fn rails_to(&self, peer: &Hello) -> Vec<RailPair> {
        let same_machine = peer.boot_id == self.environment.machine().boot_id;
        self.environment.rails().map(|mine| rail_pairs::pair(&mine, &peer.devices, same_machine)).unwrap_or_default()
    }

    fn tcp_candidates(&self, peer: &Hello) -> Vec<Candidate> {
        let tls = &self.environment.settings().tls;
        if !tls.allows("tcp") {
            return vec![
                explain::candidate("tcp", "tcp", None, &Cost::rail(None, None, false))
                    .out(&format!("CROSSRAIL_TLS={tls} leaves it out")),
            ];
        }
        let mine = self.environment.rails().unwrap_or_default();
        let pairs = self.rails_to(peer);
        mine.iter()
            .map(|device| {
                let name = format!("tcp/{}", device.name);
                let pair = pairs.iter().find(|pair| pair.mine.name == device.name);
                let theirs = pair.and_then(|pair| pair.theirs.speed_mbps);
                let cost = Cost::rail(device.speed_mbps, theirs, device.loopback);
                let way = explain::candidate(&name, "tcp", Some(&device.name), &cost);
                if pair.is_some() { way } else { way.out("the peer has no device that it could reach") }
            })
            .collect()
    }

    fn connect_tcp(self: &Arc<Self>, session: Session, no_shm: &str, deadline: Instant) -> Result<EndpointId> {
        let rails = self.rails_to(&session.peer);
        let peer = session.peer.name.clone();
        if rails.is_empty() {
            return Err(self.no_rail(&session.peer)?);
        }
        let channels = self.environment.settings().channels as u16;
        let mut names = vec![LaneName { rail: 0, channel: MESSAGE_CHANNEL, purpose: LanePurpose::Message }];
        for rail in 0..rails.len() as u16 {
            names.extend((0..channels).map(|channel| LaneName { rail, channel, purpose: LanePurpose::Bulk }));
        }
        let ticket = session.ticket;
        let limit = deadline.min(Instant::now() + DIAL_MAX);
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
                self.log.warn(format_args!("{peer}: rail {} is left out: {reason}", rail.mine.name));
            }
        }
        if reasons.iter().all(Option::is_some) {
            let reason = reasons.into_iter().flatten().next().unwrap_or_default();
            return Err(
                Error::new(ErrorKind::Unreachable, "connect", format!("no rail came up: {reason}")).with_peer(peer)
            );
        }
        let lost: Vec<LaneName> = dialled.iter().filter(|(_, r)| r.is_err()).map(|(name, _)| *name).collect();
        let count = dialled.len() - lost.len();
        let mut control = match session.stream {
            Stream::Tcp(control) => control,
            Stream::Unix(_) => return Err(Error::new(ErrorKind::Unsupported, "connect", "tcp needs a TCP session")),
        };
        let announced = [READY, count as u8, (count >> 8) as u8, 0];
        control.write_all(&announced).map_err(|error| Error::io("connect", "send", &error).with_peer(&peer))?;
        let candidates = self.explained(&session.peer, &rails, &reasons, no_shm);
        let endpoint = self.open_link(control, ticket, true, session.peer, rails.clone(), candidates)?;
        for (name, result) in dialled {
            let rail = &rails[usize::from(name.rail)];
            if let Ok(stream) = result {
                self.add_tcp_lane(endpoint, name, stream, &rail.mine.name, Some(rail.mine.interface.clone()))?;
            }
        }
        for name in lost {
            self.redialer.lost(self, LostRail { endpoint, rail: name.rail, channel: name.channel });
        }
        Ok(endpoint)
    }

    /// The error of a connection for which no device of ours reaches one of the peer's.
    fn no_rail(&self, peer: &Hello) -> Result<Error> {
        let list = |names: Vec<&str>| if names.is_empty() { "none".to_owned() } else { names.join(" ") };
        let mine = self.environment.rails()?;
        let detail = format!(
            "no rail: our devices are {}, the peer offers {}",
            list(mine.iter().map(|device| device.name.as_str()).collect()),
            list(peer.devices.iter().map(|device| device.name.as_str()).collect()),
        );
        let hint = "a peer offers more than loopback once it listens beyond it or names CROSSRAIL_NET_DEVICES";
        Ok(Error::new(ErrorKind::Unsupported, "connect", detail).with_peer(&peer.name).with_hint(hint))
    }

    fn explained(&self, peer: &Hello, rails: &[RailPair], reasons: &[Option<String>], no_shm: &str) -> Vec<Candidate> {
        let shm = explain::candidate("shm", "shm", None, &Cost::SHM_CMA).out(no_shm);
        let no_gpu = Some("it needs shm's Unix socket".to_owned());
        let mut candidates = vec![shm, self.cuda_ipc_candidate(peer, no_gpu)];
        for way in self.tcp_candidates(peer) {
            let at = rails.iter().position(|rail| way.device.as_ref() == Some(&rail.mine.name));
            candidates.push(match at.map(|at| &reasons[at]) {
                Some(None) => way.chosen(if at == Some(0) { &["small", "large"] } else { &["large"] }),
                Some(Some(reason)) => way.out(reason),
                None if way.reason.is_some() => way,
                None => way.slower(),
            });
        }
        candidates
    }

    fn tcp_explain(&self, peer: &Hello, candidates: Vec<Candidate>) -> Explain {
        let chosen: Vec<_> =
            candidates.iter().filter(|way| !way.chosen_for.is_empty()).map(|way| way.lane.clone()).collect();
        let small = chosen.first().cloned().unwrap_or_default();
        let large = explain::from_size(EAGER_LIMIT, &chosen.join(" "));
        Explain::new(&peer.name, small, large, &self.environment.settings().tls.to_string(), candidates)
    }

    /// What an accepted endpoint uses is what the connecting end chose: the rails whose lanes have arrived.
    pub(crate) fn accepted_over(&self, endpoint: EndpointId, peer: &Hello) {
        let mut core = self.progress.core();
        let ids = core.peers().get(endpoint).map(|peer| peer.lanes().to_vec()).unwrap_or_default();
        let arrived: Vec<String> = ids.into_iter().map(|id| core.transfers().lanes().name(id).to_string()).collect();
        drop(core);
        // A lane is named after its rail: `tcp/eth1`, `tcp/eth1#2`, `tcp/eth1:messages`.
        let uses = |way: &Candidate| {
            let of = |name: &String| {
                name.strip_prefix(&way.lane)
                    .is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '.'))
            };
            arrived.iter().any(of)
        };
        let reason =
            if peer.boot_id == self.environment.machine().boot_id { "the peer chose tcp" } else { "another machine" };
        let shm = explain::candidate("shm", "shm", None, &Cost::SHM_CMA).out(reason);
        let mut candidates = vec![shm, self.cuda_ipc_candidate(peer, Some("it needs shm's Unix socket".to_owned()))];
        for way in self.tcp_candidates(peer) {
            let first = candidates.iter().all(|known| known.chosen_for.is_empty());
            candidates.push(match (uses(&way), &way.reason) {
                (true, _) => {
                    Candidate { reason: None, ..way }.chosen(if first { &["small", "large"] } else { &["large"] })
                }
                (false, Some(_)) => way,
                (false, None) => way.out("the peer did not use it"),
            });
        }
        let explain = self.tcp_explain(peer, candidates);
        self.announce(&explain);
        self.set_explain(endpoint, explain);
    }

    /// Registers a TCP session and its endpoint. Without `candidates`: [`Sessions::accepted_over`] tells them later.
    pub(crate) fn open_link(
        self: &Arc<Self>,
        control: TcpStream,
        ticket: handshake::Ticket,
        initiator: bool,
        peer: Hello,
        rails: Vec<RailPair>,
        candidates: Vec<Candidate>,
    ) -> Result<EndpointId> {
        let endpoint =
            self.new_peer(&peer.name, self.tcp_explain(&peer, candidates), Reach::Staged(NO_SHM.to_owned()))?;
        let failed = |call: &str, error: &std::io::Error| Error::io("connect", call, error).with_peer(&peer.name);
        control.set_nonblocking(true).map_err(|error| failed("fcntl", &error))?;
        let fd = control.as_raw_fd();
        let link = Link {
            endpoint,
            ticket,
            initiator,
            control,
            peer,
            rails,
            lanes: 0,
            expected: None,
            accepted: false,
            heard: Vec::new(),
        };
        self.control.sessions.lock().insert(ticket.session, link);
        self.progress.watch(fd, About::Session(endpoint))?;
        self.progress.wake_driver();
        self.watch_links();
        Ok(endpoint)
    }

    /// Makes a connected stream a lane of its endpoint.
    pub(crate) fn add_tcp_lane(
        self: &Arc<Self>,
        endpoint: EndpointId,
        name: LaneName,
        stream: TcpStream,
        device: &str,
        interface: Option<String>,
    ) -> Result<()> {
        let id = self.new_lane_id();
        let label = match (name.purpose, self.environment.settings().channels) {
            (LanePurpose::Message, _) => format!("tcp/{device}:messages"),
            (LanePurpose::Bulk, 1) => format!("tcp/{device}"),
            (LanePurpose::Bulk, _) => format!("tcp/{device}#{}", name.channel),
        };
        let lane = TcpLane::new(stream, id, label.clone(), &crossrail_tcp::Options::default())?;
        let caps = lane.caps().clone();
        let record = LaneRecord::new(&label, "tcp", caps.clone(), EAGER_LIMIT);
        let record = record.on_rail((name.rail, name.channel), interface);
        if name.purpose == LanePurpose::Message {
            return self.add_polled_lane(endpoint, Box::new(lane), record, false);
        }
        let spec = proto::LaneSpec {
            id,
            reliable: caps.reliable,
            messages: true,
            bulk: true,
            max_payload: u32::try_from(caps.max_payload).unwrap_or(u32::MAX),
            eager_max: EAGER_LIMIT as u32,
            whole_max: 0,
            counts: false,
            cost_ns: 1000 + u64::from(name.rail) * 100 + u64::from(name.channel),
        };
        let bulk = Arc::new(BulkLane::new(endpoint, Box::new(lane)));
        let mut core = self.progress.core();
        if !core.transfers().add_bulk_lane(&bulk, record, spec) {
            return Err(gone("connect"));
        }
        self.progress.after(core);
        self.progress.add_connection(bulk)
    }
}

fn no_gpus(why: &str) -> Error {
    Error::new(ErrorKind::Unsupported, "connect", format!("require=cuda_ipc: {why}"))
        .with_hint("`crossrail info` says what is missing; without require, GPU memory goes through host memory")
}
