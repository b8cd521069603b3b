//! Point-to-point transfer over every link a machine has.
//!
//! A [`Context`] is one process's view of its devices and settings. A [`Worker`] made from it listens, connects and
//! makes progress. An [`Endpoint`] is one peer: messages are sent to it and received from it by tag, its registered
//! [`Region`]s are written and read by key. Every operation is a [`Request`], and a finished one has a [`Receipt`]
//! that says how the bytes went.
//!
//! ```text
//! user buffer ─ Request ─ proto (splits into chunks, picks a lane with room) ─ Lane ─ wire
//!     wire ─ Lane ─ proto (where does this chunk go?) ─ directly into the user's buffer ─ Request done
//! ```
//!
//! This crate alone selects a backend. Its modules, each of which uses only those above it in this list:
//!
//! ```text
//! memory        buffers and regions
//! environment   what this process has: settings, memory, GPUs, network devices
//! core          what the worker's lock protects: operations, peers, lanes, direct copies, GPU memory
//! progress      who drives the core when, and how sleepers are woken
//! session       connecting, accepting, reconnecting; the transports
//! api           the handles that users hold
//! ```
//!
//! See the workspace's ARCHITECTURE.md.

mod api;
mod core;
mod environment;
mod memory;
mod progress;
mod session;

pub use api::placing;
pub use api::{
    Awaited, ConnectOptions, Context, DeviceInfo, Endpoint, FabricAttributes, FabricDevice, FabricFacts, FabricState,
    Info, LaneReport, Layout, Mapped, Move, MoveExplain, MoveKind, MoveOptions, NOTICE_MAX, Notice, Op, Outcome,
    Region, Request, Shared, Signal, StartOptions, TransportInfo, Worker, WorkerOptions, close_all, fabric_state,
    fabric_test, fabric_write_into, hold_lock,
};
#[cfg(feature = "fuzzing")]
pub use core::rows::fuzzing;
pub use core::{HeldTimes, LaneShare, Protocol, Receipt};
pub use crossrail_gpu::{CudaInfo, CudaState, GpuState, KernelCache, StageStats, unpack};
#[cfg(feature = "simulated-gpu")]
pub use crossrail_gpu::{Simulated, SimulatedStream};
pub use crossrail_topology::{Distance, GpuSeen, HostMemory, NumaNode, cpu_quota, host_memory};
pub use crossrail_types::{
    Channels, Error, ErrorKind, Filter, IoThreads, LogLevel, Rails, Reason, Result, Secret, Settings, Unpack,
};
pub use memory::{Addresses, Buffer, Described, Description, Memory, Place, Ready, RegionKey, Row};
pub use progress::{CallerLock, set_caller_lock};
pub use session::{Candidate, Explain, Turn};
