"""Sections about two ends: latency, bandwidth, single transfers, streams; and collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..schema import Row
from ..stats import median
from ..units import format_bytes, format_size
from .gather import (
    US,
    Entry,
    curves,
    distinct,
    latency_of,
    mid,
    p99_of,
    place_of,
    rate_of,
    rate_text,
    size_text,
    table_of,
    time_text,
    varying,
    with_peers_of,
)
from .model import NEUTRAL, Bar, Bars, Figure, HeatMap, Lines, Section, Series, Stack
from .scales import number_text, time_unit

LATENCIES = ("latency", "write", "put")
RATES = ("bandwidth", "pair", "transfer", "bidirectional bandwidth", "bi-directional bandwidth")

_SHOWN = frozenset((*LATENCIES, *RATES, "dispatch", "combine", "e2e", "stream"))
"""Measurements of other programs that have sections of their own."""

_MOST_BARS = 24

_FEW = 4
"""Transfers up to which each has bars of its own for rails and for parts of its time."""

_DOTTED = 4
"""Curves up to which the 99th percentiles are drawn as well."""


def latency_section(found: Sequence[Entry]) -> Section | None:
    """Small transfers: time by size."""
    chosen = _beside_ours(
        found, [entry for entry in found if entry.row.what in LATENCIES and latency_of(entry.row) is not None]
    )
    if not chosen:
        return None
    figures = []
    for place, part in _by_place(chosen):
        transports = distinct(entry.row.transport for entry in part if not entry.program)
        several = _several_sizes(part)
        for transport in [""] if several else transports or [""]:
            over = [entry for entry in part if not transport or entry.program or entry.row.transport == transport]
            words = [word for word in (place, transport) if word]
            figures += _times(over, ", ".join(["One-way latency", *words]))
    return Section(
        "latency",
        "Latency",
        "Time of one message from one end to the other: half of a round trip. Less is better.",
        figures,
    )


def _beside_ours(found: Sequence[Entry], chosen: Sequence[Entry]) -> list[Entry]:
    """Without what other programs measured beside rows of ours of another kind."""
    ours = {entry.file for entry in found if not entry.program}
    alike = {entry.file for entry in chosen if not entry.program}
    return [entry for entry in chosen if not entry.program or entry.file in alike or entry.file not in ours]


def _by_place(chosen: Sequence[Entry]) -> list[tuple[str, list[Entry]]]:
    """Entries by the memory they are about; those of other programs are where the rows of their file are."""
    places = distinct(place_of(entry.row) for entry in chosen if not entry.program) or [""]
    return [(place, [entry for entry in chosen if _belongs(entry, place, chosen)]) for place in places]


def _belongs(entry: Entry, place: str, others: Sequence[Entry]) -> bool:
    if not place or not entry.program or entry.row.device:
        return not place or place_of(entry.row) == place
    beside = [place_of(one.row) for one in others if one.file == entry.file and not one.program]
    return place in beside or not beside


def _times(part: Sequence[Entry], title: str) -> list[Figure]:
    entries = with_peers_of(part)
    parts: list[tuple[str, Callable[[Row], object]]] = [
        ("", lambda row: {"latency": "message", "write": "write"}.get(row.what, row.what)),
        ("", lambda row: row.transport),
        ("", lambda row: row.memory),
    ]
    name = varying(entries, parts)
    if _several_sizes(entries):
        return [_lines_of_times(entries, name, title, "message size (bytes)")]
    return [_bars_of_times(entries, name, f"{title}, {size_text(entries[0].row.size)}")]


def _several_sizes(entries: Sequence[Entry]) -> bool:
    """Whether there is a curve to draw."""
    return len({entry.row.size for entry in entries if entry.row.size > 0}) > 1


def _lines_of_times(entries: Sequence[Entry], name: Callable[[Entry], str], title: str, x_name: str) -> Figure:
    found = curves([entry for entry in entries if entry.row.size > 0], name, lambda entry: float(entry.row.size))
    most = max(mid(at, latency_of) or 0.0 for one in found for at in one.at.values())
    scale, unit = time_unit(most)
    series, lines = [], []
    for one in found:
        known = [(x, mid(at, latency_of), mid(at, p99_of)) for x, at in one.at.items() if x > 0]
        points = [(x, value / scale) for x, value, _ in known if value is not None]
        upper = [None if high is None else high / scale for _, value, high in known if value is not None]
        upper = upper if len(found) <= _DOTTED else []
        series.append(Series(one.name, points, upper, one.by))
        lines += [[size_text(int(x)), one.name, time_text(value), time_text(high)] for x, value, high in known]
    dotted = any(value is not None for one in series for value in one.upper)
    sub = "Line: median." + (" Dotted: 99th percentile." if dotted else "")
    chart = Lines(title, x_name, unit, series, sub, log_y=True)
    return Figure(chart, table_of(["size", "by", "median", "p99"], lines, left=2))


def _bars_of_times(entries: Sequence[Entry], name: Callable[[Entry], str], title: str) -> Figure:
    found = curves(entries, name, lambda entry: float(entry.row.size))
    bars, lines = [], []
    for one in found:
        for at in one.at.values():
            value, high = mid(at, latency_of), mid(at, p99_of)
            if value is not None:
                hint = f"{one.name}: {time_text(value)}, p99 {time_text(high)}"
                bars.append(Bar(one.name, value, time_text(value), one.by, value, high, hint))
                lines.append([one.name, time_text(value), time_text(high)])
    chart = Bars(title, US, [("", bars)], sub="Bar: median. Whisker: up to the 99th percentile.")
    return Figure(chart, table_of(["by", "median", "p99"], lines))


def bandwidth_section(found: Sequence[Entry]) -> Section | None:
    """Windows of messages: rate by size."""
    chosen = _beside_ours(found, [entry for entry in found if entry.row.what in RATES and entry.row.gb_per_s])
    if not chosen:
        return None
    figures = []
    for place, there in _by_place(chosen):
        windows = sorted({entry.row.window or 0 for entry in there if not entry.program}) or [0]
        for window in windows:
            same = [entry for entry in there if not window or entry.row.window in (window, None)]
            transports = distinct(entry.row.transport for entry in same if not entry.program) or [""]
            for transport in transports:
                over = [entry for entry in same if not transport or entry.program or entry.row.transport == transport]
                part = with_peers_of(over)
                parts: list[tuple[str, Callable[[Row], object]]] = [("", _memory), ("window ", lambda row: row.window)]
                words = [place, transport, f"{window} in flight" if window > 1 else "one at a time" if window else ""]
                figures += _rates(part, varying(part, parts), ", ".join(["Bandwidth", *(one for one in words if one)]))
    text = "A window of messages in flight from one end to the other. GB is 1e9 bytes; more is better."
    return Section("bandwidth", "Bandwidth", text, figures)


def _memory(row: Row) -> str:
    return f"{row.memory} memory" if row.memory else ""


def _rates(part: Sequence[Entry], name: Callable[[Entry], str], title: str) -> list[Figure]:
    if _several_sizes(part):
        return [_lines_of_rates(part, name, title)]
    found = curves(part, name, lambda entry: float(entry.row.size))
    bars, lines = [], []
    for one in found:
        for at in one.at.values():
            value = mid(at, rate_of)
            if value is not None:
                bars.append(Bar(one.name, value, rate_text(value), one.by))
                lines.append([one.name, rate_text(value)])
    chart = Bars(f"{title}, {size_text(part[0].row.size)}", "GB/s", [("", bars)])
    return [Figure(chart, table_of(["by", "rate"], lines))]


def _lines_of_rates(part: Sequence[Entry], name: Callable[[Entry], str], title: str) -> Figure:
    found = curves([entry for entry in part if entry.row.size > 0], name, lambda entry: float(entry.row.size))
    series, lines = [], []
    for one in found:
        known = [(x, mid(at, rate_of)) for x, at in one.at.items() if x > 0]
        series.append(Series(one.name, [(x, value) for x, value in known if value is not None], by=one.by))
        lines += [[size_text(int(x)), one.name, rate_text(value)] for x, value in known]
    chart = Lines(title, "message size (bytes)", "GB/s", series, log_y=True)
    return Figure(chart, table_of(["size", "by", "rate"], lines, left=2))


def transfer_section(found: Sequence[Entry]) -> Section | None:
    """Single transfers over many rails: rate, share of each rail, and where the time went."""
    chosen = [entry for entry in found if entry.row.what == "p2p"]
    if not chosen:
        return None
    names = _transfer_names(chosen)
    beside = [entry for entry in found if entry.program and entry.row.what == "bandwidth" and not entry.row.peers]
    files = {entry.file for entry in chosen}
    figures = [_overview(chosen, names, [entry for entry in beside if entry.file in files])]
    part = list(zip(chosen, names, strict=True))
    few = len(part) <= _FEW
    details = (_rails(part), _stages(part)) if few else (_all_rails(part), _all_stages(part))
    figures += [made for made in details if made is not None]
    verdicts = [
        f"{name}: {entry.row.verdict.text}" for entry, name in zip(chosen, names, strict=True) if entry.row.verdict
    ]
    text = "One transfer at a time, over every rail. Rates are bytes over the time until the sender knows of the end."
    return Section("transfers", "Single transfers", text, figures, notes=distinct(verdicts))


def _transfer_names(chosen: Sequence[Entry]) -> list[str]:
    made = []
    for entry in chosen:
        row = entry.row
        device = f", {row.device.replace(',', ' to ')}" if row.device else ""
        unpack = f", {row.unpack}" if row.unpack else ""
        rails = len([lane for lane in row.lanes if lane.bytes])
        channels = f" x {row.channels}" if (row.channels or 1) > 1 else ""
        over = f"{row.transport}, {rails} {'rail' if rails == 1 else 'rails'}{channels}"
        made.append(f"{format_size(row.size)} over {over}{device}{unpack}")
    files = len({entry.file for entry in chosen}) > 1
    named = [f"{name} ({entry.file})" if files else name for name, entry in zip(made, chosen, strict=True)]
    seen: dict[str, int] = {}
    numbered = []
    for name in named:
        seen[name] = seen.get(name, 0) + 1
        numbered.append(f"{name}, run {seen[name]}" if named.count(name) > 1 else name)
    return numbered


def _overview(chosen: Sequence[Entry], names: Sequence[str], beside: Sequence[Entry]) -> Figure:
    groups, lines = [], []
    for entry, name in zip(chosen, names, strict=True):
        row = entry.row
        bars = [Bar("Crossrail", row.gb_per_s or 0.0, rate_text(row.gb_per_s))]
        if row.raw_tcp_gb_per_s:
            bars.append(Bar("plain TCP sockets", row.raw_tcp_gb_per_s, rate_text(row.raw_tcp_gb_per_s), NEUTRAL))
        for peer, result in row.peers.items():
            if result.gb_per_s and result.error is None:
                bars.append(Bar(peer, result.gb_per_s, rate_text(result.gb_per_s), peer, hint=f"{peer}: {result.what}"))
        groups.append((name, bars))
        lines += [[name, bar.label, bar.text] for bar in bars]
    for one in beside[:_MOST_BARS]:
        groups.append(
            (
                f"{format_size(one.row.size)} by {one.program}",
                [Bar(one.program, one.row.gb_per_s or 0.0, rate_text(one.row.gb_per_s), one.program)],
            )
        )
        lines.append([f"{format_size(one.row.size)} by {one.program}", one.program, rate_text(one.row.gb_per_s)])
    chart = Bars(
        "Rate of each transfer", "GB/s", groups, sub="Beside plain sockets over the same rails, in the same run."
    )
    return Figure(chart, table_of(["transfer", "by", "rate"], lines, left=2))


def _rails(part: Sequence[tuple[Entry, str]]) -> Figure | None:
    groups, lines = [], []
    for entry, name in part:
        row = entry.row
        bars = []
        for lane in row.lanes:
            if lane.bytes:
                more = f", resent {format_bytes(lane.resent)}" if lane.resent else ""
                more += f", {lane.retransmits} retransmits" if lane.retransmits else ""
                rate = rate_text(lane.gb_per_s) if lane.gb_per_s else format_bytes(lane.bytes)
                hint = f"{lane.name}: {format_bytes(lane.bytes)}, {lane.share:.1%}, {rate}{more}"
                bars.append(Bar(lane.name, lane.share * 100, f"{rate}, {lane.share:.0%}", hint=hint))
                lines.append([name, lane.name, format_bytes(lane.bytes), f"{lane.share:.1%}", rate])
        for unused, why in row.unused.items():
            bars.append(Bar(f"{unused}: {why}", 0.0, "not used", NEUTRAL))
            lines.append([name, unused, "0 B", "0 %", f"not used: {why}"])
        if bars:
            groups.append((name, bars))
    if not groups:
        return None
    chart = Bars("What each rail carried", "%", groups, sub="Share of the bytes, and the rail's rate.")
    return Figure(chart, table_of(["transfer", "rail", "bytes", "share", "rate"], lines, left=2))


_STAGES = {
    "wire": "on the wire",
    "window": "window full",
    "copy": "copying",
    "match": "waiting for the receiver",
    "pack": "packing",
    "unpack": "unpacking",
    "slot": "waiting for a slot",
}
"""Parts of the time of a transfer."""


def _all_rails(part: Sequence[tuple[Entry, str]]) -> Figure | None:
    """Many transfers: a line for each, with a part for each rail."""
    names = distinct(lane.name for entry, _ in part for lane in entry.row.lanes if lane.bytes)
    if not names:
        return None
    rows, lines = [], []
    for entry, name in part:
        shares = {lane.name: lane for lane in entry.row.lanes}
        values = [shares[rail].share * 100 if rail in shares else 0.0 for rail in names]
        rows.append((name, values, rate_text(entry.row.gb_per_s)))
        for lane in entry.row.lanes:
            if lane.bytes:
                rate = rate_text(lane.gb_per_s)
                lines.append([name, lane.name, format_bytes(lane.bytes), f"{lane.share:.1%}", rate])
    chart = Stack("What each rail carried", "%", names, rows, sub="Share of the bytes; the transfer's rate.")
    return Figure(chart, table_of(["transfer", "rail", "bytes", "share", "rate"], lines, left=2))


def _all_stages(part: Sequence[tuple[Entry, str]]) -> Figure | None:
    """Many transfers: a line of cells for each, one for each part of the time."""
    shares = [(name, _shares(entry.row)) for entry, name in part]
    used = [stage for stage in _STAGES if any(found.get(stage, 0.0) >= 0.5 for _, found in shares)]
    if not used:
        return None
    values = [[round(found[stage]) if stage in found else None for stage in used] for _, found in shares]
    lines = [[name, *(f"{found[stage]:.0f} %" if stage in found else "-" for stage in used)] for name, found in shares]
    legend = ", ".join(f"{stage}: {_STAGES[stage]}" for stage in used if stage != _STAGES[stage])
    sub = f"Share of a transfer's time; parts overlap. {legend[:1].upper()}{legend[1:]}."
    names = [name for name, _ in shares]
    chart = HeatMap("Where the time went", "%", "transfer", "part", names, used, values, sub=sub, strips=True)
    return Figure(chart, table_of(["transfer", *used], lines))


def _shares(row: Row) -> dict[str, float]:
    """Each part of the time of a transfer, in percent of it; none if that was not measured."""
    if row.stages is None or not row.iterations:
        return {}
    whole = median([one.us_sender for one in row.iterations])
    if whole <= 0:
        return {}
    return {stage: min(getattr(row.stages, f"{stage}_us") / whole * 100, 100.0) for stage in _STAGES}


def _stages(part: Sequence[tuple[Entry, str]]) -> Figure | None:
    groups, lines = [], []
    for entry, name in part:
        shares = {stage: share for stage, share in _shares(entry.row).items() if share > 0}
        if not shares:
            continue
        bars = []
        for stage, label in _STAGES.items():
            if stage in shares:
                spent = time_text(getattr(entry.row.stages, f"{stage}_us"))
                bars.append(Bar(label, shares[stage], f"{shares[stage]:.0f} %, {spent}"))
                lines.append([name, label, spent, f"{shares[stage]:.0f} %"])
        groups.append((f"{name}: {time_text(entry.row.p50_us)}", bars))
    if not groups:
        return None
    sub = "Share of a transfer's time. Parts overlap and need not add up."
    chart = Bars("Where the time went", "%", groups, sub=sub, top=100.0)
    return Figure(chart, table_of(["transfer", "part", "time", "share"], lines, left=2))


def stream_section(found: Sequence[Entry]) -> Section | None:
    """What iperf3 measured: the rate over time, and every stream."""
    chosen = [entry for entry in found if entry.row.what == "stream"]
    if not chosen:
        return None
    series = [
        Series(
            f"{_direction(entry, entry.program)} ({entry.file})",
            [(float(index + 1), rate) for index, rate in enumerate(entry.row.rounds)],
        )
        for entry in chosen
        if len(entry.row.rounds) > 1
    ]
    figures = []
    if series:
        lines = [[one.name, f"{x:.0f}", rate_text(y)] for one in series for x, y in one.points]
        chart = Lines("Rate over time", "interval", "GB/s", series, x_kind="index")
        figures.append(Figure(chart, table_of(["by", "interval", "rate"], lines)))
    groups, rows = [], []
    for entry in chosen:
        parts = [
            (_direction(entry, "all streams"), entry.row.gb_per_s),
            *((_direction(entry, lane.name), lane.gb_per_s) for lane in entry.row.lanes),
        ]
        bars = [Bar(name, rate or 0.0, rate_text(rate), entry.program) for name, rate in parts]
        groups.append((f"{entry.file}: {', '.join(entry.row.notes)}", bars))
        rows += [[entry.file, bar.label, bar.text] for bar in bars]
    figures.append(Figure(Bars("Streams", "GB/s", groups), table_of(["file", "stream", "rate"], rows, left=2)))
    return Section("streams", "Streams", "Bulk data through sockets, as iperf3 counts it.", figures)


def _direction(entry: Entry, name: str) -> str:
    return f"{name}, {entry.row.protocol}" if entry.row.protocol else name


def other_section(found: Sequence[Entry], known: frozenset[str]) -> Section | None:
    """Collectives, and whatever else has a size and a figure."""
    chosen = [
        entry
        for entry in found
        if (entry.row.what not in known or (entry.foreign and entry.row.what not in _SHOWN))
        and (latency_of(entry.row) is not None or entry.row.samples_us or entry.row.gb_per_s)
    ]
    if not chosen:
        return None
    figures = []
    for what in distinct(entry.row.what for entry in chosen):
        part = [entry for entry in chosen if entry.row.what == what]
        name = _program
        title = what.replace("_", "-") if what.islower() else what
        title = title[:1].upper() + title[1:]
        timed = [entry for entry in part if latency_of(entry.row) is not None]
        if timed:
            figures.append(
                _lines_of_times(timed, name, f"{title}: time", "size (bytes)")
                if _several_sizes(timed)
                else _bars_of_times(timed, name, f"{title}: time")
            )
        rated = [entry for entry in part if entry.row.gb_per_s]
        if rated:
            figures += _rates(rated, name, f"{title}: rate")
    return Section("others", "Collectives and others", "As the programs that measured them count.", figures)


def _program(entry: Entry) -> str:
    return entry.program or "Crossrail"


_SMALL = 8
"""Bytes of the message that latencies are compared by."""


def headline_latency(found: Sequence[Entry]) -> tuple[str, str, str] | None:
    """The shortest one-way time of 8 B, or of what else was measured, its unit, of what, and its ratio to peers."""
    chosen = [entry for entry in found if entry.row.what in ("latency", "write") and not entry.program]
    timed = [(time, entry.row) for entry in chosen if (time := latency_of(entry.row)) is not None]
    if not timed:
        return None
    time, row = min(timed, key=lambda item: (item[1].size != _SMALL, item[0]))
    scale, unit = time_unit(time)
    of = [f"{size_text(row.size)} over {row.transport}, {place_of(row)}", *ratios_text(row)]
    return number_text(time / scale), unit, "; ".join(of)


def ratios_text(row: Row) -> list[str]:
    """How many times better than each peer of the same run ``row`` is: more than 1 is better."""
    return [f"{ratio:.2f} x {peer}" for peer, ratio in row.ratio.items()]
