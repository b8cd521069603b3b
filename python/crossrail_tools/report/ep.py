"""Rows and tables of dispatch and combine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .build import with_times
from .schema import Lane, Row
from .stats import gb_per_s, median

MODES = ("dispatch", "combine", "e2e")
STAGES = ("cast", "copy", "sum", "wait")
COUNTED = ("logical", "wire", "network")


@dataclass(frozen=True)
class EpRank:
    """The samples of one rank in one turn: microseconds of each iteration, and stages and bytes of all together.

    ``links``: how it reaches each rank (``self``, ``heap``, ``network``); ``rails``: bytes that left by each;
    ``unused``: what was expected to carry data and did not, and why. In GPU memory, microseconds are by the GPU's
    clock, ``host_us`` by the host's, ``bytes`` those of one iteration, and ``rails`` count since the buffer was made.
    """

    total_us: list[float]
    stages_us: dict[str, float]
    bytes: dict[str, int]
    links: list[str]
    rails: dict[str, int] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)
    host_us: list[float] = field(default_factory=list)

    @staticmethod
    def of(parts: Sequence[Mapping[str, Any]]) -> EpRank:
        """From the messages of a rank: parts of its iterations, one after the other."""
        stages = {stage: sum(sum(part[f"{stage}_us"]) for part in parts) for stage in STAGES}
        moved = {name: sum(part["bytes"][name] for part in parts) for name in COUNTED}
        rails: dict[str, int] = {}
        for rail, sent in (one for part in parts for one in part["rails"].items()):
            rails[rail] = rails.get(rail, 0) + sent
        unused = {name: why for part in parts for name, why in part["unused"].items()}
        total = [sample for part in parts for sample in part["total_us"]]
        return EpRank(total, stages, moved, parts[0]["links"], rails, unused)

    @staticmethod
    def on_gpu(gpu: Mapping[str, Any], host: Mapping[str, Any]) -> EpRank:
        """From the messages with the samples of each clock."""
        rails = dict(host.get("rails", {}))
        return EpRank(gpu["samples_us"], {}, dict(gpu["bytes"]), gpu["links"], rails, host_us=host["samples_us"])


@dataclass(frozen=True)
class EpTurn:
    """The samples of all ranks in one turn, by rank."""

    ranks: list[EpRank]

    @property
    def slowest_us(self) -> list[float]:
        """The time of the slowest rank in each iteration, for which a model would have to wait."""
        return slowest([one.total_us for one in self.ranks])


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
    host = [sample for one in ranks for sample in one.host_us]
    count = len(ranks) if host else sum(len(one.total_us) for one in ranks)
    row = with_times(row, [sample for one in ranks for sample in one.total_us])
    avg_us = row.avg_us or 0.0
    moved = {name: round(sum(one.bytes[name] for one in ranks) / count) for name in COUNTED}
    links = [kind for one in turns[0].ranks for kind in one.links]
    row = replace(
        row,
        slowest_us=[time for turn in turns for time in turn.slowest_us],
        rounds=[median(turn.slowest_us) for turn in turns],
        bytes_logical=moved["logical"],
        bytes_wire=moved["wire"],
        bytes_network=moved["network"],
        gb_per_s=gb_per_s(moved["wire"], avg_us),
        gb_per_s_logical=gb_per_s(moved["logical"], avg_us),
        links={kind: links.count(kind) for kind in ("self", "heap", "network") if kind in links},
        unused={name: why for one in ranks for name, why in one.unused.items()},
    )
    if host:
        transport = "+".join(kind for kind in ("heap", "network") if kind in row.links) or "self"
        shares = _rails(turns[-1].ranks, 1)
        lanes = [replace(lane, bytes=round(moved["network"] * lane.share)) for lane in shares]
        return replace(row, transport=transport, host_us=host, host_p50_us=median(host), lanes=lanes)
    stages = {stage: sum(one.stages_us[stage] for one in ranks) / count for stage in STAGES}
    stages["other"] = max(avg_us - sum(stages.values()), 0.0)
    lanes = _rails(ranks, count)
    used = [kind for kind in ("heap",) if kind in row.links] + [str(lane.transport) for lane in lanes]
    return replace(row, transport="+".join(dict.fromkeys(used)) or "self", stages_us=stages, lanes=lanes)


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
