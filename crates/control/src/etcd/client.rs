//! The members of an etcd cluster: selection, failover, and the meaning of their errors.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossrail_handshake::resolve;
use crossrail_types::{Error, ErrorKind, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::http::{Answer, Connection, Content, Failure, remaining};
use super::messages::Fault;

/// Scheme of an etcd store's address.
const SCHEME: &str = "etcd://";
/// etcd's default port.
const DEFAULT_PORT: u16 = 2379;
/// Idle connections kept per member.
const MOST_IDLE: usize = 4;
/// gRPC's code for an unauthenticated user.
const UNAUTHENTICATED: u32 = 16;
/// gRPC's code for a transient failure.
const UNAVAILABLE: u32 = 14;
/// An election takes about a second.
const ELECTION_PAUSE: Duration = Duration::from_millis(50);
const GONE: &str = "check that etcd runs there; everything that does not need the store continues";

/// Whether a request may be retried when it is unknown whether it was executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// Made again at the next member.
    Reads,
    /// Never made twice.
    Changes,
}

#[derive(Debug)]
struct Member {
    /// As the user wrote it.
    host: String,
    name: String,
    port: u16,
    idle: Mutex<Vec<Connection>>,
}

/// Why a member did not execute a request: no response, or a response with an error.
enum MemberError {
    Failure(Failure),
    Fault(Fault),
}

impl From<Failure> for MemberError {
    fn from(failure: Failure) -> MemberError {
        MemberError::Failure(failure)
    }
}

/// The outcome of asking every member once, when none succeeded.
struct Round {
    reasons: Vec<String>,
    kind: ErrorKind,
    /// One of them responded that a retry may succeed.
    electing: bool,
}

/// Everything that talks to the cluster goes through one of these. Any thread.
#[derive(Debug)]
pub(super) struct Client {
    members: Vec<Member>,
    /// The member that answered last.
    current: AtomicUsize,
}

impl Client {
    /// Reads `etcd://host[:port][,host[:port]]`.
    pub(super) fn parse(address: &str) -> Result<Client> {
        let bad = |what: String| {
            Error::new(ErrorKind::Config, "CROSSRAIL_STORE", format!("{address:?} {what}"))
                .with_hint("accepted: etcd://host:port, or several: etcd://host:port,host:port")
        };
        let list = address.strip_prefix(SCHEME).ok_or_else(|| bad(format!("does not begin with {SCHEME}")))?;
        let mut members = Vec::new();
        for host in list.trim_end_matches('/').split(',').map(str::trim) {
            let (name, port) = split(host).map_err(bad)?;
            let host = if name.contains(':') { format!("[{name}]:{port}") } else { format!("{name}:{port}") };
            members.push(Member { host, name: name.to_owned(), port, idle: Mutex::new(Vec::new()) });
        }
        Ok(Client { members, current: AtomicUsize::new(0) })
    }

    /// As [`Client::parse`] reads it.
    pub(super) fn address(&self) -> String {
        let hosts: Vec<&str> = self.members.iter().map(|member| member.host.as_str()).collect();
        format!("{SCHEME}{}", hosts.join(","))
    }

    /// Makes a request and reads its answer.
    pub(super) fn call<A: DeserializeOwned>(
        &self,
        operation: &str,
        path: &str,
        request: &impl Serialize,
        effect: Effect,
        deadline: Instant,
    ) -> Result<A> {
        let body = self.encode(operation, request)?;
        let answer = self.ask(operation, effect, deadline, |member, connect_by, by| {
            let mut connection = member.connection(connect_by)?;
            let (answer, reusable) = connection.exchange(path, &body, by)?;
            if reusable {
                member.keep(connection);
            }
            accept(answer)
        })?;
        serde_json::from_slice(&answer)
            .map_err(|e| self.foreign(operation, &format!("an answer to {path} that cannot be read: {e}")))
    }

    /// Makes a request with a streamed response; from then on the connection is the caller's.
    pub(super) fn stream(
        &self,
        operation: &str,
        path: &str,
        request: &impl Serialize,
        deadline: Instant,
    ) -> Result<(Connection, Content)> {
        let body = self.encode(operation, request)?;
        self.ask(operation, Effect::Reads, deadline, |member, connect_by, by| {
            let mut connection = member.connection(connect_by)?;
            let head = connection.request(path, &body, by)?;
            if head.status == 200 {
                return Ok((connection, head.content));
            }
            let answer = connection.finish(head, by)?;
            let status = answer.status;
            accept(answer).and(Err(Failure::Foreign(format!("status {status}")).into()))
        })
    }

    /// The error for etcd's own error.
    pub(super) fn refused(&self, operation: &str, fault: &Fault) -> Error {
        // The numbers are gRPC's.
        let login = is_login(&fault.message);
        let (kind, hint) = match fault.code {
            3 if !login => (ErrorKind::Usage, None),
            4 => (ErrorKind::Timeout, None),
            5 => (ErrorKind::Closed, Some("the lease has ended, and with it its keys")),
            3 | 7 | UNAUTHENTICATED => (ErrorKind::Refused, Some("stores with users and roles are not supported")),
            8 => (
                ErrorKind::Exhausted,
                Some("compact and defragment etcd, then `etcdctl alarm disarm`; or raise --quota-backend-bytes"),
            ),
            11 => (ErrorKind::Usage, None),
            UNAVAILABLE => (ErrorKind::Unreachable, Some(GONE)),
            _ => (ErrorKind::Protocol, None),
        };
        let error = Error::new(kind, operation, format!("{} says: {}", self.address(), fault.message));
        match hint {
            Some(hint) => error.with_hint(hint),
            None => error,
        }
    }

    /// The error for a watch that etcd cancels, with a reason but no code.
    pub(super) fn canceled(&self, operation: &str, reason: &str) -> Error {
        let message = if reason.is_empty() { "the watch was canceled" } else { reason }.to_owned();
        let code = if is_login(&message) { UNAUTHENTICATED } else { UNAVAILABLE };
        self.refused(operation, &Fault { code, message })
    }

    /// The error for an answer that is not etcd's.
    pub(super) fn foreign(&self, operation: &str, what: &str) -> Error {
        Error::new(ErrorKind::Protocol, operation, format!("{} does not answer as etcd does: {what}", self.address()))
            .with_hint(
                "etcd 3.4 or later is needed, with its JSON gateway (on unless --enable-grpc-gateway=false), no TLS",
            )
    }

    /// The error for an unreachable store.
    pub(super) fn gone(&self, operation: &str, why: &str) -> Error {
        Error::new(ErrorKind::Unreachable, operation, format!("{} cannot be reached: {why}", self.address()))
            .with_hint(GONE)
    }

    fn encode(&self, operation: &str, request: &impl Serialize) -> Result<Vec<u8>> {
        serde_json::to_vec(request).map_err(|e| Error::new(ErrorKind::Usage, operation, format!("{e}")))
    }

    /// Calls `exchange` with one member after the other until one answers, with the deadlines for connecting and for
    /// the answer. Retries while the members elect a leader.
    fn ask<A>(
        &self,
        operation: &str,
        effect: Effect,
        deadline: Instant,
        exchange: impl Fn(&Member, Instant, Instant) -> std::result::Result<A, MemberError>,
    ) -> Result<A> {
        let started = Instant::now();
        loop {
            let mut round = Round { reasons: Vec::new(), kind: ErrorKind::Timeout, electing: false };
            if let Some(end) = self.ask_each(operation, effect, deadline, &exchange, &mut round) {
                return end;
            }
            if round.electing && remaining(deadline).is_some_and(|time| time > ELECTION_PAUSE) {
                std::thread::sleep(ELECTION_PAUSE);
                continue;
            }
            return Err(self.unanswered(operation, &round, started));
        }
    }

    /// Asks each member once; `None` if none answered, with the reasons in `round`.
    fn ask_each<A>(
        &self,
        operation: &str,
        effect: Effect,
        deadline: Instant,
        exchange: &impl Fn(&Member, Instant, Instant) -> std::result::Result<A, MemberError>,
        round: &mut Round,
    ) -> Option<Result<A>> {
        let (count, first) = (self.members.len(), self.current.load(Ordering::Relaxed));
        for tried in 0..count {
            let index = (first + tried) % count;
            let (member, left) = (self.members.get(index)?, remaining(deadline)?);
            let share = Instant::now() + left / u32::try_from(count - tried).unwrap_or(u32::MAX);
            let by = if effect == Effect::Reads { share } else { deadline };
            let error = match exchange(member, share, by) {
                Ok(answer) => {
                    self.current.store(index, Ordering::Relaxed);
                    return Some(Ok(answer));
                }
                Err(error) => error,
            };
            self.current.store((index + 1) % count, Ordering::Relaxed);
            let (why, undone) = match error {
                MemberError::Fault(fault) if fault.code != UNAVAILABLE => {
                    self.current.store(index, Ordering::Relaxed);
                    return Some(Err(self.refused(operation, &fault)));
                }
                MemberError::Failure(Failure::Foreign(what)) => return Some(Err(self.foreign(operation, &what))),
                MemberError::Fault(fault) => {
                    round.electing = true;
                    // etcd has no code for it: the only transient failure that is certain to precede execution.
                    let undone = fault.message.contains("no leader");
                    (fault.message, undone)
                }
                MemberError::Failure(Failure::Unreached(why)) => (why, true),
                MemberError::Failure(Failure::Broken(why)) => (why, false),
                MemberError::Failure(Failure::Late) => ("no answer".to_owned(), false),
            };
            round.kind =
                if remaining(deadline).is_some() || undone { ErrorKind::Unreachable } else { ErrorKind::Timeout };
            round.reasons.push(format!("{}: {why}", member.host));
            if effect == Effect::Changes && !undone {
                round.electing = false;
                round.reasons.push("the change may or may not have been made".to_owned());
                break;
            }
        }
        None
    }

    fn unanswered(&self, operation: &str, round: &Round, started: Instant) -> Error {
        let why = if round.reasons.is_empty() { "no time was left".to_owned() } else { round.reasons.join(", ") };
        if round.kind == ErrorKind::Unreachable {
            return self.gone(operation, &why);
        }
        let what = format!("{} did not answer: {why}", self.address());
        Error::new(ErrorKind::Timeout, operation, what).with_waited(started.elapsed()).with_hint(GONE)
    }
}

impl Member {
    /// An idle connection, or a new one.
    fn connection(&self, deadline: Instant) -> std::result::Result<Connection, Failure> {
        loop {
            let waiting = lock(&self.idle).pop();
            match waiting {
                Some(connection) if connection.is_fresh() => return Ok(connection),
                Some(_) => {}
                None => return Connection::open(&self.host, &self.resolve(deadline)?, deadline),
            }
        }
    }

    fn keep(&self, connection: Connection) {
        let mut idle = lock(&self.idle);
        if idle.len() < MOST_IDLE {
            idle.push(connection);
        }
    }

    /// The addresses of the member's host name.
    fn resolve(&self, deadline: Instant) -> std::result::Result<Vec<SocketAddr>, Failure> {
        if let Ok(ip) = self.name.parse() {
            return Ok(vec![SocketAddr::new(ip, self.port)]);
        }
        resolve("store", &self.name, self.port, deadline).map_err(|error| Failure::Unreached(error.detail))
    }
}

/// Whether etcd asks for authentication, which it reports by text only.
fn is_login(message: &str) -> bool {
    ["user name", "auth", "permission denied"].iter().any(|words| message.contains(words))
}

/// The content of a successful answer.
fn accept(answer: Answer) -> std::result::Result<Vec<u8>, MemberError> {
    if answer.status == 200 {
        return Ok(answer.body);
    }
    match serde_json::from_slice(&answer.body) {
        Ok(fault) => Err(MemberError::Fault(fault)),
        Err(_) => Err(Failure::Foreign(format!("status {}", answer.status)).into()),
    }
}

/// Host and port; an IPv6 address stands in brackets when a port follows.
fn split(host: &str) -> std::result::Result<(&str, u16), String> {
    let port_of = |port: &str| {
        let port = port.parse().ok().filter(|port| *port != 0);
        port.ok_or_else(|| format!("has a port in {host:?} that is none"))
    };
    let (name, port) = if let Some(rest) = host.strip_prefix('[') {
        let (name, rest) =
            rest.split_once(']').ok_or_else(|| format!("has a bracket in {host:?} that does not close"))?;
        match rest.strip_prefix(':') {
            Some(port) => (name, port_of(port)?),
            None if rest.is_empty() => (name, DEFAULT_PORT),
            None => return Err(format!("has something after the bracket in {host:?}")),
        }
    } else {
        match host.split_once(':') {
            Some((_, port)) if port.contains(':') => (host, DEFAULT_PORT),
            Some((name, port)) => (name, port_of(port)?),
            None => (host, DEFAULT_PORT),
        }
    };
    let is_host = |c: char| c.is_ascii_alphanumeric() || "-._:".contains(c);
    if name.is_empty() || !name.chars().all(is_host) {
        return Err(format!("names {host:?}, which is no host"));
    }
    Ok((name, port))
}

/// Locks a mutex whose contents are consistent at every moment, even after a panic elsewhere.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_name_one_member_or_several() {
        for (text, read) in [
            ("etcd://10.0.0.1:7400", "etcd://10.0.0.1:7400"),
            ("etcd://one", "etcd://one:2379"),
            ("etcd://one:1, two:2/", "etcd://one:1,two:2"),
            ("etcd://[::1]:5", "etcd://[::1]:5"),
            ("etcd://::1", "etcd://[::1]:2379"),
        ] {
            assert_eq!(Client::parse(text).unwrap().address(), read);
        }
        for text in
            ["tcp://one:1", "etcd://", "etcd://one,", "etcd://one:0", "etcd://one:x", "etcd://[::1", "etcd://a b"]
        {
            let error = Client::parse(text).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Config, "{text}");
            assert!(error.detail.contains(text), "{error}");
        }
    }
}
