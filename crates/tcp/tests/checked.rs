//! Lanes with checksums, and a middle that changes bytes on their way.

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};

use common::{Keeper, frame, poll_to_error, poll_until, streams};
use crossrail_tcp::{CheckedLane, Options};
use crossrail_transport::{Lane, LaneError};
use crossrail_types::LaneId;

fn checked(stream: TcpStream) -> CheckedLane {
    CheckedLane::checked(stream, LaneId(1), "tcp/test".into(), &Options::default()).expect("options")
}

/// What a lane sends for these payloads.
fn sent(payloads: &[Vec<u8>]) -> Vec<u8> {
    let (dialled, mut accepted) = streams("127.0.0.1", "127.0.0.1");
    let reader = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        accepted.read_to_end(&mut bytes).expect("a connection");
        bytes
    });
    let mut lane = checked(dialled);
    let mut sink = Keeper { queue: payloads.iter().map(|payload| frame(payload)).collect(), ..Keeper::default() };
    poll_until(&mut lane, &mut sink, |sink| sink.sent == payloads.len());
    while !lane.arm() {
        lane.poll(&mut sink, 1 << 20, true).expect("a lane that works");
    }
    drop(lane);
    reader.join().expect("no panic")
}

/// What a lane makes of these bytes, and how it ends.
fn received(bytes: &[u8]) -> (Keeper, LaneError) {
    let (mut dialled, accepted) = streams("127.0.0.1", "127.0.0.1");
    let mut lane = checked(accepted);
    let mut sink = Keeper::default();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // The lane closes in the middle of what it refuses.
            if dialled.write_all(bytes).is_ok() {
                let _ = dialled.shutdown(Shutdown::Write);
            }
        });
        let error = poll_to_error(&mut lane, &mut sink);
        drop(lane);
        (sink, error)
    })
}

/// Every byte that was placed is the right one, whether its payload is complete or not.
fn check(sink: &Keeper, payloads: &[Vec<u8>], changed: usize) {
    for (place, payload) in sink.places.iter().zip(payloads) {
        // Payloads have no zeros.
        let right = place.iter().zip(payload).all(|(placed, byte)| *placed == 0 || placed == byte);
        assert!(right && place.len() == payload.len(), "byte {changed} was changed, and a wrong one was placed");
    }
    let whole = sink.places.iter().zip(payloads).filter(|(place, payload)| place == payload).count();
    assert!(sink.placed <= whole, "byte {changed}: {} payloads placed, {whole} are whole", sink.placed);
}

fn payload(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at % 251 + 1) as u8).collect()
}

#[test]
fn whatever_byte_of_short_frames_is_changed_the_lane_ends_and_no_wrong_byte_is_placed() {
    let payloads = [payload(8), payload(1), payload(70)];
    let bytes = sent(&payloads);
    let (sink, error) = received(&bytes);
    assert_eq!((&sink.places[..], sink.placed), (&payloads[..], 3));
    assert!(matches!(error, LaneError::Closed(_)), "{error}");
    for at in 0..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 1 << (at % 8);
        let (sink, error) = received(&changed);
        assert!(matches!(error, LaneError::Corrupt(_)), "byte {at}: {error}");
        check(&sink, &payloads, at);
    }
}

#[test]
fn changes_in_a_stream_of_chunks_are_noticed() {
    let payloads = [payload(150_000), payload(8), payload(65_536), payload(32_756)];
    let bytes = sent(&payloads);
    let (sink, _) = received(&bytes);
    assert_eq!((&sink.places[..], sink.placed), (&payloads[..], 4));
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    for _ in 0..40 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let at = (seed >> 33) as usize % bytes.len();
        let mut changed = bytes.clone();
        match seed >> 20 & 3 {
            0 => drop(changed.remove(at)),
            1 => changed.insert(at, seed as u8),
            _ => changed[at] ^= (seed >> 24) as u8 | 1,
        }
        let (sink, error) = received(&changed);
        // What follows a byte that is missing may end before a record does.
        assert!(matches!(error, LaneError::Corrupt(_) | LaneError::Closed(_)), "byte {at}: {error}");
        assert!(sink.placed < 4, "byte {at}");
        check(&sink, &payloads, at);
    }
}
