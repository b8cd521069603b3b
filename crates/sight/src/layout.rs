//! The layout of a page: a header, then rows of equal length, all of them 64-bit words in the machine's byte order.
//!
//! ```text
//! header   magic, version, process, times, how many rows are in use
//! row      sequence word | kind and owner | name | peer | wait | time of birth | values
//! ```
//!
//! Which value is where follows from the order in which [`kinds!`] declares the fields of a kind. Anything that moves a
//! word changes [`VERSION`]: readers refuse other versions.

/// Version of the layout.
pub const VERSION: u32 = 1;
/// First word of a page that is complete: `CROSSPG` and a zero.
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"CROSSPG\0");

/// Words of the header, and of a row.
pub(crate) const ROW_WORDS: usize = 64;
pub(crate) const ROW_BYTES: usize = ROW_WORDS * 8;
/// Most rows of a page, which bounds what a process takes of the shared memory (1 MiB) and what a reader reads.
pub(crate) const ROWS_MAX: usize = 2047;
/// Rows whose memory is reserved together.
pub(crate) const EXTENT_ROWS: usize = 127;
pub(crate) const PAGE_BYTES: usize = (ROWS_MAX + 1) * ROW_BYTES;

/// Bytes of a name, the longest that is kept.
pub(crate) const TEXT_WORDS: usize = 8;
/// Most ranks that a wait lists.
pub(crate) const RANKS_MAX: usize = 8;

/// Words of the header.
pub(crate) mod header {
    pub(crate) const MAGIC: usize = 0;
    /// Version, and the bytes of a row.
    pub(crate) const VERSION: usize = 1;
    pub(crate) const PID: usize = 2;
    /// Start of the process in ticks since the machine booted: process ids are used again.
    pub(crate) const START: usize = 3;
    /// The process-id namespace that `PID` is of.
    pub(crate) const SPACE: usize = 4;
    /// Nanoseconds of the machine's monotonic clock: when the page was made and when a row was last written.
    pub(crate) const BORN: usize = 5;
    pub(crate) const WRITTEN: usize = 6;
    /// Rows up to the last one that was ever used.
    pub(crate) const USED: usize = 7;
    /// Rows that were refused because the page was full.
    pub(crate) const DROPPED: usize = 8;
    pub(crate) const HOST: usize = 9;
    pub(crate) const COMMAND: usize = 17;
}

/// Words of a row.
pub(crate) mod row {
    /// Odd while the row is being written.
    pub(crate) const SEQUENCE: usize = 0;
    /// Kind, and the number of its owner: rows of the same worker or buffer have the same.
    pub(crate) const KIND: usize = 1;
    pub(crate) const NAME: usize = 2;
    pub(crate) const PEER: usize = 10;
    /// The oldest wait: operation (two words of text), since when (0: none), number or tag, whom (text), ranks.
    pub(crate) const WAIT: usize = 18;
    pub(crate) const SINCE: usize = 20;
    pub(crate) const NUMBER: usize = 21;
    pub(crate) const WHOM: usize = 22;
    /// Four words of two ranks each, plus one; 0: none.
    pub(crate) const RANKS: usize = 30;
    pub(crate) const BORN: usize = 34;
    pub(crate) const VALUES: usize = 35;
}

/// What a value counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Only grows.
    Count,
    /// Bytes; only grows.
    CountBytes,
    /// Nanoseconds; only grows.
    CountNs,
    /// A present number.
    Now,
    /// Present bytes.
    NowBytes,
    /// Present bytes per second.
    NowRate,
    /// How often each of [`ERRORS`] happened.
    Errors,
    /// How many lasted up to each of [`HISTOGRAM_LIMITS_NS`], longer, and how long all of them together.
    Histogram,
}

impl Form {
    /// Words that it takes.
    pub const fn words(self) -> usize {
        match self {
            Form::Errors => ERRORS.len(),
            Form::Histogram => HISTOGRAM_WORDS,
            _ => 1,
        }
    }
}

/// Upper limits of a histogram's buckets, in nanoseconds; one more bucket has what is longer.
pub const HISTOGRAM_LIMITS_NS: [u64; 12] = [
    10_000,
    40_000,
    160_000,
    640_000,
    2_560_000,
    10_240_000,
    40_960_000,
    163_840_000,
    655_360_000,
    2_621_440_000,
    10_485_760_000,
    41_943_040_000,
];
/// Words of a histogram: the buckets, and the sum.
pub const HISTOGRAM_WORDS: usize = HISTOGRAM_LIMITS_NS.len() + 2;

/// The kinds of errors, in the order of their counters: that of `crossrail_types::ErrorKind`.
pub const ERRORS: [&str; 15] = [
    "usage",
    "config",
    "unreachable",
    "refused",
    "mismatch",
    "timeout",
    "peer_dead",
    "truncated",
    "cancelled",
    "region",
    "exhausted",
    "unsupported",
    "io",
    "protocol",
    "closed",
];

/// One value of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Its name in JSON, and the middle of its metric's name.
    pub name: &'static str,
    /// What it counts.
    pub form: Form,
    /// What it means.
    pub doc: &'static str,
}

macro_rules! kinds {
    ($( $(#[doc = $doc:literal])+ $kind:ident = $code:literal $name:literal in $module:ident { $( #[doc = $about:literal] $field:ident: $form:ident, )+ } )+) => {
        /// What a row is about.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Kind { $( $(#[doc = $doc])+ $kind = $code, )+ }

        /// All kinds.
        pub const KINDS: &[Kind] = &[$( Kind::$kind, )+];

        impl Kind {
            /// Its name in JSON and in metrics.
            pub const fn name(self) -> &'static str {
                match self { $( Kind::$kind => $name, )+ }
            }

            /// What a row of it is about.
            pub const fn doc(self) -> &'static str {
                match self { $( Kind::$kind => concat!($($doc),+), )+ }
            }

            /// Its values, in order.
            pub const fn fields(self) -> &'static [Field] {
                match self { $( Kind::$kind => &[$( Field { name: stringify!($field), form: Form::$form, doc: $about }, )+], )+ }
            }

            pub(crate) fn of(code: u64) -> Option<Kind> {
                match code { $( $code => Some(Kind::$kind), )+ _ => None }
            }
        }

        /// Where the values of each kind are in its row: the index of their first word.
        pub mod fields {
            $( #[doc = concat!("Values of a ", $name, " row.")] pub mod $module {
                use super::super::offset;
                $( #[doc = $about] #[allow(non_upper_case_globals)] pub const $field: usize =
                    offset(crate::layout::Kind::$kind, stringify!($field)); )+
            } )+
        }
    };
}

kinds! {
    /// A process.
    Process = 1 "process" in process {
        /// Errors of operations, connections and calls, by kind.
        errors: Errors,
    }
    /// A worker: its transfers with all peers.
    Worker = 2 "worker" in worker {
        /// Operations that were begun: sends, receives, writes, reads and batches.
        operations: Count,
        /// Operations in flight.
        in_flight: Now,
        /// Peers that are connected.
        peers: Now,
        /// Completed transfers, sent or received, that were too long for a single frame.
        transfers: Count,
        /// Bytes of those transfers.
        transfer_bytes: CountBytes,
        /// Time that those transfers waited for the peer to match them.
        match_seconds: CountNs,
        /// Time that those transfers were blocked because no lane had room in its window.
        window_seconds: CountNs,
        /// Time in which the bytes of those transfers were in flight.
        wire_seconds: CountNs,
        /// Time in which this process copied bytes of those transfers itself.
        copy_seconds: CountNs,
        /// How long each of those transfers took, from matched to delivered.
        transfer_seconds: Histogram,
    }
    /// A rail of a worker: the lanes over one network device, or over shared memory, with all peers.
    Rail = 3 "rail" in rail {
        /// Bytes sent, frame heads included.
        sent_bytes: CountBytes,
        /// Bytes received, frame heads included.
        received_bytes: CountBytes,
        /// Lanes that are up.
        lanes: Now,
        /// Chunks sent and not acknowledged.
        in_flight_chunks: Now,
        /// Bytes of chunks sent and not acknowledged.
        in_flight_bytes: NowBytes,
        /// Times that the peer owed something on a lane and the lane was silent for a whole deadline.
        stalls: Count,
        /// TCP segments that the kernel sent again.
        retransmits: Count,
        /// Chunks resent over other lanes after their lane failed.
        resent_chunks: Count,
        /// Lanes that were lost.
        lost_lanes: Count,
        /// Lanes that were lost because a checksum differed.
        corrupt_lanes: Count,
    }
    /// A peer of a worker.
    Peer = 4 "peer" in peer {
        /// Frames of messages sent: a message with its first bytes, an answer, an acknowledgement.
        sent_frames: Count,
        /// Frames of messages received.
        received_frames: Count,
        /// Operations with it in flight.
        in_flight: Now,
        /// Bytes that this process copied to or from its memory directly, without a lane.
        copied_bytes: CountBytes,
        /// Chunks resent over other lanes after their lane failed.
        resent_chunks: Count,
        /// Lanes that are up.
        lanes: Now,
    }
    /// A link: one lane to one peer.
    Link = 5 "link" in link {
        /// Bytes sent, frame heads included.
        sent_bytes: CountBytes,
        /// Bytes received, frame heads included.
        received_bytes: CountBytes,
        /// Chunks sent and not acknowledged.
        in_flight_chunks: Now,
        /// Bytes of chunks sent and not acknowledged.
        in_flight_bytes: NowBytes,
        /// The rate of the last chunks, as this end measured it; 0 while unknown.
        rate: NowRate,
        /// Times that the peer owed something on it and it was silent for a whole deadline.
        stalls: Count,
        /// TCP segments that the kernel sent again.
        retransmits: Count,
        /// 1 while its next frame waits for a GPU or for room at the peer.
        held_up: Now,
    }
    /// A GPU and a peer: copies that this process's GPU made to or from GPU memory of that peer.
    Gpu = 6 "gpu" in gpu {
        /// Bytes copied.
        copied_bytes: CountBytes,
        /// Copies.
        copies: Count,
        /// Time from the beginning of each copy to its end, added up.
        copy_seconds: CountNs,
    }
    /// An expert buffer: one rank's part in dispatch and combine.
    Buffer = 7 "buffer" in buffer {
        /// This rank.
        rank: Now,
        /// Ranks of the buffer.
        ranks: Now,
        /// Ranks that are connected, this one included.
        connected: Now,
        /// Connected ranks that are masked.
        masked: Now,
        /// Ranks that were lost.
        lost: Count,
        /// Bytes of memory of the buffer.
        memory_bytes: NowBytes,
        /// Dispatches begun.
        dispatches: Count,
        /// Combines begun.
        combines: Count,
        /// Operations begun: dispatches, combines, synchronisations.
        operations: Count,
        /// How long each operation took in this process, from its call to its end.
        operation_seconds: Histogram,
    }
    /// A group that the process is a member of.
    Group = 8 "group" in group {
        /// This rank.
        rank: Now,
        /// Ranks of the group.
        ranks: Now,
        /// Barriers completed.
        barriers: Count,
    }
    /// A rank on another node, and what the proxy of an expert buffer does for it.
    Proxy = 9 "proxy" in proxy {
        /// The other rank.
        rank: Now,
        /// Commands of kernels that were read: each stands for rows, for words, or for the release of slots.
        commands: Count,
        /// Bytes that those commands named, and that were sent.
        sent_bytes: CountBytes,
        /// Commands that were read and are not sent yet.
        pending: Now,
        /// Writes that were sent and are not confirmed yet.
        in_flight: Now,
        /// Rails that carry its data, those of all lanes together.
        rails: Now,
        /// Rails that were lost and are not replaced.
        lost_rails: Now,
        /// Durations of bursts of commands, each from the time when its first one was read until all were in place.
        burst_seconds: Histogram,
    }
    /// A thread of the proxy of an expert buffer.
    ProxyThread = 10 "proxy_thread" in proxy_thread {
        /// 2: it polls, 1: it naps between looks, 0: it sleeps until an operation is enqueued.
        state: Now,
        /// Time in which it polled without a pause.
        polling_seconds: CountNs,
        /// Times at which it began to poll again.
        wake_ups: Count,
    }
    /// Dispatches, or combines, of an expert buffer in GPU memory, whose bytes by link the host counts now and then.
    Exchange = 11 "exchange" in exchange {
        /// Operations whose bytes were counted.
        counted: Count,
        /// Bytes of the last one, sent to ranks whose memory the GPU writes.
        nvlink_out_bytes: NowBytes,
        /// Bytes of the last one, received from such ranks.
        nvlink_in_bytes: NowBytes,
        /// Bytes of the last one, sent over the network.
        network_out_bytes: NowBytes,
        /// Bytes of the last one, received from the network.
        network_in_bytes: NowBytes,
    }
}

/// The index, among a row's words, of the first word of that value.
const fn offset(kind: Kind, name: &str) -> usize {
    let (mut at, mut word) = (0, row::VALUES);
    let fields = kind.fields();
    while at < fields.len() {
        if equal(fields[at].name.as_bytes(), name.as_bytes()) {
            assert!(word + fields[at].form.words() <= ROW_WORDS);
            return word;
        }
        word += fields[at].form.words();
        at += 1;
    }
    panic!("no such value")
}

const fn equal(a: &[u8], b: &[u8]) -> bool {
    let mut at = 0;
    while at < a.len() && at < b.len() && a[at] == b[at] {
        at += 1;
    }
    at == a.len() && at == b.len()
}

/// As much of `text` as fits in `words` words, cut between characters, padded with zeros.
pub(crate) fn encode(text: &str, words: usize) -> Vec<u64> {
    let mut end = text.len().min(words * 8);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let mut bytes = vec![0; words * 8];
    bytes[..end].copy_from_slice(&text.as_bytes()[..end]);
    bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap_or_default())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_fits_in_a_row_and_no_two_values_overlap() {
        for kind in KINDS {
            let words: usize = kind.fields().iter().map(|field| field.form.words()).sum();
            assert!(row::VALUES + words <= ROW_WORDS, "{}", kind.name());
            assert_eq!(Kind::of(*kind as u64), Some(*kind));
        }
        assert_eq!(fields::worker::operations, row::VALUES);
        assert_eq!(fields::worker::transfer_seconds + HISTOGRAM_WORDS, row::VALUES + 9 + HISTOGRAM_WORDS);
        assert_eq!(Kind::of(0), None);
    }

    #[test]
    fn kinds_of_errors_are_counted_under_their_names() {
        use crossrail_types::ErrorKind::*;
        let kinds = [
            Usage,
            Config,
            Unreachable,
            Refused,
            Mismatch,
            Timeout,
            PeerDead,
            Truncated,
            Cancelled,
            Region,
            Exhausted,
            Unsupported,
            Io,
            Protocol,
            Closed,
        ];
        for (at, kind) in kinds.into_iter().enumerate() {
            assert_eq!((kind as usize, format!("{kind:?}").to_lowercase()), (at, ERRORS[at].replace('_', "")));
        }
    }
}
