"""The tables of `bench ep`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from .ep import STAGES
from .schema import Row
from .stats import gb_per_s, median
from .tables import Cell, compared, peer_errors, table
from .units import counted, format_bytes


def ep_tables(rows: Sequence[Row]) -> list[RenderableType]:
    """The tables of dispatch, combine and both, for each shape measured."""
    shown: list[RenderableType] = []
    for heading in dict.fromkeys(_heading(row) for row in rows):
        chosen = [row for row in rows if _heading(row) == heading]
        shown += [Text(heading, style="bold"), Text(_passed(chosen[0])), *(Text(line) for line in _links(chosen))]
        stages = [_stages(chosen)] if chosen[0].device is None else [_ways(chosen)]
        shown += [Text(""), _times(chosen), _bytes(chosen), *stages, *peer_errors(chosen)]
        shown += [Text(line) for line in (*_as_nixl(chosen), *_saved(chosen))]
    return shown


HEADER = 16
"""Bytes that NIXL's performance tests count for a row's header."""


def _as_nixl(rows: Sequence[Row]) -> list[str]:
    """The three lines of NIXL's tests of expert parallelism, and bytes that left the node, for each exchange on GPUs.

    As there, a rate is a rank's bytes over its average time: a row per selection with a header, its own rank's too.
    """
    lines: list[str] = []
    for row in rows:
        selections = (row.tokens or 0) * (row.topk or 0)
        averages = averages_by_rank(row)
        if row.device is None or not averages or not selections:
            continue
        there, back = (row.size or 0) + HEADER, 2 * (row.hidden or 0)
        moved = selections * {"dispatch": there, "combine": back}.get(row.what, there + back)
        rates = [gb_per_s(moved, average) for average in averages]
        rails = [lane.name for lane in row.lanes]
        network = row.bytes_network or 0
        over = " + ".join(
            text for kind, text in (("heap", "NVLink"), ("network", "network lanes")) if kind in row.links
        )
        only = " only" if "heap" not in row.links and "network" in row.links else ""
        passed = "not verified" if row.ranks_passed is None else f"{row.ranks_passed}/{row.ranks} ranks passed"
        lines += [
            f"Data Plane ({row.what}): {passed}, {counted(row.nodes or 0, 'node')}, {over or 'one rank'}{only}",
            f"Bandwidth (GB/s): {_spread(rates, 2)}; logical {_rate(row.bytes_logical, row.avg_us)}, "
            f"wire {_rate(row.bytes_wire, row.avg_us)}, network {_rate(row.bytes_network, row.avg_us)}",
            f"Latency (us): {_spread(averages, 1)}; p50 {_us(row.p50_us)}, slowest rank {_us(median(row.rounds))}",
        ]
        if network:
            each = _rate(round(network / len(rails)), row.avg_us) if rails else "-"
            lines.append(
                f"Network: {format_bytes(network)} per rank, {each} GB/s on each of {counted(len(rails), 'rail')}"
            )
    return lines


def averages_by_rank(row: Row) -> list[float]:
    """The average time of each rank, of all turns, from samples ordered by turn, rank and iteration."""
    ranks, turns = row.ranks or 1, max(len(row.rounds), 1)
    each = len(row.samples_us) // (ranks * turns)
    if each == 0 or each * ranks * turns != len(row.samples_us):
        return []
    parts = [row.samples_us[at : at + each] for at in range(0, len(row.samples_us), each)]
    return [sum(sum(part) for part in parts[rank::ranks]) / (each * turns) for rank in range(ranks)]


def _spread(values: Sequence[float], digits: int) -> str:
    average = sum(values) / len(values)
    return ", ".join(
        f"{name}={value:.{digits}f}" for name, value in (("avg", average), ("min", min(values)), ("max", max(values)))
    )


def _saved(rows: Sequence[Row]) -> list[str]:
    """The share of the time over the network alone that NVLink saves, by the slowest rank's median."""
    lines = []
    for row in rows:
        alone = row.peers.get("network")
        if alone is not None and alone.rounds and row.rounds:
            ours, theirs = median(row.rounds), median(alone.rounds)
            saves = 1 - ours / theirs
            text = f"saves {saves:.0%}" if saves >= 0 else f"takes {-saves:.0%} more"
            lines.append(f"{row.what}: {_us(ours)} us, over the network alone {_us(theirs)} us: {text}")
    return lines


def _heading(row: Row) -> str:
    nodes, ranks = counted(row.nodes or 0, "node"), counted(row.ranks or 0, "rank")
    extra = ["routing cached"] if row.cached else []
    extra += [] if row.prereduce is not False else ["no pre-reduction"]
    extra += [] if row.backend != "none" else ["no shared memory"]
    extra += ["once per node"] if row.send == "node" else []
    extra += [] if row.device is None else [f"in GPU memory, given as {row.given}, {row.num_sms} SMs"]
    return ", ".join(
        [
            f"expert parallelism: {ranks} on {nodes}",
            f"{counted(row.tokens or 0, 'token')} x {row.hidden} each",
            f"top-{row.topk} of {counted(row.experts or 0, 'expert')}",
            f"{row.layout} layout",
            f"dispatch {row.dtype}",
            f"routing {row.routing}",
            *extra,
        ]
    )


def _passed(row: Row) -> str:
    if row.ranks_passed is None:
        return "data: not verified"
    ranks = counted(row.ranks or 0, "rank")
    passed = f"data: {row.ranks_passed} of {ranks} passed against the reference"
    if row.verification == "quick":
        return f"{passed} with a few tokens each before anything was timed; --verify full compares all {row.tokens}"
    return f"{passed} before anything was timed"


def _links(rows: Sequence[Row]) -> list[str]:
    kinds = {"heap": "over mapped memory", "network": "over the network lanes", "self": "to the rank itself"}
    links = rows[0].links
    lines = ["links: " + ", ".join(f"{links[kind]} {text}" for kind, text in kinds.items() if kind in links)]
    carried = [f"{lane.name} {format_bytes(lane.bytes)}" for row in rows[-1:] for lane in row.lanes]
    return lines + ([f"rails: {', '.join(carried)} of each rank's {rows[-1].what}"] if carried else [])


def _times(rows: Sequence[Row]) -> RenderableType:
    count = counted(len(rows[0].slowest_us), "iteration")
    warmup = "" if rows[0].warmup is None else f" after {rows[0].warmup} untimed"
    heading = f"latency: all ranks and iterations together ({count}{warmup}); the slowest rank of each iteration"
    columns: list[Cell] = [("us", lambda row: row.what), *(_time(name) for name in ("p50", "p99", "avg", "min", "max"))]
    columns.append(("slowest p50", lambda row: _us(median(row.rounds))))
    beside: Cell = ("", lambda result: _us(median(result.rounds) if result.rounds else None))
    return compared(heading, rows, columns, [beside], 1, ["min", "max", "avg"])


def _time(name: str) -> Cell:
    return name, lambda row: _us(getattr(row, f"{name}_us"))


def _ways(rows: Sequence[Row]) -> RenderableType:
    """Crossrail and each peer, counted in three ways."""
    heading = (
        "three ways to count: kernels alone (profiler, slowest rank; events where there is none); events, all ranks "
        "together; the host's clock, until it knows of the end"
    )
    made = table(heading, ["us", "by", "kernels", "events p50", "host p50", "memory"], left=2, spare=["memory"])
    for row in rows:
        heap = "-" if row.heap_bytes is None else format_bytes(row.heap_bytes)
        made.add_row(row.what, "ours", _us(median(row.rounds)), _us(row.p50_us), _us(row.host_p50_us), heap)
        for name, result in row.peers.items():
            if result.error is None:
                heap = "-" if result.heap_bytes is None else format_bytes(result.heap_bytes)
                figures = (result.kernel_us, result.p50_us, result.host_p50_us)
                made.add_row(row.what, name, *(_us(figure) for figure in figures), heap)
    return made


def _bytes(rows: Sequence[Row]) -> RenderableType:
    heading = (
        "bandwidth: bytes of one rank and iteration over the times above (p99: what 99 % reach). logical: a row per "
        "selection, its own rank's too; wire: what left the rank; network: what left the node"
    )
    made = table(
        heading, ["GB/s", "counting", "bytes", "p50", "p99", "avg", "min", "max"], left=2, spare=["min", "max", "p99"]
    )
    for row in rows:
        counted = {"logical": row.bytes_logical, "wire": row.bytes_wire, "network": row.bytes_network}
        for name, moved in counted.items():
            times = (row.p50_us, row.p99_us, row.avg_us, row.max_us, row.min_us)
            made.add_row(row.what, name, format_bytes(moved or 0), *(_rate(moved, time) for time in times))
    return made


def _rate(moved: int | None, time: float | None) -> str:
    return f"{gb_per_s(moved, time):.2f}" if moved and time else "-"


def _stages(rows: Sequence[Row]) -> RenderableType:
    names = [*STAGES, "other"]
    columns = ["", *(column for name in names for column in (f"{name} us", "share"))]
    made = table("where the time went, average of all ranks and iterations", columns)
    for row in rows:
        cells: list[str] = []
        for name in names:
            spent = row.stages_us.get(name, 0.0)
            cells += [_us(spent), f"{spent / row.avg_us:.0%}" if row.avg_us else "-"]
        made.add_row(row.what, *cells)
    return made


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
