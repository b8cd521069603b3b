//! Pairs of lanes in one process, a sink that keeps what arrives, and the test binary as a second process.
#![allow(dead_code, unsafe_code)]

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crossrail_shm::{Arena, Options, ShmLane, Side, attach};
use crossrail_transport::{Copy, DirectKind, Domain, Job, Lane, LaneError, Payload, Place, Post, Sink, Step, Tx};
use crossrail_types::{Head, LaneId};
use nix::poll::{PollFd, PollFlags, poll};

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
    let stdout = if role == "role_accepts" { Stdio::piped() } else { Stdio::inherit() };
    Command::new(line[0]).args(&line[1..]).env(NAME, socket).stdout(stdout).spawn()
}

/// In such a child: the socket's name. `None`: somebody runs the ignored tests by hand.
pub(crate) fn socket_of_parent() -> Option<SocketAddr> {
    let name = std::env::var(NAME).ok()?;
    Some(SocketAddr::from_abstract_name(name).expect("a socket name"))
}

/// Sleeps on the lane unless there is work; panics when nobody wakes it.
pub(crate) fn sleep(lane: &mut ShmLane) {
    if lane.arm() {
        let fd = lane.fd().expect("shm lanes have a descriptor");
        // SAFETY: the lane keeps it open past this call.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let ready = poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], 10_000u16).expect("poll");
        assert_ne!(ready, 0, "slept 10 s and was not woken");
        lane.ready(true, false);
    }
    lane.disarm();
}

const OFFER: u8 = 200;
const ANSWER: u8 = 201;
const RECEIVED: u8 = 202;

/// What is copied, where it is, and by whom.
pub(crate) struct Piece {
    pub(crate) ptr: *mut u8,
    pub(crate) len: usize,
    /// Both ends copy; otherwise the receiver does.
    pub(crate) both: bool,
}

/// Sends a piece by a direct copy; how it was done and how many bytes this end copied.
pub(crate) fn send_direct(lane: &mut ShmLane, sink: &mut Keeper, piece: &Piece) -> (DirectKind, usize) {
    let (mine, kind) = domain(lane).describe(piece.ptr, piece.len).expect("the peer can reach this memory");
    let slot = piece.both.then(|| domain(lane).open(piece.len).expect("a free cursor"));
    let mut offer = mine.to_vec();
    offer.extend(slot.unwrap_or(u32::MAX).to_le_bytes());
    post(lane, sink, OFFER, &offer).expect("post");
    let (what, answer) = hear(lane, sink).expect("an answer");
    assert_eq!(what, ANSWER);
    let mut moved = 0;
    if slot.is_some() {
        moved = copy_all(lane, piece, slot, &answer, Copy::Push);
    }
    assert_eq!(hear(lane, sink).expect("a receipt").0, RECEIVED);
    if let Some(slot) = slot {
        domain(lane).close(slot);
    }
    (kind, moved)
}

/// The other end of it.
pub(crate) fn receive_direct(lane: &mut ShmLane, sink: &mut Keeper, piece: &Piece) -> (DirectKind, usize) {
    let (what, offer) = hear(lane, sink).expect("an offer");
    assert_eq!(what, OFFER);
    let kind = domain(lane).reach(&offer[..24].try_into().expect("24"), piece.len).expect("reach");
    let slot = Some(u32::from_le_bytes(offer[24..].try_into().expect("4"))).filter(|slot| *slot != u32::MAX);
    let (mine, _) = domain(lane).describe(piece.ptr, piece.len).unwrap_or(([0; 24], DirectKind::Cma));
    post(lane, sink, ANSWER, &mine).expect("post");
    let moved = copy_all(lane, piece, slot, &offer[..24], Copy::Pull);
    post(lane, sink, RECEIVED, &[]).expect("post");
    (kind, moved)
}

pub(crate) fn domain(lane: &mut ShmLane) -> &mut dyn Domain {
    lane.domain().expect("shm lanes copy directly")
}

fn copy_all(lane: &mut ShmLane, piece: &Piece, slot: Option<u32>, remote: &[u8], copy: Copy) -> usize {
    let remote = remote.try_into().expect("24 bytes");
    let mut job = Job { slot, local: piece.ptr, remote, len: piece.len, copy, moved: 0, state: 0, helps: true };
    let limit = soon();
    loop {
        // SAFETY: `piece` describes valid memory that nobody else touches meanwhile.
        match unsafe { domain(lane).step(&mut job, 300_000) } {
            Step::Moved(_) | Step::Waiting => std::thread::yield_now(),
            Step::Done => return job.moved,
            Step::Failed(why) | Step::Unmapped(why) => panic!("{why}"),
        }
        assert!(Instant::now() < limit, "the copy does not end");
    }
}

/// Byte `i` of a test transfer.
pub(crate) fn byte(i: usize) -> u8 {
    (i.wrapping_mul(0x9e37_79b1) >> 13) as u8
}

/// What each end of two processes does to show that everything works between them: frames of many sizes there and
/// back, then mapped copies by both. The ends must call it with opposite `leads`.
pub(crate) fn exercise(lane: &mut ShmLane, arena: &Arc<Arena>, leads: bool) {
    let mut sink = Keeper::default();
    let mut random = Random(99);
    for _ in 0..2_000 {
        let len = random.below(70) * random.below(900);
        let payload: Vec<u8> = (0..len).map(byte).collect();
        if leads {
            post(lane, &mut sink, 7, &payload).expect("post");
        }
        let (kind, got) = hear(lane, &mut sink).expect("hear");
        assert!(kind == 7 && got == payload, "a frame of {len} bytes");
        if !leads {
            post(lane, &mut sink, 7, &got).expect("post");
        }
    }
    let len = (5 << 20) + 3;
    let segment = arena.alloc(len + 1).expect("alloc");
    // SAFETY: len + 1 bytes of the segment; nobody else knows it yet.
    let memory = unsafe { std::slice::from_raw_parts_mut(segment.ptr().add(1), len) };
    let piece = Piece { ptr: memory.as_mut_ptr(), len, both: true };
    if leads {
        memory.iter_mut().enumerate().for_each(|(i, to)| *to = byte(i));
        assert_eq!(send_direct(lane, &mut sink, &piece).0, DirectKind::Mapped);
    } else {
        assert_eq!(receive_direct(lane, &mut sink, &piece).0, DirectKind::Mapped);
        assert!(memory.iter().enumerate().all(|(i, got)| *got == byte(i)));
    }
}
