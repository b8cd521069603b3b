"""How much memory and how many multiprocessors the second version takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from crossrail.deep_ep.checks import torch, wrong
from crossrail.deep_ep.pool import SPARE_RESULTS, Kind, capacity_for
from crossrail.experts import ExpertBuffer

__all__ = ["buffer_bytes", "multiprocessors", "planned", "theoretical_sms"]

UNIT = 2 << 20
"""Bytes that sizes are multiples of."""
MOST_TOPK = 32
"""Experts of a token, at most."""
EXPERTS_EACH = 256
"""Experts of a rank for which a hint is enough."""
SMS, OVERLAPPED_SMS = 64, 24
"""Multiprocessors of an operation that runs alone, and of one that overlaps with computation."""


def planned(kind: Kind, max_tokens: int, ranks: int) -> int:
    """Bytes of a kind on PyTorch's current GPU."""
    options = kind.parameters(max_tokens) | {"device": torch().cuda.current_device(), "regions": SPARE_RESULTS}
    return ExpertBuffer.plan(**options, ranks=ranks).total


def buffer_bytes(
    ranks: int, tokens: int, hidden: int, topk: int, plan: Callable[[Kind, int], int] | None = None
) -> int:
    """Bytes that a dispatch of `tokens` takes, in bf16 or in fp8, whichever is more, in whole units. `topk` 0: any.

    `plan`: the bytes of a kind with so many tokens, by default on PyTorch's current GPU.
    """
    plan = plan or partial(planned, ranks=ranks)
    if hidden == 0 or hidden % 128:
        raise wrong("get_buffer_size_hint", f"hidden is {hidden}, not a multiple of 128")
    experts = ranks * EXPERTS_EACH
    kinds = [Kind("rank", hidden, experts, topk or MOST_TOPK, payload) for payload in ("bf16", "f32")]
    most = max(plan(kind, capacity_for(tokens)) for kind in kinds)
    return -(-most // UNIT) * UNIT


def multiprocessors(device: Any) -> int:
    """How many the GPU has."""
    return int(torch().cuda.get_device_properties(device).multi_processor_count)


def theoretical_sms(have: int, overlap: bool) -> int:
    """Multiprocessors for an operation on a GPU that has `have`, an even number; fewer with `overlap`."""
    return max(2, min(OVERLAPPED_SMS if overlap else SMS, have // 2 * 2))
