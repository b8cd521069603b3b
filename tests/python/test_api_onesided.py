"""Regions: write, read, immediates, keys, bounds, deregistering."""

from __future__ import annotations

import json
import pickle
import random
import threading

import pytest
from pairs import Pair

import crossrail


def data(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@pytest.mark.parametrize("memory", ["ordinary", "shared"])
def test_write_and_read_every_size(pair: Pair, memory: str) -> None:
    whole = 4 << 20
    target = bytearray(whole) if memory == "ordinary" else pair.context.alloc(whole)
    region = pair.b.register(target)
    assert len(region) == len(region.key()) == whole
    seen = memoryview(target).cast("B")
    for size in [0, 1, 8, 4095, 8192, 8193, 65536, 1_000_003, whole]:
        sent = data(size)
        offset = (whole - size) // 3
        assert pair.to_b.write(sent, region.key(), offset).wait().bytes == size
        assert bytes(seen[offset : offset + size]) == sent
        back = bytearray(size)
        assert pair.to_b.read(back, region.key(), offset).wait().bytes == size
        assert bytes(back) == sent
    seen.release()
    region.deregister()


def test_immediates_are_counted_and_waited_for(pair: Pair) -> None:
    target = bytearray(1 << 20)
    region = pair.b.register(target)
    key = region.key()
    with pytest.raises(crossrail.TimeoutError, match=r"0 of 3 .*immediate 7 have arrived .*0\.150 s"):
        region.wait_imm(7, 3, timeout=0.15)
    requests = [pair.to_b.write(bytes([number]) * size, key, imm=7) for number, size in ((1, 1), (2, 1 << 20), (3, 0))]
    region.wait_imm(7, 3)
    assert region.imm_count(7) == 3 and region.imm_count(8) == 0
    crossrail.wait_all(requests)
    pair.to_b.write(b"!", key, imm=2**32 - 1).wait()
    region.wait_imm(2**32 - 1)
    with pytest.raises(crossrail.UsageError):
        pair.to_b.write(b"!", key, imm=2**32)
    region.deregister()


def test_the_bytes_of_a_counted_write_are_in_place(pair: Pair) -> None:
    target = bytearray(300_000)
    region = pair.b.register(target)
    for round_ in range(1, 6):
        filled = bytes([round_]) * len(target)
        request = pair.to_b.write(filled, region.key(), imm=0)
        region.wait_imm(0, round_)
        assert bytes(target) == filled
        request.wait()
    region.deregister()


def test_a_wrong_key_opens_nothing(pair: Pair) -> None:
    target = bytearray(16)
    region = pair.b.register(target)
    raw = bytes(region.key())
    for position in (len(raw) - 1, len(raw) - 16):
        forged = bytearray(raw)
        forged[position] ^= 1
        key = crossrail.RegionKey.from_bytes(bytes(forged))
        assert key != region.key()
        for request in (pair.to_b.write(b"evil", key), pair.to_b.read(bytearray(4), key)):
            with pytest.raises(crossrail.RegionError):
                request.wait()
    assert target == bytearray(16)
    region.deregister()


def test_keys_and_receipts_are_pickled(pair: Pair) -> None:
    """Between processes of a job, in the payload of any library. A receipt has all it had."""
    sent, target = bytes(range(256)) * 1024, bytearray(256 << 10)
    region = pair.b.register(target)
    key = pickle.loads(pickle.dumps(region.key()))
    assert key == region.key() and hash(key) == hash(region.key()) and len(key) == len(target)
    for receipt in (pair.to_b.write(sent, key, 0).wait(), pair.to_b.batch([("write", sent, key, 0)]).wait()):
        there = pickle.loads(pickle.dumps(receipt))
        assert type(there) is crossrail.Receipt and there.as_dict() == receipt.as_dict() and there.peer
        assert crossrail.Receipt.from_dict(json.loads(json.dumps(receipt.as_dict()))).as_dict() == receipt.as_dict()
    assert target == sent
    with pytest.raises(crossrail.UsageError, match='"pigeon" is not a known protocol'):
        crossrail.Receipt.from_dict({**receipt.as_dict(), "protocol": "pigeon"})
    region.deregister()


def test_keys_travel_as_bytes(shm: Pair) -> None:
    region = shm.b.register(bytearray(5))
    key = crossrail.RegionKey.from_bytes(bytes(region.key()))
    assert key == region.key() and hash(key) == hash(region.key()) and len(key) == 5 and key != "a key"
    for broken in (b"", b"XRK1", bytes(key)[:-1], bytes(key) + b"x", b"\0" * len(bytes(key))):
        with pytest.raises(crossrail.UsageError):
            crossrail.RegionKey.from_bytes(broken)
    region.deregister()


@pytest.mark.parametrize(("offset", "size"), [(0, 17), (16, 1), (17, 0), (2**63, 1), (2**64 - 1, 2)])
def test_nothing_outside_the_region_is_touched(pair: Pair, offset: int, size: int) -> None:
    target = bytearray(b"\x11" * 48)
    region = pair.b.register(memoryview(target)[16:32])
    for request in (
        pair.to_b.write(b"x" * size, region.key(), offset),
        pair.to_b.read(bytearray(size), region.key(), offset),
    ):
        with pytest.raises(crossrail.RegionError) as caught:
            request.wait()
        assert caught.value.peer == "b"
    assert target == b"\x11" * 48
    # A hand-made key that claims more than the region has does not help.
    raw = bytes(region.key())
    claimed = crossrail.RegionKey.from_bytes(raw[:4] + (48).to_bytes(8, "little") + raw[12:])
    with pytest.raises(crossrail.RegionError):
        pair.to_b.write(b"x" * 17, claimed).wait()
    assert target == b"\x11" * 48
    region.deregister()


def test_after_deregistering_access_fails_and_the_buffer_is_free(pair: Pair) -> None:
    target = bytearray(100)
    region = pair.b.register(target)
    key = region.key()
    with pytest.raises(BufferError):
        target.append(1)
    pair.to_b.write(b"before", key).wait()
    region.deregister()
    target.append(1)
    for request in (pair.to_b.write(b"after", key), pair.to_b.read(bytearray(1), key)):
        with pytest.raises(crossrail.RegionError):
            request.wait()
    assert target[:6] == b"before"
    with pytest.raises(crossrail.RegionError):
        region.deregister()
    with pytest.raises(crossrail.RegionError):
        region.wait_imm(1, timeout=30)


def test_a_dropped_region_is_deregistered(pair: Pair) -> None:
    target = bytearray(100)
    key = pair.b.register(target).key()
    with pytest.raises(crossrail.RegionError):
        pair.to_b.write(b"after", key).wait()
    target.append(1)


def test_a_waiting_thread_is_told_of_deregistering(shm: Pair) -> None:
    region = shm.b.register(bytearray(8))
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            region.wait_imm(1, timeout=15)
        except crossrail.RegionError as error:
            failures.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    region.deregister()
    waiter.join(30)
    assert len(failures) == 1


def test_a_region_needs_writable_contiguous_memory(shm: Pair) -> None:
    with pytest.raises(crossrail.UsageError, match="read-only"):
        shm.b.register(b"constant")
    with pytest.raises(crossrail.UsageError, match="contiguous"):
        shm.b.register(memoryview(bytearray(10))[::2])
