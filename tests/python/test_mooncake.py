"""crossrail.mooncake: what SGLang, vLLM, LMCache and checkpoint-engine call, and what they get."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from foreign import NOWHERE
from nixl_engines import until

import crossrail
from crossrail.mooncake import TransferEngine, TransferNotify, TransferOpcode

HOST = "127.0.0.1"
PEER = """
import sys
import numpy as np
from crossrail.mooncake import TransferEngine
engine = TransferEngine()
assert engine.initialize("127.0.0.1:1234", "P2PHANDSHAKE", "rdma", "") == 0
memory = np.zeros(64 << 20, np.uint8)
assert engine.register_memory(memory.ctypes.data, memory.nbytes) == 0
sys.stdout.write(f"{engine.get_rpc_port()} {memory.ctypes.data}\\n")
sys.stdout.flush()
sys.stdin.read()
"""


def engine() -> TransferEngine:
    made = TransferEngine()
    assert made.initialize(HOST, "P2PHANDSHAKE", "tcp", "") == 0
    return made


@pytest.fixture(params=["shm", "tcp"])
def two(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[TransferEngine, TransferEngine, str]:
    monkeypatch.setenv("CROSSRAIL_TLS", f"{request.param},self")
    a, b = engine(), engine()
    return a, b, f"{HOST}:{b.get_rpc_port()}"


def pools(size: int) -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(0).integers(0, 256, size, np.uint8), np.zeros(size, np.uint8)


def test_vllm_and_sglang_write_pages_from_many_threads(two: tuple[TransferEngine, TransferEngine, str]) -> None:
    a, b, session = two
    page, pages, layers = 512, 40, 8
    ours, theirs = pools(page * pages * layers)
    assert a.batch_register_memory([ours.ctypes.data], [ours.nbytes]) == 0
    assert b.batch_register_memory([theirs.ctypes.data], [theirs.nbytes]) == 0

    def layer(number: int) -> int:
        offsets = [(number * pages + at) * page for at in range(pages)]
        mine = [ours.ctypes.data + at for at in offsets]
        other = (
            np.array([theirs.ctypes.data + at for at in offsets], np.int64)
            if number % 2
            else [theirs.ctypes.data + at for at in offsets]
        )
        return a.batch_transfer_sync_write(session, mine, other, [page] * pages)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(layer, range(layers))) == [0] * layers
    assert np.array_equal(ours, theirs)
    assert a.send_probe(session) == 0


def test_checkpoint_engine_reads_memory_that_is_registered_later(
    two: tuple[TransferEngine, TransferEngine, str],
) -> None:
    a, b, session = two
    for turn in range(3):
        weights, buffer = pools(300_000 + turn)
        assert b.register_memory(weights.ctypes.data, weights.nbytes) == 0
        assert a.register_memory(buffer.ctypes.data, buffer.nbytes) == 0
        lengths = [100_000, 100_000, weights.nbytes - 200_000]
        mine = [buffer.ctypes.data + 100_000 * at for at in range(3)]
        other = [weights.ctypes.data + 100_000 * at for at in range(3)]
        assert a.batch_transfer_sync_read(session, mine, other, lengths) == 0
        assert np.array_equal(weights, buffer)
        assert a.unregister_memory(buffer.ctypes.data) == 0 == b.unregister_memory(weights.ctypes.data)
    assert a.batch_transfer_sync_read(session, mine, other, lengths) == -1
    assert a.unregister_memory(buffer.ctypes.data) == -1


def test_memory_that_is_not_there_is_refused_and_nothing_of_its_batch_is_kept(
    two: tuple[TransferEngine, TransferEngine, str],
) -> None:
    a, b, session = two
    ours, theirs = pools(4096)
    size = 4096
    for at, length in ((theirs.ctypes.data, 1 << 45), (0, size), ((1 << 64) - size, 2 * size), (NOWHERE, size)):
        assert b.register_memory(at, length) == -1, (at, length)
        assert b.batch_register_memory([theirs.ctypes.data, at], [theirs.nbytes, length]) == -1, (at, length)
        assert b.unregister_memory(theirs.ctypes.data) == -1, "the row before it was kept"
    assert b.register_memory(theirs.ctypes.data, theirs.nbytes) == 0 == a.register_memory(ours.ctypes.data, ours.nbytes)
    assert a.transfer_sync_write(session, ours.ctypes.data, theirs.ctypes.data, 4096) == 0
    assert np.array_equal(ours, theirs)


def test_asynchronous_calls_and_messages(two: tuple[TransferEngine, TransferEngine, str]) -> None:
    a, b, session = two
    mine, other = a.allocate_managed_buffer(4096), b.allocate_managed_buffer(4096)
    a.write_bytes_to_buffer(mine, b"x" * 4096, 4096)
    first = a.batch_transfer_async_write(session, [mine], [other], [1000])
    second = a.transfer_submit_write(session, mine + 1000, other + 1000, 1000)
    assert 0 < first < second
    assert a.get_batch_transfer_status([first]) == 0
    assert until(lambda: a.transfer_check_status(second), "the transfer") == 1
    assert a.transfer_check_status(second) == -1
    notify = TransferNotify("name", "message")
    assert a.transfer_sync(session, mine + 2000, other + 2000, 2096, TransferOpcode.Write, notify) == 0
    (got,) = until(b.get_notifies, "the message")
    assert (got.name, got.msg) == ("name", "message")
    assert b.read_bytes_from_buffer(other, 4096) == b"x" * 4096
    assert a.transfer_sync_read(session, mine, other + 4000, 200) == -1
    assert a.get_first_buffer_address(session) == other
    assert a.free_managed_buffer(mine, 4096) == 0 == b.free_managed_buffer(other, 4096)


def test_what_is_refused() -> None:
    made = TransferEngine()
    assert made.initialize(HOST, "etcd://somewhere", "rdma", "mlx5_0") == -1
    assert made.initialize(HOST, "P2PHANDSHAKE", "rdma", "mlx5_0") == 0
    memory = np.zeros(100, np.uint8)
    assert made.register_memory(memory.ctypes.data, 100) == 0 == made.register_memory(memory.ctypes.data, 100)
    assert made.unregister_memory(memory.ctypes.data) == 0 == made.unregister_memory(memory.ctypes.data)
    assert made.unregister_memory(memory.ctypes.data) == -1
    for session in ("127.0.0.1:1", "nowhere", "127.0.0.1:notaport"):
        assert made.send_probe(session) == -1
        assert made.batch_transfer_sync_write(session, [1], [1], [1]) == -1
    assert made.batch_transfer_async_write("127.0.0.1:1", [1], [1, 2], [1]) == 0
    with pytest.raises(NotImplementedError, match="get_engine"):
        made.get_engine()
    with pytest.raises(AttributeError):
        made.nothing  # noqa: B018


@pytest.fixture
def peer() -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    environment = {**os.environ, "PYTHONPATH": str(Path(crossrail.__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        assert process.stdout is not None
        port, address = process.stdout.readline().split()
        yield process, f"{HOST}:{port}", int(address)
        process.kill()
        process.communicate(timeout=20)


def test_a_killed_peer_fails_within_seconds(peer: tuple[subprocess.Popen[str], str, int]) -> None:
    process, session, address = peer
    a, memory = engine(), np.ones(64 << 20, np.uint8)
    a.register_memory(memory.ctypes.data, memory.nbytes)
    assert a.transfer_sync_write(session, memory.ctypes.data, address, 1000) == 0
    process.send_signal(signal.SIGKILL)
    process.wait(20)
    began = time.monotonic()
    assert a.transfer_sync_write(session, memory.ctypes.data, address, memory.nbytes) == -1
    assert time.monotonic() - began < 5
    assert a.send_probe(session) == -1


def test_an_engine_is_released_when_modules_are_gone_already(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine()
    monkeypatch.setattr(sys.modules[TransferEngine.__module__], "contextlib", None)
    made.__del__()
    with pytest.raises(crossrail.ClosedError):
        made._worker.describe([])


def test_memory_that_was_registered_again_is_asked_for_anew(two: tuple[TransferEngine, TransferEngine, str]) -> None:
    a, b, session = two
    ours, theirs = pools(4096)
    at, its = ours.ctypes.data, theirs.ctypes.data
    assert a.register_memory(at, 4096) == 0 == b.register_memory(its, 4096)
    assert a.transfer_sync_write(session, at, its, 100) == 0

    def again() -> None:  # the same addresses, under other keys, which the session does not know
        assert b.unregister_memory(its) == 0 == b.register_memory(its, 4096)

    again()
    assert a.transfer_sync_write(session, at, its, 4096) == 0
    assert np.array_equal(ours, theirs)
    again()
    numbers = [a.batch_transfer_async_write(session, [at], [its], [4096]) for _ in range(2)]
    assert a.get_batch_transfer_status(numbers[:1]) == 0
    assert until(lambda: a.transfer_check_status(numbers[1]), "the transfer") == 1
    again()
    assert a.transfer_sync_read(session, at, its, 4096) == 0
    assert b.unregister_memory(its) == 0
    assert a.transfer_sync_read(session, at, its, 4096) == -1
    number = a.batch_transfer_async_write(session, [at], [its], [4096])
    assert number == 0 or until(lambda: a.transfer_check_status(number), "the transfer") == -1


def test_an_engine_that_was_started_again_at_its_port_is_found() -> None:
    a, first = engine(), engine()
    mine, its = a.allocate_managed_buffer(100), first.allocate_managed_buffer(100)
    port = first.get_rpc_port()
    session = f"{HOST}:{port}"
    assert a.transfer_sync_write(session, mine, its, 100) == 0
    second = engine()
    assert second._exchange is not None and first._exchange is not None and first._worker is not None
    first._exchange.close()
    first._worker.close()
    second._exchange.close()
    second._exchange.listen(port)
    other = second.allocate_managed_buffer(100)
    assert a.transfer_sync_write(session, mine, other, 100) == 0


def test_empty_rows_move_nothing_and_are_no_error(two: tuple[TransferEngine, TransferEngine, str]) -> None:
    a, b, session = two
    mine, its = a.allocate_managed_buffer(100), b.allocate_managed_buffer(100)
    a.write_bytes_to_buffer(mine, bytes(range(100)), 100)
    assert a.batch_transfer_sync_write(session, [mine, 1, mine + 50], [its, 2, its + 50], [50, 0, 50]) == 0
    assert b.read_bytes_from_buffer(its, 100) == bytes(range(100))
    assert a.batch_transfer_sync_read(session, [mine], [its], [0]) == 0
    assert a.batch_transfer_sync_read(session, [], [], []) == 0
    number = a.batch_transfer_async_write(session, [mine], [its], [0])
    assert number > 0 and a.transfer_check_status(number) == 1
    notify = TransferNotify("name", "nothing to move")
    assert a.batch_transfer_sync(session, [mine], [its], [0], TransferOpcode.Write, notify) == 0
    (got,) = until(b.get_notifies, "the message")
    assert got.msg == "nothing to move"


def test_a_batch_that_fails_half_way_registers_nothing() -> None:
    made = engine()
    memory = np.zeros(300, np.uint8)
    at = memory.ctypes.data
    assert made.register_memory(at, 100) == 0
    bad: list[tuple[list[int], list[int]]] = [
        ([at + 100, at + 200], [100, 1 << 64]),
        ([at + 100, at + 200], [100]),
        ([at + 100, -1], [100, 100]),
        ([at, at + 200], [300, 1 << 64]),
    ]
    for addresses, sizes in bad:
        assert made.batch_register_memory(addresses, sizes) == -1
        assert list(made._regions) == [at] and dict(made._counts) == {at: 1}
        assert len(made._regions[at]) == 100
    assert made.unregister_memory(at) == 0
    assert made.unregister_memory(at + 100) == -1


def test_calls_before_initialize_are_refused() -> None:
    made = TransferEngine()
    assert made.register_memory(1 << 20, 10) == -1 == made.batch_register_memory([1 << 20], [10])
    assert made.unregister_memory(1 << 20) == -1
    assert made.transfer_sync_write("127.0.0.1:1", 1, 1, 1) == -1 == made.transfer_sync_read("127.0.0.1:1", 1, 1, 1)
    assert made.batch_transfer_async_write("127.0.0.1:1", [1], [1], [1]) == 0
    assert made.get_batch_transfer_status([7]) == -1 == made.transfer_check_status(7)
    assert made.send_probe("127.0.0.1:1") == -1
    assert made.get_notifies() == [] and made.get_local_topology() == ""
    assert made.get_rpc_port() == 0 == made.get_first_buffer_address("127.0.0.1:1")
    assert made.allocate_managed_buffer(100) == 0


def test_a_second_initialize_changes_nothing(two: tuple[TransferEngine, TransferEngine, str]) -> None:
    a, b, session = two
    ours, theirs = pools(4096)
    assert a.register_memory(ours.ctypes.data, ours.nbytes) == 0
    assert b.register_memory(theirs.ctypes.data, theirs.nbytes) == 0
    port = a.get_rpc_port()
    assert a.initialize(HOST, "P2PHANDSHAKE", "tcp", "") == -1
    assert a.get_rpc_port() == port
    assert a.transfer_sync_write(session, ours.ctypes.data, theirs.ctypes.data, 4096) == 0
    assert np.array_equal(ours, theirs)


def test_arguments_that_make_no_sense_are_minus_one(two: tuple[TransferEngine, TransferEngine, str]) -> None:
    a, b, session = two
    ours, theirs = pools(4096)
    at, there = ours.ctypes.data, theirs.ctypes.data
    assert a.register_memory(at, ours.nbytes) == 0
    assert b.register_memory(there, theirs.nbytes) == 0
    assert a.register_memory(at, -1) == -1, "known memory too"
    assert a.unregister_memory(at) == 0
    assert a.unregister_memory(at) == -1, "the refused one was not counted"
    assert a.register_memory(at, ours.nbytes, None) == 0  # type: ignore[arg-type]
    for name in (None, "", "host", "host:", ":1", "host:x", "host:0", "host:65536", "host:-1", session.encode()):
        assert a.transfer_sync_write(name, at, there, 16) == -1, name  # type: ignore[arg-type]
        assert a.send_probe(name) == -1, name  # type: ignore[arg-type]
        assert a.get_first_buffer_address(name) == 0, name  # type: ignore[arg-type]
    for notify in (TransferNotify(None, None), TransferNotify(b"a", 1), "text"):  # type: ignore[arg-type]
        assert a.transfer_sync(session, at, there, 16, TransferOpcode.Write, notify) == -1  # type: ignore[arg-type]
    assert TransferEngine().initialize(HOST, "P2PHANDSHAKE", "tcp", None) == 0  # type: ignore[arg-type]
