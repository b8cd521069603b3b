use super::frames::{Answer, Failure, FailureKind};

/// The destination of answers.
pub trait Outbox {
    /// Sends an answer to a client's call; a no-op if the client has disconnected.
    fn send(&mut self, client: u64, call: u64, answer: &Answer<'_>);

    /// Unsent bytes of the client.
    fn backlog(&self, client: u64) -> usize;
}

/// A failure to be sent as an answer.
pub(super) struct Failed {
    kind: FailureKind,
    detail: String,
    hint: &'static str,
}

impl Failed {
    pub(super) fn new(kind: FailureKind, detail: impl Into<String>) -> Failed {
        Failed { kind, detail: detail.into(), hint: "" }
    }

    pub(super) fn hint(mut self, hint: &'static str) -> Failed {
        self.hint = hint;
        self
    }

    pub(super) fn send(&self, out: &mut dyn Outbox, client: u64, call: u64) {
        let failure = Failure { kind: self.kind, detail: &self.detail, hint: self.hint };
        out.send(client, call, &Answer::Failed(failure));
    }
}
