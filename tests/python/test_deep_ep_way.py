"""crossrail.deep_ep on what an ExpertBuffer does with tensors, down to addresses and strides; the GPU is the host."""

from __future__ import annotations

from typing import Any

import deep_ep_work as work
import pytest
from deep_ep_twin import Meeting, TwinDeepEp, TwinExperts, TwinMachine, TwinRanks, on_ranks
from fake_gpu import STREAM, FakeHandle
from host_torch import torch, torch_is_there

from crossrail import _calls, _experts_device
from crossrail._device_arrays import CallStreams, TorchArrays
from crossrail._experts_device import DeviceOperations

__all__ = ["torch_is_there"]


@pytest.fixture(autouse=True)
def handles_are_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_experts_device, "DeviceHandle", FakeHandle)


class HostTensors(TorchArrays):
    """PyTorch's tensors, as if the host's were on a GPU."""

    def __init__(self) -> None:
        super().__init__(torch, 0)
        self.device, self.ordinal = torch.device("cpu"), -1

    def streams(self, stream: Any, operation: str) -> CallStreams:
        return CallStreams(STREAM, None)

    def shown(self, array: Any) -> Any:
        return (
            torch.from_numpy(array.view("i2")).view(torch.bfloat16) if array.dtype == "u2" else torch.from_numpy(array)
        )


class Way(DeviceOperations):
    def arrays_of(self, value: Any) -> Any:
        assert isinstance(value, torch.Tensor)
        return HostTensors()


class WayBuffer(TwinExperts):
    """An ExpertBuffer's half that is in Python."""

    spare_regions = 1

    def __init__(self, meeting: Meeting, rank: int, kind: Any, max_tokens: int, name: str) -> None:
        super().__init__(meeting, rank, kind, max_tokens, name)
        self._operations = Way(self.world.buffers[rank], self.sizes, None)  # type: ignore[arg-type]

    def _together(self, done: Any) -> Any:
        """An operation is over when all ranks have put it in."""
        self.meeting.gather(self.rank, None)
        return done

    def dispatch(self, x: Any, topk_idx: Any, topk_weights: Any = None, layout: Any = "rank", **rest: Any) -> Any:
        options = {"handle": None, "expert_alignment": 1, "out": None, "stats": None, "waits": None, "max_rows": None}
        options |= {"host_word": 0}
        given = options | rest
        assert given.keys() == options.keys()
        call = _calls.DispatchCall(x, topk_idx, topk_weights, layout, **given, stream=None, send_only=False)
        return self._together(self._operations.dispatch(call))

    def combine(self, y: Any, handle: Any, **rest: Any) -> Any:
        options = {"topk_weights": None, "bias": None, "out": None, "waits": None}
        given = options | rest
        assert given.keys() == options.keys()
        call = _calls.CombineCall(y, handle, **given, stream=None, send_only=False)
        return self._together(self._operations.combine(call))


class WayMachine(TwinMachine):
    def make(self, kind: Any, max_tokens: int, num_sms: int | None, name: str, ranks: list[int]) -> Any:
        return WayBuffer(self.meeting, self.rank, kind, max_tokens, name)

    def dispatch(self, made: Any, given: tuple[Any, ...], alignment: int, host_word: int, *, counted: bool) -> Any:
        assert counted, "no call is wrong here"
        return made.buffer.dispatch(*given, "rank", expert_alignment=alignment, host_word=host_word)


class WayDeepEp(TwinDeepEp):
    def _meet(self, group: Any, comm: Any, share_node: bool) -> Any:
        return TwinRanks(*group), WayMachine(*group)


def run(what: Any, *arguments: Any, **options: Any) -> None:
    on_ranks(2, lambda buffer: what(work.Env(torch, buffer), *arguments, **options), WayDeepEp)


def test_normal_without_ids() -> None:
    run(work.normal_without_ids, 4)


def test_normal_with_more_tokens() -> None:
    run(work.normal_grows)
