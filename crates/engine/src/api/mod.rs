//! The handles that users hold.

mod context;
mod endpoint;
mod fabric;
mod interop;
mod layout;
mod mapped;
mod moves;
mod notices;
pub mod placing;
mod region;
mod request;
mod streams;
mod worker;

pub use context::{Context, DeviceInfo, Info, TransportInfo};
pub use endpoint::{Endpoint, LaneReport, Op};
pub use fabric::{
    FabricAttributes, FabricDevice, FabricFacts, FabricState, fabric_state, fabric_test, fabric_write_into,
};
pub use layout::Layout;
pub use mapped::{Mapped, Shared};
pub use moves::{Move, MoveExplain, MoveKind, MoveOptions, StartOptions};
pub use notices::{NOTICE_MAX, Notice};
pub use region::Region;
pub use request::Request;
pub use streams::{Awaited, Outcome, Signal};
pub use worker::{ConnectOptions, Worker, WorkerOptions, close_all, hold_lock};
