//! Fast path for short messages.

use crossrail_types::LaneId;

/// Set while a short message can skip all checks of the connection: one reliable lane that
/// [counts](crate::LaneSpec::counts) carries the messages, and nothing is queued, owed, held back or ending.
///
/// It is established after a message that took the slow path ([`Peer::enter_fast_path`](super::Peer::enter_fast_path)),
/// and holds until any other method of [`Peer`](super::Peer) may invalidate it: each of those calls
/// [`FastPath::invalidate`] first.
#[derive(Debug)]
pub(super) struct FastPath {
    /// The lane's id; [`NO_LANE`] while the fast path is off. One word, so that one comparison suffices.
    lane: u64,
    send_max: u64,
    place_max: u32,
}

const NO_LANE: u64 = u64::MAX;

impl Default for FastPath {
    fn default() -> FastPath {
        FastPath { lane: NO_LANE, send_max: 0, place_max: 0 }
    }
}

impl FastPath {
    /// `send_max`: longest message that goes with its first frame. `place_max`: longest that is placed whole.
    pub(super) fn on(lane: LaneId, send_max: u64, place_max: u32) -> FastPath {
        FastPath { lane: u64::from(lane.0), send_max, place_max }
    }

    /// Whether short messages on that lane may take the fast path.
    #[inline(always)]
    pub(super) fn is_on(&self, lane: LaneId) -> bool {
        self.lane == u64::from(lane.0)
    }

    /// Turns the fast path off: one of its preconditions may change.
    #[inline(always)]
    pub(super) fn invalidate(&mut self) {
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
