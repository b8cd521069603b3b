//! A worker to meet, and a peer made by hand that speaks the wire format byte by byte.

use std::collections::{HashMap, HashSet};
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crossrail_handshake::wire::{
    Challenge, HELLO_HEAD_LEN, HelloHead, Kind, PROOF_LEN, Proof, REJECT_LEN, REPLY_LEN, Reject, Reply, WORKER,
};
use crossrail_handshake::{
    Arrival, Hello, Identity, Limits, ListenConfig, Listener, Parameters, Rail, Secret, Session, Target,
};
use crossrail_tcp::Binding;
use crossrail_types::{Checksum, Error};
use hmac::{Hmac, Mac};
use sha2::Sha256;

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Lets one test run at a time, and fails it if it leaves descriptors open. Take it first, so that it goes last.
pub(crate) struct Descriptors {
    before: HashSet<(u32, String)>,
    _one: MutexGuard<'static, ()>,
}

fn descriptors() -> HashSet<(u32, String)> {
    let open = std::fs::read_dir("/proc/self/fd").unwrap();
    open.filter_map(|entry| {
        let entry = entry.unwrap();
        let number = entry.file_name().to_str()?.parse().ok()?;
        // The directory being read shows up too, and is gone by now.
        Some((number, std::fs::read_link(entry.path()).ok()?.to_str()?.to_owned()))
    })
    .filter(|(_, what)| !what.ends_with("/fd"))
    .collect()
}

impl Descriptors {
    pub(crate) fn watch() -> Descriptors {
        let one = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        Descriptors { before: descriptors(), _one: one }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let after = descriptors();
        let left: Vec<_> = after.difference(&self.before).collect();
        assert!(left.is_empty(), "left open: {left:?}");
    }
}

pub(crate) fn in_secs(secs: f64) -> Instant {
    Instant::now() + Duration::from_secs_f64(secs)
}

pub(crate) fn binding(address: impl Into<IpAddr>) -> Binding {
    Binding { device: None, address: address.into() }
}

pub(crate) fn loopback() -> Binding {
    binding(Ipv4Addr::LOCALHOST)
}

pub(crate) const PARAMETERS: Parameters =
    Parameters { chunk: 2 << 20, window: 16, channels: 1, channels_max: 1, checksum: Checksum::Off, node: None };

pub(crate) fn secret(text: &str) -> Secret {
    Secret::Shared(text.as_bytes().to_vec())
}

pub(crate) fn identity(name: &str, secret: Secret) -> Identity {
    Identity::new(Some(name.to_owned()), secret, vec!["tcp".to_owned()], PARAMETERS).unwrap()
}

/// A Unix socket, control on 127.0.0.1, two rails; patient for 2 s.
pub(crate) fn config() -> ListenConfig {
    let rail = |name: &str, last| Rail {
        name: name.to_owned(),
        binding: binding(Ipv4Addr::new(127, 0, 0, last)),
        speed_mbps: Some(2000),
    };
    ListenConfig {
        unix: true,
        control: vec![loopback()],
        rails: vec![rail("127.0.0.2", 2), rail("127.0.0.3", 3)],
        limits: Limits { timeout: Duration::from_secs(2), ..Limits::default() },
        ..ListenConfig::default()
    }
}

/// A listening worker that keeps its sessions' keys as the engine does.
pub(crate) struct Worker {
    pub(crate) listener: Listener,
    arrivals: Receiver<Arrival>,
}

impl Worker {
    pub(crate) fn start(config: ListenConfig, me: Identity) -> Result<Worker, Error> {
        Worker::start_with(config, me, |_| {})
    }

    /// `before`: runs before each arrival is taken in.
    pub(crate) fn start_with(
        config: ListenConfig,
        me: Identity,
        before: impl Fn(&Arrival) + Send + Sync + 'static,
    ) -> Result<Worker, Error> {
        let keys = Arc::new(Mutex::new(HashMap::new()));
        let (send, arrivals): (Sender<Arrival>, _) = channel();
        let send = Mutex::new(send);
        let known = Arc::clone(&keys);
        let deliver = move |arrival: Arrival| {
            before(&arrival);
            if let Arrival::Session(session) = &arrival {
                keys.lock().unwrap().insert(session.ticket.session, session.ticket.key);
            }
            // The test may be over.
            let _ = send.lock().unwrap().send(arrival);
        };
        let lookup = move |session: &[u8; 16]| known.lock().unwrap().get(session).copied();
        let listener = Listener::start(config, me, Box::new(lookup), Box::new(deliver))?;
        Ok(Worker { listener, arrivals })
    }

    pub(crate) fn control(&self) -> SocketAddr {
        self.listener.address().control[0]
    }

    pub(crate) fn by_port(&self) -> Target {
        Target::Control(vec![self.control()])
    }

    pub(crate) fn by_address(&self) -> Target {
        Target::Worker(self.listener.address())
    }

    pub(crate) fn arrival(&self) -> Arrival {
        self.arrivals.recv_timeout(Duration::from_secs(30)).expect("nobody came")
    }

    pub(crate) fn session(&self) -> Session {
        match self.arrival() {
            Arrival::Session(session) => session,
            other => panic!("not a session: {other:?}"),
        }
    }

    pub(crate) fn rejected(&self) -> Error {
        match self.arrival() {
            Arrival::Rejected { error, .. } => error,
            other => panic!("not rejected: {other:?}"),
        }
    }

    pub(crate) fn nobody_else(&self) {
        self.nobody_for(Duration::ZERO);
    }

    pub(crate) fn nobody_for(&self, time: Duration) {
        if let Ok(arrival) = self.arrivals.recv_timeout(time) {
            panic!("somebody else came: {arrival:?}");
        }
    }
}

pub(crate) fn tag(key: &[u8], label: &str, parts: &[&[u8]]) -> [u8; 32] {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).unwrap();
    mac.update(label.as_bytes());
    mac.update(&[0]);
    for part in parts {
        mac.update(&(part.len() as u64).to_le_bytes());
        mac.update(part);
    }
    mac.finalize().into_bytes().into()
}

/// A connector made by hand. It knows no secret and no token.
pub(crate) struct Raw {
    pub(crate) stream: TcpStream,
    challenge: Vec<u8>,
    master: [u8; 32],
}

impl Raw {
    /// Connects and reads the challenge.
    pub(crate) fn connect(to: SocketAddr) -> Raw {
        let mut stream = TcpStream::connect(to).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let mut challenge = vec![0; WORKER.length(Kind::Challenge)];
        stream.read_exact(&mut challenge).unwrap();
        Raw { stream, challenge, master: [0; 32] }
    }

    pub(crate) fn challenge(&self) -> Challenge {
        Challenge::decode(&WORKER, &self.challenge).unwrap()
    }

    /// The reply that proves knowledge of `secret` and `token` as far as `flags` say.
    pub(crate) fn reply(&mut self, version: u16, flags: u8, secret: &[u8]) -> Vec<u8> {
        let known = tag(secret, "crossrail known", &[&[flags], &[]]);
        let mut reply = Reply { version, flags, nonce: [7; 32], mac: [0; 32] };
        reply.mac = tag(&known, "crossrail connector", &[&self.challenge, &reply.encode(&WORKER)[..48]]);
        let bytes = reply.encode(&WORKER).to_vec();
        self.master = tag(&known, "crossrail session", &[&self.challenge, &bytes]);
        bytes
    }

    /// Goes through the proofs, as a peer without secret and token.
    pub(crate) fn prove(&mut self) {
        let reply = self.reply(WORKER.version, 0, &[]);
        self.write(&reply);
        let mut proof = [0; PROOF_LEN];
        self.stream.read_exact(&mut proof).unwrap();
        assert_eq!(Proof::decode(&WORKER, &proof).unwrap().mac, tag(&self.master, "crossrail acceptor", &[]));
    }

    /// A hello's head and body with the right mac.
    pub(crate) fn hello(&self, body: &[u8]) -> Vec<u8> {
        let mac = tag(&self.master, "crossrail connector hello", &[body]);
        let mut bytes = HelloHead { length: body.len() as u32, mac }.encode().to_vec();
        bytes.extend_from_slice(body);
        bytes
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// What the worker says before it closes.
    pub(crate) fn reject(&mut self) -> Reject {
        let mut bytes = [0; REJECT_LEN];
        self.stream.read_exact(&mut bytes).unwrap();
        assert_eq!(WORKER.decode_prelude(&bytes), Ok(Kind::Reject));
        Reject::decode(&WORKER, &bytes).unwrap()
    }

    /// Waits until the worker has closed, whatever it says before.
    pub(crate) fn closed(&mut self) {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => {}
            Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => {}
            Err(e) => panic!("still open: {e}"),
        }
    }
}

/// Serves one control connection as a worker without a secret: `challenge` as that worker's, `hello` as its hello.
pub(crate) fn accept_by_hand(mut stream: TcpStream, challenge: &Challenge, hello: &Hello) {
    let challenge = challenge.encode(&WORKER);
    stream.write_all(&challenge).unwrap();
    let mut reply = [0; REPLY_LEN];
    stream.read_exact(&mut reply).unwrap();
    let known = tag(&[], "crossrail known", &[&[0], &[]]);
    let master = tag(&known, "crossrail session", &[&challenge, &reply]);
    stream.write_all(&Proof { mac: tag(&master, "crossrail acceptor", &[]) }.encode(&WORKER)).unwrap();
    let mut head = [0; HELLO_HEAD_LEN];
    stream.read_exact(&mut head).unwrap();
    let mut body = vec![0; HelloHead::decode(&head).unwrap().length as usize];
    stream.read_exact(&mut body).unwrap();
    let body = hello.encode().unwrap();
    let mac = tag(&master, "crossrail acceptor hello", &[&body]);
    let mut answer = HelloHead { length: body.len() as u32, mac }.encode().to_vec();
    answer.extend_from_slice(&body);
    stream.write_all(&answer).unwrap();
    // Until the other end has closed.
    let _ = stream.read_to_end(&mut Vec::new());
}

/// Reports, bypassing the harness's capture, that a test can't run here; with `CI=true` it fails.
pub(crate) fn skip(why: &str) {
    assert!(std::env::var_os("CI").is_none_or(|ci| ci != "true"), "CI=true, but the test can't run: {why}");
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    let _ = std::io::stderr().write_all(format!("skipped: {test}: {why}\n").as_bytes());
}
