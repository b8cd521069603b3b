"""The tables of `bench mesh`: matrices of rates and latencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import RenderableType
from rich.text import Text

from .mesh import PARTS, figure
from .schema import Row
from .stats import median
from .tables import HeadedTable, table
from .units import counted, format_bytes, format_size


def mesh_tables(rows: Sequence[Row]) -> list[RenderableType]:
    """A matrix of rates, one of latencies, a table of all ranks at once, and the outliers with their figures."""
    of = {part: [row for row in rows if row.part == part] for part in PARTS}
    first = rows[0]
    shown: list[RenderableType] = [Text(_heading(first, of), style="bold"), Text("")]
    if of["pair"]:
        moved = f"{format_size(first.size)}, {of['pair'][0].window} in flight"
        shown.append(_matrix(f"each pair alone, GB/s from row to column: messages of {moved}", of["pair"]))
    if of["latency"]:
        small = format_bytes(of["latency"][0].size)
        shown.append(_matrix(f"each pair alone, half a round trip of {small} in us (p50)", of["latency"]))
    if of["all"]:
        shown.append(_together(of["all"]))
        shown += [Text(line) for line in (_copies(of["all"]), *_slowest(of["all"])) if line]
    shown += [Text(line) for part in PARTS for line in _outliers(of[part])]
    if first.verified:
        together = ", and all at once," if of["all"] else ""
        shown.append(Text(f"data: every pair{together} verified before the timing and after it"))
    return shown


def _heading(row: Row, of: Mapping[str, Sequence[Row]]) -> str:
    transports = ", ".join(dict.fromkeys(one.transport for one in of["pair"]))
    nodes = "" if row.nodes in (None, 1) else f" on {counted(row.nodes or 0, 'node')}"
    memory = "GPU memory" if row.device else f"{row.memory} memory"
    return f"mesh: {counted(row.ranks or 0, 'rank')}{nodes}, {memory}, over {transports or 'nothing'}"


def _places(rows: Sequence[Row]) -> dict[int, str]:
    """The label of each rank: its number, and its GPU."""
    places: dict[int, str] = {}
    for row in rows:
        if row.source is not None:
            device = (row.device or "").partition(",")[0]
            places[row.source] = f"{row.source} {device}".rstrip()
    return places


def _matrix(title: str, rows: Sequence[Row]) -> HeadedTable:
    places = _places(rows)
    numbers = sorted({number for row in rows for number in (row.source, row.target) if number is not None})
    cells = {(row.source, row.target): row for row in rows}
    made = table(title, ["rank", *(str(number) for number in numbers)])
    for source in numbers:
        line = [cells.get((source, target)) for target in numbers]
        made.add_row(places.get(source, str(source)), *("-" if row is None else _cell(row) for row in line))
    return made


def _together(rows: Sequence[Row]) -> HeadedTable:
    first = rows[0]
    moved = f"{format_size(first.size)} to each other rank, {first.window} in flight to each"
    made = table(f"all to all at once, from a barrier on: {moved}", ["rank", "GB/s sent", "p50 ms", "p99 ms"])
    places = _places(rows)
    for row in rows:
        times = [f"{(time or 0.0) / 1e3:.3f}" for time in (row.p50_us, row.p99_us)]
        made.add_row(places[row.source or 0], _cell(row), *times)
    made.add_section()
    rates = [figure(row) for row in rows]
    made.add_row("slowest, sum", f"{min(rates):.2f}, {sum(rates):.2f}", "", "")
    return made


def _copies(rows: Sequence[Row]) -> str:
    """The number of copies by copy engines, if there were any."""
    count = sum(row.copies.get("by_engine", 0) for row in rows)
    return f"copies from GPU to GPU: {count} by copy engines" if count else ""


def _slowest(rows: Sequence[Row]) -> list[str]:
    """The slowest exchange of the slowest rank: when its messages to each rank were matched, and copied."""
    row = min(rows, key=figure)
    if not any(message.copied_us for message in row.messages):
        return []
    lines = [f"rank {row.source}'s slowest of these, in us from the barrier:"]
    for target in dict.fromkeys(message.target for message in row.messages):
        to = [message for message in row.messages if message.target == target]
        matched, copied = (_span([message.matched_us for message in to]), _span([message.copied_us for message in to]))
        lines.append(f"  to {target}: matched {matched}, copied {copied}")
    return lines


def _span(times: Sequence[float]) -> str:
    return f"{min(times):.0f} to {max(times):.0f}"


def _cell(row: Row) -> str:
    value = figure(row)
    text = f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"
    return f"* {text}" if row.outlier else text


def _outliers(rows: Sequence[Row]) -> list[str]:
    if not any(row.outlier for row in rows):
        return []
    usual = median([figure(row) for row in rows])
    unit = "us" if rows[0].part == "latency" else "GB/s"
    named = {"pair": "rate", "latency": "latency", "all": "rate, all at once"}[rows[0].part or "pair"]
    lines = []
    for row in rows:
        if row.outlier:
            way = f"rank {row.source}" if row.target is None else f"{row.source} -> {row.target}"
            compared = f"{figure(row) / usual:.2f} of the median {usual:.2f}" if usual else "the median is 0"
            lines.append(f"* {way}: {named} {figure(row):.2f} {unit}, {compared}")
    return lines
