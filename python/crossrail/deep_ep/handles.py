"""Handles: the routing of a dispatch, for its combine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from crossrail.deep_ep.checks import Tensor, torch, wrong
from crossrail.deep_ep.layouts import dispatch_layout, ids_of_ranks, prefix_matrix, send_positions
from crossrail.deep_ep.pool import Kind

from .._words import kind

__all__ = ["NODE_RANKS", "Handle", "RankHandle", "Routing", "routing_of"]

NODE_RANKS = 8
"""Ranks of a node, as DeepEP counts: a larger group has the handles of several nodes."""


@dataclass(slots=True)
class Routing:
    """Destinations of the rows of a dispatch. `rows`: of the result; `topk_idx`: rank layout, ids to repeat the routing
    with rows of another kind, None if the handle has is_token_in_rank; `calls`: a `_native.ExpertCalls`, or, in the
    rank layout, a `_native.RankCalls` or None."""

    buffer: Any
    native: Any
    kind: Kind
    max_tokens: int
    tokens: int
    rows: int
    topk_idx: Tensor | None = None
    combine_input: Tensor | None = None
    calls: Any = None


class Handle(tuple[Any, ...]):
    """The tuple that a dispatch returns for its combine. It carries hidden state: pass the object itself, not a copy.

    Low-latency dispatch: source token index of each row (i32 [El, ranks*M]), first row << 32 | number of rows of each
    source (i64 [El, ranks]), M, hidden size, number of experts. Normal dispatch: see `RankHandle`."""

    routing: Routing

    @staticmethod
    def of(routing: Routing, *items: Any) -> Handle:
        handle = Handle(items)
        handle.routing = routing
        return handle


class RankHandle(Handle):
    """The handle of a normal dispatch, with DeepEP's items in DeepEP's order, which are computed when they are read.

    With up to 8 ranks six items, of one channel:

    0. rank_prefix_matrix i32 [ranks, ranks]: in the column of this rank, the end of each source's rows here. Other
       columns are -1, as only their ranks know them.
    1. channel_prefix_matrix i32 [ranks, 1]: tokens that this rank sent to each.
    2. recv_channel_prefix_matrix i32 [ranks, 1]: zeros, as a source's rows begin with its only channel.
    3. recv_src_idx i32 [N]: the token that each row was at its source.
    4. is_token_in_rank bool [T, ranks].
    5. send_head i32 [T, ranks]: the place of a token among those that this rank sent to the rank, -1 for none.

    With more ranks ten items, of which the seventh, recv_gbl_rank_prefix_sum i32 [ranks], has the end of each source's
    rows; the first is is_token_in_rank, the eighth recv_src_idx, the last send_head; the others, about queues
    between nodes that this library does not have, are None.
    """

    _offsets: Tensor
    _source: Callable[[], Tensor]
    _in_rank: Tensor | None
    _rank: int

    @staticmethod
    def made(
        routing: Routing, rank: int, offsets: Tensor, source: Callable[[], Tensor], in_rank: Tensor | None
    ) -> RankHandle:
        """`offsets` i64 [ranks+1]: where the rows of each source begin; `source` gives the token of each row, i32 [N];
        `in_rank`: what the caller gave, if it did."""
        handle = RankHandle()
        handle.routing = routing
        handle._offsets, handle._source, handle._in_rank, handle._rank = offsets, source, in_rank, rank
        return handle

    def sent(self) -> Tensor:
        """Ids i64 [T, K] that send each token to its ranks."""
        routing = self.routing
        if routing.topk_idx is not None or self._in_rank is None:
            return routing.topk_idx
        return ids_of_ranks(self._in_rank, routing.kind.experts, routing.kind.topk)

    def _all(self) -> tuple[Any, ...]:
        """All items, as they are now: a replayed graph changes them."""
        ranks = len(self._offsets) - 1
        in_rank = self._in_rank
        if in_rank is None:
            in_rank = dispatch_layout(self.routing.topk_idx, self.routing.kind.experts, ranks)[2]
        ends = self._offsets[1:].to(torch().int32)
        heads = send_positions(in_rank)
        if ranks > NODE_RANKS:
            return (in_rank, None, None, None, None, None, ends, self._source(), None, heads)
        sent = in_rank.sum(0, dtype=torch().int32).view(ranks, 1)
        first = torch().zeros((ranks, 1), dtype=torch().int32, device=sent.device)
        return (prefix_matrix(ends, self._rank), sent, first, self._source(), in_rank, heads)

    def __getitem__(self, key: Any) -> Any:
        return self._all()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._all())

    def __len__(self) -> int:
        return 6 if len(self._offsets) - 1 <= NODE_RANKS else 10

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<handle of a normal dispatch of {self.routing.tokens} tokens, {self.routing.rows} rows received>"


def routing_of(handle: Any, layout: str, operation: str) -> Routing:
    """The routing of a handle. Raises UsageError for what is none, or one of the other mode."""
    if not isinstance(handle, Handle):
        hint = "pass the handle that the dispatch gave, itself"
        raise wrong(operation, f"handle is {kind(handle)}, not one of a dispatch", hint)
    if handle.routing.kind.layout != layout:
        there = "a low-latency" if handle.routing.kind.layout == "expert" else "a normal"
        raise wrong(operation, f"handle is of {there} dispatch")
    return handle.routing
