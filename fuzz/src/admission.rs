use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{LazyLock, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crossrail_handshake::store::{Greeting, turn_away};
use crossrail_handshake::wire::REPLY_LEN;
use crossrail_handshake::{
    Address, Arrival, Identity, Limits, ListenConfig, Listener, Parameters, Secret, Target, connect, store,
};
use crossrail_types::{Checksum, Result};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::input::Input;

/// Longer than any handshake here takes, also on a loaded machine.
const LIMIT: Duration = Duration::from_secs(30);
/// Silence of both ends, after bytes were held back, that counts as a deadlock.
const SILENCE_MS: u16 = 5;
/// From the connecting to the accepting end, and back.
const TO_ACCEPTOR: usize = 0;
const TO_CONNECTOR: usize = 1;

/// A handshake of two ends that share a secret (workers, or a store and its client) with a man in the middle who
/// changes, drops, duplicates, moves or reflects bytes or cuts the connection. Checks that an admitted end has received
/// exactly what the other sent, and that an untampered handshake succeeds.
pub fn admission(input: &[u8]) {
    let mut input = Input::new(input);
    let stores = input.byte() & 1 == 1;
    let mut faults = Vec::new();
    while input.left() >= 4 && faults.len() < 8 {
        faults.push(Fault::read(&mut input));
    }
    match stores {
        true => stores_handshake(&faults),
        false => workers_handshake(&faults),
    }
}

#[derive(Clone, Copy, Debug)]
struct Fault {
    way: usize,
    /// The byte of the stream at which it happens.
    at: usize,
    what: What,
}

#[derive(Clone, Copy, Debug)]
enum What {
    Flip(u8),
    Drop(usize),
    Double(usize),
    /// Replaced by this many bytes of the other direction.
    Reflect(usize),
    /// This many bytes are delivered after the byte that follows them.
    Move(usize),
    Cut,
}

impl Fault {
    fn read(input: &mut Input<'_>) -> Fault {
        let [how, low, high, value] = input.array();
        let at = usize::from(u16::from_le_bytes([low, high])) % 640;
        let count = usize::from(value) % 64 + 1;
        let what = match how >> 1 & 7 {
            0..=2 => What::Flip(value.max(1)),
            3 => What::Drop(count),
            4 => What::Double(count),
            5 => What::Reflect(count),
            6 => What::Move(count),
            _ => What::Cut,
        };
        Fault { way: usize::from(how & 1), at, what }
    }
}

/// Bytes of one direction, as sent and as delivered.
#[derive(Default)]
struct Stream {
    sent: Vec<u8>,
    delivered: Vec<u8>,
    /// Bytes that are dropped yet.
    dropping: usize,
    /// Bytes that are held back, and how many more join them.
    held: (Vec<u8>, usize),
    cut: bool,
    touched: bool,
}

impl Stream {
    /// What to deliver of the next bytes sent.
    fn pass(&mut self, way: usize, bytes: &[u8], faults: &[Fault], other: &[u8]) -> Vec<u8> {
        let before = self.delivered.len();
        for byte in bytes {
            let at = self.sent.len();
            self.sent.push(*byte);
            let mut byte = *byte;
            for fault in faults.iter().filter(|fault| fault.way == way && fault.at == at) {
                self.touched = true;
                match fault.what {
                    What::Flip(mask) => byte ^= mask,
                    What::Drop(count) => self.dropping = count,
                    What::Double(count) => {
                        let from = self.delivered.len().saturating_sub(count);
                        self.delivered.extend_from_within(from..);
                    }
                    What::Reflect(count) => {
                        let from = other.len().saturating_sub(count);
                        self.delivered.extend_from_slice(&other[from..]);
                        self.dropping = count;
                    }
                    What::Move(count) => self.held.1 = count,
                    What::Cut => self.cut = true,
                }
            }
            if self.dropping > 0 {
                self.dropping -= 1;
            } else if self.held.1 > 0 {
                self.held.0.push(byte);
                self.held.1 -= 1;
            } else {
                self.delivered.push(byte);
                self.delivered.append(&mut self.held.0);
            }
            if self.cut {
                break;
            }
        }
        self.delivered[before..].to_vec()
    }

    /// Whether the first `len` bytes were sent, and delivered as they were.
    fn is_whole(&self, len: usize) -> bool {
        self.sent.len() >= len && self.delivered.get(..len) == self.sent.get(..len)
    }
}

fn secret() -> Secret {
    Secret::Shared(b"both ends know these bytes".to_vec())
}

/// A worker that listens, and what comes to it. One handshake at a time.
struct Workers {
    me: Identity,
    listener: Listener,
    arrivals: Mutex<Receiver<Arrival>>,
    /// Bytes of a handshake that nobody touched, each way.
    lengths: [usize; 2],
}

impl Workers {
    fn new() -> Result<Workers> {
        let parameters = Parameters {
            chunk: 2 << 20,
            window: 16,
            channels: 1,
            channels_max: 1,
            checksum: Checksum::Off,
            node: None,
        };
        let identity =
            |name: &str| Identity::new(Some(name.to_owned()), secret(), vec!["tcp".to_owned()], parameters.clone());
        let (send, arrivals) = channel();
        let send = Mutex::new(send);
        let deliver = move |arrival| {
            if let Ok(send) = send.lock() {
                // The run may be over.
                let _ = send.send(arrival);
            }
        };
        let limits = Limits { timeout: LIMIT, ..Limits::default() };
        let config = ListenConfig { unix: true, limits, require_token: true, ..ListenConfig::default() };
        let listener = Listener::start(config, identity("acceptor")?, Box::new(|_| None), Box::new(deliver))?;
        let mut workers =
            Workers { me: identity("connector")?, listener, arrivals: Mutex::new(arrivals), lengths: [0; 2] };
        let (streams, connected, arrival) = workers.meet(&[]);
        assert!(connected.is_ok() && matches!(arrival, Some(Arrival::Session(_))), "{connected:?} {arrival:?}");
        workers.lengths = streams.map(|stream| stream.sent.len());
        Ok(workers)
    }

    /// One handshake: what went either way, the session's key at the connecting end, and who came.
    fn meet(&self, faults: &[Fault]) -> ([Stream; 2], Result<[u8; 32]>, Option<Arrival>) {
        static NAMES: AtomicU64 = AtomicU64::new(0);
        let arrivals = self.arrivals.lock().unwrap_or_else(|_| panic!("an earlier handshake has failed"));
        let address = self.listener.address();
        let name = format!("crossrail-fuzz-{}-{}", std::process::id(), NAMES.fetch_add(1, Ordering::Relaxed));
        let between = SocketAddr::from_abstract_name(&name).and_then(|name| UnixListener::bind_addr(&name));
        let between = between.unwrap_or_else(|error| panic!("a Unix socket: {error}"));
        let target = Target::Worker(Address { unix: Some(name), control: Vec::new(), ..address.clone() });
        thread::scope(|scope| {
            let connector = scope.spawn(|| {
                connect(&target, &self.me, None, true, Instant::now() + LIMIT).map(|session| session.ticket.key)
            });
            let streams = match (between.accept(), dial(address.unix.as_deref().unwrap_or_default())) {
                (Ok((near, _)), Ok(far)) => shuttle([near, far], faults),
                (near, far) => panic!("no connection: {near:?} {far:?}"),
            };
            drop(between); // nobody takes a second attempt
            let connected = connector.join().unwrap_or_else(|_| panic!("the connecting end panicked"));
            (streams, connected, arrivals.recv_timeout(LIMIT).ok())
        })
    }
}

fn dial(name: &str) -> std::io::Result<UnixStream> {
    UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?)
}

/// Carries bytes between two connections until one ends, or both wait for bytes that were held back.
fn shuttle(mut ends: [UnixStream; 2], faults: &[Fault]) -> [Stream; 2] {
    let mut streams = [Stream::default(), Stream::default()];
    loop {
        let touched = streams.iter().any(|stream| stream.touched);
        let mut fds: Vec<_> = ends.iter().map(|end| PollFd::new(end.as_fd(), PollFlags::POLLIN)).collect();
        let timeout = if touched { SILENCE_MS } else { LIMIT.as_millis() as u16 };
        if !poll(&mut fds, PollTimeout::from(timeout)).is_ok_and(|ready| ready > 0) {
            return streams;
        }
        let ready: Vec<bool> = fds.iter().map(|fd| fd.any().unwrap_or(false)).collect();
        for way in [TO_ACCEPTOR, TO_CONNECTOR].into_iter().filter(|way| ready[*way]) {
            let mut bytes = [0; 4096];
            let Ok(len @ 1..) = ends[way].read(&mut bytes) else { return streams };
            let other = std::mem::take(&mut streams[1 - way].sent);
            let delivered = streams[way].pass(way, &bytes[..len], faults, &other);
            streams[1 - way].sent = other;
            if ends[1 - way].write_all(&delivered).is_err() || streams[way].cut {
                return streams;
            }
        }
    }
}

fn workers_handshake(faults: &[Fault]) {
    static WORKERS: LazyLock<Workers> =
        LazyLock::new(|| Workers::new().unwrap_or_else(|error| panic!("no handshake at all: {error}")));
    let (streams, connected, arrival) = WORKERS.meet(faults);
    let whole = [TO_ACCEPTOR, TO_CONNECTOR].map(|way| streams[way].is_whole(WORKERS.lengths[way]));
    if connected.is_ok() {
        assert_eq!(whole, [true; 2], "the connecting end is deceived: {faults:?}");
    }
    match arrival {
        Some(Arrival::Session(session)) => {
            assert!(whole[TO_ACCEPTOR], "the accepting end is deceived: {faults:?}");
            assert!(connected.is_err() || connected.is_ok_and(|key| key == session.ticket.key));
        }
        Some(Arrival::Rejected { error, .. }) => {
            assert!(!error.detail.is_empty() && streams.iter().any(|stream| stream.touched), "{error}");
        }
        other => panic!("neither admitted nor rejected: {other:?}"),
    }
    if streams.iter().all(|stream| !stream.touched) {
        assert_eq!(whole, [true; 2], "a handshake that nobody touched stops");
    }
}

/// The store answers from its own state, so the one in between asks it directly.
fn stores_handshake(faults: &[Fault]) {
    let (mut near, far) = UnixStream::pair().unwrap_or_else(|error| panic!("a Unix socket: {error}"));
    let secret = secret();
    let mut streams = [Stream::default(), Stream::default()];
    let mut proven = false;
    let connected = thread::scope(|scope| {
        let client = scope.spawn(|| {
            let outcome = store::connect(far.as_fd(), &secret, "fuzz", "the store", Instant::now() + LIMIT);
            drop(far);
            outcome
        });
        let greeting = Greeting::new(&secret).unwrap_or_else(|error| panic!("no greeting: {error}"));
        let challenge = streams[TO_CONNECTOR].pass(TO_CONNECTOR, greeting.challenge(), faults, &[]);
        let mut open = near.write_all(&challenge).is_ok() && !streams[TO_CONNECTOR].cut;
        while open && near.set_read_timeout(Some(silence(&streams))).is_ok() {
            let mut bytes = [0; 4096];
            let Ok(len @ 1..) = near.read(&mut bytes) else { break };
            let [to_store, to_client] = &mut streams;
            to_store.pass(TO_ACCEPTOR, &bytes[..len], faults, &to_client.sent);
            let answer = match greeting.check(&secret, &to_store.delivered) {
                Ok(Some(answer)) => {
                    proven = true;
                    assert!(
                        answer.used == REPLY_LEN && to_store.is_whole(REPLY_LEN),
                        "the store is deceived: {faults:?}"
                    );
                    answer.proof.to_vec()
                }
                Ok(None) => continue,
                Err(reject) => turn_away(&reject).to_vec(),
            };
            let delivered = to_client.pass(TO_CONNECTOR, &answer, faults, &to_store.sent);
            open = near.write_all(&delivered).is_ok() && !proven && !to_client.cut && !to_store.cut;
        }
        drop(near);
        client.join().unwrap_or_else(|_| panic!("the client panicked"))
    });
    match connected {
        Ok(()) => {
            let sent = streams[TO_CONNECTOR].sent.len();
            assert!(proven && streams[TO_CONNECTOR].is_whole(sent), "the client is deceived: {faults:?}");
        }
        Err(error) => assert!(!error.detail.is_empty() && streams.iter().any(|stream| stream.touched), "{error}"),
    }
}

fn silence(streams: &[Stream; 2]) -> Duration {
    match streams.iter().any(|stream| stream.touched) {
        true => Duration::from_millis(SILENCE_MS.into()),
        false => LIMIT,
    }
}
