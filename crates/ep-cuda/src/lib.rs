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
mod completion;
mod connect;
mod counts;
mod device_reader;
mod enqueue;
mod fault_ring;
mod forward;
mod handles;
mod heap;
mod inner;
mod kernel_cache;
mod launch;
mod lease;
mod losses;
mod options;
mod outstanding;
mod peer;
mod regions;
mod setup_timings;
mod traffic;

pub use buffer::DeviceBuffer;
pub use completion::Completion;
pub use counts::{Counts, UNHEARD};
pub use crossrail_ep::{Config, Fault, Layout, Link, LinkKind, Payload, Plan, Scale};
pub use crossrail_kernels::ep::{EpCombineArgs, EpCommon, EpDispatchArgs, Shape};
pub use enqueue::{Enqueued, Pending, RankDispatch, Split};
pub use handles::DeviceHandle;
pub use lease::RegionLease;
pub use options::DeviceOptions;
pub use regions::RegionView;
pub use setup_timings::SetupTimings;
pub use traffic::Traffic;
