"""Nothing is touched before the work that comes before it in its stream, and nobody has to wait on the host."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from conftest import Link, goes_on
from far import pattern

import crossrail

torch = pytest.importorskip("torch")

LONG = 600_000_000
"""Cycles of a GPU: a third of a second or so."""
SIZE = (6 << 20) + 11


@pytest.fixture
def side() -> Any:
    return torch.cuda.Stream("cuda:0")


@pytest.fixture
def tensor() -> Any:
    made = torch.zeros(SIZE, dtype=torch.uint8, device="cuda:0")
    made.fill_(1)  # loads the kernels, which could wait for a stream that is busy
    torch.empty_like(made).copy_(made)
    made.zero_()
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    return made


def busy_then(stream: Any, work: Callable[[], object]) -> None:
    """Keeps a stream busy for a long time, and then does `work`."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        work()


def test_a_send_comes_after_the_present_work_of_the_current_stream(link: Link, side: Any, tensor: Any) -> None:
    link.far.do("make", name="target", nbytes=SIZE)
    link.far.ask("recv", name="target")
    busy_then(side, lambda: tensor.fill_(7))
    with torch.cuda.stream(side):
        request = link.endpoint.send(tensor)
    assert not side.query(), "the call came back while the stream was still busy"
    request.wait()
    link.far.answer()
    assert link.far.do("value", name="target") == [7, 7]
    link.far.do("drop")


@pytest.mark.parametrize("form", ["handle", "torch", "protocol"])
def test_a_stream_that_is_named_comes_first(link: Link, side: Any, tensor: Any, form: str) -> None:
    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, side.cuda_stream)

    named = {"handle": side.cuda_stream, "torch": side, "protocol": Protocol()}[form]
    link.far.do("make", name="target", nbytes=SIZE)
    key = crossrail.RegionKey.from_bytes(bytes.fromhex(link.far.do("register", name="target")))
    busy_then(side, lambda: tensor.fill_(9))
    request = link.endpoint.write(tensor, key, stream=named)
    assert not side.query()
    request.wait()
    assert link.far.do("value", name="target") == [9, 9]
    link.far.do("deregister", name="target")
    link.far.do("drop")


def test_a_receive_comes_after_what_still_reads_its_target(link: Link, side: Any, tensor: Any) -> None:
    kept = torch.empty_like(tensor)
    tensor.fill_(1)
    torch.cuda.synchronize()
    link.far.do("make", name="source", nbytes=SIZE, seed=4)
    link.far.ask("send", name="source")
    busy_then(side, lambda: kept.copy_(tensor))
    with torch.cuda.stream(side):
        request = link.worker.recv(tensor, source=link.endpoint)
    assert not side.query()
    request.wait()
    link.far.answer()
    torch.cuda.synchronize()
    assert int(kept.min()) == int(kept.max()) == 1, "what was queued saw the old bytes"
    assert torch.equal(tensor, pattern(SIZE, 4, "cuda:0"))
    link.far.do("drop")


def test_a_read_comes_after_what_still_reads_its_target(link: Link, side: Any, tensor: Any) -> None:
    kept = torch.empty_like(tensor)
    link.far.do("make", name="source", nbytes=SIZE, seed=4)
    key = crossrail.RegionKey.from_bytes(bytes.fromhex(link.far.do("register", name="source")))
    busy_then(side, lambda: kept.copy_(tensor))
    link.endpoint.read(tensor, key, stream=side).wait()
    torch.cuda.synchronize()
    assert int(kept.max()) == 0 and torch.equal(tensor, pattern(SIZE, 4, "cuda:0"))
    link.far.do("deregister", name="source")
    link.far.do("drop")


def test_endpoints_do_not_wait_for_each_others_streams(link: Link, side: Any, tensor: Any) -> None:
    source, target = (torch.full((100_000,), value, dtype=torch.uint8, device="cuda:0") for value in (3, 0))
    torch.cuda.synchronize()
    busy_then(side, lambda: (torch.cuda._sleep(3 * LONG), tensor.fill_(7)))
    with torch.cuda.stream(side):
        slow = link.worker.recv(tensor, tag=99, source=link.endpoint)
    with (
        torch.cuda.stream(torch.cuda.Stream("cuda:0")),
        crossrail.Worker(link.context) as a,
        crossrail.Worker(link.context) as b,
    ):
        to_b = a.connect(b.address())
        quick = b.recv(target)
        to_b.send(source).wait()
        quick.wait()
        assert not side.query(), "the other stream is still busy"
    assert int(target.min()) == 3
    slow.cancel()
    with pytest.raises(crossrail.CancelledError):
        slow.wait()
    torch.cuda.synchronize()


def test_messages_keep_their_order(link: Link, side: Any, tensor: Any) -> None:
    """The first waits for its stream, and the second, which could go at once, for the first."""
    quick = torch.full((100,), 2, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    for name in ("first", "second"):
        link.far.do("make", name=name, nbytes=100)
    busy_then(side, lambda: tensor.fill_(1))
    with torch.cuda.stream(side):
        requests = [link.endpoint.send(tensor[:100], tag=5)]
    requests += [link.endpoint.send(quick, tag=5), link.endpoint.send(b"host" * 25, tag=6)]
    link.far.do("recv", name="first", tag=5)
    link.far.do("recv", name="second", tag=5)
    assert link.far.do("value", name="first") == [1, 1] and link.far.do("value", name="second") == [2, 2]
    link.far.do("recv", name="second", tag=6)
    crossrail.wait_all(requests)
    link.far.do("drop")


@pytest.mark.parametrize("current", [False, True], ids=["side", "default"])
def test_a_stream_waits_for_a_receive(link: Link, side: Any, tensor: Any, current: bool) -> None:
    stream = torch.cuda.current_stream() if current else side
    link.far.do("make", name="source", nbytes=SIZE, seed=8)
    result = torch.zeros_like(tensor)
    torch.add(tensor, 1, out=result)  # loads the kernel, for which a stream that waits could be no time
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        request = link.worker.recv(tensor, source=link.endpoint)
        request.wait_on(stream)
        torch.add(tensor, 1, out=result)  # put in before a single byte has been sent
    assert not stream.query()
    link.far.ask("send", name="source", delay=0.1)
    goes_on(stream, request)
    assert torch.equal(result, pattern(SIZE, 8, "cuda:0") + 1)
    assert request.is_done() and request.wait().bytes == SIZE
    link.far.answer()
    link.far.do("drop")


def test_a_stream_waits_for_a_send_before_it_reuses_the_source(link: Link, side: Any, tensor: Any) -> None:
    link.far.do("make", name="target", nbytes=SIZE)
    with torch.cuda.stream(side):
        tensor.fill_(5)
        request = link.endpoint.send(tensor)
        request.wait_on(side)
        tensor.fill_(6)
    assert not side.query(), "nobody has received it yet"
    link.far.ask("recv", name="target")
    goes_on(side, request)
    link.far.answer()
    assert link.far.do("value", name="target") == [5, 5] and int(tensor.min()) == 6
    request.wait()
    link.far.do("drop")


def test_a_stream_goes_on_when_its_operation_fails(link: Link, side: Any, tensor: Any) -> None:
    for _ in range(3):
        request = link.worker.recv(tensor, tag=55)
        request.wait_on(side)
        request.wait_on(side.cuda_stream)
        assert not side.query()
        request.cancel()
        goes_on(side, request)
        with pytest.raises(crossrail.CancelledError):
            request.wait()
        request.wait_on(side)  # finished already: nothing to wait for
        side.synchronize()


def test_wait_on_and_a_callback_both_hear_of_the_end(link: Link, side: Any, tensor: Any) -> None:
    told = threading.Event()
    request = link.worker.recv(tensor, tag=56)
    request.on_complete(lambda _request: told.set())
    request.wait_on(side)
    request.cancel()
    goes_on(side, request)
    assert told.wait(10)
    with pytest.raises(crossrail.CancelledError):
        request.wait()


def test_inside_a_capture_operations_are_refused(link: Link, tensor: Any) -> None:
    graph, request = torch.cuda.CUDAGraph(), link.worker.recv(tensor, tag=57)
    stream = torch.cuda.Stream("cuda:0")
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        with pytest.raises(crossrail.UsageError, match="captured"):
            request.wait_on(stream)
        with pytest.raises(crossrail.UsageError, match="captured"):
            link.endpoint.send(tensor, stream=stream)
        tensor.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert int(tensor.max()) == 1
    request.cancel()
    with pytest.raises(crossrail.CancelledError):
        request.wait()


def test_captures_of_another_thread_are_not_broken(link: Link, tensor: Any) -> None:
    """While this thread transfers, another captures graphs in the mode that forbids nearly everything meanwhile."""
    link.far.do("make", name="here", nbytes=SIZE)
    link.far.do("make", name="there", nbytes=SIZE, seed=3)
    back = torch.empty_like(tensor)
    torch.cuda.synchronize()
    failures: list[BaseException] = []
    captured, over = [0], threading.Event()

    def capture() -> None:
        try:
            stream, numbers = torch.cuda.Stream("cuda:0"), torch.zeros(1000, device="cuda:0")
            stream.wait_stream(torch.cuda.current_stream())
            numbers.add_(1)
            while not over.is_set():
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.stream(stream):
                    graph.capture_begin(capture_error_mode="global")
                    for _ in range(200):
                        numbers.add_(1)
                    graph.capture_end()
                graph.replay()
                captured[0] += 1
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=capture)
    thread.start()
    try:
        while captured[0] < 2 and not failures:
            time.sleep(0.01)
        for _ in range(40):
            link.far.ask("recv", name="here")
            link.endpoint.send(tensor).wait()
            link.far.answer()
            link.far.ask("send", name="there")
            link.worker.recv(back, source=link.endpoint).wait()
            link.far.answer()
            if failures:
                break
    finally:
        over.set()
        thread.join(60)
    assert not failures, failures
    assert captured[0] > 5 and torch.equal(back, pattern(SIZE, 3, "cuda:0"))
    link.far.do("drop")
