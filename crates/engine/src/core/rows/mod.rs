//! Rows of lists as both ends hold them: encoding ([`wire`]), what a peer has sent ([`hosted`]), what a peer has been sent
//! ([`outbox`]), pairs of rows ([`view`]) and the memory of an operation's part of them ([`part`]).
#![allow(unsafe_code)]

#[cfg(feature = "fuzzing")]
pub mod fuzzing;
pub(in crate::core) mod hosted;
pub(in crate::core) mod outbox;
pub(in crate::core) mod part;
mod totals;
pub(in crate::core) mod view;
pub(crate) mod wire;
