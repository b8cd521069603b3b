//! An end that joins first may write before the other end knows of it.

mod stand_in;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crossrail_fabric::{FabricLane, Wanted, attach_lane};
use crossrail_transport::{Lane, Payload, Place, Post, Sink, Tx};
use crossrail_types::{Head, LaneId};
use stand_in::Hostile;

const LIMIT: Duration = Duration::from_secs(20);
const FRAMES: u8 = 20;
/// Kind of the first frame.
const FIRST: u8 = 7;

/// The kinds of the frames that arrive.
#[derive(Default)]
struct Kinds(Vec<u8>);

impl Sink for Kinds {
    fn next(&mut self, _: LaneId) -> Option<Tx> {
        None
    }

    fn sent(&mut self, _: LaneId, _: u64) {}

    fn place(&mut self, _: LaneId, head: &Head) -> Place {
        self.0.push(head.kind());
        Place::Discard
    }

    fn placed(&mut self, _: LaneId, _: u64) {}
}

fn streams() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
    let dialled = TcpStream::connect(listener.local_addr().expect("bound")).expect("dial");
    (dialled, listener.accept().expect("accept").0)
}

/// Copies what `from` sends, of which all after `most` bytes once `go_on` is sent to. `copied`: the bytes so far.
fn copy(mut from: TcpStream, mut to: TcpStream, most: usize, copied: &AtomicUsize, go_on: Option<Receiver<()>>) {
    let mut bytes = [0];
    while let Ok(1) = from.read(&mut bytes) {
        if copied.fetch_add(1, Ordering::SeqCst) == most
            && let Some(go_on) = &go_on
        {
            go_on.recv_timeout(LIMIT).expect("the first end has written");
        }
        if to.write_all(&bytes).is_err() {
            break;
        }
    }
}

fn attached(stream: TcpStream, hostile: &Hostile, id: u32) -> FabricLane {
    let wanted = Wanted { provider: Some("hostile"), ..Wanted::default() };
    let offer = hostile.fabric.offers(&wanted).expect("usable").remove(0);
    attach_lane(stream, &offer, LaneId(id), ("peer", "fabric/test"), Instant::now() + LIMIT).expect("a lane")
}

/// Joins two lanes through a relay. `most`: bytes of the first end that pass before it has written its frames. The kinds of
/// the frames that the other end received, and the bytes that had passed when that had joined.
fn exchange(hostile: &Hostile, most: usize) -> (Vec<u8>, usize) {
    let ((first, first_far), (other, other_far)) = (streams(), streams());
    let ((go_on, waits), copied, back) = (channel(), AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let (from, to) = (first_far.try_clone().expect("a descriptor"), other_far.try_clone().expect("a descriptor"));
        scope.spawn(|| copy(from, to, most, &copied, Some(waits)));
        scope.spawn(|| copy(other_far, first_far, usize::MAX, &back, None));
        let receiving = scope.spawn(|| {
            let mut lane = attached(other, hostile, 2);
            let (joined, mut kinds, began) = (copied.load(Ordering::SeqCst), Kinds::default(), Instant::now());
            while kinds.0.len() < usize::from(FRAMES) {
                lane.poll(&mut kinds, 1 << 20, true).expect("alive");
                assert!(began.elapsed() < LIMIT, "{:?} arrived", kinds.0);
            }
            (kinds.0, joined)
        });
        let mut lane = attached(first, hostile, 1);
        for kind in FIRST..FIRST + FRAMES {
            let tx = Tx { head: Head::new(kind, 0), payload: Payload::EMPTY, token: 0 };
            assert_eq!(lane.post(&tx), Ok(Post::Taken));
        }
        // The provider delivers them meanwhile; later, they would be no test.
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(200) {
            lane.poll(&mut Kinds::default(), 1 << 20, true).expect("alive");
        }
        let _ = go_on.send(());
        while !receiving.is_finished() {
            lane.poll(&mut Kinds::default(), 1 << 20, true).expect("alive");
        }
        receiving.join().expect("no panic")
    })
}

#[test]
fn frames_that_arrive_before_an_end_has_joined_are_delivered() {
    let Some(hostile) = Hostile::load() else { return };
    hostile.begin(1, "nics=1,tx=64,msg=1048576,move=200,fail_at=0,mr_fail=0");
    let all: Vec<u8> = (FIRST..FIRST + FRAMES).collect();
    let (kinds, joined) = exchange(&hostile, usize::MAX);
    assert_eq!(kinds, all);
    // The last byte of the note that ends the other end's joining is held back.
    let (kinds, _) = exchange(&hostile, joined - 1);
    assert_eq!(kinds, all);
}
