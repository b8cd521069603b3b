"""Sizes of low-latency dispatches that a program passed to the size hint, before it creates a buffer for them."""

from __future__ import annotations

import json

from crossrail._untrusted import of_rank, parsing
from crossrail.deep_ep.pool import LowLatencySize
from crossrail.deep_ep.ranks import Ranks

__all__ = ["agreed_sizes", "remember"]

_bytes: dict[tuple[int, LowLatencySize], int] = {}
"""Bytes by number of ranks and sizes, as returned by the size hint."""


def remember(ranks: int, size: LowLatencySize, length: int) -> int:
    """Records that dispatches of this size among `ranks` ranks take `length` bytes, and returns `length`."""
    _bytes[ranks, size] = length
    return length


def agreed_sizes(ranks: Ranks, length: int) -> list[LowLatencySize]:
    """Collective: the sizes recorded on all ranks, largest first, as far as `length` bytes go."""
    mine = [(*size, needed) for (count, size), needed in _bytes.items() if count == ranks.size]
    known = []
    for rank, message in enumerate(ranks.exchange(json.dumps(mine).encode())):
        with parsing(of_rank("Buffer", rank, message)):
            known.append({tuple(one) for one in json.loads(message)})
    taken = []
    # All of them are this rank's own as well.
    for *fields, needed in sorted(set(mine).intersection(*known), key=lambda one: (-one[-1], one)):
        if needed <= length:
            length -= needed
            taken.append(LowLatencySize(*fields))
    return taken
