"""What a dispatch gives for its combine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossrail.deep_ep.checks import Tensor, wrong
from crossrail.deep_ep.pool import Kind

__all__ = ["Handle", "Routing"]


@dataclass
class Routing:
    """Where the rows of a dispatch went. `rows`: of the result; `topk_idx`: of the rank layout, for rows of another
    kind; `shortcut`: of the expert layout, for combines that are as usual."""

    buffer: Any
    native: Any
    kind: Kind
    max_tokens: int
    tokens: int
    rows: int
    topk_idx: Tensor | None = None
    room: Tensor | None = None
    shortcut: Any = None


class Handle(tuple[Any, ...]):
    """A tuple, as programs expect, that combine takes back. What is beside its items goes only with the tuple itself.

    Of a low-latency dispatch: the token that each row was at its source (i32 [El, ranks*M]), where the rows of each
    source begin << 32 | how many there are (i64 [El, ranks]), M, hidden size, number of experts. Of a normal one: the
    first row of each source and the number of rows (i64 [ranks+1]), and `is_token_in_rank`.
    """

    routing: Routing

    @staticmethod
    def of(routing: Routing, *items: Any) -> Handle:
        handle = Handle(items)
        handle.routing = routing
        return handle


def routing_of(handle: Any, layout: str, operation: str) -> Routing:
    """The routing of a handle. Raises UsageError for what is none, or one of the other mode."""
    if not isinstance(handle, Handle):
        hint = "pass the handle that the dispatch gave, itself"
        raise wrong(operation, f"handle is a {type(handle).__name__}, not one of a dispatch", hint)
    if handle.routing.kind.layout != layout:
        there = "a low-latency" if handle.routing.kind.layout == "expert" else "a normal"
        raise wrong(operation, f"handle is of {there} dispatch")
    return handle.routing
