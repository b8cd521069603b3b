//! Proofs and keys: HMAC-SHA256 over the whole exchange, each use under its own label.

use crossrail_types::{Error, ErrorKind, Result};
use hmac::{Hmac, Mac};
use sha2::Sha256;

use super::wire::{CHALLENGE_LEN, FLAG_SECRET, FLAG_TOKEN, LANE_HELLO_LEN, REPLY_LEN};

/// Start of a reply's and a lane hello's own mac, which is their last field.
const REPLY_MAC: usize = REPLY_LEN - 32;
const LANE_HELLO_MAC: usize = LANE_HELLO_LEN - 32;

fn hmac(key: &[u8], label: &str, parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut mac = match Hmac::<Sha256>::new_from_slice(key) {
        Ok(mac) => mac,
        Err(_) => unreachable!("HMAC takes keys of any length"),
    };
    mac.update(label.as_bytes());
    mac.update(&[0]);
    // Lengths keep two lists of parts from running together to the same bytes.
    for part in parts {
        mac.update(&(part.len() as u64).to_le_bytes());
        mac.update(part);
    }
    mac
}

fn tag(key: &[u8], label: &str, parts: &[&[u8]]) -> [u8; 32] {
    hmac(key, label, parts).finalize().into_bytes().into()
}

/// Compares in constant time.
fn holds(key: &[u8], label: &str, parts: &[&[u8]], claimed: &[u8; 32]) -> bool {
    hmac(key, label, parts).verify_slice(claimed).is_ok()
}

/// Fresh random bytes from the kernel.
pub(super) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|e| Error::new(ErrorKind::Io, "worker", format!("getrandom: {e}")))?;
    Ok(bytes)
}

/// What both ends know before they meet: the secret, the token of the acceptor's address, both or neither.
pub(super) struct Known([u8; 32]);

impl Known {
    pub(super) fn new(flags: u8, secret: &[u8], token: &[u8; 16]) -> Known {
        let secret = if flags & FLAG_SECRET != 0 { secret } else { &[] };
        let token: &[u8] = if flags & FLAG_TOKEN != 0 { token } else { &[] };
        Known(tag(secret, "crossrail known", &[&[flags], token]))
    }

    /// The connector's proof; `reply`'s own mac field is not looked at.
    pub(super) fn connector(&self, challenge: &[u8; CHALLENGE_LEN], reply: &[u8; REPLY_LEN]) -> [u8; 32] {
        tag(&self.0, "crossrail connector", &[challenge, &reply[..REPLY_MAC]])
    }

    pub(super) fn connector_holds(
        &self,
        challenge: &[u8; CHALLENGE_LEN],
        reply: &[u8; REPLY_LEN],
        claimed: &[u8; 32],
    ) -> bool {
        holds(&self.0, "crossrail connector", &[challenge, &reply[..REPLY_MAC]], claimed)
    }

    /// What follows from a finished exchange.
    pub(super) fn keys(&self, challenge: &[u8; CHALLENGE_LEN], reply: &[u8; REPLY_LEN]) -> Keys {
        let master = tag(&self.0, "crossrail session", &[challenge, reply]);
        let mut id = [0; 16];
        id.copy_from_slice(&tag(&master, "id", &[])[..16]);
        Keys { master, id, lane: tag(&master, "lane key", &[]) }
    }
}

/// One session's keys.
pub(super) struct Keys {
    master: [u8; 32],
    pub(super) id: [u8; 16],
    pub(super) lane: [u8; 32],
}

impl Keys {
    /// The acceptor's proof: it too knew what [`Known`] holds, and saw the same exchange.
    pub(super) fn acceptor(&self) -> [u8; 32] {
        tag(&self.master, "crossrail acceptor", &[])
    }

    pub(super) fn acceptor_holds(&self, claimed: &[u8; 32]) -> bool {
        holds(&self.master, "crossrail acceptor", &[], claimed)
    }

    /// Covers a hello's body.
    pub(super) fn hello(&self, from_connector: bool, body: &[u8]) -> [u8; 32] {
        tag(&self.master, hello_label(from_connector), &[body])
    }

    pub(super) fn hello_holds(&self, from_connector: bool, body: &[u8], claimed: &[u8; 32]) -> bool {
        holds(&self.master, hello_label(from_connector), &[body], claimed)
    }
}

fn hello_label(from_connector: bool) -> &'static str {
    if from_connector { "crossrail connector hello" } else { "crossrail acceptor hello" }
}

/// Proof on a data connection; `hello`'s own mac field is not looked at.
pub(super) fn lane_connector(
    key: &[u8; 32],
    challenge: &[u8; CHALLENGE_LEN],
    hello: &[u8; LANE_HELLO_LEN],
) -> [u8; 32] {
    tag(key, "crossrail lane connector", &[challenge, &hello[..LANE_HELLO_MAC]])
}

pub(super) fn lane_connector_holds(
    key: &[u8; 32],
    challenge: &[u8; CHALLENGE_LEN],
    hello: &[u8; LANE_HELLO_LEN],
    claimed: &[u8; 32],
) -> bool {
    holds(key, "crossrail lane connector", &[challenge, &hello[..LANE_HELLO_MAC]], claimed)
}

/// The acceptor's confirmation on a data connection.
pub(super) fn lane_acceptor(key: &[u8; 32], challenge: &[u8; CHALLENGE_LEN], hello: &[u8; LANE_HELLO_LEN]) -> [u8; 32] {
    tag(key, "crossrail lane acceptor", &[challenge, hello])
}

pub(super) fn lane_acceptor_holds(
    key: &[u8; 32],
    challenge: &[u8; CHALLENGE_LEN],
    hello: &[u8; LANE_HELLO_LEN],
    claimed: &[u8; 32],
) -> bool {
    holds(key, "crossrail lane acceptor", &[challenge, hello], claimed)
}
