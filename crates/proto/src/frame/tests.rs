//! Heads of frames, written and read.

use super::*;

#[test]
fn a_void_chunk_has_no_payload() {
    let target = Target { index: 3, serial: 4 };
    let chunk = |void| Frame::Chunk { target, offset: 5, from: 6, again: true, void, unasked: false, lane: 7 };
    let head = void(&encode_head(&chunk(false), 700));
    assert_eq!((head.payload_len(), decode_head(&head)), (0, Ok(chunk(true))));
}

#[test]
fn the_short_way_writes_what_the_long_way_reads() {
    let stamp = Stamp { seq: 0x0102_0304, ack: 0x0506_0708, epoch: 0x090a };
    let (op, tag, counted) = (0x0b0c_0d0e_u32, 0x1122_3344_5566_7788_u64, true);
    let head = eager(op, tag, 300, stamp, 77, counted);
    let mut long_way = encode_head(&Frame::Eager { op, tag, counted }, 300);
    stamp.put(&mut long_way, 77);
    assert_eq!(head, long_way);
    assert_eq!(Stamp::of(&head), stamp);
    assert_eq!(as_eager(&head), Some(EagerHead { op, tag, done: 77, counted }));
    assert_eq!(as_ack(&head), None);
    assert_eq!(as_eager(&encode_head(&Frame::Bye, 0)), None);
}
