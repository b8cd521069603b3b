//! Lanes that end: those that fail, those that are taken for dead because they are silent or their link is down; and
//! peers that no lane leads to.

use std::time::Duration;

use crossrail_proto as proto;
use crossrail_transport::LaneError;
use crossrail_types::{EndpointId, LaneId};

use super::tables::State;
use super::{Core, Lost};

/// How long a peer may be without any rail before it is taken for dead: as long as TCP would give a connection.
const STRANDED: Duration = Duration::from_secs(10);

impl Core {
    /// A lane is gone (its object already dropped): its work goes to the others, or the peer is dead.
    pub(crate) fn lane_lost(&mut self, endpoint: EndpointId, id: LaneId, error: &LaneError) {
        let now = self.st.tick();
        let Some(lane) = self.st.lane(id).filter(|lane| lane.alive) else { return };
        lane.bury();
        let (name, rail) = (lane.name.clone(), lane.rail);
        self.st.forget_lane(id);
        self.drop_jobs(|job| job.lane == id);
        self.closing.retain(|(lane, _)| *lane != id);
        let Some(peer) = self.st.peer(endpoint) else { return };
        peer.bulk.retain(|lane| lane.id != id);
        peer.lanes.retain(|lane| *lane != id);
        if peer.inside == Some(id) {
            peer.inside = None;
        }
        let none = peer.lanes.is_empty();
        // Its process says so itself when it ends or gives up, on the control connection.
        if none && (rail.is_none() || !peer.alive || matches!(error, LaneError::Protocol(_))) {
            self.kill(endpoint, &format!("lane {name} is {error}"));
            return;
        }
        peer.peer.lane_down(now, id);
        if peer.alive {
            let goes = match peer.lanes.len() {
                0 => format!("no other is left, it is retried for {} s", STRANDED.as_secs()),
                1 => "1 lane goes on (1 left), it is retried in the background".to_owned(),
                left => format!("the others go on ({left} left), it is retried in the background"),
            };
            peer.stranded = none.then(|| (now, format!("lane {name} is {error}")));
            let peer = peer.name().to_owned();
            self.st.log.warn(format_args!("{peer}: lane {name} is {error}; {goes}"));
            if let Some((rail, channel)) = rail {
                self.lost.push(Lost { endpoint, rail, channel });
            }
        }
        self.settle(endpoint);
    }

    /// Gives up a peer whose last rail was lost and has not come back for [`STRANDED`].
    #[cold]
    pub(crate) fn see_to_stranded(&mut self, endpoint: EndpointId, now: proto::Time) {
        let Some((since, why)) = self.st.peer(endpoint).and_then(|peer| peer.stranded.as_ref()) else { return };
        if now.since(*since) >= STRANDED.as_nanos() as u64 {
            let why = format!("{why}, and no rail came back for {} s", STRANDED.as_secs());
            self.kill(endpoint, &why);
        }
    }

    /// The peer is gone: its operations fail, everything else goes on.
    pub(crate) fn kill(&mut self, endpoint: EndpointId, why: &str) {
        let now = self.st.tick();
        let Some(Some(peer)) = self.st.peers.get_mut(endpoint.0 as usize) else { return };
        let was_alive = std::mem::replace(&mut peer.alive, false);
        if was_alive {
            peer.why_dead = why.to_owned();
            self.ended.push(endpoint);
            self.kicked = true;
        }
        for lane in &peer.bulk {
            lane.dead.raise();
        }
        self.kicked |= !peer.bulk.is_empty();
        peer.stranded = None;
        let (name, waits) = (peer.name().to_owned(), !peer.peer.idle());
        self.drop_jobs(|job| job.endpoint == endpoint);
        let mut at = 0;
        while at < self.inside.len() {
            if self.inside[at].endpoint == endpoint {
                let lane = self.inside.swap_remove(at);
                let id = lane.id;
                self.part(lane);
                self.closing.retain(|(lane, _)| *lane != id);
                if let Some(lane) = self.st.lane(id) {
                    lane.bury();
                }
            } else {
                at += 1;
            }
        }
        self.recount();
        self.drop_link(endpoint);
        self.st.let_go_of_all(endpoint);
        let State { peers, matcher, .. } = &mut self.st;
        if let Some(Some(peer)) = peers.get_mut(endpoint.0 as usize) {
            peer.inside = None;
            let failure = if was_alive { proto::Failure::PeerDead(why.to_owned()) } else { proto::Failure::Closed };
            peer.peer.dead(now, failure, matcher);
        }
        if was_alive && waits {
            self.st.log.warn(format_args!("{name}: {why}; its requests fail, other peers go on"));
        } else if was_alive {
            self.st.log.info(format_args!("{name}: {why}"));
        }
        while let Some(event) = self.st.peer(endpoint).and_then(|peer| peer.peer.event()) {
            self.apply(endpoint, event);
        }
        self.fail_gate(endpoint, why);
        self.st.ops.finished = true;
    }

    /// Drops an inside lane that has not failed by itself.
    pub(crate) fn drop_inside(&mut self, endpoint: EndpointId, id: LaneId, error: &LaneError) {
        let Some(at) = self.inside.iter().position(|lane| lane.id == id) else { return };
        let lane = self.inside.swap_remove(at);
        self.part(lane);
        self.recount();
        self.lane_lost(endpoint, id, error);
    }
}
