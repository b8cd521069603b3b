//! Joins two ends: exchanges worker addresses over an authenticated TCP connection.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_transport::LaneError;
use crossrail_types::{Error, ErrorKind, LaneId, Result};

use crate::companion::Companion;
use crate::fabric::Fabric;
use crate::lane::UcxLane;
use crate::lingering;
use crate::link::{Link, Request, timed_out};
use crate::sender::Sender;
use crate::wire::{self, INTRODUCTION_LEN};

/// Joins the two ends of `stream`, which both call this, and returns once UCX has carried a message in each direction.
/// The lane's name is `label` with what UCX uses beneath, as `ucx/eth1(tcp/eth1)`.
/// The stream must be authenticated; it stays open beside the lane. The caller must not drive the lane's peer on the
/// same thread.
///
/// # Errors
/// `Timeout` at the deadline; `Protocol` when the peer introduces itself otherwise; `Unreachable` when UCX finds no way
/// between the two devices; `Io` and others as the system and UCX report them.
pub fn attach(stream: TcpStream, fabric: &Arc<Fabric>, id: LaneId, label: &str, deadline: Instant) -> Result<UcxLane> {
    lingering::reap();
    // UCX refers to its memory as long as the link lives, so it goes after the link.
    let mut tx = Sender::new();
    let mut link = Link::new(fabric)?;
    let address = link.address()?;
    if address.len() > wire::ADDRESS_MAX {
        let detail = format!("UCX's worker address has {} bytes, of {} at most", address.len(), wire::ADDRESS_MAX);
        return Err(Error::new(ErrorKind::Unsupported, "connect", detail)
            .with_hint("let UCX use fewer devices: UCX_NET_DEVICES, UCX_TLS"));
    }
    let connected = introduce(&stream, &address, deadline).and_then(|theirs| link.connect(&theirs));
    if let Err(error) = connected {
        // Do not wait for a peer that broke the protocol.
        if error.kind != ErrorKind::Protocol {
            lingering::abandon(link, tx, stream);
        }
        return Err(error);
    }
    let mut companion = Companion::new(stream).map_err(|error| Error::io("connect", "fcntl", &error))?;
    match join(&link, &mut tx, &mut companion, deadline) {
        Ok(()) => UcxLane::new(id, label, tx, link, companion),
        Err(error) => {
            lingering::abandon(link, tx, companion.into_stream());
            Err(error)
        }
    }
}

/// Drives this end until UCX has connected both.
fn join(link: &Link, tx: &mut Sender, companion: &mut Companion, deadline: Instant) -> Result<()> {
    tx.hello(link).map_err(failed)?;
    // UCX connects while both ends progress: this end goes on until the other has connected, too.
    let mut flush = link.begin_flush().map_err(failed)?;
    let joined = until_both_connected(link, &mut flush, companion, deadline);
    link.forget(flush);
    joined
}

fn until_both_connected(
    link: &Link,
    flush: &mut Option<Request>,
    companion: &mut Companion,
    deadline: Instant,
) -> Result<()> {
    let mut announced = false;
    loop {
        // Checked before UCX is driven, which is not allowed once the peer has closed (see `lingering`).
        let ended = companion.read();
        if let Some(ended) = ended {
            // It has joined and gone already, or gives up.
            if announced && companion.peer_is_ready() {
                return Ok(());
            }
            let why = ended.map_or_else(|error| error.to_string(), |_| "it abandoned the lane".to_owned());
            return Err(Error::new(ErrorKind::Unreachable, "connect", format!("while UCX connected, {why}")));
        }
        let moved = link.progress();
        if let Some(error) = link.failure() {
            return Err(failed(error));
        }
        if let Some(why) = link.inbox().fault() {
            return Err(Error::new(ErrorKind::Protocol, "connect", why));
        }
        if !announced && link.inbox().has_hello() && link.has_ended(flush).map_err(failed)? {
            announced = true;
            companion.announce_ready().map_err(|error| Error::io("connect", "send", &error))?;
        }
        if announced && companion.peer_is_ready() {
            return Ok(());
        }
        if Instant::now() >= deadline {
            let detail = "UCX did not connect to the peer's worker in time";
            return Err(timed_out(detail).with_hint("UCX_LOG_LEVEL=info says what UCX tries"));
        }
        if !moved {
            std::thread::yield_now();
        }
    }
}

fn failed(error: LaneError) -> Error {
    Error::new(ErrorKind::Unreachable, "connect", error.to_string())
}

/// Exchanges worker addresses; the peer's.
fn introduce(mut stream: &TcpStream, address: &[u8], deadline: Instant) -> Result<Vec<u8>> {
    let failed = |call: &'static str| {
        move |error: std::io::Error| match error.kind() {
            std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => {
                timed_out("the peer did not introduce its UCX worker in time")
            }
            _ => Error::io("connect", call, &error),
        }
    };
    stream.set_nonblocking(false).map_err(failed("fcntl"))?;
    let arm = |stream: &TcpStream| {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        stream.set_read_timeout(Some(left)).and_then(|()| stream.set_write_timeout(Some(left)))
    };
    arm(stream).map_err(failed("setsockopt"))?;
    // An introduction fits a socket's buffer, so both ends may write first.
    let mut bytes = wire::introduction(address.len()).to_vec();
    bytes.extend_from_slice(address);
    stream.write_all(&bytes).map_err(failed("send"))?;
    let mut introduction = [0; INTRODUCTION_LEN];
    read(stream, &mut introduction, &arm).map_err(failed("recv"))?;
    let len = wire::introduced(&introduction).map_err(|why| Error::new(ErrorKind::Protocol, "connect", why))?;
    let mut theirs = vec![0; len];
    read(stream, &mut theirs, &arm).map_err(failed("recv"))?;
    Ok(theirs)
}

/// Reads to the end of `into`; the deadline bounds all of it, not each part.
fn read(
    mut stream: &TcpStream,
    mut into: &mut [u8],
    arm: &impl Fn(&TcpStream) -> std::io::Result<()>,
) -> std::io::Result<()> {
    while !into.is_empty() {
        arm(stream)?;
        match stream.read(into) {
            Ok(0) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => into = &mut into[read..],
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
