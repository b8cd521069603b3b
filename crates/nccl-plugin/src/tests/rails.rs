//! Several rails: what each carries, and one that is lost.

use std::net::Ipv4Addr;
use std::os::fd::{BorrowedFd, RawFd};

use crossrail::{Endpoint, Settings};
use nix::sys::socket::{Shutdown, SockaddrIn, SockaddrStorage, getsockname, getsockopt, shutdown, sockopt};

use super::*;

const PIECE: usize = 128 << 10;
const RAILS: usize = 4;
/// Pieces in flight: for each of four workers fewer than the receiver's credit, beyond which a sender asks.
const WINDOW: usize = 24;

/// Two networks with several workers each, which start transfers, over rails of their own.
struct Bed {
    pair: Pair,
    rails: [Ipv4Addr; RAILS],
    sending: Arc<Net>,
}

/// Bytes that an endpoint has sent over a rail.
#[derive(Clone, Copy, Debug)]
struct Sent {
    chunks: u64,
    messages: u64,
}

impl Bed {
    /// The rails are `127.0.net.1` to `.4`. `counts`: workers of the sender and of the receiver.
    fn new(net: u8, counts: [usize; 2]) -> Bed {
        let rails = [1, 2, 3, 4].map(|rail| Ipv4Addr::new(127, 0, net, rail));
        let names = rails.map(|rail| rail.to_string()).join(",");
        let settings = Settings::from_pairs([("CROSSRAIL_TLS", "tcp"), ("CROSSRAIL_NET_DEVICES", names.as_str())]);
        let process = Process::of(settings.expect("settings"), |_| false).expect("the rails");
        let process: &'static Process = Box::leak(Box::new(process));
        let nets = counts.map(|count| Net::of(process, count, true).expect("a network"));
        let sending = nets[0].clone();
        Bed { pair: Pair::of_nets(nets), rails, sending }
    }

    fn sent(&self, endpoint: &Endpoint) -> [Sent; RAILS] {
        let lanes = endpoint.lanes();
        self.rails.map(|rail| {
            let (name, messages) = (format!("tcp/{rail}"), format!("tcp/{rail}:messages"));
            let of = |carries: bool| {
                let lanes = lanes.iter().filter(|lane| lane.name.starts_with(&name));
                lanes.filter(|lane| (lane.name == messages) == carries).map(|lane| lane.tx_bytes).sum()
            };
            Sent { chunks: of(false), messages: of(true) }
        })
    }

    /// Has `windows` times [`WINDOW`] pieces sent, the first filled with `from`, each with the next value. `meanwhile`:
    /// called while the second window is in flight.
    fn transfer(&self, from: u8, windows: usize, meanwhile: impl Fn()) {
        for window in 0..windows {
            let value = |at: usize| from.wrapping_add((window * WINDOW + at) as u8);
            let mut sent: Vec<Vec<u8>> = (0..WINDOW).map(|at| vec![value(at); PIECE]).collect();
            let mut received = vec![vec![0; PIECE]; WINDOW];
            let post = |piece: &mut Vec<u8>| self.pair.receive(&mut [piece], &mut [0]);
            let (early, late) = received.split_at_mut(WINDOW / 2);
            let mut receives: Vec<*mut c_void> = early.iter_mut().map(post).collect();
            let sends: Vec<*mut c_void> = sent.iter_mut().map(|piece| self.pair.send(piece, 0)).collect();
            if window == 1 {
                meanwhile();
            }
            receives.extend(late.iter_mut().map(post));
            for request in receives.into_iter().chain(sends) {
                assert_eq!(self.pair.finish(request)[0], PIECE as c_int);
            }
            for (at, piece) in received.iter().enumerate() {
                assert!(piece.iter().all(|byte| *byte == value(at)), "piece {at} of window {window}: {}", piece[0]);
            }
        }
    }
}

/// The connections of this process from or to a rail.
pub(crate) fn connections_at(rail: Ipv4Addr) -> Vec<RawFd> {
    let is_one = |fd: RawFd| {
        let own = getsockname::<SockaddrStorage>(fd).ok()?;
        let _: &SockaddrIn = own.as_sockaddr_in().filter(|own| own.ip() == rail)?;
        // SAFETY: used for this call only.
        let listens = getsockopt(&unsafe { BorrowedFd::borrow_raw(fd) }, sockopt::AcceptConn).ok()?;
        (!listens).then_some(fd)
    };
    let entries = std::fs::read_dir("/proc/self/fd").expect("descriptors");
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).filter_map(is_one).collect()
}

#[test]
fn pieces_go_unasked_and_load_all_rails_alike() {
    const WINDOWS: usize = 4;
    let bed = Bed::new(41, [4, 4]);
    bed.transfer(1, WINDOWS, || ());
    let endpoints = bed.sending.endpoints();
    assert_eq!(endpoints.len(), 4);
    let each = (WINDOWS * WINDOW / 4 * PIECE) as u64;
    for (at, endpoint) in endpoints.iter().enumerate() {
        for (rail, Sent { chunks, messages }) in bed.sent(endpoint).into_iter().enumerate() {
            assert!(chunks < each / 50, "endpoint {at}: {chunks} bytes over rail {rail} were asked for");
            let expected = if rail == at { each..=each + each / 50 } else { 0..=0 };
            assert!(expected.contains(&messages), "endpoint {at}: {messages} bytes over rail {rail}");
        }
    }
}

#[test]
fn pieces_are_asked_for_where_the_workers_do_not_reach_all_rails() {
    for (net, counts) in [(42, [4, 2]), (43, [3, 4])] {
        let bed = Bed::new(net, counts);
        bed.transfer(7, 2, || ());
        let endpoints = bed.sending.endpoints();
        assert_eq!(endpoints.len(), counts[0].min(counts[1]));
        let all: Vec<[Sent; RAILS]> = endpoints.iter().map(|endpoint| bed.sent(endpoint)).collect();
        for (at, sent) in all.iter().enumerate() {
            let carry: Vec<usize> = (0..RAILS).filter(|rail| sent[*rail].messages > 0).collect();
            assert_eq!(carry, [at], "messages of endpoint {at} of {counts:?}");
            assert!(sent[at].messages < PIECE as u64, "pieces went unasked: {sent:?}");
        }
        let chunks = [0, 1, 2, 3].map(|rail| all.iter().map(|sent| sent[rail].chunks).sum::<u64>());
        assert!(chunks.iter().sum::<u64>() >= (2 * WINDOW * PIECE) as u64, "{all:?}");
        assert!(chunks.iter().filter(|bytes| **bytes > 0).count() > 1, "{all:?}");
    }
}

#[test]
fn a_rail_lost_with_pieces_in_flight_neither_loses_nor_doubles_any() {
    const LOST: usize = 2;
    let bed = Bed::new(44, [4, 4]);
    bed.transfer(1, 4, || {
        for fd in connections_at(bed.rails[LOST]) {
            // The other end may have ended it already.
            let _ = shutdown(fd, Shutdown::Both);
        }
    });
    let endpoint = &bed.sending.endpoints()[LOST];
    let carried: u64 = (0..RAILS).filter(|rail| *rail != LOST).map(|rail| bed.sent(endpoint)[rail].chunks).sum();
    assert!(carried > PIECE as u64, "the other rails carried {carried} bytes of the pieces");
    let name = format!("tcp/{}:messages", bed.rails[LOST]);
    until("the rail's return", || endpoint.lanes().iter().any(|lane| lane.name == name && lane.alive));
    // Anything doubled would take the place of these.
    bed.transfer(200, 1, || ());
    let again = bed.sent(endpoint)[LOST].messages;
    assert!(again >= (WINDOW / 4 * PIECE) as u64, "{again} bytes went over the rail that is back");
}
