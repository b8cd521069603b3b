//! How the values of settings are parsed and shown.

use std::path::PathBuf;
use std::time::Duration;

use super::{Codec, Filter, LogLevel, Rails, Secret, TRANSPORTS};
use crate::checksum::Checksum;
use crate::counts::{Affinity, Channels, IoThreads};
use crate::error::Error;
use crate::ports::Ports;
use crate::size::{format_duration, format_size, parse_duration, parse_size};
use crate::unpack::Unpack;

pub(super) const TRANSPORT_FILTER: Codec<Filter> = Codec {
    parse: |text| {
        let filter = Filter::parse_transports(text)?;
        match filter.unknown_transport(&TRANSPORTS) {
            Some(name) => Err(format!("contains the unknown transport {name}; known: {}", TRANSPORTS.join(", "))),
            None => Ok(filter),
        }
    },
    show: |filter| Some(filter.to_string()),
};

pub(super) const RAILS: Codec<Rails> = Codec { parse: Rails::parse, show: |rails| Some(rails.to_string()) };

pub(super) const DEVICE: Codec<Option<String>> = Codec {
    parse: |text| match text.trim() {
        "" => Err("is empty".to_owned()),
        name if name.contains([',', '^']) => Err("names more than one device".to_owned()),
        name => Ok(Some(name.to_owned())),
    },
    show: Clone::clone,
};

/// Maximum length of a node's name.
const NODE_MAX: usize = 64;

pub(super) const NODE: Codec<Option<String>> = Codec {
    parse: |text| {
        let is_letter = |letter: char| letter.is_ascii_alphanumeric() || "._-".contains(letter);
        match text.trim() {
            "" => Err("is empty".to_owned()),
            name if name.len() > NODE_MAX => Err(format!("has more than {NODE_MAX} letters")),
            name if !name.chars().all(is_letter) => Err("has other letters".to_owned()),
            name => Ok(Some(name.to_owned())),
        }
    },
    show: Clone::clone,
};

pub(super) const CHUNK: Codec<usize> = size::<0x1000, 0x4000_0000>();

pub(super) const BOUNCE: Codec<usize> = size::<0x10_0000, 0x40_0000_0000>();

pub(super) const UNPACK: Codec<Unpack> = Codec {
    parse: |text| text.parse().map_err(|_| "is not an unpack mode".to_owned()),
    show: |way| Some(way.to_string()),
};

pub(super) const TIMEOUT: Codec<Duration> = Codec {
    parse: |text| match parse_duration(text) {
        Err(error) => Err(why(&error)),
        Ok(time) if time < Duration::from_millis(1) || time > Duration::from_secs(86_400) => {
            Err("is out of range".to_owned())
        }
        Ok(time) => Ok(time),
    },
    show: |time| Some(format_duration(*time)),
};

pub(super) const SECRET: Codec<Option<Secret>> = Codec {
    parse: |text| Secret::new(text).map(Some).map_err(|error| error.detail),
    show: |secret| secret.as_ref().map(|_| "(hidden)".to_owned()),
};

pub(super) const CHECKSUM: Codec<Checksum> = Codec {
    parse: |text| Checksum::parse(text.trim()).ok_or_else(|| "is not a checksum".to_owned()),
    show: |checksum| Some(checksum.to_string()),
};

pub(super) const PATH: Codec<Option<PathBuf>> = Codec {
    parse: |text| if text.is_empty() { Err("is empty".to_owned()) } else { Ok(Some(PathBuf::from(text))) },
    show: |path| path.as_ref().map(|path| path.display().to_string()),
};

pub(super) const LOG: Codec<LogLevel> = Codec {
    parse: |text| {
        let found = LogLevel::NAMES.iter().find(|(name, _)| *name == text.trim());
        found.map(|(_, level)| *level).ok_or_else(|| "is not a log level".to_owned())
    },
    show: |level| Some(level.to_string()),
};

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

pub(super) const PORTS: Codec<Option<Ports>> =
    Codec { parse: |text| Ports::parse(text).map(Some), show: |ports| ports.map(|ports| ports.to_string()) };

pub(super) const PAGES: Codec<Option<PathBuf>> = Codec {
    parse: |text| if text.trim() == "off" { Ok(None) } else { (PATH.parse)(text) },
    show: |folder| (PATH.show)(folder).or_else(|| Some("off".to_owned())),
};

pub(super) const METRICS: Codec<Option<String>> = Codec {
    parse: |text| {
        let text = text.trim();
        if let Some(folder) = text.strip_prefix("file:") {
            return if folder.is_empty() { Err("names no folder".to_owned()) } else { Ok(Some(text.to_owned())) };
        }
        match text.rsplit_once(':') {
            Some((_, port)) if port.parse::<u16>().is_ok() => Ok(Some(text.to_owned())),
            _ => Err("is neither an address with a port nor file:FOLDER".to_owned()),
        }
    },
    show: Clone::clone,
};

pub(super) const STORE: Codec<Option<String>> = Codec {
    parse: |text| {
        let text = text.trim();
        let Some((scheme, addresses)) = text.split_once("://") else {
            return Err("has no scheme".to_owned());
        };
        if !["tcp", "etcd"].contains(&scheme) {
            return Err(format!("has the unknown scheme {scheme}; known: tcp, etcd"));
        }
        if scheme == "tcp" && addresses.contains(',') {
            return Err("lists several addresses: only etcd supports that".to_owned());
        }
        for address in addresses.split(',') {
            match address.rsplit_once(':') {
                Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0) => {}
                _ => return Err(format!("contains {address:?}, which is not host:port")),
            }
        }
        Ok(Some(text.to_owned()))
    },
    show: Clone::clone,
};

pub(super) const fn count<const MIN: u32, const MAX: u32>() -> Codec<u32> {
    Codec {
        parse: |text| match text.trim().parse::<u32>() {
            Ok(count) if (MIN..=MAX).contains(&count) => Ok(count),
            Ok(_) => Err("is out of range".to_owned()),
            Err(_) => Err("is not a whole number".to_owned()),
        },
        show: |count| Some(count.to_string()),
    }
}

const fn size<const MIN: u64, const MAX: u64>() -> Codec<usize> {
    Codec {
        parse: |text| match parse_size(text) {
            Err(error) => Err(why(&error)),
            Ok(bytes) if (MIN..=MAX).contains(&bytes) => {
                usize::try_from(bytes).map_err(|_| "does not fit in the address space".to_owned())
            }
            Ok(_) => Err("is out of range".to_owned()),
        },
        show: |bytes| Some(format_size(*bytes as u64)),
    }
}

/// The reason of a parse error without the quoted value, which the setting's own error repeats.
fn why(error: &Error) -> String {
    error.detail.rsplit_once("\" ").map_or(error.detail.as_str(), |(_, why)| why).to_owned()
}
