use std::sync::Arc;
use std::time::Instant;

use crossrail_types::{Error, ErrorKind, Result, Settings};

use crate::{EtcdStore, Store, builtin};

/// A client of the store at `address`, by its scheme: `tcp://host:port` is the built-in one, `etcd://host:port[,host:port]`
/// etcd. Waits until the store is there.
///
/// # Errors
/// `Config`: an address of no known scheme or form. `Unreachable` or `Timeout`: not reached by the deadline.
/// `Refused`: the secret.
pub fn open(address: &str, settings: &Settings, deadline: Instant) -> Result<Arc<dyn Store>> {
    match address.split_once("://") {
        Some(("tcp", place)) => builtin::connect(place, settings, deadline),
        Some(("etcd", _)) => Ok(Arc::new(EtcdStore::open(address, deadline)?)),
        _ => Err(Error::new(ErrorKind::Config, "CROSSRAIL_STORE", format!("{address:?} has no known scheme"))
            .with_hint("known: tcp://host:port, etcd://host:port")),
    }
}
