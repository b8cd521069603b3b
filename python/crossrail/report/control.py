"""Rows and tables of the control plane and of elastic plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rich.console import RenderableType
from rich.text import Text

from .schema import RankTimes, Row
from .stats import summarize
from .tables import table
from .units import counted, format_rate

STEPS = ("init", "connect", "disconnect", "reconnect", "destroy")
"""The steps in the life of a buffer, in order."""


def control_rows(samples: Mapping[int, Mapping[str, Sequence[float]]], like: Row) -> list[Row]:
    """A row for each step, from each rank's microseconds by step; ``like`` has the identifying fields.

    ``samples_us`` are all ranks' samples, by rank and then round; ``stages_us`` the mean of each part of the step,
    where ranks tell it, as ``step/part``.
    """
    ranks = sorted(samples)
    steps = [step for step in STEPS if any(step in times for times in samples.values())]
    return [
        _step_row(
            replace(like, what=step, stages_us=_parts(step, samples)), {rank: samples[rank][step] for rank in ranks}
        )
        for step in steps
    ]


def with_times(row: Row, samples_us: Sequence[float]) -> Row:
    """``row`` with the samples of all ranks, in microseconds, and their statistics."""
    summary = summarize(samples_us)
    return replace(
        row,
        samples_us=list(samples_us),
        p50_us=summary.p50,
        p99_us=summary.p99,
        avg_us=summary.avg,
        min_us=summary.min,
        max_us=summary.max,
    )


def _step_row(row: Row, samples: Mapping[int, Sequence[float]]) -> Row:
    pooled = [sample for times in samples.values() for sample in times]
    return replace(with_times(row, pooled), rank_times=[_times(rank, times) for rank, times in samples.items()])


def _parts(step: str, samples: Mapping[int, Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """The mean of each part of a step, over all ranks and rounds."""
    found: dict[str, list[float]] = {}
    for times in samples.values():
        for name, part in times.items():
            if name.startswith(f"{step}/"):
                found.setdefault(name.removeprefix(f"{step}/"), []).extend(part)
    return {name: sum(times) / len(times) for name, times in found.items()}


def _times(rank: int, samples: Sequence[float]) -> RankTimes:
    return RankTimes(rank, avg_us=sum(samples) / len(samples), min_us=min(samples), max_us=max(samples))


def averaged(row: Row) -> tuple[float, float, float]:
    """Mean, minimum and maximum of each rank, each averaged over the ranks, in microseconds."""
    count = len(row.rank_times)
    return (
        sum(one.avg_us for one in row.rank_times) / count,
        sum(one.min_us for one in row.rank_times) / count,
        sum(one.max_us for one in row.rank_times) / count,
    )


def control_tables(rows: Sequence[Row]) -> list[RenderableType]:
    """One table of the steps for each number of experts."""
    shown: list[RenderableType] = []
    for experts in dict.fromkeys(row.experts_per_rank for row in rows):
        chosen = [row for row in rows if row.experts_per_rank == experts]
        first = chosen[0]
        rounds = len(first.samples_us) // len(first.rank_times)
        on_gpus = "" if first.device is None else " in GPU memory"
        ranks = f"{counted(len(first.rank_times), 'rank')}{on_gpus}"
        made = table(
            f"control: {ranks} x {counted(experts or 0, 'expert')}, {counted(rounds, 'round')}, store {first.store}; "
            "each rank's figures, averaged over the ranks",
            ["step", "mean ms", "min ms", "max ms"],
        )
        sums = [averaged(row) for row in chosen]
        for row, figures in zip(chosen, sums, strict=True):
            made.add_row(row.what, *(_ms(figure) for figure in figures))
        if len(chosen) > 1:
            made.add_row("total", *(_ms(sum(column)) for column in zip(*sums, strict=True)))
        shown.append(made)
    return shown


def phase_tables(rows: Sequence[Row]) -> list[RenderableType]:
    """The table of the phases of an elastic plan, and the survivors' reports about killed ranks."""
    columns = ["phase", "ranks", "joined", "left", "killed", "passed", "connect ms", "p50 us", "logical", "wire"]
    made = table(
        "elastic: each phase's ranks, and a dispatch with its combine between them (bytes of one rank over its time)",
        [*columns, "recovery ms"],
        left=5,
        keys=1,
        spare=["passed", "joined", "left"],
    )
    faults: list[Text] = []
    for row in rows:
        phase = row.phase
        assert phase is not None
        made.add_row(
            str(phase.number),
            _ranks(phase.active),
            *(_ranks(ranks) for ranks in (phase.joined, phase.left, phase.killed)),
            "-" if row.ranks_passed is None else str(row.ranks_passed),
            "-" if phase.connect_us is None else _ms(phase.connect_us),
            "-" if row.p50_us is None else f"{row.p50_us:.1f}",
            *("-" if rate is None else format_rate(rate) for rate in (row.gb_per_s_logical, row.gb_per_s)),
            "-" if phase.recovery_us is None else _ms(phase.recovery_us),
        )
        faults += [Text(f"phase {phase.number}: {fault}") for fault in phase.faults]
    return [made, *faults]


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:.2f}"


def _ranks(ranks: Sequence[int]) -> str:
    """``0-3,5`` for ranks 0, 1, 2, 3 and 5; ``-`` for none."""
    parts: list[str] = []
    for rank in sorted(ranks):
        first, _, last = parts[-1].partition("-") if parts else ("", "", "")
        if parts and rank == int(last or first) + 1:
            parts[-1] = f"{first}-{rank}"
        else:
            parts.append(str(rank))
    return ",".join(parts) or "-"
