//! TCP lanes: one connection per lane, bound to its network device.
//!
//! [`listen`] and [`dial`] open the connections of a rail ([`Binding`]). Once both ends have authenticated each other,
//! [`TcpLane`] carries frames over a connection, and [`LinkWatch`] reports when a device goes down or comes back.
//!
//! [`CheckedLane`] carries the same frames in records with checksums.
//!
//! # Receiving
//!
//! One readv reads the rest of a payload into its destination and, beyond it, the next header. With no payload in
//! progress, one recv of 64 KiB reads many small frames at once.
//!
//! # Sending
//!
//! Payloads of 64 KiB and more are sent by reference (vmsplice into a pipe, splice into the socket), smaller ones are
//! copied, and so are bounce slots: the kernel delivers what a lost connection holds, after its slots have other bytes. If
//! vmsplice or the pipe is refused, the lane copies everything. The choice was made between four ways to
//! send large payloads, measured with bare sockets over loopback (64 MiB, two processes, 2 cores, Linux 6.18, best
//! averages of alternating runs, with the ends asleep / spinning):
//!
//! | way | GB/s | |
//! |---|---|---|
//! | vmsplice + splice | 7.2 / 7.2 | used: works for any memory, least CPU time |
//! | sendmsg | 6.5 / 7.0 | used for small payloads, and as the fallback |
//! | sendfile | 5.9 / 5.9 | takes one page at a time from the page cache |
//! | MSG_ZEROCOPY | 4.3 (spinning) | loopback copies anyway, and completions cost system calls |
//!
//! io_uring was compared likewise, by a program without a protocol (512 MiB in calls of 1 MiB over loopback, one
//! process at each end, Linux 6.18), in CPU time per byte, which other load on the machine changes little:
//!
//! | way | sender, ns/B | receiver, ns/B |
//! |---|---|---|
//! | send, recv | 0.12 | 0.12 |
//! | vmsplice + splice, recv | 0.06 | 0.21 |
//! | io_uring: send, recv | 0.13 | 0.13 |
//! | the same, one issuer, cooperative | 0.12 | 0.12 |
//! | io_uring: zero-copy send of registered buffers, recv | 0.18 | 0.21 |
//!
//! What it saves in system calls doesn't show beside the copies, so lanes don't use it. [`ways`] reports what of all
//! this a process has, for `crossrail info`.
//!
//! On this shared machine the order of the first three varied between runs that did not alternate. The alternating
//! runs and the CPU time decided. Later runs had sendmsg at 0.9 to 1.6 times the rate of vmsplice.
//! `examples/raw_lane.rs` repeats the comparison of the two ways in use as a lane.
//!
//! The congestion control matters more than the copy. BBR, the default there, paces and costs up to half the rate. A
//! connection within one machine therefore requests cubic, before it is made: BBR's pacing stays with a socket that it
//! has begun on. Between machines the system's default stands.
//!
//! For a payload sent by reference, `sent` means that the kernel holds references to the pages, not that it has read
//! them: see [`crossrail_transport::Payload`]. splice(2) has no flag to suppress SIGPIPE. The Rust and Python runtimes
//! ignore that signal; in a process that does not, it is blocked around the call, which costs two system calls more.

mod checked;
mod fault;
mod info;
mod lane;
mod pipe;
pub mod placing;
mod record;
mod room;
mod rows;
mod rx;
mod socket;
mod sys;
mod tx;
mod watch;
mod ways;

pub use info::{TcpInfo, describe};
pub use lane::{CheckedLane, SocketLane, TcpLane};
pub use socket::{Binding, Options, dial, listen};
pub use watch::{LinkChange, LinkWatch};
pub use ways::{Way, ways};
