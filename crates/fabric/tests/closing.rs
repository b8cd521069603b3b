//! A slow provider that often has no room: what is registered for it, and lanes that are closed before it is done.
#![allow(unsafe_code)] // exposes and writes the test's own memory, which outlives the objects

mod stand_in;

use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossrail_fabric::{Offer, Wanted, attach, attach_lane};
use crossrail_transport::placing::{Event, Extent, Imm, Placing};
use crossrail_transport::{Lane, LaneError, Loan, Payload, Place, Post, Sink, Tx};
use crossrail_types::{Head, LaneId};
use stand_in::Hostile;

const LIMIT: Duration = Duration::from_secs(30);

/// The library serves one run at a time.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn offer(hostile: &Hostile, provider: &str) -> Offer {
    let wanted = Wanted { provider: Some(provider), ..Wanted::default() };
    hostile.fabric.offers(&wanted).expect("usable").swap_remove(0)
}

fn streams() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
    let here = TcpStream::connect(listener.local_addr().expect("bound")).expect("dial");
    (here, listener.accept().expect("accept").0)
}

/// Both ends of a connection, each joined.
fn both<T: Send>(join: impl Fn(TcpStream) -> T + Sync) -> (T, T) {
    let (here, there) = streams();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| join(there));
        (join(here), other.join().expect("no panic"))
    })
}

/// A write from memory that the provider needs registered is posted again and again until there is room.
#[test]
fn memory_is_registered_once_for_a_post_that_is_refused() {
    const LEN: usize = 20_000;
    const WRITES: u16 = 40;
    let _turn = turn();
    let Some(hostile) = Hostile::load() else { return };
    // FI_MR_LOCAL
    hostile.begin(3, "tx=64,msg=1048576,iov=4,mr_mode=4,move=255,eagain=200,burst=20,early=0,repeat=0");
    let offer = offer(&hostile, "hostile");
    let join = |stream| attach(stream, &offer, "the other", "fabric/test", Instant::now() + LIMIT).expect("joined");
    let (mut one, mut other) = both(join);
    let (mut heap, bytes) = (vec![0u8; LEN], vec![7u8; LEN]);
    let memory = Extent::host(heap.as_mut_ptr(), LEN);
    // SAFETY: the objects are dropped before the memory.
    let key = unsafe { other.expose(&memory, &Arc::<Loan>::default()) }.expect("a key");
    let counter = other.count(WRITES).expect("a counter");
    let (registered, refused) = (hostile.count("registered"), hostile.count("refused"));
    for piece in 0..WRITES {
        // Three pieces, each of which needs a registration of its own.
        let from =
            [0, 5000, 10_000].map(|at| Extent::host(bytes[at..].as_ptr(), if at == 10_000 { 10_000 } else { 5000 }));
        // SAFETY: as above.
        let posted = unsafe { one.write(&from, &key, 0, Imm { counter, piece }, piece.into()) };
        assert_eq!(posted, Ok(Post::Held));
    }
    let (mut ended, start) = (0, Instant::now());
    while ended < WRITES {
        one.poll(&mut |event| ended += u16::from(matches!(event, Event::Ended { result: Ok(()), .. }))).expect("up");
        other.poll(&mut |_| {}).expect("up");
        assert!(start.elapsed() < LIMIT, "{ended} of {WRITES}");
    }
    let refused = hostile.count("refused") - refused;
    assert!(refused > 4 * u64::from(WRITES), "{refused}: the library had room");
    assert_eq!(hostile.count("registered") - registered, 3 * u64::from(WRITES), "{refused} were refused");
    drop((one, other, offer));
    assert!(heap == bytes);
    assert_eq!(hostile.violations(true), "");
}

/// Counts what is placed.
#[derive(Default)]
struct Taker {
    memory: Vec<u8>,
    placed: usize,
}

impl Sink for Taker {
    fn next(&mut self, _: LaneId) -> Option<Tx> {
        None
    }

    fn sent(&mut self, _: LaneId, _: u64) {}

    fn place(&mut self, _: LaneId, head: &Head) -> Place {
        let len = head.payload_len() as usize;
        self.memory = vec![0; len.max(1)];
        Place::Into { dst: self.memory.as_mut_ptr(), len, grant: None, token: 0 }
    }

    fn placed(&mut self, _: LaneId, _: u64) {
        assert!(self.memory.iter().all(|byte| *byte == 9), "a wrong byte");
        self.placed += 1;
    }
}

/// The provider ends with its endpoint what it has not completed, and takes longer than a moment.
#[test]
fn a_lane_that_is_closed_hands_over_what_it_was_given() {
    const FRAMES: usize = 50;
    let _turn = turn();
    let Some(hostile) = Hostile::load() else { return };
    hostile.begin(4, "tx=256,msg=1048576,move=16,cuts=2,early=0,linger=0,eagain=0,repeat=0,withhold=0");
    let offer = offer(&hostile, "efa");
    let join = |stream| {
        let ends = ("the other", "fabric/test");
        attach_lane(stream, &offer, LaneId(1), ends, Instant::now() + LIMIT).expect("a lane")
    };
    let (mut one, mut other) = both(join);
    let bytes = vec![9; 4000];
    let took = std::thread::scope(|scope| {
        let receiver = scope.spawn(|| {
            let (mut sink, start) = (Taker::default(), Instant::now());
            loop {
                match other.poll(&mut sink, 1 << 20, true) {
                    Ok(_) => assert!(start.elapsed() < LIMIT, "{} of {FRAMES}", sink.placed),
                    Err(error) => return (sink.placed, error),
                }
                // It is busy with other things.
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        for _ in 0..FRAMES {
            let payload = Payload { ptr: bytes.as_ptr(), len: bytes.len(), ..Payload::EMPTY };
            let tx = Tx { head: Head::new(1, bytes.len() as u32), payload, token: 0 };
            assert_eq!(one.post(&tx), Ok(Post::Taken));
        }
        let closing = Instant::now();
        drop(one);
        let took = closing.elapsed();
        let (placed, error) = receiver.join().expect("no panic");
        assert!(matches!(&error, LaneError::Closed(why) if why.contains("dropped")), "{error}");
        assert_eq!(placed, FRAMES, "after {took:?}: {error}");
        took
    });
    assert!(took > Duration::from_millis(100), "{took:?}: the library was fast, or nothing was awaited");
    drop((other, offer));
    assert_eq!(hostile.violations(true), "");
}
