"""Pairs on the driver without a GPU: prints what the driver was called for, as JSON.

    LD_LIBRARY_PATH=FOLDER python driver_calls.py FOLDER

FOLDER has libcuda.so.1 and libnvrtc.so.13, made of driver/*. Kernels do nothing: what this shows is the host's way.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from host_torch import torch

from crossrail import ExpertBuffer, Group
from crossrail._calls import Sizes
from crossrail._device_arrays import CallStreams, TorchArrays
from crossrail._expert_calls import Frame
from crossrail._native import ExpertCalls
from crossrail.deep_ep import EventOverlap
from crossrail.deep_ep.buffer import Buffer, answer_of
from crossrail.deep_ep.events import Turn
from crossrail.deep_ep.pool import Gpu, Kind

MAIN, OWN = 0x5000, 0x6000
EXPERTS, MOST, TOPK, HIDDEN = 8, 4, 2, 512
PAIRS = 64
PATTERNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hook": {"return_recv_hook": True},
    "async_finish": {"async_finish": True},
}
COUNTED = ["push", "pop", "current", "owner", "capturing", "mode", "wait", "record", "query", "launch"]


class Streams:
    """See `deep_ep.events.Streams`: handles that the driver takes."""

    last_handle = MAIN

    @staticmethod
    def current_raw(ordinal: int) -> int:
        return MAIN

    def beside(self) -> int:
        return OWN

    def follow(self, handle: int) -> None:
        self.last_handle = handle

    def is_capturing(self) -> bool:
        return False

    def turn(self, previous: Any = None, beside: bool = False) -> Turn:
        return Turn(MAIN, apart=False)

    def overlap(self, operation: Any, tensors: Any) -> EventOverlap:
        if tensors is None:
            return EventOverlap()
        event = operation.event()
        return EventOverlap(SimpleNamespace(current_stream_wait=lambda: event.wait(MAIN)), tensors)  # type: ignore[arg-type]


class OneRank(Buffer):
    """A buffer of one rank, prepared for its dispatches."""

    def __init__(self) -> None:
        self.experts = ExpertBuffer(
            Group(size=1), MOST, HIDDEN, EXPERTS, TOPK, "bf16", device="cuda:0", layouts=["expert"]
        )
        device = torch.empty(1).device
        sizes, kind = Sizes(1, MOST, HIDDEN, EXPERTS, TOPK, False, False), Kind("expert", HIDDEN, EXPERTS, TOPK, "bf16")
        streams: Any = Streams()
        answer = answer_of(self.experts, kind, MOST, MOST)
        frame = Frame(torch, self.experts._native, streams, sizes, device, answer, streams.overlap)
        self._calls = {(MOST, EXPERTS, False, False, False): ExpertCalls(frame)}
        self._closed, self.group_size, self._combine_rooms = False, 1, {}

    def destroy(self) -> None:
        self.experts.destroy()


class HostTensors(TorchArrays):
    """PyTorch's tensors of the host, as if they were on the GPU."""

    def __init__(self) -> None:
        super().__init__(torch, 0)
        self.device, self.ordinal = torch.empty(1).device, -1

    def streams(self, stream: Any, operation: str) -> CallStreams:
        return CallStreams(MAIN, None)

    def shown(self, array: Any) -> Any:
        tensor = torch.empty(tuple(array.shape), dtype=self.dtypes[array.dtype])
        tensor.memory = array
        return tensor


class OneGpu(Gpu):
    """See `deep_ep.pool.Gpu`."""

    def __init__(self) -> None:
        streams: Any = Streams()
        self.device, self.streams = torch.empty(1).device, streams

    def make(self, kind: Kind, max_tokens: int, num_sms: int | None, name: str, ranks: list[int]) -> ExpertBuffer:
        made = ExpertBuffer(Group(size=1), **kind.parameters(max_tokens), device="cuda:0", regions=2)
        arrays = HostTensors()
        made._operations.arrays_of = lambda value: arrays  # type: ignore[method-assign,union-attr]
        return made

    def bytes(self, kind: Kind, max_tokens: int) -> int:
        return max_tokens


class NormalRank(Buffer):
    """A buffer of one rank for normal mode."""

    def _meet(self, group: Any, comm: Any, share_node: bool) -> Any:
        alone = SimpleNamespace(rank=0, size=1, step=lambda: None, exchange=lambda message: [message])
        return alone, OneGpu()


def chain(buffer: Buffer) -> None:
    """A dispatch for which the host waits, and a combine."""
    x, idx = torch.ones(MOST, HIDDEN, dtype=torch.bfloat16), torch.zeros(MOST, TOPK, dtype=torch.int64)
    given = {"num_tokens_per_expert": torch.zeros(EXPERTS, dtype=torch.int32)}
    rows, _, weights, counts, handle, _ = buffer.dispatch(x, topk_idx=idx, topk_weights=torch.ones(MOST, TOPK), **given)
    assert isinstance(handle, tuple) and counts == [0] * EXPERTS and len(rows) == MOST
    sums, _, _ = buffer.combine(rows, handle, topk_weights=weights)
    assert tuple(sums.shape) == (MOST, HIDDEN)


def pair(buffer: Buffer, how: dict[str, Any]) -> None:
    """A dispatch and a combine; the caller's stream waits for each."""
    x, y = (torch.ones(*shape, HIDDEN, dtype=torch.bfloat16) for shape in ((MOST,), (EXPERTS, MOST)))
    idx, weights = torch.zeros(MOST, TOPK, dtype=torch.int64), torch.ones(MOST, TOPK)
    _, _, handle, event, hook = buffer.low_latency_dispatch(x, idx, MOST, EXPERTS, use_fp8=False, **how)
    hook() if hook else event.current_stream_wait()
    _, event, hook = buffer.low_latency_combine(y, idx, weights, handle, **how)
    hook() if hook else event.current_stream_wait()


def main() -> None:
    """Prints the calls of `PAIRS` pairs, by pattern and by what is called."""
    sys.modules["torch"] = torch
    ctypes.CDLL(f"{sys.argv[1]}/libnvrtc.so.13")  # which is taken as it is loaded
    driver = ctypes.CDLL("libcuda.so.1")
    low_latency, normal = OneRank(), NormalRank(None)
    counts = {name: ctypes.c_ulonglong.in_dll(driver, f"calls_{name}") for name in COUNTED}
    calls: dict[str, Callable[[], None]] = {name: partial(pair, low_latency, how) for name, how in PATTERNS.items()}
    calls["normal"] = partial(chain, normal)
    said = {}
    for pattern, call in calls.items():
        for _ in range(4):
            call()
        before = {name: count.value for name, count in counts.items()}
        for _ in range(PAIRS):
            call()
        said[pattern] = {name: count.value - before[name] for name, count in counts.items()}
    low_latency.destroy()
    normal.destroy()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
