//! Crossrail as a network plugin of NCCL: `libnccl-net-crossrail.so`, with the tables of versions 8 to 12. The same library
//! is NCCL's [`rma`] plugin, with the tables of versions 13 to 16.
//!
//! NCCL sees one device whose rails are Crossrail's, so striping and the loss of a rail stay beneath it. All versions
//! call the same functions of [`net`]; [`exports`] adapts their arguments.
//!
//! ```text
//! exports      the tables, and C arguments to Rust
//! net          what `init` creates: workers, and the connections to other ranks' workers
//! workers      the workers, each with a thread of its own
//! connecting   listen, connect and accept, none of which blocks
//! comm         communicators and their requests: one send or up to 8 receives each
//! handle       the 128 bytes by which a listener is found
//! device       what NCCL learns of the device
//! log          NCCL's logger
//! rma          the RMA plugin
//! ```
//!
//! A connection between two workers is an [`Endpoint`](crossrail::Endpoint) that all communicators of the two share;
//! a message's tag names the communicator and carries NCCL's tag. Each worker is connected to the other rank's worker of
//! the same number, and the messages of a communicator take turns. Data goes from NCCL's pinned buffers to the engine
//! and back without a copy in between.

mod comm;
mod connecting;
mod device;
mod exports;
mod handle;
mod log;
mod net;
mod rma;
#[cfg(test)]
mod tests;
mod workers;

pub use exports::{TABLE_V8, TABLE_V9, TABLE_V10, TABLE_V11, TABLE_V12};
pub use rma::{RMA_V13, RMA_V14, RMA_V15, RMA_V16};
