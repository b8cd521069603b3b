//! Split operations in flight: they are received in the order of sending, and at most two of a kind are outstanding,
//! because kernels have two slots for each source.

use std::collections::VecDeque;

use crossrail_kernels::ep::EP_DEPTH;
use crossrail_types::{Error, ErrorKind, Result};

/// The two operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Dispatch,
    Combine,
}

impl Operation {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Operation::Dispatch => "dispatch",
            Operation::Combine => "combine",
        }
    }
}

/// Operations that were sent and have not been received yet.
#[derive(Debug, Default)]
pub(crate) struct Outstanding {
    sent: [VecDeque<u64>; 2],
    next: u64,
    /// Set when a sent operation was dropped: it will never be received, and the ranks are out of step for good.
    dropped: Option<Operation>,
}

impl Outstanding {
    /// Checks that an operation may begin now, whole or (`split`) only its first half.
    pub(crate) fn check(&self, kind: Operation, split: bool) -> Result<()> {
        let name = kind.name();
        let wrong = |text: String| Err(Error::new(ErrorKind::Usage, name, text));
        if let Some(dropped) = self.dropped {
            let text = format!("a {} that was sent was dropped without being received", dropped.name());
            return wrong(text).map_err(|error| error.with_hint("destroy the buffer: its ranks are out of step"));
        }
        match self.sent[kind as usize].len() {
            0 => Ok(()),
            _ if !split => wrong(format!("a {name} that was sent has not been received yet: finish it first")),
            under_way if under_way >= EP_DEPTH as usize => {
                wrong(format!("{under_way} calls of {name} were sent and have not been received yet: finish the first"))
            }
            _ => Ok(()),
        }
    }

    /// Registers a sent operation; returns its number.
    pub(crate) fn sent(&mut self, kind: Operation) -> u64 {
        self.next += 1;
        self.sent[kind as usize].push_back(self.next);
        self.next
    }

    /// Checks that the operation is the next to be received.
    pub(crate) fn check_receive(&self, kind: Operation, number: u64) -> Result<()> {
        if self.sent[kind as usize].front() == Some(&number) {
            return Ok(());
        }
        let name = kind.name();
        let text = format!("another {name} was sent before this one: they are received in the order of sending");
        Err(Error::new(ErrorKind::Usage, name, text))
    }

    pub(crate) fn received(&mut self, kind: Operation) {
        self.sent[kind as usize].pop_front();
    }

    /// Notes that a sent operation will never be received.
    pub(crate) fn dropped(&mut self, kind: Operation) {
        self.dropped = Some(kind);
    }

    /// Whether every sent operation has been received.
    pub(crate) fn is_idle(&self) -> bool {
        self.dropped.is_none() && self.sent.iter().all(VecDeque::is_empty)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(result: Result<()>, text: &str) {
        let error = result.unwrap_err();
        assert!(error.kind == ErrorKind::Usage && error.detail.contains(text), "{error}");
    }

    #[test]
    fn two_of_a_kind_may_be_under_way_and_are_received_in_order() {
        let mut order = Outstanding::default();
        order.check(Operation::Dispatch, false).unwrap();
        order.check(Operation::Dispatch, true).unwrap();
        let first = order.sent(Operation::Dispatch);
        assert!(!order.is_idle());
        refused(order.check(Operation::Dispatch, false), "finish it first");
        order.check(Operation::Combine, false).unwrap();
        order.check(Operation::Dispatch, true).unwrap();
        let second = order.sent(Operation::Dispatch);
        refused(order.check(Operation::Dispatch, true), "2 calls of dispatch were sent");
        refused(order.check_receive(Operation::Dispatch, second), "in the order of sending");
        order.check_receive(Operation::Dispatch, first).unwrap();
        order.received(Operation::Dispatch);
        order.check_receive(Operation::Dispatch, second).unwrap();
        order.received(Operation::Dispatch);
        refused(order.check_receive(Operation::Dispatch, second), "another dispatch");
        assert!(order.is_idle());
    }

    #[test]
    fn what_is_dropped_is_said_by_every_later_call() {
        let mut order = Outstanding::default();
        order.sent(Operation::Combine);
        order.dropped(Operation::Combine);
        refused(order.check(Operation::Dispatch, false), "a combine that was sent was dropped");
        assert!(!order.is_idle());
    }
}
