"""Sections about expert parallelism: dispatch and combine, traffic, the control plane, elastic plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..control import STEPS
from ..schema import PeerResult, Row
from ..stats import median
from ..units import counted, format_bytes
from .gather import Entry, distinct, latency_of, rate_text, table_of, time_text
from .model import OURS, Bar, Bars, Figure, HeatMap, Lines, Section, Series, Stack, Table
from .scales import number_text, time_unit

MODES = ("dispatch", "combine", "e2e")
NAMED = {"dispatch": "dispatch", "combine": "combine", "e2e": "dispatch and combine"}

VARIED = ("tokens", "hidden", "topk", "experts", "num_sms")
"""Numbers of a shape that may stand on an axis."""

_NAMES = {"tokens": "tokens per rank", "hidden": "hidden size", "topk": "top-k", "num_sms": "multiprocessors"}

_MOST_GROUPS = 6


def expert_section(found: Sequence[Entry]) -> Section | None:
    """Dispatch and combine: beside peers, by each number that varies, and where the time went."""
    chosen = [
        entry
        for entry in found
        if entry.row.what in MODES and entry.row.phase is None and latency_of(entry.row) is not None
    ]
    if not chosen:
        return None
    swept, figures = _sweeps(chosen)
    alone = [entry for entry in chosen if id(entry) not in swept]
    for shape in distinct(_shape(entry) for entry in alone):
        part = [entry for entry in alone if _shape(entry) == shape]
        for first in range(0, len(part), _MOST_GROUPS):
            figures.append(_beside(part[first : first + _MOST_GROUPS], shape))
    figures += _traffic(chosen)
    staged = [entry for entry in alone if entry.row.stages_us]
    if staged:
        figures.append(_parts(staged))
    text = "Times of all ranks and iterations together. In GPU memory, by the GPU's clock."
    carried = _carried(chosen)
    return Section("experts", "Expert parallelism", text, figures, [carried] if carried is not None else [])


def _carried(chosen: Sequence[Entry]) -> Table | None:
    """Bytes of one rank and iteration: as counted, and over each link."""
    lines = []
    for entry in chosen:
        row = entry.row
        counted_as = (("logical", row.bytes_logical), ("wire", row.bytes_wire), ("network", row.bytes_network))
        parts = [(name, moved) for name, moved in counted_as if moved is not None]
        parts += [(lane.name, lane.bytes) for lane in row.lanes]
        lines += [[entry.file, _variant(row), name, format_bytes(moved)] for name, moved in parts]
    if not lines:
        return None
    note = (
        "logical: a row per selection, its own rank's too; wire: what left the rank; network: what left the node; then "
        "what each link carried"
    )
    return Table(["file", "work", "bytes", "of a rank and iteration"], lines, 3, "Bytes per link", note)


def _traffic(chosen: Sequence[Entry]) -> list[Figure]:
    """Tokens from rank to rank and of each expert, once for each routing."""
    found: dict[str, Entry] = {}
    for entry in chosen:
        if entry.row.traffic and all(len(sent) == len(entry.row.traffic) for sent in entry.row.traffic):
            found.setdefault(f"{entry.row.traffic}{entry.row.expert_tokens}", entry)
    figures = []
    for entry in found.values():
        row = entry.row
        about = f"{row.tokens} tokens per rank, top-{row.topk} of {row.experts}, routing {row.routing} ({entry.file})"
        names = [str(number) for number in range(len(row.traffic))]
        chart = HeatMap(
            "Tokens from rank to rank",
            "tokens",
            "from rank",
            "to rank",
            names,
            names,
            row.traffic,
            sub=about,
            zero=True,
        )
        figures.append(Figure(chart, _loads(["from rank", "to rank"], row.traffic)))
        local = len(row.expert_tokens) // len(names)
        if local and local * len(names) == len(row.expert_tokens) and any(row.expert_tokens):
            loads = [row.expert_tokens[first : first + local] for first in range(0, len(row.expert_tokens), local)]
            mean = sum(row.expert_tokens) / len(row.expert_tokens)
            sub = f"{about}. The busiest has {max(row.expert_tokens) / mean:.2f} times the mean of {number_text(mean)}."
            columns = [str(number) for number in range(local)]
            each = HeatMap(
                "Tokens of each expert",
                "tokens",
                "rank",
                "expert of the rank",
                names,
                columns,
                loads,
                sub=sub,
                zero=True,
            )
            figures.append(Figure(each, _loads(["rank", "expert"], loads)))
    return figures


def _loads(names: Sequence[str], loads: Sequence[Sequence[int]]) -> Table:
    """A line for each rank: the sum, mean and least of its loads, and the busiest of them with its number."""
    lines = []
    for rank, each in enumerate(loads):
        figures = [str(sum(each)), number_text(sum(each) / len(each)), str(min(each)), str(max(each))]
        lines.append([str(rank), *figures, str(each.index(max(each)))])
    return table_of([names[0], "tokens", "mean", "least", "most", f"busiest {names[1]}"], lines)


def _shape(entry: Entry) -> str:
    row = entry.row
    words = [counted(row.ranks, "rank") if row.ranks else "", f"{row.layout} layout" if row.layout else ""]
    words += [
        f"{row.tokens} x {row.hidden}" if row.tokens else "",
        f"top-{row.topk} of {row.experts}" if row.topk else "",
    ]
    words += ["GPU memory" if row.device else "host memory" if not entry.program else entry.program]
    return ", ".join(word for word in words if word)


def _variant(row: Row) -> str:
    words = [NAMED.get(row.what, row.what), row.dtype or "", row.protocol or ""]
    words += ["routing cached" if row.cached else "", f"{row.num_sms} SMs" if row.num_sms and row.device else ""]
    words += [f"routing {row.routing}" if row.routing not in (None, "uniform") else ""]
    words += ["no shared memory" if row.backend == "none" else "", f"given {row.given}" if row.given else ""]
    words += ["once per node" if row.send == "node" else ""]
    return ", ".join(word for word in words if word)


def _beside(part: Sequence[Entry], shape: str) -> Figure:
    groups, lines = [], []
    for entry in part:
        row = entry.row
        label = f"{_variant(row)} ({entry.file})"
        value = latency_of(row) or 0.0
        high = row.p99_us or row.max_us
        bars = [Bar(entry.program or "Crossrail", value, time_text(value), entry.program, value, high)]
        for name, peer in row.peers.items():
            time = _peer_time(peer)
            if time is not None:
                bars.append(Bar(name, time, time_text(time), name, hint=f"{name}: {peer.what}, {time_text(time)}"))
        groups.append((label, bars))
        for bar in bars:
            lines.append(
                [label, bar.label, bar.text, time_text(bar.high), rate_text(row.gb_per_s) if bar is bars[0] else "-"]
            )
    chart = Bars(shape, "\N{MICRO SIGN}s", groups, sub="Bar: median. Whisker: up to the 99th percentile.")
    return Figure(chart, table_of(["work", "by", "median", "p99", "rate (wire)"], lines, left=2))


def _peer_time(peer: PeerResult) -> float | None:
    if peer.error is not None:
        return None
    return peer.p50_us if peer.p50_us is not None else peer.avg_us


def _sweeps(chosen: Sequence[Entry]) -> tuple[set[int], list[Figure]]:
    """A chart for each number that takes several values while everything else stays; and the entries they show."""
    shown: set[int] = set()
    figures = []
    for file in distinct(entry.file for entry in chosen if not entry.program):
        for layout in distinct(str(entry.row.layout) for entry in chosen if entry.file == file):
            part = [entry for entry in chosen if entry.file == file and str(entry.row.layout) == layout]
            usual = {name: Counter(getattr(one.row, name) for one in part).most_common(1)[0][0] for name in _ALL_VARIED}
            for name in VARIED:
                same = [
                    one
                    for one in part
                    if all(getattr(one.row, other) == usual[other] for other in _ALL_VARIED if other != name)
                    and getattr(one.row, name)
                ]
                values = {getattr(one.row, name) for one in same}
                if len(values) > 2:
                    figures.append(_one_sweep(same, name, usual, layout))
                    shown |= {id(one) for one in same}
            if len(part) > 12:  # a sweep: what differs in a word, not a number, is in the table of the section
                shown |= {id(one) for one in part}
    return shown, figures


_ALL_VARIED = (*VARIED, "routing", "dtype", "cached", "ranks")


def _one_sweep(part: Sequence[Entry], name: str, usual: dict[str, object], layout: str) -> Figure:
    most = max(latency_of(entry.row) or 0.0 for entry in part)
    scale, unit = time_unit(most)
    series, lines = [], []
    for mode in MODES:
        at = sorted((entry for entry in part if entry.row.what == mode), key=lambda one: getattr(one.row, name))
        points = {float(getattr(one.row, name)): (latency_of(one.row) or 0.0, one.row.p99_us) for one in at}
        if points:
            upper = [None if high is None else high / scale for _, high in points.values()]
            series.append(Series(NAMED[mode], [(x, y / scale) for x, (y, _) in points.items()], upper))
            lines += [[number_text(x), NAMED[mode], time_text(y), time_text(high)] for x, (y, high) in points.items()]
    ranks = part[0].row.ranks
    fixed = ", ".join(
        f"{_NAMES.get(other, other)} {usual[other]}" for other in VARIED if other != name and usual[other]
    )
    title = f"By {_NAMES.get(name, name)}: {layout} layout, {ranks} ranks ({part[0].file})"
    chart = Lines(
        title, _NAMES.get(name, name), unit, series, f"{fixed}. Dotted: 99th percentile.", "number", log_y=True
    )
    return Figure(chart, table_of([_NAMES.get(name, name), "work", "median", "p99"], lines, left=2))


def _parts(staged: Sequence[Entry]) -> Figure:
    names = distinct(name for entry in staged for name in entry.row.stages_us)
    rows, lines = [], []
    for entry in staged:
        row = entry.row
        whole = sum(row.stages_us.values())
        label = f"{_variant(row)}, {row.tokens} tokens, {row.ranks} ranks ({entry.file})"
        values = [row.stages_us.get(name, 0.0) for name in names]
        rows.append((label, values, time_text(whole)))
        for name, value in zip(names, values, strict=True):
            lines.append([label, name, time_text(value), f"{value / whole:.0%}" if whole else "-"])
    chart = Stack("Where the time went", "\N{MICRO SIGN}s", names, rows, sub="Mean of all ranks and iterations.")
    return Figure(chart, table_of(["work", "part", "time", "share"], lines, left=2))


def control_section(found: Sequence[Entry]) -> Section | None:
    """The life of expert buffers, step by step; and elastic plans."""
    chosen = [entry for entry in found if entry.row.rank_times and entry.row.what in STEPS]
    phased = [entry for entry in found if entry.row.phase is not None]
    figures = []
    for key in distinct(_control_key(entry) for entry in chosen):
        figures.append(_steps([entry for entry in chosen if _control_key(entry) == key], key))
    for file in distinct(entry.file for entry in phased):
        figures.append(_phases([entry for entry in phased if entry.file == file], file))
    if not figures:
        return None
    text = "What it takes to make, connect and end expert buffers, and what a change of ranks costs."
    return Section("control", "Control plane", text, figures)


def _control_key(entry: Entry) -> str:
    row = entry.row
    memory = "GPU memory" if row.device else "host memory"
    return f"{len(row.rank_times)} ranks x {row.experts_per_rank} experts, {memory}, store {row.store} ({entry.file})"


def _steps(part: Sequence[Entry], key: str) -> Figure:
    bars, lines = [], []
    for step in (one for one in STEPS if any(entry.row.what == one for entry in part)):
        rows = [entry.row for entry in part if entry.row.what == step]
        value = median([row.avg_us or 0.0 for row in rows])
        least, most = min(row.min_us or value for row in rows), max(row.max_us or value for row in rows)
        parts = "; ".join(f"{name} {time_text(time)}" for name, time in rows[0].stages_us.items())
        hint = f"{step}: mean {time_text(value)}, {time_text(least)} to {time_text(most)}" + (
            f"; {parts}" * bool(parts)
        )
        bars.append(Bar(step, value, time_text(value), OURS, least, most, hint))
        lines.append([step, time_text(value), time_text(least), time_text(most), parts])
    chart = Bars(key, "\N{MICRO SIGN}s", [("", bars)], sub="Bar: mean of all ranks and rounds. Whisker: least to most.")
    return Figure(chart, table_of(["step", "mean", "least", "most", "parts"], lines))


def _phases(part: Sequence[Entry], file: str) -> Figure:
    groups, lines = [], []
    for number in distinct(str(entry.row.phase.number) for entry in part if entry.row.phase):
        rows = [entry.row for entry in part if entry.row.phase and str(entry.row.phase.number) == number]
        phase = rows[0].phase
        if phase is None:
            continue
        words = [f"phase {number}: {counted(len(phase.active), 'rank')}"]
        words += [f"{len(ranks)} {what}" for what, ranks in _changes(phase.joined, phase.left, phase.killed) if ranks]
        bars = []
        for variant in distinct(_variant(row) for row in rows):
            times = [time for row in rows if _variant(row) == variant and (time := latency_of(row)) is not None]
            if times:
                bars.append(Bar(variant, median(times), time_text(median(times)), OURS, min(times), max(times)))
        facts = [row.phase for row in rows if row.phase is not None]
        for label, found in (
            ("all connected", [one.connect_us for one in facts if one.connect_us is not None]),
            ("recovered from the kill", [one.recovery_us for one in facts if one.recovery_us is not None]),
        ):
            if found:
                bars.append(Bar(label, median(found), time_text(median(found)), OURS, min(found), max(found)))
        groups.append((", ".join(words), bars))
        lines += [[", ".join(words), bar.label, bar.text] for bar in bars]
    sub = "Bar: median of the runs. Whisker: least to most."
    chart = Bars(f"Elastic plan ({file})", "\N{MICRO SIGN}s", groups, sub=sub)
    return Figure(chart, table_of(["phase", "what", "time"], lines, left=2))


def _changes(joined: Sequence[int], left: Sequence[int], killed: Sequence[int]) -> list[tuple[str, Sequence[int]]]:
    return [("joined", joined), ("left", left), ("killed", killed)]


def headline_experts(found: Sequence[Entry]) -> tuple[str, str, str] | None:
    """The time of dispatch and combine of the decode-like row with the fewest tokens, its unit, and of what."""
    rows = [entry.row for entry in found if entry.row.what == "e2e" and not entry.program and entry.row.phase is None]
    timed = [(time, row) for row in rows if (time := latency_of(row)) is not None]
    if not timed:
        return None
    most = Counter(row.tokens for _, row in timed).most_common(1)[0][0]
    time, row = min(((time, row) for time, row in timed if row.tokens == most), key=lambda item: item[0])
    scale, unit = time_unit(time)
    memory = format_bytes(row.heap_bytes) if row.heap_bytes else ""
    note = f"{row.tokens} tokens, {row.ranks} ranks, {row.layout} layout" + (f", {memory} of memory" if memory else "")
    return number_text(time / scale), unit, note
