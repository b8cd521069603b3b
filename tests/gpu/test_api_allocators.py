"""Memory of each of PyTorch's allocators at the other end: the caching one, expandable segments, cudaMallocAsync."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import GPUS, WAYS
from far import Far, pattern

import crossrail

torch = pytest.importorskip("torch")

SIZES = [5, 100_001, (70 << 20) + 13]
ALLOCATORS = {"caching": "", "expandable": "expandable_segments:True", "async": "backend:cudaMallocAsync"}


@pytest.fixture(scope="module", params=ALLOCATORS)
def other(request: pytest.FixtureRequest) -> Iterator[tuple[str, crossrail.Worker, Far]]:
    context = crossrail.Context(tls=WAYS["cuda_ipc"], timeout=30, log="error")
    setting = ALLOCATORS[request.param]
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    with crossrail.Worker(context, name="near") as worker:
        environment = dict.fromkeys(names, setting) if setting else {}
        far = Far(worker, f"cuda:{min(1, GPUS - 1)}", WAYS["cuda_ipc"], **environment)
        yield request.param, worker, far
        far.close()


@pytest.mark.parametrize("size", SIZES)
def test_both_ways(other: tuple[str, crossrail.Worker, Far], size: int) -> None:
    name, worker, far = other
    source = pattern(size, 1, "cuda:0")
    target = torch.zeros_like(source)
    for offset in (0, 7):
        far.do("make", name="target", nbytes=size, offset=offset)
        far.ask("recv", name="target")
        sent = far.endpoint.send(source).wait().as_dict()
        received = far.answer()
        assert far.do("wrong", name="target", seed=1) == 0
        far.do("make", name="source", nbytes=size, offset=offset, seed=2)
        far.ask("send", name="source")
        back = worker.recv(target, source=far.endpoint).wait().as_dict()
        far.answer()
        assert torch.equal(target, pattern(size, 2, "cuda:0"))
        if size > 4096:
            assert "direct(cuda_ipc)" in {sent["protocol"], received["protocol"]}
            # What cannot be passed on goes another way; what can does not.
            assert name == "async" or back["protocol"] == "direct(cuda_ipc)"
    far.do("drop")


def test_memory_that_is_freed_and_allocated_again(other: tuple[str, crossrail.Worker, Far]) -> None:
    """The same addresses mean other memory then."""
    _, worker, far = other
    size = 40 << 20
    target = torch.zeros(size, dtype=torch.uint8, device="cuda:0")
    for turn in range(5):
        far.do("make", name="source", nbytes=size, seed=turn)
        far.ask("send", name="source")
        worker.recv(target, source=far.endpoint).wait()
        far.answer()
        assert torch.equal(target, pattern(size, turn, "cuda:0"))
        far.do("drop")
        far.do("free")


def test_regions(other: tuple[str, crossrail.Worker, Far]) -> None:
    _, _, far = other
    size = (30 << 20) + 1
    far.do("make", name="region", nbytes=size, offset=33)
    key = crossrail.RegionKey.from_bytes(bytes.fromhex(far.do("register", name="region")))
    far.endpoint.write(pattern(size, 5, "cuda:0"), key).wait()
    assert far.do("wrong", name="region", seed=5) == 0
    back = torch.zeros(size, dtype=torch.uint8, device="cuda:0")
    far.endpoint.read(back, key).wait()
    assert torch.equal(back, pattern(size, 5, "cuda:0"))
    far.do("deregister", name="region")
    far.do("drop")
