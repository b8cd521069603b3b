//! Messages of a rank of another node that arrive late, or in part.

use std::thread;
use std::time::{Duration, Instant};

use crossrail::{Context, Receipt, Request, Settings};
use crossrail_control::{Group, GroupOptions, StoreServer};
use crossrail_ep::{Config, Layout, OnLoss, Payload};

use super::{Access, BACK, Expected, META, Message, Network, OwnHeap, Peer, WEIGHTS, WORD, immediate, stamp};
use crate::buffer::ExpertBuffer;
use crate::heap::{HEADER, Header};
use crate::local_rank::GroupView;

const LIMIT: Duration = Duration::from_secs(60);
/// The slots of odd operations.
const PARITY: usize = 1;

/// Two connected ranks of two nodes, whose messages the tests write and read by hand, and their store.
fn two_ranks() -> ([(Group, ExpertBuffer); 2], StoreServer) {
    let server = StoreServer::start("127.0.0.1:0", &Settings::default()).expect("a store");
    let ranks = [0u32, 1].map(|rank| {
        let store = Some(server.address());
        thread::spawn(move || {
            let options = GroupOptions { rank: Some(rank), size: Some(2), store, ..GroupOptions::default() };
            let group = Group::join(options, &Settings::default()).expect("join");
            let config = Config {
                ranks: 2,
                max_tokens: 4,
                hidden: 128,
                experts: 2,
                topk: 1,
                payload: Payload::Bf16,
                layouts: vec![Layout::Expert],
                prereduce: true,
                share_node: false,
                timeout: LIMIT,
                on_loss: OnLoss::Raise,
            };
            let context = Context::new(Settings::default()).expect("a context");
            let buffer = ExpertBuffer::new(&group, &context, "experts", config).expect("a buffer");
            buffer.connect(&[0, 1], true, None).expect("connect");
            (group, buffer)
        })
    });
    (ranks.map(|rank| rank.join().expect("a rank")), server)
}

/// What `body` makes of the other rank, as this one sees it.
fn with_peer<T>((_, buffer): &(Group, ExpertBuffer), body: impl FnOnce(&OwnHeap, &mut Peer) -> T) -> T {
    let mut view = buffer.0.view.lock();
    let view: &mut GroupView = &mut view;
    body(&buffer.0.own, view.peers[1 - buffer.0.own.me].as_mut().expect("connected"))
}

fn network(peer: &mut Peer) -> &mut Network {
    let Access::Network(network) = &mut peer.access else { panic!("no rank of another node") };
    network
}

fn delivered(request: &Request) -> Receipt {
    request.wait(Some(LIMIT)).expect("the write is delivered")
}

/// Where the header of a message lies: in the writer's staging, and in the reader's heap.
fn header_at(own: &OwnHeap, peer: &Peer, message: Message) -> (*mut Header, usize) {
    let areas = &own.areas;
    let (staged, at) = match message {
        Message::Meta => (peer.slot(own, PARITY), areas.slot(PARITY, own.me)),
        Message::Back => (peer.back(own, PARITY), areas.back(PARITY, own.me)),
        _ => {
            let weights = areas.back_weights();
            (peer.back(own, PARITY).wrapping_add(weights), areas.back(PARITY, own.me) + weights)
        }
    };
    (staged.cast(), at)
}

/// Writes a message of operation `number`, and waits until it is delivered.
fn publish(writer: &(Group, ExpertBuffer), message: Message, number: u64) {
    with_peer(writer, |own, peer| {
        let (staged, _) = header_at(own, peer, message);
        // SAFETY: a header inside staging, from which nothing is being read.
        unsafe { staged.write_volatile(Header::new(number, 0, 0)) };
        let published = match message {
            Message::Meta => peer.publish_meta(own, PARITY, number, HEADER),
            Message::Back => peer.publish_back(own, PARITY, number, 0),
            _ => peer.publish_weights(own, PARITY, number, HEADER),
        };
        published.expect("posted");
        for request in network(peer).requests.iter_mut().flat_map(std::mem::take) {
            delivered(&request);
        }
    });
}

/// Places the header of that message in the reader's heap, as the first of its bytes to arrive: the write is not complete,
/// and is not counted.
fn place_in_part(writer: &(Group, ExpertBuffer), message: Message, number: u64, nth: u64) {
    with_peer(writer, |own, peer| {
        let (staged, at) = header_at(own, peer, message);
        let header = Header { stamp: stamp(number, nth), ..Header::new(number, 0, 0) };
        // SAFETY: as above; all of the header is initialised memory, since staging is.
        let bytes = unsafe {
            staged.write_volatile(header);
            std::slice::from_raw_parts(staged.cast::<u8>(), HEADER).to_vec()
        };
        let network = network(peer);
        let imm = immediate(network.generation[0], WORD as usize);
        delivered(&network.endpoint.write(bytes, &network.key, at as u64, Some(imm)).expect("posted"));
    });
}

fn has_arrived(reader: &(Group, ExpertBuffer), message: Message, number: u64) -> bool {
    let expected = Expected { rank: 1, message, parity: PARITY, number };
    with_peer(reader, |own, peer| peer.has_arrived(own, expected))
}

/// The reader gave the writer up in operation 1 and released its slots; then the writer's part of operation 1 arrives. It is
/// a whole write that was not examined, but not that of operation 3, whose header is the first that is placed of it.
#[test]
fn a_late_write_does_not_make_the_next_one_whole() {
    let ([reader, writer], _store) = two_ranks();
    for (message, kind) in [(Message::Meta, META), (Message::Weights, WEIGHTS), (Message::Back, BACK)] {
        with_peer(&reader, |own, peer| match message {
            Message::Meta => peer.release_dispatch(own, PARITY, 1),
            _ => peer.release_combine(own, PARITY, 1),
        });
        publish(&writer, message, 1);
        assert_eq!(with_peer(&reader, |_, peer| network(peer).count(kind + PARITY)), 1);
        place_in_part(&writer, message, 3, 2);
        assert!(!has_arrived(&reader, message, 3), "{message:?} is taken for complete when its header is placed");
        publish(&writer, message, 3);
        assert!(has_arrived(&reader, message, 3), "{message:?}");
        assert!(!has_arrived(&reader, message, 5), "{message:?}");
    }
}

/// The count has wrapped in the half of a word that the stamp has for it.
#[test]
fn counts_of_writes_wrap() {
    let ([reader, writer], _store) = two_ranks();
    with_peer(&writer, |_, peer| network(peer).posted[META + PARITY] = u64::from(u32::MAX) - 1);
    publish(&writer, Message::Meta, 1);
    assert!(has_arrived(&reader, Message::Meta, 1));
}

/// A peer that gave this rank up has released a slot whose writes may still be in flight. The slot must not be written
/// again before they have left it: what they carry would be of two operations.
#[test]
fn a_slot_is_free_once_its_writes_have_left_it() {
    let (ranks, _store) = two_ranks();
    for message in [Message::DispatchReleased, Message::CombineReleased] {
        let expected = Expected { rank: 1, message, parity: PARITY, number: 1 };
        with_peer(&ranks[1], |own, peer| peer.set_word(own, PARITY, message, 1));
        with_peer(&ranks[0], |own, peer| {
            // A write that takes as long as the test wants it to: nobody sends what it waits for.
            let worker = &ranks[0].1.0.worker;
            let endless = worker.recv(vec![0; 8], 77, u64::MAX, None).expect("posted");
            let slot = message.staged(PARITY).expect("a slot");
            network(peer).requests[slot].push(endless);
            let seen = || message.word(own.heap.words(&own.areas, 1), PARITY).observe() == 1;
            let until = Instant::now() + LIMIT;
            while !seen() && Instant::now() < until {
                worker.progress();
            }
            assert!(seen(), "the word of the release arrives");
            assert!(!peer.has_arrived(own, expected), "{message:?}: the slot is still being read");
            assert!(peer.await_write(own, expected, Duration::ZERO), "{message:?}: its wait is for the write");
            network(peer).requests[slot][0].cancel();
            let _ = network(peer).requests[slot][0].wait(Some(LIMIT));
            assert!(peer.has_arrived(own, expected), "{message:?}: the slot is free");
            assert!(!peer.await_write(own, expected, Duration::ZERO), "{message:?}: nothing is in flight");
        });
    }
}
