use std::sync::Arc;
use std::time::Instant;

use crossrail_types::{Error, ErrorKind, Result, Settings};

use crate::{EtcdStore, Store, builtin};

/// Opens a client of the store at `address`: the built-in store for `tcp://host:port`, etcd for
/// `etcd://host:port[,host:port]`. Waits until the store is reachable.
///
/// # Errors
/// `Config`: unknown scheme or malformed address. `Unreachable` or `Timeout`: not reached before the deadline.
/// `Refused`: the secret.
pub fn open(address: &str, settings: &Settings, deadline: Instant) -> Result<Arc<dyn Store>> {
    match address.split_once("://") {
        Some(("tcp", place)) => builtin::connect(place, settings, deadline),
        Some(("etcd", _)) => Ok(Arc::new(EtcdStore::open(address, deadline)?)),
        _ => Err(Error::new(ErrorKind::Config, "CROSSRAIL_STORE", format!("{address:?} has no known scheme"))
            .with_hint("known: tcp://host:port, etcd://host:port")),
    }
}
