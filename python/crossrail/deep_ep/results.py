"""Results of dispatches in the rank layout, for the caller to keep."""

from __future__ import annotations

from typing import Any

from crossrail.deep_ep.checks import Tensor, torch
from crossrail.deep_ep.events import Turn
from crossrail.deep_ep.given import Rows
from crossrail.deep_ep.pool import Kind, Machine

__all__ = ["copies", "kept", "kept_rows"]


def copies(*parts: Tensor | None) -> list[Tensor | None]:
    """Copies of those that there are."""
    return [None if part is None else part.clone() for part in parts]


def kept(machine: Machine, turn: Turn, buffer: Any, result: Any, kind: Kind, with_topk: bool) -> list[Tensor | None]:
    """Rows, scales, ids and weights of a result, copied if it is in the last memory that the buffer has for results."""
    parts = [result.x, result.scales, *((result.topk_idx, result.topk_weights) if with_topk else (None, None))]
    copied = machine.streams.is_capturing() or not buffer.spare_regions
    if copied:
        parts = copies(*parts)
        turn.gives(*parts)
    if kind.payload == "ue8m0":
        parts[1] = parts[1].view(torch().int32)
    if not copied:
        turn.shows(result)
        recorder = result.stream_recorder()
        for part in parts:
            if part is not None:  # memory that is not PyTorch's, whose own record_stream would do nothing
                part.record_stream = recorder
    return parts


def kept_rows(
    machine: Machine, turn: Turn, buffer: Any, result: Any, kind: Kind, with_topk: bool
) -> tuple[Rows, Tensor | None, Tensor | None]:
    """The same, with the scales beside the rows."""
    x, scales, idx, weights = kept(machine, turn, buffer, result, kind, with_topk)
    return (x if scales is None else (x, scales)), idx, weights
