//! The order of messages. On a control connection:
//!
//! ```text
//! connector                         acceptor
//!              <- Challenge         versions, what the proof must contain, nonce
//! Reply ->                          version, nonce, proof over all of the above
//!              <- Proof             the acceptor knew the secret too
//! Hello ->                          from here on sizes vary, and only proven peers get here
//!              <- Hello             or a Reject that says what differs
//! ```
//!
//! On a data connection: Challenge, LaneHello, Proof.

use crossrail_types::{ErrorKind, Result};

use super::address::Address;
use super::hello::{Hello, Identity, decode_hello};
use super::keys::{self, Keys, Known};
use super::wire::{
    self, CHALLENGE_LEN, Challenge, FLAG_SECRET, FLAG_TOKEN, HELLO_HEAD_LEN, HelloHead, Kind, LANE_HELLO_LEN,
    LaneHello, PROOF_LEN, REPLY_LEN, RejectCode, Reply, VERSION_MAX, VERSION_MIN,
};
use super::{LaneName, Ticket};
use crate::exchange::Talk;

/// What both ends hold after a handshake.
pub(super) struct Met {
    pub(super) peer: Hello,
    pub(super) ticket: Ticket,
    pub(super) version: u16,
}

/// The connecting end of a control connection. `expect`: the worker sought, where its address is known.
pub(super) fn initiate(
    talk: &mut Talk<'_>,
    me: &Identity,
    expect: Option<&Address>,
    replaces: Option<[u8; 16]>,
) -> Result<Met> {
    let mut hello = me.hello.clone();
    hello.replaces = replaces;
    let hello = hello.encode()?;

    talk.stage("challenge");
    let challenge_bytes = talk.message::<CHALLENGE_LEN>(Kind::Challenge)?;
    let challenge = wire::decode_challenge(&challenge_bytes).map_err(|e| talk.malformed(&e))?;
    let version = common_version(talk, &challenge)?;
    if expect.is_some_and(|address| address.worker != challenge.worker) {
        return Err(talk.error(ErrorKind::Unreachable, "another worker listens here now; the one sought is gone"));
    }

    talk.stage("proof");
    let flags = offered_proof(talk, me, &challenge, expect.is_some())?;
    let token = expect.map_or([0; 16], |address| address.token);
    let known = Known::new(flags, me.secret.bytes(), &token);
    let mut reply = Reply { version, flags, nonce: keys::random()?, mac: [0; 32] };
    reply.mac = known.connector(&challenge_bytes, &reply.encode());
    let reply_bytes = reply.encode();
    talk.write(&reply_bytes)?;
    let keys = known.keys(&challenge_bytes, &reply_bytes);
    let proof = wire::decode_proof(&talk.message::<PROOF_LEN>(Kind::Proof)?).map_err(|e| talk.malformed(&e))?;
    if !keys.acceptor_holds(&proof) {
        return Err(talk.reject(RejectCode::Refused, "the listening end does not know the secret"));
    }

    talk.stage("hello");
    send_hello(talk, &keys, true, &hello)?;
    let peer = receive_hello(talk, &keys, false)?;
    if peer.worker != challenge.worker {
        return Err(talk.reject(RejectCode::Protocol, "the hello is another worker's than the challenge"));
    }
    if let Some(text) = peer.disagreement(&me.hello) {
        return Err(talk.reject(RejectCode::Mismatch, &text));
    }
    Ok(Met { peer, ticket: Ticket { session: keys.id, key: keys.lane }, version })
}

fn common_version(talk: &Talk<'_>, challenge: &Challenge) -> Result<u16> {
    let version = challenge.version_max.min(VERSION_MAX);
    if version >= challenge.version_min.max(VERSION_MIN) {
        return Ok(version);
    }
    let text = format!(
        "protocol versions {VERSION_MIN} to {VERSION_MAX} at the connecting end, {} to {} at the listening end",
        challenge.version_min, challenge.version_max
    );
    Err(talk
        .reject(RejectCode::Mismatch, &text)
        .with_hint("run Crossrail releases of the same protocol version at both ends"))
}

/// What the connecting end puts into its proof, or why it cannot satisfy the challenge. A peer that should ask for
/// the secret and does not is refused: it may be someone else.
fn offered_proof(talk: &Talk<'_>, me: &Identity, challenge: &Challenge, has_token: bool) -> Result<u8> {
    const SAME_SECRET: &str = "set the same CROSSRAIL_SECRET or CROSSRAIL_SECRET_FILE at both ends";
    if challenge.flags & !(FLAG_SECRET | FLAG_TOKEN) != 0 {
        let text = format!("the listening end asks for a proof of an unknown kind ({:#04x})", challenge.flags);
        return Err(talk.reject(RejectCode::Mismatch, &text));
    }
    match (me.secret.is_shared(), challenge.flags & FLAG_SECRET != 0) {
        (false, true) => {
            let text = "the listening end has a secret, the connecting end has none";
            return Err(talk.reject(RejectCode::Refused, text).with_hint(SAME_SECRET));
        }
        (true, false) => {
            let text = "the connecting end has a secret, the listening end has none";
            return Err(talk.reject(RejectCode::Refused, text).with_hint(SAME_SECRET));
        }
        (true, true) | (false, false) => {}
    }
    if challenge.flags & FLAG_TOKEN != 0 && !has_token {
        let text = "the listening end admits only holders of its worker address";
        return Err(talk
            .reject(RejectCode::Refused, text)
            .with_hint("connect with Worker.address instead of host:port, or set CROSSRAIL_SECRET at both ends"));
    }
    Ok((challenge.flags & FLAG_SECRET) | if has_token { FLAG_TOKEN } else { 0 })
}

/// The accepting end of a control connection, up to but not including its own hello.
pub(super) fn admit(talk: &mut Talk<'_>, me: &Identity, require_token: bool) -> Result<Admitted> {
    let hello = me.hello.encode()?;
    let required = required_flags(me, require_token);

    talk.stage("challenge");
    let challenge = Challenge {
        version_min: VERSION_MIN,
        version_max: VERSION_MAX,
        flags: required,
        worker: me.hello.worker,
        nonce: keys::random()?,
    };
    let challenge_bytes = challenge.encode();
    talk.write(&challenge_bytes)?;

    talk.stage("proof");
    let reply_bytes = talk.message::<REPLY_LEN>(Kind::Reply)?;
    let reply = wire::decode_reply(&reply_bytes).map_err(|e| talk.malformed(&e))?;
    check_version(talk, reply.version)?;
    if reply.flags & required != required || reply.flags & !(required | FLAG_TOKEN) != 0 {
        return Err(talk.reject(RejectCode::Protocol, "the proof is not of the kind asked for"));
    }
    let known = Known::new(reply.flags, me.secret.bytes(), &me.hello.token);
    if !known.connector_holds(&challenge_bytes, &reply_bytes, &reply.mac) {
        let text = match (reply.flags & FLAG_SECRET != 0, reply.flags & FLAG_TOKEN != 0) {
            (true, true) => "wrong secret, or the token of another worker's address",
            (true, false) => "wrong secret",
            (false, true) => "the token of another worker's address",
            (false, false) => "wrong proof",
        };
        return Err(talk.reject(RejectCode::Refused, text));
    }
    let keys = known.keys(&challenge_bytes, &reply_bytes);
    talk.write(&wire::encode_proof(&keys.acceptor()))?;

    talk.stage("hello");
    let peer = receive_hello(talk, &keys, true)?;
    if let Some(text) = me.hello.disagreement(&peer) {
        return Err(talk.reject(RejectCode::Mismatch, &text));
    }
    let ticket = Ticket { session: keys.id, key: keys.lane };
    Ok(Admitted { met: Met { peer, ticket, version: reply.version }, keys, hello })
}

/// A peer that has proved itself and is still waiting for this end's hello.
pub(super) struct Admitted {
    pub(super) met: Met,
    keys: Keys,
    hello: Vec<u8>,
}

impl Admitted {
    /// Sends the hello, after which the peer may dial lanes.
    pub(super) fn confirm(self, talk: &Talk<'_>) -> Result<Met> {
        send_hello(talk, &self.keys, false, &self.hello)?;
        Ok(self.met)
    }
}

fn required_flags(me: &Identity, require_token: bool) -> u8 {
    (if me.secret.is_shared() { FLAG_SECRET } else { 0 }) | (if require_token { FLAG_TOKEN } else { 0 })
}

fn check_version(talk: &Talk<'_>, version: u16) -> Result<()> {
    if (VERSION_MIN..=VERSION_MAX).contains(&version) {
        return Ok(());
    }
    let text = format!(
        "protocol version {version} at the connecting end, {VERSION_MIN} to {VERSION_MAX} at the listening end"
    );
    Err(talk.reject(RejectCode::Mismatch, &text))
}

fn send_hello(talk: &Talk<'_>, keys: &Keys, from_connector: bool, hello: &[u8]) -> Result<()> {
    let Ok(length) = u32::try_from(hello.len()) else {
        return Err(talk.error(ErrorKind::Usage, "this worker's description is too long"));
    };
    let mut message = HelloHead { length, mac: keys.hello(from_connector, hello) }.encode().to_vec();
    message.extend_from_slice(hello);
    talk.write(&message)
}

fn receive_hello(talk: &Talk<'_>, keys: &Keys, from_connector: bool) -> Result<Hello> {
    let head = talk.message::<HELLO_HEAD_LEN>(Kind::Hello)?;
    let head = wire::decode_hello_head(&head).map_err(|e| talk.malformed(&e))?;
    let body = talk.body(head.length as usize)?;
    if !keys.hello_holds(from_connector, &body, &head.mac) {
        return Err(talk.reject(RejectCode::Refused, "the hello was changed on its way"));
    }
    decode_hello(&body).map_err(|e| talk.malformed(&e))
}

/// The connecting end of a data connection.
pub(super) fn initiate_lane(talk: &mut Talk<'_>, ticket: &Ticket, lane: LaneName) -> Result<()> {
    talk.stage(format!("{lane}: challenge"));
    let challenge_bytes = talk.message::<CHALLENGE_LEN>(Kind::Challenge)?;
    let challenge = wire::decode_challenge(&challenge_bytes).map_err(|e| talk.malformed(&e))?;
    let version = common_version(talk, &challenge)?;

    talk.stage(format!("{lane}: proof"));
    let mut hello = LaneHello {
        version,
        purpose: lane.purpose,
        rail: lane.rail,
        channel: lane.channel,
        session: ticket.session,
        nonce: keys::random()?,
        mac: [0; 32],
    };
    hello.mac = keys::lane_connector(&ticket.key, &challenge_bytes, &hello.encode());
    let hello_bytes = hello.encode();
    talk.write(&hello_bytes)?;
    let proof = wire::decode_proof(&talk.message::<PROOF_LEN>(Kind::Proof)?).map_err(|e| talk.malformed(&e))?;
    if !keys::lane_acceptor_holds(&ticket.key, &challenge_bytes, &hello_bytes, &proof) {
        return Err(talk.reject(RejectCode::Refused, "the listening end does not know the session's key"));
    }
    Ok(())
}

/// Finds the lane key of a session, `None` when there is no such session.
pub(super) type FindKey<'a> = &'a dyn Fn(&Talk<'_>, &[u8; 16]) -> Result<Option<[u8; 32]>>;

/// The accepting end of a data connection, up to but not including its proof. `key` finds the session's lane key.
pub(super) fn admit_lane(talk: &mut Talk<'_>, me: &Identity, key: FindKey<'_>) -> Result<([u8; 16], LaneName)> {
    talk.stage("lane: challenge");
    let challenge = Challenge {
        version_min: VERSION_MIN,
        version_max: VERSION_MAX,
        flags: required_flags(me, false),
        worker: me.hello.worker,
        nonce: keys::random()?,
    };
    let challenge_bytes = challenge.encode();
    talk.write(&challenge_bytes)?;

    talk.stage("lane: proof");
    let hello_bytes = talk.message::<LANE_HELLO_LEN>(Kind::LaneHello)?;
    let hello = wire::decode_lane_hello(&hello_bytes).map_err(|e| talk.malformed(&e))?;
    let lane = LaneName { rail: hello.rail, channel: hello.channel, purpose: hello.purpose };
    talk.stage(lane.to_string());
    check_version(talk, hello.version)?;
    let Some(key) = key(talk, &hello.session)? else {
        return Err(talk.reject(RejectCode::Refused, "no such session; it may have been closed"));
    };
    if !keys::lane_connector_holds(&key, &challenge_bytes, &hello_bytes, &hello.mac) {
        return Err(talk.reject(RejectCode::Refused, "wrong key for this session"));
    }
    talk.write(&wire::encode_proof(&keys::lane_acceptor(&key, &challenge_bytes, &hello_bytes)))?;
    Ok((hello.session, lane))
}
