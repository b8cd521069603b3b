//! Operations that wait for work in a caller's stream: data to be sent is still being computed, a buffer to be received
//! into is still being read. Later operations of the endpoint wait behind them, and receives behind receives, so that
//! messages are matched in the order in which they were posted.

use std::collections::{HashMap, VecDeque};

use crossrail_types::{EndpointId, Error, OpId, Result};

use crate::core::outcome::Submission;

/// See the module.
#[derive(Default)]
pub(super) struct StreamGates {
    endpoints: HashMap<EndpointId, Gate>,
    receives: Gate,
    /// Operations in all gates: most workers never have one.
    waiting: usize,
}

/// Operations in their order; the first waits for an event, or only for its turn.
#[derive(Default)]
struct Gate(VecDeque<Waiting>);

struct Waiting {
    op: OpId,
    submission: Submission,
    until: Until,
}

enum Until {
    Turn,
    /// The stager completes this ticket.
    Ticket(u64),
    /// The caller's work failed.
    Failed(Box<Error>),
}

/// An operation that need not wait any longer: it is to be started, or fails.
pub(in crate::core) struct Released {
    pub(in crate::core) op: OpId,
    pub(in crate::core) submission: Submission,
    pub(in crate::core) failed: Option<Box<Error>>,
}

/// Which gate: an endpoint's, or that of receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GateOf {
    Endpoint(EndpointId),
    Receives,
}

impl GateOf {
    fn submission(submission: &Submission, endpoint: Option<EndpointId>) -> Option<GateOf> {
        match submission {
            Submission::Operation(_) => endpoint.map(GateOf::Endpoint),
            Submission::Receive { .. } => Some(GateOf::Receives),
        }
    }
}

impl StreamGates {
    /// Whether any operation waits.
    #[inline]
    pub(super) fn waiting(&self) -> bool {
        self.waiting > 0
    }

    /// Whether an operation must wait because others before it do.
    #[inline]
    pub(super) fn is_closed(&self, submission: &Submission, endpoint: Option<EndpointId>) -> bool {
        self.waiting > 0 && self.is_closed_to(submission, endpoint)
    }

    #[cold]
    fn is_closed_to(&self, submission: &Submission, endpoint: Option<EndpointId>) -> bool {
        let gate = match GateOf::submission(submission, endpoint) {
            Some(GateOf::Endpoint(endpoint)) => self.endpoints.get(&endpoint),
            Some(GateOf::Receives) => Some(&self.receives),
            None => None,
        };
        gate.is_some_and(|gate| !gate.0.is_empty())
    }

    /// Has an operation wait for a ticket, if there is one, and for those before it. Those that may start at once.
    pub(super) fn hold(
        &mut self,
        op: OpId,
        submission: Submission,
        endpoint: Option<EndpointId>,
        ticket: Option<u64>,
    ) -> Vec<Released> {
        let Some(of) = GateOf::submission(&submission, endpoint) else { return Vec::new() };
        let until = ticket.map_or(Until::Turn, Until::Ticket);
        self.gate(of).0.push_back(Waiting { op, submission, until });
        self.waiting += 1;
        self.release(of)
    }

    /// A ticket is complete. Those that may start now; `Err`: nothing here waits for it.
    pub(super) fn completed(
        &mut self,
        ticket: u64,
        result: Result<()>,
    ) -> std::result::Result<Vec<Released>, Result<()>> {
        let gates = self.endpoints.iter_mut().map(|(endpoint, gate)| (GateOf::Endpoint(*endpoint), gate));
        let found = gates.chain([(GateOf::Receives, &mut self.receives)]).find_map(|(of, gate)| {
            let waits = |waiting: &&mut Waiting| matches!(waiting.until, Until::Ticket(known) if known == ticket);
            gate.0.iter_mut().find(waits).map(|waiting| (of, waiting))
        });
        let Some((of, waiting)) = found else { return Err(result) };
        waiting.until = match result {
            Ok(()) => Until::Turn,
            Err(error) => Until::Failed(Box::new(error)),
        };
        Ok(self.release(of))
    }

    /// Takes an operation out that has not started; `None`: it does not wait here. Those that may start now.
    pub(super) fn leave(&mut self, op: OpId, endpoint: Option<EndpointId>) -> Option<Vec<Released>> {
        if self.waiting == 0 {
            return None;
        }
        let of = endpoint.map(GateOf::Endpoint).into_iter().chain([GateOf::Receives]);
        let of = of.into_iter().find(|of| {
            let gate = self.gate(*of);
            let found = gate.0.iter().position(|waiting| waiting.op == op);
            found.and_then(|at| gate.0.remove(at)).is_some()
        })?;
        self.waiting -= 1;
        Some(self.release(of))
    }

    /// The peer has ended: its operations that have not started, which fail.
    pub(super) fn end(&mut self, endpoint: EndpointId) -> Vec<OpId> {
        let waiting = self.endpoints.remove(&endpoint).unwrap_or_default().0;
        self.waiting -= waiting.len();
        waiting.into_iter().map(|waiting| waiting.op).collect()
    }

    fn gate(&mut self, of: GateOf) -> &mut Gate {
        match of {
            GateOf::Endpoint(endpoint) => self.endpoints.entry(endpoint).or_default(),
            GateOf::Receives => &mut self.receives,
        }
    }

    /// Takes out whatever need not wait any longer.
    fn release(&mut self, of: GateOf) -> Vec<Released> {
        let gate = self.gate(of);
        let mut released = Vec::new();
        while gate.0.front().is_some_and(|first| !matches!(first.until, Until::Ticket(_))) {
            let Some(Waiting { op, submission, until }) = gate.0.pop_front() else { break };
            let failed = if let Until::Failed(error) = until { Some(error) } else { None };
            released.push(Released { op, submission, failed });
        }
        self.waiting -= released.len();
        released
    }
}
