//! The control plane: a small key-value store shared by all processes of a job, and groups of ranks built on it. Not on
//! the data path: transfers continue while the store is unreachable.
#![forbid(unsafe_code)]

mod bootstrap;
#[doc(hidden)]
pub mod builtin;
#[cfg(feature = "conformance")]
pub mod conformance;
mod etcd;
mod group;
mod job;
mod keys;
mod launch;
mod limits;
mod membership;
pub mod metadata;
mod open;
mod ranks;
mod store;

#[cfg(test)]
mod crowd_tests;

pub use bootstrap::{Bootstrap, Overrides};
pub use builtin::StoreServer;
pub use etcd::EtcdStore;
pub use group::{Group, GroupOptions};
pub use job::{JobGroup, JobRank, job};
pub use launch::Launch;
pub use membership::{Member, RankState};
pub use open::open;
pub use store::{Entry, Event, Expected, Lease, LeaseId, MissingKeys, Revision, Store, Watch};
