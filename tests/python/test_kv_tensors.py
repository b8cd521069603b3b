"""Which tensors a paged cache takes, and where it finds their pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import host_torch
import ml_dtypes
import numpy as np
import pytest
from foreign import HOST, Dlpack, Interface, Said
from host_torch import torch, torch_is_there

import crossrail
from crossrail.kv import PagedCache

__all__ = ["torch_is_there"]

PAGES = 10


@pytest.fixture
def worker() -> Iterator[crossrail.Worker]:
    with crossrail.Worker(crossrail.Context(log="error", tls="shm", timeout=30), name="mine", admit=True) as made:
        yield made


def numbered(shape: tuple[int, ...], dtype: Any = np.uint16) -> np.ndarray:
    return (
        np.random.default_rng(len(shape))
        .integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
        .view(dtype)[..., 0]
    )


def test_pages_are_found_wherever_they_lie(worker: crossrail.Worker) -> None:
    plain = numbered((PAGES, 6, 5))
    for shape, view, planes in (
        ((PAGES, 6, 9), lambda array: array[:, :, :5], 6),  # padded rows
        ((PAGES, 9, 5), lambda array: array[:, 2:8], 1),
        ((PAGES, 5, 6), lambda array: array.transpose(0, 2, 1), 1),
        ((2, 6, PAGES, 5), lambda array: array[1].transpose(1, 0, 2), 6),
        ((6, 5, PAGES), lambda array: array.transpose(2, 0, 1), 30),
    ):
        target, other = (view(np.zeros(shape, np.uint16)) for _ in range(2))
        here, there = PagedCache(worker, [target]), PagedCache(worker, [other])
        assert here.block_nbytes == 60 and len(here._shape.parts[0].places) == planes
        target[:] = plain
        remote = here.remote(there.describe())
        remote.push(range(PAGES), range(PAGES)).wait()
        assert np.array_equal(other, plain)
        target[:] = 0
        remote.pull([7, 3], [1, 0]).wait()
        expected = np.zeros_like(plain)
        expected[[7, 3]] = plain[[1, 0]]
        assert np.array_equal(target, expected)


def test_memory_is_registered_once(worker: crossrail.Worker) -> None:
    whole = numbered((3, 2, PAGES, 8))
    assert len(PagedCache(worker, [tuple(layer) for layer in whole])._ranges) == 1
    assert len(PagedCache(worker, list(whole), page_axis=1)._ranges) == 1
    assert len(PagedCache(worker, [whole[0, 0], whole[2, 0]])._ranges) == 2
    # Memory that the peer maps is found by its own segment, which ends where it ends.
    mapped = [worker.context.alloc(1 << 20).numpy(np.uint8).reshape(16, -1) for _ in range(4)]
    assert len(PagedCache(worker, mapped)._ranges) == 4


def test_arrays_of_others(worker: crossrail.Worker) -> None:
    plain, bf16 = bytearray(64), numbered((PAGES, 4), ml_dtypes.bfloat16)
    there = PagedCache(worker, [bf16])
    assert there._shape.parts[0].dtype == "bfloat16"
    assert PagedCache(worker, [plain])._shape.parts[0].dtype == "uint8" and PagedCache(worker, [plain]).pages == 64
    memory = np.zeros((4, 8), np.uint8)
    lent = Dlpack(Said(data=memory.ctypes.data, device=(HOST, 0), shape=(4, 8)))
    cache = PagedCache(worker, [lent])
    assert cache._shape == PagedCache(worker, [memory])._shape and not lent.returned
    del cache
    for on_gpu in (Interface(), Dlpack(Said())):
        with pytest.raises((crossrail.UnsupportedError, crossrail.UsageError)):
            PagedCache(worker, [on_gpu])


@pytest.mark.usefixtures("torch_is_there")
def test_tensors_of_pytorch(worker: crossrail.Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(torch, host_torch.NumpyTorch):
        monkeypatch.setattr(host_torch.Storage, "data_ptr", lambda storage: id(storage), raising=False)
    tensors = [torch.zeros((PAGES, 4, 2, 8), dtype=torch.bfloat16) for _ in range(2)]
    here = PagedCache(worker, tensors, head_axis=2, shard=(1, 2))
    whole = [numbered((PAGES, 4, 4, 8), ml_dtypes.bfloat16) for _ in range(2)]
    there = PagedCache(worker, whole, head_axis=2)
    here.remote(there.describe()).pull([4, 5], [9, 0]).wait()
    for tensor, array in zip(tensors, whole, strict=True):
        got = tensor.view(torch.uint8).numpy().view(np.uint8).reshape(PAGES, -1)
        expected = np.zeros((PAGES, 4, 2, 8), np.uint16)
        expected[[4, 5]] = array.view(np.uint16)[[9, 0], :, 2:]
        assert np.array_equal(got, expected.view(np.uint8).reshape(PAGES, -1))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ([], {}), "0 layers"),
        (lambda: ([()], {}), "1 layers"),
        (lambda: ([np.zeros((3, 4)), np.zeros((4, 4))], {}), r"\[3, 4\] pages"),
        (lambda: ([np.zeros(4)], {"page_axis": 1}), "no such page_axis"),
        (lambda: ([np.zeros((4, 4))], {"head_axis": 0}), "no such page_axis or head_axis"),
        (lambda: ([np.zeros((4, 4, 4))], {"page_axis": 1, "head_axis": 0}), "head_axis 0 is not contiguous"),
        (lambda: ([np.zeros((4, 4))], {"shard": (0, 2)}), "head_axis None"),
        (lambda: ([np.zeros((4, 4))], {"shard": (2, 2), "head_axis": 1}), r"shard \(2, 2\)"),
        (lambda: ([np.zeros((4, 0))], {}), "is empty"),
        (lambda: ([np.zeros((4, 4))[::-1]], {}), "negative or zero strides"),
        (lambda: ([np.broadcast_to(np.zeros(4), (4, 4))], {}), "read-only"),
        (lambda: ([np.lib.stride_tricks.as_strided(np.zeros(9), (4, 4), (8, 8))], {}), "overlap"),
        (lambda: ([b"read-only"], {}), "read-only"),
    ],
)
def test_what_is_no_cache(worker: crossrail.Worker, make: Any, words: str) -> None:
    layers, options = make()
    with pytest.raises(crossrail.UsageError, match=words):
        PagedCache(worker, layers, **options)
