"""Sizes of low-latency dispatches whose memory a program has asked about, before it makes a buffer for them."""

from __future__ import annotations

import json

from crossrail.deep_ep.pool import Room
from crossrail.deep_ep.ranks import Ranks

__all__ = ["agreed_rooms", "remember"]

_told: dict[tuple[int, Room], int] = {}
"""Bytes, by ranks and sizes."""


def remember(ranks: int, room: Room, length: int) -> int:
    """Notes that dispatches of this size among so many ranks take `length` bytes, which it returns."""
    _told[ranks, room] = length
    return length


def agreed_rooms(ranks: Ranks, length: int) -> list[Room]:
    """Sizes that the programs of all ranks know of, as many as `length` bytes are enough for, large ones first. A
    collective call."""
    mine = [(*room, _told[size, room]) for size, room in _told if size == ranks.size]
    said = [{tuple(one) for one in json.loads(message)} for message in ranks.exchange(json.dumps(mine).encode())]
    taken = []
    for *sizes, needed in sorted(set.intersection(*said), key=lambda one: (-one[-1], one)):
        if needed <= length:
            length -= needed
            taken.append(Room(*sizes))
    return taken
