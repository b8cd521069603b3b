//! Settings of what the library finds by itself unless it is told.

use super::{Codec, count};
use crate::counts::{Affinity, Channels, IoThreads};

pub(super) const CHANNELS: Codec<Channels> = Codec {
    parse: |text| match text.trim() {
        "auto" => Ok(Channels::Auto),
        number => (count::<1, 64>().parse)(number).map(Channels::Count),
    },
    show: |channels| {
        Some(match channels {
            Channels::Auto => "auto".to_owned(),
            Channels::Count(count) => count.to_string(),
        })
    },
};

pub(super) const IO_THREADS: Codec<IoThreads> = Codec {
    parse: |text| match text.trim() {
        "auto" => Ok(IoThreads::Auto),
        number => (count::<1, 256>().parse)(number).map(IoThreads::Count),
    },
    show: |threads| {
        Some(match threads {
            IoThreads::Auto => "auto".to_owned(),
            IoThreads::Count(count) => count.to_string(),
        })
    },
};

pub(super) const AFFINITY: Codec<Affinity> = Codec {
    parse: |text| match text.trim() {
        "auto" => Ok(Affinity::Auto),
        "off" => Ok(Affinity::Off),
        _ => Err("is neither auto nor off".to_owned()),
    },
    show: |affinity| {
        Some(match affinity {
            Affinity::Auto => "auto".to_owned(),
            Affinity::Off => "off".to_owned(),
        })
    },
};
