"""Requests: timeouts and their text, cancel, callbacks, threads, Ctrl-C, dropped requests."""

from __future__ import annotations

import gc
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable

import pytest
from pairs import Pair

import crossrail

MAIN = threading.main_thread().ident or 0


def eventually(true: Callable[[], bool], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def test_a_timeout_says_what_who_and_how_far(pair: Pair) -> None:
    request = pair.b.recv(bytearray(123), tag=1)
    began = time.monotonic()
    with pytest.raises(crossrail.TimeoutError) as caught:
        request.wait(timeout=0.25)
    assert 0.24 < time.monotonic() - began < 20
    error = caught.value
    assert isinstance(error, TimeoutError) and isinstance(error, crossrail.CrossrailError)
    assert error.kind == "timeout" and error.operation == "recv" and error.progress == (0, 123)
    assert "0.250 s" in str(error) and "no message has matched" in str(error) and error.hint
    # It went on: the message is still received.
    pair.to_b.send(b"late", tag=1).wait()
    assert request.wait().bytes == 4

    outbound = pair.to_b.send(b"nobody receives this", tag=2)
    with pytest.raises(crossrail.TimeoutError) as caught:
        outbound.wait(timeout=0.02)
    assert caught.value.operation == "send" and caught.value.peer == "b" and "0.020 s" in str(caught.value)
    late = pair.b.recv(bytearray(30), tag=2)
    assert late.wait().bytes == outbound.wait().bytes == 20


def test_the_default_timeout_is_the_contexts(connected: Callable[..., Pair]) -> None:
    pair = connected(timeout="120ms")
    assert pair.context.timeout == pytest.approx(0.12)
    for wait in (pair.b.recv(bytearray(1)).wait, pair.b.accept, pair.b.register(bytearray(1)).wait_imm):
        began = time.monotonic()
        with pytest.raises(crossrail.TimeoutError, match=r"0\.120 s"):
            wait(1) if wait.__name__ == "wait_imm" else wait()
        assert 0.1 < time.monotonic() - began < 20


@pytest.mark.parametrize("timeout", [-1, -1e-9, float("nan"), float("-inf")])
def test_a_senseless_timeout_is_refused(shm: Pair, timeout: float) -> None:
    request = shm.b.recv(bytearray(1))
    with pytest.raises(crossrail.UsageError, match="timeout"):
        request.wait(timeout)
    with pytest.raises(crossrail.UsageError, match="timeout"):
        shm.b.accept(timeout)
    request.cancel()


def test_an_infinite_timeout_waits(shm: Pair) -> None:
    request = shm.b.recv(bytearray(1))
    timer = threading.Timer(0.15, lambda: shm.to_b.send(b"!").wait())
    timer.start()
    assert request.wait(float("inf")).bytes == 1
    timer.join()


def test_test_and_is_done(pair: Pair) -> None:
    request = pair.b.recv(bytearray(1))
    assert request.test() is None and not request.is_done()
    pair.to_b.send(b"!").wait()
    assert eventually(request.is_done)
    receipt = request.test()
    assert receipt is not None and receipt.bytes == 1
    assert request.wait(0).bytes == 1, "the outcome stays"
    assert receipt.as_dict() == request.wait().as_dict()
    assert "finished" in repr(request) and "1 bytes" in repr(receipt)


def test_cancel_before_a_match_gives_the_buffer_back(pair: Pair) -> None:
    buffer = bytearray(10)
    request = pair.b.recv(buffer, tag=1)
    with pytest.raises(BufferError):
        buffer.append(0)
    request.cancel()
    with pytest.raises(crossrail.CancelledError):
        request.wait()
    buffer.append(0)
    request.cancel()
    # The message goes to the next receive.
    other = pair.b.recv(bytearray(4), tag=1)
    pair.to_b.send(b"next", tag=1).wait()
    assert other.wait().bytes == 4


def test_cancel_of_a_send_nobody_receives(pair: Pair) -> None:
    buffer = bytearray(8 << 20)
    request = pair.to_b.send(buffer, tag=1)
    request.cancel()
    with pytest.raises(crossrail.CancelledError):
        request.wait()
    buffer.append(0)
    after = pair.b.recv(bytearray(5), tag=2)
    pair.to_b.send(b"after", tag=2).wait()
    assert after.wait().bytes == 5


def test_cancel_in_mid_transfer_ends_both_ends(pair: Pair) -> None:
    outcomes = set()
    for delay in (0.0, 0.0002, 0.001, 0.003):
        source, target = bytearray(16 << 20), bytearray(16 << 20)
        inbound = pair.b.recv(target, tag=1)
        outbound = pair.to_b.send(source, tag=1)
        time.sleep(delay)
        inbound.cancel()
        for request in (inbound, outbound):
            try:
                outcomes.add(f"{request.wait().bytes} bytes")
            except crossrail.CancelledError as error:
                outcomes.add("cancelled")
                if "before a message matched it" in str(error):
                    outbound.cancel()  # nobody had taken it: it waits for somebody who does
        source.append(0)
        target.append(0)
    assert outcomes <= {"cancelled", f"{16 << 20} bytes"} and outcomes
    after = pair.b.recv(bytearray(5), tag=2)
    pair.to_b.send(b"after", tag=2).wait()
    assert after.wait().bytes == 5


def test_a_callback_gets_its_request_once(pair: Pair) -> None:
    calls: list[tuple[crossrail.Request, int]] = []
    request = pair.b.recv(bytearray(3))
    request.on_complete(lambda done: calls.append((done, threading.get_ident())))
    with pytest.raises(crossrail.UsageError, match="callback"):
        request.on_complete(print)
    with pytest.raises(crossrail.UsageError, match="callable"):
        pair.b.recv(bytearray(3), tag=9).on_complete(7)  # type: ignore[arg-type]
    pair.to_b.send(b"abc").wait()
    assert eventually(lambda: bool(calls))
    assert len(calls) == 1 and calls[0][0] is request and request.wait(0).bytes == 3
    late = pair.b.recv(bytearray(0))
    pair.to_b.send(b"").wait()
    late.wait()
    late.on_complete(lambda done: calls.append((done, 0)))
    assert eventually(lambda: len(calls) == 2), "a finished request calls at once"


def test_a_callback_may_start_operations(pair: Pair) -> None:
    count = 50
    everything = threading.Event()
    received: list[bytes] = []

    def again(request: crossrail.Request) -> None:
        received.append(bytes(inbox))
        if len(received) == count:
            everything.set()
        else:
            pair.b.recv(inbox).on_complete(again)

    inbox = bytearray(4)
    pair.b.recv(inbox).on_complete(again)
    for number in range(count):
        pair.to_b.send(number.to_bytes(4, "little")).wait()
    assert everything.wait(30)
    assert [int.from_bytes(text, "little") for text in received] == list(range(count))


def test_what_a_callback_raises_is_reported_and_nothing_breaks(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[BaseException | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: reported.append(report.exc_value))
    request = pair.b.recv(bytearray(1))
    request.on_complete(lambda _: 1 / 0)
    pair.to_b.send(b"!").wait()
    assert request.wait().bytes == 1
    assert eventually(lambda: len(reported) == 1)
    assert isinstance(reported[0], ZeroDivisionError)


def test_a_failed_request_calls_too(pair: Pair) -> None:
    outcomes: list[str] = []

    def look(request: crossrail.Request) -> None:
        try:
            request.test()
        except crossrail.CancelledError as error:
            outcomes.append(error.kind)

    request = pair.b.recv(bytearray(1))
    request.on_complete(look)
    request.cancel()
    assert eventually(lambda: outcomes == ["cancelled"])


def test_other_threads_run_while_one_waits(pair: Pair) -> None:
    counted = 0
    stop = threading.Event()

    def count() -> None:
        nonlocal counted
        while not stop.is_set():
            counted += 1

    request = pair.b.recv(bytearray(1))
    counter = threading.Thread(target=count)
    counter.start()
    before = counted
    with pytest.raises(crossrail.TimeoutError):
        request.wait(0.3)
    during = counted - before
    stop.set()
    counter.join()
    request.cancel()
    # With the GIL held for the wait it would be a handful.
    assert during > 1000


def test_threads_share_a_worker(pair: Pair) -> None:
    rounds, threads = 200, 4
    failures: list[str] = []

    def talk(tag: int) -> None:
        for number in range(rounds):
            into = bytearray(16)
            inbound = pair.b.recv(into, tag=tag)
            outbound = pair.to_b.send(f"{tag}:{number}".encode().ljust(16), tag=tag)
            inbound.wait()
            outbound.wait()
            if into.decode().strip() != f"{tag}:{number}":
                failures.append(into.decode())

    everyone = [threading.Thread(target=talk, args=(tag,)) for tag in range(threads)]
    for thread in everyone:
        thread.start()
    for thread in everyone:
        thread.join(60)
    assert not failures and not any(thread.is_alive() for thread in everyone)


@pytest.mark.parametrize("what", ["request", "accept", "imm", "connect"])
def test_ctrl_c_ends_every_wait(shm: Pair, what: str) -> None:
    request = shm.b.recv(bytearray(1))
    region = shm.b.register(bytearray(1))
    # Takes connections and says nothing.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        waits: dict[str, Callable[[], object]] = {
            "request": lambda: request.wait(15),
            "accept": lambda: shm.b.accept(15),
            "imm": lambda: region.wait_imm(1, timeout=15),
            "connect": lambda: shm.b.connect(f"127.0.0.1:{silent.getsockname()[1]}", timeout=3),
        }
        timer = threading.Timer(0.2, lambda: signal.pthread_kill(MAIN, signal.SIGINT))
        timer.start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            waits[what]()
        assert time.monotonic() - began < 20
        timer.join()
    request.cancel()
    region.deregister()


def test_a_dropped_request_keeps_its_buffer_until_it_is_finished(pair: Pair) -> None:
    class Buffer(bytearray):
        pass

    buffer = Buffer(5)
    alive = weakref.ref(buffer)
    pair.b.recv(buffer, tag=1)
    marker = pair.b.recv(bytearray(1), tag=2)
    del buffer
    gc.collect()
    assert alive() is not None
    pair.to_b.send(b"later", tag=1)
    pair.to_b.send(b"!", tag=2)
    marker.wait()
    # Handed back by the interpreter's main thread, without any call into Crossrail.
    assert eventually(lambda: alive() is None)


def test_buffers_are_released_as_requests_finish(pair: Pair) -> None:
    into, out = bytearray(100), bytearray(100)
    for _ in range(50):
        inbound = pair.b.recv(into)
        outbound = pair.to_b.send(out)
        outbound.wait()
        inbound.wait()
        into.append(0)
        out.append(0)
    assert len(into) == len(out) == 150


def test_wait_all(pair: Pair) -> None:
    requests = [pair.b.recv(bytearray(1), tag=tag) for tag in range(5)]
    for tag in range(5):
        pair.to_b.send(b"!", tag=tag)
    assert [receipt.tag for receipt in crossrail.wait_all(requests)] == list(range(5))
    assert crossrail.wait_all([]) == []
    stuck = [pair.b.recv(bytearray(1), tag=9), pair.b.recv(bytearray(1), tag=10)]
    began = time.monotonic()
    with pytest.raises(crossrail.TimeoutError):
        crossrail.wait_all(stuck, timeout=0.1)
    assert time.monotonic() - began < 20
    for request in stuck:
        request.cancel()
