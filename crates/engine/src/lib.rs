//! Point-to-point transfer over every link a machine has.
//!
//! A [`Context`] is one process's view of its devices and settings. A [`Worker`] made from it listens, connects and
//! makes progress. An [`Endpoint`] is one peer: messages are sent to it and received from it by tag, its registered
//! [`Region`]s are written and read by key. Every operation is a [`Request`], and a finished one has a [`Receipt`]
//! that says how the bytes went.
//!
//! ```text
//! user buffer ─ Request ─ proto (splits into chunks, picks a lane with room) ─ Lane ─ wire
//!     wire ─ Lane ─ proto (where does this chunk go?) ─ straight into the user's buffer ─ Request done
//! ```
//!
//! This room is the only one that picks a backend. See the workspace's ARCHITECTURE.md.

mod admit;
mod buffer;
mod chunks;
mod connect;
mod context;
mod copies;
mod core;
mod endpoint;
mod foreign;
mod gates;
mod io;
mod keeper;
mod link;
mod links;
mod listen;
mod lost;
mod mapped;
mod ops;
mod progress;
mod rails;
mod region;
mod request;
mod select;
mod state;
mod streams;
mod submit;
mod tickets;
mod worker;

pub use buffer::{Buffer, Memory, Place, Ready};
pub use context::{Context, DeviceInfo, Info, TransportInfo};
pub use crossrail_cuda_ipc::Copied;
pub use crossrail_gpu::{CudaInfo, CudaState, GpuState, KernelCache, StageStats, unpack};
#[cfg(feature = "simulated-gpu")]
pub use crossrail_gpu::{Simulated, SimulatedStream};
pub use crossrail_topology::{Distance, GpuSeen};
pub use crossrail_types::{
    Error, ErrorKind, Filter, GpuCopy, IoThreads, LogLevel, Rails, Result, Secret, Settings, Unpack,
};
pub use endpoint::{Endpoint, LaneReport, Op};
pub use mapped::{Mapped, Shared};
pub use region::{Region, RegionKey};
pub use request::{LaneShare, Protocol, Receipt, Request};
pub use select::{Candidate, Explain};
pub use streams::{Awaited, Outcome, Signal};
pub use worker::{ConnectOptions, Worker, WorkerOptions};
