//! The handles that users hold.

mod context;
mod endpoint;
mod interop;
mod mapped;
mod region;
mod request;
mod streams;
mod worker;

pub use context::{Context, DeviceInfo, Info, TransportInfo};
pub use endpoint::{Endpoint, LaneReport, Op};
pub use mapped::{Mapped, Shared};
pub use region::Region;
pub use request::Request;
pub use streams::{Awaited, Outcome, Signal};
pub use worker::{ConnectOptions, Worker, WorkerOptions};
