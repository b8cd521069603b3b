"""The table of `bench kv`: lists of rows, and one row with a notification."""

from __future__ import annotations

from collections.abc import Sequence

from .schema import Row
from .stats import median
from .tables import Cell, HeadedTable, compared

TITLES = {
    "kv": "kv: lists of rows, from the first post until the last transfer is done",
    "kv-notice": "kv: one row with a notification, until the target sees it; half of a round trip",
}
_COLUMNS: list[Cell] = [
    ("work", lambda row: row.part or ""),
    ("transport", lambda row: row.transport),
    ("rows", lambda row: str(row.pieces)),
    ("p50 us", lambda row: f"{median(row.samples_us):.1f}"),
    ("p99 us", lambda row: f"{row.p99_us or 0.0:.1f}"),
    ("us per row", lambda row: f"{median(row.samples_us) / (row.pieces or 1):.3f}"),
]


def kv_table(rows: Sequence[Row]) -> HeadedTable:
    """Rows of one kind. Peers are compared by the rate, or by the time of a notification."""
    timed = rows[0].what == "kv-notice"
    compared_by: Cell = ("avg us" if timed else "GB/s", lambda of: _figure(of.avg_us if timed else of.gb_per_s))
    cpu: list[Cell] = [("CPU s/GiB", lambda of: _figure(of.cpu_s_per_gib))]
    beside = [compared_by, *(cpu if any(row.cpu_s_per_gib is not None for row in rows) else [])]
    spare = ["p99 us", "transport", "rows", *(name for name, _ in beside[1:])]
    return compared(TITLES[rows[0].what], rows, [*_COLUMNS, *beside], beside, 2, spare)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
