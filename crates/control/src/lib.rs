//! Who is there, and how to reach them: a small store that all processes of a job share, and the group of ranks
//! that is built on it. Nothing here is on the way of the data: when the store is gone, transfers go on.
#![forbid(unsafe_code)]

mod etcd;
mod store;

pub use etcd::EtcdStore;
pub use store::{Entry, Event, Expected, Lease, LeaseId, Revision, Store, Watch};
