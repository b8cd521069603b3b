use crossrail_proto as proto;
use proto::Time;

/// Total time during which at least one of several overlapping activities was in flight, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BusyTime {
    count: u32,
    since: Time,
    ns: u64,
}

impl BusyTime {
    pub(crate) fn begin(&mut self, now: Time) {
        if self.count == 0 {
            self.since = now;
        }
        self.count += 1;
    }

    pub(crate) fn end(&mut self, now: Time) {
        if self.count > 0 {
            self.count -= 1;
            if self.count == 0 {
                self.ns += now.since(self.since);
            }
        }
    }

    pub(crate) fn ns(&self) -> u64 {
        self.ns
    }

    fn is_busy(&self) -> bool {
        self.count > 0
    }
}

/// Time that one operation spent on staging GPU memory, and for which of it the transfer waited.
///
/// Stages overlap, so a stage that is busy all the time need not be the one that limits the transfer. It is waited for
/// in these cases, which exclude each other at every moment:
///
/// - *Pack.* A connection has room for a chunk, and its next one is not packed although packs are in flight.
/// - *Slot.* The same, but no pack is in flight: the chunk waits for bounce memory, which the peer has yet to release.
///   At the receiver: a connection has a chunk for which there is no bounce memory, and none is being unpacked.
/// - *Unpack.* Such a chunk waits while others are being unpacked; or chunks are being unpacked and no connection is
///   receiving any: all have arrived, or the sender waits for acknowledgements.
///
/// What one connection waits for counts with its share in the connections of the transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GpuTimes {
    pub(crate) pack: BusyTime,
    pub(crate) unpack: BusyTime,
    pub(crate) slot: BusyTime,
    waits: Waits,
    pack_held: Held,
    unpack_held: Held,
    slot_held: Held,
    /// Until when the held times are accounted.
    accounted: Time,
}

/// Connections by what they are doing, as far as it decides which stage is waited for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Waits {
    starved: u32,
    receiving: u32,
    slotless: u32,
}

/// Time during which a stage was waited for, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Held {
    /// By all connections.
    all: u64,
    /// By some: the sum over them.
    some: u64,
}

impl Held {
    fn ns(self, connections: usize) -> u64 {
        self.all + self.some / connections.max(1) as u64
    }
}

impl GpuTimes {
    /// Accounts the time until `now`, from which on `how` changes what is being done.
    pub(crate) fn change(&mut self, now: Time, how: impl FnOnce(&mut GpuTimes, Time)) {
        let ns = now.since(self.accounted);
        self.accounted = now;
        let Waits { starved, receiving, slotless } = self.waits;
        if starved > 0 {
            let held = if self.pack.is_busy() { &mut self.pack_held } else { &mut self.slot_held };
            held.some += ns * u64::from(starved);
        }
        let unpacking = self.unpack.is_busy();
        if slotless > 0 || unpacking {
            let held = if unpacking { &mut self.unpack_held } else { &mut self.slot_held };
            if receiving == 0 {
                held.all += ns;
            } else {
                held.some += ns * u64::from(slotless);
            }
        }
        how(self, now);
    }

    /// A connection has room, and its next chunk is not packed.
    pub(crate) fn starve(&mut self) {
        self.waits.starved += 1;
    }

    /// That chunk is packed, or given up.
    pub(crate) fn feed(&mut self) {
        self.waits.starved = self.waits.starved.saturating_sub(1);
    }

    /// A connection begins to receive a chunk.
    pub(crate) fn receive(&mut self) {
        self.waits.receiving += 1;
    }

    /// It has received it, or never will.
    pub(crate) fn received(&mut self) {
        self.waits.receiving = self.waits.receiving.saturating_sub(1);
    }

    /// A connection has a chunk for which there is no slot.
    pub(crate) fn lack_slot(&mut self, now: Time) {
        self.slot.begin(now);
        self.waits.slotless += 1;
    }

    /// There is one now, or the connection is lost.
    pub(crate) fn have_slot(&mut self, now: Time) {
        self.slot.end(now);
        self.waits.slotless = self.waits.slotless.saturating_sub(1);
    }

    /// For how long packs, unpacks and slots were waited for, of a transfer over that many connections.
    pub(crate) fn held_ns(&self, connections: usize) -> [u64; 3] {
        [self.pack_held, self.unpack_held, self.slot_held].map(|held| held.ns(connections))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What happens at a time.
    type Change = (u64, fn(&mut GpuTimes, Time));

    /// Held times, in packs, unpacks and slots, of a transfer over four connections, after changes at these times.
    fn held(changes: &[Change]) -> [u64; 3] {
        let mut times = GpuTimes::default();
        for (at, how) in changes {
            times.change(Time(*at), how);
        }
        times.held_ns(4)
    }

    #[test]
    fn a_busy_stage_for_which_nobody_waits_holds_nothing() {
        assert_eq!(held(&[(100, |t, now| t.pack.begin(now)), (900, |t, now| t.pack.end(now))]), [0, 0, 0]);
        let overlapped: [Change; 4] = [
            (100, |t, _| t.receive()),
            (150, |t, now| t.unpack.begin(now)),
            (850, |t, now| t.unpack.end(now)),
            (900, |t, _| t.received()),
        ];
        assert_eq!(held(&overlapped), [0, 0, 0]);
    }

    #[test]
    fn a_connection_that_starves_waits_for_a_pack_or_for_a_slot() {
        let changes: [Change; 5] = [
            (100, |t, _| t.starve()),
            (140, |t, now| t.pack.begin(now)),
            (200, |t, _| t.starve()),
            (300, |t, now| {
                t.pack.end(now);
                t.feed();
            }),
            (340, |t, _| t.feed()),
        ];
        // Slots: 40 of one, and 40 of one; packs: 60 of one and 100 of two.
        assert_eq!(held(&changes), [65, 0, 20]);
    }

    #[test]
    fn an_unpack_is_waited_for_when_nothing_arrives_meanwhile() {
        let changes: [Change; 6] = [
            (0, |t, _| t.receive()),
            (100, |t, now| t.unpack.begin(now)),
            (200, |t, now| t.lack_slot(now)),
            (400, |t, _| t.received()),
            (500, |t, now| t.unpack.end(now)),
            (550, |t, now| t.have_slot(now)),
        ];
        // From 200 to 400 one of four connections waits for a slot of an unpack, from 400 to 500 nothing else happens.
        assert_eq!(held(&changes), [0, 150, 50]);
    }
}
