"""Streams that wait for a request must hold up nothing of what the request needs.

In a file of its own: where they do, the process ends only when its time is over.
"""

from __future__ import annotations

import os

import pytest
from conftest import Link, goes_on
from far import pattern

import crossrail

torch = pytest.importorskip("torch")

SIZE = (6 << 20) + 11


def test_as_many_streams_wait_as_may(link: Link) -> None:
    """Streams share a few queues of the GPU: those that wait leave one for what they wait for, the next is refused."""
    tensor = torch.zeros(SIZE, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    queues = int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8"))
    # PyTorch has 32 streams in all, and gives them out in turns.
    streams = [torch.cuda.Stream("cuda:0") for _ in range(queues - 1)]
    one_more = torch.cuda.Stream("cuda:0")
    link.far.do("make", name="source", nbytes=SIZE, seed=5)
    request = link.worker.recv(tensor, source=link.endpoint)
    for stream in streams:
        request.wait_on(stream)
    with pytest.raises(crossrail.ExhaustedError, match=f"{queues - 1} streams of cuda:0 wait already"):
        request.wait_on(one_more)
    link.far.ask("send", name="source")
    for stream in streams:
        goes_on(stream, request)
    assert request.wait().bytes == SIZE
    link.far.answer()
    assert torch.equal(tensor, pattern(SIZE, 5, "cuda:0"))
    link.far.do("drop")


def test_memory_that_was_never_seen_before_comes_while_a_stream_waits(link: Link) -> None:
    """What the first transfer from it makes must not wait for the GPU, which waits for it."""
    size = 90 << 20
    side, target = torch.cuda.Stream("cuda:0"), torch.zeros(size, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    link.far.do("free")
    link.far.do("make", name="source", nbytes=size, seed=6)
    request = link.worker.recv(target, source=link.endpoint)
    request.wait_on(side)
    link.far.ask("send", name="source")
    goes_on(side, request)
    assert request.wait().bytes == size
    link.far.answer()
    assert torch.equal(target, pattern(size, 6, "cuda:0"))
    link.far.do("drop")
