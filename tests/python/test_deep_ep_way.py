"""crossrail.deep_ep on what an ExpertBuffer does with tensors, down to addresses and strides; the GPU is the host."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import deep_ep_work as work
import pytest
from deep_ep_twin import PATIENCE_S, Meeting, TwinDeepEp, TwinMachine, TwinRanks, TwinStreams, on_ranks
from fake_gpu import STREAM, FakeHandle, FakeOperation, World
from host_torch import torch, torch_is_there

from crossrail import UsageError, _calls, _experts_device
from crossrail._device_arrays import CallStreams, TorchArrays
from crossrail._experts_device import DeviceOperations

__all__ = ["torch_is_there"]
CHANGED = threading.Condition()


@pytest.fixture(autouse=True)
def ranks_are_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    put = FakeOperation._put

    def put_alone(operation: FakeOperation) -> None:
        with CHANGED:
            put(operation)
            CHANGED.notify_all()

    def counts(operation: FakeOperation) -> Any:
        with CHANGED:
            assert CHANGED.wait_for(lambda: operation.told is not None, PATIENCE_S)
        return operation.told

    monkeypatch.setattr(FakeOperation, "_put", put_alone)
    monkeypatch.setattr(FakeOperation, "counts", counts)
    monkeypatch.setattr(_experts_device, "DeviceHandle", FakeHandle)
    yield


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


class WayStreams(TwinStreams):
    """There is only one."""

    def unchanged(self) -> int | None:
        return STREAM


class Together:
    """The native half, for calls that go to it straight: an operation is over when all ranks have put it in."""

    def __init__(self, native: Any, meeting: Meeting) -> None:
        self.native, self.meeting, self.calls = native, meeting, 0

    def _over(self, begun: Any, send_only: bool) -> Any:
        self.calls += 1
        if not send_only:
            self.meeting.gather(self.native.rank, None)
            return begun
        finish = begun.finish

        def finished(stream: int) -> None:
            finish(stream)
            self.meeting.gather(self.native.rank, None)

        begun.finish = finished
        return begun

    def dispatch_expert(self, args: Any, stream: int, send_only: bool) -> Any:
        return self._over(self.native.dispatch_expert(args, stream, send_only), send_only)

    def combine_expert(self, args: Any, handle: Any, stream: int, send_only: bool) -> Any:
        return self._over(self.native.combine_expert(args, handle, stream, send_only), send_only)


class WayBuffer:
    """An ExpertBuffer's half that is in Python."""

    spare_regions = 1

    def __init__(self, meeting: Meeting, rank: int, kind: Any, max_tokens: int) -> None:
        fp8, packed = kind.payload != "bf16", kind.payload == "ue8m0"
        self.sizes = _calls.Sizes(meeting.size, max_tokens, kind.hidden, kind.experts, kind.topk, fp8, packed)
        world = meeting.gather(rank, World(self.sizes) if rank == 0 else None)[0]
        self.meeting, self.rank = meeting, rank
        self._operations = Way(world.buffers[rank], self.sizes, None)  # type: ignore[arg-type]
        self._native = Together(world.buffers[rank], meeting)

    def destroy(self) -> None: ...

    def masked(self) -> list[int]:
        return []

    def _together(self, begun: Any, send_only: bool) -> Any:
        """An operation is over when all ranks have put it in."""
        if not send_only:
            self.meeting.gather(self.rank, None)
            return begun

        def finish(stream: Any) -> None:
            begun.finish(stream)
            self.meeting.gather(self.rank, None)

        return SimpleNamespace(result=begun.result, finish=finish)

    def dispatch(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any = None,
        layout: Any = "expert",
        *,
        send_only: bool = False,
        **rest: Any,
    ) -> Any:
        options = {"handle": None, "expert_alignment": 1, "out": None, "stats": None, "waits": None, "max_rows": None}
        options |= {"say": 0}
        given = options | rest
        assert given.keys() == options.keys()
        call = _calls.DispatchCall(x, topk_idx, topk_weights, layout, **given, stream=None, send_only=send_only)
        return self._together(self._operations.dispatch(call), send_only)

    def combine(self, y: Any, handle: Any, *, send_only: bool = False, **rest: Any) -> Any:
        options = {"topk_weights": None, "bias": None, "out": None, "waits": None}
        given = options | rest
        assert given.keys() == options.keys()
        call = _calls.CombineCall(y, handle, **given, stream=None, send_only=send_only)
        return self._together(self._operations.combine(call), send_only)


class WayMachine(TwinMachine):
    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(meeting, rank)
        self.streams = WayStreams()

    def make(self, kind: Any, max_tokens: int, num_sms: int | None, name: str, ranks: list[int]) -> Any:
        return WayBuffer(self.meeting, self.rank, kind, max_tokens)

    def dispatch(self, made: Any, given: tuple[Any, ...], alignment: int, say: int, *, counted: bool) -> Any:
        assert counted, "no call is wrong here"
        return made.buffer.dispatch(*given, "rank", expert_alignment=alignment, say=say)


class WayDeepEp(TwinDeepEp):
    def _meet(self, group: Any, comm: Any, share_node: bool) -> Any:
        return TwinRanks(*group), WayMachine(*group)


def run(what: Any, *arguments: Any, **options: Any) -> None:
    on_ranks(2, lambda buffer: what(work.Env(torch, buffer), *arguments, **options), WayDeepEp)


@pytest.mark.parametrize("payload", ["bf16", "fp8", "ue8m0"])
@pytest.mark.parametrize("hook", [False, True])
def test_low_latency(payload: str, hook: bool) -> None:
    for seed in (1, 2):
        run(work.low_latency, seed, payload, hook=hook)


def test_low_latency_halves() -> None:
    run(work.low_latency_overlapped, 3)


@pytest.mark.parametrize("payload", ["bf16", "fp8", "ue8m0"])
def test_low_latency_as_usual(payload: str) -> None:
    """Calls like an earlier one go a shorter way, and give the same; what is not like it says what is wrong."""

    def rounds(buffer: TwinDeepEp) -> None:
        env = work.Env(torch, buffer)
        for seed in range(5):
            work.low_latency(env, 200 + seed, payload, hook=seed == 3, counted=False)
        (made,) = buffer._pool._made.values()
        assert made.buffer._native.calls == 9, "all but the first dispatch go straight to the native half"
        work.low_latency(env, 205, payload)
        assert made.buffer._native.calls == 9, "not those that count"
        x, idx = torch.zeros(3, env.hidden, dtype=torch.bfloat16), torch.zeros(3, env.topk, dtype=torch.int64)
        with pytest.raises(UsageError, match="x is not contiguous"):
            buffer.low_latency_dispatch(x.t().contiguous().t(), idx, work.MOST, env.experts, use_fp8=payload != "bf16")
        with pytest.raises(UsageError, match=r"topk_idx is int64 \[3, 4\] where .* \[2, K\]"):
            buffer.low_latency_dispatch(x[:2], idx, work.MOST, env.experts, use_fp8=payload != "bf16")

    on_ranks(2, rounds, WayDeepEp)


def test_normal_without_ids() -> None:
    run(work.normal_without_ids, 4)


def test_normal_with_more_tokens() -> None:
    run(work.normal_grows)
