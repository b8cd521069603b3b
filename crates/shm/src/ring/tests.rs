use crossrail_transport::Loan;

use super::*;

fn ends(ring: usize) -> (Arc<Control>, Producer, Consumer) {
    let (control, _fd) = Control::create(ring).expect("a control segment");
    let control = Arc::new(control);
    let producer = Producer::new(&control, 0).expect("mapped");
    let consumer = Consumer::new(&control, 0).expect("mapped");
    (control, producer, consumer)
}

fn push(producer: &mut Producer, bytes: &[u8]) -> bool {
    let payload = Payload { ptr: bytes.as_ptr(), len: bytes.len(), ..Payload::EMPTY };
    producer.push(&Head::new(5, bytes.len() as u32), &payload).expect("the consumer is honest")
}

fn peek(consumer: &Consumer) -> Result<Option<Frame>, LaneError> {
    if consumer.is_ready()? { consumer.frame().map(Some) } else { Ok(None) }
}

fn pop(consumer: &mut Consumer) -> Option<Vec<u8>> {
    let frame = peek(consumer).expect("the producer is honest")?;
    let mut bytes = vec![0; frame.len];
    // SAFETY: `bytes` has `frame.len` bytes; the frame is released after this.
    unsafe { frame.copy_to(bytes.as_mut_ptr(), 0, frame.len) };
    consumer.release(&frame);
    Some(bytes)
}

#[test]
fn every_inline_length_is_kept() {
    let (_control, mut producer, mut consumer) = ends(*RING_RANGE.start());
    for len in 0..=40u8 {
        let bytes: Vec<u8> = (1..=len).collect();
        assert!(push(&mut producer, &bytes));
        assert_eq!(pop(&mut consumer), Some(bytes));
    }
}

#[test]
fn a_full_ring_takes_nothing_until_the_consumer_says_so() {
    let (_control, mut producer, mut consumer) = ends(*RING_RANGE.start());
    for round in 0..5 {
        let mut count = 0;
        while push(&mut producer, &[round; 8]) {
            count += 1;
        }
        assert_eq!(count, SLOTS);
        while let Some(bytes) = pop(&mut consumer) {
            assert_eq!(bytes, [round; 8]);
            count -= 1;
        }
        assert_eq!(count, 0);
        assert!(!push(&mut producer, &[]), "nothing was published");
        consumer.publish();
    }
}

#[test]
fn half_of_a_ring_is_what_the_consumer_has_read() {
    for (ring, whole) in [(2 << 20, 1 << 20), (1 << 20, 512 << 10), (256 << 10, 128 << 10), (128 << 10, 128 << 10)] {
        let (_control, mut producer, mut consumer) = ends(ring);
        for round in 0..5 {
            let mut count = 0;
            while push(&mut producer, &[round; MAX_PAYLOAD]) {
                count += 1;
            }
            assert_eq!(count, whole / MAX_PAYLOAD, "of a ring of {ring} bytes");
            while pop(&mut consumer).is_some() {}
            consumer.publish();
        }
        // What an empty ring's end leaves no room for goes to its start.
        for len in [64, MAX_PAYLOAD].repeat(40) {
            assert!(producer.room() == Ok(true) && push(&mut producer, &vec![1; len]), "{len} into a ring of {ring}");
            assert_eq!(pop(&mut consumer).map(|bytes| bytes.len()), Some(len));
            consumer.publish();
        }
    }
}

#[test]
fn large_payloads_never_wrap_nor_overlap() {
    let (_control, mut producer, mut consumer) = ends(*RING_RANGE.start());
    let (mut sent, mut heard) = (0usize, 0usize);
    let shape = |i: usize| vec![i as u8; 25 + i * 7919 % (MAX_PAYLOAD - 24)];
    while heard < 3_000 {
        while push(&mut producer, &shape(sent)) {
            sent += 1;
        }
        assert!(sent > heard, "stuck at {sent}");
        for _ in 0..=sent % 3 {
            if let Some(bytes) = pop(&mut consumer) {
                assert!(bytes == shape(heard), "frame {heard}");
                heard += 1;
            }
        }
        consumer.publish();
    }
}

#[test]
fn a_revoked_payload_becomes_filler_of_the_same_length() {
    let (_control, mut producer, mut consumer) = ends(*RING_RANGE.start());
    for len in [8usize, 1000] {
        let bytes = vec![7; len];
        let grant = Arc::new(Loan::default());
        grant.recall();
        let payload = Payload { ptr: bytes.as_ptr(), len, grant: Some(grant), ..Payload::EMPTY };
        assert_eq!(producer.push(&Head::new(5, len as u32), &payload), Ok(true));
        assert_eq!(pop(&mut consumer), Some(vec![0; len]));
    }
}

fn violation<T>(result: Result<T, LaneError>) -> String {
    match result {
        Err(LaneError::Protocol(why)) => why,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("believed"),
    }
}

#[test]
fn lengths_and_numbers_of_a_hostile_peer_are_not_believed() {
    for len in [MAX_PAYLOAD as u32 + 1, 1 << 31, u32::MAX] {
        let (control, _producer, consumer) = ends(*RING_RANGE.start());
        let slot = &control.fixed().slots[0][0];
        slot.words[0].store(u64::from(len) << 32, Ordering::Relaxed);
        slot.seq.store(1, Ordering::Release);
        assert!(violation(peek(&consumer)).contains(&len.to_string()));
    }
    for seq in [2, SLOTS as u64 + 1, u64::MAX] {
        let (control, _producer, consumer) = ends(*RING_RANGE.start());
        control.fixed().slots[0][0].seq.store(seq, Ordering::Release);
        assert!(consumer.has_next(), "so that a sleeper looks");
        assert!(violation(peek(&consumer)).contains(&seq.to_string()));
    }
    for consumed in [SLOTS as u64 + 1, u64::MAX] {
        let (control, mut producer, _consumer) = ends(*RING_RANGE.start());
        while push(&mut producer, &[]) {}
        control.fixed().consumed[0].0.store(consumed, Ordering::Release);
        assert!(violation(producer.push(&Head::new(5, 0), &Payload::EMPTY)).contains(&consumed.to_string()));
    }
    let (control, mut producer, _consumer) = ends(*RING_RANGE.start());
    while push(&mut producer, &[]) {}
    control.fixed().consumed[0].0.store(9, Ordering::Release);
    while push(&mut producer, &[]) {}
    control.fixed().consumed[0].0.store(8, Ordering::Release);
    assert!(violation(producer.room()).contains("it had 9 before"));
}

#[test]
fn a_payload_that_no_lane_carries_is_an_error() {
    let (_control, mut producer, _consumer) = ends(*RING_RANGE.start());
    let bytes = vec![0; MAX_PAYLOAD + 1];
    let payload = Payload { ptr: bytes.as_ptr(), len: bytes.len(), ..Payload::EMPTY };
    violation(producer.push(&Head::new(5, bytes.len() as u32), &payload));
}
