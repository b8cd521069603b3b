use super::frames::{Answer, Failure, Why};

/// Where answers go.
pub trait Outbox {
    /// Sends an answer to a client's call; for a client that is gone, nothing.
    fn send(&mut self, client: u64, call: u64, answer: &Answer<'_>);

    /// Bytes that the client has not taken yet.
    fn backlog(&self, client: u64) -> usize;
}

/// An answer that is a failure; the detail outlives the borrow of the state.
pub(super) struct Failed {
    why: Why,
    detail: String,
    hint: &'static str,
}

impl Failed {
    pub(super) fn new(why: Why, detail: impl Into<String>) -> Failed {
        Failed { why, detail: detail.into(), hint: "" }
    }

    pub(super) fn hint(mut self, hint: &'static str) -> Failed {
        self.hint = hint;
        self
    }

    pub(super) fn send(&self, out: &mut dyn Outbox, client: u64, call: u64) {
        let failure = Failure { why: self.why, detail: &self.detail, hint: self.hint };
        out.send(client, call, &Answer::Failed(failure));
    }
}
