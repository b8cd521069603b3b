//! Lanes that are silent, or whose link is down.

use crossrail_transport::LaneError;
use crossrail_types::{EndpointId, LaneId};
use parking_lot::MutexGuard;

use super::Progress;
use crate::core::Core;

impl Progress {
    /// A lane owes something and is silent: does its link still move bytes?
    pub(crate) fn examine(&self, endpoint: EndpointId, id: LaneId) {
        let mut core = self.core.lock();
        let now = core.st.tick();
        let bulk = core.st.peer(endpoint).and_then(|peer| peer.bulk.iter().find(|lane| lane.id == id).cloned());
        let stats = match &bulk {
            Some(lane) => match lane.lane.try_lock() {
                Some(held) => held.as_ref().map(|lane| Some(lane.stats())),
                // Somebody is moving bytes on it at this moment.
                None => Some(None),
            },
            None => core.inside.iter().find(|lane| lane.id == id).map(|lane| Some(lane.lane.stats())),
        };
        let (Some(stats), Some(state)) = (stats, core.st.lane(id)) else { return };
        let stats = stats.filter(|_| !state.is_held_up());
        // The other end's kernel acknowledges what comes in, whatever its process does: only a link keeps back that of
        // bytes which were under way a whole deadline ago.
        let owed = stats.filter(|stats| stats.in_flight_bytes > 0).map(|stats| stats.acked_bytes);
        let silent = owed.is_some() && owed == state.seen_acked;
        state.seen_acked = owed;
        if silent {
            let error = LaneError::Down("silent: nothing was acknowledged in time".to_owned());
            self.take_for_dead(core, endpoint, id, error);
            return;
        }
        if let Some(peer) = core.st.peer(endpoint) {
            peer.peer.lane_alive(now, id);
            if stats.is_some() && owed.is_none() {
                peer.peer.probe(id);
            }
        }
        core.settle(endpoint);
        self.after(core);
    }

    /// Drops a lane that has not failed by itself.
    pub(crate) fn take_for_dead(
        &self,
        mut core: MutexGuard<'_, Core>,
        endpoint: EndpointId,
        id: LaneId,
        error: LaneError,
    ) {
        let bulk = core.st.peer(endpoint).and_then(|peer| peer.bulk.iter().find(|lane| lane.id == id).cloned());
        if let Some(lane) = bulk {
            lane.verdict.lock().get_or_insert(error);
            lane.dead.raise();
            core.kicked = true;
        } else {
            core.drop_inside(endpoint, id, &error);
        }
        self.after(core);
    }
}
