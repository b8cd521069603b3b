//! What makes the usual short message cheap.

use crossrail_types::LaneId;

/// The condition of a connection in which a short message needs nothing but its own words: one lane that loses nothing
/// and [counts](crate::LaneSpec::counts) carries the messages, and nothing is queued, owed, held back or ending.
///
/// It is found out once, after a message that went the long way ([`Peer::calm_down`](super::Peer::calm_down)), and holds
/// until any other method of [`Peer`](super::Peer) may have changed it: each of those calls [`Calm::stir`] first.
#[derive(Debug)]
pub(super) struct Calm {
    /// The lane's id; [`NO_LANE`] while the connection is not calm. One word, so that it is found out by one comparison.
    lane: u64,
    send_max: u64,
    place_max: u32,
}

const NO_LANE: u64 = u64::MAX;

impl Default for Calm {
    fn default() -> Calm {
        Calm { lane: NO_LANE, send_max: 0, place_max: 0 }
    }
}

impl Calm {
    /// `send_max`: longest message that goes with its first frame. `place_max`: longest that is placed whole.
    pub(super) fn on(lane: LaneId, send_max: u64, place_max: u32) -> Calm {
        Calm { lane: u64::from(lane.0), send_max, place_max }
    }

    /// Whether short messages on that lane need no further look at the connection.
    #[inline(always)]
    pub(super) fn is_on(&self, lane: LaneId) -> bool {
        self.lane == u64::from(lane.0)
    }

    /// Something may change that was found out.
    #[inline(always)]
    pub(super) fn stir(&mut self) {
        self.lane = NO_LANE;
    }

    #[inline(always)]
    pub(super) fn send_max(&self) -> u64 {
        self.send_max
    }

    #[inline(always)]
    pub(super) fn place_max(&self) -> u32 {
        self.place_max
    }
}
