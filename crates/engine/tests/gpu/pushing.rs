//! Copies that the sender's GPU makes into memory of the receiver: where it lies now, and not a moment longer than it
//! is lent. What is copied takes about a millisecond, in which each round cancels at another moment.

use std::time::Duration;

use crossrail::{ErrorKind, Memory, Place, Protocol, Request};

use super::{DIRECT, LIMIT, bytes_of, done, hex, pair, pattern, start};

const LARGE: usize = 384 << 20;
/// The part that is copied last.
const TAIL: usize = 32 << 20;

#[test]
fn memory_that_is_freed_and_allocated_again_is_written_where_it_is_now() {
    let Some(pair) = pair(DIRECT) else { return };
    for round in 0..8_u64 {
        // The same size each time, and most often the same address.
        let size = 6 << 20;
        let source = pair.filled(Place::Gpu(0), &pattern(size, round));
        pair.tell(&format!("alloc gpu {size}"));
        pair.tell(&format!("recv 0 {size} 1"));
        assert!(done("round", pair.to.send(&source, 1).unwrap()).pushed);
        pair.tell("wait");
        assert_eq!(pair.tell(&format!("check 0 {size} {round}")), "good", "round {round}");
        pair.tell("free");
        let target = pair.context.alloc_on(size, Place::Gpu(0)).unwrap();
        let receive = pair.worker.recv(&target, 2, u64::MAX, Some(&pair.to)).unwrap();
        pair.tell(&format!("alloc gpu {size}"));
        pair.tell(&format!("fill {}", 100 + round));
        pair.tell(&format!("send 0 {size} 2"));
        assert!(done("round", &receive).pushed);
        pair.tell("wait");
        assert!(bytes_of(&target) == pattern(size, 100 + round), "round {round}");
        pair.tell("free");
    }
}

/// What is written now into memory that a peer was copying into a moment ago stays there.
fn is_left_alone(memory: &Memory, value: u8, meanwhile: impl FnOnce()) {
    let at = memory.len() - TAIL;
    memory.fill_from(at, &vec![value; TAIL]).unwrap();
    meanwhile();
    let mut found = vec![0; TAIL];
    memory.copy_to(at, &mut found).unwrap();
    assert!(found == vec![value; TAIL], "it was written after its operation was over");
}

#[test]
fn what_is_cancelled_while_the_peer_copies_is_left_alone() {
    let Some(pair) = pair(DIRECT) else { return };
    pair.tell(&format!("alloc gpu {LARGE}"));
    let target = pair.context.alloc_on(LARGE, Place::Gpu(0)).unwrap();
    let mut cancelled = 0;
    for round in 0..8_u64 {
        let receive = pair.worker.recv(&target, round, u64::MAX, Some(&pair.to)).unwrap();
        pair.tell(&format!("send 0 {LARGE} {round}"));
        std::thread::sleep(Duration::from_micros(100 * round));
        receive.cancel();
        match receive.wait(LIMIT) {
            Ok(receipt) => assert!(receipt.pushed && receipt.bytes == LARGE as u64, "{receipt:?}"),
            Err(error) => {
                assert_eq!(error.kind, ErrorKind::Cancelled, "{error}");
                cancelled += 1;
            }
        }
        is_left_alone(&target, round as u8 + 1, || drop(pair.tell("end")));
    }
    assert!(cancelled > 0, "the copy was always over first");
    // A send that is cancelled ends the other end's receive, too.
    for round in 20..26_u64 {
        pair.tell(&format!("recv 0 {LARGE} {round}"));
        let send = pair.to.send(&target, round).unwrap();
        std::thread::sleep(Duration::from_micros(100 * (round - 20)));
        send.cancel();
        if let Err(error) = send.wait(LIMIT) {
            assert_eq!(error.kind, ErrorKind::Cancelled, "{error}");
        }
        assert!(["Cancelled", "good"].contains(&pair.tell("end").as_str()));
    }
    pair.tell("free");
    pair.round(Place::Gpu(0), "gpu", 3 << 20, Some(Protocol::CudaIpc));
}

#[test]
fn a_region_that_is_deregistered_while_the_peer_copies_is_left_alone() {
    let Some(pair) = pair(DIRECT) else { return };
    pair.tell(&format!("alloc gpu {LARGE}"));
    let target = pair.context.alloc_on(LARGE, Place::Gpu(0)).unwrap();
    for (round, what) in ["put", "get", "put", "put"].into_iter().enumerate() {
        let region = pair.worker.register(&target).unwrap();
        pair.tell(&format!("{what} 0 {LARGE} {}", hex(&region.key().to_bytes())));
        std::thread::sleep(Duration::from_micros(200 * round as u64));
        region.deregister().unwrap();
        is_left_alone(&target, 7, || assert!(["Region", "good"].contains(&pair.tell("end").as_str())));
    }
    pair.round(Place::Gpu(0), "gpu", 3 << 20, Some(Protocol::CudaIpc));
}

#[test]
fn what_a_killed_process_was_copying_is_left_alone() {
    let Some(mut pair) = pair(DIRECT) else { return };
    let targets: Vec<Memory> = (0..3).map(|_| pair.context.alloc_on(LARGE, Place::Gpu(0)).unwrap()).collect();
    let receives: Vec<Request> = (targets.iter().zip(0..))
        .map(|(target, tag)| pair.worker.recv(target, tag, u64::MAX, Some(&pair.to)).unwrap())
        .collect();
    pair.tell(&format!("alloc gpu {LARGE}"));
    (0..3).for_each(|tag| drop(pair.tell(&format!("send 0 {LARGE} {tag}"))));
    pair.child.0.kill().unwrap();
    for receive in receives {
        if let Err(error) = receive.wait(LIMIT) {
            assert!(matches!(error.kind, ErrorKind::PeerDead | ErrorKind::Closed), "{error}");
        }
    }
    let last = pair.cuda.devices().unwrap().len() as u32 - 1;
    is_left_alone(&targets[2], 9, || (pair.to, pair.child) = start(&pair.worker, DIRECT, last));
    pair.round(Place::Gpu(0), "gpu", 3 << 20, Some(Protocol::CudaIpc));
}
