//! Rows that go once to each node, on emulated GPUs: a gateway forwards them there, and returns one row of sums.

use crossrail_kernels::ep::{EP_RECEIVE, EP_SEND, Payload, Scale, Shape, Tuning};

use crossrail_emulator::coding::Coding;
use crossrail_emulator::job::{ByExpert, Job, Weights};
use crossrail_emulator::reference::{Choice, Routing};
use crossrail_emulator::shapes::BY_EXPERT;
use crossrail_emulator::{Build, Numbers};

use crate::far::{EXPERT, Far, PROXY, expert_rounds};

const BOTH: u32 = EP_SEND | EP_RECEIVE;

/// `nodes` nodes of `node` ranks.
const fn nodes(nodes: u32, node: u32) -> Shape {
    let ranks = nodes * node;
    Shape { ranks, experts: 2 * ranks, max_tokens: 5, tuning: Tuning { node, ..BY_EXPERT.tuning }, ..BY_EXPERT }
}

fn far_of(build: &Build, shape: Shape) -> Option<Far> {
    let build = build.clone().with(PROXY, include_str!("proxy.cu"));
    Some(Far::once_per_node(Job::of(&build, shape, shape.expert_shared())?))
}

fn far(shape: Shape) -> Option<Far> {
    far_of(&Build::new(&EXPERT), shape)
}

#[test]
fn rows_of_two_nodes_are_forwarded_and_summed() {
    let Some(mut far) = far(nodes(2, 2)) else { return };
    expert_rounds(&mut far, 500..508, Coding::Bf16);
}
