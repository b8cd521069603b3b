"""Sections about meshes and about unpacking into GPU memory."""

from __future__ import annotations

from collections.abc import Sequence

from ..mesh import figure
from ..schema import Row
from ..stats import median
from ..units import counted, format_bytes, format_size
from ..unpack import CEILING
from .gather import Entry, distinct, rate_of, rate_text, table_of
from .model import Bar, Bars, Figure, HeatMap, Lines, Section, Series
from .scales import number_text


def mesh_section(found: Sequence[Entry]) -> Section | None:
    """Every rank with every other: each pair alone, and all at once."""
    chosen = [entry for entry in found if entry.row.what == "mesh" and not entry.program]
    if not chosen:
        return None
    figures = []
    for key in distinct(_mesh_key(entry) for entry in chosen):
        part = [entry.row for entry in chosen if _mesh_key(entry) == key]
        file = next(entry.file for entry in chosen if _mesh_key(entry) == key)
        of = {name: [row for row in part if row.part == name] for name in ("pair", "latency", "all")}
        if of["pair"]:
            moved = f"{format_size(of['pair'][0].size)}, {of['pair'][0].window} in flight"
            figures.append(_matrix(of["pair"], "Each pair alone: rate", "GB/s", f"{moved}. {key}"))
        if of["latency"]:
            moved = f"half a round trip of {format_bytes(of['latency'][0].size)}, median"
            figures.append(_matrix(of["latency"], "Each pair alone: latency", "\N{MICRO SIGN}s", f"{moved}. {key}"))
        if of["all"]:
            others = [entry for entry in found if entry.file == file and entry.program and entry.row.what in _ALL]
            figures.append(_together(of["all"], others, key))
    text = "From every rank to every other, each pair alone while all others are idle, and then all at once."
    return Section("mesh", "Mesh", text, figures)


_ALL = ("all", "alltoall", "all_to_all")


def _mesh_key(entry: Entry) -> str:
    row = entry.row
    memory = "GPU memory" if row.device else f"{row.memory or 'host'} memory"
    return f"{counted(row.ranks or 0, 'rank')}, {memory}, {row.transport or 'no transport'}, {entry.file}"


def _matrix(rows: Sequence[Row], title: str, unit: str, sub: str) -> Figure:
    numbers = sorted({number for row in rows for number in (row.source or 0, row.target or 0)})
    cells: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        cells.setdefault((row.source or 0, row.target or 0), []).append(row)
    best = {place: (max if unit == "GB/s" else min)(figure(row) for row in there) for place, there in cells.items()}
    values = [[best.get((source, target)) for target in numbers] for source in numbers]
    marked = frozenset(
        (numbers.index(source), numbers.index(target))
        for (source, target), there in cells.items()
        if all(row.outlier for row in there)
    )
    names = [_rank_name(rows, number) for number in numbers]
    lines = [
        [names[row], names[column], number_text(value), "outlier" if (row, column) in marked else ""]
        for row, line in enumerate(values)
        for column, value in enumerate(line)
        if value is not None
    ]
    plain = [str(number) for number in numbers]
    several = len(rows) > len(cells)
    sub += ". The best of several runs" if several else ""
    chart = HeatMap(
        title, unit, "from rank", "to rank", names, plain, values, marked, sub, less_is_better=unit != "GB/s"
    )
    return Figure(chart, table_of(["from", "to", unit, "note"], lines, left=2))


def _rank_name(rows: Sequence[Row], number: int) -> str:
    device = next((row.device or "" for row in rows if row.source == number), "").partition(",")[0]
    return f"{number} {device}".strip()


def _together(rows: Sequence[Row], others: Sequence[Entry], key: str) -> Figure:
    ranks = sorted({row.source or 0 for row in rows})
    sent = {rank: median([figure(row) for row in rows if (row.source or 0) == rank]) for rank in ranks}
    bars = [Bar(f"rank {rank}", rate, rate_text(rate)) for rank, rate in sent.items()]
    for entry in others:
        bars.append(Bar(entry.program, rate_of(entry.row) or 0.0, rate_text(rate_of(entry.row)), entry.program))
    lines = [[bar.label, bar.text] for bar in bars]
    sub = f"What each rank sends: {format_size(rows[0].size)} to each other, {rows[0].window} in flight. {key}"
    return Figure(Bars("All at once", "GB/s", [("", bars)], sub=sub), table_of(["rank", "sent"], lines))


def unpack_section(found: Sequence[Entry]) -> Section | None:
    """Ways into GPU memory: rate by fragment."""
    chosen = [entry for entry in found if entry.row.what == "unpack" and entry.row.fragment]
    if not chosen:
        return None
    figures = []
    for key in distinct(_unpack_key(entry) for entry in chosen):
        part = [entry.row for entry in chosen if _unpack_key(entry) == key]
        figures.append(_by_fragment(part, key))
    text = (
        "One block scattered into GPU memory by a kernel, by copies on the GPU, and by the host, beside one plain copy."
    )
    return Section("unpack", "Unpacking into GPU memory", text, figures)


def _unpack_key(entry: Entry) -> str:
    row = entry.row
    whence = "pinned host memory" if row.origin == "pinned" else "GPU memory"
    return f"{format_size(row.size)} from {whence} ({entry.file})"


def _by_fragment(rows: Sequence[Row], key: str) -> Figure:
    clocked = all(row.gpu_gb_per_s for row in rows if row.unpack != "host")
    series, lines = [], []
    ceiling = None
    for mode in distinct(str(row.unpack) for row in rows):
        part = sorted((row for row in rows if row.unpack == mode), key=lambda row: row.fragment or 0)
        known = [(float(row.fragment or 0), _unpack_rate(row, clocked)) for row in part]
        lines += [[format_size(int(x)), mode, rate_text(y)] for x, y in known]
        if mode == CEILING:
            ceiling = (f"contiguous copy, {rate_text(max(y for _, y in known))}", max(y for _, y in known))
        else:
            series.append(Series(mode, known))
    clock = "By the GPU's clock where the GPU does the work." if clocked else "By the host's clock."
    chart = Lines(f"Unpacking {key}", "fragment (bytes)", "GB/s", series, clock, log_y=True, reference=ceiling)
    return Figure(chart, table_of(["fragment", "way", "rate"], lines, left=2))


def _unpack_rate(row: Row, clocked: bool) -> float:
    return (row.gpu_gb_per_s if clocked and row.gpu_gb_per_s else row.gb_per_s) or 0.0


def slowest_pair(found: Sequence[Entry]) -> tuple[str, str, str] | None:
    """The slowest pair of a mesh by the best of its runs, as the map shows it; its unit, and of what."""
    best: dict[tuple[str, int | None, int | None], Row] = {}
    for entry in found:
        row = entry.row
        if row.what == "mesh" and row.part == "pair" and not entry.program:
            pair = (_mesh_key(entry), row.source, row.target)
            best[pair] = max(best.get(pair, row), row, key=figure)
    if not best:
        return None
    row = min(best.values(), key=figure)
    return number_text(figure(row)), "GB/s", f"{row.source} to {row.target}, {row.transport}, of {len(best)} pairs"
