//! Links that must stay intact until the peer has abandoned the join or the lane, too.
//!
//! UCX's assertions do not allow for a connection that breaks while one of its own wire-up messages waits to be sent: a
//! peer that is connecting would abort if this end's worker were destroyed first. Nor do UCX 1.13's for a tcp
//! connection that breaks while the reply to a put is in flight.

use std::io::{ErrorKind, Read};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use crossrail_locks::{Mutex, PerProcess};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::link::Link;
use crate::sender::Sender;

/// How long an abandoned join waits for the peer to abandon it, too, which takes one check of its connection.
const WAIT_MAX: Duration = Duration::from_millis(500);

/// Maximum number kept for peers that do not respond; beyond it the oldest is dropped, because a peer must not exhaust
/// this end.
const KEPT_MAX: usize = 16;

/// A link or its connections, released once the peer has closed its end of the stream.
struct Lingering {
    _kept: Box<dyn Send>,
    stream: TcpStream,
}

/// Links whose peer has not closed the stream yet. After [`WAIT_MAX`], the peer is stopped or its machine is down.
static LINGERING: PerProcess<Mutex<Vec<Lingering>>> = PerProcess::new();

/// Ends a join that has failed: tells the peer, which may know this worker's address, and waits a moment for it to
/// close the connection, too. From the call on UCX is not driven.
pub(crate) fn abandon(link: Link, mut tx: Sender, stream: TcpStream) {
    tx.forget(&link);
    // The link goes before the memory that UCX refers to.
    let mut lingering = Lingering { _kept: Box::new((link, tx)), stream };
    // A peer that has closed already needs no announcement.
    if lingering.stream.shutdown(Shutdown::Write).is_err() || lingering.stream.set_nonblocking(true).is_err() {
        return;
    }
    let deadline = Instant::now() + WAIT_MAX;
    while !lingering.peer_has_left() {
        let rest = deadline.saturating_duration_since(Instant::now());
        if rest.is_zero() {
            keep(lingering);
            return;
        }
        let mut fds = [PollFd::new(lingering.stream.as_fd(), PollFlags::POLLIN)];
        let rest = PollTimeout::try_from(rest + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
        // Interrupted or not, the loop looks again.
        let _ = poll(&mut fds, rest);
    }
}

/// Keeps connections of a lane that has ended here open, without waiting. Its end was announced to the peer over
/// `stream`.
pub(crate) fn keep_open(connections: Vec<OwnedFd>, stream: &TcpStream) {
    let Ok(stream) = stream.try_clone() else { return };
    let mut lingering = Lingering { _kept: Box::new(connections), stream };
    if !lingering.peer_has_left() {
        keep(lingering);
    }
}

fn keep(lingering: Lingering) {
    let mut kept = LINGERING.lock();
    let first = (kept.len() == KEPT_MAX).then(|| kept.remove(0));
    kept.push(lingering);
    // UCX takes a while to close a link.
    drop(kept);
    drop(first);
}

/// Releases links whose peers have closed since.
pub(crate) fn reap() {
    let gone: Vec<Lingering> = LINGERING.lock().extract_if(.., Lingering::peer_has_left).collect();
    drop(gone);
}

impl Lingering {
    /// Whether the peer does not connect any more: it has closed its end of the stream, or that has failed. What it
    /// wrote before is of no use.
    fn peer_has_left(&mut self) -> bool {
        let mut bytes = [0; 1024];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return error.kind() != ErrorKind::WouldBlock,
            }
        }
    }
}
