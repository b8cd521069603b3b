"""Reference of dispatch, in both layouts, with all ranks in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from crossrail.ref.casting import Scale, cast_rows
from crossrail.ref.floats import U8, U16, bits
from crossrail.ref.routing import Shape

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
Layout = Literal["expert", "rank"]
Values = npt.NDArray[Any]
"""An array whose dtype (bf16 or its bits, f32, i64) is given in the description of the argument."""


@dataclass(frozen=True)
class Handle:
    """The routing of a dispatch, for its combine and for dispatches that repeat it.

    `topk_idx` and `topk_weights`: as dispatched, by rank, None for a rank that is not active. `rows`: by source rank
    i64 [T, topk], the index of each selection's row on the rank of its expert: among the rows of the expert (expert
    layout) or among all rows of the rank (rank layout, the same for all selections of a token on one rank); -1 if
    nothing was sent.
    """

    shape: Shape
    layout: Layout
    active: tuple[int, ...]
    topk_idx: list[I64 | None]
    topk_weights: list[F32 | None] | None
    rows: list[I64 | None]


@dataclass(frozen=True)
class Dispatched:
    """The rows delivered to one of `ranks` ranks with up to M tokens, El local experts and hidden H.

    Expert layout: `x` [El, ranks*M, H], bf16 bits or e4m3 bits; `scales` [El, ranks*M, H/128] (f32 or u8) or None; the
    rows of an expert come first, ordered by source rank and token; the rest is zero here, and undefined in the library.
    `counts` i32 [El]: rows of each expert; `source` i32 [El, ranks*M]: index of each row's token on its source rank;
    `ranges` i64 [El, ranks]: first row of each source << 32 | number of its rows.

    Rank layout: `x` [N, H], each received token once, ordered by source rank and token; `scales` [N, H/128] or None;
    `topk_idx` i64 [N, topk]: local experts in the order of the token's selections, -1 for experts elsewhere;
    `topk_weights` f32 [N, topk], 0 where `topk_idx` is -1, or None; `counts` i32 [El]: selections of each expert,
    rounded up to the alignment; `offsets` i64 [ranks+1]: first row of each source, and N.
    """

    x: U16 | U8
    scales: F32 | U8 | None
    counts: I32
    handle: Handle
    source: I32 | None = None
    ranges: I64 | None = None
    topk_idx: I64 | None = None
    topk_weights: F32 | None = None
    offsets: I64 | None = None


def dispatch(
    shape: Shape,
    xs: Sequence[Values | None],
    topk_idx: Sequence[I64 | None] | None,
    topk_weights: Sequence[F32 | None] | None = None,
    layout: Layout = "expert",
    *,
    scale: Scale | None = None,
    expert_alignment: int = 1,
    active: Sequence[int] | None = None,
    handle: Handle | None = None,
) -> list[Dispatched | None]:
    """Dispatches rows `xs` (bf16 or its bits [T, H], T by rank up to M) to the experts `topk_idx` (i64 [T, topk]).

    `topk_idx` has -1 for none. Each selection counts: an expert that a token selects twice has two rows in the expert
    layout (there is room for M of each rank), and is listed twice by the token's row in the rank layout. `scale`: send
    rows as fp8 with such scales, otherwise as bf16. `active`: the ranks that take part; the lists have None for the
    others, and selections of their experts are skipped like -1. `handle`: of an earlier dispatch whose routing,
    weights, layout and ranks are repeated; `topk_idx` and `topk_weights` are then None.

    Returns the rows delivered to each rank. Raises ValueError for arguments that do not fit the shape.
    """
    if handle is None:
        if topk_idx is None:
            raise ValueError("neither topk_idx nor handle is given")
        handle = _plan(shape, topk_idx, topk_weights, layout, _active(shape, active))
    wire = _cast(shape, handle, xs, scale)
    arrange = _by_expert if handle.layout == "expert" else _by_rank
    ranks = range(shape.ranks)
    return [arrange(shape, handle, wire, rank, expert_alignment) if rank in wire else None for rank in ranks]


def _active(shape: Shape, active: Sequence[int] | None) -> tuple[int, ...]:
    ranks = tuple(range(shape.ranks)) if active is None else tuple(sorted(active))
    if len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(shape.ranks)):
        raise ValueError(f"ranks {list(ranks)} are not a subset of 0 to {shape.ranks - 1}")
    return ranks


def _plan(
    shape: Shape,
    topk_idx: Sequence[I64 | None],
    topk_weights: Sequence[F32 | None] | None,
    layout: Layout,
    active: tuple[int, ...],
) -> Handle:
    """Assigns indices to the rows of each expert (or rank), ordered by source rank, token and selection."""
    selections: list[I64 | None] = [None] * shape.ranks
    rows: list[I64 | None] = [None] * shape.ranks
    taken = np.zeros(shape.num_experts if layout == "expert" else shape.ranks, np.int64)
    for source in active:
        idx = topk_idx[source]
        if idx is None:
            raise ValueError(f"rank {source} is active but has no topk_idx")
        shape.check(idx)
        sent = np.isin(shape.homes(idx), active)
        place = np.full(idx.shape, -1, np.int64)
        target = idx if layout == "expert" else shape.homes(idx)
        for one in np.unique(target[sent]):
            chosen = sent & (target == one)  # [T, topk]
            # The expert layout has a row for each selection, the rank layout one for each token.
            new = chosen if layout == "expert" else chosen.any(axis=1, keepdims=True)
            if layout == "expert" and new.sum() > shape.max_tokens:
                raise ValueError(f"rank {source} selects expert {one} {new.sum()} times, more than {shape.max_tokens}")
            number = taken[one] + np.cumsum(new).reshape(new.shape) - 1
            place[chosen] = np.broadcast_to(number, idx.shape)[chosen]
            taken[one] += new.sum()
        selections[source], rows[source] = idx, place
    weights = None if topk_weights is None else list(topk_weights)
    return Handle(shape, layout, active, selections, weights, rows)


def _cast(
    shape: Shape, handle: Handle, xs: Sequence[Values | None], scale: Scale | None
) -> dict[int, tuple[U16 | U8, F32 | U8 | None]]:
    """The rows and scales of each active rank, as they are sent."""
    wire: dict[int, tuple[U16 | U8, F32 | U8 | None]] = {}
    for source in handle.active:
        x, idx = xs[source], handle.topk_idx[source]
        if x is None or idx is None or x.shape != (len(idx), shape.hidden):
            what = None if x is None else x.shape
            tokens = None if idx is None else len(idx)
            raise ValueError(f"x of rank {source} is {what}, but its routing has {tokens} tokens")
        wire[source] = (bits(x), None) if scale is None else cast_rows(bits(x), scale)
    return wire


def _by_expert(shape: Shape, handle: Handle, wire: dict[int, Any], rank: int, alignment: int) -> Dispatched:
    """The expert layout on `rank`. Counts are not aligned, because the shape is fixed."""
    experts, most = shape.local_experts, shape.ranks * shape.max_tokens
    x, scales = _empty((experts, most), wire[rank])
    counts = np.zeros(experts, np.int32)
    origin = np.zeros((experts, most), np.int32)
    ranges = np.zeros((experts, shape.ranks), np.int64)
    for local in range(experts):
        for source in range(shape.ranks):
            begin = int(counts[local])
            tokens, rows = np.zeros(0, np.int64), np.zeros(0, np.int64)
            if source in wire:
                chosen = _of(handle, source) == rank * experts + local
                tokens, rows = np.nonzero(chosen)[0], _rows_of(handle, source)[chosen]
                payload, factors = wire[source]
                x[local, rows] = payload[tokens]
                if scales is not None:
                    scales[local, rows] = factors[tokens]
            origin[local, rows] = tokens
            counts[local] += len(tokens)
            ranges[local, source] = begin << 32 | len(tokens)
    return Dispatched(x, scales, counts, handle, source=origin, ranges=ranges)


def _by_rank(shape: Shape, handle: Handle, wire: dict[int, Any], rank: int, alignment: int) -> Dispatched:
    """The rank layout on `rank`."""
    experts = shape.local_experts
    received = {source: _received(handle, source, rank) for source in wire}
    offsets = np.zeros(shape.ranks + 1, np.int64)
    for source, (tokens, _) in received.items():
        offsets[source + 1] = len(tokens)
    offsets = np.cumsum(offsets)
    x, scales = _empty((int(offsets[-1]),), wire[rank])
    local_idx = np.full((len(x), shape.topk), -1, np.int64)
    weighted = handle.topk_weights is not None
    weights = np.zeros((len(x), shape.topk), np.float32) if weighted else None
    for source, (tokens, rows) in received.items():
        payload, factors = wire[source]
        x[rows] = payload[tokens]
        if scales is not None:
            scales[rows] = factors[tokens]
        idx = _of(handle, source)[tokens]
        here = shape.homes(idx) == rank
        local_idx[rows] = np.where(here, idx - rank * experts, -1)
        if weights is not None and handle.topk_weights is not None:
            weights[rows] = np.where(here, handle.topk_weights[source][tokens], 0)  # type: ignore[index]
    counts = np.bincount(local_idx[local_idx >= 0], minlength=experts).astype(np.int32)
    counts = -(-counts // alignment) * alignment
    return Dispatched(x, scales, counts, handle, topk_idx=local_idx, topk_weights=weights, offsets=offsets)


def _of(handle: Handle, source: int) -> I64:
    idx = handle.topk_idx[source]
    assert idx is not None
    return idx


def _rows_of(handle: Handle, source: int) -> I64:
    rows = handle.rows[source]
    assert rows is not None
    return rows


def _received(handle: Handle, source: int, rank: int) -> tuple[I64, I64]:
    """Rank layout: the tokens of `source` that select an expert of `rank`, and the row of each."""
    here = handle.shape.homes(_of(handle, source)) == rank
    tokens = np.flatnonzero(here.any(axis=1))
    return tokens, np.where(here, _rows_of(handle, source), -1).max(axis=1)[tokens]


def _empty(lead: tuple[int, ...], like: tuple[Any, Any]) -> tuple[Any, Any]:
    """Zeros for rows and scales of the same dtypes and widths as ``like``."""
    payload, scales = like
    x = np.zeros((*lead, payload.shape[1]), payload.dtype)
    return x, None if scales is None else np.zeros((*lead, scales.shape[1]), scales.dtype)


@dataclass(frozen=True)
class Traffic:
    """Rows that one rank sends in a dispatch.

    `logical`: selections, including those of its own experts. `wire`: rows that leave the rank, one per token and other
    rank. `network`: rows that leave the node.
    """

    logical: int
    wire: int
    network: int


def traffic(handle: Handle, source: int, nodes: Sequence[str] | None = None) -> Traffic:
    """The rows that rank `source` sends. `nodes`: the node of each rank; by default all are on one."""
    rows = handle.rows[source]
    if rows is None:
        return Traffic(0, 0, 0)
    homes = np.where(rows >= 0, handle.shape.homes(_of(handle, source)), -1)
    wire = network = 0
    for rank in handle.active:
        if rank != source:
            tokens = int((homes == rank).any(axis=1).sum())
            wire += tokens
            if nodes is not None and nodes[rank] != nodes[source]:
                network += tokens
    return Traffic(int((rows >= 0).sum()), wire, network)
