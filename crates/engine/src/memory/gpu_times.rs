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
}

/// Time that one operation spent on staging GPU memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GpuTimes {
    pub(crate) pack: BusyTime,
    pub(crate) unpack: BusyTime,
    pub(crate) slot: BusyTime,
}
