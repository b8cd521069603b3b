//! Single lanes against peers that fail, violate the protocol, or disconnect.

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::time::{Duration, Instant};

use common::{Keeper, binding, frame, lane, lane_and_socket, poll_to_error, poll_until, streams, wire};
use crossrail_tcp::{dial, listen};
use crossrail_transport::{Lane, LaneError, Post};
use crossrail_types::{ErrorKind, HEAD_LEN, Head};
use socket2::SockRef;

#[test]
fn each_rail_uses_its_own_source_address() {
    for from in ["127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5"] {
        let (dialled, accepted) = streams(from, "127.0.0.2");
        assert_eq!(accepted.peer_addr().expect("connected").ip().to_string(), from);
        assert_eq!(dialled.local_addr().expect("connected").ip().to_string(), from);
    }
}

#[test]
fn both_ends_of_a_connection_within_one_machine_are_made_without_bbr() {
    for address in ["127.0.0.1", "127.0.0.2", "::1"] {
        let (dialled, accepted) = streams(address, address);
        for end in [&dialled, &accepted] {
            let name = SockRef::from(end).tcp_congestion().expect("a connection");
            let name = String::from_utf8_lossy(&name);
            assert!(["cubic", "reno"].contains(&name.trim_end_matches('\0')), "{address}: {name}");
        }
    }
}

#[test]
fn errors_of_listen_and_dial_have_hints() {
    let first = listen(&binding("127.0.0.1"), 0).expect("a free port");
    let taken = first.local_addr().expect("bound");
    let error = listen(&binding("127.0.0.1"), taken.port()).expect_err("the port is taken");
    assert_eq!(error.kind, ErrorKind::Usage);
    assert!(error.to_string().contains(&taken.to_string()) && error.hint.is_some(), "{error}");

    let error = listen(&binding("198.51.100.7"), 0).expect_err("not our address");
    assert_eq!(error.kind, ErrorKind::Usage, "{error}");

    drop(first);
    let soon = || Instant::now() + Duration::from_secs(2);
    let error = dial(Some(&binding("127.0.0.3")), taken, soon()).expect_err("nobody listens");
    assert_eq!(error.kind, ErrorKind::Unreachable);
    assert!(error.to_string().contains("127.0.0.3") && error.to_string().contains(&taken.to_string()), "{error}");

    let error = dial(Some(&binding("::1")), taken, soon()).expect_err("two families");
    assert_eq!(error.kind, ErrorKind::Usage, "{error}");

    let error = dial(None, taken, Instant::now()).expect_err("no time");
    assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
}

#[test]
fn dial_times_out_without_a_response() {
    // A listener with a full queue drops connection requests, like a black hole.
    let listener = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("socket");
    let any: SocketAddr = "127.0.0.1:0".parse().expect("an address");
    listener.bind(&any.into()).expect("bind");
    listener.listen(0).expect("listen");
    let to = listener.local_addr().expect("bound").as_socket().expect("IPv4");
    let start = Instant::now();
    let mut held = Vec::new();
    let error = loop {
        match dial(None, to, Instant::now() + Duration::from_millis(200)) {
            Ok(stream) => held.push(stream),
            Err(error) => break error,
        }
        assert!(held.len() < 16, "the queue never fills");
    };
    assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
}

#[test]
fn fragmented_frames_are_reassembled() {
    let (mut lane, mut peer) = lane_and_socket();
    let mut sink = Keeper::default();
    let bytes: Vec<u8> = [wire(b"one"), wire(b""), wire(&[7; 300])].concat();
    for (count, byte) in bytes.iter().enumerate() {
        peer.write_all(std::slice::from_ref(byte)).expect("the lane is there");
        let complete = [35, 67, bytes.len()].iter().filter(|end| **end <= count + 1).count();
        poll_until(&mut lane, &mut sink, |sink| sink.placed >= complete);
        assert_eq!(sink.placed, complete, "after {} bytes", count + 1);
    }
    assert_eq!(sink.places, [b"one".to_vec(), Vec::new(), vec![7; 300]]);
    assert_eq!(lane.stats().rx_bytes, bytes.len() as u64);
}

/// A bounce slot is used again once its lane has ended, before the peer has read what the kernel holds.
#[test]
fn memory_that_is_reused_is_not_sent_by_reference() {
    let (mut lane, mut socket) = lane_and_socket();
    let mut bytes = vec![7u8; 128 << 10];
    let mut tx = frame(&bytes);
    tx.payload.reused = true;
    let mut sink = Keeper { queue: [tx].into(), ..Keeper::default() };
    poll_until(&mut lane, &mut sink, |sink| sink.sent == 1);
    bytes.fill(9);
    drop(lane);
    let mut read = Vec::new();
    socket.read_to_end(&mut read).expect("all of it");
    assert_eq!(read.len(), HEAD_LEN + bytes.len());
    assert!(read[HEAD_LEN..].iter().all(|byte| *byte == 7), "the kernel referred to the memory");
}

#[test]
fn a_close_inside_a_frame_is_reported_as_such() {
    for cut in [1, 31, 32, 40] {
        let (mut lane, mut peer) = lane_and_socket();
        let mut sink = Keeper::default();
        peer.write_all(&[wire(b"whole"), wire(&[1; 100])[..cut].to_vec()].concat()).expect("the lane is there");
        peer.shutdown(Shutdown::Write).expect("connected");
        let error = poll_to_error(&mut lane, &mut sink);
        assert!(matches!(&error, LaneError::Closed(why) if why.contains("inside a frame")), "{cut}: {error}");
        assert_eq!((sink.placed, &sink.places[0][..]), (1, &b"whole"[..]));
        assert_eq!(lane.poll(&mut sink, 1, true), Err(error), "an error is final");
    }
}

#[test]
fn oversized_lengths_are_rejected_before_the_sink_is_asked() {
    for len in [u32::MAX, 1 << 31, (1 << 30) + 1] {
        let (mut lane, mut peer) = lane_and_socket();
        let mut sink = Keeper::default();
        peer.write_all(&Head::new(1, len).0).expect("the lane is there");
        let error = poll_to_error(&mut lane, &mut sink);
        assert!(matches!(&error, LaneError::Protocol(why) if why.contains(&len.to_string())), "{error}");
        assert!(sink.places.is_empty());
    }
}

#[test]
fn garbage_fails_the_lane_and_stays_inside_the_destinations() {
    let mut state = 0x2545_F491_4F6C_DD1D_u64;
    for _ in 0..50 {
        let (mut lane, mut peer) = lane_and_socket();
        let mut sink = Keeper::default();
        let mut bytes = vec![0u8; 20_000];
        for byte in &mut bytes {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            *byte = state as u8;
        }
        peer.write_all(&bytes).expect("the socket takes this much");
        peer.shutdown(Shutdown::Write).expect("connected");
        match poll_to_error(&mut lane, &mut sink) {
            LaneError::Protocol(_) | LaneError::Closed(_) => {}
            LaneError::Down(why) | LaneError::Corrupt(why) | LaneError::Memory(why) => {
                panic!("not the peer's fault: {why}")
            }
        }
    }
}

#[test]
fn a_reset_is_reported_with_its_code_after_received_data() {
    let (mut lane, mut peer) = lane_and_socket();
    let mut sink = Keeper::default();
    peer.write_all(&[wire(b"whole"), wire(&[1; 1000])[..500].to_vec()].concat()).expect("the lane is there");
    SockRef::from(&peer).set_linger(Some(Duration::ZERO)).expect("linger");
    drop(peer);
    let error = poll_to_error(&mut lane, &mut sink);
    assert!(matches!(&error, LaneError::Closed(why) if why.contains("ECONNRESET")), "{error}");
    assert_eq!(sink.placed, 1);
    assert_eq!(sink.places[0], b"whole");
}

#[test]
fn a_post_to_a_dead_peer_does_not_lose_received_data() {
    let (mut lane, mut peer) = lane_and_socket();
    let mut sink = Keeper::default();
    peer.write_all(&wire(b"last words")).expect("the lane is there");
    SockRef::from(&peer).set_linger(Some(Duration::ZERO)).expect("linger");
    drop(peer);
    assert_eq!(lane.post(&frame(b"too late")), Ok(Post::Full));
    assert_eq!(lane.post(&frame(b"too late")), Ok(Post::Full));
    let error = poll_to_error(&mut lane, &mut sink);
    assert!(matches!(&error, LaneError::Closed(why) if why.contains("ECONNRESET")), "{error}");
    assert_eq!(sink.places, [b"last words".to_vec()]);
}

#[test]
fn short_frames_are_pushed_together() {
    let (mut lane, mut peer) = lane_and_socket();
    let payloads = [vec![1; 36], vec![2; 4], vec![], vec![3; 36], vec![4; 576]];
    let mut sink = Keeper::default();
    sink.queue.extend(payloads.iter().map(|payload| frame(payload)));
    assert!(lane.push(&mut sink, 1 << 20));
    assert_eq!(sink.sent, payloads.len());
    let mut bytes = vec![0; 1 << 16];
    // One segment: otherwise the first read is shorter.
    let len = peer.read(&mut bytes).expect("what was pushed");
    assert_eq!(bytes[..len], payloads.iter().flat_map(|payload| wire(payload)).collect::<Vec<_>>());
}

#[test]
fn a_slow_rail_accepts_little_more_than_it_can_send() {
    let (mut lane, peer) = lane_and_socket();
    SockRef::from(&peer).set_recv_buffer_size(64 * 1024).expect("before any data");
    let chunk = vec![1u8; 256 * 1024];
    let mut sink = Keeper::default();
    sink.queue.extend((0..256).map(|_| frame(&chunk)));
    while lane.poll(&mut sink, 1 << 20, true).expect("the peer is there") {}
    assert!(sink.queue.len() > 200, "{} of 256 frames left: the kernel holds the others", sink.queue.len());
    assert!(lane.info().notsent_bytes < 512 * 1024, "{:?}", lane.info());
}

#[test]
fn data_waiting_for_a_full_peers_window_is_not_in_flight() {
    let (mut lane, peer) = lane_and_socket();
    let chunk = vec![1u8; 1 << 20];
    let mut sink = Keeper::default();
    sink.queue.extend((0..64).map(|_| frame(&chunk)));
    let start = Instant::now();
    let full = loop {
        lane.poll(&mut sink, 1 << 20, true).expect("the peer is there");
        let stats = lane.stats();
        if stats.acked_bytes > 0 && stats.acked_bytes < stats.tx_bytes && stats.in_flight_bytes == 0 {
            break stats;
        }
        assert!(start.elapsed() < common::PATIENCE, "{stats:?}, {:?}", lane.info());
    };
    assert!(lane.info().notsent_bytes > 0, "{full:?}, {:?}", lane.info());
    drop(peer);
}

#[test]
fn info_reports_statistics() {
    let (dialled, accepted) = streams("127.0.0.1", "127.0.0.1");
    let (mut a, mut b) = (lane(dialled), lane(accepted));
    let payload = vec![3u8; 100_000];
    let (mut of_a, mut of_b) = (Keeper::default(), Keeper::default());
    of_a.queue.push_back(frame(&payload));
    let start = Instant::now();
    while of_b.placed == 0 || a.stats().acked_bytes < 100_032 {
        a.poll(&mut of_a, 1 << 20, true).expect("up");
        b.poll(&mut of_b, 1 << 20, true).expect("up");
        assert!(start.elapsed() < common::PATIENCE, "{:?}", a.stats());
    }
    assert_eq!(of_b.places[0], payload);
    assert_eq!((of_a.sent, a.stats().tx_bytes, b.stats().rx_bytes), (1, 100_032, 100_032));
    assert_eq!(a.stats().in_flight_bytes, 0, "all has been acknowledged");
    let info = a.info();
    assert!(info.bytes_acked >= 100_032 && info.rtt_us > 0 && info.segment_size >= 1000, "{info:?}");
}
