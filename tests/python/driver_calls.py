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

from driver_ranks import ElasticRank, NormalRank, Streams, from_dlpack, older_from_dlpack, prepare
from host_torch import torch

from crossrail import ExpertBuffer, Group
from crossrail._calls import Sizes
from crossrail._expert_calls import Frame
from crossrail._native import ExpertCalls
from crossrail.deep_ep.buffer import Buffer, answer_of
from crossrail.deep_ep.pool import Kind

EXPERTS, MOST, TOPK, HIDDEN = 8, 4, 2, 512
PAIRS = 64
PATTERNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hook": {"return_recv_hook": True},
    "async_finish": {"async_finish": True},
}
COUNTED = ["push", "pop", "current", "owner", "capturing", "mode", "wait", "record", "query", "launch", "early"]


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
        frame = Frame(torch, self.experts._native, streams, sizes, device)
        self._calls = {(MOST, EXPERTS, False, False, False): (ExpertCalls(frame), answer)}
        self._backend: Any = SimpleNamespace(streams=streams)
        self._closed, self.group_size, self._combine_rooms = False, 1, {}

    def destroy(self) -> None:
        self.experts.destroy()


def chain(buffer: Buffer, kind: str = "bf16", **how: Any) -> None:
    """What says where tokens go, a dispatch for which the host waits, and a combine. `how`: of each call."""
    x, idx = torch.ones(MOST, HIDDEN, dtype=torch.bfloat16), torch.zeros(MOST, TOPK, dtype=torch.int64)
    if kind != "bf16":
        scales = (
            torch.ones(MOST, HIDDEN // 128) if kind == "fp8" else torch.ones(MOST, HIDDEN // 512, dtype=torch.int32)
        )
        x = (torch.empty(MOST, HIDDEN, dtype=torch.float8_e4m3fn), scales)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS, **how)
    assert [tuple(one.shape) for one in (per_rank, per_expert, in_rank)] == [(1,), (EXPERTS,), (MOST, 1)]
    given = {"num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank, **how}
    rows, _, weights, counts, handle, _ = buffer.dispatch(x, topk_idx=idx, topk_weights=torch.ones(MOST, TOPK), **given)
    assert isinstance(handle, tuple) and counts == [0] * EXPERTS
    given_like, came = (x, rows) if isinstance(x, tuple) else ((x,), (rows,))
    assert [(one.dtype, one.shape) for one in came] == [(one.dtype, one.shape) for one in given_like]
    rows = came[0]
    assert tuple(rows.shape) == (MOST, HIDDEN) and tuple(weights.shape) == (MOST, TOPK)
    y = rows if kind == "bf16" else torch.ones(MOST, HIDDEN, dtype=torch.bfloat16)
    sums, _, _ = buffer.combine(y, handle, topk_weights=weights, **how)
    assert tuple(sums.shape) == (MOST, HIDDEN)


def elastic_chain(buffer: ElasticRank, sync: bool, **how: Any) -> None:
    """A dispatch and a combine of the second version. `how`: of both."""
    x, idx = torch.ones(MOST, HIDDEN, dtype=torch.bfloat16), torch.zeros(MOST, TOPK, dtype=torch.int64)
    stats = torch.zeros(EXPERTS, dtype=torch.int32)
    rows, _, weights, handle, _ = buffer.dispatch(
        x, idx, torch.ones(MOST, TOPK), stats, num_experts=EXPERTS, do_cpu_sync=sync, expert_alignment=8, **how
    )
    assert tuple(rows.shape) == (MOST, HIDDEN) and handle.num_recv_tokens == MOST
    sums, sent, _ = buffer.combine(rows, handle, topk_weights=weights, **how)
    assert tuple(sums.shape) == (MOST, HIDDEN) and tuple(sent.shape) == (MOST, TOPK)


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
    prepare()
    ctypes.CDLL(f"{sys.argv[1]}/libnvrtc.so.13")  # which is taken as it is loaded
    driver = ctypes.CDLL("libcuda.so.1")
    low_latency, normal, older = OneRank(), NormalRank(None), NormalRank(None)
    torch.from_dlpack = older_from_dlpack
    chain(older, "fp8")
    torch.from_dlpack = from_dlpack
    elastic = ElasticRank(None, num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=TOPK)
    counts = {name: ctypes.c_ulonglong.in_dll(driver, f"calls_{name}") for name in COUNTED}
    calls: dict[str, Callable[[], None]] = {name: partial(pair, low_latency, how) for name, how in PATTERNS.items()}
    calls |= {f"normal {kind}": partial(chain, normal, kind) for kind in ("bf16", "fp8", "ue8m0")}
    calls["normal fp8 as bytes"] = partial(chain, older, "fp8")
    calls |= {f"elastic{' sync' if sync else ''}": partial(elastic_chain, elastic, sync) for sync in (False, True)}
    calls["normal async"] = partial(chain, normal, async_finish=True)
    calls["elastic async"] = partial(elastic_chain, elastic, False, async_with_compute_stream=True)
    said = {}
    capture = ctypes.c_int.in_dll(driver, "in_capture")
    calls["captured"] = calls["plain"]
    for pattern, call in calls.items():
        capture.value = pattern == "captured"
        for _ in range(4):
            call()
        before = {name: count.value for name, count in counts.items()}
        general = sum(buffer.gpu.general for buffer in (normal, older, elastic))
        for _ in range(PAIRS):
            call()
        said[pattern] = {name: count.value - before[name] for name, count in counts.items()}
        said[pattern]["general"] = sum(buffer.gpu.general for buffer in (normal, older, elastic)) - general
    capture.value = 0
    low_latency.destroy()
    normal.destroy()
    older.destroy()
    elastic.destroy()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
