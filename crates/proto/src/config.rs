use crossrail_types::LaneId;

/// A moment, in nanoseconds since anything, as long as it never goes back. May be coarse.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(pub u64);

impl Time {
    /// Nanoseconds since `earlier`; 0 if that is later.
    #[inline]
    pub fn since(self, earlier: Time) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// What both ends of a connection must have agreed on (all but `lane_deadline` and `lazy_passes`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Largest chunk, in bytes.
    pub chunk: u64,
    /// Chunks that a lane may have outstanding.
    pub window: u32,
    /// Eager bytes that a peer may have sent and not yet been told are received.
    pub eager_credit: u64,
    /// Operations that a peer may have in flight; more wait at the sender.
    pub message_credit: u32,
    /// Nanoseconds without progress after which a lane that owes us something is suspected.
    pub lane_deadline: u64,
    /// How many times [`crate::Peer::next`] may find nothing but acknowledgements to send before it sends them
    /// alone, hoping that a message comes along to carry them. 0: at once.
    pub lazy_passes: u32,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            chunk: 2 << 20,
            window: 16,
            eager_credit: 1 << 20,
            message_credit: 4096,
            lane_deadline: 300_000_000,
            lazy_passes: 1,
        }
    }
}

/// What a lane carries at present.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneLoad {
    /// Chunks sent and not acknowledged.
    pub chunks: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes per second, as the acknowledgements came; 0 while unknown.
    pub rate: u64,
    /// It holds a chunk of the peer's for which there is no slot, and receives nothing meanwhile.
    pub waits: bool,
}

/// What the protocol has to know of a lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaneSpec {
    /// Its id, the same in every call.
    pub id: LaneId,
    /// Loses nothing while the peer lives: messages on it are neither kept nor acknowledged.
    pub reliable: bool,
    /// May carry the message stream.
    pub messages: bool,
    /// Carries chunks. A lane without this does so only while no lane with it is there.
    pub bulk: bool,
    /// Largest payload of one frame, in bytes; at least 64.
    pub max_payload: u32,
    /// Largest message that goes out with its first frame, in bytes.
    pub eager_max: u32,
    /// Payloads up to here, in bytes, it places in one step: between [`crate::Placing::Message`] and the last byte
    /// nothing else happens at this end. 0: it may be interrupted at any byte. Only for reliable lanes.
    pub whole_max: u32,
    /// Shows the peer a count at any time, without a frame ([`crate::Peer::publish`]): frames of their own for delivered
    /// messages are not needed on it. Only for reliable lanes.
    pub counts: bool,
    /// What a message costs on it, in nanoseconds: the cheapest lane carries the message stream.
    pub cost_ns: u64,
}
