//! Pairs of lanes in one process, a sink that keeps what arrives, and the test binary as a second process.
#![allow(dead_code)]

use std::collections::VecDeque;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crossrail_shm::{Arena, Options, ShmLane, Side, attach};
use crossrail_transport::{Lane, LaneError, Payload, Place, Post, Sink, Tx};
use crossrail_types::{Head, LaneId};

/// The two ends of a lane, each with an arena of its own.
pub(crate) fn pair(options: &Options) -> (ShmLane, ShmLane) {
    pair_in(options, Arena::new(), Arena::new())
}

/// The same with given arenas.
pub(crate) fn pair_in(options: &Options, of_a: Arc<Arena>, of_b: Arc<Arena>) -> (ShmLane, ShmLane) {
    let (a, b) = UnixStream::pair().expect("socketpair");
    std::thread::scope(|scope| {
        let b = scope.spawn(move || join(b, Side::Acceptor, of_b, options));
        (join(a, Side::Connector, of_a, options), b.join().expect("attach does not panic"))
    })
}

pub(crate) fn join(stream: UnixStream, side: Side, arena: Arc<Arena>, options: &Options) -> ShmLane {
    let id = LaneId(side as u32);
    attach(stream, side, id, arena, options.clone(), soon()).expect("attach")
}

pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

/// Keeps everything that arrives; sends what is queued.
#[derive(Default)]
pub(crate) struct Keeper {
    pub(crate) outbox: VecDeque<(u8, Vec<u8>)>,
    pub(crate) arrived: VecDeque<(u8, Vec<u8>)>,
    under_way: Vec<u8>,
}

impl Sink for Keeper {
    fn next(&mut self, _: LaneId) -> Option<Tx> {
        let (kind, payload) = self.outbox.front()?;
        let payload = Payload { ptr: payload.as_ptr(), len: payload.len(), ..Payload::EMPTY };
        Some(Tx { head: Head::new(*kind, payload.len as u32), payload, token: 1 })
    }

    fn sent(&mut self, _: LaneId, _: u64) {
        self.under_way = self.outbox.pop_front().map(|(_, payload)| payload).unwrap_or_default();
    }

    fn place(&mut self, _: LaneId, head: &Head) -> Place {
        self.arrived.push_back((head.kind(), vec![0; head.payload_len() as usize]));
        let last = self.arrived.back_mut().map(|(_, payload)| payload);
        let dst = last.map_or(std::ptr::null_mut(), |payload| payload.as_mut_ptr());
        Place::Into { dst, len: head.payload_len() as usize, grant: None, token: 2 }
    }

    fn placed(&mut self, _: LaneId, token: u64) {
        assert_eq!(token, 2);
    }
}

/// Posts a frame, polling while there is no room.
pub(crate) fn post(lane: &mut ShmLane, sink: &mut Keeper, kind: u8, payload: &[u8]) -> Result<(), LaneError> {
    let head = Head::new(kind, payload.len() as u32);
    let tx = Tx { head, payload: Payload { ptr: payload.as_ptr(), len: payload.len(), ..Payload::EMPTY }, token: 0 };
    while lane.post(&tx)? == Post::Full {
        lane.poll(sink, 1 << 20, true)?;
    }
    Ok(())
}

/// The next frame.
pub(crate) fn hear(lane: &mut ShmLane, sink: &mut Keeper) -> Result<(u8, Vec<u8>), LaneError> {
    let limit = soon();
    loop {
        if let Some(frame) = sink.arrived.pop_front() {
            return Ok(frame);
        }
        if !lane.poll(sink, 1 << 20, true)? {
            std::thread::yield_now();
        }
        assert!(Instant::now() < limit, "nothing came");
    }
}

/// Small deterministic random numbers.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit as u64) as usize
    }
}

const NAME: &str = "CROSSRAIL_SHM_TEST_SOCKET";

/// A listener that children find through the environment.
pub(crate) fn listener() -> (UnixListener, String) {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let name = format!("crossrail-shm-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let address = SocketAddr::from_abstract_name(&name).expect("a socket name");
    (UnixListener::bind_addr(&address).expect("bind"), name)
}

/// Runs the ignored test `role` of this test binary in another process, under `wrapper`.
pub(crate) fn child(wrapper: &[&str], role: &str, socket: &str) -> std::io::Result<Child> {
    let own = std::env::current_exe()?;
    let own = own.to_string_lossy();
    let line: Vec<&str> = wrapper.iter().copied().chain([&*own, role, "--exact", "--ignored", "--nocapture"]).collect();
    Command::new(line[0]).args(&line[1..]).env(NAME, socket).spawn()
}

/// In such a child: the socket's name. `None`: somebody runs the ignored tests by hand.
pub(crate) fn socket_of_parent() -> Option<SocketAddr> {
    let name = std::env::var(NAME).ok()?;
    Some(SocketAddr::from_abstract_name(name).expect("a socket name"))
}
