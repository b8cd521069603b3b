"""Memory of a peer, mapped here: both ends see the same bytes."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from pairs import Pair

import crossrail


def test_both_ends_see_the_same_bytes(shm: Pair) -> None:
    memory = shm.context.alloc(10_000)
    mapped = shm.to_b.map(shm.to_a.share(memory))
    assert len(mapped) == mapped.nbytes == 10_000 and mapped.device == "cpu" and "10000 bytes" in repr(mapped)
    there = np.from_dlpack(mapped)
    there[:] = np.arange(10_000) % 251
    assert bytes(memory) == there.tobytes()
    memory.fill_from(b"here", 5000)
    mapped.copy_to(seen := bytearray(4), 5000)
    assert seen == b"here"
    mapped.fill_from(b"there", 9995)
    assert bytes(memory)[-5:] == b"there" and not hasattr(mapped, "__cuda_array_interface__")


def test_it_outlives_the_peer(shm: Pair) -> None:
    memory = shm.context.alloc(100)
    mapped = shm.to_b.map(shm.to_a.share(memory))
    array = np.from_dlpack(mapped)
    del mapped, memory
    shm.b.close()
    gc.collect()
    array[:] = 7
    assert array.sum() == 700


def test_part_of_a_memory(shm: Pair) -> None:
    memory = shm.context.alloc(10_000)
    shared = shm.to_a.share(memoryview(memory)[4096:8192])
    shm.to_b.map(shared).fill_from(b"part")
    assert bytes(memory)[4096:4100] == b"part"


def test_what_is_not_shared(shm: Pair) -> None:
    with pytest.raises(crossrail.UsageError):
        shm.to_a.share(bytearray(100))
    with pytest.raises(crossrail.UsageError):
        shm.to_a.share(crossrail.Context(log="error").alloc(100))
    for nonsense in (b"", b"XRS1", b"x" * 36):
        with pytest.raises(crossrail.UsageError, match="not one"):
            shm.to_b.map(nonsense)
    memory = shm.context.alloc(100)
    shared = shm.to_a.share(memory)
    with pytest.raises(crossrail.UsageError, match="host"):
        shm.to_b.map(shared, device="cuda:0")
    assert shm.to_b.map(shared, device="cpu").device == "cpu"
    with pytest.raises(crossrail.CrossrailError):
        shm.to_b.map(shared[:-1] + bytes([shared[-1] ^ 1]), timeout=0.2)


def test_tcp_maps_nothing(connected: object) -> None:
    pair = connected(tls="tcp")  # type: ignore[operator]
    with pytest.raises(crossrail.UnsupportedError, match="shm"):
        pair.to_a.share(pair.context.alloc(100))


def test_streams_have_nothing_to_do_with_host_memory(shm: Pair) -> None:
    memory = shm.context.alloc(100)
    mapped = shm.to_b.map(shm.to_a.share(memory))
    with pytest.raises(crossrail.UsageError, match="host"):
        mapped.put(b"bytes")
    with pytest.raises(crossrail.UsageError, match="host"):
        mapped.put(b"", signal=(0, 1))
    with pytest.raises(crossrail.UsageError, match="host"):
        memory.await_signal(0, 1)
    with pytest.raises(crossrail.UsageError, match="is not a CUDA stream"):
        mapped.put(memory, stream="current")
    request = shm.b.recv(memory)
    for stream in (0, 7):
        with pytest.raises(crossrail.UsageError, match="GPU of the stream is unknown"):
            request.wait_on(stream)
    shm.to_b.send(b"x").wait()
    request.wait()
