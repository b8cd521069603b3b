"""Reference of combine: the sums of the experts' outputs, and a bound of their rounding error.

The sum of a token is computed in fp32, with each product and each sum rounded once (no fused operations):

- expert layout, pre-reduced: each rank adds weight * output over the token's experts there, in the order of `topk_idx`,
  and rounds the row to bf16; the token's rank adds these rows in the order of the ranks, then the biases, and rounds to
  bf16. Not pre-reduced: the token's rank adds weight * output itself, in the order of `topk_idx`, then the biases.
- rank layout: the token's rank adds the rows as the ranks pass them (bf16, unweighted), in the order of the ranks, then
  the biases; on a GPU the biases come first, and rows in the order of the token's last selections at the ranks.

The bound: adding n terms one by one in arithmetic of unit roundoff u has an error of at most g(n - 1) * sum |term|,
where g(n) = n u / (1 - n u); a rounded product in each term makes that g(n) (Higham, Accuracy and Stability of
Numerical Algorithms, 2nd edition, section 4.2 and lemma 3.1). fp32 has u = 2^-24; rounding to bf16 adds at most 2^-8 of
the value, or 2^-134 if that is more (subnormal). So, pre-reduced, with s_r the exact sum over the n_r terms of rank r,
a_r the same of magnitudes, and s the exact sum of all:

    d_r   = g(n_r) a_r                                            error of rank r's fp32 sum
    e_r   = d_r + 2^-8 (|s_r| + d_r) + 2^-134                     error of its bf16 row
    d     = sum e_r + g(N) (sum (|s_r| + e_r) + sum |bias|)       error of the sum of N rows and biases
    bound = d + 2^-8 (|s| + d) + 2^-134                           error of the result

With ``node`` > 1 rank r is of node r // node, where one rank adds the K rows of a node and rounds their sum to bf16:

    d_k   = sum e_r + g(K) sum (|s_r| + e_r)                      error of a node's fp32 sum
    e_k   = d_k + 2^-8 (|s_k| + d_k) + 2^-134                     error of its bf16 row

and these rows take the place of the ranks' in d. In the rank layout e_r = 0, because rows are added unchanged; not
pre-reduced, every term is a row of its own with e = g(1) |term|. Products that are subnormal in fp32 have an error of
2^-150 each, which 2^-134 covers many times over.
The bound holds unless a sum overflows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from crossrail.ref.exchange import F32, Handle, Values
from crossrail.ref.floats import U16, bf16_bits, bf16_values, bits

F64 = npt.NDArray[np.float64]

_BF16 = 2.0**-8
_LEAST = 2.0**-134


def combine(
    ys: Sequence[Values | None],
    handle: Handle,
    topk_weights: Sequence[F32 | None] | None = None,
    *,
    biases: Sequence[Sequence[Values]] | None = None,
    prereduce: bool = True,
    active: Sequence[int] | None = None,
) -> list[U16 | None]:
    """Combines the experts' outputs `ys` into sums per token, bf16 bits [T, H] by rank.

    `ys`: bf16 (or bits) in the layout of the dispatched `x`, by rank. `topk_weights`: f32 [T, topk] by rank, in the
    expert layout if dispatch was given none; without any weights outputs are added unweighted. `biases`: by rank, at
    most two arrays bf16 [T, H] to add. `active`: the ranks that still take part; rows of the others are skipped. The
    result of a token without any row is the sum of its biases, or 0.
    """
    results: list[U16 | None] = [None] * handle.shape.ranks
    for source in _there(handle, active):
        total = _zeros(handle, source, np.float32)
        rows: dict[int, F32] = {}
        for rank, tokens, values, weights in _terms(ys, handle, topk_weights, source, active):
            into = rows.setdefault(rank, np.zeros_like(total)) if _by_rank(handle, prereduce) else total
            into[tokens] += values if weights is None else values * weights
        for rank in sorted(rows):
            total += bf16_values(bf16_bits(rows[rank]))
        for bias in biases[source] if biases is not None else ():
            total += bf16_values(bits(bias))
        results[source] = bf16_bits(total)
    return results


def combine_exact(
    ys: Sequence[Values | None],
    handle: Handle,
    topk_weights: Sequence[F32 | None] | None = None,
    *,
    biases: Sequence[Sequence[Values]] | None = None,
    prereduce: bool = True,
    active: Sequence[int] | None = None,
    node: int = 1,
) -> list[tuple[F64, F64] | None]:
    """The sums of `combine` in fp64, and the error bound of a bf16 result, both f64 [T, H] by rank.

    ``node``: the number of ranks in a node, if rows return once from each node (`ExpertBuffer(send="node")`).
    (The error of fp64 itself, 2^-53 of the terms, is negligible: the bound has more slack than that.)
    """
    results: list[tuple[F64, F64] | None] = [None] * handle.shape.ranks
    for source in _there(handle, active):
        exact = _zeros(handle, source, np.float64)
        error, last, added = exact.copy(), exact.copy(), 0
        rows = _rows(ys, handle, topk_weights, source, active, prereduce)
        for sum_, off, count in _by_node(rows, node) if node > 1 else ((sum_, off, n) for _, sum_, off, n in rows):
            exact, error, last, added = exact + sum_, error + off, last + np.abs(sum_) + off, added + count
        for bias in biases[source] if biases is not None else ():
            values = bf16_values(bits(bias)).astype(np.float64)
            exact, last, added = exact + values, last + np.abs(values), added + 1
        error = error + _g(added) * last
        results[source] = exact, error + _BF16 * (np.abs(exact) + error) + _LEAST
    return results


def _rows(
    ys: Sequence[Values | None],
    handle: Handle,
    topk_weights: Sequence[F32 | None] | None,
    source: int,
    active: Sequence[int] | None,
    prereduce: bool,
) -> Iterator[tuple[int, F64, F64, int]]:
    """The rows that are added last: rank, exact value, error bound, and number of terms."""
    sums: dict[int, list[F64]] = {}
    terms: dict[int, int] = {}
    for rank, tokens, values, weights in _terms(ys, handle, topk_weights, source, active):
        wide = values.astype(np.float64) * (1.0 if weights is None else weights.astype(np.float64))
        one = _zeros(handle, source, np.float64)
        one[tokens] = wide
        if not _by_rank(handle, prereduce):
            yield rank, one, _g(1) * np.abs(one), 1
            continue
        sum_ = sums.setdefault(rank, [np.zeros_like(one), np.zeros_like(one)])
        sum_[0] += one
        sum_[1] += np.abs(one)
        terms[rank] = terms.get(rank, 0) + 1
    for rank, (sum_rank, magnitude) in sums.items():
        off = np.zeros_like(magnitude)
        if handle.layout == "expert":
            off = _g(terms[rank]) * magnitude
            off += _BF16 * (np.abs(sum_rank) + off) + _LEAST
        yield rank, sum_rank, off, 1


def _by_node(rows: Iterator[tuple[int, F64, F64, int]], node: int) -> Iterator[tuple[F64, F64, int]]:
    """The rows of nodes: exact value, error bound, and number of terms."""
    nodes: dict[int, list[tuple[F64, F64]]] = {}
    for rank, sum_rank, off, _ in rows:
        nodes.setdefault(rank // node, []).append((sum_rank, off))
    for of_node in nodes.values():
        sum_node, off, added = np.zeros_like(of_node[0][0]), np.zeros_like(of_node[0][1]), np.zeros_like(of_node[0][1])
        for sum_rank, off_rank in of_node:
            sum_node, off, added = sum_node + sum_rank, off + off_rank, added + np.abs(sum_rank) + off_rank
        off = off + _g(len(of_node)) * added
        yield sum_node, off + _BF16 * (np.abs(sum_node) + off) + _LEAST, 1


def _g(terms: int) -> float:
    return terms * 2.0**-24 / (1 - terms * 2.0**-24)


def _there(handle: Handle, active: Sequence[int] | None) -> tuple[int, ...]:
    return handle.active if active is None else tuple(sorted(active))


def _by_rank(handle: Handle, prereduce: bool) -> bool:
    """Whether each rank returns one row per token, which is rounded to bf16 before it is added."""
    return prereduce or handle.layout == "rank"


def _zeros(handle: Handle, source: int, dtype: Any) -> Any:
    idx = handle.topk_idx[source]
    assert idx is not None
    return np.zeros((len(idx), handle.shape.hidden), dtype)


def _weights(handle: Handle, given: Sequence[F32 | None] | None, source: int) -> F32 | None:
    """The weights [T, topk] of the outputs for a source; None if they are added unweighted."""
    if given is not None and (handle.layout == "rank" or handle.topk_weights is not None):
        raise ValueError("topk_weights are for the expert layout, if dispatch was given none")
    if handle.layout == "rank":
        return None
    weights = handle.topk_weights if given is None else given
    return None if weights is None else weights[source]


def _terms(
    ys: Sequence[Values | None],
    handle: Handle,
    topk_weights: Sequence[F32 | None] | None,
    source: int,
    active: Sequence[int] | None,
) -> Iterator[tuple[int, Any, F32, F32 | None]]:
    """The terms of the sums of `source`, in order: the rank they are from, the tokens (distinct), their rows f32
    [n, H], and their weights f32 [n, 1] or None."""
    shape, idx, rows = handle.shape, handle.topk_idx[source], handle.rows[source]
    assert idx is not None and rows is not None
    homes = np.where(rows >= 0, shape.homes(idx), -1)
    weights = _weights(handle, topk_weights, source)
    for k in range(shape.topk if handle.layout == "expert" else 1):
        for rank in _there(handle, active):
            y = ys[rank]
            if y is None:
                raise ValueError(f"rank {rank} is active but has no outputs")
            if handle.layout == "rank":
                tokens = np.flatnonzero((homes == rank).any(axis=1))
                yield rank, tokens, bf16_values(bits(y)[np.where(homes == rank, rows, -1).max(axis=1)[tokens]]), None
                continue
            tokens = np.flatnonzero(homes[:, k] == rank)
            local = idx[tokens, k] - rank * shape.local_experts
            chosen = None if weights is None else weights[tokens, k, None]
            yield rank, tokens, bf16_values(bits(y)[local, rows[tokens, k]]), chosen
