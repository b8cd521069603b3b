"""Rails: the lanes of one device, counted together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import crossrail
from crossrail.records import LaneReport, LaneShare
from crossrail_tools.report.schema import Lane

_LANE_OF_RAIL = re.compile(r"(#[0-9]+|:messages)(?=$|\()")
"""Suffix of a lane's name behind the name of its rail: the number of the connection, or its purpose. A provider or a
transport of another library follows in parentheses."""


def rail_of(lane: LaneReport | LaneShare) -> str:
    """The rail that a lane belongs to: ``tcp/eth1`` for ``tcp/eth1#0`` and ``tcp/eth1:messages``."""
    return rail_named(lane["name"])


def rail_named(lane: str) -> str:
    """The same for the name of a lane."""
    return _LANE_OF_RAIL.sub("", lane)


def most_connections(lanes: Sequence[LaneReport]) -> int:
    """Connections that carry chunks, of the rail that has the most of them."""
    carrying = [lane for lane in lanes if lane["alive"] and not lane["name"].endswith(":messages")]
    return max(Counter(rail_of(lane) for lane in carrying if lane["transport"] == "tcp").values(), default=1)


def sent_by_rail(lanes: Mapping[str, int]) -> dict[str, int]:
    """The bytes of each rail, from those of its lanes by name."""
    sent: dict[str, int] = {}
    for lane, carried in lanes.items():
        sent[rail_named(lane)] = sent.get(rail_named(lane), 0) + carried
    return sent


def rails_of(lanes: Sequence[LaneShare]) -> list[Lane]:
    """The share of each rail in one transfer, summed over its lanes."""
    total = sum(lane["bytes"] for lane in lanes)
    found = []
    for rail in dict.fromkeys(rail_of(lane) for lane in lanes):
        parts = [lane for lane in lanes if rail_of(lane) == rail]
        carried = sum(lane["bytes"] for lane in parts)
        found.append(
            Lane(
                name=rail,
                bytes=carried,
                share=carried / total if total else 0.0,
                chunks=sum(lane["chunks"] for lane in parts),
                resent=sum(lane["resent"] for lane in parts),
            )
        )
    return found


def missed(endpoint: crossrail.Endpoint) -> dict[str, str]:
    """What was expected to carry data to this peer and does not, by lane, and why."""
    return {way["lane"]: way["reason"] or "" for way in endpoint.explain().candidates if way["missed"]}


def line_rate(rail: str) -> float | None:
    """Line rate of a physical interface, in GB/s. None for virtual ones, whose stated rate means nothing."""
    device = rail.partition("/")[2]
    folder = Path("/sys/class/net", device)
    if not device or "/" in device or not (folder / "device").exists():
        return None
    try:
        megabits = int((folder / "speed").read_text())
    except (OSError, ValueError):
        return None
    return megabits / 8e3 if megabits > 0 else None
