//! What expert buffers in host memory (`crossrail-ep-host`) and in GPU memory (`crossrail-ep-cuda`) share.
//!
//! E experts are spread evenly over R ranks. Each rank has T tokens of H values, and for each token K expert ids and
//! K weights. **Dispatch** sends every token to the ranks of its experts, once per rank; **combine** returns the
//! experts' outputs and sums them, weighted, into the token's row.
//!
//! ```text
//! Config      the parameters of a buffer, equal on every rank        Plan    the memory that they take
//! Meeting     ranks find each other through the group's store, connect, and compare parameters (Hello)
//! Link        how a rank is reached                                  Fault   a rank that was lost, and why
//! View        which ranks take part, and how all come to the same view       notices   how they tell each other
//! ```

mod bytes;
mod config;
mod fault;
pub mod hello;
mod link;
pub mod meeting;
pub mod notices;
mod plan;
pub mod view;

pub use bytes::Bytes;
pub use config::{BLOCK, Config, Layout, MOST_RANKS, MOST_TOPK, OnLoss, Payload, Scale};
pub use fault::Fault;
pub use link::{Link, LinkKind, ProxyRail, ProxyReport};
pub use plan::{Plan, Room};
