//! Shared-memory lanes between processes of one machine.
//!
//! Needs no privilege, no `/dev/shm`, no ptrace permission and no common PID namespace: all that two processes
//! share is one connected Unix socket, over which sealed memfds are passed.
//!
//! ```text
//! Unix socket   doorbell for a sleeping peer, descriptors of segments, notes, and the peer's death (hang-up)
//! control memfd per direction: 1024 slots of one cache line (head, up to 24 payload bytes, sequence)
//!               and a ring of bytes for larger payloads; the cursors of direct copies
//! segments      memory of [`Arena::alloc`], mapped by the peer when it is first named: one plain copy moves it
//! CMA           process_vm_readv/writev for any other memory, if a trial copy at attach succeeded
//! ```
//!
//! Values read from shared memory are never trusted: each is read once and checked before use. A memfd of the
//! peer is mapped only after its seals show that it can't shrink under us.

mod arena;
mod arriving;
mod atomics;
mod attach;
mod attached;
mod cma;
mod control;
mod copy;
mod count;
mod cursor;
mod descriptors;
mod direct;
mod lane;
mod memory;
#[cfg(all(test, loom))]
mod models;
mod notes;
mod peer_segment;
mod ring;
mod shutdown;
mod wake;
mod wire;

pub use arena::{Arena, Segment, SegmentRef};
pub use attach::{Options, attach};
pub use attached::{Report, Side};
pub use lane::ShmLane;
pub use wake::{prepare, prepare_if_quick};
