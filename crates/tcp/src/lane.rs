use std::net::TcpStream;
use std::os::fd::{AsRawFd, RawFd};

use crossrail_transport::{Lane, LaneCaps, LaneError, LaneStats, Post, Sink, Tx};
use crossrail_types::{LaneId, Result};

use crate::info::TcpInfo;
use crate::rx::Receiver;
use crate::socket::Options;
use crate::sys;
use crate::tx::{COPIES_UP_TO, Sender};

/// Largest payload of one frame: nothing is allocated for it here, so this only bounds what a peer may claim.
const MAX_PAYLOAD: usize = 1 << 30;

/// One TCP connection as a lane. Frames go back to back: a 32-byte head, then the payload.
///
/// Dropping it closes the connection. As with any TCP socket, what the peer has sent and this end has not read
/// is then lost to the peer's knowledge (it may see a reset): part company at protocol level first.
#[derive(Debug)]
pub struct TcpLane {
    stream: TcpStream,
    id: LaneId,
    name: String,
    caps: LaneCaps,
    tx: Sender,
    rx: Receiver,
    /// Sending failed: what has arrived is still delivered, then this is reported.
    broken: Option<LaneError>,
}

impl TcpLane {
    /// Makes a lane of a connection on which nothing but frames follows, in either direction.
    ///
    /// # Errors
    /// `Io` when an option cannot be set.
    pub fn new(stream: TcpStream, id: LaneId, name: String, options: &Options) -> Result<TcpLane> {
        options.apply(&stream).map_err(|error| error.with_lane(name.as_str()))?;
        let caps = LaneCaps { copies_up_to: COPIES_UP_TO, max_payload: MAX_PAYLOAD, reliable: false, direct: false };
        let tx = Sender::new(options.notsent_lowat as usize, options.zero_copy);
        Ok(TcpLane { stream, id, name, caps, tx, rx: Receiver::new(), broken: None })
    }

    /// The kernel's view of this connection, at this moment; zeros once the kernel has none.
    pub fn info(&self) -> TcpInfo {
        crate::info::describe(&self.stream)
    }

    /// The connection itself, for its addresses and options.
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }
}

impl Lane for TcpLane {
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
                self.broken = Some(error); // the next poll reports it, after what has arrived
                Ok(Post::Full)
            }
            answer => answer,
        }
    }

    fn poll(&mut self, sink: &mut dyn Sink, budget: usize, probe: bool) -> std::result::Result<bool, LaneError> {
        let fd = self.stream.as_raw_fd();
        let probe = probe || self.broken.is_some();
        let received = match self.rx.poll(fd, (self.id, self.caps.max_payload), sink, budget, probe) {
            Err(error @ LaneError::Protocol(_)) => return Err(error),
            Err(error) => return Err(self.broken.take().unwrap_or(error)),
            Ok(received) => received,
        };
        if let Some(error) = &self.broken {
            return if received || self.rx.waits { Ok(received) } else { Err(error.clone()) };
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
        self.tx.writable |= writable;
    }

    fn arm(&mut self) -> bool {
        if self.rx.waits {
            return self.broken.is_some() || !self.tx.has_work();
        }
        !(self.rx.readable || self.rx.has_work() || self.tx.has_work() || self.broken.is_some())
    }

    fn stats(&self) -> LaneStats {
        let (sent, waiting, info) = (self.tx.bytes, sys::unacknowledged(self.stream.as_raw_fd()), self.info());
        // A full peer answers the kernel's probes of its window. That a second one went out says that nobody does.
        let owed = info.unacked > 0 || info.window_probes > 1;
        LaneStats {
            tx_bytes: sent,
            rx_bytes: self.rx.bytes,
            acked_bytes: sent.saturating_sub(waiting),
            in_flight_bytes: if owed { waiting } else { 0 },
            retransmits: u64::from(info.retransmits),
        }
    }
}
