//! How two ends of a connection find and trust each other: the authenticated handshake, and what workers build on it.

#![forbid(unsafe_code)]

mod exchange;
mod secret;
mod worker;

pub use worker::*;
