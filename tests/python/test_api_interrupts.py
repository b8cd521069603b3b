"""A signal that Python has a handler for ends a wait of the main thread at once; nothing wakes up before."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pairs import Pair

import crossrail
from crossrail._native import StoreServer

LONG = 60.0


@contextmanager
def handled(handler: Callable[[int, Any], Any], number: signal.Signals = signal.SIGUSR1) -> Iterator[None]:
    """SIGUSR1 runs `handler` within."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


class InterruptedByTest(Exception):
    """Raised by the handlers of these tests."""


def interrupt(*_: object) -> None:
    raise InterruptedByTest


class Sender:
    """Sends SIGUSR1 to this process while the main thread waits, and remembers when."""

    def __init__(self, times: int = 1) -> None:
        self.sent: list[float] = []
        self._main = threading.main_thread().ident
        self._thread = threading.Thread(target=self._run, args=(times,))

    def _run(self, times: int) -> None:
        for _ in range(times):
            asleep()
            self.sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGUSR1)

    def __enter__(self) -> Sender:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()


def switches() -> int:
    """Voluntary context switches of the main thread so far."""
    status = Path(f"/proc/self/task/{os.getpid()}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("voluntary_ctxt_switches"))


def asleep() -> None:
    """Returns once the main thread has been asleep for a while; after a second in any case."""
    before, since = switches(), time.monotonic()
    until = since + 1
    while time.monotonic() - since < 0.1 and time.monotonic() < until:
        time.sleep(0.005)
        now = switches()
        if now != before:
            before, since = now, time.monotonic()


def test_a_wait_ends_at_once(shm: Pair) -> None:
    request = shm.b.recv(bytearray(1))
    took = []
    with handled(interrupt):
        for _ in range(5):
            with Sender() as sender, pytest.raises(InterruptedByTest):
                request.wait(timeout=LONG)
            took.append(time.monotonic() - sender.sent[0])
    # That nothing looks for signals in intervals is the next test: here the machine may be busy.
    assert min(took) < 1, took
    shm.to_b.send(b"!").wait()
    assert request.wait(timeout=LONG).bytes == 1


def test_nothing_wakes_up_while_waiting(shm: Pair) -> None:
    request = shm.b.recv(bytearray(1))
    seen: list[int] = []

    def count() -> None:
        asleep()
        first = switches()
        time.sleep(1)
        seen.append(switches() - first)
        os.kill(os.getpid(), signal.SIGUSR1)

    counter = threading.Thread(target=count)
    counter.start()
    with handled(interrupt), pytest.raises(InterruptedByTest):
        request.wait(timeout=LONG)
    counter.join()
    assert seen == [0]
    request.cancel()


def test_a_handler_that_raises_nothing_lets_the_wait_go_on(shm: Pair) -> None:
    request = shm.b.recv(bytearray(1))
    calls: list[float] = []
    with handled(lambda *_: calls.append(time.monotonic())):
        began = time.monotonic()
        with Sender(2), pytest.raises(crossrail.TimeoutError) as caught:
            request.wait(timeout=1.0)
        assert time.monotonic() - began >= 1.0
    assert len(calls) == 2
    assert caught.value.waited == pytest.approx(1.0)
    request.cancel()


def test_a_handler_may_wait_itself(shm: Pair) -> None:
    outer, inner = shm.b.recv(bytearray(1), tag=1), shm.b.recv(bytearray(1), tag=2)
    results: list[int] = []

    def answer(*_: object) -> None:
        shm.to_b.send(b"i", tag=2).wait(timeout=LONG)
        results.append(inner.wait(timeout=LONG).bytes)
        with pytest.raises(crossrail.TimeoutError):
            outer.wait(timeout=0.05)
        shm.to_b.send(b"o", tag=1)

    with handled(answer), Sender():
        assert outer.wait(timeout=LONG).bytes == 1
    assert results == [1]
    assert signal.set_wakeup_fd(-1) == -1, "the descriptor that was set before is set again"


def test_other_threads_wait_on(shm: Pair) -> None:
    request = shm.b.recv(bytearray(1))
    results: list[int] = []
    waiter = threading.Thread(target=lambda: results.append(request.wait(timeout=LONG).bytes))
    calls: list[int] = []
    with handled(lambda number, _: calls.append(number)):
        waiter.start()
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert calls == [signal.SIGUSR1]
    assert waiter.is_alive()
    shm.to_b.send(b"!").wait()
    waiter.join()
    assert results == [1]


def test_whoever_else_watches_signals_is_told(shm: Pair) -> None:
    request = shm.b.recv(bytearray(1))
    read, write = socket.socketpair()
    with read, write:
        write.setblocking(False)
        before = signal.set_wakeup_fd(write.fileno())
        try:
            with handled(interrupt), Sender(), pytest.raises(InterruptedByTest):
                request.wait(timeout=LONG)
            read.settimeout(10)
            assert read.recv(16) == bytes([signal.SIGUSR1])
            assert signal.set_wakeup_fd(before) == write.fileno()
        finally:
            signal.set_wakeup_fd(before)
    request.cancel()


def test_every_kind_of_wait_ends(shm: Pair) -> None:
    region = shm.b.register(bytearray(8))
    for wait in (lambda: shm.b.accept(timeout=LONG), lambda: region.wait_imm(7, timeout=LONG)):
        with handled(interrupt), Sender(), pytest.raises(InterruptedByTest):
            wait()


def test_waits_of_a_group_end() -> None:
    with (
        StoreServer(crossrail.Context(log="error"), "127.0.0.1:0") as store,
        crossrail.Group(rank=0, size=3, store=store.address, timeout=LONG) as group,
        crossrail.Group(rank=1, size=3, store=store.address, timeout=LONG),
    ):
        group.wait_members([1])
        waits: list[Callable[[], object]] = [
            lambda: group.wait_change(timeout=LONG),
            lambda: group.wait_members([2], timeout=LONG),
            lambda: group.barrier("of all", timeout=LONG),
            lambda: group.barrier("of those that are there", [0, 1], timeout=LONG),
            lambda: group.collect("key", [0, 1], timeout=LONG),
        ]
        while group.wait_change(timeout=0.05):
            pass
        for wait in waits:
            with handled(interrupt), Sender() as sender, pytest.raises(InterruptedByTest):
                wait()
            assert time.monotonic() - sender.sent[0] < 20


def test_a_connection_that_is_not_answered_is_left(shm: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with handled(interrupt), Sender(), pytest.raises(InterruptedByTest):
            shm.a.connect(address, timeout=2)


def test_an_event_loop_gets_its_signals(shm: Pair) -> None:
    async def main() -> int:
        got = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, got.set)
        request = shm.b.recv(bytearray(1))
        with Sender(), pytest.raises(crossrail.TimeoutError):
            request.wait(timeout=0.5)
        await asyncio.wait_for(got.wait(), 10)
        shm.to_b.send(b"!")
        return (await request).bytes

    assert asyncio.run(main()) == 1
