//! The handshake of the built-in store with its clients: Challenge, Reply, Proof, then the store's frames.

use std::os::fd::BorrowedFd;
use std::time::Instant;

use crossrail_types::Result;

use crate::exchange::Exchange;
use crate::message::{PRELUDE_LEN, PROOF_LEN, Protocol, REJECT_LEN, REPLY_LEN, Reject, RejectCode};
use crate::secret::Secret;
use crate::service::{MESSAGES, REJECTS, Service};

/// The store's protocol. Its magic differs from the others', so that each recognizes a misdirected connection.
pub static STORE: Protocol =
    Protocol { name: "Crossrail store", magic: *b"\xc5XSTOR", version: 1, messages: MESSAGES, rejects: REJECTS };

static SERVICE: Service = Service {
    protocol: &STORE,
    noun: "store",
    connector: "crossrail store client",
    acceptor: "crossrail store server",
    elsewhere: "check that CROSSRAIL_STORE is the address of a store",
};

/// A client's half: proves on the connection `fd` that this end knows `secret`, and that the store does. `peer` is the
/// store's address, for errors. Blocks until `deadline` at most.
///
/// # Errors
/// `Refused`: the secrets or the users differ, or only one end has one. `Mismatch`: the version. `Exhausted`: the store
/// admits no more clients. `Refused` with [`Reason::Busy`](crossrail_types::Reason::Busy): too many clients have not
/// proved themselves; try again. `Protocol`: not a store. `Unreachable`: the connection ended. `Timeout`.
pub fn connect(fd: BorrowedFd<'_>, secret: &Secret, operation: &str, peer: &str, deadline: Instant) -> Result<()> {
    SERVICE.connect(&mut Exchange::new(fd, &STORE, operation, peer, deadline), secret)
}

/// The store's half with one client, without I/O: the store serves all clients from one thread that never blocks.
#[derive(Debug)]
pub struct Greeting {
    challenge: Vec<u8>,
}

/// A client that has proved itself.
#[derive(Debug)]
pub struct Proven {
    /// The store's own proof, to be sent to the client.
    pub proof: [u8; PROOF_LEN],
    /// Bytes of the client's that the handshake used up; what follows are frames.
    pub used: usize,
}

impl Greeting {
    /// A greeting with a fresh challenge.
    ///
    /// # Errors
    /// `Io`: the kernel gives no random bytes.
    pub fn new(secret: &Secret) -> Result<Greeting> {
        Ok(Greeting { challenge: SERVICE.challenge(secret)? })
    }

    /// The bytes to open the connection with.
    pub fn challenge(&self) -> &[u8] {
        &self.challenge
    }

    /// Checks what the client has sent so far. `None`: its reply is not complete yet.
    ///
    /// # Errors
    /// The reject to send in place of the proof, before the connection is closed.
    pub fn check(&self, secret: &Secret, input: &[u8]) -> std::result::Result<Option<Proven>, Reject> {
        // Checked as soon as they are there: a stranger need not send as many bytes as a reply has to be rejected.
        if let Some(prelude) = input.get(..PRELUDE_LEN) {
            STORE.decode_prelude(prelude).map_err(|e| Reject::new(RejectCode::Protocol, e.to_string()))?;
        }
        let Some(bytes) = input.get(..REPLY_LEN) else { return Ok(None) };
        let proof = SERVICE.answer(secret, &self.challenge, bytes)?;
        Ok(Some(Proven { proof: proof.encode(&STORE), used: REPLY_LEN }))
    }
}

/// The bytes that turn a client away.
pub fn turn_away(reject: &Reject) -> [u8; REJECT_LEN] {
    reject.encode(&STORE)
}
