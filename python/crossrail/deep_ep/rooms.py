"""Sizes of low-latency dispatches that a program passed to the size hint, before it creates a buffer for them."""

from __future__ import annotations

import json

from crossrail.deep_ep.pool import Room
from crossrail.deep_ep.ranks import Ranks

__all__ = ["agreed_rooms", "remember"]

_told: dict[tuple[int, Room], int] = {}
"""Bytes by number of ranks and sizes, as returned by the size hint."""


def remember(ranks: int, room: Room, length: int) -> int:
    """Records that dispatches of this size among `ranks` ranks take `length` bytes, and returns `length`."""
    _told[ranks, room] = length
    return length


def agreed_rooms(ranks: Ranks, length: int) -> list[Room]:
    """Collective: the sizes recorded on all ranks, largest first, as far as `length` bytes go."""
    mine = [(*room, _told[size, room]) for size, room in _told if size == ranks.size]
    said = [{tuple(one) for one in json.loads(message)} for message in ranks.exchange(json.dumps(mine).encode())]
    taken = []
    for *sizes, needed in sorted(set.intersection(*said), key=lambda one: (-one[-1], one)):
        if needed <= length:
            length -= needed
            taken.append(Room(*sizes))
    return taken
