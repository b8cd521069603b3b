//! Mixture-of-experts dispatch and combine in GPU memory.
//!
//! Configuration, faults and links are those of `crossrail-ep`. A rank's heap is GPU memory that every rank with peer
//! access maps; kernels write directly into each other's heaps. The host connects ranks, enqueues kernels in callers'
//! streams, and detects lost ranks.
//!
//! ```text
//! DeviceBuffer   connect, mask, links ...        Fault, Link, Config   as in host memory
//! EpDispatchArgs, EpCombineArgs     arguments, from the caller to the kernel: addresses and strides
//! Enqueued       an enqueued operation: its handle, its completion, the half still to be received
//! RegionLease    memory of one result in the rank layout
//! arrays         checks of the arrays that callers pass, with errors that name the argument
//! ```
//!
//! No call waits for the GPU unless its documentation says so, so calls can be captured in a graph. For a rank whose heap
//! this GPU cannot map, on another node for instance, kernels write into pinned memory, from which threads of the buffer
//! send it (the `proxy` module).
//!
//! Every rank calls the same operations in the same order. All blocks of a launch must be resident at once, because
//! they wait for blocks of other ranks; buffers whose operations may overlap on one GPU must therefore share its
//! multiprocessors ([`DeviceOptions::num_sms`]).

mod agreement;
pub mod arrays;
mod buffer;
mod completion;
mod connect;
mod connection_event;
mod counts;
mod device_reader;
mod enqueue;
mod fault_ring;
mod handles;
mod heap;
mod inner;
mod kernel_cache;
mod launch;
mod launches;
mod lease;
mod losses;
#[cfg(test)]
mod many;
mod membership;
mod moved;
mod options;
mod outstanding;
mod peer;
mod proxy;
mod regions;
mod results;
mod send;
mod setup_timings;
mod sight;
mod token_layout;
mod traffic;
mod variant;

pub use buffer::DeviceBuffer;
pub use completion::Completion;
pub use counts::{Counts, NO_REPORT};
pub use crossrail_ep::{Config, Fault, Layout, Link, LinkKind, OnLoss, Payload, Plan, ProxyRail, ProxyReport, Scale};
pub use crossrail_kernels::ep::{EpCombineArgs, EpCommon, EpDispatchArgs, EpLayoutArgs, Shape};
pub use enqueue::{Enqueued, Pending, RankDispatch, Split, check_dispatch};
pub use handles::DeviceHandle;
pub use lease::RegionLease;
pub use moved::{Moved, Traffic};
pub use options::DeviceOptions;
pub use regions::RegionView;
pub use send::SendOnce;
pub use setup_timings::SetupTimings;
pub use sight::LinkBytes;
pub use token_layout::TokenLayout;
