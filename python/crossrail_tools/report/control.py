"""Rows and tables of the control plane and of elastic plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .build import with_times
from .schema import RankTimes, Row

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
