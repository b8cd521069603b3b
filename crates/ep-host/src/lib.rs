//! Mixture-of-experts dispatch and combine in host memory.
//!
//! E experts are spread evenly over R ranks. Each rank has T tokens of H values, and for each token K expert ids and
//! K weights. **Dispatch** sends every token to the ranks of its experts, once per rank; **combine** returns the
//! experts' outputs and sums them, weighted, into the token's row.
//!
//! Ranks of one node write rows straight into each other's [heap](heap.rs); ranks of other nodes are reached by the
//! engine's one-sided writes. A rank is lost when its connection ends or it exceeds the timeout. The operation
//! then fails, or, with [`OnLoss::Mask`], continues without the rank and lists it as missing.
//!
//! Every rank of a group calls the same operations in the same order. A buffer is used by one thread at a time;
//! others block.

mod buffer;
mod combine;
mod connect;
mod dispatch;
mod heap;
mod local_rank;
mod notices;
mod operation;
mod peer;
mod plan;
mod rank_layout;
mod routes;
pub mod rows;
mod send;
mod sight;
mod sync;
mod tensor;
#[cfg(test)]
mod tests;

pub use buffer::ExpertBuffer;
pub use combine::{CombineOptions, Combined};
pub use crossrail_ep::{
    BLOCK, Bytes, Config, Fault, Layout, Link, LinkKind, MOST_TOPK, OnLoss, Payload, Plan, ProxyRail, ProxyReport,
    Scale,
};
pub use dispatch::{DispatchOptions, Dispatched, Placed};
pub use operation::{Pending, Timing};
pub use routes::Handle;
pub use tensor::{Input, Tensor, TensorMut};
