//! Lanes that are silent, or whose link is down.

use crossrail_transport::LaneError;
use crossrail_types::{EndpointId, LaneId};

use super::Progress;

impl Progress {
    /// A lane owes something and is silent: does its link still move bytes?
    pub(super) fn examine(&self, endpoint: EndpointId, id: LaneId) {
        let mut core = self.core.lock();
        let now = core.read_clock();
        let bulk = core.peers().get(endpoint).and_then(|peer| peer.bulk_lane(id).cloned());
        let stats = match &bulk {
            Some(lane) => match lane.lane.try_lock() {
                Some(held) => held.as_ref().map(|lane| Some(lane.stats())),
                // Another thread is moving bytes on it at this moment.
                None => Some(None),
            },
            None => core.transfers().polled().stats(id).map(Some),
        };
        let (Some(stats), Some(record)) = (stats, core.transfers().lanes().get_mut(id)) else { return };
        let stats = stats.filter(|_| !record.is_held_up());
        // The peer's kernel acknowledges what arrives, even if its process hangs: only a broken link withholds the
        // acknowledgement of bytes that were in flight a whole deadline ago.
        let owed = stats.filter(|stats| stats.in_flight_bytes > 0).map(|stats| stats.acked_bytes);
        if record.is_silent(owed) {
            let error = LaneError::Down("silent: no acknowledgement within the deadline".to_owned());
            core.transfers().take_for_dead(endpoint, id, error);
            self.after(core);
            return;
        }
        if let Some(peer) = core.peers().get_mut(endpoint) {
            peer.lane_is_alive(now, id, stats.is_some() && owed.is_none());
        }
        core.transfers().settle(endpoint);
        self.after(core);
    }

    /// A network interface is down: the lanes over it are lost.
    pub(crate) fn interface_down(&self, interface: &str) {
        let mut core = self.core.lock();
        for id in core.transfers().lanes().over(interface) {
            if let Some(endpoint) = core.peers().owner_of(id) {
                let error = LaneError::Down(format!("{interface} is down"));
                core.transfers().take_for_dead(endpoint, id, error);
            }
        }
        self.after(core);
    }
}
