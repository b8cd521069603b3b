"""PyTorch's tensors and streams in expert buffers on GPUs: whose memory is used in which stream. By the double."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from ep_cases import Case, Setup, inputs
from fake_gpu import World
from host_torch import ExternalStream, GpuTorch, Stream, Tensor
from test_experts_device import combine, dispatch

import crossrail
from crossrail import _calls, _experts_device
from crossrail._calls import Sizes
from crossrail._device_arrays import TorchArrays
from crossrail._experts_device import DeviceOperations, device_ordinal

SETUP = Setup(1, max_tokens=6, hidden=512, local_experts=3, topk=2)
CURRENT, SIDE = GpuTorch.current, 77
"""Raw handles; the second is the stream of the stand-in for a GPU."""


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> GpuTorch:
    fake = GpuTorch()
    monkeypatch.setitem(sys.modules, "torch", fake)
    return fake


@pytest.fixture
def way(torch: GpuTorch, monkeypatch: pytest.MonkeyPatch) -> DeviceOperations:
    numbers = {"max_tokens_per_rank": 6, "hidden": 512, "num_experts": 3, "topk": 2, "ranks": 1}
    parameters = _calls.parameters_of(numbers, "bf16", "f32", ("expert", "rank"), 1.0)
    world = World(Sizes.of(parameters))
    monkeypatch.setattr("fake_gpu.STREAM", SIDE)
    return DeviceOperations(world.buffers[0], world.sizes, None)  # type: ignore[arg-type]


@pytest.fixture
def given(torch: GpuTorch) -> dict[str, Tensor]:
    fed = inputs(Case(SETUP), 0)
    return {
        "x": torch.on_gpu(fed.x),
        "topk_idx": torch.on_gpu(fed.topk_idx),
        "topk_weights": torch.on_gpu(fed.topk_weights),
    }


def test_the_current_stream_needs_no_notes(way: DeviceOperations, torch: GpuTorch, given: dict[str, Tensor]) -> None:
    with torch.within(Stream(SIDE)):
        came = dispatch(way, **given)
        sums = combine(way, torch.on_gpu(np.zeros(came.x.shape, np.uint16)), came.handle)
    assert isinstance(came.x, Tensor) and came.x.dtype is torch.bfloat16 and came.x.shape == (3, 6, 512)
    assert came.counts.dtype is torch.int32 and came.ranges.dtype is torch.int64
    assert sums.x.shape == (6, 512)
    for tensor in (*given.values(), came.x, came.counts, sums.x):
        assert tensor.used_in == []
    assert came.x.made_in == SIDE


def test_usual_calls_are_prepared(
    way: DeviceOperations, torch: GpuTorch, given: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without, torch.within(Stream(SIDE)):
        without.delattr(_experts_device, "Call")
        came = dispatch(way, **given)
        y = torch.on_gpu(np.zeros(came.x.shape, np.uint16))
        combine(way, y, came.handle, out=torch.on_gpu(np.zeros((6, 512), np.uint16)))
        with pytest.raises(crossrail.UsageError, match="wire 'fp7' is none of"):
            combine(way, y, came.handle, wire="fp7")
    with torch.within(Stream(SIDE)):
        pending = dispatch(way, **given, send_only=True)
        assert pending.result.counts.shape == (3,)
        assert pending.finish() is pending.result and pending.result.event.is_done()


@pytest.mark.parametrize("kind", ["stream", "handle"])
def test_another_stream(way: DeviceOperations, torch: GpuTorch, given: dict[str, Tensor], kind: str) -> None:
    came = dispatch(way, **given, stream=Stream(SIDE) if kind == "stream" else SIDE)
    assert GpuTorch.current == CURRENT
    for tensor in given.values():
        assert tensor.used_in == [SIDE], "the allocator may give it to others before it was read"
    assert came.x.made_in == SIDE and came.x.used_in == [CURRENT]


def test_regions_know_both_streams(
    way: DeviceOperations, given: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchArrays, "shown", lambda self, array: array)
    dispatch(way, **given, layout="rank", max_rows=6, stream=Stream(SIDE))
    (region,) = way._native.regions  # type: ignore[attr-defined]
    assert region.users == [SIDE, CURRENT]


def test_slices_of_routers_are_put_together_in_the_calls_stream(
    way: DeviceOperations, torch: GpuTorch, given: dict[str, Tensor]
) -> None:
    wide = torch.on_gpu(np.repeat(given["topk_idx"].array, 2, axis=1))
    mine = torch.on_gpu(np.zeros((6, 4), np.float32))
    given |= {"topk_idx": wide[:, ::2], "topk_weights": mine[:, :2]}
    came = dispatch(way, **given, stream=Stream(SIDE))
    assert int(came.counts.array.sum()) == 12
    with torch.within(Stream(SIDE)):
        begun = dispatch(way, **given, send_only=True)
        copies = [tensor for tensor in begun._call.keep if tensor.shape == (6, 2) and tensor.is_contiguous()]
        assert len(copies) == 2, "what was copied is kept until the operation is finished"
        assert int(begun.finish().counts.array.sum()) == 12


def test_received_in_a_third_stream(
    way: DeviceOperations, given: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = dispatch(way, **given, stream=SIDE, send_only=True)
    waited: list[int] = []
    monkeypatch.setattr("fake_gpu.FakeEvent.wait", lambda event, stream: waited.append(stream))
    monkeypatch.setattr("fake_gpu.STREAM", 99)
    came = begun.finish(stream=99)
    assert came is begun.result and waited == [99]
    assert came.x.used_in == [CURRENT, 99] and given["x"].used_in == [SIDE, 99]


def test_a_stream_by_its_handle_is_an_external_one(torch: GpuTorch) -> None:
    arrays = TorchArrays(torch, 0)
    streams = arrays.streams(1234, "dispatch")
    assert isinstance(streams.stream, ExternalStream) and streams.handle == 1234
    assert streams.current.cuda_stream == CURRENT
    assert [handle for handle, _ in streams.users()] == [1234, CURRENT]
    assert arrays.streams(CURRENT, "dispatch").current is None
    with pytest.raises(crossrail.UsageError, match="the stream is of cuda:1, but the buffer is on cuda:0"):
        arrays.streams(Stream(7, torch.device("cuda", 1)), "dispatch")


def test_tensors_that_are_not_the_gpus(way: DeviceOperations, torch: GpuTorch, given: dict[str, Tensor]) -> None:
    fed = inputs(Case(SETUP), 0)

    def says(text: str, **options: Any) -> None:
        with pytest.raises(crossrail.UsageError, match=text):
            dispatch(way, **(given | options))

    says("x is on cpu, but the buffer is on cuda:0", x=torch.on_gpu(fed.x, device="cpu"))
    says("topk_idx is a ndarray, but other arguments are PyTorch tensors", topk_idx=fed.topk_idx)
    says("topk_weights: expected float32", topk_weights=torch.on_gpu(fed.topk_weights.astype(np.float64)))
    says("the ndarray is memory of the host", x=fed.x)
    says("x is a list, not an array in GPU memory", x=[1, 2])


def test_cuda_is_the_current_gpu_where_pytorch_is_used(torch: GpuTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_ordinal("cuda") == 3
    assert device_ordinal(torch.device("cuda", 1)) == 1
    assert device_ordinal("cpu") is None
    monkeypatch.delitem(sys.modules, "torch")
    assert device_ordinal("cuda") == 0 and device_ordinal(2) == 2
