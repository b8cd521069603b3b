//! Settings that name a place: ports, a store, where metrics go, where pages are.

use std::path::PathBuf;

use super::{Codec, PATH};
use crate::ports::Ports;

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
