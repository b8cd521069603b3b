//! Idle endpoints, which cost the busy ones nothing, however many there are.
//!
//! A lane that was idle for a while rests (see [`PolledLanes`](super::polled_lanes::PolledLanes)): it is armed, so its peer
//! sends a wake-up with the next frame, and not polled. While threads poll and therefore do not sleep in epoll, they
//! ask epoll for such wake-ups every now and then. Nothing is in flight with a resting lane's peer, so its timers are
//! looked at rarely.

use crossrail_proto as proto;
use crossrail_types::EndpointId;

use super::data_path::wants;
use super::{Core, Transfers};

/// With so few lanes or peers, all are polled: that costs less than waking them would.
const FEW: usize = 64;
/// Passes, or nanoseconds, between two looks for lanes to rest and at the timers of all peers.
const SWEEP_PASSES: u32 = 16384;
/// The same while many lanes are polled, where a pass takes longer than a look.
const SWEEP_MANY_PASSES: u32 = 1024;
const SWEEP_NS: u64 = 100_000_000;
/// Lanes that begin to rest in one look, while the worker's lock is held.
const REST_AT_ONCE: usize = 64;
/// Passes, some tens of microseconds, after which threads that poll ask epoll for wake-ups of resting lanes.
const ASK_PASSES: u32 = 512;

/// When it was last done what is done every so many passes.
#[derive(Default)]
pub(super) struct Rounds {
    swept: u32,
    swept_at: proto::Time,
    asked: u32,
}

impl Core {
    /// Reads the clock and has the protocol check for silent lanes; those of idle peers now and then.
    #[inline(never)]
    pub(crate) fn tick(&mut self) {
        let now = self.transfers.tables.clock.read();
        let Rounds { swept, swept_at, asked } = &mut self.rounds;
        let sweep = if self.transfers.polled.len() > FEW { SWEEP_MANY_PASSES } else { SWEEP_PASSES };
        let due = self.passes.wrapping_sub(*swept) >= sweep || now.since(*swept_at) >= SWEEP_NS;
        let ask = self.passes.wrapping_sub(*asked) >= ASK_PASSES;
        if due {
            (*swept, *swept_at) = (self.passes, now);
        }
        if ask {
            *asked = self.passes;
        }
        if due || self.transfers.tables.peers.len() <= FEW {
            self.check_timers(now);
        } else {
            let mut at = 0;
            while let Some(endpoint) = self.transfers.polled.at(at).map(|lane| lane.endpoint) {
                self.transfers.check_timer(endpoint, now);
                at += 1;
            }
        }
        if due {
            self.transfers.rest_idle();
        }
        if ask && self.transfers.polled.resting() > 0 {
            self.transfers.wake_ups.want_events();
        }
    }

    /// Reads the clock and has the protocol check for silent lanes.
    pub(crate) fn timers(&mut self) {
        let now = self.transfers.tables.clock.read();
        self.check_timers(now);
    }

    fn check_timers(&mut self, now: proto::Time) {
        if self.transfers.gpu.has_links() {
            for endpoint in self.transfers.gpu.tidy() {
                self.transfers.pass_notes(endpoint);
            }
        }
        for id in self.transfers.tables.peers.ids() {
            self.transfers.check_timer(id, now);
        }
        if !self.transfers.direct.lingering.is_empty() && self.transfers.direct.lingering.look() {
            self.transfers.tables.operations.report();
        }
        if !self.transfers.tables.operations.returns.is_empty() {
            self.transfers.check_returns(now);
        }
    }
}

impl Transfers {
    fn check_timer(&mut self, id: EndpointId, now: proto::Time) {
        let Some(peer) = self.tables.peers.get_mut(id) else { return };
        if peer.stranded().is_some() {
            self.check_stranded(id, now);
        } else if peer.is_alive() && peer.protocol.timeout().is_some_and(|at| at <= now) {
            peer.protocol.on_timeout(now);
            self.settle(id);
        }
    }

    /// Has lanes rest over which nothing has come since the last call, unless they are few.
    fn rest_idle(&mut self) {
        // Copies between GPUs exchange notes over all lanes.
        let all = self.polled.len() + self.polled.resting();
        if all <= FEW || self.polled.is_armed() || self.gpu.has_links() {
            return;
        }
        let mut idle = Vec::new();
        for at in 0..self.polled.len() {
            let Some(lane) = self.polled.at(at).filter(|_| idle.len() < REST_AT_ONCE) else { break };
            let used = std::mem::take(&mut lane.used);
            if !used && lane.rests && self.is_at_rest(at) {
                idle.push(at);
            }
        }
        if !idle.is_empty() {
            self.polled.rest(&idle);
        }
    }

    /// Whether nothing is in flight with the peer of the lane at that position, and nothing is owed.
    fn is_at_rest(&mut self, at: usize) -> bool {
        let Some((endpoint, id)) = self.polled.at(at).map(|lane| (lane.endpoint, lane.id)) else { return false };
        let Some(peer) = self.tables.peers.get(endpoint) else { return false };
        let idle = !peer.has_operations() && !peer.protocol.awaits_count() && peer.protocol.timeout().is_none();
        idle && !wants(&self.tables, endpoint, id) && !self.direct.is_with(endpoint)
    }
}
