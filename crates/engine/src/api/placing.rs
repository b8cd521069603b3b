//! One-sided writes into memory that a peer has exposed, without the worker's lock or its threads.

use std::time::Duration;

pub use crossrail_transport::placing::*;
pub use crossrail_transport::{LaneError, Loan, Post};
use crossrail_types::Result;

use super::Endpoint;
use crate::session;

/// Opens an object for one-sided writes to the endpoint's peer, with connections of its own on every rail.
///
/// Both ends call this with the same `index` (0 to 15): the end that has connected dials, the other one waits for the
/// connections. Each call makes a new object. Objects of several indices are independent, for one thread each.
///
/// The object ends with the endpoint, for the same reason. Lost rails are dialled again.
///
/// # Errors
/// `Unsupported`: the endpoint is not over network devices, or its session has checksums; `Unreachable` and `Timeout`: no
/// rail could be connected, or the peer did not call this; `Usage`: the index; `PeerDead` and `Closed`.
pub fn open(endpoint: &Endpoint, index: u16, timeout: Duration) -> Result<Box<dyn Placing>> {
    open_for(endpoint, index, None, timeout)
}

/// As [`open`], for memory of the GPU with that CUDA ordinal: where a NIC is chosen for the object, as EFA's, it is one of
/// those nearest to that GPU, which the objects take in turn.
///
/// # Errors
/// As [`open`].
pub fn open_for(endpoint: &Endpoint, index: u16, gpu: Option<u32>, timeout: Duration) -> Result<Box<dyn Placing>> {
    endpoint.worker.progress_handle().check_origin("placing")?;
    session::placing::open(endpoint.worker.sessions(), endpoint.id, (index, gpu), timeout)
}
