//! The conformance suite of crossrail-transport, over real connections.

use std::net::{IpAddr, TcpStream};
use std::time::{Duration, Instant};

use crossrail_tcp::{Binding, CheckedLane, Options, TcpLane, dial, listen};
use crossrail_transport::{Lane, conformance};
use crossrail_types::LaneId;

fn pair(address: &str, options: &Options) -> (Box<dyn Lane>, Box<dyn Lane>) {
    let (dialled, accepted) = streams(address);
    let lane = |stream, id| TcpLane::new(stream, LaneId(id), format!("tcp/{address}"), options).expect("options");
    (Box::new(lane(dialled, 1)), Box::new(lane(accepted, 2)))
}

fn checked(options: &Options) -> (Box<dyn Lane>, Box<dyn Lane>) {
    let (dialled, accepted) = streams("127.0.0.1");
    let lane = |stream, id| CheckedLane::checked(stream, LaneId(id), "tcp/checked".into(), options).expect("options");
    (Box::new(lane(dialled, 1)), Box::new(lane(accepted, 2)))
}

fn streams(address: &str) -> (TcpStream, TcpStream) {
    let address: IpAddr = address.parse().expect("an address");
    let binding = Binding { device: None, address };
    let listener = listen(&binding, 0).expect("listen");
    let to = listener.local_addr().expect("bound");
    let dialled = dial(Some(&binding), to, Instant::now() + Duration::from_secs(5)).expect("dial");
    let (accepted, _) = listener.accept().expect("accept");
    (dialled, accepted)
}

#[test]
fn ipv4() {
    conformance::run("tcp/127.0.0.1", &mut || pair("127.0.0.1", &Options::default()));
}

#[test]
fn ipv6() {
    conformance::run("tcp/::1", &mut || pair("::1", &Options::default()));
}

fn small() -> Options {
    Options {
        send_buffer: Some(128 * 1024),
        receive_buffer: Some(128 * 1024),
        notsent_lowat: 16 * 1024,
        ..Options::default()
    }
}

#[test]
fn with_checksums() {
    conformance::run("tcp, with checksums", &mut || checked(&small()));
}

#[test]
fn small_kernel_buffers() {
    let options = small();
    conformance::run("tcp/127.0.0.1, small buffers", &mut || pair("127.0.0.1", &options));
}

#[test]
fn lanes_end_at_any_stage() {
    conformance::run_endings("tcp/127.0.0.1", 0..12, &mut || pair("127.0.0.1", &Options::default()));
}
