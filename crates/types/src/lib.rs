//! What every room of Crossrail shares: ids, the 32-byte frame head, sizes, settings and errors.
//!
//! This crate does no I/O and depends on nothing else in the workspace.

#![forbid(unsafe_code)]

mod error;
mod head;
mod ids;

pub use error::{Error, ErrorKind, Result};
pub use head::{HEAD_LEN, Head};
pub use ids::{EndpointId, LaneId, OpId};
