//! Bytes on rails are changed on their way, and the checksums notice it.
#![allow(unsafe_code)]

use std::collections::HashSet;
use std::net::Ipv4Addr;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossrail::{ConnectOptions, Context, Endpoint, ErrorKind, Settings, Worker, WorkerOptions};
use nix::libc::{IPPROTO_TCP, TCP_INFO, TIOCOUTQ, c_int, getsockopt, ioctl, socklen_t};
use nix::sys::socket::{MsgFlags, SockaddrIn, SockaddrStorage, getsockname, send};

const LIMIT: Option<Duration> = Some(Duration::from_secs(60));
const SIZE: usize = 3 << 20;
/// Times that a rail which is always corrupt is dialled again, by either end, and the least that they may take
/// together.
const DIALS: usize = 5;
const PAUSES: Duration = Duration::from_millis(1300);

/// One test at a time: the number of a lane that has just been closed may be another one's socket.
static ALONE: Mutex<()> = Mutex::new(());

fn worker(rails: &[Ipv4Addr], (checksum, chunk): (&str, &str)) -> Worker {
    let rails = rails.iter().map(Ipv4Addr::to_string).collect::<Vec<_>>().join(",");
    let settings = [
        ("CROSSRAIL_TLS", "tcp"),
        ("CROSSRAIL_NET_DEVICES", &rails),
        // The dials are counted.
        ("CROSSRAIL_CHANNELS", "1"),
        ("CROSSRAIL_CHECKSUM", checksum),
        ("CROSSRAIL_CHUNK", chunk),
    ];
    let context = Context::new(Settings::from_pairs(settings).unwrap()).unwrap();
    Worker::new(&context, WorkerOptions::default()).unwrap()
}

/// Two workers, of which only one asks for checksums.
fn pair(rails: &[Ipv4Addr], chunk: &str) -> ((Worker, Endpoint), (Worker, Endpoint)) {
    let (a, b) = (worker(rails, ("crc", chunk)), worker(rails, ("off", chunk)));
    let ab = a.connect(&b.address(), &ConnectOptions::default()).unwrap();
    let ba = b.accept(LIMIT).unwrap();
    ((a, ab), (b, ba))
}

/// The sockets of this process that have one of these addresses. Every test has addresses of its own; the control
/// connections have none of them.
fn lanes(rails: &[Ipv4Addr]) -> Vec<RawFd> {
    let is_lane = |fd: &RawFd| {
        let own = getsockname::<SockaddrStorage>(*fd);
        own.is_ok_and(|own| own.as_sockaddr_in().is_some_and(|own| rails.contains(&own.ip())))
    };
    let entries = std::fs::read_dir("/proc/self/fd").unwrap();
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).filter(is_lane).collect()
}

/// Puts a byte between those that a lane sends: all that follow are in another's place. False: it is no lane any more.
fn insert(lane: RawFd) -> bool {
    send(lane, b"!", MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL).is_ok()
}

/// Whether more bytes are in flight than a handshake has: the lane carries a payload.
fn is_carrying(lane: RawFd) -> bool {
    let mut waiting: c_int = 0;
    // SAFETY: the call writes one int.
    unsafe { ioctl(lane, TIOCOUTQ, &mut waiting) == 0 && waiting > 4096 }
}

/// True once a lane has sent or received more bytes than a handshake has.
fn has_carried(lane: RawFd) -> bool {
    // The kernel's struct tcp_info: bytes_acked and bytes_received are its words at 120 and 128.
    let mut info = [0u64; 32];
    let mut len = size_of_val(&info) as socklen_t;
    // SAFETY: the call writes at most `len` bytes.
    let result = unsafe { getsockopt(lane, IPPROTO_TCP, TCP_INFO, info.as_mut_ptr().cast(), &raw mut len) };
    result == 0 && info[120 / 8] + info[128 / 8] > 4096
}

#[test]
fn lanes_whose_bytes_are_changed_come_back_and_every_byte_delivered_is_right() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let rails = [Ipv4Addr::new(127, 0, 0, 4), Ipv4Addr::new(127, 0, 0, 5)];
    let ((_a, ab), (b, ba)) = pair(&rails, "256K");
    for explain in [ab.explain(), ba.explain()] {
        assert!(explain.selected.contains("(checksum crc)"), "{}", explain.selected);
    }
    let (mut corrupt, mut seed) = (0, 12345_u64);
    for round in 0..200 {
        let bytes: Vec<u8> = (0..SIZE).map(|at| (round * 31 + at * 7 + (at >> 12)) as u8).collect();
        let receive = b.recv(vec![0; SIZE], round as u64, u64::MAX, Some(&ba)).unwrap();
        let send = ab.send(bytes.clone(), round as u64).unwrap();
        let up = lanes(&rails);
        if !up.is_empty() {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            insert(up[(seed >> 33) as usize % up.len()]);
        }
        let receipts = [send.wait(LIMIT).unwrap(), receive.wait(LIMIT).unwrap()];
        assert!(receive.into_vec().unwrap() == bytes, "round {round}");
        corrupt += receipts.iter().flat_map(|receipt| receipt.notes()).filter(|note| note.contains("corrupt")).count();
        if round >= 20 && corrupt >= 3 {
            return;
        }
    }
    panic!("a byte was inserted in each of 200 transfers, and {corrupt} receipts speak of it");
}

#[test]
fn a_transfer_whose_lanes_are_changed_again_and_again_is_whole_or_names_them() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let rails = [Ipv4Addr::new(127, 0, 0, 6)];
    let ((_a, ab), (b, ba)) = pair(&rails, "64M");
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                lanes(&rails).into_iter().filter(|lane| is_carrying(*lane)).for_each(|lane| {
                    insert(lane);
                });
            }
        });
        let receive = b.recv(vec![0; 64 << 20], 1, u64::MAX, Some(&ba)).unwrap();
        let send = ab.send(vec![1; 64 << 20], 1).unwrap();
        let ended = [receive.wait(LIMIT), send.wait(LIMIT)];
        done.store(true, Ordering::Relaxed);
        match ended {
            // Chunks became so short that they got through.
            [Ok(_), _] => assert!(receive.into_vec().unwrap().iter().all(|byte| *byte == 1)),
            [Err(receive), send] => {
                assert_eq!(receive.kind, ErrorKind::PeerDead, "{receive}");
                let told = format!("{receive}; {send:?}");
                assert!(["corrupt", "no rail came back"].iter().any(|why| told.contains(why)), "{told}");
            }
        }
    });
}

/// The ports from which lanes to an address were dialled.
fn dialled_from(rail: Ipv4Addr) -> HashSet<u16> {
    let own = lanes(&[rail]).into_iter().filter_map(|lane| getsockname::<SockaddrStorage>(lane).ok());
    let own: Vec<u16> = own.filter_map(|own| own.as_sockaddr_in().map(SockaddrIn::port)).collect();
    // All accepted ones have the port that is listened at, the listener included.
    own.iter().copied().filter(|port| own.iter().filter(|other| *other == port).count() == 1).collect()
}

#[test]
fn a_rail_that_changes_every_transfer_beside_another_is_dialled_less_and_less_often() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let rails = [Ipv4Addr::new(127, 0, 0, 7), Ipv4Addr::new(127, 0, 0, 8)];
    let ((_a, ab), (b, ba)) = pair(&rails, "64K");
    // The other rail has the lane for messages too.
    let bad = if lanes(&rails[..1]).len() < lanes(&rails[1..]).len() { rails[0] } else { rails[1] };
    let (began, mut seen, mut round) = (Instant::now(), dialled_from(bad), 0);
    let first = seen.len();
    assert!(first > 0);
    while seen.len() < first + DIALS {
        assert!(began.elapsed() < LIMIT.unwrap(), "dialled {} times", seen.len() - first);
        let receive = b.recv(vec![0; SIZE], round, u64::MAX, Some(&ba)).unwrap();
        let send = ab.send(vec![7; SIZE], round).unwrap();
        // Not into a handshake, whose failure has pauses of its own.
        lanes(&[bad]).into_iter().filter(|lane| has_carried(*lane)).for_each(|lane| {
            insert(lane);
        });
        send.wait(LIMIT).unwrap();
        receive.wait(LIMIT).unwrap();
        assert!(receive.into_vec().unwrap().iter().all(|byte| *byte == 7), "round {round}");
        seen.extend(dialled_from(bad));
        round += 1;
    }
    // Pauses double from 200 ms; at the other end they begin with 600 ms.
    assert!(began.elapsed() >= PAUSES, "dialled {DIALS} times within {:?}", began.elapsed());
}
