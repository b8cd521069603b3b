//! A barrier, over the same control words as the data.

use std::sync::Arc;

use crossrail_types::{Error, ErrorKind, Result};

use crate::local_rank::{GroupView, LocalRank};
use crate::operation::{Common, Operation, Pending};
use crate::peer::{Expected, Message};

struct Sync(Common);

pub(crate) fn begin(local: &Arc<LocalRank>) -> Result<Pending<()>> {
    let mut view = local.view.lock();
    if view.closed {
        return Err(Error::new(ErrorKind::Closed, "sync", "the buffer was destroyed"));
    }
    view.refuse_broken("sync")?;
    view.operations += 1;
    let number = view.operations;
    let mut common = Common::new(local, &mut view, "sync", number, 0);
    for rank in view.others(local.own.me) {
        if let Some(peer) = &mut view.peers[rank] {
            peer.set_word(&local.own, common.parity, Message::Sync, common.number);
        }
        common.expect(rank, Message::Sync);
    }
    Ok(Pending::new(Box::new(Sync(common)), Arc::clone(local)))
}

impl Operation for Sync {
    type Output = ();

    fn common(&mut self) -> &mut Common {
        &mut self.0
    }

    fn arrived(&mut self, _: &LocalRank, _: &mut GroupView, _: Expected) {}

    fn lost(&mut self, _: &LocalRank, _: &mut GroupView, _: Expected) {}

    fn settle(&mut self, _: &LocalRank, _: &mut GroupView) {}

    fn finish(&mut self, _: &LocalRank, _: &mut GroupView) {}
}
