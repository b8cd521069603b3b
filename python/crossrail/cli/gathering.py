"""What every rank found, brought to rank 0 through the group's store."""

from __future__ import annotations

import json
import zlib
from typing import Any

import crossrail

PIECE = 60_000
"""Bytes of one value; a store takes 64 KiB."""


def gather(group: crossrail.Group, name: str, value: Any) -> list[Any] | None:
    """Brings each rank's ``value`` (anything that JSON has) to rank 0; called by all ranks alike.

    Returns the values by rank at rank 0, None elsewhere. ``name`` is used once in a group's life. Raises the library's
    errors.
    """
    data = zlib.compress(json.dumps(value).encode(), 1)
    pieces = [data[at : at + PIECE] for at in range(0, len(data), PIECE)]
    group.publish(f"{name}: pieces", str(len(pieces)).encode())
    for number, piece in enumerate(pieces):
        group.publish(f"{name}: {number}", piece)
    found = None
    if group.rank == 0:
        counts = [int(count) for count in group.collect(f"{name}: pieces")]
        found = [_join(group, name, rank, count) for rank, count in enumerate(counts)]
    group.barrier(f"{name}: taken")
    for number in range(len(pieces)):
        group.withdraw(f"{name}: {number}")
    group.withdraw(f"{name}: pieces")
    return found


def _join(group: crossrail.Group, name: str, rank: int, count: int) -> Any:
    pieces = [group.collect(f"{name}: {number}", [rank])[0] for number in range(count)]
    return json.loads(zlib.decompress(b"".join(pieces)))
