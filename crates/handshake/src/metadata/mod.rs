//! Metadata of agents and engines over connections of their own: the handshake of a service, then one request and its
//! answer.
//!
//! ```text
//! client                            listener
//!              <- Challenge
//! Reply ->
//!              <- Proof
//! Request ->                        operation 0 | 0 x3 | length 4..8, then as many bytes
//!              <- Answer            status 0 | 0 x3 | length 4..8, then as many bytes: metadata, or why it is refused
//! ```
//!
//! The listener knows nothing of what the bytes mean: its owner takes [`Inquiry`]s and answers them.

mod client;
mod listener;

use std::os::fd::BorrowedFd;
use std::time::Instant;

use crossrail_types::{ErrorKind, Result};

use crate::exchange::Exchange;
use crate::message::Protocol;
use crate::service::{MESSAGES, REJECTS, Service};

pub use client::request;
pub use listener::{Inquiry, MetadataListener};

/// The protocol of metadata listeners.
pub static METADATA: Protocol = Protocol {
    name: "Crossrail metadata listener",
    magic: *b"\xc5XMETA",
    version: 1,
    messages: MESSAGES,
    rejects: REJECTS,
};

static SERVICE: Service = Service {
    protocol: &METADATA,
    noun: "agent",
    connector: "crossrail metadata client",
    acceptor: "crossrail metadata listener",
    elsewhere: "check that an agent or engine of Crossrail listens for metadata at this address",
};

/// Longest body of a request or an answer, in bytes.
pub const BODY_MAX: usize = 64 << 20;
/// Length of the head of a request or an answer.
const HEAD_LEN: usize = 8;
/// Bytes that are received before memory for more is allocated.
const STEP: usize = 256 << 10;

/// Statuses of answers.
const DONE: u8 = 0;
const REFUSED: u8 = 1;

fn exchange<'a>(fd: BorrowedFd<'a>, operation: &str, peer: &str, deadline: Instant) -> Exchange<'a> {
    Exchange::new(fd, &METADATA, operation, peer, deadline)
}

/// Writes a head and its body.
fn send(exchange: &Exchange<'_>, code: u8, body: &[u8]) -> Result<()> {
    let Some(length) = u32::try_from(body.len()).ok().filter(|_| body.len() <= BODY_MAX) else {
        return Err(exchange.error(ErrorKind::Usage, format!("{} bytes; at most {BODY_MAX}", body.len())));
    };
    let [a, b, c, d] = length.to_le_bytes();
    exchange.write(&[code, 0, 0, 0, a, b, c, d])?;
    exchange.write(body)
}

/// Reads a head and its body. `room` is called with a number of bytes before memory for them is allocated.
fn receive(exchange: &Exchange<'_>, mut room: impl FnMut(usize) -> Result<()>) -> Result<(u8, Vec<u8>)> {
    let head = exchange.body(HEAD_LEN)?;
    let Some(&[code, 0, 0, 0, a, b, c, d]) = head.first_chunk::<HEAD_LEN>() else {
        return Err(exchange.error(ErrorKind::Protocol, "a malformed head"));
    };
    let length = u32::from_le_bytes([a, b, c, d]) as usize;
    if length > BODY_MAX {
        return Err(exchange.error(ErrorKind::Protocol, format!("a body of {length} bytes; at most {BODY_MAX}")));
    }
    let mut body = Vec::new();
    while body.len() < length {
        let step = STEP.min(length - body.len());
        room(step)?;
        body.extend_from_slice(&exchange.body(step)?);
    }
    Ok((code, body))
}
