//! Types that every crate of Crossrail shares: ids, the 32-byte frame header, sizes, settings and errors.
//!
//! This crate depends on nothing else in the workspace. Its only I/O is [`Log`], which writes lines to stderr, and
//! [`loopback`], which tries addresses.

#![forbid(unsafe_code)]

mod checksum;
mod counts;
mod error;
mod head;
mod ids;
pub mod interrupt;
mod log;
mod loopback;
mod origin;
mod ports;
mod reason;
pub mod settings;
mod size;
mod unpack;

pub use checksum::Checksum;
pub use counts::{Affinity, Channels, IoThreads};
pub use error::{Error, ErrorKind, Result, Source};
pub use head::{HEAD_LEN, Head};
pub use ids::{EndpointId, LaneId, OpId};
pub use interrupt::Interrupt;
pub use log::{Log, Sink as LogSink};
pub use loopback::loopback;
pub use origin::{Origin, count_fork};
pub use ports::Ports;
pub use reason::Reason;
pub use settings::{Filter, LogLevel, Rails, Secret, Settings, TRANSPORTS};
pub use size::{
    format_duration, format_gb, format_gb_per_s, format_gib, format_size, parse_duration, parse_size, parse_sizes,
};
pub use unpack::Unpack;
