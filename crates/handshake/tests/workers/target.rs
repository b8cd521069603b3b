//! What users pass in: addresses, host:port, secrets.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;

use crossrail_handshake::wire::{
    Challenge, Confirm, HelloHead, LaneHello, Proof, REJECT_TEXT_MAX, Reject, RejectCode, Reply, WORKER, decode_hello,
};
use crossrail_handshake::{ADDRESS_MAX, Address, Secret, Target, UserToken};
use crossrail_types::ErrorKind;

use crate::support::{Descriptors, identity, in_secs};

fn address() -> Address {
    Address {
        worker: [1; 16],
        name: "host:42".to_owned(),
        boot_id: "0f1e".to_owned(),
        token: [9; 16],
        unix: Some("crossrail.0f".to_owned()),
        control: vec!["127.0.0.1:4000".parse().unwrap(), "[fe80::1]:4001".parse().unwrap()],
    }
}

#[test]
fn an_address_survives_and_its_damage_is_seen() {
    let address = address();
    let bytes = address.encode();
    assert_eq!(Address::decode(&bytes).unwrap(), address);
    assert!(matches!(Target::parse(&bytes, 1, in_secs(1.0)).unwrap(), Target::Worker(a) if a == address));
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1 << bit;
            let error = Address::decode(&damaged).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Usage, "byte {at}: {error}");
        }
        let error = Address::decode(&bytes[..at]).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Usage, "{error}");
    }
    let mut longer = bytes.clone();
    longer.push(0);
    assert!(Address::decode(&longer).unwrap_err().detail.contains("damaged"));
    let mut newer = bytes;
    newer[4] = 2;
    assert!(Address::decode(&newer).unwrap_err().detail.contains("version 2"));
    assert!(Address::decode(&vec![0xc5; ADDRESS_MAX + 1]).unwrap_err().detail.contains("too many"));
    assert!(!format!("{address:?}").contains('9'), "the token shows");
}

#[test]
fn text_targets() {
    let _fds = Descriptors::watch();
    let parse = |text: &str| Target::parse(text.as_bytes(), 7000, in_secs(30.0));
    let cases = [
        ("127.0.0.1:80", "127.0.0.1:80"),
        (" 127.0.0.1 ", "127.0.0.1:7000"),
        ("[::1]:80", "[::1]:80"),
        ("[::1]", "[::1]:7000"),
        ("::1", "[::1]:7000"),
    ];
    for (text, expected) in cases {
        let expected: SocketAddr = expected.parse().unwrap();
        assert_eq!(parse(text).unwrap(), Target::Control(vec![expected]), "{text}");
    }
    match parse("[fe80::1%lo]:80").unwrap() {
        Target::Control(list) => assert!(matches!(list[..], [SocketAddr::V6(v6)] if v6.scope_id() == 1)),
        other => panic!("{other:?}"),
    }
    match parse("localhost:80").unwrap() {
        Target::Control(list) => assert!(list.iter().all(|a| a.ip().is_loopback() && a.port() == 80), "{list:?}"),
        other => panic!("{other:?}"),
    }
    for text in [
        "",
        " ",
        ":80",
        "host:",
        "host:0",
        "host:65536",
        "host:x",
        "[::1",
        "[::1]x",
        "[::1]:",
        "1::2::3",
        "a\nb",
        "7471",
        "7471:80",
    ] {
        let error = parse(text).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Usage, "{text:?}: {error}");
    }
    assert_eq!(Target::parse(&[0xff, 0xfe], 1, in_secs(1.0)).unwrap_err().kind, ErrorKind::Usage);
    assert_eq!(parse("no-such-host.invalid:1").unwrap_err().kind, ErrorKind::Unreachable);
}

#[test]
fn secrets_from_text_and_file() {
    let _fds = Descriptors::watch();
    let directory = std::env::temp_dir().join(format!("crossrail-meet-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let file = directory.join("secret");
    let write = |text: &str, mode: u32| {
        std::fs::write(&file, text).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    write("0123456789abcdef\n", 0o600);
    let expected = Secret::Shared(b"0123456789abcdef".to_vec());
    assert_eq!(Secret::load(None, Some(&file)).unwrap(), (expected.clone(), Vec::new()));
    assert_eq!(Secret::load(Some(b"0123456789abcdef"), None).unwrap(), (expected.clone(), Vec::new()));
    assert_eq!(Secret::load(None, None).unwrap(), (Secret::User(UserToken::of_this_user()), Vec::new()));
    assert!(!format!("{expected:?}").contains("0123"));
    write("0123456789abcdef\n", 0o644);
    let (_, warnings) = Secret::load(None, Some(&file)).unwrap();
    assert!(matches!(&warnings[..], [one] if one.contains("chmod 600")), "{warnings:?}");
    let (_, warnings) = Secret::load(Some(b"short"), None).unwrap();
    assert!(matches!(&warnings[..], [one] if one.contains("5 bytes")), "{warnings:?}");
    write("\n", 0o600);
    let too_long = directory.join("long");
    std::fs::write(&too_long, vec![b'x'; 70_000]).unwrap();
    let missing = directory.join("missing");
    let failing = [
        Secret::load(None, Some(&file)),
        Secret::load(Some(b""), None),
        Secret::load(Some(b"x"), Some(&file)),
        Secret::load(None, Some(&too_long)),
        Secret::load(None, Some(&missing)),
        Secret::load(None, Some(&directory)),
    ];
    for result in failing {
        assert_eq!(result.unwrap_err().kind, ErrorKind::Config);
    }
    // No process writes into it: opening it as a file would wait for ever.
    let pipe = directory.join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRUSR | nix::sys::stat::Mode::S_IWUSR).unwrap();
    let error = Secret::load(None, Some(&pipe)).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Config, "{error}");
    assert!(error.detail.contains("pipe is no regular file"), "{error}");
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn rejects_carry_any_text_as_one_harmless_line() {
    let text = "ä".repeat(REJECT_TEXT_MAX);
    let reject = Reject::decode(&WORKER, &Reject::new(RejectCode::Busy, text).encode(&WORKER)).unwrap();
    assert_eq!(reject.text, "ä".repeat(REJECT_TEXT_MAX / 2));
    let text = "one\n\x1b[31mtwo".to_owned();
    let reject = Reject::decode(&WORKER, &Reject::new(RejectCode::Busy, text).encode(&WORKER)).unwrap();
    assert_eq!(reject.text, "one\u{fffd}\u{fffd}[31mtwo");
}

#[test]
fn a_hello_with_control_characters_or_too_much_is_refused() {
    let _fds = Descriptors::watch();
    let good = identity("host:1", Secret::None).hello;
    assert_eq!(decode_hello(&good.encode().unwrap()).unwrap(), good);
    let mut bad = good.clone();
    bad.name = "a\x1b]0;b".to_owned();
    assert!(bad.encode().is_err());
    let mut bad = good.clone();
    bad.transports = vec!["x".to_owned(); 129];
    assert!(bad.encode().is_err());
    let mut bad = good;
    bad.chunk = 0;
    assert!(bad.encode().is_err());
}

#[test]
fn decoders_take_anything() {
    let mut state = 1_u64;
    let mut bytes = [0_u8; 300];
    for round in 0..20_000_usize {
        for byte in &mut bytes {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            *byte = (state >> 56) as u8;
        }
        // Most of them get past the magic.
        if round % 8 != 0 {
            bytes[..6].copy_from_slice(&WORKER.magic);
            bytes[6] = (round % 8) as u8;
            bytes[7] = 0;
        }
        for length in [64, 80, 96, 40, 48, 256, 8, round % 300] {
            let bytes = &bytes[..length];
            let decoded = [
                Challenge::decode(&WORKER, bytes).map(|x| x.encode(&WORKER)),
                Reply::decode(&WORKER, bytes).map(|x| x.encode(&WORKER).to_vec()),
                LaneHello::decode(bytes).map(|x| x.encode().to_vec()),
                HelloHead::decode(bytes).map(|x| x.encode().to_vec()),
            ];
            // What decodes encodes to as many bytes.
            assert!(decoded.iter().flatten().all(|encoded| encoded.len() == length));
            let _ = Proof::decode(&WORKER, bytes);
            let _ = Confirm::decode(&WORKER, bytes);
            let _ = Reject::decode(&WORKER, bytes);
            let _ = decode_hello(bytes);
            let _ = Address::decode(bytes);
        }
    }
}
