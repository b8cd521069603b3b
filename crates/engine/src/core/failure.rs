//! Lanes that end, because they failed, or were declared dead (silent, or link down); and peers without any lane.

use std::time::Duration;

use crossrail_proto as proto;
use crossrail_transport::LaneError;
use crossrail_types::{EndpointId, ErrorKind, LaneId, Log, Reason};

use super::gpu::NoteFailed;
use super::peers::Peers;
use super::returns::RETURN_MAX;
use super::tables::Tables;
use super::transfers::{LostRail, Transfers};

/// A lane that is lost within this time after it came up counts as not having worked: a rail that corrupts bytes comes
/// up each time it is dialled.
const SOON: Duration = Duration::from_secs(2);

/// Lanes of a peer that may end by memory which is nevertheless mapped, one after the other.
const FAULTS_MAX: u32 = 8;

/// Bytes of unexpected messages of peers that have ended.
const LEFT_MAX: u64 = 64 << 20;

/// How long a peer may be without any rail before it is declared dead: as long as TCP would keep a connection.
const STRANDED: Duration = Duration::from_secs(10);

impl Transfers {
    /// The lanes that a peer has under those names of rails, (rail, channel), in the order in which they came up.
    pub(crate) fn lanes_of(&self, endpoint: EndpointId, names: impl Fn((u16, u16)) -> bool) -> Vec<LaneId> {
        let Tables { peers, lanes, .. } = &self.tables;
        let all = peers.get(endpoint).map_or(&[][..], |peer| peer.lanes());
        let named = |id: &&LaneId| lanes.get(**id).and_then(|lane| lane.rail()).is_some_and(&names);
        all.iter().filter(named).copied().collect()
    }

    /// Messages with that peer stay on their lane, whole, at this end.
    pub(crate) fn keep_messages_whole(&mut self, endpoint: EndpointId) {
        if let Some(peer) = self.tables.peers.get_mut(endpoint) {
            peer.protocol.keep_messages_whole();
        }
    }

    /// A lane has ended and was dropped: its work goes to the others, or the peer has ended.
    pub(crate) fn lane_lost(&mut self, endpoint: EndpointId, id: LaneId, error: &LaneError) {
        let tables = &mut self.tables;
        let now = tables.clock.read();
        // Whatever memory it kept is returned.
        tables.operations.settle_returns();
        self.gpu.end_waits(tables, id);
        let Some(lane) = tables.lanes.get_mut(id) else { return };
        if !lane.close() {
            return;
        }
        lane.is_corrupt = matches!(error, LaneError::Corrupt(_));
        let (name, rail, soon) = (lane.name().clone(), lane.rail(), lane.age(now) < SOON);
        self.gpu.release_lane(tables, id);
        self.direct.abandon_lane(&mut self.gpu, id);
        if let LaneError::Memory(why) = error {
            self.fail_unmapped(endpoint, why);
        }
        let tables = &mut self.tables;
        let Some(peer) = tables.peers.get_mut(endpoint) else { return };
        let is_further = peer.bulk_lane(id).is_some_and(|lane| lane.is_further());
        let is_of_messages = peer.bulk_lane(id).is_none();
        let is_refused = is_further && peer.protocol.is_unused(id);
        let none_left = peer.remove_lane(id);
        // A peer whose process ends or gives up says so itself, on the control connection; a shared-memory lane has
        // none.
        if none_left && (rail.is_none() || !peer.is_alive() || matches!(error, LaneError::Protocol(_))) {
            self.kill(endpoint, &format!("lane {name} is {error}"), Some(Reason::LanesLost));
            return;
        }
        if let LaneError::Corrupt(_) = error {
            let what = format!("lane {name} is {error}");
            peer.note(now, what.clone());
            peer.protocol.corrupted(&what);
        }
        peer.protocol.lane_down(now, id);
        if is_refused && !none_left && matches!(error, LaneError::Closed(_)) {
            // The peer has enough of them, or the rail is lost, whose first connection brings them back. The last lane
            // of all is another matter: from its loss on the peer has STRANDED to come back.
            tables.log.debug(format_args!("{}: lane {name} is {error}; the rail continues without it", peer.name()));
        } else if is_of_messages && peer.message_lane().is_some() {
            tables.log.debug(format_args!("{}: lane {name} is {error}: messages go over another", peer.name()));
        } else if peer.is_alive() {
            // The connection for messages is no lane that the user knows of.
            let rest = match (none_left, peer.bulk().len()) {
                (true, _) => format!("no other is left, it is retried for {} s", STRANDED.as_secs()),
                (false, 0) => "chunks wait until a lane is back, it is retried in the background".to_owned(),
                (false, 1) => "1 lane goes on, it is retried in the background".to_owned(),
                (false, left) => format!("{left} lanes go on, it is retried in the background"),
            };
            peer.set_stranded(none_left.then(|| (now, format!("lane {name} is {error}"))));
            // A lane that the peer closes is nearly always the first sign of its goodbye, or of the end of its
            // process, which is reported once and by name. If it is neither, dialling it again fails, and that is
            // reported. The peer also closes the connection for messages when it has moved them to another rail.
            let reported = !matches!(error, LaneError::Closed(_));
            // Where no other lane carries chunks, a lane that works for a moment is better than none.
            let spared = soon && !peer.bulk().is_empty();
            let short_lived = rail.map_or(0, |rail| peer.rail_lost(rail, spared));
            let (log, again): (fn(Log, std::fmt::Arguments<'_>), &str) = match short_lived {
                0 | 1 if reported => (Log::warn, ""),
                0 | 1 => (Log::info, ""),
                2 => (Log::warn, ", after growing pauses, as it was lost again soon after it had come back"),
                // Known by now: the next line is for when it has worked for a while.
                _ => (Log::debug, ""),
            };
            log(tables.log, format_args!("{}: lane {name} is {error}; {rest}{again}", peer.name()));
            if let Some((rail, channel)) = rail {
                self.deferred.lost.push(LostRail { endpoint, rail, channel, reported, short_lived });
                self.wake_ups.want_connections();
            }
        }
        self.settle(endpoint);
    }

    /// A lane could not access memory: fails the operations that use memory which is not mapped any more, or all with
    /// that peer, because every other lane would end in the same way.
    #[cold]
    fn fail_unmapped(&mut self, endpoint: EndpointId, why: &str) {
        let (gone, now) = (self.tables.unmapped(endpoint), self.tables.clock.now());
        if let Some(peer) = self.tables.peers.get_mut(endpoint) {
            for memory in &gone {
                peer.protocol.fault(now, *memory, format!("it is not mapped any more ({why})"));
            }
        }
        // Its operation may have ended meanwhile. Memory that is mapped and cannot be accessed would end one lane after the
        // other.
        let peer = self.tables.peers.get_mut(endpoint);
        if peer.is_some_and(|peer| peer.memory_fault(gone.is_empty()) >= FAULTS_MAX) {
            let why = format!("memory of an operation with it cannot be accessed ({why})");
            self.kill(endpoint, &why, None);
        }
    }

    /// Drops a lane polled under the lock.
    pub(crate) fn drop_polled_lane(&mut self, endpoint: EndpointId, id: LaneId, error: &LaneError) {
        let Some(at) = self.polled.position(id) else { return };
        let lane = self.polled.remove(at);
        self.direct.close_lane(&mut self.tables, &mut self.gpu, lane);
        self.lane_lost(endpoint, id, error);
    }

    /// Drops a lane over which a note could not be passed.
    pub(super) fn drop_noted(&mut self, failed: &NoteFailed) {
        self.drop_polled_lane(failed.endpoint, failed.lane, &failed.error);
    }

    /// Declares a lane dead that has not reported an error itself.
    pub(crate) fn take_for_dead(&mut self, endpoint: EndpointId, id: LaneId, error: LaneError) {
        let peer = self.tables.peers.get(endpoint);
        if let Some(lane) = peer.and_then(|peer| peer.bulk_lane(id)) {
            lane.verdict.lock().get_or_insert(error);
            lane.drop_soon();
            self.wake_ups.want_connections();
        } else {
            self.drop_polled_lane(endpoint, id, &error);
        }
    }

    /// Declares lanes dead that have kept memory for too long after its recall.
    #[cold]
    pub(super) fn check_returns(&mut self, now: proto::Time) {
        let tables = &mut self.tables;
        tables.operations.settle_returns();
        for lane in tables.operations.returns.overdue(now) {
            let Some(endpoint) = self.tables.lanes.get(lane).map(|lane| lane.owner()) else { continue };
            let why = format!("it did not return recalled memory within {} s", RETURN_MAX.as_secs());
            self.take_for_dead(endpoint, lane, LaneError::Down(why));
        }
    }

    /// Gives up a peer whose last rail was lost and has not come back for [`STRANDED`].
    #[cold]
    pub(super) fn check_stranded(&mut self, endpoint: EndpointId, now: proto::Time) {
        let Some((since, why)) = self.tables.peers.get(endpoint).and_then(|peer| peer.stranded()) else { return };
        if now.since(*since) >= STRANDED.as_nanos() as u64 {
            let why = format!("{why}, and no rail came back for {} s", STRANDED.as_secs());
            self.kill(endpoint, &why, Some(Reason::LanesLost));
        }
    }

    /// The peer has ended: its operations fail, everything else goes on.
    ///
    /// The order matters. Direct copies end before their lanes are closed, lanes before the staging that their buffers
    /// belong to, and all of it before the protocol reports the failures that give the memory back to the user.
    pub(crate) fn kill(&mut self, endpoint: EndpointId, why: &str, reason: Option<Reason>) {
        let tables = &mut self.tables;
        let now = tables.clock.read();
        let Some(peer) = tables.peers.get_mut(endpoint) else { return };
        let was_alive = peer.end(why, reason);
        for lane in peer.bulk() {
            lane.drop_soon();
        }
        if !peer.bulk().is_empty() {
            self.wake_ups.want_connections();
        }
        peer.set_stranded(None);
        let (had_work, is_closing) = (peer.has_operations(), peer.is_closing);
        if was_alive {
            self.deferred.ended.push(endpoint);
            self.wake_ups.want_connections();
        }
        self.direct.abandon_endpoint(&mut self.gpu, endpoint);
        while let Some(lane) = self.polled.remove_of(endpoint) {
            let id = lane.id;
            self.direct.close_lane(&mut self.tables, &mut self.gpu, lane);
            self.direct.abandon_lane(&mut self.gpu, id);
            if let Some(lane) = self.tables.lanes.get_mut(id) {
                lane.close();
            }
        }
        self.gpu.release_endpoint(&mut self.tables, endpoint);
        let tables = &mut self.tables;
        if let Some(peer) = tables.peers.get_mut(endpoint) {
            peer.clear_message_lane();
            let failure = if was_alive { proto::Failure::PeerDead(why.to_owned()) } else { proto::Failure::Closed };
            peer.protocol.dead(now, failure, &mut tables.matcher);
        }
        let name = tables.peers.name(endpoint);
        if was_alive && had_work && !is_closing && self.warns_of_ends {
            tables.log.warn(format_args!("{name}: {why}; its requests fail, other peers go on"));
        } else if was_alive {
            tables.log.info(format_args!("{name}: {why}"));
        }
        self.apply_events(endpoint);
        self.end_lists(endpoint, why);
        for op in self.gpu.take_held(endpoint) {
            self.tables.fail(op, ErrorKind::PeerDead, why, Some(endpoint));
        }
        self.bound_left(endpoint);
        self.tables.operations.settle_returns();
        self.tables.operations.report();
    }

    /// Drops unexpected messages of peers that have ended, the oldest first, as far as they exceed [`LEFT_MAX`]: their
    /// sends have failed, because a send ends with its receive.
    fn bound_left(&mut self, ended: EndpointId) {
        let bytes = |peers: &Peers, of: EndpointId| peers.get(of).map_or(0, |peer| peer.arrival_bytes());
        let Transfers { tables, left, .. } = self;
        let cost = bytes(&tables.peers, ended);
        if cost == 0 || left.peers.contains(&ended) {
            return;
        }
        left.peers.push_back(ended);
        left.bytes += cost;
        if left.bytes <= LEFT_MAX {
            return;
        }
        // Some have been received since. To less than the maximum, so that this is done rarely.
        left.peers.retain(|of| bytes(&tables.peers, *of) > 0);
        left.bytes = left.peers.iter().map(|of| bytes(&tables.peers, *of)).sum();
        let mut dropped = Vec::new();
        while left.bytes > LEFT_MAX / 4 * 3
            && let Some(oldest) = left.peers.pop_front()
        {
            left.bytes -= bytes(&tables.peers, oldest);
            dropped.push(oldest);
        }
        let now = tables.clock.now();
        for endpoint in dropped {
            let name = self.tables.peers.name(endpoint);
            self.tables.log.warn(format_args!(
                "{name}: unreceived messages were dropped: it has ended, and those of ended peers exceed {} \
                 MiB",
                LEFT_MAX >> 20
            ));
            if let Some(peer) = self.tables.peers.get_mut(endpoint) {
                peer.protocol.forget_messages(now, &mut self.tables.matcher);
            }
            self.apply_events(endpoint);
        }
    }
}
