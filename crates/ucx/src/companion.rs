//! The TCP connection beside a lane: when it ends, the lane ends.
#![allow(unsafe_code)]

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};

use crossrail_transport::LaneError;

/// Heartbeat byte, which proves that the path works: the peer's kernel acknowledges it, its lane ignores it.
const HEARTBEAT: u8 = 0;
/// UCX has connected at the end that writes it.
const READY: u8 = 2;
/// Begins the farewell.
const FAREWELL: u8 = 1;
/// Bytes of a farewell: its first byte, the frames and the pieces that were sent.
const FAREWELL_LEN: usize = 9;

/// How a lane's peer has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// It has closed the lane after sending so many frames and pieces.
    Closed { frames: u32, pieces: u32 },
    /// Its process has exited, or it dropped the lane without a farewell.
    Gone,
}

/// See the module.
pub(crate) struct Companion {
    stream: TcpStream,
    farewell: Vec<u8>,
    peer_is_ready: bool,
    beats: AtomicU64,
}

impl Companion {
    /// Wraps a connection that carries nothing else from now on.
    pub(crate) fn new(stream: TcpStream) -> std::io::Result<Companion> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Companion { stream, farewell: Vec::new(), peer_is_ready: false, beats: AtomicU64::new(0) })
    }

    pub(crate) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Reads what has arrived: `None` while the connection is open.
    pub(crate) fn read(&mut self) -> Option<Result<Ending, LaneError>> {
        let mut bytes = [0; 64];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => return Some(Ok(self.ending())),
                Ok(read) => {
                    for &byte in &bytes[..read] {
                        match (self.farewell.len(), byte) {
                            (0, HEARTBEAT) => {}
                            (0, READY) => self.peer_is_ready = true,
                            (0, FAREWELL) | (1..FAREWELL_LEN, _) => self.farewell.push(byte),
                            _ => {
                                let why = "it wrote an invalid byte to the connection beside the UCX lane".to_owned();
                                return Some(Err(LaneError::Protocol(why)));
                            }
                        }
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Some(Ok(self.ending())),
                Err(error) => return Some(Err(LaneError::Down(format!("the connection beside the lane: {error}")))),
            }
        }
    }

    fn ending(&self) -> Ending {
        match <[u8; FAREWELL_LEN]>::try_from(&self.farewell[..]) {
            Ok([_, a, b, c, d, e, f, g, h]) => {
                Ending::Closed { frames: u32::from_le_bytes([a, b, c, d]), pieces: u32::from_le_bytes([e, f, g, h]) }
            }
            Err(_) => Ending::Gone,
        }
    }

    /// Closes this end for writing, after which the peer closes its own. False: it has.
    pub(crate) fn end(&self) -> bool {
        self.stream.shutdown(Shutdown::Write).is_ok()
    }

    pub(crate) fn into_stream(self) -> TcpStream {
        self.stream
    }

    /// Announces that UCX has connected here.
    pub(crate) fn announce_ready(&mut self) -> std::io::Result<()> {
        self.stream.write_all(&[READY])
    }

    pub(crate) fn peer_is_ready(&self) -> bool {
        self.peer_is_ready
    }

    /// Announces the end of the lane, with the numbers of frames and pieces sent.
    pub(crate) fn bid_farewell(&mut self, frames: u32, pieces: u32) {
        let mut bytes = vec![FAREWELL];
        bytes.extend(frames.to_le_bytes());
        bytes.extend(pieces.to_le_bytes());
        // A peer that is gone needs none.
        let _ = self.stream.write_all(&bytes);
    }

    /// Heartbeats that the peer's kernel has acknowledged, and those in flight. Writes the next one.
    pub(crate) fn heartbeat(&self) -> (u64, u64) {
        let beats = self.beats.load(Ordering::Relaxed);
        let mut waiting: libc::c_int = 0;
        // SAFETY: TIOCOUTQ writes one int.
        let asked = unsafe { libc::ioctl(self.stream.as_raw_fd(), libc::TIOCOUTQ, &mut waiting) };
        let waiting = if asked == 0 { u64::try_from(waiting).unwrap_or(0).min(beats) } else { 0 };
        if waiting == 0 && (&self.stream).write(&[HEARTBEAT]).is_ok() {
            self.beats.store(beats + 1, Ordering::Relaxed);
        }
        (beats - waiting, waiting)
    }

    /// Whether everything written was acknowledged by the peer's kernel.
    pub(crate) fn is_acknowledged(&self) -> bool {
        let mut waiting: libc::c_int = 0;
        // SAFETY: as above.
        unsafe { libc::ioctl(self.stream.as_raw_fd(), libc::TIOCOUTQ, &mut waiting) == 0 && waiting == 0 }
    }
}
