//! Lanes over UCX, which is loaded at run time: the way to InfiniBand, RoCE and EFA.
//!
//! [`Library::load`] finds `libucp`, [`Fabric`] opens it for some of its transports and one of its devices, and
//! [`attach`] joins two ends over a TCP connection that has been authenticated: they exchange the addresses of their
//! UCX workers there, so that UCX's own listener is never opened. The connection stays open beside the lane; its end is
//! the lane's.
//!
//! # How frames travel
//!
//! A frame is one active message, with its payload if that is at most 8 KiB. A longer payload follows in pieces of 1
//! MiB by UCX's rendezvous, from the sender's memory straight to the payload's place: UCX moves a piece by whatever is
//! fastest on the device, over its tcp by a put (not of UCX 1.13: `WRITES_THAT_ASSERT`). UCX's `put` itself is not
//! used: UCX before 1.16 emulates it by active messages of 8 KiB wherever the transport lacks a short put, as TCP does.
//!
//! A transfer that UCX has begun can't be recalled, so both ends keep the [`Loan`](crossrail_transport::Loan) of its
//! memory until it has ended, or the link is gone. Where UCX reads the peer's memory by a call of the kernel (cma,
//! knem), the peer decides when, so the sending end stages pieces, of 256 KiB, in memory of the lane; such a copy ends
//! within the call of ours that began it, so it goes straight to the payload's place. What is in flight is bounded: 128
//! frames and 8 pieces in each direction. UCX retries and waits beneath; no call here waits for the peer, except
//! [`attach`], which has a deadline, and the drop of a lane, which gives UCX 200 ms to hand over what was sent.
//!
//! UCX ends the process when it finds its own state to be other than it asserts, as a queue of copies that is not empty
//! when its worker is destroyed. Over tcp, the worker's connections are cut first, which empties it; elsewhere, a
//! worker where that may be so is given up: never called again, never freed. Nor does UCX provide for a peer that goes
//! while both connect: an end that gives a join up keeps its worker until the other end has, too.
//!
//! Each lane has a worker of its own, so an error of UCX's ends that lane only, and once the worker is gone nothing
//! refers to the lane's memory.

mod alarm;
mod attach;
mod companion;
mod cut;
mod fabric;
mod inbox;
mod lane;
mod library;
mod lingering;
mod link;
mod memory;
mod raw;
mod receiver;
mod sender;
mod slots;
mod wire;

pub use attach::attach;
pub use fabric::{Class, Fabric, Resource};
pub use lane::UcxLane;
pub use library::{Absent, Library, loaded_files};
