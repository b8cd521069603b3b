//! TCP lanes: one connection each, bound to its network device.

mod fault;
mod info;
mod lane;
mod pipe;
mod rx;
mod socket;
mod sys;
mod tx;
mod watch;

pub use info::{TcpInfo, describe};
pub use lane::TcpLane;
pub use socket::{Binding, Options, dial, listen};
pub use watch::{LinkChange, LinkWatch};
