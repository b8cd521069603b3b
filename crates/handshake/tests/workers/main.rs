//! Workers meet: addresses, handshakes, lanes, and everything that may go wrong between two of them.

mod admission;
mod bad_peers;
mod late;
mod support;
mod target;
mod users;
