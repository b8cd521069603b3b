use crossrail_types::LaneId;

/// A point in time, in nanoseconds from an arbitrary origin. Must not decrease; may be coarse.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(pub u64);

impl Time {
    /// Nanoseconds since `earlier`; 0 if that is later.
    #[inline]
    pub fn since(self, earlier: Time) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// Parameters that both ends of a connection must have agreed on (all but the last five).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Largest chunk, in bytes.
    pub chunk: u64,
    /// Chunks that a lane may have outstanding.
    pub window: u32,
    /// Eager bytes that a peer may have in flight: sent, and their receipt not yet confirmed by the peer.
    pub eager_credit: u64,
    /// Operations that a peer may have in flight; more wait at the sender.
    pub message_credit: u32,
    /// Nanoseconds without progress after which a lane that owes us something is suspected.
    pub lane_deadline: u64,
    /// How many calls of [`crate::Peer::next`] may defer acknowledgements, when there is nothing else to send, so that
    /// a message can carry them. 0: none, they are sent at once.
    pub lazy_passes: u32,
    /// Shortest message that may be spread over several rails, in bytes: a chunk costs more than a message does.
    pub spread_min: u64,
    /// Bytes of short messages in flight above which they are spread: one connection has enough to do with fewer, and a
    /// message alone arrives sooner with its first frame.
    pub spread_above: u64,
    /// Nanoseconds that a message must gain by that, by the measured rates: less is spent on its chunk by the processors.
    pub spread_gain: u64,
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
            spread_min: 8 << 10,
            spread_above: 64 << 10,
            spread_gain: 8_000,
        }
    }
}

/// Current load of a lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneLoad {
    /// Chunks sent and not acknowledged.
    pub chunks: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes per second, as the acknowledgements came; 0 while unknown.
    pub rate: u64,
    /// The head of an incoming chunk is blocked for want of a slot; nothing else is received on the lane until then.
    pub waits: bool,
}

/// Properties of a lane that the protocol depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaneSpec {
    /// Its id, the same in every call.
    pub id: LaneId,
    /// Loses nothing while the peer lives: messages on it are neither kept nor acknowledged.
    pub reliable: bool,
    /// May carry the message stream.
    pub messages: bool,
    /// Carries chunks. A lane without this flag does so only while no lane with it is up.
    pub bulk: bool,
    /// Largest payload of one frame, in bytes; at least 64.
    pub max_payload: u32,
    /// Largest message that goes out with its first frame, in bytes.
    pub eager_max: u32,
    /// Largest payload, in bytes, that the lane places in one step: nothing else happens at this end between
    /// [`crate::Placing::Message`] and the last byte. 0: placement may be interrupted at any byte. Only for reliable
    /// lanes.
    pub whole_max: u32,
    /// Shows the peer a count at any time, without a frame ([`crate::Peer::publish`]): frames of their own for
    /// delivered messages are not needed on it. Only for reliable lanes.
    pub counts: bool,
    /// What a message costs on it, in nanoseconds: the cheapest lane carries the message stream.
    pub cost_ns: u64,
}
