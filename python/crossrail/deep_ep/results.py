"""Results of dispatches in the rank layout, for the caller to keep."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeAlias

from crossrail.deep_ep.checks import Tensor, torch, wrong
from crossrail.deep_ep.events import EventOverlap, Turn
from crossrail.deep_ep.given import Rows, rows_kind
from crossrail.deep_ep.handles import Routing
from crossrail.deep_ep.pool import Kind, Machine, Made

__all__ = ["combined", "copies", "gives_parts", "kept", "kept_rows", "listed", "repeated"]


def copies(*parts: Tensor | None) -> list[Tensor | None]:
    """Copies of those that there are."""
    return [None if part is None else part.clone() for part in parts]


def gives_parts(turn: Turn | None, parts: tuple[Tensor | None, ...], *others: Tensor | None, lent: bool) -> None:
    """The caller gets rows, scales, ids and weights of a prepared dispatch, and others, in its turn, if it has one.
    `lent`: the parts are in the buffer's memory, of which each notes the streams that use it for all."""
    if turn is None:
        return
    turn.gives(*others)
    if lent:
        turn.shows(parts[0])
    else:
        turn.gives(*parts)


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


Combined: TypeAlias = tuple[Tensor, "Tensor | None", EventOverlap]


def combined(turn: contextlib.AbstractContextManager[Turn] | None, routing: Routing, *given: Any) -> Combined | None:
    """A prepared combine in its turn (None: in the current stream, which waits for it) and its event; None, before it
    begins, for one that is not as prepared. `given`: rows, weights, biases."""
    rows, weights, bias = given
    if routing.calls is None:
        return None
    if turn is None:
        summed = routing.calls.combine(rows, routing.native, weights, bias)
        return None if summed is None else (summed[0], summed[1], EventOverlap())
    with turn as entered:
        summed = routing.calls.combine(rows, routing.native, weights, bias)
        if summed is not None:
            entered.reads(rows, weights, *listed(bias))
            entered.gives(summed[0], summed[1])
    return None if summed is None else (summed[0], summed[1], entered.overlap)


def repeated(machine: Machine, turn: Turn, x: Rows, handle: Any, room: Callable[[Kind, int], Made]) -> Rows:
    """Other rows along the ways of a dispatch, in their turn. `room`: the expert buffer of a kind, for so many
    tokens."""
    routing: Routing = handle.routing
    shape, payload = rows_kind(x, machine.device)
    if shape != (routing.tokens, routing.kind.hidden):
        there = [routing.tokens, routing.kind.hidden]
        raise wrong("dispatch", f"x has shape {list(shape)}, that of the handle {there}")
    turn.reads(*(x if isinstance(x, tuple) else (x,)))
    buffer, kind = routing.buffer, routing.kind
    if payload == kind.payload:
        result = buffer.dispatch(x, None, layout="rank", handle=routing.native)
    else:
        kind = kind._replace(payload=payload)
        buffer = room(kind, routing.max_tokens).buffer
        result = buffer.dispatch(x, handle.sent(), layout="rank", max_rows=max(routing.rows, 1))
    came = kept_rows(machine, turn, buffer, result, kind, False)[0]
    if routing.rows > 0:
        return came
    return tuple(part[:0] for part in came) if isinstance(came, tuple) else came[:0]


def listed(bias: Any) -> list[Tensor]:
    """The biases of a combine."""
    return [] if bias is None else list(bias) if isinstance(bias, list | tuple) else [bias]
