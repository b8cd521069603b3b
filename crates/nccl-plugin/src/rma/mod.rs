//! Crossrail as an RMA plugin of NCCL: the CPU's half of NCCL's device API, without RDMA and without GDRCopy.
//!
//! ```text
//! kernel ─ NCCL's queue ─ NCCL's thread ─ iput ─ pinned slot of a batch ─ rails ─ slot at the peer ─ its memory ─ signal
//! ```
//!
//! ```text
//! exports      the tables, and C arguments to Rust        objects     handles: numbers, all of them checked
//! connecting   listen and connect                         group       a group of ranks, its contexts, their operations
//! shared       what threads share: registrations, gets, lost peers    requests    what NCCL tests
//! outgoing     operations become batches                  incoming    batches are applied, in order, and signals added up
//! batch        the form of a batch                        memory      of batches, and what NCCL has registered
//! gpu          copies, and words behind them              mirror      a rank is a peer of its own
//! progress     the threads
//! ```
//!
//! A pair of ranks has one order: the peer applies batches by their numbers, whatever order the rails bring them in. A
//! signal is therefore visible after all that was put before it in any context, and after what other peers' batches placed
//! earlier. An operation is done when the peer has placed it.

mod batch;
mod connecting;
mod exports;
mod gpu;
mod group;
mod incoming;
mod memory;
mod mirror;
mod objects;
mod outgoing;
mod progress;
mod requests;
mod shared;
#[cfg(test)]
mod tests;

pub use exports::{RMA_V13, RMA_V14, RMA_V15, RMA_V16};
