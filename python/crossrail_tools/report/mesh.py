"""Rows and tables of a mesh: every rank with every other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .build import Round, with_samples
from .schema import Lane, MessageTimes, Row
from .stats import median

SLOW = 0.8
"""A rate below this fraction of the median of its part is an outlier."""

LATE = 1.5
"""A latency above this multiple of the median of its part is an outlier."""

PARTS = ("pair", "latency", "all")


def mesh_rows(found: Mapping[int, Mapping[str, Any]], like: Row, devices: Sequence[str] | None = None) -> list[Row]:
    """The rows of a mesh, from the samples of each rank; ``like`` has the identifying fields.

    ``devices``: the place of each rank's memory, when it is not the host's.
    """
    pairs: list[Row] = []
    late: list[Row] = []
    everybody: list[Row] = []
    for rank, measured in sorted(found.items()):
        for pair in measured["pairs"]:
            target = pair["target"]
            ends = _ends(devices, rank, target)
            transport = "+".join(dict.fromkeys(lane["transport"] for lane in pair["lanes"]))
            row = replace(like, source=rank, target=target, device=ends, transport=transport, protocol=pair["protocol"])
            row = replace(
                row, notes=[f"{rank} -> {target}: {note}" for note in pair["notes"]], unused=pair.get("unused", {})
            )
            rate, latency = pair["rate"], pair["latency"]
            lanes = [Lane(lane["name"], lane["bytes"], lane["share"]) for lane in pair["lanes"]]
            pairs.append(
                with_samples(
                    replace(row, part="pair", window=rate["batch"], lanes=lanes),
                    [Round(rate["samples_us"], rate["bytes_per_sample"])],
                )
            )
            small = replace(row, part="latency", size=latency["size"], iterations_per_sample=latency["batch"], notes=[])
            small = replace(small, unused={})
            late.append(with_samples(small, [Round(latency["samples_us"])]))
        if measured["all_us"]:
            device = devices[rank] if devices else None
            copied = measured.get("copied", {})
            copies = {way: count for way, count in copied.items() if count}
            messages = [MessageTimes(**message) for message in measured.get("slowest", [])]
            row = replace(like, part="all", source=rank, device=device, messages=messages, copies=copies)
            everybody.append(with_samples(row, [Round(measured["all_us"], measured["all_bytes"])]))
    over = "+".join(dict.fromkeys(row.transport for row in pairs))
    everybody = [replace(row, transport=over, window=pairs[0].window) for row in everybody]
    return [*_marked(pairs), *_marked(late), *_marked(everybody)]


def figure(row: Row) -> float:
    """The figure to judge a row by: GB/s, or microseconds for a latency."""
    value = row.p50_us if row.part == "latency" else row.gb_per_s
    return value or 0.0


def _marked(rows: Sequence[Row]) -> list[Row]:
    """``rows`` of one part, with outliers marked."""
    if not rows:
        return []
    usual = median([figure(row) for row in rows])
    return [replace(row, outlier=_is_outlier(row, usual)) for row in rows]


def _is_outlier(row: Row, usual: float) -> bool:
    return figure(row) > LATE * usual if row.part == "latency" else figure(row) < SLOW * usual


def _ends(devices: Sequence[str] | None, source: int, target: int) -> str | None:
    return f"{devices[source]},{devices[target]}" if devices else None
