"""Tables of what two ends measure: latency, bandwidth, one big transfer."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.console import RenderableType
from rich.text import Text

from .schema import Iteration, Lane, Row
from .stats import gb_per_s, median, percentile
from .tables import Cell, HeadedTable, compared, peer_names, ratio_text, table
from .units import counted, format_bytes, format_size
from .verdict import is_void

LATENCIES = {
    "latency": "latency: one way, half of a round trip",
    "write": "write: one-sided, until the other host has seen it; half of a round trip of two",
}


_VERIFIED = {
    "": "data: verified before and after the timing",
    "full": "data: every transfer verified, byte by byte",
    "quick": "data: the first and the last transfer verified, byte by byte; --verify full verifies every one",
    "none": "data: not verified",
}

_SHOWN_AT_EACH_END = 5
"""Iterations shown at the beginning and at the end of a table that would otherwise be longer than four times that."""


_WAY: list[Cell] = [
    ("size", lambda row: format_size(row.size)),
    ("transport", lambda row: row.transport),
    ("protocol", lambda row: row.protocol or "-"),
]


def latency_table(rows: Sequence[Row]) -> HeadedTable:
    """The table of half round trips."""
    on = f", {rows[0].device.replace(',', ' and ')}" if rows[0].device else ""
    # Beside a peer, the mean is what is compared.
    spare = ["min us", "max us", "protocol", "transport"] + ([] if peer_names(rows) else ["avg us"])
    times = [_time(name) for name in ("p50", "p99", "avg", "min", "max")]
    return compared(LATENCIES[rows[0].what] + on, rows, _WAY + times, [_time("avg")], 3, spare)


def _time(name: str) -> Cell:
    return f"{name} us", lambda of: _figure(getattr(of, f"{name}_us"))


def bandwidth_table(rows: Sequence[Row]) -> HeadedTable:
    """The table of windows of sends."""
    spare = ["memory", "protocol", "messages/s", "transport"]
    title = f"bandwidth: {rows[0].window} sends, wait for all, one small reply; us per such window"
    rate: Cell = ("GB/s", lambda of: _rate(of.gb_per_s))
    memory: Cell = ("memory", lambda row: row.memory or "-")
    columns = [*_WAY, memory, rate, ("messages/s", _messages), _time("p50"), _time("p99")]
    return compared(title, rows, columns, [rate], 4, spare)


def shares_table(rows: Sequence[Row]) -> HeadedTable | None:
    """Share of each rail in the bytes of each size; None where no row has several rails."""
    rails = list(dict.fromkeys(lane.name for row in rows if len(row.lanes) > 1 for lane in row.lanes))
    if not rails:
        return None
    made = table("share of each lane", ["size", *rails], left=1, keys=1)
    for row in rows:
        shares = {lane.name: lane.share for lane in row.lanes}
        made.add_row(format_size(row.size), *(f"{shares.get(rail, 0.0):.1%}" for rail in rails))
    return made


def p2p_tables(row: Row) -> list[RenderableType]:
    """The tables and lines of one big transfer."""
    shown: list[RenderableType] = [_iterations(row)]
    if row.lanes:
        shown.append(_lanes(row.lanes, row.unused))
    if row.stages is not None:
        shown.append(_stages(row))
    shown.extend(Text(line) for line in _ceilings(row))
    for name, result in row.peers.items():
        if result.error is None:
            both = f"{_rate(result.gb_per_s)} GB/s ({result.what}), Crossrail: {_rate(row.gb_per_s)}"
            rounds = f"medians of {counted(len(row.rounds), 'round')}"
            shown.append(Text(f"{name}: {both}, {rounds}; ratio {ratio_text(row, name)}"))
    if row.verified is not None:
        shown.append(Text(_VERIFIED[row.verification or ("" if row.verified else "none")]))
    if row.verdict is not None:
        shown.append(Text(f"verdict: {row.verdict.text}"))
    return shown


def _ceilings(row: Row) -> list[str]:
    """The rates of parts of the path alone, measured in the same run."""
    lines = []
    if row.raw_tcp_gb_per_s and row.gb_per_s:
        if is_void(row.gb_per_s, row.raw_tcp_gb_per_s):
            part = ", slower than this transfer: the comparison is void"
        else:
            part = f"; this is {row.gb_per_s / row.raw_tcp_gb_per_s:.0%} of it"
        lines.append(f"plain TCP sockets over the same rails: {_rate(row.raw_tcp_gb_per_s)} GB/s{part}")
    if row.unpack_gb_per_s:
        modes = ", ".join(f"{mode} {_rate(rate)}" for mode, rate in row.unpack_gb_per_s.items())
        lines.append(f"unpacking alone on the receiver's GPU: {modes} GB/s; this used {row.unpack}")
    return lines


def _iterations(row: Row) -> HeadedTable:
    columns = ["iteration", "protocol", "sender ms", "receiver ms", "sender GB/s", "receiver GB/s"]
    where = f" from {row.device.replace(',', ' to ')}" if row.device else ""
    title = f"p2p: {format_size(row.size)} ({format_bytes(row.size)}) per iteration over {row.transport}{where}"
    made = table(title, columns, left=2, keys=1, spare=["protocol"])
    count = len(row.iterations)
    long = count > 4 * _SHOWN_AT_EACH_END
    for number, one in enumerate(row.iterations, 1):
        if not long or number <= _SHOWN_AT_EACH_END or number > count - _SHOWN_AT_EACH_END:
            made.add_row(str(number), one.protocol, *_both_ends(one))
        elif number == _SHOWN_AT_EACH_END + 1:
            made.add_row(f"({count - 2 * _SHOWN_AT_EACH_END} more)")
    if long:
        made.add_section()
        for name, part in (("fastest", 0.0), ("p50", 50.0), ("p90", 90.0), ("p99", 99.0), ("slowest", 100.0)):
            made.add_row(name, "", *_at(row, part))
    if row.iterations:
        made.add_section()
        made.add_row("average", "", *_average(row.iterations))
    return made


def _both_ends(one: Iteration) -> list[str]:
    times = [_figure(one.us_sender / 1e3), _figure(one.us_receiver / 1e3)]
    return [*times, _rate(one.gb_per_s_sender), _rate(one.gb_per_s_receiver)]


def _at(row: Row, part: float) -> list[str]:
    """The percentile ``part`` of the times of each end, and the rates of transfers that took so long."""
    times = [
        percentile(sorted(times), part)
        for times in ([one.us_sender for one in row.iterations], [one.us_receiver for one in row.iterations])
    ]
    return [*(_figure(time / 1e3) for time in times), *(_rate(gb_per_s(row.size, time)) for time in times)]


def _average(iterations: Sequence[Iteration]) -> list[str]:
    """Average times, and the corresponding rates (bytes over time, not the mean of rates)."""
    count = len(iterations)
    sender = sum(one.us_sender for one in iterations) / count
    receiver = sum(one.us_receiver for one in iterations) / count
    moved = [one.gb_per_s_sender * one.us_sender for one in iterations]
    rates = (sum(moved) / count / sender, sum(moved) / count / receiver)
    return [_figure(sender / 1e3), _figure(receiver / 1e3), *(_rate(rate) for rate in rates)]


def _lanes(lanes: Sequence[Lane], unused: Collection[str]) -> HeadedTable:
    columns = ["lane", "bytes", "share", "GB/s", "line GB/s", "chunks", "resent", "retransmits"]
    made = table("lanes", columns, spare=["chunks", "line GB/s"])
    for lane in lanes:
        if not lane.bytes and lane.name in unused:
            continue
        resent = "-" if lane.resent is None else format_bytes(lane.resent)
        counts = [_count(lane.chunks), resent, _count(lane.retransmits)]
        rates = [_rate(lane.gb_per_s), _rate(lane.line_gb_per_s)]
        made.add_row(lane.name, format_bytes(lane.bytes), f"{lane.share:.1%}", *rates, *counts)
    for name in unused:
        made.add_row(name, "not used", *["-"] * 6)
    return made


_SHARES = {"wire": "network", "slot": "bounce"}
"""Stages whose share of the time has another name than their times."""


def _stages(row: Row) -> HeadedTable:
    stages = row.stages
    shares = stages.slowest if stages is not None else {}
    columns = ["stage", "ms", "of the time", *(["slowest"] if shares else [])]
    made = table("where the time went, per iteration (parts may overlap; one is the slowest at a time)", columns)
    whole = median([one.us_sender for one in row.iterations]) if row.iterations else 0.0
    if stages is not None and whole:
        named = {"wire": stages.wire_us, "window": stages.window_us, "copy": stages.copy_us, "match": stages.match_us}
        if row.device is not None:
            named |= {"pack": stages.pack_us, "unpack": stages.unpack_us, "slot": stages.slot_us}
        for name, spent in named.items():
            share = shares.get(_SHARES.get(name, name))
            last = ["-" if share is None else f"{share:.0%}"] if shares else []
            made.add_row(name, _figure(spent / 1e3), f"{spent / whole:.0%}", *last)
    return made


def _messages(row: Row) -> str:
    """Messages per second at the rate beside them; of empty messages, at the average time of a window."""
    if row.size and row.gb_per_s:
        return f"{row.gb_per_s * 1e9 / row.size:,.0f}"
    return f"{row.window / row.avg_us * 1e6:,.0f}" if row.window and row.avg_us else "-"


def _rate(rate: float | None) -> str:
    if rate is None:
        return "-"
    return f"{rate:.2f}" if rate >= 0.1 else f"{rate:.4f}"


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if value < 100 else f"{value:.1f}"


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)
