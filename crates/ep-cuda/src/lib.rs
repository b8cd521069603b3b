//! Mixture-of-experts dispatch and combine in GPU memory.
//!
//! The meaning is that of `crossrail-ep`, whose configuration, faults and links these are too. A rank's heap is in its
//! GPU's memory; every rank that its GPU reaches maps it, and kernels write straight into each other's. What the host
//! does here is bring the ranks together, put kernels into callers' streams, and notice who is lost.
//!
//! ```text
//! DeviceBuffer   connect, mask, links ...        Fault, Link, Config   as on the host
//! EpDispatchArgs, EpCombineArgs     arguments, from the caller to the kernel: addresses and strides
//! Enqueued       what a call gives: a handle, when it is done, what is still to be received
//! RegionLease    the memory of one result in the rank layout
//! ```
//!
//! Nothing here waits for the GPU unless it says so, so calls can be captured in a graph. The exception are ranks that
//! this GPU does not reach, on other nodes for instance: kernels write what they should get into a mirror of their heap
//! here, and the host carries it there through the engine before the call returns.
//!
//! Every rank calls the same operations in the same order. All blocks of a launch run at once, since they wait for
//! blocks of other ranks; so buffers whose operations may run at the same time on one GPU must share its
//! multiprocessors ([`DeviceOptions::num_sms`]).

mod buffer;
mod calls;
mod connect;
mod done;
mod far;
mod faults;
mod handles;
mod heap;
mod loading;
mod options;
mod order;
mod peer;
mod regions;
mod took;
mod traffic;
mod watch;

pub use buffer::DeviceBuffer;
pub use calls::{Enqueued, Pending, RankDispatch, Split};
pub use crossrail_ep::{Config, Fault, Layout, Link, LinkKind, Payload, Plan, Scale};
pub use crossrail_kernels::ep::{EpCombineArgs, EpCommon, EpDispatchArgs, Shape};
pub use done::{Count, Done, UNHEARD};
pub use handles::DeviceHandle;
pub use options::DeviceOptions;
pub use regions::{RegionLease, RegionView};
pub use took::Took;
pub use traffic::Traffic;
