//! Bandwidth of plain TCP sockets between the two ends over the same devices, as an upper bound for transfers. Our
//! protocol is used only to agree on addresses.

use std::io::{ErrorKind as IoKind, IoSlice, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossrail_types::{Error, ErrorKind, Reason, Result, Settings};
use serde::{Deserialize, Serialize};
use socket2::{Domain, Protocol, Socket, Type};

use crate::session::{Role, Session};

/// Bytes that a connection takes from the common work at a time.
const PIECE: usize = 1 << 20;
/// Timeout for connection setup; detects a firewall that drops packets.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time budget: no iteration starts after this.
const TIME_BUDGET: Duration = Duration::from_secs(2);
const MOST_CONNECTIONS: usize = 64;
/// Sentinels in place of a piece's length: end of an iteration; end of the run.
const OVER: u32 = 0;
const DONE: u32 = u32::MAX;
const TOKEN_LEN: usize = 16;

/// What [`raw_tcp`] does.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawTcpPlan {
    /// Bytes of one iteration.
    pub size: usize,
    /// Timed iterations, at least one; fewer when two seconds are over.
    pub iters: usize,
    /// The driver's devices, by name, one per rail. Empty at the echo end, which receives the choice.
    pub devices: Vec<String>,
    /// Connections per device.
    pub channels: usize,
}

/// Raw samples of the raw sockets.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RawTcpSamples {
    /// Microseconds from the first byte until the receiver confirmed the last one; empty at the echo end.
    pub samples_us: Vec<f64>,
    /// Bytes of each.
    pub bytes_per_sample: u64,
    /// The pairs of addresses that were used, as `10.0.0.1 -> 10.0.0.2`.
    pub ways: Vec<String>,
}

/// Moves `size` bytes over plain blocking sockets, one thread for each connection; whichever has room takes the next
/// piece. Devices are paired as the engine pairs them, by the longest common prefix of their addresses.
///
/// # Errors
/// `Mismatch` when the plans differ, `Usage` for a device that is not there, `Io` when connections do not come up
/// (a firewall), at both ends alike: the session goes on.
pub fn raw_tcp(session: &mut Session<'_>, plan: &RawTcpPlan) -> Result<RawTcpSamples> {
    session.agree("raw tcp", &[("size", plan.size), ("channels", plan.channels)])?;
    match session.role {
        Role::Driver => drive(session, plan),
        Role::Echo => answer(session, plan),
    }
}

fn drive(session: &mut Session<'_>, plan: &RawTcpPlan) -> Result<RawTcpSamples> {
    let timeout = session.context.settings().timeout;
    let theirs = parse_addresses(&session.exchange(b"")?);
    let mine = devices(session, &plan.devices);
    let ways = mine.and_then(|mine| pairs(&mine, &theirs));
    let wanted: Vec<String> = ways.iter().flatten().map(|way| way.to.to_string()).collect();
    session.exchange(wanted.join(" ").as_bytes())?;
    let offer = session.exchange(b"")?;
    let streams = ways.as_ref().map_err(Clone::clone).and_then(|ways| connect(ways, plan.channels, &offer, timeout));
    let outcome = streams.and_then(|streams| send(streams, plan));
    session.judge(outcome.as_ref().map(drop).map_err(Clone::clone))?;
    Ok(RawTcpSamples {
        samples_us: outcome?,
        bytes_per_sample: plan.size as u64,
        ways: ways.iter().flatten().map(|way| format!("{} -> {}", way.from, way.to)).collect(),
    })
}

fn answer(session: &mut Session<'_>, plan: &RawTcpPlan) -> Result<RawTcpSamples> {
    let settings = session.context.settings();
    let timeout = settings.timeout;
    let mine = devices(session, &[]).unwrap_or_default();
    let said: Vec<String> = mine.iter().map(|device| device.address.to_string()).collect();
    session.exchange(said.join(" ").as_bytes())?;
    let wanted = parse_addresses(&session.exchange(b"")?);
    let opened = listen(&mine, &wanted, settings);
    session.exchange(&opened.as_ref().map(Offer::to_bytes).unwrap_or_default())?;
    let streams = opened.and_then(|offer| accept(&offer, plan.channels, timeout));
    let outcome = streams.and_then(|streams| receive(streams, plan.size));
    session.judge(outcome)?;
    Ok(RawTcpSamples { bytes_per_sample: plan.size as u64, ..RawTcpSamples::default() })
}

/// A device that carries data here.
#[derive(Clone, Debug, PartialEq)]
struct Device {
    name: String,
    /// What it is bound to; none for loopback.
    interface: Option<String>,
    address: IpAddr,
}

/// A connection's two ends.
#[derive(Clone, Debug, PartialEq)]
struct Way {
    interface: Option<String>,
    from: IpAddr,
    to: IpAddr,
}

/// Listeners of the echo end, and the token that a connection must send first.
struct Offer {
    listeners: Vec<Socket>,
    ports: Vec<u16>,
    token: [u8; TOKEN_LEN],
}

impl Offer {
    fn to_bytes(&self) -> Vec<u8> {
        let ports = self.ports.iter().flat_map(|port| port.to_le_bytes());
        self.token.iter().copied().chain(ports).collect()
    }
}

/// The chosen devices of this machine, or those of them that `names` names.
fn devices(session: &Session<'_>, names: &[String]) -> Result<Vec<Device>> {
    let known: Vec<Device> = session
        .context
        .info()?
        .devices
        .into_iter()
        .filter(|device| device.chosen)
        .filter_map(|device| {
            let address = device.address?;
            let interface = (!address.is_loopback()).then_some(device.interface);
            Some(Device { name: device.name, interface, address })
        })
        .collect();
    if names.is_empty() {
        return Ok(known);
    }
    let find = |name: &String| {
        let found = known.iter().find(|device| device.name == *name).cloned();
        found.ok_or_else(|| Error::new(ErrorKind::Usage, "raw tcp", format!("no device {name:?} carries data here")))
    };
    names.iter().map(find).collect()
}

fn parse_addresses(said: &[u8]) -> Vec<IpAddr> {
    let said = String::from_utf8_lossy(said);
    said.split_whitespace().filter_map(|one| one.parse().ok()).take(MOST_CONNECTIONS).collect()
}

/// Pairs each of our devices with one of theirs: the longest common prefix first, each of theirs once.
fn pairs(mine: &[Device], theirs: &[IpAddr]) -> Result<Vec<Way>> {
    let mut ways: Vec<(u32, usize, usize)> = Vec::new();
    for (at, device) in mine.iter().enumerate() {
        for (to, address) in theirs.iter().enumerate() {
            ways.extend(common_bits(device.address, *address).map(|bits| (bits, at, to)));
        }
    }
    ways.sort_by(|a, b| b.0.cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    let mut found: Vec<Option<IpAddr>> = vec![None; mine.len()];
    for (_, at, to) in ways {
        if found[at].is_none() && !found.contains(&Some(theirs[to])) {
            found[at] = Some(theirs[to]);
        }
    }
    let together = mine.iter().zip(found);
    let whole: Option<Vec<Way>> = together
        .map(|(device, to)| Some(Way { interface: device.interface.clone(), from: device.address, to: to? }))
        .collect();
    whole.filter(|ways| !ways.is_empty()).ok_or_else(|| {
        let names: Vec<_> = mine.iter().map(|device| device.name.as_str()).collect();
        let text = format!("the other end has no counterpart for each of {}", names.join(", "));
        Error::new(ErrorKind::Unreachable, "raw tcp", text)
    })
}

/// Leading bits that two addresses have in common; none where no connection between them is possible.
fn common_bits(a: IpAddr, b: IpAddr) -> Option<u32> {
    match (a, b) {
        _ if a.is_loopback() != b.is_loopback() => None,
        (IpAddr::V4(a), IpAddr::V4(b)) => Some((a.to_bits() ^ b.to_bits()).leading_zeros()),
        (IpAddr::V6(a), IpAddr::V6(b)) => Some((a.to_bits() ^ b.to_bits()).leading_zeros()),
        _ => None,
    }
}

fn socket(address: IpAddr, port: u16, interface: Option<&str>) -> std::io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(SocketAddr::new(address, 0)), Type::STREAM, Some(Protocol::TCP))?;
    if let Some(interface) = interface {
        // Best effort: without permission, the source address alone selects the route.
        let _ = socket.bind_device(Some(interface.as_bytes()));
    }
    if address.is_loopback() {
        // As our own lanes on one machine: BBR, the default of many systems, paces what never leaves it.
        let _ = socket.set_tcp_congestion(b"cubic");
    }
    if port != 0 {
        // Connections of the last run may linger.
        socket.set_reuse_address(true)?;
    }
    socket.bind(&SocketAddr::new(address, port).into())?;
    Ok(socket)
}

fn listen(mine: &[Device], wanted: &[IpAddr], settings: &Settings) -> Result<Offer> {
    let mut offer = Offer { listeners: Vec::new(), ports: Vec::new(), token: [0; TOKEN_LEN] };
    getrandom::fill(&mut offer.token).map_err(|error| failed(format!("no random bytes: {error}")))?;
    for address in wanted {
        let device = mine.iter().find(|device| device.address == *address);
        let device = device.ok_or_else(|| failed(format!("no device that carries data has the address {address}")))?;
        let open = |port| {
            let opened = socket(*address, port, device.interface.as_deref()).and_then(|socket| {
                socket.listen(MOST_CONNECTIONS as i32)?;
                let port = socket.local_addr()?.as_socket().map_or(0, |address| address.port());
                Ok((socket, port))
            });
            opened.map_err(|error| {
                let in_use = error.kind() == IoKind::AddrInUse;
                let failure = failed(format!("cannot listen on {address}: {error}"));
                if in_use { failure.with_reason(Reason::PortInUse) } else { failure }
            })
        };
        let (socket, port) = match settings.ports_at(*address) {
            Some(ports) => ports.listen(*address, None, open)?,
            None => open(0)?,
        };
        offer.listeners.push(socket);
        offer.ports.push(port);
    }
    Ok(offer)
}

fn connect(ways: &[Way], channels: usize, offer: &[u8], timeout: Duration) -> Result<Vec<TcpStream>> {
    let (token, ports) = offer.split_at_checked(TOKEN_LEN).unwrap_or_default();
    if ports.len() != 2 * ways.len() {
        return Err(failed("the other end does not listen".to_owned()));
    }
    let mut streams = Vec::new();
    for (way, port) in ways.iter().zip(ports.chunks_exact(2)) {
        let target = SocketAddr::new(way.to, u16::from_le_bytes([port[0], port[1]]));
        for _ in 0..channels {
            let connected = socket(way.from, 0, way.interface.as_deref()).and_then(|socket| {
                socket.connect_timeout(&target.into(), CONNECT_TIMEOUT)?;
                let mut stream = prepared(socket, timeout)?;
                stream.write_all(token)?;
                Ok(stream)
            });
            streams.push(connected.map_err(|error| failed(format!("{} -> {target}: {error}", way.from)))?);
        }
    }
    Ok(streams)
}

fn accept(offer: &Offer, channels: usize, timeout: Duration) -> Result<Vec<TcpStream>> {
    let mut streams = Vec::new();
    for listener in &offer.listeners {
        // On Linux it bounds accept as well.
        listener.set_read_timeout(Some(CONNECT_TIMEOUT)).map_err(|error| failed(format!("cannot wait: {error}")))?;
        let began = Instant::now();
        let mut missing = channels;
        while missing > 0 {
            let known = listener.accept().and_then(|(socket, _)| {
                let mut stream = prepared(socket, CONNECT_TIMEOUT)?;
                let mut said = [0; TOKEN_LEN];
                stream.read_exact(&mut said)?;
                stream.set_read_timeout(Some(timeout))?;
                Ok((said == offer.token).then_some(stream))
            });
            match known {
                Ok(Some(stream)) => {
                    streams.push(stream);
                    missing -= 1;
                }
                _ if began.elapsed() < CONNECT_TIMEOUT => {}
                _ => return Err(failed(format!("{missing} of {channels} connections were not established in time"))),
            }
        }
    }
    Ok(streams)
}

fn prepared(socket: Socket, timeout: Duration) -> std::io::Result<TcpStream> {
    socket.set_tcp_nodelay(true)?;
    socket.set_read_timeout(Some(timeout))?;
    socket.set_write_timeout(Some(timeout))?;
    Ok(socket.into())
}

/// Runs all iterations over the same connections. The first is not timed, like the warmup of our transfers.
fn send(mut streams: Vec<TcpStream>, plan: &RawTcpPlan) -> Result<Vec<f64>> {
    let data = vec![0x5a; plan.size];
    let began = Instant::now();
    let mut samples_us = Vec::with_capacity(plan.iters);
    for iteration in 0..=plan.iters.max(1) {
        let us = once(&mut streams, &data)?;
        if iteration > 0 {
            samples_us.push(us);
        }
        if iteration > 0 && began.elapsed() > TIME_BUDGET {
            break;
        }
    }
    for stream in &mut streams {
        stream.write_all(&DONE.to_le_bytes()).map_err(|error| failed(error.to_string()))?;
    }
    Ok(samples_us)
}

/// Microseconds from the start of the first connection to the end of the last, measured in their own threads: this
/// thread may be scheduled only after all have finished.
fn once(streams: &mut [TcpStream], data: &[u8]) -> Result<f64> {
    let next = &AtomicUsize::new(0);
    let ready = &Barrier::new(streams.len());
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let spawn = |stream| {
            scope.spawn(move || {
                ready.wait();
                let began = Instant::now();
                pieces(stream, data, next).map(|()| (began, Instant::now()))
            })
        };
        let started: Vec<_> = streams.iter_mut().map(spawn).collect();
        started.into_iter().map(|thread| thread.join()).collect()
    });
    let mut whole: Option<(Instant, Instant)> = None;
    for outcome in outcomes {
        let sent = outcome.map_err(|_| failed("a thread panicked".to_owned()))?;
        let (began, ended) = sent.map_err(|error| failed(error.to_string()))?;
        whole = Some(whole.map_or((began, ended), |(first, last)| (first.min(began), last.max(ended))));
    }
    let (began, ended) = whole.ok_or_else(|| failed("no connection".to_owned()))?;
    Ok(ended.duration_since(began).as_secs_f64() * 1e6)
}

fn pieces(stream: &mut TcpStream, data: &[u8], next: &AtomicUsize) -> std::io::Result<()> {
    loop {
        let offset = next.fetch_add(PIECE, Ordering::Relaxed);
        let Some(rest) = data.get(offset..).filter(|rest| !rest.is_empty()) else { break };
        let piece = &rest[..rest.len().min(PIECE)];
        let head = (piece.len() as u32).to_le_bytes();
        let sent = stream.write_vectored(&[IoSlice::new(&head), IoSlice::new(piece)])?;
        stream.write_all(head.get(sent..).unwrap_or_default())?;
        stream.write_all(&piece[sent.saturating_sub(head.len())..])?;
    }
    stream.write_all(&OVER.to_le_bytes())?;
    stream.read_exact(&mut [0])
}

/// Reads until the end of the run; fails unless whole iterations of `size` bytes were received.
fn receive(streams: Vec<TcpStream>, size: usize) -> Result<()> {
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let started: Vec<_> = streams.into_iter().map(|stream| scope.spawn(move || drain(stream))).collect();
        started.into_iter().map(|thread| thread.join()).collect()
    });
    let mut came = 0u64;
    for outcome in outcomes {
        let read = outcome.map_err(|_| failed("a thread panicked".to_owned()))?;
        came += read.map_err(|error| failed(error.to_string()))?;
    }
    match came.checked_rem(size as u64) {
        None | Some(0) => Ok(()),
        Some(_) => Err(Error::new(ErrorKind::Protocol, "raw tcp", format!("{came} bytes received, some missing"))),
    }
}

fn drain(mut stream: TcpStream) -> std::io::Result<u64> {
    let mut room = vec![0; PIECE];
    let mut came = 0;
    loop {
        let mut head = [0; 4];
        stream.read_exact(&mut head)?;
        match u32::from_le_bytes(head) {
            OVER => stream.write_all(&[1])?,
            DONE => return Ok(came),
            len => {
                let piece = room.get_mut(..len as usize).ok_or(IoKind::InvalidData)?;
                stream.read_exact(piece)?;
                came += u64::from(len);
            }
        }
    }
}

fn failed(why: String) -> Error {
    Error::new(ErrorKind::Io, "raw tcp", why)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(name: &str, address: &str) -> Device {
        let address: IpAddr = address.parse().unwrap();
        Device { name: name.to_owned(), interface: None, address }
    }

    fn addresses(all: &[&str]) -> Vec<IpAddr> {
        all.iter().map(|one| one.parse().unwrap()).collect()
    }

    #[test]
    fn devices_meet_those_in_their_own_network() {
        let mine = [device("eth2", "10.0.2.1"), device("eth1", "10.0.1.1")];
        let ways = pairs(&mine, &addresses(&["10.0.1.9", "10.0.2.9", "10.0.3.9"])).unwrap();
        let shown: Vec<_> = ways.iter().map(|way| format!("{} {}", way.from, way.to)).collect();
        assert_eq!(shown, ["10.0.2.1 10.0.2.9", "10.0.1.1 10.0.1.9"]);
    }

    #[test]
    fn each_of_theirs_is_used_once_and_loopback_meets_loopback_only() {
        let mine = [device("a", "127.0.0.1"), device("b", "127.0.0.2")];
        let ways = pairs(&mine, &addresses(&["127.0.0.1", "127.0.0.2"])).unwrap();
        assert_eq!((ways[0].to, ways[1].to), (mine[0].address, mine[1].address));
        for theirs in [&["127.0.0.1"][..], &["127.0.0.1", "10.0.0.1"], &["::1", "127.0.0.1"], &[]] {
            let error = pairs(&mine, &addresses(theirs)).unwrap_err();
            assert!(error.detail.contains("a, b"), "{error}");
        }
    }
}
