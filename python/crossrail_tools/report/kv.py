"""The table of `bench kv`: lists of rows, and one row with a notification."""

from __future__ import annotations

from collections.abc import Sequence

from .schema import Row
from .stats import median
from .tables import HeadedTable, peer_names, ratio_text, table

TITLES = {
    "kv": "kv: lists of rows, from the first post until the last transfer is done",
    "kv-notice": "kv: one row with a notification, until the target sees it; half of a round trip",
}


def kv_table(rows: Sequence[Row]) -> HeadedTable:
    """Rows of one kind. Peers are compared by the rate, or by the time of a notification."""
    peers = peer_names(rows)
    timed = rows[0].what == "kv-notice"
    unit = "avg us" if timed else "GB/s"
    cpu = any(row.cpu_s_per_gib is not None for row in rows)
    columns = ["work", "transport", "rows", "p50 us", "p99 us", "us per row", unit, *(["CPU s/GiB"] if cpu else [])]
    for peer in peers:
        columns += [f"{peer} {unit}", f"x {peer}", *([f"{peer} CPU s/GiB"] if cpu else [])]
    processors = [column for column in columns if "CPU" in column]
    spare = ["p99 us", "transport", "rows", *processors]
    made = table(TITLES[rows[0].what], columns, left=2, keys=1, spare=spare)
    for row in rows:
        p50 = median(row.samples_us)
        cells = [row.part or "", row.transport, str(row.pieces), f"{p50:.1f}", f"{row.p99_us or 0.0:.1f}"]
        cells += [f"{p50 / (row.pieces or 1):.3f}", _figure(row.avg_us if timed else row.gb_per_s)]
        cells += [_figure(row.cpu_s_per_gib)] if cpu else []
        for peer in peers:
            result = row.peers.get(peer)
            figure = None if result is None else result.avg_us if timed else result.gb_per_s
            cells += [_figure(figure), ratio_text(row, peer)]
            cells += [_figure(None if result is None else result.cpu_s_per_gib)] if cpu else []
        made.add_row(*cells)
    return made


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
