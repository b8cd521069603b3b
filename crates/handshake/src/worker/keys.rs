//! What the two ends of a session prove to each other to know, and the keys that follow from it.

use std::fmt;

use crossrail_types::Checksum;

use crate::message::{FLAG_SECRET, FLAG_TOKEN, FLAG_USER};
use crate::proof::{Acceptor, Shared, holds, tag};

/// Label under which a session's master key is derived from the exchange.
const SESSION: &str = "crossrail session";

/// What both ends know before they meet: the secret or their user's token, and the token of the acceptor's address; or
/// nothing.
pub(super) struct PreShared([u8; 32]);

impl PreShared {
    pub(super) fn new(flags: u8, secret: &[u8], token: &[u8; 16]) -> PreShared {
        let secret = if flags & (FLAG_SECRET | FLAG_USER) != 0 { secret } else { &[] };
        let token: &[u8] = if flags & FLAG_TOKEN != 0 { token } else { &[] };
        PreShared(tag(secret, "crossrail known", &[&[flags], token]))
    }

    /// What the ends of a control connection prove to know.
    pub(super) fn shared(&self) -> Shared<'_> {
        let acceptor = Acceptor::Derived(SESSION, "crossrail acceptor");
        Shared { key: &self.0, connector: "crossrail connector", acceptor }
    }

    /// The keys of the session that a finished exchange opens.
    pub(super) fn keys(&self, challenge: &[u8], reply: &[u8]) -> Keys {
        let master = tag(&self.0, SESSION, &[challenge, reply]);
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
    /// Authenticates a hello's body.
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

/// What it takes to add lanes to a session. `Debug` hides the key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Ticket {
    /// The session's id; not a secret.
    pub session: [u8; 16],
    /// The session's lane key.
    pub key: [u8; 32],
    /// The checksum that its lanes over TCP and its control connection have.
    pub checksum: Checksum,
}

impl Ticket {
    /// Shows that an end of the session sent `bytes`, for one use that `label` names.
    pub fn proof(&self, label: &str, bytes: &[u8]) -> [u8; 32] {
        tag(&self.key, "crossrail session proof", &[label.as_bytes(), bytes])
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ticket({:032x}, ..)", u128::from_be_bytes(self.session))
    }
}

/// What the ends of a data connection prove to know: the session's lane key.
pub(super) fn lane(key: &[u8; 32]) -> Shared<'_> {
    Shared { key, connector: "crossrail lane connector", acceptor: Acceptor::Label("crossrail lane acceptor") }
}
