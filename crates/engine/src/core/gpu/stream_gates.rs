//! Operations that wait for work of the caller's on a GPU: what is to be sent is still being computed, what is to be
//! received into is still being read. Those of an endpoint that come after them wait too, and so do receives after
//! receives, so that messages are matched in the order in which they were posted.

use std::collections::VecDeque;

use crossrail_proto as proto;
use crossrail_types::{EndpointId, Error, ErrorKind, OpId, Result};
use proto::Operation;

use crate::core::Core;
use crossrail_gpu::StreamPoint;

/// Operations in their order; the first waits for an event, or for nothing but that it is its turn.
#[derive(Default)]
pub(crate) struct Gate(VecDeque<Waiting>);

struct Waiting {
    op: OpId,
    what: What,
    after: After,
}

enum After {
    Nothing,
    /// The stager says when, under this ticket.
    Ticket(u64),
    /// The caller's work failed.
    Failed(Box<Error>),
}

/// What waits.
#[derive(Clone, Copy, Debug)]
pub(crate) enum What {
    Start(Operation),
    Receive { tag: u64, mask: u64, from: Option<EndpointId> },
}

/// Whose turn it is when a gate opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Of {
    Endpoint(EndpointId),
    Receives,
}

impl Gate {
    #[inline]
    pub(crate) fn is_closed(&self) -> bool {
        !self.0.is_empty()
    }

    fn remove(&mut self, op: OpId) -> bool {
        let found = self.0.iter().position(|waiting| waiting.op == op);
        found.and_then(|at| self.0.remove(at)).is_some()
    }
}

impl Core {
    /// Has `op` wait for `after`, and for those before it.
    pub(crate) fn wait_at_gate(&mut self, op: OpId, what: What, gpu: Option<u32>, after: Option<StreamPoint>) {
        let after = match (gpu, after) {
            (Some(gpu), Some(after)) => self.st.staging.after(gpu, after).map_or(After::Nothing, After::Ticket),
            _ => After::Nothing,
        };
        let of = match what {
            What::Start(_) => self.st.ops.op(op).and_then(|op| op.endpoint).map(Of::Endpoint),
            What::Receive { .. } => Some(Of::Receives),
        };
        let Some(of) = of else { return };
        if let Some(gate) = self.gate(of) {
            gate.0.push_back(Waiting { op, what, after });
        }
        self.pass_gate(of);
    }

    fn gate(&mut self, of: Of) -> Option<&mut Gate> {
        match of {
            Of::Endpoint(endpoint) => self.st.peer(endpoint).map(|peer| &mut peer.gate),
            Of::Receives => Some(&mut self.receives),
        }
    }

    /// What was waited for under that ticket is there, or failed.
    pub(crate) fn open_gate(&mut self, ticket: u64, result: Result<()>) {
        let gates = (0..self.st.peers.len() as u32).map(|at| Of::Endpoint(EndpointId(at))).chain([Of::Receives]);
        for of in gates.collect::<Vec<_>>() {
            let Some(gate) = self.gate(of) else { continue };
            let waits = |waiting: &&mut Waiting| matches!(waiting.after, After::Ticket(known) if known == ticket);
            let Some(waiting) = gate.0.iter_mut().find(waits) else { continue };
            waiting.after = match result {
                Ok(()) => After::Nothing,
                Err(error) => After::Failed(Box::new(error)),
            };
            self.pass_gate(of);
            return;
        }
    }

    /// Lets through whoever need not wait any longer.
    fn pass_gate(&mut self, of: Of) {
        loop {
            let Some(gate) = self.gate(of) else { return };
            if gate.0.front().is_none_or(|first| matches!(first.after, After::Ticket(_))) {
                return;
            }
            let Some(Waiting { op, what, after }) = gate.0.pop_front() else { return };
            if let After::Failed(error) = after {
                let doing = self.st.ops.op(op).map_or("request", |op| op.what);
                let error = Error { operation: doing.to_owned(), ..*error };
                self.st.ops.finish(op, Err(Box::new(error)));
                continue;
            }
            match what {
                What::Start(operation) => self.begin_operation(op, operation),
                What::Receive { tag, mask, from } => self.post_late(op, tag, mask, from),
            }
        }
    }

    /// Takes an operation that has not begun out of its gate.
    pub(crate) fn leave_gate(&mut self, op: OpId) -> bool {
        let endpoint = self.st.ops.op(op).and_then(|op| op.endpoint);
        let of = endpoint.map(Of::Endpoint).into_iter().chain([Of::Receives]);
        let found = of.collect::<Vec<_>>().into_iter().find(|of| self.gate(*of).is_some_and(|gate| gate.remove(op)));
        if let Some(of) = found {
            self.pass_gate(of);
        }
        found.is_some()
    }

    /// The peer is gone: what has not begun with it fails.
    pub(crate) fn fail_gate(&mut self, endpoint: EndpointId, why: &str) {
        let Some(peer) = self.st.peer(endpoint) else { return };
        let (waiting, name) = (std::mem::take(&mut peer.gate.0), peer.name().to_owned());
        for Waiting { op, .. } in waiting {
            let what = self.st.ops.op(op).map_or("request", |op| op.what);
            let error = Error::new(ErrorKind::PeerDead, what, why).with_peer(&name);
            self.st.ops.finish(op, Err(Box::new(error)));
        }
    }
}
