//! A TCP connection as a lane.

use std::net::TcpStream;
use std::os::fd::{AsRawFd, RawFd};

use crossrail_transport::{Lane, LaneCaps, LaneError, LaneStats, Post, Sink, Tx};
use crossrail_types::{LaneId, Result};

use crate::checked::{Opener, Sealer};
use crate::info::TcpInfo;
use crate::room::Room;
use crate::rx::{Intake, Plain, Receiver};
use crate::socket::Options;
use crate::sys;
use crate::tx::{Outlet, Sender};

/// Maximum payload of a frame in bytes. Nothing is allocated for a payload here; this bounds what a peer may announce.
const MAX_PAYLOAD: usize = 1 << 30;

/// A TCP connection as a lane. Frames follow each other without gaps: a 32-byte header, then the payload.
///
/// The lane never blocks. It has no lock of its own: its owner calls it from one thread at a time.
///
/// Errors on sending are reported by the next [`Lane::poll`] that has delivered everything received before, so that a
/// peer's last frames are not lost to a reset that a send sees first.
///
/// Dropping the lane closes the connection. If this end has unread data, the peer may see a reset and lose data that is
/// still in flight, as with any TCP socket: say goodbye at the protocol level first.
#[derive(Debug)]
pub struct SocketLane<S, I> {
    stream: TcpStream,
    id: LaneId,
    name: String,
    caps: LaneCaps,
    tx: S,
    rx: Receiver<I>,
    /// The send error. `poll` reports it once everything received has been delivered.
    broken: Option<LaneError>,
}

/// A connection that carries frames as they are.
pub type TcpLane = SocketLane<Sender, Plain>;

/// A connection that carries frames in records with checksums. Both ends must.
pub type CheckedLane = SocketLane<Sealer, Opener>;

impl TcpLane {
    /// Turns a connection into a lane. From now on it must carry nothing but frames, in either direction.
    ///
    /// # Errors
    /// `Io` if a socket option cannot be set.
    pub fn new(stream: TcpStream, id: LaneId, name: String, options: &Options) -> Result<TcpLane> {
        let tx = Sender::new(options.notsent_lowat as usize, options.zero_copy);
        SocketLane::of(stream, id, name, options, (tx, Plain::new()))
    }
}

impl CheckedLane {
    /// Turns a connection into a lane that notices every change to its bytes on the way. From now on it must carry
    /// nothing but records of frames, in either direction.
    ///
    /// Bytes reach their destinations only once they have been checked. A change ends the lane, with
    /// [`LaneError::Corrupt`].
    ///
    /// # Errors
    /// `Io` if a socket option cannot be set.
    pub fn checked(stream: TcpStream, id: LaneId, name: String, options: &Options) -> Result<CheckedLane> {
        let tx = Sealer::new(Room::new(options.notsent_lowat as usize));
        SocketLane::of(stream, id, name, options, (tx, Opener::new()))
    }
}

impl<S: Outlet, I: Intake> SocketLane<S, I> {
    fn of(stream: TcpStream, id: LaneId, name: String, options: &Options, (tx, intake): (S, I)) -> Result<Self> {
        options.apply(&stream).map_err(|error| error.with_lane(name.as_str()))?;
        let caps = LaneCaps {
            max_payload: MAX_PAYLOAD,
            reliable: false,
            whole_max: 0,
            counts: false,
            direct: false,
            lists: true,
        };
        Ok(SocketLane { stream, id, name, caps, tx, rx: Receiver::new(intake), broken: None })
    }

    /// The kernel's current statistics of this connection; zeros if it has none any more.
    pub fn info(&self) -> TcpInfo {
        crate::info::describe(&self.stream)
    }

    /// The connection, for access to its addresses and options.
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }
}

impl<S: Outlet, I: Intake> Lane for SocketLane<S, I> {
    fn id(&self) -> LaneId {
        self.id
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn caps(&self) -> &LaneCaps {
        &self.caps
    }

    fn post(&mut self, tx: &Tx) -> std::result::Result<Post, LaneError> {
        if self.broken.is_some() {
            return Ok(Post::Full);
        }
        match self.tx.post(self.stream.as_raw_fd(), tx) {
            Err(error) => {
                self.broken = Some(error); // reported by the next poll, after everything received
                Ok(Post::Full)
            }
            posted => posted,
        }
    }

    fn push(&mut self, sink: &mut dyn Sink, budget: usize) -> bool {
        if self.broken.is_none()
            && let Err(error) = self.tx.poll(self.stream.as_raw_fd(), self.id, sink, budget, false)
        {
            self.broken = Some(error);
        }
        true
    }

    fn poll(&mut self, sink: &mut dyn Sink, budget: usize, probe: bool) -> std::result::Result<bool, LaneError> {
        let fd = self.stream.as_raw_fd();
        let probe = probe || self.broken.is_some();
        let received = match self.rx.poll(fd, (self.id, self.caps.max_payload), sink, budget, probe) {
            Err(error @ (LaneError::Protocol(_) | LaneError::Corrupt(_))) => return Err(error),
            Err(error) => return Err(self.broken.take().unwrap_or(error)),
            Ok(received) => received,
        };
        if let Some(error) = &self.broken {
            return if received || self.rx.intake.waits() { Ok(received) } else { Err(error.clone()) };
        }
        match self.tx.poll(fd, self.id, sink, budget, probe) {
            Ok(sent) => Ok(received || sent),
            Err(error) => {
                self.broken = Some(error);
                Ok(true)
            }
        }
    }

    fn fd(&self) -> Option<RawFd> {
        Some(self.stream.as_raw_fd())
    }

    fn ready(&mut self, readable: bool, writable: bool) {
        self.rx.readable |= readable;
        if writable {
            self.tx.set_writable();
        }
    }

    fn arm(&mut self) -> bool {
        if self.rx.intake.waits() {
            return self.broken.is_some() || !self.tx.has_work();
        }
        !(self.rx.readable || self.rx.has_work() || self.tx.has_work() || self.broken.is_some())
    }

    fn stats(&self) -> LaneStats {
        let (sent, waiting, info) = (self.tx.bytes(), sys::unacknowledged(self.stream.as_raw_fd()), self.info());
        // A peer whose window is full acknowledges the kernel's window probes. A second outstanding probe means that it
        // does not, so the bytes that wait for the window count as unacknowledged.
        let owed = info.unacked > 0 || info.window_probes > 1;
        LaneStats {
            tx_bytes: sent,
            rx_bytes: self.rx.intake.bytes(),
            acked_bytes: sent.saturating_sub(waiting),
            in_flight_bytes: if owed { waiting } else { 0 },
            retransmits: u64::from(info.retransmits),
        }
    }
}
