"""Combine: the experts' outputs summed into the tokens' rows, and how far the sum may be from the exact one.

The sum of a token, fp32 throughout, each product and each sum rounded once (no fused operations):

- expert layout, pre-reduced: each rank adds weight * output over the token's experts there, in the order of `topk_idx`,
  and rounds the row to bf16; the token's rank adds these rows in the order of the ranks, then the biases, and rounds to
  bf16. Not pre-reduced: the token's rank adds weight * output itself, by rank and then in the order of `topk_idx`.
- rank layout: the token's rank adds the rows as the ranks give them (bf16, unweighted), in the order of the ranks.

The bound. Adding n terms one by one in arithmetic of unit roundoff u is off by at most g(n-1) * sum |term|, where
g(n) = n u / (1 - n u); a rounded product in each term makes that g(n) (Higham, Accuracy and Stability of Numerical
Algorithms, 2nd edition, section 4.2 and lemma 3.1). fp32 has u = 2^-24, rounding to bf16 adds 2^-8 of the value, or
2^-134 where that is more (subnormal). So, with s_r the exact sum over rank r, a_r the same of magnitudes, n_r its terms
and N the rows and biases that are added last:

    d_r   = g(n_r) a_r                                            what rank r's fp32 sum is off by
    e_r   = d_r + 2^-8 (|s_r| + d_r) + 2^-134                     and its bf16 row, where there is one (else d_r)
    d     = sum e_r + g(N) (sum |s_r| + e_r, and |bias|)          what the last fp32 sum is off by
    bound = d + 2^-8 (|s| + d) + 2^-134                           and its bf16 row

fp32 subnormals add at most 2^-150 per product, which 2^-134 covers twice over. Unless a sum overflows.
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
    """The tokens' rows, bf16 bits [T, H] by rank, of the experts' outputs `ys`.

    `ys`: bf16 (or bits), laid out as `dispatch` laid out `x`, by rank. `topk_weights`: f32 [T, topk] by rank, otherwise
    those given to dispatch; expert layout only. `biases`: by rank, rows bf16 [T, H] to add, at most two. `active`:
    the ranks that still take part; rows of the others are skipped. A token without any row is its biases' sum, or 0.
    """
    there = handle.active if active is None else tuple(active)
    results: list[U16 | None] = []
    for source in range(handle.shape.ranks):
        if source not in there:
            results.append(None)
            continue
        total = _zeros(handle, source)
        for rank in there:
            part = _zeros(handle, source)
            into = part if prereduce or handle.layout == "rank" else total
            for tokens, rows, weights in _terms(ys, handle, _weights(handle, topk_weights, source), source, rank):
                values = bf16_values(rows)
                into[tokens] += values if weights is None else values * weights
            if into is part:
                total += bf16_values(bf16_bits(part))
        for bias in biases[source] if biases is not None else ():
            total += bf16_values(bits(bias))
        results.append(bf16_bits(total))
    return results


def combine_exact(
    ys: Sequence[Values | None],
    handle: Handle,
    topk_weights: Sequence[F32 | None] | None = None,
    *,
    biases: Sequence[Sequence[Values]] | None = None,
    prereduce: bool = True,
    active: Sequence[int] | None = None,
) -> list[tuple[F64, F64] | None]:
    """As `combine`: the sums in fp64, and how far a bf16 result may be from each, f64 [T, H] both, by rank.

    (fp64 is off by 2^-53 of the terms, which is nothing here: the bound is an upper one by more than that.)
    """
    there = handle.active if active is None else tuple(active)
    results: list[tuple[F64, F64] | None] = []
    for source in range(handle.shape.ranks):
        if source not in there:
            results.append(None)
            continue
        idx = handle.topk_idx[source]
        assert idx is not None
        exact = np.zeros((len(idx), handle.shape.hidden))
        error, last, rows_added = exact.copy(), exact.copy(), 0
        for rank in there:
            part, magnitude, terms = np.zeros_like(exact), np.zeros_like(exact), 0
            for tokens, rows, weights in _terms(ys, handle, _weights(handle, topk_weights, source), source, rank):
                values = bf16_values(rows).astype(np.float64) * (1 if weights is None else weights.astype(np.float64))
                part[tokens] += values
                magnitude[tokens] += np.abs(values)
                terms += 1
            off = _g(terms) * magnitude
            if handle.layout == "rank":
                off = np.zeros_like(exact)  # one row, as it is
            elif prereduce:
                off += _BF16 * (np.abs(part) + off) + _LEAST
            exact, error = exact + part, error + off
            last += (np.abs(part) if prereduce else magnitude) + off
            rows_added += 1 if prereduce else terms
        for bias in biases[source] if biases is not None else ():
            values = bf16_values(bits(bias)).astype(np.float64)
            exact, last, rows_added = exact + values, last + np.abs(values), rows_added + 1
        error = error + _g(rows_added) * last
        results.append((exact, error + _BF16 * (np.abs(exact) + error) + _LEAST))
    return results


def _g(terms: int) -> float:
    return terms * 2.0**-24 / (1 - terms * 2.0**-24)


def _zeros(handle: Handle, source: int) -> F32:
    idx = handle.topk_idx[source]
    assert idx is not None
    return np.zeros((len(idx), handle.shape.hidden), np.float32)


def _weights(handle: Handle, given: Sequence[F32 | None] | None, source: int) -> F32 | None:
    """The weights of a source's tokens; None in the rank layout, whose rows are weighted already."""
    if handle.layout == "rank":
        return None
    weights = given if given is not None else handle.topk_weights
    if weights is None or weights[source] is None:
        raise ValueError(f"the tokens of rank {source} have no weights, neither from dispatch nor here")
    return weights[source]


def _terms(
    ys: Sequence[Values | None], handle: Handle, weights: F32 | None, source: int, rank: int
) -> Iterator[tuple[Any, U16, F32 | None]]:
    """What `rank` gives for the tokens of `source`, in the order in which it is added.

    Tokens (distinct), their output rows bf16 bits [n, H] and weights f32 [n, 1] or None.
    """
    shape, idx, rows, y = handle.shape, handle.topk_idx[source], handle.rows[source], ys[rank]
    if idx is None or rows is None or y is None:
        raise ValueError(f"ranks {source} and {rank} are to take part, but did not")
    y = bits(y)
    here = (shape.homes(idx) == rank) & (rows >= 0)
    if handle.layout == "rank":
        tokens = np.flatnonzero(here.any(axis=1))
        yield tokens, y[np.where(here, rows, -1).max(axis=1)[tokens]], None
        return
    for k in range(shape.topk):
        tokens = np.flatnonzero(here[:, k])
        local = idx[tokens, k] - rank * shape.local_experts
        assert weights is not None
        yield tokens, y[local, rows[tokens, k]], weights[tokens, k, None]
