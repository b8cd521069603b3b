use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::reason::Reason;

/// What went wrong, as a caller branches on it. Each kind is one Python exception class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Invalid call or command line: the caller's mistake.
    Usage,
    /// A setting (environment variable or override) that is unknown or does not parse.
    Config,
    /// The peer could not be reached at all.
    Unreachable,
    /// The peer refused: wrong secret, wrong token, too many half-open connections.
    Refused,
    /// Both ends are reachable but their parameters differ: version, chunk, window, channels.
    Mismatch,
    /// The deadline passed; the operation may still complete.
    Timeout,
    /// The peer died or closed; its own requests fail, the worker goes on.
    PeerDead,
    /// The receiver's buffer is shorter than the message. Reported at both ends.
    Truncated,
    /// The request was cancelled, here or at the peer.
    Cancelled,
    /// A deregistered region, a wrong key, or an access out of bounds.
    Region,
    /// Memory or descriptors are exhausted; the text states the amount requested.
    Exhausted,
    /// This transport or device cannot do that; the text says which could.
    Unsupported,
    /// The operating system refused a call; the text names call and code.
    Io,
    /// The peer sent something that is not this protocol.
    Protocol,
    /// The object was already closed.
    Closed,
}

impl ErrorKind {
    /// Every kind, in the order of their declaration.
    pub const ALL: [ErrorKind; 15] = [
        ErrorKind::Usage,
        ErrorKind::Config,
        ErrorKind::Unreachable,
        ErrorKind::Refused,
        ErrorKind::Mismatch,
        ErrorKind::Timeout,
        ErrorKind::PeerDead,
        ErrorKind::Truncated,
        ErrorKind::Cancelled,
        ErrorKind::Region,
        ErrorKind::Exhausted,
        ErrorKind::Unsupported,
        ErrorKind::Io,
        ErrorKind::Protocol,
        ErrorKind::Closed,
    ];

    /// Its number, which is part of the C interface: fixed, and never used again. And its name there.
    fn row(self) -> (i32, &'static str) {
        match self {
            ErrorKind::Usage => (1, "usage"),
            ErrorKind::Config => (2, "config"),
            ErrorKind::Unreachable => (3, "unreachable"),
            ErrorKind::Refused => (4, "refused"),
            ErrorKind::Mismatch => (5, "mismatch"),
            ErrorKind::Timeout => (6, "timeout"),
            ErrorKind::PeerDead => (7, "peer_dead"),
            ErrorKind::Truncated => (8, "truncated"),
            ErrorKind::Cancelled => (9, "cancelled"),
            ErrorKind::Region => (10, "region"),
            ErrorKind::Exhausted => (11, "exhausted"),
            ErrorKind::Unsupported => (12, "unsupported"),
            ErrorKind::Io => (13, "io"),
            ErrorKind::Protocol => (14, "protocol"),
            ErrorKind::Closed => (15, "closed"),
        }
    }

    /// A number that stands for this kind in every version, from 1.
    pub fn number(self) -> i32 {
        self.row().0
    }

    /// The kind in one word, as `peer_dead`.
    pub fn name(self) -> &'static str {
        self.row().1
    }
}

/// An error with the operation, peer, lane and progress, and a hint.
///
/// `Display` prints one line: `operation: detail (peer P, lane L, D of T bytes done, after S s); hint`. Programs branch
/// on [`Error::kind`] and [`Error::reason`], never on the text. [`std::error::Error::source`] is the system's or the
/// driver's error, where there was one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// What a caller branches on.
    pub kind: ErrorKind,
    /// Why, more precisely than the kind, where the code knows.
    pub reason: Option<Reason>,
    /// The operation that failed, in the API's words: `send`, `connect`, `CROSSRAIL_TLS`.
    pub operation: String,
    /// What happened.
    pub detail: String,
    /// The peer's name, where one is concerned.
    pub peer: Option<String>,
    /// The lane's name, where one is concerned.
    pub lane: Option<String>,
    /// Bytes done and total bytes, if a transfer was in flight.
    pub progress: Option<(u64, u64)>,
    /// How long the caller waited, if the wait timed out.
    pub waited: Option<Duration>,
    /// What the user can do about it, or what still works.
    pub hint: Option<String>,
    /// The error below this one; see [`Error::with_source`].
    pub source: Option<Source>,
}

/// The error that caused an [`Error`]. Two are equal when their texts are.
#[derive(Clone)]
pub struct Source(Arc<dyn std::error::Error + Send + Sync>);

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl PartialEq for Source {
    fn eq(&self, other: &Source) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.0.to_string() == other.0.to_string()
    }
}

impl Eq for Source {}

/// The result of everything that can fail.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error of `kind` in `operation`.
    pub fn new(kind: ErrorKind, operation: impl Into<String>, detail: impl Into<String>) -> Error {
        Error {
            kind,
            reason: None,
            operation: operation.into(),
            detail: detail.into(),
            peer: None,
            lane: None,
            progress: None,
            waited: None,
            hint: None,
            source: None,
        }
    }

    /// A failed system call: `call` with the code's name and text.
    pub fn io(operation: impl Into<String>, call: &str, source: &std::io::Error) -> Error {
        Error::new(ErrorKind::Io, operation, format!("{call}: {source}")).with_io(source)
    }

    /// Sets the reason that programs branch on.
    #[must_use]
    pub fn with_reason(mut self, reason: Reason) -> Error {
        self.reason = Some(reason);
        self
    }

    /// Sets the underlying error.
    #[must_use]
    pub fn with_source(mut self, source: impl std::error::Error + Send + Sync + 'static) -> Error {
        self.source = Some(Source(Arc::new(source)));
        self
    }

    /// Sets a copy of the system's error as the source, with its code or else its kind and text. An `Io` error caused
    /// by the limit on file descriptors (EMFILE, ENFILE) becomes `Exhausted`, whichever call failed.
    #[must_use]
    pub fn with_io(mut self, source: &std::io::Error) -> Error {
        const ENFILE: i32 = 23;
        const EMFILE: i32 = 24;
        if self.kind == ErrorKind::Io && matches!(source.raw_os_error(), Some(ENFILE | EMFILE)) {
            self.kind = ErrorKind::Exhausted;
            self.reason = Some(Reason::Descriptors);
            self.hint.get_or_insert_with(|| "raise the limit of open files (ulimit -n)".to_owned());
        }
        self.with_source(match source.raw_os_error() {
            Some(code) => std::io::Error::from_raw_os_error(code),
            None => std::io::Error::new(source.kind(), source.to_string()),
        })
    }

    /// The code of the system call that failed (`errno`), if one did.
    pub fn os_code(&self) -> Option<i32> {
        self.source.as_ref()?.0.downcast_ref::<std::io::Error>()?.raw_os_error()
    }

    /// Names the peer.
    #[must_use]
    pub fn with_peer(mut self, peer: impl Into<String>) -> Error {
        self.peer = Some(peer.into());
        self
    }

    /// Names the lane.
    #[must_use]
    pub fn with_lane(mut self, lane: impl Into<String>) -> Error {
        self.lane = Some(lane.into());
        self
    }

    /// Sets the progress of the transfer, in bytes.
    #[must_use]
    pub fn with_progress(mut self, done: u64, total: u64) -> Error {
        self.progress = Some((done, total));
        self
    }

    /// Sets the hint: what to try, or what still works.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Error {
        self.hint = Some(hint.into());
        self
    }

    /// Sets the total time that the caller waited before the timeout.
    #[must_use]
    pub fn with_waited(mut self, waited: Duration) -> Error {
        self.waited = Some(waited);
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.operation, self.detail)?;
        let mut context = Vec::new();
        if let Some(peer) = &self.peer {
            context.push(format!("peer {peer}"));
        }
        if let Some(lane) = &self.lane {
            context.push(format!("lane {lane}"));
        }
        if let Some((done, total)) = self.progress {
            context.push(format!("{done} of {total} bytes done"));
        }
        if let Some(waited) = self.waited {
            context.push(format!("after {:.3} s", waited.as_secs_f64()));
        }
        if !context.is_empty() {
            write!(f, " ({})", context.join(", "))?;
        }
        if let Some(hint) = &self.hint {
            write!(f, "; {hint}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|source| &*source.0 as &(dyn std::error::Error + 'static))
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;
    use std::io;

    use super::*;

    #[test]
    fn the_source_is_the_systems_error() {
        let refused = io::Error::from_raw_os_error(111);
        let error = Error::io("connect", "connect", &refused);
        let source = error.source().and_then(|source| source.downcast_ref::<io::Error>());
        assert_eq!(source.map(io::Error::kind), Some(io::ErrorKind::ConnectionRefused));
        assert_eq!(source.and_then(io::Error::raw_os_error), Some(111));
        assert_eq!((error.os_code(), error.kind.name()), (Some(111), "io"));
        let custom = Error::io("read", "read", &io::Error::new(io::ErrorKind::InvalidData, "no UTF-8"));
        assert_eq!(custom.source().map(ToString::to_string).as_deref(), Some("no UTF-8"));
        assert!(Error::new(ErrorKind::Usage, "send", "0 bytes").source().is_none());
    }

    #[test]
    fn numbers_of_kinds_are_their_places() {
        assert!(ErrorKind::ALL.iter().zip(1..).all(|(kind, number)| kind.number() == number));
        let names: std::collections::BTreeSet<_> = ErrorKind::ALL.iter().map(|kind| kind.name()).collect();
        assert_eq!(names.len(), ErrorKind::ALL.len());
    }

    #[test]
    fn equal_errors_have_equal_sources() {
        let error = |code| Error::io("connect", "connect", &io::Error::from_raw_os_error(code));
        assert_eq!(error(111), error(111));
        assert_ne!(error(111), error(104));
        assert_ne!(error(111), error(111).with_reason(Reason::NotListening));
    }

    #[test]
    fn the_text_says_how_long_a_wait_took() {
        let error = Error::new(ErrorKind::Timeout, "recv", "not finished");
        let error = error.with_peer("b").with_waited(Duration::from_millis(95)).with_hint("wait again");
        assert_eq!(error.to_string(), "recv: not finished (peer b, after 0.095 s); wait again");
        let error = error.with_waited(Duration::from_secs(3));
        assert_eq!(error.to_string(), "recv: not finished (peer b, after 3.000 s); wait again");
    }

    #[test]
    fn names_of_reasons_are_unique_words() {
        let names: std::collections::BTreeSet<&str> = Reason::ALL.iter().map(|reason| reason.name()).collect();
        assert_eq!(names.len(), Reason::ALL.len());
        assert!(names.iter().all(|name| name.chars().all(|c| c.is_ascii_lowercase() || c == '_')));
    }
}
