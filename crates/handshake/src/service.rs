//! The handshake of a service with its clients, as bytes and over a connection: Challenge, Reply, Proof. What follows
//! belongs to the service: the built-in store ([`crate::store`]), or a metadata listener ([`crate::metadata`]).

use crossrail_types::{ErrorKind, Reason, Result};

use crate::exchange::Exchange;
use crate::message::{Challenge, Kind, PROOF_LEN, Proof, Protocol, REJECT_LEN, REPLY_LEN, Reject, RejectCode, Reply};
use crate::proof::{Acceptor, Shared, random};
use crate::secret::Secret;
use crate::terms;

/// Length of a challenge.
pub(crate) const CHALLENGE_LEN: usize = 48;

/// The messages of every service.
pub(crate) const MESSAGES: &[(Kind, usize)] =
    &[(Kind::Challenge, CHALLENGE_LEN), (Kind::Reply, REPLY_LEN), (Kind::Proof, PROOF_LEN), (Kind::Reject, REJECT_LEN)];

/// The reasons for which a service turns clients away.
pub(crate) const REJECTS: &[RejectCode] =
    &[RejectCode::Refused, RejectCode::Mismatch, RejectCode::Full, RejectCode::Protocol, RejectCode::Busy];

/// A protocol whose two ends are a service and its clients.
#[derive(Debug)]
pub(crate) struct Service {
    pub(crate) protocol: &'static Protocol,
    /// Its noun in rejects.
    pub(crate) noun: &'static str,
    /// The labels of the two ends' proofs.
    pub(crate) connector: &'static str,
    pub(crate) acceptor: &'static str,
    /// Hint of a client whose connection leads to something else.
    pub(crate) elsewhere: &'static str,
}

impl Service {
    fn shared<'a>(&self, key: &'a [u8]) -> Shared<'a> {
        Shared { key, connector: self.connector, acceptor: Acceptor::Label(self.acceptor) }
    }

    /// The client's half.
    ///
    /// # Errors
    /// `Refused`: the secrets or the users differ, or only one end has one. `Mismatch`: the version. `Exhausted`: no
    /// more clients are admitted. `Refused` with [`Reason::Busy`]: too many clients have not proved themselves; try
    /// again. `Protocol`: not this service. `Unreachable`: the connection ended. `Timeout`.
    pub(crate) fn connect(&self, exchange: &mut Exchange<'_>, secret: &Secret) -> Result<()> {
        self.greet(exchange, secret).map_err(|error| match error.kind {
            ErrorKind::Protocol | ErrorKind::Timeout => error.with_hint(self.elsewhere),
            ErrorKind::Refused if error.hint.is_none() && error.reason != Some(Reason::Busy) => {
                error.with_hint(terms::SAME_SECRET)
            }
            _ => error,
        })
    }

    fn greet(&self, exchange: &mut Exchange<'_>, secret: &Secret) -> Result<()> {
        exchange.stage("challenge");
        let (challenge_bytes, challenge) = exchange.challenge()?;
        terms::check_challenge(self.protocol, &challenge).map_err(|refusal| exchange.refuse(&refusal))?;
        let flags = terms::offered(secret, false, &challenge).map_err(|refusal| exchange.refuse(&refusal))?;
        exchange.stage("proof");
        let reply = Reply { version: self.protocol.version, flags, nonce: random()?, mac: [0; 32] };
        let mut reply = reply.encode(self.protocol);
        let key = secret.key().map_err(|error| exchange.refuse(&terms::unreadable(&error)))?;
        exchange.prove(&self.shared(&key), flags, &challenge_bytes, &mut reply).map_err(|error| match error.kind {
            // Nothing but the secret, or the user's token, goes into this proof.
            ErrorKind::Refused if error.reason.is_none() => {
                let (reason, hint) = terms::advice(flags);
                error.with_reason(reason).with_hint(hint)
            }
            _ => error,
        })
    }

    /// A fresh challenge, as bytes.
    ///
    /// # Errors
    /// `Io`: the kernel gives no random bytes.
    pub(crate) fn challenge(&self, secret: &Secret) -> Result<Vec<u8>> {
        let version = self.protocol.version;
        let challenge = Challenge { version, flags: secret.flag(), id: None, nonce: random()? };
        Ok(challenge.encode(self.protocol))
    }

    /// The service's proof for a client whose whole reply is `bytes`, or why it is turned away.
    pub(crate) fn answer(&self, secret: &Secret, challenge: &[u8], bytes: &[u8]) -> std::result::Result<Proof, Reject> {
        let malformed = |e: crate::message::Malformed| Reject::new(RejectCode::Protocol, e.to_string());
        let reply = Reply::decode(self.protocol, bytes).map_err(malformed)?;
        terms::check_reply(self.protocol, secret.flag(), secret.flag(), &reply)?;
        let key = secret.key().map_err(|error| terms::unreadable(&error).reject)?;
        self.shared(&key).answer(challenge, bytes).ok_or_else(|| {
            terms::foreign(secret, self.noun)
                .unwrap_or_else(|| Reject::new(RejectCode::Refused, "wrong secret").because(Reason::SecretWrong))
        })
    }

    /// The service's half over a blocking connection.
    ///
    /// # Errors
    /// As [`Service::connect`], seen from the other end.
    pub(crate) fn admit(&self, exchange: &mut Exchange<'_>, secret: &Secret) -> Result<()> {
        exchange.stage("challenge");
        let challenge = self.challenge(secret)?;
        exchange.write(&challenge)?;
        exchange.stage("reply");
        let reply = exchange.message(Kind::Reply)?;
        let proof = self.answer(secret, &challenge, &reply).map_err(|reject| exchange.reject(&reject))?;
        exchange.write(&proof.encode(self.protocol))
    }
}
