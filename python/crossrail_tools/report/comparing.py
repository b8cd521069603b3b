"""Two runs of the same bench compared: do they differ, by how much, and how sure is that?

The test is that of Mann and Whitney ("On a test of whether one of two random variables is stochastically larger than
the other", Annals of Mathematical Statistics 18, 1947), two-sided: it needs no normal distribution, which times do not
have. With few samples every way to divide them in two is counted, otherwise the normal approximation is taken,
corrected for ties. With many rows some differ by chance, so p is Holm's ("A simple sequentially rejective multiple test
procedure", Scandinavian Journal of Statistics 6, 1979). The interval of the ratio of medians is a bootstrap's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from .schema import Row
from .stats import median
from .sweeping import is_time, label_of
from .units import counted

ALPHA = 0.01
"""Probability, over all rows together, of calling rows different that are not."""

MARGIN = 0.02
"""Part of a time by which it must change to count as better or worse."""

MOST_BATCHES = 64
"""Samples of one run follow on each other and are alike: the test is of the medians of as many batches at most."""

RESAMPLES = 2000
_CONFIDENCE = 0.95
_COUNTED = 20_000
_SEED = 1

Verdict = Literal["better", "worse", "same", "unclear"]


@dataclass(frozen=True)
class Compared:
    """One row of two runs. ``ratio``: old time by new, more than 1 is better; ``p`` is Holm's."""

    label: str
    old_us: float
    new_us: float
    ratio: float
    low: float
    high: float
    p: float
    samples: tuple[int, int]
    verdict: Verdict


@dataclass(frozen=True)
class Comparison:
    """The rows of both runs; labels of those of one; rows of both without samples, as other programs have."""

    rows: list[Compared]
    unmatched: list[str]
    untested: list[Pair]


def compare(old: Sequence[Row], new: Sequence[Row]) -> Comparison:
    """Compares rows of the same work: the k-th of a kind in one run with the k-th in the other."""
    ours, theirs = _numbered(new), _numbered(old)
    ours, theirs = _paired_over_others(ours, theirs)
    unmatched = [key for key in [*ours, *theirs] if key not in ours or key not in theirs]
    pairs = [(key, _samples(theirs[key]), _samples(row)) for key, row in ours.items() if key in theirs]
    untested = [Pair(key, ("", ""), (theirs[key], ours[key])) for key, before, now in pairs if not before or not now]
    unmatched += [one.label for one in untested if None in map(figure_of, one.rows)]
    untested = [one for one in untested if None not in map(figure_of, one.rows)]
    pairs = [(key, before, now) for key, before, now in pairs if before and now]
    raw = [mann_whitney(_batches(before), _batches(now)) for _, before, now in pairs]
    rows = [_compared(key, before, now, p) for (key, before, now), p in zip(pairs, holm(raw), strict=True)]
    return Comparison(rows, list(dict.fromkeys(unmatched)), untested)


def _paired_over_others(ours: dict[str, Row], theirs: dict[str, Row]) -> tuple[dict[str, Row], dict[str, Row]]:
    """Rows that only one run has, paired with the same work in the other run that something else carried."""
    pairs = beside(
        [row for key, row in theirs.items() if key not in ours], [row for key, row in ours.items() if key not in theirs]
    )
    renamed = {id(row): f"{one.label}, {' now '.join(one.hows)}" for one in pairs for row in one.rows}

    def named(run: dict[str, Row]) -> dict[str, Row]:
        return {renamed.get(id(row), key): row for key, row in run.items()}

    return named(ours), named(theirs)


@dataclass(frozen=True)
class Pair:
    """The same work done in two ways: ``hows`` and ``rows`` of the first and the second."""

    label: str
    hows: tuple[str, str]
    rows: tuple[Row, Row]

    @property
    def saves(self) -> float | None:
        """The part of the first one's time that the second one saves; negative if it takes longer."""
        first, second = (figure_of(row) for row in self.rows)
        if not first or not second:
            return None
        return 1 - (second / first if is_time(self.rows[0]) else first / second)


def beside(first: Sequence[Row], second: Sequence[Row]) -> list[Pair]:
    """Rows of the same work in two runs, by whatever they were carried: transport, rails, nodes, processes."""
    one, other = (_numbered(rows, how=False) for rows in (first, second))
    both = [(label, row, other[label]) for label, row in one.items() if label in other]
    return [Pair(label, (_how(row), _how(there)), (row, there)) for label, row, there in both]


def _how(row: Row) -> str:
    words = [row.transport, f"{row.channels} channels" if row.channels else ""]
    words += [f"{row.nodes} nodes" if row.nodes and row.nodes > 1 else "", row.memory or ""]
    return ", ".join(word for word in words if word)


def figure_of(row: Row) -> float | None:
    """The figure of a row: its time, where ranks wait for each other that of the slowest, or its rate."""
    if not is_time(row):
        return row.gb_per_s
    return median(row.slowest_us) if row.slowest_us else row.p50_us if row.p50_us is not None else row.avg_us


def _numbered(rows: Sequence[Row], *, how: bool = True) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for row in rows:
        label = _label(row, how)
        number = next(number for number in itertools.count(1) if _with(label, number) not in found)
        found[_with(label, number)] = row
    return found


def _with(label: str, number: int) -> str:
    return label if number == 1 else f"{label}, run {number}"


def _label(row: Row, how: bool) -> str:
    """What a row is about, and, if asked for, how it was done."""
    words = [label_of(row), row.device or "", f"window {row.window}" if row.window and row.what != "p2p" else ""]
    # Of other programs, which write no samples, it is part of the work: a type, a direction, a shape.
    foreign = not (row.samples_us or row.memory or row.device or row.layout)
    words += [row.protocol if row.protocol and foreign else ""]
    if how:
        words += [row.transport if row.what != "mesh" else "", row.memory or ""]
        words += [f"window {row.window}" if row.window and row.what == "p2p" else ""]
        words += [f"chunk {row.chunk}" if row.chunk else "", f"{row.channels} channels" if row.channels else ""]
    words += [counted(row.ranks, "rank") if row.ranks else ""]
    words += [f"hidden {row.hidden}" if row.hidden else "", f"top-{row.topk}" if row.topk else ""]
    words += [f"routing {row.routing}" if row.routing else "", "cached" if row.cached else ""]
    words += [f"{row.num_sms} SMs" if row.num_sms else "", f"phase {row.phase.number}" if row.phase else ""]
    words += [f"{row.experts_per_rank} experts" if row.experts_per_rank else "", row.unpack or "" if row.bounce else ""]
    return ", ".join(word for word in words if word)


def _samples(row: Row) -> list[float]:
    """The times to compare: of the slowest rank of each iteration where those are known."""
    return [time for time in row.slowest_us or row.samples_us if time > 0]


def _batches(samples: Sequence[float]) -> list[float]:
    """The medians of consecutive batches of samples."""
    size = math.ceil(len(samples) / MOST_BATCHES)
    return [median(samples[first : first + size]) for first in range(0, len(samples), size)]


def mann_whitney(first: Sequence[float], second: Sequence[float]) -> float:
    """The two-sided p of Mann and Whitney's test: the probability of ranks as far apart as these, if both are alike."""
    ranks = _ranks(np.concatenate([np.asarray(first, float), np.asarray(second, float)]))
    here, there = len(first), len(second)
    total = here + there
    middle = here * (total + 1) / 2
    distance = abs(float(ranks[:here].sum()) - middle)
    if math.comb(total, here) <= _COUNTED:
        sums = np.array([ranks[list(chosen)].sum() for chosen in itertools.combinations(range(total), here)])
        return float(np.mean(np.abs(sums - middle) >= distance - 1e-9))
    _, ties = np.unique(ranks, return_counts=True)
    spread = here * there / 12 * (total + 1 - float((ties**3 - ties).sum()) / (total * (total - 1)))
    if spread <= 0:
        return 1.0
    z = max(distance - 0.5, 0.0) / math.sqrt(spread)
    return math.erfc(z / math.sqrt(2))


def _ranks(values: Any) -> Any:
    """Ranks from 1; equal values share the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((last - counts + 1 + last) / 2)[place]


def holm(raw: Sequence[float]) -> list[float]:
    """Each p so corrected that all rows together are wrong with the probability that each alone would be."""
    adjusted = [1.0] * len(raw)
    least = 0.0
    for number, place in enumerate(sorted(range(len(raw)), key=lambda one: raw[one])):
        least = max(least, min(raw[place] * (len(raw) - number), 1.0))
        adjusted[place] = least
    return adjusted


def _compared(label: str, old: Sequence[float], new: Sequence[float], p: float) -> Compared:
    before, now = _batches(old), _batches(new)
    ratios = _resampled(before, 0) / _resampled(now, 1)
    part = (1 - _CONFIDENCE) / 2 * 100
    low, high = (float(value) for value in np.percentile(ratios, [part, 100 - part]))
    ratio = median(before) / median(now)
    verdict: Verdict = "unclear"
    if p < ALPHA and abs(ratio - 1) > MARGIN:
        verdict = "better" if ratio > 1 else "worse"
    elif p < ALPHA or (low >= 1 - MARGIN and high <= 1 + MARGIN):
        verdict = "same"
    return Compared(label, median(before), median(now), ratio, low, high, p, (len(old), len(new)), verdict)


def _resampled(values: Sequence[float], seed: int) -> Any:
    """Medians of resamples of ``values``."""
    generator = np.random.default_rng((_SEED, seed))
    drawn = generator.integers(len(values), size=(RESAMPLES, len(values)))
    return np.median(np.asarray(values, float)[drawn], axis=1)
