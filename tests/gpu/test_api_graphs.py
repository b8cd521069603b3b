"""Copies and signals in the order of streams between two processes' GPUs, captured in graphs and replayed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import graphs
import pytest
from conftest import GPUS, Link
from far import pattern

import crossrail

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.parametrize("link", ["cuda_ipc"], indirect=True)
"""No other way maps GPU memory."""

REPLAYS = 1000 if GPUS > 1 else 100
"""Two processes take turns on one GPU, which takes its time."""


@pytest.fixture
def near(link: Link) -> Iterator[Link]:
    yield link
    link.far.do("drop")


def map_theirs(near: Link, name: str, nbytes: int) -> Any:
    """Their memory of that name, mapped here."""
    near.context.alloc(1, near.device)
    near.far.do("make", name=name, nbytes=nbytes, own=True)
    return near.endpoint.map(bytes.fromhex(near.far.do("share", name=name)))


@pytest.mark.parametrize("size", [1, 4096, 65_537, (9 << 20) + 5])
def test_put(near: Link, size: int) -> None:
    mapped = map_theirs(near, "target", size)
    assert mapped.device == "cuda:0" and mapped.nbytes == size + 256
    stream = torch.cuda.Stream("cuda:0")
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        source = pattern(size, 21, "cuda:0")
        mapped.put(source, stream=stream)
    stream.synchronize()
    assert near.far.do("wrong", name="target", seed=21) == 0
    assert torch.equal(torch.from_dlpack(mapped)[:size], source)


def test_put_without_a_stream_comes_after_the_arrays_own(near: Link) -> None:
    mapped = map_theirs(near, "target", 5000)
    side, source = torch.cuda.Stream("cuda:0"), torch.zeros(5000, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(300_000_000)
        source.fill_(4)
        mapped.put(source)
    torch.cuda.synchronize()
    assert near.far.do("value", name="target") == [4, 4]


def test_a_signal_comes_after_its_bytes_and_is_awaited(near: Link) -> None:
    memory = near.context.alloc(1 << 20, near.device)
    mapped = map_theirs(near, "numbers", 1 << 20)
    stream = torch.cuda.Stream("cuda:0")
    signal = torch.from_dlpack(memory)[:8].view(torch.int64)
    signal.fill_(3)  # loads the kernel, for which a stream that waits could be no time
    torch.cuda.synchronize()
    awaited = memory.await_signal(0, 5, stream=stream, timeout=20)
    assert awaited.outcome == "pending" and not stream.query()
    signal.fill_(4)
    torch.cuda.current_stream().synchronize()
    assert awaited.outcome == "pending"
    signal.fill_(5)
    stream.synchronize()
    assert awaited.outcome == "reached"
    source = pattern(4096, 2, "cuda:0")
    mapped.put(source, 256, stream=stream, signal=(8, 7))
    stream.synchronize()
    theirs = torch.from_dlpack(mapped)
    assert torch.equal(theirs[256:4352], source) and int(theirs[8:16].view(torch.int64)) == 7
    mapped.put(source[:0], stream=stream, signal=(8, 8))
    stream.synchronize()
    assert int(theirs[8:16].view(torch.int64)) == 8, "a signal without bytes"


def test_a_signal_that_never_comes(near: Link) -> None:
    memory, stream = near.context.alloc(64, near.device), torch.cuda.Stream("cuda:0")
    awaited = memory.await_signal(8, 1, stream=stream, timeout=0.2)
    stream.synchronize()
    assert awaited.outcome == "timed_out"


def test_there_and_back_in_two_graphs(near: Link) -> None:
    memory = near.context.alloc(graphs.NBYTES, near.device)
    mapped = map_theirs(near, "numbers", graphs.NBYTES)
    near.far.ask("echo_graph", shared=bytes(near.endpoint.share(memory)).hex(), replays=REPLAYS)
    numbers = graphs.call(torch, memory, mapped, REPLAYS, near.device)
    assert near.far.answer() == REPLAYS
    assert int(numbers.min()) == int(numbers.max()) == REPLAYS


def test_tensors_of_pytorch_are_shared_too(near: Link) -> None:
    tensor = torch.zeros(3 << 20, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    near.far.do("fill_shared", shared=bytes(near.endpoint.share(tensor[1 << 20 :])).hex(), value=9)
    assert int(tensor[: 1 << 20].max()) == 0 and int(tensor[1 << 20 :].min()) == 9


def test_bad_puts(near: Link) -> None:
    mapped = map_theirs(near, "target", 1000)
    source = torch.zeros(2000, dtype=torch.uint8, device="cuda:0")
    for start, words in (
        (lambda: mapped.put(source), "2000 bytes"),
        (lambda: mapped.put(source[:100], mapped.nbytes - 99), "100 bytes"),
        (lambda: mapped.put(source[:1], signal=(4, 1)), "aligned"),
        (lambda: mapped.put(source[:1], signal=(mapped.nbytes, 1)), "8 bytes"),
        (lambda: mapped.put(b"host"), "host"),
        (lambda: mapped.put(source[:200:2]), "contiguous"),
    ):
        with pytest.raises(crossrail.UsageError, match=words):
            start()
    memory = near.context.alloc(64, near.device)
    for offset in (4, 60, 64, 1 << 40):
        with pytest.raises(crossrail.UsageError):
            memory.await_signal(offset, 1, timeout=0.1)
