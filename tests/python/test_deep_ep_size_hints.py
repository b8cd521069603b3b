"""What the constructor of crossrail.deep_ep.Buffer makes for low-latency mode, so that no dispatch waits for a host."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from typing import Any

import deep_ep_work as work
import pytest
from deep_ep_twin import TwinDeepEp, on_ranks
from host_torch import torch, torch_is_there

from crossrail import UsageError
from crossrail.deep_ep import size_hints
from crossrail.deep_ep.pool import LowLatencySize
from crossrail.deep_ep.size_hints import agreed_sizes, remember

__all__ = ["torch_is_there"]
TWIN_BYTES = 1000 + 10 * work.MOST
"""What the twin says that dispatches of up to so many tokens take."""
PREPARED = {"low_latency_mode": True, "num_rdma_bytes": TWIN_BYTES}


@pytest.fixture(autouse=True)
def nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(size_hints, "_bytes", {})
    yield


def told(ranks: int = 2, hidden: int = work.HIDDEN) -> None:
    remember(ranks, LowLatencySize(hidden, 16, work.MOST), TWIN_BYTES)


def collective(buffer: TwinDeepEp) -> int:
    """Expert buffers that all ranks made together."""
    return len(buffer._backend.made)  # type: ignore[attr-defined]


def test_dispatches_of_any_rows_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    told()

    def rounds(buffer: TwinDeepEp) -> int:
        made = collective(buffer)
        for seed, payload in enumerate(work.PAYLOADS):
            work.low_latency(work.Env(torch, buffer), 300 + seed, payload, hook=bool(seed % 2))
        work.low_latency(work.Env(torch, buffer, topk=3), 310, "fp8")
        assert collective(buffer) == made
        return made

    assert on_ranks(2, rounds, **PREPARED) == [1, 1]


def test_the_first_dispatch_may_be_captured_and_waits_for_no_rank() -> None:
    told()

    def alone(buffer: TwinDeepEp) -> None:
        buffer._backend.streams.capturing = True  # type: ignore[attr-defined]
        x, idx = torch.zeros(2, work.HIDDEN, dtype=torch.bfloat16), torch.tensor([[0, 1], [2, 3]])
        if buffer.rank == 0:  # the other one has not come that far
            for use_fp8 in (False, True):
                buffer._prepare(x, idx, None, None, work.MOST, 16, use_fp8, False, False)

    on_ranks(2, alone, **PREPARED)


def test_other_sizes_are_made_by_all_ranks_outside_of_captures() -> None:
    told()

    def other(buffer: TwinDeepEp) -> None:
        env = work.Env(torch, buffer, hidden=512)
        buffer._backend.streams.capturing = True  # type: ignore[attr-defined]
        with pytest.raises(UsageError, match="run it once before the capture"):
            work.low_latency(env, 320)
        buffer._backend.streams.capturing = False  # type: ignore[attr-defined]
        work.low_latency(env, 320)
        work.low_latency(env, 321, "bf16")
        assert collective(buffer) == 2

    on_ranks(2, other, **PREPARED)


def test_what_does_not_fit_says_how_many_bytes_it_takes() -> None:
    def large(buffer: TwinDeepEp) -> None:
        with pytest.raises(UsageError, match=rf"{TWIN_BYTES} bytes are needed, and num_rdma_bytes is {TWIN_BYTES - 1}"):
            work.low_latency(work.Env(torch, buffer), 330)
        assert collective(buffer) == 0

    told()
    on_ranks(2, large, low_latency_mode=True, num_rdma_bytes=TWIN_BYTES - 1)


def test_a_program_that_says_no_bytes_may_use_any() -> None:
    told()
    on_ranks(2, lambda buffer: work.low_latency(work.Env(torch, buffer), 340), low_latency_mode=True)


class Heard:
    """Ranks of which others know of other sizes."""

    size, rank = 2, 0

    def __init__(self, *others: Any) -> None:
        self.others = json.dumps(others).encode()

    def exchange(self, message: bytes) -> list[bytes]:
        return [message, self.others]


def test_ranks_make_what_all_know_of_as_far_as_the_bytes_go() -> None:
    for hidden, length in ((128, 10), (256, 30), (512, 20), (1024, 50)):
        remember(2, LowLatencySize(hidden, 8, 4), length)
    remember(4, LowLatencySize(640, 8, 4), 1)
    heard: Any = Heard([128, 8, 4, 10], [256, 8, 4, 30], [512, 8, 4, 20], [640, 8, 4, 1])
    assert agreed_sizes(heard, 60) == [LowLatencySize(256, 8, 4), LowLatencySize(512, 8, 4), LowLatencySize(128, 8, 4)]
    assert agreed_sizes(heard, 45) == [LowLatencySize(256, 8, 4), LowLatencySize(128, 8, 4)]
    assert agreed_sizes(heard, 9) == []


def test_a_buffer_that_is_dropped_ends() -> None:
    def one(buffer: TwinDeepEp) -> Any:
        work.low_latency(work.Env(torch, buffer), 350)
        return weakref.ref(buffer), buffer._backend.made[0]  # type: ignore[attr-defined]

    ((dropped, made),) = on_ranks(1, one)
    gc.collect()
    assert dropped() is None and made.destroyed
