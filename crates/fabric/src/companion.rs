//! The authenticated companion connection of an object: when it ends, the peer is lost.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use nix::sys::socket::{setsockopt, sockopt};

/// Time without an acknowledgement from the peer's kernel after which the connection ends.
const SILENT_FOR: Duration = Duration::from_secs(10);
const LEN: usize = 9;

/// A message over it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Note {
    /// It knows the other's endpoint.
    Ready,
    /// A write by the other end has arrived, and one of its own was completed.
    Joined,
    /// Answer this once the completion queue was read.
    Probe(u64),
    Answer(u64),
    /// It drops the object, after that number of frames of a lane.
    Farewell(u64),
    /// It has ended that rail. The number of writes that it had counted over it; the words of the last of them follow.
    Ended {
        rail: u16,
        counted: u64,
    },
    /// See [`Note::Ended`].
    Word {
        rail: u16,
        word: u32,
    },
    /// Memory and counters are as on its other rails: this one may be used.
    Open,
}

const COUNTED: u64 = (1 << 48) - 1;

impl Note {
    fn encode(self) -> [u8; LEN] {
        let (kind, number) = match self {
            Note::Ready => (1, 0),
            Note::Joined => (2, 0),
            Note::Probe(number) => (3, number),
            Note::Answer(number) => (4, number),
            Note::Farewell(number) => (5, number),
            Note::Ended { rail, counted } => (6, u64::from(rail) << 48 | counted & COUNTED),
            Note::Word { rail, word } => (7, u64::from(rail) << 48 | u64::from(word)),
            Note::Open => (8, 0),
        };
        let mut out = [kind; LEN];
        out[1..].copy_from_slice(&u64::to_le_bytes(number));
        out
    }

    fn decode(bytes: &[u8; LEN]) -> Option<Note> {
        let number = bytes[1..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        match bytes[0] {
            1 => Some(Note::Ready),
            2 => Some(Note::Joined),
            3 => Some(Note::Probe(number)),
            4 => Some(Note::Answer(number)),
            5 => Some(Note::Farewell(number)),
            6 => Some(Note::Ended { rail: (number >> 48) as u16, counted: number & COUNTED }),
            7 => Some(Note::Word { rail: (number >> 48) as u16, word: number as u32 }),
            8 => Some(Note::Open),
            _ => None,
        }
    }
}

/// Cause of the end of the connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// The peer dropped the object.
    Closed,
    /// The peer's process has exited, or what lies between them has closed the connection.
    Lost,
    /// The network.
    Down(String),
    /// It wrote an invalid note.
    Protocol,
}

/// See the module.
pub(crate) struct Companion {
    /// `None`: this end has closed it.
    stream: Option<TcpStream>,
    bytes: Vec<u8>,
    /// Bytes that the connection has no room for yet.
    unsent: Vec<u8>,
    /// Notes of joining that have arrived, and the number in the peer's farewell.
    ready: bool,
    joined: bool,
    farewell: Option<u64>,
}

impl Companion {
    /// Wraps a connection that carries nothing else from now on.
    pub(crate) fn new(stream: TcpStream) -> std::io::Result<Companion> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        // A path that is down is noticed by what is not acknowledged, and in idle times by probes of the kernel's.
        let millis = SILENT_FOR.as_millis() as u32;
        let set = setsockopt(&stream, sockopt::TcpUserTimeout, &millis)
            .and_then(|()| setsockopt(&stream, sockopt::KeepAlive, &true))
            .and_then(|()| setsockopt(&stream, sockopt::TcpKeepIdle, &3))
            .and_then(|()| setsockopt(&stream, sockopt::TcpKeepInterval, &2));
        set.map_err(std::io::Error::from)?;
        Ok(Companion {
            stream: Some(stream),
            bytes: Vec::new(),
            unsent: Vec::new(),
            ready: false,
            joined: false,
            farewell: None,
        })
    }

    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.stream.as_ref().map(|stream| stream.as_fd())
    }

    /// Sends a note. One that has no room goes with [`Companion::flush`]; a question that is repeated is left out then.
    pub(crate) fn send(&mut self, note: Note) {
        if self.unsent.is_empty() || !matches!(note, Note::Probe(_) | Note::Answer(_)) {
            self.unsent.extend(note.encode());
            self.flush();
        }
    }

    /// Sends what had no room. False: there still is none.
    pub(crate) fn flush(&mut self) -> bool {
        while !self.unsent.is_empty()
            && let Some(Ok(sent @ 1..)) = self.stream.as_ref().map(|mut stream| stream.write(&self.unsent))
        {
            self.unsent.drain(..sent);
        }
        // An end is found by reading.
        self.unsent.is_empty()
    }

    /// Closes the connection, by which the peer learns of the end.
    pub(crate) fn close(&mut self) {
        if let Some(stream) = self.stream.take() {
            // A process that was forked off may have the descriptor, too.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// The next note that has arrived; `Ok(None)`: none.
    pub(crate) fn receive(&mut self) -> Result<Option<Note>, Ended> {
        loop {
            if let Some((bytes, _)) = self.bytes.split_first_chunk::<LEN>() {
                let note = Note::decode(bytes).ok_or(Ended::Protocol)?;
                self.bytes.drain(..LEN);
                match note {
                    Note::Ready => self.ready = true,
                    Note::Joined => self.joined = true,
                    Note::Farewell(number) => self.farewell = Some(number),
                    _ => {}
                }
                return Ok(Some(note));
            }
            let Some(mut stream) = self.stream.as_ref() else { return Err(self.closed()) };
            let mut more = [0; 8 * LEN];
            match stream.read(&mut more) {
                Ok(0) => return Err(self.closed()),
                Ok(read) => self.bytes.extend(&more[..read]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Err(self.closed()),
                Err(error) => return Err(Ended::Down(error.to_string())),
            }
        }
    }

    fn closed(&self) -> Ended {
        if self.farewell.is_some() { Ended::Closed } else { Ended::Lost }
    }

    /// The peer knows this end's endpoint.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready
    }

    /// The peer has joined.
    pub(crate) fn has_joined(&self) -> bool {
        self.joined
    }

    /// The number in the peer's farewell, once it has arrived.
    pub(crate) fn farewell(&self) -> Option<u64> {
        self.farewell
    }

    /// Waits for a note at most until `deadline`, at most some milliseconds.
    pub(crate) fn wait(&self, deadline: Instant) {
        use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
        let left = deadline.saturating_duration_since(Instant::now()).min(Duration::from_millis(2));
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
        // An error is as good as a note: the caller reads again.
        let mut fds: Vec<PollFd<'_>> = self.fd().map(|fd| PollFd::new(fd, PollFlags::POLLIN)).into_iter().collect();
        let _ = poll(&mut fds, timeout);
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn pair() -> (Companion, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let one = TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
        (Companion::new(one).expect("options"), listener.accept().expect("accepted").0)
    }

    fn received(companion: &mut Companion) -> Result<Note, Ended> {
        loop {
            if let Some(note) = companion.receive()? {
                return Ok(note);
            }
            companion.wait(Instant::now() + Duration::from_secs(1));
        }
    }

    #[test]
    fn notes_arrive_in_pieces_and_the_end_is_named() {
        let (mut companion, mut peer) = pair();
        let bytes = [Note::Ready.encode(), Note::Probe(u64::MAX - 3).encode()].concat();
        for byte in bytes {
            peer.write_all(&[byte]).expect("room");
        }
        assert_eq!(received(&mut companion), Ok(Note::Ready));
        assert_eq!(received(&mut companion), Ok(Note::Probe(u64::MAX - 3)));
        drop(peer);
        assert_eq!(received(&mut companion), Err(Ended::Lost));
        let (mut companion, mut peer) = pair();
        peer.write_all(&Note::Farewell(7).encode()).expect("room");
        drop(peer);
        assert_eq!(received(&mut companion), Ok(Note::Farewell(7)));
        assert_eq!(received(&mut companion), Err(Ended::Closed));
        let (mut companion, mut peer) = pair();
        companion.send(Note::Farewell(3));
        companion.close();
        let mut bytes = Vec::new();
        peer.read_to_end(&mut bytes).expect("closed");
        assert_eq!(bytes, Note::Farewell(3).encode());
        assert_eq!(received(&mut companion), Err(Ended::Lost));
        let (mut companion, mut peer) = pair();
        peer.write_all(&[99; LEN]).expect("room");
        assert_eq!(received(&mut companion), Err(Ended::Protocol));
    }
}
