//! The store's handshake, with one end made by hand from the wire format alone.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use crossrail_handshake::store::{Greeting, connect};
use crossrail_handshake::wire::{Kind, Reject, STORE};
use crossrail_handshake::{RejectCode, Secret};
use crossrail_types::{ErrorKind, Reason, Result};
use hmac::{Hmac, Mac};
use sha2::Sha256;

const SECRET: &[u8] = b"correct horse battery";

fn secret() -> Secret {
    Secret::Shared(SECRET.to_vec())
}

fn tag(key: &[u8], label: &str, parts: &[&[u8]]) -> [u8; 32] {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).unwrap();
    mac.update(label.as_bytes());
    mac.update(&[0]);
    for part in parts {
        mac.update(&(part.len() as u64).to_le_bytes());
        mac.update(part);
    }
    mac.finalize().into_bytes().into()
}

/// A client's reply of version 1 to `challenge`.
fn reply(challenge: &[u8], flags: u8, key: &[u8]) -> [u8; 80] {
    let mut reply = [0; 80];
    reply[..12].copy_from_slice(b"\xc5XSTOR\x02\0\x01\0\0\0");
    reply[10] = flags;
    reply[16..48].copy_from_slice(&[7; 32]);
    let mac = tag(key, "crossrail store client", &[challenge, &reply[..48]]);
    reply[48..].copy_from_slice(&mac);
    reply
}

#[test]
fn the_store_accepts_a_client_made_by_hand() {
    let greeting = Greeting::new(&secret()).unwrap();
    let challenge = greeting.challenge();
    assert_eq!(challenge[..16], *b"\xc5XSTOR\x01\0\x01\0\x01\0\0\0\0\0");
    assert_eq!(challenge.len(), 48);
    let mut input = reply(challenge, 1, SECRET).to_vec();
    assert!(greeting.check(&secret(), &input[..79]).unwrap().is_none(), "one byte is missing");
    let mac = tag(SECRET, "crossrail store server", &[challenge, &input]);
    input.extend_from_slice(b"frames");
    let proven = greeting.check(&secret(), &input).unwrap().unwrap();
    assert_eq!(proven.used, 80);
    assert_eq!(proven.proof[..8], *b"\xc5XSTOR\x03\0");
    assert_eq!(proven.proof[8..], mac);
}

#[test]
fn the_store_rejects_what_does_not_prove_the_secret() {
    let greeting = Greeting::new(&secret()).unwrap();
    let code = |input: &[u8]| greeting.check(&secret(), input).unwrap_err().code;
    let good = reply(greeting.challenge(), 1, SECRET);
    assert_eq!(code(&reply(greeting.challenge(), 1, b"another secret")), RejectCode::Refused);
    assert_eq!(code(&reply(&[0; 48], 1, SECRET)), RejectCode::Refused, "recorded with another challenge");
    assert_eq!(code(&reply(greeting.challenge(), 0, &[])), RejectCode::Protocol, "without the secret asked for");
    let mut version = good;
    version[8] = 2;
    assert_eq!(code(&version), RejectCode::Mismatch);
    let mut reserved = good;
    reserved[11] = 1;
    assert_eq!(code(&reserved), RejectCode::Protocol);
    assert_eq!(code(b"GET / HT"), RejectCode::Protocol, "from its first bytes on");
    let reject = Reject::new(RejectCode::Full, "no room").encode(&STORE);
    assert_eq!((&reject[..12], reject.len()), (&b"\xc5XSTOR\x04\0\x03\0\x07\0"[..], 256));
}

/// What a client makes of a store that `serve` plays.
fn client(secret: &Secret, serve: impl FnOnce(UnixStream) + Send + 'static) -> Result<()> {
    let (here, there) = UnixStream::pair().unwrap();
    let store = thread::spawn(move || serve(there));
    let result = connect(here.as_fd(), secret, "put", "the store", Instant::now() + Duration::from_secs(10));
    drop(here);
    store.join().unwrap();
    result
}

/// A challenge of the store's, made by hand.
fn challenge(flags: u8) -> [u8; 48] {
    let mut challenge = [9; 48];
    challenge[..16].copy_from_slice(b"\xc5XSTOR\x01\0\x01\0\0\0\0\0\0\0");
    challenge[10] = flags;
    challenge
}

/// Reads a client's reply to that challenge, and proves the store with `key`.
fn prove(mut stream: &UnixStream, key: &[u8]) {
    stream.write_all(&challenge(1)).unwrap();
    let mut reply = [0; 80];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(reply[..16], *b"\xc5XSTOR\x02\0\x01\0\x01\0\0\0\0\0");
    assert_eq!(reply[48..], tag(SECRET, "crossrail store client", &[&challenge(1), &reply[..48]]));
    stream.write_all(b"\xc5XSTOR\x03\0").unwrap();
    stream.write_all(&tag(key, "crossrail store server", &[&challenge(1), &reply])).unwrap();
}

#[test]
fn a_client_accepts_a_store_made_by_hand() {
    client(&secret(), |stream| prove(&stream, SECRET)).unwrap();
}

#[test]
fn a_client_refuses_a_store_that_does_not_prove_the_secret() {
    let error = client(&secret(), |stream| prove(&stream, b"another secret")).unwrap_err();
    assert_eq!((error.kind, error.reason), (ErrorKind::Refused, Some(Reason::SecretWrong)), "{error}");
    assert!(error.hint.is_some_and(|hint| hint.contains("CROSSRAIL_SECRET")));
    for (secret, flags) in [(secret(), 0), (Secret::None, 1)] {
        let error = client(&secret, move |mut stream| {
            stream.write_all(&challenge(flags)).unwrap();
            // The client proves nothing to such a store: it sends its reason.
            let mut said = Vec::new();
            stream.read_to_end(&mut said).unwrap();
            assert_eq!(STORE.decode_prelude(&said), Ok(Kind::Reject));
        });
        let error = error.unwrap_err();
        assert_eq!((error.kind, error.reason), (ErrorKind::Refused, Some(Reason::SecretMissing)), "{error}");
    }
}

#[test]
fn a_rejected_client_reports_the_reason() {
    for (code, kind) in [(RejectCode::Full, ErrorKind::Exhausted), (RejectCode::Refused, ErrorKind::Refused)] {
        let error = client(&secret(), move |mut stream| {
            stream.write_all(&challenge(1)).unwrap();
            stream.read_exact(&mut [0; 80]).unwrap();
            stream.write_all(&Reject::new(code, "for a reason").encode(&STORE)).unwrap();
        });
        let error = error.unwrap_err();
        assert_eq!(error.kind, kind, "{error}");
        assert!(error.detail.contains("for a reason") && error.peer.as_deref() == Some("the store"), "{error}");
    }
}
