//! The handshake on a data connection, which adds a lane to a session.

use std::fmt;

use crossrail_types::{ErrorKind, Reason, Result};

use super::keys::{self, Ticket};
use super::limits::evicted_error;
use super::wire::{LaneHello, LanePurpose, WORKER};
use crate::exchange::Exchange;
use crate::message::{Confirm, Kind, Reject, RejectCode};
use crate::proof::random;
use crate::terms;

/// Which lane of a session a data connection is. The session's owner checks for duplicates.
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

/// The connecting end.
pub(super) fn initiate(exchange: &mut Exchange<'_>, ticket: &Ticket, lane: LaneName) -> Result<()> {
    exchange.stage(format!("{lane}: challenge"));
    let (challenge_bytes, challenge) = exchange.challenge()?;
    terms::check_challenge(&WORKER, &challenge).map_err(|refusal| exchange.refuse(&refusal))?;

    exchange.stage(format!("{lane}: proof"));
    let LaneName { rail, channel, purpose } = lane;
    let (session, nonce) = (ticket.session, random()?);
    let mut hello =
        LaneHello { version: WORKER.version, purpose, rail, channel, session, nonce, mac: [0; 32] }.encode();
    exchange.prove(&keys::lane(&ticket.key), 0, &challenge_bytes, &mut hello).map_err(|error| match error.kind {
        ErrorKind::Refused if error.reason.is_none() => error.with_reason(Reason::SessionUnknown),
        _ => error,
    })?;
    exchange.stage(format!("{lane}: confirmation"));
    exchange.write(&Confirm.encode(&WORKER))
}

/// Finds the lane key of a session; `None`: there is no such session.
pub(super) type FindKey<'a> = &'a dyn Fn(&Exchange<'_>, &[u8; 16]) -> Result<Option<[u8; 32]>>;

/// The accepting end, once the connector has answered `challenge` with `hello`: the session, and which of its lanes
/// this connection is. `settle` is called once the connector has proved itself; false: the connection has been given
/// up, and the connector told so.
pub(super) fn admit(
    exchange: &mut Exchange<'_>,
    (challenge, hello_bytes): (&[u8], &[u8]),
    key: FindKey<'_>,
    settle: impl FnOnce() -> bool,
) -> Result<([u8; 16], LaneName)> {
    exchange.stage("lane: proof");
    let hello = LaneHello::decode(hello_bytes).map_err(|e| exchange.malformed(&e))?;
    let lane = LaneName { rail: hello.rail, channel: hello.channel, purpose: hello.purpose };
    exchange.stage(lane.to_string());
    terms::check_version(&WORKER, hello.version).map_err(|reject| exchange.reject(&reject))?;
    let Some(key) = key(exchange, &hello.session)? else {
        let text = "no such session; it may have been closed";
        return Err(exchange.reject(&Reject::new(RejectCode::Refused, text).because(Reason::SessionUnknown)));
    };
    let Some(proof) = keys::lane(&key).answer(challenge, hello_bytes) else {
        return Err(exchange
            .reject(&Reject::new(RejectCode::Refused, "wrong key for this session").because(Reason::SessionUnknown)));
    };
    if !settle() {
        return Err(evicted_error(exchange));
    }
    exchange.write(&proof.encode(&WORKER))?;
    exchange.stage(format!("{lane}: confirmation"));
    // From the proof on, the connector may take the connection for a lane.
    exchange.stop_rejects();
    Confirm::decode(&WORKER, &exchange.message(Kind::Confirm)?).map_err(|e| exchange.malformed(&e))?;
    Ok((hello.session, lane))
}
