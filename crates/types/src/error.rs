use std::fmt;
use std::time::Duration;

/// What went wrong, as a caller branches on it. Each kind is one Python exception class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A call or command line that makes no sense: the caller's own mistake.
    Usage,
    /// A setting (environment variable or override) that is unknown or does not parse.
    Config,
    /// The peer could not be reached at all.
    Unreachable,
    /// The peer refused: wrong secret, wrong token, too many half-open connections.
    Refused,
    /// Both ends are there but disagree: version, chunk, window, channels.
    Mismatch,
    /// A bounded wait ran out; the operation may still finish.
    Timeout,
    /// The peer died or closed; its own requests fail, the worker goes on.
    PeerDead,
    /// The receiver's buffer is shorter than the message. Reported at both ends.
    Truncated,
    /// The request was cancelled, here or at the peer.
    Cancelled,
    /// A region that is gone, a wrong key, or an access outside its bounds.
    Region,
    /// Memory or descriptors ran out; the text names the sum asked for.
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

/// An error that says who failed, at what, how far it got, and what to try.
///
/// `Display` prints one line: `operation: detail (peer P, lane L, D of T bytes done); hint`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// What a caller branches on.
    pub kind: ErrorKind,
    /// The operation that failed, in the API's words: `send`, `connect`, `CROSSRAIL_TLS`.
    pub operation: String,
    /// What happened.
    pub detail: String,
    /// The peer's name, where one is concerned.
    pub peer: Option<String>,
    /// The lane's name, where one is concerned.
    pub lane: Option<String>,
    /// Bytes done and bytes in all, where a transfer was under way.
    pub progress: Option<(u64, u64)>,
    /// What the user can do about it, or what still works.
    pub hint: Option<String>,
}

/// The result of everything that can fail.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error of `kind` in `operation`.
    pub fn new(kind: ErrorKind, operation: impl Into<String>, detail: impl Into<String>) -> Error {
        Error {
            kind,
            operation: operation.into(),
            detail: detail.into(),
            peer: None,
            lane: None,
            progress: None,
            hint: None,
        }
    }

    /// A failed system call: `call` with the code's name and text.
    pub fn io(operation: impl Into<String>, call: &str, source: &std::io::Error) -> Error {
        Error::new(ErrorKind::Io, operation, format!("{call}: {source}"))
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

    /// Says how far the transfer got, in bytes.
    #[must_use]
    pub fn with_progress(mut self, done: u64, total: u64) -> Error {
        self.progress = Some((done, total));
        self
    }

    /// Says what to try, or what still works.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Error {
        self.hint = Some(hint.into());
        self
    }

    /// For waits in slices: a timeout that says how long its slice was ("... in 0.100 s") says how long all of them were.
    #[must_use]
    pub fn waited_in_all(mut self, limit: Duration) -> Error {
        let number = |at: usize| {
            let (from, len) = (at + " in ".len(), self.detail[at + " in ".len()..].find(" s")?);
            self.detail[from..from + len].parse::<f64>().ok().map(|_| from..from + len)
        };
        let found = self.detail.rmatch_indices(" in ").find_map(|(at, _)| number(at));
        if let (ErrorKind::Timeout, Some(range)) = (self.kind, found) {
            self.detail.replace_range(range, &format!("{:.3}", limit.as_secs_f64()));
        }
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
        if !context.is_empty() {
            write!(f, " ({})", context.join(", "))?;
        }
        if let Some(hint) = &self.hint {
            write!(f, "; {hint}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_says_how_long_all_slices_were() {
        let all = Duration::from_secs(3);
        let said = |kind, detail: &str| Error::new(kind, "recv", detail).waited_in_all(all).detail;
        assert_eq!(said(ErrorKind::Timeout, "not finished in 0.095 s"), "not finished in 3.000 s");
        let more = "not finished in 0.095 s: no message has matched it";
        assert_eq!(said(ErrorKind::Timeout, more), "not finished in 3.000 s: no message has matched it");
        let behind = "not finished in 0.095 s: the peer is in its setup, bytes in flight";
        assert!(said(ErrorKind::Timeout, behind).starts_with("not finished in 3.000 s: the peer is in its setup, "));
        for without in ["nothing received", "rank 1 did not come in time, or is still waiting"] {
            assert_eq!(said(ErrorKind::Timeout, without), without);
        }
        assert_eq!(said(ErrorKind::Io, "it took place in 0.1 s"), "it took place in 0.1 s");
    }
}
