//! Mutual authentication of the two ends of a connection.
//!
//! One challenge and response serves three protocols: workers, which build sessions and lanes on it, the built-in store
//! with its clients ([`store`]), and metadata listeners with theirs ([`metadata`]).
//!
//! ```text
//! connector                         acceptor
//!              <- Challenge         version, what the proof must contain, nonce
//! Reply ->                          version, nonce, proof over all of the above
//!              <- Proof             the acceptor knew the secret too
//! Confirm ->                        lanes only: the connector takes the connection for one, and frames follow
//! ```
//!
//! Instead of any message, either end may send a Reject, which states its reason, as long as the peer still reads
//! messages: an acceptor that has sent its Proof for a lane closes silently, because the connector may already treat
//! the connection as a lane and would read the Reject as a frame. The guarantees, for all protocols:
//!
//! - With a shared [`Secret`], both ends prove that they know it. Without one, only this machine can connect (see
//!   [`Secret::allows_listening`]), and over TCP both ends prove that they know their user's token (see [`UserToken`]).
//! - Until both proofs have been checked, only messages of fixed size are read. See [`message`].
//! - Proofs are HMAC-SHA256 over fresh random bytes of both ends, the role and every byte exchanged before, so they can
//!   be neither replayed nor reflected.
//! - Nothing is encrypted: a secret keeps strangers out; it does not hide data.
//!
//! [`message`]: crate::wire

#![forbid(unsafe_code)]

mod exchange;
mod message;
pub mod metadata;
mod pause;
mod pending;
mod proof;
mod resolve;
mod secret;
mod service;
pub mod store;
mod terms;
mod user;
mod worker;

/// The messages as bytes, for tests and fuzzing: pure functions of `&[u8]`, safe to call with anything.
pub mod wire {
    pub use crate::message::{
        CONFIRM_LEN, Challenge, Confirm, FLAG_SECRET, FLAG_TOKEN, FLAG_USER, Kind, Malformed, PRELUDE_LEN, PROOF_LEN,
        Proof, Protocol, REJECT_LEN, REJECT_TEXT_MAX, REPLY_LEN, Reject, RejectCode, Reply,
    };
    pub use crate::metadata::METADATA;
    pub use crate::store::STORE;
    pub use crate::worker::wire::{
        HELLO_HEAD_LEN, HELLO_MAX, HelloHead, LANE_HELLO_LEN, LaneHello, WORKER, decode_hello,
    };
}

pub use pending::{GRACE, Pending, source_of};
pub use proof::draw;
pub use resolve::resolve;
pub use secret::Secret;
pub use user::UserToken;
pub use wire::{Reject, RejectCode};
pub use worker::{
    ADDRESS_MAX, Address, Arrival, Deliver, Device, HELLO_MAX, Hello, Identity, LaneKeys, LaneName, LanePurpose,
    Limits, ListenConfig, Listener, Parameters, Rail, Session, Stream, Target, Ticket, connect, decode_devices,
    dial_lane, encode_devices, network_namespace, share_of_descriptors, upgrade,
};
