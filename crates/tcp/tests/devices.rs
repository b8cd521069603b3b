//! Device binding and link notifications in network namespaces. Requires root and iproute2; skipped with a message
//! elsewhere.

mod common;

use std::fs::File;
use std::net::TcpStream;
use std::os::fd::BorrowedFd;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use common::{Keeper, PATIENCE, frame, lane, poll_until};
use crossrail_tcp::placing::{Connection, Door, LINKS_MAX, TcpPlacing};
use crossrail_tcp::{Binding, LinkWatch, dial, listen};
use crossrail_transport::conformance::skip;
use crossrail_transport::placing::{Event, Extent, Imm, Placing};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, setns};
use socket2::SockRef;

/// Two network namespaces: the first has two devices in one network, both attached to a bridge in the second.
struct Bed {
    near: String,
    far: String,
}

fn ip(words: &str) -> bool {
    let output = Command::new("ip").args(words.split(' ')).output();
    output.is_ok_and(|output| {
        if !output.status.success() {
            eprintln!("ip {words}: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        output.status.success()
    })
}

impl Bed {
    /// Creates the namespaces; `None`, with the reason on stderr, if the system does not permit it.
    fn new(name: &str) -> Option<Bed> {
        let id = std::process::id();
        let bed = Bed { near: format!("xr-{name}-near-{id}"), far: format!("xr-{name}-far-{id}") };
        let (near, far) = (&bed.near, &bed.far);
        if !nix::unistd::geteuid().is_root() || !ip(&format!("netns add {near}")) || !ip(&format!("netns add {far}")) {
            return None;
        }
        let mut works = ip(&format!("-n {far} link add br0 type bridge"));
        for (device, address) in [("eth1", "10.77.0.1"), ("eth2", "10.77.0.2")] {
            works &= ip(&format!("link add {device} netns {near} type veth peer name {device} netns {far}"))
                && ip(&format!("-n {near} address add {address}/24 dev {device}"))
                && ip(&format!("-n {near} link set {device} up"))
                && ip(&format!("-n {far} link set {device} master br0 up"));
        }
        works &= ip(&format!("-n {far} address add 10.77.0.9/24 dev br0")) && ip(&format!("-n {far} link set br0 up"));
        works.then_some(bed)
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        for name in [&self.near, &self.far] {
            if std::path::Path::new("/run/netns").join(name).exists() {
                ip(&format!("netns delete {name}"));
            }
        }
    }
}

/// Runs `body` on a thread inside namespace `name`.
fn inside<T: Send>(name: &str, body: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let namespace = File::open(format!("/run/netns/{name}")).expect("the namespace");
            setns(namespace, CloneFlags::CLONE_NEWNET).expect("setns");
            body()
        });
        thread.join().expect("the body succeeds")
    })
}

fn bytes_out(device: &str) -> u64 {
    let table = std::fs::read_to_string("/proc/thread-self/net/dev").expect("proc");
    let line = table.lines().find_map(|line| line.trim().strip_prefix(&format!("{device}:"))).expect("the device");
    line.split_whitespace().nth(8).expect("the transmit column").parse().expect("a number")
}

fn rail(device: &str, address: &str) -> Binding {
    Binding { device: Some(device.into()), address: address.parse().expect("an address") }
}

fn carry(from: TcpStream, to: TcpStream, payload: &[u8]) {
    let (mut sender, mut receiver) = (lane(from), lane(to));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut sink = Keeper::default();
            poll_until(&mut receiver, &mut sink, |sink| sink.placed == 1);
        });
        let mut sink = Keeper::default();
        sink.queue.push_back(frame(payload));
        poll_until(&mut sender, &mut sink, |sink| sink.sent == 1);
    });
}

#[test]
fn packets_leave_through_the_bound_device() {
    let Some(bed) = Bed::new("bind") else { return skip("needs root and iproute2 with veth and bridge") };
    let far = inside(&bed.far, || listen(&rail("br0", "10.77.0.9"), 0).expect("listen"));
    let to = far.local_addr().expect("bound");
    let payload = vec![1u8; 400_000];
    inside(&bed.near, || {
        // Each device answers ARP for its own address only, as on a multi-homed host.
        std::fs::write("/proc/sys/net/ipv4/conf/all/arp_ignore", "1").expect("sysctl");
        for (device, other, address) in [("eth1", "eth2", "10.77.0.1"), ("eth2", "eth1", "10.77.0.2")] {
            let binding = rail(device, address);
            assert_eq!(binding.warning(), None);
            let before = (bytes_out(device), bytes_out(other));
            let dialled = dial(Some(&binding), to, Instant::now() + PATIENCE).expect("dial");
            assert_eq!(SockRef::from(&dialled).device().expect("option").as_deref(), Some(device.as_bytes()));
            let (accepted, from) = far.accept().expect("accept");
            assert_eq!(from.ip(), binding.address);
            carry(dialled, accepted, &payload);
            assert!(bytes_out(device) - before.0 >= 400_000, "{device} carried too little");
            assert!(bytes_out(other) - before.1 < 10_000, "{other} carried what was {device}'s");

            // The other direction: this end accepts the connection and binds it to its device.
            let listener = listen(&binding, 0).expect("listen");
            let port = listener.local_addr().expect("bound");
            let dialled = inside(&bed.far, || dial(None, port, Instant::now() + PATIENCE).expect("dial"));
            let (accepted, _) = listener.accept().expect("accept");
            binding.adopt(&accepted).expect("connected");
            let before = (bytes_out(device), bytes_out(other));
            carry(accepted, dialled, &payload);
            assert!(bytes_out(device) - before.0 >= 400_000, "{device} carried too little");
            assert!(bytes_out(other) - before.1 < 10_000, "{other} carried what was {device}'s");
        }
        let nowhere = rail("eth7", "10.77.0.1");
        assert!(nowhere.warning().is_some_and(|text| text.contains("eth7")));
    });
}

#[test]
fn a_link_that_goes_down_is_reported() {
    let Some(bed) = Bed::new("watch") else {
        return skip("needs root and iproute2 with veth and bridge");
    };
    inside(&bed.near, || {
        let mut watch = LinkWatch::new().expect("netlink");
        let mut wait_for = |up: bool| {
            let start = Instant::now();
            loop {
                if watch.changes().iter().any(|change| change.name == "eth2" && change.up == up && change.index > 0) {
                    return;
                }
                #[allow(unsafe_code)]
                // SAFETY: the watch keeps its descriptor open past this call.
                let fd = unsafe { BorrowedFd::borrow_raw(watch.fd()) };
                poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], PollTimeout::from(1000u16)).expect("poll");
                assert!(start.elapsed() < PATIENCE, "up={up} was not reported");
            }
        };
        assert!(ip(&format!("-n {} link set eth2 down", bed.near)));
        wait_for(false);
        assert!(ip(&format!("-n {} link set eth2 up", bed.near)));
        wait_for(true);
        // Unplug the cable: the other end goes down, while this one stays administratively up.
        assert!(ip(&format!("-n {} link set eth2 down", bed.far)));
        wait_for(false);
    });
}

#[test]
#[allow(unsafe_code)]
fn one_sided_writes_leave_a_rail_that_is_silent() {
    const LEN: usize = 1 << 20;
    let Some(bed) = Bed::new("silent") else { return skip("needs root and iproute2 with veth and bridge") };
    let far = inside(&bed.far, || listen(&rail("br0", "10.77.0.9"), 0).expect("listen"));
    let to = far.local_addr().expect("bound");
    let dialled = inside(&bed.near, || {
        std::fs::write("/proc/sys/net/ipv4/conf/all/arp_ignore", "1").expect("sysctl");
        [("eth1", "10.77.0.1"), ("eth2", "10.77.0.2")]
            .map(|(device, address)| dial(Some(&rail(device, address)), to, Instant::now() + PATIENCE).expect("dial"))
    });
    let connection = |(id, stream): (usize, TcpStream)| Connection {
        id: id as u16,
        name: format!("tcp/eth{}", id + 1),
        cost: 0,
        interface: None,
        stream,
    };
    let accepted: Vec<_> = (0..2).map(|_| far.accept().expect("accept").0).enumerate().map(connection).collect();
    let dialled: Vec<_> = dialled.into_iter().enumerate().map(connection).collect();
    let door = || Arc::new(Door::new(LINKS_MAX).expect("a descriptor"));
    let (mut heap, from) = (vec![0u8; LEN], vec![7u8; LEN]);
    let mut near = TcpPlacing::new("far", true, dialled, door()).expect("options");
    let mut far = TcpPlacing::new("near", false, accepted, door()).expect("options");
    // SAFETY: the objects are dropped before the memory.
    let key = unsafe { far.expose(&Extent::host(heap.as_mut_ptr(), LEN), &Arc::default()) }.expect("a key");
    let counter = far.count(4096).expect("a counter");
    let (mut arrived, mut ended, start) = (0u16, 0, Instant::now());
    for piece in 0..60 {
        if piece == 20 {
            assert!(
                ip(&format!("-n {} link set eth2 nomaster", bed.far)),
                "the bridge forwards nothing of eth2 any more"
            );
        }
        // SAFETY: as above.
        let posted = unsafe { near.write(&[Extent::host(from.as_ptr(), LEN)], &key, 0, Imm { counter, piece }, 0) };
        posted.expect("up");
        while arrived + 4 < piece || (piece == 59 && ended < 60) {
            near.poll(&mut |event| ended += u16::from(matches!(event, Event::Ended { result: Ok(()), .. })))
                .expect("eth1");
            far.poll(&mut |event| arrived += u16::from(matches!(event, Event::Arrived(_)))).expect("eth1");
            assert!(start.elapsed() < 4 * PATIENCE, "{arrived} arrived, {ended} ended: {:?}", near.rails());
        }
    }
    assert_eq!(arrived, 60, "each once");
    let lost: Vec<String> = near.rails().into_iter().filter_map(|rail| rail.lost).collect();
    assert!(lost.len() == 1 && lost[0].contains("no acknowledgement"), "{lost:?}");
    assert!(near.rails().iter().any(|rail| rail.name == "tcp/eth2" && rail.reposted > 0), "{:?}", near.rails());
    drop((near, far));
    assert!(heap == from);
}
