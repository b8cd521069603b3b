"""Rows and tables of unpacking: three ways on one list, beside a contiguous copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from .build import Round, with_samples
from .schema import Row
from .stats import better, gb_per_s, median
from .tables import HeadedTable, table
from .units import format_bytes, format_size

CEILING = "contiguous"
"""The baseline: one contiguous copy of as many bytes between the same memories."""


def unpack_rows(found: Mapping[str, Any], like: Row) -> list[Row]:
    """A row for the contiguous copy and one for each mode, from the samples of one fragment size.

    ``ratio`` says how near a way comes to the contiguous copy: by the GPU's own clock where both have that, else by the
    whole time.
    """
    like = replace(like, pieces=found["pieces"])
    ceiling = _row(CEILING, found[CEILING], like)
    return [ceiling, *(_compared(_row(mode, times, like), ceiling) for mode, times in found["modes"].items())]


def _row(mode: str, times: Mapping[str, Any], like: Row) -> Row:
    row = with_samples(replace(like, unpack=mode), [Round(times["samples_us"], like.size)])
    gpu_us = list(times["gpu_us"])
    if not gpu_us:
        return row
    return replace(row, gpu_us=gpu_us, gpu_gb_per_s=gb_per_s(like.size, median(gpu_us)))


def _compared(row: Row, ceiling: Row) -> Row:
    if row.gpu_us and ceiling.gpu_us:
        ratio = better(median(row.gpu_us), median(ceiling.gpu_us), "time")
    else:
        ratio = better(median(row.samples_us), median(ceiling.samples_us), "time")
    return replace(row, ratio={CEILING: ratio})


def unpack_tables(rows: Sequence[Row]) -> list[RenderableType]:
    """One table for each GPU, source and size, and whether the data was verified."""
    shown: list[RenderableType] = []
    for heading in dict.fromkeys(_heading(row) for row in rows):
        shown.append(_table(heading, [row for row in rows if _heading(row) == heading]))
    if all(row.verified for row in rows):
        shown.append(Text("data: every way verified before and after its timing, byte by byte"))
    return shown


def _heading(row: Row) -> str:
    whence = "pinned host memory" if row.origin == "pinned" else "the GPU's own memory"
    return f"unpack: {format_size(row.size)} ({format_bytes(row.size)}) from {whence} into {row.device}, in fragments"


def _table(heading: str, rows: Sequence[Row]) -> HeadedTable:
    columns = ["fragment", "way", "pieces", "p50 us", "p99 us", "GB/s", "GPU p50 us", "GPU GB/s", "of contiguous"]
    made = table(heading, columns, left=2, spare=["pieces", "p99 us"])
    for fragment in dict.fromkeys(row.fragment for row in rows):
        for row in (one for one in rows if one.fragment == fragment):
            name = format_size(fragment or 0)
            pieces = "-" if row.unpack == CEILING else str(row.pieces)
            cells = [pieces, f"{row.p50_us or 0.0:.1f}", f"{row.p99_us or 0.0:.1f}", f"{row.gb_per_s or 0.0:.1f}"]
            cells += [f"{median(row.gpu_us):.1f}" if row.gpu_us else "-"]
            cells += ["-" if row.gpu_gb_per_s is None else f"{row.gpu_gb_per_s:.1f}"]
            cells += [f"{row.ratio[CEILING]:.2f}" if CEILING in row.ratio else "-"]
            made.add_row(name, str(row.unpack), *cells)
        made.add_section()
    return made
