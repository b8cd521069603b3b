"""Streams that wait for a request must hold up nothing of what the request needs.

In a file of its own: where they do, the process ends only when its time is over.
"""

from __future__ import annotations

import pytest
from conftest import Link, goes_on
from far import pattern

torch = pytest.importorskip("torch")

SIZE = (6 << 20) + 11


def test_as_many_streams_wait_as_there_are(link: Link) -> None:
    """Streams share a few queues of the GPU: none of those that wait may hold up what they wait for."""
    tensor = torch.zeros(SIZE, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream("cuda:0") for _ in range(32)]
    link.far.do("make", name="source", nbytes=SIZE, seed=5)
    request = link.worker.recv(tensor, source=link.endpoint)
    for stream in streams:
        request.wait_on(stream)
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
