//! The control connection of two workers fails while their lanes are healthy, and the other way round.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crossrail::{ConnectOptions, Context, Endpoint, ErrorKind, Settings, Worker, WorkerOptions};
use nix::sys::socket::{setsockopt, sockopt};

const LIMIT: Option<Duration> = Some(Duration::from_secs(20));
const SIZE: usize = 3 << 20;

/// Stands between a connecting worker and the control port `to`, until it is told to reset both connections.
struct Between {
    address: SocketAddr,
    streams: Receiver<[TcpStream; 2]>,
    relays: JoinHandle<()>,
}

fn forward(mut from: TcpStream, mut to: TcpStream) -> JoinHandle<()> {
    thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            if to.write_all(&bytes[..count]).is_err() {
                break;
            }
        }
    })
}

impl Between {
    fn new(to: SocketAddr) -> Between {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let (send, streams) = channel();
        let relays = thread::spawn(move || {
            let (here, there) = (listener.accept().unwrap().0, TcpStream::connect(to).unwrap());
            send.send([here.try_clone().unwrap(), there.try_clone().unwrap()]).unwrap();
            let back = forward(there.try_clone().unwrap(), here.try_clone().unwrap());
            forward(here, there).join().unwrap();
            back.join().unwrap();
        });
        Between { address, streams, relays }
    }

    /// Both ends receive the end of the connection, as from a middlebox with an idle limit.
    fn finish(self) {
        for stream in self.streams.recv().unwrap() {
            stream.shutdown(Shutdown::Both).unwrap();
        }
        self.relays.join().unwrap();
    }

    /// Both ends receive a reset, as from a middlebox that has forgotten the connection.
    fn reset(self) {
        let linger = libc::linger { l_onoff: 1, l_linger: 0 };
        for stream in self.streams.recv().unwrap() {
            // With that linger, the last one to let go of the socket resets the connection.
            setsockopt(&stream.as_fd(), sockopt::Linger, &linger).unwrap();
            stream.shutdown(Shutdown::Read).unwrap();
        }
        self.relays.join().unwrap();
    }
}

fn worker() -> Worker {
    let settings = [("CROSSRAIL_TLS", "tcp"), ("CROSSRAIL_NET_DEVICES", "127.0.0.1,127.0.0.2")];
    let context = Context::new(Settings::from_pairs(settings).unwrap()).unwrap();
    Worker::new(&context, WorkerOptions::default()).unwrap()
}

/// A message each way, of which some is chunks.
fn exchange((a, ab): (&Worker, &Endpoint), (b, ba): (&Worker, &Endpoint)) {
    for ((to, from), (sender, back)) in [((b, ba), (a, ab)), ((a, ab), (b, ba))] {
        let receive = to.recv(vec![0; SIZE], 7, u64::MAX, Some(from)).unwrap();
        let send = back.send(vec![9; SIZE], 7).unwrap();
        receive.wait(LIMIT).unwrap_or_else(|error| panic!("{}: {error}", to.name()));
        send.wait(LIMIT).unwrap_or_else(|error| panic!("{}: {error}", sender.name()));
        assert!(receive.into_vec().unwrap().iter().all(|byte| *byte == 9));
    }
}

/// Two workers whose control connection ends so: their lanes go on.
fn check_lanes_outlive_the_control_connection(end: fn(Between)) {
    let (a, b) = (worker(), worker());
    let between = Between::new(b.control_addresses()[0]);
    let ab = a.connect(between.address.to_string().as_bytes(), &ConnectOptions::default()).unwrap();
    let ba = b.accept(LIMIT).unwrap();
    exchange((&a, &ab), (&b, &ba));
    end(between);
    for _ in 0..5 {
        exchange((&a, &ab), (&b, &ba));
    }
    // Without it, the peer's goodbye comes over a lane.
    let receive = a.recv(vec![0; 8], 8, u64::MAX, Some(&ab)).unwrap();
    b.close().unwrap();
    let error = receive.wait(LIMIT).unwrap_err();
    assert!(matches!(error.kind, ErrorKind::PeerDead | ErrorKind::Closed), "{error}");
}

#[test]
fn a_reset_of_the_control_connection_alone_takes_no_peer_with_it() {
    check_lanes_outlive_the_control_connection(Between::reset);
}

#[test]
fn a_control_connection_that_is_closed_in_between_takes_no_peer_with_it() {
    check_lanes_outlive_the_control_connection(Between::finish);
}
