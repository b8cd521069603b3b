//! Ranks whose heaps this GPU does not reach: kernels write into mirrors of their heaps, and the host carries what they
//! wrote to the heaps themselves, rows before the words and flags that say that they are there.
//!
//! A mirror holds all that this rank has ever written to that heap, so more may be carried than was written now.
#![allow(unsafe_code)]

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossrail::{Memory, Op};
use crossrail_cuda::{Context, Event, PinnedMemory, Stream};
use crossrail_ep::Fault;
use crossrail_kernels::ep::{EP_ANNOUNCE, EP_RECEIVE, EP_SEND, EpCombineArgs, Epochs, Layout, Load, Look, Span, There};
use crossrail_types::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use crate::buffer::{Inner, State};
use crate::calls::{Args, Launch};
use crate::heap::set_taken;
use crate::order::Kind;
use crate::peer::Far;

/// Reads GPU memory that kernels are done with.
pub(crate) struct Reader {
    context: Context,
    parts: Mutex<Option<Parts>>,
}

struct Parts {
    stream: Stream,
    done: Event,
    area: PinnedMemory,
}

/// Bytes that are read at once.
const AREA: usize = 1 << 18;
const READ_LIMIT: Duration = Duration::from_secs(10);

impl Reader {
    /// Makes nothing before the first read.
    pub(crate) fn new(context: &Context) -> Reader {
        Reader { context: context.clone(), parts: Mutex::default() }
    }

    pub(crate) fn read(&self, address: u64, bytes: &mut [u8]) -> Result<()> {
        let mut kept = self.parts.lock();
        let parts = match kept.take() {
            Some(parts) => parts,
            None => Parts {
                stream: Stream::urgent(&self.context)?,
                done: Event::new(&self.context)?,
                area: PinnedMemory::new(&self.context, AREA)?,
            },
        };
        // A read that does not end in time leaves nothing behind that could be written later.
        for (part, at) in bytes.chunks_mut(AREA).zip((address..).step_by(AREA)) {
            // SAFETY: the area has that many bytes and no copy uses it; kernels are done with the source.
            unsafe { parts.stream.copy_out(parts.area.as_ptr(), at, part.len())? };
            parts.done.record(&parts.stream)?;
            parts.done.wait(READ_LIMIT)?;
            // SAFETY: as above; the copy is done.
            unsafe { std::ptr::copy_nonoverlapping(parts.area.as_ptr(), part.as_mut_ptr(), part.len()) };
        }
        *kept = Some(parts);
        Ok(())
    }
}

impl Look for Reader {
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<()> {
        Reader::read(self, address, bytes)
    }
}

impl Inner {
    /// Puts the phases in one after the other; each is carried before the next.
    pub(crate) fn run_far(&self, state: &mut State, stream: &Stream, launch: &Launch, phases: u32) -> Result<()> {
        // Kernels that unpack what comes from other nodes want some multiprocessors, while ours wait for it.
        let blocks = self.blocks.min(self.kernels.most_blocks() / 2).max(1);
        for phase in [EP_ANNOUNCE, EP_SEND, EP_RECEIVE] {
            if phases & phase == 0 {
                continue;
            }
            if phase == EP_SEND
                && let Args::CombineExpert(args) = &launch.args
            {
                self.carry_weights(state, stream, args)?;
            }
            let args = launch.args.with(phase);
            self.launch(stream, &args, blocks)?;
            self.wait_for(stream)?;
            self.drain(state);
            for far in self.far(state) {
                let (shape, look) = (&self.shape, &self.reader);
                let to = There { rank: far.rank, mirror: far.mirror.ptr() as u64 };
                let load = match &args {
                    Args::DispatchExpert(args) => shape.dispatched(Layout::Expert, args, to, look)?,
                    Args::DispatchRank(args) => shape.dispatched(Layout::Rank, args, to, look)?,
                    Args::CombineExpert(args) => shape.combined(Layout::Expert, args, to, look)?,
                    Args::CombineRank(args) => shape.combined(Layout::Rank, args, to, look)?,
                };
                self.carry(state, &far, &load, args.kind());
            }
        }
        Ok(())
    }

    /// What was sent between `rank` and this one so far counts as taken: here, and there, if it is out of reach, with the
    /// next line of words that is carried from its mirror.
    pub(crate) fn set_taken(&self, rank: u32, mirror: Option<&Memory>, epochs: Epochs) -> Result<()> {
        set_taken(&self.heap.memory, &self.heap.parts, rank, epochs)?;
        match mirror {
            Some(mirror) => set_taken(mirror, &self.heap.parts, self.me, epochs),
            None => Ok(()),
        }
    }

    /// Ranks out of reach that are not masked.
    fn far(&self, state: &State) -> Vec<Far> {
        let open = state.peers.iter().flatten().filter(|peer| !peer.masked);
        open.filter_map(|peer| peer.far().cloned()).collect()
    }

    fn wait_for(&self, stream: &Stream) -> Result<()> {
        let limit = self.config.timeout.saturating_mul(2) + self.context.settings().timeout;
        self.events.record(stream, false)?.synchronize(limit)
    }

    /// Carries a load. A rank that it cannot be carried to is lost.
    fn carry(&self, state: &mut State, far: &Far, load: &Load, kind: Kind) {
        let parts = [&load.rows[..], &load.told, &[load.line]];
        let carried = parts.into_iter().try_for_each(|spans| self.write(far, spans));
        match carried {
            Ok(()) => {
                let rows: u64 = load.rows.iter().map(|span| span.len).sum();
                self.network.fetch_add(rows, Ordering::Relaxed);
            }
            Err(error) => self.lose(state, far.rank, kind, &error),
        }
    }

    /// Writes these parts of the mirror to the heap, all before it returns.
    fn write(&self, far: &Far, spans: &[Span]) -> Result<()> {
        let mut ops = Vec::with_capacity(spans.len());
        for span in spans.iter().filter(|span| span.len > 0) {
            let (at, end) = (span.at as usize, (span.at + span.len) as usize);
            let local = far.mirror.slice(at..end)?;
            ops.push(Op::Write { local, remote: far.key.clone(), offset: span.at, imm: None });
        }
        if ops.is_empty() {
            return Ok(());
        }
        let deadline = Instant::now() + self.config.timeout;
        let request = far.endpoint.batch(ops)?;
        match request.wait(Some(deadline.saturating_duration_since(Instant::now()))) {
            Ok(_) => Ok(()),
            Err(error) => {
                request.cancel();
                Err(error)
            }
        }
    }

    fn lose(&self, state: &mut State, rank: u32, kind: Kind, error: &Error) {
        self.tell_mask(rank);
        let Some(peer) = state.peers[rank as usize].as_mut().filter(|peer| !peer.masked) else { return };
        peer.masked = true;
        let dead = matches!(error.kind, ErrorKind::PeerDead | ErrorKind::Closed);
        let why = peer.end().filter(|_| dead).unwrap_or_else(|| error.to_string());
        let number = self.heap.sent().map_or(0, |epochs| match kind {
            Kind::Dispatch => epochs.dispatch,
            Kind::Combine => epochs.combine,
        });
        let fault =
            Fault { rank, operation: kind.name(), number, stage: "it to take our rows", why, left: state.active() };
        self.meeting.warn(&fault);
        state.faults.push(fault);
    }

    /// Weights that come with a combine go before its rows.
    fn carry_weights(&self, state: &mut State, stream: &Stream, args: &EpCombineArgs) -> Result<()> {
        // What is before it in the stream may write the weights.
        self.wait_for(stream)?;
        let Some((span, words)) = self.shape.weights(args, &self.reader)? else { return Ok(()) };
        let load = Load { rows: Vec::new(), told: vec![span], line: self.heap.line(self.me) };
        for far in &self.far(state) {
            far.mirror.fill_from(span.at as usize, &words)?;
            self.carry(state, far, &load, Kind::Combine);
        }
        Ok(())
    }
}
