//! Components of a lane, and the report of attaching.

use std::sync::Arc;

use crossrail_types::LaneId;

use crate::arena::Arena;
use crate::cma::Process;
use crate::control::Control;
use crate::wire::Wire;

/// Which end of the socket this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Called connect; makes the control segment.
    Connector,
    /// Called accept.
    Acceptor,
}

impl Side {
    pub(crate) fn index(self) -> usize {
        match self {
            Side::Connector => 0,
            Side::Acceptor => 1,
        }
    }
}

/// The outcome of attaching: whether CMA works.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Whether this end can read the peer's memory (process_vm_readv), or why not.
    pub cma_pull: std::result::Result<(), String>,
    /// Whether this end can write to the peer's memory (process_vm_writev), or why not.
    pub cma_push: std::result::Result<(), String>,
}

/// Everything that attaching creates for a lane.
pub(crate) struct Attached {
    pub(crate) side: Side,
    pub(crate) id: LaneId,
    pub(crate) wire: Arc<Wire>,
    pub(crate) arena: Arc<Arena>,
    pub(crate) control: Arc<Control>,
    pub(crate) expedited: bool,
    pub(crate) report: Report,
    /// Whether the peer can reach our memory by CMA, in either way.
    pub(crate) peer_has_cma: bool,
    pub(crate) process: std::result::Result<Process, String>,
}
