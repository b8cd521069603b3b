use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Instant;

use crossrail_types::{Error, ErrorKind, Reason, Result};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, recv, send};

use crate::message::{Challenge, Kind, Malformed, PRELUDE_LEN, Proof, Protocol, REJECT_LEN, Reject, RejectCode};
use crate::proof::Shared;
use crate::terms::{Refusal, advice};

/// The time until `deadline` in poll's terms, rounded up: a wait that ends early would spin.
pub(crate) fn poll_timeout(deadline: Instant) -> PollTimeout {
    let left = deadline.saturating_duration_since(Instant::now());
    let millis = left.as_micros().div_ceil(1000).min(i32::MAX as u128);
    PollTimeout::try_from(millis as i32).unwrap_or(PollTimeout::MAX)
}

/// One end of a handshake on one connection: reads and writes whole messages until a deadline, and words the errors.
///
/// The connection may be in blocking or nonblocking mode. Nothing is read from it beyond the messages asked for.
pub(crate) struct Exchange<'a> {
    fd: BorrowedFd<'a>,
    protocol: &'static Protocol,
    /// Becomes readable when the listener stops.
    stop: Option<BorrowedFd<'a>>,
    operation: String,
    peer: String,
    stage: String,
    started: Instant,
    deadline: Instant,
    /// The peer may already be reading frames: no reject is sent any more.
    rejects_stopped: bool,
}

impl<'a> Exchange<'a> {
    pub(crate) fn new(
        fd: BorrowedFd<'a>,
        protocol: &'static Protocol,
        operation: impl Into<String>,
        peer: impl Into<String>,
        deadline: Instant,
    ) -> Exchange<'a> {
        let (operation, peer, stage) = (operation.into(), peer.into(), "connect".to_owned());
        Exchange {
            fd,
            protocol,
            stop: None,
            operation,
            peer,
            stage,
            started: Instant::now(),
            deadline,
            rejects_stopped: false,
        }
    }

    /// Ends every wait with `Closed` once `stop` is readable.
    pub(crate) fn stopped_by(mut self, stop: BorrowedFd<'a>) -> Exchange<'a> {
        self.stop = Some(stop);
        self
    }

    /// Counts the time that errors name from `started`.
    pub(crate) fn since(mut self, started: Instant) -> Exchange<'a> {
        self.started = started;
        self
    }

    /// Closes silently from now on, whatever fails: the peer may already use the connection as a lane, and would read a
    /// reject as a frame.
    pub(crate) fn stop_rejects(&mut self) {
        self.rejects_stopped = true;
    }

    /// Names the next step, for errors.
    pub(crate) fn stage(&mut self, stage: impl Into<String>) {
        self.stage = stage.into();
    }

    /// An error at this stage.
    pub(crate) fn error(&self, kind: ErrorKind, detail: impl AsRef<str>) -> Error {
        let detail = format!("{}: {}", self.stage, detail.as_ref());
        Error::new(kind, &self.operation, detail).with_peer(&self.peer).with_waited(self.started.elapsed())
    }

    /// The error for a peer that broke the protocol or speaks another one. Only the former can read a reject.
    pub(crate) fn malformed(&self, error: &Malformed) -> Error {
        if !matches!(error, Malformed::Foreign { .. }) {
            self.send_reject(&Reject::new(RejectCode::Protocol, error.to_string()));
        }
        let foreign = matches!(error, Malformed::Foreign { .. });
        let failure = self.error(ErrorKind::Protocol, error.to_string()).with_source(error.clone());
        if foreign { failure.with_reason(Reason::Foreign) } else { failure }
    }

    /// Sends `reject`; returns the matching error for this end. Never blocks: the message fits into any socket's
    /// buffer, and a peer that lets that fill up does not read it anyway.
    pub(crate) fn reject(&self, reject: &Reject) -> Error {
        self.send_reject(reject);
        Error { reason: reject.reason, ..self.error(reject.code.kind(), &reject.text) }
    }

    /// As [`Exchange::reject`], with a hint for this end's user.
    pub(crate) fn refuse(&self, refusal: &Refusal) -> Error {
        let error = self.reject(&refusal.reject);
        match refusal.hint {
            Some(hint) => error.with_hint(hint),
            None => error,
        }
    }

    fn send_reject(&self, reject: &Reject) {
        if !self.rejects_stopped {
            send_reject(self.fd, self.protocol, reject);
        }
    }

    /// Waits for `events`. An early return without error is possible.
    fn wait(&self, events: PollFlags, progress: &dyn Fn() -> String) -> Result<()> {
        let mut fds = vec![PollFd::new(self.fd, events)];
        if let Some(stop) = self.stop {
            fds.push(PollFd::new(stop, PollFlags::POLLIN));
        }
        match poll(&mut fds, poll_timeout(self.deadline)) {
            Ok(0) if Instant::now() >= self.deadline => {
                let error = self.error(ErrorKind::Timeout, progress());
                self.send_reject(&Reject::new(RejectCode::Timeout, &error.detail));
                Err(error)
            }
            Ok(_) if fds.get(1).and_then(PollFd::any).unwrap_or(false) => {
                Err(self.error(ErrorKind::Closed, "this worker is closing"))
            }
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(e) => Err(self.system("poll", e)),
        }
    }

    fn system(&self, call: &str, e: Errno) -> Error {
        let (kind, reason) = match e {
            Errno::ECONNRESET | Errno::EPIPE => (ErrorKind::Unreachable, Some(Reason::ConnectionClosed)),
            Errno::ECONNREFUSED | Errno::ENETUNREACH | Errno::EHOSTUNREACH => (ErrorKind::Unreachable, None),
            Errno::ETIMEDOUT => (ErrorKind::Timeout, Some(Reason::NoResponse)),
            _ => (ErrorKind::Io, None),
        };
        let source = std::io::Error::from(e);
        Error { reason, ..self.error(kind, format!("{call}: {source}")).with_source(source) }
    }

    /// Fills `buf`, of which `done` bytes have been received already.
    fn fill(&self, buf: &mut [u8], mut done: usize) -> Result<()> {
        while done < buf.len() {
            let total = buf.len();
            match recv(self.fd.as_raw_fd(), &mut buf[done..], MsgFlags::MSG_DONTWAIT) {
                Ok(0) if done == 0 => {
                    let error = self.error(ErrorKind::Unreachable, "the peer closed the connection");
                    return Err(error.with_reason(Reason::ConnectionClosed));
                }
                Ok(0) => {
                    let detail = format!("the peer closed the connection after {done} of {total} bytes");
                    return Err(self.error(ErrorKind::Protocol, detail).with_reason(Reason::ConnectionClosed));
                }
                Ok(n) => done += n,
                Err(Errno::EAGAIN) => self.wait(PollFlags::POLLIN, &|| match done {
                    0 => "nothing received".to_owned(),
                    done => format!("only {done} of {total} bytes received"),
                })?,
                Err(Errno::EINTR) => {}
                Err(e) => return Err(self.system("recv", e)),
            }
        }
        Ok(())
    }

    /// Reads `length` bytes that follow a message.
    pub(crate) fn body(&self, length: usize) -> Result<Vec<u8>> {
        let mut body = vec![0; length];
        self.fill(&mut body, 0)?;
        Ok(body)
    }

    /// Writes all of `bytes`.
    pub(crate) fn write(&self, bytes: &[u8]) -> Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            match send(self.fd.as_raw_fd(), &bytes[done..], MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL) {
                Ok(n) => done += n,
                Err(Errno::EAGAIN) => {
                    let total = bytes.len();
                    self.wait(PollFlags::POLLOUT, &|| format!("the peer accepted only {done} of {total} bytes"))?;
                }
                Err(Errno::EINTR) => {}
                // The peer may have sent its reason before it closed.
                Err(e) => return Err(self.pending_reject().unwrap_or_else(|| self.system("send", e))),
            }
        }
        Ok(())
    }

    /// The reject that the peer sent before it closed, if the socket still holds one.
    fn pending_reject(&self) -> Option<Error> {
        let mut bytes = [0; REJECT_LEN];
        let n = recv(self.fd.as_raw_fd(), &mut bytes, MsgFlags::MSG_DONTWAIT).ok()?;
        let reject = Reject::decode(self.protocol, bytes.get(..n)?).ok()?;
        Some(self.rejected(&reject))
    }

    fn rejected(&self, reject: &Reject) -> Error {
        let error = self.error(reject.code.kind(), format!("refused by the peer: {}", reject.text));
        Error { reason: reject.reason, ..error }
    }

    /// Reads one message of that kind, its bytes as received. A reject in its place is an error of the kind it names.
    pub(crate) fn message(&self, kind: Kind) -> Result<Vec<u8>> {
        self.either(kind, None).map(|(_, bytes)| bytes)
    }

    /// As [`Exchange::message`], of that kind or, if there is one, of the `other`; which of them it is.
    pub(crate) fn either(&self, kind: Kind, other: Option<Kind>) -> Result<(Kind, Vec<u8>)> {
        let mut bytes = vec![0; PRELUDE_LEN];
        self.fill(&mut bytes, 0)?;
        let found = self.protocol.decode_prelude(&bytes).map_err(|e| self.malformed(&e))?;
        let wanted = found == kind || Some(found) == other;
        if !wanted && found != Kind::Reject {
            return Err(self.malformed(&Malformed::Kind { expected: kind, found }));
        }
        bytes.resize(self.protocol.length(found), 0);
        self.fill(&mut bytes, PRELUDE_LEN)?;
        if wanted {
            return Ok((found, bytes));
        }
        match Reject::decode(self.protocol, &bytes) {
            Ok(reject) => Err(self.rejected(&reject)),
            Err(e) => Err(self.error(ErrorKind::Protocol, e.to_string())),
        }
    }

    /// Connector: reads the challenge, with which a listener of Crossrail begins at once.
    pub(crate) fn challenge(&self) -> Result<(Vec<u8>, Challenge)> {
        let bytes = self.message(Kind::Challenge).map_err(|error| match (error.kind, error.reason) {
            (ErrorKind::Timeout, None) | (ErrorKind::Unreachable, Some(Reason::ConnectionClosed)) => {
                error.with_hint("the listener is not Crossrail, or its process is stopped: check address and port")
            }
            _ => error,
        })?;
        let challenge = Challenge::decode(self.protocol, &bytes).map_err(|e| self.malformed(&e))?;
        Ok((bytes, challenge))
    }

    /// Connector: proves itself with `response`, whose last field the proof becomes, and checks the acceptor's proof.
    /// `flags`: what goes into it, for errors.
    pub(crate) fn prove(&self, shared: &Shared<'_>, flags: u8, challenge: &[u8], response: &mut [u8]) -> Result<()> {
        shared.sign(challenge, response);
        self.write(response)?;
        let proof = Proof::decode(self.protocol, &self.message(Kind::Proof)?).map_err(|e| self.malformed(&e))?;
        if shared.confirmed(challenge, response, &proof) {
            return Ok(());
        }
        let (reason, hint) = advice(flags);
        let known = if reason == Reason::UserDenied { "the token of this process's user" } else { "the secret" };
        let reject = Reject::new(RejectCode::Refused, format!("the listening end does not know {known}"));
        Err(self.refuse(&Refusal { reject: reject.because(reason), hint: Some(hint) }))
    }
}

/// Sends `reject` without waiting; a peer that cannot receive it is given up on either way.
pub(crate) fn send_reject(fd: BorrowedFd<'_>, protocol: &Protocol, reject: &Reject) {
    let _ = send(fd.as_raw_fd(), &reject.encode(protocol), MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL);
}
