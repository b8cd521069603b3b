//! What a link must offer to carry Crossrail traffic.
//!
//! A [`Lane`] is one (transport, device, path) to one peer. It carries *frames*: a 32-byte
//! [`Head`] and `payload_len` bytes. It knows nothing of messages or transfers: when it has room it
//! asks its [`Sink`] what to carry next, when a head has come in it asks where the payload goes,
//! and it moves the bytes from and to exactly there.
//!
//! ```text
//! out:  sink.next() -> Tx          lane writes head and payload        sink.sent(token)
//! in:   lane reads a head          sink.place(head) -> Place           sink.placed(token)
//! ```
//!
//! A link's [`Domain`] covers direct access to memory: where the link reaches the peer's memory by itself, one copy
//! moves the bytes of a transfer, bypassing frames.
//!
//! Thread rule: a lane is driven by one thread at a time (`&mut self`), any thread.

#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
mod doorbell;
#[cfg(any(test, feature = "conformance"))]
pub mod dry;
mod lane;
pub mod library;
pub mod loopback;
mod memory;
#[cfg(all(test, loom))]
mod models;
pub mod placing;
mod word;

pub use doorbell::Doorbell;
pub use lane::{
    Barrier, COPIED_MAX, Lane, LaneCaps, LaneError, LaneStats, NOTE_FILES, NOTE_MAX, Payload, Place, Post,
    ReceivedNote, Sink, Tx, WatchRoom,
};
pub use memory::*;
pub use word::Word;
