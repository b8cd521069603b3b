//! A barrier over the same words as the data.

use std::sync::Arc;

use crossrail_types::{Error, ErrorKind, Result};

use crate::buffer::{Inner, State};
use crate::operation::{Common, Machine, Pending, Wait};
use crate::peer::Message;

struct Sync(Common);

pub(crate) fn begin(inner: &Arc<Inner>) -> Result<Pending<()>> {
    let mut state = inner.state.lock();
    if state.closed {
        return Err(Error::new(ErrorKind::Closed, "sync", "the buffer was destroyed"));
    }
    state.operations += 1;
    let mut common = Common::new("sync", state.operations, 0, inner.config.timeout);
    for rank in state.others(inner.here.me) {
        if let Some(peer) = &mut state.peers[rank] {
            peer.tell(&inner.here, common.parity, Message::Sync, common.number);
        }
        common.expect(rank, Message::Sync);
    }
    Ok(Pending::new(Box::new(Sync(common)), Arc::clone(inner)))
}

impl Machine for Sync {
    type Output = ();

    fn common(&mut self) -> &mut Common {
        &mut self.0
    }

    fn arrived(&mut self, _: &Inner, _: &mut State, _: Wait) {}

    fn lost(&mut self, _: &Inner, _: &mut State, _: Wait) {}

    fn settle(&mut self, _: &Inner, _: &mut State) {}

    fn finish(&mut self, _: &Inner, _: &mut State) {}
}
