use crossrail_proto::Operation;

use super::outcome::OpKind;

/// What a caller submits.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Submission {
    /// An operation with a peer.
    Operation(Operation),
    /// A receive, from one peer or from any.
    Receive { tag: u64, mask: u64 },
}

impl Submission {
    #[inline]
    pub(super) fn kind(&self) -> OpKind {
        match self {
            Submission::Operation(operation) => operation.into(),
            Submission::Receive { .. } => OpKind::Receive,
        }
    }

    #[inline]
    pub(super) fn tag(&self) -> u64 {
        match self {
            Submission::Operation(Operation::Send { tag }) | Submission::Receive { tag, .. } => *tag,
            Submission::Operation(_) => 0,
        }
    }
}
