"""Which rank sends how many tokens to which, and how many each expert gets, by the routing of an exchange."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from crossrail_tools.verify.checking import Work

MOST_DRAWN = 1 << 24
"""Numbers that drawing a routing may take: beyond them it would take seconds, and is left out."""

MOST_RANKS = 64


@lru_cache(maxsize=1)
def traffic(work: Work) -> tuple[list[list[int]], list[int]]:
    """Tokens from each rank to each, once for all experts there, and tokens of each expert; empty for large work."""
    shape = work.shape
    ranks = range(shape.ranks)
    if shape.ranks > MOST_RANKS or work.tokens * shape.num_experts * shape.ranks > MOST_DRAWN:
        return [], []
    sent: list[list[int]] = []
    loads = np.zeros(shape.num_experts, np.int64)
    for rank in ranks:
        chosen = work.selections(rank, ranks)
        homes = shape.homes(chosen)
        sent.append([int((homes == target).any(axis=1).sum()) for target in ranks])
        loads += np.bincount(chosen[chosen >= 0], minlength=shape.num_experts)
    return sent, [int(load) for load in loads]
