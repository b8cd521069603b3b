//! Metadata listeners: requests of proven clients are answered, and the cost of unproven ones is bounded.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossrail_handshake::Secret;
use crossrail_handshake::metadata::{BODY_MAX, MetadataListener, request};
use crossrail_types::{ErrorKind, Reason, Result, Settings};

const SECRET: &str = "correct horse battery staple";

fn settings() -> Settings {
    let mut settings = Settings::default();
    settings.set("secret", SECRET).expect("a setting");
    settings.set("log", "off").expect("a setting");
    settings
}

/// A listener that answers with the operation and the body that it received; refuses operation 9.
struct Echo {
    listener: Arc<MetadataListener>,
    thread: Option<JoinHandle<()>>,
}

impl Echo {
    fn start(settings: &Settings) -> Echo {
        let listener = Arc::new(MetadataListener::start(settings, 0).expect("a listener"));
        let own = Arc::clone(&listener);
        let thread = thread::spawn(move || {
            while let Ok(mut inquiry) = own.next(Duration::from_secs(60)) {
                let operation = inquiry.operation;
                let mut body = vec![operation];
                body.append(&mut inquiry.body);
                inquiry.answer(if operation == 9 { Err("not today".to_owned()) } else { Ok(body) });
            }
        });
        Echo { listener, thread: Some(thread) }
    }

    fn port(&self) -> u16 {
        self.listener.addresses()[0].port()
    }

    fn ask(&self, host: &str, secret: &str, operation: u8, body: &[u8]) -> Result<Vec<u8>> {
        let secret = Secret::Shared(secret.as_bytes().to_vec());
        request(host, self.port(), &secret, operation, body, Instant::now() + Duration::from_secs(20))
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.listener.close();
        self.thread.take().map(JoinHandle::join).expect("a thread").expect("no panic");
    }
}

fn dial(port: u16) -> TcpStream {
    let stream = TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], port))).expect("a connection");
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
    stream
}

/// All that the listener sends until it hangs up.
fn rest(mut stream: TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    bytes
}

#[test]
fn both_families_get_answers_and_reasons() {
    let echo = Echo::start(&settings());
    for host in ["127.0.0.1", "::1", "localhost"] {
        assert_eq!(echo.ask(host, SECRET, 2, b"body").expect("an answer"), b"\x02body", "{host}");
    }
    let long = vec![7; 3 << 20];
    assert_eq!(echo.ask("::1", SECRET, 1, &long).expect("an answer").len(), long.len() + 1);
    let refused = echo.ask("127.0.0.1", SECRET, 9, b"").expect_err("it is refused");
    assert_eq!(refused.kind, ErrorKind::Refused);
    assert!(refused.detail.contains("not today"), "{refused}");
    let stranger = echo.ask("127.0.0.1", "another secret of that length", 2, b"").expect_err("it is refused");
    assert_eq!((stranger.kind, stranger.reason), (ErrorKind::Refused, Some(Reason::SecretWrong)), "{stranger}");
}

#[test]
fn an_error_names_the_address_that_was_asked_for() {
    let port = Echo::start(&settings()).port(); // closed again
    let secret = Secret::Shared(SECRET.as_bytes().to_vec());
    for (host, place) in [("127.0.0.1", format!("127.0.0.1:{port}")), ("::1", format!("[::1]:{port}"))] {
        let deadline = Instant::now() + Duration::from_secs(20);
        let error = request(host, port, &secret, 2, b"", deadline).expect_err("nobody listens");
        assert_eq!((error.kind, error.peer.as_deref()), (ErrorKind::Unreachable, Some(&*place)), "{error}");
    }
}

#[test]
fn a_flood_of_unproven_connections_keeps_no_client_out() {
    let echo = Echo::start(&settings());
    let port = echo.port();
    let mut flood: Vec<TcpStream> = (0..64).map(|_| dial(port)).collect();
    for _ in 0..7 {
        flood.iter_mut().for_each(|stream| drop(stream.write_all(b"\xc5")));
        assert_eq!(echo.ask("127.0.0.1", SECRET, 2, b"").expect("an answer"), b"\x02");
    }
}

#[test]
fn a_stranger_is_read_no_further_than_its_proof() {
    let echo = Echo::start(&settings());
    // What a listener that asks for no proof took: the head of a message of 64 MiB, and the message.
    for start in [&b"CRNIXLMD\x02\0\0\0\0"[..], b"GET / HTTP/1.1\r\n\r\n", b"\xc5XMETA\x09\0"] {
        let mut stream = dial(echo.port());
        stream.write_all(start).expect("room");
        let said = rest(stream);
        assert_eq!(said[..8], *b"\xc5XMETA\x01\0", "a challenge");
        assert!(said.len() <= 48 + 256, "{} bytes", said.len());
    }
    // A reply of the right form with a wrong proof.
    let mut stream = dial(echo.port());
    let mut reply = [0; 80];
    reply[..12].copy_from_slice(b"\xc5XMETA\x02\0\x01\0\x01\0");
    stream.write_all(&reply).expect("room");
    let said = rest(stream);
    assert_eq!(said.len(), 48 + 256);
    assert!(String::from_utf8_lossy(&said).contains("wrong secret"));
}

#[test]
fn bodies_are_bounded_each_and_together() {
    let echo = Echo::start(&settings());
    let too_long = echo.ask("127.0.0.1", SECRET, 2, &vec![0; BODY_MAX + 1]).expect_err("too long");
    assert_eq!(too_long.kind, ErrorKind::Usage);
    // Three of 60 MiB exceed the limit of all while no request is answered: the third is refused until its deadline.
    let silent = MetadataListener::start(&settings(), 0).expect("a listener");
    let port = silent.addresses()[0].port();
    let body = vec![1; 60 << 20];
    let ask = |seconds| {
        let secret = Secret::Shared(SECRET.as_bytes().to_vec());
        request("127.0.0.1", port, &secret, 2, &body, Instant::now() + Duration::from_secs(seconds))
            .expect_err("no answer")
    };
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| ask(60));
        }
        let taken = [(); 2].map(|()| silent.next(Duration::from_secs(60)));
        let third = ask(2);
        silent.close();
        drop(taken.map(|inquiry| inquiry.expect("there is room for it")));
        assert_eq!(third.reason, Some(Reason::Busy), "{third:?}");
    });
    assert_eq!(silent.next(Duration::ZERO).expect_err("closed").kind, ErrorKind::Closed);
}

#[test]
fn without_a_secret_it_is_on_loopback_alone_at_one_port() {
    let mut settings = Settings::default();
    settings.set("log", "off").expect("a setting");
    let listener = MetadataListener::start(&settings, 0).expect("a listener");
    let addresses = listener.addresses();
    assert!(addresses.iter().all(|at| at.ip().is_loopback() && at.port() == addresses[0].port()), "{addresses:?}");
    assert_eq!(addresses.len(), 2, "{addresses:?}");
    let taken = MetadataListener::start(&settings, addresses[0].port()).expect_err("it is taken");
    assert_eq!((taken.kind, taken.reason), (ErrorKind::Usage, Some(Reason::PortInUse)));
}
