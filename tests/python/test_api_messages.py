"""Two-sided messages: sizes, tags, order, unexpected, truncated, batches."""

from __future__ import annotations

import random

import pytest
from pairs import Pair

import crossrail

SIZES = [0, 1, 7, 8, 63, 64, 65, 255, 1000, 4095, 4096, 8191, 8192, 8193, 16384, 65535, 65536, 65537, 262147]
LARGE = [1 << 20, (1 << 20) + 13, (4 << 20) - 1, 4 << 20, (4 << 20) + 4097]


def data(size: int, seed: int = 1) -> bytes:
    return random.Random(seed * 1_000_003 + size).randbytes(size)


def same(received: object, sent: bytes) -> bool:
    """Plain equality, without pytest's slow account of megabytes that differ."""
    return bytes(received) == sent  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("memory", ["ordinary", "shared"])
def test_every_size_arrives_whole(pair: Pair, memory: str) -> None:
    for size in SIZES + LARGE:
        sent = data(size)
        if memory == "shared":
            source, target = pair.context.alloc(max(size, 1)), pair.context.alloc(max(size, 1))
            memoryview(source)[:size] = sent
            out, into = memoryview(source)[:size], memoryview(target)[:size]
        else:
            out, into = memoryview(sent), memoryview(bytearray(size))
        inbound = pair.b.recv(into, tag=size)
        outbound = pair.to_b.send(out, tag=size)
        receipt = inbound.wait()
        assert outbound.wait().bytes == receipt.bytes == size
        assert receipt.tag == size and receipt.peer == "a"
        assert same(into, sent), size
        assert sum(lane["bytes"] for lane in receipt.lanes) == size or size == 0


def test_a_larger_buffer_keeps_its_tail(pair: Pair) -> None:
    for size in (3, 100_000):
        into = bytearray(b"\xee" * (size + 10))
        inbound = pair.b.recv(into)
        pair.to_b.send(data(size)).wait()
        assert inbound.wait().bytes == size
        assert same(into, data(size) + b"\xee" * 10)


def test_both_directions_at_once(pair: Pair) -> None:
    size = 3_000_001
    ways = [(pair.to_b, pair.b, 1), (pair.to_a, pair.a, 2)]
    inboxes = [bytearray(size), bytearray(size)]
    requests = [worker.recv(into) for (_, worker, _), into in zip(ways, inboxes, strict=True)]
    requests += [endpoint.send(data(size, seed)) for endpoint, _, seed in ways]
    crossrail.wait_all(requests)
    assert same(inboxes[0], data(size, 1)) and same(inboxes[1], data(size, 2))


def test_tags_and_masks_choose_the_message(pair: Pair) -> None:
    first, second, third = bytearray(1), bytearray(1), bytearray(1)
    high = 0xFFFF_FFFF_0000_0000
    for_two = pair.b.recv(first, tag=2)
    for_class = pair.b.recv(second, tag=0x7_0000_0000, mask=high)
    for_any = pair.b.recv(third, mask=0)
    sends = [
        pair.to_b.send(b"x", tag=0x7_0000_0063),
        pair.to_b.send(b"y", tag=2),
        pair.to_b.send(b"z", tag=2**64 - 1),
    ]
    assert for_two.wait().tag == 2 and first == b"y"
    assert for_class.wait().tag == 0x7_0000_0063 and second == b"x"
    assert for_any.wait().tag == 2**64 - 1 and third == b"z"
    crossrail.wait_all(sends)


def test_unexpected_messages_wait_and_keep_their_order(pair: Pair) -> None:
    texts = [data(size, size) for size in (5, 0, 3000, 200_000, 9, 1_500_000)]
    sends = [pair.to_b.send(text, tag=4) for text in texts]
    # Something sent later has arrived, so all of them are unexpected now.
    marker = pair.b.recv(bytearray(1), tag=5)
    pair.to_b.send(b"!", tag=5)
    marker.wait()
    for text in texts:
        into = bytearray(2_000_000)
        assert pair.b.recv(into, tag=4).wait().bytes == len(text)
        assert same(into[: len(text)], text)
    crossrail.wait_all(sends)


def test_a_receive_from_one_peer_ignores_the_other(connected) -> None:  # type: ignore[no-untyped-def]
    pair = connected()
    third = crossrail.Worker(pair.context, name="c")
    with third:
        from_c_endpoint = third.connect(pair.b.address())
        to_c = pair.b.accept()
        into_a, into_c = bytearray(1), bytearray(1)
        from_c = pair.b.recv(into_c, source=to_c)
        from_a = pair.b.recv(into_a, source=pair.to_a)
        pair.to_b.send(b"a").wait()
        assert from_a.wait().peer == "a" and into_a == b"a"
        assert not from_c.is_done()
        from_c_endpoint.send(b"c").wait()
        assert from_c.wait().peer == "c" and into_c == b"c"


@pytest.mark.parametrize("size", [9, 5000, 100_000, 3 << 20])
@pytest.mark.parametrize("posted", ["before", "after"])
def test_a_buffer_too_short_fails_at_both_ends(pair: Pair, size: int, posted: str) -> None:
    short = bytearray(b"\xaa" * (size - 1))
    inbound = pair.b.recv(short, tag=1) if posted == "before" else None
    outbound = pair.to_b.send(data(size), tag=1)
    inbound = inbound or pair.b.recv(short, tag=1)
    for request in (inbound, outbound):
        with pytest.raises(crossrail.TruncatedError) as caught:
            request.wait()
        assert str(size) in str(caught.value) and str(size - 1) in str(caught.value)
    # The endpoint goes on.
    after = pair.b.recv(bytearray(2))
    pair.to_b.send(b"ok").wait()
    assert after.wait().bytes == 2


def test_a_batch_is_one_request(pair: Pair) -> None:
    target, mirror = bytearray(1000), bytearray(b"m" * 1000)
    region, other = pair.b.register(target), pair.b.register(mirror)
    into, back = bytearray(10), bytearray(1000)
    inbound = pair.b.recv(into, tag=1)
    answer = pair.to_a.send(b"answer", tag=2)
    got = bytearray(6)
    receipt = pair.to_b.batch(
        [
            ("send", b"0123456789", 1),
            ("recv", got, 2, crossrail.ALL_BITS),
            ("write", b"w" * 100, region.key(), 50, 9),
            ("read", back, other.key(), 0),
        ]
    ).wait()
    assert receipt.protocol == "batch"
    carried = receipt.lanes
    assert sum(lane["bytes"] for lane in carried) == receipt.bytes == 10 + 6 + 100 + 1000
    assert len({lane["name"] for lane in carried}) == len(carried) and all(lane["name"] for lane in carried)
    assert inbound.wait().bytes == 10 and into == b"0123456789"
    answer.wait()
    assert got == b"answer" and back == mirror and target[50:150] == b"w" * 100 and region.imm_count(9) == 1
    assert pair.to_b.batch([]).wait().bytes == 0
    region.deregister()
    other.deregister()


def test_a_batch_fails_with_its_first_failure_and_still_does_the_rest(pair: Pair) -> None:
    target = bytearray(10)
    region = pair.b.register(target)
    request = pair.to_b.batch([("write", b"1234", region.key(), 8, None), ("write", b"56", region.key(), 0, None)])
    with pytest.raises(crossrail.RegionError):
        request.wait()
    assert target[:2] == b"56"
    region.deregister()


@pytest.mark.parametrize(
    "operation",
    [("send", b""), ("fly", b"", 1), ("write", b"", b"no key", 0, None), ["send", b"", 1], 7],
)
def test_a_malformed_batch_starts_nothing(shm: Pair, operation: object) -> None:
    with pytest.raises(crossrail.UsageError, match="no operation"):
        shm.to_b.batch([("send", b"x", 77), operation])  # type: ignore[list-item]
    with pytest.raises(crossrail.TimeoutError):
        request = shm.b.recv(bytearray(1), tag=77)
        try:
            request.wait(0.05)
        finally:
            request.cancel()


def test_many_small_messages_in_flight(pair: Pair) -> None:
    count = 3000
    inboxes = [bytearray(8) for _ in range(count)]
    inbound = [pair.b.recv(inbox, tag=3) for inbox in inboxes]
    outbound = [pair.to_b.send(number.to_bytes(8, "little"), tag=3) for number in range(count)]
    crossrail.wait_all(outbound)
    crossrail.wait_all(inbound)
    assert [int.from_bytes(inbox, "little") for inbox in inboxes] == list(range(count))


def test_messages_that_nobody_receives_are_named_when_others_wait_behind_them(pair: Pair) -> None:
    """A peer holds a bounded number of them; the errors on both sides name what is in the way."""
    unmatched = [pair.to_b.send(b"12345678", tag=1) for _ in range(5000)]
    inbound, outbound = pair.b.recv(bytearray(8), tag=2), pair.to_b.send(b"87654321", tag=2)
    with pytest.raises(crossrail.TimeoutError, match=r"\d+ messages that do not match it wait to be received"):
        inbound.wait(0.5)
    with pytest.raises(crossrail.TimeoutError, match=r"\d+ operations with the peer are in flight; it accepts 4096"):
        outbound.wait(0.1)
    crossrail.wait_all([pair.b.recv(bytearray(8), tag=1) for _ in unmatched])
    assert inbound.wait().bytes == outbound.wait().bytes == 8
    crossrail.wait_all(unmatched)
