//! The built-in store: one process of the job serves it from a thread, the others are its clients over TCP.
//!
//! Its contents live in that process's memory. With a secret ([`Settings::secret`]) both ends prove that they know it
//! before anything else is read; without one the store listens on loopback only.
//!
//! [`Settings::secret`]: crossrail_types::Settings::secret

mod calls;
mod channel;
mod client;
#[doc(hidden)]
pub mod contents;
mod dial;
#[doc(hidden)]
pub mod frames;
mod history;
mod lease;
mod outbox;
mod server;
mod server_connection;
mod waits;

pub(crate) use client::connect;
pub use server::StoreServer;
