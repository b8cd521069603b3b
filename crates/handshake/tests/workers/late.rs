//! Lanes whose handshake is held up or cut at every step: no end ever reads a handshake's message as a frame, and
//! dialling again works.

use std::io::{ErrorKind as Io, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crossrail_handshake::wire::{CONFIRM_LEN, Kind, LANE_HELLO_LEN, LaneHello, PROOF_LEN, Reject, RejectCode, WORKER};
use crossrail_handshake::{
    Arrival, LaneName, LanePurpose, Limits, ListenConfig, Secret, Session, Ticket, connect, dial_lane,
};
use crossrail_types::ErrorKind;

use crate::support::{Descriptors, Worker, config, identity, in_secs, loopback, tag};

const LANE: LaneName = LaneName { rail: 0, channel: 0, purpose: LanePurpose::Bulk };
/// How long the end that is to give up waits, and the other one: long enough to be there still.
const SHORT_S: f64 = 0.1;
const LONG_S: f64 = 10.0;
/// What each end writes once it takes the connection for a lane.
const FRAME: &[u8] = b"a frame";

/// A message of a lane's handshake, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Challenge,
    Hello,
    Proof,
    Confirm,
}

const STEPS: [Step; 4] = [Step::Challenge, Step::Hello, Step::Proof, Step::Confirm];

impl Step {
    fn length(self) -> usize {
        match self {
            Step::Challenge => WORKER.length(Kind::Challenge),
            Step::Hello => LANE_HELLO_LEN,
            Step::Proof => PROOF_LEN,
            Step::Confirm => CONFIRM_LEN,
        }
    }

    fn is_connectors(self) -> bool {
        matches!(self, Step::Hello | Step::Confirm)
    }
}

/// What becomes of that message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// It arrives byte by byte.
    Slow,
    /// It is held up until its reader has given up.
    Late,
    /// The connection ends in front of it.
    Cut,
}

/// Everything that `from` still sends goes to `to`, and so does its end.
fn forward(mut from: TcpStream, mut to: TcpStream) -> JoinHandle<()> {
    thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            if to.write_all(&bytes[..count]).is_err() {
                break;
            }
        }
        // Closed already, if it fails.
        let _ = to.shutdown(Shutdown::Write);
    })
}

/// Stands between one connector and the rail `to`: `fault` hits the message `step`.
fn between(to: SocketAddr, step: Step, fault: Fault) -> (SocketAddr, JoinHandle<()>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let relay = thread::spawn(move || {
        let mut connector = listener.accept().unwrap().0;
        let mut acceptor = TcpStream::connect(to).unwrap();
        for now in STEPS {
            let (from, into) =
                if now.is_connectors() { (&mut connector, &mut acceptor) } else { (&mut acceptor, &mut connector) };
            let mut message = vec![0; now.length()];
            from.read_exact(&mut message).unwrap();
            if now != step {
                into.write_all(&message).unwrap();
                continue;
            }
            match fault {
                Fault::Cut => return,
                Fault::Slow => {
                    into.set_nodelay(true).unwrap();
                    message.iter().for_each(|byte| into.write_all(&[*byte]).unwrap());
                }
                Fault::Late => {
                    // What its reader says when it gives up arrives before it would have.
                    forward(into.try_clone().unwrap(), from.try_clone().unwrap()).join().unwrap();
                    // Its reader has gone.
                    let _ = into.write_all(&message);
                    break;
                }
            }
        }
        let back = forward(acceptor.try_clone().unwrap(), connector.try_clone().unwrap());
        forward(connector, acceptor).join().unwrap();
        back.join().unwrap();
    });
    (address, relay)
}

/// All that an end reads on what it takes for a lane, until the connection ends.
fn rest(mut stream: &TcpStream) -> Vec<u8> {
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Ok(_) => {}
        Err(e) if e.kind() == Io::ConnectionReset => {}
        Err(e) => panic!("{e}"),
    }
    bytes
}

fn start(timeout: f64) -> (Worker, Session, SocketAddr) {
    let limits = Limits { timeout: Duration::from_secs_f64(timeout), ..Limits::default() };
    let worker = Worker::start(ListenConfig { limits, ..config() }, identity("listening", Secret::None)).unwrap();
    let me = identity("connecting", Secret::None);
    let ours = connect(&worker.by_address(), &me, None, true, in_secs(30.0)).unwrap();
    worker.session();
    let device = &worker.listener.devices()[0];
    let to = SocketAddr::new(device.address, device.port);
    (worker, ours, to)
}

fn hit(step: Step, fault: Fault) {
    // The reader of the message gives up first.
    let (here, there) = if step.is_connectors() { (LONG_S, SHORT_S) } else { (SHORT_S, LONG_S) };
    let (here, there) = if fault == Fault::Late { (here, there) } else { (LONG_S, LONG_S) };
    let (worker, ours, to) = start(there);
    let (address, relay) = between(to, step, fault);
    let dialled = dial_lane(&ours.ticket, &loopback(), address, LANE, in_secs(here));
    if let Ok(mut stream) = dialled.as_ref() {
        // Not where the other end has gone.
        let _ = stream.write_all(FRAME);
        let _ = stream.shutdown(Shutdown::Write);
    }
    match worker.arrival() {
        Arrival::Lane { mut stream, .. } => {
            assert!(dialled.is_ok(), "{step:?} {fault:?}: a lane at the accepting end only: {dialled:?}");
            // The connector may have gone.
            let _ = stream.write_all(FRAME);
            assert_eq!(rest(&stream), FRAME, "{step:?} {fault:?}: read by the accepting end");
        }
        Arrival::Rejected { error, .. } => {
            assert_ne!(fault, Fault::Slow, "{error}");
            assert_ne!(error.kind, ErrorKind::Refused, "{error}");
        }
        Arrival::Session(session) => panic!("{step:?} {fault:?}: {session:?}"),
    }
    if let Ok(stream) = &dialled {
        let read = rest(stream);
        let whole = if fault == Fault::Slow { FRAME } else { b"" };
        assert_eq!(read, whole, "{step:?} {fault:?}: read by the connecting end");
    }
    drop(dialled);
    relay.join().unwrap();
    // Whatever became of the first attempt, the next one works.
    let stream = dial_lane(&ours.ticket, &loopback(), to, LANE, in_secs(LONG_S)).unwrap();
    assert!(matches!(worker.arrival(), Arrival::Lane { lane: LANE, .. }));
    drop(stream);
    worker.nobody_else();
}

#[test]
fn a_message_that_is_late_or_lost_at_any_step_is_never_read_as_a_frame() {
    let _fds = Descriptors::watch();
    let tries = STEPS.into_iter().flat_map(|step| [Fault::Slow, Fault::Late, Fault::Cut].map(|fault| (step, fault)));
    let tries: Vec<_> = tries.map(|(step, fault)| thread::spawn(move || hit(step, fault))).collect();
    for one in tries {
        one.join().unwrap();
    }
}

/// A lane's hello with the right proof, of that version.
fn hello(ticket: &Ticket, challenge: &[u8], version: u16) -> [u8; LANE_HELLO_LEN] {
    let LaneName { rail, channel, purpose } = LANE;
    let mut hello =
        LaneHello { version, purpose, rail, channel, session: ticket.session, nonce: [7; 32], mac: [0; 32] };
    let unsigned = hello.encode();
    hello.mac = tag(&ticket.key, "crossrail lane connector", &[challenge, &unsigned[..LANE_HELLO_LEN - 32]]);
    hello.encode()
}

#[test]
fn an_acceptor_waits_for_the_confirmation_and_takes_a_reject_for_what_it_is() {
    let _fds = Descriptors::watch();
    let (worker, ours, to) = start(LONG_S);
    let dial = |version: u16| {
        let mut stream = TcpStream::connect(to).unwrap();
        let mut challenge = vec![0; Step::Challenge.length()];
        stream.read_exact(&mut challenge).unwrap();
        stream.write_all(&hello(&ours.ticket, &challenge, version)).unwrap();
        stream.read_exact(&mut [0; PROOF_LEN]).unwrap();
        stream
    };
    let mut gives_up = dial(WORKER.version);
    gives_up.write_all(&Reject::new(RejectCode::Timeout, "too late").encode(&WORKER)).unwrap();
    let error = worker.rejected();
    assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
    assert!(error.detail.contains("confirmation") && error.detail.contains("too late"), "{error}");
    // A frame in place of the confirmation: closed without a word, which would be read as a frame.
    let mut frame_first = dial(WORKER.version);
    frame_first.write_all(&[1; 32]).unwrap();
    assert_eq!(worker.rejected().kind, ErrorKind::Protocol);
    assert_eq!(rest(&frame_first), b"");
}
