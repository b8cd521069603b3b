//! Bringing a lane up over a connected Unix socket.
//!
//! ```text
//! both        hello    version, payload ring, membarrier, CMA wanted, address and secret of a probe
//! connector   control  the memfd of the control segment
//! both        tried    whether reading and writing the other's probe worked
//! both        seen     whether the other's write has arrived
//! ```

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use crossrail_types::{Error, ErrorKind, LaneId, Result};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};

use crate::arena::Arena;
use crate::attached::{Attached, Report, Side};
use crate::cma::{self, Probe, Process};
use crate::control::Control;
use crate::lane::ShmLane;
use crate::ring::RING_RANGE;
use crate::wire::{self, Wire};

const MAGIC: [u8; 8] = *b"xrailshm";
const VERSION: u8 = 3;
const MESSAGE: usize = 64;

const HELLO: u8 = 1;
const CONTROL: u8 = 2;
const TRIED: u8 = 3;
const SEEN: u8 = 4;

/// How a lane is set up.
#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes of the payload ring per direction; rounded up to a power of two, at least 128 KiB, at most 1 GiB. Payloads
    /// that the peer has not read take up to half of it (128 KiB at least). The larger of the two ends' wishes counts.
    pub ring_bytes: usize,
    /// Whether CMA may be used. False at either end: neither end uses it, as if it were denied.
    pub cma: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options { ring_bytes: 2 << 20, cma: true }
    }
}

/// Makes a lane over `stream`, an authenticated connection to the peer, which calls this too with the other side.
/// Blocks until `deadline` at the latest.
///
/// # Errors
/// [`ErrorKind::Timeout`] past the deadline, [`ErrorKind::PeerDead`] when the peer hangs up, [`ErrorKind::Mismatch`]
/// for another version, [`ErrorKind::Protocol`] when the peer's segment or messages are not as they must be,
/// [`ErrorKind::Exhausted`] and [`ErrorKind::Io`] when the system refuses.
pub fn attach(
    stream: UnixStream,
    side: Side,
    id: LaneId,
    arena: Arc<Arena>,
    options: Options,
    deadline: Instant,
) -> Result<ShmLane> {
    stream.set_nonblocking(true).map_err(|e| Error::io(OPERATION, "fcntl", &e).with_lane("shm"))?;
    let socket = HandshakeSocket { stream: &stream, deadline };
    let probe = Probe::new().map_err(|e| Error::io(OPERATION, "getrandom", &e).with_lane("shm"))?;
    let wish = options.ring_bytes.min(*RING_RANGE.end()).next_power_of_two().max(*RING_RANGE.start());
    let mine = Hello {
        ring: wish,
        membarrier: crate::wake::register(),
        cma: options.cma,
        address: probe.address(),
        secret: probe.secret(),
    };
    socket.send(HELLO, &mine.encode(), None)?;
    let theirs = Hello::decode(&socket.recv(HELLO)?.0)?;
    let control = Arc::new(socket.share_control(side, mine.ring.max(theirs.ring))?);
    // The peer sends nothing over the lane before it has received what follows over the socket.
    crate::wake::announce_first(&control, side.index());
    let process = process_of(&stream, &mine, &theirs);
    let (report, peer_has_cma) = socket.try_cma(&probe, process.clone(), &theirs)?;
    let wire = Arc::new(Wire::new(stream));
    arena.enlist(&wire);
    let expedited = mine.membarrier && theirs.membarrier;
    ShmLane::new(Attached { side, id, wire, arena, control, expedited, report, peer_has_cma, process })
        .ok_or_else(|| broken("the control segment has no address"))
}

const OPERATION: &str = "connect";

struct Hello {
    ring: usize,
    membarrier: bool,
    cma: bool,
    address: u64,
    secret: [u64; 2],
}

impl Hello {
    fn encode(&self) -> [u8; MESSAGE - 1] {
        let mut bytes = [0; MESSAGE - 1];
        bytes[0] = VERSION;
        bytes[1] = u8::from(self.membarrier);
        bytes[2] = u8::from(self.cma);
        bytes[7..15].copy_from_slice(&MAGIC);
        let words = [self.ring as u64, self.address, self.secret[0], self.secret[1]];
        for (field, word) in bytes[15..].chunks_exact_mut(8).zip(words) {
            field.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn decode(bytes: &[u8; MESSAGE - 1]) -> Result<Hello> {
        if bytes[7..15] != MAGIC {
            return Err(broken("the hello is not one of a shared-memory lane"));
        }
        if bytes[0] != VERSION {
            let text = format!("shared-memory protocol {VERSION} here, {} at the peer", bytes[0]);
            return Err(Error::new(ErrorKind::Mismatch, OPERATION, text)
                .with_lane("shm")
                .with_hint("run the same version at both ends"));
        }
        let word = |i: usize| {
            bytes[15 + 8 * i..23 + 8 * i].iter().rev().fold(0u64, |value, byte| value << 8 | u64::from(*byte))
        };
        let ring = usize::try_from(word(0))
            .ok()
            .filter(|ring| ring.is_power_of_two() && RING_RANGE.contains(ring))
            .ok_or_else(|| broken(format!("the peer wants a payload ring of {} bytes", word(0))))?;
        let secret = [word(2), word(3)];
        Ok(Hello { ring, membarrier: bytes[1] == 1, cma: bytes[2] == 1, address: word(1), secret })
    }
}

fn process_of(stream: &UnixStream, mine: &Hello, theirs: &Hello) -> std::result::Result<Process, String> {
    match (mine.cma, theirs.cma) {
        (false, _) => return Err("CMA is switched off here".into()),
        (_, false) => return Err("CMA is switched off at the peer".into()),
        _ => {}
    }
    let credentials = getsockopt(stream, PeerCredentials).map_err(|code| format!("SO_PEERCRED: {code}"))?;
    Process::new(credentials.pid())
}

/// Whole messages over the socket, until the deadline.
struct HandshakeSocket<'a> {
    stream: &'a UnixStream,
    deadline: Instant,
}

impl HandshakeSocket<'_> {
    fn share_control(&self, side: Side, ring: usize) -> Result<Control> {
        match side {
            Side::Connector => {
                let (control, fd) = Control::create(ring).map_err(|e| {
                    let text = format!("memfd_create, for a control segment with payload rings of {ring} bytes: {e}");
                    Error::new(ErrorKind::Exhausted, OPERATION, text).with_lane("shm")
                })?;
                self.send(CONTROL, &[0; MESSAGE - 1], Some(fd.as_fd()))?;
                Ok(control)
            }
            Side::Acceptor => {
                let (_, fd) = self.recv(CONTROL)?;
                let fd = fd.ok_or_else(|| broken("the control segment's descriptor was not received"))?;
                Control::open(&fd, ring).map_err(broken)
            }
        }
    }

    /// Really does it once, both ways; returns also whether the peer could.
    fn try_cma(
        &self,
        probe: &Probe,
        process: std::result::Result<Process, String>,
        theirs: &Hello,
    ) -> Result<(Report, bool)> {
        let pull = process.clone().and_then(|p| cma::try_pull(p, theirs.address, theirs.secret));
        let push = match (&process, &pull) {
            (Ok(process), Ok(())) => cma::try_push(*process, theirs.address, theirs.secret),
            (_, Err(why)) | (Err(why), _) => Err(why.clone()),
        };
        self.send(TRIED, &flags([pull.is_ok(), push.is_ok()]), None)?;
        let (tried, _) = self.recv(TRIED)?;
        let arrived = tried[1] == 1 && probe.answered();
        self.send(SEEN, &flags([arrived, false]), None)?;
        let (seen, _) = self.recv(SEEN)?;
        let push = match push {
            Ok(()) if seen[0] != 1 => Err("process_vm_writev: the written probe value did not arrive".into()),
            push => push,
        };
        Ok((Report { cma_pull: pull, cma_push: push }, process.is_ok() && (tried[0] == 1 || arrived)))
    }

    fn send(&self, kind: u8, body: &[u8; MESSAGE - 1], fd: Option<BorrowedFd<'_>>) -> Result<()> {
        let mut message = [kind; MESSAGE];
        message[1..].copy_from_slice(body);
        let (mut done, mut fd) = (0, fd);
        while done < MESSAGE {
            match wire::send(self.stream, &message[done..], fd.as_slice()) {
                Ok(n) => (done, fd) = (done + n, None),
                Err(e) => self.wait(&e, PollFlags::POLLOUT, "sendmsg")?,
            }
        }
        Ok(())
    }

    fn recv(&self, kind: u8) -> Result<([u8; MESSAGE - 1], Option<OwnedFd>)> {
        let mut message = [0; MESSAGE];
        let (mut have, mut fds) = (0, Vec::new());
        while have < MESSAGE {
            match wire::recv(self.stream, &mut message[have..], &mut fds) {
                Ok((0, _)) => return Err(gone("the peer hung up during the handshake")),
                Ok((n, _)) => have += n,
                Err(e) => self.wait(&e, PollFlags::POLLIN, "recvmsg")?,
            }
        }
        let mut body = [0; MESSAGE - 1];
        body.copy_from_slice(&message[1..]);
        match (message[0] == kind, fds.pop(), fds.is_empty()) {
            (true, fd, true) => Ok((body, fd)),
            (false, ..) => Err(broken(format!("handshake message {} where {kind} is due", message[0]))),
            _ => Err(broken("a handshake message with several descriptors")),
        }
    }

    /// After `error`: returns when the socket is worth another try.
    fn wait(&self, error: &io::Error, what: PollFlags, call: &str) -> Result<()> {
        match error.kind() {
            io::ErrorKind::Interrupted => return Ok(()),
            io::ErrorKind::WouldBlock => {}
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                return Err(gone(format!("the peer hung up during the handshake: {error}")));
            }
            _ => return Err(Error::io(OPERATION, call, error).with_lane("shm")),
        }
        let left = self.deadline.saturating_duration_since(Instant::now());
        let timeout = Error::new(ErrorKind::Timeout, OPERATION, "the peer did not finish the shared-memory handshake")
            .with_lane("shm");
        if left.is_zero() {
            return Err(timeout);
        }
        let millis = left.as_millis().saturating_add(1).min(60_000);
        let limit = PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(self.stream.as_fd(), what)], limit) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
            Err(code) => Err(Error::io(OPERATION, "poll", &code.into()).with_lane("shm")),
        }
    }
}

fn flags(flags: [bool; 2]) -> [u8; MESSAGE - 1] {
    let mut body = [0; MESSAGE - 1];
    body[0] = u8::from(flags[0]);
    body[1] = u8::from(flags[1]);
    body
}

fn broken(why: impl Into<String>) -> Error {
    Error::new(ErrorKind::Protocol, OPERATION, why).with_lane("shm")
}

fn gone(why: impl Into<String>) -> Error {
    Error::new(ErrorKind::PeerDead, OPERATION, why).with_lane("shm")
}
