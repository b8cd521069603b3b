//! Loads NCCL's network plugins, versions 4 to 12, and moves data through them as NCCL does; and RMA plugins, versions 13
//! to 16, whose calls it makes.
//!
//! ```text
//! plugin      a loaded plugin: its calls, in one form for all versions
//! rma         a loaded RMA plugin: its calls, in one form for all versions
//! logger      the logger that plugins get; their last warning goes into our errors
//! stdout      what a plugin prints to stdout, kept from it
//! memory      the memory that is transferred
//! fragments   lists of fragments that a device leaves for the receiver to gather
//! lanes       sending and receiving: windows, chunks, any number of devices and channels
//! ```
//!
//! A plugin is foreign code in this process: it is trusted to keep to NCCL's contract as far as memory is concerned.
//! Everything else that it returns is checked, and an error names the function at fault.

mod fragments;
mod lanes;
mod logger;
mod memory;
mod plugin;
mod rma;
mod stdout;

pub use lanes::{Assignment, LaneUse, Lanes, Receiver, Sender, Transfer};
pub use memory::Memory;
pub use plugin::{Network, Plugin, Properties};
pub use rma::{At, Rma, RmaDevice, RmaHandle, RmaObject, RmaPlugin, Route, SignalOp};
pub use stdout::Diverted;
