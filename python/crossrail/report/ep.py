"""Rows and tables of dispatch and combine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from .schema import Lane, Row
from .stats import gb_per_s, median, summarize
from .tables import peer_errors, peer_names, ratio_text, table
from .units import counted, format_bytes

MODES = ("dispatch", "combine", "e2e")
STAGES = ("cast", "copy", "sum", "wait")
COUNTED = ("logical", "wire", "network")


@dataclass(frozen=True)
class EpRank:
    """The samples of one rank in one turn: microseconds of each iteration, and stages and bytes of all together.

    ``links``: how it reaches each rank (``self``, ``heap``, ``network``); ``rails``: bytes that left by each;
    ``unused``: what was expected to carry data and did not, and why.
    """

    total_us: list[float]
    stages_us: dict[str, float]
    bytes: dict[str, int]
    links: list[str]
    rails: dict[str, int] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def from_dict(found: Mapping[str, Any]) -> EpRank:
        """From the message of a rank."""
        stages = {stage: sum(found[f"{stage}_us"]) for stage in STAGES}
        moved, rails, unused = dict(found["bytes"]), dict(found["rails"]), dict(found["unused"])
        return EpRank(found["total_us"], stages, moved, found["links"], rails, unused)


@dataclass(frozen=True)
class EpTurn:
    """The samples of all ranks in one turn, by rank."""

    ranks: list[EpRank]

    @property
    def slowest_us(self) -> list[float]:
        """The time of the slowest rank in each iteration, for which a model would have to wait."""
        return slowest([one.total_us for one in self.ranks])


@dataclass(frozen=True)
class EpDeviceRank:
    """The samples of one rank in GPU memory in one turn: microseconds by both clocks, bytes of one iteration."""

    gpu_us: list[float]
    host_us: list[float]
    bytes: dict[str, int]
    links: list[str]

    @staticmethod
    def of(gpu: Mapping[str, Any], host: Mapping[str, Any]) -> EpDeviceRank:
        """From the messages with the samples of each clock."""
        return EpDeviceRank(gpu["samples_us"], host["samples_us"], dict(gpu["bytes"]), gpu["links"])


@dataclass(frozen=True)
class EpDeviceTurn:
    """The samples of all ranks in GPU memory in one turn, by rank."""

    ranks: list[EpDeviceRank]

    @property
    def slowest_us(self) -> list[float]:
        """The time of the slowest rank in each iteration, by the GPU's clock."""
        return slowest([one.gpu_us for one in self.ranks])


def ep_device_row(row: Row, turns: Sequence[EpDeviceTurn]) -> Row:
    """``row`` with the figures computed from the samples of every turn in GPU memory."""
    ranks = [one for turn in turns for one in turn.ranks]
    samples = [sample for one in ranks for sample in one.gpu_us]
    host = [sample for one in ranks for sample in one.host_us]
    summary = summarize(samples)
    moved = {name: round(sum(one.bytes[name] for one in ranks) / len(ranks)) for name in COUNTED}
    links = [kind for one in turns[0].ranks for kind in one.links]
    return replace(
        row,
        transport="+".join(kind for kind in ("heap", "network") if kind in links) or "self",
        samples_us=samples,
        slowest_us=[time for turn in turns for time in turn.slowest_us],
        rounds=[median(turn.slowest_us) for turn in turns],
        host_us=host,
        host_p50_us=median(host),
        p50_us=summary.p50,
        p99_us=summary.p99,
        avg_us=summary.avg,
        min_us=summary.min,
        max_us=summary.max,
        bytes_logical=moved["logical"],
        bytes_wire=moved["wire"],
        bytes_network=moved["network"],
        gb_per_s=gb_per_s(moved["wire"], summary.avg),
        gb_per_s_logical=gb_per_s(moved["logical"], summary.avg),
        links={kind: links.count(kind) for kind in ("self", "heap", "network") if kind in links},
    )


def slowest(samples: Sequence[Sequence[float]]) -> list[float]:
    """The longest time of each iteration, from each rank's times."""
    return [max(times) for times in zip(*samples, strict=True)]


def kernels_us(spans: Sequence[tuple[float, float, str]], meeting: str, fills: int, warmup: int) -> float:
    """The total kernel time of an iteration, the median over iterations, from the spans of a profiler.

    ``spans`` has the begin, microseconds and name of each kernel. Each iteration is preceded by ``fills`` kernels that
    overwrite the cache, and one whose name contains ``meeting``. The first ``warmup`` iterations are ignored, as are
    those that the profiler has recorded incompletely. Raises ValueError if no others are left.
    """
    iterations: list[list[float]] = []
    for _, took, name in sorted(spans):
        if meeting not in name:
            if iterations:
                iterations[-1].append(took)
        elif not iterations or iterations[-1]:
            iterations.append([])
    kernels = [each[: max(len(each) - fills, 0)] for each in iterations[:-1]] + iterations[-1:]
    return median([sum(each) for each in kernels[warmup:] if each])


def ep_row(row: Row, turns: Sequence[EpTurn]) -> Row:
    """``row`` with the figures computed from the samples of every turn; bytes are averages per rank and iteration."""
    ranks = [one for turn in turns for one in turn.ranks]
    samples = [sample for one in ranks for sample in one.total_us]
    summary = summarize(samples)
    count = len(samples)
    moved = {name: round(sum(one.bytes[name] for one in ranks) / count) for name in COUNTED}
    stages = {stage: sum(one.stages_us[stage] for one in ranks) / count for stage in STAGES}
    stages["other"] = max(summary.avg - sum(stages.values()), 0.0)
    links = [kind for one in turns[0].ranks for kind in one.links]
    lanes = _rails(ranks, count)
    used = [kind for kind in ("heap",) if kind in links] + [str(lane.transport) for lane in lanes]
    return replace(
        row,
        transport="+".join(dict.fromkeys(used)) or "self",
        samples_us=samples,
        slowest_us=[time for turn in turns for time in turn.slowest_us],
        rounds=[median(turn.slowest_us) for turn in turns],
        p50_us=summary.p50,
        p99_us=summary.p99,
        avg_us=summary.avg,
        min_us=summary.min,
        max_us=summary.max,
        bytes_logical=moved["logical"],
        bytes_wire=moved["wire"],
        bytes_network=moved["network"],
        gb_per_s=gb_per_s(moved["wire"], summary.avg),
        gb_per_s_logical=gb_per_s(moved["logical"], summary.avg),
        stages_us=stages,
        links={kind: links.count(kind) for kind in ("self", "heap", "network") if kind in links},
        lanes=lanes,
        unused={name: why for one in ranks for name, why in one.unused.items()},
    )


def _rails(ranks: Sequence[EpRank], count: int) -> list[Lane]:
    """Average bytes that each rail carried per rank and iteration, frame heads included."""
    sums: dict[str, int] = {}
    for one in ranks:
        for rail, sent in one.rails.items():
            sums[rail] = sums.get(rail, 0) + sent
    total = sum(sums.values())
    return [
        Lane(
            rail,
            bytes=round(sent / count),
            share=sent / total,
            transport=rail.partition("/")[0],
            device=rail.partition("/")[2] or None,
        )
        for rail, sent in sums.items()
        if sent
    ]


def ep_tables(rows: Sequence[Row]) -> list[RenderableType]:
    """The tables of dispatch, combine and both, for each shape measured."""
    shown: list[RenderableType] = []
    for heading in dict.fromkeys(_heading(row) for row in rows):
        chosen = [row for row in rows if _heading(row) == heading]
        shown += [Text(heading, style="bold"), Text(_passed(chosen[0])), *(Text(line) for line in _links(chosen))]
        stages = [_stages(chosen)] if chosen[0].device is None else [_ways(chosen)]
        shown += [Text(""), _times(chosen), _bytes(chosen), *stages, *peer_errors(chosen)]
    return shown


def _heading(row: Row) -> str:
    nodes, ranks = counted(row.nodes or 0, "node"), counted(row.ranks or 0, "rank")
    extra = ["routing cached"] if row.cached else []
    extra += [] if row.prereduce is not False else ["no pre-reduction"]
    extra += [] if row.backend != "none" else ["no shared memory"]
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
    peers = peer_names(rows)
    columns = ["us", "p50", "p99", "avg", "min", "max", "slowest p50"]
    for peer in peers:
        columns += [peer, f"x {peer}"]
    heading = "latency: all ranks and iterations together; the slowest rank of each iteration"
    made = table(heading, columns, spare=["min", "max", "avg"])
    for row in rows:
        cells = [_us(value) for value in (row.p50_us, row.p99_us, row.avg_us, row.min_us, row.max_us)]
        cells.append(_us(median(row.rounds)))
        for peer in peers:
            result = row.peers.get(peer)
            cells += [_us(median(result.rounds) if result and result.rounds else None), ratio_text(row, peer)]
        made.add_row(row.what, *cells)
    return made


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
