//! TCP lanes: one connection each, bound to its network device.
//!
//! [`listen`] and [`dial`] make connections of a rail ([`Binding`]); once both ends know each other,
//! [`TcpLane`] carries frames over one, and [`LinkWatch`] tells when a device goes down or comes back.
//!
//! # Receiving
//!
//! One readv fills the rest of a payload at its destination and brings the next head with a little beyond
//! it; without a payload under way, one recv of 64 KiB brings many small frames at once.
//!
//! # Sending
//!
//! Four ways were tried for large payloads. Expected, from iperf3 (5.4 GB/s, with sendfile 8.7): sendfile from a
//! memfd first, then vmsplice + splice, then MSG_ZEROCOPY, and the plain copy last. Measured with bare sockets over
//! loopback (64 MiB, two processes, 2 cores, Linux 6.18, best averages of alternating runs, ends asleep / spinning):
//!
//! | way | GB/s | |
//! |---|---|---|
//! | vmsplice + splice | 7.2 / 7.2 | taken: any memory, the least CPU |
//! | sendmsg | 6.5 / 7.0 | the fallback, and the way of small payloads |
//! | sendfile | 5.9 / 5.9 | one page at a time out of the page cache |
//! | MSG_ZEROCOPY | 4.3 (spinning) | loopback copies after all, and completions cost calls |
//!
//! The machine was shared, and the ranks of the first three move with its state: in another, unalternated series with
//! spinning ends, sendmsg reached 8.2, sendfile 8.4 and vmsplice 7.6 GB/s, which is what one copy of memory takes
//! there (the receiver's). What decided is the series that alternates, and the CPU time.
//!
//! As a lane (`examples/raw_lane.rs`), ends asleep, by reference against copied: frames of 64 KiB 5.1 : 4.5,
//! 256 KiB 8.7 : 6.1, 2 MiB 7.9 : 6.5..7.0, 8 MiB 7.6..9.0 : 7.3 GB/s, and a fifth less CPU at the sender. So payloads
//! from 64 KiB on go by reference, the others are copied. Where vmsplice or the pipe is refused, the lane copies.
//!
//! Congestion control mattered more than the copy: BBR, the default there, paces; it took a fifth to a third of the
//! rate (5.2 against 6.6 GB/s, plain). A lane whose both ends are on this machine asks for cubic; elsewhere the
//! system's choice stands.
//!
//! By reference, `sent` means that the kernel refers to the pages, not that it has read them: see
//! [`crossrail_transport::Payload`]. splice(2) cannot ask for no SIGPIPE; Rust's and Python's runtimes ignore that
//! signal, and a host program in another language must too (or set [`Options::zero_copy`] to false).

mod fault;
mod info;
mod lane;
mod pipe;
mod rx;
mod socket;
mod sys;
mod tx;
mod watch;

pub use info::{TcpInfo, describe};
pub use lane::TcpLane;
pub use socket::{Binding, Options, dial, listen};
pub use watch::{LinkChange, LinkWatch};
