//! Who is there, and how to reach them: a small store that all processes of a job share, and the group of ranks
//! that is built on it. Nothing here is on the way of the data: when the store is gone, transfers go on.
#![forbid(unsafe_code)]

mod bootstrap;
#[doc(hidden)]
pub mod builtin;
#[cfg(feature = "conformance")]
pub mod conformance;
mod etcd;
mod group;
mod keys;
mod limits;
mod log;
mod membership;
mod open;
mod ranks;
mod store;

pub use bootstrap::{Bootstrap, Overrides};
pub use builtin::StoreServer;
pub use etcd::EtcdStore;
pub use group::{Group, GroupOptions};
pub use membership::{Member, RankState};
pub use open::open;
pub use store::{Entry, Event, Expected, Lease, LeaseId, MissingKeys, Revision, Store, Watch};
