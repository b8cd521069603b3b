//! Discovery and authentication between workers: addresses, the authenticated handshake on the control connection, and
//! the admission of data connections (lanes). Nothing of the data path.
//!
//! A worker runs one [`Listener`]; its peers [`connect`] to it and then [`dial_lane`] as many lanes as they want.
//! Both ends get plain sockets whose peer has proved itself:
//!
//! - Without a shared [`Secret`](crate::Secret), a worker admits only processes of the same user: over its Unix socket
//!   by their credentials, which admit root's as well, and over TCP by the user's token.
//! - Whoever holds a worker's [`Address`] also proves that, so nobody else can answer in the worker's place.

mod address;
mod dial;
mod handoff;
mod hello;
mod keys;
mod lane;
mod limits;
mod listen;
mod session;
mod sockets;
mod target;
mod text;
pub(crate) mod wire;

pub use address::{ADDRESS_MAX, Address};
pub use dial::{connect, dial_lane, upgrade};
pub use hello::{Device, HELLO_MAX, Hello, Identity, Parameters, decode_devices, encode_devices, network_namespace};
pub use keys::Ticket;
pub use lane::LaneName;
pub(crate) use limits::{HalfOpen, Slot, Source};
pub use limits::{Limits, share_of_descriptors};
pub use listen::{Arrival, Deliver, LaneKeys, Listener};
pub use session::{Session, Stream};
pub use sockets::{ListenConfig, Rail};
pub use target::Target;
pub use wire::LanePurpose;
