//! A lost rail comes back although the end that connected is refused there: the end that accepted dials, too.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::os::fd::{BorrowedFd, RawFd};
use std::time::{Duration, Instant};

use crossrail::{ConnectOptions, Context, Settings, Worker, WorkerOptions};
use nix::sys::socket::{Shutdown, SockaddrIn, SockaddrStorage, getsockname, getsockopt, shutdown, sockopt};

const LIMIT: Option<Duration> = Some(Duration::from_secs(60));
const RAILS: [Ipv4Addr; 2] = [Ipv4Addr::new(127, 0, 0, 21), Ipv4Addr::new(127, 0, 0, 22)];

fn worker() -> Worker {
    let rails = RAILS.map(|rail| rail.to_string()).join(",");
    let settings = [("CROSSRAIL_TLS", "tcp"), ("CROSSRAIL_NET_DEVICES", rails.as_str())];
    let context = Context::new(Settings::from_pairs(settings).unwrap()).unwrap();
    Worker::new(&context, WorkerOptions::default()).unwrap()
}

/// A socket of this process at one of the rails.
#[derive(Clone, Copy)]
struct Socket {
    fd: RawFd,
    port: u16,
    listens: bool,
}

#[allow(unsafe_code)]
fn sockets_at(rail: Ipv4Addr) -> Vec<Socket> {
    let found = |fd: RawFd| {
        let own = getsockname::<SockaddrStorage>(fd).ok()?;
        let own: &SockaddrIn = own.as_sockaddr_in().filter(|own| own.ip() == rail)?;
        // SAFETY: used for this call only.
        let listens = getsockopt(&unsafe { BorrowedFd::borrow_raw(fd) }, sockopt::AcceptConn).ok()?;
        Some(Socket { fd, port: own.port(), listens })
    };
    let entries = std::fs::read_dir("/proc/self/fd").unwrap();
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).filter_map(found).collect()
}

/// How many lanes were accepted at each port that is listened at.
fn accepted_at(rail: Ipv4Addr) -> HashMap<u16, usize> {
    let sockets = sockets_at(rail);
    let lanes = |port| sockets.iter().filter(|one| !one.listens && one.port == port).count();
    sockets.iter().filter(|one| one.listens).map(|one| (one.port, lanes(one.port))).collect()
}

fn until<T>(what: &str, found: impl Fn() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(began.elapsed() < LIMIT.unwrap(), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn the_end_that_accepted_dials_where_the_other_one_is_refused() {
    let (a, b) = (worker(), worker());
    let ab = a.connect(&b.address(), &ConnectOptions::default()).unwrap();
    let ba = b.accept(LIMIT).unwrap();
    let accepting = RAILS.map(|rail| {
        until("a lane on each rail", || {
            accepted_at(rail).into_iter().find(|(_, lanes)| *lanes > 0).map(|(port, _)| port)
        })
    });
    let connecting: u16 = *accepted_at(RAILS[0]).keys().find(|port| **port != accepting[0]).unwrap();
    // From now on nobody is admitted where b listens, and one rail is lost.
    for socket in RAILS.into_iter().flat_map(sockets_at).filter(|one| one.listens && accepting.contains(&one.port)) {
        shutdown(socket.fd, Shutdown::Both).unwrap();
    }
    for socket in sockets_at(RAILS[0]).into_iter().filter(|one| !one.listens) {
        // The other end may have ended it already.
        let _ = shutdown(socket.fd, Shutdown::Both);
    }
    until("b has dialled a", || accepted_at(RAILS[0]).get(&connecting).filter(|lanes| **lanes > 0).copied());
    let receive = b.recv(vec![0; 8 << 20], 1, u64::MAX, Some(&ba)).unwrap();
    let send = ab.send(vec![7; 8 << 20], 1).unwrap();
    send.wait(LIMIT).unwrap();
    receive.wait(LIMIT).unwrap();
    assert!(receive.into_vec().unwrap().iter().all(|byte| *byte == 7));
}
