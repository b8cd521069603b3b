//! One-sided writes over libfabric, which is loaded at run time: the way to EFA, Slingshot and InfiniBand without copies.
//!
//! [`Library::load`] finds `libfabric.so.1`, [`Library::offers`] lists what its providers offer, and [`attach`] joins two
//! ends over a TCP connection that has been authenticated. The connection stays open as long as the [`FabricPlacing`]; its
//! end is the object's.
//!
//! # What is relied upon, and what is not
//!
//! A provider keeps no order, and its local completion of a write proves nothing about the peer. So everything is
//! counted where it arrives, by the immediate of each write, once, and acknowledged by frames that go into a ring in the
//! peer's memory by writes, too: no receives are posted, and only who has a key gets in. Keys are drawn at random where
//! the provider lets this end choose. The peer checks a key before the first write by it, so that no write fails at the
//! device, and confirms that it writes no more before its memory is returned: closing a registration does not stop a
//! write that is arriving. Limits of the provider are kept here: exceeded ones vanish without an error.
//!
//! A provider's error ends the endpoint, by name, since it may concern any of its writes. A [`FabricRails`] has several
//! and continues over the others: both ends state what they had counted over an endpoint that has ended.

mod attach;
#[cfg(feature = "bare")]
pub mod bare;
mod companion;
mod count;
pub mod examine;
mod exposures;
#[cfg(any(test, feature = "fuzzing"))]
#[cfg_attr(not(feature = "fuzzing"), allow(unreachable_pub))]
pub mod fuzzing;
mod lane;
mod library;
mod offer;
mod outgoing;
mod placing;
mod port;
mod rails;
#[doc(hidden)]
pub mod raw;
mod ring;
mod slab;
mod wire;

pub use attach::{attach, attach_rail};
pub use lane::{FabricLane, attach_lane};
pub use library::{Absent, Library, SONAME, VARIABLE};
pub use offer::{Attributes, Offer, Wanted};
pub use placing::FabricPlacing;
pub use rails::{Door, FabricRails, Joined, RAILS_MAX};
