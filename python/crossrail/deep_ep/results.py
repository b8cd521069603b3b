"""Results of dispatches in the rank layout, for the caller to keep."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeAlias

from crossrail.deep_ep.arguments import Rows, rows_kind
from crossrail.deep_ep.checks import Tensor, torch, wrong
from crossrail.deep_ep.events import EventOverlap, Turn
from crossrail.deep_ep.handles import Routing
from crossrail.deep_ep.pool import Backend, Kind, SizedBuffer

__all__ = ["combined", "copies", "kept", "kept_rows", "listed", "record_outputs", "repeated"]


def copies(*parts: Tensor | None) -> list[Tensor | None]:
    """Clones the tensors that are not None."""
    return [None if part is None else part.clone() for part in parts]


def record_outputs(turn: Turn | None, parts: tuple[Tensor | None, ...], *others: Tensor | None, lent: bool) -> None:
    """Records in the turn, if any, that the caller gets rows, scales, ids and weights of a prepared dispatch, and
    `others`. `lent`: the parts share the buffer's memory, so recording one of them records all."""
    if turn is None:
        return
    turn.add_outputs(*others)
    if lent:
        turn.add_result(parts[0])
    else:
        turn.add_outputs(*parts)


def kept(backend: Backend, turn: Turn, buffer: Any, result: Any, kind: Kind, with_topk: bool) -> list[Tensor | None]:
    """Rows, scales, ids and weights of a result; cloned if the result occupies the buffer's last free region."""
    parts = [result.x, result.scales, *((result.topk_idx, result.topk_weights) if with_topk else (None, None))]
    copied = backend.streams.is_capturing() or not buffer.spare_regions
    if copied:
        parts = copies(*parts)
        turn.add_outputs(*parts)
    if kind.payload == "ue8m0":
        parts[1] = parts[1].view(torch().int32)
    if not copied:
        turn.add_result(result)
        recorder = result.stream_recorder()
        for part in parts:
            if part is not None:  # not PyTorch's memory: its own record_stream would have no effect
                part.record_stream = recorder
    return parts


def kept_rows(
    backend: Backend, turn: Turn, buffer: Any, result: Any, kind: Kind, with_topk: bool
) -> tuple[Rows, Tensor | None, Tensor | None]:
    """The same, with the scales beside the rows."""
    x, scales, idx, weights = kept(backend, turn, buffer, result, kind, with_topk)
    return (x if scales is None else (x, scales)), idx, weights


Combined: TypeAlias = tuple[Tensor, "Tensor | None", EventOverlap]


def combined(turn: contextlib.AbstractContextManager[Turn] | None, routing: Routing, *given: Any) -> Combined | None:
    """Runs a prepared combine in its turn (None: in the current stream). Returns its results and event; None, with
    nothing enqueued, if the general path must take it. `given`: rows, weights, biases."""
    rows, weights, bias = given
    if routing.calls is None:
        return None
    if turn is None:
        summed = routing.calls.combine(rows, routing.native, weights, bias)
        return None if summed is None else (summed[0], summed[1], EventOverlap())
    with turn as entered:
        summed = routing.calls.combine(rows, routing.native, weights, bias)
        if summed is not None:
            entered.add_inputs(rows, weights, *listed(bias))
            entered.add_outputs(summed[0], summed[1])
    return None if summed is None else (summed[0], summed[1], entered.overlap)


def repeated(
    backend: Backend, turn: Turn, x: Rows, handle: Any, buffer_for: Callable[[Kind, int], SizedBuffer]
) -> Rows:
    """Repeats the routing of `handle` with other rows, in `turn`. `buffer_for`: returns the
    expert buffer of a kind for up to that many tokens."""
    routing: Routing = handle.routing
    shape, payload = rows_kind(x, backend.device)
    if shape != (routing.tokens, routing.kind.hidden):
        there = [routing.tokens, routing.kind.hidden]
        raise wrong("dispatch", f"x has shape {list(shape)}, that of the handle {there}")
    turn.add_inputs(*(x if isinstance(x, tuple) else (x,)))
    buffer, kind = routing.buffer, routing.kind
    if payload == kind.payload:
        result = buffer.dispatch(x, None, layout="rank", handle=routing.native)
    else:
        kind = kind._replace(payload=payload)
        buffer = buffer_for(kind, routing.max_tokens).buffer
        result = buffer.dispatch(x, handle.sent(), layout="rank", max_rows=max(routing.rows, 1))
    came = kept_rows(backend, turn, buffer, result, kind, False)[0]
    if routing.rows > 0:
        return came
    return tuple(part[:0] for part in came) if isinstance(came, tuple) else came[:0]


def listed(bias: Any) -> list[Tensor]:
    """The biases of a combine."""
    return [] if bias is None else list(bias) if isinstance(bias, list | tuple) else [bias]
