"""Low-latency pairs on the driver without a GPU: prints what the driver was called for, as JSON.

    LD_LIBRARY_PATH=FOLDER python driver_calls.py FOLDER

FOLDER has libcuda.so.1 and libnvrtc.so.13, made of driver/*.c. Kernels do nothing: what this shows is the host's way.
"""

from __future__ import annotations

import ctypes
import json
import sys
from types import SimpleNamespace
from typing import Any

from host_torch import torch

from crossrail import ExpertBuffer, Group
from crossrail._calls import Sizes
from crossrail._expert_calls import Frame
from crossrail._native import ExpertCalls
from crossrail.deep_ep import EventOverlap
from crossrail.deep_ep.buffer import Buffer, answer_of
from crossrail.deep_ep.pool import Kind

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
    ctypes.CDLL(f"{sys.argv[1]}/libnvrtc.so.13")  # which is taken as it is loaded
    driver = ctypes.CDLL("libcuda.so.1")
    buffer = OneRank()
    counts = {name: ctypes.c_ulonglong.in_dll(driver, f"calls_{name}") for name in COUNTED}
    said = {}
    for pattern, how in PATTERNS.items():
        for _ in range(4):
            pair(buffer, how)
        before = {name: count.value for name, count in counts.items()}
        for _ in range(PAIRS):
            pair(buffer, how)
        said[pattern] = {name: count.value - before[name] for name, count in counts.items()}
    buffer.destroy()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
