"""The end of lent memory ends transfers of both ends: nothing touches it afterwards, and nothing of it succeeds."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import crossrail
from crossrail.kv import PagedCache, Receiver
from crossrail.mooncake.engine import TransferEngine
from crossrail.nixl._api import nixl_agent
from crossrail.nixl._kinds import nixlNotFoundError

ROWS, SIZE = 64, 32 << 20
DATA, OLD, POISON = 0x11, 0x44, 0x99
TRANSPORTS = ["shm", "tcp", "ucx"]
LIMIT_S = 30


def rows(memory: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    each = memory.nbytes // ROWS
    starts = memory.ctypes.data + each * np.arange(ROWS)
    return np.stack([starts, np.full(ROWS, each), np.zeros(ROWS, int)], 1).astype(np.uint64)


@pytest.fixture(scope="module", params=TRANSPORTS)
def tls(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "ucx":
        request.getfixturevalue("ucx")
    return name


class Ends:
    """Two ends of a transfer: `start` moves between the memory of both, `end` ends the near memory's lending."""

    failures: tuple[type[crossrail.CrossrailError], ...] = (crossrail.RegionError,)

    def __init__(self, near: np.ndarray[Any, Any], far: np.ndarray[Any, Any]) -> None:
        self.near, self.far = near, far
        self.a = crossrail.Worker(crossrail.Context(), name="a")
        self.b = crossrail.Worker(crossrail.Context(), name="b", admit=True)

    def start(self, op: str) -> Callable[[], object]:
        raise NotImplementedError

    def end(self) -> None:
        raise NotImplementedError

    def notices(self) -> int:
        return len(self.b.notices())

    def close(self) -> None:
        self.a.close()
        self.b.close()


class OfRegion(Ends):
    def start(self, op: str) -> Callable[[], object]:
        self.region = self.a.register_range(self.near.ctypes.data, SIZE)
        self.theirs = self.b.register_range(self.far.ctypes.data, SIZE)
        description = crossrail.Description(self.b.describe([self.theirs]))
        endpoint = self.a.connect(description.address)
        there = endpoint.layout(rows(self.far), description)
        move = endpoint.prepare(op, self.a.layout(rows(self.near), [self.region]), there, notice=b"moved")
        request = move.start()
        return lambda: request.wait(LIMIT_S)

    def end(self) -> None:
        self.region.deregister()


class OfCache(Ends):
    def start(self, op: str) -> Callable[[], object]:
        self.cache = PagedCache(self.a, [self.near.reshape(ROWS, -1)])
        self.theirs = PagedCache(self.b, [self.far.reshape(ROWS, -1)])
        remote = self.cache.remote(self.theirs.describe())
        request = (remote.pull if op == "read" else remote.push)(range(ROWS), range(ROWS), notice=b"moved")
        return lambda: request.wait(LIMIT_S)

    def end(self) -> None:
        self.cache.close()

    def close(self) -> None:
        self.theirs.close()
        super().close()


class OfDroppedCache(OfCache):
    def end(self) -> None:
        del self.cache
        gc.collect()


class OfLease(Ends):
    """The peer moves: it borrows what is lent."""

    def start(self, op: str) -> Callable[[], object]:
        self.lent = PagedCache(self.b, [self.near.reshape(ROWS, -1)])
        self.theirs = PagedCache(self.a, [self.far.reshape(ROWS, -1)])
        self.lease = self.lent.lend(range(ROWS))
        borrowed = self.theirs.remote(self.lent.describe()).borrow(bytes(self.lease))
        request = (borrowed.push if op == "read" else borrowed.pull)(range(ROWS), range(ROWS), notice=b"moved")
        return lambda: request.wait(LIMIT_S)

    def end(self) -> None:
        self.lease.end()

    def close(self) -> None:
        self.lent.close()
        self.theirs.close()
        super().close()


class OfReceiver(Ends):
    """A peer moves between its memory and the tensors, again and again: what it has begun may be let finish."""

    failures = (crossrail.RegionError, crossrail.PeerDeadError, crossrail.ClosedError)  # it closes its worker

    def __init__(self, near: np.ndarray[Any, Any], far: np.ndarray[Any, Any]) -> None:
        super().__init__(near, far)
        self.receiver = Receiver(crossrail.Context(), [near], name="receiver")

    def start(self, op: str) -> Callable[[], object]:
        weights = self.receiver._weights
        endpoint, key = self.a.connect(weights.worker.address()), weights._regions[0].key()
        move = endpoint.write if op == "read" else endpoint.read
        ended: list[crossrail.CrossrailError] = []

        def run() -> None:
            until = time.monotonic() + LIMIT_S
            try:
                while time.monotonic() < until:
                    crossrail.wait_all([move(self.far, key) for _ in range(2)], LIMIT_S)
            except crossrail.CrossrailError as error:
                ended.append(error)

        thread = threading.Thread(target=run)
        thread.start()

        def wait() -> None:
            thread.join(2 * LIMIT_S)
            assert ended, "its transfers continued after its end"
            raise ended[0]

        return wait

    def end(self) -> None:
        self.receiver.close()

    def notices(self) -> int:
        return -1


class OfAgent(Ends):
    def __init__(self, near: np.ndarray[Any, Any], far: np.ndarray[Any, Any]) -> None:
        self.near, self.far = near, far
        self.agents = nixl_agent("A"), nixl_agent("B")

    def start(self, op: str) -> Callable[[], object]:
        here, there = self.agents
        self.registered = here.register_memory([(self.near.ctypes.data, SIZE, 0, "")], "DRAM")
        there.register_memory([(self.far.ctypes.data, SIZE, 0, "")], "DRAM")
        here.add_remote_agent(there.get_agent_metadata())
        local = here.get_xfer_descs([(self.near.ctypes.data, SIZE, 0)], "DRAM")
        remote = here.get_xfer_descs([(self.far.ctypes.data, SIZE, 0)], "DRAM")
        assert local is not None and remote is not None
        handle = here.initialize_xfer(op.upper(), local, remote, "B", b"moved")
        here.transfer(handle)

        def wait() -> None:
            until = time.monotonic() + LIMIT_S
            try:
                while here.check_xfer_state(handle) == "PROC":
                    assert time.monotonic() < until
                    time.sleep(0.001)
            except nixlNotFoundError as error:
                raise crossrail.RegionError(str(error)) from error

        return wait

    def end(self) -> None:
        self.agents[0].deregister_memory(self.registered)

    def notices(self) -> int:
        return sum(len(of) for of in self.agents[1].get_new_notifs().values())

    def close(self) -> None:
        del self.agents


class OfEngine(Ends):
    def __init__(self, near: np.ndarray[Any, Any], far: np.ndarray[Any, Any]) -> None:
        self.near, self.far = near, far
        self.engines = TransferEngine(), TransferEngine()
        for engine in self.engines:
            assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0

    def start(self, op: str) -> Callable[[], object]:
        here, there = self.engines
        here.register_memory(self.near.ctypes.data, SIZE)
        there.register_memory(self.far.ctypes.data, SIZE)
        address = f"127.0.0.1:{there.get_rpc_port()}"
        move = here.transfer_sync_read if op == "read" else here.transfer_sync_write
        done: list[int] = []

        def run() -> None:
            done.append(move(address, self.near.ctypes.data, self.far.ctypes.data, SIZE))

        thread = threading.Thread(target=run)
        thread.start()

        def wait() -> None:
            thread.join(LIMIT_S)
            if done != [0]:
                raise crossrail.RegionError(str(done))

        return wait

    def end(self) -> None:
        assert self.engines[0].unregister_memory(self.near.ctypes.data) == 0

    def notices(self) -> int:
        return -1  # it has none

    def close(self) -> None:
        del self.engines


@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("ends", [OfRegion, OfCache, OfDroppedCache, OfLease, OfReceiver, OfAgent, OfEngine])
def test_nothing_touches_memory_after_its_end(
    ends: type[Ends], tls: str, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROSSRAIL_TLS", tls)
    failed = 0
    for round_ in range(12):
        near, far = (np.full(SIZE, of, np.uint8) for of in ((OLD, DATA) if op == "read" else (DATA, OLD)))
        both = ends(near, far)
        try:
            wait = both.start(op)
            time.sleep(0.0001 * round_)
            both.end()
            near[:] = POISON
            try:
                wait()
                succeeded = True
            except both.failures:
                succeeded = False
            time.sleep(0.02)
            assert (near == POISON).all(), "written after its end"
            assert not (far == POISON).any(), "bytes of the next owner were delivered"
            assert not succeeded or (far == DATA).all()
            assert both.notices() in (-1, int(succeeded))
            failed += not succeeded
        finally:
            both.close()
        if failed == 2:
            return
    pytest.fail("every transfer was over before its memory's end")


# Both ends copy the pieces of such a write.
PEER = """
import sys, crossrail
address, key, size = sys.argv[1], bytes.fromhex(sys.argv[2]), int(sys.argv[3])
context = crossrail.Context()
worker = crossrail.Worker(context, name="stopped")
endpoint = worker.connect(address)
memory = context.alloc(size).numpy()
memory[:] = 0x99
print("ready", flush=True)
while True:
    endpoint.write(memory, crossrail.RegionKey.from_bytes(key)).wait(30)
"""


Lent = tuple[crossrail.Worker, crossrail.Region, Callable[[], None]]
"""A worker, a region of its that peers may write, and what ends that."""


def lend_region(context: crossrail.Context, memory: np.ndarray[Any, Any]) -> Lent:
    worker = crossrail.Worker(context, name="v", admit=True)
    region = worker.register_range(memory.ctypes.data, memory.nbytes)
    return worker, region, region.deregister


def lend_cache(context: crossrail.Context, memory: np.ndarray[Any, Any]) -> Lent:
    worker = crossrail.Worker(context, name="v", admit=True)
    cache = PagedCache(worker, [memory.reshape(1, -1)])
    return worker, cache._regions[0], cache.close


def lend_lease(context: crossrail.Context, memory: np.ndarray[Any, Any]) -> Lent:
    worker = crossrail.Worker(context, name="v", admit=True)
    lease = PagedCache(worker, [memory.reshape(1, -1)]).lend([0])
    return worker, lease._regions[0], lease.end


def lend_receiver(context: crossrail.Context, memory: np.ndarray[Any, Any]) -> Lent:
    receiver = Receiver(context, [memory], name="v")
    return receiver._weights.worker, receiver._weights._regions[0], receiver.close


@pytest.mark.parametrize("lend", [lend_region, lend_cache, lend_lease, lend_receiver])
def test_an_end_that_a_stopped_peer_holds_up_is_an_error(
    lend: Callable[[crossrail.Context, np.ndarray[Any, Any]], Lent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROSSRAIL_TLS", "shm")
    refused = 0
    for round_ in range(30):
        context = crossrail.Context(timeout=0.3)
        memory = context.alloc(SIZE).numpy()
        worker, region, end = lend(context, memory)
        with worker:
            where = worker.control_addresses()[0], bytes(region.key()).hex(), str(SIZE)
            command = [sys.executable, "-c", PEER, *where]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as peer:
                try:
                    assert peer.stdout is not None and peer.stdout.readline() == "ready\n"
                    time.sleep(0.03 + 0.0013 * round_)
                    os.kill(peer.pid, signal.SIGSTOP)
                    ended = False
                    try:
                        end()
                        ended = True
                    except crossrail.TimeoutError as error:
                        refused += 1
                        assert "stopped may still read or write" in str(error)
                        os.kill(peer.pid, signal.SIGCONT)
                        end()
                    memory[:] = 0x77
                    if ended:
                        os.kill(peer.pid, signal.SIGCONT)
                    time.sleep(0.1)
                    assert (memory == 0x77).all(), f"written after its end; refused before: {not ended}"
                finally:
                    peer.kill()
        if refused:
            return
    pytest.fail("the peer was never stopped in the middle of a write")
