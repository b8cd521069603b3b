//! Requirements that each end checks before it verifies a proof, and the rejects that follow.

use std::fmt::Display;

use crossrail_types::{Error, Reason};
use nix::sys::resource::{Resource, getrlimit};
use nix::unistd::Uid;

use crate::message::{Challenge, FLAG_SECRET, FLAG_TOKEN, FLAG_USER, Protocol, Reject, RejectCode, Reply};
use crate::secret::Secret;

/// A reject to send, and what the user of this end can do about it.
pub(crate) struct Refusal {
    pub(crate) reject: Reject,
    pub(crate) hint: Option<&'static str>,
}

/// What to do when only one end has a secret, or the two differ.
pub(crate) const SAME_SECRET: &str = "set the same CROSSRAIL_SECRET or CROSSRAIL_SECRET_FILE at both ends";

/// What to do when the ends do not know the same user's token.
pub(crate) const SAME_USER: &str = "run both ends as the same user and, in containers, with the same /tmp, or set the \
                                    same CROSSRAIL_SECRET_FILE at both ends";

/// What to do about a proof of this kind that does not hold, and why it does not.
pub(crate) fn advice(flags: u8) -> (Reason, &'static str) {
    if flags & FLAG_USER != 0 { (Reason::UserDenied, SAME_USER) } else { (Reason::SecretWrong, SAME_SECRET) }
}

/// What an acceptor says to whom does not know its user's token.
pub(crate) fn foreign(secret: &Secret, what: &str) -> Option<Reject> {
    let Secret::User(token) = secret else { return None };
    let (user, path) = (Uid::effective(), token.path());
    let text = format!(
        "this {what} accepts processes of user {user} only, which share {}; set CROSSRAIL_SECRET_FILE at both ends for \
         others",
        path.display()
    );
    Some(Reject::new(RejectCode::Refused, text).because(Reason::UserDenied))
}

/// Reject for a peer whose request needs a file descriptor when none is left: retrying does not help, and the limit is
/// this end's own.
pub(crate) fn no_descriptor(why: impl Display) -> Reject {
    let limit = getrlimit(Resource::RLIMIT_NOFILE).map(|(soft, _)| format!(" is {soft}")).unwrap_or_default();
    let text = format!("{why}; its limit of open files{limit}: raise ulimit -n");
    Reject::new(RejectCode::Full, text).because(Reason::Descriptors)
}

/// Reject of an end that can no longer read its user's token.
pub(crate) fn unreadable(error: &Error) -> Refusal {
    if error.reason == Some(Reason::Descriptors) {
        return Refusal { reject: no_descriptor(&*error.detail), hint: None };
    }
    refusal(RejectCode::Refused, Reason::UserDenied, &*error.detail, Some(SAME_USER))
}

fn refusal(code: RejectCode, reason: Reason, text: impl Into<String>, hint: Option<&'static str>) -> Refusal {
    Refusal { reject: Reject::new(code, text).because(reason), hint }
}

/// Whether the connector may answer this challenge: it is of this end's version.
pub(crate) fn check_challenge(protocol: &Protocol, challenge: &Challenge) -> Result<(), Refusal> {
    if challenge.version == protocol.version {
        return Ok(());
    }
    let text = versions_differ(protocol.version, challenge.version);
    let hint = "run the same release of Crossrail at both ends";
    Err(refusal(RejectCode::Mismatch, Reason::Version, text, Some(hint)))
}

/// The flags of the connector's proof, or why it cannot meet the challenge. An acceptor that ought to ask for the
/// secret and does not is refused: it may be an impostor.
pub(crate) fn offered(secret: &Secret, has_token: bool, challenge: &Challenge) -> Result<u8, Refusal> {
    if challenge.flags & !(FLAG_SECRET | FLAG_TOKEN | FLAG_USER) != 0 {
        let text = format!("the listening end asks for a proof of an unknown kind ({:#04x})", challenge.flags);
        return Err(refusal(RejectCode::Mismatch, Reason::Version, text, None));
    }
    match (secret.is_shared(), challenge.flags & FLAG_SECRET != 0) {
        (false, true) => {
            let text = "the listening end has a secret, the connecting end has none";
            return Err(refusal(RejectCode::Refused, Reason::SecretMissing, text, Some(SAME_SECRET)));
        }
        (true, false) => {
            let text = "the connecting end has a secret, the listening end has none";
            return Err(refusal(RejectCode::Refused, Reason::SecretMissing, text, Some(SAME_SECRET)));
        }
        (true, true) | (false, false) => {}
    }
    match (secret, challenge.flags & FLAG_USER != 0) {
        (Secret::User(_), false) => {
            let text = "the listening end does not ask for its user's token: it cannot make one";
            return Err(refusal(RejectCode::Refused, Reason::UserDenied, text, Some(SAME_USER)));
        }
        (Secret::None | Secret::Shared(_), true) => {
            let text = "the listening end accepts processes of its own user only, and the connecting end has no token";
            return Err(refusal(RejectCode::Refused, Reason::UserDenied, text, Some(SAME_USER)));
        }
        _ => {}
    }
    if challenge.flags & FLAG_TOKEN != 0 && !has_token {
        let text = "the listening end admits only holders of its worker address";
        let hint = "connect with Worker.address instead of host:port, or set CROSSRAIL_SECRET at both ends";
        return Err(refusal(RejectCode::Refused, Reason::TokenMissing, text, Some(hint)));
    }
    Ok((challenge.flags & (FLAG_SECRET | FLAG_USER)) | if has_token { FLAG_TOKEN } else { 0 })
}

/// Whether the acceptor may go on with a connector of this version.
pub(crate) fn check_version(protocol: &Protocol, version: u16) -> Result<(), Reject> {
    if version == protocol.version {
        return Ok(());
    }
    let text = versions_differ(version, protocol.version);
    Err(Reject::new(RejectCode::Mismatch, text).because(Reason::Version))
}

fn versions_differ(connecting: u16, listening: u16) -> String {
    format!("protocol version {connecting} at the connecting end, {listening} at the listening end")
}

/// Whether the acceptor may look at this reply's proof: it has every flag of `required`, and none beyond `accepted`.
pub(crate) fn check_reply(protocol: &Protocol, required: u8, accepted: u8, reply: &Reply) -> Result<(), Reject> {
    check_version(protocol, reply.version)?;
    if reply.flags & required != required || reply.flags & !accepted != 0 {
        return Err(Reject::new(RejectCode::Protocol, "the proof is not of the kind asked for"));
    }
    Ok(())
}
