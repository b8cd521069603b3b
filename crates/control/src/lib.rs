//! Who is there, and how to reach them: a small store that all processes of a job share, and the group of ranks
//! that is built on it. Nothing here is on the way of the data: when the store is gone, transfers go on.
#![forbid(unsafe_code)]

#[doc(hidden)]
pub mod builtin;
#[cfg(feature = "conformance")]
pub mod conformance;
mod etcd;
mod limits;
mod open;
mod store;

pub use builtin::StoreServer;
pub use etcd::EtcdStore;
pub use open::open;
pub use store::{Entry, Event, Expected, Lease, LeaseId, Revision, Store, Watch};
