//! Forwarding to ranks whose heaps this GPU cannot map: kernels write into local mirrors of these heaps, and the host
//! writes the changed ranges to the heaps themselves through the engine: rows first, then the flags and words that
//! announce them, since the peer's kernels read rows as soon as they see a flag.
//!
//! A mirror keeps everything this rank ever wrote to that heap, so forwarding a range again is harmless.

use std::time::Instant;

use crossrail::Op;
use crossrail_cuda::Stream;
use crossrail_ep::Fault;
use crossrail_kernels::ep::{EP_ANNOUNCE, EP_RECEIVE, EP_SEND, EpCombineArgs, Layout, Load, Span, There};
use crossrail_types::{Error, ErrorKind, Result};

use crate::inner::Inner;
use crate::launch::{Args, Launch};
use crate::membership::State;
use crate::outstanding::Operation;
use crate::peer::Forwarded;

impl Inner {
    /// Launches the phases one after the other, forwarding the data of each before the next.
    pub(crate) fn run_forwarding(
        &self,
        state: &mut State,
        stream: &Stream,
        launch: &Launch,
        phases: u32,
    ) -> Result<()> {
        let blocks = self.launches.forwarding_blocks();
        for phase in [EP_ANNOUNCE, EP_SEND, EP_RECEIVE] {
            if phases & phase == 0 {
                continue;
            }
            if phase == EP_SEND
                && let Args::CombineExpert(args) = &launch.args
            {
                self.forward_weights(state, stream, args)?;
            }
            let args = launch.args.with(phase);
            self.launches.launch(stream, &args, blocks, false)?;
            self.wait_for(stream)?;
            self.process_losses(state);
            for peer in forwarded(state) {
                let (shape, look) = (&self.shape, self.launches.reader());
                let to = There { rank: peer.rank, mirror: peer.mirror.ptr() as u64 };
                let load = match &args {
                    Args::DispatchExpert(args) => shape.dispatched(Layout::Expert, args, to, look)?,
                    Args::DispatchRank(args) => shape.dispatched(Layout::Rank, args, to, look)?,
                    Args::CombineExpert(args) => shape.combined(Layout::Expert, args, to, look)?,
                    Args::CombineRank(args) => shape.combined(Layout::Rank, args, to, look)?,
                };
                self.forward(state, &peer, &load, args.kind());
            }
        }
        Ok(())
    }

    fn wait_for(&self, stream: &Stream) -> Result<()> {
        self.launches.record(stream, false)?.synchronize(self.kernels_limit())
    }

    /// Forwards the changed ranges of a mirror. A rank that cannot be reached is lost.
    fn forward(&self, state: &mut State, peer: &Forwarded, load: &Load, kind: Operation) {
        let parts = [&load.rows[..], &load.told, &[load.line]];
        let carried = parts.into_iter().try_for_each(|spans| self.write(peer, spans));
        match carried {
            Ok(()) => {
                self.launches.add_forwarded(load.rows.iter().map(|span| span.len).sum());
            }
            Err(error) => self.lose(state, peer.rank, kind, &error),
        }
    }

    /// Writes these ranges of the mirror to the heap, and waits until they are there.
    fn write(&self, peer: &Forwarded, spans: &[Span]) -> Result<()> {
        let mut ops = Vec::with_capacity(spans.len());
        for span in spans.iter().filter(|span| span.len > 0) {
            let (at, end) = (span.at as usize, (span.at + span.len) as usize);
            let local = peer.mirror.slice(at..end)?;
            ops.push(Op::Write { local, remote: peer.key.clone(), offset: span.at, imm: None });
        }
        if ops.is_empty() {
            return Ok(());
        }
        let deadline = Instant::now() + self.config.timeout;
        let request = peer.endpoint.batch(ops)?;
        match request.wait(Some(deadline.saturating_duration_since(Instant::now()))) {
            Ok(_) => Ok(()),
            Err(error) => {
                request.cancel();
                Err(error)
            }
        }
    }

    fn lose(&self, state: &mut State, rank: u32, kind: Operation, error: &Error) {
        self.mask_in_kernels(rank);
        let Some(peer) = state.peer_mut(rank).filter(|peer| !peer.masked) else { return };
        peer.masked = true;
        let dead = matches!(error.kind, ErrorKind::PeerDead | ErrorKind::Closed);
        let why = peer.end().filter(|_| dead).unwrap_or_else(|| error.to_string());
        let number = self.heap.sent().map_or(0, |epochs| match kind {
            Operation::Dispatch => epochs.dispatch,
            Operation::Combine => epochs.combine,
        });
        let (operation, left) = (kind.name(), state.active());
        self.record(state, Fault { rank, operation, number, stage: "it to take our rows", why, left, masked: true });
    }

    /// Forwards the weights given to a combine, which the peers wait for before they send rows back.
    fn forward_weights(&self, state: &mut State, stream: &Stream, args: &EpCombineArgs) -> Result<()> {
        // Earlier work in the stream may write the weights.
        self.wait_for(stream)?;
        let Some((span, words)) = self.shape.weights(args, self.launches.reader())? else { return Ok(()) };
        let load = Load { rows: Vec::new(), told: vec![span], line: self.heap.line(self.me) };
        for peer in &forwarded(state) {
            peer.mirror.fill_from(span.at as usize, &words)?;
            self.forward(state, peer, &load, Operation::Combine);
        }
        Ok(())
    }
}

/// Unmasked ranks that are reached through the host.
fn forwarded(state: &State) -> Vec<Forwarded> {
    state.forwarded().cloned().collect()
}
