//! Joins two ends: over an authenticated connection they exchange the names of their endpoints, then a write goes each
//! way before anything else does.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crossrail_locks::PerProcess;
use crossrail_types::{Error, ErrorKind, Result};

use crate::companion::{Companion, Ended, Note};
use crate::offer::Offer;
use crate::placing::FabricPlacing;
use crate::port::{Port, queue_of};
use crate::wire::{GREETING, INTRODUCTION, Introduction, PEER_WRITES};

/// Advice for a lost connection: keys are registrations of one device, so no other rail takes its writes.
pub(crate) const ADVICE: &str =
    "; an object over libfabric is not dialled again: while the endpoint is alive, open the object anew at both ends";

/// Joins the two ends of `stream`, which both call this, each with its own offer, and returns once a write has arrived
/// in each direction. The stream must be authenticated; it stays open as long as the object, which ends with it. `peer` and
/// `rail` are names for people. The caller must not drive the peer's end on the same thread.
///
/// # Errors
/// `Timeout` at the deadline; `Unsupported` when the peer's provider is another; `Protocol` when the peer introduces
/// itself otherwise; `Unreachable` when the provider finds no way; others as the system and libfabric report them.
pub fn attach(stream: TcpStream, offer: &Offer, peer: &str, rail: &str, deadline: Instant) -> Result<FabricPlacing> {
    let (mut placing, _) = attach_as(stream, offer, (peer, rail), deadline, |_| Ok([0; GREETING]))?;
    placing.advice = ADVICE;
    Ok(placing)
}

/// First byte of the greeting of a rail.
const KIND: u8 = 2;

/// As [`attach`], for one rail of a [`FabricRails`](crate::FabricRails). One end gives it a number, which no earlier rail
/// of the object had, and by which those that work differ modulo 64; the other learns it.
///
/// # Errors
/// As [`attach`]; `Protocol` when both ends give a number, or none does.
pub fn attach_rail(
    stream: TcpStream,
    offer: &Offer,
    (peer, rail): (&str, &str),
    number: Option<u16>,
    deadline: Instant,
) -> Result<FabricPlacing> {
    let mut greeting = [0; GREETING];
    greeting[0] = KIND;
    greeting[1] = u8::from(number.is_some());
    greeting[2..4].copy_from_slice(&number.unwrap_or_default().to_le_bytes());
    let (mut placing, theirs) = attach_as(stream, offer, (peer, rail), deadline, |placing| {
        placing.is_rail = true;
        Ok(greeting)
    })?;
    if (theirs[1] != 0) == number.is_some() {
        let detail = "the peer joins this rail as the end that this one is";
        return Err(Error::new(ErrorKind::Protocol, "connect", detail).with_peer(peer).with_lane(rail));
    }
    placing.number = number.unwrap_or(u16::from_le_bytes([theirs[2], theirs[3]]));
    Ok(placing)
}

/// As [`attach`], with a greeting whose first byte is the same at both ends; the peer's.
pub(crate) fn attach_as(
    stream: TcpStream,
    offer: &Offer,
    (peer, rail): (&str, &str),
    deadline: Instant,
    greet: impl FnOnce(&mut FabricPlacing) -> Result<[u8; GREETING]>,
) -> Result<(FabricPlacing, [u8; GREETING])> {
    let named = |error: Error| Error { operation: "connect".to_owned(), ..error }.with_peer(peer).with_lane(rail);
    join(stream, offer, (peer, rail), deadline, greet).map_err(named)
}

fn join(
    stream: TcpStream,
    offer: &Offer,
    (peer, rail): (&str, &str),
    deadline: Instant,
    greet: impl FnOnce(&mut FabricPlacing) -> Result<[u8; GREETING]>,
) -> Result<(FabricPlacing, [u8; GREETING])> {
    let (ops, queue) = queue_of(&offer.attributes);
    let port = Port::open(offer, ops, queue)?;
    let name = port.name()?;
    let beside = stream.try_clone().map_err(|error| Error::io("connect", "dup", &error))?;
    let companion = Companion::new(beside).map_err(|error| Error::io("connect", "setsockopt", &error))?;
    let (mut placing, ring) = FabricPlacing::new(port, &offer.attributes, (peer, rail), companion, ops)?;
    let greeting = greet(&mut placing)?;
    let ours = Introduction {
        provider: offer.provider.clone(),
        name,
        ring,
        grant: PEER_WRITES as u32,
        process: process(),
        greeting,
    };
    let theirs = introduce(&stream, &ours, deadline)?;
    if theirs.provider != ours.provider {
        let detail = format!("the peer's provider is {}, ours {}", theirs.provider, ours.provider);
        return Err(Error::new(ErrorKind::Unsupported, "connect", detail)
            .with_hint("name one at both ends: CROSSRAIL_TLS=fabric:PROVIDER"));
    }
    if theirs.process == ours.process && (placing.is_lane || placing.is_rail) && ours.provider == "shm" {
        let detail =
            "both ends are in one process, and the provider shm crashes one that polls after the other was closed";
        let hint = "use TCP between ends of one process: CROSSRAIL_TLS=tcp";
        return Err(Error::new(ErrorKind::Unsupported, "connect", detail).with_hint(hint));
    }
    if theirs.greeting[0] != greeting[0] {
        return Err(Error::new(ErrorKind::Protocol, "connect", "the peer joins something else over this connection"));
    }
    placing.introduced(theirs.ring, theirs.grant);
    if let Some(port) = placing.port.as_mut() {
        port.insert(&theirs.name)?;
    }
    // A target may have to know the initiator before its first write.
    placing.companion.send(Note::Ready);
    until(&mut placing, deadline, "the peer did not open its endpoint in time", |placing| {
        placing.companion.is_ready()
    })?;
    let (mut posted, mut joined) = (false, false);
    let late = "no write arrived from the peer in time: the provider does not connect the two devices";
    until(&mut placing, deadline, late, |placing| {
        if !posted {
            posted = placing.post_bare(0).unwrap_or(false);
        }
        if posted && !joined && placing.credits > 0 && placing.is_quiet() {
            joined = true;
            placing.companion.send(Note::Joined);
        }
        joined && placing.companion.has_joined()
    })?;
    Ok((placing, theirs.greeting))
}

/// A number that other processes do not have, most likely.
fn process() -> u32 {
    static DRAWN: PerProcess<OnceLock<u32>> = PerProcess::new();
    *DRAWN.get_or_init(|| RandomState::new().build_hasher().finish() as u32)
}

/// Drives this end until `done`.
fn until(
    placing: &mut FabricPlacing,
    deadline: Instant,
    late: &str,
    mut done: impl FnMut(&mut FabricPlacing) -> bool,
) -> Result<()> {
    loop {
        // The peer may have joined and write already: its writes are at most as many as it was granted.
        let mut early = std::mem::take(&mut placing.early);
        let driven = placing.drive(&mut |event| early.push(event));
        placing.early = early;
        let mut moved = driven.map_err(|error| failed(&error.to_string()))?;
        if let Some(why) = placing.broken() {
            return Err(failed(why));
        }
        if done(placing) {
            return Ok(());
        }
        match placing.companion.receive() {
            Ok(note) => moved |= note.is_some(),
            Err(Ended::Lost) => return Err(failed("while both ends connected, the peer's process has ended")),
            Err(Ended::Closed) => return Err(failed("while both ends connected, the peer has dropped its end")),
            Err(Ended::Down(why)) => return Err(failed(&why)),
            Err(Ended::Protocol) => {
                return Err(Error::new(ErrorKind::Protocol, "connect", "it wrote an invalid note while connecting"));
            }
        }
        // Also while notes arrive without end.
        if Instant::now() >= deadline {
            return Err(Error::new(ErrorKind::Timeout, "connect", late));
        }
        if !moved {
            placing.companion.wait(deadline);
        }
    }
}

fn failed(why: &str) -> Error {
    Error::new(ErrorKind::Unreachable, "connect", why)
}

/// Exchanges introductions; the peer's.
fn introduce(mut stream: &TcpStream, ours: &Introduction, deadline: Instant) -> Result<Introduction> {
    let failed = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => {
            Error::new(ErrorKind::Timeout, "connect", "the peer did not introduce its endpoint in time")
        }
        _ => Error::io("connect", "introduction", &error),
    };
    // An introduction fits a socket's buffer, so both ends write first; the companion has made it non-blocking.
    stream.write_all(&ours.encode()).map_err(failed)?;
    let mut bytes = [0; INTRODUCTION];
    let mut have = 0;
    while have < INTRODUCTION {
        match stream.read(&mut bytes[have..]) {
            Ok(0) => return Err(failed(std::io::ErrorKind::UnexpectedEof.into())),
            Ok(read) => have += read,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                if Instant::now() >= deadline {
                    return Err(failed(error));
                }
                wait(stream, deadline);
            }
            Err(error) => return Err(failed(error)),
        }
    }
    Introduction::decode(&bytes).map_err(|why| Error::new(ErrorKind::Protocol, "connect", why))
}

fn wait(stream: &TcpStream, deadline: Instant) {
    use std::os::fd::AsFd;

    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    let left = deadline.saturating_duration_since(Instant::now()).min(Duration::from_secs(1));
    let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
    // An error is as good as bytes: the caller reads again.
    let _ = poll(&mut [PollFd::new(stream.as_fd(), PollFlags::POLLIN)], timeout);
}
