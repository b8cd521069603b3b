//! The transfer protocol of Crossrail, without I/O: eager and rendezvous messages, one-sided access,
//! chunks striped over lanes, windows, lane failure, cancellation.
//!
//! A [`Peer`] is one connection's state machine and a [`Matcher`] the worker's tag matching. Both take
//! events and the time as input and answer with frames ([`Out`]), places for arriving bytes
//! ([`Placing`]) and events ([`Event`]); they own no memory of the user, no socket and no clock, so
//! the same inputs give the same outputs.
//!
//! ```text
//! out:  start() .. next(lane) -> Out                                  (the lane carries it)
//! in:   place(lane, head) -> Placing .. bytes .. placed(lane)         event() -> Done
//!                                    .. bytes .. landed(lane) .. unpacked(landed)
//! ```
//!
//! Thread rule: everything here is `&mut self`; the caller holds one lock per peer and one for the matcher.

#![forbid(unsafe_code)]

mod config;
mod event;
mod feed;
pub mod frame;
mod lane;
mod matcher;
mod meter;
mod peer;
mod ramp;
mod ranges;
mod target;

pub use config::{Config, LaneLoad, LaneSpec, Time};
pub use event::{
    Access, Body, DirectId, Event, Failure, Host, Landed, LaneShare, Memory, Offer, Operation, Out, Placing, Protocol,
    Receipt, RegionFault, RegionKey, RegionRef, Regions, Role, Short,
};
pub use matcher::Matcher;
pub use peer::Peer;
