//! Who notices that a rank is gone while kernels wait for it: a thread that sleeps until a connection ends.

use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Weak};

use crossrail::{Endpoint, ErrorKind, Request};
use crossrail_ep::Fault;
use crossrail_types::{Error, Result};

use crate::buffer::{Inner, State};
use crate::peer::Gone;

/// The tag of a message that never comes: its receive ends with the connection.
const LIFE: u64 = 0x4550_0000_0001_0003;

/// A connection ended.
pub(crate) struct Lost {
    rank: u32,
    generation: u64,
    error: Error,
}

/// What is known of connections beside the state, which may be held for long.
pub(crate) struct Connections {
    /// By rank, the generation of its connection; 0 for none.
    pub(crate) generations: Vec<u64>,
    /// Those that have ended, and are still to be acted on.
    pub(crate) ended: Vec<Lost>,
}

/// Lets `tell` know when the connection ends.
pub(crate) fn on_end(inner: &Inner, rank: u32, generation: u64, endpoint: &Endpoint) -> Result<Request> {
    let tell: Sender<Lost> = inner.tell.clone();
    let life = inner.meeting.worker.recv(Vec::new(), LIFE, u64::MAX, Some(endpoint))?;
    life.on_complete(move |end| {
        if let Err(error) = end {
            // Nobody listens any more when the buffer is gone.
            let _ = tell.send(Lost { rank, generation, error });
        }
    });
    Ok(life)
}

/// The thread; it ends with the buffer.
pub(crate) fn start(inner: &Arc<Inner>, lost: Receiver<Lost>) -> Result<()> {
    let buffer: Weak<Inner> = Arc::downgrade(inner);
    let body = move || {
        while let Ok(lost) = lost.recv() {
            let Some(inner) = buffer.upgrade() else { return };
            inner.lost(lost);
        }
    };
    let thread = std::thread::Builder::new().name("crossrail-ep-watch".into()).spawn(body);
    thread.map(drop).map_err(|error| Error::io("ExpertBuffer", "a thread", &error))
}

impl Inner {
    /// Masks a rank whose connection has ended.
    fn lost(&self, lost: Lost) {
        // At once, as whoever has the state may wait for kernels that wait for that rank. It is noted before: whoever sees
        // that an operation went on without the rank is told of it then.
        let mut connections = self.connections.lock();
        let rank = lost.rank;
        let is_current = connections.generations[rank as usize] == lost.generation;
        connections.ended.push(lost);
        if is_current {
            self.tell_mask(rank);
        }
        drop(connections);
        let mut state = self.state.lock();
        self.drain(&mut state);
    }

    /// Acts on connections that have ended. A rank that died is a fault now; one that has left is one only if an operation
    /// with it is begun.
    pub(crate) fn notice_ends(&self, state: &mut State) {
        let ended = std::mem::take(&mut self.connections.lock().ended);
        for lost in ended {
            let peer = state.peers.get_mut(lost.rank as usize).and_then(Option::as_mut);
            let peer = peer.filter(|peer| peer.generation == lost.generation && peer.gone.is_none());
            let Some(peer) = peer else { continue };
            let dead = lost.error.kind == ErrorKind::PeerDead;
            let why = match dead {
                true => peer.end().unwrap_or_else(|| lost.error.detail.clone()),
                false => "it has left".to_owned(),
            };
            peer.gone = Some(Gone { why: why.clone(), said: dead || peer.masked });
            let was_masked = std::mem::replace(&mut peer.masked, true);
            // It may have been unmasked meanwhile.
            self.tell_mask(lost.rank);
            if dead && !was_masked {
                self.say_gone(state, lost.rank, &why);
            }
        }
    }

    /// Has kernels leave a rank out, those under way too.
    pub(crate) fn tell_mask(&self, rank: u32) {
        if let Err(error) = self.heap.set_mask(rank, true) {
            self.meeting.warn(&error);
        }
    }

    /// Records that a rank is gone.
    pub(crate) fn say_gone(&self, state: &mut State, rank: u32, why: &str) {
        let left = state.active();
        let fault = Fault { rank, operation: "connection", number: 0, stage: "it", why: why.to_owned(), left };
        self.meeting.warn(&fault);
        state.faults.push(fault);
    }
}
