//! What must hold.

use crossrail_proto::{Failure, RegionFault};
use crossrail_types::OpId;

use crate::memory::pattern;
use crate::node::Node;
use crate::plan::{Key, Work};
use crate::wire::lane_id;
use crate::world::World;

fn holds(bytes: &[u8], number: u64, from: usize) -> bool {
    bytes.iter().enumerate().all(|(at, b)| *b == pattern(number, from + at))
}

/// An operation of `n` is over: are its bytes right?
pub(crate) fn done(n: &mut Node, other: &Node, messages: &[(usize, usize)], id: OpId) {
    let op = &n.ops[id.index as usize];
    let Some((result, tag)) = &op.done else { unreachable!() };
    let name = &op.span.name;
    let bytes = op.span.bytes.borrow();
    match (&op.work, result) {
        (Work::Receive { tag: want, mask, .. }, Ok(receipt)) => {
            let message = tag >> 8;
            let (sender, index) = messages[message as usize];
            let sent = &other.ops[index];
            assert_eq!(sender, other.index);
            assert_eq!((tag ^ u64::from(*want)) & mask, 0, "{name} took a message of another tag");
            assert_eq!(receipt.bytes, sent.len as u64);
            assert!(holds(&bytes[..sent.len], message, 0), "{name} has wrong bytes of message {message}");
            assert!(bytes[sent.len..].iter().all(|b| *b == 0), "{name} was written past the message");
        }
        (Work::Send { .. }, Ok(receipt)) => {
            assert_eq!(receipt.bytes, op.len as u64);
            // It is complete only when the receiver has it.
            let taken = taker(other, op.number);
            assert!(taken.is_some_and(|r| matches!(r.done, Some((Ok(_), _)))), "{name} is not received");
        }
        (Work::Write { offset, .. }, Ok(_)) => {
            let region = other.regions.0[0].bytes.borrow();
            let at = *offset as usize;
            assert!(holds(&region[at..at + op.len], op.number, 0), "{name} is not in place");
        }
        (Work::Read { offset, .. }, Ok(_)) => {
            assert!(holds(&bytes, 1_000_000 + other.index as u64, *offset as usize), "{name} has wrong bytes");
        }
        // Explained in the end: the reason may lie at the other end, which is not done yet.
        (_, Err(_)) => {}
    }
}

fn taker(node: &Node, message: u64) -> Option<&crate::node::Op> {
    node.ops.iter().find(|o| {
        matches!(o.work, Work::Receive { .. })
            && matches!(&o.done, Some((_, tag)) if *tag != u64::MAX && tag >> 8 == message)
    })
}

/// Is its failure one that the plan explains?
fn explained(n: &Node, other: &Node, id: OpId, why: &Failure, tag: u64) {
    let op = &n.ops[id.index as usize];
    let ok = match why {
        Failure::Truncated { message, buffer } => {
            message > buffer
                && match op.work {
                    Work::Receive { .. } => op.len as u64 == *buffer,
                    Work::Send { .. } => op.len as u64 == *message,
                    _ => false,
                }
        }
        Failure::Cancelled => {
            let theirs = match op.work {
                Work::Send { .. } => taker(other, op.number).is_some_and(|r| r.cancelled) || other.crashed,
                Work::Receive { .. } => {
                    other.ops.iter().any(|o| matches!(o.work, Work::Send { .. }) && o.number == tag >> 8 && o.cancelled)
                }
                _ => false,
            };
            op.cancelled || theirs
        }
        Failure::Region(fault) => match op.work {
            Work::Write { region, key, .. } | Work::Read { region, key, .. } => match fault {
                RegionFault::Gone => key == Key::Wrong || !other.regions.0[region].alive,
                RegionFault::Bounds => key == Key::OutOfBounds,
                RegionFault::Access | RegionFault::Full => false,
            },
            _ => false,
        },
        Failure::PeerDead(_) => n.dead || n.broken.is_some(),
        Failure::Device(why) => {
            let theirs = match op.work {
                Work::Send { .. } => taker(other, op.number).is_some_and(|r| r.faulty) || other.crashed,
                Work::Receive { .. } => {
                    let of = |o: &&crate::node::Op| matches!(o.work, Work::Send { .. }) && o.number == tag >> 8;
                    other.ops.iter().find(of).is_some_and(|o| o.faulty)
                }
                Work::Write { .. } | Work::Read { .. } => other.region_fault,
            };
            if why.starts_with("at the peer: ") { theirs } else { op.faulty }
        }
        Failure::Closed => n.closed || other.closed,
        // Nothing deregisters local memory here: the engine's tests do.
        Failure::Withdrawn => false,
    };
    assert!(ok, "{} failed without a reason: {why:?}", op.span.name);
}

/// Immediates come once, after their bytes.
pub(crate) fn immediates(n: &Node, other: &Node) {
    for (at, imm) in n.imms.iter().enumerate() {
        assert!(!n.imms[..at].contains(imm), "immediate {imm} came twice");
        let op = other.ops.iter().find(|o| o.number == u64::from(*imm)).expect("an immediate of nobody");
        let Work::Write { offset, imm: true, .. } = op.work else { panic!("an immediate that was not asked for") };
        let region = n.regions.0[0].bytes.borrow();
        let place = &region[offset as usize..offset as usize + op.len];
        assert!(holds(place, op.number, 0), "an immediate came before its bytes");
    }
}

/// Receives and messages were brought together in order.
fn matching(n: &Node, sender: &Node) {
    let mut taken: Vec<Option<usize>> = Vec::new();
    let fits = |receive: usize, message: &crate::node::Op| match (&n.ops[receive].work, &message.work) {
        (Work::Receive { tag, mask, .. }, Work::Send { tag: sent, .. }) => {
            let sent = message.number << 8 | u64::from(*sent);
            (sent ^ u64::from(*tag)) & mask == 0
        }
        _ => false,
    };
    let sends: Vec<_> = sender.ops.iter().filter(|o| matches!(o.work, Work::Send { .. })).collect();
    for send in &sends {
        taken.push(
            n.posts.iter().position(
                |at| matches!(&n.ops[*at].done, Some((_, tag)) if *tag != u64::MAX && tag >> 8 == send.number),
            ),
        );
    }
    for later in 0..sends.len() {
        let Some(post) = taken[later] else { continue };
        for earlier in 0..later {
            if !fits(n.posts[post], sends[earlier]) || sends[earlier].cancelled {
                continue;
            }
            // Without death or goodbye every message is taken in the end.
            match taken[earlier] {
                Some(other) => {
                    assert!(other < post, "message {} overtook message {}", sends[later].number, sends[earlier].number)
                }
                None => assert!(
                    n.down() || sender.down() || n.closed || sender.closed,
                    "message {} was passed over for message {}",
                    sends[earlier].number,
                    sends[later].number
                ),
            }
        }
    }
}

/// Nothing is left over.
pub(crate) fn end(w: &World) {
    for node in &w.nodes {
        if node.crashed {
            continue;
        }
        let other = &w.nodes[1 - node.index];
        assert!(node.finished() && node.jobs.is_empty());
        assert!(node.peer.idle(), "left over: {:?}", node.peer);
        assert!(node.packs.is_empty() && node.unpacks.is_empty());
        for (wire, state) in
            w.wires.iter().enumerate().filter(|(_, s)| s.usable(node.index) && !node.down() && !node.bye)
        {
            let left = node.given.get(&lane_id(wire, node.index)).map_or(0, |given| given.len());
            assert_eq!(left, 0, "chunks never acknowledged on a lane that is up: {}", state.spec.id);
        }
        assert!(node.passives.is_empty(), "accesses not released: {:?}", node.passives);
        // Bytes whose announcement was in flight when the other end failed: kept until this end is notified.
        let waits = other.dead && !node.down();
        assert!(node.arrivals.is_empty() || waits, "unexpected messages kept: {}", node.arrivals.len());
        assert_eq!((node.matcher.posted(), node.matcher.unexpected()), (0, 0));
        matching(node, other);
        for op in &node.ops {
            let Some((result, tag)) = &op.done else { unreachable!() };
            if let Err(why) = result {
                explained(node, other, op.id, why, *tag);
            }
            agree(node, other, op, result.as_ref().err());
        }
        // Only writes that succeeded, or broke off, have left traces in the region.
        let region = node.regions.0[0].bytes.borrow();
        let mut free = vec![true; region.len()];
        for op in &other.ops {
            if let Work::Write { offset, key: Key::Right, .. } = op.work {
                free[offset as usize..offset as usize + op.len].fill(false);
            }
        }
        assert!(region.iter().zip(&free).all(|(b, free)| !*free || *b == 0), "the region was written where nobody may");
    }
}

/// Both ends tell the same story, where both lived to tell it.
fn agree(n: &Node, other: &Node, op: &crate::node::Op, failure: Option<&Failure>) {
    if n.down() || other.down() {
        return;
    }
    match op.work {
        Work::Send { .. } => {
            let theirs = taker(other, op.number).and_then(|r| r.done.as_ref());
            match (failure, theirs) {
                (None, Some((Ok(_), _))) | (Some(_), Some((Err(_), _)) | None) => {}
                (Some(Failure::Closed), Some((Ok(_), _))) => {}
                (mine, theirs) => panic!("{}: {mine:?} here and {theirs:?} there", op.span.name),
            }
        }
        Work::Write { imm: true, .. } => {
            let came = other.imms.contains(&(op.number as u32));
            assert_eq!(came, failure.is_none(), "{}: {failure:?} and the immediate came: {came}", op.span.name);
        }
        _ => {}
    }
}
