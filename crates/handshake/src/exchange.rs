use std::cell::Cell;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use crossrail_types::{Error, ErrorKind, Result};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, recv, send};

use crate::worker::wire::{self, Kind, PRELUDE_LEN, REJECT_LEN, Reject, RejectCode, WireError};

/// A control connection: blocking mode, no timeouts set.
#[derive(Debug)]
pub enum Stream {
    /// Within the machine; can pass descriptors.
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

/// How long to wait for `deadline` in poll's terms: rounded up, so that a wait never ends early and spins.
pub(crate) fn poll_timeout(deadline: Instant) -> PollTimeout {
    let left = deadline.saturating_duration_since(Instant::now());
    let millis = left.as_micros().div_ceil(1000).min(i32::MAX as u128);
    PollTimeout::try_from(millis as i32).unwrap_or(PollTimeout::MAX)
}

/// One handshake under way over one connection: reads and writes whole messages until a deadline, and words the errors.
pub(crate) struct Talk<'a> {
    fd: BorrowedFd<'a>,
    /// Readable once the listener stops.
    stop: Option<BorrowedFd<'a>>,
    operation: &'static str,
    peer: String,
    stage: String,
    started: Instant,
    deadline: Instant,
    busy: Cell<bool>,
}

impl<'a> Talk<'a> {
    pub(crate) fn new(fd: BorrowedFd<'a>, operation: &'static str, peer: String, deadline: Instant) -> Talk<'a> {
        let stage = "connect".to_owned();
        Talk { fd, stop: None, operation, peer, stage, started: Instant::now(), deadline, busy: Cell::new(false) }
    }

    pub(crate) fn stopped_by(mut self, stop: BorrowedFd<'a>) -> Talk<'a> {
        self.stop = Some(stop);
        self
    }

    pub(crate) fn since(mut self, started: Instant) -> Talk<'a> {
        self.started = started;
        self
    }

    /// Names what happens next, for errors.
    pub(crate) fn stage(&mut self, stage: impl Into<String>) {
        self.stage = stage.into();
    }

    /// An error at this stage.
    pub(crate) fn error(&self, kind: ErrorKind, detail: impl AsRef<str>) -> Error {
        let waited = self.started.elapsed().as_secs_f64();
        let detail = format!("{}: {} (after {waited:.3} s)", self.stage, detail.as_ref());
        Error::new(kind, self.operation, detail).with_peer(&self.peer)
    }

    /// The peer broke the protocol, or speaks another one; in the first case it is told.
    pub(crate) fn malformed(&self, error: &WireError) -> Error {
        if !matches!(error, WireError::NotCrossrail(_)) {
            self.send_reject(RejectCode::Protocol, &error.to_string());
        }
        self.error(ErrorKind::Protocol, error.to_string())
    }

    /// Tells the peer why this end closes, and words the same for this end. Never waits: the message is small enough
    /// for any socket's buffer, and a peer that has let that fill up does not read it anyway.
    pub(crate) fn reject(&self, code: RejectCode, text: &str) -> Error {
        self.send_reject(code, text);
        self.error(code.kind(), text)
    }

    fn send_reject(&self, code: RejectCode, text: &str) {
        let bytes = Reject { code, text: text.to_owned() }.encode();
        // The peer is given up on either way.
        let _ = send(self.fd.as_raw_fd(), &bytes, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL);
    }

    fn wait(&self, events: PollFlags, progress: &dyn Fn() -> String) -> Result<()> {
        let mut fds = vec![PollFd::new(self.fd, events)];
        if let Some(stop) = self.stop {
            fds.push(PollFd::new(stop, PollFlags::POLLIN));
        }
        match poll(&mut fds, poll_timeout(self.deadline)) {
            Ok(0) if Instant::now() >= self.deadline => {
                let error = self.error(ErrorKind::Timeout, progress());
                self.send_reject(RejectCode::Timeout, &error.detail);
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
        let kind = match e {
            Errno::ECONNRESET | Errno::EPIPE | Errno::ECONNREFUSED | Errno::ENETUNREACH | Errno::EHOSTUNREACH => {
                ErrorKind::Unreachable
            }
            Errno::ETIMEDOUT => ErrorKind::Timeout,
            _ => ErrorKind::Io,
        };
        self.error(kind, format!("{call}: {}", std::io::Error::from(e)))
    }

    /// Fills `buf`, whose first `done` bytes are there already.
    fn fill(&self, buf: &mut [u8], mut done: usize) -> Result<()> {
        while done < buf.len() {
            let total = buf.len();
            match recv(self.fd.as_raw_fd(), &mut buf[done..], MsgFlags::MSG_DONTWAIT) {
                Ok(0) if done == 0 => {
                    return Err(self.error(ErrorKind::Unreachable, "the peer closed the connection"));
                }
                Ok(0) => {
                    let detail = format!("the peer closed the connection after {done} of {total} bytes");
                    return Err(self.error(ErrorKind::Protocol, detail));
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
                    self.wait(PollFlags::POLLOUT, &|| format!("the peer takes only {done} of {total} bytes"))?;
                }
                Err(Errno::EINTR) => {}
                // The peer may have said why before it closed.
                Err(e) => return Err(self.parting_words().unwrap_or_else(|| self.system("send", e))),
            }
        }
        Ok(())
    }

    /// The reject that the peer sent before it closed, if that is what lies in the socket.
    fn parting_words(&self) -> Option<Error> {
        let mut bytes = [0; REJECT_LEN];
        let n = recv(self.fd.as_raw_fd(), &mut bytes, MsgFlags::MSG_DONTWAIT).ok()?;
        wire::decode_reject(&bytes[..n]).ok().map(|reject| self.rejected(&reject))
    }

    fn rejected(&self, reject: &Reject) -> Error {
        self.busy.set(reject.code == RejectCode::Busy);
        self.error(reject.code.kind(), format!("refused by the peer: {}", reject.text))
    }

    /// Reads one message of `N` bytes and that kind; the peer's reject in its place is an error of the peer's kind.
    pub(crate) fn message<const N: usize>(&self, kind: Kind) -> Result<[u8; N]> {
        const { assert!(N >= PRELUDE_LEN) };
        let mut bytes = [0; N];
        self.fill(&mut bytes[..PRELUDE_LEN], 0)?;
        let found = wire::decode_prelude(&bytes[..PRELUDE_LEN]).map_err(|e| self.malformed(&e))?;
        if found == Kind::Reject {
            let mut reject = [0; REJECT_LEN];
            reject[..PRELUDE_LEN].copy_from_slice(&bytes[..PRELUDE_LEN]);
            self.fill(&mut reject, PRELUDE_LEN)?;
            let reject = wire::decode_reject(&reject).map_err(|e| self.error(ErrorKind::Protocol, e.to_string()))?;
            return Err(self.rejected(&reject));
        }
        if found != kind {
            return Err(self.malformed(&WireError::Kind { expected: kind as u8, found: found as u8 }));
        }
        self.fill(&mut bytes, PRELUDE_LEN)?;
        Ok(bytes)
    }

    /// Whether the peer turned this end away only because it has too many handshakes under way.
    pub(crate) fn busy(&self) -> bool {
        self.busy.get()
    }
}

/// Tells a connection that nobody will talk to it.
pub(crate) fn turn_away(fd: BorrowedFd<'_>, text: &str) {
    let bytes = Reject { code: RejectCode::Busy, text: text.to_owned() }.encode();
    // As in `Talk::reject`: whether the peer hears it does not matter here.
    let _ = send(fd.as_raw_fd(), &bytes, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL);
}

/// `ip:port` for people: an IPv4 peer of an IPv6 socket under its IPv4 address.
pub(crate) fn tcp_name(address: SocketAddr) -> String {
    SocketAddr::new(address.ip().to_canonical(), address.port()).to_string()
}
