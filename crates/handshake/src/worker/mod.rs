//! How two workers find and trust each other: addresses, the authenticated handshake on the control connection, and
//! the admission of data connections (lanes). Nothing of the data path.
//!
//! A worker runs one [`Listener`]; its peers [`connect`] to it and then [`dial_lane`] as many lanes as they want.
//! What either end gets is plain sockets that belong to a peer who has proved itself:
//!
//! - With a [`Secret`] both ends prove that they know it; without one a worker listens on this machine only, and its
//!   Unix socket admits processes of the same user.
//! - Who holds a worker's [`Address`] also proves that, so nobody else can answer in the worker's place.
//! - Before both proofs have been checked only messages of fixed size are read. See [`wire`].
//! - Proofs are HMAC-SHA256 over fresh random bytes of both ends, the role and all that was said before, so they can
//!   be neither replayed nor reflected. Nothing is encrypted: a secret keeps strangers out, it does not hide data.

mod address;
mod dial;
mod hello;
mod keys;
mod listen;
mod session;
pub mod wire;

use std::fmt;

pub use crate::exchange::Stream;
pub use crate::secret::Secret;
pub use address::{ADDRESS_MAX, Address, Target};
pub use dial::{connect, dial_lane, upgrade};
pub use hello::{Device, Hello, Identity, Parameters};
pub use listen::{Arrival, Deliver, LaneKeys, Limits, ListenConfig, Listener, Rail};
pub use wire::LanePurpose;

/// A control connection whose two ends have proved themselves and agree on every parameter.
#[derive(Debug)]
pub struct Session {
    /// The connection: in blocking mode, nothing read from it beyond the handshake.
    pub stream: Stream,
    /// Who is at the other end.
    pub peer: Hello,
    /// The session and the key of its lanes; the same at both ends.
    pub ticket: Ticket,
    /// Whether this end connected.
    pub initiator: bool,
    /// The protocol version that both speak.
    pub version: u16,
}

/// What it takes to add lanes to a session. `Debug` hides the key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Ticket {
    /// The session's id; no secret.
    pub session: [u8; 16],
    /// The session's lane key.
    pub key: [u8; 32],
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ticket({:032x}, ..)", u128::from_be_bytes(self.session))
    }
}

/// Which lane of a session a data connection is. Whether a lane exists already is for the session's owner to check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LaneName {
    /// Index of the rail.
    pub rail: u16,
    /// Index of the connection within the rail.
    pub channel: u16,
    /// What the connection is for.
    pub purpose: LanePurpose,
}

impl fmt::Display for LaneName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lane {} channel {}", self.rail, self.channel)
    }
}
