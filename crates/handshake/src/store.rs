//! The handshake of the built-in store with its clients: Challenge, Reply, Proof, then the store's frames.

use std::os::fd::BorrowedFd;
use std::time::Instant;

use crossrail_types::{ErrorKind, Reason, Result};

use crate::exchange::Exchange;
use crate::message::{
    Challenge, Kind, PRELUDE_LEN, PROOF_LEN, Protocol, REJECT_LEN, REPLY_LEN, Reject, RejectCode, Reply,
};
use crate::proof::{Acceptor, Shared, random};
use crate::secret::Secret;
use crate::terms;

/// Length of a challenge.
const CHALLENGE_LEN: usize = 48;

/// The store's protocol. Its magic differs from the workers', so that each recognizes a misdirected connection.
pub static STORE: Protocol = Protocol {
    name: "Crossrail store",
    magic: *b"\xc5XSTOR",
    version: 1,
    messages: &[
        (Kind::Challenge, CHALLENGE_LEN),
        (Kind::Reply, REPLY_LEN),
        (Kind::Proof, PROOF_LEN),
        (Kind::Reject, REJECT_LEN),
    ],
    rejects: &[RejectCode::Refused, RejectCode::Mismatch, RejectCode::Full, RejectCode::Protocol, RejectCode::Busy],
};

fn shared(key: &[u8]) -> Shared<'_> {
    Shared { key, connector: "crossrail store client", acceptor: Acceptor::Label("crossrail store server") }
}

/// A client's half: proves on the connection `fd` that this end knows `secret`, and that the store does. `peer` is the
/// store's address, for errors. Blocks until `deadline` at most.
///
/// # Errors
/// `Refused`: the secrets or the users differ, or only one end has one. `Mismatch`: the version. `Exhausted`: the store
/// admits no more clients. `Refused` with [`Reason::Busy`]: too many clients have not proved themselves; try again.
/// `Protocol`: not a store. `Unreachable`: the connection ended. `Timeout`.
pub fn connect(fd: BorrowedFd<'_>, secret: &Secret, operation: &str, peer: &str, deadline: Instant) -> Result<()> {
    let mut exchange = Exchange::new(fd, &STORE, operation, peer, deadline);
    greet(&mut exchange, secret).map_err(|error| match error.kind {
        ErrorKind::Protocol | ErrorKind::Timeout => {
            error.with_hint("check that CROSSRAIL_STORE is the address of a store")
        }
        ErrorKind::Refused if error.hint.is_none() && error.reason != Some(Reason::Busy) => {
            error.with_hint(terms::SAME_SECRET)
        }
        _ => error,
    })
}

fn greet(exchange: &mut Exchange<'_>, secret: &Secret) -> Result<()> {
    exchange.stage("challenge");
    let (challenge_bytes, challenge) = exchange.challenge()?;
    terms::check_challenge(&STORE, &challenge).map_err(|refusal| exchange.refuse(&refusal))?;
    let flags = terms::offered(secret, false, &challenge).map_err(|refusal| exchange.refuse(&refusal))?;
    exchange.stage("proof");
    let mut reply = Reply { version: STORE.version, flags, nonce: random()?, mac: [0; 32] }.encode(&STORE);
    let key = secret.key().map_err(|error| exchange.refuse(&terms::unreadable(&error)))?;
    exchange.prove(&shared(&key), flags, &challenge_bytes, &mut reply).map_err(|error| match error.kind {
        // Nothing but the secret, or the user's token, goes into this proof.
        ErrorKind::Refused if error.reason.is_none() => {
            let (reason, hint) = terms::advice(flags);
            error.with_reason(reason).with_hint(hint)
        }
        _ => error,
    })
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
        let challenge = Challenge { version: STORE.version, flags: secret.flag(), id: None, nonce: random()? };
        Ok(Greeting { challenge: challenge.encode(&STORE) })
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
        let reply = Reply::decode(&STORE, bytes).map_err(|e| Reject::new(RejectCode::Protocol, e.to_string()))?;
        terms::check_reply(&STORE, secret.flag(), secret.flag(), &reply)?;
        let key = secret.key().map_err(|error| terms::unreadable(&error).reject)?;
        match shared(&key).answer(&self.challenge, bytes) {
            Some(proof) => Ok(Some(Proven { proof: proof.encode(&STORE), used: REPLY_LEN })),
            None => Err(terms::foreign(secret, "store")
                .unwrap_or_else(|| Reject::new(RejectCode::Refused, "wrong secret").because(Reason::SecretWrong))),
        }
    }
}

/// The bytes that turn a client away.
pub fn turn_away(reject: &Reject) -> [u8; REJECT_LEN] {
    reject.encode(&STORE)
}
