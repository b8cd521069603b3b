//! The handshake on a control connection: the shared exchange, then both hellos.

use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use crossrail_types::{ErrorKind, Reason, Result};

use super::address::Address;
use super::hello::{Hello, Identity, decode_hello};
use super::keys::{Keys, PreShared, Ticket};
use super::wire::{HelloHead, WORKER};
use crate::exchange::Exchange;
use crate::message::{Challenge, FLAG_SECRET, FLAG_TOKEN, FLAG_USER, Kind, Reject, RejectCode, Reply};
use crate::proof::random;
use crate::terms;

/// A control connection: blocking mode, no timeouts set.
#[derive(Debug)]
pub enum Stream {
    /// Within the machine; can pass file descriptors.
    Unix(UnixStream),
    /// Over the network, or loopback.
    Tcp(TcpStream),
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Unix(stream) => stream.as_fd(),
            Stream::Tcp(stream) => stream.as_fd(),
        }
    }
}

impl Stream {
    /// Whether it is a Unix socket.
    pub fn is_unix(&self) -> bool {
        matches!(self, Stream::Unix(_))
    }
}

/// A control connection whose two ends have proved themselves and agree on every parameter.
#[derive(Debug)]
pub struct Session {
    /// The connection, in blocking mode; nothing has been read from it beyond the handshake.
    pub stream: Stream,
    /// Who is at the other end.
    pub peer: Hello,
    /// The session and the key of its lanes; the same at both ends.
    pub ticket: Ticket,
    /// Whether this end connected.
    pub initiator: bool,
}

/// What both ends hold after a handshake.
pub(super) struct Agreed {
    pub(super) peer: Hello,
    pub(super) ticket: Ticket,
}

/// The connecting end. `expect`: the worker sought, where its address is known.
pub(super) fn initiate(
    exchange: &mut Exchange<'_>,
    me: &Identity,
    expect: Option<&Address>,
    replaces: Option<[u8; 16]>,
    unix: bool,
) -> Result<Agreed> {
    let secret = me.secret.over(unix);
    let mut hello = me.hello.clone();
    hello.replaces = replaces;
    let hello = hello.encode()?;

    exchange.stage("challenge");
    let (challenge_bytes, challenge) = exchange.challenge()?;
    terms::check_challenge(&WORKER, &challenge).map_err(|refusal| exchange.refuse(&refusal))?;
    if expect.is_some_and(|address| Some(address.worker) != challenge.id) {
        let detail = "another worker listens here now; the worker of that address has ended";
        return Err(exchange.error(ErrorKind::Unreachable, detail).with_reason(Reason::Replaced));
    }

    exchange.stage("proof");
    let flags = terms::offered(secret, expect.is_some(), &challenge).map_err(|refusal| exchange.refuse(&refusal))?;
    let token = expect.map_or([0; 16], |address| address.token);
    let key = secret.key().map_err(|error| exchange.refuse(&terms::unreadable(&error)))?;
    let pre_shared = PreShared::new(flags, &key, &token);
    let mut reply = Reply { version: WORKER.version, flags, nonce: random()?, mac: [0; 32] }.encode(&WORKER);
    exchange.prove(&pre_shared.shared(), flags, &challenge_bytes, &mut reply).map_err(|error| match error.kind {
        // What the acceptor refuses is what went into the proof.
        _ if error.kind != ErrorKind::Refused || error.reason.is_some() => error,
        ErrorKind::Refused if flags & FLAG_USER != 0 => {
            error.with_reason(Reason::UserDenied).with_hint(terms::SAME_USER)
        }
        ErrorKind::Refused if flags & FLAG_SECRET != 0 => error.with_reason(Reason::SecretWrong),
        ErrorKind::Refused if flags & FLAG_TOKEN != 0 => error.with_reason(Reason::TokenWrong),
        _ => error,
    })?;
    let keys = pre_shared.keys(&challenge_bytes, &reply);

    exchange.stage("hello");
    send_hello(exchange, &keys, true, &hello)?;
    let peer = receive_hello(exchange, &keys, false)?;
    if Some(peer.worker) != challenge.id {
        let text = "the hello names another worker than the challenge";
        return Err(exchange.reject(&Reject::new(RejectCode::Protocol, text)));
    }
    if let Some(text) = peer.disagreement(&me.hello) {
        return Err(exchange.reject(&Reject::new(RejectCode::Mismatch, text).because(Reason::Parameters)));
    }
    let checksum = me.hello.checksum_with(&peer);
    Ok(Agreed { peer, ticket: Ticket { session: keys.id, key: keys.lane, checksum } })
}

/// The accepting end begins every connection with a challenge, and only the answer says whether it is to be a session
/// or a lane of one: which may come here, and the challenge and its answer, as bytes.
pub(super) fn begin(
    exchange: &mut Exchange<'_>,
    me: &Identity,
    flags: u8,
    (kind, other): (Kind, Option<Kind>),
) -> Result<(Kind, Vec<u8>, Vec<u8>)> {
    exchange.stage("challenge");
    let challenge = Challenge { version: WORKER.version, flags, id: Some(me.hello.worker), nonce: random()? };
    let challenge = challenge.encode(&WORKER);
    exchange.write(&challenge)?;
    exchange.stage("proof");
    let (kind, answer) = exchange.either(kind, other)?;
    Ok((kind, challenge.to_vec(), answer))
}

/// The flags of the challenge on a control connection.
pub(super) fn flags(me: &Identity, require_token: bool, unix: bool) -> u8 {
    me.secret.over(unix).flag() | if require_token { FLAG_TOKEN } else { 0 }
}

/// The accepting end, once the connector has answered `challenge` with `reply`, up to but not including its own hello.
/// `flags`: those of the challenge.
pub(super) fn admit(
    exchange: &mut Exchange<'_>,
    me: &Identity,
    (challenge_bytes, reply_bytes): (&[u8], &[u8]),
    flags: u8,
    unix: bool,
) -> Result<Admitted> {
    let secret = me.secret.over(unix);
    let hello = me.hello.encode()?;
    let reply = Reply::decode(&WORKER, reply_bytes).map_err(|e| exchange.malformed(&e))?;
    terms::check_reply(&WORKER, flags, flags | FLAG_TOKEN, &reply).map_err(|reject| exchange.reject(&reject))?;
    let key = secret.key().map_err(|error| exchange.refuse(&terms::unreadable(&error)))?;
    let pre_shared = PreShared::new(reply.flags, &key, &me.hello.token);
    let Some(proof) = pre_shared.shared().answer(challenge_bytes, reply_bytes) else {
        let (text, reason) = match (reply.flags & FLAG_SECRET != 0, reply.flags & FLAG_TOKEN != 0) {
            (true, true) => ("wrong secret, or the token of another worker's address", Reason::SecretWrong),
            (true, false) => ("wrong secret", Reason::SecretWrong),
            (false, true) => ("the token of another worker's address", Reason::TokenWrong),
            (false, false) => ("wrong proof", Reason::Tampered),
        };
        if let Some(reject) = terms::foreign(secret, "worker") {
            return Err(exchange.reject(&reject));
        }
        return Err(exchange.reject(&Reject::new(RejectCode::Refused, text).because(reason)));
    };
    exchange.write(&proof.encode(&WORKER))?;
    let keys = pre_shared.keys(challenge_bytes, reply_bytes);

    exchange.stage("hello");
    let peer = receive_hello(exchange, &keys, true)?;
    if let Some(text) = me.hello.disagreement(&peer) {
        return Err(exchange.reject(&Reject::new(RejectCode::Mismatch, text).because(Reason::Parameters)));
    }
    let checksum = me.hello.checksum_with(&peer);
    let ticket = Ticket { session: keys.id, key: keys.lane, checksum };
    Ok(Admitted { agreed: Agreed { peer, ticket }, keys, hello })
}

/// A peer that has proved itself and is still waiting for this end's hello.
pub(super) struct Admitted {
    agreed: Agreed,
    keys: Keys,
    hello: Vec<u8>,
}

impl Admitted {
    /// The session that this peer is about to have.
    pub(super) fn session(&self) -> [u8; 16] {
        self.keys.id
    }

    /// Sends the hello, after which the peer may dial lanes.
    pub(super) fn confirm(self, exchange: &Exchange<'_>) -> Result<Agreed> {
        send_hello(exchange, &self.keys, false, &self.hello)?;
        Ok(self.agreed)
    }
}

fn send_hello(exchange: &Exchange<'_>, keys: &Keys, from_connector: bool, hello: &[u8]) -> Result<()> {
    let Ok(length) = u32::try_from(hello.len()) else {
        return Err(exchange.error(ErrorKind::Usage, "this worker's description is too long"));
    };
    let mut message = HelloHead { length, mac: keys.hello(from_connector, hello) }.encode().to_vec();
    message.extend_from_slice(hello);
    exchange.write(&message)
}

fn receive_hello(exchange: &Exchange<'_>, keys: &Keys, from_connector: bool) -> Result<Hello> {
    let head = HelloHead::decode(&exchange.message(Kind::Hello)?).map_err(|e| exchange.malformed(&e))?;
    let body = exchange.body(head.length as usize)?;
    if !keys.hello_holds(from_connector, &body, &head.mac) {
        return Err(exchange
            .reject(&Reject::new(RejectCode::Refused, "the hello was changed in transit").because(Reason::Tampered)));
    }
    decode_hello(&body).map_err(|e| exchange.malformed(&e))
}
